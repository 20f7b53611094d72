"""How a stage is run, one frozen dataclass a stage."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro

from ..data import DataConfig
from ..data.config import TOKENS_OF_A_ROW
from ..limits import COUNT, POSITIVE, SHARE, Limits, check_fields
from .losses import KINDS

MAY_CHANGE = frozenset(
    {"micro_batch_size", "checkpoint_every", "keep_checkpoints", "log_every", "recompute", "spike", "on_divergence",
     "max_skips"}
)  # fmt: skip
"""Fields that a resumed run may have another value of."""

COUNTS = (
    "steps", "batch_size", "micro_batch_size", "checkpoint_every", "log_every", "keep_checkpoints", "max_skips",
)  # fmt: skip
BETA, WITHIN = Limits(0, 0.999999), Limits(0, 1, without_ends=True)

T = TypeVar("T")
Fixed = Annotated[T, tyro.conf.Suppress]
"""A field that a command line neither lists nor needs."""

CHOICES: dict[str, tuple[str, ...]] = {
    "precision": ("fp32", "bf16"),
    "on_divergence": ("stop", "skip"),
    "target": ("mixer", "layer", "head"),
    "loss": ("l2", "nmse"),
    "train": ("ssm", "mixer", "all"),
    "kind": KINDS,
}


@dataclass(frozen=True)
class StageConfig:
    """What every stage has. Raises ValueError for a field out of range."""

    name: Fixed[str] = "stage"
    """Of the stage, for messages and trackers."""
    steps: int = 1000
    """Of the optimiser."""
    batch_size: int = 32
    """Rows of an optimiser step, over all processes."""
    micro_batch_size: int = 8
    """Rows of one forward pass of one process. It sets memory and speed; the update is the same for any size."""
    learning_rate: float = 1e-3
    """Its peak: it rises, stays, and falls."""
    warmup: float = 0.1
    """Fraction of the steps in which the learning rate rises."""
    decay: float = 0.1
    """Fraction of the steps, the last ones, in which it falls to zero."""
    weight_decay: float = 0.1
    """Of matrices; vectors have none."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Of AdamW."""
    clip: float = 1.0
    """Largest norm of the gradient."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """``bf16`` computes in bfloat16 over float32 weights."""
    recompute: bool = False
    """Save memory: recompute each layer in the backward pass."""
    spike: float = 20.0
    """A loss so many times the median of the last 64 counts as diverged, like one that is not finite."""
    on_divergence: Literal["stop", "skip"] = "stop"
    """``skip`` leaves the batch out, says so in the metrics, and stops after ``max_skips`` in a row."""
    max_skips: int = 3
    """Batches left out in a row before the run stops."""
    checkpoint_every: int = 500
    """Steps between checkpoints."""
    log_every: int = 10
    """Steps between lines of metrics.jsonl."""
    keep_checkpoints: int = 2
    """How many of the newest are left on disk."""

    def __post_init__(self) -> None:
        check_fields(
            self,
            f"{self.name}.",
            **dict.fromkeys(COUNTS, COUNT),
            **dict.fromkeys(("learning_rate", "clip", "spike"), POSITIVE),
            **dict.fromkeys(("warmup", "decay", "weight_decay"), SHARE),
            betas=BETA,
        )
        for name, choices in CHOICES.items():
            value = getattr(self, name, choices[0])
            if value not in choices:
                raise ValueError(f"{self.name}.{name} is {value!r}; choose one of {', '.join(choices)}.")

    def check_world(self, processes: int) -> None:
        """Raise ValueError when so many processes cannot share a step's rows equally."""
        if self.batch_size % processes:
            raise ValueError(
                f"{self.name}.batch_size is {self.batch_size}, which {processes} processes cannot share; "
                f"use a multiple of {processes}."
            )

    @property
    def rows_read(self) -> int:
        """Rows that the stage reads, from the first of the data's order."""
        return self.steps * self.batch_size

    def to_dict(self) -> dict[str, Any]:
        """For JSON: tuples become lists, paths strings."""
        return json.loads(json.dumps(asdict(self), default=str))


@dataclass(frozen=True)
class AlignConfig(StageConfig):
    """Layer-to-layer alignment (arXiv 2408.10189): see `LayerAlignment`."""

    name: Fixed[str] = "align"
    target: Literal["mixer", "layer", "head"] = "mixer"
    """What must be equal: the mixer's output, the layer's output, or each recurrent head's output."""
    loss: Literal["l2", "nmse"] = "l2"
    """``l2``: mean L2 norm of the error; ``nmse``: squared error over the target's square, each of all tokens of a
    step."""
    train: Literal["ssm", "mixer"] = "ssm"
    """``ssm``: recurrent heads alone; ``mixer``: kept heads and the output projection too."""


@dataclass(frozen=True)
class MatrixConfig(StageConfig):
    """Mixing matrices against attention maps (arXiv 2408.10189): see `MatrixAlignment`."""

    name: Fixed[str] = "matrix"


@dataclass(frozen=True)
class DistillConfig(StageConfig):
    """End-to-end distillation: see `EndToEnd`."""

    name: Fixed[str] = "distill"
    kind: Literal["forward_kl", "reverse_kl", "jsd"] = "forward_kl"
    """The divergence between teacher and student (docs/training.md)."""
    temperature: float = 1.0
    """Of both."""
    beta: float = 0.5
    """Of ``jsd``."""
    hard_weight: float = 0.0
    """Share of cross-entropy to the text itself."""
    train: Literal["all", "mixer", "ssm"] = "all"
    """``all`` parameters; ``mixer``: kept and recurrent heads, output projection; ``ssm``: recurrent heads alone."""
    fused: bool = True
    """Never hold the logits of all tokens, where the models allow it (see `EndToEnd`)."""
    teacher_logits: Path | None = None
    """A folder that ``hybrid-distill cache-logits`` has written for this run: the stage reads what the teacher says
    there, and there is no teacher in memory."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, f"{self.name}.", temperature=POSITIVE, beta=WITHIN, hard_weight=SHARE)


@dataclass(frozen=True)
class OnPolicyConfig(DistillConfig):
    """End-to-end distillation, partly on text that the student writes itself (arXiv 2306.13649): see `OnPolicy`."""

    name: Fixed[str] = "on_policy"
    teacher_logits: Fixed[Path | None] = None
    kind: Literal["forward_kl", "reverse_kl", "jsd"] = "jsd"
    share: float = 0.5
    """Probability that a row is text that the student writes itself; also their part of the loss."""
    prompt_tokens: int = 64
    """Tokens of a row that the student goes on from."""
    new_tokens: int = 64
    """Tokens that it writes."""
    sampling_temperature: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(
            self,
            f"{self.name}.",
            share=SHARE,
            prompt_tokens=COUNT,
            new_tokens=COUNT,
            sampling_temperature=POSITIVE,
        )
        if self.teacher_logits is not None:
            raise ValueError(
                f"{self.name}.teacher_logits is {self.teacher_logits}; what a student will write is on no disk: "
                "leave it out."
            )
        if self.hard_weight:
            raise ValueError(f"{self.name}.hard_weight is {self.hard_weight}; a student's own text is no label: use 0.")


@dataclass(frozen=True)
class LongConfig(DistillConfig):
    """End-to-end distillation on longer rows of the same data."""

    name: Fixed[str] = "long"
    seq_len: int = 8192
    """Tokens of a row, in the place of ``data.seq_len``. The teacher must reach as far: its RoPE settings are kept."""
    segment_len: int | None = 2048
    """Tokens that the recurrent heads run over at a time, the state handed on: what their forward keeps for its
    backward is of one segment, not of the row. The result is the same; empty runs whole rows."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, f"{self.name}.", seq_len=TOKENS_OF_A_ROW, segment_len=COUNT)


@dataclass(frozen=True)
class PostConfig(DistillConfig):
    """End-to-end distillation on conversations, from a larger teacher if need be."""

    name: Fixed[str] = "post"
    data: DataConfig = field(default_factory=lambda: DataConfig(chat=True))
    """The stage's own; by default conversations, of which the assistant's part is learned."""
    teacher: str | None = None
    """A folder, or a name on the hub, of another teacher with the same vocabulary; by default the run's. Loaded in the
    run's ``teacher.dtype``; its chat template is the one that conversations are put into."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.teacher is not None and not self.teacher.strip():
            raise ValueError(f"{self.name}.teacher is {self.teacher!r}; name a folder or a model, or leave it out.")
