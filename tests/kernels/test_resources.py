"""Compiled ahead of time, without a GPU: no spills where none are accepted, tensor cores where wanted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "benchmarks" / "kernel_resources.py"
RECORD = ROOT / "benchmarks" / "results" / "kernel_resources.json"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: here triton interprets."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "kernels"), environment.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], env=environment, capture_output=True, text=True, cwd=ROOT
    )


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        ("ssd forward N=16 P=64 bfloat16", 90),
        ("ssd backward CBX N=16 P=16 bfloat16", 80),
    ],
)
def test_a_kernel_compiled_now_keeps_its_promises(name: str, capability: int, tmp_path: Path) -> None:
    done = run("--only", name, "--capability", str(capability), "--out", str(tmp_path / "resources.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    (section,) = json.loads((tmp_path / "resources.json").read_text()).values()
    assert section["ssd_triton"][f"sm_{capability}"][name]["tensor_core_instructions"] > 0


@pytest.mark.parametrize(
    ("resource", "value", "complaint"),
    [
        ("spills", 1000, "1000 spill instructions"),
        ("resident", 1, "1 programs on a multiprocessor"),
        ("shared_bytes", 1 << 18, "shared memory"),
        ("tensor_core_instructions", 0, "tensor-core"),
    ],
)
def test_a_record_that_breaks_a_promise_is_found(resource: str, value: int, complaint: str, tmp_path: Path) -> None:
    name = "ssd forward N=64 P=64 bfloat16"
    record = json.loads(RECORD.read_text())
    record["triton 3.6.0"]["ssd_triton"]["sm_90"][name][resource] = value
    (tmp_path / "resources.json").write_text(json.dumps(record))
    done = run("--check", "--out", str(tmp_path / "resources.json"))
    assert done.returncode == 1
    assert f"sm_90 {name}: " in done.stdout and complaint in done.stdout


def test_every_configuration_on_record_keeps_its_promises() -> None:
    done = run("--check")
    if done.returncode == 3:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr
