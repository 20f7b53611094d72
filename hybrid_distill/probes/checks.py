"""Checks, before hours of scoring, that the questions fit a model's tokenizer and context length."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence

from transformers import PreTrainedTokenizerBase

from . import Example
from .answering import tokenize

WORD = re.compile(r"\w+|[^\w\s]|\n")
NAMED = 8


def check_answerable(examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, max_length: int) -> None:
    """Raise ValueError for examples that a model cannot read: words without tokens, or too long for its context.

    ``max_length`` is the model's context length in tokens (`longest_context`); each prompt must fit together with its
    longest choice.
    """
    texts = dict.fromkeys(text for example in examples for text in (example.prompt, *example.choices))
    if missing := missing_words(tokenizer, texts):
        named = ", ".join(repr(word) for word in missing[:NAMED])
        more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
        raise ValueError(
            f"this tokenizer has no token for {named}{more}, so the model cannot distinguish these words; "
            "give the probe words that it knows (keys, words, facts or filler), or take another probe."
        )
    lengths = token_counts(tokenizer, examples)
    if (longest := max(lengths, default=0)) > max_length:
        raise ValueError(
            f"{sum(n > max_length for n in lengths)} of {len(examples)} examples are longer than the model's context "
            f"of {max_length} tokens; example {lengths.index(longest)} is the longest, with {longest}: take fewer "
            "pairs (--pairs), a shorter filler (--lengths) or shorter questions (--length)."
        )


def missing_words(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> list[str]:
    """Return words that the tokenizer drops or maps, at least in part, to the unknown token, in order of appearance."""
    unknown, is_lost = tokenizer.unk_token_id, dict[str, bool]()
    found: dict[str, None] = {}
    for text in texts:
        words = dict.fromkeys(WORD.findall(text))
        for word in words.keys() - is_lost.keys():
            ids = _ids(tokenizer, word)
            vanishes = unknown is None and _plain(word) not in _plain(str(tokenizer.decode(ids)))
            is_lost[word] = vanishes or unknown in ids
        lost = [word for word in words if is_lost[word]]
        plain = text.replace(str(tokenizer.unk_token or ""), "")  # chat templates may contain that token
        if not lost and unknown in _ids(tokenizer, plain):  # tokenizer does not split words as WORD does
            lost = [part for part in plain.split() if unknown in _ids(tokenizer, part)]
        found |= dict.fromkeys(lost)
    return list(found)


def _plain(text: str) -> str:
    """Remove differences that tokenizers introduce on purpose: case, Unicode form, spaces between tokens."""
    return "".join(unicodedata.normalize("NFKC", text).casefold().split())


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def token_counts(tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example]) -> list[int]:
    """Count the tokens of each prompt together with its longest choice."""
    choices = list(dict.fromkeys(choice for example in examples for choice in example.choices))
    n_tokens = dict(zip(choices, map(len, tokenize(tokenizer, choices)), strict=True))
    texts = [example.prompt + max(example.choices, key=n_tokens.__getitem__) for example in examples]
    return [len(row) for row in tokenize(tokenizer, texts)]
