"""The memory plan against measured memory on a CPU, against arithmetic, and what a dry run makes of it.

benchmarks/memory_plan.py measures; here its smallest shapes run.
"""

import importlib
import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import has_facts, naming
from test_cli import RECIPES
from training import QUICK, copy_tiny_tokenizer, small_run
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from hybrid_distill.cli.app import main
from hybrid_distill.cli.dry_run import describe
from hybrid_distill.cli.launch_plan import COMMUNICATION, LAUNCH, plan_stage
from hybrid_distill.config import PlanConfig
from hybrid_distill.data import DataConfig
from hybrid_distill.lab.memory.activations import KERNEL_CHUNK
from hybrid_distill.lab.memory.plan import (
    STRATEGIES,
    MemoryPlan,
    memory_plan,
)
from hybrid_distill.lab.memory.shape import StageShape
from hybrid_distill.lab.memory.timing import training_time
from hybrid_distill.plan import HeadPlan
from hybrid_distill.student.build import build_student, empty_student
from hybrid_distill.teacher import load_config
from hybrid_distill.train.config import (
    Align,
    AlignMatrix,
    Distill,
    DistillOnPolicy,
    StageConfig,
    TeacherConfig,
)
from hybrid_distill.train.on_policy import OnPolicy
from hybrid_distill.train.stages import make_stage

ROOT = Path(__file__).parents[2]


# A benchmark is a program, not a module of a package.
sys.path.append(str(ROOT / "benchmarks"))
benchmark: Any = importlib.import_module("memory_plan")
sys.path.pop()
benchmark.SHAPES["small"] = {
    "vocab_size": 600,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
ALIGN = Align()
DISTILL = Distill()
MATRIX = AlignMatrix()


def small_case(
    config: StageConfig, dtype: torch.dtype = torch.float32, kept: int = 3, **fields: Any
) -> Any:
    return benchmark.Case(
        "small",
        config,
        dtype,
        kept=kept,
        d_state=8,
        rows=2,
        length=128,
        **fields,
    )


def dtype_of(precision: str) -> torch.dtype:
    return torch.bfloat16 if precision == "bf16" else torch.float32


BF16 = {"precision": "bf16"}
AGAIN = {"gradient_checkpointing": True}
HALF = [replace(ALIGN, **BF16), replace(DISTILL, **BF16)]
"""Stages whose teacher is in bfloat16 too."""


CONFIGS = [
    ALIGN,
    *HALF,
    replace(ALIGN, **AGAIN),
    replace(ALIGN, target="layer"),
    replace(ALIGN, train="mixer"),
    DISTILL,
    replace(DISTILL, **AGAIN),
    replace(DISTILL, train="ssm", **BF16),
    replace(DISTILL, train="mixer", **BF16, **AGAIN),
    replace(DISTILL, kind="jsd", fused=False),
    Distill(name="long", segment_len=32),
    Distill(name="long", segment_len=32, train="ssm", **BF16),
    MATRIX,
    replace(MATRIX, **AGAIN),
]


@pytest.mark.parametrize(
    ("config", "recurrence"),
    [
        *((config, "discrete") for config in CONFIGS),
        *((config, "gdn") for config in (ALIGN, HALF[1], MATRIX)),
    ],
    ids=str,
)
def test_the_plan_says_what_a_step_takes(config: StageConfig, recurrence: str) -> None:
    """Every part that is 2 % of the peak or more within 15 %, parameters and optimizer to the byte."""
    dtype = torch.bfloat16 if config in HALF else torch.float32
    kept = 0 if config.name == "matrix" else 3
    case = small_case(config, dtype, kept, recurrence=recurrence)

    record = benchmark.one_process(case, "cpu")

    assert not record["misses"], benchmark.show(record)
    parts = record["parts"]
    for name in ("trained", "frozen", "gradients", "teacher"):
        assert parts[name]["predicted"] == parts[name]["measured"], name
    optimizer = parts["optimizer"]
    assert optimizer["predicted"] == pytest.approx(optimizer["measured"], rel=0.01)


@pytest.mark.parametrize(
    ("config", "d_state"),
    [
        (ALIGN, 8),
        (replace(ALIGN, train="mixer"), 8),
        (HALF[0], 8),
        (HALF[1], 8),
        (HALF[1], 0),
        (DISTILL, 8),
        (DISTILL, 0),
    ],
    ids=str,
)
def test_windows_beside_states_and_alone(config: StageConfig, d_state: int) -> None:
    case = small_case(config, dtype_of(config.precision), window=20)
    case = case._replace(d_state=d_state)
    record = benchmark.one_process(case, "cpu")
    assert not record["misses"], benchmark.show(record)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kept", [0, 3])
def test_windows_of_several_blocks_alone(precision: str, kept: int) -> None:
    """With kept heads, windowed heads read KV heads unevenly, each with keys of its own."""
    config = replace(ALIGN, train="mixer", precision=precision)
    case = small_case(config, dtype_of(precision), kept, window=44)
    case = case._replace(d_state=0, rows=1, length=300)

    record = benchmark.one_process(case, "cpu")

    part = record["parts"]["activations and bf16 copies"]
    assert part["predicted"] == pytest.approx(part["measured"], rel=0.05)


# No gate, more norms, wider heads.
@pytest.mark.parametrize("family", ["gpt_neox", "olmo3", "qwen3"])
def test_other_families(family: str, family_model: Callable[..., PreTrainedModel]) -> None:
    n_kept = 4
    d_state = 8
    teacher = family_model(family, num_hidden_layers=2)
    plan = HeadPlan.random(teacher.config, n_kept, seed=1)
    student, _ = build_student(teacher, plan, d_state=d_state, init="random")
    stage = make_stage(DISTILL, student, teacher).train()
    batch = benchmark.make_batch(small_case(DISTILL), teacher.config.vocab_size, "cpu")

    measured = benchmark.measure(stage, batch, "cpu")

    without_weights = meta_models(teacher.config, torch.float32, n_kept, d_state)
    predicted = memory_plan(
        StageShape(DISTILL, *without_weights),
        world=1,
        micro_batch=2,
        seq_len=128,
        strategy="ddp",
        device="cpu",
    )
    parts = benchmark.compare(measured, benchmark.predicted(predicted))
    assert not benchmark.misses(parts), parts


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.skipif(os.environ["TRITON_INTERPRET"] != "1", reason="kernels run on a GPU")
def test_with_the_kernels_less_is_kept_and_the_plan_knows(precision: str) -> None:
    pytest.importorskip("triton")
    config = replace(ALIGN, precision=precision)
    case = small_case(config, dtype_of(precision))._replace(rows=1, length=64)
    stage = benchmark.make_real_stage(case, "cpu")
    stage.student.set_ssm_implementation("triton")
    batch = benchmark.make_batch(case, 600, "cpu")

    saved = benchmark.saved_tensors(stage, batch)

    kernels = benchmark.predict(case, "cuda")["activations"]
    plain = benchmark.predict(case, "cpu")["activations"]
    assert kernels == pytest.approx(saved, rel=0.15)
    assert kernels < 0.7 * plain


def test_the_kernels_store_states_after_as_many_tokens_as_the_plan_says() -> None:
    pytest.importorskip("triton")
    from hybrid_kernels.ssd_tiles import LARGEST_FP32_BLOCK, tile_for

    for dtype, size in ((torch.bfloat16, 64), (torch.float32, LARGEST_FP32_BLOCK)):
        assert tile_for(90, dtype, size, size).chunk == KERNEL_CHUNK[dtype.itemsize]


@pytest.mark.launched
def test_two_processes_take_what_the_plan_divides() -> None:
    pytest.importorskip("deepspeed")
    record = benchmark.two_processes("zero2")
    assert not record["misses"], benchmark.show(record)


# Shapes of real models, without weights.

LLAMA_1B = LlamaConfig(**benchmark.SHAPES["llama-3.2-1b"])


def meta_models(
    config: Any, dtype: torch.dtype, kept: int = 20, d_state: int = 64
) -> tuple[Any, PreTrainedModel]:
    """Student and teacher without values."""
    with torch.device("meta"):
        teacher = AutoModelForCausalLM.from_config(config, dtype=dtype)
    plan = HeadPlan.random(config, kept, seed=0)
    student = empty_student(teacher, plan, d_state=d_state, conv_width=4)
    return student, teacher


def big_shape(config: LlamaConfig, stage: StageConfig) -> StageShape:
    student, teacher = meta_models(config, torch.bfloat16)
    shape = StageShape(stage, student, teacher)
    for model in (student, teacher):
        assert all(parameter.is_meta for parameter in model.parameters())
    return shape


def big_plan(shape: StageShape, strategy: str = "ddp", **changes: Any) -> MemoryPlan:
    options = {"world": 8, "micro_batch": 4, "seq_len": 2048, **changes}
    return memory_plan(shape, strategy=strategy, **options)


DISTILL_1B = big_shape(LLAMA_1B, replace(DISTILL, precision="bf16"))


def test_what_is_always_there_is_arithmetic() -> None:
    parameters_of_llama_1b = 1_235_814_400
    assert DISTILL_1B.weights.teacher_bytes == 2 * parameters_of_llama_1b, "in bf16"

    plans = {strategy: big_plan(DISTILL_1B, strategy) for strategy in STRATEGIES}

    held: dict[str, tuple[int, int, int]] = {}
    for name, plan in plans.items():
        held[name] = (plan["trained parameters"], plan["gradients"], plan["optimizer"])
    # A parameter, its gradient and the optimizer take 4, 4 and 8 bytes, an eighth where processes
    # share. DeepSpeed's optimizer works on a copy of its share of the parameters.
    n = DISTILL_1B.weights.trained
    assert held == {
        "ddp": (4 * n, 4 * n, 8 * n),
        "zero1": (4 * n + n // 2, 4 * n, n),
        "zero2": (4 * n + n // 2, n // 2, n),
        "zero3": (n, n // 2, n),
        "fsdp2": (n // 2, n // 2, n),
    }
    teachers = {plan["teacher"] for plan in plans.values()}
    assert len(teachers) == 1, "every process has a whole teacher"


def test_a_sharded_teacher_is_a_share_of_its_layers_and_whole_embeddings() -> None:
    whole = big_plan(DISTILL_1B, teacher_sharding="replicated")["teacher"]
    sharded = big_plan(DISTILL_1B, teacher_sharding="sharded")["teacher"]
    layer = 2 * 60_821_504
    # And the last norm.
    embedding = 2 * (128_256 * 2048 + 2048)
    assert whole == 16 * layer + embedding
    # The layer at work is gathered, and the next one already.
    assert sharded == 16 * layer // 8 + embedding + 2 * layer


def test_timing_lets_transformers_choose_the_attention_and_students_write(
    tmp_path: Path, family_model: Callable[..., PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher = family_model("gemma2", num_hidden_layers=1)
    teacher.save_pretrained(tmp_path)
    write = OnPolicy.generate_text
    n_written = 0

    def count_and_write(*args: Any) -> Any:
        nonlocal n_written
        n_written += 1
        return write(*args)

    monkeypatch.setattr(OnPolicy, "generate_text", count_and_write)
    stages = (Align(**QUICK), DistillOnPolicy(**QUICK))
    run = small_run(gpus=1, teacher=TeacherConfig(str(tmp_path)), stages=stages)
    plan = HeadPlan.random(teacher, 3, seed=0)

    report = training_time(run, plan, teacher.num_parameters())

    timed_stages = re.findall(r"\n  (\w+): [\d,]+ steps of ", report)
    assert timed_stages == ["align", "on_policy"]
    assert n_written > 0


@pytest.fixture(autouse=True)
def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dry runs that do not train for a second, as tests/cli has them do."""
    monkeypatch.setattr("hybrid_distill.cli.dry_run.training_time", lambda *of: "")


def test_a_dry_run_shows_every_strategy_and_what_to_launch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = str(RECIPES / "hybrid_tiny.py")

    main(["run", recipe, "--dry-run", "--out", str(tmp_path / "run"), "--gpus", "8"])

    printed = capsys.readouterr().out
    parts = ("activations", "total with gradient checkpointing", "loss chunk")
    for words in (*STRATEGIES, *parts, COMMUNICATION):
        assert words in printed
    launch = "--config_file launch/ddp.yaml --num_processes 8"
    assert f"{launch} -m hybrid_distill run {recipe}" in printed


def test_zero_is_not_offered_to_a_stage_that_skips_steps() -> None:
    """DeepSpeed refuses such a stage."""
    skipping = small_run(gpus=2).with_stage("distill", on_divergence="skip")
    plan = HeadPlan.spread(load_config("tiny"), 3)
    strategies = {}
    for stage in skipping.stages:
        planned = plan_stage(skipping, stage, plan)
        assert list(planned.as_configured) == list(planned.with_checkpointing_toggled)
        strategies[stage.name] = tuple(planned.as_configured)
    assert strategies == {"align": STRATEGIES, "distill": ("ddp", "fsdp2")}


def test_a_dry_run_for_one_gpu() -> None:
    for launch in LAUNCH.values():
        assert (ROOT / launch.split()[0]).is_file(), "files for several are there"
    printed = describe(replace(small_run(), gpus=1), "small.py --seed 1")
    assert "zero2" not in printed
    assert COMMUNICATION not in printed
    assert "hybrid-distill run small.py --seed 1\n" in printed


def test_a_dry_run_for_gpus_that_are_too_small_says_what_helps() -> None:
    report = describe(replace(small_run(), gpus=2, gpu_memory=0.0001))
    assert "hybrid_distill run" not in report
    assert has_facts(report, "0 MB", "--gpus", "--gpu-memory")

    run = replace(small_run(), gpus=1, stages=(Distill(**QUICK),))
    totals = re.findall(r"total.*?(\d+)\.\d\d", describe(run))
    plain, recomputed = map(int, totals)
    assert recomputed < plain

    # A tenth of the memory is left alone.
    between = (plain + recomputed) / 2 / 0.9
    report = describe(replace(run, gpu_memory=between / 1e3))
    assert "hybrid-distill run RECIPE.py --distill.gradient-checkpointing\n" in report


def test_a_dry_run_says_which_stage_cannot_run() -> None:
    stages = (AlignMatrix(**QUICK), Align(**QUICK))
    run = small_run(gpus=1, stages=stages, plan=PlanConfig("none", k=0))
    with pytest.raises(
        ValueError, match=naming("matrix", "'sdpa'", "--teacher.attn-implementation eager")
    ):
        describe(run)
    with pytest.raises(ValueError, match=naming("distill", 2, 3)):
        describe(replace(small_run(), gpus=3))


def test_a_dry_run_shows_stages_with_their_own_length_and_teacher(tmp_path: Path) -> None:
    wide = LlamaConfig(vocab_size=1900, hidden_size=512, intermediate_size=700, num_hidden_layers=4)
    model = AutoModelForCausalLM.from_config(wide)
    model.save_pretrained(tmp_path / "wide")
    copy_tiny_tokenizer(tmp_path / "wide")
    long = Distill(
        name="long",
        steps=3,
        batch_size=2,
        micro_batch_size=1,
        seq_len=512,
        segment_len=128,
    )
    post = Distill(
        name="post",
        steps=5,
        batch_size=2,
        data=DataConfig(seq_len=192),
        teacher=str(tmp_path / "wide"),
    )
    run = replace(small_run(), gpus=1, stages=(Distill(**QUICK), long, post))

    report = describe(run)

    expected = {
        "distill": ("2 x 64",),
        "long": ("1 x 512", "fp32", 128, "3 steps", "3,072"),
        "post": ("2 x 192", "fp32", "5 steps", "1,920"),
    }
    for name, facts in expected.items():
        (heading,) = re.findall(rf"^  {name}: .*$", report, re.MULTILINE)
        assert has_facts(heading, *facts)

    megabytes = re.findall(r"  teacher +([\d.]+)", report)
    of_distill, of_long, of_post = map(float, megabytes)
    assert of_distill == of_long
    in_float32 = 4 * model.num_parameters() / 1e6
    assert of_post == pytest.approx(in_float32, rel=0.01)

    with pytest.raises(ValueError, match=naming(tmp_path / "gone")):
        describe(run.with_stage("post", teacher=str(tmp_path / "gone")))
