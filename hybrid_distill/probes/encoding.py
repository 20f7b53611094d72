"""Encode examples as tokens: the prompt, and each choice as a continuation of it.

Shapes: C choice, Q target (`EncodedExample.targets`), G model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from .probe import Example

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class EncodedExample:
    """One example as tokens: the prompt, and each choice as a continuation of the prompt.

    All choices begin with the same ``n_shared`` tokens (for some tokenizers, the space before a
    number), followed by at least one more token. ``stops[c]`` holds the tokens that would extend
    choice c to a longer choice: for a tokenizer that splits digits, " 8" must not count where the
    model is about to write " 84".
    """

    prompt: Tokens
    choices: tuple[Tokens, ...]
    n_shared: int
    stops: tuple[Tokens, ...]
    answer: int

    def contexts(self) -> list[Tokens]:
        """Return each choice without its last token, if it is longer than the shared prefix."""
        return sorted({choice[:-1] for choice in self.choices if len(choice) > self.n_shared + 1})

    @cached_property
    def targets(self) -> list[tuple[Tokens, int]]:
        """Pairs (tokens after the prompt, next token) whose log-probabilities make up those of choices."""
        pairs: set[tuple[Tokens, int]] = set()
        for choice, stop in zip(self.choices, self.stops):
            pairs.update((choice[:place], token) for place, token in enumerate(choice))
            pairs.update((choice, token) for token in stop)
        return sorted(pairs)

    def choice_logprobs(self, target_logprob_GQ: Tensor) -> Tensor:
        """Return log-probabilities of the choices, [G, C], from those of `targets`, for G models.

        Sums over a choice's tokens, then excludes the probability of continuing to a longer choice.
        """
        logprob_G_of = dict(zip(self.targets, target_logprob_GQ.unbind(1)))
        totals = []
        for choice, stop in zip(self.choices, self.stops):
            total_G = torch.zeros(())
            for place, token in enumerate(choice):
                total_G = total_G + logprob_G_of[choice[:place], token]
            if stop:
                p_longer_G = torch.zeros(())
                for token in stop:
                    p_longer_G = p_longer_G + logprob_G_of[choice, token].exp()
                # Rounding can bring the sum to 1 or above; the logarithm would not be finite.
                p_stop_G = (1 - p_longer_G).clamp(min=1e-30)
                total_G = total_G + p_stop_G.log()
            totals.append(total_G)
        return torch.stack(totals, dim=1)


def encode_example(tokenizer: PreTrainedTokenizerBase, example: Example) -> EncodedExample:
    """Tokenize ``prompt + choice`` as the model would read it, for every choice.

    Raises ValueError if two choices have the same tokens: the tokenizer cannot distinguish them.
    """
    texts = [example.prompt]
    texts += [example.prompt + choice for choice in example.choices]
    prompt, *rows = tokenize(tokenizer, texts)
    if len(set(rows)) < len(rows):
        raise ValueError(
            f"some of the choices {example.choices} become the same tokens; "
            "use a tokenizer that tells them apart, or other choices."
        )
    shortest = min(map(len, rows))
    # Even of the shortest choice, one token must be left to predict.
    n_common = min(common_prefix(rows), shortest - 1)
    # A tokenizer may merge the prompt's end with a choice's beginning; that token belongs to the choice.
    n_prompt = min(n_common, common_prefix([prompt, *rows]))
    # Taken from the whole row: tokenized alone, a choice may have other tokens.
    choices = tuple(row[n_prompt:] for row in rows)
    return EncodedExample(
        prompt=rows[0][:n_prompt],
        choices=choices,
        n_shared=n_common - n_prompt,
        stops=tuple(_stops(choice, choices) for choice in choices),
        answer=example.choices.index(example.answer),
    )


def _stops(choice: Tokens, choices: Sequence[Tokens]) -> Tokens:
    """Return the tokens that follow ``choice`` in longer choices, ascending."""
    following = set()
    for other in choices:
        if len(other) > len(choice) and other[: len(choice)] == choice:
            following.add(other[len(choice)])
    return tuple(sorted(following))


def tokenize(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[Tokens]:
    """Tokenize each text, with a beginning-of-text token if the tokenizer adds one, without end-of-text.

    A text that already begins with that token, as from a chat template, does not get a second one.
    """
    if not texts:  # fast tokenizers fail on an empty batch
        return []
    # Without special tokens, because some tokenizers also add one at the end. Not verbose: callers compare lengths with
    # the context and say what to do, where transformers warns of errors to come.
    encoded = tokenizer(list(texts), add_special_tokens=False, verbose=False)
    rows: list[list[int]] = encoded["input_ids"]
    # Any text shows whether the tokenizer adds a first token.
    sample: list[int] = tokenizer("a")["input_ids"]
    start: list[int] = []
    if tokenizer.bos_token_id is not None and sample[:1] == [tokenizer.bos_token_id]:
        start = sample[:1]
    tokenized = []
    for row in rows:
        if row[: len(start)] != start:
            row = start + row
        tokenized.append(tuple(row))
    return tokenized


def common_prefix(rows: Sequence[Tokens]) -> int:
    """Return the length of the longest common prefix of all rows, in tokens."""
    n_common = 0
    for column in zip(*rows):
        if len(set(column)) > 1:
            break
        n_common += 1
    return n_common
