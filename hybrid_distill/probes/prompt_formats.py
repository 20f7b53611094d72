"""Format a probe's prompts: as written, after solved examples, or as a turn in a chat."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..chat_template import has_chat_template, render
from ..teacher import longest_context
from .answering import answer_choices
from .checks import token_counts
from .probe import Example, Probe, SeededProbe, queries_of

log = logging.getLogger(__name__)

PLAIN = "plain"
CHAT = "chat"
TRIED = (PLAIN, "shots=1", "shots=3", CHAT)
"""Formats that `accuracy_by_prompt_format` tries, simplest first."""
N_TRIED = 32


def check_prompt_format(name: str, prompt_format: str) -> None:
    """Raise ValueError unless the format is plain, chat or shots=n, with n from 1 to 99."""
    if prompt_format in (PLAIN, CHAT):
        return
    if not re.fullmatch(r"shots=[1-9]\d?", prompt_format):
        raise ValueError(f"{name} is {prompt_format!r}; pass plain, shots=1 (or more) or chat.")


@dataclass(frozen=True)
class FormattedProbe:
    """A probe with its prompts in another format.

    ``shots=n`` puts the next ``n`` prompts before each prompt, each with one question solved.
    ``chat`` makes the prompt a user turn and begins the assistant's answer with the probe's
    ``lead``. Raises ValueError for ``chat`` if the tokenizer has no chat template.
    """

    probe: Probe
    prompt_format: str
    tokenizer: PreTrainedTokenizerBase

    def __post_init__(self) -> None:
        if self.prompt_format == CHAT and not has_chat_template(self.tokenizer):
            raise ValueError(
                "the prompt format is 'chat', but this tokenizer has no chat template, or several "
                "of which none is named default; pass plain or shots=1."
            )

    @property
    def chance(self) -> float:
        """Accuracy of guessing, 0 to 1."""
        return self.probe.chance

    @property
    def n_queries(self) -> int:
        """Number of consecutive examples that ask about one prompt."""
        return queries_of(self.probe)

    def describe(self) -> dict[str, object]:
        """Return the settings that determine every prompt."""
        return {**self.probe.describe(), "prompt_format": self.prompt_format}

    def examples(self, n: int) -> list[Example]:
        """Return the first ``n`` examples in this format.

        Raises ValueError if the probe has too few for the shots.
        """
        if self.prompt_format == CHAT:
            return [self._in_chat(example) for example in self.probe.examples(n)]
        return self._after_shots(n, int(self.prompt_format.removeprefix("shots=")))

    def _after_shots(self, n: int, n_shots: int) -> list[Example]:
        n_queries = self.n_queries
        pool = self.probe.examples(n + n_shots * n_queries)
        if len(pool) <= n_shots * n_queries:
            raise ValueError(
                f"the prompt format is {self.prompt_format!r}, but the probe has {len(pool)} "
                "questions; pass fewer shots."
            )
        formatted = []
        for index, example in enumerate(pool[:n]):
            # All questions about a prompt follow the same shots, so that they can share its tokens.
            first_of_prompt = index - index % n_queries
            shots = ""
            for shot in range(1, n_shots + 1):
                solved = pool[(first_of_prompt + shot * n_queries) % len(pool)]
                shots += f"{solved.prompt}{solved.answer}\n\n"
            formatted.append(replace(example, prompt=shots + example.prompt))
        return formatted

    def _in_chat(self, example: Example) -> Example:
        question = {"role": "user", "content": example.prompt}
        try:
            # Thinking models would begin the answer with a thought.
            text = render([question], self.tokenizer, thinking=False, prompt=True)
        except ValueError as error:
            raise ValueError(
                f"the chat template rejects a question ({error.__cause__ or error}); pass plain or shots=1."
            ) from error
        lead = getattr(self.probe, "lead", SeededProbe.lead)
        return replace(example, prompt=f"{text}{lead}")


def with_prompt_format(
    probe: Probe, prompt_format: str, tokenizer: PreTrainedTokenizerBase
) -> Probe:
    """Return the probe with its prompts in a format; plain returns the probe itself."""
    if prompt_format == PLAIN:
        return probe
    return FormattedProbe(probe, prompt_format, tokenizer)


def accuracy_by_prompt_format(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    probe: Probe,
    tried: Sequence[str] = TRIED,
) -> dict[str, float]:
    """Return the model's accuracy on the first 32 prompts in each of the formats ``tried``.

    Leaves out formats that the probe or the chat template refuses, those longer than the model's
    context, and chat without a template.
    """
    # Recurrent models have no longest context.
    limit = longest_context(model.config) or sys.maxsize
    accuracies = {}
    for prompt_format in tried:
        if prompt_format == CHAT and not has_chat_template(tokenizer):
            continue
        try:
            examples = with_prompt_format(probe, prompt_format, tokenizer).examples(N_TRIED)
        except ValueError as error:
            # Only tried: the format that was asked for has been made before.
            log.info("prompt format %s left out: %s", prompt_format, error)
            continue
        if max(token_counts(tokenizer, examples)) <= limit:
            result = answer_choices(model, tokenizer, examples, batch_size=16)
            accuracies[prompt_format] = result.accuracy
    return accuracies
