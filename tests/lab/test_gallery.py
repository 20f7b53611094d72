"""docs/gallery.md shows what benchmarks/gallery.py makes: every command, every figure, and no other."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path
from typing import get_args

import pytest

from hybrid_distill.cli.analyze import Experiment
from hybrid_distill.cli.app import main

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/gallery.md").read_text()


@pytest.fixture(scope="module")
def commands() -> dict[str, str]:
    """The commands of benchmarks/gallery.py for the embedded teacher, by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        script = importlib.import_module("gallery")
    gallery = script.Gallery()
    students = script.Students(gallery.work / "recurrent", gallery.work / "hybrid")
    return script.experiments(gallery, students)


def test_the_page_gives_the_commands_that_the_script_runs(commands: dict[str, str]) -> None:
    written = re.findall(r"^hybrid-distill (.*)$", PAGE, re.MULTILINE)
    assert sorted(written) == sorted(commands.values())


def test_the_page_shows_all_figures_and_they_are_there() -> None:
    shown = re.findall(r"!\[[^\]]+\]\((gallery/[^)]+)\)", PAGE)
    docs = ROOT / "docs"
    drawn = [str(path.relative_to(docs)) for path in (docs / "gallery").rglob("*.png")]
    assert sorted(shown) == sorted(drawn)
    assert len(shown) == len(set(shown))


def test_the_commands_are_ones_that_the_command_line_knows(
    commands: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    for experiment in get_args(Experiment):
        kind = get_args(experiment)[0]
        monkeypatch.setattr(kind, "run", lambda self: ran.append(type(self).__name__) or "")
    for command in commands.values():
        main(shlex.split(command))
    assert len(ran) == len(commands)
