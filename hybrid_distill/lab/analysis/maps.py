"""Gather and aggregate patterns of heads on a prompt, and heads reduced to only that pattern (arXiv
2504.18574).

`Maps` draws attention maps and mixing matrices side by side. `Mask` multiplies matrices by a mask
made for each prompt, to test whether the pattern is what the heads do. For comparison it removes
the head, or the pattern from the head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...data import check_same_vocabulary
from ...io import whole_text
from ...plan import HeadId
from ...probes import Example, check_counts
from ...probes.answering import choice_result, forward
from ...probes.encoding import EncodedExample, Tokens, encode_example
from ...progress import track
from ...scoring import HeadScores
from ...teacher import HeadKind, eval_mode
from .experiment import Experiment, ModelExperiment, Subject, parse_head
from .figures import draw_bars, draw_maps
from .head_matrices import HeadMix
from .mixing import MAX_GB, check_prompt, mask_heads, mix_heads
from .patterns import (
    PATTERNS,
    MarkedPrompt,
    Sharpness,
    find_patterns,
    mark_example,
    mark_prompt,
    rank_by,
    sharpness,
)
from .tables import Column, Row, Table
from .tasks import QuestionDraw, Questions, check_readable

COLUMNS_OF_ONE_MODEL = 3
SEARCHED = 8  # questions on which mask searches for heads
VARIANTS: dict[str, Callable[[Tensor], Tensor]] = {
    "removed": torch.zeros_like,
    "pattern alone": lambda pattern_TS: pattern_TS,
    "pattern taken out": lambda pattern_TS: ~pattern_TS,
}
Marked = Sequence[tuple[EncodedExample, MarkedPrompt]]
"""Questions as tokens, each with its marked prompt."""


@dataclass(frozen=True, kw_only=True)
class Maps(Experiment):
    """Show what heads mix on one prompt, which of them gather and aggregate, and whether ablation
    agrees."""

    NAME = "maps"

    subject: Subject = field(default_factory=Subject)
    beside: tuple[str, ...] = ()
    """More models to show, for the same heads and prompt: a student next to its teacher."""
    heads: tuple[str, ...] = ()
    """Heads to show, such as ``L2H6 L5H5``; by default those that gather and aggregate most."""
    ssm_heads: tuple[str, ...] = ()
    """Recurrent heads to show, for a model that also has attention (Zamba2, Falcon-H1)."""
    kind: HeadKind | None = None
    """Kind of the heads: ``ssm`` for the recurrent heads of a model that also has attention."""
    prompt: str | None = None
    """Your own text, whose lines are the segments; by default the first question of the probe."""
    probe: str = "kv"
    """kv, letters, or a RULER task (docs/scores.md lists them)."""
    questions: QuestionDraw = field(default_factory=lambda: QuestionDraw(pairs=8, examples=16))
    """Questions that the search averages over."""
    k: int = 3
    """Heads of each pattern, if none are named."""
    scores: Path | None = None
    """Path to a scores.json, to show each head's rank by ablation."""
    max_gb: float = MAX_GB
    """Largest matrices, in GiB; larger ones are refused."""

    def run(self) -> str:
        check_counts(examples=self.questions.examples, k=self.k)
        ablation = [] if self.scores is None else HeadScores.load(self.scores).ranking()
        model, tokenizer = self.subject.load()
        heads = [parse_head(text) for text in self.heads]
        ssm_heads = [parse_head(text) for text in self.ssm_heads]
        questions = self.questions.probe(self.probe).examples(self.questions.examples)
        shown = []
        if ablation or not (heads or ssm_heads):
            sharpness_of = find_patterns(model, tokenizer, questions, kind=self.kind)
            first: dict[HeadId, None] = {}  # a dict keeps their order
            for pattern in PATTERNS:
                first.update(dict.fromkeys(rank_by(sharpness_of, pattern)[: self.k]))
            table = self._search_table(
                model, {head: sharpness_of[head] for head in first}, ablation
            )
            shown.append(self.save(table, suffix=".patterns"))
            # Named heads stay as named; the search then only adds its table.
            if not (heads or ssm_heads):
                heads = list(first)

        if self.prompt is None:
            prompt = mark_example(tokenizer, questions[0])
        else:
            # A shell may pass halves of surrogate pairs, which tokenizers refuse.
            prompt = mark_prompt(tokenizer, whole_text(self.prompt))
        panels = self._panels(model, self.subject.model, prompt, heads, ssm_heads)
        for path in self.beside:
            other, its_tokenizer = replace(self.subject, model=path).load("--beside")
            # The same ids have to mean the same text in both.
            check_same_vocabulary(tokenizer, its_tokenizer)
            panels += self._panels(other, path, prompt, heads, ssm_heads)
        # Side by side, each model is a row of the figure.
        n_columns = len(heads) + len(ssm_heads) if self.beside else COLUMNS_OF_ONE_MODEL

        def draw(table: Table, path: Path) -> None:
            draw_maps(panels, prompt, path, n_columns=n_columns)

        sizes = f"{len(prompt.ids)} tokens, {len(prompt.segments)} segments"
        title = f"one prompt of {sizes}: where heads look"
        table = sharpness_table(title, [(label, sharpness(prompt, mix)) for label, mix in panels])
        shown.append(self.save(table, draw))
        return "\n\n".join(shown)

    def _search_table(
        self,
        model: PreTrainedModel,
        sharpness_of: Mapping[HeadId, Sharpness],
        ablation: Sequence[HeadId],
    ) -> Table:
        """Make a table of the heads that were found, with their places by ablation, if known."""
        what = f"heads that gather or aggregate, means over {self.questions.examples} prompts"
        title = f"{model.name_or_path}: {what}"
        table = sharpness_table(
            title, [(str(head), measures) for head, measures in sharpness_of.items()]
        )
        if not ablation:
            return table
        place_of = {head: place for place, head in enumerate(ablation, start=1)}
        rows = []
        for head, row in zip(sharpness_of, table.rows):
            rows.append(row._replace(values=(*row.values, place_of.get(head, math.nan))))
        columns = [*table.columns, Column("place by ablation", "", digits=0)]
        return table._replace(columns=columns, rows=rows)

    def _panels(
        self,
        model: PreTrainedModel,
        name: str,
        prompt: MarkedPrompt,
        heads: list[HeadId],
        ssm_heads: list[HeadId],
    ) -> list[tuple[str, HeadMix]]:
        mixes: list[HeadMix] = []
        if heads:
            mixes += mix_heads(
                model,
                prompt.ids,
                heads,
                kind=self.kind,
                max_gb=self.max_gb,
            )
        if ssm_heads:
            mixes += mix_heads(
                model,
                prompt.ids,
                ssm_heads,
                kind="ssm",
                max_gb=self.max_gb,
            )
        label = Path(name).name if self.beside else ""
        return [(f"{label} {mix.head} {mix.kind}".strip(), mix) for mix in mixes]


def sharpness_table(title: str, measured: Sequence[tuple[str, Sharpness]]) -> Table:
    """Make a table with a row per head; shares in percent."""
    columns = [Column("entropy", "bits", digits=2), *map(Column, Sharpness._fields[1:])]
    rows = []
    for label, measures in measured:
        entropy, *shares = measures
        rows.append(Row(label, (entropy, *(100 * share for share in shares))))
    return Table(title, "head", columns, rows, compared=False)


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
    k: int = 1
    """Heads of each pattern, if none are named."""
    scores: Path | None = None
    """Path to a scores.json; only the top heads of its ranking are searched."""
    first: int = 10
    """Number of those top heads."""
    kind: HeadKind | None = None
    """Kind of the heads: ``ssm`` for the recurrent heads of a model that also has attention."""
    max_gb: float = MAX_GB
    """Largest matrices, in GiB; larger ones are refused."""

    def run(self) -> str:
        check_counts(k=self.k, first=self.first)
        heads = {
            "gather": [parse_head(text) for text in self.gather],
            "aggregate": [parse_head(text) for text in self.aggregate],
        }
        # Heads can look as if they gathered without mattering; scores tell which matter.
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
        if not any(heads.values()):
            first_task = examples_of[self.questions.names[0]]
            sharpness_of = find_patterns(model, tokenizer, first_task[:SEARCHED], kind=self.kind)
            # Searched in all heads first: it costs one forward a prompt either way.
            if among is not None:
                sharpness_of = {head: sharpness_of[head] for head in sharpness_of if head in among}
            heads = {pattern: rank_by(sharpness_of, pattern)[: self.k] for pattern in PATTERNS}
        return self.save(self.table(model, marked, heads), draw_bars)

    def table(
        self,
        model: PreTrainedModel,
        tasks: Mapping[Column, Marked],
        heads: Mapping[str, Sequence[HeadId]],
    ) -> Table:
        """Make a row for the intact model, then three (`VARIANTS`) each for gather heads, aggregate
        heads, and both.

        Raises ValueError for a head that does not exist, for no heads at all, and as `check_prompt`
        does.
        """
        every_head: set[HeadId] = set()
        for own in heads.values():
            every_head.update(own)
        if not every_head:
            raise ValueError("there are no heads to mask; pass some with --gather or --aggregate.")
        # Checked for all tasks first: the refusal must not come after an hour.
        for marked in tasks.values():
            longest = max((prompt.ids for _, prompt in marked), key=len)
            check_prompt(model, longest, sorted(every_head), self.kind, self.max_gb)

        groups = {role: {role: own} for role, own in heads.items() if own}
        title = ", ".join(f"{role} {' '.join(map(str, heads[role]))}" for role in groups)
        if len(groups) > 1:
            groups["both"] = dict(heads)
        wanted: list[tuple[str, Mapping[str, Sequence[HeadId]], Callable[[Tensor], Tensor]]]
        wanted = [("intact", {}, torch.ones_like)]
        for group, roles in groups.items():
            wanted += [(f"{group}: {name}", roles, mask) for name, mask in VARIANTS.items()]
        rows = []
        with eval_mode(model):
            for label, roles, variant in track(wanted, "masking"):
                values = [
                    self._accuracy(model, marked, roles, variant) for marked in tasks.values()
                ]
                rows.append(Row(label, tuple(values)))
        return Table(f"{model.name_or_path}: {title}", "heads", list(tasks), rows)

    def _accuracy(
        self,
        model: PreTrainedModel,
        marked: Marked,
        roles: Mapping[str, Sequence[HeadId]],
        variant: Callable[[Tensor], Tensor],
    ) -> float:
        """Measure accuracy on one task, in percent, with the heads masked by their roles."""
        logprobs = []
        for encoded, prompt in marked:
            masks_of = partial(_masks, prompt, roles, variant)
            logprobs.append(masked_logprobs(model, encoded, masks_of, kind=self.kind))
        answers = [encoded.answer for encoded, _ in marked]
        return 100 * choice_result(logprobs, answers).accuracy


def _masks(
    prompt: MarkedPrompt,
    roles: Mapping[str, Sequence[HeadId]],
    variant: Callable[[Tensor], Tensor],
    ids: Tokens,
) -> dict[HeadId, Tensor]:
    """Make the masks for ``ids``, which continue a prompt; a head may have both roles."""
    continued = replace(prompt, ids=ids)
    patterns: dict[HeadId, Tensor] = {}
    for role, heads in roles.items():
        pattern_TS = PATTERNS[role](continued)
        for head in heads:
            patterns[head] = patterns[head] | pattern_TS if head in patterns else pattern_TS
    return {head: variant(pattern_TS) for head, pattern_TS in patterns.items()}


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
    # Choices of one more token have no contexts: the shared prefix is the only row.
    for path in encoded.contexts() or [encoded.choices[0][: encoded.n_shared]]:
        ids = encoded.prompt + path
        ids_1L = torch.tensor([ids], device=model.device)
        with mask_heads(model, masks_of(ids), kind=kind):
            logits_1TV = forward(
                model, ids_1L, torch.ones_like(ids_1L), logits_to_keep=len(path) + 1
            ).logits
        logprob_TV = logits_1TV[0].float().log_softmax(-1)
        for place in range(len(path) + 1):
            logprob_after[path[:place]] = logprob_TV[place]
    reads = [logprob_after[path][token] for path, token in encoded.reads]
    read_1Q = torch.tensor([reads], dtype=torch.float64)
    return encoded.choice_logprobs(read_1Q)[0].tolist()
