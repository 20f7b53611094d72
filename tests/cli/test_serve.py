"""Serving: what is refused, what the server is given; and the benchmarks of generation at their smallest."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel
from transformers.cli import transformers as transformers_cli

from hybrid_distill.cli.app import main
from hybrid_distill.cli.serve import PACKAGES
from hybrid_distill.model import HybridForCausalLM
from hybrid_distill.plan import HeadPlan
from hybrid_distill.student.build import build_student

ROOT = Path(__file__).parents[2]


def installed(monkeypatch: pytest.MonkeyPatch, **packages: bool | None) -> None:
    """Let `find_spec` answer these values: None for an absent package."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *of: packages[name] if name in packages else find_spec(name, *of)
    )


def test_what_cannot_be_served_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, family_model: Any
) -> None:
    def refusal() -> str:
        with pytest.raises(SystemExit, match="2"):
            main(["serve", str(tmp_path)])
        return capsys.readouterr().err

    teacher = family_model("llama")
    teacher.save_pretrained(tmp_path)
    assert "holds a model of type 'llama', so it is not an export; pass" in refusal()
    build_student(teacher, HeadPlan.none(teacher), d_state=4)[0].save_pretrained(tmp_path)
    installed(monkeypatch, **{**dict.fromkeys(PACKAGES, True), "fastapi": None})
    assert "serving needs fastapi: pip install 'transformers[serving]'" in refusal()


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


def test_the_benchmark_of_generation_counts_the_bytes_that_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails by itself where `cache_bytes` differs from the tensors."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    benchmark: Any = importlib.import_module("generate")
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
