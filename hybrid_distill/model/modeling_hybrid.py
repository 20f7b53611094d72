"""The student: a transformers decoder whose attention modules are `HybridMixer`s; the rest is the backbone's.

Shapes: B batch, L length, S source length, D model width, V vocabulary.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    GenerationMixin,
    PretrainedConfig,
    PreTrainedModel,
    __version__,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from .configuration_hybrid import HybridConfig
from .mixer import HybridCache, HybridMixer

# transformers 4 and 5.0 load only those files of an export that this one imports itself: keep all three.
from .ssd import check_implementation

ATTENTION_PARTS = ("q_proj", "k_proj", "v_proj", "o_proj")
LOGIT_OPTIONS = ("logits_scaling", "logit_scale", "final_logit_softcapping")  # of Granite, Cohere, Gemma 2


class HybridForCausalLM(PreTrainedModel, GenerationMixin):
    """A causal language model that keeps some attention heads and replaces the others by recurrent ones.

    ``model`` and ``lm_head`` are the backbone's; ``model.layers[i].self_attn`` is a `HybridMixer`.
    """

    config_class = HybridConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _skip_keys_device_placement = ["past_key_values"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flash_attn_2 = True  # the name until transformers 4.5x
    _supports_flex_attn = True
    _supports_attention_backend = True
    _is_stateful = True  # a recurrent state cannot be rolled back, which assisted decoding would need

    def __init__(self, config: HybridConfig) -> None:
        requested = config._attn_implementation
        super().__init__(config)
        backbone = _make_backbone(config.backbone_config(), requested)
        config._attn_implementation = backbone.config._attn_implementation
        self.model = backbone.model
        self.lm_head = backbone.lm_head
        self._no_split_modules = backbone._no_split_modules
        for index, layer in enumerate(self.model.layers):
            layer.self_attn = _make_mixer(layer.self_attn, config, index)
        self.post_init()
        for mixer in self.mixers():  # post_init leaves submodules to the backbone, which does not know these
            if mixer.ssm is not None:
                mixer.ssm.reset_parameters(config.initializer_range)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def mixers(self) -> list[HybridMixer]:
        """The mixer of each layer."""
        return [layer.self_attn for layer in self.model.layers]

    def set_segment_len(self, segment_len: int | None) -> None:
        """Let recurrent heads run over so many tokens at a time (`SSMHeads`); None is a row at once."""
        for mixer in self.mixers():
            if mixer.ssm is not None:
                mixer.ssm.segment_len = segment_len

    def set_ssm_implementation(self, impl: str) -> None:
        """Choose how recurrent heads are computed (`ssd.IMPLEMENTATIONS`). Raises as `ssd_scan` does."""
        check_implementation(impl)
        for mixer in self.mixers():
            if mixer.ssm is not None:
                mixer.ssm.impl = impl

    def new_cache(self, kv_dtype: torch.dtype | None = None) -> HybridCache:
        """An empty cache that fits this model.

        Keys and values are stored in ``kv_dtype``, of `KV_DTYPES`, or as they come; recurrent states stay in float32.
        """
        return HybridCache(_sliding_windows(self.model.config), kv_dtype)

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """`generate` starts from this model's own cache. Raises ValueError for what would come out wrong."""
        kind = generation_config.cache_implementation
        if kind not in (None, "dynamic"):
            raise ValueError(
                f"cache_implementation is {kind!r}; a hybrid has a cache of its own, which holds recurrent states too: "
                "leave it out."
            )
        if getattr(generation_config, "is_assistant", False):
            raise ValueError(
                "a hybrid cannot draft for another model: a recurrent state cannot be rolled back to the accepted "
                "tokens; use an assistant_model without recurrent heads."
            )
        mask = model_kwargs.get("attention_mask")
        in_pieces = generation_config.prefill_chunk_size is not None
        if in_pieces and __version__.startswith("4.") and mask is not None and not mask.all():
            raise ValueError(
                f"transformers {__version__} gives wrong positions to padded rows that are read in pieces; "
                "use version 5, or leave prefill_chunk_size out."
            )
        if generation_config.use_cache and model_kwargs.get("past_key_values") is None:
            model_kwargs["past_key_values"] = self.new_cache()

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: it lays several sequences end to end, and a recurrent state would run from one into the next."""
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
        """Next-token logits.

        ``attention_mask`` [B, S] is 0 at padding. ``seq_idx`` [B, L] numbers the documents packed in a row,
        ascending: positions restart and nothing passes from one document to the next. ``use_cache`` defaults
        to True except in training and with ``seq_idx``. Raises ValueError for a cache of another class, or a
        cache with ``seq_idx``.
        """
        outputs = self.backbone_outputs(
            input_ids,
            attention_mask,
            position_ids,
            past_key_values,
            inputs_embeds,
            use_cache,
            seq_idx,
            **kwargs,
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
        """`forward` up to the output embedding: ``last_hidden_state`` [B, L, D] is what that would read."""
        inputs = input_ids if inputs_embeds is None else inputs_embeds
        if inputs is None:
            raise ValueError("neither input_ids nor inputs_embeds was given; pass one of them.")
        if seq_idx is not None:
            _refuse_cache_with_packing(past_key_values, use_cache)
            use_cache = False
        use_cache = not self.training if use_cache is None else use_cache
        if use_cache and past_key_values is None:
            past_key_values = self.new_cache()
        if past_key_values is not None and not isinstance(past_key_values, HybridCache):
            raise ValueError(
                f"past_key_values is a {type(past_key_values).__name__}, which holds no recurrent state; "
                "pass model.new_cache(), or nothing."
            )
        token_mask = _token_mask(attention_mask, inputs.shape[1])
        if seq_idx is not None:
            packed = packed_inputs(seq_idx, self.dtype, self.model.config, attention_mask)
            attention_mask = packed["attention_mask"]
            position_ids = packed["position_ids"] if position_ids is None else position_ids
        if not any(mixer.kept for mixer in self.mixers()):
            attention_mask = None  # nobody reads it, and the backbone would make length² numbers of it
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


def packed_inputs(
    seq_idx_BL: Tensor,
    dtype: torch.dtype = torch.float32,
    config: PretrainedConfig | None = None,
    mask_BL: Tensor | None = None,
) -> dict[str, Any]:
    """Arguments that make any transformers decoder treat the documents packed in a row as if each were alone.

    Returns ``position_ids`` [B, L], restarting at 0 with each document, and ``attention_mask`` [B, 1, L, L]:
    boolean for a ``config`` that says sdpa, else additive in ``dtype``, which sdpa and eager both take. Pass
    the model's ``config`` also for its sliding windows (the mask of a model that mixes window and full layers
    is then a dictionary by layer type). ``mask_BL`` is 0 at padding. Raises ValueError for an attention
    implementation that takes no such mask.
    """
    implementation = getattr(config, "_attn_implementation", None)
    if implementation not in ("sdpa", "eager", None):
        raise ValueError(f"packed rows cannot run on {implementation!r} attention; load the model with 'sdpa'.")
    length = seq_idx_BL.shape[1]
    index_L = torch.arange(length, device=seq_idx_BL.device)
    starts_BL = torch.ones_like(seq_idx_BL, dtype=torch.bool)
    starts_BL[:, 1:] = seq_idx_BL[:, 1:] != seq_idx_BL[:, :-1]
    position_ids = index_L - torch.where(starts_BL, index_L, 0).cummax(dim=1).values

    distance_LL = index_L.unsqueeze(1) - index_L
    seen = (seq_idx_BL.unsqueeze(2) == seq_idx_BL.unsqueeze(1)) & (distance_LL >= 0)
    if mask_BL is not None:
        seen = seen & (mask_BL.bool().unsqueeze(1) | (distance_LL == 0))
    as_mask = partial(_additive, dtype=dtype) if implementation != "sdpa" else partial(torch.unsqueeze, dim=1)
    full = as_mask(seen)
    window = getattr(config, "sliding_window", None)
    layer_types = set(getattr(config, "layer_types", None) or ())
    if window is None or (layer_types and "sliding_attention" not in layer_types):
        return {"position_ids": position_ids, "attention_mask": full}
    windowed = as_mask(seen & (distance_LL < window))
    masks = {"full_attention": full, "sliding_attention": windowed} if layer_types else windowed
    return {"position_ids": position_ids, "attention_mask": masks}


def _additive(seen_BLL: Tensor, dtype: torch.dtype) -> Tensor:
    mask = torch.zeros(seen_BLL.shape, dtype=dtype, device=seen_BLL.device)
    return mask.masked_fill_(~seen_BLL, torch.finfo(dtype).min).unsqueeze(1)


def _make_backbone(config: PretrainedConfig, attn_implementation: str | None) -> PreTrainedModel:
    chosen: dict[str, Any] = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    # Explicit, because the backbone's own configuration may name the dtype of another checkpoint.
    chosen["trust_remote_code"] = False
    backbone = AutoModelForCausalLM.from_config(config, dtype=torch.get_default_dtype(), **chosen)
    layers = getattr(getattr(backbone, "model", None), "layers", None)
    if layers is None or not hasattr(backbone, "lm_head"):
        raise ValueError(
            f"{type(backbone).__name__} has no model.layers and lm_head; the backbone must be a decoder of that shape."
        )
    return backbone


def _make_mixer(attention: Any, config: HybridConfig, layer: int) -> HybridMixer:
    missing = [name for name in ATTENTION_PARTS if not isinstance(getattr(attention, name, None), nn.Linear)]
    if missing:
        raise ValueError(
            f"model.layers.{layer}.self_attn ({type(attention).__name__}) has no {', '.join(missing)}; "
            f"expected the linear projections {', '.join(ATTENTION_PARTS)}."
        )
    return HybridMixer(
        attention,
        config.kept[layer],
        n_heads=config.num_attention_heads,
        n_kv_heads=config.num_key_value_heads,
        hidden_size=config.hidden_size,
        d_state=config.d_state,
        conv_width=config.conv_width,
        layer=layer,
        conv_bias=config.conv_bias,
        recurrence=config.recurrence,
    )


def _sliding_windows(config: PretrainedConfig) -> list[int | None]:
    """The window of each layer of a backbone, None where a layer sees everything."""
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if window is None or layer_types is None:
        return [window] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in layer_types]


def _token_mask(attention_mask: Any, length: int) -> Tensor | None:
    """1 at tokens, 0 at padding, [B, L], from the mask over past and new tokens; 4-D masks do not tell."""
    if not isinstance(attention_mask, Tensor) or attention_mask.ndim != 2:
        return None
    return attention_mask[:, -length:]


def _refuse_cache_with_packing(past_key_values: Any, use_cache: bool | None) -> None:
    if past_key_values is not None or use_cache:
        raise ValueError("packed documents (seq_idx) cannot be continued from a cache; drop the cache or seq_idx.")


def finishes_logits(config: PretrainedConfig) -> bool:
    """Whether logits are more than the output embedding's product with the last hidden state."""
    return any(getattr(config, name, None) is not None for name in LOGIT_OPTIONS)


def finish_logits(logits_BLV: Tensor, config: PretrainedConfig) -> Tensor:
    """What some families do behind the output embedding: see `LOGIT_OPTIONS`."""
    if getattr(config, "logits_scaling", None) is not None:
        logits_BLV = logits_BLV / config.logits_scaling
    if getattr(config, "logit_scale", None) is not None:
        logits_BLV = logits_BLV * config.logit_scale
    cap = getattr(config, "final_logit_softcapping", None)
    return logits_BLV if cap is None else cap * torch.tanh(logits_BLV / cap)
