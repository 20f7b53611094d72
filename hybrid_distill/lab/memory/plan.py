"""Bytes that one process needs to train a stage, from shapes alone: no tensor is allocated.

`StageShape` holds the sizes of a stage, read from models on the meta device. `memory_plan` adds up the peak memory
for one strategy of splitting the work among processes. The peak is near the end of a forward pass, in a micro-batch
after the first of its step, when gradients already exist. Not counted: the CUDA context (about 0.5 GB), NCCL, and
fragmentation. benchmarks/memory_plan.py compares every part with measurements.
"""

from __future__ import annotations

from typing import NamedTuple

from hybrid_kernels.loss import CHUNK_LOGITS
from hybrid_kernels.loss_torch import CACHED_LOGITS

from ...model.kernel_choice import OUR_LIMITS
from ...model.local_attention import BLOCK
from ...model.ssd import CHUNK_SIZE
from ...train.losses import CHUNK_LOGITS as UNFUSED_CHUNK_LOGITS
from .shape import BF16, FP32, LayerHeads, StageShape

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
# Tokens between the states that the kernels store, by bytes of a number (on Hopper, N = P = 64). A
# copy of hybrid_kernels.ssd_tiles, which imports triton: a machine that only plans may lack it.
KERNEL_CHUNK = {BF16: 32, FP32: 16}
# flash-linear-attention's; it stores queries, keys, values and a row of each chunk's system.
DELTA_CHUNK = 64
# float32, per logit that plain torch compares at once.
LOGIT_BUFFERS = {"forward_kl": 8, "reverse_kl": 9, "jsd": 10}

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
    copied = shape.weights.trained_matrices + shape.weights.frozen_matrices
    recomputed: float = 0
    if recompute:
        activations = _inputs_of_layers(shape, seq_len)
        copied = shape.weights.trained_matrices
        # The backward holds one layer's activations at a time.
        recomputed = max(layers)
    loss = 0
    if shape.end_to_end:
        activations += _around_the_head(shape, fused)
        loss = _loss(shape, tokens, kernels, fused)
    if strategy == "fsdp2":
        copied = max(0, copied - shape.weights.gathered_in_bf16)
    workspace = int(tokens * _workspace(shape, seq_len, kernels, recomputed))
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
        # Of float32 weights, by autocast.
        "bf16 copies": BF16 * copied if shape.bf16 else 0,
        # Logits of a chunk of tokens, and the gradients that are computed with the loss.
        "loss chunk": loss,
        # Of one layer, beyond the loss chunk whose memory it reuses.
        "layer workspace": max(0, workspace - loss),
    }


def _around_the_head(shape: StageShape, fused: bool) -> int:
    """Count the bytes per token around the last norm, and those of the output embedding's input."""
    n_bytes = FP32
    if shape.trains_all:
        n_bytes += FP32
        if not fused:
            n_bytes += shape.itemsize
    return shape.student.width * n_bytes


def _sharded_teacher(shape: StageShape, world: int) -> int:
    """Count a share of the teacher's layers, the layer that runs, the next one, and all outside layers."""
    layer = shape.weights.teacher_layer_bytes
    in_layers = shape.student.n_layers * layer
    share = -(-in_layers // world)
    return shape.weights.teacher_bytes - in_layers + share + 2 * layer


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
    share = -(-whole // world)
    if strategy == "ddp":
        # Gradients are views of the buckets, until zero_grad drops them and accumulation makes new
        # ones.
        buckets = whole if world > 1 and micro_batches > 1 else 0
        return Shares(whole, frozen, whole, 2 * whole, buckets)
    if strategy in ("zero1", "zero2"):
        gradients = whole if strategy == "zero1" else share
        return Shares(whole + share, frozen, gradients, 2 * share, bucket)
    frozen_share = -(-frozen // world)
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
    """Count the bytes of whole parameters and whole gradients."""
    whole = shape.weights.trained * FP32
    held = whole + shape.weights.frozen_bytes
    if micro_batches > 1 or not shape.end_to_end:
        # Everything stays gathered until the last micro-batch's backward has come by, or, where nothing flows back into
        # a layer's input, until it has ended; so do whole gradients.
        return held - (FP32 - BF16) * shape.weights.gathered_in_bf16 + whole
    # Parameters outside layers stay gathered; so do a layer, the next one, and one layer's gradients.
    layer = shape.weights.layer_bytes
    outside = max(0, held - len(shape.layers) * layer)
    return min(2 * held, outside + 3 * layer)


# From here to the loss: bytes per token.


def _layer(shape: StageShape, heads: LayerHeads, seq_len: int, kernels: bool) -> float:
    """Count what a layer with these numbers of heads keeps for the backward."""
    if shape.matrix:
        return _mixing_matrices(shape, heads.recurrent, seq_len, kernels)
    return (
        _inputs_of_heads(shape, heads, seq_len)
        + _recurrent_heads(shape, heads.recurrent, seq_len, kernels)
        + _attention_heads(shape, heads, seq_len)
        + _output_of_heads(shape, heads)
        + _outside_the_mixer(shape)
    )


def _mixing_matrices(shape: StageShape, recurrent: int, seq_len: int, kernels: bool) -> float:
    """Count what a layer keeps that is compared matrix by matrix."""
    student = shape.student
    # Per pair of tokens: scores, decays and error; also the system of the writes.
    of_pair = 9 if student.delta_rule else 3
    channels = recurrent * (student.head_dim + 2 * student.d_state)
    convolution = channels * shape.itemsize * (1 if kernels else student.conv_width)
    matrices = recurrent * FP32 * (2 * (student.d_state + 1) + of_pair * seq_len)
    return _inputs(shape, 3) + convolution + matrices


def _inputs_of_heads(shape: StageShape, heads: LayerHeads, seq_len: int) -> int:
    """Count the inputs of the projections that heads read."""
    n_linears = 0
    if heads.kept + heads.windowed and shape.trains_attention:
        # q, k and v.
        n_linears += 3
    if heads.recurrent and shape.segment_len >= seq_len:
        # x, b, c, z and a.
        n_linears += 5
    return _inputs(shape, n_linears)


def _recurrent_heads(shape: StageShape, recurrent: int, seq_len: int, kernels: bool) -> float:
    """Count what recurrent heads keep: all between input and output, or what their segments start from."""
    if not recurrent:
        return 0
    if shape.segment_len >= seq_len:
        return _recurrence(shape, recurrent, seq_len, kernels)
    student = shape.student
    states = recurrent * student.head_dim * student.d_state * FP32 / shape.segment_len
    # The projections of attention keep the same hidden states, unless they read a cast copy.
    if shape.trains_attention and shape.hidden_itemsize == shape.itemsize:
        return states
    return student.width * shape.hidden_itemsize + states


def _attention_heads(shape: StageShape, heads: LayerHeads, seq_len: int) -> float:
    """Count what kept and windowed heads keep, if anything flows back through them."""
    total = 0.0
    if not (shape.trains_attention or shape.end_to_end):
        return total
    if heads.kept:
        total += _full_attention(shape, heads.kept, seq_len)
    if heads.windowed:
        total += _window(shape, heads.windowed, heads.read, seq_len)
    return total


def _full_attention(shape: StageShape, kept: int, seq_len: int) -> int:
    item = shape.itemsize
    # q, k, v (as many as query heads) and the output.
    projected = 4 * kept * shape.student.head_dim * item
    if shape.student.eager:
        # The map itself, and its softmax in float32.
        return projected + kept * seq_len * (FP32 + item)
    # The mask, and a float32 normalizer.
    return projected + seq_len * item + kept * FP32


def _window(shape: StageShape, windowed: int, read: int, seq_len: int) -> float:
    """Count queries, the near keys and values of every block, their mask, and the output."""
    item = shape.itemsize
    head_dim = shape.student.head_dim
    block = min(BLOCK, seq_len)
    # Rows are padded to whole blocks.
    n_blocks = -(-seq_len // block)
    filled = n_blocks * block / seq_len
    n_earlier = shape.student.window - 1
    row_of_keys = 2 * read * head_dim * item
    has_sinks = shape.student.sinks > 0 and n_blocks > 1
    # Keys of a block, and those of them for each of its queries.
    of_block = block + n_earlier
    total = 0.0
    if has_sinks:
        of_block += shape.student.sinks
        # The row's own keys and values, of which the sinks are gathered.
        total += row_of_keys * (filled + n_earlier / seq_len)
    total += filled * row_of_keys * of_block / block
    # sdpa's additive mask, repeated for the heads of a KV head.
    mask = of_block * windowed / read * item
    # The last is a normalizer.
    return total + filled * (mask + 2 * windowed * head_dim * item + windowed * FP32)


def _output_of_heads(shape: StageShape, heads: LayerHeads) -> int:
    """Count the input of the output projection, and the error of an alignment."""
    student = shape.student
    total = 0
    if shape.trains_attention:
        total += student.n_heads * student.head_dim * shape.itemsize
    if not shape.end_to_end:
        width = student.width
        if shape.target == "head":
            width = max(heads.windowed, heads.recurrent) * student.head_dim
        total += width * FP32
    return total


def _outside_the_mixer(shape: StageShape) -> int:
    """Count what norms and the MLP keep, if the stage computes them."""
    if not shape.end_to_end and shape.target != "layer":
        return 0
    student = shape.student
    # An alignment reads the teacher's hidden states: nothing flows back into the first norm.
    n_norms = student.n_norms if shape.end_to_end else student.n_norms - 1
    # RMSNorm in float32: its input, and, for the weight's gradient, its normalized input.
    copies_of_norm = 2 if shape.trains_all else 1
    norms = n_norms * student.width * FP32 * copies_of_norm
    # Gate, activation and up; without a gate, up alone.
    n_kept = 3 if student.gated else 1
    mlp = n_kept * student.mlp_width * shape.itemsize
    if shape.trains_all:
        # For the weights' gradients, their product and the input too.
        mlp += student.mlp_width * shape.itemsize
        mlp += _inputs(shape, 2 if student.gated else 1)
    return norms + mlp


def _inputs(shape: StageShape, n_linears: int) -> int:
    """Count the input of trained linear layers that read the same hidden states: one tensor, or a cast copy each."""
    n_copies = n_linears
    if shape.hidden_itemsize == shape.itemsize:
        n_copies = min(1, n_linears)
    return shape.student.width * shape.itemsize * n_copies


def _recurrence(shape: StageShape, recurrent: int, seq_len: int, kernels: bool) -> float:
    """Count convolution, scan, skip and gate of the recurrent heads."""
    student = shape.student
    item = shape.itemsize
    x = recurrent * student.head_dim
    bc = recurrent * student.d_state
    state = x * student.d_state
    channels = x + 2 * bc
    if kernels and max(student.head_dim, student.d_state) <= OUR_LIMITS.largest:
        # Input and output of the convolution, both factors of the gate, and the raw decay.
        around = 2 * channels * item + 2 * x * item + recurrent * FP32
        if student.delta_rule:
            return around + (channels + recurrent * DELTA_CHUNK) * item
        # The state before every chunk.
        return around + state * item / KERNEL_CHUNK[item]
    chunk = min(CHUNK_SIZE, seq_len)
    # Rows are padded to whole chunks.
    filled = -(-seq_len // chunk) * chunk / seq_len
    scan = 2 * x + 3 * bc + recurrent * (chunk + 7) + 2 * state / chunk
    if student.delta_rule:
        # The writes: their systems, solved for both terms, and the states that these read.
        systems = recurrent * (3 * chunk + 8)
        states = (2 * state + bc * student.d_state) / chunk
        scan += 2 * x + 6 * bc + systems + states
    convolution = (student.conv_width + 1) * channels * item
    gate = 3 * x * item
    if item != FP32:
        gate += x * FP32
    return convolution + filled * FP32 * scan + gate


def _inputs_of_layers(shape: StageShape, seq_len: int) -> int:
    """Count what gradient checkpointing keeps: every layer's input and, in alignment, its target."""
    student = shape.student
    n_layers = len(shape.layers)
    # The packing mask, cosines and sines.
    total = seq_len + 2 * student.head_dim * shape.hidden_itemsize
    total += n_layers * student.width * shape.hidden_itemsize
    if not shape.end_to_end:
        maps = seq_len * shape.teacher_itemsize if student.eager else 0
        total += n_layers * student.n_heads * (student.head_dim * shape.itemsize + maps)
        if shape.target == "layer":
            # A decoder layer's output is the next one's input.
            total += student.width * shape.hidden_itemsize
        else:
            total += student.width * n_layers * shape.itemsize
    return total


def _workspace(shape: StageShape, seq_len: int, kernels: bool, recomputed: float) -> float:
    """Count the workspace of one layer: the teacher's, alongside the student's activations, or the backward's."""
    student = shape.student
    residuals = 2 * student.width * FP32
    mlp = 3 * student.mlp_width * shape.itemsize
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
        teacher += student.n_layers * student.n_heads * student.head_dim * shape.itemsize
        if student.eager:
            teacher += student.n_heads * seq_len * (2 * FP32 + shape.teacher_itemsize)
    return max(teacher, backward)


def _loss(shape: StageShape, tokens: int, kernels: bool, fused: bool) -> int:
    """Count the bytes of the loss over the vocabulary."""
    item = shape.itemsize
    buffers_of_logit = LOGIT_BUFFERS[shape.kind] * FP32
    if not fused:
        # Logits of all tokens, the student's with their gradient once there are several chunks.
        logits = tokens * shape.student.vocabulary
        chunk = min(logits, UNFUSED_CHUNK_LOGITS)
        n_copies = 3 if chunk < logits else 2
        return n_copies * logits * item + chunk * buffers_of_logit
    head = shape.student.vocabulary * shape.student.width
    chunk = min(tokens, _tokens_of_chunk(shape, kernels)) * shape.student.vocabulary
    buffers = 0
    if not kernels:
        # The chunk's own logits cover a part of the buffers.
        own = item if item < FP32 else 2 * item
        buffers = min(chunk, CACHED_LOGITS) * (buffers_of_logit - own)
    gradients = tokens * shape.student.width * shape.hidden_itemsize
    if shape.trains_all:
        gradients += head * FP32
    copies = 0
    for size in (shape.hidden_itemsize, shape.teacher_itemsize):
        if item < size:
            copies += head * BF16
    return gradients + copies + chunk * 2 * item + buffers


def _tokens_of_chunk(shape: StageShape, kernels: bool) -> int:
    """Return the tokens of a chunk of the fused loss: a multiple of 128, where as many fit."""
    largest = CHUNK_LOGITS["triton" if kernels else "torch"] // shape.student.vocabulary
    if largest >= 128:
        return largest // 128 * 128
    return max(1, largest)
