"""wandb without a key or a server: a run continues, and its files hold what was logged."""

from __future__ import annotations

import importlib.util
import json
import os
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from training import small_config, small_rows, small_run, small_stage

from hybrid_distill.pipeline import RunInputs
from hybrid_distill.pipeline.run import prepare, run
from hybrid_distill.train.checkpoint import Checkpoints
from hybrid_distill.train.loop import train_stage
from hybrid_distill.train.resume import clear
from hybrid_distill.train.tracking import TrackedRun, check_trackers, log_figures

wandb = pytest.importorskip("wandb", reason="wandb is not installed")

BLOCK = 2**15
"""Bytes of a block in a ``.wandb`` file, a log of LevelDB. The file has a header of 7 bytes."""
HEADER = struct.Struct("<IHB")
"""Checksum, length and kind of a piece of a record."""
# Kinds of pieces that end a record: a whole one, and the last of several.
FULL = 1
LAST = 4


@pytest.fixture(autouse=True)
def own_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep the user's key and settings out."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_CONSOLE", "off")
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_MODE"):
        # Set first: a variable that was absent is removed again only if the test has set it.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    # A session keeps the environment of its first run; other tests may have begun one.
    wandb.teardown()
    yield
    wandb.teardown()


def records(path: Path) -> Iterator[Any]:
    """Yield the records of a ``.wandb`` file."""
    from wandb.proto.wandb_internal_pb2 import Record

    content = path.read_bytes()
    place = HEADER.size
    record = b""
    while place < len(content):
        if BLOCK - place % BLOCK < HEADER.size:
            place += BLOCK - place % BLOCK
            continue
        _, length, kind = HEADER.unpack_from(content, place)
        place += HEADER.size
        record += content[place : place + length]
        place += length
        if kind in (FULL, LAST):
            yield Record.FromString(record)
            record = b""


def logged(folder: Path) -> dict[str, dict[int, float]]:
    """Return the value by step of every number in the files of a run, by name."""
    # A run that is finished may still be in the buffers of wandb's service.
    wandb.teardown()
    values: dict[str, dict[int, float]] = {}
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for record in records(path):
            if record.WhichOneof("record_type") != "history":
                continue
            row: dict[str, float] = {}
            for item in record.history.item:
                name = item.key or "/".join(item.nested_key)
                row[name] = json.loads(item.value_json)
            step = int(row.pop("_step"))
            for name, value in row.items():
                values.setdefault(name, {})[step] = value
    return values


def test_a_run_without_a_key_is_tracked_in_files(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    out = run(small_run(tmp_path / "run", trackers=("wandb",)))
    values = logged(out)
    losses: list[float] = []
    for path in sorted(out.glob("stages/*/metrics.jsonl")):
        losses += [json.loads(line)["loss"] for line in path.open()]
    assert [*values["align/loss"].values(), *values["distill/loss"].values()] == losses
    steps: list[int] = []
    for name in ("align/loss", "distill/loss", "evaluation/perplexity"):
        steps += values[name]
    assert steps == sorted(set(steps)), "one run, whose steps continue from stage to stage"
    perplexity = json.loads((out / "evaluation.json").read_text())["perplexity"]
    assert list(values["evaluation/perplexity"].values()) == [perplexity]


def test_a_server_that_does_not_answer_stops_no_stage(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "1")
    stage = small_stage(small_config("align", steps=2))
    out = tmp_path / "stage"
    train_stage(stage, small_rows(), out, progress=False, trackers=("wandb",))
    assert "wandb sync" in caplog.text
    assert len(logged(out)["align/loss"]) == 2


def test_a_run_that_begins_again_is_another_run_of_the_tracker(tmp_path):
    config = small_run(tmp_path)
    tracked = TrackedRun(tmp_path, "name")
    prepare(RunInputs(config))
    first = tracked.id
    prepare(RunInputs(config))
    assert tracked.id == first
    prepare(RunInputs(replace(config, resume="never")))
    second = tracked.id
    assert second != first
    # Of a stage that is trained without a run.
    clear(tmp_path, Checkpoints(tmp_path / "checkpoints", 1))
    assert tracked.id != second


@pytest.mark.parametrize(("next_step", "expected"), [(0, 5), (5, 5), (6, 6)])
def test_a_later_evaluation_is_logged_after_the_steps_that_wandb_has(
    tmp_path, monkeypatch, next_step, expected
):
    steps: list[int] = []
    run_of_wandb = SimpleNamespace(step=next_step)
    tracker = SimpleNamespace(name="wandb", tracker=run_of_wandb, finish=lambda: None)
    accelerator = SimpleNamespace(
        log_with=[], trackers=[tracker], log=lambda values, step: steps.append(step)
    )
    monkeypatch.setattr(TrackedRun, "accelerator", lambda tracked, trackers: accelerator)
    log_figures(["wandb"], TrackedRun(tmp_path, "name", first_step=4), {"perplexity": 2.0})
    assert steps == [expected]


def test_a_tracker_is_requested_by_name(monkeypatch):
    with pytest.raises(ValueError, match="'mlflow'"):
        check_trackers(["mlflow"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install wandb"):
        check_trackers(["wandb"])


@pytest.mark.parametrize(("key", "mode"), [("", "offline"), ("key", None)])
def test_without_a_key_wandb_is_offline(monkeypatch, key, mode):
    monkeypatch.setenv("WANDB_API_KEY", key)
    check_trackers(["wandb"])
    assert os.environ.pop("WANDB_MODE", None) == mode
