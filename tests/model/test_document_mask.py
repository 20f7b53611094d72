"""Packed rows without a mask of all pairs: FlashAttention's variable-length form, FlexAttention, and the mask itself.

FlashAttention needs a GPU: `flash` does what it does, by its documentation, document by document.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from students import mixed_student
from test_segments import allocations
from torch import Tensor
from training import small_config, small_models
from transformers import PreTrainedModel

from hybrid_distill.data import Batch, cu_seqlens, pick_rows
from hybrid_distill.model import HybridForCausalLM, documents, packed_inputs
from hybrid_distill.model.documents import DocumentMask
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
    assert cu_seqlens_q is cu_seqlens_k and cu_seqlens_q.dtype == torch.int32 and cu_seqlens_q.ndim == 1
    assert borders[0] == 0 and borders[-1] == len(q) == len(k) and max_seqlen_q == max_seqlen_k and causal
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
        documents.append(F.scaled_dot_product_attention(*parts, scale=softmax_scale, **options).transpose(0, 1))
    return torch.cat(documents)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """``as_on_a_gpu(function)``: packed rows run it, or FlexAttention with None, from now on."""

    def choose(function: Any) -> None:
        monkeypatch.setattr(documents, "_has_document_attention", lambda device: True)
        monkeypatch.setattr(documents, "_flash_attention", lambda: function)

    return choose


def packed_rows(length: int = LENGTH, mean: int = 20) -> Batch:
    """Two rows of random documents, with other borders in each."""
    generator = torch.Generator().manual_seed(0)
    seq_idx = (torch.rand(2, length, generator=generator) < 1 / mean).long().cumsum(1)
    seq_idx = seq_idx - seq_idx[:, :1]
    lengths = torch.stack([row.bincount(minlength=int(seq_idx.max()) + 1) for row in seq_idx])
    ids = torch.randint(2, 99, seq_idx.shape, generator=generator)
    return {"input_ids": ids, "seq_idx": seq_idx, "mask": torch.ones_like(ids, dtype=torch.bool), "lengths": lengths}


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
@pytest.mark.parametrize("kernel", [flash, pytest.param(None, marks=pytest.mark.slow, id="flex")])
@pytest.mark.parametrize("family", FAMILIES)
def test_documents_and_windows_without_their_mask(family, kernel, family_model, as_on_a_gpu):
    """For each kind of layer the same attention, and a teacher and its student the same logits but for rounding."""
    batch = packed_rows()
    shape = {"head_dim": 16} if kernel else {"head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
    teacher = family_model(family, **FAMILIES[family] | shape).bfloat16()
    models = [teacher, mixed_student(teacher).bfloat16()] if kernel else [teacher]  # one shape: compiled once
    q, k, v = torch.randn(3, 2, 4, LENGTH, 16).bfloat16()
    expected = [logits(model, batch) for model in models]
    plain = packed_inputs(batch["seq_idx"], config=teacher.config)["attention_mask"]
    as_on_a_gpu(kernel)
    for borders in (None, cu_seqlens(batch)):
        found = packed_inputs(batch["seq_idx"], config=teacher.config, cu_seqlens=borders)["attention_mask"]
        for kind, mask in found.items() if isinstance(found, dict) else [(None, found)]:
            numbers = plain if kind is None else plain[kind]
            assert isinstance(mask, DocumentMask) and mask.shape == numbers.shape and torch.equal(mask + 0, numbers + 0)
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3)
            close(attended, F.scaled_dot_product_attention(q, k, v, attn_mask=numbers, scale=0.3))
        for model, logits_BLV in zip(models, expected):
            close(logits(model, batch, borders), logits_BLV, 2e-2)  # after three layers that round


@pytest.mark.parametrize("settings", [{"target": "layer", "train": "mixer"}, {"name": "distill"}])
def test_a_stage_trains_the_same_without_the_mask(settings, as_on_a_gpu):
    """Kept heads too; the borders come with the batch, so that the host does not wait for them."""
    losses, gradients = [], []
    batch = packed_rows()
    for turn in range(2):
        if turn:
            as_on_a_gpu(flash)
        stage = make_stage(small_config(**settings, precision="bf16"), *small_models()).train()
        loss = stage(batch).total
        loss.backward()
        losses.append(loss.item())
        gradients.append(torch.cat([p.grad.flatten() for p in stage.parameters() if p.grad is not None]))
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


def test_blocks_of_documents_are_those_of_their_mask(as_on_a_gpu):
    as_on_a_gpu(None)
    seq_idx = packed_rows(MANY, mean=250)["seq_idx"]
    config = small_models()[1].config
    mask = packed_inputs(seq_idx, config=config)["attention_mask"]
    begins = F.pad(seq_idx[:, 1:] != seq_idx[:, :-1], (1, 0), value=True)
    seen = torch.zeros(2, 64, 64, dtype=torch.int32)
    for row, token in begins.nonzero().tolist():
        end = next((t for t in range(token + 1, MANY) if begins[row, t]), MANY) - 1
        for block in range(token // 128, end // 128 + 1):
            seen[row, block, token // 128 : block + 1] = 1
    assert torch.equal(mask.blocks.to_dense()[:, 0], seen)
    assert mask.blocks.kv_indices.nbytes < MANY**2 / 500


def test_a_mask_of_documents_has_its_numbers_for_any_other_function(as_on_a_gpu):
    batch = packed_rows()
    config = small_models()[1].config
    plain = packed_inputs(batch["seq_idx"], config=config)["attention_mask"]
    as_on_a_gpu(None)
    mask = packed_inputs(batch["seq_idx"], config=config)["attention_mask"]
    assert isinstance(mask[:, :, :, :LENGTH], DocumentMask) and mask.dtype == torch.bool and mask.dim() == 4
    for change in (lambda m: m[..., :5], lambda m: torch.where(m, 0.0, -1.0), lambda m: torch.cat([m, m]), torch.sum):
        assert torch.equal(change(mask), change(plain)) and not isinstance(change(mask), DocumentMask)
    q = torch.randn(2, 2, LENGTH, 8)  # too narrow for FlexAttention
    attended = [F.scaled_dot_product_attention(q, q, q, attn_mask=m) for m in (mask, plain)]
    assert torch.equal(*attended)
