"""One process at a time writes to a folder; the error of a second one names it; a killed one holds nothing."""

import errno
import multiprocessing
import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest
from test_launch import DDP, launch
from training import die, killed, small_run

from hybrid_distill import locking
from hybrid_distill.cli.app import main
from hybrid_distill.locking import NOTE, InUse, is_locked, locked
from hybrid_distill.pipeline import RunInputs
from hybrid_distill.pipeline.run import prepare

RECIPE = "from training import small_run as config\n"


@pytest.fixture(autouse=True)
def _refused_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locking, "SETTLING", 0.2)


@pytest.mark.parametrize(
    "command",
    [
        "run {recipe} --out {out}",
        "sweep {recipe} --out {out} --heads 0 --d-state 4 --seeds 1",
        "score --out {out}/scores.json",
        "prepare-data --tokenizer tiny --sources tiny --out {out}",
        "cache-logits {recipe} --distill.teacher-logits {out}",
        "evaluate {done} --again",
        "evaluate --model tiny --suite kv --limit 1 --out {out}",
    ],
)
def test_a_second_command_is_told_who_is_at_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    recipe, out, done = tmp_path / "recipe.py", tmp_path / "out", tmp_path / "done"
    recipe.write_text(RECIPE)
    if "{done}" in command:
        prepare(RunInputs(small_run(done)))
    files = {"score": (out / "scores.json", True), "evaluate {": (done, False)}
    place, beside = next(
        (found for word, found in files.items() if command.startswith(word)), (out, False)
    )
    with locked(place, beside=beside), pytest.raises(SystemExit) as exit_:
        main(command.format(recipe=recipe, out=out, done=done).split())
    said = [
        line for line in capsys.readouterr().err.splitlines() if line.startswith("error")
    ]
    assert exit_.value.code == 2 and len(said) == 1
    assert (
        f"{place} is in use by process {os.getpid()} on {socket.gethostname()}" in said[0]
    )
    assert not out.exists(), "nothing was written but the lock, which is gone"


def test_the_lock_of_a_killed_process_is_taken_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def hold_and_die() -> None:
        with locked(tmp_path / "out"):
            die()

    killed(hold_and_die)
    left = (tmp_path / "out" / NOTE).read_text()
    assert not is_locked(tmp_path / "out")
    with caplog.at_level("INFO", "hybrid_distill"), locked(tmp_path / "out"):
        assert is_locked(tmp_path / "out")
    assert [f"left by {left}" in message for message in caplog.messages] == [True]
    assert not is_locked(tmp_path / "out") and not list((tmp_path / "out").iterdir())


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
            pytest.raises(InUse, match=f"in use by process {os.getpid()} on"),
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


@pytest.mark.launched
def test_of_launched_processes_one_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipe.py").write_text(RECIPE)
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *sys.path])
    )
    words = ("run", tmp_path / "recipe.py", "--out", tmp_path / "run")
    with locked(tmp_path / "run"):
        ended = launch((*DDP, "-m"), *words, program=Path("hybrid_distill"))
    said = [line for line in ended.stderr.splitlines() if line.startswith("error")]
    assert ended.returncode != 0 and len(said) == 1, ended.stderr
    assert f"in use by process {os.getpid()} on" in said[0]
    assert not (tmp_path / "run").exists()
