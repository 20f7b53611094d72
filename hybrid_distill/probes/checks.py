"""Can a model's tokenizer and context hold these questions at all? Asked before hours of scoring, not after."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from . import Example
from .answering import tokenize

WORD = re.compile(r"\w+|[^\w\s]|\n")
NAMED = 8


def check_answerable(
    examples: Sequence[Example],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    *,
    shorter: str = "fewer pairs, shorter lists or a shorter filler",
) -> None:
    """Raise ValueError for examples that a model cannot read: words without tokens, prompts beyond its context.

    ``max_length`` is the model's context in tokens (``max_position_embeddings`` of its config); the prompt and its
    longest choice must fit together. ``shorter`` is what the error advises to take where they do not.
    """
    if missing := missing_words(tokenizer, _texts(examples)):
        named = ", ".join(repr(word) for word in missing[:NAMED])
        more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
        raise ValueError(
            f"this tokenizer has no token for {named}{more}, so the model cannot tell such words apart; "
            "give the probe words that it knows (keys, words, facts or filler), or take another probe."
        )
    too_long = [(index, n) for index, n in enumerate(_lengths(tokenizer, examples)) if n > max_length]
    if too_long:
        index, n_tokens = max(too_long, key=lambda found: found[1])
        raise ValueError(
            f"{len(too_long)} of {len(examples)} examples are longer than the model's context of {max_length} tokens; "
            f"example {index} is the longest, with {n_tokens}: take {shorter}."
        )


def missing_words(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> list[str]:
    """Words that become the unknown token, wholly or in part, or that vanish; each once, in order of appearance."""
    find = _vanishing if tokenizer.unk_token_id is None else _unknown
    return list(dict.fromkeys(word for text in texts for word in find(tokenizer, text)))


def _texts(examples: Iterable[Example]) -> list[str]:
    """Prompts and choices, each once."""
    return list(dict.fromkeys(text for example in examples for text in (example.prompt, *example.choices)))


def _unknown(tokenizer: PreTrainedTokenizerBase, text: str) -> Iterator[str]:
    """Words of a text that hold the unknown token."""
    if tokenizer.unk_token_id not in tokenizer(text, add_special_tokens=False)["input_ids"]:
        return
    if not tokenizer.is_fast:
        words = WORD.findall(text)
        found = [word for word in words if tokenizer.unk_token_id in _ids(tokenizer, word)]
        yield from found or [text.strip()]
        return
    encoded: Any = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    spans = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
    unknown = [span for token, span in spans if token == tokenizer.unk_token_id]
    for word in WORD.finditer(text):
        if any(start < word.end() and word.start() < end for start, end in unknown):
            yield word.group()


def _vanishing(tokenizer: PreTrainedTokenizerBase, text: str) -> Iterator[str]:
    """Words that do not come back: what a tokenizer without an unknown token does not know it leaves out."""
    for word in dict.fromkeys(WORD.findall(text)):
        if _plain(word) not in _plain(str(tokenizer.decode(_ids(tokenizer, word)))):
            yield word


def _plain(text: str) -> str:
    """Without what tokenizers change on purpose: case, ways of writing a letter, spaces between tokens."""
    return "".join(unicodedata.normalize("NFKC", text).casefold().split())


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: Any = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _lengths(tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example]) -> list[int]:
    """Tokens of each prompt with the choice that has most tokens."""
    choices = list(dict.fromkeys(choice for example in examples for choice in example.choices))
    n_tokens = dict(zip(choices, map(len, tokenize(tokenizer, choices)), strict=True))
    texts = [example.prompt + max(example.choices, key=n_tokens.__getitem__) for example in examples]
    return [len(row) for row in tokenize(tokenizer, texts)]
