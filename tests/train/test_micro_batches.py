"""However a step's rows are cut and spread, every loss of every stage trains the same update.

Everything runs in float64: rounding is then 1e-16 of a gradient, and 1e-6 tells it from another denominator. In float32
AdamW, which divides a gradient by its own size, would make an update of rounding. This file is also a program:
``accelerate launch tests/train/test_micro_batches.py OUT``.
"""

from __future__ import annotations

import json
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
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

from training import WrappedRows, small_models, small_rows

from hybrid_distill.data.caching import top_k_of
from hybrid_distill.distributed import connect
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
    "steps": 3, "batch_size": 8, "micro_batch_size": 8, "learning_rate": 3e-3, "warmup": 0.0, "clip": 1e3,
    "log_every": 1,
}  # fmt: skip
CASES: dict[str, StageConfig] = {
    **{
        f"align {target} {loss}": Align(target=target, loss=loss, **COMMON)
        for target in ("mixer", "layer", "head")
        for loss in ("l2", "nmse")
    },
    "align all nmse recomputed": Align(loss="nmse", train="mixer", gradient_checkpointing=True, **COMMON),
    "matrix": AlignMatrix(**COMMON),
    **{
        f"distill {kind} {'fused' if fused else 'plain'}": Distill(
            kind=kind, fused=fused, hard_weight=0.3, temperature=2.0, **COMMON
        )
        for kind in ("forward_kl", "reverse_kl", "jsd")
        for fused in (True, False)
    },
    "distill soft": Distill(**COMMON),
    "distill recomputed": Distill(hard_weight=0.3, gradient_checkpointing=True, **COMMON),
    "top k fused": Distill(teacher_logits=ON_DISK, hard_weight=0.3, **COMMON),
    "top k plain": Distill(teacher_logits=ON_DISK, hard_weight=0.3, fused=False, **COMMON),
    "long": Distill(name="long", segment_len=6, hard_weight=0.3, **COMMON),
    "post": Distill(name="post", hard_weight=0.3, **COMMON),
    "on_policy": DistillOnPolicy(prompt_tokens=8, new_tokens=6, **COMMON),
    "all on_policy": DistillOnPolicy(prompt_tokens=8, new_tokens=6, share=1.0, **COMMON),
}


class UnevenRows(WrappedRows):
    """Rows with documents and masks of every length: two without a token to judge, one with a token and no label."""

    def __init__(self, teacher: nn.Module | None = None) -> None:
        super().__init__(small_rows())
        self.teacher = teacher

    def batch(self, step: int, batch_size: int, rank: int = 0, world: int = 1) -> Any:
        batch: Any = self.rows.batch(step, batch_size)
        generator = torch.Generator().manual_seed(step)
        kept = torch.rand(batch_size, 1, generator=generator)
        batch["mask"] &= torch.rand(batch["mask"].shape, generator=generator) < kept
        batch["mask"][2:4] = False
        batch["mask"][5] = torch.arange(16) == 15
        batch["mask"][6] = torch.arange(16) < 12
        if self.teacher is not None:
            top: Any = top_k_of(self.teacher, batch, 8, vocab_size=99)  # type: ignore[arg-type]
            batch |= {"teacher_ids_BLK": top.ids_BLK, "teacher_log_probs_BLK": top.log_probs_BLK}
        share = batch_size // world
        return {name: tensor[rank * share : (rank + 1) * share] for name, tensor in batch.items()}


def train(name: str, micro_batch_size: int, out: Path) -> dict[str, Tensor]:
    """Three steps: the gradient of the first, how far the weights came, and what was logged."""
    config = replace(CASES[name], micro_batch_size=micro_batch_size)
    student, teacher = small_models()
    student.generation_config.eos_token_id = list(range(2, 30))  # rows end early, alone and together
    if name == "matrix":
        teacher.set_attn_implementation("eager")
    stage = make_stage(config, student.double(), teacher.double(), vocab_size=99)
    stage.student.double()  # what is trained is made float32
    before = {name: p.detach().clone() for name, p in trainable(stage).items()}
    gradients: dict[str, Tensor] = {}
    plain = Strategy.clip_gradients

    def clip_gradients(strategy: Strategy, max_norm: float) -> Tensor:
        if not gradients:
            gradients.update({name: p.grad.clone() for name, p in trainable(strategy.stage).items()})  # type: ignore[union-attr]
        return plain(strategy, max_norm)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Strategy, "clip_gradients", clip_gradients)
        rows: Any = UnevenRows(teacher if name.startswith("top k") else None)
        loop.train_stage(stage, rows, out, progress=False)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    found = {f"gradient of {name}": gradient for name, gradient in gradients.items()}
    found |= {f"update of {name}": (p - before[name]).detach() for name, p in trainable(stage).items()}
    for key in ("loss", "grad_norm", "tokens"):
        found[key] = torch.tensor([float(line[key]) for line in lines])
    return found | {f"logged {layer}": torch.tensor(value) for layer, value in lines[0]["per_layer"].items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Every tensor to 1e-6 of its largest entry."""
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        scale = expected[name].abs().max()
        error = (tensor - expected[name]).abs().max()
        assert error <= 1e-6 * scale, f"{name}: {error / scale:.1e}"


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Callable[[str], dict[str, Tensor]]:
    """`train` of a case on one process without a cut, once."""
    return cache(lambda name: train(name, 8, tmp_path_factory.mktemp("whole")))


@pytest.mark.parametrize("name", CASES)
def test_a_step_is_the_same_however_it_is_cut(name, whole, tmp_path):
    assert all(tensor.any() for key, tensor in whole(name).items() if key.startswith("update"))
    for size in (2, 1):
        assert_same(train(name, size, tmp_path / str(size)), whole(name))


@pytest.mark.launched
def test_a_step_is_the_same_on_two_processes(whole, tmp_path):
    from test_launch import DDP, launch

    done = launch(DDP, tmp_path, program=Path(__file__))
    assert done.returncode == 0, done.stderr
    for name in CASES:
        for rank in range(2):
            assert_same(torch.load(tmp_path / f"{name}-{rank}.pt"), whole(name))


def main() -> None:
    """Train every case in micro-batches of two rows on as many processes as were launched."""
    torch.set_num_threads(1)
    out, rank = Path(sys.argv[1]), connect().process_index
    for name in CASES:
        torch.save(train(name, 2, out / name), out / f"{name}-{rank}.pt")


if __name__ == "__main__":
    main()
