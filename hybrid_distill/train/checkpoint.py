"""Checkpoints and results of a stage on disk: what is not whole does not count.

Every process writes its own share of a checkpoint, in the background: its rows of each tensor in a safetensors file,
then a sealed JSON record with that file's hash. A checkpoint is complete when it has the records of all processes;
nothing else is agreed on, so a save needs no collective. There are no pickles: reading one runs no code.
`Checkpoints` are the states that a run can resume from; `StageManifest` describes a finished stage.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from ..distributed import agree_on, compute_everywhere, is_first_on_machine, own_share, rank_and_world
from ..io import Record, file_hash, save_tensors, sync, write_json

FORMAT = "hybrid-distill/checkpoint/3"
STAGE_FORMAT = "hybrid-distill/stage/2"
MANIFEST = "manifest.json"
SEAL = "seal"
WEIGHTS = "model.safetensors"


class ShardedTensors(Mapping[str, Tensor]):
    """Tensors whose rows lie in several safetensors files, in their order, each read when it is asked for."""

    def __init__(self, paths: Sequence[Path], prefix: str = "") -> None:
        self._holders: dict[str, list[safe_open]] = {}
        for path in paths:
            file = safe_open(path, framework="pt")
            for name in file.keys():  # noqa: SIM118
                if name.startswith(prefix):
                    self._holders.setdefault(name.removeprefix(prefix), []).append(file)
        self._prefix = prefix

    def __getitem__(self, name: str) -> Tensor:
        parts = [file.get_tensor(self._prefix + name) for file in self._holders[name]]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def rows(self, name: str, begin: int, end: int) -> Tensor:
        """Read some rows of a tensor and nothing else."""
        found, first = [], 0
        for file in self._holders[name]:
            part = file.get_slice(self._prefix + name)
            n_rows = part.get_shape()[0]
            found.append(part[max(begin - first, 0) : max(min(end - first, n_rows), 0)])
            first += n_rows
        return torch.cat(found)

    def __iter__(self) -> Iterator[str]:
        return iter(self._holders)

    def __len__(self) -> int:
        return len(self._holders)


class CorruptCheckpoint(ValueError):
    """A checkpoint's files do not match their records."""


class SaveFailed(OSError):
    """Something could not be written; what was saved before is untouched."""


@dataclass(frozen=True)
class Snapshot:
    """A checkpoint read back."""

    step: int
    weights: ShardedTensors
    optimizer: ShardedTensors
    states: list[Record]
    """State of each process that wrote it."""


class Checkpoints:
    """The checkpoints of one stage, ``step-00000100`` and so on; the last ``keep`` of them stay.

    Every process must call each method, but for `failed`, `close` and `clear`.
    """

    def __init__(self, folder: str | Path, keep: int = 2) -> None:
        self.folder, self.keep = Path(folder), keep
        self._writing: Future[None] | None = None

    def paths(self) -> list[Path]:
        """List the folders of complete checkpoints, oldest first, intact or not."""
        return [path for path in self._folders() if _records(path)]

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def save(self, step: int, shares: Callable[[], dict[str, Tensor]], state: Record) -> None:
        """Begin to write what ``shares`` returns, this process's rows of all tensors; training may go on meanwhile.

        ``shares`` must return copies; it is called when the checkpoint before is complete. Raises as `wait`.
        """
        self.wait()
        writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing = writer.submit(self._write, self.path(step), step, shares(), state)
        writer.shutdown(wait=False)

    def wait(self) -> None:
        """Wait until what `save` began is complete, then delete the checkpoints that are too old.

        Raises SaveFailed, with the earlier checkpoints untouched, when the disk is full or cannot be written;
        OtherProcessError in the processes where it can.
        """
        writing, self._writing = self._writing, None
        compute_everywhere(lambda: writing and writing.result())
        if rank_and_world()[0] == 0:
            for old in self.paths()[: -self.keep]:
                _remove(old)

    def failed(self) -> bool:
        """Return whether this process could not write what it began to; `wait` raises why."""
        return self._writing is not None and self._writing.done() and self._writing.exception() is not None

    def close(self) -> None:
        """Let this process's writing end."""
        if self._writing is not None:
            self._writing.exception()

    def latest(self) -> Snapshot | None:
        """Read the newest checkpoint whose files are intact; None when there is no complete checkpoint at all.

        Warns about every broken one that is passed over. Raises CorruptCheckpoint when all are broken.
        """
        problems: list[str] = []
        for path in reversed(agree_on(self.paths)):
            try:
                snapshot = load(path)
            except CorruptCheckpoint as error:
                problems.append(str(error))
                continue
            for problem in problems:
                warnings.warn(f"{problem} Resuming from {path.name}.", stacklevel=2)
            return snapshot
        if not problems:
            return None
        found = " ".join(problems)
        raise CorruptCheckpoint(f"no checkpoint in {self.folder} is intact: {found} Begin again with --resume never.")

    def clear(self, after: int = -1) -> None:
        """Delete the checkpoints of later steps than ``after``, and what killed processes have left."""
        complete = self.paths()
        for path in self._folders():
            if path not in complete or int(path.name.removeprefix("step-")) > after:
                _remove(path)
        if self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()

    def _folders(self) -> list[Path]:
        return sorted(self.folder.glob("step-*"))

    def _write(self, folder: Path, step: int, tensors: dict[str, Tensor], state: Record) -> None:
        rank, world = rank_and_world()
        record = folder / f"rank-{rank:05d}-of-{world:05d}.json"
        file = record.with_suffix(".safetensors")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            save_tensors(file, tensors)
            files = {file.name: file_hash(file)}
            write_sealed(record, {"format": FORMAT, "step": step, "files": files, "state": state})
            sync(folder)
            sync(self.folder)
        except (OSError, SafetensorError) as error:
            with suppress(OSError):  # others may have written more; the next start removes it
                file.unlink(missing_ok=True)
                folder.rmdir()
            kept = ", ".join(p.name for p in self.paths()) or "none"
            raise SaveFailed(
                f"cannot save {folder} ({error}); earlier checkpoints are untouched ({kept}): make room and run again."
            ) from error


def _records(folder: Path) -> list[Path]:
    """List the records of a checkpoint by rank, none of one that is not complete.

    One of an earlier version, with a manifest, counts as complete, so that it is refused rather than ignored.
    """
    found = sorted(folder.glob("rank-*-of-*.json"))
    if found and len(found) == int(found[0].stem.rpartition("-")[2]):
        return found
    return sorted(folder.glob(MANIFEST))


def check_files(folder: Path, hashes: Mapping[str, str]) -> None:
    """Raise CorruptCheckpoint naming the first file that is missing or does not match its hash."""
    for name, expected in hashes.items():
        if not (folder / name).exists():
            raise CorruptCheckpoint(f"{folder / name} is missing.")
        if (found := file_hash(folder / name)) != expected:
            raise CorruptCheckpoint(
                f"{folder / name} is corrupt: its hash is {found[:12]}, the manifest says {expected[:12]}."
            )


def load(folder: str | Path) -> Snapshot:
    """Read a checkpoint, written by any number of processes. Every process must call this: each checks some hashes.

    Raises CorruptCheckpoint, in all of them.
    """
    folder, records, problem = Path(folder), [], ""
    try:
        records = [_read_sealed(path, FORMAT) for path in _records(folder)]
        for record in own_share(records):
            check_files(folder, record["files"])
        if not records:
            problem = f"{folder} does not hold a complete checkpoint."
    except CorruptCheckpoint as error:
        problem = str(error)
    if problems := [found for found in compute_everywhere(lambda: problem) if found]:
        raise CorruptCheckpoint(problems[0])
    files = [folder / name for record in records for name in record["files"]]
    weights, optimizer = ShardedTensors(files, "weights/"), ShardedTensors(files, "optimizer/")
    return Snapshot(records[0]["step"], weights, optimizer, [record["state"] for record in records])


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
        return cls(**_read_sealed(folder / MANIFEST, STAGE_FORMAT))


def save_stage(folder: str | Path, student: nn.Module, **record: Any) -> StageManifest:
    """Write a student as the result of a stage: the weights first, then the manifest that makes them count.

    ``record`` is the rest of the manifest. Raises SaveFailed when the disk is full or cannot be written.
    """
    folder = Path(folder)
    tensors, tied = untied_state(student)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_tensors(folder / WEIGHTS, {name: tensor.contiguous() for name, tensor in tensors.items()})
        files = {WEIGHTS: file_hash(folder / WEIGHTS)}
        manifest = StageManifest(**record, weights=weights_hash(student), files=files, tied=tied)
        write_sealed(folder / MANIFEST, asdict(manifest))
    except (OSError, SafetensorError) as error:
        raise SaveFailed(f"cannot save {folder / WEIGHTS} ({error}); make room and run again.") from error
    return manifest


def load_stage(folder: str | Path, student: nn.Module) -> StageManifest:
    """Load a finished stage's weights into a student of the same build, every tensor of them.

    Every process must call this; the first one of each machine checks the hash. Parameters take the stored dtype. A
    student that shares weights with its teacher must be unshared first, unless the stage left those weights alone.
    Raises ValueError for another student, CorruptCheckpoint for damaged files.
    """
    folder = Path(folder)
    manifest = StageManifest.read(folder)
    if manifest is None:
        raise ValueError(f"{folder} does not hold a finished stage (no {MANIFEST}); run the stage first.")
    compute_everywhere(lambda: check_files(folder, manifest.files if is_first_on_machine() else {}))
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


def load_trained(folder: Path, student: nn.Module) -> None:
    """Take the trained parameters from the result of the stage that has just trained them.

    On a CPU they are pages of the file, of which a machine's memory holds one copy until somebody writes to them.
    """
    stored = ShardedTensors([folder / WEIGHTS])
    for name, parameter in student.named_parameters():
        if parameter.requires_grad:
            parameter.data = stored[name].to(parameter.device)


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


def write_sealed(path: Path, record: Record) -> None:
    """Write the record that makes a folder, or a share of it, count, with a hash of its own."""
    write_json(path, {**record, SEAL: _seal(record)})


def _seal(record: Record) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _read_sealed(path: Path, expected: str) -> Record:
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
    """Delete a checkpoint, a record first: one that is half gone does not count."""
    for record in _records(folder):
        record.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
