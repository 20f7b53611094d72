"""Experiments on which part of a hybrid carries retrieval.

`ReplaceLayer` replaces a mixer with the teacher's attention, on the student's own inputs (arXiv
2504.18574). `ZeroedRecurrence` zeroes the recurrent heads of one layer, and of all.
`HybridHeadRanking` ablates heads one by one, as `hybrid-distill score` does, then the top heads of
each kind and of both kinds together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple, cast

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...data import read_held_out
from ...distributed import own_device
from ...kernels import Kernels, use_kernels
from ...model.mixer import HybridMixer, zero_part
from ...model.modeling_hybrid import HybridForCausalLM
from ...pipeline import finished_run, is_run, trained_student
from ...plan import HeadId
from ...safe_loading import load_student
from ...scoring import HeadScores, score_heads
from ...scoring.head_scores import heads_of
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
from ...validation import Count, CountOrZero, Share
from .experiment import Bench, Experiment, ModelExperiment, Variant
from .figures import draw_bars, draw_groups
from .tables import Column, Row, Table
from .tasks import Questions, check_readable

SHOWN = 24  # rows that replace-layer shows, at most
COLUMNS = (
    Column("accuracy lost", "points"),
    Column("log-probability lost", "nats", digits=3),
    Column("plain text lost", "nats", digits=4),
)


@dataclass(frozen=True, kw_only=True)
class ReplaceLayer(Experiment):
    """Put the teacher's attention back into an aligned student, one layer at a time: which layer
    restores retrieval?"""

    NAME = "replace-layer"

    student: Path
    """Folder of a run with its alignment (of a sweep: OUT/shared/*/aligned), or a student's checkpoint."""
    teacher: str | None = None
    """Teacher of a checkpoint, by default the embedded one; a run knows its own."""
    kernels: Kernels = "auto"
    """Implementation of a student's recurrent heads."""
    by: Literal["layer", "head"] = "layer"
    """Unit to put back at a time: a ``layer`` or a ``head``."""
    questions: Questions = field(default_factory=Questions)

    def run(self) -> str:
        student, teacher, tokenizer = self.load()
        bench = Bench(student, tokenizer, self.questions.make(student, tokenizer))
        return self.save(self.table(bench, teacher), draw_bars, most=SHOWN)

    def load(self) -> tuple[PreTrainedModel, PreTrainedModel, PreTrainedTokenizerBase]:
        """Load student, teacher and tokenizer. Raises ValueError unless they match."""
        # A run and a checkpoint both have a config.json; its contents tell.
        if is_run(self.student):
            student, teacher, tokenizer = self._load_run()
        else:
            student, teacher, tokenizer = self._load_checkpoint()
        use_kernels(student, self.kernels, own_device())
        student.name_or_path = str(self.student)
        student_shape = _shape(student)
        teacher_shape = _shape(teacher)
        if student_shape != teacher_shape:
            raise ValueError(
                f"the student has {student_shape}, the teacher {teacher.name_or_path!r} has "
                f"{teacher_shape}; pass the student's own with --teacher."
            )
        for model in (student, teacher):
            # By nn.Module: transformers' own to() is decorated, which hides its type.
            nn.Module.to(model, own_device())
        return student.eval(), teacher, tokenizer

    def _load_run(self) -> tuple[PreTrainedModel, PreTrainedModel, PreTrainedTokenizerBase]:
        if self.teacher is not None:
            raise ValueError(
                f"{self.student} is a run and records its teacher; leave out --teacher."
            )
        run = finished_run(self.student)
        student, _ = trained_student(run)
        teacher, tokenizer = run.teacher_and_tokenizer
        return student, teacher, tokenizer

    def _load_checkpoint(self) -> tuple[PreTrainedModel, PreTrainedModel, PreTrainedTokenizerBase]:
        student, own_tokenizer = load_student(self.student)
        name = self.teacher or TINY
        config, _ = read_teacher(name, flag="--teacher")
        check_teacher(config, name=name)
        # Teacher and student exchange tensors, so their dtypes must be the same.
        dtype = str(student.dtype).removeprefix("torch.")
        teacher, tokenizer = load_teacher(name, dtype=dtype, flag="--teacher")
        return student, teacher, own_tokenizer or tokenizer

    def table(self, bench: Bench, teacher: PreTrainedModel) -> Table:
        """Make rows for the student, each part put back (heads: best first), and the teacher."""
        student = bench.model
        assert isinstance(student, HybridForCausalLM)
        variants = [Variant("none", nullcontext())]
        if self.by == "head":
            for head in heads_of(head_sites(student)):
                variants.append(Variant(str(head), restore_heads(student, teacher, [head])))
        else:
            for site in head_sites(student):
                put_back = restore_layers(student, teacher, [site.layer])
                variants.append(Variant(f"layer {site.layer}", put_back))
        table = bench.table(f"one {self.by} of the teacher put back", "put back", variants)
        rows = list(table.rows)
        if self.by == "head":
            # Perplexity, the only figure without a unit, is better if lower.
            higher_is_better = bool(bench.tasks[0].column.unit)
            rows[1:] = sorted(rows[1:], key=lambda row: row.values[0], reverse=higher_is_better)
        intact_teacher = Variant("teacher", nullcontext(), "teacher")
        rows += bench._replace(model=teacher).rows([intact_teacher], "teacher")
        return table._replace(rows=rows)


@dataclass(frozen=True, kw_only=True)
class ZeroedRecurrence(ModelExperiment):
    """Zero the recurrent heads of one layer at a time, then of all layers: which layers use their
    recurrence?"""

    NAME = "zeroed-recurrence"

    questions: Questions = field(
        default_factory=lambda: Questions(tasks="kv,kv:generate,text", pairs=8, examples=64)
    )

    def run(self) -> str:
        return self.save(self.table(self.load()), draw_bars)

    def table(self, bench: Bench) -> Table:
        """Make a row for the model as it is, for each layer with recurrent heads, and for all layers.

        Raises ValueError for a model without recurrent heads.
        """
        model = bench.model
        # A layer has several sites if its attention and its SSM are side by side (Falcon-H1).
        sites: list[HeadSite] = []
        for kind in head_kinds(model):
            sites += head_sites(model, as_head_kind(kind))
        layers: dict[int, list[HeadSite]] = {}
        for site in sites:
            if _recurrent_heads(site):
                layers.setdefault(site.layer, []).append(site)
        if not layers:
            raise ValueError(
                f"{model.name_or_path} has no recurrent heads to zero; pass a student that does "
                "not keep all heads, or another model with recurrent layers."
            )
        variants = [Variant("nothing", nullcontext())]
        for layer, layer_sites in sorted(layers.items()):
            n_heads = sum(len(_recurrent_heads(site)) for site in layer_sites)
            label = f"layer {layer} ({n_heads} heads)"
            variants.append(Variant(label, _zero_recurrence(model, layer_sites)))
        variants.append(Variant("all layers", _zero_recurrence(model, sites), "all layers"))
        return bench.table("recurrent heads zeroed, by layer", "zeroed", variants)


def _recurrent_heads(site: HeadSite) -> list[HeadId]:
    return [head for head in heads_of([site]) if site.kind_of(head.head) != "attention"]


@contextmanager
def _zero_recurrence(model: PreTrainedModel, sites: Sequence[HeadSite]) -> Iterator[None]:
    """Zero all recurrent heads of these sites; in a student, not the windows beside them."""
    with ExitStack() as zeroed:
        for site in sites:
            if site.kind == "hybrid":
                mixers = [cast(HybridMixer, site.module)]
                zeroed.enter_context(zero_part(mixers, "recurrence"))
                continue
            zeroed.enter_context(
                ablate_heads(model, _recurrent_heads(site), kind=as_head_kind(site.kind))
            )
        yield


def _shape(model: PreTrainedModel) -> str:
    sites = head_sites(model)
    site = sites[0]
    heads = f"{len(sites)} layers of {site.n_heads} heads of {site.head_dim}"
    return f"{heads}, {site.o_proj.out_features} wide"


@dataclass(frozen=True, kw_only=True)
class HybridHeadRanking(ModelExperiment):
    """Rank attention and recurrent heads together: which of them carry retrieval, and what is lost
    without them?

    Heads are ranked by ``--probe``, with questions of another seed than those that measure the
    removal. The ``--counts`` are of each kind, and of both together.
    """

    NAME = "carriers"

    questions: Questions = field(
        default_factory=lambda: Questions(tasks="kv,knowledge", pairs=8, examples=64)
    )
    probe: str = "kv"
    """kv, letters, or a RULER task (docs/scores.md lists them)."""
    k: Count = 20
    """Heads to show; racing applies to the top k."""
    counts: tuple[Count, ...] = (1, 3, 10)
    """Numbers of heads to remove."""
    min_accuracy: Share | None = None
    """Lowest accuracy on the probe: a task that the model fails cannot rank its heads. By default
    a third of the way from guessing to always right."""
    n_control_texts: CountOrZero = 16
    """Plain texts that reveal heads which matter for any text."""

    def run(self) -> str:
        bench = self.load()
        scores = self._scores(bench)
        ranking = rank_together(bench.model, scores)
        rows = [Row(f"{ranked.head} {ranked.kind}", ranked.lost) for ranked in ranking]
        title = f"{bench.model.name_or_path}: what is lost without a head, by {self.probe}"
        ranking_table = Table(title, "head", COLUMNS, rows, compared=False)
        removal_table = self.without_first(bench, ranking)
        # Written only now: an error before leaves the files of an earlier call.
        ranking_text = self.save(ranking_table, draw_bars, most=self.k)
        for kind, kind_scores in scores.items():
            kind_scores.save(self.out / f"{self.NAME}.{kind}.json")
        removal_text = self.save(removal_table, draw_groups, suffix=".removed")
        return f"{ranking_text}\n\n{removal_text}"

    def _scores(self, bench: Bench) -> dict[str, HeadScores]:
        """Score the heads of each kind.

        Raises ValueError for unreadable questions, and for Mamba-1.
        """
        model = bench.model
        n_examples = self.questions.examples
        # Not the questions that measure the removal: heads chosen and measured on the same ones
        # would look better than they are.
        probe = replace(self.questions, seed=self.questions.seed + 1).probe(self.probe)
        check_readable(model, bench.tokenizer, probe.examples(n_examples))
        texts = read_held_out(self.questions.texts, self.n_control_texts)
        kinds = head_kinds(model)
        if "channel" in kinds:
            raise ValueError(
                f"{model.name_or_path} has Mamba-1 channels, too many to ablate one by one; pass "
                "a model whose recurrent heads are those of Mamba-2."
            )
        scores = {}
        for kind in kinds:
            scores[kind] = score_heads(
                model,
                bench.tokenizer,
                probe,
                n_examples=n_examples,
                race_k=self.k,
                min_accuracy=self.min_accuracy,
                control_texts=texts,
                kind=as_head_kind(kind),
            )
        return scores

    def without_first(self, bench: Bench, ranking: Sequence[RankedHead]) -> Table:
        """Make a row with no heads removed, then rows without the top heads of each kind and of
        both, by count.

        A kind with fewer heads than a count loses all of them, once.
        """
        groups: dict[str, list[RankedHead]] = {}
        for kind in sorted({ranked.kind for ranked in ranking}):
            groups[kind] = [ranked for ranked in ranking if ranked.kind == kind]
        if len(groups) > 1:
            groups["both"] = list(ranking)
        variants = [Variant("nothing", nullcontext())]
        for group, heads in groups.items():
            # A set: several counts may exceed a kind's number of heads.
            for n in sorted({min(count, len(heads)) for count in self.counts}):
                removed = _without(bench.model, heads[:n])
                variants.append(Variant(f"{group}: first {n}", removed, group, n))
        return bench.table(
            "without the first heads of the ranking, by kind", "heads removed", variants
        )


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
    for kind, kind_scores in scores.items():
        sites = {site.layer: site for site in head_sites(model, as_head_kind(kind))}
        for head in kind_scores.ranking():
            accuracy = 100 * kind_scores.value_LH()[head].item()
            logprob = kind_scores.logprob_drop_LH[head].item()
            control = math.nan
            if kind_scores.control_drop_LH is not None:
                control = kind_scores.control_drop_LH[head].item()
            head_kind = sites[head.layer].kind_of(head.head)
            ranked.append(RankedHead(head, head_kind, (accuracy, logprob, control)))

    def best_first(head: RankedHead) -> tuple[object, ...]:
        accuracy, logprob, _ = head.lost
        return -accuracy, -logprob, head.head, head.kind

    return sorted(ranked, key=best_first)


@contextmanager
def _without(model: PreTrainedModel, heads: Sequence[RankedHead]) -> Iterator[None]:
    with ExitStack() as removed:
        for kind in head_kinds(model):
            # The sites of a student hold heads of both kinds.
            heads_of_kind = [ranked.head for ranked in heads if kind in (ranked.kind, "hybrid")]
            removed.enter_context(ablate_heads(model, heads_of_kind, kind=as_head_kind(kind)))
        yield
