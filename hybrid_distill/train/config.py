"""Options of every stage, one frozen dataclass a stage. A field is declared here, with its range or choices, and
nowhere else: flags, checks and the reference follow from it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal, TypeVar

import tyro

from ..data import DataConfig
from ..io import Record
from ..limits import Count, CountOrZero, Limits, Positive, Share, check_options
from ..teacher import TINY

T = TypeVar("T")
Fixed = Annotated[T, tyro.conf.Suppress]
"""A field that a command line neither lists nor needs."""
Factor = Annotated[float, Limits(0)]

MAY_CHANGE = frozenset(
    {"micro_batch_size", "checkpoint_every", "keep_checkpoints", "log_every", "gradient_checkpointing", "spike",
     "on_divergence", "max_skips", "data_workers"}
)  # fmt: skip
"""Fields that may differ when a stage resumes."""


@dataclass(frozen=True)
class TeacherConfig:
    """The pretrained Transformer."""

    path: Annotated[str, tyro.conf.arg(aliases=("--teacher",))] = TINY
    """``tiny`` (the embedded default), a local Hugging Face folder, or a name on the hub."""
    revision: str | None = None
    """Hub revision: branch, tag or commit."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of the teacher's weights; the student trains float32 weights in any case."""
    attn_implementation: str | None = None
    """``sdpa``, ``flash_attention_2``, ``eager``; empty lets transformers choose."""
    allow_bin: bool = False
    """Accept pickled weights (``*.bin``). A pickle runs code when it is loaded: only for files you trust."""

    def __post_init__(self) -> None:
        if not self.path.strip():
            raise ValueError(f"teacher.path is {self.path!r}; name a local folder, a model on the hub, or tiny.")


@dataclass(frozen=True)
class StageConfig:
    """Options that every stage has. Raises ValueError for a field out of range."""

    stage: ClassVar[str] = ""
    """The `Stage` of these options: ``file.Class``, in this folder."""
    name: Fixed[str] = "stage"
    """Name of the stage in flags, messages and trackers."""
    steps: Count = 1000
    """Optimizer steps."""
    batch_size: Count = 32
    """Rows of an optimizer step, over all processes."""
    micro_batch_size: Count = 8
    """Rows of one forward pass of one process. Sets memory and speed; the update is the same for any size."""
    learning_rate: Positive = 1e-3
    """Peak learning rate: it rises, stays, and falls."""
    warmup: Share = 0.1
    """Fraction of the steps in which the learning rate rises."""
    decay: Share = 0.1
    """Fraction of the steps, the last ones, in which it falls to zero."""
    weight_decay: Share = 0.1
    """Weight decay of matrices; vectors have none."""
    betas: tuple[Annotated[float, Limits(0, 0.999999)], Annotated[float, Limits(0, 0.999999)]] = (0.9, 0.95)
    """Betas of AdamW."""
    clip: Positive = 1.0
    """Largest norm of the gradient."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """``bf16`` computes in bfloat16 over float32 weights."""
    gradient_checkpointing: bool = False
    """Save memory: recompute each layer in the backward pass."""
    spike: Positive = 20.0
    """Factor over the median of the last 64 losses from which a loss counts as diverged, as one that is not finite."""
    on_divergence: Literal["stop", "skip"] = "stop"
    """``skip`` leaves the batch out, notes it in the metrics, and stops after ``max_skips`` in a row."""
    max_skips: Count = 3
    """Batches left out in a row before the run stops."""
    checkpoint_every: Count = 500
    """Steps between checkpoints."""
    log_every: Count = 10
    """Steps between lines of metrics.jsonl."""
    keep_checkpoints: Count = 2
    """Newest checkpoints left on disk."""
    data_workers: CountOrZero | None = None
    """Processes beside each training process that make its batches ahead; empty: 2 for a GPU, none for a CPU."""

    def __post_init__(self) -> None:
        check_options(self, f"{self.name}.")

    def data_within(self, run: DataConfig) -> DataConfig:
        """Return the data of this stage in a run with the given data."""
        return run

    def teacher_within(self, run: TeacherConfig) -> TeacherConfig:
        """Return the teacher of this stage in a run with the given teacher."""
        return run

    @property
    def is_per_plan(self) -> bool:
        """True for a stage that trains a student of one plan; False for one that aligns heads, whatever the plan."""
        return isinstance(self, DistillConfig)

    @property
    def cached_logits(self) -> Path | None:
        """Folder that the stage reads the teacher's logits from, in the place of a teacher."""
        return None

    @property
    def rows_read(self) -> int:
        """Rows that the stage reads, from the first of the data's order."""
        return self.steps * self.batch_size

    def check_world(self, processes: int) -> None:
        """Raise ValueError when so many processes cannot share a step's rows equally."""
        if self.batch_size % processes:
            raise ValueError(
                f"{self.name}.batch_size is {self.batch_size}, which {processes} processes cannot share; "
                f"use a multiple of {processes}."
            )

    def to_dict(self) -> Record:
        """Return JSON values: tuples become lists, paths strings."""
        return json.loads(json.dumps(asdict(self), default=str))


@dataclass(frozen=True)
class AlignConfig(StageConfig):
    """Layer-to-layer alignment (arXiv 2408.10189): see `LayerAlignment`."""

    stage = "align.LayerAlignment"
    name: Fixed[str] = "align"
    target: Literal["mixer", "layer", "head"] = "mixer"
    """Output that must be equal: the mixer's, the layer's, or each recurrent head's."""
    loss: Literal["l2", "nmse"] = "l2"
    """``l2``: mean L2 norm of the error; ``nmse``: squared error over the target's square, each of all tokens of a
    step."""
    train: Literal["ssm", "mixer"] = "ssm"
    """``ssm``: recurrent heads alone; ``mixer``: kept heads and the output projection too."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target == "head" and self.train != "ssm":
            raise ValueError(
                f"align.train is {self.train!r}; target 'head' compares recurrent heads alone: use --align.train ssm."
            )


@dataclass(frozen=True)
class MatrixConfig(StageConfig):
    """Mixing matrices against attention maps (arXiv 2408.10189): see `MatrixAlignment`."""

    stage = "matrix.MatrixAlignment"
    name: Fixed[str] = "matrix"


@dataclass(frozen=True)
class DistillConfig(StageConfig):
    """End-to-end distillation: see `EndToEnd`."""

    stage = "end_to_end.EndToEnd"
    name: Fixed[str] = "distill"
    kind: Literal["forward_kl", "reverse_kl", "jsd"] = "forward_kl"
    """Divergence between teacher and student (docs/training.md)."""
    temperature: Positive = 1.0
    """Softmax temperature for teacher and student."""
    beta: Annotated[float, Limits(0, 1, without_ends=True)] = 0.5
    """Weight of the teacher in the mixture of ``jsd``."""
    hard_weight: Share = 0.0
    """Share of cross-entropy to the text itself."""
    train: Literal["all", "mixer", "ssm"] = "all"
    """``all`` parameters; ``mixer``: kept and recurrent heads, output projection; ``ssm``: recurrent heads alone."""
    lr_scale: tuple[Factor, Factor, Factor] | None = None
    """Factors of the learning rate for kept attention, recurrent heads and all other weights (output projections, MLPs,
    norms, embeddings): ``1 1 0.1`` lets attention learn ten times as fast as the MLPs. By default 1 1 1."""
    fused: bool = True
    """Never hold the logits of all tokens, where the models allow it (see `EndToEnd`)."""
    teacher_logits: Path | None = None
    """Folder written by ``hybrid-distill cache-logits`` for this run: the stage reads the teacher's logits there and
    holds no teacher in memory."""

    @property
    def cached_logits(self) -> Path | None:
        return self.teacher_logits


@dataclass(frozen=True)
class OnPolicyConfig(DistillConfig):
    """End-to-end distillation, partly on text that the student writes itself (arXiv 2306.13649): see `OnPolicy`."""

    stage = "on_policy.OnPolicy"
    name: Fixed[str] = "on_policy"
    teacher_logits: Fixed[Path | None] = None
    kind: Literal["forward_kl", "reverse_kl", "jsd"] = "jsd"
    share: Share = 0.5
    """Probability that a row is text that the student writes itself; also their part of the loss."""
    prompt_tokens: Count = 64
    """Tokens of a row that the student continues."""
    new_tokens: Count = 64
    """Tokens that it writes."""
    sampling_temperature: Positive = 1.0
    """Softmax temperature of the text that it writes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.teacher_logits is not None:
            raise ValueError(
                f"{self.name}.teacher_logits is {self.teacher_logits}; logits of text that a student will write cannot "
                "be cached: leave it out."
            )
        if self.hard_weight:
            raise ValueError(f"{self.name}.hard_weight is {self.hard_weight}; a student's own text is not a label: "
                             "use 0.")  # fmt: skip


@dataclass(frozen=True)
class LongConfig(DistillConfig):
    """End-to-end distillation on longer rows of the same data."""

    name: Fixed[str] = "long"
    seq_len: Annotated[int, Limits(2, whole=True)] = 8192
    """Tokens of a row, in the place of ``data.seq_len``. The teacher must reach as far: its RoPE settings are kept."""
    segment_len: Count | None = 2048
    """Tokens that the recurrent heads run over at a time, the state handed on: their forward keeps one segment, not the
    row, for its backward. The result is the same; empty runs whole rows."""

    def data_within(self, run: DataConfig) -> DataConfig:
        return replace(run, seq_len=self.seq_len)


@dataclass(frozen=True)
class PostConfig(DistillConfig):
    """End-to-end distillation on conversations, from a larger teacher if need be."""

    name: Fixed[str] = "post"
    data: DataConfig = field(default_factory=lambda: DataConfig(chat=True))
    """Data of this stage; by default conversations, of which the assistant's part is learned."""
    teacher: str | None = None
    """Folder, or name on the hub, of another teacher with the same vocabulary; by default the run's. Loaded in the
    run's ``teacher.dtype``; its chat template is the one that conversations are put into."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.teacher is not None and not self.teacher.strip():
            raise ValueError(f"{self.name}.teacher is {self.teacher!r}; name a folder or a model, or leave it out.")

    def data_within(self, run: DataConfig) -> DataConfig:
        return self.data

    def teacher_within(self, run: TeacherConfig) -> TeacherConfig:
        return run if self.teacher is None else replace(run, path=self.teacher, revision=None)
