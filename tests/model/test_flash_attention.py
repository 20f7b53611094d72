"""Calls of flash-attn against its documented definition in float64; its kernels need a GPU."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_distill.model import document_kernels
from hybrid_distill.model.document_mask import DocumentMask, visible

LENGTHS = ((5, 1, 30), (12, 24))
"""Documents of each of two rows."""
LENGTH = 36


def varlen_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    deterministic: bool = False,
) -> Tensor:
    """Compute what `flash_attn_varlen_func` documents, for q [T, H, P] and k, v [T, KV heads, P].

    Query i of a sequence of n queries and m keys sees the keys from i + m - n - window_size[0] to
    i + m - n + window_size[1], where -1 stands for no limit; ``causal`` sets the right limit to 0.
    Query head h reads KV head h // (H / KV heads).
    """
    assert q.dtype == k.dtype == v.dtype
    assert q.dtype in (torch.float16, torch.bfloat16)
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert dropout_p == 0.0
    scale = 1 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale
    left, right = window_size
    if causal:
        right = 0
    n_heads = q.shape[1]
    n_repeats = n_heads // k.shape[1]
    # What belongs to no sequence stays NaN.
    out = torch.full(q.shape, math.nan, dtype=torch.float64)
    for row in range(len(cu_seqlens_q) - 1):
        queries = slice(int(cu_seqlens_q[row]), int(cu_seqlens_q[row + 1]))
        keys = slice(int(cu_seqlens_k[row]), int(cu_seqlens_k[row + 1]))
        n_queries = queries.stop - queries.start
        n_keys = keys.stop - keys.start
        assert n_queries <= max_seqlen_q
        assert n_keys <= max_seqlen_k
        is_seen = visible_keys(n_queries, n_keys, left, right)
        for head in range(n_heads):
            kv_head = head // n_repeats
            query = q[queries, head].double()
            key = k[keys, kv_head].double()
            value = v[keys, kv_head].double()
            scores = query @ key.T * scale
            weights = scores.masked_fill(~is_seen, -math.inf).softmax(dim=-1)
            out[queries, head] = weights @ value
    return out.to(q.dtype)


def visible_keys(n_queries: int, n_keys: int, left: int, right: int) -> Tensor:
    """Return which keys each query of a sequence sees; see `varlen_reference`."""
    own_key = torch.arange(n_queries)[:, None] + n_keys - n_queries
    key = torch.arange(n_keys)
    is_seen = torch.ones(n_queries, n_keys, dtype=torch.bool)
    if left >= 0:
        is_seen &= key >= own_key - left
    if right >= 0:
        is_seen &= key <= own_key + right
    return is_seen


def first_tokens(window: int | None) -> Tensor:
    """Return the first token that each token sees."""
    rows = []
    for lengths in LENGTHS:
        begins = []
        for length in lengths:
            begins += [len(begins)] * length
        rows.append(begins)
    first_BL = torch.tensor(rows)
    if window is not None:
        first_BL = first_BL.maximum(torch.arange(LENGTH) - window + 1)
    return first_BL


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("window", [None, 1, 7])
@pytest.mark.parametrize("n_kv_heads", [4, 2, 1])
def test_flash_attention_is_called_by_its_definition(
    n_kv_heads: int,
    window: int | None,
    scale: float | None,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(document_kernels, "flash_function", lambda: varlen_reference)
    query = torch.randn(2, 4, LENGTH, 16, dtype=dtype)
    key = torch.randn(2, n_kv_heads, LENGTH, 16, dtype=dtype)
    value = torch.randn(2, n_kv_heads, LENGTH, 16, dtype=dtype)
    first_BL = first_tokens(window)
    # Of both rows, one after the other.
    borders = torch.tensor([0, 5, 6, 36, 48, 72])
    mask = DocumentMask.of(first_BL, borders, window)
    options: dict[str, Any] = {"scale": scale, "enable_gqa": True}
    attend = torch.nn.functional.scaled_dot_product_attention

    attended = attend(query, key, value, attn_mask=mask, **options)

    exact = attend(
        query.double(),
        key.double(),
        value.double(),
        attn_mask=visible(first_BL).unsqueeze(1),
        **options,
    )
    # Both sum in float64: they may round to neighbors, no further.
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(attended, exact.to(dtype), rtol=eps, atol=0.0)
