"""The notebook and the scripts of examples/ run as they are, at smaller sizes."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from messages import has_facts
from students import gate_in_this_process

import hybrid_distill

EXAMPLES = Path(__file__).parents[1] / "examples"
SMALLER = {
    "EXAMPLES = 64": "EXAMPLES = 2",
    "ALIGN_STEPS, DISTILL_STEPS = 60, 30": "ALIGN_STEPS, DISTILL_STEPS = 1, 1",
}


@pytest.mark.launched
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient", reason="pip install nbclient ipykernel")
    pytest.importorskip("ipykernel", reason="pip install nbclient ipykernel")
    import nbformat

    notebook = nbformat.read(EXAMPLES / "heads.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "outputs are not committed"
    for whole, small in SMALLER.items():
        [cell] = [cell for cell in notebook.cells if whole in cell.source]
        cell.source = cell.source.replace(whole, small)
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    resources = {"metadata": {"path": str(tmp_path)}}
    client = nbclient.NotebookClient(notebook, timeout=300, resources=resources)

    client.execute()

    outputs: list[dict] = []
    for cell in notebook.cells:
        outputs += cell.get("outputs", [])
    printed = "".join(output.get("text", "") for output in outputs)
    # Name of a row of the notebook's table.
    assert "six at random" in printed
    assert has_facts(printed, 6, 42)
    figures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(figures) == 3


@pytest.mark.launched
def test_the_scripts_run_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def printed(name: str, *words: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *words])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    assert re.search(r"48 heads.*\n  L2H6 ", printed("rank_heads.py"))
    assert has_facts(printed("build_student.py"), 6, 42)
    student, tokenizer = hybrid_distill.load_student("student")
    assert tokenizer is not None
    assert isinstance(student.lm_head.weight, torch.Tensor)

    pytest.importorskip("trl", reason="pip install 'hybrid-distill[finetune]'")
    pytest.importorskip("peft", reason="pip install 'hybrid-distill[finetune]'")
    gate_in_this_process(monkeypatch, tmp_path / "modules", new_tokens=2)
    (tmp_path / "texts.txt").write_text("The flag of the town is red.\n" * 8)
    assert has_facts(printed("finetune.py", "student", "texts.txt", "tuned", "2"), "tuned")

    # All mixers, and nothing else, were trained.
    tuned, _ = hybrid_distill.load_student("tuned")
    trained = tuned.state_dict()
    changed: set[str] = set()
    for name, tensor in student.state_dict().items():
        if not torch.equal(tensor, trained[name]):
            _, _, part = name.partition(".self_attn.")
            changed.add(part)
    recurrent = {f"ssm.{name}_proj.weight" for name in "xbcza"}
    attention = {f"attention.{name}_proj.weight" for name in "qkv"}
    assert changed == {*recurrent, *attention, "o_proj.weight"}
