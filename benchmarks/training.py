"""Train a stage on given batches, without the loop's checkpoints, logs and spike guard."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from hybrid_distill.data import Batch
from hybrid_distill.train.optimizer import make_adamw, set_learning_rate, wsd
from hybrid_distill.train.stage import Stage


def trained(
    stage: Stage,
    batches: Callable[[int], Sequence[Batch]],
    steps: int,
    rate: float,
) -> Iterator[int]:
    """Train on the mean loss of each step's batches; yield the number of steps done, from 0."""
    optimizer = make_adamw(stage, learning_rate=rate, betas=(0.9, 0.95), weight_decay=0.1)
    yield 0
    for step in range(steps):
        set_learning_rate(optimizer, rate * wsd(step, steps, 0.1, 0.5))
        micro_batches = batches(step)
        for batch in micro_batches:
            (stage(batch).total / len(micro_batches)).backward()
        torch.nn.utils.clip_grad_norm_([p for p in stage.parameters() if p.requires_grad], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield step + 1
