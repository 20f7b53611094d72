"""A stage gives the same weights however it was interrupted: by a signal, an error or kill -9."""

from __future__ import annotations

import json
import multiprocessing
import os
import pty
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from conftest import make_family_model
from messages import naming
from torch.utils.flop_counter import FlopCounterMode
from training import (
    StoppingRows,
    WrappedRows,
    die,
    killed,
    metrics,
    random_student,
    small_config,
    small_models,
    small_rows,
    small_stage,
)

from hybrid_distill.train import loop, result, stop
from hybrid_distill.train.loop import Diverged, train_stage
from hybrid_distill.train.meter import flops_per_token
from hybrid_distill.train.optimizer import make_adamw, wsd
from hybrid_distill.train.profiling import PROFILED
from hybrid_distill.train.result import StageManifest
from hybrid_distill.train.resume import StageParentError
from hybrid_distill.train.spikes import WINDOW, SpikeDetector
from hybrid_distill.train.stages import make_stage
from hybrid_distill.train.stop import Interrupted
from hybrid_distill.train.weights import weights_hash

NAMES = ("align", "distill")


class Trained(NamedTuple):
    """All that a stage leaves: its manifest, and step, loss and gradient norm of each line."""

    manifest: StageManifest
    curve: list[tuple[int, float, float]]


def train(
    name: str,
    out: Path,
    rows=None,
    *,
    resume: str = "auto",
    seed: int = 0,
    parent_hash: str = "",
    **changes,
) -> Trained:
    """Train the small stage of this name from the beginning, or from what is in ``out``."""
    stage = small_stage(small_config(name, **changes))
    manifest = train_stage(
        stage,
        rows or small_rows(),
        out,
        progress=False,
        resume=resume,
        seed=seed,
        parent_hash=parent_hash,
    )
    return Trained(manifest, curve(out))


def curve(out: Path) -> list[tuple[int, float, float]]:
    return [(line["step"], line["loss"], line["grad_norm"]) for line in metrics(out)]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> dict[str, Trained]:
    """Runs that nothing disturbed."""
    torch.set_num_threads(1)
    return {name: train(name, tmp_path_factory.mktemp(name)) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_a_stage_lowers_its_loss_and_leaves_its_result(uninterrupted, tmp_path, name):
    config = small_config(name)
    stage = small_stage(config)

    manifest = train_stage(stage, small_rows(), tmp_path, progress=False)

    losses = [loss for _, loss, _ in curve(tmp_path)]
    assert losses[-1] < 0.95 * losses[0]
    assert manifest.finished
    assert manifest.steps == config.steps
    assert manifest.weights == weights_hash(stage.student) != manifest.parent
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["manifest.json", "metrics.jsonl", "model.safetensors"]
    again = Trained(manifest, curve(tmp_path))
    assert again == uninterrupted[name], "the same seed, the same everything"


def test_every_line_of_the_metrics_says_what_happened(tmp_path):
    rows = small_rows()

    train("align", tmp_path, rows, log_every=5)

    lines = metrics(tmp_path)
    assert [line["step"] for line in lines] == [1, 5, 10, 12]
    tokens_of_steps = [int(rows.batch(step, 8)["mask"].sum()) for step in range(12)]
    names = "step loss per_layer lr grad_norm tokens tokens_per_s data_wait memory_bytes seconds"
    for line in lines:
        assert set(line) == set(names.split())
        assert 0 <= line["data_wait"] < 1
        assert line["memory_bytes"] > 2**20
        sum_of_layers = sum(line["per_layer"].values())
        assert line["loss"] == pytest.approx(sum_of_layers, rel=1e-5)
        tokens_until_now = sum(tokens_of_steps[: line["step"]])
        assert line["tokens"] == tokens_until_now
        schedule = wsd(line["step"] - 1, 12, 0.1, 0.1)
        assert line["lr"] == 3e-3 * schedule


# Interruptions.


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("align", [signal.SIGINT]),
        ("distill", [signal.SIGUSR1]),
        ("align", [signal.SIGTERM, signal.SIGTERM]),
    ],
)
def test_a_signal_saves_and_the_same_command_continues(uninterrupted, tmp_path, name, numbers):
    """One that comes twice is one request: torchrun forwards what SLURM has sent to all."""

    def send() -> None:
        for number in numbers:
            os.kill(os.getpid(), number)

    handler = signal.getsignal(numbers[0])
    with pytest.raises(Interrupted, match="step-00000007"):
        train(name, tmp_path, StoppingRows(small_rows(), 6, send))
    assert signal.getsignal(numbers[0]) == handler, "the handler of before is there again"

    assert train(name, tmp_path) == uninterrupted[name]


def test_the_end_of_a_session_saves_too(uninterrupted, tmp_path):
    """A terminal that is gone cannot be written to any more."""
    waits = tmp_path / "waits"
    out = tmp_path / "out"

    def hang_up() -> None:
        waits.touch()
        end = time.monotonic() + 60
        while os.isatty(2) or not os.path.samestat(os.fstat(2), os.stat(os.devnull)):
            assert time.monotonic() < end, "stderr still is the terminal"
            time.sleep(0.01)
        os.write(1, b"progress")
        os.write(2, b"progress")

    child, terminal = pty.fork()
    if child == 0:
        try:
            # Renews torch's pool, which two threads at once cannot.
            torch.set_num_threads(torch.get_num_threads())
            train("align", out, StoppingRows(small_rows(), 6, hang_up))
        except Interrupted:
            os._exit(0)
        finally:
            os._exit(1)
    while not waits.exists() and os.waitpid(child, os.WNOHANG) == (0, 0):
        time.sleep(0.01)
    os.close(terminal)
    assert os.waitpid(child, 0) == (child, 0)

    assert train("align", out) == uninterrupted["align"]


def test_nohup_trains_on(uninterrupted, tmp_path):
    rows = StoppingRows(small_rows(), 6, lambda: os.kill(os.getpid(), signal.SIGHUP))
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert train("align", tmp_path, rows) == uninterrupted["align"]
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_request_that_comes_later_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(stop, "SAME_REQUEST_S", 0.0)

    def twice() -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)

    # A shell's background job ignores it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            train("align", tmp_path, StoppingRows(small_rows(), 6, twice))
    finally:
        signal.signal(signal.SIGINT, before)


def test_text_that_the_student_writes_is_the_same_after_an_interruption(tmp_path):
    whole = train("on_policy", tmp_path / "whole", steps=6)
    cut = tmp_path / "cut"
    with pytest.raises(Interrupted):
        train("on_policy", cut, StoppingRows(small_rows(), 3), steps=6)
    assert train("on_policy", cut, steps=6) == whole


@pytest.mark.parametrize("moment", ["step", "result"])
def test_a_signal_at_the_end_finishes_the_stage_and_stops_then(
    uninterrupted, tmp_path, monkeypatch, moment
):
    """In the last step, and while the result is written."""
    rows = small_rows()
    if moment == "step":
        rows = StoppingRows(rows, 11)
    else:
        save = loop.save_stage

        def save_and_stop(*args, **kwargs) -> StageManifest:
            os.kill(os.getpid(), signal.SIGTERM)
            return save(*args, **kwargs)

        monkeypatch.setattr(loop, "save_stage", save_and_stop)

    with pytest.raises(Interrupted, match=naming("align", tmp_path)):
        train("align", tmp_path, rows)

    left_behind = (StageManifest.read(tmp_path), curve(tmp_path))
    assert left_behind == uninterrupted["align"]
    assert train("align", tmp_path) == uninterrupted["align"]


@pytest.mark.parametrize(("name", "step"), [("align", 0), ("distill", 7)])
def test_killed_between_steps_and_resumed_gives_the_same_weights(
    uninterrupted, tmp_path, name, step
):
    killed(lambda: train(name, tmp_path, StoppingRows(small_rows(), step, die)))
    assert train(name, tmp_path) == uninterrupted[name]


def test_killed_before_the_manifest_that_makes_the_result_count(uninterrupted, tmp_path):
    def action() -> None:
        result.write_sealed = die
        train("align", tmp_path)

    killed(action)
    assert (tmp_path / "model.safetensors").exists()
    assert StageManifest.read(tmp_path) is None
    assert train("align", tmp_path) == uninterrupted["align"]


def test_a_resumed_run_may_log_and_save_more_often_but_not_train_differently(
    uninterrupted, tmp_path
):
    with pytest.raises(Interrupted):
        train("align", tmp_path, StoppingRows(small_rows(), 6))

    with pytest.raises(ValueError, match=naming("learning_rate", 0.003, 0.1)):
        train("align", tmp_path, learning_rate=0.1)
    with pytest.raises(ValueError, match="seed"):
        train("align", tmp_path, seed=1)
    with pytest.raises(ValueError, match="data"):
        train("align", tmp_path, small_rows(seq_len=8))

    resumed = train("align", tmp_path, checkpoint_every=3, log_every=2)
    assert resumed.manifest.weights == uninterrupted["align"].manifest.weights


def test_a_finished_stage_is_loaded_not_run_again(tmp_path, monkeypatch):
    manifest, _ = train("align", tmp_path)
    monkeypatch.setattr(loop._Training, "run", pytest.fail)

    stage = small_stage(small_config("align"))
    assert train_stage(stage, small_rows(), tmp_path, progress=False) == manifest
    assert weights_hash(stage.student) == manifest.weights

    with pytest.raises(ValueError, match="steps"):
        train("align", tmp_path, steps=13)


def test_resume_never_begins_again(uninterrupted, tmp_path):
    """Over a finished stage, then over an interrupted one, both of another learning rate."""
    train("align", tmp_path, learning_rate=1e-4)
    rows = StoppingRows(small_rows(), 6)
    # The same command would begin again.
    with pytest.raises(Interrupted, match=naming("--resume never")):
        train("align", tmp_path, rows, resume="never", learning_rate=1e-4)
    assert train("align", tmp_path, resume="never") == uninterrupted["align"]


def test_batches_made_ahead_by_other_processes_train_the_same(uninterrupted, tmp_path):
    """A signal to all processes stops the loop alone: it saves, and its workers work until then."""
    trainer = os.getpid()

    def to_all() -> None:
        for process in (os.getpid(), trainer):
            os.kill(process, signal.SIGTERM)

    with pytest.raises(Interrupted):
        train("align", tmp_path, StoppingRows(small_rows(), 9, to_all), data_workers=1)
    last_step, _, _ = curve(tmp_path)[-1]
    assert 0 < last_step < 12
    assert not multiprocessing.active_children()

    resumed = train("align", tmp_path, data_workers=2)
    assert resumed.manifest.weights == uninterrupted["align"].manifest.weights
    assert resumed.curve == uninterrupted["align"].curve


def test_an_error_of_a_worker_ends_the_stage_and_all_workers(tmp_path):
    def fail() -> None:
        raise ValueError("the disk is gone")

    with pytest.raises(ValueError, match="the disk is gone"):
        train("align", tmp_path, StoppingRows(small_rows(), 3, fail), data_workers=1)
    assert not multiprocessing.active_children(), "Python would wait for them when it exits"


# Parents.


def test_stages_follow_each_other_by_hash(tmp_path):
    student, teacher = small_models()
    fresh = weights_hash(student)
    align = make_stage(small_config("align", steps=3), student, teacher)
    aligned = train_stage(align, small_rows(), tmp_path, progress=False).weights
    out = tmp_path / "2-distill"

    # A new student, not the aligned one.
    with pytest.raises(StageParentError) as refusal:
        train("distill", out, parent_hash=aligned)
    assert aligned[:16] in str(refusal.value)
    assert fresh[:16] in str(refusal.value)
    assert not out.exists()

    distill = make_stage(small_config("distill", steps=1), student, teacher, vocab_size=99)
    distilled = train_stage(distill, small_rows(), out, parent_hash=aligned, progress=False)
    assert distilled.parent == aligned


@pytest.mark.parametrize("is_finished", [True, False])
def test_a_stage_that_came_from_another_parent_is_refused(tmp_path, is_finished):
    config = small_config("distill", steps=3)
    if is_finished:
        train("distill", tmp_path, steps=3)
    else:
        with pytest.raises(Interrupted):
            train("distill", tmp_path, StoppingRows(small_rows(), 1), steps=3)

    other, teacher = small_models()
    with torch.no_grad():
        other.mixers()[0].ssm.D.add_(1.0)
    stage = make_stage(config, other, teacher)
    with pytest.raises(StageParentError) as refusal:
        train_stage(stage, small_rows(), tmp_path)

    parent, _ = small_models()
    for model in (parent, other):
        assert weights_hash(model)[:16] in str(refusal.value)


# Divergence.


def test_a_loss_that_is_not_finite_names_step_rows_and_layer(tmp_path):
    stage = small_stage(small_config("align"))

    def spoil() -> None:
        with torch.no_grad():
            stage.student.mixers()[1].ssm.D[0] = float("nan")

    rows = StoppingRows(small_rows(), 6, spoil)
    with pytest.raises(Diverged, match=naming("step 7", "nan", "layer.1", 48, 55)):
        train_stage(stage, rows, tmp_path, progress=False)
    checkpoints = [path.name for path in (tmp_path / "checkpoints").iterdir()]
    assert checkpoints == ["step-00000004"], "the one before the divergence"


class SpoiltRows(WrappedRows):
    """Rows whose batch at some steps breaks the loss."""

    def __init__(self, rows, steps: set[int], stage) -> None:
        super().__init__(rows)
        self.steps = steps
        self.step = -1
        for model in (stage.student, stage.teacher):
            model.get_input_embeddings().register_forward_hook(self._spoil)

    def _spoil(self, module, args, output):
        if self.step in self.steps:
            return output * float("nan")
        return output

    def batch(self, step: int, *args):
        self.step = step
        return self.rows.batch(step, *args)


def test_a_bad_batch_can_be_left_out_but_not_too_many_in_a_row(tmp_path):
    config = small_config("distill", on_divergence="skip", max_skips=2)
    stage = small_stage(config)
    rows = SpoiltRows(small_rows(), {4, 5, 9}, stage)

    train_stage(stage, rows, tmp_path, progress=False)

    lines = metrics(tmp_path)
    # Logs count steps from 1.
    assert [line["step"] for line in lines if "skipped" in line] == [5, 6, 10]
    assert "nan" in lines[4]["skipped"]
    assert lines[4]["loss"] is None
    losses = [line["loss"] for line in lines if "skipped" not in line]
    assert losses[-1] < losses[0]
    for parameter in stage.student.parameters():
        assert torch.isfinite(parameter).all()

    stage = small_stage(config)
    rows = SpoiltRows(small_rows(), {4, 5, 6}, stage)
    with pytest.raises(Diverged, match="step 7"):
        train_stage(stage, rows, tmp_path / "more", progress=False)


def test_a_loss_far_above_the_usual_is_a_divergence():
    factor = 5.0
    spikes = SpikeDetector(factor)
    assert spikes.reason(90.0, 1.0, {}) is None, "nothing is usual yet"
    for _ in range(WINDOW):
        assert spikes.reason(2.0, 1.0, {"layer.0": 0.5, "layer.1": 1.5}) is None

    # The limit is 5 times the usual 2.0.
    assert spikes.reason(9.9, 1.0, {}) is None
    restored = SpikeDetector(factor)
    as_saved = json.dumps(spikes.state_dict())
    restored.load_state_dict(json.loads(as_saved))
    for detector in (spikes, restored):
        reason = detector.reason(10.1, 1.0, {"layer.0": 1, "layer.1": 9})
        assert "layer.1" in reason


def test_rounding_of_a_student_that_equals_its_teacher_is_not_the_usual():
    """Such losses may even be negative; where a row differs a little, nothing has diverged."""
    spikes = SpikeDetector(20.0)
    for number in range(WINDOW):
        assert spikes.reason(-1e-9 * number, 1e-6, {}) is None
    assert spikes.reason(0.005, 0.1, {}) is None
    assert spikes.reason(3.0, 9.0, {}) is not None


def test_a_bfloat16_teacher_needs_bf16_compute(tmp_path):
    student, teacher = small_models()
    stage = make_stage(small_config("align"), student.bfloat16(), teacher.bfloat16())
    with pytest.raises(ValueError, match=naming("precision", "bf16")):
        train_stage(stage, small_rows(), tmp_path, progress=False)


# Measurement.


def test_a_trace_and_a_tracker_are_written_when_asked_for(tmp_path):
    train_stage(
        small_stage(small_config("align", steps=6)),
        small_rows(),
        tmp_path,
        progress=False,
        profile=True,
        trackers=("tensorboard",),
    )
    trace = json.loads((tmp_path / "trace-0.json").read_text())
    names = [event["name"] for event in trace["traceEvents"]]
    steps = [name for name in names if name.startswith("ProfilerStep")]
    assert len(steps) == len(PROFILED)
    assert list(tmp_path.rglob("events.out.tfevents.*"))


def test_operations_of_a_step_follow_from_the_weights():
    student, teacher = small_models()
    # The fused loss hides its products.
    stage = make_stage(small_config("distill", fused=False), student, teacher)
    batch = small_rows().batch(0, 1)
    n_tokens = batch["input_ids"].numel()

    with FlopCounterMode(display=False) as counter:
        stage(batch).total.backward()

    ours = flops_per_token(student, [teacher], teacher_forced=False) * n_tokens
    # The counter also counts attention and the recurrence.
    assert ours <= counter.get_total_flops() < 1.5 * ours


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("align", {"target": "head"}),
        ("align", {"target": "layer", "train": "mixer"}),
        ("distill", {}),
        ("long", {}),
    ],
)
def test_a_step_waits_for_the_device_once(tmp_path, monkeypatch, name, changes):
    from host_reads import counted

    reads = []
    counting = counted(loop._Training._train_step, reads)
    monkeypatch.setattr(loop._Training, "_train_step", counting)
    train(name, tmp_path, steps=2, **changes)
    assert [sum(places.values()) for places in reads] == [1, 1], reads


READS: list[Callable[[torch.Tensor], object]] = [
    lambda mask: mask[mask],
    lambda mask: mask.nonzero(),
    lambda mask: mask[0].item(),
    lambda mask: bool(mask[0]),
    lambda mask: mask.tolist(),
    lambda mask: mask.cpu(),
    lambda mask: mask.numpy(),
]


def test_the_counter_of_waits_sees_each_kind():
    from host_reads import counting_reads

    for read in READS:
        with counting_reads() as reads:
            read(torch.tensor([True, False]))
        assert sum(reads.places.values()) == 1


# The optimizer.


def test_weight_decay_is_for_matrices_only():
    stage = small_stage(small_config("distill"))
    name_of = {id(parameter): name for name, parameter in stage.named_parameters()}

    optimizer = make_adamw(stage, learning_rate=1e-3, betas=(0.9, 0.95), weight_decay=0.1)

    matrices, others = optimizer.param_groups
    assert matrices["weight_decay"] == 0.1
    assert others["weight_decay"] == 0.0
    decayed = [name_of[id(parameter)] for parameter in matrices["params"]]
    free = [name_of[id(parameter)] for parameter in others["params"]]
    assert len(decayed) + len(free) == len(name_of)
    for part in ("bias", "norm", "conv_weight", ".D", "a_proj"):
        assert any(part in name for name in free)
        assert not any(part in name for name in decayed)
    for part in ("x_proj.weight", "q_proj.weight", "o_proj.weight", "up_proj.weight"):
        assert any(part in name for name in decayed)


# gpt_neox calls every mixer `attention`.
ATTENTION = {"llama": ".self_attn.attention.", "gpt_neox": ".attention.attention."}


@pytest.mark.parametrize("family", ATTENTION)
@pytest.mark.parametrize("stopped", ["attention", "recurrent", "rest", None])
def test_attention_recurrent_heads_and_the_rest_have_learning_rates_of_their_own(
    tmp_path, family, stopped
):
    def part_of(name: str) -> str:
        if ATTENTION[family] in name:
            return "attention"
        if ".ssm." in name:
            return "recurrent"
        return "rest"

    parts = ("attention", "recurrent", "rest")
    scale = tuple(float(part != stopped) for part in parts)

    before, after = train_with_scale(family, scale, tmp_path / "scaled")

    unchanged = {name for name in before if torch.equal(before[name], after[name])}
    in_stopped_part = {name for name in before if part_of(name) == stopped}
    assert unchanged == in_stopped_part
    if stopped is None:
        # Scales of one are no scales.
        _, by_default = train_with_scale(family, None, tmp_path / "default")
        assert all(torch.equal(after[name], by_default[name]) for name in after)


def test_frozen_weights_do_not_count_when_gradients_are_clipped(tmp_path: Path) -> None:
    """A scale of 0 for all but the recurrent heads is the same as training these alone."""

    def trained(out: Path, **options: Any) -> Weights:
        teacher = make_family_model("llama", num_hidden_layers=2)
        student = random_student(teacher, k=4)
        config = small_config("distill", steps=2, clip=1e-3, **options)
        stage = make_stage(config, student, teacher, vocab_size=99)
        train_stage(stage, small_rows(), out, progress=False)
        return dict(stage.student.named_parameters())

    scaled = trained(tmp_path / "scaled", lr_scale=(0.0, 1.0, 0.0))
    alone = trained(tmp_path / "alone", lr_scale=None, train="ssm")
    for name, parameter in alone.items():
        assert torch.equal(parameter, scaled[name]), name


Weights = dict[str, torch.Tensor]


def train_with_scale(family: str, scale, out: Path) -> tuple[Weights, Weights]:
    """Return the student's parameters before and after two steps."""
    teacher = make_family_model(family, num_hidden_layers=2)
    student = random_student(teacher, k=4)
    before = {name: parameter.clone() for name, parameter in student.named_parameters()}
    config = small_config("distill", steps=2, lr_scale=scale)
    stage = make_stage(config, student, teacher, vocab_size=99)
    train_stage(stage, small_rows(), out, progress=False)
    after = {name: parameter.detach() for name, parameter in stage.student.named_parameters()}
    return before, after


def test_the_schedule_rises_stays_and_falls():
    warmup = decay = 0.1
    rates = [wsd(step, 100, warmup, decay) for step in range(100)]
    rising = [0.1 * (step + 1) for step in range(10)]
    falling = [1.0 - 0.1 * step for step in range(10)]
    assert rates[:10] == pytest.approx(rising)
    assert rates[9:91] == [1.0] * 82
    assert rates[90:] == pytest.approx(falling)

    # In floating point, 0.07 * 100 is above 7.
    assert [wsd(step, 100, 0.07, 0.0) for step in (5, 6)] == pytest.approx([6 / 7, 1.0])
    constant = [wsd(step, 3, 0.0, 0.0) for step in range(3)]
    assert constant == [1.0] * 3


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_the_schedule_of_a_short_stage_has_no_step_without_learning(steps):
    assert all(0 < wsd(step, steps, 0.1, 0.1) <= 1 for step in range(steps))
