"""Steps without a learned token have no loss.

Data of long questions and short answers has such steps.
"""

import sys
from collections.abc import Set
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

if __name__ == "__main__":
    # A launched process does not have pytest's path.
    tests = Path(__file__).parents[1]
    sys.path[:0] = [str(tests.parent), str(tests), str(tests / "train")]

from messages import naming
from test_launch import DDP, ZERO_2, launch
from training import (
    StoppingRows,
    WrappedRows,
    metrics,
    small_config,
    small_models,
    small_rows,
)

from hybrid_distill.data import PackedRows
from hybrid_distill.train import spikes
from hybrid_distill.train.config import AlignMatrix
from hybrid_distill.train.loop import Diverged, train_stage
from hybrid_distill.train.stage import Stage
from hybrid_distill.train.stages import make_stage
from hybrid_distill.train.stop import Interrupted

NAMES = ("matrix", "align", "distill", "on_policy", "long")


class UnlearnedRows(WrappedRows):
    """Rows with nothing to learn in ``empty`` steps, nor in half of the batch in ``half`` steps."""

    def __init__(self, rows: PackedRows, empty: Set[int], half: Set[int] = frozenset()) -> None:
        super().__init__(rows)
        self.empty = empty
        self.half = half
        self.step = -1

    def batch(self, step: int, batch_size: int, rank: int = 0, world: int = 1) -> Any:
        self.step = step
        batch = self.rows.batch(step, batch_size, rank, world)
        mask_BL = batch["mask"]
        if step in self.empty:
            mask_BL[:] = False
        if step in self.half:
            # Of the batch of all processes: the last one has nothing then.
            first_place = rank * batch_size // world
            places = first_place + torch.arange(len(mask_BL))
            mask_BL[places >= batch_size // 2] = False
        return batch


@pytest.fixture
def short_window(monkeypatch: pytest.MonkeyPatch) -> int:
    """The number of losses that the next is compared with."""
    monkeypatch.setattr(spikes, "WINDOW", 6)
    return 6


def stage_of(name: str, **changes: Any) -> Stage:
    if name == "matrix":
        models = small_models(attn_implementation="eager")
        return make_stage(AlignMatrix(**changes), *models, vocab_size=99)
    return make_stage(small_config(name, **changes), *small_models(), vocab_size=99)


def empty_steps(lines: list[dict[str, Any]]) -> list[int]:
    """Return the numbers of the steps, from 0, that have no loss."""
    return [line["step"] - 1 for line in lines if line["loss"] is None]


def weights(stage: Stage) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in stage.student.state_dict().items()}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_they_enter_no_statistic_in_any_stage(tmp_path, name, micro_batch_size, short_window):
    """nanochat#662, LMOps#38: a loss of 0 was usual, and every other one "20 times the usual 0"."""
    empty = set(range(16)) - {3, 10, 14}
    assert len(empty) > short_window
    stage = stage_of(
        name,
        steps=16,
        batch_size=2,
        micro_batch_size=micro_batch_size,
        log_every=1,
        learning_rate=1e-3,
        on_divergence="stop",
    )

    train_stage(stage, UnlearnedRows(small_rows(), empty), tmp_path, progress=False)

    lines = metrics(tmp_path)
    assert empty_steps(lines) == sorted(empty)
    assert lines[-1]["empty_steps"] == len(empty)
    assert "skipped" not in lines[-1]
    for line in lines:
        if line["step"] - 1 in empty:
            assert line["grad_norm"] is None
            assert line["per_layer"] == {}
        else:
            assert line["loss"] > 0
            assert line["grad_norm"] > 0
    n_tokens = [line["tokens"] for line in lines]
    assert n_tokens == sorted(n_tokens)


@pytest.mark.parametrize("name", ["align", "distill"])
def test_they_leave_the_weights_as_they_are(tmp_path, name):
    """With momentum and weight decay, a gradient of zero would move them."""
    seen: list[dict[str, torch.Tensor]] = []
    stage = stage_of(name, steps=6, batch_size=4, micro_batch_size=2)

    class Watched(UnlearnedRows):
        def batch(self, step: int, *args: int) -> Any:
            seen.append(weights(stage))
            return super().batch(step, *args)

    train_stage(stage, Watched(small_rows(), {2, 3}), tmp_path, progress=False)

    def is_unchanged_by(step: int) -> bool:
        before = seen[step]
        after = seen[step + 1]
        return all(torch.equal(before[key], after[key]) for key in before)

    unchanged = [is_unchanged_by(step) for step in range(5)]
    assert unchanged == [False, False, True, True, False]


@pytest.mark.parametrize("choice", ["stop", "skip"])
def test_a_divergence_among_them_is_still_one(tmp_path, choice, short_window):
    empty = set(range(1, 24, 2))
    # The first step with a loss after the window is full.
    spoilt = 2 * short_window
    rows = UnlearnedRows(small_rows(), empty)
    shape = {"steps": 24, "batch_size": 2, "micro_batch_size": 2}
    stage = stage_of("distill", **shape, spike=2.0, on_divergence=choice)

    def spoil(module: Any, args: Any, output: Any) -> Any:
        factor = 1000 if rows.step == spoilt else 1
        return type(output)(last_hidden_state=output[0] * factor)

    stage.teacher.model.register_forward_hook(spoil)
    if choice == "stop":
        with pytest.raises(Diverged, match=naming(f"step {spoilt + 1}")):
            train_stage(stage, rows, tmp_path, progress=False)
        return

    train_stage(stage, rows, tmp_path, progress=False)

    lines = metrics(tmp_path)
    skipped = [line["step"] - 1 for line in lines if "skipped" in line]
    assert skipped == [spoilt]
    assert empty_steps(lines) == sorted({*empty, spoilt})


def test_resuming_goes_on_with_their_count_even_before_the_first_real_step(tmp_path):
    empty = {0, 1, 2, 3, 7}
    rows: Any = UnlearnedRows(small_rows(), empty)
    whole = stage_of("distill")
    train_stage(whole, rows, tmp_path / "whole", progress=False)
    # The first checkpoint is made before the optimizer has a state.
    for stop_at in (2, 5, 8):
        stopping: Any = StoppingRows(rows, stop_at)
        with pytest.raises(Interrupted):
            train_stage(stage_of("distill"), stopping, tmp_path / "parts", progress=False)
    parts = stage_of("distill")
    train_stage(parts, rows, tmp_path / "parts", progress=False)

    def history(name: str) -> list[tuple]:
        lines = metrics(tmp_path / name)
        return [(line["step"], line["loss"], line.get("empty_steps")) for line in lines]

    assert history("parts") == history("whole")
    _, _, count_at_the_end = history("whole")[-1]
    assert count_at_the_end == len(empty)
    expected = weights(whole)
    for name, tensor in weights(parts).items():
        assert torch.equal(tensor, expected[name])


@pytest.mark.parametrize("fused", [True, False])
def test_a_loss_on_the_text_alone_needs_labels(tmp_path, fused):
    """Each row learns its last token alone, whose next token is in another row."""

    class LastOnly(WrappedRows):
        def batch(self, *args: int) -> Any:
            batch = self.rows.batch(*args)
            batch["mask"][:, :-1] = False
            return batch

    stage = stage_of(
        "distill",
        steps=2,
        batch_size=2,
        micro_batch_size=1,
        hard_weight=1.0,
        fused=fused,
    )
    train_stage(stage, LastOnly(small_rows()), tmp_path, progress=False)
    assert [line["loss"] for line in metrics(tmp_path)] == [None, None]


# Several processes

EMPTY = {1, 4, 5}
HALF = {0, 2, 7}


def train_under_launcher(out: Path) -> None:
    stage = stage_of("distill", steps=9, micro_batch_size=2, log_every=1)
    train_stage(stage, UnlearnedRows(small_rows(), EMPTY, HALF), out, progress=False)


@pytest.mark.launched
@pytest.mark.parametrize("launcher", [DDP, ZERO_2], ids=["ddp", "zero2"])
def test_a_step_is_empty_if_no_process_has_a_token(tmp_path, launcher):
    if launcher is ZERO_2:
        pytest.importorskip("deepspeed")

    done = launch(launcher, tmp_path / "two", program=Path(__file__))
    train_under_launcher(tmp_path / "one")

    assert done.returncode == 0, done.stderr
    one = metrics(tmp_path / "one")
    two = metrics(tmp_path / "two")
    assert empty_steps(two) == sorted(EMPTY)
    for ours, theirs in zip(one, two, strict=True):
        assert theirs["tokens"] == ours["tokens"]
        if ours["loss"] is None:
            assert theirs["loss"] is None
        else:
            assert theirs["loss"] == pytest.approx(ours["loss"], rel=1e-4)
    of_two = load_file(tmp_path / "two" / "model.safetensors")
    for name, tensor in load_file(tmp_path / "one" / "model.safetensors").items():
        assert_close(tensor, of_two[name], rtol=1e-4, atol=1e-5, msg=name)


if __name__ == "__main__":
    train_under_launcher(Path(sys.argv[1]))
