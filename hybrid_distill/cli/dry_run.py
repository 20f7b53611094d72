"""Dry run: launch command, plan, sizes and memory of a run, without starting it."""

from __future__ import annotations

import json
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedModel

from ..config import RunConfig, to_json
from ..data import DataConfig, preparations
from ..evaluation.evaluate import CACHE_LENGTHS
from ..lab.memory.timing import training_time
from ..pipeline import RunInputs, RunPaths
from ..pipeline.budget import student_cache
from ..pipeline.checks import check_teachers, checks_of
from ..pipeline.folder import as_started, obsolete_results
from ..pipeline.inputs import teacher_without_weights
from ..pipeline.planning import placeholder_plan, plan_before_ranking
from ..plan import HeadPlan
from ..student.build import empty_student
from ..teacher import load_config
from ..teacher.location import RECIPE_FLAG, check_not_missing_path, folder_or_name
from ..validation import MB, first_line
from .launch_plan import launch_command, memory_tables, plan_stage

NO_PLAN = (
    "No plan yet: heads are ranked when the run starts. Sizes below assume the same number of heads, "
    "evenly spread."
)


def describe(config: RunConfig, command: str = "RECIPE.py") -> str:
    """Describe the launch command, the sizes of each stage and, if asked for, the resolved config.

    ``command`` is the recipe and its flags, as passed to a launcher. Of the teacher, only the
    config is read; if a name on the hub has none that can be read here, one line reports that.
    Raises ValueError, with all reasons, for a run that would not start.
    """
    config = as_started(config)
    settings = [json.dumps(to_json(config), indent=2)] if config.show_config else []
    stages_text = f"stages {', '.join(config.stage_names)}" if config.stages else "without training"
    if config.control:
        stages_text += ", and those that train whole models again for the control"
    heading = f"{config.name}: {config.teacher.path} as a hybrid, {stages_text}; into {config.out}"
    check_not_missing_path(config.teacher.path, RECIPE_FLAG)
    missing = _missing_config(config)
    if missing:
        return "\n\n".join([*settings, heading, missing])
    _check_would_start(config)
    teacher = teacher_without_weights(config.teacher)
    plan, plan_text = _plan(config, teacher)
    stages = [plan_stage(config, stage, plan) for stage in config.stages]
    summary = [heading]
    if config.gpus > 1:
        commands_before, source_flags = _preparations(config)
        if commands_before:
            listed = textwrap.indent("\n".join(commands_before), "  ")
            summary.append(f"First, once, without GPUs:\n{listed}")
        command += source_flags
    launch = launch_command(config, stages, command)
    summary += [launch, _kept_and_replaced(config), plan_text]
    sizes = f"{_sizes(config, teacher, plan)}\n{memory_tables(config, stages)}"
    blocks = ["\n".join(summary), sizes]
    time = training_time(config, plan, teacher.num_parameters())
    if time:
        blocks.append(time)
    return "\n\n".join([*blocks, *settings])


def _missing_config(config: RunConfig) -> str:
    """Say that the config of a teacher on the hub cannot be read here; empty if it can."""
    try:
        load_config(config.teacher.path, config.teacher.revision)
    except (OSError, ValueError) as error:
        # `_problems` reports what a local folder lacks.
        if not isinstance(folder_or_name(config.teacher.path), Path):
            return (
                "The launch command, plan, sizes and memory follow from the teacher's config, and "
                f"{RECIPE_FLAG} {first_line(error)} (--teacher tiny is the embedded one.)"
            )
    return ""


def _check_would_start(config: RunConfig) -> None:
    """Raise ValueError with all reasons why the run would not start."""
    # Once each: several checks read the plan and find the same fault.
    problems = list(dict.fromkeys(_problems(config)))
    if not problems:
        return
    if len(problems) > 1:
        problems = [f"({number}) {problem}" for number, problem in enumerate(problems, 1)]
    raise ValueError(f"the run would not start: {' '.join(problems)}")


def _preparations(config: RunConfig) -> tuple[list[str], str]:
    """Return the commands to run before a launch of several processes, which would refuse to tokenize so much, and the
    flags of the launch that name the folders they make."""
    # By command: what several stages read is tokenized once.
    folders: dict[str, str] = {}
    flags = ""
    for name, data, tokenizer in _data_read(config):
        commands = preparations(data, tokenizer)
        if not commands:
            continue
        sources = []
        for source in data.sources:
            if source in commands:
                source = folders.setdefault(commands[source], f"tokens/{len(folders) + 1}")
            sources.append(source)
        flags += f" --{name}.sources {shlex.join(sources)}"
    return [f"{command} --out {folder}" for command, folder in folders.items()], flags


def _data_read(config: RunConfig) -> Iterator[tuple[str, DataConfig, str]]:
    """Yield all data that the run reads: the name of its flags, its options, the path of its tokenizer."""
    if config.fits_to_text or any(stage.data is None for stage in config.stages):
        yield "data", config.data, config.teacher.path
    for stage in config.stages:
        if stage.data is not None:
            name = stage.name.replace("_", "-")
            yield f"{name}.data", stage.data, config.teacher_of(stage).path


def _problems(config: RunConfig) -> Iterator[str]:
    """Yield reasons why the run would not start, a sentence each; reads names, headers and head
    scores, not weights."""
    inputs = RunInputs(config)
    try:
        check_teachers(inputs)
    except (OSError, ValueError) as error:
        # The other checks would describe the same fault in their own words.
        yield str(error).strip()
        return
    try:
        obsolete_results(config)
    except (OSError, ValueError) as error:
        yield str(error).strip()
        # The folder belongs to another run: its plan says nothing about this one.
        inputs = RunInputs(replace(config, resume="never"))
    for check in checks_of(inputs):
        try:
            check()
        except (OSError, ValueError) as error:
            yield str(error).strip()
    for stage in config.stages:
        if stage.batch_size % config.gpus:
            yield f"{stage.name}: {stage.batch_size} rows of a step cannot be shared by {config.gpus} GPUs."


def _kept_and_replaced(config: RunConfig) -> str:
    """Describe what stays attention and what the other heads become."""
    options = config.student
    replacements = []
    if options.window:
        replacements.append(f"a window of {options.window} tokens and {options.sinks} sinks")
    if options.d_state:
        replacements.append(f"a state of {options.d_state} ({options.recurrence})")
    kept = f"{config.plan.k} of unit {config.plan.unit}"
    if config.plan.selection != "top":
        kept = config.plan.selection
    return f"Kept heads: {kept}; the others: {' and '.join(replacements)}."


def _plan(config: RunConfig, teacher: PreTrainedModel) -> tuple[HeadPlan, str]:
    """Return (plan, its description); if heads are not ranked yet, the plan has as many heads,
    evenly spread."""
    path = RunPaths(config.out).plan
    if path.exists() and config.resume != "never":
        plan = HeadPlan.load(path)
        return plan, _heads_by_layer(plan, str(path))
    options = config.plan
    plan = plan_before_ranking(RunInputs(config), teacher)
    if plan is None:
        return placeholder_plan(teacher, options), NO_PLAN
    if options.selection == "top":
        return plan, _heads_by_layer(plan, f"top {options.k} of {config.scoring.file}")
    return plan, _heads_by_layer(plan, options.selection)


def _heads_by_layer(plan: HeadPlan, origin: str) -> str:
    lines = [f"Plan ({origin}):"]
    for layer in range(plan.n_layers):
        heads = plan.kept_in(layer)
        if heads:
            lines.append(f"  layer {layer}: {', '.join(map(str, heads))}")
    return "\n".join(lines)


def _sizes(config: RunConfig, teacher: PreTrainedModel, plan: HeadPlan) -> str:
    """Describe the parameters of teacher and student, and their caches."""
    options = config.student
    student = empty_student(teacher, plan, **options.head_options)
    n_recurrent = 0
    for mixer in student.mixers():
        if mixer.ssm:
            n_recurrent += sum(parameter.numel() for parameter in mixer.ssm.parameters())
    caches = []
    lengths_in_tokens = sorted({*CACHE_LENGTHS, config.context})
    for name, kept in {"teacher": HeadPlan.all(plan), "student": plan}.items():
        sizes = []
        for length in lengths_in_tokens:
            n_bytes = student_cache(kept, teacher.config, options, length)
            sizes.append(f"{n_bytes / MB:.2f}")
        caches.append(f"{name} {' / '.join(sizes)}")
    lengths = " / ".join(map(str, lengths_in_tokens))
    if config.cache is not None:
        caches.append(f"allowed {config.cache} at {config.context:,} tokens")
    return (
        f"Parameters: teacher {teacher.num_parameters():,}; student {student.num_parameters():,}, "
        f"of them {n_recurrent:,} in recurrent heads\n"
        f"Cache of one sequence at {lengths} tokens, MB in bf16 (states fp32): {', '.join(caches)}"
    )
