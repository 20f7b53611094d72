"""Inputs of a run: teacher, tokenizer, rows, texts and questions, each opened when a step first needs it."""

from __future__ import annotations

import gc
import logging
import sys
from dataclasses import replace
from functools import cached_property

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..assets import facts_path, general_facts_path
from ..config import RunConfig
from ..data import (
    CachedLogitsDataset,
    LogitFolder,
    Pins,
    Rows,
    cache_root,
    open_logits,
    open_rows,
    pinned,
    read_held_out,
    read_pins,
)
from ..distributed import agree_on
from ..evaluation.evaluate import far_examples
from ..probes import Probe
from ..probes.checks import CannotAnswer, check_answerable
from ..probes.knowledge import Knowledge
from ..probes.kv_retrieval import KVRetrieval
from ..probes.prompt_formats import with_prompt_format
from ..scoring.defaults import default_questions
from ..student.teachers import empty_teacher
from ..teacher import (
    DTYPES,
    TINY,
    fingerprint,
    load_config,
    load_teacher,
    longest_context,
    read_teacher,
)
from ..train.config import Distill, StageConfig, TeacherConfig
from ..vocabulary import vocabulary_size
from .folder import as_started
from .paths import RunPaths

log = logging.getLogger(__name__)

TeacherAndTokenizer = tuple[PreTrainedModel, PreTrainedTokenizerBase]
LONGEST_SCORED = 512
"""Longest window that heads are ranked for. Heads that read beyond it also read beyond longer ones, which therefore use
this ranking."""
GENERAL = "general"
"""Name of the shipped questions of general knowledge."""
PROBE_SEEDS = {"scoring": 0, "evaluation": 1}
"""Offsets to the run's seed, so that heads are never ranked on the prompts that measure students."""


class RunInputs:
    """Config, paths and inputs of a run. Models load on first use; an already loaded ``teacher`` may be passed in."""

    def __init__(
        self,
        config: RunConfig,
        teacher: TeacherAndTokenizer | None = None,
        pins: Pins | None = None,
    ) -> None:
        self.config = as_started(config)
        self.paths = RunPaths(config.out)
        self.given_teacher = teacher
        self._given_pins = pins
        self.aligned: RunInputs | None = None
        """Run in ``aligned/``, once `align_all_heads` has completed it; it holds the teacher too."""

    @property
    def stages(self) -> tuple[StageConfig, ...]:
        """Stages that run in this run's own folder: for a ``restoration`` plan, the heads align in ``aligned/``."""
        if self.config.plan.restores:
            return self.config.student_stages
        return self.config.stages

    # The teacher

    @cached_property
    def teacher_and_tokenizer(self) -> TeacherAndTokenizer:
        return self.given_teacher or load_configured(self.config.teacher)

    @property
    def teacher(self) -> PreTrainedModel:
        return self.teacher_and_tokenizer[0]

    @cached_property
    def config_and_tokenizer(self) -> tuple[PretrainedConfig, PreTrainedTokenizerBase]:
        """The teacher's config and tokenizer, read without its weights."""
        if self.given_teacher is not None:
            model, tokenizer = self.given_teacher
            return model.config, tokenizer
        return read_teacher(self.config.teacher.path, self.config.teacher.revision)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.config_and_tokenizer[1]

    def given_or_empty_teacher(self) -> PreTrainedModel:
        """Return the teacher, or a model of its shape without weights if it is not loaded yet."""
        if self.given_teacher is not None:
            return self.given_teacher[0]
        return teacher_without_weights(self.config.teacher)

    def release_teacher(self) -> None:
        """Free the teacher's memory; it is loaded again on next use. A teacher given by the caller moves to the CPU."""
        if self.given_teacher is not None:
            nn.Module.to(self.given_teacher[0], "cpu")
            return
        self.__dict__.pop("teacher_and_tokenizer", None)
        self.aligned = None
        gc.collect()

    # A stage's teacher and data

    def has_own_teacher(self, stage: StageConfig) -> bool:
        """Return whether a stage learns from another teacher than the run's."""
        return self.config.teacher_of(stage) != self.config.teacher

    def stage_teacher(self, stage: StageConfig) -> PreTrainedModel:
        """Return the teacher that a stage distills from."""
        if not self.has_own_teacher(stage):
            return self.teacher
        options = self.config.teacher_of(stage)
        log.info(
            "%s distills from %s: from its logits alone, not its hidden states",
            stage.name,
            options.path,
        )
        teacher, _ = load_configured(options)
        return teacher

    def stage_config_and_tokenizer(
        self, stage: StageConfig
    ) -> tuple[PretrainedConfig, PreTrainedTokenizerBase]:
        """Return config and tokenizer of the teacher that a stage distills from; its chat template serves the stage."""
        if not self.has_own_teacher(stage):
            return self.config_and_tokenizer
        teacher = self.config.teacher_of(stage)
        return read_teacher(teacher.path, teacher.revision, flag=f"--{stage.name}.teacher")

    def rows(self, stage: StageConfig) -> Rows:
        """Open the rows of a stage, with its cached logits if any, after checking that these match."""
        _, tokenizer = self.stage_config_and_tokenizer(stage)
        rows = open_rows(self.config.data_of(stage), tokenizer, pins=self.pins)
        logits = self.stored_logits(stage, tokenizer)
        if logits is None:
            return rows
        if self.has_own_teacher(stage):
            teacher = self.config.teacher_of(stage).path
        else:
            teacher = fingerprint(self.teacher)
        logits.check_rows(rows, teacher, rows_read=stage.rows_read)
        return CachedLogitsDataset(rows, logits)

    def stored_logits(
        self, stage: StageConfig, tokenizer: PreTrainedTokenizerBase
    ) -> LogitFolder | None:
        """Open the logits that a stage reads, if any. Raises ValueError unless they were made with its settings."""
        if not isinstance(stage, Distill) or stage.teacher_logits is None:
            return None
        logits = open_logits(stage.teacher_logits)
        logits.check_settings(
            tokenizer,
            vocab_size=vocabulary_size(self.tokenizer),
            seq_len=self.config.data_of(stage).seq_len,
            temperature=stage.temperature,
        )
        return logits

    def calibration_rows(self) -> Rows:
        """Open the rows that recurrent heads are fitted to. All processes open them: one tokenizes, the others wait."""
        return open_rows(self.config.data, self.tokenizer, pins=self.pins)

    @cached_property
    def pins(self) -> Pins:
        """Commits of the sources on the hub: those in the run's folder, else the newest. All processes must access this
        together; only the main process asks the hub."""
        pins = self._given_pins
        if pins is None and self.config.resume == "never":
            pins = {}
        if pins is None:
            pins = agree_on(lambda: read_pins(self.paths.sources))
        sources = list(self.config.data.sources) if self.config.fits_to_text else []
        for stage in self.config.stages:
            sources += self.config.data_of(stage).sources
        return pinned(sources, pins, cache_root())

    # Questions and texts

    def held_out_texts(self, n: int) -> list[str]:
        return read_held_out(self.config.evaluation.texts, n, self.config.data.text_column)

    def knowledge(self) -> Knowledge | None:
        """Return the multiple-choice questions, None if there are none."""
        source = self.config.evaluation.knowledge
        if source is None and self.config.teacher.path == TINY:
            source = TINY
        if source is None:
            return None
        shipped = {TINY: facts_path(), GENERAL: general_facts_path()}
        return Knowledge(shipped.get(source, source))

    def scoring_probe(self) -> Probe:
        """Return the probe whose prompts heads are ranked on."""
        return with_prompt_format(self.plain_probe, self.prompt_format, self.tokenizer)

    @property
    def scoring_window(self) -> int:
        """Window that heads are ranked for: the student's, or a shorter one that keeps questions short."""
        return min(self.config.student.window, LONGEST_SCORED)

    def far_probe(self) -> Probe:
        """Return the probe for `attribute_heads`: its questions are out of reach of the windows."""
        scoring = self.config.scoring
        # A word has a token or more: the window never reaches the dictionary.
        distance = scoring.distance or self.scoring_window
        # Several questions about a dictionary lose alike: more dictionaries tell more.
        probe = replace(self.plain_probe, n_queries=scoring.n_queries or 1, distance=distance)
        return with_prompt_format(probe, self.prompt_format, self.tokenizer)

    @cached_property
    def evaluation_distance(self) -> int:
        """Words between dictionary and question in the evaluation's far reading, 0 for none."""
        asked = self.config.evaluation.distance
        if asked is not None:
            return asked
        # A word has a token or more: the window never reaches the dictionary.
        window = self.config.student.window
        try:
            self.check_far_questions(window)
        except CannotAnswer as error:
            log.info("dictionaries beyond the window are not evaluated: %s", error)
            return 0
        return window

    def check_far_questions(self, distance: int) -> None:
        """Raise CannotAnswer unless the teacher can read dictionaries so many words before their question."""
        options = self.config.evaluation
        by_size = far_examples(
            options.n_pairs,
            distance,
            self.tokenizer,
            n_examples=options.n_examples,
            seed=self.config.seed + PROBE_SEEDS["evaluation"],
            prompt_format=self.prompt_format,
        )
        limit = longest_context(self.config_and_tokenizer[0]) or sys.maxsize
        for examples in by_size.values():
            check_answerable(examples, self.tokenizer, limit)

    @property
    def plain_probe(self) -> KVRetrieval:
        scoring = self.config.scoring
        seed = self.config.seed + PROBE_SEEDS["scoring"]
        n_queries = scoring.n_queries
        if n_queries is None:
            # Restoration compares log-probabilities, which differ more between dictionaries than within.
            is_ranking = not self.config.plan.restores
            n_queries = default_questions([scoring.n_pairs]) if is_ranking else 1
        return KVRetrieval(scoring.n_pairs, seed=seed, n_queries=n_queries)

    @property
    def prompt_format(self) -> str:
        """Format of all prompts."""
        return self.config.scoring.prompt_format


def load_configured(options: TeacherConfig) -> TeacherAndTokenizer:
    """Load the teacher that a config describes, and its tokenizer."""
    return load_teacher(
        options.path,
        dtype=options.dtype,
        revision=options.revision,
        attn_implementation=options.attn_implementation,
        allow_bin=options.allow_bin,
    )


def teacher_without_weights(options: TeacherConfig) -> PreTrainedModel:
    """Build the teacher on the meta device, without weights. Raises ValueError if transformers cannot."""
    config = load_config(options.path, options.revision)
    return empty_teacher(config, options.path, DTYPES[options.dtype], options.attn_implementation)
