"""Text generation of students: transformers' `generate` with a `HybridCache`.

Shapes: B batch, L length.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import wraps
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import functional
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


@dataclass
class KeptCache:
    """Static cache of the last `generate`, for the next one that it fits."""

    key: tuple[Any, ...]
    length: int
    """Length of the longest static cache so far."""
    cache: HybridCache | None
    """None if `generate` has returned it to its caller."""
    is_in_use: bool = False


# GenerationMixin is a base by name, because `PreTrainedModel.can_generate` looks for it among the bases' names.
class HybridGeneration(HybridPrefill, GenerationMixin):
    """Model that `generate` runs with a `HybridCache`: by steps, by drafts, and from the cache of a `prefill`."""

    _static_cache: KeptCache | None = None

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

        Raises ValueError without a cache, with a static one, with LongRoPE and for new tokens alone after a cache.
        """
        self._check_speculation()
        cache = kwargs.get(GENERATION_CACHE)
        if not isinstance(cache, HybridCache) or cache.is_compileable:
            raise ValueError(
                "speculation needs a cache that can be rolled back; leave use_cache and cache_implementation out."
            )
        options: Any = kwargs["generation_config"]
        # Before anything is read: a refused call leaves its cache as it was.
        self._check_prompt(input_ids, options, kwargs)
        if _is_new_alone(cache, input_ids, options, kwargs):
            raise ValueError(
                f"the cache holds {cache.get_seq_length()} tokens that the input lacks, and speculation looks up the "
                "whole text; pass all tokens, or leave assistant_model and prompt_lookup_num_tokens out."
            )
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

    def _prefill(
        self,
        input_ids: Tensor,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Read the prompt as transformers does. Raises ValueError for one that would be read wrong.

        transformers cuts the prompt into pieces here, so this is the last place that knows all of it.
        """
        # An assistant goes on from its own cache, which is cropped to the text so far.
        if not getattr(generation_config, "is_assistant", False):
            self._check_prompt(input_ids, generation_config, model_kwargs)
        parent: Any = super()
        return parent._prefill(input_ids, generation_config, model_kwargs, *args, **kwargs)

    def _check_prompt(
        self, input_ids: Tensor, options: GenerationConfig, kwargs: dict[str, Any]
    ) -> None:
        """Raise ValueError for a prompt that does not go on from its cache, or is cut at the LongRoPE switch."""
        cache = kwargs.get(GENERATION_CACHE)
        if not isinstance(cache, HybridCache):
            return
        n_past = int(cache.get_seq_length())
        if n_past:
            _check_continued(self, cache, input_ids, options, kwargs)
        n_all = _n_given(input_ids, kwargs)
        is_new_alone = _is_new_alone(cache, input_ids, options, kwargs)
        if is_new_alone:
            # Steps cannot read all tokens anew: they know the new ones alone. No step reads the last one.
            n_all = n_past + options.max_length - 1
            cache.layer(0).check_room(n_all)
        switch = self._longrope_switch
        piece = options.prefill_chunk_size
        is_cut = is_new_alone or (piece is not None and (n_past > 0 or piece < n_all))
        if switch is not None and is_cut and n_past <= switch < n_all:
            raise ValueError(
                f"LongRoPE changes at {switch} tokens, so {n_all} cannot be read in pieces; pass all tokens, "
                "those of the cache too, without prefill_chunk_size."
            )

    def _sample(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Sample as transformers does, on a cache that no other `generate` uses."""
        parent: Any = super()
        with self._in_use(kwargs.get(GENERATION_CACHE)):
            return parent._sample(input_ids, *args, **kwargs)

    def _beam_search(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Search beams as transformers does, on a cache that no other `generate` uses."""
        parent: Any = super()
        with self._in_use(kwargs.get(GENERATION_CACHE)):
            return parent._beam_search(input_ids, *args, **kwargs)

    @contextmanager
    def _in_use(self, cache: Any) -> Iterator[None]:
        """Keep the kept static cache from a `generate` within this one, which a logits processor may call."""
        kept = self._static_cache
        if kept is None or kept.cache is not cache:
            yield
            return
        kept.is_in_use = True
        try:
            yield
        finally:
            kept.is_in_use = False

    def _kept_cache(self, n_rows: int, max_length: int, is_shared: bool) -> HybridCache:
        """Return an empty static cache: if possible that of the last call, for which the step is compiled.

        A new one is as long as the longest so far. If ``is_shared``, `generate` returns the cache to its caller, who
        may go on from it: it is not used again.
        """
        key = self._static_cache_key(n_rows)
        kept = self._static_cache
        longest = max_length
        if kept is not None:
            longest = max(max_length, kept.length)
            if kept.is_in_use:
                return self.new_cache(max_length=longest)
            if kept.cache is not None and kept.key == key and longest == kept.length:
                cache = kept.cache
                cache.reset()
                if is_shared:
                    kept.cache = None
                return cache
        cache = self.new_cache(max_length=longest)
        self._static_cache = KeptCache(key, longest, None if is_shared else cache)
        return cache

    def _static_cache_key(self, n_rows: int) -> tuple[Any, ...]:
        """Return everything that a call must share with an earlier one to use its static cache."""
        # Autocast decides in which dtype a layer stores what it has read.
        autocast_dtype = None
        device_type = self.device.type
        # An offloaded student is on the meta device, which has no autocast.
        if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
            autocast_dtype = torch.get_autocast_dtype(device_type)
        # Tensors of inference mode cannot be reset outside it; threads generate at the same time.
        return (
            n_rows,
            self.dtype,
            autocast_dtype,
            self.device,
            torch.is_inference_mode_enabled(),
            threading.get_ident(),
        )

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
        # For a call that goes on from this cache.
        kwargs[GENERATION_CACHE].mask_BL = _mask_so_far(input_ids, kwargs)
        inputs = parent.prepare_inputs_for_generation(input_ids, *args, **kwargs)
        if cache.is_compileable:
            read = inputs.get("inputs_embeds")
            if read is None:
                read = inputs["input_ids"]
            # A piece of a prompt may be one column, of padding. Steps are given all tokens, and read the last.
            is_piece = kwargs.get("inputs_embeds") is None and read.shape[1] == input_ids.shape[1]
            if is_piece or read.shape[1] > 1:
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
    cache = model_kwargs.get(GENERATION_CACHE)
    if release(__version__) < (5, 21) and cache is not None and cache.get_seq_length():
        raise ValueError(
            f"transformers {__version__} reads a prompt in pieces from its beginning, and the cache holds "
            f"{int(cache.get_seq_length())} tokens; install version 5.21 or newer, or leave prefill_chunk_size out."
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


def _n_given(input_ids: Tensor, kwargs: dict[str, Any]) -> int:
    """Count the tokens or embeddings of a row of the prompt."""
    embedded = kwargs.get("inputs_embeds")
    return input_ids.shape[1] if embedded is None else embedded.shape[1]


def _n_covered(input_ids: Tensor, options: GenerationConfig, kwargs: dict[str, Any]) -> int:
    """Count the columns of the attention mask that `generate` was given; without one, those of the prompt."""
    mask = kwargs.get("attention_mask")
    if mask is not None:
        return mask.shape[-1]
    # transformers 5.24 drops a mask without padding, and notes its length.
    return getattr(options, "_mask_length", _n_given(input_ids, kwargs))


def _is_new_alone(
    cache: HybridCache, input_ids: Tensor, options: GenerationConfig, kwargs: dict[str, Any]
) -> bool:
    """Return True if the input is the tokens after those of the cache, and the mask covers both.

    transformers 5.5 or newer then reads the whole input. It cuts the past off any embeddings.
    """
    n_past = int(cache.get_seq_length())
    if not n_past or kwargs.get("inputs_embeds") is not None or release(__version__) < (5, 5):
        return False
    return _n_covered(input_ids, options, kwargs) == n_past + input_ids.shape[1]


def _mask_so_far(input_ids: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """Return the 2-D mask of all tokens so far; without one, all count."""
    mask = kwargs.get("attention_mask")
    if mask is not None and mask.dim() == 2:
        return mask
    length = _n_tokens_so_far(input_ids, kwargs)
    return input_ids.new_ones(()).expand(len(input_ids), length)


def _is_padding(mask_BS: Tensor, n_columns: int) -> Tensor:
    """Return which of the first columns are padding; those beyond the mask are tokens."""
    is_padding_BS = mask_BS[:, :n_columns] == 0
    return functional.pad(is_padding_BS, (0, n_columns - is_padding_BS.shape[1]))


def _check_padding(cache: HybridCache, n_past: int, mask_BS: Tensor) -> None:
    """Raise ValueError if columns of the cache that were read as tokens count as padding now, or the reverse.

    `generate` fills rows that have ended with padding until all have, and reads it as tokens: a key can be masked
    later, but a state or a ring has it for good.
    """
    before_BL = cache.mask_BL
    if before_BL is None or len(before_BL) != len(mask_BS):
        return
    is_other_BL = _is_padding(before_BL, n_past) != _is_padding(mask_BS, n_past)
    if bool(is_other_BL.any()):
        raise ValueError(
            f"attention_mask counts other columns as padding than the call that filled the cache, in "
            f"{int(is_other_BL.any(dim=1).sum())} of {len(mask_BS)} rows. Rows that ended early went on with padding, "
            "which their states hold; leave the cache out, or continue each row from a cache of its own."
        )


def _check_continued(
    student: HybridGeneration,
    cache: HybridCache,
    input_ids: Tensor,
    options: GenerationConfig,
    kwargs: dict[str, Any],
) -> None:
    """Raise ValueError if the prompt does not go on from the tokens of the cache."""
    n_past = int(cache.get_seq_length())
    n_given = _n_given(input_ids, kwargs)
    n_covered = _n_covered(input_ids, options, kwargs)
    is_new_alone = _is_new_alone(cache, input_ids, options, kwargs)
    is_whole = n_covered == n_given > n_past
    if not is_whole and not is_new_alone:
        raise ValueError(
            f"the cache holds {n_past} tokens, the input {n_given} and attention_mask covers {n_covered}; pass the "
            "tokens of the cache and at least one more, and a cache.copy() to each of several continuations."
        )
    _check_padding(cache, n_past, _mask_so_far(input_ids, kwargs))
    prefix = cache.prefix
    if prefix is None:
        return
    mask = kwargs.get("attention_mask")
    embedded = kwargs.get("inputs_embeds")
    if is_new_alone:
        # Their rows and padding can be compared, the tokens before them cannot.
        has_same_rows = len(input_ids) == len(prefix.ids_BL)
        begins = has_same_rows and prefix.begins(prefix.ids_BL.to(input_ids.device), mask)
    elif embedded is None:
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
