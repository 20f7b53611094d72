"""The plan and the memory of a run, without starting it."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import pandas as pd
from transformers import PreTrainedModel

from ..config import PlanConfig, RunConfig, to_json
from ..lab.memory.plan import GB, REDUCE_BUCKET, STRATEGIES, MemoryPlan, StageShape, memory_plan
from ..lab.reporting import text_table
from ..model import layer_windows
from ..pipeline import Run
from ..pipeline.folder import outdated
from ..pipeline.inputs import shape_of_teacher
from ..pipeline.timing import training_time
from ..plan import HeadId, HeadPlan, cache_bytes
from ..student.build import empty_student
from ..teacher import head_dim_of, load_config
from ..train.config import StageConfig

MB = 1e6
LENGTHS = (128, 2048, 4096)
HEADROOM = 0.9
"""Share of a GPU's memory that is planned with; CUDA, NCCL and fragmentation take the rest."""
LAUNCH = {
    "ddp": "launch/ddp.yaml",
    "zero1": "launch/zero2.yaml --zero_stage 1",
    "zero2": "launch/zero2.yaml",
    "zero3": "launch/zero3.yaml",
    "fsdp2": "launch/fsdp2.yaml",
}
BUCKET = f"{REDUCE_BUCKET:,} float32 elements, {4 * REDUCE_BUCKET / GB:g} GB"
COMMUNICATION = f"""\
  communication holds gradients and gathered weights while they are sent: under ZeRO a bucket of
  {BUCKET}, however small the model (DeepSpeed's reduce_bucket_size)."""


def describe(config: RunConfig, command: str = "RECIPE.py") -> str:
    """Describe what to launch, then sizes, stage by stage, then the resolved config if it is asked for.

    ``command`` is the recipe and its flags, as a launcher takes them. Only the teacher's config is read; without it,
    the text says so in one line.
    """
    record = [json.dumps(to_json(config), indent=2)] if config.show_config else []
    try:
        teacher = shape_of_teacher(config.teacher)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        missing = f"No parameter counts: --teacher.path {reason} (--teacher tiny is the embedded one.)"
        return "\n\n".join([*record, _heading(config), missing])
    try:
        Run(config).check_student(PlanConfig("none", k=0))
    except ValueError as error:
        return "\n\n".join([*record, f"{_heading(config)}\nCannot be launched: {error}"])
    plan, source = _plan(config, teacher)
    stages = [_stage_plans(config, stage, plan) for stage in config.stage_configs]
    answer = "\n".join([_heading(config), _launch(config, stages, command), source])
    time = [] if any(stage.problem for stage in stages) else [training_time(config, plan, teacher.num_parameters())]
    return "\n\n".join([answer, _sizes(config, teacher, plan, stages), *filter(None, time), *record])


def problems(config: RunConfig) -> Iterator[str]:
    """Yield why the run would not start, one sentence each, from names, headers and head scores, not from weights."""
    this = Run(config)
    try:
        load_config(config.teacher.path, config.teacher.revision)
    except (OSError, ValueError):
        return  # `describe` says so, and nothing else can be judged
    for check in (partial(outdated, config), *this.checks()):
        try:
            check()
        except (OSError, ValueError) as error:
            yield str(error).strip()


def _heading(config: RunConfig) -> str:
    return f"{config.name}: {config.teacher.path} as a hybrid, stages {', '.join(config.stages)}; into {config.out}"


def _plan(config: RunConfig, teacher: PreTrainedModel) -> tuple[HeadPlan, str]:
    """Return (plan, its description); heads that are not ranked yet are replaced by as many, evenly spread."""
    path, options = config.out / "plan.json", config.plan
    if path.exists():
        plan = HeadPlan.load(path)
        return plan, f"Plan ({path}):\n{_plan_text(plan)}"
    try:
        plan = Run(config).known_plan(options, teacher)
    except ValueError:
        plan = None  # one of the `problems`
    if plan is not None:
        origin = f"top {options.k} of {config.scoring.file}" if options.selection == "top" else options.selection
        return plan, f"Plan ({origin}):\n{_plan_text(plan)}"
    everything = HeadPlan.all(teacher)
    k = max(0, min(options.k, everything.k))
    spread = [everything.kept[i * everything.k // k] for i in range(k)]
    plan = HeadPlan.from_pairs(teacher, [HeadId(*head) for head in spread])
    return plan, "No plan yet: heads are ranked when the run starts. Sizes below are for as many heads, evenly spread."


def _plan_text(plan: HeadPlan) -> str:
    kept = [f"  layer {layer}: {', '.join(map(str, plan.kept_in(layer)))}" for layer in range(plan.n_layers)]
    return "\n".join(line for line in kept if not line.endswith(": "))


@dataclass(frozen=True)
class _StagePlans:
    """Plans of one stage by strategy: ``own`` as the recipe has it, ``others`` with gradient checkpointing on for off.

    ``problem`` is set, and there are no plans, where the stage cannot be run.
    """

    name: str
    heading: str = ""
    micro_batch: int = 1
    checkpoints: bool = False
    own: tuple[MemoryPlan, ...] = ()
    others: tuple[MemoryPlan, ...] = ()
    problem: str = ""

    @property
    def allowed(self) -> tuple[MemoryPlan, ...]:
        """Plans to recommend: gradient checkpointing that was asked for stays."""
        return self.own if self.checkpoints else (*self.own, *self.others)

    def fitting(self, strategy: str, budget: float) -> MemoryPlan | None:
        """Return the first plan of a strategy that fits."""
        return next((p for p in self.allowed if p.strategy == strategy and p.total <= budget), None)


def _launch(config: RunConfig, stages: list[_StagePlans], command: str) -> str:
    """Name one command under which every stage fits; or what to change."""
    if refused := [stage.problem for stage in stages if stage.problem]:
        return f"Cannot be launched: {' '.join(refused)}"
    budget = HEADROOM * config.gpu_memory * GB
    fits = {stage.name: [s for s in STRATEGIES if stage.fitting(s, budget)] for stage in stages}
    shared = [strategy for strategy in STRATEGIES if all(strategy in found for found in fits.values())]
    if shared:
        plans = [plan for stage in stages if (plan := stage.fitting(shared[0], budget))]
        return _command(config, stages, plans, command)
    refusals = [_advice(stage, budget) for stage in stages if not fits[stage.name]] or [
        f"no strategy fits every stage ({', '.join(f'{name} under {found[0]}' for name, found in fits.items())}); stop "
        "the run when a stage is finished, and resume it with the other's launch file, or take GPUs with more memory."
    ]
    return f"Cannot be launched: {' '.join(refusals)}"


def _advice(stage: _StagePlans, budget: float) -> str:
    """Say what a stage that fits under no strategy needs."""
    least = min(stage.allowed, key=lambda plan: plan.total)
    advice = [f"a micro-batch smaller than {stage.micro_batch}"] if stage.micro_batch > 1 else []
    advice += ["more GPUs" if least.strategy != "ddp" else "ZeRO over several GPUs"]
    return (
        f"{stage.name} fits in {budget / GB:.1f} GB with no strategy: {least.strategy} needs least, "
        f"{least.total / GB:.1f} GB; try {', '.join(advice)}, or GPUs with more memory."
    )


def _command(config: RunConfig, stages: list[_StagePlans], plans: list[MemoryPlan], command: str) -> str:
    changed = [stage.name for stage, plan in zip(stages, plans) if plan not in stage.own]
    flags = "".join(f" --{name.replace('_', '-')}.gradient-checkpointing" for name in changed)
    needed = f"needs {_size(max(plan.total for plan in plans))}"
    if config.gpus == 1:
        return f"Launch ({needed} while training): hybrid-distill run {command}{flags}"
    launch = f"accelerate launch --config_file {LAUNCH[plans[0].strategy]} --num_processes {config.gpus}"
    where = f"each of {config.gpus} GPUs of {config.gpu_memory:g} GB"
    return f"Launch ({plans[0].strategy} {needed} of {where}): {launch} {command}{flags}"


def _sizes(config: RunConfig, teacher: PreTrainedModel, plan: HeadPlan, stages: list[_StagePlans]) -> str:
    student = empty_student(teacher, plan, config.student.d_state, config.student.conv_width)
    n_teacher, n_student = teacher.num_parameters(), student.num_parameters()
    n_mixers = sum(p.numel() for mixer in student.mixers() if mixer.ssm for p in mixer.ssm.parameters())
    processes = "one process" if config.gpus == 1 else f"each of {config.gpus} processes"
    lines = [
        f"Parameters: teacher {n_teacher:,}; student {n_student:,}, of them {n_mixers:,} in recurrent heads",
        _cache_line(config, teacher, plan),
        f"Memory of {processes} while training (1 GB = 1e9 bytes):",
        *(f"\n  {stage.problem}" if stage.problem else _plans_table(stage) for stage in stages),
    ]
    if any(size.communication for stage in stages for size in stage.own):
        lines.append(f"\n{COMMUNICATION}")
    return "\n".join(lines)


def _stage_plans(config: RunConfig, stage: StageConfig, plan: HeadPlan) -> _StagePlans:
    name, seq_len = stage.name, stage.data_within(config.data).seq_len
    if stage.batch_size % config.gpus:
        problem = f"{name}: {stage.batch_size} rows of a step cannot be shared by {config.gpus} GPUs."
        return _StagePlans(name, problem=problem)
    teacher, other = config.teacher, stage.teacher_within(config.teacher)
    judge = model = shape_of_teacher(teacher)
    student = empty_student(model, plan, config.student.d_state, config.student.conv_width)
    try:
        judge = model if other == teacher else shape_of_teacher(other)
        shape = StageShape(stage, student, judge)
    except (OSError, ValueError) as error:
        return _StagePlans(name, problem=f"{name}: {str(error).strip().splitlines()[0]}")
    rows = stage.batch_size // config.gpus
    micro_batch = min(stage.micro_batch_size, rows)
    length = max(seq_len, getattr(stage, "prompt_tokens", 0) + getattr(stage, "new_tokens", 0))
    strategies = STRATEGIES if config.gpus > 1 else STRATEGIES[:1]
    strategies = [name for name in strategies if shape.shardable or name not in ("zero3", "fsdp2")]
    plan_for = partial(
        memory_plan, shape, world=config.gpus, micro_batch=micro_batch, seq_len=length,
        micro_batches=-(-rows // micro_batch), teacher_sharding=config.teacher_sharding,
    )  # fmt: skip
    own, others = (
        tuple(plan_for(strategy=strategy, gradient_checkpointing=checkpoints) for strategy in strategies)
        for checkpoints in (stage.gradient_checkpointing, not stage.gradient_checkpointing)
    )
    n_tokens = stage.steps * stage.batch_size * seq_len
    heading = f"  {name}: micro-batches of {micro_batch} x {length:,} tokens, {stage.precision}"
    heading += f", segments of {shape.segment_len:,}" if shape.segment_len else ""
    heading += ", gradient checkpointing" if stage.gradient_checkpointing else ""
    heading += f"; {stage.steps:,} steps, {n_tokens:,} tokens in all"
    return _StagePlans(name, heading, micro_batch, stage.gradient_checkpointing, own, others)


def _plans_table(stage: _StagePlans) -> str:
    """Tabulate parts by strategies."""
    plans = stage.own
    unit, name = (GB, "GB") if plans[0].total >= GB else (MB, "MB")
    rows = {part: [plan.parts[part] for plan in plans] for part in plans[0].parts}
    rows = {part: sizes for part, sizes in rows.items() if any(sizes)}
    other = f"total {'without' if stage.checkpoints else 'with'} gradient checkpointing"
    rows |= {"total": [plan.total for plan in plans], other: [plan.total for plan in stage.others]}
    columns = [plan.strategy for plan in plans] if len(plans) > 1 else [""]
    cells = [[part, *(f"{size / unit:,.2f}" for size in sizes)] for part, sizes in rows.items()]
    table = text_table(pd.DataFrame(cells, columns=[name, *columns]))
    return f"\n{stage.heading}\n{textwrap.indent(table, '    ')}"


def _size(n_bytes: float) -> str:
    return f"{n_bytes / GB:,.1f} GB" if n_bytes >= GB else f"{n_bytes / MB:,.0f} MB"


def _cache_line(config: RunConfig, teacher: PreTrainedModel, plan: HeadPlan) -> str:
    shape = {"head_dim": head_dim_of(teacher.config), "d_state": config.student.d_state}
    windows = layer_windows(teacher.config)
    sizes = {"teacher": HeadPlan.all(plan), "student": plan}
    shown = []
    for name, kept in sizes.items():
        totals = [cache_bytes(kept, length=length, **shape, windows=windows).total for length in LENGTHS]
        shown.append(f"{name} {' / '.join(f'{total / MB:.2f}' for total in totals)}")
    lengths = " / ".join(map(str, LENGTHS))
    return f"Cache of one sequence at {lengths} tokens, MB in bf16 (states fp32): {', '.join(shown)}"
