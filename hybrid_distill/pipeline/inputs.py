"""Inputs of a run: teacher, data, texts and questions, checked before anything is computed."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path

from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..config import PlanConfig, RunConfig
from ..data import (
    PINS,
    CachedLogitsDataset,
    Pins,
    Rows,
    cache_root,
    check_launch,
    check_same_vocabulary,
    check_sources,
    open_logits,
    open_rows,
    pinned,
    read_held_out,
    read_pins,
)
from ..distributed import agree_on, check_trackers
from ..model.documents import check_packs
from ..plan import HeadPlan
from ..probes import Probe
from ..probes.checks import check_answerable
from ..probes.knowledge import Knowledge
from ..probes.kv_retrieval import KVRetrieval
from ..probes.plain_text import text_rows
from ..probes.prompt_formats import PLAIN, with_prompt_format
from ..scoring import HeadScores
from ..student.build import check_family, checked_sites, empty_student
from ..student.teachers import check_teacher, empty_teacher
from ..teacher import DTYPES, TINY, fingerprint, load_config, load_teacher, longest_context, read_teacher
from ..train.checkpoint import StageManifest
from ..train.config import DistillConfig, StageConfig, TeacherConfig
from ..vocabulary import vocabulary_size

Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]
PROBE_SEEDS = {"scoring": 0, "evaluation": 1}
"""Offsets to the run's seed, so that heads are never ranked on the prompts that measure students."""


class RunInputs:
    """Inputs of a run. Models load on first use; an already loaded ``teacher`` may be passed in."""

    def __init__(self, config: RunConfig, teacher: Loaded | None = None, pins: Pins | None = None) -> None:
        self.config, self.out, self.seed = config, Path(config.out), config.seed
        self._given, self._given_pins = teacher, pins

    @cached_property
    def teacher_and_tokenizer(self) -> Loaded:
        return self._given or load(self.config.teacher)

    @property
    def teacher(self) -> PreTrainedModel:
        return self.teacher_and_tokenizer[0]

    @cached_property
    def shape_and_tokenizer(self) -> tuple[PretrainedConfig, PreTrainedTokenizerBase]:
        """The teacher's config and tokenizer, read without its weights."""
        if self._given:
            return self._given[0].config, self._given[1]
        return read_teacher(self.config.teacher.path, self.config.teacher.revision)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.shape_and_tokenizer[1]

    def stage_shape_and_tokenizer(self, stage: StageConfig) -> tuple[PretrainedConfig, PreTrainedTokenizerBase]:
        """Return config and tokenizer of the teacher that a stage distills from; its chat template serves the stage."""
        teacher = stage.teacher_within(self.config.teacher)
        if teacher == self.config.teacher:
            return self.shape_and_tokenizer
        return read_teacher(teacher.path, teacher.revision)

    def rows(self, stage: StageConfig) -> Rows:
        """Open the rows of a stage, with its cached logits if any, after checking that these match."""
        _, tokenizer = self.stage_shape_and_tokenizer(stage)
        data, teacher = stage.data_within(self.config.data), stage.teacher_within(self.config.teacher)
        rows = open_rows(data, tokenizer, pins=self.pins)
        if not isinstance(stage, DistillConfig) or stage.cached_logits is None:
            return rows
        logits = open_logits(stage.cached_logits)
        logits.check(
            rows,
            tokenizer,
            fingerprint(self.teacher) if teacher == self.config.teacher else teacher.path,
            vocab_size=vocabulary_size(self.tokenizer),
            places=stage.rows_read,
            temperature=stage.temperature,
        )
        return CachedLogitsDataset(rows, logits)

    @cached_property
    def pins(self) -> Pins:
        """Commits of the sources on the hub: those in the run's folder, else the newest. All processes must access this
        together; only the main process asks the hub."""
        starts_over = self.config.resume == "never"
        known = self._given_pins or ({} if starts_over else agree_on(lambda: read_pins(self.out / PINS)))
        stages = [stage.data_within(self.config.data) for stage in self.config.stage_configs]
        sources = [source for data in (self.config.data, *stages) for source in data.sources]
        return pinned(sources, known, cache_root())

    def held_out_texts(self, n: int) -> list[str]:
        return read_held_out(self.config.evaluation.texts, n, self.config.data.text_column)

    def knowledge(self) -> Knowledge | None:
        source = self.config.evaluation.knowledge or (TINY if self.config.teacher.path == TINY else None)
        return None if source is None else Knowledge(None if source == TINY else source)

    def scoring_probe(self) -> Probe:
        """Return the probe whose prompts heads are ranked on."""
        return with_prompt_format(self._plain_probe, self.prompt_format, self.tokenizer)

    @property
    def _plain_probe(self) -> KVRetrieval:
        scoring = self.config.scoring
        return KVRetrieval(scoring.n_pairs, seed=self.seed + PROBE_SEEDS["scoring"], n_queries=scoring.n_queries)

    @property
    def prompt_format(self) -> str:
        """Format of all prompts."""
        return self.config.scoring.prompt_format

    def known_plan(self, options: PlanConfig, teacher: PreTrainedModel) -> HeadPlan | None:
        """Make the plan for a teacher of this shape; None if its heads must be ranked first. Raises ValueError for a
        plan that cannot be made."""
        file = self.config.scoring.file
        if options.selection in ("top", "restoration", "random"):
            unit = options.unit if options.selection == "top" else "head"
            HeadPlan.check_k(teacher, options.k, "--plan.k", unit)
        if options.selection == "restoration" or (options.selection == "top" and file is None):
            return None
        plan = make_plan(options, teacher, lambda: HeadScores.load(file or Path()), by_shape=True)
        plan.check_fits(teacher)
        return plan

    # Checks raise ValueError for input that would stop a run. They look at names, headers and shapes, not at weights.

    def checks(self) -> list[Callable[[], object]]:
        return [
            partial(check_trackers, self.config.trackers),
            self.check_teachers,
            self.check_data,
            self.check_evaluation,
            self.check_student,
        ]

    def check_teachers(self) -> None:
        """Check that the run's teacher and every stage's can be one, and that their tokenizers fit their embeddings."""
        # Flags name packable attention only; a given teacher or a config.json may name any.
        check_packs(self.shape_and_tokenizer[0]._attn_implementation)
        # A model in memory may be of a class that only its owner can build; `check_student` looks at its heads.
        check_teacher(*self.shape_and_tokenizer, name=self.config.teacher.path, heads=self._given is None)
        for stage in self.config.stage_configs:
            teacher = stage.teacher_within(self.config.teacher)
            if teacher != self.config.teacher:
                check_teacher(*self.stage_shape_and_tokenizer(stage), name=teacher.path)

    def check_data(self) -> None:
        """Check sources, vocabularies, and that rows fit into the teachers' contexts; read no text."""
        check_sources(self.config.data, self.tokenizer)
        for stage in self.config.stage_configs:
            teacher, data = stage.teacher_within(self.config.teacher), stage.data_within(self.config.data)
            shape, tokenizer = self.stage_shape_and_tokenizer(stage)
            if teacher != self.config.teacher:
                check_same_vocabulary(self.tokenizer, tokenizer)
            check_sources(data, tokenizer)
            longest = longest_context(shape)
            if longest is not None and data.seq_len > longest:
                field = {"long": "long.seq_len", "post": "post.data.seq_len"}.get(stage.name, "data.seq_len")
                raise ValueError(
                    f"{field} is {data.seq_len}, but the context of the teacher {teacher.path!r} is "
                    f"{longest} tokens; use at most {longest}, or a teacher whose config scales its RoPE further "
                    "(rope_parameters of type yarn)."
                )

    def check_launch(self) -> None:
        """Check that no process would wait for hours until the main one has tokenized a source."""
        for stage in self.config.stage_configs:
            _, tokenizer = self.stage_shape_and_tokenizer(stage)
            check_launch(stage.data_within(self.config.data), tokenizer, pins=self.pins)

    def check_evaluation(self) -> None:
        """Check evaluation texts and questions now, not after training."""
        options = self.config.evaluation
        if options.texts != TINY:
            text_rows(self.tokenizer, self.held_out_texts(options.n_texts), max_tokens=2)
        if (knowledge := self.knowledge()) is not None:
            knowledge.examples(1)
        for n_pairs in options.n_pairs:
            KVRetrieval(n_pairs, seed=self.seed).examples(1)
        self._plain_probe.examples(1)
        if (prompt_format := self.config.scoring.prompt_format) != PLAIN:
            limit = longest_context(self.shape_and_tokenizer[0]) or sys.maxsize
            for probe in (self._plain_probe, *(KVRetrieval(n_pairs) for n_pairs in options.n_pairs)):
                examples = with_prompt_format(probe, prompt_format, self.tokenizer).examples(1)
                check_answerable(examples, self.tokenizer, limit)

    def check_student(self, plan: PlanConfig | None = None) -> None:
        """Check that the teacher, this plan (default: the config's) and the config's options make a valid student."""
        options, path = self.config.student, self.out / "plan.json"
        teacher = self._given[0] if self._given else shape_of_teacher(self.config.teacher)
        if plan is None and self.config.resume != "never" and path.exists():
            heads = HeadPlan.load(path)
        else:
            heads = self.known_plan(plan or self.config.plan, teacher)
        heads = heads or HeadPlan.none(teacher)
        checked_sites(teacher, heads, options.init)
        empty_student(teacher, heads, options.d_state, options.conv_width, options.recurrence)
        check_family(teacher, options.recurrence)  # else a new transformers is found out after hours of scoring
        if options.aligned is not None and not StageManifest.read(options.aligned):
            raise ValueError(f"student.aligned is {options.aligned}, which has no finished stage; pass a finished one.")


def load(options: TeacherConfig) -> Loaded:
    """Load a teacher and its tokenizer."""
    return load_teacher(
        options.path,
        dtype=options.dtype,
        revision=options.revision,
        attn_implementation=options.attn_implementation,
        allow_bin=options.allow_bin,
    )


def shape_of_teacher(options: TeacherConfig) -> PreTrainedModel:
    """Build the teacher on the meta device, without weights. Raises ValueError if transformers cannot."""
    shape = load_config(options.path, options.revision)
    return empty_teacher(shape, options.path, DTYPES[options.dtype], options.attn_implementation)


def make_plan(
    options: PlanConfig, teacher: PreTrainedModel, scores: Callable[[], HeadScores], *, by_shape: bool = False
) -> HeadPlan:
    """Make the plan that a config describes; ``scores`` is called only for ``top``. ``by_shape`` reads no weights."""
    if options.selection == "top":
        return HeadPlan.top_k(scores(), options.k, unit=options.unit)
    if options.selection == "file":
        if options.file is None:
            raise ValueError("plan.selection is 'file' without a file; name it with --plan.file.")
        return HeadPlan.load(options.file)
    make: dict[str, Callable[[], HeadPlan]] = {
        "random": lambda: HeadPlan.random(teacher, options.k, options.seed),
        "layers": lambda: HeadPlan.layers(teacher, options.layers),
        "all": lambda: HeadPlan.all(teacher),
        "none": lambda: HeadPlan.none(teacher),
        "pairs": lambda: HeadPlan.from_pairs(teacher, options.pairs),
    }
    plan = make[options.selection]()
    return plan if by_shape else dataclasses.replace(plan, teacher=fingerprint(teacher))
