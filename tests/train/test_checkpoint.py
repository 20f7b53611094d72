"""A checkpoint is there whole or not at all; what is broken is named; earlier ones survive."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from messages import naming
from safetensors.torch import load_file
from training import die, killed, small_models

from hybrid_distill.train import checkpoint, sealed
from hybrid_distill.train.checkpoint import Checkpoints
from hybrid_distill.train.parallel import strategy
from hybrid_distill.train.result import (
    MANIFEST,
    WEIGHTS,
    StageManifest,
    load_stage,
    load_trained,
    save_stage,
)
from hybrid_distill.train.sealed import CorruptCheckpoint, SaveFailed
from hybrid_distill.train.weights import weights_hash


def tensors(step: int) -> dict[str, torch.Tensor]:
    return {
        "weights/a": torch.full((64, 64), float(step)),
        "optimizer/step/a": torch.tensor(step),
    }


@pytest.fixture
def checkpoints(tmp_path) -> Checkpoints:
    """Three were saved; the last two remain."""
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    for step in (4, 8, 12):
        save(checkpoints, step)
    return checkpoints


def save(checkpoints: Checkpoints, step: int) -> None:
    checkpoints.save(step, lambda: tensors(step), {"tokens": step})
    checkpoints.wait()


def newest(checkpoints: Checkpoints) -> int:
    snapshot = checkpoints.latest()
    assert snapshot is not None
    return snapshot.step


def test_what_is_saved_is_read_back_and_the_oldest_goes(checkpoints):
    assert [path.name for path in checkpoints.paths()] == ["step-00000008", "step-00000012"]
    snapshot = checkpoint.load(checkpoints.paths()[-1])
    assert snapshot.step == 12
    assert snapshot.states == [{"tokens": 12}]
    assert list(snapshot.weights) == ["a"]
    assert torch.equal(snapshot.weights["a"], tensors(12)["weights/a"])
    assert snapshot.optimizer["step/a"].dtype == torch.int64


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_shares_of_any_number_of_processes_make_the_same_tensors(tmp_path, monkeypatch, world):
    """A process of seven may have none of five rows.

    Each tensor is read whole, and by the rows of four processes.
    """

    def be(rank: int, world: int) -> None:
        for module in (strategy, checkpoint):
            monkeypatch.setattr(module, "rank_and_world", lambda: (rank, world))

    whole = {
        "weights/a": torch.randn(3, 5).t(),
        "weights/b": torch.arange(4),
        "optimizer/step/a": torch.tensor(3.0),
    }

    for rank in range(world):
        be(rank, world)
        shares: dict[str, torch.Tensor] = {}
        for name, tensor in whole.items():
            rows = strategy.own_rows(tensor)
            if rows is not None:
                shares[name] = rows
        assert not Checkpoints(tmp_path).paths(), "complete before all have written"
        Checkpoints(tmp_path)._write(tmp_path / "step-1", 1, shares, {})
    monkeypatch.undo()

    snapshot = checkpoint.load(tmp_path / "step-1")
    assert len(snapshot.states) == world
    assert torch.equal(snapshot.optimizer["step/a"], whole["optimizer/step/a"])
    for name in ("a", "b"):
        expected = whole[f"weights/{name}"]
        assert torch.equal(snapshot.weights[name], expected)
        for rank in range(4):
            be(rank, 4)
            begin, end = strategy.row_bounds(len(expected))
            assert torch.equal(snapshot.weights.rows(name, begin, end), expected[begin:end])
        monkeypatch.undo()


def test_training_continues_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    may_write = threading.Event()
    real = checkpoint.save_tensors

    def save_later(*args) -> None:
        may_write.wait(60)
        real(*args)

    monkeypatch.setattr(checkpoint, "save_tensors", save_later)

    checkpoints.save(4, lambda: tensors(4), {})
    assert checkpoints.paths() == []
    assert not checkpoints.failed()

    may_write.set()
    checkpoints.wait()
    assert newest(checkpoints) == 4


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def edit(record: Path, **changes: object) -> None:
    """Change a record as somebody would by hand."""
    content = json.loads(record.read_text())
    record.write_text(json.dumps(content | changes))


RECORD = "rank-00000-of-00001.json"
FILE = "rank-00000-of-00001.safetensors"
DAMAGE: dict[str, Callable[[Path], None]] = {
    "a flipped bit": lambda folder: flip(folder / FILE),
    "a missing file": lambda folder: (folder / FILE).unlink(),
    "a changed state": lambda folder: edit(folder / RECORD, state={"tokens": 13}),
    "a record of fewer files": lambda folder: edit(folder / RECORD, files={}),
    "a torn record": lambda folder: os.truncate(folder / RECORD, 20),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_broken_checkpoint_is_named_and_the_one_before_it_used(checkpoints, damage):
    damage(checkpoints.paths()[-1])
    with pytest.warns(UserWarning, match="step-00000012"):
        assert newest(checkpoints) == 8
    with pytest.raises(CorruptCheckpoint, match="step-00000012"):
        checkpoint.load(checkpoints.folder / "step-00000012")


def test_when_all_are_broken_it_says_so(checkpoints):
    for path in checkpoints.paths():
        flip(path / FILE)
    with pytest.raises(CorruptCheckpoint, match=r"step-00000012.*step-00000008"):
        checkpoints.latest()


@pytest.fixture
def full_disk(monkeypatch) -> Callable[[], None]:
    """Fill the disk up: from then on, it ends in the middle of any file of tensors."""
    real = safetensors.torch.save_file

    def save_file(tensors, path, **options):
        real(tensors, path, **options)
        os.truncate(path, 1000)
        raise OSError(errno.ENOSPC, "No space left on device")

    return lambda: monkeypatch.setattr(safetensors.torch, "save_file", save_file)


def test_a_full_disk_leaves_the_earlier_checkpoints(checkpoints, full_disk):
    full_disk()
    with pytest.raises(SaveFailed, match=r"step-00000016.*step-00000012"):
        save(checkpoints, 16)
    assert newest(checkpoints) == 12
    assert list(checkpoints.folder.iterdir()) == checkpoints.paths()


@pytest.mark.parametrize(
    ("module", "moment", "is_complete"),
    [
        (checkpoint, "save_tensors", False),
        (sealed, "write_json", False),
        (checkpoint, "sync", True),
        (checkpoint, "_remove", True),
    ],
)
def test_killed_at_any_moment_of_a_save(checkpoints, module, moment, is_complete):
    """``kill -9`` when this step of a save begins."""

    def action() -> None:
        setattr(module, moment, die)
        save(checkpoints, 16)

    killed(action)

    latest = newest(checkpoints)
    assert latest == (16 if is_complete else 12)

    # The next save works, and removes what the killed one left.
    checkpoints.clear(after=latest)
    save(checkpoints, 20)
    assert newest(checkpoints) == 20
    assert len(checkpoints.paths()) == 2
    assert len(list(checkpoints.folder.iterdir())) == 2


STAGE = {
    "name": "align",
    "steps": 3,
    "parent": "p" * 64,
    "data": "d",
    "seed": 0,
    "config": {"steps": 3},
}


@pytest.mark.parametrize("tied", [False, True])
def test_a_stage_is_read_back_whole(tmp_path, tied):
    student, _ = small_models(tie_word_embeddings=tied)

    saved = save_stage(tmp_path, student, **STAGE)

    assert StageManifest.read(tmp_path) == saved
    assert bool(saved.tied) == tied
    names_in_file = set(load_file(tmp_path / WEIGHTS))
    assert names_in_file | set(saved.tied) == set(student.state_dict())

    other, _ = small_models(tie_word_embeddings=tied)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert weights_hash(other) != saved.weights
    assert load_stage(tmp_path, other) == saved
    assert weights_hash(other) == saved.weights == weights_hash(student)


def test_trained_parameters_are_pages_of_the_result_and_training_leaves_it_alone(tmp_path):
    student, _ = small_models()
    saved = save_stage(tmp_path, student, **STAGE)
    other, _ = small_models()
    for parameter in other.parameters():
        parameter.data = strategy.placeholder(parameter)

    load_trained(tmp_path, other)

    assert weights_hash(other) == saved.weights
    weight = other.lm_head.weight
    assert is_mapped(weight, tmp_path / WEIGHTS)
    with torch.no_grad():
        weight.add_(1.0)
    sealed.check_files(tmp_path, saved.files)


def is_mapped(tensor: torch.Tensor, path: Path) -> bool:
    """Check whether a tensor lies in a memory-mapped file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, *_, mapped = line.split()
        begin, end = addresses.split("-")
        if mapped == str(path) and int(begin, 16) <= tensor.data_ptr() < int(end, 16):
            return True
    return False


def test_loading_takes_over_the_stored_precision_and_a_hash_depends_on_every_value(tmp_path):
    student, _ = small_models()
    saved = save_stage(tmp_path, student, **STAGE)

    other, _ = small_models()
    other.bfloat16()
    rounded = weights_hash(other)
    assert rounded != saved.weights
    other.float()
    assert weights_hash(other) == rounded, "a hash is of the values, not of their type"

    other.bfloat16()
    load_stage(tmp_path, other)
    assert weights_hash(other) == saved.weights

    with torch.no_grad():
        other.model.layers[1].self_attn.ssm.D[0] += 1e-3
    assert weights_hash(other) != saved.weights


@pytest.mark.parametrize(
    ("options", "differing"),
    [
        ({"k": 0}, "model.layers.0.self_attn.attention.k_proj.weight"),
        ({"hidden_size": 16}, "lm_head.weight"),
    ],
)
def test_another_student_is_refused(tmp_path, options, differing):
    save_stage(tmp_path, small_models()[0], **STAGE)
    with pytest.raises(ValueError, match=naming(tmp_path, differing)):
        load_stage(tmp_path, small_models(**options)[0])


def test_a_folder_without_a_finished_stage_is_refused(tmp_path):
    with pytest.raises(ValueError, match=MANIFEST):
        load_stage(tmp_path, small_models()[0])


def test_weights_that_are_not_those_of_the_manifest_are_refused(tmp_path):
    student, _ = small_models()
    save_stage(tmp_path, student, **STAGE)
    flip(tmp_path / WEIGHTS)
    with pytest.raises(CorruptCheckpoint, match=WEIGHTS):
        load_stage(tmp_path, student)
    edit(tmp_path / MANIFEST, steps=4)
    with pytest.raises(CorruptCheckpoint, match=MANIFEST):
        StageManifest.read(tmp_path)


def test_a_full_disk_at_the_end_of_a_stage_leaves_no_result(tmp_path, full_disk):
    student, _ = small_models()
    full_disk()
    with pytest.raises(SaveFailed) as failure:
        save_stage(tmp_path / "stage", student, **STAGE)
    cause = failure.value.__cause__
    assert isinstance(cause, OSError)
    assert cause.errno == errno.ENOSPC
    assert StageManifest.read(tmp_path / "stage") is None
    assert not list((tmp_path / "stage").iterdir())
