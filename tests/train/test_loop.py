"""A stage gives the same weights however it was cut up: in micro-batches, by interruptions, by kill -9."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import make_family_model
from torch.utils.flop_counter import FlopCounterMode
from training import StoppingRows, WrappedRows, die, killed, small_config, small_models, small_rows, small_stage

from hybrid_distill.plan import HeadPlan
from hybrid_distill.student.build import build_student
from hybrid_distill.train import checkpoint, loop, resume, tracking
from hybrid_distill.train.checkpoint import StageManifest, weights_hash
from hybrid_distill.train.loop import Diverged, Interrupted, StageParentError, train_stage
from hybrid_distill.train.meter import flops_per_token
from hybrid_distill.train.optimizer import make_adamw, wsd
from hybrid_distill.train.profiling import PROFILED
from hybrid_distill.train.spikes import WINDOW, SpikeDetector
from hybrid_distill.train.stages import make_stage

NAMES = ("align", "distill")


def train(name: str, out: Path, rows=None, **changes) -> StageManifest:
    """Train the small stage of this name from the beginning, or from what is in ``out``."""
    options = {key: changes.pop(key) for key in ("resume", "seed", "parent_hash") if key in changes}
    config = small_config(name, **changes)
    return train_stage(small_stage(config), rows or small_rows(), out, progress=False, **options)


def metrics(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def losses(out: Path) -> list[tuple[int, float, float]]:
    return [(line["step"], line["loss"], line["grad_norm"]) for line in metrics(out)]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> dict[str, tuple[StageManifest, list]]:
    """Manifest and losses of runs that nothing disturbed."""
    torch.set_num_threads(1)
    found = {}
    for name in NAMES:
        out = tmp_path_factory.mktemp(name)
        found[name] = train(name, out), losses(out)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_stage_lowers_its_loss_and_leaves_its_result(uninterrupted, tmp_path, name):
    config = small_config(name)
    stage = small_stage(config)
    manifest = train_stage(stage, small_rows(), tmp_path, progress=False)
    curve = [loss for _, loss, _ in losses(tmp_path)]
    assert curve[-1] < 0.95 * curve[0]
    assert manifest.finished and manifest.steps == config.steps
    assert manifest.weights == weights_hash(stage.student) != manifest.parent
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "manifest.json", "metrics.jsonl", "model.safetensors",
    ]  # fmt: skip
    assert (manifest, losses(tmp_path)) == uninterrupted[name], "the same seed, the same everything"


def test_every_line_of_the_metrics_says_what_happened(tmp_path):
    rows = small_rows()
    train("align", tmp_path, rows, log_every=5)
    lines = metrics(tmp_path)
    assert [line["step"] for line in lines] == [1, 5, 10, 12]
    tokens = [int(rows.batch(step, 8)["mask"].sum()) for step in range(12)]
    for line in lines:
        assert set(line) == {
            "step", "loss", "per_layer", "lr", "grad_norm", "tokens", "tokens_per_s", "data_wait", "memory_bytes",
            "seconds",
        }  # fmt: skip
        assert 0 <= line["data_wait"] < 1 and line["memory_bytes"] > 2**20
        assert line["loss"] == pytest.approx(sum(line["per_layer"].values()), rel=1e-5)
        assert line["tokens"] == sum(tokens[: line["step"]])
        assert line["lr"] == 3e-3 * wsd(line["step"] - 1, 12, 0.1, 0.1)


@pytest.mark.parametrize(
    ("name", "numbers"),
    [("align", [signal.SIGINT]), ("distill", [signal.SIGUSR1]), ("align", [signal.SIGTERM, signal.SIGTERM])],
)
def test_a_signal_saves_and_the_same_command_goes_on(uninterrupted, tmp_path, name, numbers):
    """One that comes twice is one request: torchrun passes on what SLURM or a terminal has sent to all processes."""
    rows = StoppingRows(small_rows(), 6, lambda: [os.kill(os.getpid(), number) for number in numbers])
    handler = signal.getsignal(numbers[0])
    with pytest.raises(Interrupted, match=r"stopped at step 7 of 12 .*step-00000007"):
        train(name, tmp_path, rows)
    assert signal.getsignal(numbers[0]) == handler
    assert (train(name, tmp_path), losses(tmp_path)) == uninterrupted[name]


def test_a_second_request_that_comes_later_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(resume, "SAME_REQUEST_S", 0.0)

    def twice() -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            train("align", tmp_path, StoppingRows(small_rows(), 6, twice))
    finally:
        signal.signal(signal.SIGINT, before)


def test_text_that_the_student_writes_is_the_same_after_an_interruption(tmp_path):
    whole = train("on_policy", tmp_path / "whole")
    with pytest.raises(Interrupted):
        train("on_policy", tmp_path / "cut", StoppingRows(small_rows(), 6))
    assert train("on_policy", tmp_path / "cut") == whole
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")


@pytest.mark.parametrize("moment", ["step", "result"])
def test_a_signal_at_the_end_finishes_the_stage_and_stops_then(uninterrupted, tmp_path, monkeypatch, moment):
    """In the last step, and while the result is written."""
    if moment == "step":
        rows = StoppingRows(small_rows(), 11)
    else:
        rows, save = small_rows(), checkpoint.save_stage

        def save_and_stop(*args, **kwargs):
            os.kill(os.getpid(), signal.SIGTERM)
            return save(*args, **kwargs)

        monkeypatch.setattr(checkpoint, "save_stage", save_and_stop)
    with pytest.raises(Interrupted, match=f"align is finished and saved in {tmp_path}; run the same command"):
        train("align", tmp_path, rows)
    assert (StageManifest.read(tmp_path), losses(tmp_path)) == uninterrupted["align"]
    assert train("align", tmp_path) == uninterrupted["align"][0]


@pytest.mark.parametrize(("name", "step"), [("align", 0), ("distill", 7)])
def test_killed_between_steps_and_resumed_gives_the_same_weights(uninterrupted, tmp_path, name, step):
    killed(lambda: train(name, tmp_path, StoppingRows(small_rows(), step, die)))
    assert (train(name, tmp_path), losses(tmp_path)) == uninterrupted[name]


def test_killed_after_the_weights_of_the_result_before_the_manifest_that_makes_them_count(uninterrupted, tmp_path):
    def action() -> None:
        real = checkpoint.save_stage

        def save_stage(*args, **kwargs):
            checkpoint.write_json = die
            return real(*args, **kwargs)

        checkpoint.save_stage = save_stage
        train("align", tmp_path)

    killed(action)
    assert StageManifest.read(tmp_path) is None
    assert (train("align", tmp_path), losses(tmp_path)) == uninterrupted["align"]


def test_a_resumed_run_may_log_and_save_more_often_but_not_train_differently(uninterrupted, tmp_path):
    with pytest.raises(Interrupted):
        train("align", tmp_path, StoppingRows(small_rows(), 6))
    with pytest.raises(ValueError, match=r"other settings: learning_rate \(0.003 there, 0.1 here\)"):
        train("align", tmp_path, learning_rate=0.1)
    with pytest.raises(ValueError, match="other settings: seed"):
        train("align", tmp_path, seed=1)
    with pytest.raises(ValueError, match="other settings: data"):
        train("align", tmp_path, small_rows(seq_len=8))
    manifest = train("align", tmp_path, checkpoint_every=3, log_every=2)
    assert manifest.weights == uninterrupted["align"][0].weights


def test_a_finished_stage_is_loaded_not_run_again(uninterrupted, tmp_path, monkeypatch):
    manifest = train("align", tmp_path)
    monkeypatch.setattr(loop._Training, "run", pytest.fail)
    stage = small_stage(small_config("align"))
    assert train_stage(stage, small_rows(), tmp_path, progress=False) == manifest
    assert weights_hash(stage.student) == manifest.weights
    with pytest.raises(ValueError, match="other settings"):
        train("align", tmp_path, steps=13)


def test_resume_never_begins_again(uninterrupted, tmp_path):
    train("align", tmp_path, learning_rate=1e-4)
    with pytest.raises(Interrupted):
        train("align", tmp_path, StoppingRows(small_rows(), 6), resume="never", learning_rate=1e-4)
    assert (train("align", tmp_path, resume="never"), losses(tmp_path)) == uninterrupted["align"]


def test_stages_follow_each_other_by_hash(tmp_path):
    student, teacher = small_models()
    fresh = weights_hash(student)
    aligned = train_stage(make_stage(small_config("align"), student, teacher), small_rows(), tmp_path, progress=False)
    with pytest.raises(StageParentError, match=f"weights {aligned.weights[:16]}, but the student has {fresh[:16]}"):
        train("distill", tmp_path / "2-distill", parent_hash=aligned.weights)
    assert not (tmp_path / "2-distill").exists()
    stage = make_stage(small_config("distill", steps=1), student, teacher, vocab_size=99)
    distilled = train_stage(stage, small_rows(), tmp_path / "2-distill", parent_hash=aligned.weights, progress=False)
    assert distilled.parent == aligned.weights


@pytest.mark.parametrize("finished", [True, False])
def test_a_stage_that_came_from_another_parent_is_refused(tmp_path, finished):
    with nullcontext() if finished else pytest.raises(Interrupted):
        train("distill", tmp_path, StoppingRows(small_rows(), -1 if finished else 1), steps=3)
    student, teacher = small_models()
    with torch.no_grad():
        student.mixers()[0].ssm.D.add_(1.0)
    with pytest.raises(StageParentError) as caught:
        train_stage(make_stage(small_config("distill", steps=3), student, teacher), small_rows(), tmp_path)
    for model in (small_models()[0], student):
        assert weights_hash(model)[:16] in str(caught.value)


def test_a_loss_that_is_not_finite_names_step_rows_and_layer(tmp_path):
    stage = small_stage(small_config("align"))

    def spoil() -> None:
        with torch.no_grad():
            stage.student.mixers()[1].ssm.D[0] = float("nan")

    with pytest.raises(Diverged, match=r"step 7: loss nan.* in layer.1, on rows 48 to 55"):
        train_stage(stage, StoppingRows(small_rows(), 6, spoil), tmp_path, progress=False)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000004"]


class SpoiltRows(WrappedRows):
    """Rows whose batch at some steps breaks the loss."""

    def __init__(self, rows, steps: set[int], stage) -> None:
        super().__init__(rows)
        self.steps, self.step = steps, -1
        for model in (stage.student, stage.teacher):
            model.get_input_embeddings().register_forward_hook(self._spoil)

    def _spoil(self, module, args, output):
        return output * float("nan") if self.step in self.steps else output

    def batch(self, step: int, *args):
        self.step = step
        return self.rows.batch(step, *args)


def test_a_bad_batch_can_be_left_out_but_not_too_many_in_a_row(tmp_path):
    config = small_config("distill", on_divergence="skip", max_skips=2)
    stage = small_stage(config)
    train_stage(stage, SpoiltRows(small_rows(), {4, 5, 9}, stage), tmp_path, progress=False)
    lines = metrics(tmp_path)
    assert [line["step"] for line in lines if "skipped" in line] == [5, 6, 10]
    assert lines[4]["skipped"].startswith("loss nan") and lines[4]["loss"] is None
    good = [line["loss"] for line in lines if "skipped" not in line]
    assert good[-1] < good[0]
    assert all(torch.isfinite(p).all() for p in stage.student.parameters())
    stage = small_stage(config)
    with pytest.raises(Diverged, match="step 7: loss nan"):
        train_stage(stage, SpoiltRows(small_rows(), {4, 5, 6}, stage), tmp_path / "more", progress=False)


def test_a_loss_far_above_the_usual_is_a_divergence():
    spikes = SpikeDetector(5.0)
    assert spikes.reason(90.0, 1.0, {}) is None, "nothing is usual yet"
    for _ in range(WINDOW):
        assert spikes.reason(2.0, 1.0, {"layer.0": 0.5, "layer.1": 1.5}) is None
    assert spikes.reason(9.9, 1.0, {}) is None
    again = SpikeDetector(5.0)
    again.load_state_dict(json.loads(json.dumps(spikes.state_dict())))
    for one in (spikes, again):
        assert "5 times the usual 2, highest in layer.1" in one.reason(10.1, 1.0, {"layer.0": 1, "layer.1": 9})


def test_a_trace_and_a_tracker_are_written_when_asked_for(tmp_path):
    options = {"progress": False, "profile": True, "trackers": ("tensorboard",)}
    train_stage(small_stage(small_config("align")), small_rows(), tmp_path, **options)
    trace = json.loads((tmp_path / "trace-0.json").read_text())
    assert sum(event["name"].startswith("ProfilerStep") for event in trace["traceEvents"]) == len(PROFILED)
    assert list(tmp_path.rglob("events.out.tfevents.*"))


def test_the_evaluation_is_logged_after_the_last_step(tmp_path, monkeypatch):
    logged = []
    accelerator = SimpleNamespace(log_with=[], trackers=[], log=lambda values, step: logged.append((values, step)))
    monkeypatch.setattr(tracking, "make_accelerator", lambda **_: accelerator)
    tracking.log_figures(["wandb"], tracking.TrackedRun(tmp_path, "run", first_step=7), {"perplexity": 3.0})
    assert logged == [({"evaluation/perplexity": 3.0}, 8)]


def test_operations_of_a_step_follow_from_the_weights():
    student, teacher = small_models()
    stage = make_stage(small_config("distill", fused=False), student, teacher)  # the fused loss hides its products
    batch = small_rows().batch(0, 1)
    n_tokens = batch["input_ids"].numel()
    with FlopCounterMode(display=False) as counter:
        stage(batch).total.backward()
    ours = flops_per_token(student, [teacher], teacher_forced=False) * n_tokens
    assert ours <= counter.get_total_flops() < 1.5 * ours  # it also counts attention and the recurrence


def test_a_bfloat16_teacher_needs_bf16_compute(tmp_path):
    student, teacher = small_models()
    stage = make_stage(small_config("align"), student.bfloat16(), teacher.bfloat16())
    with pytest.raises(ValueError, match="use precision bf16"):
        train_stage(stage, small_rows(), tmp_path, progress=False)


def test_weight_decay_is_for_matrices_only():
    stage = small_stage(small_config("distill"))
    optimizer = make_adamw(stage, learning_rate=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    names = {id(p): name for name, p in stage.named_parameters()}
    decayed, free = ([names[id(p)] for p in group["params"]] for group in optimizer.param_groups)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert len(decayed) + len(free) == len(names)
    for part in ("bias", "norm", "conv_weight", ".D", "a_proj"):
        assert any(part in name for name in free) and not any(part in name for name in decayed)
    for part in ("x_proj.weight", "q_proj.weight", "o_proj.weight", "up_proj.weight"):
        assert any(part in name for name in decayed)


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])  # gpt_neox calls every mixer `attention`
def test_attention_recurrent_heads_and_the_rest_have_learning_rates_of_their_own(tmp_path, family):
    trained = {}
    for scale in (None, (1.0, 1.0, 1.0), (0.0, 1.0, 1.0), (1.0, 0.0, 1.0), (1.0, 1.0, 0.0)):
        teacher = make_family_model(family, num_hidden_layers=2)
        student, _ = build_student(teacher, HeadPlan.random(teacher.config, 4, seed=1), d_state=4)
        start = {name: p.clone() for name, p in student.named_parameters()}
        stage = make_stage(small_config("distill", steps=2, lr_scale=scale), student, teacher, vocab_size=99)
        train_stage(stage, small_rows(), tmp_path / str(scale), progress=False)
        trained[scale] = {name: p.detach() for name, p in stage.student.named_parameters()}
        if scale not in (None, (1.0, 1.0, 1.0)):
            parts = [".attention.attention." if family == "gpt_neox" else ".self_attn.attention.", ".ssm."]
            number = {name: next((n for n, part in enumerate(parts) if part in name), 2) for name in start}
            still = {name for name, p in trained[scale].items() if torch.equal(p, start[name])}
            assert still == {name for name in start if scale[number[name]] == 0}
    assert all(torch.equal(p, trained[1.0, 1.0, 1.0][name]) for name, p in trained[None].items())


def test_the_schedule_rises_stays_and_falls():
    rates = [wsd(step, 100, 0.1, 0.1) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert rates[9:91] == [1.0] * 82
    assert rates[90:] == pytest.approx([1.0 - 0.1 * i for i in range(10)])
    assert [wsd(step, 3, 0.0, 0.0) for step in range(3)] == [1.0] * 3
    assert all(0 < wsd(step, n, 0.1, 0.1) <= 1 for n in (1, 2, 7) for step in range(n))


def test_batches_made_ahead_by_other_processes_train_the_same(uninterrupted, tmp_path):
    """A signal to all processes, as SLURM sends it, stops the loop alone: it saves, and its workers work until then."""
    trainer = os.getpid()

    def to_all() -> None:
        for process in (os.getpid(), trainer):
            os.kill(process, signal.SIGTERM)

    with pytest.raises(Interrupted):
        train("align", tmp_path, StoppingRows(small_rows(), 9, to_all), data_workers=1)
    assert 0 < losses(tmp_path)[-1][0] < 12 and not multiprocessing.active_children()
    whole, curve = uninterrupted["align"]
    assert (train("align", tmp_path, data_workers=2).weights, losses(tmp_path)) == (whole.weights, curve)

    def fail() -> None:
        raise ValueError("the disk is gone")

    with pytest.raises(ValueError, match="the disk is gone"):
        train("align", tmp_path / "fails", StoppingRows(small_rows(), 3, fail), data_workers=1)
    assert not multiprocessing.active_children(), "Python would wait for them when it exits"


@pytest.mark.parametrize(
    ("name", "changes"),
    [("align", {"target": "head"}), ("align", {"target": "layer", "train": "mixer"}), ("distill", {}), ("long", {})],
)
def test_a_step_waits_for_the_device_once(tmp_path, monkeypatch, name, changes):
    from host_reads import counted, counting_reads

    with counting_reads() as reads:  # the counter sees each kind
        mask = torch.tensor([True, False])
        mask[mask], mask.nonzero(), mask[0].item(), bool(mask[0]), mask.tolist(), mask.cpu(), mask.numpy()
    assert sum(reads.places.values()) == 7
    found = []
    monkeypatch.setattr(loop._Training, "_train_step", counted(loop._Training._train_step, found))
    train(name, tmp_path, steps=2, **changes)
    assert [sum(places.values()) for places in found] == [1, 1], found
