"""Text generation of students: transformers' `generate` with a `HybridCache`.

Shapes: B batch, L length.
"""

from __future__ import annotations

import threading
from dataclasses import fields
from functools import wraps
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PretrainedConfig, __version__
from transformers.masking_utils import create_masks_for_generate
from transformers.modeling_outputs import CausalLMOutputWithPast

from .cache import HybridCache
from .field_rules import release
from .layout import CACHE_NAMES, cache_argument
from .prefill import HybridPrefill
from .prefix import fingerprint

# Two names of one thing: transformers 5.24 renamed it, in its outputs and in `generate`.
OUTPUT_CACHE = next(
    name for name in CACHE_NAMES if name in {field.name for field in fields(CausalLMOutputWithPast)}
)
_prepare_inputs: Any = vars(GenerationMixin)["prepare_inputs_for_generation"]
# `generate` reads the names of a method's arguments.
_like_prepare_inputs: Any = wraps(_prepare_inputs)
GENERATION_CACHE = cache_argument(_prepare_inputs)


# GenerationMixin is a base by name, because `PreTrainedModel.can_generate` looks for it among the bases' names.
class HybridGeneration(HybridPrefill, GenerationMixin):
    """Model that `generate` runs with a `HybridCache`: by steps, by drafts, and from the cache of a `prefill`."""

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy or a pickle holds: no cache of an earlier `generate`."""
        return {name: value for name, value in self.__dict__.items() if name != "_static_cache"}

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
        is_static = self._wants_static(generation_config, drafts)
        for name in CACHE_NAMES[:2]:  # callers may use either spelling
            if model_kwargs.get(name) is not None:
                model_kwargs[GENERATION_CACHE] = model_kwargs.pop(name)
        if generation_config.prefill_chunk_size is not None:
            _check_pieces(model_kwargs)
        _, batch_size, max_length, *_ = args
        cache = model_kwargs.get(GENERATION_CACHE)
        if isinstance(cache, HybridCache):
            cache.layer(0).check_room(max_length)
            if is_static and not cache.is_compileable:
                raise ValueError(
                    "cache_implementation is 'static' and the given cache is not; leave one of them out, or prefill "
                    f"into model.new_cache(max_length={max_length})."
                )
        if cache is None and generation_config.use_cache:
            if is_static:
                # As transformers counts the rows of its own static cache.
                n_rows = batch_size * max(
                    generation_config.num_beams, generation_config.num_return_sequences
                )
                is_shared = bool(generation_config.return_dict_in_generate)
                cache = self._kept_cache(n_rows, max_length, is_shared)
            else:
                cache = self.new_cache()
            model_kwargs[GENERATION_CACHE] = cache
        if drafts:
            model_kwargs[GENERATION_CACHE].activate_past_recording()

    def _wants_static(self, generation_config: GenerationConfig, drafts: bool) -> bool:
        """Return True for a static cache. Raises ValueError for a kind of cache that a hybrid does not have."""
        kind = generation_config.cache_implementation
        if kind == "static" and self._longrope_switch is None:
            return True
        # transformers before 5.5 asks an assistant for a cache that can be cropped by this name.
        is_own = kind in (None, "dynamic") or (drafts and kind == "dynamic_full")
        if not is_own:
            raise ValueError(
                f"cache_implementation is {kind!r}. A hybrid has its own cache, which holds recurrent states; "
                "leave it out, or pass 'static' for a model without LongRoPE."
            )
        return False

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
        # For a call that goes on from this cache.
        kwargs[GENERATION_CACHE].mask_BL = _mask_so_far(input_ids, kwargs)
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

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise ValueError: it concatenates sequences, so a recurrent state would leak from one into the next."""
        raise ValueError(
            "continuous batching (cache_implementation='paged') keeps keys and values only, no recurrent states; "
            "call generate with a left-padded batch."
        )


def _check_pieces(model_kwargs: dict[str, Any]) -> None:
    """Raise ValueError for a prompt that transformers cannot cut into pieces (``prefill_chunk_size``)."""
    mask = model_kwargs.get("attention_mask")
    if release(__version__) < (5, 5) and mask is not None and not mask.all():
        raise ValueError(
            f"transformers {__version__} gives wrong positions to padded rows that are read in pieces; "
            "install version 5.5 or newer, or leave prefill_chunk_size out."
        )
    if model_kwargs.get("inputs_embeds") is not None:
        raise ValueError(
            "inputs_embeds are given with a prefill_chunk_size, and transformers cuts tokens alone into pieces; "
            "leave prefill_chunk_size out."
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


def _mask_so_far(input_ids: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """Return the 2-D mask of all tokens so far; without one, all count."""
    mask = kwargs.get("attention_mask")
    if mask is not None and mask.dim() == 2:
        return mask
    length = _n_tokens_so_far(input_ids, kwargs)
    return input_ids.new_ones(()).expand(len(input_ids), length)


def _check_padding(cache: HybridCache, n_past: int, mask_BS: Tensor) -> None:
    """Raise ValueError if columns of the cache that were read as tokens count as padding now, or the reverse.

    `generate` fills rows that have ended with padding until all have, and reads it as tokens: a key can be masked
    later, but a state or a ring has it for good.
    """
    before_BL = cache.mask_BL
    if before_BL is None or len(before_BL) != len(mask_BS):
        return
    n_known = min(n_past, before_BL.shape[1], mask_BS.shape[1])
    is_other_BL = (before_BL[:, :n_known] != 0) != (mask_BS[:, :n_known] != 0)
    if bool(is_other_BL.any()):
        raise ValueError(
            f"attention_mask counts other columns as padding than the call that filled the cache, in "
            f"{int(is_other_BL.any(dim=1).sum())} of {len(mask_BS)} rows. Rows that ended early went on with padding, "
            "which their states hold; leave the cache out, or continue each row from a cache of its own."
        )


def _check_continued(
    student: HybridGeneration, cache: HybridCache, input_ids: Tensor, kwargs: dict[str, Any]
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
    _check_padding(cache, n_past, _mask_so_far(input_ids, kwargs))
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
