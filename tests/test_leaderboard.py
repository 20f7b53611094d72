"""The leaderboard's script: its page has every complete entry, and wrong paths cost nobody ten minutes."""

import importlib
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The script, with records and page of its own."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    script = importlib.import_module("leaderboard")
    shutil.copytree(script.FOLDER, tmp_path / "records")
    monkeypatch.setattr(script, "FOLDER", tmp_path / "records")
    monkeypatch.setattr(script, "PAGE", tmp_path / "leaderboard.md")
    yield script


def test_the_page_is_that_of_the_records(board: ModuleType) -> None:
    board.page()
    assert board.PAGE.read_text() == (ROOT / "docs/leaderboard.md").read_text()


@pytest.mark.parametrize("lost", ["text", "knowledge", "niah_multikey_2 at 2048"])
def test_an_entry_that_was_stopped_is_left_out(board: ModuleType, lost: str) -> None:
    stopped = board.FOLDER / "no-head-window16.json"
    record = json.loads(stopped.read_text())
    del record[lost]
    stopped.write_text(json.dumps(record))
    board.page()
    rows = [line for line in board.PAGE.read_text().splitlines() if line.startswith("| ")]
    assert any(row.startswith("| 3-far-groups-window280 |") for row in rows)
    assert not any(stopped.stem in row for row in rows)


@pytest.mark.parametrize("missing", ["export", "--teacher", "--text"])
def test_a_path_that_is_not_there_changes_nothing(
    board: ModuleType, missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "held_out.jsonl").touch()
    paths = dict.fromkeys(["export", "--teacher", "--text"], str(tmp_path / "there"))
    paths[missing] = str(tmp_path / "nowhere")
    before = {path.name: path.read_bytes() for path in board.FOLDER.iterdir()}
    export = paths.pop("export")
    flags = [part for pair in paths.items() for part in pair]
    monkeypatch.setattr(sys, "argv", ["leaderboard.py", "enter", export, "--name", "mine", *flags])
    with pytest.raises(SystemExit) as ended:
        board.main()
    assert ended.value.code == 2
    assert {path.name: path.read_bytes() for path in board.FOLDER.iterdir()} == before


def test_an_entry_has_the_date_of_its_figures(board: ModuleType) -> None:
    path = board.FOLDER / "no-head-window16.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"date": "2026-01-01"}))
    head = ("what", "device", "versions", "date", "held", "entry")
    measured = {name: value for name, value in record.items() if name not in head}

    def date_after(figures: dict[str, object]) -> str:
        board.enter_measured(path.stem, figures, record["entry"])
        return json.loads(path.read_text())["date"]

    assert date_after({**measured, "another": 1.0}) == "2026-01-01"
    assert date_after({**measured, "knowledge": 0.0}) != "2026-01-01"
