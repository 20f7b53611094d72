"""bfloat16 copies of trained weights: the bits that autocast gives, in any number of micro-batches."""

from __future__ import annotations

from pathlib import Path

import pytest
from training import StoppingRows, metrics, small_config, small_models, small_rows

from hybrid_distill.train import loop
from hybrid_distill.train.parallel.strategy import Strategy
from hybrid_distill.train.stages import make_stage
from hybrid_distill.train.stop import Interrupted

COMMON = {
    "precision": "bf16",
    "steps": 4,
    "micro_batch_size": 2,
    "log_every": 1,
}
CASES = {
    "align": small_config("align", **COMMON),
    "align layer": small_config("align", target="layer", train="mixer", **COMMON),
    "distill": small_config("distill", **COMMON),
    "distill recomputed": small_config("distill", gradient_checkpointing=True, **COMMON),
    "long": small_config("long", **COMMON),
    "on_policy": small_config("on_policy", **COMMON),
    "one micro-batch": small_config("distill", **{**COMMON, "micro_batch_size": 8}),
}


def trained(
    name: str, out: Path, stop_at: int | None = None
) -> tuple[list[tuple[float, float]], str]:
    """Return losses and gradient norms of each step, and the hash of the weights."""
    stage = make_stage(CASES[name], *small_models(), vocab_size=99)
    rows = StoppingRows(small_rows(), stop_at)
    manifest = loop.train_stage(stage, rows, out, progress=False)
    curve = [(line["loss"], line["grad_norm"]) for line in metrics(out)]
    return curve, manifest.weights


@pytest.mark.parametrize("name", CASES)
def test_copies_train_the_bits_that_autocast_does(name: str, tmp_path: Path, monkeypatch) -> None:
    with_copies = trained(name, tmp_path / "copies")
    monkeypatch.setattr(Strategy, "may_copy", False)
    by_autocast = trained(name, tmp_path / "autocast")
    assert with_copies == by_autocast


def test_a_stopped_stage_resumes_to_the_same_bits(tmp_path: Path) -> None:
    """Checkpoints hold the float32 weights alone: the copies follow from them."""
    whole = trained("distill", tmp_path / "whole")
    stopped = tmp_path / "stopped"
    with pytest.raises(Interrupted):
        trained("distill", stopped, stop_at=1)
    assert trained("distill", stopped) == whole
