"""Folders that the processes of a launch write to: locked, and seen by all of them."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from ..io import write_text
from ..locking import InUse, locked
from .connection import connect, rank_and_world
from .coordination import compute_everywhere, from_main, on_main_process

SEEN_WITHIN_S = 30.0
"""Seconds in which a file of the main process must be seen on all machines: an NFS may show it
late."""
LOOK_AGAIN_S = 0.1


class UnsharedFolder(ValueError):
    """Some processes of a launch do not see the main process's folder; each of them raises this."""


@contextmanager
def alone_in(target: Path, *, beside: bool = False, patience: float = 0.0) -> Iterator[None]:
    """Lock a folder against other commands; the processes of this launch share the lock.

    The main process holds it. If that fails, all processes raise the same error: InUse or OSError.
    Raises ValueError unless all processes see the folder (`check_shared`).
    """
    connect()
    with ExitStack() as held:

        def lock() -> InUse | OSError | None:
            try:
                held.enter_context(locked(target, beside=beside, patience=patience))
            except (InUse, OSError) as error:
                return error
            return None

        # The error travels as a value: raised in the main process, it would be an OtherProcessError
        # in the others, and each would report it.
        refusal = from_main(lock)
        if refusal is not None:
            raise refusal
        folder = target
        if beside:
            folder = target.parent
        check_shared(folder)
        yield


def check_shared(folder: Path) -> None:
    """Raise ValueError unless all processes see this folder of the main process.

    Results would be lost silently. The main process writes a file with a random name and value,
    which the others must read.
    """
    _, world = rank_and_world()
    if world == 1:
        return
    token = from_main(lambda: _write_token(folder))
    path = folder / token.name
    seen = compute_everywhere(lambda: (socket.gethostname(), _contains(path, token.value)))
    on_main_process(lambda: path.unlink(missing_ok=True))
    blind = [f"{rank} on {host}" for rank, (host, sees) in enumerate(seen) if not sees]
    if blind:
        main_host, _ = seen[0]
        raise UnsharedFolder(
            f"process 0 on {main_host} writes to {token.folder}, which {len(blind)} of {world} "
            f"processes do not see (process {', '.join(blind)}); pass an --out on a file system "
            "that all machines share."
        )


class _Token(NamedTuple):
    folder: str
    """Folder as the main process sees it."""
    name: str
    value: str


def _write_token(folder: Path) -> _Token:
    # Random: a machine that does not share the folder may have an equal path with an older token.
    name = f".{secrets.token_hex(8)}.token"
    token = _Token(str(folder.resolve()), name, value=secrets.token_hex(16))
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / name, token.value)
    return token


def _contains(path: Path, value: str) -> bool:
    """Check whether a file has this content, now or within `SEEN_WITHIN_S`."""
    end = time.monotonic() + SEEN_WITHIN_S
    while True:
        with suppress(OSError):
            if path.read_text() == value:
                return True
        if time.monotonic() > end:
            return False
        time.sleep(LOOK_AGAIN_S)
