"""A checkpoint is there whole or not at all; what is broken is named; what was saved before survives."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from training import die, killed, small_models

from hybrid_distill.train import checkpoint
from hybrid_distill.train.checkpoint import (
    Checkpoints,
    CorruptCheckpoint,
    SaveFailed,
    Sharded,
    StageManifest,
    load_stage,
    save_stage,
    weights_hash,
)


def tensors(step: int) -> dict[str, dict[str, torch.Tensor]]:
    return {"weights": {"a": torch.full((64, 64), float(step)), "b": torch.arange(3)}}


@pytest.fixture
def checkpoints(tmp_path) -> Checkpoints:
    """Three were saved; the last two remain."""
    saved = Checkpoints(tmp_path / "checkpoints")
    for step in (4, 8, 12):
        saved.save(step, tensors(step), {"tokens": step})
    return saved


def newest(checkpoints: Checkpoints) -> int:
    path = checkpoints.latest()
    assert path is not None
    return checkpoint.load(path).step


def test_what_is_saved_is_read_back_and_the_oldest_goes(checkpoints):
    assert [path.name for path in checkpoints.paths()] == ["step-00000008", "step-00000012"]
    found = checkpoint.load(checkpoints.paths()[-1])
    assert found.step == 12 and found.state == {"tokens": 12}
    assert torch.equal(found.tensors["weights"]["a"], tensors(12)["weights"]["a"])
    assert found.tensors["weights"]["b"].dtype == torch.int64


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def edit_manifest(folder: Path, **changes: object) -> None:
    """As somebody would by hand."""
    manifest = folder / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | changes))


DAMAGE: dict[str, Callable[[Path], None]] = {
    "a flipped bit": lambda folder: flip(folder / "weights.safetensors"),
    "a cut file": lambda folder: os.truncate(folder / "weights.safetensors", 100),
    "a missing file": lambda folder: (folder / "weights.safetensors").unlink(),
    "a changed state": lambda folder: (folder / "state.json").write_text('{"tokens": 13}'),
    "a manifest of another step": lambda folder: edit_manifest(folder, step=4),
    "a manifest of fewer files": lambda folder: edit_manifest(folder, files={}),
    "a torn manifest": lambda folder: os.truncate(folder / "manifest.json", 20),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_broken_checkpoint_is_named_and_the_one_before_it_used(checkpoints, damage):
    damage(checkpoints.paths()[-1])
    with pytest.warns(UserWarning, match=r"step-00000012.*Resuming from step-00000008"):
        assert newest(checkpoints) == 8
    with pytest.raises(CorruptCheckpoint, match="step-00000012"):
        checkpoint.load(checkpoints.folder / "step-00000012")


def test_when_all_are_broken_it_says_so(checkpoints):
    for path in checkpoints.paths():
        flip(path / "weights.safetensors")
    with pytest.raises(CorruptCheckpoint, match=r"no checkpoint in .* is intact.*--resume never"):
        checkpoints.latest()


def full_disk(real: Callable, after_bytes: int = 1000) -> Callable:
    def save_file(content, path, *args):
        real(content, path, *args)
        os.truncate(path, after_bytes)
        raise OSError(errno.ENOSPC, "No space left on device")

    return save_file


def test_what_is_written_tensor_by_tensor_is_what_safetensors_reads(tmp_path):
    """Odd sizes of narrow types before wide ones, in the order of the dictionary; one tensor at a time is whole."""
    kinds = (torch.int8, torch.bfloat16, torch.float32, torch.bool, torch.int64, torch.float64)
    content = {f"{i}": torch.arange(2 * i + 1).to(kind) for i, kind in enumerate(kinds)}
    content |= {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 4), "rows": torch.randn(4, 3).t()}
    asked = []

    def whole() -> torch.Tensor:
        asked.append("sharded")
        return torch.full((3, 2), 7.0)

    sharded = Sharded((3, 2), whole)
    checkpoint.save_file({**content, "sharded": sharded}, tmp_path / "a.safetensors")
    found = load_file(tmp_path / "a.safetensors")
    assert found.keys() == {*content, "sharded"} and asked == ["sharded"]
    for name, tensor in {**content, "sharded": torch.full((3, 2), 7.0)}.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    checkpoint.gather({"weights": {**content, "sharded": sharded}})
    assert asked == ["sharded"] * 2


def test_a_full_disk_leaves_the_earlier_checkpoints(checkpoints, monkeypatch):
    monkeypatch.setattr(checkpoint, "save_file", full_disk(checkpoint.save_file))
    with pytest.raises(SaveFailed, match=r"cannot save .*step-00000016 .*No space left.*step-00000012"):
        checkpoints.save(16, tensors(16), {})
    assert newest(checkpoints) == 12
    assert [p.name for p in checkpoints.folder.iterdir() if p.name.startswith(".")] == []


@pytest.mark.parametrize("moment", ["save_file", "write_json", "file_hash", "sync", "_remove"])
def test_killed_at_any_moment_of_a_save(checkpoints, moment):
    """``kill -9`` when this step of a save begins."""

    def save() -> None:
        setattr(checkpoint, moment, die)
        checkpoints.save(16, tensors(16), {"tokens": 16})

    killed(save)
    assert newest(checkpoints) in (12, 16)
    checkpoints.save(20, tensors(20), {})
    assert newest(checkpoints) == 20
    assert len(checkpoints.paths()) == 2 and not list(checkpoints.folder.glob(".*"))


RECORD = {"name": "align", "steps": 3, "parent": "p" * 64, "data": "d", "seed": 0, "config": {"steps": 3}}


@pytest.mark.parametrize("tied", [False, True])
def test_a_stage_is_read_back_whole(tmp_path, tied):
    student, _ = small_models(tie_word_embeddings=tied)
    saved = save_stage(tmp_path, student, **RECORD)
    assert StageManifest.read(tmp_path) == saved
    assert set(load_file(tmp_path / "model.safetensors")) | set(saved.tied) == set(student.state_dict())
    assert bool(saved.tied) == tied
    other, _ = small_models(tie_word_embeddings=tied)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert weights_hash(other) != saved.weights
    assert load_stage(tmp_path, other) == saved
    assert weights_hash(other) == saved.weights == weights_hash(student)


def test_loading_takes_over_the_stored_precision(tmp_path):
    student, _ = small_models()
    saved = save_stage(tmp_path, student, **RECORD)
    other = small_models()[0].bfloat16()
    load_stage(tmp_path, other)
    assert weights_hash(other) == saved.weights


def test_a_hash_does_not_depend_on_precision_but_on_every_value():
    student, _ = small_models()
    student.bfloat16()
    before = weights_hash(student)
    assert weights_hash(student.float()) == before
    with torch.no_grad():
        student.model.layers[1].self_attn.ssm.D[0] += 1e-3
    assert weights_hash(student) != before


def test_another_student_is_refused(tmp_path):
    save_stage(tmp_path, small_models()[0], **RECORD)
    with pytest.raises(ValueError, match="another student"):
        load_stage(tmp_path, small_models(k=0)[0])
    with pytest.raises(ValueError, match=r"another student: .* of shape"):
        load_stage(tmp_path, small_models(hidden_size=16)[0])


def test_a_folder_without_a_finished_stage_is_refused(tmp_path):
    assert StageManifest.read(tmp_path) is None
    with pytest.raises(ValueError, match="does not hold a finished stage"):
        load_stage(tmp_path, small_models()[0])


def test_weights_that_are_not_those_of_the_manifest_are_refused(tmp_path):
    student, _ = small_models()
    save_stage(tmp_path, student, **RECORD)
    flip(tmp_path / "model.safetensors")
    with pytest.raises(CorruptCheckpoint, match=r"model.safetensors is corrupt"):
        load_stage(tmp_path, student)
    edit_manifest(tmp_path, steps=4)
    with pytest.raises(CorruptCheckpoint, match=r"manifest.json was changed .*; undo that, or delete"):
        StageManifest.read(tmp_path)
    checkpoint.write_manifest(tmp_path, {"format": checkpoint.STAGE_FORMAT, "name": "align"})
    with pytest.raises(CorruptCheckpoint, match="is not the manifest of a stage"):
        StageManifest.read(tmp_path)


def test_a_full_disk_at_the_end_of_a_stage_leaves_no_result(tmp_path, monkeypatch):
    student, _ = small_models()
    monkeypatch.setattr(checkpoint, "save_file", full_disk(checkpoint.save_file))
    with pytest.raises(SaveFailed, match="No space left"):
        save_stage(tmp_path, student, **RECORD)
    assert StageManifest.read(tmp_path) is None and not list(tmp_path.iterdir())
