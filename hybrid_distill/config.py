"""One typed object describes a run: saved with it, printed by ``--dry-run``, overridden by flags. A field is declared
here, with its range or choices, and nowhere else: flags, checks and the reference follow from it.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from .data import DataConfig
from .io import Record, refused
from .limits import Count, CountOrZero, Positive, Share, check_options
from .probes.forms import check_form
from .student.init import Init
from .teacher import TINY
from .train.config import (
    AlignConfig,
    DistillConfig,
    LongConfig,
    MatrixConfig,
    OnPolicyConfig,
    PostConfig,
    StageConfig,
    TeacherConfig,
)

Selection = Literal["top", "restoration", "random", "layers", "all", "none", "pairs", "file"]
StageName = Literal["matrix", "align", "distill", "on_policy", "long", "post"]
RENAMED, DROPPED = {"recompute": "gradient_checkpointing"}, {"compile_layers"}
"""Fields of config.json files of earlier versions."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ScoringConfig:
    """How heads are ranked: KV-retrieval accuracy lost when a head is switched off."""

    n_pairs: Count = 16
    """Pairs in each dictionary."""
    n_examples: Count = 128
    """Dictionaries asked of each head."""
    n_queries: Count = 1
    """Questions about each dictionary. Further ones cost only their own tokens."""
    form: str = "plain"
    """Form of the prompts, here and in the evaluation: ``plain``, ``shots=1`` (solved examples before it), ``chat``
    (the tokenizer's template), or ``auto``: the one in which the teacher answers most of 32 prompts."""
    batch_size: Count | None = None
    """Rows at a time; by default as many as are fast and fit."""
    n_control_texts: CountOrZero = 16
    """Held-out documents on which heads that matter for everything show."""
    restoration_examples: Count = 32
    """Questions for each head and each round of greedy restoration, which looks at log-probabilities."""
    min_accuracy: Share | None = None
    """Accuracy below which a teacher is refused: its heads cannot be ranked by a task that it fails. By default half
    way from guessing to always right."""
    file: Path | None = None
    """Path to an existing scores.json; skips scoring."""

    def __post_init__(self) -> None:
        check_options(self, "scoring.")
        check_form("scoring.form", self.form)


@dataclass(frozen=True)
class PlanConfig:
    """Which heads stay attention."""

    selection: Selection = "top"
    """``top``: heads that the teacher misses most, switched off one at a time. ``restoration``: heads that bring most
    back to an aligned student without attention, one after the other; the run then aligns once, all heads, before it
    plans (below ``aligned/``)."""
    k: CountOrZero = 6
    """Heads kept, over all layers (``top``, ``restoration`` and ``random``)."""
    seed: CountOrZero = 0
    """Seed of the ``random`` selection."""
    layers: tuple[CountOrZero, ...] = ()
    """Layers kept whole (``layers``)."""
    pairs: tuple[tuple[int, int], ...] = ()
    """Heads as (layer, head), for ``pairs``."""
    file: Path | None = None
    """Path to a plan.json, for ``file``."""

    def __post_init__(self) -> None:
        check_options(self, "plan.")


@dataclass(frozen=True)
class StudentConfig:
    """The recurrent heads."""

    d_state: Count = 64
    """State size N of each head."""
    conv_width: Count = 4
    """Tokens that the causal convolution before a head sees."""
    recurrence: Literal["discrete", "mamba2", "mamba2-stock", "gdn"] = "discrete"
    """``discrete``: the method's heads. ``mamba2``: Mamba-2's own, with a SiLU behind the convolution and the input
    scaled by the step, which can be exported without remote code (docs/export.md). ``mamba2-stock``: without a bias at
    the gate, which llama.cpp has no place for. ``gdn``: the gated delta rule, which replaces what the state holds under
    a key (docs/method.md)."""
    init: Init = "fitted"
    """``fitted`` starts from the teacher's Q, K, V, O, fitted to the first rows of text; ``statistics`` from the same,
    with each head's decay from its mean attention distance on these rows and the scale of its content from its entropy;
    ``teacher`` without text; ``random`` from neither. benchmarks/init.py compares them: ``fitted`` is ahead at the
    start and for 60 steps; after 100, ``statistics`` is, by 3 %."""
    aligned: Path | None = None
    """Folder of a finished alignment of a student without kept heads, target ``head``: its recurrent heads are taken
    over, whatever the plan. Students that differ in their plan alone then share one alignment."""

    def __post_init__(self) -> None:
        check_options(self, "student.")


@dataclass(frozen=True)
class EvaluationConfig:
    """Questions and texts that teacher and student are measured on."""

    n_pairs: tuple[Count, ...] = (4, 8, 16, 32)
    """Dictionary sizes, each asked by choice and by generation."""
    stated_pairs: int | None = None
    """Dictionary size that a comparison's table and finding speak of, one of ``n_pairs``; by default the one that
    heads are ranked with. The curve over all sizes is in the report in any case."""
    n_examples: Count = 128
    """Dictionaries of each size."""
    batch_size: Count = 32
    """Questions or documents at a time."""
    n_texts: CountOrZero = 128
    """Held-out documents for perplexity and agreement."""
    knowledge: str | None = None
    """A JSON-lines file of multiple-choice questions, or ``tiny`` for the facts of the embedded teacher; by default
    those when it is the teacher, else none."""
    texts: str = "tiny"
    """``tiny`` (the embedded held-out split), or a local file or folder like a data source."""

    def __post_init__(self) -> None:
        check_options(self, "evaluation.")
        if self.stated_pairs is not None and self.stated_pairs not in self.n_pairs:
            raise ValueError(
                f"evaluation.stated_pairs is {self.stated_pairs}, which is not measured; "
                f"use one of evaluation.n_pairs: {', '.join(map(str, self.n_pairs))}."
            )


@dataclass(frozen=True)
class RunConfig:
    """A whole run: score, plan, build, align, distil, evaluate, export, report."""

    name: str = "hybrid"
    """Name in reports and trackers."""
    out: Path = Path("runs/hybrid")
    """Folder of everything that the run writes."""
    seed: CountOrZero = 0
    """Seed of the weights and questions that are drawn. The order of the data has ``data.seed``."""
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    scoring: ScoringConfig = field(default_factory=ScoringConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    student: StudentConfig = field(default_factory=StudentConfig)
    data: DataConfig = field(default_factory=DataConfig)
    stages: tuple[StageName, ...] = ("align", "distill")
    """Stages to run, in this order; ``matrix`` may come first in a student without kept heads, and after ``distill``
    come ``on_policy`` (the student's own text), ``long`` (longer rows) and ``post`` (conversations)."""
    matrix: MatrixConfig = field(default_factory=MatrixConfig)
    align: AlignConfig = field(default_factory=AlignConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    on_policy: OnPolicyConfig = field(default_factory=OnPolicyConfig)
    long: LongConfig = field(default_factory=LongConfig)
    post: PostConfig = field(default_factory=PostConfig)
    teacher_sharding: Literal["replicated", "sharded"] = "replicated"
    """``sharded``: while a stage trains, each process holds a share of the teacher's decoder layers, whatever the
    launch file does with the student. Scoring and evaluation still need a whole teacher."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    export: bool = True
    """Write the student as a Hugging Face checkpoint."""
    resume: Literal["auto", "never"] = "auto"
    """``auto`` resumes where the run directory stopped; ``never`` begins again, and removes what an earlier run has
    left there: scores, plan, stages, evaluations, export and report."""
    trackers: tuple[str, ...] = ()
    """``tensorboard``, ``trackio``, ``wandb``: metrics.jsonl is always written."""
    group: str = ""
    """Group of the run in trackers; a sweep puts its own name here."""
    profile: bool = False
    """Write a trace of a few steps of each stage, stages/*/trace-<process>.json."""
    dry_run: bool = False
    """Check sources, files and settings, print what to launch and the memory that each stage takes, start nothing."""
    show_config: bool = False
    """Let a dry run print the whole resolved config, as JSON, below the rest."""
    gpus: Count = 1
    """GPUs that a dry run plans memory for."""
    gpu_memory: Positive = 80.0
    """GB (1e9 bytes) of each of them."""

    def __post_init__(self) -> None:
        check_options(self, "")
        ordered = sorted(self.stages, key=lambda name: getattr(self, name).is_per_plan)
        if ordered != list(self.stages):
            raise ValueError(
                f"--stages is {' '.join(self.stages)}, but matrix and align train on the teacher's own weights, which "
                f"the other stages change; pass --stages {' '.join(ordered)}."
            )
        if self.teacher_sharding == "sharded" and "align" in self.stages and self.align.target == "layer":
            raise ValueError(
                "align.target is 'layer', which runs the teacher's own weights in the student, and teacher_sharding is "
                "'sharded'; use --align.target mixer or head, or --teacher-sharding replicated."
            )

    @property
    def stage_configs(self) -> tuple[StageConfig, ...]:
        """Configs of `stages`."""
        return tuple(getattr(self, name) for name in self.stages)

    @property
    def own_stages(self) -> tuple[StageConfig, ...]:
        """Configs of the stages to run in this run's own folder: a plan by restoration aligns below ``aligned/``."""
        return tuple(c for c in self.stage_configs if c.is_per_plan or self.plan.selection != "restoration")

    @property
    def unused_stages(self) -> set[str]:
        """Names of sections that this run does not read."""
        return set(get_args(StageName)) - set(self.stages)


def on_embedded_teacher(config: RunConfig) -> RunConfig:
    """Return the same run on the embedded teacher and corpus, cut down to what they and a laptop can carry."""
    small: dict[str, StageConfig] = {}
    for name in get_args(StageName):
        stage = getattr(config, name)
        small[name] = replace(stage, steps=min(stage.steps, 100), batch_size=min(stage.batch_size, 8))
    small["long"] = replace(small["long"], seq_len=min(config.long.seq_len, 512), segment_len=256)
    small["post"] = replace(small["post"], teacher=None, data=DataConfig(seq_len=min(config.post.data.seq_len, 256)))
    return replace(
        config,
        gpus=1,
        teacher=replace(config.teacher, path=TINY, revision=None, attn_implementation=None),
        plan=replace(config.plan, k=min(config.plan.k, 48)),
        data=replace(config.data, sources=(TINY,), weights=(), chat=False, seq_len=min(config.data.seq_len, 256)),
        **small,
    )


def config_of(recipe: ModuleType) -> RunConfig:
    """Return the config of a recipe's module. Raises ValueError where config() fails or returns something else."""
    return checked_config(ask_recipe(recipe, "config"), f"config() of {recipe.__file__}")


def checked_config(config: object, source: str) -> RunConfig:
    """Return ``config``. Raises ValueError for another type: a command line would silently take its own defaults."""
    if not isinstance(config, RunConfig):
        raise ValueError(f"{source} is {type(config).__name__} {str(config)[:60]!r}; return a RunConfig.")
    return config


def ask_recipe(recipe: ModuleType, name: str) -> Any:
    """Call a function of a recipe's module. Raises ValueError, naming the line, where it fails."""
    with in_recipe(str(recipe.__file__)):
        return getattr(recipe, name)()


@contextmanager
def in_recipe(file: str) -> Iterator[None]:
    """Turn any error of a recipe's own code into a ValueError of one line that names the recipe and the line."""
    try:
        yield
    except Exception as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        where = f"{file}, line {frames[-1].lineno}" if frames else file
        raise ValueError(f"{where}: {type(error).__name__}: {' '.join(str(error).split())}") from error


def current_flags(argv: Sequence[str]) -> list[str]:
    """Replace flags of earlier versions, with a line: ``--align.recompute`` is ``--align.gradient-checkpointing``."""
    current = [re.sub(r"^(--[\w-]+\.(?:no[-_])?)recompute\b", r"\1gradient-checkpointing", word) for word in argv]
    for old, new in zip(argv, current):
        if old != new:
            log.info("note: %s is now %s.", old.partition("=")[0], new.partition("=")[0])
    return current


def to_json(config: RunConfig) -> Record:
    """Return a config as plain JSON values; paths become strings."""
    return json.loads(json.dumps(dataclasses.asdict(config), default=str))


def from_json(path: Path) -> RunConfig:
    """Read a run's config.json. Raises ValueError for another file."""
    with refused(f"{path} is not a run's config", "name the directory of a run"):
        record = json.loads(path.read_text())
        if "teacher" not in record:  # it would silently be the embedded one
            raise ValueError("it does not name a teacher")
        return from_record(record)


def from_record(record: Record) -> RunConfig:
    """Rebuild a run's config from what `to_json` made of it, in this version or an earlier one."""
    config = _rebuilt(RunConfig, record)
    assert isinstance(config, RunConfig)
    return config


def _rebuilt(kind: object, value: object) -> object:
    """Return ``value``, read from JSON, as the type that a field was declared with."""
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(value, dict):
            raise TypeError(f"{value!r} stands for a {kind.__name__}")
        hints = get_type_hints(kind)
        current = [(RENAMED.get(name) or name, item) for name, item in value.items() if name not in DROPPED]
        return kind(**{name: _rebuilt(hints[name], item) for name, item in current})
    if isinstance(value, list):
        is_tuple = get_origin(kind) is tuple  # or one that may be left out
        return tuple(_rebuilt(get_args(kind)[0], item) for item in value) if is_tuple else tuple(value)
    return Path(value) if isinstance(value, str) and Path in (kind, *get_args(kind)) else value
