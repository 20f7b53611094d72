"""Checkpoints and results of a stage on disk: folders that appear whole or not at all.

A folder holds safetensors files and one ``manifest.json`` with the hash of each of them and of itself: no pickles, so
reading one runs no code. `Checkpoints` are the states that a run can resume from; `StageManifest` describes a finished
stage.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from ..io import Record, file_hash, replacing, sync, write_json

FORMAT = "hybrid-distill/checkpoint/2"
STAGE_FORMAT = "hybrid-distill/stage/2"
MANIFEST = "manifest.json"
SEAL = "seal"
STATE = "state.json"
WEIGHTS = "model.safetensors"

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""Names of dtypes in safetensors."""


@dataclass(frozen=True)
class Sharded:
    """A tensor spread over the processes, gathered only when it is written."""

    shape: tuple[int, ...]
    gather: Callable[[], Tensor]
    """Put it together; every process must call this, tensor by tensor in the same order."""
    dtype: torch.dtype = torch.float32


Content = Mapping[str, Tensor | Sharded]
"""Tensors of a file, by name."""
Tensors = Mapping[str, Content]
"""Contents by file name, without suffix."""


def gather(tensors: Tensors) -> None:
    """Take part, in a process that writes nothing, in what `Checkpoints.save` gathers in the one that writes."""
    for content in tensors.values():
        for tensor in in_file_order(content).values():
            if isinstance(tensor, Sharded):
                tensor.gather()


class TensorFile(Mapping[str, Tensor]):
    """Tensors of a safetensors file, each read when it is asked for."""

    def __init__(self, path: Path) -> None:
        self._file: Any = safe_open(path, framework="pt")

    def __getitem__(self, name: str) -> Tensor:
        return self._file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._file.keys())

    def __len__(self) -> int:
        return len(self._file.keys())


class CorruptCheckpoint(ValueError):
    """A checkpoint's files do not match its manifest."""


class SaveFailed(OSError):
    """Something could not be written; what was saved before is untouched."""


@dataclass(frozen=True)
class Snapshot:
    """A checkpoint read back."""

    step: int
    tensors: dict[str, Mapping[str, Tensor]]
    state: Record


class Checkpoints:
    """The checkpoints of one stage, ``step-00000100`` and so on; the last ``keep`` of them stay."""

    def __init__(self, folder: str | Path, keep: int = 2) -> None:
        self.folder, self.keep = Path(folder), keep

    def paths(self) -> list[Path]:
        """List the folders of the checkpoints, oldest first, valid or not."""
        return sorted(p for p in self.folder.glob("step-*") if (p / MANIFEST).exists())

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def save(self, step: int, tensors: Tensors, state: Record) -> Path:
        """Write a checkpoint and delete those that are too old.

        Raises SaveFailed, with the earlier checkpoints untouched, when the disk is full or cannot be written.
        """
        path = self.path(step)
        self._remove_leftovers()
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            temporary.mkdir(parents=True)
            for name, content in tensors.items():
                save_file(content, temporary / f"{name}.safetensors")
                sync(temporary / f"{name}.safetensors")
            write_json(temporary / STATE, state, indent=None)
            files = {file.name: file_hash(file) for file in sorted(temporary.iterdir())}
            write_manifest(temporary, {"format": FORMAT, "step": step, "files": files})
            _remove(path)
            temporary.rename(path)
            sync(self.folder)
        except (OSError, SafetensorError) as error:
            _remove(temporary)
            kept = ", ".join(p.name for p in self.paths()) or "none"
            raise SaveFailed(
                f"cannot save {path} ({error}); earlier checkpoints are untouched ({kept}): make room and run again."
            ) from error
        for old in self.paths()[: -self.keep]:
            _remove(old)
        return path

    def latest(self) -> Path | None:
        """Find the newest checkpoint whose files are intact; None when there is no checkpoint at all.

        Warns about every broken one that is passed over. Raises CorruptCheckpoint when all are broken.
        """
        problems = []
        for path in reversed(self.paths()):
            try:
                verify(path)
            except CorruptCheckpoint as error:
                problems.append(str(error))
            else:
                for problem in problems:
                    warnings.warn(f"{problem} Resuming from {path.name}.", stacklevel=2)
                return path
        if not problems:
            return None
        found = " ".join(problems)
        raise CorruptCheckpoint(f"no checkpoint in {self.folder} is intact: {found} Begin again with --resume never.")

    def clear(self, after: int = -1) -> None:
        """Delete the checkpoints of later steps than ``after``."""
        for path in self.paths():
            if int(path.name.removeprefix("step-")) > after:
                _remove(path)
        self._remove_leftovers()
        if self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()

    def _remove_leftovers(self) -> None:
        """Remove what a killed process left: half-written checkpoints, half-deleted ones."""
        for path in [*self.folder.glob(".step-*.tmp"), *self.folder.glob("step-*")]:
            if path.name.startswith(".") or not (path / MANIFEST).exists():
                _remove(path)


def verify(folder: str | Path) -> Record:
    """Return the manifest of a checkpoint with intact files. Raises CorruptCheckpoint naming one that is not."""
    manifest = _read_manifest(Path(folder), FORMAT)
    check_files(Path(folder), manifest["files"])
    return manifest


def check_files(folder: Path, hashes: Mapping[str, str]) -> None:
    """Raise CorruptCheckpoint naming the first file that is missing or does not match its hash."""
    for name, expected in hashes.items():
        if not (folder / name).exists():
            raise CorruptCheckpoint(f"{folder / name} is missing.")
        if (found := file_hash(folder / name)) != expected:
            raise CorruptCheckpoint(
                f"{folder / name} is corrupt: its hash is {found[:12]}, the manifest says {expected[:12]}."
            )


def load(folder: str | Path, *, verified: bool = False) -> Snapshot:
    """Read a checkpoint; ``verified`` skips the hashes. Raises CorruptCheckpoint."""
    folder = Path(folder)
    manifest = _read_manifest(folder, FORMAT) if verified else verify(folder)
    files = [folder / name for name in manifest["files"] if name.endswith(".safetensors")]
    state = json.loads((folder / STATE).read_text())
    return Snapshot(manifest["step"], {file.stem: TensorFile(file) for file in files}, state)


@dataclass(frozen=True)
class StageManifest:
    """Record of a finished stage."""

    name: str
    steps: int
    weights: str
    """`weights_hash` of the student at the end; the next stage's ``parent``."""
    parent: str
    """`weights_hash` of the student at the start."""
    data: str
    """Fingerprint of the rows."""
    seed: int
    config: Record
    files: dict[str, str]
    tied: dict[str, str] = field(default_factory=dict)
    """Second names of tied parameters, which are stored once."""
    finished: bool = True
    format: str = STAGE_FORMAT

    @classmethod
    def read(cls, folder: str | Path) -> StageManifest | None:
        """Read the manifest of a finished stage; None without one. Raises CorruptCheckpoint for a broken one."""
        folder = Path(folder)
        if not (folder / MANIFEST).exists():
            return None
        record = _read_manifest(folder, STAGE_FORMAT)
        try:
            return cls(**record)
        except TypeError as error:
            raise CorruptCheckpoint(f"{folder / MANIFEST} is not the manifest of a stage ({error}).") from error


def save_stage(folder: str | Path, student: nn.Module, **record: Any) -> StageManifest:
    """Write a student as the result of a stage: the weights first, then the manifest that makes them count.

    ``record`` is the rest of the manifest. Raises SaveFailed when the disk is full or cannot be written.
    """
    folder = Path(folder)
    tensors, tied = untied_state(student)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / WEIGHTS) as temporary:
            save_file(tensors, temporary)
            files = {WEIGHTS: file_hash(temporary)}
        manifest = StageManifest(**record, weights=weights_hash(student), files=files, tied=tied)
        write_manifest(folder, asdict(manifest))
    except (OSError, SafetensorError) as error:
        raise SaveFailed(f"cannot save {folder / WEIGHTS} ({error}); make room and run again.") from error
    return manifest


def load_stage(folder: str | Path, student: nn.Module) -> StageManifest:
    """Load a finished stage's weights into a student of the same build, every tensor of them.

    Parameters take the stored dtype. A student that shares weights with its teacher must be unshared first, unless the
    stage left those weights alone. Raises ValueError for another student, CorruptCheckpoint for damaged files.
    """
    folder = Path(folder)
    manifest = StageManifest.read(folder)
    if manifest is None:
        raise ValueError(f"{folder} does not hold a finished stage (no {MANIFEST}); run the stage first.")
    check_files(folder, manifest.files)
    stored = load_file(folder / WEIGHTS)
    own = student.state_dict(keep_vars=True)
    shapes, expected = ({name: tuple(x.shape) for name, x in tensors.items()} for tensors in (stored, own))
    if odd := sorted(name for name, _ in shapes.items() ^ expected.items() if name not in manifest.tied):
        raise ValueError(
            f"{folder} holds another student: {len(odd)} tensors differ, for example {odd[0]}, of shape "
            f"{shapes.get(odd[0])} there and {expected.get(odd[0])} here; build the student with the plan and options "
            "of that run."
        )
    for name, tensor in stored.items():
        target = own[name]
        if target.dtype == tensor.dtype:
            target.data.copy_(tensor)
        else:
            target.data = tensor.to(target.device)
    return manifest


def untied_state(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return (state dict with every tensor once, names that are tied to another one)."""
    kept: dict[str, Tensor] = {}
    owner: dict[tuple[int, torch.Size], str] = {}
    tied: dict[str, str] = {}
    for name, tensor in model.state_dict().items():
        key = (tensor.data_ptr(), tensor.shape)
        if tensor.numel() and key in owner:
            tied[name] = owner[key]
            continue
        owner[key] = name
        kept[name] = tensor
    return kept, tied


def weights_hash(model: nn.Module) -> str:
    """Hash every parameter and persistent buffer: names, shapes and values.

    Values are hashed as float32, so that a bfloat16 model and its float32 copy have the same hash.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(untied_state(model)[0].items()):
        values = tensor.detach().cpu()
        values = values.float() if values.is_floating_point() else values
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(values.contiguous().view(-1).numpy().data)
    return digest.hexdigest()


def write_manifest(folder: Path, record: Record) -> None:
    """Write the record that makes a folder count, with a hash of its own."""
    write_json(folder / MANIFEST, {**record, SEAL: _seal(record)})


def _seal(record: Record) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def save_file(content: Content, path: Path) -> None:
    """Write a safetensors file, gathering one sharded tensor at a time.

    Its format: the length of the header in 8 bytes, the header in JSON, the tensors' bytes in turn.
    """
    ordered = in_file_order(content)
    header: Record = {}
    end = 0
    for name, tensor in ordered.items():
        begin, end = end, end + math.prod(tensor.shape) * tensor.dtype.itemsize
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # readers want the tensors at a multiple of 8
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in ordered.values():
            whole = tensor.gather() if isinstance(tensor, Sharded) else tensor
            flat = whole.detach().cpu().contiguous().as_strided((whole.numel(),), (1,))
            file.write(flat.view(torch.uint8).numpy().data)


def in_file_order(content: Content) -> Content:
    """Sort wide types first, so that every tensor begins at a multiple of its own."""
    return dict(sorted(content.items(), key=lambda item: -item[1].dtype.itemsize))


def _read_manifest(folder: Path, expected: str) -> Record:
    path = folder / MANIFEST
    try:
        record = json.loads(path.read_text())
        found = record.get("format")
    except (OSError, ValueError, AttributeError) as error:
        raise CorruptCheckpoint(f"{path} cannot be read ({error}).") from error
    if found != expected:
        raise CorruptCheckpoint(f"{path} has format {found!r}, expected {expected!r}.")
    if record.pop(SEAL, None) != _seal(record):
        raise CorruptCheckpoint(f"{path} was changed after it was written; undo that, or delete {path.parent}.")
    return record


def _remove(folder: Path) -> None:
    """Delete a checkpoint, its manifest first: one that is half gone does not count."""
    (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
