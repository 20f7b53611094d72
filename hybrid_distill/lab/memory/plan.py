"""Bytes that one process needs to train a stage, from shapes alone: no tensor is allocated.

`StageShape` reads from models on the meta device what a stage trains and keeps. `memory_plan` adds up the peak memory
for one strategy of splitting the work among processes. The peak is near the end of a forward pass, in a micro-batch
after the first of its step, when gradients already exist. Not counted: the CUDA context (about 0.5 GB), NCCL, and
fragmentation. benchmarks/memory_plan.py compares every part with measurements.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from hybrid_kernels.loss import CHUNK_LOGITS
from hybrid_kernels.loss_torch import CACHED_LOGITS
from torch import nn
from transformers import PreTrainedModel

from ...model.kernel_choice import OUR_LIMITS
from ...model.local_attention import BLOCK
from ...model.mixer import HybridMixer
from ...model.modeling_hybrid import HybridForCausalLM, finishes_logits
from ...model.ssd import CHUNK_SIZE
from ...teacher import decoder_blocks, text_config
from ...train.config import StageConfig
from ...train.end_to_end import EndToEnd
from ...train.losses import CHUNK_LOGITS as UNFUSED_CHUNK_LOGITS
from ...train.matrix import MatrixAlignment
from ...train.parallel.fsdp2 import gathered_in_bf16
from ...train.stages import make_stage

GB = 1e9
STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "fsdp2")
"""Strategies for splitting a stage among processes. They differ in what they send: DDP and ZeRO-1 once per step, ZeRO-2
the gradients of every micro-batch, ZeRO-3 also the parameters of every pass. FSDP2 sends parameters and gradients once
per step if it has several micro-batches, for which it holds both whole in between."""

FP32 = 4
BF16 = 2
NEVER = 2**62
"""Length of a segment that is longer than any row."""
REDUCE_BUCKET = 500_000_000
"""Elements; DeepSpeed's default, which the launch files keep."""
LIVE_PARAMETERS = 1_000_000_000
"""Elements that ZeRO-3 keeps gathered for reuse; its default."""
# Tokens between the states that the kernels store, by bytes of a number (on Hopper, N = P = 64). A
# copy of hybrid_kernels.ssd_tiles, which imports triton: a machine that only plans may lack it.
KERNEL_CHUNK = {BF16: 32, FP32: 16}
# flash-linear-attention's; it stores queries, keys, values and a row of each chunk's system.
DELTA_CHUNK = 64
# float32, per logit that plain torch compares at once.
LOGIT_BUFFERS = {"forward_kl": 8, "reverse_kl": 9, "jsd": 10}


class StageShape:
    """Everything that a stage's memory depends on, except batch and processes. Counts are elements unless in bytes.

    Models may be on the meta device. Use them for one stage only: making the stage freezes and shares parameters.
    Raises ValueError as `make_stage` does.
    """

    def __init__(
        self, config: StageConfig, student: HybridForCausalLM, teacher: PreTrainedModel
    ) -> None:
        stage = make_stage(config, student, teacher)
        self.end_to_end = isinstance(stage, EndToEnd)
        self.matrix = isinstance(stage, MatrixAlignment)
        self.target: str = getattr(config, "target", "mixer")
        train = getattr(config, "train", "ssm")
        self.trains_all = train == "all"
        self.trains_attention = train != "ssm"
        self.kind: str = getattr(config, "kind", "forward_kl")
        # Tokens per segment of the recurrent heads; the backward recomputes each segment.
        self.segment_len: int = getattr(config, "segment_len", None) or NEVER
        self.bf16 = config.precision == "bf16"
        self.gradient_checkpointing = config.gradient_checkpointing
        self.itemsize = BF16 if self.bf16 else FP32
        self.shardable = stage.shardable

        # Not the teacher: a stage may have its own, larger one.
        backbone = text_config(student.model)
        blocks = student.model.layers
        mixers = student.mixers()
        # Fused: the loss holds the logits of only a chunk of tokens (never under ZeRO-3).
        finishes = finishes_logits(backbone) or finishes_logits(text_config(teacher))
        self.fused = getattr(config, "fused", True) and not finishes
        self.trained = sum(p.numel() for p in stage.parameters() if p.requires_grad)
        # Parameters shared with the teacher are the teacher's.
        self.frozen_bytes = _nbytes(p for p in stage.parameters() if not p.requires_grad)
        # Elements of float32 that FSDP2 gathers as bfloat16.
        self.gathered_in_bf16 = sum(
            p.numel() for p in gathered_in_bf16(stage) if p.dtype == torch.float32
        )
        self.teacher_bytes = sum(_nbytes(model.parameters()) for model in stage.teachers)
        self.teacher_layer_bytes = max(
            _nbytes(block.parameters()) for _, block in decoder_blocks(teacher)
        )
        sharded_layers = blocks if self.end_to_end else mixers
        self.layer_bytes = max(_nbytes(layer.parameters()) for layer in sharded_layers)
        # Under bf16, autocast copies trained matrices once per forward, and float32 frozen ones at every use.
        computed = blocks if self.end_to_end or self.target == "layer" else nn.ModuleList(mixers)
        matrices = [m.weight for m in _linears(computed) if m.weight.dtype == torch.float32]
        self.trained_matrices = sum(w.numel() for w in matrices if w.requires_grad)
        self.frozen_matrices = sum(w.numel() for w in matrices if not w.requires_grad)

        self.n_layers = len(mixers)
        self.n_heads = mixers[0].n_heads
        self.head_dim = mixers[0].head_dim
        self.group_size = mixers[0].group_size
        self.window = student.config.window
        self.sinks = student.config.sinks
        computed_mixers = [mixer for mixer in mixers if self.end_to_end or mixer.replaced]
        # Heads of the layers that the stage computes for the student.
        self.layers = [LayerHeads.of(mixer) for mixer in computed_mixers]
        self.width: int = backbone.hidden_size
        self.mlp_width: int = backbone.intermediate_size
        mlp = getattr(blocks[0], "mlp", nn.Module())
        mlp_inputs = [linear for linear in _linears(mlp) if linear.in_features == self.width]
        # GPT-NeoX's has one projection.
        self.gated = sum(m.out_features for m in mlp_inputs) != self.mlp_width
        self.vocabulary: int = backbone.vocab_size
        self.d_state = student.config.d_state
        self.conv_width = student.config.conv_width
        self.delta_rule = student.config.recurrence == "gdn"
        # Over a layer's whole width.
        self.n_norms = sum("norm" in name for name, _ in blocks[0].named_children())
        # The one attention that stores its maps.
        self.eager = backbone._attn_implementation == "eager"
        embedding: Any = (student if self.end_to_end else teacher).get_input_embeddings()
        self.teacher_itemsize = teacher.dtype.itemsize
        # Of hidden states between the student's layers.
        self.hidden_itemsize: int = embedding.weight.element_size()


class LayerHeads(NamedTuple):
    """Numbers of a layer's heads by what they compute; a replaced head may do both of the latter."""

    kept: int
    windowed: int
    recurrent: int
    read: int
    """KV heads of the windows: one for each windowed head if they are read unevenly."""

    @classmethod
    def of(cls, mixer: HybridMixer) -> LayerHeads:
        """Count the heads of a student's layer."""
        n_replaced = len(mixer.replaced)
        return cls(
            kept=len(mixer.kept),
            windowed=n_replaced if mixer.windowed is not None else 0,
            recurrent=n_replaced if mixer.ssm is not None else 0,
            read=len(mixer.windowed.window_groups) if mixer.windowed is not None else 0,
        )


def _linears(module: nn.Module) -> list[nn.Linear]:
    return [m for m in module.modules() if isinstance(m, nn.Linear)]


def _nbytes(parameters: Iterable[nn.Parameter]) -> int:
    return sum(p.numel() * p.element_size() for p in parameters)


MemoryPlan = dict[str, int]
"""Peak bytes of one process, by part. Parts that never coexist share a line."""


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
    or ``cpu``, with plain torch.
    """
    recompute = gradient_checkpointing
    if recompute is None:
        recompute = shape.gradient_checkpointing
    tokens = micro_batch * seq_len
    kernels = device == "cuda"
    # Under ZeRO-3, no process holds the whole output embedding between calls.
    fused = shape.fused and strategy != "zero3"
    layers = [_layer(shape, heads, seq_len, kernels) for heads in shape.layers]
    activations: float = sum(layers)
    copied = shape.trained_matrices + shape.frozen_matrices
    recomputed: float = 0
    if recompute:
        activations = _inputs_of_layers(shape, seq_len)
        copied = shape.trained_matrices
        # The backward holds one layer's activations at a time.
        recomputed = max(layers)
    loss = 0
    if shape.end_to_end:
        activations += _around_the_head(shape, fused)
        loss = _loss(shape, tokens, kernels, fused)
    if strategy == "fsdp2":
        copied = max(0, copied - shape.gathered_in_bf16)
    work = int(tokens * _workspace(shape, seq_len, kernels, recomputed))
    teacher = shape.teacher_bytes
    # A share of the layers, the layer that runs, and the next one.
    if teacher_sharding == "sharded":
        in_layers = shape.n_layers * shape.teacher_layer_bytes
        teacher += -(-in_layers // world) - in_layers + 2 * shape.teacher_layer_bytes
    names = ("trained parameters", "frozen parameters", "gradients", "optimizer", "communication")
    shares = _shares(shape, strategy, world, micro_batches, reduce_bucket * FP32)
    return {
        **dict(zip(names, shares, strict=True)),
        "teacher": teacher,
        # Kept for the backward.
        "activations": int(tokens * activations),
        # Of float32 weights, by autocast.
        "bf16 copies": BF16 * copied if shape.bf16 else 0,
        # Logits of a chunk of tokens, and the gradients that are computed with the loss.
        "loss chunk": loss,
        # Of one layer, beyond the loss chunk whose memory it reuses.
        "layer workspace": max(0, work - loss),
    }


def _around_the_head(shape: StageShape, fused: bool) -> int:
    """Count the bytes per token around the last norm, and those of the output embedding's input."""
    n_bytes = FP32
    if shape.trains_all:
        n_bytes += FP32
        if not fused:
            n_bytes += shape.itemsize
    return shape.width * n_bytes


def _shares(
    shape: StageShape, strategy: str, world: int, micro_batches: int, bucket: int
) -> tuple[int, ...]:
    """Return a process's bytes of trained and frozen parameters, gradients, optimizer and communication.

    As in DeepSpeed 0.19, whose optimizer works on a copy of its shard of the float32 weights. Communication consists
    of buckets and of parameters gathered for use.
    """
    whole = shape.trained * FP32
    frozen = shape.frozen_bytes
    held = whole + frozen
    share = -(-whole // world)
    if strategy == "ddp":
        # Gradients are views of the buckets, until zero_grad drops them and accumulation makes new
        # ones.
        buckets = whole if world > 1 and micro_batches > 1 else 0
        return whole, frozen, whole, 2 * whole, buckets
    if strategy in ("zero1", "zero2"):
        gradients = whole if strategy == "zero1" else share
        return whole + share, frozen, gradients, 2 * share, bucket
    frozen = -(-frozen // world)
    if strategy == "zero3":
        elements = shape.trained + shape.frozen_bytes // shape.teacher_itemsize
        live = int(held * min(1.0, LIVE_PARAMETERS / elements))
        return 2 * share, frozen, share, 2 * share, bucket + live
    if micro_batches > 1 or not shape.end_to_end:
        # Everything stays gathered until the last micro-batch's backward has come by, or, where nothing flows back into
        # a layer's input, until it has ended; so do whole gradients.
        gathered = held - (FP32 - BF16) * shape.gathered_in_bf16
        return share, frozen, share, 2 * share, gathered + whole
    # Parameters outside layers stay gathered; so do a layer, the next one, and one layer's gradients.
    outside = max(0, held - len(shape.layers) * shape.layer_bytes)
    return share, frozen, share, 2 * share, min(2 * held, outside + 3 * shape.layer_bytes)


# From here to the loss: bytes per token.


def _layer(shape: StageShape, heads: LayerHeads, seq_len: int, kernels: bool) -> float:
    """Count what a layer with these numbers of heads keeps for the backward."""
    kept, windowed, recurrent, read = heads
    attending = kept + windowed
    item = shape.itemsize
    if shape.matrix:
        # Per pair of tokens: scores, decays and error; also the system of the writes.
        of_pair = 9 if shape.delta_rule else 3
        channels = recurrent * (shape.head_dim + 2 * shape.d_state)
        convolution = channels * item * (1 if kernels else shape.conv_width)
        matrices = recurrent * FP32 * (2 * (shape.d_state + 1) + of_pair * seq_len)
        return _inputs(shape, 3) + convolution + matrices
    in_segments = shape.segment_len < seq_len
    n_linears = 0
    if attending and shape.trains_attention:
        # q, k and v.
        n_linears += 3
    if recurrent and not in_segments:
        # x, b, c, z and a.
        n_linears += 5
    total: float = _inputs(shape, n_linears)
    if recurrent and in_segments:
        # Hidden states that segments start from, and the states between.
        if not (shape.trains_attention and shape.hidden_itemsize == item):
            total += shape.width * shape.hidden_itemsize
        total += recurrent * shape.head_dim * shape.d_state * FP32 / shape.segment_len
    elif recurrent:
        total += _recurrence(shape, recurrent, seq_len, kernels)
    if kept and (shape.trains_attention or shape.end_to_end):
        # q, k, v (as many as query heads) and the output.
        total += 4 * kept * shape.head_dim * item
        if shape.eager:
            # The map itself, and its softmax in float32.
            total += kept * seq_len * (FP32 + item)
        else:
            # The mask, and a float32 normalizer.
            total += seq_len * item + kept * FP32
    if windowed and (shape.trains_attention or shape.end_to_end):
        total += _window(shape, windowed, read, seq_len)
    if shape.trains_attention:
        # Input of the output projection.
        total += shape.n_heads * shape.head_dim * item
    if not shape.end_to_end:
        # The error.
        width = shape.width
        if shape.target == "head":
            width = max(windowed, recurrent) * shape.head_dim
        total += width * FP32
    if shape.end_to_end or shape.target == "layer":
        # RMSNorm in float32: its input, and, for the weight's gradient, its normalized input.
        n_norms = shape.n_norms - (not shape.end_to_end)
        total += n_norms * shape.width * FP32 * (2 if shape.trains_all else 1)
        # Gate, activation and up; without a gate, up alone.
        n_kept = 3 if shape.gated else 1
        total += n_kept * shape.mlp_width * item
        if shape.trains_all:
            # For the weights' gradients, their product and the input too.
            n_inputs = 2 if shape.gated else 1
            total += shape.mlp_width * item + _inputs(shape, n_inputs)
    return total


def _window(shape: StageShape, windowed: int, read: int, seq_len: int) -> float:
    """Count queries, the near keys and values of every block, their mask, and the output."""
    item = shape.itemsize
    block = min(BLOCK, seq_len)
    # Rows are padded to whole blocks.
    n_blocks = -(-seq_len // block)
    filled = n_blocks * block / seq_len
    n_earlier = shape.window - 1
    row_of_keys = 2 * read * shape.head_dim * item
    has_sinks = shape.sinks > 0 and n_blocks > 1
    # Keys of a block, and those of them for each of its queries.
    of_block = block + n_earlier
    total = 0.0
    if has_sinks:
        of_block += shape.sinks
        # The row's own keys and values, of which the sinks are gathered.
        total += row_of_keys * (filled + n_earlier / seq_len)
    total += filled * row_of_keys * of_block / block
    # sdpa's additive mask, repeated for the heads of a KV head.
    mask = of_block * windowed / read * item
    # The last is a normalizer.
    return total + filled * (mask + 2 * windowed * shape.head_dim * item + windowed * FP32)


def _inputs(shape: StageShape, n_linears: int) -> int:
    """Count the input of trained linear layers that read the same hidden states: one tensor, or a cast copy each."""
    is_same = shape.hidden_itemsize == shape.itemsize
    return shape.width * shape.itemsize * (min(1, n_linears) if is_same else n_linears)


def _recurrence(shape: StageShape, recurrent: int, seq_len: int, kernels: bool) -> float:
    """Count convolution, scan, skip and gate of the recurrent heads."""
    item = shape.itemsize
    x = recurrent * shape.head_dim
    bc = recurrent * shape.d_state
    state = x * shape.d_state
    channels = x + 2 * bc
    if kernels and max(shape.head_dim, shape.d_state) <= OUR_LIMITS.largest:
        # Input and output of the convolution, both factors of the gate, and the raw decay.
        around = 2 * channels * item + 2 * x * item + recurrent * FP32
        if shape.delta_rule:
            return around + (channels + recurrent * DELTA_CHUNK) * item
        # The state before every chunk.
        return around + state * item / KERNEL_CHUNK[item]
    chunk = min(CHUNK_SIZE, seq_len)
    # Rows are padded to whole chunks.
    filled = -(-seq_len // chunk) * chunk / seq_len
    scan = 2 * x + 3 * bc + recurrent * (chunk + 7) + 2 * state / chunk
    if shape.delta_rule:
        # The writes: their systems, solved for both terms, and the states that these read.
        systems = recurrent * (3 * chunk + 8)
        states = (2 * state + bc * shape.d_state) / chunk
        scan += 2 * x + 6 * bc + systems + states
    convolution = (shape.conv_width + 1) * channels * item
    gate = 3 * x * item
    if item != FP32:
        gate += x * FP32
    return convolution + filled * FP32 * scan + gate


def _inputs_of_layers(shape: StageShape, seq_len: int) -> int:
    """Count what gradient checkpointing keeps: every layer's input and, in alignment, its target."""
    n_layers = len(shape.layers)
    # The packing mask, cosines and sines.
    total = seq_len + 2 * shape.head_dim * shape.hidden_itemsize
    total += n_layers * shape.width * shape.hidden_itemsize
    if not shape.end_to_end:
        maps = seq_len * shape.teacher_itemsize if shape.eager else 0
        total += n_layers * shape.n_heads * (shape.head_dim * shape.itemsize + maps)
        if shape.target == "layer":
            # A decoder layer's output is the next one's input.
            total += shape.width * shape.hidden_itemsize
        else:
            total += shape.width * n_layers * shape.itemsize
    return total


def _workspace(shape: StageShape, seq_len: int, kernels: bool, recomputed: float) -> float:
    """Count the workspace of one layer: the teacher's, alongside the student's activations, or the backward's."""
    residuals = 2 * shape.width * FP32
    mlp = 3 * shape.mlp_width * shape.itemsize
    most = max(heads.recurrent for heads in shape.layers)
    backward = residuals + recomputed
    if shape.end_to_end or shape.target == "layer":
        backward += mlp
    if shape.matrix:
        backward += 3 * most * seq_len * FP32
    if shape.segment_len < seq_len:
        # A segment is recomputed.
        again = _inputs(shape, 5) + _recurrence(shape, most, seq_len, kernels)
        backward += again * shape.segment_len / seq_len
    teacher = residuals + mlp
    if not shape.end_to_end:
        # Hooks hold every layer's heads until the teacher's forward ends.
        teacher += shape.n_layers * shape.n_heads * shape.head_dim * shape.itemsize
        if shape.eager:
            teacher += shape.n_heads * seq_len * (2 * FP32 + shape.teacher_itemsize)
    return max(teacher, backward)


def _loss(shape: StageShape, tokens: int, kernels: bool, fused: bool) -> int:
    """Count the bytes of the loss over the vocabulary."""
    item = shape.itemsize
    buffers_of_logit = LOGIT_BUFFERS[shape.kind] * FP32
    if not fused:
        # Logits of all tokens, the student's with their gradient once there are several chunks.
        logits = tokens * shape.vocabulary
        chunk = min(logits, UNFUSED_CHUNK_LOGITS)
        n_copies = 3 if chunk < logits else 2
        return n_copies * logits * item + chunk * buffers_of_logit
    head = shape.vocabulary * shape.width
    chunk = min(tokens, _tokens_of_chunk(shape, kernels)) * shape.vocabulary
    buffers = 0
    if not kernels:
        # The chunk's own logits cover a part of the buffers.
        own = item if item < FP32 else 2 * item
        buffers = min(chunk, CACHED_LOGITS) * (buffers_of_logit - own)
    gradients = tokens * shape.width * shape.hidden_itemsize
    if shape.trains_all:
        gradients += head * FP32
    copies = 0
    for size in (shape.hidden_itemsize, shape.teacher_itemsize):
        if item < size:
            copies += head * BF16
    return gradients + copies + chunk * 2 * item + buffers


def _tokens_of_chunk(shape: StageShape, kernels: bool) -> int:
    """Return the tokens of a chunk of the fused loss: a multiple of 128, where as many fit."""
    largest = CHUNK_LOGITS["triton" if kernels else "torch"] // shape.vocabulary
    if largest >= 128:
        return largest // 128 * 128
    return max(1, largest)
