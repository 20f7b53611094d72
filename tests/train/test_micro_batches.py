"""However a step's rows are cut and spread, every loss of every stage trains the same update.

Everything runs in float64: rounding is then 1e-16 of a gradient, and 1e-6 tells it from another
denominator. In float32 AdamW, which divides a gradient by its own size, would make an update of
rounding. This file is also the program that each of two processes runs:
``test_micro_batches.py OUT``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

if __name__ == "__main__":
    # A launched process does not have pytest's path.
    ROOT = Path(__file__).parents[2]
    sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "tests")]

from training import WrappedRows, metrics, small_models, small_rows

from hybrid_distill.data.caching import top_k_of
from hybrid_distill.distributed import connect, disconnect
from hybrid_distill.train import loop
from hybrid_distill.train.config import (
    Align,
    AlignMatrix,
    Distill,
    DistillOnPolicy,
    StageConfig,
)
from hybrid_distill.train.optimizer import trainable
from hybrid_distill.train.parallel.strategy import Strategy
from hybrid_distill.train.stages import make_stage

ON_DISK = Path("logits")
COMMON: dict[str, Any] = {
    "steps": 3,
    "batch_size": 8,
    "micro_batch_size": 8,
    "learning_rate": 3e-3,
    "warmup": 0.0,
    "clip": 1e3,
    "log_every": 1,
}
HARD: dict[str, Any] = {**COMMON, "hard_weight": 0.3}
CASES: dict[str, StageConfig] = {
    "align all nmse recomputed": Align(
        loss="nmse", train="mixer", gradient_checkpointing=True, **COMMON
    ),
    "matrix": AlignMatrix(**COMMON),
    "distill soft": Distill(**COMMON),
    "distill recomputed": Distill(gradient_checkpointing=True, **HARD),
    "top k fused": Distill(teacher_logits=ON_DISK, **HARD),
    "top k plain": Distill(teacher_logits=ON_DISK, fused=False, **HARD),
    "long": Distill(name="long", segment_len=6, **HARD),
    "on_policy": DistillOnPolicy(prompt_tokens=8, new_tokens=6, **COMMON),
    "all on_policy": DistillOnPolicy(prompt_tokens=8, new_tokens=6, share=1.0, **COMMON),
}
for target in ("mixer", "layer", "head"):
    for loss in ("l2", "nmse"):
        CASES[f"align {target} {loss}"] = Align(target=target, loss=loss, **COMMON)
for kind in ("forward_kl", "reverse_kl", "jsd"):
    for name, fused in (("fused", True), ("plain", False)):
        CASES[f"distill {kind} {name}"] = Distill(kind=kind, fused=fused, temperature=2.0, **HARD)


class UnevenRows(WrappedRows):
    """Rows with documents and masks of every length.

    Two have no token in the loss, one has a token and no label.
    """

    def __init__(self, teacher: nn.Module | None = None) -> None:
        super().__init__(small_rows())
        self.teacher = teacher

    def batch(self, step: int, batch_size: int, rank: int = 0, world: int = 1) -> Any:
        batch: Any = self.rows.batch(step, batch_size)
        mask_BL = batch["mask"]
        generator = torch.Generator().manual_seed(step)
        share_B1 = torch.rand(batch_size, 1, generator=generator)
        mask_BL &= torch.rand(mask_BL.shape, generator=generator) < share_B1
        place_L = torch.arange(16)
        mask_BL[2:4] = False
        # The last token of a row has no label: nothing is known to follow it.
        mask_BL[5] = place_L == 15
        mask_BL[6] = place_L < 12
        if self.teacher is not None:
            top: Any = top_k_of(self.teacher, batch, 8, vocab_size=99)  # type: ignore[arg-type]
            batch["teacher_ids_BLK"] = top.ids_BLK
            batch["teacher_log_probs_BLK"] = top.log_probs_BLK
        n_rows = batch_size // world
        own = slice(rank * n_rows, (rank + 1) * n_rows)
        return {name: tensor[own] for name, tensor in batch.items()}


def train(name: str, micro_batch_size: int, out: Path) -> dict[str, Tensor]:
    """Train three steps.

    Return the first one's gradient, how far the weights came, and what was logged.
    """
    config = replace(CASES[name], micro_batch_size=micro_batch_size)
    student, teacher = small_models()
    # Rows end early, alone and together.
    student.generation_config.eos_token_id = list(range(2, 30))
    if name == "matrix":
        teacher.set_attn_implementation("eager")
    stage = make_stage(config, student.double(), teacher.double(), vocab_size=99)
    # Once more: making a stage makes what it trains float32.
    stage.student.double()
    before = {key: parameter.detach().clone() for key, parameter in trainable(stage).items()}
    reads_logits = name.startswith("top k")
    rows: Any = UnevenRows(teacher if reads_logits else None)

    with pytest.MonkeyPatch.context() as patch:
        findings = recording_first_gradient(patch)
        loop.train_stage(stage, rows, out, progress=False)

    for key, parameter in trainable(stage).items():
        update = parameter - before[key]
        findings[f"update of {key}"] = update.detach()
    lines = metrics(out)
    for key in ("loss", "grad_norm", "tokens"):
        logged = [float(line[key]) for line in lines]
        findings[key] = torch.tensor(logged)
    for layer, value in lines[0]["per_layer"].items():
        findings[f"logged {layer}"] = torch.tensor(value)
    return findings


def recording_first_gradient(patch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """Return a dictionary that gets the gradients of the first step, before they are clipped."""
    gradients: dict[str, Tensor] = {}
    clip = Strategy.clip_gradients

    def record_and_clip(strategy: Strategy, max_norm: float) -> Tensor:
        if not gradients:
            for key, parameter in trainable(strategy.stage).items():
                gradients[f"gradient of {key}"] = parameter.grad.clone()  # type: ignore[union-attr]
        return clip(strategy, max_norm)

    patch.setattr(Strategy, "clip_gradients", record_and_clip)
    return gradients


def assert_same(findings: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compare every tensor to 1e-6 of its largest entry."""
    assert findings.keys() == expected.keys()
    for name, tensor in findings.items():
        scale = expected[name].abs().max()
        error = (tensor - expected[name]).abs().max()
        assert error <= 1e-6 * scale, f"{name}: {error / scale:.1e}"


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Callable[[str], dict[str, Tensor]]:
    """`train` of a case on one process without a cut, once."""
    return cache(lambda name: train(name, 8, tmp_path_factory.mktemp("whole")))


@pytest.mark.parametrize("name", CASES)
def test_a_step_is_the_same_in_micro_batches_of_one_row(name, whole, tmp_path):
    expected = whole(name)
    for key, tensor in expected.items():
        if key.startswith("update"):
            assert tensor.any(), f"{key} is zero, and any step would be the same"

    row_by_row = train(name, 1, tmp_path)

    assert_same(row_by_row, expected)


@pytest.mark.launched
def test_a_step_is_the_same_on_two_processes_in_micro_batches_of_two_rows(whole, tmp_path):
    from processes import start_two

    ended = start_two(Path(__file__), tmp_path, timeout=240.0)

    assert [process.status for process in ended] == [0, 0], ended
    for name in CASES:
        for rank in range(2):
            findings = torch.load(tmp_path / f"{name}-{rank}.pt")
            assert_same(findings, whole(name))


def main() -> None:
    """Train every case in micro-batches of two rows as one of two processes."""
    torch.set_num_threads(1)
    out = Path(sys.argv[1])
    rank = connect().process_index
    for name in CASES:
        findings = train(name, 2, out / name)
        torch.save(findings, out / f"{name}-{rank}.pt")
    disconnect()


if __name__ == "__main__":
    main()
