"""What one process needs to train a stage, in bytes, from shapes alone: no tensor is allocated.

A `StageShape` says what a stage trains and keeps, read off models on the meta device. `memory_plan` adds up, for one
way to divide the work among processes, what is in memory when it is fullest: about the end of a forward pass, of a
micro-batch that is not the first of its step, so that gradients are there already.

    always there     trained and frozen parameters, gradients, AdamW's two moments, the teacher
    a micro-batch    activations kept for the backward, bf16 copies that autocast makes of float32 weights
    for a moment     the loss over the vocabulary; where that needs less, one layer's forward or backward
    to communicate   buckets, and parameters put together for use

Not counted: the CUDA context (about 0.5 GB), NCCL, and what the allocator loses to fragments.

What a layer keeps is listed below operation by operation, in bytes of a token, for dense decoders with gated MLPs;
benchmarks/memory_plan.py holds it against what was measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ...model.modeling_hybrid import HybridForCausalLM, finishes_logits
from ...model.ssd import CHUNK_SIZE, LARGEST_IN_KERNELS
from ...teacher import decoder_blocks, text_config
from ...train.config import StageConfig
from ...train.losses import CHUNK_LOGITS as UNFUSED_CHUNK_LOGITS
from ...train.stages import EndToEnd, MatrixAlignment, make_stage

GB = 1e9
STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "fsdp2")
"""Ways to divide a stage among processes, in the order of what they send: DDP and ZeRO-1 once a step, ZeRO-2 the
gradients of every micro-batch, ZeRO-3 and FSDP2 the parameters of every pass as well."""

FP32, BF16 = 4, 2
REDUCE_BUCKET = 500_000_000  # elements, DeepSpeed's default; the launch files leave it
LIVE_PARAMETERS = 1_000_000_000  # ZeRO-3 keeps as many elements together that it will soon use again: its default
KERNEL_CHUNK = {BF16: 32, FP32: 16}  # tokens between the states that the kernels store (on Hopper, N = P = 64)
KERNEL_LOGITS, TORCH_LOGITS = 2**28, 2**25  # of a chunk of the fused loss: hybrid_kernels.loss.CHUNK_LOGITS
LOGIT_BUFFERS = {"forward_kl": 8, "reverse_kl": 9, "jsd": 10}  # float32, of a chunk's size; in plain torch


@dataclass(frozen=True)
class StageShape:
    """What the memory of a stage depends on, besides batch and processes. `stage_shape` reads it off the models."""

    stage: str
    """``matrix``, ``align``, or ``distill``: any that is end to end."""
    target: str
    """What alignment compares: ``mixer``, ``layer`` or ``head``."""
    train: str
    """``ssm``, ``mixer`` or ``all``."""
    kind: str
    """The divergence, of end-to-end distillation."""
    fused: bool
    """Whether the loss holds the logits of a chunk of tokens only (under ZeRO-3 it never does)."""
    bf16: bool
    recompute: bool
    segment_len: int | None
    """Tokens that recurrent heads run over at a time; the backward computes them again."""
    divisible: bool
    """Whether the weights may be divided among processes."""

    trained: int
    """Elements, float32."""
    frozen_bytes: int
    """Of parameters that the stage holds beside them; those shared with the teacher are the teacher's."""
    teacher_bytes: int
    teacher_layer_bytes: int
    """Of the largest decoder layer of the teacher."""
    largest_layer_bytes: int
    """Of the parameters that the stage holds, those of one layer."""
    trained_matrices: int
    """Elements. Under bf16, autocast copies them once in a forward and keeps the copies to its end."""
    frozen_matrices: int
    """Elements in float32, copied at every use, and kept for the backward."""

    kept: tuple[int, ...]
    """Heads that stay attention, layer by layer."""
    n_heads: int
    head_dim: int
    width: int
    mlp_width: int
    gated: bool
    """An MLP that multiplies two projections of its input; GPT-NeoX's has one."""
    vocabulary: int
    d_state: int
    conv_width: int
    n_norms: int
    """In a layer, over its whole width."""
    eager: bool
    """Attention that holds its maps."""
    teacher_itemsize: int
    hidden_itemsize: int
    """Of what the student's layers hand on."""

    @property
    def itemsize(self) -> int:
        """Of what is computed in."""
        return BF16 if self.bf16 else FP32

    @property
    def layers(self) -> list[tuple[int, int]]:
        """(kept, recurrent) heads of the layers that the stage computes for the student."""
        both = [(kept, self.n_heads - kept) for kept in self.kept]
        return both if self.stage == "distill" else [layer for layer in both if layer[1]]


def stage_shape(config: StageConfig, student: HybridForCausalLM, teacher: PreTrainedModel) -> StageShape:
    """The shape of a stage; models on the meta device will do, and serve one stage each.

    Makes the stage, which freezes and shares parameters as `make_stage` says. Raises ValueError as that does.
    """
    stage = make_stage(config, student, teacher)
    end_to_end = isinstance(stage, EndToEnd)
    backbone: Any = text_config(student.model)  # a stage of its own may have a larger teacher
    target = getattr(config, "target", "mixer")
    blocks: Any = student.model.layers
    mixers = nn.ModuleList(student.mixers())
    computed = blocks if end_to_end or target == "layer" else mixers
    held = blocks if end_to_end else mixers
    embedding: Any = student.get_input_embeddings() if end_to_end else teacher.get_input_embeddings()
    return StageShape(
        stage="distill" if end_to_end else "matrix" if isinstance(stage, MatrixAlignment) else "align",
        target=target,
        train=getattr(config, "train", "ssm"),
        kind=getattr(config, "kind", "forward_kl"),
        fused=getattr(config, "fused", True) and not any(map(finishes_logits, (backbone, text_config(teacher)))),
        bf16=config.precision == "bf16",
        recompute=config.gradient_checkpointing,
        segment_len=getattr(config, "segment_len", None),
        divisible=stage.shardable,
        trained=sum(p.numel() for p in stage.parameters() if p.requires_grad),
        frozen_bytes=_nbytes(p for p in stage.parameters() if not p.requires_grad),
        teacher_bytes=sum(_nbytes(model.parameters()) for model in stage.teachers),
        teacher_layer_bytes=max(_nbytes(block.parameters()) for _, block in decoder_blocks(teacher)),
        largest_layer_bytes=max(_nbytes(layer.parameters()) for layer in held),
        trained_matrices=_float32_matrices(computed, trained=True),
        frozen_matrices=_float32_matrices(computed, trained=False),
        kept=tuple(len(mixer.kept) for mixer in student.mixers()),
        n_heads=student.mixers()[0].n_heads,
        head_dim=student.mixers()[0].head_dim,
        width=backbone.hidden_size,
        mlp_width=backbone.intermediate_size,
        gated=_reads(getattr(blocks[0], "mlp", None), backbone.hidden_size) != backbone.intermediate_size,
        vocabulary=backbone.vocab_size,
        d_state=student.config.d_state,
        conv_width=student.config.conv_width,
        n_norms=sum("norm" in name for name, _ in blocks[0].named_children()),
        eager=backbone._attn_implementation == "eager",
        teacher_itemsize=teacher.dtype.itemsize,
        hidden_itemsize=embedding.weight.element_size(),
    )


def _reads(mlp: nn.Module | None, width: int) -> int:
    """Rows of an MLP's linears that read hidden states of this width."""
    modules = () if mlp is None else mlp.modules()
    return sum(m.out_features for m in modules if isinstance(m, nn.Linear) and m.in_features == width)


def _float32_matrices(layers: nn.Module, *, trained: bool) -> int:
    weights = (module.weight for module in layers.modules() if isinstance(module, nn.Linear))
    return sum(w.numel() for w in weights if w.dtype == torch.float32 and w.requires_grad == trained)


def _nbytes(parameters: Iterable[nn.Parameter]) -> int:
    return sum(p.numel() * p.element_size() for p in parameters)


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one process at its fullest, part by part. Parts that are never there together share a line."""

    stage: str
    strategy: str
    world: int
    micro_batch: int
    recompute: bool

    trained: int
    frozen: int
    gradients: int
    optimizer: int
    teacher: int
    activations: int
    bf16_copies: int
    loss: int
    """Logits of a chunk of tokens, and the gradients that are computed with the loss."""
    workspace: int
    """What one layer's forward or backward needs beyond ``loss``, in whose place it comes."""
    communication: int

    @property
    def parts(self) -> dict[str, int]:
        """The lines of a table, by name."""
        return {name: getattr(self, name) for name in PARTS}

    @property
    def total(self) -> int:
        return sum(self.parts.values())


PARTS = {
    "trained": "trained parameters",
    "frozen": "frozen parameters",
    "gradients": "gradients",
    "optimizer": "optimiser",
    "teacher": "teacher",
    "activations": "activations",
    "bf16_copies": "bf16 copies",
    "loss": "loss chunk",
    "workspace": "workspace of a layer",
    "communication": "communication",
}
"""Fields of `MemoryPlan` that are bytes, and what tables call them."""


def memory_plan(
    shape: StageShape,
    *,
    world: int,
    micro_batch: int,
    seq_len: int,
    strategy: str,
    recompute: bool | None = None,
    micro_batches: int = 2,
    reduce_bucket: int = REDUCE_BUCKET,
    device: str = "cuda",
    teacher_sharding: str = "replicated",
) -> MemoryPlan:
    """The bytes of one of ``world`` processes, each with ``micro_batch`` rows of ``seq_len`` tokens at a time.

    ``recompute`` overrides the stage's own. ``micro_batches`` is how many make a step, in one process, and
    ``reduce_bucket`` the elements of DeepSpeed's. ``teacher_sharding`` is the run's. ``device`` is ``cuda``, with
    the kernels of `hybrid_kernels`, or ``cpu``, with plain torch.

    Raises ValueError for an unknown strategy or device, and numbers below 1.
    """
    _check(strategy, device, world=world, micro_batch=micro_batch, seq_len=seq_len, micro_batches=micro_batches)
    recompute = shape.recompute if recompute is None else recompute
    run = _Run(shape, micro_batch, seq_len, kernels=device == "cuda", fused=shape.fused and strategy != "zero3")
    loss = run.loss() if shape.stage == "distill" else 0
    return MemoryPlan(
        stage=shape.stage,
        strategy=strategy,
        world=world,
        micro_batch=micro_batch,
        recompute=recompute,
        **_divided(shape, strategy, world, micro_batches, reduce_bucket * FP32),
        teacher=_teacher(shape, world if teacher_sharding == "sharded" else 1),
        activations=run.kept_for_recompute() if recompute else run.kept(),
        bf16_copies=run.copies(recompute),
        loss=loss,
        workspace=max(0, run.work(recompute) - loss),
    )


def _teacher(shape: StageShape, parts: int) -> int:
    """Bytes of the teacher in one process. Of a divided one also the layer that runs, and the one put together next."""
    if parts == 1:
        return shape.teacher_bytes
    layers = len(shape.kept) * shape.teacher_layer_bytes
    return shape.teacher_bytes - layers + -(-layers // parts) + 2 * shape.teacher_layer_bytes


def recommend(plans: Sequence[MemoryPlan], budget_bytes: float) -> MemoryPlan:
    """The plan that fits and sends least. Raises ValueError, with advice, when none fits."""
    in_order = sorted(plans, key=lambda plan: STRATEGIES.index(plan.strategy))
    for plan in in_order:
        if plan.total <= budget_bytes:
            return plan
    least = min(in_order, key=lambda plan: plan.total)
    advice = [f"a micro-batch smaller than {least.micro_batch}"] if least.micro_batch > 1 else []
    advice += [] if least.recompute else ["recompute"]
    advice += ["more GPUs" if least.strategy != "ddp" else "ZeRO over several GPUs"]
    raise ValueError(
        f"{least.stage} fits in {budget_bytes / GB:.1f} GB with no strategy: {least.strategy} needs least, "
        f"{least.total / GB:.1f} GB; try {', '.join(advice)}, or GPUs with more memory."
    )


def _check(strategy: str, device: str, **counts: int) -> None:
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy is {strategy!r}; choose one of {', '.join(STRATEGIES)}.")
    if device not in ("cuda", "cpu"):
        raise ValueError(f"device is {device!r}; choose cuda or cpu.")
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name} is {value!r}; it must be a whole number of at least 1.")


def _divided(shape: StageShape, strategy: str, world: int, micro_batches: int, bucket: int) -> dict[str, int]:
    """What a process holds of parameters, gradients and optimiser, and what it communicates in.

    As DeepSpeed 0.19 does it: its optimiser works on a copy of the float32 weights of its own share.
    """
    whole, frozen = shape.trained * FP32, shape.frozen_bytes
    held, share = whole + frozen, -(-whole // world)
    if strategy == "ddp":
        # Gradients are views of the buckets, until zero_grad drops them and accumulation makes new ones.
        buckets = whole if world > 1 and micro_batches > 1 else 0
        return dict(trained=whole, frozen=frozen, gradients=whole, optimizer=2 * whole, communication=buckets)
    if strategy in ("zero1", "zero2"):
        gradients = whole if strategy == "zero1" else share
        return dict(
            trained=whole + share, frozen=frozen, gradients=gradients, optimizer=2 * share, communication=bucket
        )
    divided = dict(frozen=-(-frozen // world), gradients=share, optimizer=2 * share)
    if strategy == "zero3":
        elements = shape.trained + frozen // shape.teacher_itemsize
        together = int(held * min(1.0, LIVE_PARAMETERS / elements))
        return dict(trained=2 * share, communication=bucket + together, **divided)
    if shape.stage != "distill":
        # Nothing flows back into a layer's input, so FSDP2 divides weights and gradients when the backward ends.
        return dict(trained=share, communication=held + whole, **divided)
    # What is in no layer stays together; besides a layer, the next one, and one layer's gradients.
    outside = max(0, held - len(shape.layers) * shape.largest_layer_bytes)
    together = min(2 * held, outside + 3 * shape.largest_layer_bytes)
    return dict(trained=share, communication=together, **divided)


@dataclass(frozen=True)
class _Run:
    """A micro-batch of a stage: what its forward keeps, and what it needs for a moment."""

    shape: StageShape
    micro_batch: int
    seq_len: int
    kernels: bool
    fused: bool

    @property
    def tokens(self) -> int:
        return self.micro_batch * self.seq_len

    def kept(self) -> int:
        """Bytes that wait for the backward."""
        layers = sum(self._layer(kept, recurrent) for kept, recurrent in self.shape.layers)
        return int(self.tokens * (layers + self._around()))

    def kept_for_recompute(self) -> int:
        """The same with every layer recomputed: what goes into a layer, in alignment also what it is compared with."""
        shape, n_layers = self.shape, len(self.shape.layers)
        masks = self.seq_len + 2 * shape.head_dim * shape.hidden_itemsize  # the packing mask, cosines and sines
        inputs = n_layers * shape.width * shape.hidden_itemsize
        if shape.stage != "distill":
            inputs += n_layers * shape.n_heads * shape.head_dim * shape.itemsize
            inputs += n_layers * shape.n_heads * self.seq_len * shape.teacher_itemsize if shape.eager else 0
            # A decoder layer's output is the next one's input.
            inputs += shape.width * (shape.hidden_itemsize if shape.target == "layer" else n_layers * shape.itemsize)
        return self.tokens * (inputs + masks + self._around())

    def copies(self, recompute: bool) -> int:
        """Bytes of autocast's copies of weights; recomputed layers make those of frozen ones again."""
        if not self.shape.bf16:
            return 0
        return BF16 * (self.shape.trained_matrices + (0 if recompute else self.shape.frozen_matrices))

    def _around(self) -> int:
        """Bytes of a token kept outside the layers: around the last norm, and what an output embedding reads."""
        shape = self.shape
        if shape.stage != "distill":
            return 0
        trained = FP32 + (0 if self.fused else shape.itemsize) if shape.train == "all" else 0
        return shape.width * (FP32 + trained)

    def _layer(self, kept: int, recurrent: int) -> float:
        """Bytes of a token that one layer keeps."""
        if self.shape.stage == "matrix":
            return self._matrix(recurrent)
        total = self._mixer(kept, recurrent)
        if self.shape.stage == "distill":
            return total + self._norms(self.shape.n_norms) + self._mlp()
        if self.shape.target == "layer":
            total += self._norms(self.shape.n_norms - 1) + self._mlp()
        compared = recurrent * self.shape.head_dim if self.shape.target == "head" else self.shape.width
        return total + compared * FP32  # the error

    def _norms(self, n_norms: int) -> int:
        """RMSNorm in float32: its input, and, for the weight's gradient, its normalised input."""
        trained = FP32 if self.shape.train == "all" else 0
        return n_norms * self.shape.width * (FP32 + trained)

    def _mlp(self) -> int:
        """Gate, its activation and up; for the weights' gradients their product and the input of gate and up. Without
        a gate: up, and for the gradients its activation and its input.
        """
        shape, item = self.shape, self.shape.itemsize
        if not shape.gated:
            return shape.mlp_width * item if shape.train != "all" else 2 * shape.mlp_width * item + self._inputs(1)
        if shape.train != "all":
            return 3 * shape.mlp_width * item
        return 4 * shape.mlp_width * item + self._inputs(2)

    def _inputs(self, n_linears: int) -> int:
        """What trained linear layers that read the same hidden states keep: the same tensor, or a cast one each."""
        shape = self.shape
        if n_linears == 0:
            return 0
        return shape.width * (shape.itemsize if shape.hidden_itemsize == shape.itemsize else n_linears * shape.itemsize)

    def _mixer(self, kept: int, recurrent: int) -> float:
        shape, item = self.shape, self.shape.itemsize
        trains_attention = shape.train != "ssm"
        total = self._inputs((3 if kept and trains_attention else 0) + (5 if recurrent and not self.in_segments else 0))
        if recurrent:
            total += self._handed_on(recurrent) if self.in_segments else self._recurrence(recurrent)
        if kept and (trains_attention or shape.stage == "distill"):
            total += self._attention(kept)
        if trains_attention:  # the output projection's input
            total += shape.n_heads * shape.head_dim * item
        return total

    def _attention(self, kept: int) -> int:
        """q, k, v (as many as query heads) and the output; the mask, and a float32 normaliser, or the map itself."""
        item, length = self.shape.itemsize, self.seq_len
        heads = 4 * kept * self.shape.head_dim * item
        if self.shape.eager:
            return heads + kept * length * (FP32 + item)
        return heads + length * item + kept * FP32

    def _recurrence(self, recurrent: int) -> float:
        """Convolution, scan, skip and gate of the recurrent heads."""
        shape, item = self.shape, self.shape.itemsize
        x, state = recurrent * shape.head_dim, recurrent * shape.head_dim * shape.d_state
        bc = recurrent * shape.d_state
        channels = x + 2 * bc
        if self.kernels and max(shape.head_dim, shape.d_state) <= LARGEST_IN_KERNELS:
            # Into and out of the convolution, z, the raw decay, and the state before every chunk.
            return 2 * channels * item + x * item + recurrent * FP32 + state * item / KERNEL_CHUNK[item]
        chunk = min(CHUNK_SIZE, self.seq_len)
        filled = -(-self.seq_len // chunk) * chunk / self.seq_len  # to whole chunks
        convolution = (shape.conv_width + 1) * channels * item
        scan = FP32 * (2 * x + 3 * bc + recurrent * (chunk + 7) + 2 * state / chunk)
        gate = 3 * x * item
        return convolution + filled * scan + gate + (x * FP32 if item != FP32 else 0)

    @property
    def in_segments(self) -> bool:
        return self.shape.segment_len is not None and self.shape.segment_len < self.seq_len

    def _handed_on(self, recurrent: int) -> float:
        """What the segments begin from: the hidden states, where nothing else keeps them, and the states between."""
        shape = self.shape
        state = recurrent * shape.head_dim * shape.d_state * FP32
        shared = shape.train != "ssm" and shape.hidden_itemsize == shape.itemsize
        return (0 if shared else shape.width * shape.hidden_itemsize) + state / (shape.segment_len or 1)

    def _segment(self) -> float:
        """What the backward of one segment computes again, shared out over the tokens of the row."""
        recurrent = max(recurrent for _, recurrent in self.shape.layers)
        if not self.in_segments or not recurrent:
            return 0
        return (self._inputs(5) + self._recurrence(recurrent)) * (self.shape.segment_len or 1) / self.seq_len

    def _matrix(self, recurrent: int) -> int:
        """For every pair of tokens the scores, the decays and the error, in float32."""
        shape, item = self.shape, self.shape.itemsize
        channels = recurrent * (shape.head_dim + 2 * shape.d_state)
        convolution = channels * item * (1 if self.kernels else shape.conv_width)
        maps = recurrent * self.seq_len * 3 * FP32
        return self._inputs(3) + convolution + 2 * recurrent * (shape.d_state + 1) * FP32 + maps

    def work(self, recompute: bool) -> int:
        """Bytes that one layer needs for a moment, at the end of the forward or in the backward."""
        return int(self.tokens * max(self._forward_work(), self._backward_work(recompute)))

    def _forward_work(self) -> float:
        """A teacher's layer while the student's activations are there: its MLP, its residuals, the packing mask."""
        shape, item = self.shape, self.shape.itemsize
        held = (3 if shape.gated else 2) * shape.mlp_width * item
        held += 2 * shape.width * shape.teacher_itemsize + self.seq_len
        if shape.stage == "distill":
            return held
        if shape.eager:  # scores, their softmax and what a layer's comparison picks from it
            held += shape.n_heads * self.seq_len * (2 * FP32 + shape.teacher_itemsize)
        # The hooks hold every layer's heads until the teacher is through.
        return held + len(shape.kept) * shape.n_heads * shape.head_dim * item

    def _backward_work(self, recompute: bool) -> float:
        shape, item = self.shape, self.shape.itemsize
        gradients = 2 * shape.width * FP32
        if shape.stage == "matrix":
            gradients = 3 * max(recurrent for _, recurrent in shape.layers) * self.seq_len * FP32
        if shape.stage == "distill" or shape.target == "layer":
            gradients += 2 * shape.mlp_width * item
        again = max(self._layer(*layer) for layer in shape.layers) if recompute else 0
        return gradients + again + self._segment()

    def loss(self) -> int:
        """The loss over the vocabulary: at its fullest in its forward, or where its gradients are scaled."""
        shape, item = self.shape, self.shape.itemsize
        head = shape.vocabulary * shape.width
        trained_head = head if shape.train == "all" else 0
        d_hidden = self.tokens * shape.width * shape.hidden_itemsize
        if not self.fused:
            return self._unfused_loss()
        largest = (KERNEL_LOGITS if self.kernels else TORCH_LOGITS) // shape.vocabulary
        chunk = min(self.tokens, largest // 128 * 128 if largest >= 128 else max(1, largest)) * shape.vocabulary
        copies = sum(head * BF16 for size in (shape.hidden_itemsize, shape.teacher_itemsize) if item < size)
        logits = 2 * chunk * item
        if not self.kernels:
            logits = chunk * (LOGIT_BUFFERS[shape.kind] * FP32 + (item if item < FP32 else 0))
        forward = trained_head * FP32 + d_hidden + copies + logits
        return max(forward, 2 * (trained_head * FP32 + d_hidden))

    def _unfused_loss(self) -> int:
        """Logits of all tokens, the student's with their gradient once there are several chunks; one in float32."""
        shape, item = self.shape, self.shape.itemsize
        logits = self.tokens * shape.vocabulary
        chunk = min(logits, UNFUSED_CHUNK_LOGITS)
        several = logits * item if chunk < logits else 0
        return 2 * logits * item + several + chunk * LOGIT_BUFFERS[shape.kind] * FP32
