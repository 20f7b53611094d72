"""Forms for other programs: refused with the reason, recorded, checked where the program is, and only there."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import make_family_model
from students import byte_tokenizer, gate_in_this_process, only_error, tiny_student

from hybrid_distill.cli.app import main
from hybrid_distill.export import ExportError, check, export_checkpoint, verify_export
from hybrid_distill.export.check import PACKAGES, Prompts, greedy, load_program, run_checks, table
from hybrid_distill.export.engines import WRITTEN_WITH, writer
from hybrid_distill.export.programs import PROGRAMS, Program
from hybrid_distill.model import HybridForCausalLM
from hybrid_distill.plan import HeadPlan
from hybrid_distill.student.build import build_student
from hybrid_distill.teacher import load_teacher

RECURRENCE = {"onnx": "discrete", "vllm": "mamba2", "gguf": "mamba2-stock", "mlx": "mamba2-stock"}


def student_for(form: str) -> tuple[HybridForCausalLM, HeadPlan]:
    """Build a student with heads as wide as every program takes them, and the embedded teacher's vocabulary."""
    teacher = make_family_model("llama", vocab_size=1900, head_dim=32)
    plan = HeadPlan.from_pairs(teacher, [(0, 1), (1, 2), (1, 3), (1, 7)])
    return build_student(teacher, plan, d_state=16, recurrence=RECURRENCE[form])[0], plan


def test_every_form_has_a_writer_and_a_program() -> None:
    assert WRITTEN_WITH.keys() - {"falcon-h1"} == PACKAGES.keys() == PROGRAMS.keys() == RECURRENCE.keys()
    assert all(load_program(form).__name__ == PROGRAMS[form].__name__ for form in PACKAGES)


@pytest.mark.parametrize("family", ["gpt_neox", "gemma2"])
def test_a_student_that_a_program_cannot_run_is_refused_before_anything_is_written(family: str, tmp_path: Path) -> None:
    student, plan = tiny_student(family)
    for form in WRITTEN_WITH:
        with pytest.raises(ValueError, match=rf"exported as {form}: .*its backbone is {family}.*\. Export it as"):
            export_checkpoint(student, byte_tokenizer(), tmp_path / "export", plan=plan, form=form)
    assert list(tmp_path.iterdir()) == []


def test_a_form_whose_packages_are_absent_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybrid_distill.export.engines.find_spec", lambda name: None)
    for form in ("gguf", "onnx"):
        with pytest.raises(ValueError, match=rf"not installed; pip install 'hybrid-distill\[{form}\]'"):
            writer(form, student_for(form)[0])


def test_without_the_program_files_are_checked_and_nothing_else(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setitem(check.PACKAGES, "vllm", "no_such_program")
    student, plan = student_for("vllm")
    path = tmp_path / "export"
    assert export_checkpoint(student, load_teacher("tiny")[1], path, plan=plan, form="vllm").checks == ()
    assert "was not checked: no_such_program" in caplog.text and not (path / "gate" / "report.json").exists()
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main(["verify", str(path)])
    assert end.value.code == 2
    assert "no_such_program, which runs it, is not installed here (pip" in only_error(capsys.readouterr().err)
    weights = max(path.iterdir(), key=lambda file: file.stat().st_size)
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(ExportError, match=rf"has changed since its export: .*{weights.name} has changed"):
        verify_export(path)
    weights.unlink()
    with pytest.raises(ExportError, match=rf"{weights.name} is missing"):
        verify_export(path)


@pytest.mark.parametrize("fault", [None, "logits", "tokens"])
def test_a_program_that_computes_something_else_fails(fault: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    student, _ = tiny_student("llama")
    ids = [torch.randint(5, 300, (length,)) for length in (1, 9)]
    out = [greedy(student, ids_L[None], None, 6) for ids_L in ids]
    logits = [student(ids_L[None]).logits[0].detach() for ids_L in ids]
    prompts = Prompts(torch.arange(300), ids, logits, [o.tokens_BT[0] for o in out], [o.leads_BT[0] + 1 for o in out])

    class Answers(Program):
        def __init__(self, folder: Path, context: int) -> None:
            assert context == 9 + 6

        def logits(self, prompt: Sequence[int]) -> np.ndarray:
            row = next(row for row, ids_L in zip(logits, ids) if ids_L.tolist() == list(prompt))
            return row.numpy() + 0.01 * prompts.scale * (fault == "logits")

        def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
            assert new_tokens == 6 and prompts == [ids_L.tolist() for ids_L in ids]
            return [(o.tokens_BT[0] + (fault == "tokens")).tolist() for o in out]

    monkeypatch.setattr(check, "load_program", {"onnx": Answers}.get)
    record = {"form": "onnx", "computes": "float32", "rounding": 0.0}
    found = list(check.check_program(Path(), record, prompts))
    assert [one.ok for one in found] == [fault != "logits", fault != "tokens"], table(found)


@pytest.mark.launched
@pytest.mark.parametrize("form", PACKAGES)
def test_a_program_computes_what_the_student_computes(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if absent := [name for name in (WRITTEN_WITH[form], PACKAGES[form]) if name and find_spec(name) is None]:
        pytest.skip(f"{', '.join(absent)} is not installed here (make test-serving)")
    gate_in_this_process(monkeypatch, tmp_path / "modules")
    student, plan = student_for(form)
    path = tmp_path / "export"
    report = export_checkpoint(student, load_teacher("tiny")[1], path, plan=plan, form=form)
    assert report.ok and f"generated tokens, {PACKAGES[form]}" in report.table()
    assert verify_export(path).ok
    (path / "extra.py").write_text("")
    checks = run_checks(path, path / "gate", device="meta")  # of models: programs choose their own
    assert [one.detail for one in checks if not one.ok] == ["extra.py is unknown"]
