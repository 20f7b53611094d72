"""Serving: what is refused, what the server is given; and the benchmarks of generation at their smallest."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel
from transformers.cli import transformers as transformers_cli

from hybrid_distill.cli.app import main
from hybrid_distill.export.falcon_h1 import container
from hybrid_distill.lab.serve import PACKAGES
from hybrid_distill.model import HybridForCausalLM
from hybrid_distill.plan import HeadPlan
from hybrid_distill.student.build import build_student

ROOT = Path(__file__).parents[2]
# Parameters of a layer in vLLM 0.33's Falcon-H1, listed from the class itself, and what fills them.
VLLM_LAYER = {
    "input_layernorm.weight": ("input_layernorm.weight",),
    "pre_ff_layernorm.weight": ("pre_ff_layernorm.weight",),
    "self_attn.qkv_proj.weight": tuple(f"self_attn.{part}_proj.weight" for part in "qkv"),
    "self_attn.o_proj.weight": ("self_attn.o_proj.weight",),
    "feed_forward.gate_up_proj.weight": ("feed_forward.gate_proj.weight", "feed_forward.up_proj.weight"),
    "feed_forward.down_proj.weight": ("feed_forward.down_proj.weight",),
    "mamba.mamba.A": ("mamba.A_log",),
    **{
        f"mamba.mamba.{name}": (f"mamba.{name}",)
        for name in ("D", "dt_bias", "conv1d.weight", "conv1d.bias", "in_proj.weight", "in_proj.bias",
                     "out_proj.weight", "out_proj.bias")
    },
}  # fmt: skip
VLLM_READS = (
    "attention_in_multiplier", "attention_out_multiplier", "embedding_multiplier", "head_dim", "hidden_act",
    "hidden_size", "intermediate_size", "key_multiplier", "lm_head_multiplier", "mamba_conv_bias", "mamba_d_conv",
    "mamba_d_head", "mamba_d_ssm", "mamba_d_state", "mamba_expand", "mamba_n_groups", "mamba_n_heads",
    "mamba_proj_bias", "mamba_rms_norm", "max_position_embeddings", "mlp_multipliers", "num_attention_heads",
    "num_hidden_layers", "num_key_value_heads", "rms_norm_eps", "rope_parameters", "ssm_in_multiplier",
    "ssm_multipliers", "ssm_out_multiplier", "tie_word_embeddings", "vocab_size",
)  # fmt: skip


@pytest.fixture
def benchmark(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A script of benchmarks/ as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module(request.param)


def installed(monkeypatch: pytest.MonkeyPatch, **packages: bool | None) -> None:
    """Let `find_spec` answer these values: None for an absent package."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *of: packages[name] if name in packages else find_spec(name, *of)
    )


def refusal(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as exit_info:
        main(argv)
    assert exit_info.value.code == 2
    return capsys.readouterr().err


def test_what_cannot_be_served_is_refused_in_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    family_model: Callable[..., PreTrainedModel],
) -> None:
    assert "nowhere holds no config.json, so it is not an export; pass" in refusal(["serve", "nowhere"], capsys)
    teacher = family_model("llama")
    teacher.save_pretrained(tmp_path)
    assert "holds a model of type 'llama', so it is not an export; pass" in refusal(["serve", str(tmp_path)], capsys)
    build_student(teacher, HeadPlan.none(teacher), d_state=4)[0].save_pretrained(tmp_path)
    installed(monkeypatch, **{**dict.fromkeys(PACKAGES, True), "fastapi": None})
    assert "serving needs fastapi: pip install 'transformers[serving]'" in refusal(["serve", str(tmp_path)], capsys)


def test_the_server_gets_the_folder_the_flags_and_the_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family_model: Callable[..., PreTrainedModel]
) -> None:
    """It looks the class up by the name in config.json, which transformers itself does not have."""
    teacher = family_model("llama")
    build_student(teacher, HeadPlan.none(teacher), d_state=4)[0].save_pretrained(tmp_path)
    installed(monkeypatch, **dict.fromkeys(PACKAGES, True))
    monkeypatch.setattr(transformers, "HybridForCausalLM", None, raising=False)  # taken back after the test
    given: list[Any] = []
    monkeypatch.setattr(transformers_cli, "app", given.append)
    main(["serve", str(tmp_path), "--port", "8123"])
    assert given == [["serve", str(tmp_path), "--port", "8123"]]
    assert vars(transformers)["HybridForCausalLM"] is HybridForCausalLM


def test_a_container_holds_what_vllm_reads(family_model: Callable[..., PreTrainedModel]) -> None:
    teacher = family_model("llama")
    student, _ = build_student(teacher, HeadPlan.from_pairs(teacher, [(0, 1), (2, 3)]), d_state=4, recurrence="mamba2")
    written = container(student)
    layer = "model.layers.1."
    names = {name.removeprefix(layer) for name in written.state if name.startswith(layer)}
    assert names == {name for sources in VLLM_LAYER.values() for name in sources}
    config = transformers.FalconH1Config(**written.config)
    assert [field for field in VLLM_READS if not hasattr(config, field)] == []
    multipliers = [getattr(config, field) for field in VLLM_READS if "multiplier" in field]
    assert all(value == 1 or set(value) == {1} for value in multipliers)


@pytest.mark.parametrize("benchmark", ["generate"], indirect=True)
def test_the_benchmark_of_generation_counts_the_bytes_that_are_held(benchmark: Any) -> None:
    """It fails by itself where `cache_bytes` differs from the tensors."""
    torch.manual_seed(0)
    found = benchmark.decoding(benchmark.TINY)
    short, long = (found[str(context)] for context in benchmark.TINY.contexts)
    assert long["none"]["cache_bytes"] == short["none"]["cache_bytes"]
    assert long["teacher"]["cache_bytes"]["kv"] == 4 * short["teacher"]["cache_bytes"]["kv"]
    assert long["all"]["cache_bytes"] == long["teacher"]["cache_bytes"]
    assert 0 < long["few"]["ms_of_recurrent_heads"] < long["few"]["ms_per_token"]
    teacher = benchmark.contestants(benchmark.TINY)[0]
    benchmark.read(teacher, 5)
    teacher.cache.layers[0].keys = teacher.cache.layers[0].keys[..., :4, :].clone()
    with pytest.raises(RuntimeError, match="bytes are held after"):
        benchmark.held_bytes(teacher, benchmark.TINY.d_state)
