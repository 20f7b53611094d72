"""Memory of each stage of a dry run under every strategy, and the launch command that fits."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import pandas as pd

from ..config import RunConfig
from ..lab.memory.plan import GB, REDUCE_BUCKET, STRATEGIES, memory_plan
from ..lab.memory.shape import StageShape
from ..lab.reporting import text_table
from ..pipeline.inputs import teacher_without_weights
from ..plan import HeadPlan
from ..student.build import empty_student
from ..train.config import StageConfig
from ..validation import MB

HEADROOM = 0.9
"""Share of a GPU's memory that a run may plan to use; CUDA, NCCL and fragmentation take the
rest."""
LAUNCH = {
    "ddp": "launch/ddp.yaml",
    "zero1": "launch/zero2.yaml --zero_stage 1",
    "zero2": "launch/zero2.yaml",
    "zero3": "launch/zero3.yaml",
    "fsdp2": "launch/fsdp2.yaml",
}
"""Options of accelerate launch, by strategy."""
COMMUNICATION = f"""
  communication: gradients and weights on their way; under ZeRO {4 * REDUCE_BUCKET / GB:g} GB (reduce_bucket_size)."""


class Fit(NamedTuple):
    """A way to train a stage within the budget: its bytes, and whether gradient checkpointing must be switched on."""

    n_bytes: float
    adds_checkpointing: bool


class PlannedStage(NamedTuple):
    """Bytes of a stage, parts x strategies: as configured, and with the opposite choice of
    gradient checkpointing."""

    config: StageConfig
    heading: str
    as_configured: pd.DataFrame
    with_checkpointing_toggled: pd.DataFrame

    def fit(self, strategy: str, budget: float) -> Fit | None:
        """Return the way to recommend, None if none fits; requested gradient checkpointing stays on."""
        if strategy not in self.as_configured:
            return None
        as_configured = self.as_configured[strategy].sum()
        if as_configured <= budget:
            return Fit(as_configured, adds_checkpointing=False)
        with_the_opposite = self.with_checkpointing_toggled[strategy].sum()
        if with_the_opposite <= budget and not self.config.gradient_checkpointing:
            return Fit(with_the_opposite, adds_checkpointing=True)
        return None

    @property
    def least(self) -> float:
        """Smallest total of any strategy, with or without gradient checkpointing."""
        least = self.as_configured.sum().min()
        least_toggled = self.with_checkpointing_toggled.sum().min()
        return min(least, least_toggled)


def plan_stage(config: RunConfig, stage: StageConfig, plan: HeadPlan) -> PlannedStage:
    """Plan the memory of one process for every strategy that the stage can train under."""
    # Each stage gets models of its own: making it freezes and shares parameters.
    model = teacher_without_weights(config.teacher)
    student = empty_student(model, plan, **config.student.head_options)
    its_teacher = config.teacher_of(stage)
    teacher = model if its_teacher == config.teacher else teacher_without_weights(its_teacher)
    shape = StageShape(stage, student, teacher)
    n_rows = stage.batch_size // config.gpus
    micro_batch = min(stage.micro_batch_size, n_rows)
    seq_len = config.data_of(stage).seq_len
    longest = max(seq_len, stage.tokens_generated)
    plan_for = partial(
        memory_plan,
        shape,
        world=config.gpus,
        micro_batch=micro_batch,
        seq_len=longest,
        micro_batches=math.ceil(n_rows / micro_batch),
        teacher_sharding=config.teacher_sharding,
    )
    strategies = _strategies(config, stage, shape)

    def plan_all(gradient_checkpointing: bool) -> pd.DataFrame:
        columns = {}
        for name in strategies:
            columns[name] = plan_for(strategy=name, gradient_checkpointing=gradient_checkpointing)
        return pd.DataFrame(columns)

    return PlannedStage(
        stage,
        _heading(stage, micro_batch, longest, n_tokens=stage.steps * stage.batch_size * seq_len),
        as_configured=plan_all(stage.gradient_checkpointing),
        with_checkpointing_toggled=plan_all(not stage.gradient_checkpointing),
    )


def _strategies(config: RunConfig, stage: StageConfig, shape: StageShape) -> list[str]:
    """Return the strategies that a stage can train under."""
    if config.gpus == 1:
        return list(STRATEGIES[:1])
    names: list[str] = list(STRATEGIES)
    if not shape.shardable:
        names = [name for name in names if name not in ("zero3", "fsdp2")]
    if stage.on_divergence == "skip":
        # DeepSpeed steps before anyone has seen the gradient: `Zero` refuses.
        names = [name for name in names if not name.startswith("zero")]
    return names


def _heading(stage: StageConfig, micro_batch: int, length: int, n_tokens: int) -> str:
    parts = [f"  {stage.name}: micro-batches of {micro_batch} x {length:,} tokens", stage.precision]
    if stage.tokens_per_segment is not None:
        parts.append(f"segments of {stage.tokens_per_segment:,}")
    if stage.gradient_checkpointing:
        parts.append("gradient checkpointing")
    return f"{', '.join(parts)}; {stage.steps:,} steps, {n_tokens:,} tokens in all"


def launch_command(config: RunConfig, stages: Sequence[PlannedStage], command: str) -> str:
    """Return one launch command under which every stage fits, or advice on what to change."""
    budget = HEADROOM * config.gpu_memory * GB
    for strategy in STRATEGIES:
        fits: list[Fit] = []
        for stage in stages:
            fit = stage.fit(strategy, budget)
            if fit is not None:
                fits.append(fit)
        if len(fits) == len(stages):
            return _launch_under(strategy, config, stages, fits, command)
    needs = ", ".join(f"{stage.config.name} {_size(stage.least)}" for stage in stages)
    return (
        f"Cannot be launched: no strategy fits every stage in {_size(budget)}; they need at least: {needs}. "
        "Pass smaller micro-batches, more --gpus, or GPUs with more memory (--gpu-memory)."
    )


def _launch_under(
    strategy: str,
    config: RunConfig,
    stages: Sequence[PlannedStage],
    fits: Sequence[Fit],
    command: str,
) -> str:
    for stage, fit in zip(stages, fits):
        if fit.adds_checkpointing:
            command += f" --{stage.config.name.replace('_', '-')}.gradient-checkpointing"
    if not stages:
        return f"Launch (nothing is trained): hybrid-distill run {command}"
    needed = f"needs {_size(max(fit.n_bytes for fit in fits))}"
    if config.gpus == 1:
        return f"Launch ({needed} while training): hybrid-distill run {command}"
    options = f"--config_file {LAUNCH[strategy]} --num_processes {config.gpus}"
    gpus = f"each of {config.gpus} GPUs of {config.gpu_memory:g} GB"
    return (
        f"Launch ({strategy} {needed} of {gpus}): "
        f"accelerate launch {options} -m hybrid_distill run {command}"
    )


def _size(n_bytes: float) -> str:
    if n_bytes >= GB:
        return f"{n_bytes / GB:,.1f} GB"
    return f"{n_bytes / MB:,.0f} MB"


def memory_tables(config: RunConfig, stages: Sequence[PlannedStage]) -> str:
    """Format the memory of every stage, one table each."""
    if not stages:
        return "No stage trains."
    process = "the process" if config.gpus == 1 else f"each of {config.gpus} processes"
    blocks = [f"Memory of {process} while training (1 GB = 1e9 bytes):"]
    blocks += [_table(stage) for stage in stages]
    if any(stage.as_configured.loc["communication"].any() for stage in stages):
        blocks.append(COMMUNICATION)
    return "\n".join(blocks)


def _table(stage: PlannedStage) -> str:
    """Format a table of parts x strategies."""
    parts = stage.as_configured[stage.as_configured.any(axis=1)]
    total = stage.as_configured.sum()
    unit, name = (GB, "GB") if total.iloc[0] >= GB else (MB, "MB")
    how = "without" if stage.config.gradient_checkpointing else "with"
    totals = {
        "total": total,
        f"total {how} gradient checkpointing": stage.with_checkpointing_toggled.sum(),
    }
    sizes = pd.concat([parts, pd.DataFrame(totals).T]) / unit
    table = sizes.apply(lambda column: column.map("{:,.2f}".format))
    table = table.rename_axis(name).reset_index()
    if len(total) == 1:
        # One process has one way to train, which needs no name.
        table.columns = [name, ""]
    return f"\n{stage.heading}\n{textwrap.indent(text_table(table), '    ')}"
