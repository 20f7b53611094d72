"""Decoder of a student: the backbone's own class, whose forward hands each row's padding and documents to the mixers.

Every run of a student comes through this forward: that of `HybridForCausalLM`, and those of trainers that compute
their own loss and of embedding models, which call the decoder itself (``get_decoder()``).

Shapes: B batch, L length, S source length, D model width.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import lru_cache, wraps
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .cache import HybridCache
from .configuration_hybrid import HybridConfig
from .documents import (
    CACHE_WITH_PACKING,
    packed_inputs,
    packs_by_itself,
    positions_in_documents,
    seq_idx_of_borders,
    seq_idx_of_positions,
)
from .layer_cache import HybridLayerCache
from .layout import CACHE_NAMES, attention_name, cache_among, cache_argument
from .mixer import ROW_ARGUMENTS, HybridMixer, current_row
from .static_layer_cache import StaticLayerCache
from .windows import layer_windows

ARGUMENTS_READ = (
    "input_ids", "inputs_embeds", "attention_mask", "position_ids", "use_cache", "seq_idx",
)  # fmt: skip
"""Arguments of a decoder that `row_arguments` reads, besides borders and the cache."""
SEQUENCE_PARALLEL = "deepspeed.runtime.sequence_parallel"
"""Package of the functions by which DeepSpeed replaces those of transformers' attention."""


def put_mixers(decoder: Any, config: HybridConfig) -> None:
    """Replace every attention module of a decoder by a `HybridMixer`, and the classes of the decoder and its layers."""
    for index, layer in enumerate(decoder.layers):
        name = attention_name(layer)
        setattr(layer, name, HybridMixer(getattr(layer, name), config, index))
        layer.__class__ = _layer_class(type(layer))
    decoder.__class__ = _decoder_class(type(decoder))
    # The backbone's plans for several devices name projections that a mixer has elsewhere, or not at all.
    decoder._tp_plan = {}
    decoder._pp_plan = {}
    decoder._ep_plan = {}
    # Stored, because wrappers (FSDP, torch.compile) put other modules in the place of the layers.
    decoder.layers_with_attention = [bool(heads) for heads in config.kept]
    decoder.layers_with_maps = [bool(heads) or config.window > 0 for heads in config.kept]
    decoder.replaces_heads = any(map(config.replaced_in, range(len(config.kept))))
    decoder.has_windows = config.window > 0


def make_cache(
    config: Any, kv_dtype: torch.dtype | None = None, max_length: int | None = None
) -> HybridCache:
    """Make an empty cache for a decoder with this config; see `HybridForCausalLM.new_cache`."""
    windows = layer_windows(config)
    if max_length is not None:
        return HybridCache([StaticLayerCache(max_length, kv_dtype) for _ in windows])
    return HybridCache([HybridLayerCache(window, kv_dtype) for window in windows])


@lru_cache
def _decoder_class(decoder_class: type[nn.Module]) -> type[nn.Module]:
    """Subclass a backbone's decoder to compute `row_arguments` before its forward."""
    # Families order their arguments differently (GPT-NeoX).
    names = tuple(inspect.signature(decoder_class.forward).parameters)[1:]
    cache_name = cache_argument(decoder_class.forward)

    @wraps(decoder_class.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        row = row_arguments(self, cache_name, dict(zip(names, args)) | kwargs)
        cache = row[cache_name]
        with nullcontext() if cache is None else cache.one_forward_pass():
            outputs = decoder_class.forward(self, **row)
        _align_maps(self, outputs)
        return outputs

    subclass: Any = _subclass(decoder_class, forward, _decoder_class)
    subclass.save_pretrained = _refuse_to_save
    return subclass


def _align_maps(decoder: Any, outputs: Any) -> None:
    """Give layers without an attention module maps of no head, [B, 0, L, L].

    transformers records maps by the modules that it finds: without these, others would move to wrong layers.
    """
    recorded = getattr(outputs, "attentions", None)
    if not recorded or len(recorded) != sum(decoder.layers_with_maps):
        return
    batch, _, length, _ = recorded[0].shape
    remaining = iter(recorded)
    aligned = []
    for has_maps in decoder.layers_with_maps:
        if has_maps:
            aligned.append(next(remaining))
        else:
            aligned.append(recorded[0].new_zeros((batch, 0, length, length)))
    outputs.attentions = tuple(aligned)


def _refuse_to_save(self: PreTrainedModel, *args: Any, **kwargs: Any) -> NoReturn:
    raise ValueError(
        f"a student's decoder has the config of a {type(self).__name__}, which would be loaded without its recurrent "
        "heads; call save_pretrained of the student, or of a HybridModel."
    )


@lru_cache
def _layer_class(layer_class: type[nn.Module]) -> type[nn.Module]:
    """Subclass a decoder layer so that its mixer gets `ROW_ARGUMENTS`, even if the layer drops unknown arguments
    (Nemotron's does).

    The layer receives them as arguments, because gradient checkpointing reruns a layer after its decoder has returned.
    ``forward`` sets `current_row` for the mixer. No compiler traces that assignment, so ``backbone_forward`` is the
    part to compile. Some transformers versions wrap gradient checkpointing around ``forward``: ``backbone_forward``
    runs inside of it.
    """

    @wraps(layer_class.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        current_row.arguments = {name: kwargs.get(name) for name in ROW_ARGUMENTS}
        try:
            return self.backbone_forward(*args, **kwargs)
        finally:
            current_row.arguments = {}

    subclass: Any = _subclass(layer_class, forward, _layer_class)
    subclass.backbone_forward = layer_class.forward
    return subclass


def _subclass(
    parent: type[nn.Module],
    forward: Callable[..., Any],
    subclass_of: Callable[[type[nn.Module]], type[nn.Module]],
) -> type[nn.Module]:
    """Make a class that looks like its parent, since transformers finds what to record by class and class name.

    Such a class has no address to be pickled by. Its instances pickle as ``subclass_of(parent)``, the call that makes
    the class, and their state.
    """

    def reduce(self: Any, protocol: Any) -> Any:
        return _revive, (subclass_of, parent), self.__dict__

    body = {
        "forward": forward,
        "__reduce_ex__": reduce,
        "__module__": parent.__module__,
        "__qualname__": parent.__qualname__,
        "__doc__": parent.__doc__,
    }
    return type(parent.__name__, (parent,), body)


def _revive(
    subclass_of: Callable[[type[nn.Module]], type[nn.Module]], parent: type[nn.Module]
) -> nn.Module:
    """Make an instance without state (unpickling)."""
    subclass = subclass_of(parent)
    return subclass.__new__(subclass)


def row_arguments(decoder: Any, cache_name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Complete a decoder's arguments by the cache, under its name there, by masks and by `ROW_ARGUMENTS`.

    Finds padding in a 2-D ``attention_mask``, and documents in ``seq_idx``, ``cu_seq_lens_q`` or in ``position_ids``
    that restart (`HybridForCausalLM.forward`). Raises ValueError for a cache of another class, for a cache with packed
    documents, for attention that is not causal, and for rows that are split over devices.
    """
    completed = {name: value for name, value in arguments.items() if name not in CACHE_NAMES}
    # Not passed on: a mixer that gets it was given it by someone else (`HybridMixer.heads`).
    _check_direction(decoder, completed.pop("is_causal", None))
    _check_whole_rows(decoder)
    for name in ARGUMENTS_READ:
        completed.setdefault(name, None)
    batch, length = _input_shape(completed)
    cache = _hybrid_cache(arguments)
    completed["token_mask"] = _token_mask(completed["attention_mask"], length)
    caches_by_default = (
        not decoder.training and getattr(decoder.config, "use_cache", None) is not False
    )
    backbone_packs = False
    # A single token is one document; to look at its position would wait for the device.
    if completed["seq_idx"] is None and length > 1:
        completed["seq_idx"] = _documents(completed, batch, length, cache, caches_by_default)
        backbone_packs = completed["attention_mask"] is None and packs_by_itself(
            decoder.config, completed["position_ids"], batch
        )
    _check_mask(decoder, completed, length)
    completed["use_cache"] = _fills_cache(completed, cache, caches_by_default)
    if completed["use_cache"] and cache is None:
        cache = make_cache(decoder.config)
    completed[cache_name] = cache
    _mask_documents(decoder, completed, backbone_packs)
    # After finding documents: that counts the past from the mask, and asks no static cache on a device for it.
    if _marks_nothing(completed["token_mask"], cache):
        completed["token_mask"] = None
    return completed


def _check_direction(decoder: Any, is_causal: bool | None) -> None:
    """Raise ValueError if the call or the config asks for attention to later tokens."""
    if is_causal is None:
        is_causal = getattr(decoder.config, "is_causal", True)
    if not is_causal and decoder.replaces_heads:
        raise ValueError(
            "is_causal is False, in the call or in the config. Replaced heads read earlier tokens alone: leave "
            "is_causal out."
        )


def _check_whole_rows(decoder: Any) -> None:
    """Raise ValueError if DeepSpeed splits rows over devices (Ulysses), which attention alone puts together again."""
    # A compiler may not trace this. DeepSpeed replaces the function before any step is compiled.
    if torch.compiler.is_compiling() or not decoder.replaces_heads:
        return
    attention: Any = ALL_ATTENTION_FUNCTIONS.get(decoder.config._attn_implementation)
    if getattr(attention, "__module__", "").startswith(SEQUENCE_PARALLEL):
        raise ValueError(
            "DeepSpeed's sequence parallelism (Ulysses) gives each device a part of the row. Replaced heads need the "
            "whole row: use no sequence parallelism; set_segment_len saves memory on long rows."
        )


def _input_shape(row: Mapping[str, Any]) -> tuple[int, int]:
    """Return the batch size and length of a decoder's input. Raises ValueError if there is none."""
    inputs = row["inputs_embeds"]
    if inputs is None:
        inputs = row["input_ids"]
    if inputs is None:
        raise ValueError("neither input_ids nor inputs_embeds was given; pass one of them.")
    batch, length = inputs.shape[:2]
    return batch, length


def _token_mask(attention_mask: Any, length: int) -> Tensor | None:
    """Return the new tokens' part of a 2-D mask; None for another mask, which does not mark padding."""
    if _is_padding_mask(attention_mask):
        return attention_mask[:, -length:]
    return None


def _is_padding_mask(attention_mask: Any) -> bool:
    """Return True for a 2-D mask, which marks padding; a 4-D mask says which token sees which."""
    return isinstance(attention_mask, Tensor) and attention_mask.ndim == 2


def _check_mask(decoder: Any, row: Mapping[str, Any], length: int) -> None:
    """Raise ValueError for a mask that some heads would misread."""
    if row["seq_idx"] is not None:
        return
    attention_mask = row["attention_mask"]
    if _is_padding_mask(attention_mask):
        _refuse_padding_in_windows(decoder, attention_mask)
    elif isinstance(attention_mask, Tensor) and length > 1 and decoder.replaces_heads:
        _refuse_hidden_tokens(attention_mask)


def _fills_cache(
    row: Mapping[str, Any], cache: HybridCache | None, caches_by_default: bool
) -> bool:
    """Return True if these tokens go into a cache. Raises ValueError for a cache with packed documents."""
    use_cache = row["use_cache"]
    if row["seq_idx"] is None:
        if use_cache is None:
            return caches_by_default
        return use_cache
    if cache is not None or use_cache:
        raise ValueError(CACHE_WITH_PACKING)
    return False


def _marks_nothing(token_mask_BL: Tensor | None, cache: HybridCache | None) -> bool:
    """Return True for a mask without padding, which would make every layer reorder tokens or guard ring slots
    needlessly.

    Reading a mask on a GPU waits for the device, so there only a decoding step's mask is read: `generate` waits at
    each token anyway.
    """
    if token_mask_BL is None or torch.compiler.is_compiling():
        return False
    decodes = token_mask_BL.shape[1] == 1 and cache is not None and not cache.is_compileable
    if token_mask_BL.device.type != "cpu" and not decodes:
        return False
    return bool(token_mask_BL.all())


def _hybrid_cache(arguments: Mapping[str, Any]) -> HybridCache | None:
    """Return the cache among a decoder's arguments. Raises ValueError for one of another class."""
    cache = cache_among(arguments)
    if cache is not None and not isinstance(cache, HybridCache):
        raise ValueError(
            f"the cache is a {type(cache).__name__}, which holds neither recurrent states nor windows; "
            "pass model.new_cache(), or nothing."
        )
    return cache


def _documents(
    row: Mapping[str, Any],
    batch: int,
    length: int,
    cache: HybridCache | None,
    caches_by_default: bool,
) -> Tensor | None:
    """Find each token's document in borders or positions, [B, L]; None for one document a row."""
    borders = row.get("cu_seq_lens_q")
    if borders is not None:
        return seq_idx_of_borders(borders, batch, length)
    position_ids = row["position_ids"]
    if position_ids is None or position_ids.ndim != 2:
        return None
    use_cache = row["use_cache"]
    is_cached = cache is not None or bool(use_cache)
    # A graph cannot look for documents: whether it fills a cache decides what it assumes.
    if torch.compiler.is_compiling() and use_cache is None:
        is_cached = is_cached or caches_by_default
    n_past = 0
    if cache is not None:
        n_past = cache.get_seq_length()
    position_BL = position_ids.expand(batch, -1)
    return seq_idx_of_positions(
        position_BL, row["attention_mask"], row["token_mask"], n_past, is_cached
    )


def _mask_documents(decoder: Any, row: dict[str, Any], backbone_packs: bool) -> None:
    """Set the mask and positions that keep the heads within a document."""
    seq_idx_BL = row["seq_idx"]
    attention_mask = row["attention_mask"]
    has_kept_heads = any(decoder.layers_with_attention)
    if not has_kept_heads:
        # No head reads it, and the backbone would expand it to length² elements.
        row["attention_mask"] = None
    has_own_mask = attention_mask is not None and not _is_padding_mask(attention_mask)
    if seq_idx_BL is None or backbone_packs or has_own_mask:
        return
    if has_kept_heads:
        borders = row.pop("cu_seq_lens_q", None)
        # Not the decoder's `dtype`: a replica of DataParallel has no parameters to read it from.
        dtype = decoder.get_input_embeddings().weight.dtype
        packed = packed_inputs(seq_idx_BL, dtype, decoder.config, attention_mask, borders)
        row["attention_mask"] = packed["attention_mask"]
        if row["position_ids"] is None:
            row["position_ids"] = packed["position_ids"]
    elif row["position_ids"] is None and decoder.has_windows:
        row["position_ids"] = positions_in_documents(seq_idx_BL)


def _refuse_hidden_tokens(mask_BHLS: Tensor) -> None:
    """Raise ValueError for a 4-D mask that hides earlier tokens: replaced heads would read them."""
    if torch.compiler.is_compiling():
        return
    length, source_length = mask_BHLS.shape[-2:]
    is_seen_BHLS = mask_BHLS
    if mask_BHLS.dtype != torch.bool:
        # Added to scores: 0 where a token is seen.
        is_seen_BHLS = mask_BHLS == 0
    causal_LS = torch.ones_like(is_seen_BHLS[0, 0]).tril(source_length - length)
    if (is_seen_BHLS != causal_LS).any():
        raise ValueError(
            f"attention_mask is {mask_BHLS.ndim}-D and not only causal. Replaced heads need to know which tokens are "
            "padding, and which documents: pass a 2-D mask, or seq_idx for packed documents."
        )


def _refuse_padding_in_windows(decoder: Any, attention_mask_BS: Tensor) -> None:
    """Raise ValueError for padding between tokens, if a row is longer than a kept head's sliding window."""
    windows = []
    for has_attention, window in zip(decoder.layers_with_attention, layer_windows(decoder.config)):
        if has_attention and window is not None:
            windows.append(window)
    if torch.compiler.is_compiling() or not windows:
        return
    shortest = min(windows)
    if attention_mask_BS.shape[1] <= shortest:
        return
    is_token_BS = attention_mask_BS != 0
    follows_padding_BS = is_token_BS[:, 1:] & ~is_token_BS[:, :-1]
    has_tokens_before_BS = is_token_BS.cumsum(1)[:, :-1] > 0
    if (follows_padding_BS & has_tokens_before_BS).any():
        raise ValueError(
            f"attention_mask has padding between the tokens of a row, and some layers have a window of {shortest} "
            "tokens, in which transformers counts padding; pad on the left."
        )
