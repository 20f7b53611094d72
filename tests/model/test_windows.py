"""Windowed heads: equal to the masked teacher, in every family and in every way that a row is computed."""

from __future__ import annotations

import copy
import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from conftest import FAMILIES, make_family_model
from memory_use import LargestTensor
from students import COMPUTATIONS, logits, logits_in_pieces, positions_of
from torch import Tensor
from torch.nn.attention import flex_attention
from transformers import PreTrainedModel
from windows import SINKS, WINDOW, masked_teacher, opened, windowed_student

from hybrid_distill.export.formats import check_expressible
from hybrid_distill.model import (
    HybridMixer,
    document_kernels,
    local_attention,
    window_kernels,
)
from hybrid_distill.model.document_kernels import FLEX_BLOCK as BLOCK
from hybrid_distill.model.local_attention import Reach, Scoring
from hybrid_distill.model.mixer import zero_part
from hybrid_distill.model.recurrent_heads import OPEN_GATE
from hybrid_distill.model.ring import TokenRing
from hybrid_distill.plan import HeadPlan
from hybrid_distill.student.build import build_student
from hybrid_distill.teacher import trace_mixers
from hybrid_distill.teacher.hooks import MixerCall
from hybrid_distill.train.end_to_end import checkpoint_activations

LENGTH = 48

PLANS = {
    "heads in some groups": [(0, 0), (0, 3), (2, 5)],
    "whole groups": [(0, 0), (0, 1), (1, 6), (1, 7)],
    "no head": [],
}


@pytest.fixture
def teacher() -> PreTrainedModel:
    return make_family_model("llama")


def ids_of(model: PreTrainedModel, n_rows: int = 2, length: int = LENGTH) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, model.config.vocab_size, (n_rows, length), generator=generator)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


# Equal to the masked teacher


@pytest.mark.parametrize("family", [*FAMILIES, "gemma2", "gemma3", "nemotron", "stablelm"])
def test_a_new_student_is_the_teacher_under_windows(family: str) -> None:
    teacher = make_family_model(family)
    plan = HeadPlan.from_pairs(teacher, PLANS["heads in some groups"])
    student = windowed_student(teacher, plan)
    ids = ids_of(teacher)

    with masked_teacher(teacher, plan):
        expected = logits(teacher, ids, use_cache=False)
    assert_close(logits(student, ids, use_cache=False), expected)


@pytest.mark.parametrize("kept", PLANS)
@pytest.mark.parametrize(("window", "sinks"), [(1, 0), (5, 0), (5, 5), (200, 4)])
def test_any_plan_window_and_sinks(teacher, kept: str, window: int, sinks: int) -> None:
    plan = HeadPlan.from_pairs(teacher, PLANS[kept])
    student = windowed_student(teacher, plan, window, sinks, d_state=0)
    ids = ids_of(teacher, length=300)

    with masked_teacher(teacher, plan, window, sinks):
        expected = logits(teacher, ids, use_cache=False)
    assert_close(logits(student, ids, use_cache=False), expected)
    assert not student.recurrent_heads()


@pytest.mark.parametrize("layer_window", [6, 20], ids=["shorter", "longer"])
def test_a_layer_with_a_window_of_its_own(layer_window: int) -> None:
    teacher = make_family_model("mistral", sliding_window=layer_window)
    plan = HeadPlan.from_pairs(teacher, PLANS["heads in some groups"])
    student = windowed_student(teacher, plan, window=9, sinks=3)
    ids = ids_of(teacher)

    with masked_teacher(teacher, plan, window=9, sinks=3):
        expected = logits(teacher, ids, use_cache=False)
    assert_close(logits(student, ids, use_cache=False), expected)
    assert_close(logits_in_pieces(student, ids, (20, 1, 1, 5, 1, 20)), expected)


@torch.no_grad()
def test_zeroed_parts(teacher) -> None:
    plan = HeadPlan.from_pairs(teacher, [(0, 0)])
    student = opened(windowed_student(teacher, plan))
    ids = ids_of(teacher)

    with zero_part(student.mixers(), "recurrence"), masked_teacher(teacher, plan):
        assert_close(logits(student, ids), logits(teacher, ids, use_cache=False))

    whole = logits(student, ids)
    with zero_part(student.mixers(), "window"):
        assert not torch.allclose(logits(student, ids), whole, atol=1e-3)
    assert torch.equal(logits(student, ids), whole)


def test_gradients_are_those_of_the_masked_teacher_and_of_checkpointing(teacher) -> None:
    plan = HeadPlan.from_pairs(teacher, [(0, 0), (1, 2)])
    student = windowed_student(teacher, plan, d_state=0).train()
    ids = ids_of(teacher, length=140)
    keys = student.model.get_parameter("layers.1.self_attn.attention.k_proj.weight")
    keys_of_teacher = teacher.model.get_parameter("layers.1.self_attn.k_proj.weight")

    student(ids, labels=ids).loss.backward()
    gradient = keys.grad
    assert gradient is not None
    with masked_teacher(teacher, plan):
        teacher(ids, labels=ids, use_cache=False).loss.backward()
    torch.testing.assert_close(gradient, keys_of_teacher.grad, rtol=1e-3, atol=1e-6)

    student.zero_grad()
    checkpoint_activations(student)
    student(ids, labels=ids).loss.backward()
    torch.testing.assert_close(keys.grad, gradient, rtol=1e-5, atol=1e-7)


# The same in every way that a row is computed


@pytest.mark.parametrize("kept", PLANS)
@pytest.mark.parametrize("recurrence", COMPUTATIONS)
def test_cached_equals_whole(teacher, kept: str, recurrence: str) -> None:
    plan = HeadPlan.from_pairs(teacher, PLANS[kept])
    student = opened(windowed_student(teacher, plan, recurrence=recurrence))
    ids = ids_of(teacher)
    token_by_token = (1,) * LENGTH
    mixed = (3, 1, 2, 12, 1, 1, 28)
    prefill_and_tokens = (30, *(1,) * 18)

    expected = logits(student, ids, use_cache=False)
    for lengths in (token_by_token, mixed, prefill_and_tokens):
        assert_close(logits_in_pieces(student, ids, lengths), expected)


def test_left_padding_and_a_cache(teacher) -> None:
    plan = HeadPlan.from_pairs(teacher, PLANS["heads in some groups"])
    student = opened(windowed_student(teacher, plan))
    ids = ids_of(teacher)
    n_padding = 13
    mask = torch.ones_like(ids)
    mask[1, :n_padding] = 0

    # The first piece of the padded row holds no token.
    lengths = (9, 15, 1, 1, 5, 1, 1, 15)
    padded = logits_in_pieces(student, ids, lengths, mask=mask, positions=positions_of(mask))
    alone = logits(student, ids[1:, n_padding:], use_cache=False)
    assert_close(padded[1:, n_padding:], alone)


def test_padding_anywhere(teacher) -> None:
    student = opened(windowed_student(teacher, HeadPlan.from_pairs(teacher, [(0, 0)])))
    ids = ids_of(teacher, n_rows=1)
    mask = torch.ones_like(ids)
    mask[0, [0, 5, 6, 7, 20, 47]] = 0
    is_token = mask[0].bool()

    positions = positions_of(mask)
    padded = logits(student, ids, attention_mask=mask, position_ids=positions, use_cache=False)
    alone = logits(student, ids[:, is_token], use_cache=False)
    assert_close(padded[:, is_token], alone)


@pytest.mark.parametrize("kept", PLANS)
def test_windows_and_sinks_end_at_a_documents_border(teacher, kept: str) -> None:
    student = opened(windowed_student(teacher, HeadPlan.from_pairs(teacher, PLANS[kept])))
    ids = ids_of(teacher, length=400)
    seq_idx = torch.zeros_like(ids)
    borders = (0, 3, 5, 130, 290, 400)
    for number, first in enumerate(borders[:-1]):
        seq_idx[:, first:] = number

    packed = logits(student, ids, seq_idx=seq_idx)
    for first, last in pairwise(borders):
        alone = logits(student, ids[:, first:last], use_cache=False)
        assert_close(packed[:, first:last], alone)


def test_generation_of_a_padded_batch_and_with_a_static_cache(teacher) -> None:
    student = opened(windowed_student(teacher, HeadPlan.from_pairs(teacher, [(0, 0), (1, 2)])))
    ids = ids_of(teacher, length=20)
    n_padding = 6
    mask = torch.ones_like(ids)
    mask[1, :n_padding] = 0

    def generated(ids: Tensor, **options: Any) -> list[list[int]]:
        greedy = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
        return student.generate(ids, **greedy, **options).tolist()

    batch = generated(ids, attention_mask=mask)
    (alone,) = generated(ids[1:, n_padding:])
    assert batch[1][n_padding:] == alone
    # The second text takes the cache that the first one left.
    for _ in range(2):
        assert generated(ids, attention_mask=mask, cache_implementation="static") == batch


@torch.no_grad()
def test_beams_take_their_rings_along(teacher) -> None:
    student = opened(windowed_student(teacher, HeadPlan.from_pairs(teacher, [(0, 0)])))
    ids = ids_of(teacher, length=12)
    options = {"max_new_tokens": 8, "num_beams": 3, "do_sample": False, "eos_token_id": None}
    cached = student.generate(ids, **options)
    whole = student.generate(ids, use_cache=False, **options)
    assert cached.tolist() == whole.tolist()


def test_a_copied_cache_goes_on_by_itself(teacher) -> None:
    student = opened(windowed_student(teacher, HeadPlan.from_pairs(teacher, [(0, 0)])))
    ids = ids_of(teacher)
    cache = student.new_cache()
    logits(student, ids[:, :30], cache=cache)
    copied = copy.deepcopy(cache)

    following = ids[:, 30:31]
    expected = logits(student, following, cache=cache)
    logits(student, ids[:, 31:], cache=cache)
    assert torch.equal(logits(student, following, cache=copied), expected)


# Rings: the keys that a window holds


def test_a_ring_has_a_slot_a_token_up_to_its_window_and_is_then_written_in_place(teacher) -> None:
    window = 9
    sinks = 2
    student = opened(windowed_student(teacher, HeadPlan.none(teacher), window, sinks))
    ids = ids_of(student, length=24)
    whole = logits(student, ids, use_cache=False)
    cache = student.new_cache()
    ring = cache.layer(0).ring_of(window, sinks)
    n_seen = 0
    # Shorter than the window, beyond it at once, then token by token.
    for n_tokens in (3, 1, 4, 6, *[1] * 10):
        address = None if ring.keys is None else ring.keys.data_ptr()
        piece = ids[:, n_seen : n_seen + n_tokens]
        step = logits(student, piece, past_key_values=cache)
        n_seen += n_tokens
        assert_close(step[:, -1], whole[:, n_seen - 1])
        assert ring.keys.shape[2] == sinks + min(window, n_seen)
        if n_tokens == 1 and n_seen > window:
            assert ring.keys.data_ptr() == address
    assert n_seen == 24


@pytest.mark.parametrize("kept", list(PLANS))
def test_a_cache_keeps_no_more_in_memory_than_it_counts(teacher, kept: str) -> None:
    student = windowed_student(teacher, HeadPlan.from_pairs(teacher, PLANS[kept]), window=4)
    cache = student.new_cache()
    logits(student, ids_of(student, n_rows=1, length=12), cache=cache)
    for layer in cache.layers:
        for tensor in layer.tensors().values():
            assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_layers_share_what_a_token_does_to_their_rings(
    teacher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decoded token costs each layer its own keys alone, also after a crop and with beams in
    another order."""
    student = windowed_student(teacher, HeadPlan.none(teacher), window=4, sinks=1)
    ids = ids_of(student, length=12)
    computed = []
    step = TokenRing.step

    def counted(ring: TokenRing, *args: Any) -> Any:
        computed.append(ring)
        return step(ring, *args)

    monkeypatch.setattr(TokenRing, "step", counted)
    cache = student.new_cache()
    logits(student, ids[:, :8], cache=cache)
    cache.activate_past_recording()
    for place in (8, 9, 9):
        logits(student, ids[:, place : place + 1], cache=cache)
        if cache.get_seq_length() == 10:
            cache.crop(-1)
            cache.reorder_cache(torch.arange(len(ids)).flip(0))
    assert len(cache.layers) > 1
    assert len(computed) == 3


def test_gradients_go_through_a_cache_token_by_token(teacher) -> None:
    """A ring that was written in place would have lost what the last token's attention has read."""
    student = opened(windowed_student(teacher, HeadPlan.none(teacher), window=4, sinks=1))
    length = 9
    ids = ids_of(student, n_rows=1, length=length)
    weight = student.get_input_embeddings().weight
    cache = student.new_cache()
    steps = []
    for place in range(length):
        output = student(ids[:, place : place + 1], past_key_values=cache)
        steps.append(output.logits)

    whole = student(ids, use_cache=False).logits
    (expected,) = torch.autograd.grad(whole.square().sum(), weight)
    (gradient,) = torch.autograd.grad(torch.cat(steps, 1).square().sum(), weight)
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-4)


# The recurrent heads beside a window


def test_a_closed_gate_opens(teacher) -> None:
    student = windowed_student(teacher, HeadPlan.none(teacher)).train()
    ids = ids_of(teacher)
    student(ids, labels=ids).loss.backward()
    for heads in student.recurrent_heads():
        assert heads.z_proj.weight.grad is not None
        assert heads.z_proj.weight.grad.abs().max() > 0


@torch.no_grad()
def test_the_state_is_fitted_to_what_the_window_leaves_over(teacher) -> None:
    """With its gate open it is never worse than the window alone, head by head, on the fitting
    rows."""
    plan = HeadPlan.from_pairs(teacher, [(0, 0), (1, 2)])
    ids = ids_of(teacher, length=96)
    student, _ = build_student(
        teacher,
        plan,
        d_state=8,
        window=WINDOW,
        sinks=SINKS,
        init="fitted",
        calibration={"input_ids": ids},
    )
    with trace_mixers(teacher) as calls:
        teacher(ids, use_cache=False)
    for mixer, call in zip(student.mixers(), calls.values(), strict=True):
        alone = errors_of_replaced(mixer, call)
        mixer.ssm.z_proj.bias.fill_(OPEN_GATE)
        fitted = errors_of_replaced(mixer, call)
        assert (fitted <= alone * 1.001).all()
        assert fitted.sum() < 0.95 * alone.sum()


def errors_of_replaced(mixer: HybridMixer, call: MixerCall) -> Tensor:
    """Return the squared error of each replaced head's output against the teacher's."""
    heads_BLHP = mixer.heads(*call.args, **call.kwargs)
    error_H = (heads_BLHP - call.heads_BLHP).square().sum((0, 1, 3))
    return error_H[list(mixer.replaced)]


# Refusals


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"window": 0, "sinks": 0, "d_state": 0}, id="heads of nothing"),
        pytest.param({"window": 3, "sinks": 4}, id="more sinks than window"),
        pytest.param({"window": 3, "sinks": 0, "recurrence": "mamba2-stock"}, id="mamba2-stock"),
    ],
)
def test_bad_windows_are_refused(teacher, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="window"):
        windowed_student(teacher, HeadPlan.none(teacher), **options)


def test_windows_of_attention_in_chunks_are_refused() -> None:
    chunked = make_family_model("llama4", attention_chunk_size=16)
    with pytest.raises(ValueError, match="window"):
        windowed_student(chunked, HeadPlan.none(chunked))


@pytest.mark.parametrize("export_format", ["falcon-h1", "vllm", "gguf", "mlx"])
def test_formats_that_cannot_hold_a_window_say_so(teacher, export_format: str) -> None:
    student = windowed_student(teacher, HeadPlan.none(teacher), recurrence="mamba2")
    with pytest.raises(ValueError, match="window"):
        check_expressible(student, export_format)


# Kernels of windows


@pytest.mark.parametrize(("window", "sinks", "limit"), [(1, 0, None), (44, 4, None), (130, 3, 140)])
def test_flex_attention_and_its_backward(
    window: int, sinks: int, limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlexAttention refuses only at its border to train on a CPU."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *args: None)
    plain = flex_attention.flex_attention
    monkeypatch.setattr(document_kernels, "compiled_flex_attention", lambda: plain)
    begins = begins_of_documents()
    length = begins.shape[1]
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, length, 16, generator=generator, requires_grad=True)
    key = torch.randn(2, 2, length, 16, generator=generator, requires_grad=True)
    value = torch.randn(2, 2, length, 16, generator=generator, requires_grad=True)
    upstream = torch.randn(2, 4, length, 16, generator=generator)
    reach = Reach(window, sinks, limit)

    def attend(value: Tensor) -> Tensor:
        return local_attention.attend_locally(query, key, value, begins, reach, Scoring())

    results = []
    for runs in (False, True):
        monkeypatch.setattr(local_attention, "kernel_runs", lambda *_, runs=runs: runs)
        out = attend(value)
        results.append([out, *torch.autograd.grad(out, (query, key, value), upstream)])
        # Rotation by float32 angles leaves queries and keys in float32.
        with torch.autocast("cpu", torch.bfloat16):
            half = attend(value.bfloat16())
        torch.testing.assert_close(half.float(), out, rtol=0.05, atol=0.05)
    for in_blocks, by_kernel in zip(*results, strict=True):
        torch.testing.assert_close(by_kernel, in_blocks, rtol=1e-4, atol=1e-5)


def test_prompts_of_many_lengths_compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop of training alone says which rows are worth it."""
    monkeypatch.setattr(window_kernels, "has_document_attention", lambda device: True)
    query = torch.zeros(1, 2, 256, 16)
    assert not window_kernels.kernel_runs(query, dropout=0.0)
    with document_kernels.compiling_for(None):
        assert window_kernels.kernel_runs(query, dropout=0.0)
        with document_kernels.compiling_for(300):
            assert not window_kernels.kernel_runs(query, dropout=0.0)
        with document_kernels.compiling_for(256):
            assert window_kernels.kernel_runs(query, dropout=0.0)
    assert not window_kernels.kernel_runs(query, dropout=0.0)


@pytest.mark.parametrize("window", [1, 44, 128, 300])
@pytest.mark.parametrize("sinks", [0, 4])
def test_the_kernels_work_list_holds_every_block_that_is_seen(window: int, sinks: int) -> None:
    begins = begins_of_documents()
    length = begins.shape[1]
    mask = window_kernels.window_blocks(begins, window, sinks, None)

    index = torch.arange(length)
    place = index - begins.unsqueeze(2)
    seen = Reach(window, sinks).sees(index[:, None] - index, place)
    beyond = -length % BLOCK
    padded = torch.nn.functional.pad(seen, (0, beyond, 0, beyond))
    is_seen = padded.unflatten(2, (-1, BLOCK)).unflatten(1, (-1, BLOCK)).any(4).any(2)

    # A block's sinks may lie in two, its window in one more than its own length takes.
    most = 2 + 1 + math.ceil((window - 1) / BLOCK)
    n_rows, n_blocks = is_seen.shape[:2]
    for row in range(n_rows):
        for block in range(n_blocks):
            count = int(mask.kv_num_blocks[row, 0, block])
            listed = mask.kv_indices[row, 0, block, :count].tolist()
            needed = is_seen[row, block].nonzero().flatten().tolist()
            assert listed == sorted(set(listed))
            assert set(needed) <= set(listed)
            assert len(listed) <= most


def begins_of_documents() -> Tensor:
    """Documents begin within blocks and at their borders; some have their sinks in two blocks."""
    begins = torch.zeros(2, 700, dtype=torch.long)
    for row, starts in enumerate([(0, 126, 256, 390), (0, 5)]):
        for first in starts:
            begins[row, first:] = first
    return begins


@torch.no_grad()
def test_no_memory_grows_with_the_square_of_the_length() -> None:
    """The largest tensor that a forward makes has as many elements per token at 4,096 tokens as at
    1,024."""
    teacher = make_family_model("llama", max_position_embeddings=4096)
    student = windowed_student(teacher, HeadPlan.none(teacher), d_state=0)
    per_token = {}
    for length in (1024, 4096):
        ids = ids_of(teacher, n_rows=1, length=length)
        with LargestTensor() as largest:
            student.model(ids, use_cache=False)
        per_token[length] = largest.n_elements / length
    assert per_token[4096] == per_token[1024]
