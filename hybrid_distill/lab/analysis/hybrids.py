"""Experiments on which part of a hybrid carries retrieval.

`ReplaceLayer` replaces a mixer with the teacher's attention, on the student's own inputs (arXiv 2504.18574).
`ZeroedRecurrence` zeroes the recurrent heads of one layer, and of all.
`HybridHeadRanking` ablates heads one by one, as `hybrid-distill score` does, then the top heads of each kind and of
both kinds together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...data import read_held_out
from ...distributed import own_device
from ...guard import load_student
from ...kernels import Kernels, use_kernels
from ...model.modeling_hybrid import HybridForCausalLM
from ...pipeline import finished_run
from ...pipeline.folder import is_run
from ...plan import HeadId
from ...probes import check_counts
from ...scoring import HeadScores, score_heads
from ...scoring.restoration import restore_heads, restore_layers
from ...student.teachers import check_teacher
from ...teacher import (
    TINY,
    HeadKind,
    HeadSite,
    ablate_heads,
    as_head_kind,
    head_kinds,
    head_sites,
    load_teacher,
    read_teacher,
)
from .experiment import (
    Bench,
    Column,
    Experiment,
    ModelExperiment,
    Questions,
    Row,
    Table,
    Variant,
    check_readable,
)
from .figures import draw_bars, draw_lines

SHOWN = 24  # rows that replace-layer shows, at most
COLUMNS = (
    Column("accuracy lost", "points"),
    Column("log-probability lost", "nats", digits=3),
    Column("plain text lost", "nats", digits=4),
)


@dataclass(frozen=True, kw_only=True)
class ReplaceLayer(Experiment):
    """Put the teacher's attention back into an aligned student, one layer at a time: which layer restores retrieval?"""

    NAME = "replace-layer"

    student: Path
    """Folder of a run with its alignment (for a demo: OUT/aligned), or a student's checkpoint."""
    teacher: str | None = None
    """Teacher of a checkpoint, by default the embedded one; a run knows its own."""
    kernels: Kernels = "auto"
    """Implementation of the student's recurrent heads."""
    by: Literal["layer", "head"] = "layer"
    """Unit to put back at a time: a ``layer`` or a ``head``."""
    questions: Questions = field(default_factory=Questions)

    def run(self) -> str:
        student, teacher, tokenizer = self.load()
        table = self.table(Bench(student, tokenizer, self.questions.make(student, tokenizer)), teacher)
        return self.save(table, draw_bars, most=SHOWN)

    def load(self) -> tuple[PreTrainedModel, PreTrainedModel, PreTrainedTokenizerBase]:
        """Load student, teacher and tokenizer. Raises ValueError unless they match."""
        if is_run(self.student / "config.json"):
            if self.teacher is not None:
                raise ValueError(f"{self.student} is a run and records its teacher; leave out --teacher.")
            run = finished_run(self.student)
            (student, _), (teacher, tokenizer) = run.trained_student(), run.teacher_and_tokenizer
        else:
            student, own = load_student(self.student)
            dtype = str(student.dtype).removeprefix("torch.")
            name = self.teacher or TINY
            check_teacher(read_teacher(name, flag="--teacher")[0], name=name)
            teacher, tokenizer = load_teacher(name, dtype=dtype, flag="--teacher")
            tokenizer = own or tokenizer
        use_kernels(student, self.kernels, own_device())
        student.name_or_path = str(self.student)
        if (ours := _shape(student)) != (theirs := _shape(teacher)):
            raise ValueError(
                f"the student has {ours}, the teacher {teacher.name_or_path!r} has {theirs}; pass the student's own "
                "with --teacher."
            )
        for model in (student, teacher):
            nn.Module.to(model, own_device())
        return student.eval(), teacher, tokenizer

    def table(self, bench: Bench, teacher: PreTrainedModel) -> Table:
        """Make rows for the student, for each layer or head put back alone (heads: best first), and for the teacher."""
        student, of_heads = bench.model, self.by == "head"
        assert isinstance(student, HybridForCausalLM)
        n_parts = {site.layer: site.n_heads if of_heads else 1 for site in head_sites(student)}

        def put_back(part: HeadId) -> Variant:
            if of_heads:
                return Variant(str(part), restore_heads(student, teacher, [part]))
            return Variant(f"layer {part.layer}", restore_layers(student, teacher, [part.layer]))

        def worth(row: Row) -> float:
            return row.values[0] if bench.tasks[0].column.unit else -row.values[0]  # less perplexity is better

        parts = [HeadId(layer, part) for layer, n in n_parts.items() for part in range(n)]
        alone = [Variant("none", nullcontext()), *map(put_back, parts)]
        table = bench.table(f"one {self.by} of the teacher put back", "put back", alone)
        intact, *tried = table.rows
        rows = [intact, *(sorted(tried, key=worth, reverse=True) if of_heads else tried)]
        whole = bench._replace(model=teacher).table("", "teacher", [Variant("teacher", nullcontext(), "teacher")])
        return table._replace(rows=[*rows, *whole.rows])


@dataclass(frozen=True, kw_only=True)
class ZeroedRecurrence(ModelExperiment):
    """Zero the recurrent heads of one layer at a time, then of all layers: which layers use their recurrence?"""

    NAME = "zeroed-recurrence"

    questions: Questions = field(default_factory=lambda: Questions(tasks="kv,kv:generate,text", pairs=8, examples=64))

    def run(self) -> str:
        return self.save(self.table(self.load()), draw_bars)

    def table(self, bench: Bench) -> Table:
        """Make a row for the model as it is, for each layer with recurrent heads, and for all layers.

        Raises ValueError for a model without recurrent heads.
        """
        model = bench.model
        sites = [site for kind in head_kinds(model) for site in head_sites(model, as_head_kind(kind))]
        layers: dict[int, list[HeadSite]] = {}
        for site in sites:
            if _recurrent_heads(site):
                layers.setdefault(site.layer, []).append(site)
        if not layers:
            raise ValueError(
                f"{model.name_or_path} has no recurrent heads to zero; pass a student that does not keep all heads, or "
                "another model with recurrent layers."
            )
        variants = [Variant("nothing", nullcontext())]
        for layer, own in sorted(layers.items()):
            n_heads = sum(len(_recurrent_heads(site)) for site in own)
            variants.append(Variant(f"layer {layer} ({n_heads} heads)", _without_recurrence(model, own)))
        variants.append(Variant("all layers", _without_recurrence(model, sites), "all layers"))
        return bench.table("recurrent heads zeroed, by layer", "zeroed", variants)


def _recurrent_heads(site: HeadSite) -> list[HeadId]:
    return [HeadId(site.layer, head) for head in range(site.n_heads) if site.kind_of(head) != "attention"]


@contextmanager
def _without_recurrence(model: PreTrainedModel, sites: Sequence[HeadSite]) -> Iterator[None]:
    """Zero all recurrent heads of these sites."""
    with ExitStack() as zeroed:
        for site in sites:
            zeroed.enter_context(ablate_heads(model, _recurrent_heads(site), kind=as_head_kind(site.kind)))
        yield


def _shape(model: PreTrainedModel) -> str:
    sites = head_sites(model)
    site = sites[0]
    return f"{len(sites)} layers of {site.n_heads} heads of {site.head_dim}, {site.o_proj.out_features} wide"


@dataclass(frozen=True, kw_only=True)
class HybridHeadRanking(ModelExperiment):
    """Rank attention and recurrent heads together: which of them carry retrieval, and what is lost without them?"""

    NAME = "carriers"

    questions: Questions = field(default_factory=lambda: Questions(tasks="kv,knowledge", pairs=8, examples=64))
    probe: str = "kv"
    """Probe to rank heads by, with questions of another seed: kv, letters or a RULER task."""
    k: int = 20
    """Heads to show; racing applies to the top k."""
    counts: tuple[int, ...] = (1, 3, 10)
    """Numbers of top heads of each kind, and of both, to remove together."""
    min_accuracy: float | None = None
    """Lowest accuracy of the model on the probe; by default halfway between guessing and always right."""
    n_control_texts: int = 16
    """Number of plain texts, which reveal heads that matter for any text."""

    def run(self) -> str:
        check_counts(k=self.k, **{f"counts[{place}]": count for place, count in enumerate(self.counts)})
        bench = self.load()
        model, tokenizer = bench.model, bench.tokenizer
        probe, n_examples = self.questions.probe(self.probe, self.questions.seed + 1), self.questions.examples
        check_readable(model, tokenizer, probe.examples(n_examples))
        texts, kinds = read_held_out(self.questions.texts, self.n_control_texts), head_kinds(model)
        if "channel" in kinds:
            raise ValueError(
                f"{model.name_or_path} has Mamba-1 channels, too many to ablate one by one; pass a model whose "
                "recurrent heads are those of Mamba-2."
            )
        score = partial(score_heads, model, tokenizer, probe, n_examples=n_examples, race_k=self.k)
        score = partial(score, min_accuracy=self.min_accuracy, control_texts=texts)
        scores = {kind: score(kind=as_head_kind(kind)) for kind in kinds}
        ranking = rank_together(model, scores)
        rows = [Row(f"{ranked.head} {ranked.kind}", ranked.lost) for ranked in ranking]
        title = f"{model.name_or_path}: what is lost without a head, by {self.probe}"
        removed = self.without_first(bench, ranking)
        shown = self.save(Table(title, "head", COLUMNS, rows, compared=False), draw_bars, most=self.k)
        for kind, found in scores.items():
            found.save(self.out / f"{self.NAME}.{kind}.json")
        return f"{shown}\n\n{self.save(removed, draw_lines, suffix='.removed')}"

    def without_first(self, bench: Bench, ranking: Sequence[RankedHead]) -> Table:
        """Make a row with no heads removed, then rows without the top heads of each kind and of both, by count.

        A kind with fewer heads than a count loses all of them, once.
        """
        kinds = sorted({ranked.kind for ranked in ranking})
        groups = {kind: [ranked for ranked in ranking if ranked.kind == kind] for kind in kinds}
        variants = [Variant("nothing", nullcontext())]
        for group, heads in (groups | ({"both": list(ranking)} if len(kinds) > 1 else {})).items():
            for n in sorted({min(count, len(heads)) for count in self.counts}):
                variants.append(Variant(f"{group}: first {n}", _without(bench.model, heads[:n]), group, n))
        return bench.table("without the first heads of the ranking, by kind", "heads removed", variants)


class RankedHead(NamedTuple):
    """Head, and its losses in the order of ``COLUMNS``."""

    head: HeadId
    kind: HeadKind
    lost: tuple[float, float, float]


def rank_together(model: PreTrainedModel, scores: Mapping[str, HeadScores]) -> list[RankedHead]:
    """Rank all heads, best first: by accuracy lost, then log-probability lost, then position.

    ``scores`` are by kind; "hybrid" are those of a student's heads, both kinds together.
    """
    ranked = []
    for kind, found in scores.items():
        sites = {site.layer: site for site in head_sites(model, as_head_kind(kind))}
        for head in found.ranking():
            control = math.nan if found.control_drop_LH is None else found.control_drop_LH[head].item()
            lost = (100 * found.accuracy_drop_LH[head].item(), found.logprob_drop_LH[head].item(), control)
            ranked.append(RankedHead(head, sites[head.layer].kind_of(head.head), lost))
    return sorted(ranked, key=lambda r: (-r.lost[0], -r.lost[1], r.head, r.kind))


@contextmanager
def _without(model: PreTrainedModel, heads: Sequence[RankedHead]) -> Iterator[None]:
    with ExitStack() as removed:
        for kind in head_kinds(model):
            own = [ranked.head for ranked in heads if kind in (ranked.kind, "hybrid")]
            removed.enter_context(ablate_heads(model, own, kind=as_head_kind(kind)))
        yield
