"""Attention maps and mixing matrices on one prompt, side by side, and the heads that look like gather or aggregate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...plan import HeadId
from ...probes import Example, check_counts
from ...probes.registry import probe_with
from ...scoring import HeadScores
from ...teacher import HeadKind
from .experiment import Experiment, parse_head
from .figures import draw_maps
from .mixing import MAX_BYTES, HeadMix, heads_in, mix_heads, mixing_bytes, mixing_sites
from .patterns import MarkedPrompt, Sharpness, mark_example, mark_prompt, sharpness
from .rankings import comparison_table
from .tables import Column, Row, Table
from .tasks import Subject

COLUMNS_OF_ONE_MODEL = 3
GATHER, AGGREGATE = Sharpness._fields.index("gather"), Sharpness._fields.index("aggregate")
COLUMNS = (
    Column("entropy", "bits", digits=2),
    *(Column(name) for name in ("answer", "separators", "gather", "aggregate")),
)


@dataclass(frozen=True, kw_only=True)
class Maps(Experiment):
    """Show what heads mix on one prompt, which of them gather and aggregate, and whether ablation agrees."""

    NAME = "maps"

    subject: Subject = field(default_factory=Subject)
    beside: tuple[str, ...] = ()
    """More models, for the same heads on the same prompt: a student beside its teacher."""
    heads: tuple[str, ...] = ()
    """Heads to show, such as ``L2H6 L5H5``; by default those that gather and aggregate most."""
    ssm_heads: tuple[str, ...] = ()
    """Recurrent heads to show of a model that has attention too (Zamba2, Falcon-H1)."""
    kind: HeadKind | None = None
    """Kind of the heads: only attention heads, or only ``ssm`` heads."""
    prompt: str | None = None
    """A text of your own, its lines being segments; by default a question of the probe."""
    probe: str = "kv"
    """Probe to search gather and aggregate heads on, and to take the prompt from: kv, letters, needle or two_hop."""
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
    """Largest matrices, in GiB; larger ones are refused."""

    def run(self) -> str:
        check_counts(examples=self.examples, k=self.k)
        ablation = None if self.scores is None else HeadScores.load(self.scores).ranking()
        model, tokenizer = self.subject.load()
        heads, ssm_heads = map(parse_head, self.heads), list(map(parse_head, self.ssm_heads))
        chosen, shown = list(heads), []
        asked = probe_with(self.probe, {"pairs": self.pairs, "seed": self.seed}).examples(self.examples)
        if not (chosen or ssm_heads) or ablation is not None:
            found = find_patterns(model, tokenizer, asked, kind=self.kind, max_bytes=int(self.max_gb * 2**30))
            chosen = chosen or ([] if ssm_heads else found.first(self.k))
            shown.append(self.save(found.table(self.k, ablation), suffix=".patterns"))
            shown += [] if ablation is None else [found.compared(ablation)]
        prompt = mark_example(tokenizer, asked[0]) if self.prompt is None else mark_prompt(tokenizer, self.prompt)
        panels = self._panels(model, self.subject.model, prompt, chosen, ssm_heads)
        for path in self.beside:
            other, _ = Subject(path, self.subject.dtype).load()
            panels += self._panels(other, path, prompt, chosen, ssm_heads)
        n_columns = len(chosen) + len(ssm_heads) if self.beside else COLUMNS_OF_ONE_MODEL

        def draw(table: Table, path: Path) -> None:
            draw_maps(panels, prompt, path, n_columns=n_columns)

        return "\n\n".join([*shown, self.save(sharpness_table(panels, prompt), draw)])

    def _panels(
        self,
        model: PreTrainedModel,
        name: str,
        prompt: MarkedPrompt,
        heads: Sequence[HeadId],
        ssm_heads: Sequence[HeadId],
    ) -> list[tuple[str, HeadMix]]:
        max_bytes = int(self.max_gb * 2**30)
        mixes = mix_heads(model, prompt.ids, heads, kind=self.kind, max_bytes=max_bytes) if heads else []
        mixes += mix_heads(model, prompt.ids, ssm_heads, kind="ssm", max_bytes=max_bytes) if ssm_heads else []
        label = Path(name).name if self.beside else ""
        return [(f"{label} {mix.head} {mix.kind}".strip(), mix) for mix in mixes]


def sharpness_table(shown: Sequence[tuple[str, HeadMix]], prompt: MarkedPrompt) -> Table:
    """Make a row for each head: see `Sharpness`."""
    rows = [Row(label, _in_percent(sharpness(mix.matrix_TS, prompt))) for label, mix in shown]
    title = f"one prompt of {len(prompt.ids)} tokens, {len(prompt.segments)} segments: where heads look"
    return Table(title, "head", COLUMNS, tuple(rows), compared=False)


def _in_percent(found: Sharpness) -> tuple[float, ...]:
    return (found.entropy, *(100 * share for share in found[1:]))


@dataclass(frozen=True, eq=False)
class Patterns:
    """Average of every head of a model over some questions: ``means_HM``, a row of `Sharpness` each."""

    model: str
    n_examples: int
    heads: list[HeadId]
    means_HM: Tensor

    def ranking(self, measure: int) -> list[HeadId]:
        """Rank all heads by this measure, most first."""
        order = self.means_HM[:, measure].argsort(descending=True, stable=True)
        return [self.heads[index] for index in order.tolist()]

    def first(self, k: int) -> list[HeadId]:
        """Return the candidates: the first ``k`` gather heads, then aggregate heads, each once."""
        return list(dict.fromkeys([*self.ranking(GATHER)[:k], *self.ranking(AGGREGATE)[:k]]))

    def table(self, k: int, ablation: Sequence[HeadId] | None = None) -> Table:
        """Make a row for each candidate; with a ranking by ablation, its place there (1 is first)."""
        place = {head: number for number, head in enumerate(ablation or (), start=1)}
        columns = (*COLUMNS, *([Column("place by ablation", "", digits=0)] if ablation else []))
        rows = []
        for head in self.first(k):
            means = _in_percent(Sharpness(*self.means_HM[self.heads.index(head)].tolist()))
            rows.append(Row(str(head), (*means, *([place.get(head, float("nan"))] if ablation else []))))
        title = f"{self.model}: heads that gather or aggregate, means over {self.n_examples} prompts"
        return Table(title, "head", columns, tuple(rows), compared=False)

    def compared(self, ablation: Sequence[HeadId]) -> str:
        """Compare the patterns' rankings and that of ablation, each with each, as text."""
        named = {"gather": self.ranking(GATHER), "aggregate": self.ranking(AGGREGATE), "ablation": ablation}
        return comparison_table(named, min(10, len(ablation), len(self.heads)))


def find_patterns(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    *,
    kind: HeadKind | None = None,
    max_bytes: int = MAX_BYTES,
) -> Patterns:
    """Measure every head on every question: one forward each, or several where all matrices together are too large.

    Raises ValueError for Mamba-1, whose channels are too many to look through, and as `mix_heads` does.
    """
    sites = mixing_sites(model, kind)
    if sites[0].kind == "channel":
        raise ValueError(
            f"this model has {sites[0].n_heads} channels a layer, too many to look through; name some with --heads."
        )
    prompts = [mark_example(tokenizer, example) for example in examples]
    heads = [head for site in sites for head in heads_in(site, kind)]
    total_HM = torch.zeros(len(heads), len(Sharpness._fields), dtype=torch.float64)
    for prompt in tqdm(prompts, desc="matrices", disable=None):
        groups: list[list[HeadId]] = [[]]  # as many layers together as fit; a layer that does not is alone
        for site in sites:
            own = heads_in(site, kind)
            if groups[-1] and mixing_bytes(model, len(prompt.ids), groups[-1] + own, sites) > max_bytes:
                groups.append([])
            groups[-1] += own
        mixes = (m for g in groups for m in mix_heads(model, prompt.ids, g, kind=kind, max_bytes=max_bytes))
        total_HM += torch.tensor([sharpness(mix.matrix_TS, prompt) for mix in mixes], dtype=torch.float64)
    return Patterns(str(model.name_or_path), len(prompts), heads, total_HM / len(prompts))
