"""FSDP2 moves each weight once a step, and in bfloat16 where autocast rounds it.

This file is also the program that each of two processes runs: ``test_fsdp2.py OUT``.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

if __name__ == "__main__":
    # A launched process does not have pytest's path.
    home = Path(__file__).parents[2]
    sys.path[:0] = [str(home), str(home / "kernels"), str(home / "tests")]

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from training import metrics, small_config, small_rows, sure_models

from hybrid_distill.distributed import connect, disconnect
from hybrid_distill.train.loop import train_stage
from hybrid_distill.train.stages import make_stage

FSDP_2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
STEPS = 2
BATCH = 16
FLOAT32_BYTES = 4
PRECISIONS = ("fp32", "bf16")
STAGES = ("align", "distill", "long")
MICRO_BATCHES = (1, 4)
"""Micro-batches of a step."""
CASES = list(itertools.product(STAGES, PRECISIONS, MICRO_BATCHES))


def name_of(name: str, precision: str, count: int) -> str:
    return f"{name}-{precision}-{count}"


def train(out: Path, name: str, precision: str, count: int, world: int) -> dict[str, Any]:
    """Train two steps of 16 rows in ``count`` micro-batches.

    Return what they logged, and what a step moved as a share of the float32 weights that it
    gathers (all) and reduces (the trained ones).
    """
    config = small_config(
        name,
        steps=STEPS,
        batch_size=BATCH,
        micro_batch_size=BATCH // world // count,
        precision=precision,
    )
    stage = make_stage(config, *sure_models(), vocab_size=99)
    n_held = sum(p.numel() for p in stage.parameters())
    n_trained = sum(p.numel() for p in stage.parameters() if p.requires_grad)
    folder = out / name_of(name, precision, count)

    with Moved() as moved:
        train_stage(stage, small_rows(), folder, progress=False)

    lines = metrics(folder)
    return {
        "gathered": moved.gathered / STEPS / (FLOAT32_BYTES * n_held),
        "reduced": moved.reduced / STEPS / (FLOAT32_BYTES * n_trained),
        "losses": [line["loss"] for line in lines],
        "norms": [line["grad_norm"] for line in lines],
    }


class Moved(TorchDispatchMode):
    """Bytes of the whole tensors that FSDP2 gathers and reduces, by collectives of any name."""

    def __init__(self) -> None:
        super().__init__()
        self.gathered = 0
        self.reduced = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name.startswith("c10d."):
            # The whole tensor is the largest argument of either collective.
            sizes = [leaf.nbytes for leaf in tree_leaves(args) if type(leaf) is torch.Tensor]
            n_bytes = max(sizes)
            if "allgather" in name:
                self.gathered += n_bytes
            if "reduce_scatter" in name:
                self.reduced += n_bytes
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> dict[str, dict[str, Any]]:
    """All cases on two processes."""
    from processes import start_two

    out = tmp_path_factory.mktemp("two")
    ended = start_two(Path(__file__), out, own=[FSDP_2, FSDP_2], timeout=240.0)
    assert [process.status for process in ended] == [0, 0], ended
    return json.loads((out / "results.json").read_text())


@pytest.mark.launched
@pytest.mark.parametrize("name", STAGES)
def test_a_step_moves_its_weights_and_gradients_once(two, name):
    """Shards are padded to equal lengths, which at this size is a few percent."""
    step = two[name_of(name, "fp32", 4)]
    assert 0.99 <= step["reduced"] < 1.1
    assert 0.99 <= step["gathered"] < 1.1


@pytest.mark.launched
@pytest.mark.parametrize("name", STAGES)
def test_more_micro_batches_move_no_more(two, name):
    for precision in PRECISIONS:
        one = two[name_of(name, precision, 1)]
        four = two[name_of(name, precision, 4)]
        assert four["gathered"] <= one["gathered"]
        assert four["reduced"] == pytest.approx(one["reduced"])


@pytest.mark.launched
def test_bf16_gathers_less_and_sums_in_float32(two):
    for count in MICRO_BATCHES:
        whole = two[name_of("distill", "fp32", count)]
        half = two[name_of("distill", "bf16", count)]
        # More than half: what autocast does not round is gathered in float32.
        assert half["gathered"] < 0.85 * whole["gathered"]
        assert half["reduced"] == pytest.approx(whole["reduced"], rel=0.05)


@pytest.mark.launched
@pytest.mark.parametrize(("name", "precision", "count"), CASES)
def test_the_losses_are_those_of_one_process(two, tmp_path, name, precision, count):
    # Two processes sum in another order; a number of bfloat16 has 8 bits.
    tolerance = {"fp32": 1e-4, "bf16": 5e-3}[precision]
    together = two[name_of(name, precision, count)]

    alone = train(tmp_path, name, precision, count, world=1)

    assert together["losses"] == pytest.approx(alone["losses"], rel=tolerance)
    assert together["norms"] == pytest.approx(alone["norms"], rel=10 * tolerance)


def main(out: Path) -> None:
    """Train every case as one of two processes."""
    torch.set_num_threads(1)
    rank = connect().process_index
    results = {name_of(*case): train(out, *case, world=2) for case in CASES}
    if rank == 0:
        (out / "results.json").write_text(json.dumps(results))
    disconnect()


if __name__ == "__main__":
    assert os.environ["ACCELERATE_USE_FSDP"] == "true"
    main(Path(sys.argv[1]))
