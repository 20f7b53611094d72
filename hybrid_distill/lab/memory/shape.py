"""Sizes of a stage, read from models without values: everything that its memory depends on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from ...model.logits import finishes_logits
from ...model.mixer import HybridMixer
from ...model.modeling_hybrid import HybridForCausalLM
from ...model.recurrences import FORMS
from ...teacher import decoder_blocks, text_config
from ...train.config import Align, Distill, StageConfig
from ...train.end_to_end import EndToEnd
from ...train.matrix import MatrixAlignment
from ...train.parallel.fsdp2 import gathered_in_bf16
from ...train.stage import Stage
from ...train.stages import make_stage

FP32 = 4
BF16 = 2
NEVER = 2**62
"""Length of a segment that is longer than any row."""


class StageShape:
    """Everything that a stage's memory depends on, except batch and processes.

    Models may be on the meta device. Use them for one stage only: making the stage freezes and shares parameters.
    Raises ValueError as `make_stage` does.
    """

    def __init__(
        self, config: StageConfig, student: HybridForCausalLM, teacher: PreTrainedModel
    ) -> None:
        stage = make_stage(config, student, teacher)
        self.end_to_end = isinstance(stage, EndToEnd)
        self.matrix = isinstance(stage, MatrixAlignment)
        self.shardable = stage.shardable
        self.trains_all = config.trained_part == "all"
        self.trains_attention = config.trained_part != "ssm"
        # The backward recomputes the recurrent heads segment by segment.
        self.segment_len = config.tokens_per_segment or NEVER
        self.gradient_checkpointing = config.gradient_checkpointing
        self.bf16 = config.precision == "bf16"
        self.itemsize = BF16 if self.bf16 else FP32
        self.target = config.target if isinstance(config, Align) else "mixer"
        self.kind = ""
        self.fused = False
        if isinstance(config, Distill):
            self.kind = config.kind
            # Fused: the loss holds the logits of only a chunk of tokens (never under ZeRO-3).
            finishes = finishes_logits(text_config(student.model))
            finishes = finishes or finishes_logits(text_config(teacher))
            self.fused = config.fused and not finishes

        self.student = StudentShape(student)
        mixers = student.mixers()
        computed_mixers = [mixer for mixer in mixers if self.end_to_end or mixer.replaced]
        # Heads of the layers that the stage computes for the student.
        self.layers = [LayerHeads.of(mixer) for mixer in computed_mixers]
        blocks = student.model.layers
        sharded_layers = blocks if self.end_to_end else mixers
        computes_blocks = self.end_to_end or self.target == "layer"
        computed = blocks if computes_blocks else nn.ModuleList(mixers)
        self.weights = Weights.of(stage, teacher, sharded_layers, computed)
        self.teacher_itemsize = teacher.dtype.itemsize
        embedding: Any = (student if self.end_to_end else teacher).get_input_embeddings()
        # Bytes of a number between the student's layers.
        self.hidden_itemsize: int = embedding.weight.element_size()


class StudentShape:
    """Sizes of a student, and the ways in which it computes that take memory."""

    def __init__(self, student: HybridForCausalLM) -> None:
        mixer = student.mixers()[0]
        self.n_layers = len(student.mixers())
        self.n_heads = mixer.n_heads
        self.head_dim = mixer.head_dim
        self.window = student.config.window
        self.sinks = student.config.sinks
        self.d_state = student.config.d_state
        self.conv_width = student.config.conv_width
        self.delta_rule = FORMS[student.config.recurrence].delta_rule
        # Not the teacher's config: a stage may have its own, larger teacher.
        backbone = text_config(student.model)
        self.width: int = backbone.hidden_size
        self.mlp_width: int = backbone.intermediate_size
        self.vocabulary: int = backbone.vocab_size
        # The one attention that stores its maps.
        self.eager = backbone._attn_implementation == "eager"
        block = student.model.layers[0]
        mlp = getattr(block, "mlp", nn.Module())
        mlp_inputs = [linear for linear in _linears(mlp) if linear.in_features == self.width]
        # GPT-NeoX's has one projection.
        self.gated = sum(linear.out_features for linear in mlp_inputs) != self.mlp_width
        # Over a layer's whole width.
        self.n_norms = sum("norm" in name for name, _ in block.named_children())


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


class Weights(NamedTuple):
    """Parameters of a stage: elements, unless in bytes."""

    trained: int
    frozen_bytes: int
    """Without those shared with the teacher, which count as the teacher's."""
    gathered_in_bf16: int
    """Float32 parameters that FSDP2 gathers in bfloat16."""
    layer_bytes: int
    """Size of the largest layer that FSDP2 shards."""
    trained_matrices: int
    """Float32 matrices that autocast copies once per forward."""
    frozen_matrices: int
    """Float32 matrices that autocast copies at every use."""
    teacher_bytes: int
    teacher_layer_bytes: int
    """Size of the teacher's largest layer."""

    @classmethod
    def of(
        cls,
        stage: Stage,
        teacher: PreTrainedModel,
        sharded_layers: Iterable[nn.Module],
        computed: nn.Module,
    ) -> Weights:
        """Count the parameters of a stage, which computes the modules ``computed`` for its student."""
        parameters = list(stage.parameters())
        matrices = [linear.weight for linear in _linears(computed)]
        in_fp32 = [weight for weight in matrices if weight.dtype == torch.float32]
        gathered = [p for p in gathered_in_bf16(stage) if p.dtype == torch.float32]
        teacher_blocks = [block for _, block in decoder_blocks(teacher)]
        return cls(
            trained=sum(p.numel() for p in parameters if p.requires_grad),
            frozen_bytes=_nbytes(p for p in parameters if not p.requires_grad),
            gathered_in_bf16=sum(p.numel() for p in gathered),
            layer_bytes=max(_nbytes(layer.parameters()) for layer in sharded_layers),
            trained_matrices=sum(w.numel() for w in in_fp32 if w.requires_grad),
            frozen_matrices=sum(w.numel() for w in in_fp32 if not w.requires_grad),
            teacher_bytes=sum(_nbytes(model.parameters()) for model in stage.teachers),
            teacher_layer_bytes=max(_nbytes(block.parameters()) for block in teacher_blocks),
        )


def _linears(module: nn.Module) -> list[nn.Linear]:
    return [m for m in module.modules() if isinstance(m, nn.Linear)]


def _nbytes(parameters: Iterable[nn.Parameter]) -> int:
    return sum(p.numel() * p.element_size() for p in parameters)
