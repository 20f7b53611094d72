"""Formats for other programs: refused, recorded, checked only where the program is."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import make_family_model
from messages import has_facts, naming
from students import byte_tokenizer, gate_in_this_process, only_error, tiny_student

from hybrid_distill.cli.app import main
from hybrid_distill.export import ExportError, check, export_checkpoint, verify_export
from hybrid_distill.export.check import PACKAGES, Prompts, greedy, load_program, run_checks, table
from hybrid_distill.export.formats import FORMATS, check_expressible
from hybrid_distill.export.programs import PROGRAMS
from hybrid_distill.model import HybridForCausalLM
from hybrid_distill.plan import HeadPlan
from hybrid_distill.student.build import build_student
from hybrid_distill.teacher import load_teacher

RECURRENCE = {
    "onnx": "discrete",
    "vllm": "mamba2",
    "gguf": "mamba2-stock",
    "mlx": "mamba2-stock",
}


def student_for(export_format: str) -> tuple[HybridForCausalLM, HeadPlan]:
    """Build a student with heads of a width that every program takes, and our vocabulary."""
    teacher = make_family_model("llama", vocab_size=1900, head_dim=32)
    plan = HeadPlan.from_pairs(teacher, [(0, 1), (1, 2), (1, 3), (1, 7)])
    student, _ = build_student(teacher, plan, d_state=16, recurrence=RECURRENCE[export_format])
    return student, plan


def test_every_format_for_another_program_has_that_program() -> None:
    for_programs = {name for name, format in FORMATS.items() if format.is_for_other_program}
    assert PACKAGES.keys() == for_programs
    assert PROGRAMS.keys() == for_programs
    assert RECURRENCE.keys() == for_programs
    for export_format in PACKAGES:
        program = load_program(export_format)
        assert program.__name__ == PROGRAMS[export_format].__name__


@pytest.mark.parametrize("family", ["gpt_neox", "gemma2"])
def test_a_student_that_a_program_cannot_run_is_refused_before_anything_is_written(
    family: str, tmp_path: Path
) -> None:
    student, plan = tiny_student(family)
    for export_format in FORMATS.keys() - {"remote-code", "safetensors"}:
        with pytest.raises(ValueError, match=naming(export_format, family)):
            export_checkpoint(
                student,
                byte_tokenizer(),
                tmp_path / "export",
                plan=plan,
                export_format=export_format,
            )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("export_format", ["gguf", "onnx"])
def test_a_format_whose_package_is_absent_names_the_extra(
    export_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybrid_distill.export.formats.find_spec", lambda name: None)
    student, _ = student_for(export_format)
    with pytest.raises(ValueError, match=rf"hybrid-distill\[{export_format}\]"):
        check_expressible(student, export_format)


def test_without_the_program_files_are_checked_and_nothing_else(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setitem(check.PACKAGES, "vllm", "no_such_program")
    student, plan = student_for("vllm")
    _, tokenizer = load_teacher("tiny")
    path = tmp_path / "export"

    report = export_checkpoint(student, tokenizer, path, plan=plan, export_format="vllm")
    assert report.checks == ()
    assert "no_such_program" in caplog.text
    assert not (path / "gate" / "report.json").exists()

    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main(["verify", str(path)])
    assert end.value.code == 2
    assert "no_such_program" in only_error(capsys.readouterr().err)

    weights = max(path.iterdir(), key=lambda file: file.stat().st_size)
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(ExportError, match=naming(path, weights.name)):
        verify_export(path)

    weights.unlink()
    with pytest.raises(ExportError, match=naming(path, weights.name)):
        verify_export(path)


@pytest.mark.parametrize("fault", [None, "logits", "tokens"])
def test_a_program_that_computes_something_else_fails(
    fault: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_new = 6
    student, _ = tiny_student("llama")
    ids = [torch.randint(5, 300, (length,)) for length in (1, 9)]
    id_lists = [ids_L.tolist() for ids_L in ids]
    prompts = Prompts(torch.arange(300), ids, [], [], [])
    for ids_L in ids:
        continued = greedy(student, ids_L[None], None, n_new)
        prompts.logits.append(student(ids_L[None]).logits[0].detach())
        prompts.generated.append(continued.tokens_BT[0])
        prompts.leads.append(continued.leads_BT[0] + 1)  # no token is within rounding

    class Answers:
        """The student's own answers, but for the fault."""

        def __init__(self, folder: Path, longest: int) -> None:
            assert longest == 9 + n_new

        def logits(self, prompt: Sequence[int]) -> np.ndarray:
            place = id_lists.index(list(prompt))
            error = 0.01 * prompts.scale if fault == "logits" else 0.0
            return prompts.logits[place].numpy() + error

        def generate(self, tokens: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
            assert new_tokens == n_new
            assert tokens == id_lists
            error = 1 if fault == "tokens" else 0
            return [(tokens_T + error).tolist() for tokens_T in prompts.generated]

    monkeypatch.setattr(check, "load_program", {"onnx": Answers}.get)
    record = {"export_format": "onnx", "rounding": {"float32": 0.0}}

    of_logits, of_tokens = check.check_program(Path(), record, prompts)

    assert of_logits.ok == (fault != "logits"), table([of_logits])
    assert of_tokens.ok == (fault != "tokens"), table([of_tokens])


@pytest.mark.launched
@pytest.mark.parametrize("export_format", PACKAGES)
def test_a_program_computes_what_the_student_computes(
    export_format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in (FORMATS[export_format].written_with, PACKAGES[export_format]):
        if package is not None and find_spec(package) is None:
            pytest.skip(f"{package} is not installed here (make test-serving)")
    gate_in_this_process(monkeypatch, tmp_path / "modules")
    student, plan = student_for(export_format)
    _, tokenizer = load_teacher("tiny")
    path = tmp_path / "export"

    report = export_checkpoint(student, tokenizer, path, plan=plan, export_format=export_format)
    assert report.ok
    assert has_facts(report.table(), PACKAGES[export_format])
    assert verify_export(path).ok

    (path / "extra.py").write_text("")
    # The device is that of models: programs choose their own.
    checks = run_checks(path, path / "gate", device="meta")
    assert [one.detail for one in checks if not one.ok] == ["extra.py is unknown"]
