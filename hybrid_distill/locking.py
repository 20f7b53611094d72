"""Folder locks: only one process may write to a folder.

The operating system frees the lock of a killed process. A note next to the lock names the holder;
the error in a process that is refused quotes it.
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

LOCK = ".lock"
NOTE = ".lock.holder"
SETTLING = 1.0
"""Seconds within which a new holder writes its note, and a check by `is_locked` releases the lock
again."""

log = logging.getLogger(__name__)


class InUse(ValueError):
    """Another process is writing to the folder."""


@contextmanager
def locked(target: Path, *, beside: bool = False, patience: float = 0.0) -> Iterator[None]:
    """Lock a folder against other processes.

    Create it, and parents, if missing; remove those again if they stay empty. ``beside`` puts the
    lock next to ``target``: a file, or a folder that is replaced as a whole. Raises InUse, naming
    the holder, if the lock is held for longer than ``patience`` seconds, and OSError if nothing can
    be written.
    """
    if beside:
        folder = target.parent
        path = folder / f".{target.name}{LOCK}"
        note = folder / f".{target.name}{NOTE}"
    elif target.exists() and not target.is_dir():
        raise NotADirectoryError(f"{target} is not a folder; pass another one.")
    else:
        folder = target
        path = folder / LOCK
        note = folder / NOTE
    # Folders that this call makes, innermost first: the order in which they can be removed.
    missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = _acquire(path, max(patience, SETTLING))
    except Timeout:
        holder = _read(note) or "another process"
        raise InUse(
            f"{target} is in use by {holder}; wait for it, end it, or pass another place."
        ) from None
    try:
        earlier_holder = _read(note)
        if earlier_holder:
            log.info("%s was left by %s, which has ended; taking over", target, earlier_holder)
        note.write_text(_describe_process())
        try:
            yield
        finally:
            note.unlink(missing_ok=True)
            # While it is held: a process that waits for this file then opens the new one.
            path.unlink(missing_ok=True)
    finally:
        lock.release()
        # Ends at the first folder that has content.
        with suppress(OSError):
            for parent in missing:
                parent.rmdir()


def is_locked(folder: Path) -> bool:
    """Check whether a process is writing to a folder."""
    try:
        with (folder / LOCK).open() as file:
            # Shared, so that two that look at the same time do not see each other.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        # It is held, or the file system has no locks.
        return True
    return False


def _acquire(path: Path, patience: float) -> BaseFileLock:
    """Lock a file. Raises Timeout.

    On a file system without locks (some NFS), the existence of ``PATH.soft`` is the lock.
    """
    lock: BaseFileLock = FileLock(path)
    try:
        lock.acquire(timeout=patience)
    except OSError as error:
        if error.errno != errno.ENOLCK:
            raise
        lock = SoftFileLock(f"{path}.soft")
        lock.acquire(timeout=patience)
    return lock


def _describe_process() -> str:
    program = Path(sys.argv[0]).name
    command = textwrap.shorten(" ".join([program, *sys.argv[1:]]), 80, placeholder=" ...")
    return f"process {os.getpid()} on {socket.gethostname()} ({command})"


def _read(note: Path) -> str:
    with suppress(OSError):
        return note.read_text()
    return ""
