"""Attention maps and mixing matrices on one prompt, side by side, and the heads that look like gather or aggregate."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...plan import HeadId
from ...probes import Example, check_counts
from ...probes.registry import probe_with
from ...scoring import HeadScores
from ...scoring.comparison import comparison_table
from ...teacher import HeadKind, HeadSite
from .figures import Panel, draw_maps
from .mixing import MAX_BYTES, HeadMix, heads_in, mix_heads, mixing_bytes, mixing_sites
from .patterns import MarkedPrompt, Sharpness, mark_example, mark_prompt, row_shares, sharpness
from .tables import Column, Row, Table
from .tasks import Subject

NAME = "maps"
COLUMNS_OF_ONE_MODEL = 3
GATHER, AGGREGATE = Sharpness._fields.index("gather"), Sharpness._fields.index("aggregate")
COLUMNS = (
    Column("entropy", "bits", digits=2),
    *(Column(name) for name in ("answer", "separators", "gather", "aggregate")),
)


@dataclass(frozen=True)
class Maps:
    """What heads mix on one prompt, which of them gather and aggregate, and whether ablation agrees."""

    subject: Subject = field(default_factory=Subject)
    beside: tuple[str, ...] = ()
    """More models, for the same heads on the same prompt: a student beside its teacher."""
    heads: tuple[str, ...] = ()
    """Heads to show, such as ``L2H6 L5H5``; by default those that gather and aggregate most."""
    ssm_heads: tuple[str, ...] = ()
    """Recurrent heads to show of a model that has attention too (Zamba2, Falcon-H1)."""
    kind: HeadKind | None = None
    """Of the heads: only attention heads, or only ``ssm`` heads."""
    prompt: str | None = None
    """A text of your own, its lines being segments; by default a question of the probe."""
    probe: str = "kv"
    """kv, letters, needle or two_hop: where gather and aggregate heads are searched, and the prompt comes from."""
    pairs: int = 8
    """Dictionary size of kv and two_hop."""
    examples: int = 16
    """Questions that the search averages over."""
    seed: int = 1
    k: int = 3
    """Heads of each pattern to show."""
    scores: Path | None = None
    """A scores.json: the patterns' rankings are compared with it."""
    max_gb: float = MAX_BYTES / 2**30
    """Larger matrices are refused."""
    out: Path = Path("runs/analysis")
    """The folder of the tables and the figure."""

    def run(self) -> str:
        """The tables as text; writes them and the figure to ``out``."""
        check_counts(examples=self.examples, k=self.k)
        ablation = None if self.scores is None else HeadScores.load(self.scores).ranking()
        model, tokenizer = self.subject.load()
        heads, ssm_heads = map(parse_head, self.heads), list(map(parse_head, self.ssm_heads))
        chosen, shown = list(heads), []
        if not (chosen or ssm_heads) or ablation is not None:
            found = find_patterns(model, tokenizer, self._questions(), kind=self.kind, max_bytes=self._max_bytes)
            chosen = chosen or ([] if ssm_heads else found.first(self.k))
            table = found.table(self.k, ablation)
            table.save(self.out, f"{NAME}.patterns")
            shown += [table.text(), *([] if ablation is None else [found.compared(ablation)])]
        prompt = self._prompt(tokenizer)
        panels = self._panels(model, self.subject.model, prompt, chosen, ssm_heads)
        for path in self.beside:
            other, _ = Subject(path, self.subject.dtype).load()
            panels += self._panels(other, path, prompt, chosen, ssm_heads)
        table = sharpness_table(panels, prompt)
        table.save(self.out, NAME)
        n_columns = len(chosen) + len(ssm_heads) if self.beside else COLUMNS_OF_ONE_MODEL
        draw_maps([head.panel() for head in panels], prompt, self.out / f"{NAME}.png", n_columns=n_columns)
        return "\n\n".join([*shown, table.text()])

    @property
    def _max_bytes(self) -> int:
        return int(self.max_gb * 2**30)

    def _questions(self) -> list[Example]:
        given: dict[str, Any] = {"pairs": self.pairs, "seed": self.seed}
        return probe_with(self.probe, given).examples(self.examples)

    def _prompt(self, tokenizer: PreTrainedTokenizerBase) -> MarkedPrompt:
        if self.prompt is not None:
            return mark_prompt(tokenizer, self.prompt)
        return mark_example(tokenizer, self._questions()[0])

    def _panels(
        self,
        model: PreTrainedModel,
        name: str,
        prompt: MarkedPrompt,
        heads: Sequence[HeadId],
        ssm_heads: Sequence[HeadId],
    ) -> list[ShownHead]:
        options: dict[str, Any] = {"max_bytes": self._max_bytes}
        mixes = mix_heads(model, prompt.ids, heads, kind=self.kind, **options) if heads else []
        mixes += mix_heads(model, prompt.ids, ssm_heads, kind="ssm", **options) if ssm_heads else []
        label = Path(name).name if self.beside else ""
        return [ShownHead(f"{label} {mix.head} {mix.kind}".strip(), mix) for mix in mixes]


class ShownHead(NamedTuple):
    """A head's matrix under its label."""

    label: str
    mix: HeadMix

    def panel(self) -> Panel:
        return Panel(self.label, row_shares(self.mix.matrix_TS).tolist(), self.mix.kind == "attention")


def parse_head(text: str) -> HeadId:
    """``"L2H6"`` as a head. Raises ValueError for anything else."""
    match = re.fullmatch(r"L(\d+)H(\d+)", text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no head; name one by layer and head, such as L2H6.")
    return HeadId(int(match[1]), int(match[2]))


def sharpness_table(shown: Sequence[ShownHead], prompt: MarkedPrompt) -> Table:
    """A row for each head: see `Sharpness`."""
    rows = [Row(head.label, _in_percent(sharpness(head.mix.matrix_TS, prompt))) for head in shown]
    title = f"one prompt of {len(prompt.ids)} tokens, {len(prompt.segments)} segments: where heads look"
    return Table(title, "head", COLUMNS, tuple(rows), compared=False)


def _in_percent(found: Sharpness) -> tuple[float, ...]:
    return (found.entropy, *(100 * share for share in found[1:]))


@dataclass(frozen=True, eq=False)
class Patterns:
    """What every head of a model does on average over some questions: ``means_HM``, a row of `Sharpness` each."""

    model: str
    n_examples: int
    heads: list[HeadId]
    means_HM: Tensor

    def ranking(self, measure: int) -> list[HeadId]:
        """All heads, those with most of this measure first."""
        order = self.means_HM[:, measure].argsort(descending=True, stable=True)
        return [self.heads[index] for index in order.tolist()]

    def first(self, k: int) -> list[HeadId]:
        """The candidates: the first ``k`` gather heads, then aggregate heads, each once."""
        return list(dict.fromkeys([*self.ranking(GATHER)[:k], *self.ranking(AGGREGATE)[:k]]))

    def table(self, k: int, ablation: Sequence[HeadId] | None = None) -> Table:
        """A row for each candidate; with a ranking by ablation, its place there (1 is first)."""
        place = {head: number for number, head in enumerate(ablation or (), start=1)}
        columns = (*COLUMNS, *([Column("place by ablation", "", digits=0)] if ablation else []))
        rows = []
        for head in self.first(k):
            means = _in_percent(Sharpness(*self.means_HM[self.heads.index(head)].tolist()))
            rows.append(Row(str(head), (*means, *([place.get(head, float("nan"))] if ablation else []))))
        title = f"{self.model}: heads that gather or aggregate, means over {self.n_examples} prompts"
        return Table(title, "head", columns, tuple(rows), compared=False)

    def compared(self, ablation: Sequence[HeadId]) -> str:
        """The patterns' rankings and that of ablation, each with each, as text."""
        named = {"gather": self.ranking(GATHER), "aggregate": self.ranking(AGGREGATE), "ablation": ablation}
        return comparison_table(named, min(10, len(ablation), len(self.heads)))


def find_patterns(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    *,
    kind: HeadKind | None = None,
    max_bytes: int = MAX_BYTES,
    progress: bool = True,
) -> Patterns:
    """Measure every head on every question: one forward each, or several where all matrices together are too large.

    Raises ValueError for Mamba-1, whose channels are too many to look through, and what `mix_heads` raises.
    """
    sites = mixing_sites(model, kind)
    if sites[0].kind == "channel":
        raise ValueError(
            f"this model has {sites[0].n_heads} channels a layer, too many to look through; name some with --heads."
        )
    prompts = [mark_example(tokenizer, example) for example in examples]
    heads = [head for site in sites for head in heads_in(site, kind)]
    total_HM = torch.zeros(len(heads), len(Sharpness._fields), dtype=torch.float64)
    for prompt in tqdm(prompts, desc="matrices", disable=not progress):
        found = []
        for together in _that_fit(model, len(prompt.ids), sites, kind, max_bytes):
            mixes = mix_heads(model, prompt.ids, together, kind=kind, max_bytes=max_bytes)
            found += [sharpness(mix.matrix_TS, prompt) for mix in mixes]
        total_HM += torch.tensor(found, dtype=torch.float64)
    return Patterns(str(model.name_or_path), len(prompts), heads, total_HM / len(prompts))


def _that_fit(
    model: PreTrainedModel, n_tokens: int, sites: Sequence[HeadSite], kind: HeadKind | None, max_bytes: int
) -> list[list[HeadId]]:
    """All heads in order, as many layers together as fit into ``max_bytes``; a layer that does not is alone."""
    groups: list[list[HeadId]] = [[]]
    for site in sites:
        own = heads_in(site, kind)
        if groups[-1] and mixing_bytes(model, n_tokens, groups[-1] + own, sites) > max_bytes:
            groups.append([])
        groups[-1] += own
    return groups
