"""Write a folder so that it appears complete or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from ..export_paths import MARK
from ..locking import locked
from .errors import ExportError


def check_replaceable(path: Path) -> None:
    """Raise ValueError for a path that holds anything but an export or an empty folder, or the current folder."""
    if not path.is_dir():
        # A broken link does not exist, and yet no folder can be renamed to its place.
        if path.exists() or path.is_symlink():
            raise ValueError(f"{path} is not a folder; pass a new folder, or an export to replace.")
        return
    if any(path.iterdir()) and not (path / MARK).is_file():
        raise ValueError(
            f"{path} holds files that are not an export; pass a new folder, or an export to replace."
        )
    # Another folder takes its place: whoever works in it would be left in a deleted one.
    if _current_folder().is_relative_to(path.resolve()):
        raise ValueError(
            f"{path} is or holds the current folder, which an export cannot replace; pass a new folder, or change to "
            "another one first."
        )


def _current_folder() -> Path:
    """Return the current folder, or the root if it has been deleted."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return Path("/")


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder that replaces ``path``, or the folder that it links to, if the block succeeds.

    If the block fails, the temporary folder is deleted and ``path`` stays as it was. Leftovers of a
    killed process are restored or deleted first. Raises InUse when another process is writing
    ``path``, ExportError when the disk is full or not writable.
    """
    # Beside the folder itself: a link may lead to another disk, and renaming would put a folder in its place.
    path = path.resolve()
    new = path.with_name(f".{path.name}.new.tmp")
    old = path.with_name(f".{path.name}.old.tmp")
    with locked(path, beside=True):
        # A folder cannot be renamed onto another one: a process killed between the two renames
        # below leaves the earlier export under its temporary name.
        if old.exists() and not path.exists():
            old.rename(path)
        shutil.rmtree(new, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
        try:
            new.mkdir()
            yield new
            _exchange(path, new, old)
        except (OSError, SafetensorError) as error:
            state = "no partial export is left"
            if path.exists():
                state = "the earlier export is unchanged"
            raise ExportError(
                f"cannot write {path} ({error}); {state}: make room and export again."
            ) from error
        finally:
            shutil.rmtree(new, ignore_errors=True)
            if path.exists():
                shutil.rmtree(old, ignore_errors=True)


def _exchange(path: Path, new: Path, old: Path) -> None:
    """Move ``path`` aside to ``old``, and ``new`` to ``path``."""
    if path.exists():
        # Two renames: the earlier export is gone for the moment between them, and never half there.
        path.rename(old)
    try:
        new.rename(path)
    except OSError:
        if old.exists():
            old.rename(path)
        raise
