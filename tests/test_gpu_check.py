"""`make gpu-check`: its rows, what it skips and why; one bad row does not hide the others."""

import importlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
LAUNCH_FILES = {path.name for path in (ROOT / "launch").glob("*.yaml")}
ONE_PROCESS = {"cpu.yaml", "single_gpu.yaml"}


def import_script(name: str) -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield importlib.import_module(name)


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    yield from import_script("gpu_check")


@pytest.fixture(scope="module")
def attention() -> Iterator[ModuleType]:
    yield from import_script("gpu_attention")


@pytest.fixture
def commands(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Record the programs that rows would start; each launch leaves the metrics of two steps."""
    started: list[list[str]] = []

    def record(setting: Any, name: str, *words: str, **options: Any) -> Any:
        started.append(list(words))
        out = Path(value_of("--out", words))
        for stage in ("1-align", "2-distill"):
            folder = out / "stages" / stage
            folder.mkdir(parents=True)
            (folder / "metrics.jsonl").write_text(json.dumps({"step": 1}) + "\n")
        return script.Outcome(script.OK)

    monkeypatch.setattr(script, "program", record)
    return started


@pytest.fixture
def idle(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs do nothing, and say that all went well."""
    monkeypatch.setattr(script, "program", lambda *args, **options: script.Outcome(script.OK))


def value_of(flag: str, words: Sequence[str]) -> str:
    """Return the word behind a flag."""
    return words[words.index(flag) + 1]


def named(script: ModuleType, outcomes: dict[str, Any], result: str) -> set[str]:
    """Return the launch files whose rows have this result."""
    names = {name for name, outcome in outcomes.items() if outcome.result == result}
    return {name.removeprefix("launch/") for name in names}


def test_without_a_gpu_it_says_so_in_a_line(script, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_check.py"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        script.main()
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_rows_are_what_a_user_runs(script: ModuleType) -> None:
    names = [row.name for row in script.rows()]
    runs = {"run tiny", "run tiny in bfloat16", "run tiny, windows", "recipe at its real size"}
    launches = {f"launch/{name}" for name in LAUNCH_FILES}
    assert len(names) == len(set(names))
    assert LAUNCH_FILES
    assert launches | runs | {"packed attention", "kernels", "kernel times"} <= set(names)


@pytest.mark.parametrize("n_gpus", [1, 2])
def test_every_launch_file_takes_its_steps_on_the_gpus_there_are(
    n_gpus, script, commands, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(script, "find_spec", lambda name: object())

    outcomes = script.check(script.Setting(tmp_path, False, n_gpus), "launch/")

    assert named(script, outcomes, "ok") == LAUNCH_FILES
    n_processes: dict[str, int] = {}
    for words in commands:
        file = Path(value_of("--config_file", words)).name
        n_processes[file] = int(value_of("--num_processes", words))
    assert n_processes.keys() == LAUNCH_FILES
    for file, number in n_processes.items():
        assert number == (1 if file in ONE_PROCESS else n_gpus)


def test_what_cannot_run_is_skipped_with_a_reason(script, commands, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(script, "find_spec", lambda name: None)

    outcomes = script.check(script.Setting(tmp_path, False, 2), "launch/")

    assert named(script, outcomes, "skipped") == {"zero2.yaml", "zero3.yaml"}
    assert "deepspeed" in outcomes["launch/zero2.yaml"].detail


def test_rows_that_measure_time_run_alone_and_last(script, tmp_path, monkeypatch) -> None:
    running: set[str] = set()
    beside: dict[str, set[str]] = {}
    # The two checks wait for each other: one after the other they would never end.
    both_checks = threading.Barrier(2, timeout=30)

    def run(setting: Any, name: str) -> Any:
        running.add(name)
        if not name.startswith("time"):
            both_checks.wait()
        beside[name] = set(running)
        running.discard(name)
        return script.Outcome(script.OK)

    names = ("time one", "check one", "check two", "time two")
    rows = [script.Row(name, run, alone=name.startswith("time")) for name in names]
    monkeypatch.setattr(script, "rows", lambda: rows)

    script.check(script.Setting(tmp_path, False, 1))

    assert list(beside)[2:] == ["time one", "time two"]
    for name in ("time one", "time two"):
        assert beside[name] == {name}


@pytest.mark.parametrize("row", ["launch/ddp.yaml", "run tiny"])
def test_a_row_that_leaves_nothing_is_wrong(script, idle, tmp_path, row) -> None:
    outcomes = script.check(script.Setting(tmp_path, False, 2), f"^{row}$")
    assert outcomes[row].result == "WRONG"


def test_one_bad_row_is_named_and_the_others_run(script, tmp_path, monkeypatch, capsys) -> None:
    def broken(setting: Any, name: str) -> Any:
        raise RuntimeError("no such thing")

    def failing(setting: Any, name: str) -> Any:
        return script.program(setting, name, "-c", "raise ValueError('it is 7')")

    def endless(setting: Any, name: str) -> Any:
        return script.program(setting, name, "-c", "import time; time.sleep(600)", limit=0.2)

    def fine(setting: Any, name: str) -> Any:
        return script.program(setting, name, "-c", "print(3)")

    rows = [script.Row(run.__name__, run) for run in (broken, failing, endless, fine)]
    monkeypatch.setattr(script, "rows", lambda: rows)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--out", str(tmp_path)])

    with pytest.raises(SystemExit, match="1"):
        script.main()

    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    results = [lines[row.name].split()[1] for row in rows]
    assert results == ["WRONG", "WRONG", "WRONG", "ok"]
    assert "no such thing" in lines["broken"]
    assert "it is 7" in lines["failing"]
    assert (tmp_path / "logs" / "fine.log").read_text() == "3\n"


@pytest.mark.parametrize("row", ["kernels", "kernel times"])
def test_kernels_are_checked_on_this_device_whatever_the_committed_record_says(
    row, script, monkeypatch, tmp_path
) -> None:
    started = []

    def record(setting: Any, name: str, *words: str, **options: Any) -> Any:
        started.append(words)
        return script.Outcome(script.OK)

    monkeypatch.setattr(script, "program", record)
    script.check(script.Setting(tmp_path, False, 1), only=f"^{row}$")

    (words,) = started
    assert value_of("--out", words) == str(tmp_path / "gpu_kernels.json")


def test_a_kernel_that_was_wrong_is_checked_again(monkeypatch, tmp_path) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    (kernels,) = import_script("gpu_kernels")
    monkeypatch.setattr(kernels, "DEVICE", "cpu")
    monkeypatch.setattr(kernels, "conditions", lambda: {"device": "this"})
    out = tmp_path / "gpu_kernels.json"
    cases = {"right": {"ok": True}, "wrong": {"ok": False, "error": "ValueError: 7"}}
    parts = {"cases": cases, "steps": {}, "times": {}, "peers": {}}
    out.write_text(json.dumps({"device": "this"} | parts))
    known = []
    monkeypatch.setattr(kernels, "run_checks", lambda record, *rest: known.extend(record["cases"]))
    monkeypatch.setattr(sys, "argv", ["gpu_kernels.py", "--work", "checks", "--out", str(out)])

    with pytest.raises(SystemExit, match="0"):
        kernels.main()
    assert known == ["right"]


@torch.no_grad()
def test_packed_attention_is_compared_and_a_mistake_is_found(attention, monkeypatch) -> None:
    from hybrid_distill.model import document_kernels

    flex_attention = torch.nn.attention.flex_attention.flex_attention
    monkeypatch.setattr(document_kernels, "compiled_flex_attention", lambda: flex_attention)
    errors = attention.compare("cpu")
    assert "flex out float32" in errors
    assert not attention.wrong(errors)

    def without_mask(*heads: Any, **options: Any) -> Any:
        return flex_attention(*heads, **{**options, "block_mask": None})

    monkeypatch.setattr(document_kernels, "compiled_flex_attention", lambda: without_mask)
    errors = attention.compare("cpu")
    assert "flex out float32" in attention.wrong(errors)


@pytest.mark.launched
def test_a_rehearsal_runs_without_pytest(tmp_path: Path) -> None:
    (tmp_path / "pytest.py").write_text("raise ImportError('pytest is not installed')\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_check.py"), "--rehearse"]
    command += ["--only", "^(run tiny|kernels)$"]
    command += ["--out", str(tmp_path / "out")]

    ran = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )

    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "2 ok, 0 WRONG, 0 skipped" in ran.stdout
