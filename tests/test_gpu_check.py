"""`make gpu-check`: its rows, what it skips and why, and that one bad row does not hide the others."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks" / "gpu_check.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def commands(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The programs that rows would start; each finds its launch's two steps taken."""
    started: list[list[str]] = []

    def record(setting: Any, name: str, *words: str, **options: Any) -> Any:
        started.append([str(word) for word in words])
        if "--out" in words:
            for stage in ("1-align", "2-distill"):
                folder = Path(words[words.index("--out") + 1]) / "stages" / stage
                folder.mkdir(parents=True)
                (folder / "metrics.jsonl").write_text(json.dumps({"step": 1}) + "\n")
        return script.Outcome(script.OK)

    monkeypatch.setattr(script, "program", record)
    return started


def test_without_a_gpu_it_says_so_in_a_line(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_check.py"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as exit_:
        script.main()
    assert exit_.value.code == 2 and len(capsys.readouterr().out.splitlines()) == 1


def test_rows_are_what_a_user_runs(script: ModuleType) -> None:
    names = [row.name for row in script.rows()]
    files = {f"launch/{path.name}" for path in (ROOT / "launch").glob("*.yaml")}
    assert len(names) == len(set(names)) and files and files <= set(names)
    assert {
        "run tiny",
        "verify of run tiny",
        "run tiny in bfloat16",
        "packed attention",
        "kernels",
    } <= set(names)


def test_every_launch_file_takes_its_steps_on_two_gpus(
    script: ModuleType, commands: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "find_spec", lambda name: object())
    outcomes = script.check(script.Setting(tmp_path, False, 2), "launch/")
    assert {outcome.result for outcome in outcomes.values()} == {"ok"}
    started = {}
    for words in commands:
        file = Path(words[words.index("--config_file") + 1]).name
        started[file] = int(words[words.index("--num_processes") + 1])
    files = {path.name for path in (ROOT / "launch").glob("*.yaml")}
    assert started == {file: 1 if file in ("cpu.yaml", "single_gpu.yaml") else 2 for file in files}


def test_what_cannot_run_is_skipped_with_a_reason(
    script: ModuleType, commands: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "find_spec", lambda name: None)
    one = script.check(script.Setting(tmp_path / "one", False, 1), "launch/")
    assert {name for name, outcome in one.items() if outcome.result == "ok"} == {
        "launch/cpu.yaml",
        "launch/single_gpu.yaml",
    }
    two = script.check(script.Setting(tmp_path / "two", False, 2), "launch/")
    skipped = {name: outcome.detail for name, outcome in two.items() if outcome.result == "skipped"}
    assert skipped.keys() == {"launch/zero2.yaml", "launch/zero3.yaml"}
    assert all("deepspeed" in reason for reason in skipped.values())


def test_a_launch_that_takes_no_step_is_wrong(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "program", lambda *args, **options: script.Outcome(script.OK))
    outcome = script.launch("ddp.yaml", script.Setting(tmp_path, False, 2), "launch/ddp.yaml")
    assert outcome.result == "WRONG"


def test_a_run_without_an_export_is_wrong(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "program", lambda *args, **options: script.Outcome(script.OK))
    setting = script.Setting(tmp_path, False, 1)
    outcomes = script.check(setting, "run tiny$")
    assert {outcome.result for outcome in outcomes.values()} == {"WRONG"} and len(outcomes) == 2


def test_one_bad_row_is_named_and_the_others_run(
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def broken(setting: Any, name: str) -> Any:
        raise RuntimeError("no such thing")

    def failing(setting: Any, name: str) -> Any:
        return script.program(setting, name, "-c", "raise ValueError('it is 7')")

    def endless(setting: Any, name: str) -> Any:
        return script.program(setting, name, "-c", "import time; time.sleep(600)", limit=0.2)

    def fine(setting: Any, name: str) -> Any:
        return script.program(setting, name, "-c", "print(3)")

    made = [script.Row(run.__name__, run) for run in (broken, failing, endless, fine)]
    monkeypatch.setattr(script, "rows", lambda: made)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as exit_:
        script.main()
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    results = [lines[name].split()[1] for name in ("broken", "failing", "endless", "fine")]
    assert exit_.value.code == 1 and results == ["WRONG", "WRONG", "WRONG", "ok"]
    assert "no such thing" in lines["broken"] and "it is 7" in lines["failing"]
    assert (tmp_path / "logs" / "fine.log").read_text() == "3\n"


@torch.no_grad()
def test_packed_attention_is_compared_and_a_mistake_is_found(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hybrid_distill.model import document_kernels

    monkeypatch.setattr(
        document_kernels,
        "compiled_flex_attention",
        lambda: torch.nn.attention.flex_attention.flex_attention,
    )
    assert "flex out float32" in script.compare_attention("cpu")

    def wrong(*heads: Any, **options: Any) -> Any:
        return torch.nn.attention.flex_attention.flex_attention(
            *heads, **{**options, "block_mask": None}
        )

    monkeypatch.setattr(document_kernels, "compiled_flex_attention", lambda: wrong)
    with pytest.raises(SystemExit, match="out float32"):
        script.compare_attention("cpu")


@pytest.mark.launched
def test_a_rehearsal_runs_without_pytest(tmp_path: Path) -> None:
    rows = "^(run tiny|verify of run tiny|launch/ddp.*|kernels)$"
    (tmp_path / "pytest.py").write_text("raise ImportError('pytest is not installed')\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT), str(ROOT / "kernels")])
    command = [
        sys.executable,
        str(SCRIPT),
        "--rehearse",
        "--only",
        rows,
        "--out",
        str(tmp_path / "out"),
    ]
    ran = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "4 ok, 0 WRONG, 0 skipped" in ran.stdout
