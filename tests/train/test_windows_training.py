"""Students with windows train like others: what they compare, on one process and on two.

This file is also the program of each process: ``test_windows_training.py OUT``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

if __name__ == "__main__":
    # A launched process does not have pytest's path.
    home = Path(__file__).parents[2]
    sys.path[:0] = [str(home), str(home / "kernels"), str(home / "tests")]

import torch
from conftest import make_family_model
from messages import naming
from torch.testing import assert_close
from training import StoppingRows, losses, small_config, small_models, small_rows

from hybrid_distill.data import Rows
from hybrid_distill.distributed import connect, disconnect
from hybrid_distill.model import HybridForCausalLM
from hybrid_distill.plan import HeadPlan
from hybrid_distill.student.build import build_student
from hybrid_distill.student.grafting import graft_recurrent_heads
from hybrid_distill.teacher import trace_mixers
from hybrid_distill.train.align import LayerAlignment
from hybrid_distill.train.config import Align, AlignMatrix, Distill
from hybrid_distill.train.end_to_end import EndToEnd
from hybrid_distill.train.loop import train_stage
from hybrid_distill.train.stage import teacher_hidden
from hybrid_distill.train.stages import make_stage
from hybrid_distill.train.stop import Interrupted

WINDOW = {"window": 5, "sinks": 2}
STAGES = ("align", "distill", "long")


def windowed_models(d_state: int = 4) -> tuple[HybridForCausalLM, torch.nn.Module]:
    """`small_models` whose replaced heads add a window and a state, both far from zero."""
    _, teacher = small_models()
    plan = HeadPlan.random(teacher.config, 2, seed=1)
    student, _ = build_student(teacher, plan, d_state=d_state, **WINDOW)
    with torch.no_grad():
        for heads in student.recurrent_heads():
            heads.z_proj.bias.fill_(0.5)
    return student, teacher


@pytest.mark.parametrize(
    ("target", "train"),
    [
        ("head", "ssm"),
        ("mixer", "ssm"),
        ("mixer", "mixer"),
        ("layer", "ssm"),
        ("layer", "mixer"),
    ],
)
def test_alignment_compares_both_parts_with_the_teacher(target: str, train: str) -> None:
    student, teacher = windowed_models()
    batch = small_rows().batch(0, 4)
    stage = LayerAlignment(student, teacher, Align(target=target, train=train))

    per_layer = stage(batch).per_layer

    with torch.no_grad(), trace_mixers(teacher) as calls:
        teacher_hidden(teacher, batch)
    for layer, call in calls.items():
        mixer = student.mixers()[layer]
        inputs = call.kwargs | {"seq_idx": batch["seq_idx"]}
        with torch.no_grad():
            heads_BLHP = mixer.heads(*call.args, **inputs)
        if target == "head":
            error_BLHP = heads_BLHP - call.heads_BLHP
            error = error_BLHP[:, :, list(mixer.replaced)]
        elif target == "mixer":
            out_BLD = mixer.o_proj(heads_BLHP.flatten(-2))
            error = out_BLD - call.output[0]
        else:
            # test_stages.py recomputes whole layers.
            continue
        error_norms = error.norm(dim=-1)
        expected = error_norms[batch["mask"]].mean()
        assert_close(per_layer[f"layer.{layer}"], expected, rtol=1e-4, atol=1e-6)

    stage(batch).total.backward()
    trained = {name for name, p in stage.named_parameters() if p.grad is not None}
    trains_states = any("ssm" in name for name in trained)
    trains_windows = any("q_proj" in name for name in trained)
    assert trains_states
    assert trains_windows == (train == "mixer")


def test_segments_give_the_gradients_of_whole_rows() -> None:
    batch = small_rows().batch(0, 4)

    def gradients(segment_len: int | None) -> dict[str, torch.Tensor | None]:
        student, teacher = windowed_models()
        stage = EndToEnd(student, teacher, Distill(segment_len=segment_len))
        stage(batch).total.backward()
        return {name: parameter.grad for name, parameter in student.named_parameters()}

    of_rows = gradients(segment_len=None)
    of_segments = gradients(segment_len=6)
    for name, expected in of_rows.items():
        assert_close(of_segments[name], expected, rtol=1e-4, atol=1e-6, msg=name)


def test_windows_alone_train_all_but_states() -> None:
    with pytest.raises(ValueError, match=naming("--distill.train mixer")):
        EndToEnd(*windowed_models(d_state=0), Distill(train="ssm"))

    student, teacher = windowed_models(d_state=0)
    stage = EndToEnd(student, teacher, Distill(train="mixer"))
    stage(small_rows().batch(0, 4)).total.backward()
    for mixer in student.mixers():
        assert mixer.ssm is None
        gradient = mixer.attention.q_proj.weight.grad
        assert gradient.abs().max() > 0


def test_maps_are_not_compared_with_half_of_a_head() -> None:
    student, teacher = windowed_models()
    teacher.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="window"):
        make_stage(AlignMatrix(), student, teacher, vocab_size=99)


def test_an_alignment_without_kept_heads_is_grafted() -> None:
    teacher = make_family_model("llama")
    none_kept = HeadPlan.none(teacher)
    two_kept = HeadPlan.from_pairs(teacher, [(0, 1), (2, 3)])
    options = {"d_state": 4, "init": "random", **WINDOW}
    donor, _ = build_student(teacher, none_kept, **options)
    student, _ = build_student(teacher, two_kept, seed=1, **options)

    graft_recurrent_heads(student, donor)

    for mixer, source in zip(student.mixers(), donor.mixers(), strict=True):
        own = rows_of_heads(mixer)
        theirs = rows_of_heads(source)
        assert torch.equal(own, theirs[list(mixer.replaced)])


def rows_of_heads(mixer: torch.nn.Module) -> torch.Tensor:
    """Split the weights that make B, one block for each replaced head."""
    n_heads = len(mixer.replaced)
    return mixer.ssm.b_proj.weight.unflatten(0, (n_heads, -1))


def train_three_steps(name: str, out: Path, rows: Rows) -> str:
    """Train a stage, or what is left of it; return the hash of its weights."""
    student, teacher = windowed_models()
    config = small_config(name, steps=3, micro_batch_size=2)
    stage = make_stage(config, student, teacher, vocab_size=99)
    return train_stage(stage, rows, out, progress=False).weights


@pytest.mark.parametrize("name", STAGES)
def test_an_interrupted_stage_ends_with_the_same_weights(name: str, tmp_path: Path) -> None:
    whole = train_three_steps(name, tmp_path / "whole", small_rows())

    cut = tmp_path / "cut"
    with pytest.raises(Interrupted):
        train_three_steps(name, cut, StoppingRows(small_rows(), 1))
    resumed = train_three_steps(name, cut, small_rows())

    assert resumed == whole


def train_chain(out: Path) -> None:
    """Train three steps of each stage."""
    for name in STAGES:
        train_three_steps(name, out / name, small_rows())


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("alone")
    train_chain(out)
    return out


@pytest.mark.launched
@pytest.mark.parametrize("strategy", ["zero2", "zero3", "fsdp2"])
def test_two_processes_compute_the_losses_of_one(
    alone: Path, tmp_path: Path, strategy: str
) -> None:
    from train.test_launch import FSDP_2, ZERO_2, launch, zero_3

    launchers = {
        "zero2": ZERO_2,
        "zero3": zero_3(tmp_path),
        "fsdp2": FSDP_2,
    }

    ended = launch(launchers[strategy], tmp_path, program=Path(__file__))

    assert ended.returncode == 0, ended.stderr
    for name in STAGES:
        # An alignment's loss is a share of 1, which float32 rounds to 1e-7.
        expected = pytest.approx(losses(alone / name), rel=1e-4, abs=1e-7)
        assert losses(tmp_path / name) == expected


def main(out: Path) -> None:
    torch.set_num_threads(1)
    connect()
    train_chain(out)
    disconnect()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
