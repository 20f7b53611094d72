"""One process at a time writes to a folder; the error of a second one names it."""

import errno
import multiprocessing
import os
import signal
import socket
import time
from pathlib import Path

import pytest
from students import only_error
from training import die, killed, small_run

from hybrid_distill import locking
from hybrid_distill.cli.app import main
from hybrid_distill.locking import NOTE, InUse, is_locked, locked
from hybrid_distill.pipeline import RunInputs
from hybrid_distill.pipeline.run import prepare


@pytest.fixture(autouse=True)
def _refused_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locking, "SETTLING", 0.2)


@pytest.mark.parametrize(
    ("command", "place"),
    [
        ("run {recipe} --out {out}", "out"),
        ("sweep {recipe} --out {out} --heads 0 --d-state 4 --seeds 1", "out"),
        ("score --out {out}/scores.json", "out/scores.json"),
        ("prepare-data --tokenizer tiny --sources tiny --out {out}", "out"),
        ("cache-logits {recipe} --distill.teacher-logits {out}", "out"),
        ("evaluate {done} --again", "done"),
        ("evaluate --model tiny --suite kv --limit 1 --out {out}", "out"),
    ],
)
def test_a_second_command_is_told_who_is_at_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, place: str
) -> None:
    paths = {name: tmp_path / name for name in ("recipe", "out", "done")}
    paths["recipe"] = tmp_path / "recipe.py"
    paths["recipe"].write_text("from training import small_run as config\n")
    if place == "done":
        prepare(RunInputs(small_run(paths["done"])))
    words = command.format(**paths).split()
    is_file = place.endswith(".json")
    with locked(tmp_path / place, beside=is_file), pytest.raises(SystemExit, match="2"):
        main(words)
    error = only_error(capsys.readouterr().err)
    for value in (str(tmp_path / place), str(os.getpid()), socket.gethostname()):
        assert value in error
    assert not paths["out"].exists(), "nothing was written but the lock, which is gone"


def test_the_lock_of_a_killed_process_is_taken_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "out"

    def hold_and_die() -> None:
        with locked(out):
            die()

    killed(hold_and_die)
    note = (out / NOTE).read_text()
    assert not is_locked(out)
    with caplog.at_level("INFO", "hybrid_distill"), locked(out):
        assert is_locked(out)
    (message,) = caplog.messages
    assert note in message
    assert not is_locked(out)
    assert not list(out.iterdir())


def test_a_child_that_outlives_a_killed_holder_holds_nothing(tmp_path: Path) -> None:
    def hold_fork_and_die() -> None:
        with locked(tmp_path):
            if os.fork() == 0:
                (tmp_path / "child").write_text(str(os.getpid()))
                time.sleep(60)
                os._exit(0)
            while not (tmp_path / "child").exists() or not (tmp_path / "child").read_text():
                time.sleep(0.01)
            die()

    killed(hold_fork_and_die)
    try:
        with locked(tmp_path):
            pass
    finally:
        os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)


def test_without_locks_of_the_file_system_a_file_is_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_locks(*_: object, **__: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(locking.FileLock, "acquire", without_locks)
    with locked(tmp_path / "out"):
        with (
            pytest.raises(InUse, match=str(os.getpid())),
            locked(tmp_path / "out"),
        ):
            pass
    assert not (tmp_path / "out").exists()


def test_never_two_at_once(tmp_path: Path) -> None:
    count = tmp_path / "count"
    count.write_text("0")

    def add() -> None:
        for _ in range(5):
            with locked(tmp_path, patience=60):
                before = int(count.read_text())
                time.sleep(0.001)
                count.write_text(str(before + 1))

    children = [multiprocessing.get_context("fork").Process(target=add) for _ in range(4)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0] * 4
    assert count.read_text() == "20"
