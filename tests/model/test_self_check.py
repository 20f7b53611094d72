"""A document is the same alone, packed, padded and from a cache in every family. A model of another kind is refused."""

from typing import Any

import pytest
import torch
import transformers
from conftest import make_family_model
from students import (
    close,
    left_padded,
    logits,
    lose_caches,
    mixed_student,
    packed_logits,
    tokens,
)
from torch import Tensor
from transformers import PreTrainedModel

from hybrid_distill.model import decoder, packed_inputs, self_check
from hybrid_distill.model.layout import cache_argument, cache_of
from hybrid_distill.plan import HeadPlan
from hybrid_distill.student.build import build_student, check_family, check_teacher_rows
from hybrid_distill.train.end_to_end import checkpoint_activations

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "nemotron": ("nemotron", {}),
    "stablelm": ("stablelm", {}),
    "gemma2": ("gemma2", {"sliding_window": 6}),
    "gemma3": ("gemma3", {"sliding_window": 6, "sliding_window_pattern": 3}),
    "llama4": ("llama4", {"attention_chunk_size": 6}),
    "window of two": ("mistral", {"sliding_window": 2}),
    "long window": ("mistral", {"sliding_window": 4096}),
    "window that is off": ("qwen2", {"use_sliding_window": False, "sliding_window": 6}),
    "yarn": ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4,
                                           "original_max_position_embeddings": 64}}),
}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("shape", SHAPES)
def test_a_document_is_the_same_in_every_way(shape: str) -> None:
    family, settings = SHAPES[shape]
    teacher = make_family_model(family, **settings)
    prompts = [tokens(length) for length in (3, 17, 8)]
    ids, mask = left_padded(prompts)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    row, seq_idx = (
        torch.cat(prompts).unsqueeze(0),
        torch.tensor([[0] * 3 + [1] * 17 + [2] * 8]),
    )
    for model in (teacher, mixed_student(teacher)):
        alone = [
            logits(model, prompt.unsqueeze(0), use_cache=False)[0] for prompt in prompts
        ]
        close(packed_logits(model, row, seq_idx)[0], torch.cat(alone))
        padded = logits(
            model, ids, attention_mask=mask, position_ids=positions, use_cache=False
        )
        close(
            torch.cat([padded[i, -len(prompt) :] for i, prompt in enumerate(prompts)]),
            torch.cat(alone),
        )
        cache, pieces = None, []
        for piece in prompts[1].unsqueeze(0).split([7, 4, 1, 1, 4], dim=1):
            output = model(piece, use_cache=True, **{cache_argument(model.forward): cache})
            cache = cache_of(output)
            pieces.append(output.logits[0])
        close(torch.cat(pieces), alone[1])


@torch.no_grad()
def test_a_window_that_the_attention_does_not_have() -> None:
    """Packed rows are not cut by it, nor is a student's cache; the teacher's own cache is, so it makes no student."""
    teacher, ids = make_family_model("llama"), tokens(1, 28)
    student = mixed_student(teacher)
    seq_idx = torch.tensor([[0] * 8 + [1] * 20])
    for model, config in ((teacher, teacher.config), (student, student.model.config)):
        config.sliding_window = 6
        close(
            packed_logits(model, ids, seq_idx)[:, 8:],
            logits(model, ids[:, 8:], use_cache=False),
        )
    cache = student.new_cache()
    pieces = [logits(student, piece, cache=cache) for piece in ids.split([9, 1, 18], dim=1)]
    close(torch.cat(pieces, dim=1), logits(student, ids, use_cache=False))
    message = r"LlamaForCausalLM does not compute a document from a cache .*differ by \S+ .*at most \S+.*sliding_window"
    with pytest.raises(ValueError, match=message):
        build_student(
            make_family_model("llama", sliding_window=6), HeadPlan.none(teacher), d_state=4
        )


@pytest.mark.parametrize(
    "settings",
    [
        {"sliding_window": 1},
        {
            "sliding_window": 6,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ],
)
def test_a_teacher_that_fails_is_refused_by_name(settings: Any) -> None:
    teacher = make_family_model("mistral", **settings)
    with pytest.raises(
        ValueError, match="MistralForCausalLM does not compute a document from a cache"
    ):
        build_student(teacher, HeadPlan.from_pairs(teacher, [(0, 1)]), d_state=4)
    assert teacher.config.sliding_window == settings["sliding_window"]


@pytest.mark.parametrize("lost", ["token_mask", "seq_idx"])
def test_a_layer_that_drops_arguments_is_found(lost: str, monkeypatch) -> None:
    monkeypatch.setattr(decoder, "ROW_ARGUMENTS", tuple({"token_mask", "seq_idx"} - {lost}))
    way = {"token_mask": "padded on the left", "seq_idx": "packed behind another document"}[
        lost
    ]
    teacher = make_family_model("nemotron").to(torch.bfloat16)
    with pytest.raises(
        ValueError,
        match=f"a student made from NemotronModel does not compute a document {way}",
    ):
        build_student(teacher, HeadPlan.from_pairs(teacher, [(0, 1)]), d_state=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_teacher_whose_documents_leak_is_found(dtype: Any, monkeypatch) -> None:
    def without(seq_idx: Tensor, *args: Any) -> dict[str, Any]:
        return {**packed_inputs(seq_idx, *args), "attention_mask": torch.ones_like(seq_idx)}

    teacher = make_family_model("llama").to(dtype)
    check_teacher_rows(teacher)
    monkeypatch.setattr(self_check, "packed_inputs", without)
    monkeypatch.setattr(self_check, "_checked", {})
    with pytest.raises(
        ValueError, match="LlamaForCausalLM does not compute a document packed"
    ):
        check_teacher_rows(teacher)


@pytest.mark.parametrize(
    "family", ["llama", "gemma3", "qwen3", "phi3", "gpt_neox", "olmo3", "llama4"]
)
def test_a_small_student_shows_what_a_family_does(family: str, monkeypatch) -> None:
    """Before anything is scored, on the meta device too; a cache that reaches no head is found."""
    teacher = make_family_model(family).to("meta")
    check_family(teacher)
    lose_caches(monkeypatch)
    with pytest.raises(
        ValueError, match=f"cache with transformers {transformers.__version__}"
    ):
        check_family(teacher)


def test_a_deep_model_in_bfloat16_is_not_refused() -> None:
    teacher = make_family_model("llama", num_hidden_layers=24).bfloat16()
    build_student(teacher, HeadPlan.random(teacher, 40, seed=0), d_state=4)


def test_the_teacher_is_checked_once_and_nothing_is_drawn(monkeypatch) -> None:
    checked: list[str] = []
    real = self_check._compare

    def count(model: PreTrainedModel, *args: Any) -> None:
        checked.append(type(model).__name__)
        real(model, *args)

    monkeypatch.setattr(self_check, "_compare", count)
    teacher = make_family_model("mistral", sliding_window=6).train()
    before = torch.get_rng_state()
    check_teacher_rows(teacher)
    assert (
        torch.equal(torch.get_rng_state(), before)
        and teacher.training
        and teacher.config.sliding_window == 6
    )
    for _ in range(2):
        student, _ = build_student(teacher, HeadPlan.none(teacher), d_state=4)
        assert student.training and student.model.config.sliding_window == 6
    assert checked == ["MistralForCausalLM", "HybridForCausalLM", "HybridForCausalLM"]


@pytest.mark.parametrize("family", ["llama", "nemotron"])
def test_gradient_checkpointing_changes_nothing(family: str) -> None:
    """Nemotron's layers drop what its mixers need; two forwards before the first backward, then both backwards."""
    student = mixed_student(make_family_model(family)).train()
    rows = [
        (tokens(2, 19), torch.tensor([[0] * n + [1] * (19 - n)]).expand(2, -1))
        for n in (8, 13)
    ]

    def gradients() -> list[Tensor]:
        student.zero_grad()
        losses = [student(ids, labels=ids, seq_idx=seq_idx).loss for ids, seq_idx in rows]
        for loss in losses:
            loss.backward()
        return [p.grad.clone() for p in student.parameters()]

    plain = gradients()
    checkpoint_activations(student)
    for actual, expected in zip(gradients(), plain):
        close(actual, expected)
