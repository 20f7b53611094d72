"""Packed documents: their boundaries in a row, and attention that keeps them separate.

Shapes: B batch, L length, S source length, H heads, P head dim, K blocks, T tokens of all rows concatenated.
"""

from __future__ import annotations

import importlib
from functools import cached_property, lru_cache
from importlib.util import find_spec
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import flex_attention
from torch.utils._pytree import tree_map_only
from transformers import PretrainedConfig

from .ssd import once

FULL = "full_attention"
# Layer types with limited attention, and the config field with their size.
LIMITED = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
CACHE_WITH_PACKING = (
    "packed documents (seq_idx, cu_seq_lens_q, or position_ids that restart) cannot be continued from a cache; "
    "drop the cache, or pass positions that continue from it."
)
PACKING = ("sdpa", "eager")
"""Attention implementations whose mask arguments can keep packed documents separate."""
FLEX_BLOCK = 128  # tokens per block of FlexAttention's masks


def layer_windows(config: PretrainedConfig) -> list[int | None]:
    """Return each layer's attention window in tokens, the current token included; None for full attention."""
    return [window for _, window in _kinds_and_windows(config)]


def _kinds_and_windows(config: PretrainedConfig | None) -> list[tuple[str, int | None]]:
    """Return the kind of each layer, from `LIMITED` or `FULL`, and its window.

    Reads only fields that the family's configs define: a config.json may contain others, which no model reads.
    """
    if config is None:
        return []
    config = config.get_text_config(decoder=True)
    known = _known_fields(config.__class__)  # torch 2.6 cannot compile type(config)
    fields = {name: getattr(config, name, None) for name in ("layer_types", *LIMITED.values()) if name in known}
    kinds = fields.get("layer_types")
    if kinds is None:
        limits = [kind for kind, field in LIMITED.items() if fields.get(field) is not None]
        kinds = [limits[0] if limits else FULL] * config.num_hidden_layers
    return [(kind, fields[LIMITED[kind]]) if kind in LIMITED else (FULL, None) for kind in kinds]


@once
def _known_fields(kind: type[PretrainedConfig]) -> tuple[str, ...]:
    """Return which of ``layer_types`` and the fields of `LIMITED` the family's configs define."""
    names = ("layer_types", *LIMITED.values())
    try:
        default = kind()
    except Exception:  # remote code may require arguments
        return names
    return tuple(name for name in names if hasattr(default, name))


def seq_idx_of_borders(borders: Tensor, batch: int, length: int) -> Tensor:
    """Make seq_idx_BL from the document boundaries in all rows concatenated: 0, the first document's length, ..."""
    place_T = torch.arange(batch * length, device=borders.device)
    return torch.bucketize(place_T, borders.flatten()[1:].long(), right=True).view(batch, length)


def seq_idx_of_positions(
    position_BL: Tensor, attention_mask: Any, token_mask_BL: Tensor | None, n_past: Any, cached: bool
) -> Tensor | None:
    """Make seq_idx_BL: a document starts where positions do not increase; None if they increase everywhere.

    Without a mask and a cache, a jump by more than 1 is a boundary too, as in transformers. Synchronizes once with the
    device to find out if there are boundaries. A compiled graph cannot: it assumes some, but none with a cache.
    """
    length = position_BL.shape[1]
    if n_past and token_mask_BL is not None:
        n_past = (attention_mask[:, :-length] != 0).sum(dim=1)
    position_BS = F.pad(position_BL, (1, 0))  # starts with the last cached token
    position_BS[:, 0] = n_past - 1
    is_token_BS = torch.ones_like(position_BS, dtype=torch.bool)
    if token_mask_BL is not None:
        is_token_BS[:, 1:] = token_mask_BL != 0
    last_BS = torch.where(is_token_BS, torch.arange(length + 1, device=position_BS.device), 0).cummax(dim=1).values
    rise_BL = position_BS[:, 1:] - position_BS.gather(1, last_BS[:, :-1])
    starts_BL = (rise_BL <= 0) & is_token_BS[:, 1:]
    if attention_mask is None and not cached:
        starts_BL[:, 1:] |= rise_BL[:, 1:] > 1
    if torch.compiler.is_compiling():
        if cached:
            torch.ops.aten._assert_async.msg(~starts_BL.any(), CACHE_WITH_PACKING)
            return None
    elif not starts_BL.any():
        return None
    return starts_BL.cumsum(dim=1)


def packs_by_itself(config: PretrainedConfig, position_ids: Tensor | None, batch: int) -> bool:
    """Return True if the backbone's attention separates documents by `forward`'s own arguments, without a mask."""
    implementation = getattr(config, "_attn_implementation", None) or ""
    if implementation == "flex_attention":
        return position_ids is not None
    return "flash" in implementation and batch == 1


def check_packs(implementation: str | None) -> None:
    """Raise ValueError for attention that cannot run packed rows; None is the default's name."""
    if implementation is not None and implementation not in PACKING:
        raise ValueError(
            f"attention is {implementation!r}, which cannot run packed rows; pass one of "
            f"{', '.join(PACKING)}. With 'sdpa', packed rows run flash-attn's kernels if the package is "
            "installed."
        )


def packed_inputs(
    seq_idx_BL: Tensor,
    dtype: torch.dtype = torch.float32,
    config: PretrainedConfig | None = None,
    mask_BL: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> dict[str, Any]:
    """Make arguments with which any transformers decoder keeps packed documents separate.

    Returns ``position_ids`` [B, L], restarting at 0 with each document, and ``attention_mask`` [B, 1, L, L]: boolean
    if the ``config`` has sdpa (a `DocumentMask` on a GPU), else additive in ``dtype``, which sdpa and eager accept.
    The ``config`` also provides windows and chunks; if layers differ in kind, the mask is a dictionary by layer type.
    ``mask_BL`` is 0 at padding. ``cu_seqlens``, the document boundaries in all rows concatenated, avoids a
    synchronization with the device. Raises ValueError for an attention implementation without such masks.
    """
    implementation = getattr(config, "_attn_implementation", None)
    check_packs(implementation)
    index_L = torch.arange(seq_idx_BL.shape[1], device=seq_idx_BL.device)
    starts_BL = torch.ones_like(seq_idx_BL, dtype=torch.bool)
    starts_BL[:, 1:] = seq_idx_BL[:, 1:] != seq_idx_BL[:, :-1]
    begin_BL = torch.where(starts_BL, index_L, 0).cummax(dim=1).values
    position_ids = index_L - begin_BL
    is_token_BL = torch.ones_like(starts_BL) if mask_BL is None else mask_BL.bool()
    place_BL = is_token_BL.cumsum(dim=1)  # windows count tokens, not padding

    masks = {}
    for kind, window in set(_kinds_and_windows(config)) or {(FULL, None)}:
        first_BL, borders = begin_BL, cu_seqlens
        if window is not None and kind == "sliding_attention":
            first_BL = first_BL.maximum(torch.searchsorted(place_BL, place_BL - window, right=True))
        elif window is not None:
            first_BL, borders, window = index_L - position_ids % window, None, None
        if implementation == "sdpa" and mask_BL is None and _has_document_attention(seq_idx_BL.device):
            masks[kind] = DocumentMask.of(first_BL, borders, window)
            continue
        seen = _seen(first_BL)
        if mask_BL is not None:
            seen = seen & (is_token_BL.unsqueeze(1) | torch.eye(len(index_L), dtype=torch.bool, device=index_L.device))
        masks[kind] = seen.unsqueeze(1) if implementation == "sdpa" else _additive(seen, dtype)
    mask, *others = masks.values()  # torch 2.6 cannot compile popitem()
    return {"position_ids": position_ids, "attention_mask": masks if others else mask}


def _seen(first_BL: Tensor) -> Tensor:
    """Return a boolean mask [B, L, L]: each token sees the tokens from ``first_BL`` to itself."""
    index_L = torch.arange(first_BL.shape[1], device=first_BL.device)
    return (index_L >= first_BL.unsqueeze(2)) & (index_L <= index_L.unsqueeze(1))


def _additive(seen_BLL: Tensor, dtype: torch.dtype) -> Tensor:
    mask = torch.zeros(seen_BLL.shape, dtype=dtype, device=seen_BLL.device)
    return mask.masked_fill_(~seen_BLL, torch.finfo(dtype).min).unsqueeze(1)


class DocumentMask(Tensor):
    """Boolean mask [B, 1, L, L] that `F.scaled_dot_product_attention` uses without materializing its elements.

    FlashAttention reads the document boundaries (float16 and bfloat16, if flash-attn is installed), FlexAttention the
    first token that each token sees. Any other function gets a materialized mask and stays correct.
    """

    first_BL: Tensor
    """First token that each token sees; the last one is the token itself."""
    borders: Tensor | None
    """Boundaries of documents, or of their chunks, in all rows concatenated, int32; computed on demand if None."""
    window: int | None

    @classmethod
    def of(cls, first_BL: Tensor, borders: Tensor | None, window: int | None) -> DocumentMask:
        batch, length = first_BL.shape
        mask = first_BL.new_empty((), dtype=torch.bool).expand(batch, 1, length, length).as_subclass(cls)
        mask.first_BL, mask.borders, mask.window = first_BL, borders, window
        return mask

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _attend_documents(*args, **kwargs)
        if func.__name__ in ("__get__", "size", "dim", "is_floating_point"):  # reads shape, dtype or device
            return super().__torch_function__(func, types, args, kwargs)
        if func is Tensor.__getitem__:  # transformers slices masks to the length of the keys: here, all of it
            cut = cast(Tensor, super().__torch_function__(func, types, args, kwargs))
            if cut.shape == args[0].shape:
                return args[0]
        args, kwargs = tree_map_only(cls, lambda mask: _seen(mask.first_BL).unsqueeze(1), (args, kwargs))
        return func(*args, **kwargs)

    @cached_property
    def blocks(self) -> flex_attention.BlockMask:
        """FlexAttention's mask: the blocks of keys that a block of queries sees in part or whole.

        Only the former evaluate the mask. What is seen begins no earlier for a later token, so the
        first query of a block knows its first visible block, and the last query knows from where on
        all of them see everything.
        """
        first_BL, length = self.first_BL, self.first_BL.shape[1]
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


def _has_document_attention(device: torch.device) -> bool:
    return device.type == "cuda"


@lru_cache
def _flash_attention() -> Any:
    """Return FlashAttention for variable-length sequences; None if flash-attn is not installed."""
    try:
        return importlib.import_module("flash_attn").flash_attn_varlen_func
    except (ImportError, AttributeError):
        return None


@lru_cache
def _compiled_flex_attention() -> Any:
    config: Any = torch._dynamo.config
    limit = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"  # name until torch 2.6
    setattr(config, limit, max(64, getattr(config, limit)))  # each head count compiles anew; past it, flex is dense
    # By default, a second shape recompiles with symbolic sizes: slower kernels, for rows whose
    # length never changes.
    return torch.compile(flex_attention.flex_attention, dynamic=False)


def _attend_documents(
    query_BHLP: Tensor, key_BHLP: Tensor, value_BHLP: Tensor, attn_mask: DocumentMask, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Run `F.scaled_dot_product_attention` with a `DocumentMask`."""
    device = query_BHLP.device.type
    of_heads: Any = query_BHLP, key_BHLP, value_BHLP
    if torch.is_autocast_enabled(device):  # sdpa itself would cast its inputs under autocast
        of_heads = tuple(t.to(torch.get_autocast_dtype(device)) for t in of_heads)
    (batch, _, length, width), flash = query_BHLP.shape, _flash_attention()
    is_half = all(t.dtype in (torch.float16, torch.bfloat16) and t.shape[-1] == width <= 256 for t in of_heads)
    if flash is not None and is_half:
        if (borders := attn_mask.borders) is None:
            begins = attn_mask.first_BL == torch.arange(length, device=query_BHLP.device)
            attn_mask.borders = borders = F.pad(begins.flatten().nonzero().flatten(), (0, 1), value=batch * length)
        borders = borders.flatten().int()
        end_to_end = (t.transpose(1, 2).flatten(0, 1) for t in of_heads)
        options = {
            "dropout_p": dropout_p, "softmax_scale": scale, "causal": True,
            "window_size": (-1, -1) if attn_mask.window is None else (attn_mask.window - 1, 0),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        }  # fmt: skip
        out_THP = flash(*end_to_end, borders, borders, length, length, **options)
        return out_THP.unflatten(0, (batch, length)).transpose(1, 2)
    # A row within one block skips nothing; compiling for it would cost more than its mask.
    is_short = length <= FLEX_BLOCK
    if is_short or dropout_p or width < 16 or (device != "cpu" and find_spec("triton") is None):
        numbers = _seen(attn_mask.first_BL).unsqueeze(1)
        options = {"dropout_p": dropout_p, "scale": scale, "enable_gqa": enable_gqa}
        return F.scaled_dot_product_attention(*of_heads, attn_mask=numbers, **options)
    attend = flex_attention.flex_attention if torch.compiler.is_compiling() else _compiled_flex_attention()
    return attend(*of_heads, block_mask=attn_mask.blocks, scale=scale, enable_gqa=enable_gqa)
