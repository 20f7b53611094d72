"""Steps without a learned token, as data of long questions and short answers has them: they have no loss."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

if __name__ == "__main__":
    tests = Path(__file__).parents[1]
    sys.path[:0] = [str(tests.parent), str(tests), str(tests / "train")]

from test_launch import DDP, ZERO_2, launch
from training import StoppingRows, WrappedRows, small_config, small_models, small_rows

from hybrid_distill.data import PackedRows
from hybrid_distill.train import spikes
from hybrid_distill.train.config import AlignMatrix, StageConfig
from hybrid_distill.train.loop import Diverged, Interrupted, train_stage
from hybrid_distill.train.stage import Stage
from hybrid_distill.train.stages import make_stage

NAMES = ("matrix", "align", "distill", "on_policy", "long")


class UnlearnedRows(WrappedRows):
    """Rows of which nothing is learned in some steps, and in others nothing of the second half of the batch."""

    def __init__(
        self, rows: PackedRows, empty: set[int], half: set[int] = frozenset()
    ) -> None:  # type: ignore[assignment]
        super().__init__(rows)
        self.empty, self.half, self.step = empty, half, -1

    def batch(self, step: int, batch_size: int, rank: int = 0, world: int = 1) -> Any:
        self.step = step
        batch = self.rows.batch(step, batch_size, rank, world)
        places = torch.arange(len(batch["mask"])) + rank * batch_size // world
        if step in self.empty:
            batch["mask"][:] = False
        if step in self.half:
            batch["mask"][places >= batch_size // 2] = False
        return batch


@pytest.fixture
def short_window(monkeypatch: pytest.MonkeyPatch) -> int:
    """The number of losses that the next is compared with."""
    monkeypatch.setattr(spikes, "WINDOW", 6)
    return 6


def stage_of(name: str, **changes: Any) -> Stage:
    config: StageConfig = (
        AlignMatrix(**changes) if name == "matrix" else small_config(name, **changes)
    )
    attention = {"attn_implementation": "eager"} if name == "matrix" else {}
    return make_stage(config, *small_models(**attention), vocab_size=99)


def metrics(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def weights(stage: Stage) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in stage.student.state_dict().items()}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_they_enter_no_statistic_in_any_stage(
    tmp_path, name, micro_batch_size, short_window
):
    """nanochat#662, LMOps#38: their loss of 0 was the usual one, and every other step "20 times the usual 0"."""
    empty = set(range(16)) - {3, 10, 14}
    assert len(empty) > short_window
    stage = stage_of(
        name, steps=16, batch_size=2, micro_batch_size=micro_batch_size, log_every=1, learning_rate=1e-3,
        on_divergence="stop",
    )  # fmt: skip
    train_stage(stage, UnlearnedRows(small_rows(), empty), tmp_path, progress=False)
    lines = metrics(tmp_path)
    assert [line["step"] - 1 for line in lines if line["loss"] is None] == sorted(empty)
    assert lines[-1]["empty_steps"] == len(empty) and "skipped" not in lines[-1]
    for line in lines:
        if line["step"] - 1 in empty:
            assert line["grad_norm"] is None and line["per_layer"] == {}
        else:
            assert line["loss"] > 0 and line["grad_norm"] > 0
    assert [line["tokens"] for line in lines] == sorted(line["tokens"] for line in lines)


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

    def same(before: int, after: int) -> bool:
        return all(
            torch.equal(tensor, seen[after][key]) for key, tensor in seen[before].items()
        )

    assert [same(step, step + 1) for step in range(5)] == [False, False, True, True, False]


@pytest.mark.parametrize("choice", ["stop", "skip"])
def test_a_divergence_among_them_is_still_one(tmp_path, choice, short_window):
    empty, spoilt = set(range(1, 24, 2)), 2 * short_window  # one after the window is full
    rows = UnlearnedRows(small_rows(), empty)
    stage = stage_of(
        "distill",
        steps=24,
        batch_size=2,
        micro_batch_size=2,
        spike=2.0,
        on_divergence=choice,
    )

    def spoil(module: Any, args: Any, output: Any) -> Any:
        return type(output)(
            last_hidden_state=output[0] * (1000 if rows.step == spoilt else 1)
        )

    stage.teacher.model.register_forward_hook(spoil)
    if choice == "stop":
        with pytest.raises(Diverged, match=f"step {spoilt + 1}:"):
            train_stage(stage, rows, tmp_path, progress=False)
        return
    train_stage(stage, rows, tmp_path, progress=False)
    lines = metrics(tmp_path)
    assert [line["step"] - 1 for line in lines if "skipped" in line] == [spoilt]
    assert [line["step"] - 1 for line in lines if line["loss"] is None] == sorted(
        {*empty, spoilt}
    )


def test_resuming_goes_on_with_their_count_even_before_the_first_real_step(tmp_path):
    empty = {0, 1, 2, 3, 7}
    rows = UnlearnedRows(small_rows(), empty)
    whole = stage_of("distill")
    train_stage(whole, rows, tmp_path / "whole", progress=False)
    for stop_at in (
        2,
        5,
        8,
    ):  # the first checkpoint is made before the optimizer has a state
        with pytest.raises(Interrupted):
            train_stage(
                stage_of("distill"),
                StoppingRows(rows, stop_at),
                tmp_path / "parts",
                progress=False,
            )  # type: ignore[arg-type]
    parts = stage_of("distill")
    train_stage(parts, rows, tmp_path / "parts", progress=False)
    pairs = [[(line["step"], line["loss"], line.get("empty_steps")) for line in metrics(tmp_path / part)]
             for part in ("whole", "parts")]  # fmt: skip
    assert pairs[0] == pairs[1] and pairs[0][-1][2] == len(empty)
    theirs = weights(parts)
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in weights(whole).items())


@pytest.mark.parametrize("fused", [True, False])
def test_a_loss_on_the_text_alone_needs_labels(tmp_path, fused):
    """The only token of each row that is learned is its last, whose next token is in another row."""

    class LastOnly(WrappedRows):
        def batch(self, *args: int) -> Any:
            batch = self.rows.batch(*args)
            batch["mask"][:, :-1] = False
            return batch

    stage = stage_of(
        "distill", steps=2, batch_size=2, micro_batch_size=1, hard_weight=1.0, fused=fused
    )
    train_stage(stage, LastOnly(small_rows()), tmp_path, progress=False)
    assert [line["loss"] for line in metrics(tmp_path)] == [None, None]


# Several processes

EMPTY, HALF = {1, 4, 5}, {0, 2, 7}


def train_under_launcher(out: Path) -> None:
    stage = stage_of("distill", steps=9, micro_batch_size=2, log_every=1)
    train_stage(stage, UnlearnedRows(small_rows(), EMPTY, HALF), out, progress=False)


@pytest.mark.launched
@pytest.mark.parametrize("launcher", [DDP, ZERO_2], ids=["ddp", "zero2"])
def test_a_step_is_empty_if_no_process_has_a_token(tmp_path, launcher):
    if launcher is ZERO_2:
        pytest.importorskip("deepspeed")
    done = launch(launcher, tmp_path / "two", program=Path(__file__))
    assert done.returncode == 0, done.stderr
    train_under_launcher(tmp_path / "one")
    one, two = (metrics(tmp_path / name) for name in ("one", "two"))
    assert [line["step"] - 1 for line in two if line["loss"] is None] == sorted(EMPTY)
    assert [line["tokens"] for line in two] == [line["tokens"] for line in one]
    for ours, theirs in zip(one, two, strict=True):
        assert theirs["loss"] == (
            None if ours["loss"] is None else pytest.approx(ours["loss"], rel=1e-4)
        )
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("one", "two")]
    for name, tensor in files[0].items():
        torch.testing.assert_close(tensor, files[1][name], rtol=1e-4, atol=1e-5, msg=name)


if __name__ == "__main__":
    train_under_launcher(Path(sys.argv[1]))
