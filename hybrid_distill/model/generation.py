"""Text generation of students: transformers' `generate` with a `HybridCache`.

Shapes: B batch, L length.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PretrainedConfig
from transformers.masking_utils import create_masks_for_generate
from transformers.modeling_outputs import CausalLMOutputWithPast

from .cache import HybridCache
from .layout import CACHE_NAMES, cache_argument
from .prefill import HybridPrefill
from .prompt import Prompt, check_pieces, check_prompt, mask_so_far, n_tokens_so_far

# Two names of one thing: transformers 5.24 renamed it, in its outputs and in `generate`.
OUTPUT_CACHE = cache_argument(CausalLMOutputWithPast)
_prepare_inputs: Any = vars(GenerationMixin)["prepare_inputs_for_generation"]
# `generate` reads the names of a method's arguments.
_like_prepare_inputs: Any = wraps(_prepare_inputs)
GENERATION_CACHE = cache_argument(_prepare_inputs)


@dataclass
class ReusableCache:
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

    _static_cache: ReusableCache | None = None

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
        cache = model_kwargs.get(GENERATION_CACHE)
        if generation_config.prefill_chunk_size is not None:
            check_pieces(cache, model_kwargs)
        _, batch_size, max_length, *_ = args
        if isinstance(cache, HybridCache):
            _check_kind_and_room(cache, is_static, max_length)
        if cache is None and generation_config.use_cache:
            if is_static:
                cache = self._static_cache_for(generation_config, batch_size, max_length)
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
        prompt = Prompt(cache, input_ids, options, kwargs)
        check_prompt(self, prompt)
        if prompt.lacks_past:
            raise ValueError(
                f"the cache holds {prompt.n_past} tokens that the input lacks, and speculation looks up the "
                "whole text; pass all tokens, or leave assistant_model and prompt_lookup_num_tokens out."
            )
        shows_prompt = options.output_hidden_states or options.output_attentions
        has_one_row = kwargs.get("inputs_embeds") is None and len(input_ids) == 1
        n_past = prompt.n_past
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
        """Raise ValueError for a prompt that cannot be read after its cache; see `check_prompt`."""
        cache = kwargs.get(GENERATION_CACHE)
        if isinstance(cache, HybridCache):
            check_prompt(self, Prompt(cache, input_ids, options, kwargs))

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
        """Withhold the static cache from a `generate` within this one, which a logits processor may call."""
        reusable = self._static_cache
        if reusable is None or reusable.cache is not cache:
            yield
            return
        reusable.is_in_use = True
        try:
            yield
        finally:
            reusable.is_in_use = False

    def _static_cache_for(
        self, options: GenerationConfig, batch_size: int, max_length: int
    ) -> HybridCache:
        """Return an empty static cache: if possible that of the last call, for which the step is compiled.

        A new one is as long as the longest so far. A cache that `generate` returns to its caller, who may go on from
        it, is not used again.
        """
        # As transformers counts the rows of its own static cache.
        n_rows = batch_size * max(options.num_beams, options.num_return_sequences)
        key = self._static_cache_key(n_rows)
        is_returned = bool(options.return_dict_in_generate)
        reusable = self._static_cache
        longest = max_length
        if reusable is not None:
            longest = max(max_length, reusable.length)
            if reusable.is_in_use:
                return self.new_cache(max_length=longest)
            fits = reusable.key == key and reusable.length == longest
            if reusable.cache is not None and fits:
                cache = reusable.cache
                cache.reset()
                if is_returned:
                    reusable.cache = None
                return cache
        cache = self.new_cache(max_length=longest)
        self._static_cache = ReusableCache(key, longest, cache)
        if is_returned:
            self._static_cache.cache = None
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
            kwargs |= _new_tokens_alone(cache, input_ids, kwargs)
        # The next call that goes on from this cache compares its padding with this mask.
        kwargs[GENERATION_CACHE].mask_BL = mask_so_far(input_ids, kwargs)
        inputs = parent.prepare_inputs_for_generation(input_ids, *args, **kwargs)
        if cache.is_compileable and _reads_prompt(inputs, input_ids, kwargs):
            inputs["attention_mask"] = kwargs.get("attention_mask")
        return inputs

    def _crosses_switch(
        self, cache: HybridCache, input_ids: Tensor, kwargs: dict[str, Any]
    ) -> bool:
        """Return True if the cache ends before the LongRoPE switch and the tokens so far beyond it."""
        switch = self._longrope_switch
        if switch is None:
            return False
        return 0 < cache.get_seq_length() <= switch < n_tokens_so_far(input_ids, kwargs)

    def _all_tokens_anew(
        self, cache: HybridCache, input_ids: Tensor, kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the arguments that change if all tokens are read again, into a new cache."""
        changed: dict[str, Any] = {GENERATION_CACHE: self.new_cache(cache.layer(0).kv_dtype)}
        # transformers before 5.5 cuts the input by `cache_position`.
        if "next_sequence_length" in kwargs:
            changed["next_sequence_length"] = None
        if "cache_position" in kwargs:
            length = n_tokens_so_far(input_ids, kwargs)
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


def _new_tokens_alone(
    cache: HybridCache, input_ids: Tensor, kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return the argument that cuts off what a filled cache holds, where transformers does not.

    Its assisted decoding passes the whole input. Embeddings it cuts itself.
    """
    n_past = int(cache.get_seq_length())
    is_whole = "next_sequence_length" in kwargs and kwargs["next_sequence_length"] is None
    if is_whole and n_past and cache.layer(0).record_past:
        return {"next_sequence_length": input_ids.shape[1] - n_past}
    return {}


def _reads_prompt(inputs: dict[str, Any], input_ids: Tensor, kwargs: dict[str, Any]) -> bool:
    """Return True for a prompt or a piece of one, False for a decoding step."""
    read = inputs.get("inputs_embeds")
    if read is None:
        read = inputs["input_ids"]
    # A piece of a prompt may be one column, of padding. Steps are given all tokens, and read the last.
    is_piece = kwargs.get("inputs_embeds") is None and read.shape[1] == input_ids.shape[1]
    return is_piece or read.shape[1] > 1


def _check_kind_and_room(cache: HybridCache, is_static: bool, max_length: int) -> None:
    """Raise ValueError for a given cache that is too short, or that is not static where a static one is asked for."""
    cache.layer(0).check_room(max_length)
    if is_static and not cache.is_compileable:
        raise ValueError(
            "cache_implementation is 'static' and the given cache is not; leave one of them out, or prefill "
            f"into model.new_cache(max_length={max_length})."
        )
