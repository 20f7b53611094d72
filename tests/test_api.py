"""The public names, and the example of docs/api.md."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from students import gate_in_this_process

import hybrid_distill

ROOT = Path(__file__).parents[1]


def test_the_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/api.md").read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    gate_in_this_process(monkeypatch, tmp_path / "modules", new_tokens=2)
    exec(blocks[0], {})
    printed = capsys.readouterr().out
    assert "kept: L" in printed
    assert "retrieval by choice: " in printed
    assert (tmp_path / "student/config.json").is_file()
    compile(blocks[1], "docs/api.md", "exec")


def test_every_public_name_is_there_and_documented() -> None:
    page = (ROOT / "docs/api.md").read_text()
    for name in hybrid_distill.__all__:
        assert getattr(hybrid_distill, name) is getattr(hybrid_distill, name)
        assert name == "__version__" or f"`{name}" in page, name
    assert set(hybrid_distill.__all__) <= set(dir(hybrid_distill))
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = hybrid_distill.no_such_name


def test_importing_the_package_loads_no_library() -> None:
    heavy = {"torch", "transformers", "tyro", "numpy"}
    code = f"import sys, hybrid_distill; sys.exit(bool({heavy} & set(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, env=environment, timeout=60).returncode == 0
