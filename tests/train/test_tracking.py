"""wandb without a key or a server: a run goes on, and its files hold what was logged."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from training import small_config, small_rows, small_run, small_stage

from hybrid_distill.pipeline.run import run
from hybrid_distill.train.loop import train_stage

wandb = pytest.importorskip("wandb", reason="wandb is not installed")

BLOCK = 2**15
"""Bytes of a block in a ``.wandb`` file, which is a log of LevelDB; blocks begin anew after a header of 7 bytes."""
HEADER = struct.Struct("<IHB")
"""Checksum, length and kind of a piece of a record."""
FULL, LAST = 1, 4


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


def logged(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the step and value of every number in the files of a run, by name."""
    # A run that is finished may still be in the buffers of wandb's service.
    wandb.teardown()
    values: dict[str, list[tuple[int, float]]] = {}
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for record in records(path):
            if record.WhichOneof("record_type") != "history":
                continue
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            step = row.pop("_step")
            for name, value in row.items():
                values.setdefault(name, []).append((step, value))
    return values


def test_a_run_without_a_key_is_tracked_in_files(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    out = run(small_run(tmp_path / "run", trackers=("wandb",)))
    values = logged(out)
    lines = [json.loads(line) for path in sorted(out.glob("stages/*/metrics.jsonl")) for line in path.open()]
    losses = [line["loss"] for line in lines if line.get("loss") is not None]
    assert [value for _, value in values["align/loss"] + values["distill/loss"]] == losses
    steps = [step for name in ("align/loss", "distill/loss", "evaluation/perplexity") for step, _ in values[name]]
    assert steps == sorted(set(steps)), "one run, whose steps go on from stage to stage"
    perplexity = json.loads((out / "evaluation.json").read_text())["perplexity"]
    assert [value for _, value in values["evaluation/perplexity"]] == [perplexity]


def test_a_server_that_does_not_answer_stops_no_stage(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "1")
    stage = small_stage(small_config("align", steps=2))
    train_stage(stage, small_rows(), tmp_path / "stage", progress=False, trackers=("wandb",))
    assert "wandb sync" in caplog.text
    assert len(logged(tmp_path / "stage")["align/loss"]) == 2
