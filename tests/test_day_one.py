"""docs/training.md, day one on GPUs: its figures agree, and its commands are accepted."""

import re
import shlex
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from hybrid_distill.assets import tiny_teacher_path
from hybrid_distill.cli import main
from hybrid_distill.cli.prepare_data import command as prepare_data
from hybrid_distill.cli.recipes import load_recipe
from hybrid_distill.flags import flags_of
from hybrid_distill.plan import HeadPlan
from hybrid_distill.recipe import config_of
from hybrid_distill.student.build import empty_student
from hybrid_distill.train.meter import PEAK_FLOPS, flops_per_token

ROOT = Path(__file__).parents[1]
DAY = (ROOT / "docs/training.md").read_text().partition("## Day one")[2].partition("\n## ")[0]
CONTAINER = ("--gpus all", "--ipc=host", "--ulimit memlock=-1", "--ulimit stack=67108864")
N_GPUS = 8

LLAMA = LlamaConfig(
    vocab_size=128_256,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=64,
    max_position_embeddings=131_072,
    tie_word_embeddings=True,
    architectures=["LlamaForCausalLM"],
)


def test_the_table_follows_from_its_milliseconds() -> None:
    config = config_of(load_recipe(Path("llama_1b")))
    with torch.device("meta"):
        teacher = AutoModelForCausalLM.from_config(LLAMA)
    plan = HeadPlan.random(teacher, config.plan.k, 0)
    student = empty_student(teacher, plan, **config.student.head_options)
    rows = re.findall(r"^\| (align|distill) \| (.*) \|$", DAY, re.MULTILINE)
    assert [name for name, _ in rows] == ["align", "distill"]
    for name, row in rows:
        micro_batch, ms, step, speed, mfu, hours = row.split(" | ")
        stage = config.stage(name)
        assert micro_batch == f"{stage.micro_batch_size} x {config.data.seq_len:,}"

        n_micro_batches = stage.batch_size // (N_GPUS * stage.micro_batch_size)
        seconds = n_micro_batches * float(ms) / 1000
        assert step == f"{seconds:.2f} s"

        step_tokens = stage.batch_size * config.data.seq_len
        tokens_per_s = step_tokens / seconds
        assert f"{step_tokens:,}" in DAY
        assert float(speed.replace(",", "")) == pytest.approx(tokens_per_s, rel=5e-3)

        flops = flops_per_token(student, (teacher,), teacher_forced=name == "align")
        share = tokens_per_s / N_GPUS * flops / PEAK_FLOPS["H100"]
        assert mfu == f"{100 * share:.0f} %"

        expected_hours = stage.steps * seconds / 3600
        assert float(hours.removesuffix(" h")) == pytest.approx(expected_hours, abs=0.05)


def test_memory_is_what_a_dry_run_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    teacher = tmp_path / "llama"
    LLAMA.save_pretrained(teacher)
    AutoTokenizer.from_pretrained(tiny_teacher_path()).save_pretrained(teacher)
    (teacher / "model.safetensors").touch()  # a dry run reads no weights
    words = ["run", "llama_1b", "--teacher", str(teacher), "--out", str(tmp_path / "run")]
    words += ["--data.sources", "tiny", "--data.weights", "1", "--plan.selection", "random"]

    main([*words, "--dry-run"])

    printed = capsys.readouterr().out
    line = r"^ *total (with gradient checkpointing)? *([\d. ]+)$"
    totals = re.findall(line, printed, re.MULTILINE)
    gigabytes = [[round(float(gb)) for gb in row.split()] for _, row in totals]
    align, _, distill, with_checkpointing = gigabytes[:4]
    # Columns: DDP, FSDP2, ZeRO-2.
    for row, column in (
        (align, 0),
        (distill, 0),
        (with_checkpointing, 0),
        (with_checkpointing, 2),
    ):
        assert f"{row[column]} GB" in DAY


def test_tokens_hours_and_gigabytes() -> None:
    config = config_of(load_recipe(Path("llama_1b")))
    n_tokens = config.data.hub_tokens * len(config.data.sources)
    (millions,) = re.findall(r"([\d.]+) million tokens a second of one core", DAY)
    seconds = n_tokens / (float(millions) * 1e6)
    assert n_tokens >= 20e9
    for figure in (
        f"{n_tokens // 10**9} billion tokens",
        f"{seconds / 3600:.0f} core-hours",
        f"{4 * n_tokens / 1e9:.0f} GB",
        f"{round(seconds / 16 / 60, -1):.0f} minutes",
    ):
        assert figure in DAY


def test_documented_commands_have_flags_that_exist() -> None:
    lines = DAY.replace("\\\n", " ")
    commands = re.findall(r"^ *hybrid-distill prepare-data (.*)$", lines, re.MULTILINE)
    sources = config_of(load_recipe(Path("llama_1b"))).data.sources
    assert len(commands) == len(sources) == 2
    for command, source in zip(commands, sources):
        flags_of(prepare_data).parse_args(shlex.split(command))
        assert source in command


@pytest.mark.parametrize("page", ["docs/training.md", "launch/README.md", "Dockerfile"])
def test_a_container_gets_what_training_needs(page: str) -> None:
    text = (ROOT / page).read_text()
    assert all(flag in text for flag in CONTAINER)
    assert "580" in text


def test_one_cuda_everywhere() -> None:
    """The pinned torch is the one that the pages describe."""
    pinned = re.findall(r"torch==([\d.]+)", (ROOT / "Dockerfile").read_text())
    assert len(set(pinned)) == 1
    assert f"`torch=={pinned[0]}`" in DAY
    assert f"TORCH ?= torch=={pinned[0]}" in (ROOT / "Makefile").read_text()
