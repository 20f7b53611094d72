"""Typed configuration of a run: saved with it, printed by ``--dry-run --show-config``, overridden by flags. Each field
is declared only here, with its range or choices; flags, checks and the reference are derived from it.
"""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from .data import DataConfig
from .distributed import chosen_dtype
from .io import Record, refused
from .kernels import Kernels
from .model.field_rules import OWN_RULES, RecurrenceName, check_field, check_windows
from .plan import Unit
from .probes.prompt_formats import check_prompt_format
from .student.init import Init
from .train.config import (
    COLLECTIVE_TIMEOUT,
    STAGE_KINDS,
    Align,
    Distill,
    Fixed,
    StageConfig,
    TeacherConfig,
)
from .tunable import Tunable
from .validation import (
    Count,
    CountOrZero,
    Positive,
    Seed,
    Share,
    check_options,
    number_of_bytes,
    number_of_tokens,
)

Selection = Literal["top", "restoration", "random", "layers", "all", "none", "pairs", "file"]


@dataclass(frozen=True)
class ScoringConfig:
    """Head ranking, by the KV retrieval lost when a head is ablated or confined to the student's window."""

    method: Literal["auto", "ablation", "attribution"] = "auto"
    """``ablation``: zero one head at a time. ``attribution``: each head's share of what the student's windows lose,
    on questions farther from the dictionary than they reach. By default ``attribution`` for a student with a window."""
    n_pairs: Count = 16
    """Key-value pairs in each dictionary."""
    n_examples: Count | None = None
    """Dictionaries (prompts) for each head; by default 24 of 8 questions, 128 of one, 24 for ``attribution``."""
    n_queries: Count | None = None
    """Questions about each dictionary; by default 8, or one for each pair of smaller ones, and one for
    ``attribution`` and for a ``plan`` by ``restoration``."""
    distance: Count | None = None
    """Words of other text between dictionary and question for ``attribution``; by default as many as
    ``student.window``, at most 512, the longest window that heads are ranked for."""
    prompt_format: str = "plain"
    """Prompt format for scoring and evaluation: ``plain``, ``shots=1`` (solved examples first) or ``chat`` (the
    tokenizer's template). `hybrid-distill score` prints what the teacher answers in each."""
    batch_size: Count | None = None
    """Rows per forward pass; by default as many as run fast and fit in memory."""
    n_control_texts: CountOrZero = 16
    """Held-out documents that reveal heads needed for any text, not only for retrieval."""
    restoration_examples: Count = 32
    """Questions per head in each round of greedy restoration, which compares log-probabilities."""
    min_accuracy: Share | None = None
    """Lowest accuracy accepted from a teacher: a task that it fails cannot rank its heads. By default a third
    of the way from guessing to always right."""
    file: Path | None = None
    """Path to an existing scores.json; skips scoring."""
    other_weights: bool = False
    """Accept a ``file`` of other weights of the same shape, such as those of a quantized copy of the teacher."""

    def __post_init__(self) -> None:
        check_options(self, "scoring.")
        check_prompt_format("scoring.prompt_format", self.prompt_format)


@dataclass(frozen=True)
class PlanConfig:
    """Choice of the heads that stay attention."""

    selection: Selection = "top"
    """``top``: heads with the highest scores (``scoring.method``). ``restoration``: heads that recover most when added
    one by one to an aligned student without attention; the run first aligns all heads once, in ``aligned/``."""
    k: CountOrZero = 6
    """Number of units to keep, over all layers, for ``top``, ``restoration`` and ``random``."""
    unit: Unit = "head"
    """Unit to keep. ``head``: single heads, the only choice for ``restoration``. ``kv-group``: all query heads
    that share a KV head, which is cached once for all of them. ``layer``: all heads of a layer. ``container``: ``k``
    KV groups in every layer, for Falcon-H1 exports (docs/export.md). A unit ranks by its best head; under
    ``attribution``, by the sum of its heads."""
    seed: Seed = 0
    """Seed of the ``random`` selection."""
    layers: tuple[CountOrZero, ...] = ()
    """Layers that keep all their heads, for ``layers``."""
    pairs: tuple[tuple[int, int], ...] = ()
    """Heads to keep as (layer, head), for ``pairs``."""
    file: Path | None = None
    """Path to a plan.json, for ``file``."""

    def __post_init__(self) -> None:
        check_options(self, "plan.")
        # These have what they select in a field of their name.
        name = self.selection
        if name in ("layers", "pairs", "file") and not getattr(self, name):
            raise ValueError(
                f"plan.selection is {name!r}, and plan.{name} is empty; pass --plan.{name}."
            )
        if self.restores and self.unit != "head":
            raise ValueError(
                f"plan.unit is {self.unit!r}, and plan.selection 'restoration' chooses single heads; pass --plan.unit "
                "head, with a --plan.k of heads."
            )

    @property
    def restores(self) -> bool:
        """True if heads are chosen by what they restore to the aligned student."""
        return self.selection == "restoration"


@dataclass(frozen=True)
class StudentConfig:
    """Recurrent heads of the student."""

    d_state: CountOrZero = 64
    """State size N of each recurrent head, 4 to 128; 0 leaves replaced heads with their window alone."""
    window: CountOrZero = 0
    """Latest tokens that replaced heads attend to, beside their recurrence, with the teacher's own weights; 0 for
    recurrence alone, as in the paper."""
    sinks: CountOrZero = 0
    """First tokens of a document that replaced heads attend to beside their ``window``."""
    conv_width: Count = 4
    """Width of the causal convolution before each head, in tokens."""
    recurrence: RecurrenceName = "discrete"
    """``discrete``: the method's heads. ``mamba2``: Mamba-2's heads, with a SiLU after the convolution and the input
    scaled by the step size; they export without remote code (docs/export.md). ``mamba2-stock``: ``mamba2`` without the
    gate bias, which llama.cpp does not support. ``gdn``: the gated delta rule, which overwrites the value that the
    state holds for a key (docs/method.md)."""
    init: Init = "fitted"
    """Initial weights. ``fitted``: the teacher's Q, K, V, O, fitted to the first rows of text. ``teacher``: the same
    weights, without text. ``random``: neither. ``fitted`` has the smallest alignment error (benchmarks/init.py)."""
    kernels: Tunable[Kernels] = "auto"
    """Implementation of the recurrent heads and of the distillation loss. ``auto``: Triton's kernels on a GPU if they
    pass a test at first use, else torch. ``mamba_ssm``: its scan. It may change when a run resumes."""
    aligned: Path | None = None
    """Stage folder of a finished alignment, with target ``head``, of a student without kept heads. Its recurrent heads
    are copied for any plan, so that students that differ only in their plan share one alignment."""

    def __post_init__(self) -> None:
        check_options(self, "student.")
        for name, value in self.head_options.items():
            check_field(f"student.{name}", value, OWN_RULES[name])
        names = {name: f"student.{name}" for name in ("window", "sinks", "d_state", "recurrence")}
        check_windows(self.window, self.sinks, self.d_state, self.recurrence, names)

    @property
    def head_options(self) -> dict[str, Any]:
        """Options of the replaced heads, as `build_student` and `empty_student` take them."""
        names = ("d_state", "conv_width", "recurrence", "window", "sinks")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class EvaluationConfig:
    """Questions and texts for measuring teacher and student."""

    n_pairs: tuple[Count, ...] = (4, 8, 16, 32)
    """Dictionary sizes in pairs, each measured by choice and by generation."""
    stated_pairs: Tunable[int | None] = None
    """Dictionary size, one of ``n_pairs``, by which a sweep's report compares students; by default the size that heads
    are ranked with. Reports also show all sizes."""
    n_examples: Count = 128
    """Dictionaries per size."""
    distance: CountOrZero | None = None
    """Words between dictionary and question in an extra multiple-choice test on the smallest dictionaries; 0 skips it.
    By default as many as the student's window has tokens, to show what windows lose, if the teacher's context is long
    enough."""
    batch_size: Tunable[Count] = 32
    """Questions or documents per forward pass."""
    n_texts: CountOrZero = 128
    """Held-out documents for perplexity and agreement."""
    knowledge: str | None = None
    """JSON Lines file of multiple-choice questions, ``tiny`` for the embedded teacher's facts, or ``general`` for 172
    questions of general knowledge. By default ``tiny`` if the teacher is the embedded one, else none."""
    texts: str = "tiny"
    """Held-out texts: ``tiny`` (the embedded split), or a local file or folder as in ``data.sources``."""

    def __post_init__(self) -> None:
        check_options(self, "evaluation.")
        if self.stated_pairs is not None and self.stated_pairs not in self.n_pairs:
            sizes = ", ".join(map(str, self.n_pairs)) or "none, so leave it out"
            raise ValueError(
                f"evaluation.stated_pairs is {self.stated_pairs}, which is not measured; use one of "
                f"evaluation.n_pairs: {sizes}."
            )


@dataclass(frozen=True)
class RunConfig:
    """Complete run: score, plan, build, train stage by stage, evaluate, export, report."""

    name: str = "hybrid"
    """Name in reports and trackers."""
    out: Tunable[Path] = Path("runs/hybrid")
    """Folder for everything that the run writes."""
    seed: Seed = 0
    """Seed for random weights and questions; ``data.seed`` sets the order of the data."""
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    scoring: ScoringConfig = field(default_factory=ScoringConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    student: StudentConfig = field(default_factory=StudentConfig)
    data: DataConfig = field(default_factory=DataConfig)
    stages: Fixed[tuple[StageConfig, ...]] = (Align(), Distill())
    """Stages to run, in this order. Each has a name of its own, under which flags set its options: --align.steps. One
    that aligns recurrent heads alone is skipped where a student has none (``student.d_state`` 0)."""
    tokens: str | None = None
    """Training tokens of the whole run, such as ``3M``: sets the ``steps`` of every stage, from its batch and row size,
    when the run starts. By default each stage's own steps count."""
    align_share: Share = 0.1
    """Share of ``tokens`` for the stages that align heads; the others get the rest. Without a stage to align, all."""
    cache: str | None = None
    """Largest cache of one sequence of ``context`` tokens in bf16, such as ``15MB``, or ``16%`` of the teacher's. On
    the command line it sets ``plan.selection``, ``plan.unit``, ``plan.k``, ``student.window``, ``student.sinks`` and
    ``student.d_state``; flags for these take precedence, and ``--dry-run`` shows the result. In Python it is only a
    limit: call `pipeline.budget.within_cache` to fit a run to it."""
    context: Count = 4096
    """Length in tokens at which ``cache`` holds."""
    teacher_sharding: Tunable[Literal["replicated", "sharded"]] = "replicated"
    """``sharded``: while a stage trains, each process holds a shard of the teacher's decoder layers, however the launch
    file shards the student. Scoring and evaluation still need the whole teacher."""
    collective_timeout: Tunable[Positive] = COLLECTIVE_TIMEOUT
    """Minutes that processes wait for one another within a training step before the run ends in an error. Tokenizing,
    downloading, scoring, evaluating and exporting have no limit."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    control: Tunable[bool] = False
    """Also train the teacher itself through the stages that train whole models, in ``control/``, and show it beside the
    student in report and card: this shows what the stages cost by themselves. Takes as long as they do."""
    export: Tunable[bool] = True
    """Write the student as a Hugging Face checkpoint."""
    resume: Tunable[Literal["auto", "never"]] = "auto"
    """``auto`` resumes the run in the run directory; ``never`` starts over and deletes what an earlier run left there:
    scores, plan, stages, evaluations, export and report."""
    trackers: Tunable[tuple[str, ...]] = ()
    """Experiment trackers: ``tensorboard``, ``trackio``, ``wandb``. metrics.jsonl is always written."""
    group: Tunable[str] = ""
    """Group of the run in trackers; a sweep uses its own name."""
    profile: Tunable[bool] = False
    """Write a profiler trace of a few steps of each stage to stages/*/trace-<process>.json."""
    dry_run: Tunable[bool] = False
    """Check sources, files and settings; print what to launch, and each stage's memory and time, measured on a few
    random rows; start nothing."""
    show_config: Tunable[bool] = False
    """Also print the resolved config in a dry run, as JSON."""
    gpus: Tunable[Count] = 1
    """Number of GPUs that a dry run plans memory for."""
    gpu_memory: Tunable[Positive] = 80.0
    """Memory of each GPU, in GB (1e9 bytes)."""

    def __post_init__(self) -> None:
        check_options(self, "")
        self._check_names()
        self._check_order()
        if self.cache is not None:
            number_of_bytes("cache", self.cache, whole=100)
        if self.tokens is not None:
            number_of_tokens("tokens", self.tokens)
        if self.plan.restores and not self.head_stages:
            fix = "list an Align() in stages"
            if not self.student.d_state:
                fix = "pass a student.d_state of at least 4, since a window has nothing to align"
            raise ValueError(
                f"plan.selection is 'restoration', which first aligns every head, and no stage aligns; {fix}."
            )
        for stage in self.head_stages:
            self._check_alignment(stage)
        if self.control:
            self._check_control()
        if self.scoring.method == "attribution" and not self.student.window:
            raise ValueError(
                "scoring.method is 'attribution', which needs windows, and student.window is 0; pass "
                "--student.window, or --scoring.method ablation."
            )

    @property
    def ranks_by_attribution(self) -> bool:
        """True if heads are ranked by attribution."""
        if self.scoring.method == "auto":
            return self.student.window > 0 and not self.plan.restores
        return self.scoring.method == "attribution"

    @property
    def probes_heads(self) -> bool:
        """True if the run measures heads on probe questions: without a file of scores, and always for restoration."""
        return self.scoring.file is None or self.plan.restores

    @property
    def is_control(self) -> bool:
        """True for the run of the teacher itself through the stages."""
        # The control is this run with the plan "all" (`run_control`), under which no other run trains.
        return self.control and self.plan.selection == "all"

    def is_idle(self, stage: StageConfig) -> bool:
        """True for a stage with nothing to train: it aligns recurrent heads of a student without any, or any heads in a
        control run."""
        if self.is_control and stage.is_alignment:
            return True
        return isinstance(stage, Align) and stage.train == "ssm" and not self.student.d_state

    def resolved(self) -> RunConfig:
        """Return the run without idle stages (`is_idle`), with steps from ``tokens`` (then None), and with dtypes as
        `with_dtypes`.

        Raises ValueError if a stage gets less than one step.
        """
        stages = tuple(stage for stage in self.stages if not self.is_idle(stage))
        if self.tokens is not None:
            if not stages:
                raise ValueError(
                    f"tokens is {self.tokens!r}, but no stage of this run trains; leave out --stages or --tokens."
                )
            stages = self._within_tokens(stages)
        return replace(self, stages=stages, tokens=None).with_dtypes()

    def with_dtypes(self) -> RunConfig:
        """Return the run with the dtype and the precisions that ``auto`` stands for on this process's device."""
        teacher = replace(self.teacher, dtype=chosen_dtype(self.teacher.dtype))
        is_half = teacher.dtype != "float32"
        stages = tuple(stage.with_precision(is_half) for stage in self.stages)
        return replace(self, teacher=teacher, stages=stages)

    def _within_tokens(self, stages: tuple[StageConfig, ...]) -> tuple[StageConfig, ...]:
        """Return the stages with steps that use ``tokens`` in all; alignments get ``align_share`` of them."""
        assert self.tokens is not None
        budget = number_of_tokens("tokens", self.tokens)
        # In the order of the run: `_check_order` puts alignments first.
        alignments = [stage for stage in stages if stage.is_alignment]
        others = [stage for stage in stages if not stage.is_alignment]
        align_share = self.align_share
        if not alignments:
            align_share = 0.0
        if not others:
            align_share = 1.0
        aligned = self._within_budget(alignments, budget * align_share)
        distilled = self._within_budget(others, budget * (1 - align_share))
        return (*aligned, *distilled)

    def _within_budget(self, stages: list[StageConfig], budget: float) -> list[StageConfig]:
        """Scale the steps of stages so that they take a budget of tokens together."""
        tokens_now = sum(stage.steps * self.tokens_per_step(stage) for stage in stages)
        resized: list[StageConfig] = []
        for stage in stages:
            # Multiplied first: a scale for all stages would be rounded, and half steps with it.
            scaled_steps = budget * stage.steps / tokens_now
            steps = round(scaled_steps)
            if steps < 1:
                tokens_per_step = self.tokens_per_step(stage)
                raise ValueError(
                    f"tokens is {self.tokens!r}, which gives {stage.name} {scaled_steps * tokens_per_step:,.0f} "
                    f"tokens, less than one step of {tokens_per_step:,}; pass more tokens, another align_share, or "
                    "smaller batches."
                )
            resized.append(replace(stage, steps=steps))
        return resized

    def tokens_per_step(self, stage: StageConfig) -> int:
        """Return the tokens of one optimizer step of a stage."""
        return stage.batch_size * self.data_of(stage).seq_len

    def _check_names(self) -> None:
        """Raise ValueError unless each stage has a name of its own that can stand in flags and file names."""
        taken = {option.name for option in dataclasses.fields(self)}
        for stage in self.stages:
            if not re.fullmatch("[a-z][a-z0-9_]*", stage.name) or stage.name in taken:
                raise ValueError(
                    f"a stage has the name {stage.name!r}; pass one of small letters, digits and underscores that "
                    'neither a stage before it nor another option of the run has: Distill(name="long").'
                )
            taken.add(stage.name)

    def _check_order(self) -> None:
        ordered = [*self.head_stages, *self.student_stages]
        if ordered != list(self.stages):
            raise ValueError(
                f"the stages are {' '.join(self.stage_names)}, but alignment trains on the teacher's own weights, "
                f"which distillation changes; pass --stages {' '.join(stage.name for stage in ordered)}."
            )

    def _check_control(self) -> None:
        """Raise ValueError unless some stage trains whole models, and every stage but alignment does."""
        if not self.student_stages:
            raise ValueError(
                f"control is set, but none of the stages ({' '.join(self.stage_names) or 'none'}) trains whole models; "
                "list a Distill() in stages, or leave --control out."
            )
        for stage in self.student_stages:
            if stage.train != "all":
                raise ValueError(
                    f"control is set, and {stage.name}.train is {stage.train!r}: a teacher has no such part; pass "
                    f"--{stage.name}.train all, or leave --control out."
                )

    def _check_alignment(self, stage: StageConfig) -> None:
        if not isinstance(stage, Align):
            return
        if self.plan.restores and stage.train != "ssm":
            raise ValueError(
                f"{stage.name}.train is {stage.train!r}, but plan.selection 'restoration' swaps single recurrent "
                f"heads for attention and needs them trained alone; pass --{stage.name}.train ssm."
            )
        if self.teacher_sharding == "sharded" and stage.target == "layer":
            raise ValueError(
                f"{stage.name}.target is 'layer', which runs the teacher's own weights in the student, and "
                f"teacher_sharding is 'sharded'; use --{stage.name}.target mixer or head, or --teacher-sharding "
                "replicated."
            )

    @property
    def stage_names(self) -> tuple[str, ...]:
        """Names of `stages`."""
        return tuple(stage.name for stage in self.stages)

    @property
    def fits_to_text(self) -> bool:
        """True if recurrent heads start from a fit to the first rows of ``data``."""
        student = self.student
        return student.d_state > 0 and student.init == "fitted" and student.aligned is None

    @property
    def head_stages(self) -> tuple[StageConfig, ...]:
        """Stages that align heads with the teacher's own weights around them."""
        return tuple(stage for stage in self.stages if stage.is_alignment)

    @property
    def student_stages(self) -> tuple[Distill, ...]:
        """Stages that train the student as a whole, which differs from plan to plan."""
        return tuple(stage for stage in self.stages if isinstance(stage, Distill))

    def stage(self, name: str) -> StageConfig:
        """Return the stage of that name. Raises ValueError if there is none."""
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise ValueError(
            f"{self.name} has no stage {name!r}; name one of {', '.join(self.stage_names)}."
        )

    def with_stage(self, name: str, **options: Any) -> RunConfig:
        """Return the run with other options for the stage of that name: ``run.with_stage("align", steps=100)``."""
        changed = replace(self.stage(name), **options)
        return replace(
            self, stages=tuple(changed if stage.name == name else stage for stage in self.stages)
        )

    def data_of(self, stage: StageConfig) -> DataConfig:
        """Return the data that a stage reads."""
        data = stage.data or self.data
        return data if stage.seq_len is None else replace(data, seq_len=stage.seq_len)

    def teacher_of(self, stage: StageConfig) -> TeacherConfig:
        """Return the teacher that a stage learns from."""
        if isinstance(stage, Distill) and stage.teacher is not None:
            return replace(self.teacher, path=stage.teacher, revision=None)
        return self.teacher


def to_json(config: RunConfig) -> Record:
    """Convert a config to JSON values; paths become strings, and each stage names its class."""
    record = json.loads(json.dumps(dataclasses.asdict(config), default=str))
    record["stages"] = [stage.to_dict() for stage in config.stages]
    return record


def from_json(path: Path) -> RunConfig:
    """Read a run's config.json. Raises ValueError for any other file."""
    with refused(f"{path} is not a run's config", "name the directory of a run"):
        record = json.loads(path.read_text())
        if "teacher" not in record:  # the default would silently be the embedded one
            raise ValueError("it does not name a teacher")
        return from_record(record)


def from_record(record: Record) -> RunConfig:
    """Rebuild a run's config from the output of `to_json`."""
    config = _rebuilt(RunConfig, record)
    assert isinstance(config, RunConfig)
    return config


def _rebuilt(kind: Any, value: object) -> object:
    """Convert ``value``, read from JSON, to the type that its field is declared with."""
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _rebuilt_section(kind, value)
    # Entries of a tuple, or the type beside None of an optional field.
    inner = get_args(kind)
    if isinstance(value, dict):
        return _rebuilt(inner[0], value)
    if isinstance(value, list):
        if get_origin(kind) is tuple:
            return tuple(_rebuilt(inner[0], item) for item in value)
        # An optional tuple, of plain values.
        return tuple(value)
    if isinstance(value, str) and Path in (kind, *inner):
        return Path(value)
    return value


def _rebuilt_section(kind: type, value: object) -> object:
    """Make a dataclass from its fields; a stage names its class."""
    if not isinstance(value, dict):
        raise TypeError(f"{value!r} stands for a {kind.__name__}")
    entries = dict(value)
    if kind is StageConfig:
        kind = STAGE_KINDS[str(entries.pop("stage"))]
    hints = get_type_hints(kind)
    fields = {name: _rebuilt(hints[name], item) for name, item in entries.items()}
    return kind(**fields)
