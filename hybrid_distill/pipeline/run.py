"""One run from start to finish: score, plan, build, train, evaluate, export.

Every step writes its result to the run directory (`RunPaths`) and is skipped if the result exists, so an interrupted
run resumes where it stopped. A run with a ``restoration`` plan also has ``aligned/``, a separate run that aligned every
head.
"""

from __future__ import annotations

import dataclasses
import logging
import shutil
from functools import cache
from pathlib import Path

from torch import nn
from transformers import PreTrainedModel

from ..config import PlanConfig, RunConfig, to_json
from ..data import Pins, write_pins
from ..distributed import (
    agree_on,
    alone_in,
    computes_on_gpu,
    connect,
    device_summary,
    from_main,
    on_main_process,
    own_device,
)
from ..evaluation.evaluate import EvalResult, evaluate
from ..io import Record, write_json, write_text
from ..kernels import check_kernels
from ..model.kernel_choice import check_implementation
from ..model.modeling_hybrid import HybridForCausalLM
from ..plan import HeadPlan
from ..probes import queries_of
from ..probes.checks import CannotAnswer
from ..progress import Phase
from ..scoring import HeadScores, attribute_heads, score_heads
from ..scoring.attribution import N_EXAMPLES as ATTRIBUTED
from ..scoring.defaults import default_prompts
from ..scoring.restoration import greedy_restoration
from ..student.build import check_plan, check_teacher_rows
from ..student.confined import confined
from ..student.dtypes import settle
from ..student.sharing import unshare_weights
from ..teacher import fingerprint, float16_note
from ..train.config import Align, StageConfig
from ..train.loop import train_stage
from ..train.result import StageManifest
from ..train.stages import make_stage
from ..train.tracking import TrackedRun, log_figures
from ..validation import first_line
from ..vocabulary import vocabulary_size
from .building import build_and_save, build_requirements, new_student
from .built import build_hash, load_built
from .checks import check_sizes, checks_of
from .exporting import export_once
from .finished import last_stage, trained_student
from .folder import obsolete_results
from .inputs import PROBE_SEEDS, RunInputs
from .paths import RunPaths
from .planning import make_plan

log = logging.getLogger(__name__)


def run(config: RunConfig) -> Path:
    """Run all steps, from the config to the export; return the run directory. Resumes an interrupted run.

    Raises ValueError for a config that cannot be run, InUse while another process writes to the folder, and Interrupted
    on SIGINT, SIGTERM, SIGUSR1 or SIGHUP, after saving.
    """
    inputs = RunInputs(config)
    announce()
    with alone_in(config.out):
        prepare(inputs)
        plan = choose_heads(inputs)
        student = train(inputs, plan)
        evaluate_run(inputs, student)
        if config.control and not config.is_control:
            run_control(inputs)
        if config.export:
            export_once(inputs, student, plan)
    return config.out


@cache
def announce() -> None:
    """Log what this process computes on, and with which kernels, once: the first line of every run."""
    log.info("%s", device_summary(kernels_in_use()))


def kernels_in_use() -> str:
    """Describe which implementation of the recurrent heads ``auto`` stands for on this process's device."""
    if not computes_on_gpu():
        return "kernels of torch"
    try:
        check_implementation("triton")
    except RuntimeError as error:
        return f"kernels of torch ({first_line(error)})"
    return "kernels in Triton"


def is_there(path: Path) -> bool:
    """Check on the main process whether a result exists. It may be ahead of the others, so all use its answer."""
    # It alone looks: another machine would remember that the file is missing, and read it just after it is written.
    return from_main(path.exists)


def move_to_own_device(*models: nn.Module) -> None:
    """Move models to this process's device: a resumed run has loaded them on the CPU."""
    for model in models:
        # By nn.Module: transformers' own to() is decorated, which hides its type.
        nn.Module.to(model, connect().device)


# Prepare


def prepare(inputs: RunInputs) -> None:
    """Create the directory, or check that it holds this run. Check processes and all input before anything is
    written or computed, then remove the `obsolete_results`.

    Raises ValueError naming the fields that differ, or the problem with the input.
    """
    announce()
    config = inputs.config
    check_processes(config)
    # Listed now, deleted by `begin_folder`: refused input must not cost the results of an earlier run.
    obsolete = obsolete_results(config)
    for check in checks_of(inputs):
        check()
    trains = config.plan.selection != "all" or config.is_control
    pins: Pins = {}
    if trains or config.fits_to_text:
        # Here and not in `begin_folder`: all processes take part in asking for them.
        pins = inputs.pins
    if trains:
        tokenize_rows(inputs, pins)
    on_main_process(lambda: begin_folder(inputs, pins, obsolete))


def check_processes(config: RunConfig) -> None:
    """Raise ValueError for kernels that this device cannot run, and for batches that these processes cannot share."""
    n_processes = connect().num_processes
    check_kernels(config.student.kernels, own_device(), "student.kernels")
    for stage in config.stages:
        stage.check_world(n_processes)


def tokenize_rows(inputs: RunInputs, pins: Pins) -> None:
    """Tokenize the rows of every stage: a local source may be broken anywhere."""
    check_sizes(inputs)
    # Written first: a start that is killed while it tokenizes resumes at the same commits.
    # With "never", `begin_folder` writes them, after it has deleted the results of the earlier run.
    if inputs.config.resume != "never":
        on_main_process(lambda: write_own_pins(inputs.paths, pins))
    for stage in inputs.config.stages:
        inputs.rows(stage)


def begin_folder(inputs: RunInputs, pins: Pins, obsolete: list[Path]) -> None:
    """Delete obsolete results, then write the config and the commits of the sources."""
    for path in obsolete:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    inputs.paths.out.mkdir(parents=True, exist_ok=True)
    write_json(inputs.paths.config, to_json(inputs.config))
    write_own_pins(inputs.paths, pins)


def write_own_pins(paths: RunPaths, pins: Pins) -> None:
    """Write the commits of the sources on the hub: a later start reads the same ones, and asks nobody."""
    if pins:
        write_pins(paths.sources, pins)


# Score


def score(inputs: RunInputs) -> HeadScores:
    """Return head scores from ``scoring.file`` or the run directory; otherwise measure and write them there."""
    options = inputs.config.scoring
    path = inputs.paths.scores
    if options.file is not None:
        scores = HeadScores.load(options.file)
        teacher_fingerprint = fingerprint(inputs.teacher)
        if options.other_weights:
            scores = scores.of_teacher(teacher_fingerprint)
        if scores.fingerprint != teacher_fingerprint:
            raise ValueError(
                f"{options.file} ranks the heads of another teacher ({scores.fingerprint or 'unknown'}); score this "
                "one, pass its own scores.json, or --scoring.other-weights if it is another copy of this model."
                + float16_note(inputs.teacher)
            )
        # Copied, so that the run's folder says alone which scores it used.
        on_main_process(lambda: scores.save(path))
        return scores
    if not is_there(path):
        measure_heads(inputs)
    return HeadScores.load(path)


def measure_heads(inputs: RunInputs) -> None:
    """Score the teacher's heads; all processes share the work."""
    # Otherwise `build_student` refuses the teacher, after hours of scoring.
    check_teacher_rows(inputs.teacher)
    move_to_own_device(inputs.teacher)
    scores = None
    if inputs.config.ranks_by_attribution:
        scores = attributed_scores(inputs)
    if scores is None:
        scores = ablated_scores(inputs)

    def save() -> None:
        scores.save(inputs.paths.scores)
        # After the scores are written: a process killed in between measures nothing twice.
        inputs.paths.partial_scores.unlink(missing_ok=True)
        inputs.paths.partial_attribution.unlink(missing_ok=True)

    on_main_process(save)


def ablated_scores(inputs: RunInputs) -> HeadScores:
    """Score heads by removing one at a time."""
    options = inputs.config.scoring
    probe = inputs.scoring_probe()
    return score_heads(
        inputs.teacher,
        inputs.tokenizer,
        probe,
        n_examples=options.n_examples or default_prompts(queries_of(probe)),
        batch_size=options.batch_size,
        control_texts=inputs.held_out_texts(options.n_control_texts),
        min_accuracy=options.min_accuracy,
        resume_path=inputs.paths.partial_scores,
    )


def attributed_scores(inputs: RunInputs) -> HeadScores | None:
    """Score heads by what the student's windows take from them.

    Returns None if the teacher cannot answer from that far and the method was not asked for.
    """
    options = inputs.config.scoring
    student = confined(inputs.teacher, inputs.scoring_window, inputs.config.student.sinks)
    try:
        return attribute_heads(
            student,
            inputs.teacher,
            inputs.tokenizer,
            inputs.far_probe(),
            n_examples=options.n_examples or ATTRIBUTED,
            batch_size=options.batch_size,
            min_accuracy=options.min_accuracy,
            resume_path=inputs.paths.partial_attribution,
        )
    except CannotAnswer as error:
        if options.method == "attribution":
            raise
        log.info("heads are ranked by ablation, not by what windows take from them: %s", error)
        return None


# Plan


def choose_heads(inputs: RunInputs) -> HeadPlan:
    """Return the plan in the run directory, or make the one that the config describes."""
    path = inputs.paths.plan
    options = inputs.config.plan
    is_made = is_there(path)
    if is_made:
        plan = HeadPlan.load(path)
    elif options.restores:
        plan = restoration_plan(inputs, options.k)
    else:
        scores = score(inputs) if options.selection == "top" else None
        plan = make_plan(options, inputs.teacher, scores)
        if not plan.teacher:
            plan = dataclasses.replace(plan, teacher=fingerprint(inputs.teacher))
    check_plan(plan, inputs.teacher)
    if not is_made:
        on_main_process(lambda: plan.save(path))
    return plan


def restoration_plan(inputs: RunInputs, k: int) -> HeadPlan:
    """Return a plan of the ``k`` heads that recover most in the aligned student without attention."""
    HeadPlan.check_k(inputs.teacher, k)
    path = inputs.paths.restoration_plan(k)
    if not is_there(path):
        student, none_kept = trained_student(align_all_heads(inputs))
        move_to_own_device(student, inputs.teacher)
        student.set_ssm_implementation(inputs.config.student.kernels)
        partial_path = inputs.paths.partial_restoration(k)
        heads = greedy_restoration(
            student.eval(),
            inputs.teacher,
            inputs.tokenizer,
            inputs.scoring_probe(),
            k,
            n_examples=inputs.config.scoring.restoration_examples,
            resume_path=partial_path,
        )

        def save() -> None:
            HeadPlan.from_pairs(none_kept, heads).save(path)
            # After the plan is written: a process killed in between measures nothing twice.
            partial_path.unlink(missing_ok=True)

        on_main_process(save)
    return HeadPlan.load(path)


def align_all_heads(inputs: RunInputs) -> RunInputs:
    """Return the run in ``aligned/`` that aligns every head, independent of the final plan; completed on first use."""
    if inputs.aligned is not None:
        return inputs.aligned
    config = alignment_of_all_heads(inputs.config, inputs.paths.aligned.out)
    aligned = RunInputs(config, inputs.teacher_and_tokenizer, inputs.pins)
    prepare(aligned)
    folders = aligned.paths.stage_folders(config.stages)
    if not agree_on(lambda: all(StageManifest.read(folder) for folder in folders)):
        train(aligned, choose_heads(aligned))
    inputs.aligned = aligned
    return aligned


def alignment_of_all_heads(config: RunConfig, out: Path) -> RunConfig:
    """Return the run in ``out`` that aligns every head of a run. Raises ValueError for stages that cannot."""
    stages = []
    for stage in config.head_stages:
        if isinstance(stage, Align):
            # Only this target trains heads that can be swapped one by one.
            stage = dataclasses.replace(stage, target="head")
        stages.append(stage)
    plan = PlanConfig("none", k=0)
    return dataclasses.replace(config, out=out, plan=plan, stages=tuple(stages), control=False)


# Build


def build(inputs: RunInputs, plan: HeadPlan) -> HybridForCausalLM:
    """Return the student for its first stage. The main process builds and saves it once (`built`); all other
    processes and all later starts load it. build.json lists the source of every tensor."""
    move_to_own_device(inputs.teacher)
    config = inputs.config
    requirements = build_requirements(inputs, plan)
    if agreed_build_hash(inputs, requirements) is None:
        # All processes align together, and all open the rows, before one of them builds alone.
        aligned = config.student.aligned
        if config.plan.restores:
            aligned = last_stage(align_all_heads(inputs).paths)
        rows = None
        if aligned is None and config.fits_to_text:
            rows = inputs.calibration_rows()
        # A list, because a model cannot travel between processes as the result of `from_main`.
        built: list[HybridForCausalLM] = []
        on_main_process(
            lambda: built.append(build_and_save(inputs, plan, aligned, rows, requirements))
        )
        if built:
            return built[0]
    student, _ = new_student(
        inputs, plan, recurrent=load_built(inputs.paths), kernels=config.student.kernels
    )
    return student


def agreed_build_hash(inputs: RunInputs, requirements: Record) -> str | None:
    """Return the `build_hash` that the main process reads; None if no student was built for these requirements."""
    return from_main(lambda: build_hash(inputs.paths, requirements))


# Train


def train(inputs: RunInputs, plan: HeadPlan) -> HybridForCausalLM:
    """Build the student and train it stage by stage; finished stages are loaded instead.

    The result has the teacher's dtype (`settle`); the float32 weights are in the last stage's folder.
    """
    student = build(inputs, plan)
    if plan.keeps_all and not inputs.config.is_control:
        log.info("every head is kept: the student is the teacher, and there is nothing to train")
        return student
    # By hash: a checkpoint is good only for the very weights that its stage started from.
    parent = agreed_build_hash(inputs, build_requirements(inputs, plan)) or ""
    steps = 0
    for stage, folder in zip(inputs.stages, inputs.paths.stage_folders(inputs.stages)):
        manifest = _train_stage(inputs, student, stage, folder, parent, steps)
        parent = manifest.weights
        steps += stage.steps
    unshare_weights(student)
    return settle(student)


def _train_stage(
    inputs: RunInputs,
    student: HybridForCausalLM,
    stage: StageConfig,
    folder: Path,
    parent: str,
    steps_before: int,
) -> StageManifest:
    """Train or load one stage. ``parent`` is the hash of the weights that it must start from."""
    config = inputs.config
    rows = inputs.rows(stage)
    teacher = _only_teacher_in_memory(inputs, student, stage)
    return train_stage(
        make_stage(stage, student, teacher, vocab_size=vocabulary_size(inputs.tokenizer)),
        rows,
        folder,
        seed=config.seed,
        parent_hash=parent,
        resume=config.resume,
        trackers=config.trackers,
        tracked=_tracked(inputs, steps_before),
        profile=config.profile,
        teacher_sharding=config.teacher_sharding,
        collective_timeout=config.collective_timeout,
    )


def _only_teacher_in_memory(
    inputs: RunInputs, student: HybridForCausalLM, stage: StageConfig
) -> PreTrainedModel | None:
    """Return the stage's teacher, and make room for it; None for a stage that reads stored logits."""
    if stage.cached_logits is not None:
        # Weights that are shared would keep the teacher in memory.
        unshare_weights(student)
        inputs.release_teacher()
        return None
    teacher = inputs.stage_teacher(stage)
    if teacher is not inputs.teacher:
        # Frees the GPU's memory for the stage's own teacher; later steps move this one back.
        inputs.teacher.cpu()
    return teacher


def _tracked(inputs: RunInputs, first_step: int) -> TrackedRun:
    config = inputs.config
    return TrackedRun(config.out, config.name, config.group, first_step, to_json(config))


# Evaluate


def evaluate_run(
    inputs: RunInputs, student: HybridForCausalLM, *, again: bool = False
) -> EvalResult:
    """Measure teacher and student; write both evaluations into the run directory.

    ``again`` repeats existing measurements. New results also go to the trackers.
    """
    evaluate_teacher(inputs, again=again)
    path = inputs.paths.evaluation
    if again or not _is_measured(inputs, student):
        _measure_and_save(inputs, student, path)
        if inputs.config.trackers:
            steps = sum(stage.steps for stage in inputs.stages)
            figures = EvalResult.load(path).figures()
            log_figures(inputs.config.trackers, _tracked(inputs, steps), figures)
    return EvalResult.load(path)


def _is_measured(inputs: RunInputs, student: HybridForCausalLM) -> bool:
    """Check on the main process whether the student's evaluation is there, and of this very student: a stage whose
    folder was deleted has trained another one."""
    path = inputs.paths.evaluation
    replaces_heads = student.mixers_with("recurrence") or student.mixers_with("window")

    def is_of_student() -> bool:
        if not path.exists():
            return False
        if not replaces_heads and not inputs.config.is_control:
            # `run_beside` copies the teacher's figures.
            return True
        return EvalResult.load(path).provenance.get("fingerprint") == fingerprint(student)

    return from_main(is_of_student)


def evaluate_teacher(inputs: RunInputs, *, again: bool = False) -> EvalResult:
    """Measure the teacher, as `evaluate_run` does."""
    path = inputs.paths.teacher_evaluation
    if again or not is_there(path):
        _measure_and_save(inputs, inputs.teacher, path)
    return EvalResult.load(path)


def _measure_and_save(inputs: RunInputs, model: PreTrainedModel, path: Path) -> None:
    """Measure a model on the main process and save its evaluation; the others wait for it."""

    def measure() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _measure(inputs, model).save(path)

    on_main_process(measure)


def _measure(inputs: RunInputs, model: PreTrainedModel) -> EvalResult:
    options = inputs.config.evaluation
    move_to_own_device(model, inputs.teacher)
    role = "teacher" if model is inputs.teacher else "student"
    with Phase(f"measuring the {role}"):
        return evaluate(
            model,
            inputs.tokenizer,
            teacher=inputs.teacher,
            n_pairs=options.n_pairs,
            n_examples=options.n_examples,
            distance=inputs.evaluation_distance,
            prompt_format=inputs.prompt_format,
            seed=inputs.config.seed + PROBE_SEEDS["evaluation"],
            held_out_texts=inputs.held_out_texts(options.n_texts),
            knowledge=inputs.knowledge(),
            batch_size=options.batch_size,
            progress=True,
        )


# Runs beside one another


def run_control(inputs: RunInputs) -> None:
    """Train and measure the teacher itself in ``control/``; a finished control is kept."""
    log.info("control: the teacher itself, through the same stages")
    config = dataclasses.replace(
        inputs.config,
        out=inputs.paths.control.out,
        plan=PlanConfig("all", k=0),
        cache=None,
    )
    run_beside(inputs, config)


def run_beside(shared: RunInputs, config: RunConfig) -> None:
    """Train and measure a student in a separate run that copies the teacher's evaluation from ``shared``.

    If every head is kept, the student is the teacher and has the same figures.
    """
    inputs = RunInputs(config, shared.teacher_and_tokenizer, shared.pins)
    prepare(inputs)
    plan = choose_heads(inputs)

    def copy() -> None:
        result = shared.paths.teacher_evaluation.read_text()
        inputs.paths.teacher_evaluation.parent.mkdir(exist_ok=True)
        # The same teacher and questions: measuring it again would take as long as the student.
        write_text(inputs.paths.teacher_evaluation, result)
        if plan.keeps_all and not config.is_control:
            write_text(inputs.paths.evaluation, result)

    on_main_process(copy)
    evaluate_run(inputs, train(inputs, plan))
