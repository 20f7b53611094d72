"""Options of all stages, one frozen dataclass per kind of stage.

Each field is declared only here, with its range or choices; flags, checks and the reference are derived from it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import tyro

from ..data import DataConfig
from ..data.config import TokensOfARow
from ..distributed import Dtype, multiplies_bf16
from ..io import Record
from ..teacher import TINY
from ..tunable import Tunable, fixed_fields
from ..validation import Count, CountOrZero, Limits, Positive, Share, check_options

T = TypeVar("T")
Config = TypeVar("Config", bound="StageConfig")
Fixed = Annotated[T, tyro.conf.Suppress]
"""Field that the command line hides."""
Factor = Annotated[float, Limits(0)]
Beta = Annotated[float, Limits(0, 0.999999)]

COLLECTIVE_TIMEOUT = 30.0
"""Minutes that processes wait for one another within a training step, unless a run sets its own."""


@dataclass(frozen=True)
class TeacherConfig:
    """Pretrained Transformer to distill from."""

    path: Annotated[str, tyro.conf.arg(aliases=("--teacher",))] = TINY
    """Teacher: ``tiny`` (the embedded default), a local Hugging Face folder, or a hub id."""
    revision: str | None = None
    """Hub revision: branch, tag or commit."""
    dtype: Dtype = "float32"
    """Precision of the teacher's weights; the student always trains float32 weights. ``auto``: bfloat16 if the device
    has instructions for it, else float32. A resumed run keeps what it began with."""
    attn_implementation: Literal["sdpa", "eager"] | None = None
    """Attention implementation; by default, transformers chooses. For packed rows, ``sdpa`` runs flash-attn's kernels
    if the package is installed."""
    allow_bin: bool = False
    """Accept pickled weights (``*.bin``). Loading a pickle can run code: use only for files that you trust."""

    def __post_init__(self) -> None:
        if not self.path.strip():
            raise ValueError(
                f"teacher.path is {self.path!r}; name a local folder, a model on the hub, or tiny."
            )
        check_options(self, "teacher.")


@dataclass(frozen=True)
class StageConfig:
    """Options common to all stages. Raises ValueError for a field out of range."""

    name: Fixed[str] = "stage"
    """Name of the stage in flags, messages, folders and trackers."""
    steps: Count = 1000
    """Optimizer steps."""
    batch_size: Count = 32
    """Rows per optimizer step, over all processes."""
    micro_batch_size: Tunable[Count] = 8
    """Rows per forward pass and process. Affects memory and speed; the update is the same for any size."""
    learning_rate: Positive = 1e-3
    """Peak learning rate of the warmup-stable-decay schedule."""
    warmup: Share = 0.1
    """Fraction of the steps, at the start, in which the learning rate rises."""
    decay: Share = 0.1
    """Fraction of the steps, at the end, in which the learning rate falls to zero."""
    weight_decay: Share = 0.1
    """Weight decay for matrices; vectors have none."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Betas of AdamW."""
    clip: Positive = 1.0
    """Maximum gradient norm; larger gradients are clipped."""
    precision: Literal["auto", "fp32", "bf16"] = "fp32"
    """``bf16`` computes in bfloat16 with float32 weights. ``auto``: bf16 if the device has instructions for it or the
    teacher is in half precision, else fp32."""
    gradient_checkpointing: Tunable[bool] = False
    """Recompute each layer in the backward pass, to save memory."""
    compile: Tunable[Literal["auto", "on", "off"]] = "auto"
    """Compile decoder layers with torch.compile, which moves fewer bytes for norms, activations and casts. ``auto``
    compiles on a GPU if the stage's remaining matrix products take about ten minutes or more; compiling takes one to
    three. Layers that are sharded, aligned in parts (mixers, heads) or trained on policy are not compiled."""
    spike: Tunable[Positive] = 20.0
    """Multiple of the median of the last 64 losses, at least 0.01, above which a loss counts as diverged. A loss that
    is not finite always does."""
    on_divergence: Tunable[Literal["stop", "skip"]] = "stop"
    """``skip`` drops the batch, notes it in the metrics, and stops after more than ``max_skips`` in a row."""
    max_skips: Tunable[Count] = 3
    """Batches that may be skipped in a row before the run stops."""
    checkpoint_every: Tunable[Count] = 500
    """Steps between checkpoints."""
    log_every: Tunable[Count] = 10
    """Steps between lines of metrics.jsonl."""
    keep_checkpoints: Tunable[Count] = 2
    """Number of latest checkpoints to keep on disk."""
    data_workers: Tunable[CountOrZero | None] = None
    """Worker processes per training process that prepare batches ahead; by default 2 on a GPU, none on a CPU."""
    data: tyro.conf.AvoidSubcommands[DataConfig | None] = None
    """Data of this stage, for example conversations (``DataConfig(chat=True)``: the loss is on the assistant's
    tokens); by default the run's."""
    seq_len: TokensOfARow | None = None
    """Tokens per row, instead of the data's. The teacher's context must be as long; its RoPE settings stay."""

    def __post_init__(self) -> None:
        check_options(self, f"{self.name}.")

    @property
    def cached_logits(self) -> Path | None:
        """Folder of the cached logits that the stage reads instead of running a teacher."""
        return None

    @property
    def is_alignment(self) -> bool:
        """True if the stage aligns heads, with the teacher's own weights around them."""
        return True

    @property
    def trained_part(self) -> Literal["all", "mixer", "ssm"]:
        """Part of the student that learns, as in `Distill.train`."""
        return "ssm"

    @property
    def lr_multipliers(self) -> tuple[float, float, float] | None:
        """Multipliers of the learning rate, as in `Distill.lr_scale`."""
        return None

    def with_precision(self: Config, is_half: bool) -> Config:
        """Return the stage with the precision that ``auto`` stands for on this process's device.

        ``is_half`` is True for a teacher in half precision.
        """
        if self.precision != "auto":
            return self
        precision = "fp32"
        if is_half or multiplies_bf16():
            precision = "bf16"
        return replace(self, precision=precision)

    @property
    def tokens_per_segment(self) -> int | None:
        """Tokens that recurrent heads process at once; None for the whole row."""
        return None

    @property
    def tokens_generated(self) -> int:
        """Tokens of a prompt and of the student's longest text after it; 0 if the student writes nothing."""
        return 0

    @property
    def rows_read(self) -> int:
        """Number of rows that the stage reads, from the start of the data's order."""
        return self.steps * self.batch_size

    def check_world(self, processes: int) -> None:
        """Raise ValueError if that many processes cannot share a step's rows equally."""
        if self.batch_size % processes:
            raise ValueError(
                f"{self.name}.batch_size is {self.batch_size}, which {processes} processes cannot share; "
                f"use a multiple of {processes}."
            )

    def to_dict(self) -> Record:
        """Convert to JSON values: tuples become lists, paths strings. ``stage`` is the name of the class."""
        return {"stage": type(self).__name__, **json.loads(json.dumps(asdict(self), default=str))}

    def identity(self) -> Record:
        """Convert to JSON values as `to_dict` does, but only what may not change when the stage resumes."""
        return {"stage": type(self).__name__, **fixed_fields(self)}


@dataclass(frozen=True)
class Align(StageConfig):
    """Layer-to-layer alignment (arXiv 2408.10189); see `LayerAlignment`."""

    name: Fixed[str] = "align"
    target: Literal["mixer", "layer", "head"] = "mixer"
    """Output to match: the mixer's, the layer's, or each recurrent head's."""
    loss: Literal["l2", "nmse"] = "l2"
    """``l2``: mean L2 norm of the error; ``nmse``: squared error over squared target, both summed over a whole step."""
    train: Literal["ssm", "mixer"] = "ssm"
    """``ssm``: only recurrent heads; ``mixer``: kept heads and the output projection too."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target == "head" and self.train != "ssm":
            raise ValueError(
                f"{self.name}.train is {self.train!r}; target 'head' compares recurrent heads alone: use "
                f"--{self.name}.train ssm."
            )

    @property
    def trained_part(self) -> Literal["ssm", "mixer"]:
        return self.train


@dataclass(frozen=True)
class AlignMatrix(StageConfig):
    """Alignment of mixing matrices with attention maps (arXiv 2408.10189); see `MatrixAlignment`."""

    name: Fixed[str] = "matrix"


@dataclass(frozen=True)
class Distill(StageConfig):
    """End-to-end distillation; see `EndToEnd`."""

    name: Fixed[str] = "distill"
    kind: Literal["forward_kl", "reverse_kl", "jsd"] = "forward_kl"
    """Divergence between teacher and student (docs/training.md)."""
    temperature: Positive = 1.0
    """Softmax temperature for teacher and student."""
    beta: Annotated[float, Limits(0, 1, without_ends=True)] = 0.5
    """Weight of the teacher in the mixture of ``jsd``."""
    hard_weight: Share = 0.0
    """Share of the loss that is cross-entropy on the text itself."""
    train: Literal["all", "mixer", "ssm"] = "all"
    """``all`` parameters; ``mixer``: kept and recurrent heads, output projection; ``ssm``: only recurrent heads."""
    lr_scale: tuple[Factor, Factor, Factor] | None = None
    """Learning rate multipliers for kept attention, recurrent heads and all other weights (output projections, MLPs,
    norms, embeddings). With ``1 1 0.1``, attention learns ten times as fast as MLPs; 0 freezes. By default 1 1 1."""
    fused: bool = True
    """Never hold the logits of all tokens in memory, where the models allow it (see `EndToEnd`)."""
    segment_len: Count | None = None
    """Tokens per segment of long rows: recurrent heads process a row segment by segment and pass the state on, so that
    the backward pass holds one segment in memory, not the row. The result is the same; by default whole rows."""
    teacher: str | None = None
    """Folder or hub id of another teacher with the same vocabulary; by default the run's. It is loaded in the run's
    ``teacher.dtype``, and its chat template renders the conversations."""
    teacher_logits: Path | None = None
    """Folder written by ``hybrid-distill cache-logits`` for this run: the stage reads the teacher's logits from it and
    needs no teacher in memory."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.teacher is not None and not self.teacher.strip():
            raise ValueError(
                f"{self.name}.teacher is {self.teacher!r}; name a folder or a model, or leave it out."
            )

    @property
    def is_alignment(self) -> bool:
        return False

    @property
    def cached_logits(self) -> Path | None:
        return self.teacher_logits

    @property
    def trained_part(self) -> Literal["all", "mixer", "ssm"]:
        return self.train

    @property
    def lr_multipliers(self) -> tuple[float, float, float] | None:
        return self.lr_scale

    @property
    def tokens_per_segment(self) -> int | None:
        return self.segment_len


@dataclass(frozen=True)
class DistillOnPolicy(Distill):
    """End-to-end distillation, partly on text that the student generates (arXiv 2306.13649); see `OnPolicy`."""

    name: Fixed[str] = "on_policy"
    segment_len: Fixed[int | None] = None
    teacher_logits: Fixed[Path | None] = None
    kind: Literal["forward_kl", "reverse_kl", "jsd"] = "jsd"
    share: Share = 0.5
    """Probability that the student generates a row's text; such rows make up the same share of the loss."""
    prompt_tokens: Count = 64
    """Tokens at the start of a row that the student continues."""
    new_tokens: Count = 64
    """Maximum number of tokens that the student generates."""
    sampling_temperature: Positive = 1.0
    """Softmax temperature at which the student samples."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.teacher_logits is not None:
            raise ValueError(
                f"{self.name}.teacher_logits is {self.teacher_logits}; logits of text that a student will write cannot "
                "be cached: leave it out."
            )
        if self.hard_weight:
            raise ValueError(
                f"{self.name}.hard_weight is {self.hard_weight}; a student's own text is not a label: use 0."
            )

    @property
    def tokens_generated(self) -> int:
        return self.prompt_tokens + self.new_tokens if self.share else 0


STAGE_KINDS: dict[str, type[StageConfig]] = {
    kind.__name__: kind for kind in (Align, AlignMatrix, Distill, DistillOnPolicy)
}
"""Kinds of stages by the name that config.json has for them."""
