"""Gather and aggregate patterns of heads on a prompt (arXiv 2504.18574).

`Maps` draws attention maps and mixing matrices side by side, and lists the heads that have a pattern.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...data import check_same_vocabulary
from ...io import whole_text
from ...plan import HeadId
from ...probes import Example
from ...scoring import HeadScores
from ...teacher import HeadKind
from ...validation import Count, Positive
from .experiment import Experiment, Subject, parse_head
from .figures import draw_maps
from .head_matrices import HeadMix
from .mixing import MAX_GB, mix_heads
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
from .tasks import QuestionDraw

COLUMNS_OF_ONE_MODEL = 3
Panel = tuple[str, HeadMix]
"""One matrix of the figure, with its title."""


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
    k: Count = 3
    """Heads of each pattern, if none are named."""
    scores: Path | None = None
    """Path to a scores.json, to show each head's rank by ablation."""
    max_gb: Positive = MAX_GB
    """Largest matrices, in GiB; larger ones are refused."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompt is not None and not self.prompt.strip():
            raise ValueError(f"--prompt is {self.prompt!r}; pass some text, or leave it out.")

    def run(self) -> str:
        ablation = [] if self.scores is None else HeadScores.load(self.scores).ranking()
        model, tokenizer = self.subject.load()
        heads = [parse_head(text) for text in self.heads]
        ssm_heads = [parse_head(text) for text in self.ssm_heads]
        questions = self.questions.probe(self.probe).examples(self.questions.examples)
        shown = []
        names_heads = bool(heads or ssm_heads)
        if ablation or not names_heads:
            sharpness_of = self._search(model, tokenizer, questions)
            shown.append(self._save_search(model, sharpness_of, ablation))
            # Named heads stay as named; the search then only adds its table.
            if not names_heads:
                heads = list(sharpness_of)
        prompt = self._mark(tokenizer, questions[0])
        panels = self._panels(model, self.subject.model, prompt, heads, ssm_heads)
        for path in self.beside:
            other, its_tokenizer = replace(self.subject, model=path).load("--beside")
            # The same ids have to mean the same text in both.
            check_same_vocabulary(tokenizer, its_tokenizer)
            panels += self._panels(other, path, prompt, heads, ssm_heads)
        # Side by side, each model is a row of the figure.
        n_columns = len(heads) + len(ssm_heads) if self.beside else COLUMNS_OF_ONE_MODEL
        shown.append(self._save_maps(prompt, panels, n_columns))
        return "\n\n".join(shown)

    def _search(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        questions: Sequence[Example],
    ) -> dict[HeadId, Sharpness]:
        """Find the ``k`` heads that follow each pattern most, in that order."""
        sharpness_of = find_patterns(model, tokenizer, questions, kind=self.kind)
        sharpest: dict[HeadId, Sharpness] = {}
        for pattern in PATTERNS:
            for head in rank_by(sharpness_of, pattern)[: self.k]:
                # A head that follows both keeps its first place.
                sharpest[head] = sharpness_of[head]
        return sharpest

    def _save_search(
        self,
        model: PreTrainedModel,
        sharpness_of: Mapping[HeadId, Sharpness],
        ablation: Sequence[HeadId],
    ) -> str:
        """Write the table of the search's heads, with their places by ablation, if known."""
        what = f"heads that gather or aggregate, means over {self.questions.examples} prompts"
        table = sharpness_table(
            f"{model.name_or_path}: {what}",
            [(str(head), measures) for head, measures in sharpness_of.items()],
        )
        if ablation:
            table = _with_places(table, list(sharpness_of), ablation)
        return self.save(table, suffix=".patterns")

    def _mark(self, tokenizer: PreTrainedTokenizerBase, question: Example) -> MarkedPrompt:
        """Mark the user's prompt, or else a question."""
        if self.prompt is None:
            return mark_example(tokenizer, question)
        # A shell may pass halves of surrogate pairs, which tokenizers refuse.
        return mark_prompt(tokenizer, whole_text(self.prompt))

    def _panels(
        self,
        model: PreTrainedModel,
        name: str,
        prompt: MarkedPrompt,
        heads: list[HeadId],
        ssm_heads: list[HeadId],
    ) -> list[Panel]:
        """Compute one model's matrices on the prompt."""
        heads_of: list[tuple[HeadKind | None, list[HeadId]]]
        heads_of = [(self.kind, heads), ("ssm", ssm_heads)]
        mixes: list[HeadMix] = []
        for kind, own in heads_of:
            if own:
                mixes += mix_heads(model, prompt.ids, own, kind=kind, max_gb=self.max_gb)
        label = Path(name).name if self.beside else ""
        return [(f"{label} {mix.head} {mix.kind}".strip(), mix) for mix in mixes]

    def _save_maps(self, prompt: MarkedPrompt, panels: Sequence[Panel], n_columns: int) -> str:
        """Write the figure, and the table of its matrices."""

        def draw(table: Table, path: Path) -> None:
            draw_maps(panels, prompt, path, n_columns=n_columns)

        sizes = f"{len(prompt.ids)} tokens, {len(prompt.segments)} segments"
        title = f"one prompt of {sizes}: where heads look"
        table = sharpness_table(title, [(label, sharpness(prompt, mix)) for label, mix in panels])
        return self.save(table, draw)


def sharpness_table(title: str, measured: Sequence[tuple[str, Sharpness]]) -> Table:
    """Make a table with a row per head; shares in percent."""
    columns = [Column("entropy", "bits", digits=2), *map(Column, Sharpness._fields[1:])]
    rows = []
    for label, measures in measured:
        values = [measures.entropy]
        values += [100 * share for share in measures[1:]]
        rows.append(Row(label, tuple(values)))
    return Table(title, "head", columns, rows, compared=False)


def _with_places(table: Table, heads: Sequence[HeadId], ablation: Sequence[HeadId]) -> Table:
    """Add a column with the heads' places in a ranking by ablation; NaN for heads that it lacks."""
    place_of = {head: place for place, head in enumerate(ablation, start=1)}
    rows = []
    for head, row in zip(heads, table.rows, strict=True):
        rows.append(row._replace(values=(*row.values, place_of.get(head, math.nan))))
    columns = [*table.columns, Column("place by ablation", "", digits=0)]
    return table._replace(columns=columns, rows=rows)
