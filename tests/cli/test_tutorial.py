"""The commands of docs/tutorial.md, cut down to seconds, run one after another, and so does its Python."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from students import gate_in_this_process

from hybrid_distill.cli import main

ROOT = Path(__file__).parents[2]
SHORTER = {
    "pairs 16 --examples 64": "pairs 4 --examples 2",
    "examples 64": "examples 2",
    "steps 100": "steps 2",
    "steps 50": "steps 2",
    "pairs 8 16": "pairs 8",
}
ALSO = {
    "score": " --min-accuracy 0 --n-control-texts 2",
    "run": " --evaluation.n-texts 2 --align.batch-size 2 --distill.batch-size 2",
}
"""Flags that spare a command time; two prompts are too few to tell whether the teacher can answer."""


def shortened(command: str) -> list[str]:
    command = command.replace("\\\n", " ")
    for long, short in SHORTER.items():
        command = command.replace(long, short)
    name = command.split()[0]
    return shlex.split(command + ALSO.get(name, ""))


@pytest.mark.slow
def test_the_tutorial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs/tutorial.md").read_text()
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.chdir(tmp_path)
    gate_in_this_process(monkeypatch, tmp_path / "modules", new_tokens=2)
    commands = re.findall(r"```\n\$ hybrid-distill (.*?[^\\])\n", page, re.DOTALL)
    assert [command.split()[0] for command in commands] == [
        "score",
        "memory",
        "run",
        "run",
        "run",
        "verify",
    ]
    for command in commands:
        main(shortened(command))
        assert capsys.readouterr().out, command
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(program, {})
    assert capsys.readouterr().out
