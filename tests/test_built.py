"""A student is built once: processes and later starts that would compute other bits load it.

This file is also the program that each of two processes runs: ``test_built.py OUT``.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from training import ALIGN, DISTILL

from hybrid_distill.pipeline import trained_student

if __name__ == "__main__":
    home = Path(__file__).parents[1]
    sys.path[:0] = [str(home), str(home / "kernels"), str(home / "tests")]

import torch
from training import small_run

from hybrid_distill.config import PlanConfig, RunConfig, StudentConfig
from hybrid_distill.pipeline import RunInputs
from hybrid_distill.pipeline.run import build, choose_heads, prepare, train
from hybrid_distill.plan import HeadPlan
from hybrid_distill.student import build as student_build
from hybrid_distill.train.checkpoint import CorruptCheckpoint, StageManifest, weights_hash

fitted = student_build.init_ssm


def other_bits(*args: Any) -> Any:
    """Initialize recurrent heads as another GPU does: the last bits differ."""
    tensors = fitted(*args)
    return {name: (tensor * (1 + 2**-20), used) for name, (tensor, used) in tensors.items()}


def run_of(out: Path, **changes: Any) -> RunConfig:
    return small_run(out, stages=(ALIGN,), **changes)


def trained(config: RunConfig) -> str:
    """Train a run; the hash of its student."""
    this = RunInputs(config)
    prepare(this)
    return weights_hash(train(this, choose_heads(this)))


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run's folder, and the hash of its student."""
    out = tmp_path_factory.mktemp("before") / "run"
    return out, trained(run_of(out))


def test_other_bits_are_other_weights(before, tmp_path, monkeypatch):
    """Otherwise the tests below would prove nothing."""
    monkeypatch.setattr(student_build, "init_ssm", other_bits)
    assert trained(run_of(tmp_path / "run")) != before[1]


@pytest.mark.parametrize("stopped", ["after building", "while aligning"])
def test_a_later_start_that_fits_otherwise_goes_on(before, tmp_path, monkeypatch, stopped):
    config = run_of(tmp_path / "run")
    this = RunInputs(config)
    prepare(this)

    def stop(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if stopped == "after building":
            patch.setattr("hybrid_distill.pipeline.run.train_stage", stop)
        else:
            # With a checkpoint of the first of two steps.
            this = RunInputs(config.with_stage("align", checkpoint_every=1))
            patch.setattr("hybrid_distill.train.loop._Training.finish", stop)
        with pytest.raises(KeyboardInterrupt):
            train(this, choose_heads(this))
    monkeypatch.setattr(student_build, "init_ssm", other_bits)
    assert trained(config) == before[1]


@pytest.mark.launched
def test_processes_that_fit_otherwise_train_one_student(before, tmp_path):
    from processes import start_two

    ended = start_two(Path(__file__), tmp_path)
    assert [process.status for process in ended] == [0, 0], ended
    hashes = {(tmp_path / f"{rank}.txt").read_text() for rank in range(2)}
    assert len(hashes) == 1
    record = json.loads((tmp_path / "run" / "build.json").read_text())
    alone = json.loads((before[0] / "build.json").read_text())
    assert record["weights"] == alone["weights"], "it is the main process's student"


def test_the_file_holds_the_recurrent_heads_and_nothing_else(before):
    from safetensors.torch import load_file

    stored = load_file(before[0] / "build.safetensors")
    assert stored and all(".ssm." in name for name in stored)
    sources = json.loads((before[0] / "build.json").read_text())["tensors"]
    assert set(stored) == {
        tensor["name"] for tensor in sources if tensor["action"] == "initialized"
    }


@pytest.mark.parametrize("keep", ["some", "all"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_loaded_student_is_the_built_one(tmp_path, monkeypatch, keep, dtype):
    config = run_of(tmp_path / "run")
    config = replace(config, teacher=replace(config.teacher, dtype=dtype))
    config = config.with_stage("align", precision="bf16")
    plan = PlanConfig("all") if keep == "all" else config.plan
    config = replace(config, plan=plan)
    this = RunInputs(config)
    prepare(this)
    built = build(this, choose_heads(this))
    monkeypatch.setattr(student_build, "init_ssm", other_bits)
    loaded = build(RunInputs(config, this.teacher_and_tokenizer), choose_heads(this))
    assert loaded.dtype == built.dtype == getattr(torch, dtype)
    assert loaded.training == built.training
    theirs = built.state_dict()
    assert loaded.state_dict().keys() == theirs.keys()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, theirs[name]), name


def test_an_alignment_is_grafted_once(before, tmp_path, monkeypatch):
    """The recurrent heads come from the alignment's file, which is read head by head."""
    none = run_of(tmp_path / "none", plan=PlanConfig("none", k=0))
    trained(none)
    aligned = tmp_path / "none/stages/1-align"
    student = StudentConfig(d_state=4, init="teacher", aligned=aligned)
    config = replace(small_run(tmp_path / "run"), student=student, stages=(DISTILL,))
    this = RunInputs(config)
    prepare(this)
    built = build(this, choose_heads(this))
    donor = trained_student(RunInputs(none))[0]
    for mixer, source in zip(built.mixers(), donor.mixers()):
        for place, head in enumerate(mixer.recurrent):
            assert torch.equal(
                mixer.ssm.D[place], source.ssm.D[source.recurrent.index(head)]
            )
    monkeypatch.setattr(student_build, "init_ssm", other_bits)
    assert weights_hash(build(RunInputs(config), choose_heads(this))) == weights_hash(built)


def test_another_plan_is_another_student(tmp_path):
    """A file from before is not taken for it, although it lies there."""
    config = run_of(tmp_path / "run")
    this = RunInputs(config)
    prepare(this)
    build(this, choose_heads(this))
    other = HeadPlan.random(this.teacher, 5, seed=3)
    assert sum(len(mixer.kept) for mixer in build(this, other).mixers()) == 5


def test_a_damaged_student_is_refused(tmp_path):
    config = run_of(tmp_path / "run")
    this = RunInputs(config)
    prepare(this)
    plan = choose_heads(this)
    build(this, plan)
    path = tmp_path / "run" / "build.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptCheckpoint, match=r"build\.safetensors"):
        build(this, plan)


def main(out: Path) -> None:
    """Train as one of two processes, the second of which computes other bits."""
    from hybrid_distill.distributed import connect, disconnect

    rank = connect().process_index
    if rank == 1:
        build.init_ssm = other_bits  # type: ignore[assignment]
    digest = trained(run_of(out / "run"))
    assert StageManifest.read(out / "run/stages/1-align")
    (out / f"{rank}.txt").write_text(digest)
    disconnect()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
