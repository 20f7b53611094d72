"""Windowed heads: equal to the masked teacher, in every family and in every way that a row is computed."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from hybrid_distill.export.formats import check_expressible
from hybrid_distill.model import HybridForCausalLM, local_attention, window_kernels
from hybrid_distill.model.local_attention import Reach, Scoring
from hybrid_distill.model.mixer import silence
from hybrid_distill.model.recurrent_heads import OPEN_GATE
from hybrid_distill.model.ring import TokenRing
from hybrid_distill.plan import HeadPlan
from hybrid_distill.student.build import build_student
from hybrid_distill.teacher import trace_mixers
from hybrid_distill.train.end_to_end import checkpoint_activations
from tests.conftest import FAMILIES, make_family_model
from tests.model.windows import masked_teacher

LENGTH = 48
PLANS = {
    "heads in some groups": [(0, 0), (0, 3), (2, 5)],
    "whole groups": [(0, 0), (0, 1), (1, 6), (1, 7)],
    "no head": [],
}


def ids_of(model: PreTrainedModel, n_rows: int = 2, length: int = LENGTH) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, model.config.vocab_size, (n_rows, length), generator=generator)


def windowed_student(
    teacher: PreTrainedModel,
    plan: HeadPlan,
    window: int = 7,
    sinks: int = 2,
    d_state: int = 4,
    **options: object,
) -> HybridForCausalLM:
    student, _ = build_student(
        teacher, plan, d_state=d_state, window=window, sinks=sinks, init="random", **options
    )
    return student.eval()


def opened(student: HybridForCausalLM) -> HybridForCausalLM:
    """Open the gates of the recurrent heads: both parts of a replaced head then count."""
    with torch.no_grad():
        for heads in student.recurrent_heads():
            heads.z_proj.bias.fill_(0.7)
    return student


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", [*FAMILIES, "gemma2", "gemma3", "nemotron", "stablelm"])
@torch.no_grad()
def test_a_new_student_is_the_teacher_under_windows(family: str) -> None:
    teacher = make_family_model(family)
    plan = HeadPlan.from_pairs(teacher, PLANS["heads in some groups"])
    student = windowed_student(teacher, plan)
    ids = ids_of(teacher)
    with masked_teacher(teacher, plan, window=7, sinks=2):
        expected = teacher(ids, use_cache=False).logits
    assert_close(student(ids, use_cache=False).logits, expected)


@pytest.mark.parametrize("kept", PLANS)
@pytest.mark.parametrize(("window", "sinks"), [(1, 0), (5, 0), (5, 5), (200, 4)])
@torch.no_grad()
def test_any_plan_window_and_sinks(kept: str, window: int, sinks: int) -> None:
    teacher = make_family_model("llama")
    plan = HeadPlan.from_pairs(teacher, PLANS[kept])
    student = windowed_student(teacher, plan, window, sinks, d_state=0)
    ids = ids_of(teacher, length=300)
    with masked_teacher(teacher, plan, window, sinks):
        expected = teacher(ids, use_cache=False).logits
    assert_close(student(ids, use_cache=False).logits, expected)
    assert not student.recurrent_heads()


@pytest.mark.parametrize("layer_window", [6, 20])
@torch.no_grad()
def test_a_layer_with_a_window_of_its_own(layer_window: int) -> None:
    teacher = make_family_model("mistral", sliding_window=layer_window)
    plan = HeadPlan.from_pairs(teacher, PLANS["heads in some groups"])
    student = windowed_student(teacher, plan, window=9, sinks=3)
    ids = ids_of(teacher)
    with masked_teacher(teacher, plan, window=9, sinks=3):
        expected = teacher(ids, use_cache=False).logits
    assert_close(student(ids, use_cache=False).logits, expected)
    assert_close(decoded(student, ids, (20, 1, 1, 5, 1, 20)), expected)


def decoded(student: HybridForCausalLM, ids: Tensor, pieces: tuple[int, ...]) -> Tensor:
    """Return the logits of a row read piece by piece from a cache."""
    cache = student.new_cache()
    logits = []
    for piece in ids.split(pieces, dim=1):
        logits.append(student(piece, cache=cache).logits)
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("kept", PLANS)
@pytest.mark.parametrize("recurrence", ["discrete", "mamba2", "gdn"])
@torch.no_grad()
def test_cached_equals_whole(kept: str, recurrence: str) -> None:
    teacher = make_family_model("llama")
    plan = HeadPlan.from_pairs(teacher, PLANS[kept])
    student = opened(windowed_student(teacher, plan, recurrence=recurrence))
    ids = ids_of(teacher)
    expected = student(ids, use_cache=False).logits
    for pieces in ((1,) * LENGTH, (3, 1, 2, 12, 1, 1, 28), (30, *(1,) * 18)):
        assert_close(decoded(student, ids, pieces), expected)


@torch.no_grad()
def test_left_padding_and_a_cache() -> None:
    teacher = make_family_model("llama")
    plan = HeadPlan.from_pairs(teacher, PLANS["heads in some groups"])
    student = opened(windowed_student(teacher, plan))
    ids = ids_of(teacher)
    n_padding = 13
    mask = torch.ones_like(ids)
    mask[1, :n_padding] = 0
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    alone = student(ids[1:, n_padding:], use_cache=False).logits
    cache = student.new_cache()
    logits = []
    first = 0
    for length in (9, 15, 1, 1, 5, 1, 1, 15):
        last = first + length
        output = student(
            ids[:, first:last],
            attention_mask=mask[:, :last],
            position_ids=positions[:, first:last],
            cache=cache,
        )
        logits.append(output.logits)
        first = last
    assert_close(torch.cat(logits, dim=1)[1:, n_padding:], alone)


@torch.no_grad()
def test_padding_anywhere() -> None:
    teacher = make_family_model("llama")
    student = opened(windowed_student(teacher, HeadPlan.from_pairs(teacher, [(0, 0)])))
    ids = ids_of(teacher, n_rows=1)
    mask = torch.ones_like(ids)
    mask[0, [0, 5, 6, 7, 20, 47]] = 0
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    is_token = mask[0].bool()
    padded = student(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    assert_close(padded[:, is_token], student(ids[:, is_token], use_cache=False).logits)


@pytest.mark.parametrize("kept", PLANS)
@torch.no_grad()
def test_windows_and_sinks_end_at_a_documents_border(kept: str) -> None:
    teacher = make_family_model("llama")
    student = opened(windowed_student(teacher, HeadPlan.from_pairs(teacher, PLANS[kept])))
    ids = ids_of(teacher, length=400)
    seq_idx = torch.zeros_like(ids)
    borders = (0, 3, 5, 130, 290, 400)
    for number, first in enumerate(borders[:-1]):
        seq_idx[:, first:] = number
    packed = student(ids, seq_idx=seq_idx).logits
    for first, last in pairwise(borders):
        alone = student(ids[:, first:last], use_cache=False).logits
        assert_close(packed[:, first:last], alone)


@torch.no_grad()
def test_generation_of_a_padded_batch_and_with_a_static_cache() -> None:
    teacher = make_family_model("llama")
    student = opened(windowed_student(teacher, HeadPlan.from_pairs(teacher, [(0, 0), (1, 2)])))
    ids = ids_of(teacher, length=20)
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    batch = student.generate(ids, attention_mask=mask, **options)
    alone = student.generate(ids[1:, 6:], **options)
    assert batch[1, 6:].tolist() == alone[0].tolist()
    static = student.generate(ids, attention_mask=mask, cache_implementation="static", **options)
    assert static.tolist() == batch.tolist()
    again = student.generate(ids, attention_mask=mask, cache_implementation="static", **options)
    assert again.tolist() == batch.tolist()


def test_a_ring_has_a_slot_a_token_up_to_its_window_and_is_then_written_in_place() -> None:
    teacher = make_family_model("llama")
    student = opened(windowed_student(teacher, HeadPlan.none(teacher), window=9, sinks=2))
    ids = ids_of(student, length=24)
    with torch.no_grad():
        whole = student(ids, use_cache=False).logits
    cache = student.new_cache()
    ring = cache.layer(0).ring_of(9, 2)
    n_seen = 0
    # Shorter than the window, beyond it at once, then token by token.
    for n_tokens in (3, 1, 4, 6, *[1] * 10):
        before = None if ring.keys is None else ring.keys.data_ptr()
        piece = ids[:, n_seen : n_seen + n_tokens]
        with torch.no_grad():
            logits = student(piece, past_key_values=cache).logits
        n_seen += n_tokens
        assert_close(logits[:, -1], whole[:, n_seen - 1])
        assert ring.keys.shape[2] == 2 + min(9, n_seen)
        if n_tokens == 1 and n_seen > 9:
            assert ring.keys.data_ptr() == before
    assert n_seen == 24


@torch.no_grad()
@pytest.mark.parametrize("kept", list(PLANS))
def test_a_cache_keeps_no_more_in_memory_than_it_counts(kept: str) -> None:
    teacher = make_family_model("llama")
    student = windowed_student(teacher, HeadPlan.from_pairs(teacher, PLANS[kept]), window=4)
    cache = student.new_cache()
    student(ids_of(student, n_rows=1, length=12), cache=cache)
    for layer in cache.layers:
        for tensor in layer.tensors().values():
            assert tensor.untyped_storage().nbytes() == tensor.nbytes


@torch.no_grad()
def test_layers_share_what_a_token_does_to_their_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoded token costs each layer its own keys alone, also after a crop and with beams in another order."""
    teacher = make_family_model("llama")
    student = windowed_student(teacher, HeadPlan.none(teacher), window=4, sinks=1)
    ids = ids_of(student, length=12)
    computed = []
    step = TokenRing.step

    def counted(ring: TokenRing, *args: Any) -> Any:
        computed.append(ring)
        return step(ring, *args)

    monkeypatch.setattr(TokenRing, "step", counted)
    cache = student.new_cache()
    student(ids[:, :8], cache=cache)
    cache.activate_past_recording()
    for place in (8, 9, 9):
        student(ids[:, place : place + 1], cache=cache)
        if cache.get_seq_length() == 10:
            cache.crop(-1)
            cache.reorder_cache(torch.arange(len(ids)).flip(0))
    assert len(cache.layers) > 1
    assert len(computed) == 3


def test_gradients_go_through_a_cache_token_by_token() -> None:
    """A ring that was written in place would have lost what the last token's attention has read."""
    teacher = make_family_model("llama")
    student = opened(windowed_student(teacher, HeadPlan.none(teacher), window=4, sinks=1))
    ids = ids_of(student, n_rows=1, length=9)
    weight = student.get_input_embeddings().weight
    (expected,) = torch.autograd.grad(student(ids, use_cache=False).logits.square().sum(), weight)
    cache = student.new_cache()
    steps = [student(ids[:, i : i + 1], past_key_values=cache).logits for i in range(9)]
    (gradient,) = torch.autograd.grad(torch.cat(steps, 1).square().sum(), weight)
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_beams_take_their_rings_along() -> None:
    teacher = make_family_model("llama")
    student = opened(windowed_student(teacher, HeadPlan.from_pairs(teacher, [(0, 0)])))
    ids = ids_of(teacher, length=12)
    options = {"max_new_tokens": 8, "num_beams": 3, "do_sample": False, "eos_token_id": None}
    cached = student.generate(ids, **options)
    whole = student.generate(ids, use_cache=False, **options)
    assert cached.tolist() == whole.tolist()


@torch.no_grad()
def test_a_copied_cache_goes_on_by_itself() -> None:
    teacher = make_family_model("llama")
    student = opened(windowed_student(teacher, HeadPlan.from_pairs(teacher, [(0, 0)])))
    ids = ids_of(teacher)
    cache = student.new_cache()
    student(ids[:, :30], cache=cache)
    copied = copy.deepcopy(cache)
    first = student(ids[:, 30:31], cache=cache).logits
    student(ids[:, 31:], cache=cache)
    assert torch.equal(student(ids[:, 30:31], cache=copied).logits, first)


@torch.no_grad()
def test_silenced_parts() -> None:
    teacher = make_family_model("llama")
    plan = HeadPlan.from_pairs(teacher, [(0, 0)])
    student = opened(windowed_student(teacher, plan))
    ids = ids_of(teacher)
    with silence(student.mixers(), "recurrence"), masked_teacher(teacher, plan, 7, 2):
        assert_close(student(ids).logits, teacher(ids, use_cache=False).logits)
    whole = student(ids).logits
    with silence(student.mixers(), "window"):
        assert not torch.allclose(student(ids).logits, whole, atol=1e-3)
    assert torch.equal(student(ids).logits, whole)


def test_gradients_are_those_of_the_masked_teacher_and_of_checkpointing() -> None:
    teacher = make_family_model("llama")
    plan = HeadPlan.from_pairs(teacher, [(0, 0), (1, 2)])
    student = windowed_student(teacher, plan, d_state=0).train()
    ids = ids_of(teacher, length=140)
    name = "layers.1.self_attn.{}k_proj.weight"

    student(ids, labels=ids).loss.backward()
    gradient = student.model.get_parameter(name.format("attention.")).grad
    assert gradient is not None
    with masked_teacher(teacher, plan, 7, 2):
        teacher(ids, labels=ids, use_cache=False).loss.backward()
    expected = teacher.model.get_parameter(name.format("")).grad
    torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-6)

    student.zero_grad()
    checkpoint_activations(student)
    student(ids, labels=ids).loss.backward()
    again = student.model.get_parameter(name.format("attention.")).grad
    torch.testing.assert_close(again, gradient, rtol=1e-5, atol=1e-7)


def test_a_closed_gate_opens() -> None:
    teacher = make_family_model("llama")
    student = windowed_student(teacher, HeadPlan.none(teacher)).train()
    ids = ids_of(teacher)
    student(ids, labels=ids).loss.backward()
    for heads in student.recurrent_heads():
        assert heads.z_proj.weight.grad is not None
        assert heads.z_proj.weight.grad.abs().max() > 0


@torch.no_grad()
def test_the_state_is_fitted_to_what_the_window_leaves_over() -> None:
    """With its gate open it is never worse than the window alone, head by head, on the fitting rows."""
    teacher = make_family_model("llama")
    plan = HeadPlan.from_pairs(teacher, [(0, 0), (1, 2)])
    ids = ids_of(teacher, length=96)
    student, _ = build_student(
        teacher,
        plan,
        d_state=8,
        window=7,
        sinks=2,
        init="fitted",
        calibration={"input_ids": ids},
    )
    with trace_mixers(teacher) as calls:
        teacher(ids, use_cache=False)
    for mixer, call in zip(student.mixers(), calls.values(), strict=True):
        target = call.heads_BLHP
        alone = mixer.heads(*call.args, **call.kwargs)
        mixer.ssm.z_proj.bias.fill_(OPEN_GATE)
        fitted = mixer.heads(*call.args, **call.kwargs)
        error_alone = (alone - target).square().sum((0, 1, 3))
        error_fitted = (fitted - target).square().sum((0, 1, 3))
        replaced = list(mixer.replaced)
        assert (error_fitted[replaced] <= error_alone[replaced] * 1.001).all()
        assert error_fitted[replaced].sum() < 0.95 * error_alone[replaced].sum()


def test_bad_windows_are_refused() -> None:
    teacher = make_family_model("llama")
    none = HeadPlan.none(teacher)
    for options in (
        {"window": 0, "d_state": 0},
        {"window": 3, "sinks": 4},
        {"window": 3, "sinks": 0, "recurrence": "mamba2-stock"},
    ):
        with pytest.raises(ValueError, match="window"):
            windowed_student(teacher, none, **{"sinks": 0, **options})
    chunked = make_family_model("llama4", attention_chunk_size=16)
    with pytest.raises(ValueError, match="window"):
        windowed_student(chunked, HeadPlan.none(chunked))


@pytest.mark.parametrize("export_format", ["falcon-h1", "vllm", "gguf", "mlx"])
def test_formats_that_cannot_hold_a_window_say_so(export_format: str) -> None:
    teacher = make_family_model("llama")
    student = windowed_student(teacher, HeadPlan.none(teacher), recurrence="mamba2")
    with pytest.raises(ValueError, match="window"):
        check_expressible(student, export_format)


@pytest.mark.parametrize(("window", "sinks", "limit"), [(1, 0, None), (44, 4, None), (130, 3, 140)])
def test_flex_attention_and_its_backward(
    window: int, sinks: int, limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlexAttention refuses only at its border to train on a CPU."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *args: None)
    monkeypatch.setattr(window_kernels, "flex_function", lambda: flex_attention.flex_attention)
    begins = begins_of_documents()
    length = begins.shape[1]
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, length, 16, generator=generator, requires_grad=True)
    key = torch.randn(2, 2, length, 16, generator=generator, requires_grad=True)
    value = torch.randn(2, 2, length, 16, generator=generator, requires_grad=True)
    upstream = torch.randn(2, 4, length, 16, generator=generator)
    reach = Reach(window, sinks, limit)
    results = []
    for runs in (False, True):
        monkeypatch.setattr(local_attention, "kernel_runs", lambda *_, runs=runs: runs)
        out = local_attention.attend_locally(query, key, value, begins, reach, Scoring())
        results.append([out, *torch.autograd.grad(out, (query, key, value), upstream)])
        # Rotation by float32 angles leaves queries and keys in float32.
        with torch.autocast("cpu", torch.bfloat16):
            half = local_attention.attend_locally(
                query, key, value.bfloat16(), begins, reach, Scoring()
            )
        torch.testing.assert_close(half.float(), out, rtol=0.05, atol=0.05)
    for blocks, kernel in zip(*results, strict=True):
        torch.testing.assert_close(kernel, blocks, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [1, 44, 128, 300])
@pytest.mark.parametrize("sinks", [0, 4])
def test_the_kernels_work_list_holds_every_block_that_is_seen(window: int, sinks: int) -> None:
    begins = begins_of_documents()
    length = begins.shape[1]
    mask = window_kernels.window_blocks(begins, window, sinks, None)
    index = torch.arange(length)
    place = index - begins.unsqueeze(2)
    seen = Reach(window, sinks).sees(index[:, None] - index, place)
    n_blocks = -(-length // 128)
    padding = n_blocks * 128 - length
    padded = torch.nn.functional.pad(seen, (0, padding, 0, padding))
    is_seen = padded.unflatten(2, (-1, 128)).unflatten(1, (-1, 128)).any(4).any(2)
    for row in range(len(begins)):
        for block in range(n_blocks):
            count = int(mask.kv_num_blocks[row, 0, block])
            listed = mask.kv_indices[row, 0, block, :count].tolist()
            assert listed == sorted(set(listed))
            assert set(is_seen[row, block].nonzero().flatten().tolist()) <= set(listed)
            assert len(listed) <= 2 + 1 + -(-(window - 1) // 128)


def begins_of_documents() -> Tensor:
    """Documents begin within blocks and at their borders; some have their sinks in two blocks."""
    begins = torch.zeros(2, 700, dtype=torch.long)
    for row, starts in enumerate([(0, 126, 256, 390), (0, 5)]):
        for first in starts:
            begins[row, first:] = first
    return begins


@torch.no_grad()
def test_no_memory_grows_with_the_square_of_the_length() -> None:
    """The largest tensor that a forward makes has as many elements per token at 4,096 tokens as at 1,024."""
    teacher = make_family_model("llama", max_position_embeddings=4096)
    student = windowed_student(teacher, HeadPlan.none(teacher), d_state=0)
    largest = {}
    for length in (1024, 4096):
        with LargestTensor() as seen:
            student.model(ids_of(teacher, n_rows=1, length=length), use_cache=False)
        largest[length] = seen.n_elements / length
    assert largest[4096] == largest[1024]


class LargestTensor(TorchDispatchMode):
    """Number of elements of the largest tensor that any operation returns."""

    n_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.n_elements = max(self.n_elements, tensor.numel())
        return result
