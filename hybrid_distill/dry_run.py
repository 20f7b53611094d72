"""What a run would do and need, without starting it."""

from __future__ import annotations

import json
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from .budget import cache_bytes
from .build import empty_student
from .config import RunConfig, Stage, TeacherConfig, to_json
from .distill.config import StageConfig
from .memory_plan import GB, PARTS, STRATEGIES, MemoryPlan, memory_plan, recommend, stage_shape
from .pipeline import make_plan
from .plan import HeadId, HeadPlan
from .teacher import DTYPES, head_dim_of, load_config

MB = 1e6
LENGTHS = (128, 2048, 4096)
HEADROOM = 0.9
"""Share of a GPU's memory that is planned with; CUDA, NCCL and fragments have the rest."""
LAUNCH = {
    "ddp": "launch/ddp.yaml",
    "zero1": "launch/zero2.yaml --zero_stage 1",
    "zero2": "launch/zero2.yaml",
    "zero3": "launch/zero3.yaml",
    "fsdp2": "launch/fsdp2.yaml",
}


def describe(config: RunConfig) -> str:
    """The resolved config, the plan if there is one, parameter counts and a memory estimate, as text.

    Only the teacher's config is read. Where it cannot be had, the text says so in one line.
    """
    parts = [json.dumps(to_json(config), indent=2)]
    try:
        teacher = shape_of_teacher(config.teacher)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        parts.append(
            f"No parameter counts: the teacher's config cannot be had ({reason}); "
            "give a local folder with --teacher.path PATH, or --teacher tiny for the embedded default."
        )
        return "\n\n".join(parts)
    plan, heading = _plan(config, teacher)
    parts += [heading, _sizes(config, teacher, plan)]
    return "\n\n".join(parts)


def shape_of_teacher(options: TeacherConfig) -> PreTrainedModel:
    """The teacher on the meta device: shapes without values."""
    shape = load_config(options.path, options.revision)
    with torch.device("meta"):
        attention = options.attn_implementation
        return AutoModelForCausalLM.from_config(
            shape, dtype=DTYPES[options.dtype], **({"attn_implementation": attention} if attention else {})
        )


def _plan(config: RunConfig, teacher: PreTrainedModel) -> tuple[HeadPlan, str]:
    """(plan, what to say of it); heads that are not ranked yet are stood in for by as many, evenly spread."""
    path = config.out / "plan.json"
    if path.exists():
        plan = HeadPlan.load(path)
        return plan, f"Plan ({path}):\n{_plan_text(plan)}"
    if config.plan.selection not in ("top", "restoration"):
        plan = make_plan(config.plan, teacher, scores=lambda: None, fingerprinted=False)
        return plan, f"Plan ({config.plan.selection}):\n{_plan_text(plan)}"
    HeadPlan.check_k(teacher, config.plan.k)
    everything = HeadPlan.all(teacher)
    spread = [everything.kept[i * len(everything.kept) // max(config.plan.k, 1)] for i in range(config.plan.k)]
    plan = HeadPlan.from_pairs(teacher, [HeadId(*head) for head in spread])
    return plan, "No plan yet: heads are ranked when the run starts. Sizes below are for as many heads, evenly spread."


def _plan_text(plan: HeadPlan) -> str:
    kept = [f"  layer {layer}: {', '.join(map(str, plan.kept_in(layer)))}" for layer in range(plan.n_layers)]
    return "\n".join(line for line in kept if not line.endswith(": "))


def _sizes(config: RunConfig, teacher: PreTrainedModel, plan: HeadPlan) -> str:
    student = empty_student(teacher, plan, config.student.d_state, config.student.conv_width)
    n_teacher, n_student = teacher.num_parameters(), student.num_parameters()
    n_mixers = sum(p.numel() for mixer in student.mixers() if mixer.ssm for p in mixer.ssm.parameters())
    gpus = "one GPU" if config.gpus == 1 else f"each of {config.gpus} GPUs"
    lines = [
        f"Parameters: teacher {n_teacher:,}; student {n_student:,}, of them {n_mixers:,} in recurrent heads",
        f"Memory of {gpus} while training (1 GB = 1e9 bytes):",
        *(_stage_plans(config, name, plan) for name in config.stages),
    ]
    lines.append(_cache_line(config, teacher, plan))
    return "\n".join(lines)


def _stage_plans(config: RunConfig, name: Stage, plan: HeadPlan) -> str:
    """A table, parts by strategies, and what to launch with; one line for a stage that cannot be run."""
    stage: StageConfig = getattr(config, name)
    seq_len = config.data_of(name).seq_len
    if stage.batch_size % config.gpus:
        return f"\n  {stage.name}: {stage.batch_size} rows of a step cannot be shared by {config.gpus} GPUs."
    teacher, other = config.teacher, config.teacher_of(name)
    judge = model = shape_of_teacher(teacher)
    student = empty_student(model, plan, config.student.d_state, config.student.conv_width)
    try:
        judge = model if other == teacher else shape_of_teacher(other)
        shape = stage_shape(stage, student, judge)
    except (OSError, ValueError) as error:
        return f"\n  {stage.name}: {str(error).strip().splitlines()[0]}"
    rows = stage.batch_size // config.gpus
    micro_batch = min(stage.micro_batch_size, rows)
    length = max(seq_len, getattr(stage, "prompt_tokens", 0) + getattr(stage, "new_tokens", 0))
    sizes: dict[str, Any] = {"world": config.gpus, "micro_batch": micro_batch, "seq_len": length}
    sizes["micro_batches"] = -(-rows // micro_batch)
    sizes["teacher_sharding"] = config.teacher_sharding
    strategies = [name for name in STRATEGIES if name == "ddp" or config.gpus > 1]
    strategies = [name for name in strategies if shape.divisible or name not in ("zero3", "fsdp2")]
    plans, others = (
        [memory_plan(shape, strategy=strategy, recompute=recompute, **sizes) for strategy in strategies]
        for recompute in (stage.recompute, not stage.recompute)
    )
    n_tokens = stage.steps * stage.batch_size * seq_len
    heading = f"  {stage.name}: micro-batches of {micro_batch} x {length:,} tokens, {stage.precision}"
    heading += f", segments of {shape.segment_len:,}" if shape.segment_len else ""
    heading += f"{', recompute' if stage.recompute else ''}; {n_tokens:,} tokens in all"
    return "\n".join(["", heading, _plans_table(plans, others), f"    {_advice(config, plans, others)}"])


def _plans_table(plans: list[MemoryPlan], others: list[MemoryPlan]) -> str:
    """``others`` are the same plans with recompute where these are without, or the other way round."""
    unit, name = (GB, "GB") if plans[0].total >= GB else (MB, "MB")

    def row(label: str, sizes: list[int]) -> str:
        return f"    {label:<24}" + "".join(f"{size / unit:>10,.2f}" for size in sizes)

    lines = [f"    {name:<24}" + "".join(f"{plan.strategy if plan.world > 1 else '':>10}" for plan in plans).rstrip()]
    for part, label in PARTS.items():
        sizes = [getattr(plan, part) for plan in plans]
        lines += [row(label, sizes)] if any(sizes) else []
    lines.append(row("total", [plan.total for plan in plans]))
    other = "without recompute" if plans[0].recompute else "with recompute"
    return "\n".join([*lines, row(f"total {other}", [plan.total for plan in others])])


def _advice(config: RunConfig, plans: list[MemoryPlan], others: list[MemoryPlan]) -> str:
    """Which launch file to use, if need be with recompute; or what to change."""
    budget = HEADROOM * config.gpu_memory * GB
    refusal = ""
    for variant in [plans] if plans[0].recompute else [plans, others]:
        try:
            best = recommend(variant, budget)
        except ValueError as error:
            refusal = refusal or str(error)
            continue
        how = " with recompute" if best.recompute and not plans[0].recompute else ""
        if best.world == 1:
            return f"fits in {config.gpu_memory:g} GB{how}: accelerate launch --config_file launch/single_gpu.yaml"
        launch = f"accelerate launch --config_file {LAUNCH[best.strategy]} --num_processes {best.world}"
        return f"{best.strategy} fits in {config.gpu_memory:g} GB{how}: {launch}"
    return refusal


def _cache_line(config: RunConfig, teacher: PreTrainedModel, plan: HeadPlan) -> str:
    head_dim = head_dim_of(teacher.config)
    sizes = {"teacher": HeadPlan.all(plan), "student": plan}
    shown = []
    for name, kept in sizes.items():
        totals = [
            cache_bytes(kept, length=length, head_dim=head_dim, d_state=config.student.d_state).total
            for length in LENGTHS
        ]
        shown.append(f"{name} {' / '.join(f'{total / MB:.2f}' for total in totals)}")
    lengths = " / ".join(map(str, LENGTHS))
    return f"\n  generating, one sequence, MB in bf16 (states fp32): cache at {lengths} tokens: {', '.join(shown)}"
