"""Long rows: recurrent heads run segment by segment, and the rest cannot tell."""

from collections.abc import Callable
from itertools import accumulate

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from training import ALIGN, small_models, small_rows, small_run

from hybrid_distill.config import RunConfig
from hybrid_distill.data import DataConfig
from hybrid_distill.model import HybridLayerCache, SSMHeads
from hybrid_distill.pipeline import RunInputs
from hybrid_distill.pipeline.run import choose_heads, prepare, train
from hybrid_distill.train.config import Distill
from hybrid_distill.train.loop import train_stage
from hybrid_distill.train.stages import make_stage

D, R, P, N, K, L = 12, 3, 4, 5, 4, 23
TEXT = (
    torch.arange(L) >= torch.tensor([[5], [0]])
).long()  # the first row is padded on the left
TURNS = (
    TEXT * (torch.arange(L) % torch.tensor([[9], [10]]) < 7).long()
)  # and both of them inside
# Documents that begin within, at, just before and just after the ends of segments of 4, 5 and 8.
PACKED = (
    torch.isin(torch.arange(L), torch.tensor([1, 4, 7, 10, 17]))
    .long()
    .cumsum(0)
    .expand(2, L)
)
ROWS = {
    "plain": (None, None),
    "padded": (TEXT, None),
    "inside": (TURNS, None),
    "packed": (None, PACKED),
}
ROWS |= {"both": (TEXT, PACKED), "all": (TURNS, PACKED)}


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
    heads: SSMHeads, segment_len: int | None, hidden, rows
) -> list[torch.Tensor]:
    heads.segment_len = segment_len
    inputs = [hidden.clone().requires_grad_(), *heads.parameters()]
    y = heads(inputs[0], *rows)
    if rows[0] is not None:  # what comes out at padding means nothing
        y = y * rows[0][:, :, None, None]
    weight = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    return [y.detach(), *torch.autograd.grad((y * weight).sum(), inputs)]


@pytest.mark.parametrize("segment_len", [1, 4, 5, 8, 22])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("recurrence", ["discrete", "gdn"])
def test_values_and_gradients_are_those_of_whole_rows(recurrence, rows, segment_len):
    heads, hidden = random_heads(recurrence), torch.randn(2, L, D, dtype=torch.float64)
    whole = outputs_and_gradients(heads, None, hidden, rows)
    for found, expected in zip(
        outputs_and_gradients(heads, segment_len, hidden, rows), whole
    ):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@torch.no_grad()
def test_a_cache_goes_on_from_the_last_segment():
    heads, hidden = random_heads(), torch.randn(2, L, D, dtype=torch.float64)
    whole = heads(hidden)
    heads.segment_len = 5
    cache = HybridLayerCache()
    parts = [heads(part, cache=cache) for part in hidden.split([12, 10, 1], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole)


def test_the_long_stage_is_end_to_end_distillation_in_segments():
    batch, losses, gradients = small_rows(seq_len=40).batch(0, 4), [], []
    for config in (Distill(), Distill(name="long", segment_len=7)):
        stage = make_stage(config, *small_models()).train()
        loss = stage(batch).total
        loss.backward()
        losses.append(loss.detach())
        gradients.append([p.grad for p in stage.parameters() if p.grad is not None])
    torch.testing.assert_close(*losses)
    for ours, expected in zip(*gradients):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6)


def test_the_next_stage_runs_whole_rows_again():
    student, teacher = small_models()
    for config, expected in ((Distill(name="long", segment_len=7), 7), (Distill(), None)):
        make_stage(config, student, teacher)
        assert {
            mixer.ssm.segment_len for mixer in student.mixers() if mixer.ssm is not None
        } == {expected}


def allocations(run: Callable[[], object]) -> tuple[int, int]:
    """Bytes that are left of what a function allocates, and bytes at the fullest."""
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as record:
        _kept = run()
    events = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = list(accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))
    return held[-1], max(held)


def bytes_over_inputs(length: int, segment_len: int | None) -> tuple[int, int]:
    """(kept by the forward, at the fullest of forward and backward) of recurrent heads on one row."""
    heads = SSMHeads(32, 8, 16, 16, 4)
    heads.reset_parameters()
    heads.segment_len = segment_len
    hidden = torch.randn(1, length, 32, requires_grad=True)
    heads(hidden).sum().backward()  # gradients are there from now on
    outputs = []
    kept, _ = allocations(lambda: outputs.append(heads(hidden)))
    return kept, kept + allocations(lambda: outputs[0].sum().backward())[1]


def test_memory_grows_with_the_segment_and_hardly_with_the_row():
    _, peak = bytes_over_inputs(512, 64)
    kept_long, peak_long = bytes_over_inputs(1024, 64)
    whole_kept, whole_peak = bytes_over_inputs(1024, None)
    assert kept_long < whole_kept / 10
    assert peak_long < whole_peak / 4
    # What grows with the row: the output, its gradient and the input's, but nothing of the recurrence.
    row = 512 * (2 * 8 * 16 + 3 * 32) * 4
    assert peak_long - peak < 1.5 * row
    assert bytes_over_inputs(1024, 32)[1] < peak_long


def long_run(tmp_path, seq_len: int) -> RunConfig:
    stage = Distill(
        name="long",
        steps=2,
        batch_size=2,
        micro_batch_size=1,
        seq_len=seq_len,
        segment_len=48,
    )
    return small_run(tmp_path / "run", stages=(ALIGN, stage), data=DataConfig(seq_len=64))


def test_rows_of_the_same_data_at_their_own_length(tmp_path, monkeypatch):
    run = RunInputs(long_run(tmp_path, 320))
    lengths = []

    def watched(stage, rows, *args, **options):
        lengths.append(rows.batch(0, 1)["input_ids"].shape[1])
        return train_stage(stage, rows, *args, progress=False, **options)

    monkeypatch.setattr("hybrid_distill.pipeline.run.train_stage", watched)
    prepare(run)
    train(run, choose_heads(run))
    assert lengths == [64, 320]
