"""Packed rows without a mask of all pairs: FlashAttention's variable-length form, FlexAttention, and the mask itself.

FlashAttention needs a GPU: `flash` does what it does, by its documentation, document by document.
"""

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import make_family_model
from students import mixed_student
from test_segments import allocations
from torch import Tensor
from torch.nn.attention import flex_attention
from training import small_config, small_models
from transformers import PreTrainedModel

from hybrid_distill.data import Batch, cu_seqlens, pick_rows
from hybrid_distill.model import (
    HybridForCausalLM,
    document_kernels,
    documents,
    packed_inputs,
)
from hybrid_distill.model.document_mask import DocumentMask
from hybrid_distill.train.stages import make_stage

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {}, "mistral": {"sliding_window": 4}, "olmo3": {"sliding_window": 4},
    "llama4": {"attention_chunk_size": 5},
}  # fmt: skip
LENGTH, MANY = 150, 8192


def flash(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, block_table: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """flash_attn_varlen_func's signature and what it asks for: [tokens, heads, head dim], 16 bits, int32 borders."""
    borders = cu_seqlens_q.tolist()
    assert q.dtype == k.dtype == v.dtype and q.dtype in (torch.float16, torch.bfloat16)
    assert (
        cu_seqlens_q is cu_seqlens_k
        and cu_seqlens_q.dtype == torch.int32
        and cu_seqlens_q.ndim == 1
    )
    assert (
        borders[0] == 0
        and borders[-1] == len(q) == len(k)
        and max_seqlen_q == max_seqlen_k
        and causal
    )
    assert not dropout_p and window_size[1] in (-1, 0)
    documents = []
    for begin, end in pairwise(borders):
        assert 0 <= end - begin <= max_seqlen_q
        parts = (t[begin:end].transpose(0, 1) for t in (q, k, v))
        reach = torch.ones(0)
        options: dict[str, Any] = {"is_causal": True}
        if window_size[0] >= 0:
            place = torch.arange(end - begin)
            reach = place[:, None] - place
            options = {"attn_mask": (reach >= 0) & (reach <= window_size[0])}
        documents.append(
            F.scaled_dot_product_attention(
                *parts, scale=softmax_scale, **options
            ).transpose(0, 1)
        )
    return torch.cat(documents)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """``as_on_a_gpu(function)``: packed rows run it, or FlexAttention with None, from now on."""

    def choose(function: Any) -> None:
        monkeypatch.setattr(documents, "has_document_attention", lambda device: True)
        monkeypatch.setattr(document_kernels, "flash_function", lambda: function)

    return choose


def packed_rows(length: int = LENGTH, mean: int = 20) -> Batch:
    """Two rows of random documents, with other borders in each."""
    generator = torch.Generator().manual_seed(0)
    seq_idx = (torch.rand(2, length, generator=generator) < 1 / mean).long().cumsum(1)
    seq_idx = seq_idx - seq_idx[:, :1]
    lengths = torch.stack(
        [row.bincount(minlength=int(seq_idx.max()) + 1) for row in seq_idx]
    )
    ids = torch.randint(2, 99, seq_idx.shape, generator=generator)
    return {
        "input_ids": ids,
        "seq_idx": seq_idx,
        "mask": torch.ones_like(ids, dtype=torch.bool),
        "lengths": lengths,
    }


def logits(model: PreTrainedModel, batch: Batch, borders: Tensor | None = None) -> Tensor:
    ids, seq_idx = batch["input_ids"], batch["seq_idx"]
    if isinstance(model, HybridForCausalLM):
        return model(ids, seq_idx=seq_idx, cu_seq_lens_q=borders).logits
    packed = packed_inputs(seq_idx, model.dtype, model.config, cu_seqlens=borders)
    return model(ids, use_cache=False, **packed).logits


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-3) -> None:
    """The mean error is at most ``tolerance`` of the mean size."""
    error = (found.float() - expected.float()).abs().mean() / expected.float().abs().mean()
    assert error < tolerance, error


@torch.no_grad()
@pytest.mark.parametrize(
    "kernel", [flash, pytest.param(None, marks=pytest.mark.slow, id="flex")]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_documents_and_windows_without_their_mask(family, kernel, as_on_a_gpu):
    """For each kind of layer the same attention, and a teacher and its student the same logits but for rounding."""
    batch = packed_rows()
    shape = (
        {"head_dim": 16}
        if kernel
        else {"head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
    )
    teacher = make_family_model(family, **FAMILIES[family] | shape).bfloat16()
    models = (
        [teacher, mixed_student(teacher).bfloat16()] if kernel else [teacher]
    )  # one shape: compiled once
    q, k, v = torch.randn(3, 2, 4, LENGTH, 16).bfloat16()
    expected = [logits(model, batch) for model in models]
    plain = packed_inputs(batch["seq_idx"], config=teacher.config)["attention_mask"]
    as_on_a_gpu(kernel)
    for borders in (None, cu_seqlens(batch)):
        found = packed_inputs(batch["seq_idx"], config=teacher.config, cu_seqlens=borders)[
            "attention_mask"
        ]
        for kind, mask in found.items() if isinstance(found, dict) else [(None, found)]:
            numbers = plain if kind is None else plain[kind]
            assert (
                isinstance(mask, DocumentMask)
                and mask.shape == numbers.shape
                and torch.equal(mask + 0, numbers + 0)
            )
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3)
            close(
                attended,
                F.scaled_dot_product_attention(q, k, v, attn_mask=numbers, scale=0.3),
            )
        for model, logits_BLV in zip(models, expected):
            close(
                logits(model, batch, borders), logits_BLV, 2e-2
            )  # after three layers that round


@pytest.mark.parametrize(
    "settings", [{"target": "layer", "train": "mixer"}, {"name": "distill"}]
)
def test_a_stage_trains_the_same_without_the_mask(settings, as_on_a_gpu):
    """Kept heads too; the borders come with the batch, so that the host does not wait for them."""
    losses, gradients = [], []
    batch = packed_rows()
    for turn in range(2):
        if turn:
            as_on_a_gpu(flash)
        stage = make_stage(
            small_config(**settings, precision="bf16"), *small_models()
        ).train()
        loss = stage(batch).total
        loss.backward()
        losses.append(loss.item())
        gradients.append(
            torch.cat([p.grad.flatten() for p in stage.parameters() if p.grad is not None])
        )
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    close(gradients[1], gradients[0], 3e-2)


def test_a_row_of_8192_tokens_costs_no_mask(as_on_a_gpu):
    """Bytes at the fullest of a step of alignment, whose kept heads are trained: a mask has a byte for each pair."""
    batch, peaks = pick_rows(packed_rows(MANY, mean=250), slice(1)), []
    config = small_config(target="layer", train="mixer", precision="bf16")
    stage = make_stage(config, *small_models(num_hidden_layers=1)).train()
    for turn in range(2):
        if turn:
            as_on_a_gpu(flash)
        peaks.append(allocations(lambda: stage(batch).total.backward())[1])
    assert peaks[1] < MANY**2 < peaks[0] - peaks[1]


BLOCK = document_kernels.FLEX_BLOCK
REACHES: dict[str, tuple[str, dict[str, Any]]] = {
    "documents": ("llama", {}),
    "short windows": ("mistral", {"sliding_window": 40}),
    "long windows": ("mistral", {"sliding_window": 300}),
    "chunks": ("llama4", {"attention_chunk_size": 200}),
}


def masks_of(
    reach: str, length: int, mean: int, as_on_a_gpu
) -> list[tuple[DocumentMask, Tensor]]:
    """Each kind of mask of two rows, with its numbers [2, 1, L, L]."""
    family, settings = REACHES[reach]
    config = make_family_model(family, **settings).config
    seq_idx = packed_rows(length, mean)["seq_idx"]
    numbers = packed_inputs(seq_idx, config=config)["attention_mask"]
    as_on_a_gpu(None)
    masks = packed_inputs(seq_idx, config=config)["attention_mask"]
    if not isinstance(masks, dict):
        return [(masks, numbers)]
    return [(mask, numbers[kind]) for kind, mask in masks.items()]


def listed(counts: Tensor, indices: Tensor) -> Tensor:
    """Which blocks a BlockMask's lists name, [B, K, K], each at most once."""
    named = torch.zeros_like(indices[:, 0])
    for row, block, place in (
        (torch.arange(indices.shape[-1]) < counts[:, 0].unsqueeze(-1)).nonzero().tolist()
    ):
        named[row, block, indices[row, 0, block, place]] += 1
    return named


@pytest.mark.parametrize("reach", REACHES)
@pytest.mark.parametrize(
    ("length", "mean"), [(1024, 250), (1000, 600), (129, 90), (257, 10**6)]
)
def test_blocks_of_documents_are_those_of_their_mask(reach, length, mean, as_on_a_gpu):
    """A block is evaluated if some pair in it is seen, and read whole if every query sees all of its keys."""
    for mask, numbers in masks_of(reach, length, mean, as_on_a_gpu):
        beyond = -length % BLOCK
        # Queries beyond the end see nothing that counts; keys beyond the end must never be read whole.
        by_block = (
            F.pad(numbers[:, 0], (0, beyond, 0, beyond))
            .unflatten(2, (-1, BLOCK))
            .unflatten(1, (-1, BLOCK))
        )
        is_query = (torch.arange(length + beyond) < length).view(-1, BLOCK, 1, 1)
        some = by_block.any(4).any(2)
        whole = (by_block | ~is_query).all(4).all(2)
        blocks = mask.blocks
        partial_kv = listed(blocks.kv_num_blocks, blocks.kv_indices)
        whole_kv = listed(blocks.full_kv_num_blocks, blocks.full_kv_indices)
        assert torch.equal(partial_kv, (some & ~whole).int()) and torch.equal(
            whole_kv, whole.int()
        )
        # The backward reads the same blocks by key.
        assert torch.equal(listed(blocks.q_num_blocks, blocks.q_indices), partial_kv.mT)
        assert torch.equal(
            listed(blocks.full_q_num_blocks, blocks.full_q_indices), whole_kv.mT
        )
        if (reach, length) in (
            ("documents", 1000),
            ("long windows", 1024),
            ("documents", 257),
        ):
            assert whole.any(), "whole blocks were not tested"


def test_blocks_of_a_long_row_are_small(as_on_a_gpu):
    as_on_a_gpu(None)
    config = small_models()[1].config
    mask = packed_inputs(packed_rows(MANY, mean=250)["seq_idx"], config=config)[
        "attention_mask"
    ]
    assert mask.blocks.kv_indices.nbytes < MANY**2 / 500


HEADS = [(4, 4), (4, 2), (6, 1), (3, 3)]


@pytest.mark.parametrize(("n_heads", "n_kv_heads"), HEADS)
@pytest.mark.parametrize("length", [256, 300])
@pytest.mark.parametrize("reach", REACHES)
def test_flex_attention_and_its_backward(
    reach, length, n_heads, n_kv_heads, as_on_a_gpu, monkeypatch: pytest.MonkeyPatch
):
    """Values and gradients of the additive mask. FlexAttention refuses only at its border to train on a CPU."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *args: None)
    monkeypatch.setattr(
        document_kernels, "compiled_flex_attention", lambda: flex_attention.flex_attention
    )
    for mask, numbers in masks_of(reach, length, 150, as_on_a_gpu):
        heads = [
            torch.randn(2, n, length, 16, requires_grad=True)
            for n in (n_heads, n_kv_heads, n_kv_heads)
        ]
        weights = torch.randn(2, n_heads, length, 16)
        additive = torch.zeros(numbers.shape).masked_fill_(
            ~numbers, torch.finfo(torch.float32).min
        )
        results = []
        for attn_mask in (mask, additive):
            out = F.scaled_dot_product_attention(
                *heads, attn_mask=attn_mask, scale=0.3, enable_gqa=True
            )
            results.append([out, *torch.autograd.grad((out * weights).sum(), heads)])
        for found, expected in zip(*results):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reach", REACHES)
@pytest.mark.parametrize("length", [512, 300])
def test_attention_by_its_blocks_alone(reach, length, as_on_a_gpu):
    """The kernels' work lists: whole blocks without the mask, the others with it; forward by query, backward by key.

    They must come to the pairs of the mask, no more and no fewer. A CPU runs no backward kernel that would read them.
    """
    for mask, numbers in masks_of(reach, length, 200, as_on_a_gpu):
        blocks, padded = mask.blocks, length + -length % BLOCK
        inside = F.pad(numbers, (0, padded - length, 0, padded - length))
        partial = listed(blocks.kv_num_blocks, blocks.kv_indices)
        whole = listed(blocks.full_kv_num_blocks, blocks.full_kv_indices)
        by_query = _seen_by_blocks(partial, whole, inside)
        partial = listed(blocks.q_num_blocks, blocks.q_indices).mT
        whole = listed(blocks.full_q_num_blocks, blocks.full_q_indices).mT
        by_key = _seen_by_blocks(partial, whole, inside)
        for seen in (by_query, by_key):
            assert torch.equal(seen[:, :, :length, :length], numbers)
        assert not by_query[:, :, :length, length:].any()


def _seen_by_blocks(partial: Tensor, whole: Tensor, inside: Tensor) -> Tensor:
    def spread(blocks: Tensor) -> Tensor:
        return (
            blocks.bool()
            .repeat_interleave(BLOCK, 1)
            .repeat_interleave(BLOCK, 2)
            .unsqueeze(1)
        )

    return spread(whole) | (spread(partial) & inside)


def test_flex_attention_compiles_each_shape_once_and_static(
    as_on_a_gpu, monkeypatch: pytest.MonkeyPatch
):
    """A row of 16 tokens, as the self-check has, compiles nothing; other documents of a shape compile nothing new."""
    graphs: list[list[Any]] = []

    def record(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(inputs)
        return graph.forward

    real = torch.compile
    document_kernels.compiled_flex_attention.cache_clear()
    monkeypatch.setattr(
        torch,
        "compile",
        lambda function, **options: real(function, backend=record, **options),
    )
    config = small_models()[1].config
    as_on_a_gpu(None)
    counts = []
    for length, mean in (
        (16, 5),
        (256, 60),
        (256, 30),
        (384, 60),
        (384, 200),
        (256, 100),
        (16, 4),
    ):
        mask = packed_inputs(packed_rows(length, mean)["seq_idx"], config=config)[
            "attention_mask"
        ]
        assert isinstance(mask, DocumentMask)
        q = torch.randn(2, 4, length, 16)
        numbers = torch.zeros(2, 1, length, length, dtype=torch.bool) | mask
        found = F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
        torch.testing.assert_close(
            found, F.scaled_dot_product_attention(q, q, q, attn_mask=numbers)
        )
        counts.append(len(graphs))
    document_kernels.compiled_flex_attention.cache_clear()
    assert counts == [0, 1, 1, 2, 2, 2, 2]
    sizes = [
        size
        for inputs in graphs
        for t in inputs
        if isinstance(t, Tensor)
        for size in t.shape
    ]
    assert all(type(size) is int for size in sizes) and not any(
        isinstance(t, torch.SymInt) for g in graphs for t in g
    )


@torch.no_grad()
@pytest.mark.slow
def test_flex_attention_compiled_for_this_cpu(as_on_a_gpu):
    """The forward that inductor compiles, with whole blocks and a ragged end."""
    for mask, numbers in masks_of("long windows", 600, 500, as_on_a_gpu):
        assert mask.blocks.full_kv_num_blocks.any()
        q, k, v = torch.randn(2, 4, 600, 16), *torch.randn(2, 2, 2, 600, 16)
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        expected = F.scaled_dot_product_attention(
            q, k, v, attn_mask=numbers, enable_gqa=True
        )
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "implementation",
    ["flash_attention_2", "flash_attention_3", "flex_attention", "paged|sdpa"],
)
def test_other_attention_is_refused_by_name(implementation: str) -> None:
    for packs in (None, "sdpa", "eager"):
        documents.check_packs(packs)
    with pytest.raises(ValueError, match=re.escape(implementation)):
        documents.check_packs(implementation)


def test_a_mask_of_documents_has_its_numbers_for_any_other_function(as_on_a_gpu):
    batch = packed_rows()
    config = small_models()[1].config
    plain = packed_inputs(batch["seq_idx"], config=config)["attention_mask"]
    as_on_a_gpu(None)
    mask = packed_inputs(batch["seq_idx"], config=config)["attention_mask"]
    assert (
        isinstance(mask[:, :, :, :LENGTH], DocumentMask)
        and mask.dtype == torch.bool
        and mask.dim() == 4
    )
    for change in (
        lambda m: m[..., :5],
        lambda m: torch.where(m, 0.0, -1.0),
        lambda m: torch.cat([m, m]),
        torch.sum,
    ):
        assert torch.equal(change(mask), change(plain)) and not isinstance(
            change(mask), DocumentMask
        )
    q = torch.randn(2, 2, LENGTH, 8)  # too narrow for FlexAttention
    attended = [F.scaled_dot_product_attention(q, q, q, attn_mask=m) for m in (mask, plain)]
    assert torch.equal(*attended)
