"""One process at a time writes to a folder, under a lock of the operating system that a killed process loses.

A note beside the lock names its holder, for whoever is refused. Where other hosts cannot see the lock, the note counts.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

LOCK = ".lock"
SETTLING = 1.0
"""Seconds in which a new holder has written its note, and in which whoever only looks (`is_locked`) lets go."""
SHOWN = 80
"""Characters of a holder's command."""
KEPT_TO_ONE_HOST = {"nolock", "local_lock=all", "local_lock=flock", "localflock"}
"""Mount options of NFS and Lustre under which one host does not see the locks of another."""

log = logging.getLogger(__name__)


class InUse(ValueError):
    """Another process is writing there."""


@dataclass(frozen=True)
class Holder:
    """A process that holds a lock, or held it when it was killed."""

    host: str
    pid: int
    command: str

    @classmethod
    def this(cls) -> Holder:
        """Describe this process."""
        command = textwrap.shorten(" ".join([Path(sys.argv[0]).name, *sys.argv[1:]]), SHOWN, placeholder=" ...")
        return cls(socket.gethostname(), os.getpid(), command)

    @classmethod
    def read(cls, note: Path) -> Holder | None:
        """Read a note; None where there is none."""
        try:
            return cls(**json.loads(note.read_text()))
        except (OSError, TypeError, ValueError):
            return None

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} ({self.command})"


def note_of(lock: Path) -> Path:
    """Name the file that says who holds a lock."""
    return lock.with_name(f"{lock.name}.json")


@contextmanager
def locked(place: Path, *, beside: bool = False, patience: float = 0.0) -> Iterator[None]:
    """Keep other processes out of a folder, which is created if need be, and removed again if it stays empty.

    ``beside`` puts the lock next to ``place``: a file, or a folder that is replaced as a whole. Raises InUse, naming
    the holder, when there is one for longer than ``patience`` seconds, and OSError where nothing can be written.
    """
    folder = place.parent if beside else place
    path = folder / (f".{place.name}.lock" if beside else LOCK)
    if place.exists() and not (beside or place.is_dir()):
        raise NotADirectoryError(f"{place} is not a folder; pass another one.")
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    note = note_of(path)
    try:
        lock = _acquire(path, max(patience, SETTLING))
    except Timeout:
        holder = Holder.read(note) or "another process"
        raise InUse(f"{place} is in use by {holder}; wait for it, end it, or pass another folder.") from None
    try:
        if before := Holder.read(note):
            if before.host != socket.gethostname() and _kept_to_one_host(path):
                raise InUse(
                    f"{place} is in use by {before}; wait for it, end it, remove {note} if that process is gone, or "
                    "pass another folder."
                )
            log.info("%s was left by %s, which has ended; taking over", place, before)
        note.write_text(json.dumps(asdict(Holder.this())))
        try:
            yield
        finally:
            note.unlink(missing_ok=True)
            path.unlink(missing_ok=True)  # while it is held: whoever waits for this file looks for the new one
    finally:
        lock.release()
        if is_new:
            with suppress(OSError):
                folder.rmdir()


def is_locked(folder: Path) -> bool:
    """Check whether a process is writing to a folder."""
    try:
        with (folder / LOCK).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:  # it is held, or this file system has no such locks
        return True
    return False


def _acquire(path: Path, patience: float) -> BaseFileLock:
    """Lock a file; on a file system without locks, its existence is the lock. Raises Timeout."""
    lock: BaseFileLock = FileLock(path)
    try:
        lock.acquire(timeout=patience)
    except OSError as error:
        if error.errno != errno.ENOLCK:
            raise
        lock = SoftFileLock(f"{path}.soft")
        lock.acquire(timeout=patience)
    return lock


def _kept_to_one_host(path: Path) -> bool:
    """Check whether the file system of a path is mounted so that other hosts do not see its locks."""
    try:
        mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return False
    above = {str(parent) for parent in path.resolve().parents}
    options = {mount[1]: mount[3].split(",") for mount in mounts if mount[1] in above}  # the last one is on top
    return bool(options) and not KEPT_TO_ONE_HOST.isdisjoint(options[max(options, key=len)])
