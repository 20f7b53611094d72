"""Plan the memory that one process needs to train a stage, from shapes alone: no tensor is allocated.

`StageShape` holds the sizes of a stage, read from models on the meta device. `memory_plan` adds up the peak memory
for one strategy of splitting the work among processes; `activations` counts what a forward and its backward hold. The
peak is near the end of a forward pass, in a micro-batch after the first of its step, when gradients already exist. Not
counted: the CUDA context (about 0.5 GB), NCCL, and fragmentation. benchmarks/memory_plan.py compares every part with
measurements.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from .activations import (
    bytes_around_the_head,
    bytes_of_layer,
    bytes_of_layer_inputs,
    bytes_of_loss,
    bytes_of_workspace,
)
from .shape import BF16, FP32, StageShape

GB = 1e9
STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "fsdp2")
"""Strategies for splitting a stage among processes. They differ in what they send: DDP and ZeRO-1 once per step, ZeRO-2
the gradients of every micro-batch, ZeRO-3 also the parameters of every pass. FSDP2 sends parameters and gradients once
per step if it has several micro-batches, for which it holds both whole in between. A launch takes the first that
fits."""
REDUCE_BUCKET = 500_000_000
"""Elements; DeepSpeed's default, which the launch files keep."""
LIVE_PARAMETERS = 1_000_000_000
"""Elements that ZeRO-3 keeps gathered for reuse; its default."""
MemoryPlan = dict[str, int]
"""Peak bytes of one process, by part. Parts that never exist at the same time share an entry."""


def memory_plan(
    shape: StageShape,
    *,
    world: int,
    micro_batch: int,
    seq_len: int,
    strategy: str,
    gradient_checkpointing: bool | None = None,
    micro_batches: int = 2,
    reduce_bucket: int = REDUCE_BUCKET,
    device: str = "cuda",
    teacher_sharding: str = "replicated",
) -> MemoryPlan:
    """Plan the memory of one of ``world`` processes for micro-batches of ``micro_batch`` rows of ``seq_len`` tokens.

    ``gradient_checkpointing`` overrides the stage's own. ``micro_batches`` is their number per step and process, and
    ``reduce_bucket`` the elements of DeepSpeed's bucket. ``device`` is ``cuda``, with the kernels of `hybrid_kernels`,
    or ``cpu``, with plain torch. The teacher is ``replicated`` or ``sharded``.
    """
    recomputes = gradient_checkpointing
    if recomputes is None:
        recomputes = shape.gradient_checkpointing
    tokens = micro_batch * seq_len
    kernels = device == "cuda"
    # Under ZeRO-3, no process holds the whole output embedding between calls.
    fused = shape.fused and strategy != "zero3"
    layers = [bytes_of_layer(shape, heads, seq_len, kernels) for heads in shape.layers]
    activations: float = sum(layers)
    copied = shape.weights.trained_matrices + shape.weights.frozen_matrices
    recomputed: float = 0
    if recomputes:
        activations = bytes_of_layer_inputs(shape, seq_len)
        # Copies of frozen matrices are made anew in the backward.
        copied = shape.weights.trained_matrices
        # The backward holds one layer's activations at a time.
        recomputed = max(layers)
    loss = 0
    if shape.end_to_end:
        activations += bytes_around_the_head(shape, fused)
        loss = bytes_of_loss(shape, tokens, kernels, fused)
    if strategy == "fsdp2":
        copied = max(0, copied - shape.weights.gathered_in_bf16)
    workspace = int(tokens * bytes_of_workspace(shape, seq_len, kernels, recomputed))
    teacher = shape.weights.teacher_bytes
    if teacher_sharding == "sharded":
        teacher = _sharded_teacher(shape, world)
    shares = _shares(shape, strategy, world, micro_batches, reduce_bucket * FP32)
    return {
        "trained parameters": shares.trained,
        "frozen parameters": shares.frozen,
        "gradients": shares.gradients,
        "optimizer": shares.optimizer,
        "communication": shares.communication,
        "teacher": teacher,
        # Kept for the backward.
        "activations": int(tokens * activations),
        # Autocast's copies of float32 weights.
        "bf16 copies": BF16 * copied if shape.bf16 else 0,
        # Logits of a chunk of tokens, and the gradients that are computed with the loss.
        "loss chunk": loss,
        # One layer's: it reuses the memory of the loss chunk, so only the excess counts.
        "layer workspace": max(0, workspace - loss),
    }


def _sharded_teacher(shape: StageShape, world: int) -> int:
    """Count a share of the teacher's layers, the layer that runs, the next one, and all outside layers."""
    layer = shape.weights.teacher_layer_bytes
    in_layers = shape.student.n_layers * layer
    outside = shape.weights.teacher_bytes - in_layers
    share = math.ceil(in_layers / world)
    return outside + share + 2 * layer


class Shares(NamedTuple):
    """Bytes that a strategy leaves to one process."""

    trained: int
    frozen: int
    gradients: int
    optimizer: int
    communication: int
    """Size of buckets, and of parameters gathered for use."""


def _shares(
    shape: StageShape, strategy: str, world: int, micro_batches: int, bucket: int
) -> Shares:
    """Divide parameters, gradients and optimizer among processes.

    As in DeepSpeed 0.19, whose optimizer works on a copy of its shard of the float32 weights.
    """
    whole = shape.weights.trained * FP32
    frozen = shape.weights.frozen_bytes
    share = math.ceil(whole / world)
    if strategy == "ddp":
        # Gradients are views of the buckets, until zero_grad drops them and accumulation makes new
        # ones.
        buckets = whole if world > 1 and micro_batches > 1 else 0
        return Shares(whole, frozen, whole, 2 * whole, buckets)
    if strategy in ("zero1", "zero2"):
        gradients = whole if strategy == "zero1" else share
        return Shares(whole + share, frozen, gradients, 2 * share, bucket)
    frozen_share = math.ceil(frozen / world)
    if strategy == "zero3":
        communication = bucket + _live_parameters(shape)
        return Shares(2 * share, frozen_share, share, 2 * share, communication)
    gathered = _gathered_by_fsdp2(shape, micro_batches)
    return Shares(share, frozen_share, share, 2 * share, gathered)


def _live_parameters(shape: StageShape) -> int:
    """Count the bytes of the parameters that ZeRO-3 keeps gathered."""
    held = shape.weights.trained * FP32 + shape.weights.frozen_bytes
    elements = shape.weights.trained + shape.weights.frozen_bytes // shape.teacher_itemsize
    return int(held * min(1.0, LIVE_PARAMETERS / elements))


def _gathered_by_fsdp2(shape: StageShape, micro_batches: int) -> int:
    """Count the bytes of gathered parameters and of whole gradients."""
    whole = shape.weights.trained * FP32
    held = whole + shape.weights.frozen_bytes
    if micro_batches > 1 or not shape.end_to_end:
        # Parameters stay gathered until the last micro-batch's backward has passed their layer or, where no gradient
        # reaches a layer's input, until it has ended; so do whole gradients.
        saved_in_bf16 = (FP32 - BF16) * shape.weights.gathered_in_bf16
        return held - saved_in_bf16 + whole
    # Parameters outside layers stay gathered; so do a layer, the next one, and one layer's gradients.
    layer = shape.weights.layer_bytes
    outside = max(0, held - len(shape.layers) * layer)
    return min(2 * held, outside + 3 * layer)
