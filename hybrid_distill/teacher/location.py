"""Tell folders from hub ids, and the hub that answers from the one that does not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from huggingface_hub import constants, get_session

from ..assets import tiny_teacher_path
from ..safe_loading import check_no_run
from ..validation import first_line

TINY = "tiny"
"""Name of the embedded teacher."""
RECIPE_FLAG = "--teacher.path"
"""Flag that names a recipe's teacher."""
HUB_TIMEOUT_S = 10.0


def folder_or_name(name_or_path: str | Path) -> str | Path:
    """Return an existing folder as a Path, anything else as a hub id (str)."""
    if str(name_or_path) == TINY:
        path = tiny_teacher_path()
    else:
        path = Path(name_or_path).expanduser()
    return path if path.is_dir() else str(name_or_path)


def check_not_missing_path(name_or_path: str | Path, flag: str) -> None:
    """Raise ValueError for a name that looks like a path to no folder: it is not sent to the hub."""
    path = folder_or_name(name_or_path)
    if isinstance(path, Path):
        return
    # A hub id is "owner/name".
    looks_local = isinstance(name_or_path, Path) or path.startswith((".", "/", "~"))
    is_file = Path(path).exists()
    if looks_local or is_file or path.count("/") > 1:
        raise ValueError(f"{flag} {path!r} is not a folder; pass an existing one.")


def locate(name_or_path: str | Path, flag: str) -> str | Path:
    """Return a folder with config and weights, or a hub id. Raises ValueError for a wrong path."""
    check_not_missing_path(name_or_path, flag)
    path = folder_or_name(name_or_path)
    if not isinstance(path, Path):
        return path
    option = f"{flag} {str(name_or_path)!r}"
    check_no_run(path)
    if not (path / "config.json").is_file():
        raise ValueError(f"{option} has no config.json; pass a Hugging Face model folder.")
    if not [*path.glob("*.safetensors"), *path.glob("*.bin")]:
        raise ValueError(
            f"{option} has no weights (*.safetensors or *.bin); download them, or pass another folder."
        )
    return path


@cache
def hub_error() -> str | None:
    """Return why the hub cannot be reached, or None. Asks only once in a process."""
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=HUB_TIMEOUT_S)
    except Exception as error:  # requests or httpx, depending on the version of huggingface_hub
        return f"{constants.ENDPOINT} cannot be reached: {error}"
    return None


def offline_reason(path: str | Path) -> str:
    """Return the reason to read a hub id from the cache alone: the hub is unreachable.

    Empty for a folder, and if the hub answers.
    """
    if isinstance(path, Path):
        return ""
    error = hub_error()
    return f"{error}, and it is not in the cache" if error else ""


def must_use_cache(path: str | Path) -> bool:
    """Return True if files may come from disk alone, as transformers' ``local_files_only``.

    Without it, huggingface_hub retries every file of an unreachable hub for 25 seconds.
    """
    return bool(offline_reason(path))


@contextmanager
def loading_errors(name_or_path: str | Path, flag: str) -> Iterator[None]:
    """Turn any error while loading a model into one line with the flag, the reason and the fix."""
    try:
        yield
    except Exception as error:  # a damaged file can raise anything in transformers or tokenizers
        reason = first_line(error).rstrip(".;")
        path = folder_or_name(name_or_path)
        if not isinstance(path, Path):
            # A finished run names its teacher as it was given: perhaps from another folder.
            reason = f"not a folder in {Path.cwd()}; on the hub: {offline_reason(path) or reason}"
        demo = " (`make demo` runs it)" if flag == RECIPE_FLAG else ""
        raise ValueError(
            f"{flag} {str(name_or_path)!r} cannot be loaded ({reason}); pass a local folder, or "
            f"the embedded teacher, {TINY}{demo}."
        ) from error
