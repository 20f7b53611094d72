"""A document is the same alone, packed, padded and from a cache; other models are refused."""

from typing import Any

import pytest
import torch
import transformers
from conftest import make_family_model
from messages import naming
from students import (
    COMPUTATIONS,
    close,
    left_padded,
    logits,
    logits_in_pieces,
    lose_caches,
    mixed_student,
    packed_logits,
    positions_of,
    tokens,
)
from torch import Tensor
from transformers import PreTrainedModel

from hybrid_distill.model import (
    convolution,
    decoder,
    gated_delta,
    kernel_choice,
    packed_inputs,
    self_check,
    ssd,
)
from hybrid_distill.model.kernel_choice import KernelCall
from hybrid_distill.model.layout import cache_argument, cache_of
from hybrid_distill.model.self_check import CACHED, PACKED, PADDED
from hybrid_distill.plan import HeadPlan
from hybrid_distill.student.build import build_student, check_teacher_rows
from hybrid_distill.student.dtypes import cast_weights
from hybrid_distill.student.family_check import check_family
from hybrid_distill.train.end_to_end import checkpoint_activations

YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "rope_theta": 1e4,
    "original_max_position_embeddings": 64,
}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "nemotron": ("nemotron", {}),
    "stablelm": ("stablelm", {}),
    "gemma2": ("gemma2", {"sliding_window": 6}),
    "gemma3": ("gemma3", {"sliding_window": 6, "sliding_window_pattern": 3}),
    "llama4": ("llama4", {"attention_chunk_size": 6}),
    "window of two": ("mistral", {"sliding_window": 2}),
    "long window": ("mistral", {"sliding_window": 4096}),
    "window that is off": ("qwen2", {"use_sliding_window": False, "sliding_window": 6}),
    "yarn": ("llama", {"rope_parameters": YARN}),
}


@torch.no_grad()
@pytest.mark.parametrize("shape", SHAPES)
def test_a_document_is_the_same_in_every_way(shape: str) -> None:
    family, settings = SHAPES[shape]
    teacher = make_family_model(family, **settings)
    prompts = [tokens(length) for length in (3, 17, 8)]
    ids, mask = left_padded(prompts)
    positions = positions_of(mask)
    row = torch.cat(prompts).unsqueeze(0)
    seq_idx = torch.tensor([[0] * 3 + [1] * 17 + [2] * 8])
    for model in (teacher, mixed_student(teacher)):
        alone = [logits(model, prompt[None], use_cache=False)[0] for prompt in prompts]
        close(packed_logits(model, row, seq_idx)[0], torch.cat(alone))

        padded = logits(model, ids, use_cache=False, attention_mask=mask, position_ids=positions)
        for number, prompt in enumerate(prompts):
            close(padded[number, -len(prompt) :], alone[number])

        # As `logits_in_pieces`, with a teacher's own cache.
        cache = None
        outputs = []
        for piece in prompts[1].unsqueeze(0).split([7, 4, 1, 1, 4], dim=1):
            output = model(piece, use_cache=True, **{cache_argument(model.forward): cache})
            cache = cache_of(output)
            outputs.append(output.logits[0])
        close(torch.cat(outputs), alone[1])


def test_a_window_that_the_attention_does_not_have_cuts_nothing() -> None:
    teacher = make_family_model("llama")
    student = mixed_student(teacher)
    ids = tokens(1, 28)
    seq_idx = torch.tensor([[0] * 8 + [1] * 20])
    for model, config in (
        (teacher, teacher.config),
        (student, student.model.config),
    ):
        config.sliding_window = 6
        alone = logits(model, ids[:, 8:], use_cache=False)
        close(packed_logits(model, ids, seq_idx)[:, 8:], alone)
    whole = logits(student, ids, use_cache=False)
    close(logits_in_pieces(student, ids, (9, 1, 18)), whole)


def test_a_teacher_whose_cache_has_a_window_and_its_attention_none_is_refused() -> None:
    teacher = make_family_model("llama", sliding_window=6)
    with pytest.raises(ValueError, match=naming("LlamaForCausalLM", CACHED, "sliding_window")):
        build_student(teacher, HeadPlan.none(teacher), d_state=4)


LAYERS_OF_TWO_KINDS = ["full_attention", "sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    "settings",
    [
        {"sliding_window": 1},
        # Mistral's attention takes no notice of them, its cache does.
        {"sliding_window": 6, "layer_types": LAYERS_OF_TWO_KINDS},
    ],
    ids=["window of one", "layers of two kinds"],
)
def test_a_teacher_that_fails_is_refused_by_name(settings: Any) -> None:
    teacher = make_family_model("mistral", **settings)
    with pytest.raises(ValueError, match=naming("MistralForCausalLM", CACHED)):
        build_student(teacher, HeadPlan.from_pairs(teacher, [(0, 1)]), d_state=4)
    assert teacher.config.sliding_window == settings["sliding_window"]


@pytest.mark.parametrize(("lost", "way"), [("token_mask", PADDED), ("seq_idx", PACKED)])
def test_a_layer_that_drops_arguments_is_found(lost: str, way: str, monkeypatch) -> None:
    (passed,) = {"token_mask", "seq_idx"} - {lost}
    monkeypatch.setattr(decoder, "ROW_ARGUMENTS", (passed,))
    teacher = make_family_model("nemotron")
    cast_weights(teacher, torch.bfloat16)
    with pytest.raises(ValueError, match=naming("NemotronModel", way)):
        build_student(teacher, HeadPlan.from_pairs(teacher, [(0, 1)]), d_state=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_teacher_whose_documents_leak_is_found(dtype: Any, monkeypatch) -> None:
    def without_mask(seq_idx: Tensor, *args: Any) -> dict[str, Any]:
        inputs = packed_inputs(seq_idx, *args)
        return {**inputs, "attention_mask": torch.ones_like(seq_idx)}

    teacher = make_family_model("llama")
    cast_weights(teacher, dtype)
    check_teacher_rows(teacher)
    monkeypatch.setattr(self_check, "packed_inputs", without_mask)
    monkeypatch.setattr(self_check, "_checked", {})
    with pytest.raises(ValueError, match=naming("LlamaForCausalLM", PACKED)):
        check_teacher_rows(teacher)


@pytest.mark.parametrize(
    "family", ["llama", "gemma3", "qwen3", "phi3", "gpt_neox", "olmo3", "llama4"]
)
def test_a_small_student_shows_what_a_family_does(family: str, monkeypatch) -> None:
    """Before anything is scored, on the meta device too; a cache that reaches no head is found."""
    teacher = make_family_model(family).to("meta")
    check_family(teacher)
    lose_caches(monkeypatch)
    with pytest.raises(ValueError, match=transformers.__version__):
        check_family(teacher)


def test_a_deep_model_in_bfloat16_is_not_refused() -> None:
    teacher = make_family_model("llama", num_hidden_layers=24)
    cast_weights(teacher, torch.bfloat16)
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
    assert torch.equal(torch.get_rng_state(), before)
    assert teacher.training
    assert teacher.config.sliding_window == 6
    for _ in range(2):
        student, _ = build_student(teacher, HeadPlan.none(teacher), d_state=4)
        assert student.training
        assert student.model.config.sliding_window == 6
    assert checked == ["MistralForCausalLM", "HybridForCausalLM", "HybridForCausalLM"]


@pytest.mark.parametrize("family", ["llama", "nemotron"])
def test_gradient_checkpointing_changes_nothing(family: str) -> None:
    """Two forwards before two backwards; Nemotron's layers drop what its mixers need."""
    student = mixed_student(make_family_model(family)).train()
    length = 19
    batches = []
    for border in (8, 13):
        seq_idx = torch.tensor([[0] * border + [1] * (length - border)])
        batches.append((tokens(2, length), seq_idx.expand(2, -1)))

    def gradients() -> list[Tensor]:
        student.zero_grad()
        losses = []
        for ids, seq_idx in batches:
            losses.append(student(ids, labels=ids, seq_idx=seq_idx).loss)
        for loss in losses:
            loss.backward()
        return [parameter.grad.clone() for parameter in student.parameters()]

    plain = gradients()
    checkpoint_activations(student)
    for gradient, expected in zip(gradients(), plain):
        close(gradient, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recurrence", COMPUTATIONS)
def test_its_kernels_are_tried_together(recurrence: str, dtype: torch.dtype, monkeypatch) -> None:
    """A child process for each of them would take long to start."""
    student = mixed_student(make_family_model("llama"), recurrence=recurrence).to(dtype)
    together: list[KernelCall] = []
    called: list[KernelCall] = []
    choose = kernel_choice.choose_implementation

    def note_trials(device: torch.device, calls: list[KernelCall]) -> None:
        together.extend(calls)

    def note_choice(impl: str, kernel: str, x: Tensor, *sizes: int, **options: bool) -> str:
        # Torch's own path asks once more, without the gate.
        if impl == "auto" and options.get("gated", True):
            options_of_call = {"training": torch.is_grad_enabled(), **options}
            called.append(KernelCall(kernel, x.dtype, sizes, options_of_call))
        return choose(impl, kernel, x, *sizes, **options)

    monkeypatch.setattr(self_check, "try_together", note_trials)
    for asking in (ssd, convolution, gated_delta):
        monkeypatch.setattr(asking, "choose_implementation", note_choice)
    self_check._checked.pop(student, None)
    self_check.check_same_logits(student, "")
    not_tried = [call for call in called if call not in together]
    not_called = [call for call in together if call not in called]
    assert not_tried == []
    assert not_called == []
