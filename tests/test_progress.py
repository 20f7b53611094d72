"""Progress: a moving line on a terminal, plain lines elsewhere, nothing when asked for."""

import io
import re
import sys

import pytest

from hybrid_distill import progress
from hybrid_distill.progress import Phase, track


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that have gone; every phase begins with lines."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(progress, "quiet", False)
    return now


def work(clock: list[float]) -> None:
    """100 steps of a second each, resumed after 40."""
    with Phase("align", 100, done=40, unit="steps") as phase:
        for step in range(60):
            clock[0] += 1.0
            phase.note = f"loss {step}"
            phase.update()


def test_plain_lines_come_seldom_and_last_at_the_end(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    work(clock)
    shown = capsys.readouterr()
    assert shown.err.splitlines() == [
        "align: 60 of 100 steps, 0:40 left, loss 19",
        "align: 80 of 100 steps, 0:20 left, loss 39",
        "align: 100 of 100 steps, 0:00 left, loss 59",
        "align: 100 of 100 steps, in 1:00, loss 59",
    ]
    assert not shown.out


def test_a_slow_first_step_is_not_taken_for_the_others(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with Phase("distill", 20, unit="steps", slow_start=True) as phase:
        for seconds in (100.0, *[10.0] * 19):
            clock[0] += seconds
            phase.update()
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["distill: 1 of 20 steps", "distill: 3 of 20 steps, 2:50 left"]
    assert lines[-1] == "distill: 20 of 20 steps, in 4:50"


def test_a_phase_says_what_it_waits_for(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with Phase("measuring the student"):
        for _ in track(range(4), "plain text"):
            clock[0] += 4000.0
    assert capsys.readouterr().err.splitlines()[1:4] == [
        "measuring the student: plain text 2 of 4, 2:13:20 left",
        "measuring the student: plain text 3 of 4, 1:06:40 left",
        # What follows it may take long.
        "measuring the student: plain text 4 of 4",
    ]


def test_quick_quiet_hidden_and_unfinished_phases_have_no_line(
    clock: list[float], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in track(range(3), "quick"):
        clock[0] += 0.1
    with pytest.raises(KeyboardInterrupt), Phase("stopped"):
        clock[0] += 5
        raise KeyboardInterrupt
    for _ in track(range(3), "hidden", hidden=True):
        clock[0] += 60
    monkeypatch.setenv("RANK", "1")
    work(clock)
    monkeypatch.delenv("RANK")
    monkeypatch.setattr(progress, "quiet", True)
    work(clock)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == ""
    assert progress._open == []


def test_a_terminal_gets_one_line_a_phase(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setenv("COLUMNS", "100")

    work(clock)

    # What is left on the screen: behind the last return to the beginning of the line, without colors.
    _, _, last = shown.getvalue().rpartition("\r")
    text = re.sub(r"\x1b\[[\d;?]*\w", "", last)
    (line,) = [line for line in text.split("\n") if line]
    assert re.fullmatch("align ━+ 100 of 100 steps, in 1:00, loss 59 *", line)
