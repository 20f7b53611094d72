"""Checkpoints that a stopped stage resumes from; incomplete ones do not count.

Each process writes its own share of a checkpoint in the background: first its rows of each tensor,
as a safetensors file, then a sealed JSON record with the hash of that file. A checkpoint is
complete once it has the records of all processes; a save needs no other agreement and no
collective. There are no pickles, so reading runs no code.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ..distributed import agree_on, compute_everywhere, own_share, rank_and_world
from ..io import Record, file_hash, save_tensors, sync
from .sealed import CorruptCheckpoint, SaveFailed, check_files, read_sealed, write_sealed
from .weights import ShardedTensors

FORMAT = "hybrid-distill/checkpoint/3"
CHECKPOINTS = "checkpoints"
"""Folder in a stage's folder."""
STEPS = "step-*"
"""Pattern of the checkpoints in that folder."""


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
        self.folder = Path(folder)
        self.keep = keep
        self._writing: Future[None] | None = None

    def paths(self) -> list[Path]:
        """List the folders of complete checkpoints, oldest first, intact or not."""
        return [path for path in self._folders() if _records(path)]

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def save(self, step: int, shares: Callable[[], dict[str, Tensor]], state: Record) -> None:
        """Start writing ``shares()``, this process's rows of all tensors, while training continues.

        ``shares`` must return copies; it is called once the previous checkpoint is complete. Raises
        as `wait` does.
        """
        # Two checkpoints at once would take twice the memory.
        self.wait()
        # One thread a save, not a pool that is kept: a program that ends need not close it.
        writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        # `shares()` copies the tensors here, not in the thread: the next step changes them.
        self._writing = writer.submit(self._write, self.path(step), step, shares(), state)
        writer.shutdown(wait=False)

    def wait(self) -> None:
        """Wait until the last `save` is complete, then delete the checkpoints that are too old.

        Raises SaveFailed if the disk is full or not writable, and OtherProcessError in the
        processes that could write. Earlier checkpoints stay untouched.
        """
        # Forgotten before it can raise: an error that was reported must not come back in the next
        # `wait`.
        writing = self._writing
        self._writing = None

        def finish() -> None:
            if writing is not None:
                writing.result()

        # The disk of one machine may be full: all processes must hear of it, not only its own.
        compute_everywhere(finish)
        rank, _ = rank_and_world()
        if rank == 0:
            # Complete ones only are counted: a save that failed must not push an intact one out.
            for old in self.paths()[: -self.keep]:
                _remove(old)

    def failed(self) -> bool:
        """Check whether this process failed to write its share; `wait` raises the error."""
        if self._writing is None or not self._writing.done():
            return False
        return self._writing.exception() is not None

    def close(self) -> None:
        """Wait until this process has finished writing; ignore its errors."""
        if self._writing is not None:
            self._writing.exception()

    def latest(self) -> Snapshot | None:
        """Read the newest checkpoint whose files are intact; return None if none is complete.

        Warns about each broken one that it skips. Raises CorruptCheckpoint if all are broken.
        """
        problems: list[str] = []
        # The main process's list: another machine may see a new folder later.
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
        raise CorruptCheckpoint(
            f"no checkpoint in {self.folder} is intact: {' '.join(problems)} Begin again with --resume never."
        )

    def clear(self, after: int = -1) -> None:
        """Delete checkpoints of steps after ``after``, and leftovers of killed processes."""
        complete = self.paths()
        for path in self._folders():
            step = int(path.name.removeprefix("step-"))
            if path not in complete or step > after:
                _remove(path)
        if self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()

    def _folders(self) -> list[Path]:
        return sorted(self.folder.glob(STEPS))

    def _write(self, folder: Path, step: int, tensors: dict[str, Tensor], state: Record) -> None:
        rank, world = rank_and_world()
        record = folder / f"rank-{rank:05d}-of-{world:05d}.json"
        file = record.with_suffix(".safetensors")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            save_tensors(file, tensors)
            files = {file.name: file_hash(file)}
            write_sealed(record, {"format": FORMAT, "step": step, "files": files, "state": state})
            # The entries of both folders, which a power cut could lose although the files are
            # there.
            sync(folder)
            sync(self.folder)
        except OSError as error:
            # Other processes may have files in the folder; the next start removes them.
            with suppress(OSError):
                # The record first: with it, the checkpoint would count as complete.
                record.unlink(missing_ok=True)
                file.unlink(missing_ok=True)
                folder.rmdir()
            kept = ", ".join(path.name for path in self.paths()) or "none"
            raise SaveFailed(
                f"cannot save {folder} ({error}); earlier checkpoints are untouched ({kept}): make "
                "room and run again."
            ) from error


def load(folder: str | Path) -> Snapshot:
    """Read a checkpoint, written by any number of processes.

    Every process must call this: each checks some hashes. Raises CorruptCheckpoint in all processes
    if any of them finds an error.
    """
    folder = Path(folder)
    # Hashing a large checkpoint takes minutes: the processes divide its files among them.
    records: list[Record] = []
    problem = ""
    try:
        records = [read_sealed(path, FORMAT) for path in _records(folder)]
        if not records:
            raise CorruptCheckpoint(f"{folder} does not hold a complete checkpoint.")
        for record in own_share(records):
            check_files(folder, record["files"])
    except CorruptCheckpoint as error:
        problem = str(error)
    # As a value: raised here, it would be an OtherProcessError in the others, and they would not
    # try an older one.
    for problem_of_process in compute_everywhere(lambda: problem):
        if problem_of_process:
            raise CorruptCheckpoint(problem_of_process)
    # In rank order, which is the order of each tensor's rows.
    files: list[Path] = []
    for record in records:
        files += [folder / name for name in record["files"]]
    return Snapshot(
        step=records[0]["step"],
        weights=ShardedTensors(files, "weights/"),
        optimizer=ShardedTensors(files, "optimizer/"),
        states=[record["state"] for record in records],
    )


def _records(folder: Path) -> list[Path]:
    """List the records of a checkpoint by rank; empty if the checkpoint is incomplete."""
    records = sorted(folder.glob("rank-*-of-*.json"))
    if not records:
        return []
    # The writers' number is in the name: the reading run may have another number of processes.
    world = int(records[0].stem.rpartition("-")[2])
    if len(records) != world:
        return []
    return records


def _remove(folder: Path) -> None:
    """Delete a checkpoint, records first, so that a half-deleted one does not count."""
    for record in _records(folder):
        record.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
