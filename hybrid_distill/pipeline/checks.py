"""Checks of a run's input, before anything is computed.

They raise ValueError for input that would stop a run. They look at names, headers and shapes, not at weights.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from transformers import PretrainedConfig, PreTrainedModel

from ..config import PlanConfig, StudentConfig
from ..data import check_launch, check_same_vocabulary, check_sources
from ..distributed import chosen_dtype
from ..model.documents import check_packs
from ..plan import HeadPlan
from ..probes.checks import CannotAnswer, check_answerable, check_questions
from ..probes.kv_retrieval import KVRetrieval
from ..probes.plain_text import text_rows
from ..probes.prompt_formats import PLAIN, with_prompt_format
from ..student.build import checked_sites, empty_student
from ..student.family_check import check_family
from ..student.teachers import check_teacher
from ..teacher import DTYPES, TINY, check_row_length, longest_context
from ..train.config import Align, AlignMatrix, StageConfig
from ..train.loop import check_precision
from ..train.parallel.choice import check_launched
from ..train.result import StageManifest
from ..train.stages import make_stage
from ..train.tracking import check_trackers
from .budget import check_cache
from .built import built_for
from .inputs import RunInputs
from .paths import run_of_stage
from .planning import placeholder_plan, plan_before_ranking

log = logging.getLogger(__name__)


def checks_of(inputs: RunInputs) -> list[Callable[[], object]]:
    """Return all checks, in the order in which they are useful to a reader of their errors."""
    return [
        partial(check_trackers, inputs.config.trackers),
        partial(check_teachers, inputs),
        partial(check_data, inputs),
        partial(check_evaluation, inputs),
        partial(check_student, inputs),
        partial(check_stages, inputs),
    ]


def check_teachers(inputs: RunInputs) -> None:
    """Check that the run's teacher and every stage's can be one, and that their tokenizers fit their embeddings."""
    teacher_config, tokenizer = inputs.config_and_tokenizer
    # Flags name packable attention only; a given teacher or a config.json may name any.
    check_packs(teacher_config._attn_implementation)
    # A model in memory may be of a class that only its owner can build; `check_student` looks at its heads.
    check_teacher(
        teacher_config,
        tokenizer,
        name=inputs.config.teacher.path,
        heads=inputs.given_teacher is None,
    )
    for stage in inputs.config.stages:
        if inputs.has_own_teacher(stage):
            check_stage_teacher(inputs, stage)


def check_stage_teacher(inputs: RunInputs, stage: StageConfig) -> None:
    """Check that the teacher of one stage can be one, and that its tokenizer fits its embedding."""
    teacher_config, tokenizer = inputs.stage_config_and_tokenizer(stage)
    check_teacher(teacher_config, tokenizer, name=inputs.config.teacher_of(stage).path)


def check_data(inputs: RunInputs) -> None:
    """Check sources, stored logits, vocabularies, and that rows fit into the teachers' contexts."""
    if inputs.config.fits_to_text:
        check_sources(inputs.config.data, inputs.tokenizer)
    for stage in inputs.config.stages:
        _, tokenizer = inputs.stage_config_and_tokenizer(stage)
        if inputs.has_own_teacher(stage):
            check_same_vocabulary(inputs.tokenizer, tokenizer)
        check_sources(inputs.config.data_of(stage), tokenizer)
        # `RunInputs.rows` compares the teacher's weights and the text too.
        inputs.stored_logits(stage, tokenizer)
        check_contexts(inputs, stage)
        _check_window(inputs, stage)


def check_contexts(inputs: RunInputs, stage: StageConfig) -> None:
    """Check that a stage's rows fit into the contexts of its teacher and of the run's, whose student reads as far."""
    stage_config, _ = inputs.stage_config_and_tokenizer(stage)
    _check_context(inputs, stage, stage_config, inputs.config.teacher_of(stage).path)
    run_config, _ = inputs.config_and_tokenizer
    _check_context(inputs, stage, run_config, inputs.config.teacher.path)


def _check_context(
    inputs: RunInputs, stage: StageConfig, teacher_config: PretrainedConfig, teacher: str
) -> None:
    """Raise ValueError if a row of the stage, or what it generates, is longer than a teacher's context."""
    longest = longest_context(teacher_config)
    if longest is not None and stage.tokens_generated > longest:
        raise ValueError(
            f"{stage.name} reads prompts and writes {stage.tokens_generated} tokens in all, but the context of the "
            f"teacher {teacher!r} is {longest} tokens; use a smaller "
            f"{stage.name}.new-tokens or {stage.name}.prompt-tokens."
        )
    option = "data.seq_len"
    if stage.data is not None:
        option = f"{stage.name}.data.seq_len"
    if stage.seq_len is not None:
        option = f"{stage.name}.seq_len"
    check_row_length(option, inputs.config.data_of(stage).seq_len, teacher_config, teacher)


def _check_window(inputs: RunInputs, stage: StageConfig) -> None:
    """Raise ValueError if no row of the stage is as long as the window: its recurrence would have nothing to learn."""
    window = inputs.config.student.window
    seq_len = inputs.config.data_of(stage).seq_len
    if window > seq_len:
        raise ValueError(
            f"student.window is {window}, longer than the rows of {stage.name}, {seq_len} tokens; pass at most "
            f"{seq_len}, or longer rows (data.seq_len)."
        )


def check_sizes(inputs: RunInputs) -> None:
    """Check that no process would wait for hours until the main one has tokenized a source."""
    for stage in inputs.config.stages:
        _, tokenizer = inputs.stage_config_and_tokenizer(stage)
        check_launch(inputs.config.data_of(stage), tokenizer, pins=inputs.pins)


def check_evaluation(inputs: RunInputs) -> None:
    """Check evaluation texts and questions now, not after training."""
    options = inputs.config.evaluation
    seed = inputs.config.seed
    if options.texts != TINY:
        # Two tokens: enough to find an empty text, without tokenizing all of them.
        text_rows(inputs.tokenizer, inputs.held_out_texts(options.n_texts), max_tokens=2)
    limit = longest_context(inputs.config_and_tokenizer[0]) or sys.maxsize
    knowledge = inputs.knowledge()
    if knowledge is not None:
        check_questions(knowledge.examples(), inputs.tokenizer, limit)
    probes = [KVRetrieval(n_pairs, seed=seed) for n_pairs in options.n_pairs]
    if inputs.config.probes_heads:
        probes.insert(0, inputs.plain_probe)
    for probe in probes:
        probe.examples(1)
    if options.distance:
        inputs.check_far_questions(options.distance)
    for probe in probes:
        question = with_prompt_format(probe, inputs.prompt_format, inputs.tokenizer).examples(1)
        try:
            check_answerable(question, inputs.tokenizer, limit)
        except CannotAnswer as error:
            if inputs.prompt_format != PLAIN:
                raise
            # A run without scoring, on a teacher that cannot retrieve, is worth its figures of text.
            log.warning("figures of dictionaries will mean nothing: %s", error)


_checked_families: set[tuple[str, str, str, int]] = set()


def _check_family_once(teacher: PreTrainedModel, recurrence: str, window: int) -> None:
    """Check the teacher's family, else a new transformers would be found out after hours of scoring.

    Once in a process: a sweep runs hundreds of cells with one teacher.
    """
    attention = str(teacher.config._attn_implementation)
    family = (teacher.config.to_json_string(), attention, recurrence, window)
    if family not in _checked_families:
        check_family(teacher, recurrence, window)
        _checked_families.add(family)


def _plan_of(
    inputs: RunInputs, teacher: PreTrainedModel, plan: PlanConfig | None = None
) -> HeadPlan:
    """Return the heads to keep; before they are ranked, as many others."""
    if plan is None and inputs.config.resume != "never" and inputs.paths.plan.exists():
        return HeadPlan.load(inputs.paths.plan)
    head_plan = plan_before_ranking(inputs, teacher, plan)
    if head_plan is None:
        return placeholder_plan(teacher, plan or inputs.config.plan)
    return head_plan


def check_stages(inputs: RunInputs) -> None:
    """Check that every stage has something to train, and that its teacher and the launch suit it.

    A stage is made for it, of models without weights: the last one would fail after all others have trained.
    """
    teacher = inputs.given_or_empty_teacher()
    plan = _plan_of(inputs, teacher)
    if plan.keeps_all and not inputs.config.is_control:
        return
    for stage in inputs.config.stages:
        # A new one for each stage: making a stage replaces a student's parameters.
        student = empty_student(teacher, plan, **inputs.config.student.head_options)
        trial_stage = make_stage(stage, student, teacher)
        dtype = student.dtype
        if trial_stage.teachers:
            dtype = _dtype_of_teacher(inputs, stage)
        check_precision(stage, dtype)
        check_launched(trial_stage)


def _dtype_of_teacher(inputs: RunInputs, stage: StageConfig) -> torch.dtype:
    """Return the dtype of the teacher that a stage distills from."""
    if inputs.given_teacher is not None and not inputs.has_own_teacher(stage):
        return inputs.given_teacher[0].dtype
    return DTYPES[chosen_dtype(inputs.config.teacher_of(stage).dtype)]


def check_student(inputs: RunInputs, plan: PlanConfig | None = None) -> None:
    """Check that the teacher, this plan (default: the config's) and the config's options make a valid student."""
    options = inputs.config.student
    teacher = inputs.given_or_empty_teacher()
    head_plan = _plan_of(inputs, teacher, plan)
    check_cache(inputs.config, teacher.config, head_plan)
    checked_sites(teacher, head_plan, options.init)
    # Built without weights, for the checks of the config and of every layer's shapes.
    empty_student(teacher, head_plan, **options.head_options)
    _check_family_once(teacher, options.recurrence, options.window)
    if options.aligned is not None:
        _check_alignment(options.aligned, options)


def _check_alignment(folder: Path, options: StudentConfig) -> None:
    """Raise ValueError if the heads of the stage in ``folder`` would not compute what they were aligned to."""
    manifest = StageManifest.read(folder)
    fix = "pass a finished stage `align`, with target head, of a run without kept heads."
    if manifest is None:
        raise ValueError(f"student.aligned is {folder}, which has no finished stage; {fix}")
    stage = manifest.config["stage"]
    target = manifest.config.get("target")
    # Only these train each head alone, from the teacher's inputs, against its own target.
    is_by_head = stage == AlignMatrix.__name__ or (stage == Align.__name__ and target == "head")
    if not is_by_head:
        raise ValueError(
            f"student.aligned is {folder}, a stage {stage} with target {target}; {fix}"
        )
    requirements = built_for(run_of_stage(folder))
    if requirements is None:
        raise ValueError(f"student.aligned is {folder}, which is not in the folder of a run; {fix}")
    if requirements["plan"]["kept"]:
        raise ValueError(f"student.aligned is {folder}, of a student that keeps heads; {fix}")
    for name in ("window", "sinks"):
        aligned = requirements["student"][name]
        own = getattr(options, name)
        # Beside a window, recurrent heads learn only what it leaves over.
        if aligned != own:
            raise ValueError(
                f"student.aligned is {folder}, whose heads were aligned with {name} {aligned}, and student.{name} is "
                f"{own}; pass --student.{name} {aligned}, or another alignment."
            )
