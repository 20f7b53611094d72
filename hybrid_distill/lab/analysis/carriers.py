"""One ranking of all heads of a hybrid, attention and recurrent: which of them carry retrieval?

Heads are ablated one by one, as `hybrid-distill score` does, then the first of each kind and of both together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from transformers import PreTrainedModel

from ...plan import HeadId
from ...probes import check_counts
from ...scoring import HeadScores, score_heads
from ...teacher import HeadKind, ablate_heads, asked_for, head_kinds, head_sites
from .experiment import Bench, ModelExperiment, Variant
from .figures import draw_bars, draw_lines
from .tables import Column, Row, Table
from .tasks import Questions, check_readable

COLUMNS = (
    Column("accuracy lost", "points"),
    Column("log-probability lost", "nats", digits=3),
    Column("plain text lost", "nats", digits=4),
)


@dataclass(frozen=True, kw_only=True)
class HybridHeadRanking(ModelExperiment):
    """Rank attention and recurrent heads together: which of them carry retrieval, and what goes without them?"""

    NAME = "carriers"

    questions: Questions = field(default_factory=lambda: Questions(tasks="kv,knowledge", pairs=8, examples=64))
    probe: str = "kv"
    """Probe that heads are ranked by, in questions of another seed: kv, letters, needle, copy or two_hop."""
    k: int = 20
    """Heads to show; racing is about the first k."""
    counts: tuple[int, ...] = (1, 3, 10)
    """Numbers of first heads of each kind, and of both, that are removed together."""
    min_accuracy: float | None = None
    """Least accuracy of the model on the probe; by default half way from guessing to always right."""
    n_control_texts: int = 16
    """Plain texts that show heads which matter for everything."""

    def run(self) -> str:
        check_counts(k=self.k, **{f"counts[{place}]": count for place, count in enumerate(self.counts)})
        bench = self.load()
        model, tokenizer, _ = bench
        probe, n_examples = self.questions.probe(self.probe, self.questions.seed + 1), self.questions.examples
        check_readable(model, tokenizer, probe.examples(n_examples))
        texts, kinds = self.questions.documents(self.n_control_texts), head_kinds(model)
        if "channel" in kinds:
            raise ValueError(
                f"{model.name_or_path} has Mamba-1 channels, too many to ablate one by one; pass a model whose "
                "recurrent heads are those of Mamba-2."
            )
        scores = {
            kind: score_heads(
                model, tokenizer, probe, kind=asked_for(kind), n_examples=n_examples, race_k=self.k,
                min_accuracy=self.min_accuracy, control_texts=texts,
            )
            for kind in kinds
        }  # fmt: skip
        ranking = rank_together(model, scores)
        title = f"{model.name_or_path}: what is lost without a head, by {self.probe}"
        rows = [Row(f"{ranked.head} {ranked.kind}", ranked.lost) for ranked in ranking]
        removed = remove_kinds(bench, ranking, self.counts)
        is_attention = [ranked.kind == "attention" for ranked in ranking]
        table = Table(title, "head", COLUMNS, rows, compared=False)
        self.save(table, partial(draw_bars, most=self.k, is_attention=is_attention))
        for kind, found in scores.items():
            found.save(self.out / f"{self.NAME}.{kind}.json")
        after = self.save(removed, partial(draw_lines, x_label="heads removed"), suffix=".removed")
        return "\n\n".join([table._replace(rows=rows[: self.k]).text(), summary(ranking, self.k), after])


class RankedHead(NamedTuple):
    """One head and its losses: points of accuracy, nats of the answer, nats per token of text."""

    head: HeadId
    kind: HeadKind
    lost: tuple[float, float, float]


def rank_together(model: PreTrainedModel, scores: Mapping[str, HeadScores]) -> list[RankedHead]:
    """Rank all heads, best first: by accuracy lost, then log-probability lost, then position.

    ``scores`` are by kind; those of a student's heads, of both kinds together, are "hybrid".
    """
    ranked = []
    for kind, found in scores.items():
        sites = {site.layer: site for site in head_sites(model, asked_for(kind))}
        for head in found.ranking():
            control = math.nan if found.control_drop_LH is None else found.control_drop_LH[head].item()
            lost = (100 * found.accuracy_drop_LH[head].item(), found.logprob_drop_LH[head].item(), control)
            ranked.append(RankedHead(head, sites[head.layer].kind_of(head.head), lost))
    return sorted(ranked, key=lambda r: (-r.lost[0], -r.lost[1], r.head, r.kind))


def summary(ranking: Sequence[RankedHead], k: int) -> str:
    """Count each kind among the first k heads, and give the place of its first head."""
    lines = []
    for kind in sorted({ranked.kind for ranked in ranking}):
        places = [place for place, ranked in enumerate(ranking, start=1) if ranked.kind == kind]
        among = sum(place <= k for place in places)
        first = ranking[places[0] - 1].head
        lines.append(f"{kind}: {among} of the first {min(k, len(ranking))} heads, {first} at place {places[0]}")
    return "\n".join(lines)


def remove_kinds(bench: Bench, ranking: Sequence[RankedHead], counts: Sequence[int]) -> Table:
    """Make a row without heads removed, then for each kind and for all the first heads of the ranking, by count.

    A kind with fewer heads than a count loses all of them, once.
    """
    kinds = sorted({ranked.kind for ranked in ranking})
    groups = {kind: [ranked for ranked in ranking if ranked.kind == kind] for kind in kinds}
    variants = [Variant("nothing", nullcontext())]
    for group, heads in (groups | ({"both": list(ranking)} if len(kinds) > 1 else {})).items():
        for n in sorted({min(count, len(heads)) for count in counts}):
            variants.append(Variant(f"{group}: first {n}", _without(bench.model, heads[:n]), group, n))
    return bench.table("without the first heads of the ranking, by kind", "heads removed", variants)


@contextmanager
def _without(model: PreTrainedModel, heads: Sequence[RankedHead]) -> Iterator[None]:
    """Remove heads of several kinds at once; a student numbers both kinds together."""
    together = "hybrid" in head_kinds(model)
    own: dict[HeadKind | None, list[HeadId]] = {}
    for ranked in heads:
        own.setdefault(None if together else ranked.kind, []).append(ranked.head)
    with ExitStack() as removed:
        for kind, chosen in own.items():
            removed.enter_context(ablate_heads(model, chosen, kind=kind))
        yield
