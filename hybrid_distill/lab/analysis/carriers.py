"""One ranking of all heads of a hybrid, attention and recurrent: which of them carry retrieval?

Heads are ablated one by one, as `hybrid-distill score` does, then the first of each kind and of both together.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...plan import HeadId
from ...probes import Probe, check_counts
from ...probes.checks import check_answerable
from ...scoring import HeadScores, score_heads
from ...teacher import HeadKind, ablate_heads, asked_for, head_kinds, head_sites, longest_context
from .figures import draw_bars, draw_lines
from .tables import Column, Row, Table
from .tasks import Questions, Subject, Task, measure

NAME = "carriers"
COLUMNS = (
    Column("accuracy lost", "points"),
    Column("log-probability lost", "nats", digits=3),
    Column("plain text lost", "nats", digits=4),
)


@dataclass(frozen=True)
class Carriers:
    """Rank attention and recurrent heads together: which of them carry retrieval, and what goes without them?"""

    subject: Subject = field(default_factory=Subject)
    questions: Questions = field(default_factory=lambda: Questions(tasks="kv,knowledge", pairs=8, examples=64))
    probe: str = "kv"
    """kv, letters, needle, copy or two_hop: what heads are ranked by, in questions of another seed."""
    k: int = 20
    """Heads to show; racing is about the first k."""
    counts: tuple[int, ...] = (1, 3, 10)
    """How many first heads of each kind, and of both, are removed together."""
    min_accuracy: float | None = None
    """A model below this accuracy on the probe is refused; by default half way from guessing to always right."""
    n_control_texts: int = 16
    """Plain texts on which heads that matter for everything show."""
    out: Path = Path("runs/analysis")
    """The folder of the scores, the tables and the figures."""

    def run(self) -> str:
        """The tables as text; writes them, their figures and the scores to ``out``."""
        check_counts(k=self.k, **_named(self.counts))
        model, tokenizer = self.subject.load()
        tasks = self.questions.make(model, tokenizer)
        probe = self.questions.probe(self.probe, self.questions.seed + 1)
        context = longest_context(model.config) or sys.maxsize
        check_answerable(probe.examples(self.questions.examples), tokenizer, context)
        scores = score_kinds(
            model,
            tokenizer,
            probe,
            n_examples=self.questions.examples,
            race_k=self.k,
            min_accuracy=self.min_accuracy,
            control_texts=self.questions.documents(self.n_control_texts),
        )
        ranking = rank_together(model, scores)
        title = f"{model.name_or_path}: what is lost without a head, by {self.probe}"
        removed = remove_kinds(model, tokenizer, tasks, ranking, self.counts)
        table = ranking_table(ranking, title)
        table.save(self.out, NAME)
        removed.save(self.out, f"{NAME}.removed")
        for kind, found in scores.items():
            found.save(self.out / f"{NAME}.{kind}.json")
        is_attention = [ranked.kind == "attention" for ranked in ranking]
        draw_bars(table, self.out / f"{NAME}.png", most=self.k, is_attention=is_attention)
        draw_lines(removed, self.out / f"{NAME}.removed.png", "heads removed")
        return "\n\n".join([ranking_table(ranking[: self.k], title).text(), summary(ranking, self.k), removed.text()])


class RankedHead(NamedTuple):
    """One head with what is lost without it: points of accuracy, nats of the answer, nats of a token of text."""

    head: HeadId
    kind: HeadKind
    lost: tuple[float, float, float]


def score_kinds(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, probe: Probe, **options: Any
) -> dict[str, HeadScores]:
    """`score_heads` for each kind of head, by its name; a student's heads of both kinds are scored together, as hybrid.

    Raises ValueError for Mamba-1, whose channels are too many to ablate one by one.
    """
    kinds = head_kinds(model)
    if "channel" in kinds:
        raise ValueError(
            f"{model.name_or_path} has Mamba-1 channels, too many to ablate one by one; give a model whose recurrent "
            "heads are those of Mamba-2."
        )
    return {kind: score_heads(model, tokenizer, probe, kind=asked_for(kind), **options) for kind in kinds}


def rank_together(model: PreTrainedModel, scores: Mapping[str, HeadScores]) -> list[RankedHead]:
    """All heads, best first: by accuracy lost, equal ones by log-probability lost, then as they stand."""
    ranked = []
    for kind, found in scores.items():
        sites = {site.layer: site for site in head_sites(model, asked_for(kind))}
        for head in found.ranking():
            control = math.nan if found.control_drop_LH is None else found.control_drop_LH[head].item()
            lost = (100 * found.accuracy_drop_LH[head].item(), found.logprob_drop_LH[head].item(), control)
            ranked.append(RankedHead(head, sites[head.layer].kind_of(head.head), lost))
    return sorted(ranked, key=lambda r: (-r.lost[0], -r.lost[1], r.head, r.kind))


def ranking_table(ranking: Sequence[RankedHead], title: str) -> Table:
    """A row for each head."""
    rows = tuple(Row(f"{ranked.head} {ranked.kind}", ranked.lost) for ranked in ranking)
    return Table(title, "head", COLUMNS, rows, compared=False)


def summary(ranking: Sequence[RankedHead], k: int) -> str:
    """How the first k heads divide among the kinds, and where the first head of each kind stands."""
    lines = []
    for kind in sorted({ranked.kind for ranked in ranking}):
        places = [place for place, ranked in enumerate(ranking, start=1) if ranked.kind == kind]
        among = sum(place <= k for place in places)
        first = ranking[places[0] - 1].head
        lines.append(f"{kind}: {among} of the first {min(k, len(ranking))} heads, {first} at place {places[0]}")
    return "\n".join(lines)


def remove_kinds(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[Task],
    ranking: Sequence[RankedHead],
    counts: Sequence[int],
    *,
    progress: bool = True,
) -> Table:
    """A row without heads removed, then for each kind and for all: the first heads of the ranking, so many at a time.

    A kind with fewer heads than a count loses all of them, once.
    """
    check_counts(**_named(counts))
    kinds = sorted({ranked.kind for ranked in ranking})
    groups = {kind: [ranked for ranked in ranking if ranked.kind == kind] for kind in kinds}
    if len(kinds) > 1:
        groups["both"] = list(ranking)
    wanted = [
        (group, heads[:n])
        for group, heads in groups.items()
        for n in sorted({min(count, len(heads)) for count in counts})
    ]
    rows = []
    for group, heads in tqdm([("", []), *wanted], desc="removing heads", disable=not progress):
        with _without(model, heads):
            values = measure(model, tokenizer, tasks)
        rows.append(Row(f"{group}: first {len(heads)}" if group else "nothing", values, group, len(heads)))
    title = f"{model.name_or_path}: without the first heads of the ranking, by kind"
    return Table(title, "heads removed", tuple(task.column for task in tasks), tuple(rows))


def _named(counts: Sequence[int]) -> dict[str, int]:
    return {f"counts[{place}]": count for place, count in enumerate(counts)}


@contextmanager
def _without(model: PreTrainedModel, heads: Sequence[RankedHead]) -> Iterator[None]:
    """Heads of several kinds removed at once."""
    with ExitStack() as removed:
        if "hybrid" in head_kinds(model):
            removed.enter_context(ablate_heads(model, [ranked.head for ranked in heads]))
        else:
            for kind in {ranked.kind for ranked in heads}:
                own = [ranked.head for ranked in heads if ranked.kind == kind]
                removed.enter_context(ablate_heads(model, own, kind=asked_for(kind)))
        yield
