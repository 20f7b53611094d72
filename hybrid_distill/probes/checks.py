"""Check, before hours of scoring, that questions fit a model's tokenizer and context length."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence

from transformers import PreTrainedTokenizerBase

from .encoding import encode_example, tokenize
from .probe import Example

WORD = re.compile(r"\w+|[^\w\s]|\n")
NAMED = 8


class CannotAnswer(ValueError):
    """A model cannot read a probe's questions, or answers too few of them."""


def check_answerable(
    examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, max_length: int
) -> None:
    """Raise CannotAnswer for examples with words that have no token, or too long for the model's context.

    ``max_length`` is the context's length in tokens (`longest_context`); each prompt must fit
    together with its longest choice.
    """
    # A dict, not a set: it keeps their order.
    texts: dict[str, None] = {}
    for example in examples:
        texts.update(dict.fromkeys([example.prompt, *example.choices]))
    missing = missing_words(tokenizer, texts)
    if missing:
        named = ", ".join(map(repr, missing[:NAMED]))
        more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
        raise CannotAnswer(
            f"this tokenizer has no token for {named}{more}, so the model cannot distinguish "
            "these words; give the probe words that it knows (keys, words, facts or filler), or "
            "take another probe."
        )
    check_fits(examples, tokenizer, max_length)


def check_questions(
    examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, max_length: int
) -> None:
    """Raise CannotAnswer for questions that do not fit into the model's context, ValueError for equal choices."""
    check_fits(examples, tokenizer, max_length)
    for example in examples:
        encode_example(tokenizer, example)


def check_fits(
    examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, max_length: int
) -> None:
    """Raise CannotAnswer for examples that are too long for the model's context."""
    # With its longest choice: a prompt alone may just fit.
    lengths = token_counts(tokenizer, examples)
    longest = max(lengths, default=0)
    if longest > max_length:
        n_too_long = sum(length > max_length for length in lengths)
        raise CannotAnswer(
            f"{n_too_long} of {len(examples)} examples are longer than the model's context of {max_length} tokens; "
            f"example {lengths.index(longest)} is the longest, with {longest}: take fewer pairs (--pairs; in a run "
            "--scoring.n-pairs), less text in between (--distance; in a run --scoring.distance or "
            "--evaluation.distance) or shorter questions (--length)."
        )


def missing_words(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> list[str]:
    """Return words that the tokenizer drops or maps to the unknown token, in order."""
    unknown = tokenizer.unk_token_id
    # Each word is tested once: prompts of a probe share most of theirs.
    is_missing: dict[str, bool] = {}
    # A dict, not a set: it keeps their order.
    all_missing: dict[str, None] = {}
    for text in texts:
        words = dict.fromkeys(WORD.findall(text))
        for word in words:
            if word not in is_missing:
                is_missing[word] = _is_missing(tokenizer, word)
        missing = [word for word in words if is_missing[word]]
        # Chat templates may contain the unknown token itself.
        plain = text.replace(str(tokenizer.unk_token or ""), "")
        # In the whole text too: the tokenizer does not split words as WORD does.
        if not missing and unknown in _ids(tokenizer, plain):
            missing = [part for part in plain.split() if unknown in _ids(tokenizer, part)]
        all_missing.update(dict.fromkeys(missing))
    return list(all_missing)


def _is_missing(tokenizer: PreTrainedTokenizerBase, word: str) -> bool:
    ids = _ids(tokenizer, word)
    if tokenizer.unk_token_id is None:
        # Without an unknown token, tokenizers silently drop unknown words.
        return _normalized(word) not in _normalized(str(tokenizer.decode(ids)))
    return tokenizer.unk_token_id in ids


def _normalized(text: str) -> str:
    """Remove differences that tokenizers introduce on purpose: case, Unicode form, spaces."""
    return "".join(unicodedata.normalize("NFKC", text).casefold().split())


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def token_counts(tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example]) -> list[int]:
    """Count the tokens of each prompt together with its longest choice."""
    choices: set[str] = set()
    for example in examples:
        choices.update(example.choices)
    # By tokens, not characters: the longest text need not have the most.
    n_tokens: dict[str, int] = {}
    for choice, row in zip(choices, tokenize(tokenizer, list(choices)), strict=True):
        n_tokens[choice] = len(row)
    texts = []
    for example in examples:
        longest = max(example.choices, key=n_tokens.__getitem__)
        texts.append(example.prompt + longest)
    return [len(row) for row in tokenize(tokenizer, texts)]
