"""The student: a transformers decoder whose attention modules are `HybridMixer`s; all else is the backbone's.

Shapes: B batch, L length, S source length, D model width, V vocabulary.
"""

from __future__ import annotations

import importlib
from functools import cached_property, lru_cache
from importlib.util import find_spec
from typing import Any, NoReturn, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import flex_attention
from torch.utils._pytree import tree_map_only
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    GenerationConfig,
    GenerationMixin,
    PretrainedConfig,
    PreTrainedModel,
    __version__,
)
from transformers.masking_utils import create_masks_for_generate
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from .configuration_hybrid import HybridConfig, rope_settings
from .layout import attention_name, decoder_of
from .mixer import ROW_ARGUMENTS, HybridCache, HybridLayerCache, HybridMixer

# transformers 4 and 5.0 load only those files of an export that this one imports itself: keep all of them.
from .ssd import check_implementation

CACHE_WITH_PACKING = (
    "packed documents (seq_idx, cu_seq_lens_q, or position_ids that restart) cannot be continued from a cache; "
    "drop the cache, or pass positions that go on from it."
)
LOGIT_OPTIONS = ("logits_scaling", "logit_scale", "final_logit_softcapping")  # of Granite, Cohere, Gemma 2
FULL = "full_attention"
# Kinds of layers that do not see everything, and the field of a config with their size.
LIMITED = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}

FLEX_BLOCK = 128  # tokens of a block of FlexAttention's masks

_known: dict[type[PretrainedConfig], tuple[str, ...]] = {}


class HybridForCausalLM(PreTrainedModel, GenerationMixin):
    """A causal language model that keeps some attention heads and replaces the others by recurrent ones.

    ``model`` and ``lm_head`` are the backbone's; the attention module of each of ``model.layers``, ``self_attn`` in
    most families, is a `HybridMixer`.
    """

    config_class = HybridConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _skip_keys_device_placement = ["past_key_values"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flash_attn_2 = True  # the name until transformers 4.5x
    _supports_flex_attn = True
    _supports_attention_backend = True
    _is_stateful = True  # a recurrent state cannot be rolled back, which assisted decoding would need

    def __init__(self, config: HybridConfig) -> None:
        requested = config._attn_implementation or config.checked_attention
        super().__init__(config)
        backbone = _make_backbone(config.backbone_config(), requested)
        config._attn_implementation = backbone.config._attn_implementation
        self.model: Any = decoder_of(backbone)
        self.lm_head: Any = backbone.get_output_embeddings()
        embedding = self.model.get_input_embeddings()
        name = next(name for name, module in self.model.named_modules() if module is embedding)
        self._tied_weights_keys = {"lm_head.weight": f"model.{name}.weight"}
        self._no_split_modules = backbone._no_split_modules
        self._longrope_switch = _longrope_switch(backbone)
        for index, layer in enumerate(self.model.layers):
            name = attention_name(layer)
            setattr(layer, name, HybridMixer(getattr(layer, name), config, index))
            layer.__class__ = _handing_over(type(layer), name)
        self.post_init()
        for mixer in self.mixers():  # post_init leaves submodules to the backbone, which does not know these
            if mixer.ssm is not None:
                mixer.ssm.reset_parameters(config.initializer_range)

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """Load as transformers does, but raise ValueError where a tensor is missing or has no place.

        Not with ``output_loading_info=True``, whose caller gets their names.
        """
        loaded: Any = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        if output_loading_info:
            return loaded
        model, info = loaded
        names = {kind: sorted(info[f"{kind}_keys"]) for kind in ("missing", "unexpected")}
        shown = {kind: ", ".join(found[:3]) + " ..." * (len(found) > 3) for kind, found in names.items()}
        if wrong := [f"{kind}: {some}" for kind, some in shown.items() if some]:
            where = (args[0] if args else kwargs.get("pretrained_model_name_or_path")) or "this checkpoint"
            raise ValueError(
                f"the tensors of {where} are not this model's under transformers {__version__} "
                f"({'; '.join(wrong)}); copy the whole folder again, or export the student again."
            )
        return model

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def mixers(self) -> list[HybridMixer]:
        """Return the mixer of each layer."""
        return [getattr(layer, attention_name(layer)) for layer in self.model.layers]

    def get_input_embeddings(self) -> nn.Module:
        return self.model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.set_input_embeddings(value)

    def set_segment_len(self, segment_len: int | None) -> None:
        """Run recurrent heads over so many tokens at a time (`SSMHeads`); None is a whole row."""
        for mixer in self.mixers():
            if mixer.ssm is not None:
                mixer.ssm.segment_len = segment_len

    def set_ssm_implementation(self, impl: str) -> None:
        """Choose how recurrent heads are computed (`ssd.IMPLEMENTATIONS`). Raises as `ssd_scan` does."""
        check_implementation(impl)
        for mixer in self.mixers():
            if mixer.ssm is not None:
                mixer.ssm.impl = impl

    def new_cache(self, kv_dtype: torch.dtype | None = None, max_length: int | None = None) -> HybridCache:
        """Make an empty cache that fits this model.

        Keys and values are stored in ``kv_dtype`` (`KV_DTYPES`), or as they come; recurrent states stay in float32.
        With ``max_length`` it holds at most so many tokens, in tensors that stay where they are (`StaticLayerCache`).
        """
        cache = HybridCache(layer_windows(self.model.config), kv_dtype)
        if max_length is not None:
            cache.layers[:] = [StaticLayerCache(max_length, kv_dtype) for _ in cache.layers]
        return cache

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Start `generate` from this model's own cache. Raises ValueError where generation would go wrong.

        For ``cache_implementation="static"`` transformers compiles the step on a GPU, into a CUDA graph.
        """
        if getattr(generation_config, "is_assistant", False):
            raise ValueError(
                "a hybrid cannot draft for another model: a recurrent state cannot be rolled back to the accepted "
                "tokens. Pass an assistant_model without recurrent heads."
            )
        kind = generation_config.cache_implementation
        is_static = kind == "static" and self._longrope_switch is None
        if kind not in (None, "dynamic") and not is_static:
            raise ValueError(
                f"cache_implementation is {kind!r}. A hybrid has a cache of its own, which holds recurrent states; "
                "leave it out, or pass 'static' for a model without LongRoPE."
            )
        mask = model_kwargs.get("attention_mask")
        in_pieces = generation_config.prefill_chunk_size is not None
        if in_pieces and __version__.startswith("4.") and mask is not None and not mask.all():
            raise ValueError(
                f"transformers {__version__} gives wrong positions to padded rows that are read in pieces; "
                "install version 5, or leave prefill_chunk_size out."
            )
        if generation_config.use_cache and model_kwargs.get("past_key_values") is None:
            _, _, max_length, *_ = args
            model_kwargs["past_key_values"] = self.new_cache(max_length=max_length if is_static else None)

    def prepare_inputs_for_generation(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Prepare inputs as transformers does, but drop the cache where LongRoPE switches to its long factors.

        The keys in the cache were turned by the short factors; Phi-3 itself reads all tokens anew there. For a static
        cache transformers makes 4-D masks, but recurrent heads need to know which tokens of a prompt are padding.
        """
        cache, switch = kwargs.get("past_key_values"), self._longrope_switch
        length = input_ids.shape[1]
        if isinstance(cache, HybridCache) and switch is not None and 0 < cache.get_seq_length() <= switch < length:
            anew = {
                "past_key_values": self.new_cache(cache.layer(0).kv_dtype),
                "next_sequence_length": None,  # of transformers 5: all tokens
                "cache_position": torch.arange(length, device=input_ids.device),  # of transformers 4
            }
            kwargs |= {name: value for name, value in anew.items() if name in kwargs}
        parent: Any = super()
        inputs = parent.prepare_inputs_for_generation(input_ids, *args, **kwargs)
        if isinstance(cache, HybridCache) and cache.is_compileable and inputs["input_ids"].shape[1] > 1:
            inputs["attention_mask"] = kwargs.get("attention_mask")
        return inputs

    def create_masks_for_generate(self, config: PretrainedConfig, **kwargs: Any) -> Any:
        """Make transformers' masks for a static cache, with the windows of the backbone's layers."""
        return create_masks_for_generate(config=self.model.config, **kwargs)

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: sequences are laid end to end, and a recurrent state would run from one into the next."""
        raise ValueError(
            "continuous batching (cache_implementation='paged') keeps keys and values only, no recurrent states; "
            "call generate with a left-padded batch."
        )

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: HybridCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        seq_idx: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Compute next-token logits.

        ``attention_mask`` [B, S] is 0 at padding. ``seq_idx`` [B, L] numbers the documents packed in a row,
        ascending: positions restart and nothing passes from one document to the next. Transformers' own conventions
        work too: ``position_ids`` that restart within a row, or ``cu_seq_lens_q``, the documents' borders in all rows
        laid end to end. ``use_cache`` defaults to True except in training and with packed documents. Raises ValueError
        for a cache of another class, or a cache with packed documents.
        """
        outputs = self.backbone_outputs(
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache, seq_idx, **kwargs
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = finish_logits(self.lm_head(outputs[0][:, kept, :]), self.model.config)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def backbone_outputs(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: HybridCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        seq_idx: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Run `forward` up to the output embedding, which reads ``last_hidden_state`` [B, L, D]."""
        inputs = input_ids if inputs_embeds is None else inputs_embeds
        if inputs is None:
            raise ValueError("neither input_ids nor inputs_embeds was given; pass one of them.")
        if past_key_values is not None and not isinstance(past_key_values, HybridCache):
            raise ValueError(
                f"past_key_values is a {type(past_key_values).__name__}, which cannot hold recurrent states; "
                "pass model.new_cache(), or nothing."
            )
        batch, length = inputs.shape[:2]
        token_mask = _token_mask(attention_mask, length)
        backbone_packs = False
        if seq_idx is None and length > 1:
            borders, cached = kwargs.get("cu_seq_lens_q"), past_key_values is not None or bool(use_cache)
            if borders is not None:
                seq_idx = _between(borders, batch, length)
            elif position_ids is not None and position_ids.ndim == 2:
                cached = cached or (torch.compiler.is_compiling() and use_cache is None and not self.training)
                seq_idx = _restarts(position_ids, attention_mask, past_key_values, batch, length, cached)
            backbone_packs = attention_mask is None and _packs_by_itself(self.model.config, position_ids, batch)
        if attention_mask is not None and token_mask is not None and seq_idx is None:
            self._refuse_padding_in_windows(attention_mask)
        if seq_idx is not None:
            if past_key_values is not None or use_cache:
                raise ValueError(CACHE_WITH_PACKING)
            use_cache = False
        use_cache = not self.training if use_cache is None else use_cache
        if use_cache and past_key_values is None:
            past_key_values = self.new_cache()
        if not any(mixer.kept for mixer in self.mixers()):
            attention_mask = None  # unread, and the backbone would expand it to length² numbers
        elif seq_idx is not None and not backbone_packs and (attention_mask is None or token_mask is not None):
            borders = kwargs.pop("cu_seq_lens_q", None)
            packed = packed_inputs(seq_idx, self.dtype, self.model.config, attention_mask, borders)
            attention_mask = packed["attention_mask"]
            position_ids = packed["position_ids"] if position_ids is None else position_ids
        return self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            token_mask=token_mask,
            seq_idx=seq_idx,
            **kwargs,
        )

    def _refuse_padding_in_windows(self, attention_mask_BS: Tensor) -> None:
        """Raise ValueError for padding between the tokens of a row that is longer than the window of a kept head."""
        windows = layer_windows(self.model.config)
        kept = [window for mixer, window in zip(self.mixers(), windows) if mixer.kept and window is not None]
        if torch.compiler.is_compiling() or not kept or attention_mask_BS.shape[1] <= min(kept):
            return
        is_token_BS = attention_mask_BS != 0
        follows_padding_BS = is_token_BS[:, 1:] & ~is_token_BS[:, :-1] & (is_token_BS.cumsum(1)[:, :-1] > 0)
        if follows_padding_BS.any():
            raise ValueError(
                f"attention_mask has padding between the tokens of a row, and some layers see {min(kept)} tokens back, "
                "in which transformers counts padding too; pad on the left."
            )


class StaticLayerCache(HybridLayerCache):
    """Layer cache for ``max_length`` tokens whose tensors stay where they are: a CUDA graph can replay a step.

    Layers with a window hold all tokens too; the mask hides what is behind the window.
    """

    is_compileable = True

    def __init__(self, max_length: int, kv_dtype: torch.dtype | None = None) -> None:
        super().__init__(kv_dtype=kv_dtype)
        self.max_length = max_length
        self.n_seen: Tensor | None = None  # on the device: a number would be a constant of the graph

    def advance(self, n_tokens: int) -> None:
        if self.n_seen is None:
            held = next(t for t in (self.keys, self.ssm_state) if t is not None)
            self.n_seen = _static(torch.zeros((), dtype=torch.long, device=held.device))
        self.n_seen += n_tokens
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write keys and values [B, stored KV heads, L, P] behind those before; return all, unwritten ones as 0."""
        dtype = key_states.dtype
        if self.keys is None or self.values is None:
            (batch, heads, _, width), kind = key_states.shape, self.kv_dtype or dtype
            shape = batch, heads, self.max_length, width
            self.keys, self.values = (_static(key_states.new_zeros(shape, dtype=kind)) for _ in range(2))
        place_L = torch.arange(key_states.shape[2], device=key_states.device)
        place_L = place_L if self.n_seen is None else place_L + self.n_seen
        for held, new in ((self.keys, key_states), (self.values, value_states)):
            held.index_copy_(2, place_L, new.to(held.dtype))
        return self.keys.to(dtype), self.values.to(dtype)

    def remember(self, *, conv_state: Tensor | None = None, ssm_state: Tensor | None = None) -> None:
        for name, new in (("conv_state", conv_state), ("ssm_state", ssm_state)):
            if new is not None and getattr(self, name) is not None:
                getattr(self, name).copy_(new)
            elif new is not None:
                setattr(self, name, _static(new.clone(memory_format=torch.contiguous_format)))

    def get_seq_length(self) -> Any:
        return 0 if self.n_seen is None else self.n_seen

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        return self.max_length, 0

    def reset(self) -> None:
        self.__init__(self.max_length, self.kv_dtype)


def _static(tensor: Tensor) -> Tensor:
    """Tell torch.compile that a tensor stays where it is."""
    if not torch.compiler.is_compiling():
        torch._dynamo.mark_static_address(tensor)
    return tensor


def packed_inputs(
    seq_idx_BL: Tensor,
    dtype: torch.dtype = torch.float32,
    config: PretrainedConfig | None = None,
    mask_BL: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> dict[str, Any]:
    """Make arguments for any transformers decoder that keep the documents packed in a row apart.

    Returns ``position_ids`` [B, L], restarting at 0 with each document, and ``attention_mask`` [B, 1, L, L]: boolean
    for a ``config`` with sdpa (on a GPU a `DocumentMask`), else additive in ``dtype``, which sdpa and eager both take.
    Pass the model's ``config`` also for its windows and chunks; where layers differ in kind, the mask is a dictionary
    by layer type. ``mask_BL`` is 0 at padding. ``cu_seqlens``, the documents' borders in all rows laid end to end,
    saves the host from waiting for them. Raises ValueError for an attention implementation that takes no such mask.
    """
    implementation = getattr(config, "_attn_implementation", None)
    if implementation not in ("sdpa", "eager", None):
        raise ValueError(f"packed rows cannot run on {implementation!r} attention; load the model with 'sdpa'.")
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
    return {"position_ids": position_ids, "attention_mask": masks if len(masks) > 1 else masks.popitem()[1]}


def _seen(first_BL: Tensor) -> Tensor:
    """Tell which tokens [B, L, L] each token sees: from its first one to itself."""
    index_L = torch.arange(first_BL.shape[1], device=first_BL.device)
    return (index_L >= first_BL.unsqueeze(2)) & (index_L <= index_L.unsqueeze(1))


def _additive(seen_BLL: Tensor, dtype: torch.dtype) -> Tensor:
    mask = torch.zeros(seen_BLL.shape, dtype=dtype, device=seen_BLL.device)
    return mask.masked_fill_(~seen_BLL, torch.finfo(dtype).min).unsqueeze(1)


class DocumentMask(Tensor):
    """Boolean mask [B, 1, L, L] whose numbers `F.scaled_dot_product_attention` does without.

    FlashAttention gets the documents' borders (float16 and bfloat16, where flash-attn is installed), FlexAttention the
    first token that each token sees. Any other function gets the numbers: the mask is right wherever it ends up.
    """

    first_BL: Tensor
    """First token that each token sees; the last is itself."""
    borders: Tensor | None
    """Where documents, or their chunks, begin and end in all rows laid end to end, int32; found when it is needed."""
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
        if func.__name__ in ("__get__", "size", "dim", "is_floating_point"):  # of shape, dtype and device
            return super().__torch_function__(func, types, args, kwargs)
        if func is Tensor.__getitem__:  # transformers cuts masks to the length of the keys, here to the whole
            cut = cast(Tensor, super().__torch_function__(func, types, args, kwargs))
            if cut.shape == args[0].shape:
                return args[0]
        args, kwargs = tree_map_only(cls, lambda mask: _seen(mask.first_BL).unsqueeze(1), (args, kwargs))
        return func(*args, **kwargs)

    @cached_property
    def blocks(self) -> flex_attention.BlockMask:
        """FlexAttention's mask: for each block of tokens the blocks from the first that it sees to itself."""
        first_BL, length = self.first_BL, self.first_BL.shape[1]
        first_block_BK = first_BL[:, ::FLEX_BLOCK] // FLEX_BLOCK
        block_K = torch.arange(first_block_BK.shape[1], device=first_BL.device)
        seen_BKK = (first_block_BK.unsqueeze(2) + block_K).clamp(max=len(block_K) - 1)
        options: dict[str, Any] = {"seq_lengths": (length, length)} if length % FLEX_BLOCK else {}
        return flex_attention.BlockMask.from_kv_blocks(
            (block_K - first_block_BK + 1).unsqueeze(1).int(),
            seen_BKK.unsqueeze(1).int(),
            BLOCK_SIZE=FLEX_BLOCK,
            mask_mod=lambda b, h, q, kv: (kv >= first_BL[b, q]) & (kv <= q),
            **options,
        )


def _has_document_attention(device: torch.device) -> bool:
    return device.type == "cuda"


@lru_cache
def _flash_attention() -> Any:
    """Return FlashAttention for sequences of different lengths; None where flash-attn is not installed."""
    try:
        return importlib.import_module("flash_attn").flash_attn_varlen_func
    except (ImportError, AttributeError):
        return None


@lru_cache
def _compiled_flex_attention() -> Any:
    config: Any = torch._dynamo.config
    limit = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"  # the name until torch 2.6
    setattr(config, limit, max(64, getattr(config, limit)))  # beyond it, torch runs all pairs; layers differ in heads
    return torch.compile(flex_attention.flex_attention)


def _attend_documents(
    query_BHLP: Tensor, key_BHLP: Tensor, value_BHLP: Tensor, attn_mask: DocumentMask, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Do as `F.scaled_dot_product_attention` does with a `DocumentMask`."""
    device = query_BHLP.device.type
    of_heads: Any = query_BHLP, key_BHLP, value_BHLP
    if torch.is_autocast_enabled(device):  # which turns attention's inputs around itself
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
    if dropout_p or width < 16 or (device != "cpu" and find_spec("triton") is None):
        numbers = _seen(attn_mask.first_BL).unsqueeze(1)
        options = {"dropout_p": dropout_p, "scale": scale, "enable_gqa": enable_gqa}
        return F.scaled_dot_product_attention(*of_heads, attn_mask=numbers, **options)
    attend = flex_attention.flex_attention if torch.compiler.is_compiling() else _compiled_flex_attention()
    return attend(*of_heads, block_mask=attn_mask.blocks, scale=scale, enable_gqa=enable_gqa)


def _make_backbone(config: PretrainedConfig, attn_implementation: str | None) -> PreTrainedModel:
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"transformers {__version__} has no causal language model for a config of type {config.model_type}; "
            "use a teacher that AutoModelForCausalLM.from_config can make."
        )
    chosen: dict[str, Any] = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    # Explicit, because the backbone's own configuration may name the dtype of another checkpoint.
    chosen["trust_remote_code"] = False
    backbone = AutoModelForCausalLM.from_config(config, dtype=torch.get_default_dtype(), **chosen)
    layers = getattr(decoder_of(backbone), "layers", None)
    if layers is None or backbone.get_output_embeddings() is None or not all(map(attention_name, layers)):
        raise ValueError(
            f"{type(backbone).__name__} has no output embeddings, or no layers with attention; expected a decoder with "
            "both: take a teacher of another family (docs/heads.md)."
        )
    return backbone


def _longrope_switch(backbone: PreTrainedModel) -> int | None:
    """Return the tokens beyond which `generate` of a backbone with LongRoPE reads all anew; None if it never does."""
    name = "prepare_inputs_for_generation"
    has_own_way = getattr(type(backbone), name) is not getattr(GenerationMixin, name)  # Phi-3 has, Llama has not
    for rope in rope_settings(backbone.config) if has_own_way else ():
        if rope.get("rope_type", rope.get("type")) == "longrope":
            trained = rope.get("original_max_position_embeddings")
            return trained or getattr(backbone.config, "original_max_position_embeddings", None)
    return None


@lru_cache
def _handing_over(layer_class: type[nn.Module], attention: str) -> type[nn.Module]:
    """Subclass a decoder layer so that it hands `ROW_ARGUMENTS` to its mixer itself: some (Nemotron's) drop arguments.

    Not a hook, because gradient checkpointing runs a layer's forward alone.
    """

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        mixer = getattr(self, attention)
        mixer.row = {name: kwargs.get(name) for name in ROW_ARGUMENTS}
        try:
            return layer_class.forward(self, *args, **kwargs)
        finally:
            mixer.row = {}

    names = {"forward": forward, "__module__": layer_class.__module__, "__doc__": layer_class.__doc__}
    return type(layer_class.__name__, (layer_class,), names)


def layer_windows(config: PretrainedConfig) -> list[int | None]:
    """Return how many tokens a token of each layer sees, itself included; None where it sees all before it."""
    return [window for _, window in _kinds_and_windows(config)]


def _kinds_and_windows(config: PretrainedConfig | None) -> list[tuple[str, int | None]]:
    """Return the kind of each layer, of `LIMITED` or `FULL`, and its window.

    Only fields that the family's configurations have count: a config.json may hold others, which no model reads.
    """
    if config is None:
        return []
    config = config.get_text_config(decoder=True)
    known = _known_fields(type(config))
    fields = {name: getattr(config, name, None) for name in ("layer_types", *LIMITED.values()) if name in known}
    kinds = fields.get("layer_types")
    if kinds is None:
        limits = [kind for kind, field in LIMITED.items() if fields.get(field) is not None]
        kinds = [limits[0] if limits else FULL] * config.num_hidden_layers
    return [(kind, fields[LIMITED[kind]]) if kind in LIMITED else (FULL, None) for kind in kinds]


@torch.compiler.assume_constant_result
def _known_fields(kind: type[PretrainedConfig]) -> tuple[str, ...]:
    """Return those of ``layer_types`` and `LIMITED` that the family's configurations have."""
    if kind not in _known:  # no lru_cache, which torch.compile would trace through
        names = ("layer_types", *LIMITED.values())
        try:
            default = kind()
            _known[kind] = tuple(name for name in names if hasattr(default, name))
        except Exception:  # remote code may ask for anything
            _known[kind] = names
    return _known[kind]


def _token_mask(attention_mask: Any, length: int) -> Tensor | None:
    """Cut the mask over past and new tokens to the new ones, [B, L]; None for a 4-D mask, which does not tell."""
    if not isinstance(attention_mask, Tensor) or attention_mask.ndim != 2:
        return None
    return attention_mask[:, -length:]


def _between(borders: Tensor, batch: int, length: int) -> Tensor:
    """Make seq_idx_BL from the documents' borders in all rows laid end to end: 0, the first one's length, ..."""
    place_T = torch.arange(batch * length, device=borders.device)
    return torch.bucketize(place_T, borders.flatten()[1:].long(), right=True).view(batch, length)


def _restarts(
    position_ids: Tensor, attention_mask: Any, past: HybridCache | None, batch: int, length: int, cached: bool
) -> Tensor | None:
    """Make seq_idx_BL from positions that do not rise from one token to the next; None where all rise.

    Without a mask and a cache a leap is a border too, as in transformers. The device is asked once whether there are
    borders. A compiled graph cannot ask: it assumes some, and none where there is a cache.
    """
    token_mask = _token_mask(attention_mask, length)
    n_past = 0 if past is None else past.get_seq_length()
    if n_past and token_mask is not None:
        n_past = (attention_mask[:, :-length] != 0).sum(dim=1)
    position_BS = F.pad(position_ids.expand(batch, -1), (1, 0))  # from the last token that the cache holds
    position_BS[:, 0] = n_past - 1
    is_token_BS = torch.ones_like(position_BS, dtype=torch.bool)
    if token_mask is not None:
        is_token_BS[:, 1:] = token_mask != 0
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


def _packs_by_itself(config: PretrainedConfig, position_ids: Tensor | None, batch: int) -> bool:
    """Tell whether the backbone's attention takes no mask of documents, but the same arguments as `forward`."""
    implementation = getattr(config, "_attn_implementation", None) or ""
    if implementation == "flex_attention":
        return position_ids is not None
    return "flash" in implementation and batch == 1


def finishes_logits(config: PretrainedConfig) -> bool:
    """Tell whether logits are more than the output embedding's product with the last hidden state."""
    return any(getattr(config, name, None) is not None for name in LOGIT_OPTIONS)


def finish_logits(logits_BLV: Tensor, config: PretrainedConfig) -> Tensor:
    """Scale and cap logits behind the output embedding as some families do (`LOGIT_OPTIONS`)."""
    if getattr(config, "logits_scaling", None) is not None:
        logits_BLV = logits_BLV / config.logits_scaling
    if getattr(config, "logit_scale", None) is not None:
        logits_BLV = logits_BLV * config.logit_scale
    cap = getattr(config, "final_logit_softcapping", None)
    return logits_BLV if cap is None else cap * torch.tanh(logits_BLV / cap)
