"""kill -9 in the middle of a save: readers find what was there before, or what is there now."""

import itertools
import json
import resource
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from students import tiny_student
from training import die, killed

from hybrid_distill.export import ExportError, checkpoint, export_checkpoint
from hybrid_distill.io import replacing, save_tensors, write_json, write_text
from hybrid_distill.train.metrics import METRICS, append_metrics


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def test_a_save_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_json(path, {"n": 1})
    with pytest.raises(TypeError):
        write_json(path, {"n": object()})
    with pytest.raises(OSError), replacing(path) as temporary:
        temporary.write_text("half")
        raise OSError(28, "No space left on device")
    assert json.loads(path.read_text()) == {"n": 1}
    assert names(tmp_path) == ["file"]


def die_at_call(n: int, place: Any, name: str) -> None:
    """Make the ``n``-th call of a function, from now on, kill -9."""
    call = getattr(place, name)
    numbers = itertools.count(1)

    def counting(*args: Any, **kwargs: Any) -> Any:
        if next(numbers) == n:
            die()
        return call(*args, **kwargs)

    setattr(place, name, counting)


@pytest.mark.parametrize(
    ("place", "name", "n"),
    [
        (checkpoint, "model_card", 1),
        (Path, "rename", 1),
        (Path, "rename", 2),
        (shutil, "rmtree", 4),
    ],
)
def test_a_killed_export_leaves_the_one_before_and_no_other(
    tmp_path: Path, place: Any, name: str, n: int
) -> None:
    """While it is written, around its two renames, before what it replaced is deleted."""
    student, plan = tiny_student("llama")
    path = tmp_path / "export"

    def export(license: str) -> None:
        export_checkpoint(student, None, path, plan=plan, gate=False, license=license)

    def export_and_die() -> None:
        die_at_call(n, place, name)
        export("second")

    export("first")
    killed(export_and_die)
    assert path.exists() == ((name, n) != ("rename", 2))
    export("third")
    assert "license: third" in (path / "README.md").read_text()
    assert names(tmp_path) == ["export"]


def test_a_full_disk_is_an_error_and_what_was_moved_aside_is_put_back(
    tmp_path: Path,
) -> None:
    """The error is safetensors' own, of a file that may not grow."""
    student, plan = tiny_student("llama")
    path = tmp_path / "export"
    export_checkpoint(student, None, path, plan=plan, gate=False, license="first")
    path.rename(tmp_path / ".export.old.tmp")
    with files_up_to(4096), pytest.raises(ExportError, match=str(path)):
        export_checkpoint(student, None, path, plan=plan, gate=False, license="second")
    assert "license: first" in (path / "README.md").read_text()
    assert names(tmp_path) == ["export"]


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """Stand for a full disk: no file can grow beyond ``size`` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("kind", ["text", "tensors", "metrics"])
def test_the_error_of_a_full_disk_names_the_file(tmp_path: Path, kind: str) -> None:
    """That of the system names none, and that of safetensors is not an OSError."""
    path = tmp_path / METRICS

    def write() -> None:
        if kind == "text":
            write_text(path, "x" * 9000)
        elif kind == "tensors":
            save_tensors(path, {"a": torch.ones(9000)})
        else:
            append_metrics(tmp_path, {"step": "x" * 9000})

    with files_up_to(4096), pytest.raises(OSError) as error:
        write()
    assert error.value.filename == str(path)


def test_tensors_are_saved_with_the_users_file_mode(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    plain = tmp_path / "plain"
    plain.touch()
    # Left by a killed process.
    (tmp_path / f".{path.name}.tmp").touch(0o600)
    save_tensors(path, {"a": torch.ones(2, 3)})
    assert path.stat().st_mode == plain.stat().st_mode
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert file.get_tensor("a").shape == (2, 3)
