"""A student in ONNX computes what the student does: from its states, and beside padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_family_model
from messages import naming
from students import keep, mixed_student
from test_falcon_h1 import KEPT, random_ids, stirred, student_keeping
from training import spaced_tokenizer

from hybrid_distill.export import export_checkpoint
from hybrid_distill.export.onnx import obstacles, write
from hybrid_distill.model import HybridForCausalLM
from hybrid_distill.plan import HeadPlan
from hybrid_distill.student.build import build_student
from hybrid_distill.teacher import load_teacher

pytest.importorskip("onnxscript", reason="onnxscript, which writes ONNX, is not installed")
pytest.importorskip(
    "onnxruntime", minversion="1.30", reason="ONNX Runtime 1.30, which runs it, is not installed"
)
from hybrid_distill.export import onnx_generate
from hybrid_distill.export.onnx_generate import Session, generate

TOLERANCE = 1e-5  # relative to the largest logit


def written(student: HybridForCausalLM, folder: Path) -> Session:
    """Write a student and open it, without tokens that end its text."""
    write(student, None, folder, "2GB")
    session = Session(folder, threads=1)
    session.ends = []
    return session


def continued(student: HybridForCausalLM, ids_L: torch.Tensor, n_tokens: int) -> list[int]:
    """Return the student's own greedy tokens."""
    whole_BL = student.generate(
        ids_L[None],
        do_sample=False,
        max_new_tokens=n_tokens,
        eos_token_id=None,
        pad_token_id=0,
    )
    return whole_BL[0, len(ids_L) :].tolist()


def relative_error(actual: np.ndarray, expected: torch.Tensor) -> float:
    """Return the largest error, relative to the largest logit."""
    error = np.abs(actual - expected.numpy()).max()
    return float(error / expected.abs().max())


@torch.no_grad()
@pytest.mark.parametrize("kept", KEPT.values(), ids=KEPT)
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("qwen3", {}),
        ("qwen2", {"recurrence": "mamba2"}),
        ("mistral", {"conv_width": 1}),
        ("llama", {"window": 7, "sinks": 2}),
        ("qwen2", {"window": 7, "sinks": 2, "recurrence": "mamba2"}),
        ("qwen3", {"window": 12, "sinks": 0, "d_state": 0, "recurrence": "gdn"}),
        ("mistral", {"window": 3, "sinks": 3, "d_state": 0}),
        ("llama", {"window": 1, "sinks": 0, "d_state": 0}),
    ],
    ids=[
        "llama",
        "qwen3",
        "qwen2-mamba2",
        "mistral-width-1",
        "window-and-state",
        "window-and-mamba2",
        "window-alone",
        "as-many-sinks",
        "own-token-alone",
    ],
)
def test_onnx_computes_what_the_student_computes(
    family: str, options: dict[str, Any], kept: list[tuple[int, ...]], tmp_path: Path
) -> None:
    student = student_keeping(family, kept, **{"recurrence": "discrete", **options})
    session = written(student, tmp_path)
    ids_BL = random_ids(2, 37)
    mask_BL = np.ones((2, 37))
    expected = student(ids_BL).logits

    at_once, _ = session.run(ids_BL.numpy(), mask_BL, session.first_states(2))
    assert relative_error(at_once, expected) <= TOLERANCE

    states = session.first_states(2)
    pieces: list[np.ndarray] = []
    for start, end in ((0, 9), (9, 10), (10, 11), (11, 20), (20, 37)):
        piece, states = session.run(ids_BL[:, start:end].numpy(), mask_BL[:, :end], states)
        pieces.append(piece)
    in_pieces = np.concatenate(pieces, axis=1)
    assert relative_error(in_pieces, expected) <= TOLERANCE

    last, _ = session.run(ids_BL.numpy(), mask_BL, session.first_states(2), keep=3)
    assert relative_error(last, expected[:, -3:]) <= TOLERANCE

    prompts = [ids_BL[0, :1], ids_BL[0, 1:6], ids_BL[1, :24]]
    in_a_batch = generate(session, [ids_L.tolist() for ids_L in prompts], 6)
    assert in_a_batch == [continued(student, ids_L, 6) for ids_L in prompts]


@pytest.mark.parametrize("windows", [{}, {"window": 4, "sinks": 2}], ids=["", "windows"])
def test_padding_changes_neither_logits_nor_states(windows: dict[str, int], tmp_path: Path) -> None:
    student = student_keeping("llama", KEPT["uneven"], recurrence="discrete", **windows)
    session = written(student, tmp_path)
    ids_1L = random_ids(1, 13).numpy()
    n_padding = 6
    before = ((0, 0), (n_padding, 0))
    padded_1L = np.pad(ids_1L, before, constant_values=7)
    mask_1L = np.pad(np.ones((1, 13)), before)
    states = session.first_states(1)
    padded_states = session.first_states(1)
    for start, end in ((0, 11), (11, 12), (12, 13)):
        logits, states = session.run(ids_1L[:, start:end], np.ones((1, end)), states)
        # The first piece includes the padding.
        padded_start = start + n_padding if start else 0
        padded_logits, padded_states = session.run(
            padded_1L[:, padded_start : end + n_padding],
            mask_1L[:, : end + n_padding],
            padded_states,
        )
        last = padded_logits[:, -logits.shape[1] :]
        assert relative_error(last, torch.tensor(logits)) <= TOLERANCE
    for name, state in states.items():
        padded_state = padded_states[name].numpy()
        # What kept heads store includes the padding.
        if name.endswith((".key", ".value")):
            padded_state = padded_state[:, :, n_padding:]
        np.testing.assert_allclose(padded_state, state.numpy(), rtol=1e-5, atol=1e-6)


def test_what_windows_store_does_not_grow(tmp_path: Path) -> None:
    """Where all heads have a window, memory is the same after any number of tokens."""
    student = student_keeping("llama", KEPT["none"], "discrete", 0, window=6, sinks=3)
    session = written(student, tmp_path)
    states = session.first_states(2)
    before = {name: state.shape() for name, state in states.items()}

    _, states = session.run(random_ids(2, 30).numpy(), np.ones((2, 30)), states)

    after = {name: state.shape() for name, state in states.items()}
    assert after == before
    # Three layers of 4 KV heads of 8: keys and values of 3 first and 5 latest tokens.
    assert {tuple(shape) for shape in before.values()} == {(2, 8, 32)}
    assert len(before) == 6


@pytest.mark.launched
def test_an_export_with_windows_passes_its_gate(tmp_path: Path) -> None:
    teacher, tokenizer = load_teacher("tiny")
    plan = HeadPlan.from_pairs(teacher, [(0, 1), (1, 2), (1, 3)])
    student, _ = build_student(teacher, plan, d_state=8, window=5, sinks=2)

    report = export_checkpoint(
        stirred(student),
        tokenizer,
        tmp_path / "export",
        plan=plan,
        export_format="onnx",
    )

    assert report.checks
    assert all(one.ok for one in report.checks)


def test_generation_ends_with_the_end_token_of_each_row(tmp_path: Path) -> None:
    student = student_keeping("llama", KEPT["one"], recurrence="discrete")
    prompts = [[7, 8, 9], [11]]
    endless = generate(written(student, tmp_path), prompts, 8)

    # Of the first row, the third token ends the text from now on.
    end = endless[0][2]
    student.generation_config.eos_token_id = end
    write(student, None, tmp_path, "2GB")
    session = Session(tmp_path, threads=1)

    expected: list[list[int]] = []
    for tokens in endless:
        n_tokens = len(tokens)
        if end in tokens:
            n_tokens = tokens.index(end) + 1
        expected.append(tokens[:n_tokens])
    assert len(expected[0]) <= 3
    assert generate(session, prompts, 8) == expected

    with pytest.raises(ValueError, match=naming("prompts[1]")):
        generate(session, [[1], []])


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("family", "options", "reason"),
    [
        ("mistral", {"sliding_window": 6}, "sliding-window attention"),
        ("llama", {"hidden_act": "gelu"}, "gelu"),
        ("llama", {"rope_parameters": DYNAMIC}, "RoPE is dynamic"),
    ],
    ids=["sliding window", "activation", "dynamic RoPE"],
)
def test_students_that_cannot_be_written_are_refused(
    family: str, options: dict[str, Any], reason: str
) -> None:
    teacher = make_family_model(family, **options)
    student, _ = build_student(teacher, keep(teacher, (1,), (), (4,)), d_state=4)
    assert reason in obstacles(student)[0]


def test_windows_within_a_sliding_window_and_gdn_beside_a_window_are_refused() -> None:
    teacher = make_family_model("mistral", sliding_window=6)
    none = keep(teacher, (), (), ())
    student, _ = build_student(teacher, none, d_state=0, window=4, sinks=1)
    assert "sliding-window" in obstacles(student)[0]

    teacher = make_family_model("llama")
    two = keep(teacher, (1,), (), (4,))
    student, _ = build_student(teacher, two, d_state=4, window=4, recurrence="gdn")
    assert "gdn" in obstacles(student)[0]


@torch.no_grad()
def test_scaled_rope_biases_and_a_half_precision_student(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    teacher = make_family_model("llama", attention_bias=True, mlp_bias=True, rope_parameters=rope)
    student = mixed_student(teacher).to(torch.bfloat16)
    session = written(student, tmp_path)
    ids_BL = random_ids(2, 20) % 100

    logits, _ = session.run(ids_BL.numpy(), np.ones((2, 20)), session.first_states(2))

    # What is written computes in float32.
    expected = student.float()(ids_BL).logits
    assert relative_error(logits, expected) <= TOLERANCE


def test_the_program_prints_the_space_before_its_first_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tokenizer such as Llama 2's has it in the word's token, and drops it where a text begins."""
    spaced_tokenizer().save_pretrained(tmp_path)
    prompt = "The sky"
    new = "is blue"
    new_ids = spaced_tokenizer()(new)["input_ids"]
    monkeypatch.setattr(onnx_generate, "__file__", str(tmp_path / "generate.py"))
    monkeypatch.setattr(onnx_generate, "Session", lambda folder: folder)
    monkeypatch.setattr(onnx_generate, "generate", lambda *_: [new_ids])
    monkeypatch.setattr("sys.argv", ["generate.py", prompt])

    onnx_generate.main()

    assert capsys.readouterr().out == f"{prompt} {new}\n"
