"""What compiling ahead of time shows without a GPU: no spills where none are accepted, tensor cores where wanted."""

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


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: here triton interprets."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "kernels"), environment.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], env=environment, capture_output=True, text=True, cwd=ROOT
    )


@pytest.mark.parametrize("name", ["ssd forward N=16 P=64 bfloat16", "ssd backward CBX N=16 P=64 bfloat16"])
def test_a_kernel_compiled_now_keeps_its_promises(name: str, tmp_path: Path) -> None:
    done = run("--only", name, "--capability", "90", "--out", str(tmp_path / "resources.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    (section,) = json.loads((tmp_path / "resources.json").read_text()).values()
    assert section["ssd"]["sm_90"][name]["tensor_core_instructions"] > 0


def test_every_configuration_on_record_keeps_its_promises() -> None:
    done = run("--check")
    if done.returncode == 3:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr
