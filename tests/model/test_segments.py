"""Long rows: recurrent heads run segment by segment, and the rest cannot tell."""

import pytest
import torch
from memory_use import allocations
from training import ALIGN, small_models, small_rows, small_run

from hybrid_distill.data import DataConfig
from hybrid_distill.model import HybridLayerCache, SSMHeads
from hybrid_distill.pipeline import RunInputs
from hybrid_distill.pipeline.run import choose_heads, prepare, train
from hybrid_distill.train.config import Distill
from hybrid_distill.train.loop import train_stage
from hybrid_distill.train.stages import make_stage

# Model width, recurrent heads, head dim, state size, taps; tokens of a row.
D = 12
R = 3
P = 4
N = 5
K = 4
L = 23
PLACES = torch.arange(L)
# The first row is padded on the left.
TEXT = (torch.tensor([[5], [0]]) <= PLACES).long()
# Both rows are padded inside.
TURNS = TEXT * (PLACES % torch.tensor([[9], [10]]) < 7).long()
# Documents that begin within, at, just before and just after the ends of segments of 4, 5 and 8.
IS_BORDER = torch.isin(PLACES, torch.tensor([1, 4, 7, 10, 17]))
PACKED = IS_BORDER.long().cumsum(0).expand(2, L)
# Mask and documents.
ROWS = {
    "plain": (None, None),
    "padded": (TEXT, None),
    "inside": (TURNS, None),
    "packed": (None, PACKED),
    "both": (TEXT, PACKED),
    "all": (TURNS, PACKED),
}


def random_heads(recurrence: str = "discrete") -> SSMHeads:
    """Float64, every weight random, memories of 1 to 20 tokens."""
    torch.manual_seed(1)
    heads = SSMHeads(D, R, P, N, K, recurrence=recurrence).double()
    heads.reset_parameters(std=0.5)
    with torch.no_grad():
        heads.conv_weight.normal_()
        heads.z_proj.weight.normal_()
    return heads


def outputs_and_gradients(
    heads: SSMHeads, segment_len: int | None, hidden: torch.Tensor, rows: tuple
) -> list[torch.Tensor]:
    heads.segment_len = segment_len
    hidden = hidden.clone().requires_grad_()
    mask, seq_idx = rows
    y = heads(hidden, mask, seq_idx)
    if mask is not None:
        # Outputs at padding mean nothing.
        y = y * mask[:, :, None, None]
    weight = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    gradients = torch.autograd.grad((y * weight).sum(), [hidden, *heads.parameters()])
    return [y.detach(), *gradients]


@pytest.mark.parametrize("segment_len", [1, 4, 5, 22])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("recurrence", ["discrete", "gdn"])
def test_values_and_gradients_are_those_of_whole_rows(recurrence, rows, segment_len):
    heads = random_heads(recurrence)
    hidden = torch.randn(2, L, D, dtype=torch.float64)
    whole = outputs_and_gradients(heads, None, hidden, rows)
    in_segments = outputs_and_gradients(heads, segment_len, hidden, rows)
    for actual, expected in zip(in_segments, whole):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


@torch.no_grad()
def test_a_cache_goes_on_from_the_last_segment():
    heads = random_heads()
    hidden = torch.randn(2, L, D, dtype=torch.float64)
    whole = heads(hidden)
    heads.segment_len = 5
    cache = HybridLayerCache()
    outputs = []
    for part in hidden.split([12, 10, 1], dim=1):
        outputs.append(heads(part, cache=cache))
    torch.testing.assert_close(torch.cat(outputs, dim=1), whole)


def test_the_long_stage_is_end_to_end_distillation_in_segments():
    batch = small_rows(seq_len=40).batch(0, 4)

    def step(config: Distill) -> tuple[torch.Tensor, list[torch.Tensor]]:
        stage = make_stage(config, *small_models()).train()
        loss = stage(batch).total
        loss.backward()
        gradients = [p.grad for p in stage.parameters() if p.grad is not None]
        return loss.detach(), gradients

    whole_loss, whole_gradients = step(Distill())
    loss, gradients = step(Distill(name="long", segment_len=7))
    torch.testing.assert_close(loss, whole_loss)
    for gradient, expected in zip(gradients, whole_gradients, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)


def test_the_next_stage_runs_whole_rows_again():
    student, teacher = small_models()
    make_stage(Distill(name="long", segment_len=7), student, teacher)
    assert {heads.segment_len for heads in student.recurrent_heads()} == {7}
    make_stage(Distill(), student, teacher)
    assert {heads.segment_len for heads in student.recurrent_heads()} == {None}


def bytes_over_inputs(length: int, segment_len: int | None) -> tuple[int, int]:
    """Return the bytes that the forward keeps, and those at the fullest of a step on one row."""
    heads = SSMHeads(32, 8, 16, 16, 4)
    heads.reset_parameters()
    heads.segment_len = segment_len
    hidden = torch.randn(1, length, 32, requires_grad=True)
    # Gradients are there from now on: their own memory is not counted.
    heads(hidden).sum().backward()
    outputs = []
    kept, _ = allocations(lambda: outputs.append(heads(hidden)))
    _, peak = allocations(lambda: outputs[0].sum().backward())
    return kept, kept + peak


def test_memory_grows_with_the_segment_and_hardly_with_the_row():
    _, peak = bytes_over_inputs(256, 32)
    kept_long, peak_long = bytes_over_inputs(512, 32)
    whole_kept, whole_peak = bytes_over_inputs(512, None)
    assert kept_long < whole_kept / 10
    assert peak_long < whole_peak / 4
    # What grows with the row: the output, its gradient and the input's; not the recurrence.
    n_more_tokens = 512 - 256
    outputs = 2 * 8 * 16
    inputs = 3 * 32
    bytes_of_row = n_more_tokens * (outputs + inputs) * 4
    assert peak_long - peak < 1.5 * bytes_of_row


def test_rows_of_the_same_data_at_their_own_length(tmp_path, monkeypatch):
    shape = {
        "batch_size": 2,
        "micro_batch_size": 1,
        "seq_len": 320,
        "segment_len": 48,
    }
    long = Distill(name="long", steps=2, **shape)
    config = small_run(tmp_path / "run", stages=(ALIGN, long), data=DataConfig(seq_len=64))
    lengths = []

    def note_length(stage, rows, *args, **options):
        lengths.append(rows.batch(0, 1)["input_ids"].shape[1])
        return train_stage(stage, rows, *args, progress=False, **options)

    monkeypatch.setattr("hybrid_distill.pipeline.run.train_stage", note_length)
    run = RunInputs(config)
    prepare(run)
    train(run, choose_heads(run))
    assert lengths == [64, 320]
