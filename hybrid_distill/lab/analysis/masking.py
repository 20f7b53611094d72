"""Heads reduced to their gather or aggregate pattern (arXiv 2504.18574).

`Mask` multiplies matrices by a mask made for each prompt, to test whether the pattern is what the
heads do. For comparison it removes the head, or the pattern from the head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...plan import HeadId
from ...probes import Example
from ...probes.answering import choice_result, forward
from ...probes.encoding import EncodedExample, Tokens, encode_example
from ...progress import track
from ...scoring import HeadScores
from ...teacher import HeadKind, eval_mode
from ...validation import Count, Positive
from .experiment import ModelExperiment, parse_head
from .figures import draw_bars
from .mixing import MAX_GB, check_prompt, mask_heads
from .patterns import PATTERNS, MarkedPrompt, find_patterns, mark_example, rank_by
from .tables import Column, Row, Table
from .tasks import Questions, check_readable

SEARCHED = 8
"""Questions on which heads are searched."""
Change = Callable[[Tensor], Tensor]
"""Mask of a head's matrix, made from its pattern."""
CHANGES: dict[str, Change] = {
    "removed": torch.zeros_like,
    "pattern alone": lambda pattern_TS: pattern_TS,
    "pattern taken out": lambda pattern_TS: ~pattern_TS,
}
Roles = Mapping[str, Sequence[HeadId]]
"""Heads by their pattern: "gather" or "aggregate"."""
Marked = Sequence[tuple[EncodedExample, MarkedPrompt]]
"""Questions as tokens, each with its marked prompt."""


class MaskVariant(NamedTuple):
    """Row of the table: heads, and what is done to them."""

    label: str
    roles: Roles
    change: Change


@dataclass(frozen=True, kw_only=True)
class Mask(ModelExperiment):
    """Keep only the gather or aggregate pattern of some heads; compare with the heads intact and
    removed.

    The tasks must have their answer in one line of the prompt: kv, letters, niah_single_1 to 3.
    """

    NAME = "mask"

    questions: Questions = field(
        default_factory=lambda: Questions(tasks="kv", pairs=8, examples=64)
    )
    gather: tuple[str, ...] = ()
    """Gather heads, such as ``L2H6``. If no heads are named, they are searched by pattern."""
    aggregate: tuple[str, ...] = ()
    """Aggregate heads, such as ``L5H5``."""
    k: Count = 1
    """Heads of each pattern, if none are named."""
    scores: Path | None = None
    """Path to a scores.json; only the top heads of its ranking are searched."""
    first: Count = 10
    """Number of those top heads."""
    kind: HeadKind | None = None
    """Kind of the heads: ``ssm`` for the recurrent heads of a model that also has attention."""
    max_gb: Positive = MAX_GB
    """Largest matrices, in GiB; larger ones are refused."""

    def run(self) -> str:
        roles: Roles = {
            "gather": [parse_head(text) for text in self.gather],
            "aggregate": [parse_head(text) for text in self.aggregate],
        }
        # A head may have the pattern and still not matter; scores tell which heads matter.
        among = None
        if self.scores is not None:
            among = HeadScores.load(self.scores).ranking()[: self.first]
        model, tokenizer = self.subject.load()
        examples_of: dict[str, Sequence[Example]] = {}
        marked: dict[Column, Marked] = {}
        for name in self.questions.names:
            examples, chance = self.questions.examples_of(name)
            check_readable(model, tokenizer, examples)
            examples_of[name] = examples
            column = Column(name, chance=100 * chance)
            marked[column] = [
                (encode_example(tokenizer, e), mark_example(tokenizer, e)) for e in examples
            ]
        if not any(roles.values()):
            first_task = examples_of[self.questions.names[0]]
            roles = self._search(model, tokenizer, first_task[:SEARCHED], among)
        return self.save(self.table(model, marked, roles), draw_bars)

    def _search(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        examples: Sequence[Example],
        among: Sequence[HeadId] | None,
    ) -> Roles:
        """Find the heads that follow each pattern most, of all or ``among`` some."""
        # Searched in all heads first: it costs one forward a prompt either way.
        sharpness_of = find_patterns(model, tokenizer, examples, kind=self.kind)
        if among is not None:
            sharpness_of = {head: sharpness_of[head] for head in sharpness_of if head in among}
        return {pattern: rank_by(sharpness_of, pattern)[: self.k] for pattern in PATTERNS}

    def table(self, model: PreTrainedModel, tasks: Mapping[Column, Marked], roles: Roles) -> Table:
        """Make a row for the intact model, then three (`CHANGES`) each for gather heads, aggregate
        heads, and both.

        Raises ValueError for a head that does not exist, for no heads at all, and as `check_prompt`
        does.
        """
        all_heads: set[HeadId] = set()
        for heads in roles.values():
            all_heads.update(heads)
        if not all_heads:
            raise ValueError("there are no heads to mask; pass some with --gather or --aggregate.")
        # All tasks are checked first: an error must not come after an hour.
        for marked in tasks.values():
            longest = max((prompt.ids for _, prompt in marked), key=len)
            check_prompt(model, longest, sorted(all_heads), self.kind, self.max_gb)
        rows = []
        with eval_mode(model):
            for variant in track(_variants(roles), "masking"):
                values = [self._accuracy(model, marked, variant) for marked in tasks.values()]
                rows.append(Row(variant.label, tuple(values)))
        named = [f"{role} {' '.join(map(str, heads))}" for role, heads in roles.items() if heads]
        return Table(f"{model.name_or_path}: {', '.join(named)}", "heads", list(tasks), rows)

    def _accuracy(self, model: PreTrainedModel, marked: Marked, variant: MaskVariant) -> float:
        """Measure accuracy on one task, in percent, with the heads masked by their roles."""
        logprobs = []
        for encoded, prompt in marked:
            masks_of = partial(_masks, prompt, variant)
            logprobs.append(masked_logprobs(model, encoded, masks_of, kind=self.kind))
        answers = [encoded.answer for encoded, _ in marked]
        return 100 * choice_result(logprobs, answers).accuracy


def _variants(roles: Roles) -> list[MaskVariant]:
    """List the intact model, and every change of the heads of each role and of both."""
    groups = {role: {role: heads} for role, heads in roles.items() if heads}
    if len(groups) > 1:
        groups["both"] = dict(roles)
    variants = [MaskVariant("intact", {}, torch.ones_like)]
    for group, own in groups.items():
        for name, change in CHANGES.items():
            variants.append(MaskVariant(f"{group}: {name}", own, change))
    return variants


def _masks(prompt: MarkedPrompt, variant: MaskVariant, ids: Tokens) -> dict[HeadId, Tensor]:
    """Make the masks for ``ids``, which continue a prompt; a head may have both roles."""
    continued = replace(prompt, ids=ids)
    patterns: dict[HeadId, Tensor] = {}
    for role, heads in variant.roles.items():
        pattern_TS = PATTERNS[role](continued)
        for head in heads:
            if head in patterns:
                patterns[head] = patterns[head] | pattern_TS
            else:
                patterns[head] = pattern_TS
    return {head: variant.change(pattern_TS) for head, pattern_TS in patterns.items()}


def masked_logprobs(
    model: PreTrainedModel,
    encoded: EncodedExample,
    masks_of: Callable[[Tokens], Mapping[HeadId, Tensor]],
    *,
    kind: HeadKind | None = None,
) -> list[float]:
    """Return the log-probability of each choice, as `answer_choices` does, with masks made for each
    row of tokens.

    Runs a separate forward for every prefix of a choice, because masks do not work with a cache.
    """
    logprob_after: dict[Tokens, Tensor] = {}  # by path; log-probabilities of the next token, [V]
    paths = encoded.contexts()
    if not paths:
        # Choices of one more token: only the shared prefix is read.
        paths = [encoded.choices[0][: encoded.n_shared]]
    for path in paths:
        ids = encoded.prompt + path
        ids_1L = torch.tensor([ids], device=model.device)
        with mask_heads(model, masks_of(ids), kind=kind):
            logits_1TV = forward(
                model, ids_1L, torch.ones_like(ids_1L), logits_to_keep=len(path) + 1
            ).logits
        logprob_TV = logits_1TV[0].float().log_softmax(-1)
        for length in range(len(path) + 1):
            logprob_after[path[:length]] = logprob_TV[length]
    target_logprobs = [logprob_after[path][token] for path, token in encoded.targets]
    target_logprob_1Q = torch.tensor([target_logprobs], dtype=torch.float64)
    return encoded.choice_logprobs(target_logprob_1Q)[0].tolist()
