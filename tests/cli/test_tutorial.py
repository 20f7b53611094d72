"""The commands of docs/tutorial.md, cut down to seconds, print what the page shows, other numbers apart."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from students import gate_in_this_process

from hybrid_distill.cli import main

ROOT = Path(__file__).parents[2]
SHORTER = {"examples 64": "examples 4", "steps 100": "steps 2", "steps 50": "steps 2", "pairs 8 16": "pairs 8"}
FEWER = " --evaluation.n-texts 2"
NUMBER = r"(?<![\w.])[-+−]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?"


def shape(text: str) -> str:
    """The words of a text, with # for numbers and heads, without warnings; what is repeated in a row counts once."""
    text = re.sub(r"(?s)warning:.*?elsewhere\.", "", text)
    text = re.sub(r"\s+(± #|yes\b)", "", re.sub(r"L\d+H\d+", "#", re.sub(NUMBER, "#", text)))
    words = " ".join(re.sub(r"#(?:\s*[,/]?\s*#)*,?", "#", text).split())
    return re.sub(r"((?:\S+ ){1,12}?)\1+", r"\1", f"{words} ")


@pytest.mark.slow
def test_the_tutorial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs/tutorial.md").read_text()
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.chdir(tmp_path)
    gate_in_this_process(monkeypatch, tmp_path / "modules")
    shown = re.findall(r"```\n\$ hybrid-distill (.*?[^\\])\n(.*?)```", page, re.DOTALL)
    assert [command.split()[0] for command, _ in shown] == ["score", "memory", "run", "run", "run", "verify"]
    for command, printed in shown:
        short = re.sub("|".join(SHORTER), lambda found: SHORTER[found[0]], command.replace("\\\n", " "))
        main(shlex.split(short + FEWER * short.startswith("run") + " --min-accuracy 0" * short.startswith("score")))
        found = shape(capsys.readouterr().out)
        for part in re.split(r"\.\.\.(?: \(.*?\))?", printed.replace(" \\\n", "\n")):
            assert shape(part).strip() in found.replace(shape(FEWER), ""), (command, shape(part), found)
    exec(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0], {})
    answer = re.findall(r"It prints:\n\n```\n(.*?)```", page, re.DOTALL)[0]
    assert capsys.readouterr().out.startswith(answer.rpartition(" ")[0])
