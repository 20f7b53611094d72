"""Headers of token and logit folders: a JSON file that describes the binary files next to it.

It is written last: a folder without it is unfinished. A partial header lists what an interrupted command has finished.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import ClassVar, TypeVar

from ..io import read_json, refused, write_json

Header = TypeVar("Header", bound="FolderHeader")
LONGEST_VALUES = 60
"""Characters of values that an error message shows."""


class Unfinished(ValueError):
    """The writing of a folder was interrupted."""


@dataclass
class FolderHeader:
    """Common part of both headers. The fields of a subclass are the entries of its file."""

    FORMAT: ClassVar[str]
    CONTENT: ClassVar[str]
    """Noun for error messages, and stem of the header's file name."""
    REMAKE: ClassVar[str]
    """Last part of an error about a damaged folder: how to make it again."""
    FILES: ClassVar[tuple[str, ...]]
    """Prefixes of the names of the folder's other files."""
    RESULTS: ClassVar[tuple[str, ...]]
    """Fields that do not determine the content of the files."""

    format: str

    @classmethod
    def file(cls, folder: Path, partial: bool = False) -> Path:
        """Return the path of the header, or of the header of an unfinished folder if ``partial``."""
        suffix = ".partial.json" if partial else ".json"
        return folder / f"{cls.CONTENT}{suffix}"

    @classmethod
    def load(cls: type[Header], path: Path) -> Header:
        """Read a header. Raises ValueError for a file that is not a header or has another format."""
        with refused(f"{path} is not the header of {cls.CONTENT}", cls.REMAKE):
            record = read_json(path)
            if record.get("format") != cls.FORMAT:
                raise ValueError(f"its format is {record.get('format')!r}, not {cls.FORMAT!r}")
            names = {entry.name for entry in fields(cls)}
            # Without the position at which reading resumes, an entry of partial headers alone.
            return cls(**{name: value for name, value in record.items() if name in names})

    @classmethod
    def is_in(cls, folder: Path) -> bool:
        """Check whether a folder has a header. Raises Unfinished if its writing was interrupted."""
        if cls.file(folder).is_file():
            return True
        if cls.file(folder, partial=True).is_file():
            raise Unfinished(
                f"the {cls.CONTENT} in {folder} are unfinished; rerun the command that started them."
            )
        return False

    @classmethod
    def open(cls: type[Header], folder: Path) -> Header:
        """Read the header of a finished folder. Raises ValueError for any other folder, and if bytes are missing."""
        cls.is_in(folder)
        header = cls.load(cls.file(folder))
        header.check_files(folder)
        return header

    def existing(self: Header, folder: Path) -> Header | None:
        """Return the header of a finished or unfinished folder; None for a new folder.

        Raises ValueError for a folder that holds something else: other work, or other kinds of files.
        """
        for partial in (False, True):
            path = self.file(folder, partial)
            if path.exists():
                header = self.load(path)
                self._check_same_work(header, folder)
                if not partial:
                    # A process killed in `finish` leaves both.
                    self.file(folder, partial=True).unlink(missing_ok=True)
                return header
        # Hidden files are locks and temporary files. Without a header, there may be an unfinished first shard.
        own_prefixes = (".", *self.FILES)
        for path in sorted(folder.glob("*")):
            if not path.name.startswith(own_prefixes):
                raise ValueError(
                    f"{folder} holds {path.name}, which is not a file of {self.CONTENT}; pass a new folder."
                )
        return None

    def _check_same_work(self, other: FolderHeader, folder: Path) -> None:
        own = self.identity()
        differences = []
        for name, value in other.identity().items():
            if value != own.get(name):
                differences.append(_difference(name, value, own.get(name)))
        if differences:
            raise ValueError(
                f"{folder} holds {self.CONTENT} made with another {', '.join(differences)}; pass another folder, or "
                "delete this one."
            )

    def finish(self, folder: Path) -> None:
        """Write the header, which marks the folder as complete."""
        self.save(self.file(folder))
        self.file(folder, partial=True).unlink(missing_ok=True)

    def save(self, path: Path, **more: object) -> None:
        """Write the header atomically, with ``more`` entries."""
        write_json(path, {**asdict(self), **more})

    def identity(self) -> dict[str, object]:
        """Return all fields that determine the content of the files."""
        return {name: value for name, value in asdict(self).items() if name not in self.RESULTS}

    def sizes(self, folder: Path) -> dict[Path, int]:
        """Return the size in bytes of every file that the folder should hold."""
        raise NotImplementedError

    def check_files(self, folder: Path) -> None:
        """Raise ValueError naming the first file that is missing, truncated or too long."""
        for path, expected in self.sizes(folder).items():
            size = size_of(path)
            if size != expected:
                raise ValueError(
                    f"{path} has {size} bytes, the header says {expected}; copy the folder again, or recreate it."
                )


def _difference(name: str, there: object, here: object) -> str:
    """Name a setting in which two headers differ, with its values unless they are long (hashes, mostly)."""
    values = f"{there!r} there, {here!r} here"
    return f"{name} ({values})" if len(values) < LONGEST_VALUES else name


def size_of(path: Path) -> int:
    """Return the size of a file in bytes, 0 if it does not exist."""
    return path.stat().st_size if path.exists() else 0
