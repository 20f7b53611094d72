"""One process at a time in a folder: others are told who it is, and a killed one holds nothing."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from training import free_port, killed, small_run

from hybrid_distill import locking
from hybrid_distill.cli.app import main
from hybrid_distill.locking import LOCK, Holder, InUse, is_locked, locked
from hybrid_distill.pipeline import run

RECIPE = "from training import small_run as config\n"


def record(place: Path, **changes: object) -> None:
    """Leave the lock file of another process."""
    place.mkdir(exist_ok=True)
    (place / LOCK).write_text(json.dumps({**vars(replace(Holder.this(), **changes))}))  # type: ignore[arg-type]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    "command",
    [
        "run {recipe} --out {out}",
        "demo --recipe {recipe} --out {out}",
        "sweep --recipe {recipe} --out {out} --heads 0 --d-state 4 --seeds 1",
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
        run(small_run(done))
    files = {"score": (out / "scores.json", True), "evaluate {": (done, False)}
    place, beside = next((found for word, found in files.items() if command.startswith(word)), (out, False))
    with locked(place, beside=beside), pytest.raises(SystemExit) as exit_:
        main(command.format(recipe=recipe, out=out, done=done).split())
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert exit_.value.code == 2 and len(said) == 1
    assert f"{place} is in use by process {os.getpid()} on {socket.gethostname()}" in said[0]
    assert not out.exists(), "nothing was written but the lock, which is gone"


def test_the_lock_of_a_killed_process_is_taken_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def hold_and_die() -> None:
        with locked(tmp_path / "out"):
            die()

    killed(hold_and_die)
    left = Holder(**json.loads((tmp_path / "out" / LOCK).read_text()))
    assert not is_locked(tmp_path / "out")
    with caplog.at_level("INFO"), locked(tmp_path / "out"):
        assert is_locked(tmp_path / "out")
    assert [f"left by process {left.pid} on {left.host}" in message for message in caplog.messages] == [True]
    assert not is_locked(tmp_path / "out") and not (tmp_path / "out" / LOCK).exists()


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


def without_locks(*_: object) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({}, True),
        ({"started": 1.0}, False),  # another process has the pid now
        ({"pid": 2**22 + 1}, False),  # above the kernel's largest
        ({"host": "elsewhere"}, True),
    ],
)
def test_without_locks_of_the_file_system_the_process_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], refused: bool
) -> None:
    monkeypatch.setattr(locking.fcntl, "flock", without_locks)
    record(tmp_path, **changes)
    if not refused:
        with locked(tmp_path):
            return
    with pytest.raises(InUse) as error, locked(tmp_path):
        pass
    assert (f"remove {tmp_path / LOCK} if that process is gone" in str(error.value)) == ("host" in changes)


def test_another_hosts_lock_counts_where_its_locks_cannot_be_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(tmp_path, host="elsewhere")
    monkeypatch.setattr(locking, "_kept_to_one_host", lambda path: True)
    with pytest.raises(InUse, match=r"on elsewhere .* or remove .*\.lock if that process is gone"), locked(tmp_path):
        pass
    monkeypatch.setattr(locking, "_kept_to_one_host", lambda path: False)
    with locked(tmp_path):
        pass


def in_children(n: int, action: Callable[[], None]) -> None:
    """Run ``action`` in so many processes at once, all of which must end well."""
    children = []
    for _ in range(n):
        if (child := os.fork()) == 0:
            status = 1
            try:
                action()
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * n


def test_never_two_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locking, "POLL", 0.001)
    count = tmp_path / "count"
    count.write_text("0")

    def add() -> None:
        for _ in range(20):
            with locked(tmp_path, patience=60):
                before = int(count.read_text())
                time.sleep(0.001)
                count.write_text(str(before + 1))

    in_children(4, add)
    assert count.read_text() == "80"


@pytest.mark.launched
def test_of_launched_processes_one_says_why(tmp_path: Path) -> None:
    (tmp_path / "recipe.py").write_text(RECIPE)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    command += ["--main_process_port", str(free_port()), "-m", "hybrid_distill"]
    command += ["run", str(tmp_path / "recipe.py"), "--out", str(tmp_path / "run")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    with locked(tmp_path / "run"):
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    said = [line for line in ended.stderr.splitlines() if line.startswith("error")]
    assert ended.returncode != 0 and len(said) == 1, ended.stderr
    assert f"in use by process {os.getpid()} on" in said[0]
    assert not (tmp_path / "run").exists()
