"""Prompt formats of a probe: as written, after solved examples, or as a turn in the tokenizer's chat template."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, replace

from jinja2 import TemplateError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..teacher import longest_context
from . import Example, Probe, SeededProbe, queries_of
from .answering import answer_choices
from .checks import token_counts

PLAIN = "plain"
CHAT = "chat"
TRIED = (PLAIN, "shots=1", "shots=3", CHAT)
"""Formats that `accuracy_by_form` tries, simplest first."""
N_TRIED = 32


def check_form(name: str, form: str) -> None:
    """Raise ValueError unless the format is plain, chat or shots=n, with n from 1 to 99."""
    if form not in (PLAIN, CHAT) and not re.fullmatch(r"shots=[1-9]\d?", form):
        raise ValueError(f"{name} is {form!r}; pass plain, shots=1 (or more) or chat.")


@dataclass(frozen=True)
class FormedProbe:
    """A probe with its prompts in another format.

    ``shots=n`` puts the next ``n`` prompts before each prompt, each with one question solved. ``chat`` makes the
    prompt a user turn and begins the assistant's answer with the probe's ``lead``. Raises ValueError for ``chat`` if
    the tokenizer has no chat template.
    """

    probe: Probe
    form: str
    tokenizer: PreTrainedTokenizerBase

    def __post_init__(self) -> None:
        if self.form == CHAT and not self.tokenizer.chat_template:
            raise ValueError("form is 'chat', but this tokenizer has no chat template; pass plain or shots=1.")

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
        return {**self.probe.describe(), "prompt_form": self.form}

    def examples(self, n: int) -> list[Example]:
        """Return the first ``n`` examples in this format. Raises ValueError if the probe has too few for the shots."""
        if self.form == CHAT:
            return [self._in_chat(example) for example in self.probe.examples(n)]
        shots, step = int(self.form.removeprefix("shots=")), self.n_queries
        pool = self.probe.examples(n + shots * step)
        if len(pool) <= shots * step:
            raise ValueError(f"form is {self.form!r}, but the probe has {len(pool)} questions; pass fewer shots.")
        formed = []
        for index, example in enumerate(pool[:n]):
            solved = [pool[(index - index % step + shot * step) % len(pool)] for shot in range(1, shots + 1)]
            before = "".join(f"{other.prompt}{other.answer}\n\n" for other in solved)
            formed.append(replace(example, prompt=before + example.prompt))
        return formed

    def _in_chat(self, example: Example) -> Example:
        try:
            text = self.tokenizer.apply_chat_template(
                [{"role": "user", "content": example.prompt}],
                tokenize=False,
                add_generation_prompt=True,
                enable_thinking=False,
                date_string="1 January 2025",  # some templates insert today's date, so prompts would change daily
            )
        except TemplateError as error:
            raise ValueError(f"the chat template rejects a question ({error}); pass plain or shots=1.") from error
        lead = getattr(self.probe, "lead", SeededProbe.lead)
        return replace(example, prompt=f"{text}{lead}")


def in_form(probe: Probe, form: str, tokenizer: PreTrainedTokenizerBase) -> Probe:
    """Return the probe in a format; plain returns the probe itself."""
    return probe if form == PLAIN else FormedProbe(probe, form, tokenizer)


def accuracy_by_form(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, probe: Probe
) -> dict[str, float]:
    """Return the model's accuracy on the first 32 prompts in each of the formats `TRIED`.

    Leaves out formats longer than the model's context, and chat without a template.
    """
    limit = longest_context(model.config) or sys.maxsize
    accuracies = {}
    for form in TRIED:
        if form == CHAT and not tokenizer.chat_template:
            continue
        examples = in_form(probe, form, tokenizer).examples(N_TRIED)
        if max(token_counts(tokenizer, examples)) <= limit:
            accuracies[form] = answer_choices(model, tokenizer, examples, batch_size=16).accuracy
    return accuracies
