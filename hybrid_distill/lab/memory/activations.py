"""Bytes that a stage keeps for the backward, and those of one layer and of the loss at work, from shapes alone.

Numbers are per token unless a docstring says otherwise. benchmarks/memory_plan.py compares them with measurements.
"""

from __future__ import annotations

import math

from hybrid_kernels.loss_chunks import CHUNK_LOGITS
from hybrid_kernels.loss_torch import CACHED_LOGITS

from ...model.kernel_choice import OUR_LIMITS
from ...model.local_attention import BLOCK
from ...model.ssd import CHUNK_SIZE
from ...train.losses import CHUNK_LOGITS as UNFUSED_CHUNK_LOGITS
from .shape import BF16, FP32, LayerHeads, StageShape

# A copy of hybrid_kernels.ssd_tiles, which imports triton: a machine that only plans may lack it.
KERNEL_CHUNK = {BF16: 32, FP32: 16}
"""Tokens between the states that the kernels store, by bytes of a number (on Hopper, N = P = 64)."""
DELTA_CHUNK = 64
"""Chunk of flash-linear-attention, which stores queries, keys, values and a row of each chunk's system."""
LOGIT_BUFFERS = {"forward_kl": 8, "reverse_kl": 9, "jsd": 10}
"""Float32 numbers per logit that plain torch compares at once, by loss."""


def bytes_of_layer(shape: StageShape, heads: LayerHeads, seq_len: int, kernels: bool) -> float:
    """Count the bytes that a layer with these numbers of heads keeps for the backward."""
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
    """Count the bytes that a layer keeps if its mixing matrices are aligned."""
    student = shape.student
    # Per pair of tokens: scores, decays and error; with the delta rule also the system of the writes.
    n_per_pair = 9 if student.delta_rule else 3
    channels = recurrent * (student.head_dim + 2 * student.d_state)
    convolution = channels * shape.itemsize * (1 if kernels else student.conv_width)
    matrices = recurrent * FP32 * (2 * (student.d_state + 1) + n_per_pair * seq_len)
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
    """Count what recurrent heads keep: all between input and output or, with segments, what these start from."""
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
    """Count what kept and windowed heads keep, if a gradient flows through them."""
    total = 0.0
    if not (shape.trains_attention or shape.end_to_end):
        return total
    if heads.kept:
        total += _full_attention(shape, heads.kept, seq_len)
    if heads.windowed:
        total += _window(shape, heads.windowed, heads.read, seq_len)
    return total


def _full_attention(shape: StageShape, kept: int, seq_len: int) -> int:
    """Count queries, keys, values, outputs, and what the attention itself keeps."""
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
    n_blocks = math.ceil(seq_len / block)
    padding_factor = n_blocks * block / seq_len
    n_earlier = shape.student.window - 1
    key_and_value = 2 * read * head_dim * item
    has_sinks = shape.student.sinks > 0 and n_blocks > 1
    # Keys that the queries of a block read.
    n_keys = block + n_earlier
    total = 0.0
    if has_sinks:
        n_keys += shape.student.sinks
        # The row's own keys and values, of which the sinks are gathered.
        total += key_and_value * (padding_factor + n_earlier / seq_len)
    total += padding_factor * key_and_value * n_keys / block
    # sdpa's additive mask, repeated for the heads of a KV head.
    mask = n_keys * windowed / read * item
    queries_and_outputs = 2 * windowed * head_dim * item
    normalizers = windowed * FP32
    return total + padding_factor * (mask + queries_and_outputs + normalizers)


def _output_of_heads(shape: StageShape, heads: LayerHeads) -> int:
    """Count the input of the output projection and, in alignment, the error."""
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
    # An alignment reads the teacher's hidden states: no gradient flows into the first norm.
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
    """Count the inputs of trained linear layers that read the same hidden states: one tensor, or a cast copy each."""
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
    padding_factor = math.ceil(seq_len / chunk) * chunk / seq_len
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
    return convolution + padding_factor * FP32 * scan + gate


def bytes_around_the_head(shape: StageShape, fused: bool) -> int:
    """Count the input of the last norm and, if trained, its normalized input and the output embedding's input."""
    n_bytes = FP32
    if shape.trains_all:
        n_bytes += FP32
        if not fused:
            n_bytes += shape.itemsize
    return shape.student.width * n_bytes


def bytes_of_layer_inputs(shape: StageShape, seq_len: int) -> int:
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


def bytes_of_workspace(shape: StageShape, seq_len: int, kernels: bool, recomputed: float) -> float:
    """Count the workspace of one layer: the larger of the teacher's forward and the student's backward."""
    student = shape.student
    residuals = 2 * student.width * FP32
    mlp = 3 * student.mlp_width * shape.itemsize
    most_recurrent = max(heads.recurrent for heads in shape.layers)
    backward = residuals + recomputed
    if shape.end_to_end or shape.target == "layer":
        backward += mlp
    if shape.matrix:
        backward += 3 * most_recurrent * seq_len * FP32
    if shape.segment_len < seq_len:
        # One segment at a time is recomputed.
        whole_row = _inputs(shape, 5) + _recurrence(shape, most_recurrent, seq_len, kernels)
        backward += whole_row * shape.segment_len / seq_len
    teacher = residuals + mlp
    if not shape.end_to_end:
        # Hooks hold every layer's heads until the teacher's forward ends.
        teacher += student.n_layers * student.n_heads * student.head_dim * shape.itemsize
        if student.eager:
            teacher += student.n_heads * seq_len * (2 * FP32 + shape.teacher_itemsize)
    return max(teacher, backward)


def bytes_of_loss(shape: StageShape, tokens: int, kernels: bool, fused: bool) -> int:
    """Count the bytes, in all, of the loss over the vocabulary for some tokens."""
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
        # The chunk's own logits are a part of the buffers.
        logits_of_chunk = item if item < FP32 else 2 * item
        buffers = min(chunk, CACHED_LOGITS) * (buffers_of_logit - logits_of_chunk)
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
