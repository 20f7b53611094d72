"""Checkpoints and results of a stage on disk; incomplete ones do not count.

Each process writes its own share of a checkpoint in the background: first its rows of each tensor, as a safetensors
file, then a sealed JSON record with the hash of that file. A checkpoint is complete once it has the records of all
processes; a save needs no other agreement and no collective. There are no pickles, so reading runs no code.
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
    """Tensors whose rows are spread over several safetensors files, in order; each is read on access."""

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
        """Read only the rows from ``begin`` to ``end`` of a tensor."""
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
    """A write failed; earlier saves are untouched."""


@dataclass(frozen=True)
class Snapshot:
    """Checkpoint read from disk."""

    step: int
    weights: ShardedTensors
    optimizer: ShardedTensors
    states: list[Record]
    """States of the processes that wrote it."""


class Checkpoints:
    """Checkpoints of one stage, ``step-00000100`` and so on; only the last ``keep`` stay on disk.

    Every process must call each method, except `failed`, `close` and `clear`.
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
        """Start writing ``shares()``, this process's rows of all tensors; training may continue meanwhile.

        ``shares`` must return copies; it is called once the previous checkpoint is complete. Raises as `wait` does.
        """
        self.wait()
        writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing = writer.submit(self._write, self.path(step), step, shares(), state)
        writer.shutdown(wait=False)

    def wait(self) -> None:
        """Wait until the last `save` is complete, then delete the checkpoints that are too old.

        Raises SaveFailed if the disk is full or not writable, and OtherProcessError in the processes that could write.
        Earlier checkpoints stay untouched.
        """
        writing, self._writing = self._writing, None
        compute_everywhere(lambda: writing and writing.result())
        if rank_and_world()[0] == 0:
            for old in self.paths()[: -self.keep]:
                _remove(old)

    def failed(self) -> bool:
        """Check whether this process failed to write its share; `wait` raises the error."""
        return self._writing is not None and self._writing.done() and self._writing.exception() is not None

    def close(self) -> None:
        """Wait until this process has finished writing; ignore its errors."""
        if self._writing is not None:
            self._writing.exception()

    def latest(self) -> Snapshot | None:
        """Read the newest checkpoint whose files are intact; return None if there is no complete checkpoint.

        Warns about each broken one that it skips. Raises CorruptCheckpoint if all are broken.
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
        """Delete checkpoints of steps later than ``after``, and the leftovers of killed processes."""
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
            with suppress(OSError):  # other processes may leave files; the next start removes them
                file.unlink(missing_ok=True)
                folder.rmdir()
            kept = ", ".join(p.name for p in self.paths()) or "none"
            raise SaveFailed(
                f"cannot save {folder} ({error}); earlier checkpoints are untouched ({kept}): make room and run again."
            ) from error


def _records(folder: Path) -> list[Path]:
    """List the records of a checkpoint by rank; empty if the checkpoint is incomplete.

    A checkpoint of an earlier version, with a manifest, counts as complete, so that it is refused and not ignored.
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

    Raises CorruptCheckpoint in all processes if any of them finds an error.
    """
    folder, records, problem = Path(folder), [], ""
    try:
        records = [read_sealed(path, FORMAT) for path in _records(folder)]
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
    """Names of tied parameters that are not stored, each with the stored name."""
    finished: bool = True
    format: str = STAGE_FORMAT

    @classmethod
    def read(cls, folder: str | Path) -> StageManifest | None:
        """Read the manifest of a finished stage; None if missing. Raises CorruptCheckpoint if broken."""
        folder = Path(folder)
        if not (folder / MANIFEST).exists():
            return None
        return cls(**read_sealed(folder / MANIFEST, STAGE_FORMAT))


def save_stage(folder: str | Path, student: nn.Module, **record: Any) -> StageManifest:
    """Write a student as the result of a stage: first the weights, then the manifest that marks them as complete.

    ``record`` is the rest of the manifest. Raises SaveFailed if the disk is full or not writable.
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
    """Load all weights of a finished stage into a student that was built the same way.

    Every process must call this; the first on each machine checks the hash. Parameters take the stored dtype. A student
    that shares weights with its teacher must be unshared first, unless the stage did not change those weights.
    Raises ValueError if the student does not match, CorruptCheckpoint for damaged files.
    """
    folder = Path(folder)
    manifest = _finished(folder)
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


def stage_tensors(folder: Path) -> ShardedTensors:
    """Open the weights of a finished stage, in this process alone; each tensor is read on access.

    Raises ValueError if the stage is not finished, CorruptCheckpoint for damaged files.
    """
    check_files(folder, _finished(folder).files)
    return ShardedTensors([folder / WEIGHTS])


def _finished(folder: Path) -> StageManifest:
    manifest = StageManifest.read(folder)
    if manifest is None:
        raise ValueError(f"{folder} does not hold a finished stage (no {MANIFEST}); run the stage first.")
    return manifest


def load_trained(folder: Path, student: nn.Module) -> None:
    """Load the trained parameters from the result of the stage that has just trained them.

    On a CPU they are memory-mapped: a machine holds one copy until a process writes to it.
    """
    stored = ShardedTensors([folder / WEIGHTS])
    for name, parameter in student.named_parameters():
        if parameter.requires_grad:
            parameter.data = stored[name].to(parameter.device)


def untied_state(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return (state dict with each tensor once, stored name of each other name that is tied to one)."""
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
    """Write the record that marks a folder, or a share of it, as complete; it includes its own hash."""
    write_json(path, {**record, SEAL: _seal(record)})


def _seal(record: Record) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def read_sealed(path: Path, expected: str) -> Record:
    """Read a record that `write_sealed` wrote, of the ``expected`` format. Raises CorruptCheckpoint for any other."""
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
    """Delete a checkpoint, records first, so that a half-deleted one does not count."""
    for record in _records(folder):
        record.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
