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
    # A launched process does not have pytest's path.
    home = Path(__file__).parents[1]
    sys.path[:0] = [str(home), str(home / "kernels"), str(home / "tests")]

import torch
from messages import naming
from safetensors.torch import load_file
from training import small_run

from hybrid_distill.config import PlanConfig, RunConfig, StudentConfig
from hybrid_distill.pipeline import RunInputs
from hybrid_distill.pipeline.checks import check_student
from hybrid_distill.pipeline.paths import RunPaths
from hybrid_distill.pipeline.run import build, choose_heads, prepare, train
from hybrid_distill.plan import HeadPlan
from hybrid_distill.student import build as student_build
from hybrid_distill.teacher import TINY, load_teacher
from hybrid_distill.train.result import StageManifest
from hybrid_distill.train.sealed import CorruptCheckpoint
from hybrid_distill.train.weights import weights_hash

fitted = student_build.init_ssm


def other_bits(*args: Any) -> Any:
    """Initialize recurrent heads as another GPU does: the last bits differ."""
    changed: dict[str, Any] = {}
    for name, (tensor, used) in fitted(*args).items():
        changed[name] = (tensor * (1 + 2**-20), used)
    return changed


def run_of(out: Path, **changes: Any) -> RunConfig:
    return small_run(out, stages=(ALIGN,), **changes)


def prepared(config: RunConfig) -> RunInputs:
    inputs = RunInputs(config)
    prepare(inputs)
    return inputs


def trained(config: RunConfig) -> str:
    """Train a run; return the hash of its student."""
    inputs = prepared(config)
    return weights_hash(train(inputs, choose_heads(inputs)))


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
    inputs = prepared(config)

    def stop(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if stopped == "after building":
            patch.setattr("hybrid_distill.pipeline.run.train_stage", stop)
        else:
            # With a checkpoint of the first of two steps.
            inputs = RunInputs(config.with_stage("align", checkpoint_every=1))
            patch.setattr("hybrid_distill.train.loop._Training.finish", stop)
        with pytest.raises(KeyboardInterrupt):
            train(inputs, choose_heads(inputs))

    monkeypatch.setattr(student_build, "init_ssm", other_bits)
    _, weights = before
    assert trained(config) == weights


@pytest.mark.launched
def test_processes_that_fit_otherwise_train_one_student(before, tmp_path):
    from processes import start_two

    ended = start_two(Path(__file__), tmp_path)

    assert [process.status for process in ended] == [0, 0], ended
    hashes = {(tmp_path / f"{rank}.txt").read_text() for rank in range(2)}
    assert len(hashes) == 1
    out, _ = before
    together = build_record(tmp_path / "run")
    alone = build_record(out)
    assert together["weights"] == alone["weights"], "it is the main process's student"


def build_record(out: Path) -> dict[str, Any]:
    return json.loads((out / "build.json").read_text())


def test_the_file_holds_the_recurrent_heads_and_nothing_else(before):
    out, _ = before
    stored = load_file(out / "build.safetensors")
    assert stored
    assert all(".ssm." in name for name in stored)
    tensors = build_record(out)["tensors"]
    initialized = {tensor["name"] for tensor in tensors if tensor["action"] == "initialized"}
    assert set(stored) == initialized


@pytest.mark.parametrize("selection", ["random", "all"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_loaded_student_is_the_built_one(tmp_path, monkeypatch, selection, dtype):
    config = run_of(tmp_path / "run", plan=PlanConfig(selection, k=3))
    config = replace(config, teacher=replace(config.teacher, dtype=dtype))
    config = config.with_stage("align", precision="bf16")
    inputs = prepared(config)
    built = build(inputs, choose_heads(inputs))

    monkeypatch.setattr(student_build, "init_ssm", other_bits)
    again = RunInputs(config, inputs.teacher_and_tokenizer)
    loaded = build(again, choose_heads(again))

    assert loaded.dtype == built.dtype == getattr(torch, dtype)
    assert loaded.training == built.training
    expected = built.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_an_alignment_is_grafted_once(tmp_path, monkeypatch):
    """The recurrent heads come from the alignment's file, which is read head by head."""
    none = run_of(tmp_path / "none", plan=PlanConfig("none", k=0))
    trained(none)
    aligned = tmp_path / "none/stages/1-align"
    student = StudentConfig(d_state=4, init="teacher", aligned=aligned)
    config = replace(small_run(tmp_path / "run"), student=student, stages=(DISTILL,))
    inputs = prepared(config)
    plan = choose_heads(inputs)

    built = build(inputs, plan)

    donor, _ = trained_student(RunInputs(none))
    for mixer, source in zip(built.mixers(), donor.mixers()):
        places = [source.replaced.index(head) for head in mixer.replaced]
        assert torch.equal(mixer.ssm.D, source.ssm.D[places])

    monkeypatch.setattr(student_build, "init_ssm", other_bits)
    loaded = build(RunInputs(config), plan)
    assert weights_hash(loaded) == weights_hash(built)


UNFIT_ALIGNMENTS = {
    "a stage end to end": {"stages": (DISTILL,)},
    "another target": {"stages": (replace(ALIGN, target="mixer"),)},
    "beside a window": {"student": StudentConfig(d_state=4, init="teacher", window=8)},
    "with kept heads": {"plan": PlanConfig("random", k=3)},
}


@pytest.mark.parametrize("case", UNFIT_ALIGNMENTS)
def test_heads_that_were_aligned_to_something_else_are_refused(case, tmp_path):
    changes = {"plan": PlanConfig("none", k=0), "stages": (ALIGN,), **UNFIT_ALIGNMENTS[case]}
    donor = small_run(tmp_path / "donor", **changes)
    trained(donor)
    aligned = RunPaths(donor.out).stage_folders(donor.stages)[0]
    student = StudentConfig(d_state=4, init="teacher", aligned=aligned)
    inputs = RunInputs(small_run(tmp_path / "run", student=student))
    with pytest.raises(ValueError, match=naming(str(aligned))):
        check_student(inputs)


def test_heads_that_were_aligned_to_another_teacher_are_refused(tmp_path):
    none = run_of(tmp_path / "none", plan=PlanConfig("none", k=0))
    trained(none)
    aligned = tmp_path / "none/stages/1-align"
    teacher, tokenizer = load_teacher(TINY)
    with torch.no_grad():
        teacher.get_input_embeddings().weight.mul_(2)
    student = StudentConfig(d_state=4, init="teacher", aligned=aligned)
    config = replace(small_run(tmp_path / "run"), student=student)
    inputs = RunInputs(config, (teacher, tokenizer))
    plan = HeadPlan.none(teacher)
    with pytest.raises(ValueError, match=naming(str(aligned))):
        build(inputs, plan)


def test_another_plan_is_another_student(tmp_path):
    """A file from before is not taken for it, although it lies there."""
    inputs = prepared(run_of(tmp_path / "run"))
    build(inputs, choose_heads(inputs))
    other = build(inputs, HeadPlan.random(inputs.teacher, 5, seed=3))
    assert sum(len(mixer.kept) for mixer in other.mixers()) == 5


def test_a_damaged_student_is_refused(tmp_path):
    inputs = prepared(run_of(tmp_path / "run"))
    plan = choose_heads(inputs)
    build(inputs, plan)
    path = inputs.paths.out / "build.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CorruptCheckpoint, match=r"build\.safetensors"):
        build(inputs, plan)


def main(out: Path) -> None:
    """Train as one of two processes, the second of which computes other bits."""
    from hybrid_distill.distributed import connect, disconnect

    rank = connect().process_index
    if rank == 1:
        student_build.init_ssm = other_bits
    digest = trained(run_of(out / "run"))
    assert StageManifest.read(out / "run/stages/1-align")
    (out / f"{rank}.txt").write_text(digest)
    disconnect()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
