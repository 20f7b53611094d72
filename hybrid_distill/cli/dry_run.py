"""Dry run: launch command, plan, sizes and memory of a run, without starting it."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import pandas as pd
from transformers import PreTrainedModel

from ..config import RunConfig, to_json
from ..data import preparations
from ..lab.memory.plan import GB, REDUCE_BUCKET, STRATEGIES, StageShape, memory_plan
from ..lab.memory.timing import training_time
from ..lab.reporting import text_table
from ..model import HybridForCausalLM, layer_windows
from ..pipeline import RunInputs, RunPaths
from ..pipeline.checks import check_teachers, checks_of
from ..pipeline.folder import outdated
from ..pipeline.inputs import shape_of_teacher
from ..pipeline.planning import known_plan
from ..plan import HeadPlan, cache_bytes
from ..student.build import empty_student
from ..teacher import head_dim_of, load_config
from ..train.config import StageConfig
from ..validation import first_line

MB = 1e6
LENGTHS = (128, 2048, 4096)
HEADROOM = 0.9
"""Share of a GPU's memory that a run may plan to use; CUDA, NCCL and fragmentation take the rest."""
LAUNCH = {
    "ddp": "launch/ddp.yaml",
    "zero1": "launch/zero2.yaml --zero_stage 1",
    "zero2": "launch/zero2.yaml",
    "zero3": "launch/zero3.yaml",
    "fsdp2": "launch/fsdp2.yaml",
}
COMMUNICATION = f"""
  communication: gradients and weights on their way; under ZeRO {4 * REDUCE_BUCKET / GB:g} GB (reduce_bucket_size)."""


def describe(config: RunConfig, command: str = "RECIPE.py") -> str:
    """Describe the launch command, the sizes of each stage and, if asked for, the resolved config.

    ``command`` is the recipe and its flags, as passed to a launcher. Of the teacher, only the config is read; if it
    cannot be, one line reports that. Raises ValueError, with all reasons, for a run that would not start.
    """
    record = [json.dumps(to_json(config), indent=2)] if config.show_config else []
    names = ", ".join(config.stage_names)
    heading = f"{config.name}: {config.teacher.path} as a hybrid, stages {names}; into {config.out}"
    try:
        load_config(config.teacher.path, config.teacher.revision)
    except (OSError, ValueError) as error:
        missing = f"No parameter counts: --teacher.path {first_line(error)} (--teacher tiny is the embedded one.)"
        return "\n\n".join([*record, heading, missing])
    if found := list(_problems(config)):
        raise ValueError(f"the run would not start: {' '.join(found)}")
    teacher = shape_of_teacher(config.teacher)
    plan, source = _plan(config, teacher)
    stages = [_plan_stage(config, stage, plan) for stage in config.stages]
    answer = "\n".join([heading, *_first(config), _launch(config, stages, command), source])
    time = training_time(config, plan, teacher.num_parameters())
    return "\n\n".join([answer, _sizes(config, teacher, plan, stages), *([time] if time else []), *record])


def _first(config: RunConfig) -> list[str]:
    """Return the commands to run before a launch of several processes, which would refuse to tokenize so much."""
    if config.gpus == 1:
        return []
    commands = preparations(config.data, config.teacher.path)
    if not commands:
        return []
    shown = textwrap.indent("\n".join(commands), "  ")
    return [f"First, once, without GPUs; then launch with these folders as --data.sources:\n{shown}"]


def _problems(config: RunConfig) -> Iterator[str]:
    """Yield reasons why the run would not start, a sentence each; reads names, headers and head scores, not weights."""
    inputs = RunInputs(config)
    try:
        check_teachers(inputs)
    except (OSError, ValueError) as error:  # the other checks would describe the same fault in their own words
        yield str(error).strip()
        return
    for check in (partial(outdated, config), *checks_of(inputs)):
        try:
            check()
        except (OSError, ValueError) as error:
            yield str(error).strip()
    for stage in config.stages:
        if stage.batch_size % config.gpus:
            yield f"{stage.name}: {stage.batch_size} rows of a step cannot be shared by {config.gpus} GPUs."


def _plan(config: RunConfig, teacher: PreTrainedModel) -> tuple[HeadPlan, str]:
    """Return (plan, its description); if heads are not ranked yet, the plan has as many heads, evenly spread."""
    path = RunPaths(config.out).plan
    options = config.plan
    origin = f"top {options.k} of {config.scoring.file}" if options.selection == "top" else options.selection
    is_made = path.exists() and config.resume != "never"
    known = HeadPlan.load(path) if is_made else known_plan(RunInputs(config), teacher)
    if known is not None:
        layers = {layer: ", ".join(map(str, known.kept_in(layer))) for layer in range(known.n_layers)}
        lines = [f"  layer {layer}: {heads}" for layer, heads in layers.items() if heads]
        return known, "\n".join([f"Plan ({path if is_made else origin}):", *lines])
    heads = HeadPlan.all(teacher).kept
    plan = HeadPlan.from_pairs(teacher, [heads[i * len(heads) // options.k] for i in range(options.k)])
    return plan, "No plan yet: heads are ranked when the run starts. Sizes below are for as many heads, evenly spread."


class _PlannedStage(NamedTuple):
    """Bytes of a stage, parts x strategies: as configured, and with the opposite choice of gradient checkpointing."""

    config: StageConfig
    heading: str
    own: pd.DataFrame
    others: pd.DataFrame

    def best(self, strategy: str, budget: float) -> float | None:
        """Return the total to recommend, None if none fits; requested gradient checkpointing stays on."""
        choices = [self.own] if self.config.gradient_checkpointing else [self.own, self.others]
        totals = (choice[strategy].sum() for choice in choices if strategy in choice)
        return next((total for total in totals if total <= budget), None)


def _plan_stage(config: RunConfig, stage: StageConfig, plan: HeadPlan) -> _PlannedStage:
    other = config.teacher_of(stage)
    seq_len = config.data_of(stage).seq_len
    model = shape_of_teacher(config.teacher)
    student = _student(config, model, plan)
    shape = StageShape(stage, student, model if other == config.teacher else shape_of_teacher(other))
    rows = stage.batch_size // config.gpus
    micro_batch = min(stage.micro_batch_size, rows)
    strategies = STRATEGIES if config.gpus > 1 else STRATEGIES[:1]
    length = max(seq_len, getattr(stage, "prompt_tokens", 0) + getattr(stage, "new_tokens", 0))
    plan_for = partial(
        memory_plan, shape, world=config.gpus, micro_batch=micro_batch, seq_len=length,
        micro_batches=-(-rows // micro_batch), teacher_sharding=config.teacher_sharding,
    )  # fmt: skip
    names = [name for name in strategies if shape.shardable or name not in ("zero3", "fsdp2")]
    own, others = (
        pd.DataFrame({name: plan_for(strategy=name, gradient_checkpointing=checkpoints) for name in names})
        for checkpoints in (stage.gradient_checkpointing, not stage.gradient_checkpointing)
    )
    segments = getattr(stage, "segment_len", None)
    words = [f"  {stage.name}: micro-batches of {micro_batch} x {length:,} tokens", stage.precision]
    words += [f"segments of {segments:,}"] if segments else []
    words += ["gradient checkpointing"] if stage.gradient_checkpointing else []
    extent = f"{stage.steps:,} steps, {stage.steps * stage.batch_size * seq_len:,} tokens in all"
    return _PlannedStage(stage, f"{', '.join(words)}; {extent}", own, others)


def _student(config: RunConfig, teacher: PreTrainedModel, plan: HeadPlan) -> HybridForCausalLM:
    return empty_student(teacher, plan, **config.student.head_options)


def _launch(config: RunConfig, stages: list[_PlannedStage], command: str) -> str:
    """Return one launch command under which every stage fits, or advice on what to change."""
    budget = HEADROOM * config.gpu_memory * GB
    for strategy in STRATEGIES:
        totals = [total for stage in stages if (total := stage.best(strategy, budget))]
        if len(totals) == len(stages):
            break
    else:
        least = {stage.config.name: min(stage.own.sum().min(), stage.others.sum().min()) for stage in stages}
        needs = ", ".join(f"{name} {_size(total)}" for name, total in least.items())
        return (
            f"Cannot be launched: no strategy fits every stage in {_size(budget)}; they need at least: {needs}. "
            "Pass smaller micro-batches, more --gpus, or GPUs with more memory (--gpu-memory)."
        )
    changed = [stage.config.name for stage, total in zip(stages, totals) if total != stage.own[strategy].sum()]
    flags = "".join(f" --{name.replace('_', '-')}.gradient-checkpointing" for name in changed)
    needed = f"needs {_size(max(totals))}"
    if config.gpus == 1:
        return f"Launch ({needed} while training): hybrid-distill run {command}{flags}"
    launch = f"accelerate launch --config_file {LAUNCH[strategy]} --num_processes {config.gpus} -m hybrid_distill run"
    where = f"each of {config.gpus} GPUs of {config.gpu_memory:g} GB"
    return f"Launch ({strategy} {needed} of {where}): {launch} {command}{flags}"


def _size(n_bytes: float) -> str:
    return f"{n_bytes / GB:,.1f} GB" if n_bytes >= GB else f"{n_bytes / MB:,.0f} MB"


def _sizes(config: RunConfig, teacher: PreTrainedModel, plan: HeadPlan, stages: list[_PlannedStage]) -> str:
    student = _student(config, teacher, plan)
    n_mixers = sum(p.numel() for mixer in student.mixers() if mixer.ssm for p in mixer.ssm.parameters())
    cache = partial(
        cache_bytes,
        head_dim=head_dim_of(teacher.config),
        d_state=config.student.d_state,
        conv_width=config.student.conv_width,
        window=config.student.window,
        sinks=config.student.sinks,
        windows=layer_windows(teacher.config),
    )
    caches = (
        f"{name} {' / '.join(f'{cache(kept, length=length).total / MB:.2f}' for length in LENGTHS)}"
        for name, kept in {"teacher": HeadPlan.all(plan), "student": plan}.items()
    )
    process = "the process" if config.gpus == 1 else f"each of {config.gpus} processes"
    lines = [
        f"Parameters: teacher {teacher.num_parameters():,}; student {student.num_parameters():,}, of them {n_mixers:,} "
        "in recurrent heads",
        f"Cache of one sequence at {' / '.join(map(str, LENGTHS))} tokens, MB in bf16 (states fp32): "
        f"{', '.join(caches)}",
        f"Memory of {process} while training (1 GB = 1e9 bytes):",
        *map(_table, stages),
    ]
    shows_communication = any(stage.own.loc["communication"].any() for stage in stages)
    return "\n".join([*lines, *([COMMUNICATION] if shows_communication else [])])


def _table(stage: _PlannedStage) -> str:
    """Format a table of parts x strategies."""
    own, total = stage.own[stage.own.any(axis=1)], stage.own.sum()
    unit, name = (GB, "GB") if total.iloc[0] >= GB else (MB, "MB")
    other = f"total {'without' if stage.config.gradient_checkpointing else 'with'} gradient checkpointing"
    sizes = pd.concat([own, pd.DataFrame({"total": total, other: stage.others.sum()}).T]) / unit
    table = sizes.apply(lambda column: column.map("{:,.2f}".format)).rename_axis(name).reset_index()
    if len(total) == 1:
        table.columns = [name, ""]
    return f"\n{stage.heading}\n{textwrap.indent(text_table(table), '    ')}"
