"""Attention kernels for packed documents: flash-attn for variable lengths, and FlexAttention.

Shapes: B batch, L length, H heads, P head dim, K blocks, T tokens of all rows concatenated.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, wraps
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention

from .once import once

FLEX_BLOCK = 128  # tokens per block of FlexAttention's masks
FLASH_DTYPES = (torch.float16, torch.bfloat16)
FLASH_WIDTH = 256  # widest head of flash-attn's kernels
RECOMPILE_LIMIT = 256
"""Programs of one function: layers that keep other heads need their own, as do rows of other shapes."""
MOST_LENGTHS = 8
"""Lengths of rows that FlexAttention compiles for where nothing says that rows have one length."""
FLOAT32_SHARED = 131_074
"""Bytes of shared memory that FlexAttention takes in float32 with heads wider than 64 (pytorch issue 133254)."""

_is_declared = False
_declared_length: int | None = None
_lengths: set[int] = set()


@contextmanager
def compiling_for(length: int | None) -> Iterator[None]:
    """Let FlexAttention run, while the context is open, for rows of this length alone; None for all rows.

    It compiles for each length anew. Holds in all threads: gradient checkpointing runs layers again in those of the
    backward pass.
    """
    global _is_declared, _declared_length
    before = (_is_declared, _declared_length)
    _is_declared = True
    _declared_length = length
    try:
        yield
    finally:
        _is_declared, _declared_length = before


def has_document_attention(device: torch.device) -> bool:
    """Return True if a device has kernels that are faster than a materialized mask."""
    return device.type == "cuda"


@once
def flash_function() -> Any:
    """Return FlashAttention for variable-length sequences; None if flash-attn is not installed."""
    try:
        return importlib.import_module("flash_attn").flash_attn_varlen_func
    except (ImportError, AttributeError):
        return None


def flash_runs(*qkv_BHLP: Tensor) -> bool:
    """Return True if flash-attn is installed and takes these queries, keys and values."""
    if flash_function() is None:
        return False
    width = qkv_BHLP[0].shape[-1]
    return width <= FLASH_WIDTH and all(
        t.dtype in FLASH_DTYPES and t.shape[-1] == width for t in qkv_BHLP
    )


def flash_attend(
    query_BHLP: Tensor,
    key_BHLP: Tensor,
    value_BHLP: Tensor,
    borders: Tensor,
    window: int | None,
    dropout_p: float,
    scale: float | None,
) -> Tensor:
    """Attend within documents; ``borders``, int32, are their ends in all rows concatenated, 0 first."""
    batch, _, length, _ = query_BHLP.shape
    out_THP = flash_function()(
        query_BHLP.transpose(1, 2).flatten(0, 1),
        key_BHLP.transpose(1, 2).flatten(0, 1),
        value_BHLP.transpose(1, 2).flatten(0, 1),
        borders,
        borders,
        # An upper bound of a document's length. The longest one would cost a synchronization.
        length,
        length,
        dropout_p=dropout_p,
        softmax_scale=scale,
        causal=True,
        # flash-attn counts the tokens before the current one; -1 stands for no limit.
        window_size=(-1, -1) if window is None else (window - 1, 0),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return out_THP.unflatten(0, (batch, length)).transpose(1, 2)


def as_autocast(
    query_BHLP: Tensor, key_BHLP: Tensor, value_BHLP: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Cast queries, keys and values as sdpa does under autocast.

    Other kernels are not: rotation by float32 angles leaves queries and keys in float32, beside values
    in the dtype of autocast.
    """
    dtype = autocast_dtype(query_BHLP)
    if dtype is None:
        return query_BHLP, key_BHLP, value_BHLP
    return query_BHLP.to(dtype), key_BHLP.to(dtype), value_BHLP.to(dtype)


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """Return the dtype of autocast on a tensor's device; None where it is off."""
    device = tensor.device.type
    if not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def flex_runs(query_BHLP: Tensor, *, by_default: bool) -> bool:
    """Return True if FlexAttention is able to run these queries and worth its compilation.

    Outside `compiling_for`, it runs only ``by_default``, and for at most `MOST_LENGTHS` lengths.
    """
    length, width = query_BHLP.shape[-2:]
    # A row within one block skips nothing; compiling for it would cost more than its mask.
    if length <= FLEX_BLOCK or width < 16:
        return False
    if not _is_worth_compiling(length, by_default):
        return False
    dtype = autocast_dtype(query_BHLP) or query_BHLP.dtype
    device = query_BHLP.device
    return device.type == "cpu" or (has_triton() and flex_fits(dtype, width, device))


def _is_worth_compiling(length: int, by_default: bool) -> bool:
    if _is_declared:
        return _declared_length in (None, length)
    if not by_default:
        return False
    if not torch.compiler.is_compiling() and len(_lengths) < MOST_LENGTHS:
        _lengths.add(length)
    return length in _lengths


@once
def flex_fits(dtype: torch.dtype, width: int, device: torch.device) -> bool:
    """Return True if a GPU has the shared memory that FlexAttention's blocks take."""
    if dtype != torch.float32 or width <= 64:
        return True
    properties = torch.cuda.get_device_properties(device)
    # AMD's do not tell.
    return getattr(properties, "shared_memory_per_block_optin", FLOAT32_SHARED) >= FLOAT32_SHARED


@once
def has_triton() -> bool:
    return find_spec("triton") is not None


def flex_function() -> Any:
    """Return FlexAttention, compiled unless a compiler traces it already."""
    if torch.compiler.is_compiling():
        return flex_attention.flex_attention
    return compiled_flex_attention()


@lru_cache
def compiled_flex_attention() -> Any:
    """Compile FlexAttention for static shapes, once per process.

    Each head count compiles anew; past the limit of programs, FlexAttention falls back to its dense form.
    """
    return compile_static(flex_attention.flex_attention)


def compile_static(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function anew for each of up to `RECOMPILE_LIMIT` shapes, in whichever thread it is called.

    By default, a second shape recompiles with symbolic sizes: slower kernels, for rows whose length never changes.
    """
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        options: Any = {"recompile_limit": RECOMPILE_LIMIT}
        return torch.compile(function, dynamic=False, **options)
    compiled = torch.compile(function, dynamic=False)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        # Since torch 2.12 a thread sees only its own settings: that of backward passes, for one, which recomputes
        # what gradient checkpointing dropped.
        config: Any = torch._dynamo.config
        config.recompile_limit = max(RECOMPILE_LIMIT, config.recompile_limit)
        return compiled(*args, **kwargs)

    return call


def block_mask(first_BL: Tensor) -> flex_attention.BlockMask:
    """Make FlexAttention's mask: the blocks of keys that a block of queries sees in part or whole.

    ``first_BL`` is the first token that each token sees. Only blocks seen in part evaluate the mask. What is seen
    begins no earlier for a later token, so the first query of a block knows its first visible block, and the last
    query knows from where on all of them see everything.
    """
    length = first_BL.shape[1]
    first_seen_BK = first_BL[:, ::FLEX_BLOCK] // FLEX_BLOCK
    n_blocks = first_seen_BK.shape[1]
    block_K = torch.arange(n_blocks, device=first_BL.device)
    last_query_K = (block_K * FLEX_BLOCK + FLEX_BLOCK - 1).clamp(max=length - 1)
    # Rounded up. The diagonal block is never whole: its first query does not see its last key.
    first_whole_BK = -(-first_BL[:, last_query_K] // FLEX_BLOCK)
    first_whole_BK = first_whole_BK.minimum(block_K)
    n_partial_BK = first_whole_BK - first_seen_BK + 1
    n_whole_BK = block_K - first_whole_BK

    # Columns beyond a row's count are not read, but must be valid blocks.
    partial_BKK = first_seen_BK.unsqueeze(2) + block_K
    is_diagonal_BKK = block_K >= n_partial_BK.unsqueeze(2) - 1
    partial_BKK = torch.where(is_diagonal_BKK, block_K.unsqueeze(1), partial_BKK)
    whole_BKK = (first_whole_BK.unsqueeze(2) + block_K).clamp(max=n_blocks - 1)
    # Otherwise the mask would be one for whole blocks.
    options: dict[str, Any] = {"seq_lengths": (length, length)} if length % FLEX_BLOCK else {}
    return flex_attention.BlockMask.from_kv_blocks(
        n_partial_BK.unsqueeze(1).int(),
        partial_BKK.unsqueeze(1).int(),
        n_whole_BK.unsqueeze(1).int(),
        whole_BKK.unsqueeze(1).int(),
        BLOCK_SIZE=FLEX_BLOCK,
        mask_mod=lambda b, h, q, kv: (kv >= first_BL[b, q]) & (kv <= q),
        **options,
    )
