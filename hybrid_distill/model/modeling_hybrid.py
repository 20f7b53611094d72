"""Student model: a transformers decoder with a `HybridMixer` in place of each attention module.

Shapes: B batch, L length, S source length, D model width, V vocabulary.
"""

from __future__ import annotations

import threading
from dataclasses import fields
from functools import wraps
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn
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
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)
from transformers.utils.generic import can_return_tuple

from .backbone import MODEL_TYPE, rope_settings
from .cache import HybridCache, HybridLayerCache, StaticLayerCache
from .configuration_hybrid import HybridConfig
from .decoder import make_cache, put_mixers
from .document_kernels import flash_runs  # noqa: F401  # see below
from .document_mask import DocumentMask  # noqa: F401  # see below
from .documents import packed_inputs  # noqa: F401  # see below
from .field_rules import release
from .gated_delta import delta_scan  # noqa: F401  # see below
from .kernel_choice import check_implementation
from .layout import CACHE_NAMES, attention_name, cache_argument, cache_of, decoder_of
from .local_attention import attend_locally  # noqa: F401  # see below
from .mixer import HeadPart, HybridMixer
from .once import once  # noqa: F401  # see below
from .prefix import Prefix, fingerprint, read_prefix
from .recurrent_heads import SSMHeads
from .ring import TokenRing  # noqa: F401  # see below
from .rows import TokensFirst  # noqa: F401  # see below

# Keep every import: transformers up to 5.8 loads only those files of an export that this file imports directly.
from .self_check import check_new_version
from .ssd import ssd_scan  # noqa: F401  # see above
from .window_kernels import window_blocks  # noqa: F401  # see above
from .windowed_heads import WindowedAttention  # noqa: F401  # see above
from .windows import layer_windows  # noqa: F401  # see above

# Two names of one thing: transformers 5.24 renamed it, in its outputs and in `generate`.
OUTPUT_CACHE = next(
    name for name in CACHE_NAMES if name in {field.name for field in fields(CausalLMOutputWithPast)}
)
_prepare_inputs: Any = vars(GenerationMixin)["prepare_inputs_for_generation"]
# `generate` reads the names of a method's arguments.
_like_prepare_inputs: Any = wraps(_prepare_inputs)
GENERATION_CACHE = cache_argument(_prepare_inputs)

# Options of `from_pretrained` that say where a checkpoint is.
WHERE = ("cache_dir", "local_files_only", "revision", "subfolder", "token")

# Of Granite, Cohere, Gemma 2.
LOGIT_OPTIONS = ("logits_scaling", "logit_scale", "final_logit_softcapping")


class HybridPreTrainedModel(PreTrainedModel):
    """Base of the models with a hybrid decoder, ``model``: the backbone's decoder with a `HybridMixer` in each layer.

    The mixer replaces the attention module of the layer (``self_attn`` in most families).
    """

    config_class = HybridConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _skip_keys_device_placement = ["cache", "past_key_values"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _own_tensors: ClassVar[tuple[str, ...]] = ()
    """Tensors that a student's checkpoint lacks: they are drawn."""

    model: Any

    def _take_decoder(self, config: HybridConfig, requested: str | None) -> PreTrainedModel:
        """Make the backbone and take over its decoder; return the backbone."""
        backbone = _make_backbone(config.shared_backbone(), requested)
        config.share_backbone(decoder_of(backbone).config)
        config._attn_implementation = backbone.config._attn_implementation
        self.model = decoder_of(backbone)
        self._no_split_modules = backbone._no_split_modules
        put_mixers(self.model, config)
        return backbone

    def _finish(self, config: HybridConfig) -> None:
        self.post_init()
        # post_init uses the backbone's initialization, which skips these.
        for heads in self.recurrent_heads():
            heads.reset_parameters(config.initializer_range)

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """Load as transformers does, but raise ValueError for missing or unexpected tensors.

        Under a version of transformers that is not in the export's record, the model checks itself on a few tokens and
        raises ValueError if it computes something else padded, packed or from a cache (`check_rows`). With
        ``output_loading_info=True``, return the names of missing and unexpected tensors instead of raising.
        """
        loaded: Any = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        if output_loading_info:
            return loaded
        model, info = loaded
        path = args[0] if args else kwargs.get("pretrained_model_name_or_path")
        missing = sorted(name for name in info["missing_keys"] if name not in cls._own_tensors)
        unexpected = sorted(info["unexpected_keys"])
        if missing or unexpected:
            unties = missing == ["lm_head.weight"] and _stores_tied(path, kwargs)
            _refuse_tensors(path or "this checkpoint", missing, unexpected, unties)
        check_new_version(model, path)
        return model

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def mixers(self) -> list[HybridMixer]:
        """Return the mixers, one per layer."""
        return [getattr(layer, attention_name(layer)) for layer in self.model.layers]

    def mixers_with(self, part: HeadPart) -> list[HybridMixer]:
        """Return the mixers whose replaced heads have this part."""
        if part == "recurrence":
            return [mixer for mixer in self.mixers() if mixer.ssm is not None]
        return [mixer for mixer in self.mixers() if mixer.windowed is not None]

    def recurrent_heads(self) -> list[SSMHeads]:
        """Return the recurrent heads of every layer that has any, and the copies that adapters train."""
        # Not mixer.ssm: PEFT puts a wrapper there (`modules_to_save`), from which attributes can be read, but a
        # written one stays on the wrapper.
        return [module for module in self.model.modules() if isinstance(module, SSMHeads)]

    def get_input_embeddings(self) -> nn.Module:
        return self.model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.set_input_embeddings(value)

    def set_segment_len(self, segment_len: int | None) -> None:
        """Set how many tokens recurrent heads process per segment (`SSMHeads`); None processes a whole row at once."""
        for heads in self.recurrent_heads():
            heads.segment_len = segment_len

    def set_ssm_implementation(self, impl: str) -> None:
        """Select one of `kernel_choice.IMPLEMENTATIONS` for recurrent heads. Raises as `check_implementation`."""
        check_implementation(impl)
        for heads in self.recurrent_heads():
            heads.impl = impl

    @property
    def ssm_implementation(self) -> str:
        """Implementation of recurrent heads that `set_ssm_implementation` selected; ``auto`` without such heads."""
        return next((heads.impl for heads in self.recurrent_heads()), "auto")

    def new_cache(
        self, kv_dtype: torch.dtype | None = None, max_length: int | None = None
    ) -> HybridCache:
        """Make an empty cache for this model.

        Keys and values are stored in ``kv_dtype`` (`KV_DTYPES`), by default in their own dtype; recurrent states in
        float32. ``max_length`` makes a cache for at most that many tokens, with static addresses (`StaticLayerCache`).
        """
        return make_cache(self.model.config, kv_dtype, max_length)


class HybridModel(HybridPreTrainedModel):
    """Hybrid decoder alone, for `AutoModel`: computes hidden states, and loads checkpoints of `HybridForCausalLM`."""

    _keys_to_ignore_on_load_unexpected = [r"^lm_head\.", r"^score\."]

    def __init__(self, config: HybridConfig) -> None:
        # Read first: transformers puts its own choice in the place of None.
        requested = config._attn_implementation or config.checked_attention
        super().__init__(config)
        self._take_decoder(config, requested)
        self._finish(config)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: HybridCache | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Run the decoder. The arguments are those of `HybridForCausalLM.forward`, without ``labels``."""
        return self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            cache=cache,
            **kwargs,
        )


class HybridForSequenceClassification(GenericForSequenceClassification, HybridPreTrainedModel):
    """Hybrid decoder with a linear classifier of each row's last token: classifiers and reward models.

    Loads checkpoints of `HybridForCausalLM`; the classifier is then drawn, and has to be trained.
    """

    _keys_to_ignore_on_load_unexpected = [r"^lm_head\."]
    _own_tensors = ("score.weight",)

    def __init__(self, config: HybridConfig) -> None:
        # Read first: transformers puts its own choice in the place of None.
        requested = config._attn_implementation or config.checked_attention
        # Not super(): the mixin would make another decoder, by AutoModel.
        HybridPreTrainedModel.__init__(self, config)
        self.num_labels: Any = config.num_labels
        self._take_decoder(config, requested)
        self.score = nn.Linear(config.hidden_size, self.num_labels, bias=False)
        self._finish(config)


class HybridForCausalLM(HybridPreTrainedModel, GenerationMixin):
    """Causal language model that keeps some attention heads and replaces the others by recurrent heads.

    ``model`` and ``lm_head`` are the backbone's. In each of ``model.layers``, a `HybridMixer` replaces the attention
    module.
    """

    def __init__(self, config: HybridConfig) -> None:
        # Read first: transformers puts its own choice in the place of None.
        requested = config._attn_implementation or config.checked_attention
        super().__init__(config)
        backbone = self._take_decoder(config, requested)
        self.lm_head: Any = backbone.get_output_embeddings()
        embedding = self.model.get_input_embeddings()
        # Families name it differently: embed_tokens, or embed_in in GPT-NeoX.
        name = next(name for name, module in self.model.named_modules() if module is embedding)
        self._tied_weights_keys = {"lm_head.weight": f"model.{name}.weight"}
        self._longrope_switch = _longrope_switch(backbone)
        self._finish(config)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy or a pickle holds: no cache of an earlier `generate`."""
        return {name: value for name, value in self.__dict__.items() if name != "_static_cache"}

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """Save as transformers does, but store both embeddings if the config unties them and the model shares them."""
        if not self.config.tie_word_embeddings and self.all_tied_weights_keys:
            self.all_tied_weights_keys = {}
            state = kwargs.get("state_dict") or self.state_dict()
            # A copy: of tensors that share memory, transformers stores one.
            kwargs["state_dict"] = {**state, "lm_head.weight": state["lm_head.weight"].clone()}
        return super().save_pretrained(*args, **kwargs)

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Give `generate` this model's cache. Raises ValueError for options that would generate wrong tokens.

        With ``cache_implementation="static"``, transformers compiles the step on a GPU, into a CUDA graph.
        """
        drafts = bool(getattr(generation_config, "is_assistant", False))
        if drafts:
            self._check_speculation()
        kind = generation_config.cache_implementation
        is_static = kind == "static" and self._longrope_switch is None
        # transformers before 5.5 asks an assistant for a cache that can be cropped by this name.
        is_own = kind in (None, "dynamic") or (drafts and kind == "dynamic_full")
        if not (is_own or is_static):
            raise ValueError(
                f"cache_implementation is {kind!r}. A hybrid has its own cache, which holds recurrent states; "
                "leave it out, or pass 'static' for a model without LongRoPE."
            )
        for name in CACHE_NAMES[:2]:  # callers may use either spelling
            if model_kwargs.get(name) is not None:
                model_kwargs[GENERATION_CACHE] = model_kwargs.pop(name)
        mask = model_kwargs.get("attention_mask")
        in_pieces = generation_config.prefill_chunk_size is not None
        if in_pieces and release(__version__) < (5, 5) and mask is not None and not mask.all():
            raise ValueError(
                f"transformers {__version__} gives wrong positions to padded rows that are read in pieces; "
                "install version 5.5 or newer, or leave prefill_chunk_size out."
            )
        if in_pieces and model_kwargs.get("inputs_embeds") is not None:
            raise ValueError(
                "inputs_embeds are given with a prefill_chunk_size, and transformers cuts tokens alone into pieces; "
                "leave prefill_chunk_size out."
            )
        _, batch_size, max_length, *_ = args
        given = model_kwargs.get(GENERATION_CACHE)
        if isinstance(given, HybridCache):
            _check_room(given.layer(0), max_length)
        if generation_config.use_cache and given is None:
            if is_static:
                # As transformers counts the rows of its own static cache.
                n_rows = batch_size * max(
                    generation_config.num_beams, generation_config.num_return_sequences
                )
                cache = self._kept_cache(
                    n_rows, max_length, is_shared=bool(generation_config.return_dict_in_generate)
                )
            else:
                cache = self.new_cache()
            model_kwargs[GENERATION_CACHE] = cache
        if drafts:
            model_kwargs[GENERATION_CACHE].activate_past_recording()

    def _check_speculation(self) -> None:
        if self._longrope_switch is not None:
            raise ValueError(
                "a model with LongRoPE reads all tokens again beyond its trained length, which drafted tokens may "
                "cross; leave assistant_model and prompt_lookup_num_tokens out."
            )

    def _assisted_decoding(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Speculate as transformers does, on a cache that records what it has to undo.

        Raises ValueError without a cache, with a static one and with LongRoPE.
        """
        self._check_speculation()
        cache = kwargs.get(GENERATION_CACHE)
        if not isinstance(cache, HybridCache) or cache.is_compileable:
            raise ValueError(
                "speculation needs a cache that can be rolled back; leave use_cache and cache_implementation out."
            )
        options: Any = kwargs["generation_config"]
        shows_prompt = options.output_hidden_states or options.output_attentions
        has_one_row = kwargs.get("inputs_embeds") is None and len(input_ids) == 1
        n_past = cache.get_seq_length()
        n_early = input_ids.shape[1] - 1
        # A record of the prompt would hold what every layer has read: all but its last token come before.
        if has_one_row and n_early > n_past and not shows_prompt:
            mask = kwargs.get("attention_mask")
            positions = kwargs.get("position_ids")
            self.model(
                input_ids=input_ids[:, n_past:n_early],
                attention_mask=None if mask is None else mask[:, :n_early],
                position_ids=None if positions is None else positions[:, n_past:n_early],
                cache=cache,
            )
        cache.activate_past_recording()
        try:
            parent: Any = super()
            return parent._assisted_decoding(input_ids, *args, **kwargs)
        finally:
            cache.stop_recording()

    def _kept_cache(self, n_rows: int, max_length: int, is_shared: bool) -> HybridCache:
        """Return an empty static cache: if possible that of the last call, for which the step is compiled.

        A new one is as long as the longest so far. If ``is_shared``, `generate` returns the cache to its caller, who
        may go on from it: it is not used again.
        """
        # Tensors of inference mode cannot be reset outside it; threads generate at the same time.
        key = (
            n_rows,
            self.dtype,
            self.device,
            torch.is_inference_mode_enabled(),
            threading.get_ident(),
        )
        kept_key, kept_length, kept = getattr(self, "_static_cache", (None, 0, None))
        if kept is not None and kept_key == key and max_length <= kept_length:
            kept.reset()
            cache = kept
        else:
            cache = self.new_cache(max_length=max(max_length, kept_length))
        self._static_cache = (key, max(max_length, kept_length), None if is_shared else cache)
        return cache

    @_like_prepare_inputs
    def prepare_inputs_for_generation(
        self, input_ids: Tensor, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Prepare inputs as transformers does, but drop the cache when LongRoPE switches to its long factors.

        Cached keys were rotated with the short factors; Phi-3 also recomputes all tokens at this point. For a static
        cache, pass the 2-D mask on instead of transformers' 4-D mask: recurrent heads need to know a prompt's padding.
        """
        parent: Any = super()
        cache = kwargs.get(GENERATION_CACHE)
        if not isinstance(cache, HybridCache):
            return parent.prepare_inputs_for_generation(input_ids, *args, **kwargs)
        if self._crosses_switch(cache, input_ids, kwargs):
            kwargs |= self._all_tokens_anew(cache, input_ids, kwargs)
        elif kwargs.get("is_first_iteration"):
            n_past = int(cache.get_seq_length())
            # Speculation of transformers forgets that a cache may be filled. Embeddings it cuts.
            is_whole = "next_sequence_length" in kwargs and kwargs["next_sequence_length"] is None
            if is_whole and n_past and cache.layer(0).record_past:
                kwargs["next_sequence_length"] = input_ids.shape[1] - n_past
            _check_continued(self, cache, input_ids, kwargs)
        inputs = parent.prepare_inputs_for_generation(input_ids, *args, **kwargs)
        if cache.is_compileable:
            read = inputs.get("inputs_embeds")
            if read is None:
                read = inputs["input_ids"]
            if read.shape[1] > 1:
                inputs["attention_mask"] = kwargs.get("attention_mask")
        return inputs

    def _crosses_switch(
        self, cache: HybridCache, input_ids: Tensor, kwargs: dict[str, Any]
    ) -> bool:
        """Return True if the cache ends before the LongRoPE switch and the tokens so far beyond it."""
        switch = self._longrope_switch
        if switch is None:
            return False
        return 0 < cache.get_seq_length() <= switch < _n_tokens_so_far(input_ids, kwargs)

    def _all_tokens_anew(
        self, cache: HybridCache, input_ids: Tensor, kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the arguments that change if all tokens are read again, into a new cache."""
        changed: dict[str, Any] = {GENERATION_CACHE: self.new_cache(cache.layer(0).kv_dtype)}
        # transformers before 5.5 cuts the input by `cache_position`.
        if "next_sequence_length" in kwargs:
            changed["next_sequence_length"] = None
        if "cache_position" in kwargs:
            length = _n_tokens_so_far(input_ids, kwargs)
            changed["cache_position"] = torch.arange(length, device=input_ids.device)
        prompt = kwargs.get("inputs_embeds")
        if prompt is not None:
            written = self.get_input_embeddings()(input_ids)
            changed["inputs_embeds"] = torch.cat([prompt, written.to(prompt.dtype)], dim=1)
            changed["is_first_iteration"] = True
        return changed

    def create_masks_for_generate(self, config: PretrainedConfig, **kwargs: Any) -> Any:
        """Make transformers' masks for a static cache from the backbone's config, which has the layers' windows."""
        return create_masks_for_generate(config=self.model.config, **kwargs)

    @torch.no_grad()
    def prefill(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        cache: HybridCache | None = None,
        chunk_size: int | None = None,
    ) -> HybridCache:
        """Read a prompt into a cache, from which `generate` goes on if its input begins with this prompt.

        ``input_ids`` [B, L]; ``attention_mask`` [B, L] is 0 at padding, which must be on the left. ``chunk_size`` reads
        that many tokens at a time, which takes less memory. With a ``cache``, these tokens follow those it holds, whose
        columns ``attention_mask`` then covers too. `HybridCache.copy` and ``repeat`` make several of one,
        ``save`` writes it for `load_cache`. Raises ValueError for sizes that do not fit.
        """
        n_rows, length = input_ids.shape
        if cache is None:
            cache = self.new_cache()
        n_past = int(cache.get_seq_length())
        before = cache.prefix
        if n_past and (
            before is None or before.n_columns != n_past or len(before.ids_BL) != n_rows
        ):
            raise ValueError(
                f"the cache holds {n_past} tokens that are not one prefill of {n_rows} rows; pass the cache of a "
                "prefill, or none."
            )
        given = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        if n_past and before is not None and attention_mask is None:
            given = torch.cat([before.mask_BL, given], dim=1)
        if given.shape != (n_rows, n_past + length):
            raise ValueError(
                f"attention_mask is {tuple(given.shape)}; pass one for all tokens of the cache, "
                f"{(n_rows, n_past + length)}."
            )
        if length < 1 or (chunk_size is not None and chunk_size < 1):
            raise ValueError(
                f"{length} tokens are to be read in pieces of {chunk_size}; both must be 1 or more."
            )
        switch = self._longrope_switch
        if switch is not None and n_past + length > switch and (n_past or chunk_size is not None):
            raise ValueError(
                f"LongRoPE changes at {switch} tokens, so {n_past + length} cannot be read in pieces; pass all "
                "tokens at once, without chunk_size."
            )
        # Positions count tokens, as `generate` counts them.
        position_ids = (given.long().cumsum(-1) - 1).clamp_min(0)
        has_padding = not bool((given != 0).all())
        for first in range(n_past, n_past + length, chunk_size or length):
            last = min(first + (chunk_size or length), n_past + length)
            self.model(
                input_ids=input_ids[:, first - n_past : last - n_past],
                attention_mask=given[:, :last] if has_padding else None,
                position_ids=position_ids[:, first:last],
                cache=cache,
            )
        ids = input_ids if before is None else torch.cat([before.ids_BL, input_ids], dim=1)
        cache.prefix = Prefix(ids, given, fingerprint(self, ids, given), str(self.dtype))
        return cache

    def load_cache(
        self, path: str | Path, input_ids: Tensor, attention_mask: Tensor | None = None
    ) -> HybridCache:
        """Load what `HybridCache.save` has written for this student and this prompt, [B, L].

        Raises ValueError for a damaged file, another prompt or mask, another student or another dtype.
        """
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        prefix = Prefix(input_ids, mask, fingerprint(self, input_ids, mask), str(self.dtype))
        cache = self.new_cache()
        tensors = read_prefix(Path(path), prefix)
        for mixer in self.mixers_with("window"):
            assert mixer.windowed is not None
            reach = mixer.windowed.reach
            cache.layer(mixer.layer).ring_of(reach.window, reach.sinks)
        mixers = self.mixers()
        on_device = {}
        for name, tensor in tensors.items():
            layer, _, _ = name.partition(".")
            device = next(mixers[int(layer)].parameters()).device
            if device.type == "meta":
                # An offloaded layer runs where its input is.
                device = input_ids.device
            on_device[name] = tensor.to(device)
        cache.fill(prefix, on_device)
        return cache

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise ValueError: it concatenates sequences, so a recurrent state would leak from one into the next."""
        raise ValueError(
            "continuous batching (cache_implementation='paged') keeps keys and values only, no recurrent states; "
            "call generate with a left-padded batch."
        )

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: HybridCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        seq_idx: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        past_key_values: HybridCache | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Compute next-token logits.

        ``attention_mask`` [B, S] is 0 at padding. A 4-D mask may only be causal, unless the row's documents are given
        too: replaced heads do not read it. ``seq_idx`` [B, L] numbers the documents packed in a row, ascending:
        positions restart and nothing leaks from one document to the next. The conventions of transformers also work:
        ``position_ids`` that restart within a row, or ``cu_seq_lens_q``, the document boundaries in all rows
        concatenated. ``use_cache`` defaults to True, except in training and with packed documents.
        ``past_key_values`` is what transformers before 5.24 calls the ``cache``. Raises ValueError for a cache of
        another class, a cache with packed documents, or a 4-D mask that hides tokens. Maps (``output_attentions``) are
        [B, heads, L, S] of the heads that attend, kept ones first.
        """
        if cache is None:
            cache = past_key_values
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            seq_idx=seq_idx,
            return_dict=True,
            **kwargs,
        )
        # 0 keeps all, because -0 is where a slice begins.
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = finish_logits(self.lm_head(outputs[0][:, kept, :]), self.model.config)
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            **{OUTPUT_CACHE: cache_of(outputs)},
        )


def _stores_tied(path: Any, options: dict[str, Any]) -> bool:
    """Return True if a checkpoint's own config ties the embeddings.

    The options of `from_pretrained` do not say who untied them: `AutoModelForCausalLM` has put them into the config.
    """
    if path is None:
        return False
    where = {name: options[name] for name in WHERE if name in options}
    return bool(HybridConfig.from_pretrained(path, **where).tie_word_embeddings)


def _refuse_tensors(
    where: str, missing: list[str], unexpected: list[str], unties: bool
) -> NoReturn:
    """Raise ValueError for a checkpoint whose tensors are not the model's."""
    if unties:
        raise ValueError(
            f"{where} stores one tensor for both embeddings; leave tie_word_embeddings=False out."
        )
    differences = []
    for kind, names in (("missing", missing), ("unexpected", unexpected)):
        if names:
            differences.append(f"{kind}: {', '.join(names[:3])}")
    raise ValueError(
        f"the tensors of {where} do not match this model under transformers {__version__} "
        f"({'; '.join(differences)}); copy the whole folder again, or export the student again."
    )


def _check_room(layer: HybridLayerCache, n_tokens: int) -> None:
    """Raise ValueError for a static cache of fewer tokens."""
    if isinstance(layer, StaticLayerCache) and n_tokens > layer.max_length:
        raise ValueError(
            f"the static cache holds {layer.max_length} tokens and {n_tokens} may come; pass "
            f"model.new_cache(max_length={n_tokens}), or fewer new tokens."
        )


def _n_tokens_so_far(input_ids: Tensor, kwargs: dict[str, Any]) -> int:
    """Count a row's tokens in `generate`: beside embeddings of a prompt, ``input_ids`` are the new tokens alone."""
    prompt = kwargs.get("inputs_embeds")
    length = input_ids.shape[1]
    return length if prompt is None else length + prompt.shape[1]


def _covers_more(kwargs: dict[str, Any], length: int) -> bool:
    """Return True if the mask or the positions are longer than the input.

    The input is then the new tokens alone. Of tokens, `generate` sees that, but it cuts the past off any embeddings.
    """
    # Positions too: transformers 5.24 drops a mask without padding.
    given = [kwargs.get("attention_mask"), kwargs.get("position_ids")]
    return any(tensor is not None and tensor.shape[-1] > length for tensor in given)


def _check_continued(
    student: HybridForCausalLM, cache: HybridCache, input_ids: Tensor, kwargs: dict[str, Any]
) -> None:
    """Raise ValueError if the tokens so far do not go on from those of the cache."""
    n_past = int(cache.get_seq_length())
    embedded = kwargs.get("inputs_embeds")
    mask = kwargs.get("attention_mask")
    n_new = kwargs.get("next_sequence_length")
    # transformers before 5.5 passes the places of the new tokens.
    if n_new is None and kwargs.get("cache_position") is not None:
        n_new = len(kwargs["cache_position"])
    # Otherwise the input is the new tokens alone.
    if n_new is None or not n_past:
        return
    length = input_ids.shape[1] if embedded is None else embedded.shape[1]
    if n_new < 1 or (embedded is not None and _covers_more(kwargs, length)):
        raise ValueError(
            f"the cache holds {n_past} tokens and the input {length}; pass the tokens of the cache "
            "and at least one more, and a cache.copy() to each of several continuations."
        )
    prefix = cache.prefix
    if prefix is None:
        return
    if embedded is None:
        begins = prefix.begins(input_ids, mask)
    else:
        begins = prefix.begins_embedded(embedded, mask, student.get_input_embeddings())
    if not begins:
        raise ValueError(
            "the input does not begin with the prompt that the cache holds; pass all tokens and their "
            "attention_mask, in rows as many as the cache has (cache.repeat)."
        )
    if prefix.student != fingerprint(student, prefix.ids_BL, prefix.mask_BL):
        raise ValueError(
            "the cache holds the state of another student, or of this one with other weights, adapters or "
            "settings; call prefill again."
        )


def _make_backbone(config: PretrainedConfig, attn_implementation: str | None) -> PreTrainedModel:
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"transformers {__version__} has no causal language model for a config of type {config.model_type}; "
            "use a teacher that AutoModelForCausalLM.from_config can make."
        )
    chosen: dict[str, Any] = (
        {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    )
    # The dtype is explicit, because the backbone's config may name that of another checkpoint.
    chosen["trust_remote_code"] = False
    backbone = AutoModelForCausalLM.from_config(config, dtype=torch.get_default_dtype(), **chosen)
    layers = getattr(decoder_of(backbone), "layers", None)
    if (
        layers is None
        or backbone.get_output_embeddings() is None
        or not all(map(attention_name, layers))
    ):
        raise ValueError(
            f"{type(backbone).__name__} has no output embeddings, or no layers with attention; expected a decoder with "
            "both: take a teacher of another family (docs/heads.md)."
        )
    return backbone


def _longrope_switch(backbone: PreTrainedModel) -> int | None:
    """Return the length beyond which `generate` with LongRoPE recomputes all tokens; None if it never does."""
    name = "prepare_inputs_for_generation"
    # True for Phi-3, not for Llama.
    has_own_way = getattr(type(backbone), name) is not getattr(GenerationMixin, name)
    for rope in rope_settings(backbone.config) if has_own_way else ():
        if rope.get("rope_type", rope.get("type")) == "longrope":
            trained = rope.get("original_max_position_embeddings")
            return trained or getattr(backbone.config, "original_max_position_embeddings", None)
    return None


def finishes_logits(config: PretrainedConfig) -> bool:
    """Return True if the family scales or caps the logits after the output embedding."""
    return any(getattr(config, name, None) is not None for name in LOGIT_OPTIONS)


def logits_of(model: PreTrainedModel, hidden_BLD: Tensor) -> Tensor:
    """Compute a decoder's logits from its last hidden states."""
    embedding: Any = model.get_output_embeddings()
    return finish_logits(embedding(hidden_BLD), decoder_of(model).config)


def finish_logits(logits_BLV: Tensor, config: PretrainedConfig) -> Tensor:
    """Scale and cap logits after the output embedding, as some families do (`LOGIT_OPTIONS`)."""
    if getattr(config, "logits_scaling", None) is not None:
        logits_BLV = logits_BLV / config.logits_scaling
    if getattr(config, "logit_scale", None) is not None:
        logits_BLV = logits_BLV * config.logit_scale
    cap = getattr(config, "final_logit_softcapping", None)
    return logits_BLV if cap is None else cap * torch.tanh(logits_BLV / cap)


# transformers knows by these tables what a class is for, under an export's own code too: for others, Trainer compares
# smoothed labels with the token before (`label_smoothing_factor`), and pipelines log that they are not supported.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[MODEL_TYPE] = HybridForCausalLM.__name__
MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES[MODEL_TYPE] = (
    HybridForSequenceClassification.__name__
)
