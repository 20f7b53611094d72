"""One process at a time writes to a folder: a lock that says who holds it, and that dies with its holder.

The lock is the kernel's (flock), so that a killed process holds nothing; the file says who the holder is. Where the
file system has no such locks, or keeps them to one host, what the file says counts.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

LOCK = ".lock"
POLL = 0.1
SETTLING = 1.0
"""Seconds in which a new holder has written who it is."""
SHOWN = 80
"""Characters of a holder's command."""
KEPT_TO_ONE_HOST = {"nolock", "local_lock=all", "local_lock=flock", "localflock"}
"""Mount options of NFS and Lustre under which one host does not see the locks of another."""

log = logging.getLogger(__name__)
_held: set[int] = set()


class InUse(ValueError):
    """Another process is writing there."""


@dataclass(frozen=True)
class Holder:
    """A process that holds a lock, or held it when it was killed."""

    host: str
    pid: int
    started: float
    """Since the epoch, in seconds: a later process may have the same pid."""
    command: str

    @classmethod
    def this(cls) -> Holder:
        """This process."""
        command = textwrap.shorten(" ".join([Path(sys.argv[0]).name, *sys.argv[1:]]), SHOWN, placeholder=" ...")
        return cls(socket.gethostname(), os.getpid(), psutil.Process().create_time(), command)

    @classmethod
    def read(cls, descriptor: int) -> Holder | None:
        """The one that a lock file names; None while it names none."""
        try:
            return cls(**json.loads(os.pread(descriptor, 4096, 0)))
        except (TypeError, ValueError):
            return None

    @property
    def is_here(self) -> bool:
        """Whether it ran on this host."""
        return self.host == socket.gethostname()

    def is_alive(self) -> bool:
        """Whether it runs, on this host."""
        try:
            return abs(psutil.Process(self.pid).create_time() - self.started) < 1
        except psutil.NoSuchProcess:
            return False

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} ({self.command})"


@contextmanager
def locked(place: Path, *, beside: bool = False, patience: float = 0.0) -> Iterator[None]:
    """Keep other processes out of a folder, which is made if it is not there, and removed again if it stays empty.

    ``beside`` puts the lock next to ``place``: a file, or a folder that is replaced as a whole. Raises InUse, naming
    the holder, when there is one for longer than ``patience`` seconds, and OSError where nothing can be written. A lock
    whose holder was killed is taken over.
    """
    folder = place.parent if beside else place
    path = folder / (f".{place.name}.lock" if beside else LOCK)
    if place.exists() and not (beside or place.is_dir()):
        raise NotADirectoryError(f"{place} is not a folder; name another place.")
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = _acquire(path, place, patience)
    _held.add(descriptor)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # while it is held: whoever has opened it looks whether it is still there
        _held.discard(descriptor)
        os.close(descriptor)
        if is_new:
            with suppress(OSError):
                folder.rmdir()


def is_locked(folder: Path) -> bool:
    """Whether a process is writing to a folder."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        return _refusal(descriptor, folder / LOCK, folder, fcntl.LOCK_SH) is not None
    finally:
        os.close(descriptor)


def _acquire(path: Path, place: Path, patience: float) -> int:
    """The descriptor of the lock file, locked, with this process's name in it."""
    began = time.monotonic()
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        refusal = _refusal(descriptor, path, place)
        if refusal is None and _is_at(descriptor, path):
            break
        holder = Holder.read(descriptor)
        os.close(descriptor)
        has_said = holder is not None and (holder.is_alive() or not holder.is_here)
        if refusal is not None and time.monotonic() - began >= (patience if has_said else max(patience, SETTLING)):
            raise InUse(refusal)
        time.sleep(POLL)
    if before := Holder.read(descriptor):
        log.info("%s was left by %s, which has ended; taking over", place, before)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(asdict(Holder.this())).encode(), 0)
    return descriptor


def _refusal(descriptor: int, path: Path, place: Path, kind: int = fcntl.LOCK_EX) -> str | None:
    """Lock an open lock file. What to say where that cannot be, because somebody else has it."""
    is_proof = True
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = Holder.read(descriptor) or "another process"
        return f"{place} is in use by {holder}; wait for it, end it, or name another place."
    except OSError:  # a file system without such locks
        is_proof = False
    holder = Holder.read(descriptor)
    if holder is None or (holder.is_here and (is_proof or not holder.is_alive())):
        return None
    if is_proof and not _kept_to_one_host(path):
        return None
    gone = "" if holder.is_here else f", or remove {path} if that process is gone"
    return f"{place} is in use by {holder}; wait for it, end it{gone}, or name another place."


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether an open lock file is still the one that others find: its holder removes it when it is done."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _kept_to_one_host(path: Path) -> bool:
    """Whether the file system of a path is mounted so that other hosts do not see its locks."""
    try:
        mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return False
    above = {str(parent) for parent in path.resolve().parents}
    options = {mount[1]: mount[3].split(",") for mount in mounts if mount[1] in above}  # the last one is on top
    return bool(options) and not KEPT_TO_ONE_HOST.isdisjoint(options[max(options, key=len)])


def _let_go() -> None:
    """Forget the locks in a forked child: it may outlive a parent that is killed."""
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_let_go)
