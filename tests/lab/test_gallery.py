"""docs/gallery.md shows what benchmarks/gallery.py makes: every command, every figure, and no other."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from hybrid_distill.cli.analyze import Experiment
from hybrid_distill.cli.app import main

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/gallery.md").read_text()


@pytest.fixture(scope="module")
def script() -> Any:
    """benchmarks/gallery.py as a module."""
    spec = importlib.util.spec_from_file_location("gallery", ROOT / "benchmarks/gallery.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gallery"] = module
    spec.loader.exec_module(module)
    return module


def commands_of(script: Any, **options: Any) -> dict[str, str]:
    gallery = script.Gallery(**options)
    students = (
        None if options else script.Students(gallery.made / "recurrent", gallery.made / "hybrid")
    )
    return script.experiments(gallery, students)


def test_the_page_gives_the_commands_that_the_script_runs(script: Any) -> None:
    for command in commands_of(script).values():
        assert f"\nhybrid-distill {command}\n" in PAGE
    written = re.findall(r"^hybrid-distill (.*)$", PAGE, re.MULTILINE)
    assert sorted(written) == sorted(commands_of(script).values())


def test_the_page_shows_all_figures_and_they_are_there() -> None:
    shown = re.findall(r"!\[[^\]]+\]\((gallery/[^)]+)\)", PAGE)
    drawn = [
        str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs/gallery").rglob("*.png")
    ]
    assert sorted(shown) == sorted(drawn) and len(shown) == len(set(shown))


def test_the_commands_are_ones_that_the_command_line_knows(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    for experiment in get_args(Experiment):
        kind = get_args(experiment)[0]
        monkeypatch.setattr(kind, "run", lambda self: ran.append(type(self).__name__) or "")
    commands = commands_of(script)
    for command in commands.values():
        main(shlex.split(command))
    assert len(ran) == len(commands)
