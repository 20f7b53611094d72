"""Kernels of a stage are tried before the first step, and are the same in every process."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest
import torch

if __name__ == "__main__":
    # A launched process does not have pytest's path.
    ROOT = Path(__file__).parents[2]
    sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "tests")]

from conftest import make_family_model
from hybrid_kernels import loss_choice
from messages import has_facts, logged_by
from students import mixed_student
from training import small_config, small_models, small_rows

from hybrid_distill.cli.app import exit_cleanly
from hybrid_distill.distributed import WorldError, connect
from hybrid_distill.model import convolution, decoder, kernel_choice, ssd
from hybrid_distill.model.kernel_choice import DELTA_RULE
from hybrid_distill.train import stage_kernels as module
from hybrid_distill.train.loop import train_stage
from hybrid_distill.train.stage_kernels import agree_on_kernels, difference_between, kernels_of
from hybrid_distill.train.stages import make_stage

GPU = torch.device("cuda")


def stage_of(name: str = "distill", **changes):
    return make_stage(small_config(name, **changes), *small_models(), vocab_size=99)


@pytest.fixture
def tried(monkeypatch) -> list[tuple]:
    """Kernels that are tried on a GPU that is not there; the convolution is not right."""
    asked: list[tuple] = []

    def reason(kernel, device, dtype, sizes, training, options):
        asked.append((kernel, dtype, sizes, training, dict(options)))
        return "it is off by 3" if kernel == "convolution" else None

    def reason_of_loss(device, dtype, kind, from_head):
        asked.append(("distillation loss", dtype, kind, from_head))

    monkeypatch.setattr(kernel_choice, "_reason_against", reason)
    monkeypatch.setattr(loss_choice, "reason_against", reason_of_loss)
    monkeypatch.setattr(module, "try_together", lambda device, calls: None)
    return asked


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["align", "distill", "on_policy", "long"])
def test_what_is_tried_before_training_is_what_a_step_calls(
    name: str, precision: str, tried, monkeypatch
) -> None:
    stage = stage_of(name, precision=precision)
    together: list[tuple] = []

    def note(device: torch.device, calls: list[kernel_choice.KernelCall]) -> None:
        for kernel, dtype, sizes, options in calls:
            if kernel == "distillation loss":
                together.append((kernel, dtype, options["kind"], options["from_head"]))
                continue
            others = {option: options[option] for option in options if option != "training"}
            together.append((kernel, dtype, sizes, options["training"], others))

    monkeypatch.setattr(module, "try_together", note)

    chosen = kernels_of(stage, GPU)

    # One child process has tried all of them.
    assert [trial for trial in tried if trial not in together] == []
    assert len(together) == len(tried)
    assert chosen["recurrence"] == "triton"
    assert chosen["convolution"] == "torch (it is off by 3)"
    expected_loss = None if name == "align" else "triton"
    assert chosen.get("distillation loss") == expected_loss
    assert ("decoding step" in chosen) == (name == "on_policy")

    # What a step calls.
    called: list[tuple] = []
    choose_kernel = kernel_choice.choose_implementation
    choose_loss = loss_choice.choose_implementation

    def noting(impl, kernel, x, *sizes, **options):
        called.append((kernel, x.dtype, sizes, torch.is_grad_enabled(), options))
        return choose_kernel(impl, kernel, x, *sizes, **options)

    def noting_loss(impl, device, dtype, kind, from_head):
        called.append(("distillation loss", dtype, kind, from_head))
        return choose_loss(impl, device, dtype, kind, from_head)

    for asking in (ssd, convolution):
        monkeypatch.setattr(asking, "choose_implementation", noting)
    monkeypatch.setattr(loss_choice, "choose_implementation", noting_loss)
    # Of several tokens, only a CPU drops a mask without padding.
    monkeypatch.setattr(decoder, "_marks_nothing", lambda token_mask_BL, cache: False)
    (batch,) = stage.micro_batches(small_rows().batch(0, 4), 4, [0, 1, 2, 3])
    loss = stage(batch, stage.totals(batch)).total
    loss.backward()

    for trial in tried:
        assert trial in called, f"{trial} is tried, and no step calls it"
    for call in called:
        is_of_loss = call[0] == "distillation loss"
        if not is_of_loss and not call[3]:
            # Not a call in training.
            continue
        if call[0] == "recurrence" and not call[4]["gated"]:
            # torch's own path asks once more, without the gate.
            continue
        assert call in tried, f"a step calls {call}, which is not tried"


def test_a_cpu_tries_nothing_and_reports_torch(tried, caplog) -> None:
    with caplog.at_level(logging.INFO):
        chosen = agree_on_kernels(stage_of(), torch.device("cpu"))
    assert chosen == dict.fromkeys(("recurrence", "convolution", "distillation loss"), "torch")
    assert not tried
    (record,) = logged_by(caplog, agree_on_kernels)
    assert has_facts(record.getMessage(), *chosen, "torch")


@pytest.mark.parametrize("is_right", [True, False])
def test_the_gated_delta_rule_is_tried_before_training_too(is_right: bool, monkeypatch) -> None:
    """Torch takes over with our recurrence, in float32."""
    student = mixed_student(make_family_model("llama"), recurrence="gdn")
    heads = next(iter(student.recurrent_heads()))
    asked: list[tuple] = []

    def reason(kernel, device, dtype, sizes, training, options):
        asked.append((kernel, dtype, sizes, training, dict(options)))
        return "it is off by 3" if kernel == DELTA_RULE and not is_right else None

    monkeypatch.setattr(kernel_choice, "_reason_against", reason)

    chosen = module._head_implementations(heads, GPU, torch.bfloat16)

    options = {"packed": True}
    sizes = (heads.head_dim, heads.d_state)
    in_training = True
    first = (DELTA_RULE, torch.bfloat16, sizes, in_training, options)
    assert asked[0] == first
    assert chosen["convolution"] == "triton"
    if is_right:
        assert chosen[DELTA_RULE] == "triton"
        assert "recurrence" not in chosen
    else:
        assert chosen[DELTA_RULE] == "torch (it is off by 3)"
        assert chosen["recurrence"] == "triton"
        ours = ("recurrence", torch.float32, sizes, in_training, {"gated": False, **options})
        assert asked[1] == ours

    heads.impl = "triton"
    assert module._head_implementations(heads, GPU, torch.bfloat16)[DELTA_RULE] == "torch"
    heads.impl = "torch"
    assert set(module._head_implementations(heads, GPU, torch.bfloat16).values()) == {"torch"}


def test_kernels_that_were_named_are_reported_as_such() -> None:
    stage = stage_of()
    stage.student.set_ssm_implementation("mamba_ssm")
    kernels = kernels_of(stage, GPU)
    assert kernels["recurrence"] == "mamba_ssm"
    assert kernels["convolution"] == "torch"

    stage.student.set_ssm_implementation("torch")
    assert set(kernels_of(stage, GPU).values()) == {"torch"}

    not_fused = kernels_of(stage_of(fused=False), torch.device("cpu"))
    assert not_fused["distillation loss"] == "torch (not fused)"


def test_processes_on_different_kernels_are_refused_in_one_line(monkeypatch) -> None:
    right = {"recurrence": "triton", "convolution": "triton", "distillation loss": "triton"}
    fallen = right | {"distillation loss": "torch (on cuda:2 its value is off by 3e-2)"}
    monkeypatch.setattr(module, "compute_everywhere", lambda compute: [right, right, fallen])
    with pytest.raises(WorldError) as refusal:
        agree_on_kernels(stage_of(), torch.device("cpu"))
    facts = ("distillation loss", "process 0", "process 2", "cuda:2", "--student.kernels")
    assert has_facts(str(refusal.value), *facts)
    assert "\n" not in str(refusal.value)
    # All on torch, each for its own device's reason: slow, and the same.
    chosen = [{"recurrence": "torch (on cuda:0)"}, {"recurrence": "torch (on cuda:1)"}]
    assert difference_between(chosen) == ""


def test_warnings_of_the_loss_are_shown(monkeypatch) -> None:
    """Its package is another one than ours, whose logger was never opened."""
    logger = logging.getLogger("hybrid_kernels.loss_choice")
    is_shown: list[bool] = []
    exit_cleanly(lambda: is_shown.append(logger.isEnabledFor(logging.WARNING)))
    assert is_shown == [True]


@pytest.mark.launched
def test_two_processes_on_different_kernels_end_before_training(tmp_path) -> None:
    from processes import start_two

    ended = start_two(Path(__file__), tmp_path / "stage", timeout=240.0)
    assert [process.status for process in ended] == [2, 2], ended
    errors: set[str] = set()
    for process in ended:
        errors |= {line for line in process.err.splitlines() if line.startswith("error: ")}
    (error,) = errors
    assert "process 1" in error
    assert "cuda:1" in error
    assert not (tmp_path / "stage" / "metrics.jsonl").exists()


def main() -> None:
    """Train on the launched processes, the last of which has lost a kernel."""
    state = connect()
    is_last = state.process_index == state.num_processes - 1
    loss = "torch (on cuda:1 it is off by 3e-2)" if is_last else "triton"
    module.kernels_of = lambda stage, device: {"recurrence": "triton", "distillation loss": loss}
    out = Path(sys.argv[1])
    exit_cleanly(lambda: train_stage(stage_of(), small_rows(), out, progress=False))


if __name__ == "__main__":
    main()
