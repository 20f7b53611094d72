"""Prompt of a call of `generate`: the tokens given, their mask, and the cache that they go on from.

Shapes: B batch, L length, S columns of the mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor
from torch.nn import functional
from transformers import GenerationConfig, __version__

from .cache import HybridCache
from .field_rules import release
from .prefill import HybridPrefill
from .prefix import prompt_state_fingerprint


@dataclass(frozen=True, eq=False)
class Prompt:
    """Input of one `generate` after a cache."""

    cache: HybridCache
    input_ids: Tensor
    options: GenerationConfig
    arguments: Mapping[str, Any]
    """Further arguments of `generate`'s decoding methods."""

    @cached_property
    def n_past(self) -> int:
        """Number of tokens of the cache, when first asked for."""
        return int(self.cache.get_seq_length())

    @property
    def length(self) -> int:
        """Number of tokens or embeddings of a row."""
        embedded = self.arguments.get("inputs_embeds")
        return self.input_ids.shape[1] if embedded is None else embedded.shape[1]

    @property
    def mask_length(self) -> int:
        """Number of columns of the attention mask that `generate` was given; without one, those of the input."""
        mask = self.arguments.get("attention_mask")
        if mask is not None:
            return mask.shape[-1]
        # transformers 5.24 drops a mask without padding, and notes its length.
        return getattr(self.options, "_mask_length", self.length)

    @property
    def lacks_past(self) -> bool:
        """True if the input has only the tokens after those of the cache, and the mask covers both.

        transformers 5.5 or newer then reads the whole input. It cuts the past off any embeddings.
        """
        has_embeddings = self.arguments.get("inputs_embeds") is not None
        if not self.n_past or has_embeddings or release(__version__) < (5, 5):
            return False
        return self.mask_length == self.n_past + self.input_ids.shape[1]


def check_prompt(student: HybridPrefill, prompt: Prompt) -> None:
    """Raise ValueError for a prompt that does not go on from its cache, or is cut at the LongRoPE switch."""
    n_past = prompt.n_past
    if n_past:
        _check_continued(student, prompt)
    _check_rows(prompt)
    n_to_read = prompt.length
    if prompt.lacks_past:
        # Decoding steps get the new tokens alone: they cannot read the text anew at the switch. The last token is
        # generated, but not read.
        n_to_read = n_past + prompt.options.max_length - 1
        prompt.cache.layer(0).check_room(n_to_read)
    switch = student._longrope_switch
    piece = prompt.options.prefill_chunk_size
    reads_in_pieces = piece is not None and (n_past > 0 or piece < n_to_read)
    is_cut = prompt.lacks_past or reads_in_pieces
    if switch is not None and is_cut and n_past <= switch < n_to_read:
        raise ValueError(
            f"LongRoPE changes at {switch} tokens, so {n_to_read} cannot be read in pieces; pass all tokens, "
            "those of the cache too, without prefill_chunk_size."
        )


def _check_continued(student: HybridPrefill, prompt: Prompt) -> None:
    """Raise ValueError if the prompt does not go on from the tokens of the cache."""
    n_past = prompt.n_past
    covers_input = prompt.mask_length == prompt.length
    has_new_tokens = prompt.length > n_past
    if not (covers_input and has_new_tokens) and not prompt.lacks_past:
        raise ValueError(
            f"the cache holds {n_past} tokens, the input {prompt.length} and attention_mask covers "
            f"{prompt.mask_length}; pass the tokens of the cache and at least one more, and a cache.copy() to each of "
            "several continuations."
        )
    input_ids = prompt.input_ids
    _check_padding(prompt.cache, n_past, mask_so_far(input_ids, prompt.arguments))
    prefix = prompt.cache.prefix
    if prefix is None:
        return
    mask = prompt.arguments.get("attention_mask")
    embedded = prompt.arguments.get("inputs_embeds")
    if prompt.lacks_past:
        # The earlier tokens are not given: only rows and padding can be compared.
        begins = prefix.has_same_padding(len(input_ids), mask)
    elif embedded is None:
        begins = prefix.begins(input_ids, mask)
    else:
        begins = prefix.begins_embedded(embedded, mask, student.get_input_embeddings())
    if not begins:
        raise ValueError(
            "the input does not begin with the prompt that the cache holds; pass all tokens and their "
            "attention_mask, in rows as many as the cache has (cache.repeat)."
        )
    if prefix.student != prompt_state_fingerprint(student, prefix.ids_BL, prefix.mask_BL):
        raise ValueError(
            "the cache holds the state of another student, or of this one with other weights, adapters or "
            "settings; call prefill again."
        )


def _check_rows(prompt: Prompt) -> None:
    """Raise ValueError if the cache has rows, which a reset static one keeps, and the input has another number."""
    # Every tensor of a layer has a row for each of the cache's, and every layer the same rows.
    stored = next(iter(prompt.cache.layer(0).tensors().values()), None)
    n_rows = len(prompt.input_ids)
    if stored is not None and len(stored) != n_rows:
        raise ValueError(
            f"number of rows: {n_rows} in the input (repeats for num_beams or num_return_sequences included), "
            f"{len(stored)} in the cache. Both must be the same; pass a cache with a row for each (cache.repeat)."
        )


def check_pieces(cache: Any, model_kwargs: Mapping[str, Any]) -> None:
    """Raise ValueError for a prompt that transformers cannot cut into pieces (``prefill_chunk_size``)."""
    mask = model_kwargs.get("attention_mask")
    if release(__version__) < (5, 5) and mask is not None and not mask.all():
        raise ValueError(
            f"transformers {__version__} gives wrong positions to padded rows that are read in pieces; "
            "install version 5.5 or newer, or leave prefill_chunk_size out."
        )
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


def n_tokens_so_far(input_ids: Tensor, kwargs: Mapping[str, Any]) -> int:
    """Count a row's tokens in `generate`: beside embeddings of a prompt, ``input_ids`` are the new tokens alone."""
    prompt = kwargs.get("inputs_embeds")
    length = input_ids.shape[1]
    return length if prompt is None else length + prompt.shape[1]


def mask_so_far(input_ids: Tensor, kwargs: Mapping[str, Any]) -> Tensor:
    """Return the 2-D mask of all tokens so far; without one, all count."""
    mask = kwargs.get("attention_mask")
    if mask is not None and mask.dim() == 2:
        return mask
    length = n_tokens_so_far(input_ids, kwargs)
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
