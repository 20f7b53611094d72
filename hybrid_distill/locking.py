"""Folder locks: only one process may write to a folder. The operating system frees the lock of a killed process.

A note next to the lock names the holder; the error in a process that is refused quotes it.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

LOCK, NOTE = ".lock", ".lock.holder"
SETTLING = 1.0
"""Seconds within which a new holder writes its note, and a check by `is_locked` releases the lock again."""

log = logging.getLogger(__name__)


class InUse(ValueError):
    """Another process is writing to the folder."""


@contextmanager
def locked(place: Path, *, beside: bool = False, patience: float = 0.0) -> Iterator[None]:
    """Lock a folder against other processes. Create it, and parents, if missing; remove those again if they stay empty.

    ``beside`` puts the lock next to ``place``: a file, or a folder that is replaced as a whole. Raises InUse, naming
    the holder, if the lock is held for longer than ``patience`` seconds, and OSError if nothing can be written.
    """
    folder = place.parent if beside else place
    path, note = (folder / (f".{place.name}{name}" if beside else name) for name in (LOCK, NOTE))
    if place.exists() and not (beside or place.is_dir()):
        raise NotADirectoryError(f"{place} is not a folder; pass another one.")
    new = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = _acquire(path, max(patience, SETTLING))
    except Timeout:
        holder = _read(note) or "another process"
        raise InUse(f"{place} is in use by {holder}; wait for it, end it, or pass another place.") from None
    try:
        if left := _read(note):
            log.info("%s was left by %s, which has ended; taking over", place, left)
        command = textwrap.shorten(" ".join([Path(sys.argv[0]).name, *sys.argv[1:]]), 80, placeholder=" ...")
        note.write_text(f"process {os.getpid()} on {socket.gethostname()} ({command})")
        try:
            yield
        finally:
            note.unlink(missing_ok=True)
            path.unlink(missing_ok=True)  # while held: a process that waits for this file then opens the new one
    finally:
        lock.release()
        with suppress(OSError):
            for empty in new:
                empty.rmdir()


def is_locked(folder: Path) -> bool:
    """Check whether a process is writing to a folder."""
    try:
        with (folder / LOCK).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:  # held, or not supported by this file system
        return True
    return False


def _acquire(path: Path, patience: float) -> BaseFileLock:
    """Lock a file; on a file system without locks, use the existence of ``PATH.soft`` as the lock. Raises Timeout."""
    lock: BaseFileLock = FileLock(path)
    try:
        lock.acquire(timeout=patience)
    except OSError as error:
        if error.errno != errno.ENOLCK:
            raise
        lock = SoftFileLock(f"{path}.soft")
        lock.acquire(timeout=patience)
    return lock


def _read(note: Path) -> str:
    with suppress(OSError):
        return note.read_text()
    return ""
