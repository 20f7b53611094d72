"""What a run would do and need, without starting it."""

from __future__ import annotations

import json
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from .assets import tiny_teacher_path
from .budget import cache_bytes
from .build import empty_student
from .config import RunConfig, to_json
from .distill.config import StageConfig
from .pipeline import make_plan
from .plan import HeadId, HeadPlan
from .teacher import DTYPES, TINY

MB = 1e6
LENGTHS = (128, 2048, 4096)


def describe(config: RunConfig) -> str:
    """The resolved config, the plan if there is one, parameter counts and a memory estimate, as text.

    Only the teacher's config is read. Where it cannot be had, the text says so in one line.
    """
    parts = [json.dumps(to_json(config), indent=2)]
    try:
        teacher = _shape_of_teacher(config)
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


def _shape_of_teacher(config: RunConfig) -> PreTrainedModel:
    """The teacher on the meta device: shapes without values."""
    path = tiny_teacher_path() if config.teacher.path == TINY else config.teacher.path
    shape = AutoConfig.from_pretrained(path, revision=config.teacher.revision)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(shape, dtype=DTYPES[config.teacher.dtype])


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
    lines = [
        f"Parameters: teacher {n_teacher:,}; student {n_student:,}, of them {n_mixers:,} in recurrent heads",
        "Memory of one process, without sharding, in MB (1 MB = 1e6 bytes):",
    ]
    for name in config.stages:
        trained = n_student if name == "distill" else n_mixers
        lines.append(_memory_line(config, getattr(config, name), teacher, n_teacher, n_student, trained))
    lines.append(_cache_line(config, teacher, plan))
    return "\n".join(lines)


def _memory_line(
    config: RunConfig, stage: StageConfig, teacher: PreTrainedModel, n_teacher: int, n_student: int, n_trained: int
) -> str:
    """Weights and optimiser are exact; activations are a rule of thumb: 34 values of the width per token and layer."""
    shape: Any = teacher.config
    width = 2 if config.teacher.dtype != "float32" else 4
    compute = 2 if stage.precision == "bf16" else 4
    tokens = stage.micro_batch_size * config.data.seq_len
    layers = 1 if stage.recompute else shape.num_hidden_layers
    figures = {
        "teacher": n_teacher * width,
        "student": (n_student if stage.name == "distill" else n_trained) * 4,
        "gradients": n_trained * 4,
        "AdamW": n_trained * 8,
        "activations": 34 * tokens * shape.hidden_size * layers * compute,
        "logits": 3 * tokens * shape.vocab_size * compute if stage.name == "distill" else 0,
    }
    shown = ", ".join(f"{name} {size / MB:,.0f}" for name, size in figures.items() if size)
    n_tokens = stage.steps * stage.batch_size * config.data.seq_len
    return f"  {stage.name}: {shown}; total {sum(figures.values()) / MB:,.0f}  ({n_tokens:,} tokens)"


def _cache_line(config: RunConfig, teacher: PreTrainedModel, plan: HeadPlan) -> str:
    shape: Any = teacher.config
    head_dim = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    sizes = {"teacher": HeadPlan.all(plan), "student": plan}
    shown = []
    for name, kept in sizes.items():
        totals = [
            cache_bytes(kept, length=length, head_dim=head_dim, d_state=config.student.d_state).total
            for length in LENGTHS
        ]
        shown.append(f"{name} {' / '.join(f'{total / MB:.2f}' for total in totals)}")
    return f"  cache at {' / '.join(map(str, LENGTHS))} tokens, bf16: {', '.join(shown)}"
