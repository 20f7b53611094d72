"""Bytes that one process needs to train a stage, from shapes alone: no tensor is allocated.

`StageShape` reads off models on the meta device what a stage trains and keeps. `memory_plan` adds up, for one way to
share the work among processes, what is in memory when it is fullest: about the end of a forward pass, of a micro-batch
that is not the first of its step, so that gradients are there already.

    always there     trained and frozen parameters, gradients, AdamW's two moments, the teacher
    a micro-batch    activations kept for the backward, bf16 copies that autocast makes of float32 weights
    for a moment     the loss over the vocabulary; where that needs less, one layer's forward or backward
    to communicate   buckets, and parameters gathered for use

Not counted: the CUDA context (about 0.5 GB), NCCL, and fragmentation. `_Run` lists what a layer keeps, in bytes per
token, for dense decoders; benchmarks/memory_plan.py compares all of it with measurements.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
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
"""Ways to share a stage among processes, by what they send: DDP and ZeRO-1 once a step, ZeRO-2 the gradients of every
micro-batch, ZeRO-3 and FSDP2 the parameters of every pass as well."""

FP32, BF16 = 4, 2
REDUCE_BUCKET = 500_000_000  # elements, DeepSpeed's default; the launch files leave it
LIVE_PARAMETERS = 1_000_000_000  # ZeRO-3 keeps as many elements gathered that it will soon use again: its default
KERNEL_CHUNK = {BF16: 32, FP32: 16}  # tokens between the states that the kernels store (on Hopper, N = P = 64)
KERNEL_LOGITS, TORCH_LOGITS = 2**28, 2**25  # of a chunk of the fused loss: hybrid_kernels.loss.CHUNK_LOGITS
LOGIT_BUFFERS = {"forward_kl": 8, "reverse_kl": 9, "jsd": 10}  # float32, of a chunk's size; in plain torch


class StageShape:
    """Everything that a stage's memory depends on, besides batch and processes. Counts are elements unless in bytes.

    Models on the meta device will do, and serve one stage each: making the stage freezes and shares parameters. Raises
    ValueError as `make_stage` does.
    """

    def __init__(self, config: StageConfig, student: HybridForCausalLM, teacher: PreTrainedModel) -> None:
        stage = make_stage(config, student, teacher)
        end_to_end = isinstance(stage, EndToEnd)
        self.stage = "distill" if end_to_end else "matrix" if isinstance(stage, MatrixAlignment) else "align"
        self.target: str = getattr(config, "target", "mixer")
        self.train: str = getattr(config, "train", "ssm")
        self.kind: str = getattr(config, "kind", "forward_kl")
        # Tokens that recurrent heads run over at a time; the backward computes them again.
        self.segment_len: int | None = getattr(config, "segment_len", None)
        self.bf16 = config.precision == "bf16"
        self.itemsize = BF16 if self.bf16 else FP32
        self.gradient_checkpointing = config.gradient_checkpointing
        self.shardable = stage.shardable

        backbone: Any = text_config(student.model)  # a stage of its own may have a larger teacher
        blocks: Any = student.model.layers
        mixers = student.mixers()
        # The loss holds the logits of a chunk of tokens only (under ZeRO-3 it never does).
        self.fused = getattr(config, "fused", True) and not any(map(finishes_logits, (backbone, text_config(teacher))))
        self.trained = sum(p.numel() for p in stage.parameters() if p.requires_grad)
        # Parameters shared with the teacher are the teacher's.
        self.frozen_bytes = _nbytes(p for p in stage.parameters() if not p.requires_grad)
        self.teacher_bytes = sum(_nbytes(model.parameters()) for model in stage.teachers)
        self.teacher_layer_bytes = max(_nbytes(block.parameters()) for _, block in decoder_blocks(teacher))
        self.largest_layer_bytes = max(_nbytes(layer.parameters()) for layer in (blocks if end_to_end else mixers))
        # Under bf16, autocast copies trained matrices once in a forward, and float32 frozen ones at every use.
        computed = blocks if end_to_end or self.target == "layer" else nn.ModuleList(mixers)
        matrices = [m.weight for m in _linears(computed) if m.weight.dtype == torch.float32]
        self.trained_matrices = sum(w.numel() for w in matrices if w.requires_grad)
        self.frozen_matrices = sum(w.numel() for w in matrices if not w.requires_grad)

        self.n_heads, self.head_dim = mixers[0].n_heads, mixers[0].head_dim
        self.kept = tuple(len(mixer.kept) for mixer in mixers)
        both = [(kept, self.n_heads - kept) for kept in self.kept]
        # (kept, recurrent) heads of the layers that the stage computes for the student.
        self.layers = both if end_to_end else [layer for layer in both if layer[1]]
        self.width: int = backbone.hidden_size
        self.mlp_width: int = backbone.intermediate_size
        mlp_inputs = [m for m in _linears(getattr(blocks[0], "mlp", nn.Module())) if m.in_features == self.width]
        self.gated = sum(m.out_features for m in mlp_inputs) != self.mlp_width  # GPT-NeoX's has one projection
        self.vocabulary: int = backbone.vocab_size
        self.d_state, self.conv_width = student.config.d_state, student.config.conv_width
        self.n_norms = sum("norm" in name for name, _ in blocks[0].named_children())  # over a layer's whole width
        self.eager = backbone._attn_implementation == "eager"  # attention that holds its maps
        embedding: Any = (student if end_to_end else teacher).get_input_embeddings()
        self.teacher_itemsize = teacher.dtype.itemsize
        self.hidden_itemsize: int = embedding.weight.element_size()  # of hidden states between the student's layers


def _linears(module: nn.Module) -> list[nn.Linear]:
    return [m for m in module.modules() if isinstance(m, nn.Linear)]


def _nbytes(parameters: Iterable[nn.Parameter]) -> int:
    return sum(p.numel() * p.element_size() for p in parameters)


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one process at its fullest, part by part. Parts that are never there together share a line."""

    strategy: str
    trained_parameters: int
    frozen_parameters: int
    gradients: int
    optimizer: int
    teacher: int
    activations: int
    bf16_copies: int
    loss_chunk: int  # logits of a chunk of tokens, and the gradients that are computed with the loss
    layer_workspace: int  # of one layer's forward or backward, beyond the loss chunk in whose place it comes
    communication: int

    @property
    def parts(self) -> dict[str, int]:
        """Lines of a table, by name."""
        return {name.replace("_", " "): size for name, size in asdict(self).items() if name != "strategy"}

    @property
    def total(self) -> int:
        return sum(self.parts.values())


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
    """Plan the memory of one of ``world`` processes, each with ``micro_batch`` rows of ``seq_len`` tokens at a time.

    ``gradient_checkpointing`` overrides the stage's own. ``micro_batches`` is how many make a step, in one process, and
    ``reduce_bucket`` the elements of DeepSpeed's. ``device`` is ``cuda``, with the kernels of `hybrid_kernels`, or
    ``cpu``, with plain torch.
    """
    recompute = shape.gradient_checkpointing if gradient_checkpointing is None else gradient_checkpointing
    run = _Run(shape, micro_batch, seq_len, kernels=device == "cuda", fused=shape.fused and strategy != "zero3")
    loss = run.loss() if shape.stage == "distill" else 0
    return MemoryPlan(
        strategy,
        **_shares(shape, strategy, world, micro_batches, reduce_bucket * FP32),
        teacher=_teacher(shape, world if teacher_sharding == "sharded" else 1),
        activations=run.kept_for_recompute() if recompute else run.kept(),
        bf16_copies=run.copies(recompute),
        loss_chunk=loss,
        layer_workspace=max(0, run.work(recompute) - loss),
    )


def _teacher(shape: StageShape, parts: int) -> int:
    """Return a process's bytes of the teacher; of a sharded one also the layer that runs, and the next one."""
    if parts == 1:
        return shape.teacher_bytes
    layers = len(shape.kept) * shape.teacher_layer_bytes
    return shape.teacher_bytes - layers + -(-layers // parts) + 2 * shape.teacher_layer_bytes


def _shares(shape: StageShape, strategy: str, world: int, micro_batches: int, bucket: int) -> dict[str, int]:
    """Return a process's bytes of parameters, gradients, optimizer and communication.

    As in DeepSpeed 0.19, whose optimizer works on a copy of the float32 weights of its own share.
    """
    whole, frozen = shape.trained * FP32, shape.frozen_bytes
    held, share = whole + frozen, -(-whole // world)
    if strategy == "ddp":
        trained, gradients, optimizer = whole, whole, 2 * whole
        # Gradients are views of the buckets, until zero_grad drops them and accumulation makes new ones.
        communication = whole if world > 1 and micro_batches > 1 else 0
    elif strategy in ("zero1", "zero2"):
        trained, gradients, optimizer = whole + share, whole if strategy == "zero1" else share, 2 * share
        communication = bucket
    else:
        trained, gradients, optimizer, frozen = share, share, 2 * share, -(-frozen // world)
        if strategy == "zero3":
            elements = shape.trained + shape.frozen_bytes // shape.teacher_itemsize
            trained, communication = 2 * share, bucket + int(held * min(1.0, LIVE_PARAMETERS / elements))
        elif shape.stage != "distill":
            # Nothing flows back into a layer's input, so FSDP2 reshards when the backward ends.
            communication = held + whole
        else:
            # What is in no layer stays gathered; besides a layer, the next one, and one layer's gradients.
            outside = max(0, held - len(shape.layers) * shape.largest_layer_bytes)
            communication = min(2 * held, outside + 3 * shape.largest_layer_bytes)
    return {
        "trained_parameters": trained, "frozen_parameters": frozen, "gradients": gradients, "optimizer": optimizer,
        "communication": communication,
    }  # fmt: skip


@dataclass(frozen=True)
class _Run:
    """A micro-batch of a stage: bytes that its forward keeps, and that it needs for a moment."""

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
        return int(self.tokens * (sum(self._layer(*heads) for heads in self.shape.layers) + self._around()))

    def kept_for_recompute(self) -> int:
        """The same with every layer recomputed: a layer's input, and in alignment what it is compared with."""
        shape, n_layers = self.shape, len(self.shape.layers)
        inputs = self.seq_len + 2 * shape.head_dim * shape.hidden_itemsize  # the packing mask, cosines and sines
        inputs += n_layers * shape.width * shape.hidden_itemsize
        if shape.stage != "distill":
            inputs += n_layers * shape.n_heads * shape.head_dim * shape.itemsize
            inputs += n_layers * shape.n_heads * self.seq_len * shape.teacher_itemsize if shape.eager else 0
            # A decoder layer's output is the next one's input.
            inputs += shape.width * (shape.hidden_itemsize if shape.target == "layer" else n_layers * shape.itemsize)
        return self.tokens * (inputs + self._around())

    def copies(self, recompute: bool) -> int:
        """Bytes of autocast's copies of weights; recomputed layers make those of frozen ones again."""
        matrices = self.shape.trained_matrices + (0 if recompute else self.shape.frozen_matrices)
        return BF16 * matrices if self.shape.bf16 else 0

    def work(self, recompute: bool) -> int:
        """Bytes that one layer needs for a moment, at the end of the forward or in the backward."""
        return int(self.tokens * max(self._forward_work(), self._backward_work(recompute)))

    # From here on bytes of a token.

    def _around(self) -> int:
        """Kept outside the layers: around the last norm, and what an output embedding reads."""
        shape = self.shape
        trained = FP32 + (0 if self.fused else shape.itemsize) if shape.train == "all" else 0
        return shape.width * (FP32 + trained) if shape.stage == "distill" else 0

    def _layer(self, kept: int, recurrent: int) -> float:
        """Kept by one layer with so many heads of each kind."""
        shape, item = self.shape, self.shape.itemsize
        if shape.stage == "matrix":  # for every pair of tokens the scores, the decays and the error, in float32
            channels = recurrent * (shape.head_dim + 2 * shape.d_state)
            convolution = channels * item * (1 if self.kernels else shape.conv_width)
            maps = recurrent * self.seq_len * 3 * FP32
            return self._inputs(3) + convolution + 2 * recurrent * (shape.d_state + 1) * FP32 + maps
        total = self._mixer(kept, recurrent)
        if shape.stage == "distill":
            return total + self._norms(shape.n_norms) + self._mlp()
        if shape.target == "layer":
            total += self._norms(shape.n_norms - 1) + self._mlp()
        return total + (recurrent * shape.head_dim if shape.target == "head" else shape.width) * FP32  # the error

    def _norms(self, n_norms: int) -> int:
        """RMSNorm in float32: its input, and, for the weight's gradient, its normalized input."""
        return n_norms * self.shape.width * FP32 * (2 if self.shape.train == "all" else 1)

    def _mlp(self) -> int:
        """Gate, activation and up (without a gate: up); for the weights' gradients their product and the input too."""
        trains = self.shape.train == "all"
        n_kept, n_inputs = (3 + trains, 2) if self.shape.gated else (1 + trains, 1)
        return n_kept * self.shape.mlp_width * self.shape.itemsize + (self._inputs(n_inputs) if trains else 0)

    def _inputs(self, n_linears: int) -> int:
        """Input of trained linear layers that read the same hidden states: the same tensor, or a cast one each."""
        same = self.shape.hidden_itemsize == self.shape.itemsize
        return self.shape.width * self.shape.itemsize * (min(1, n_linears) if same else n_linears)

    def _mixer(self, kept: int, recurrent: int) -> float:
        shape, item = self.shape, self.shape.itemsize
        trains_attention = shape.train != "ssm"
        total: float = self._inputs(
            (3 if kept and trains_attention else 0) + (5 if recurrent and not self._in_segments else 0)
        )
        if recurrent:
            total += self._between_segments(recurrent) if self._in_segments else self._recurrence(recurrent)
        if kept and (trains_attention or shape.stage == "distill"):
            # q, k, v (as many as query heads) and the output; the mask, and a float32 normalizer, or the map itself.
            maps = kept * self.seq_len * (FP32 + item) if shape.eager else self.seq_len * item + kept * FP32
            total += 4 * kept * shape.head_dim * item + maps
        return total + (shape.n_heads * shape.head_dim * item if trains_attention else 0)  # of the output projection

    def _recurrence(self, recurrent: int) -> float:
        """Convolution, scan, skip and gate of the recurrent heads."""
        shape, item = self.shape, self.shape.itemsize
        x, bc, state = (recurrent * n for n in (shape.head_dim, shape.d_state, shape.head_dim * shape.d_state))
        channels = x + 2 * bc
        if self.kernels and max(shape.head_dim, shape.d_state) <= LARGEST_IN_KERNELS:
            # Into and out of the convolution, z, the raw decay, and the state before every chunk.
            return 2 * channels * item + x * item + recurrent * FP32 + state * item / KERNEL_CHUNK[item]
        chunk = min(CHUNK_SIZE, self.seq_len)
        filled = -(-self.seq_len // chunk) * chunk / self.seq_len  # to whole chunks
        convolution = (shape.conv_width + 1) * channels * item
        scan = FP32 * (2 * x + 3 * bc + recurrent * (chunk + 7) + 2 * state / chunk)
        return convolution + filled * scan + 3 * x * item + (x * FP32 if item != FP32 else 0)

    @property
    def _in_segments(self) -> bool:
        return self.shape.segment_len is not None and self.shape.segment_len < self.seq_len

    def _between_segments(self, recurrent: int) -> float:
        """Hidden states that segments begin from, where nothing else keeps them, and the states between."""
        shape = self.shape
        state = recurrent * shape.head_dim * shape.d_state * FP32
        shared = shape.train != "ssm" and shape.hidden_itemsize == shape.itemsize
        return (0 if shared else shape.width * shape.hidden_itemsize) + state / (shape.segment_len or 1)

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
        """Gradients of a layer's input, a recomputed layer, and a segment that is computed again."""
        shape, most = self.shape, max(recurrent for _, recurrent in self.shape.layers)
        work: float = 3 * most * self.seq_len * FP32 if shape.stage == "matrix" else 2 * shape.width * FP32
        if shape.stage == "distill" or shape.target == "layer":
            work += 2 * shape.mlp_width * shape.itemsize
        if recompute:
            work += max(self._layer(*layer) for layer in shape.layers)
        if self._in_segments and most:
            work += (self._inputs(5) + self._recurrence(most)) * (shape.segment_len or 1) / self.seq_len
        return work

    def loss(self) -> int:
        """Bytes of the loss over the vocabulary: in its forward, or where its gradients are scaled."""
        shape, item = self.shape, self.shape.itemsize
        if not self.fused:  # logits of all tokens, the student's with their gradient once there are several chunks
            logits = self.tokens * shape.vocabulary
            chunk = min(logits, UNFUSED_CHUNK_LOGITS)
            return (3 if chunk < logits else 2) * logits * item + chunk * LOGIT_BUFFERS[shape.kind] * FP32
        head = shape.vocabulary * shape.width
        largest = (KERNEL_LOGITS if self.kernels else TORCH_LOGITS) // shape.vocabulary
        chunk = min(self.tokens, largest // 128 * 128 if largest >= 128 else max(1, largest)) * shape.vocabulary
        logits = 2 * chunk * item
        if not self.kernels:
            logits = chunk * (LOGIT_BUFFERS[shape.kind] * FP32 + (item if item < FP32 else 0))
        copies = sum(head * BF16 for size in (shape.hidden_itemsize, shape.teacher_itemsize) if item < size)
        gradients = (head * FP32 if shape.train == "all" else 0) + self.tokens * shape.width * shape.hidden_itemsize
        return max(gradients + copies + logits, 2 * gradients)
