"""The kernels compile for AMD's MI300 (gfx942) without a GPU. None has run on one: the test at first use decides."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

ROOT = Path(__file__).parent.parent.parent
SHARED_BYTES = 64 * 1024  # of a compute unit
COMPILE = """
import sys, json
sys.path[:0] = ["kernels", "benchmarks", "."]
from kernel_resources import GPUTarget, compile_for, kernel_modules
modes = {"gpu": "hip", "tf32x3": "ieee"}
found = {}
for compilation in (c for module in kernel_modules() for c in module.compilations(80) if c.name in sys.argv[1:]):
    arguments = {**compilation.arguments, "MODE": modes[compilation.arguments["MODE"]]}
    compiled = compile_for(compilation._replace(arguments=arguments), 80, GPUTarget("hip", "gfx942", 64))
    n_products, binary = compiled.asm["amdgcn"].count("v_mfma"), compiled.asm["hsaco"]
    found[compilation.name] = compiled.metadata.shared, n_products, len(binary)
print(json.dumps(found))
"""


def test_kernels_compile_for_amd() -> None:
    names = [f"ssd {part} N=64 P=64 bfloat16" for part in ("forward", "segments", "backward CBX")]
    names += ["ssd forward N=16 P=16 float32", "ssd forward N=128 P=128 bfloat16"]
    others = ["conv backward K=4", "step N=16 P=64", "loss jsd"]
    command = [sys.executable, "-c", COMPILE, *names, *others]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found) == {*names, *others}
    for name, (shared, matrix_products, binary) in found.items():
        assert shared <= SHARED_BYTES and binary > 0, name
        assert (matrix_products > 0) == name.startswith("ssd"), name
