"""Sources on the hub: asked for once by one process, pinned, and read again without a network."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import huggingface_hub
import pytest
import torch
from huggingface_hub import DatasetInfo
from test_data import write_source
from test_launch import DDP, launch
from training import ALIGN, DISTILL, refusal, small_run, word_texts, word_tokenizer

from hybrid_distill.cli import prepare_data
from hybrid_distill.cli.app import run_recipe
from hybrid_distill.cli.prepare_data import PrepareJob
from hybrid_distill.config import RunConfig
from hybrid_distill.data import DataConfig, check_launch, folder, hub, open_rows
from hybrid_distill.data import config as data_config
from hybrid_distill.pipeline import RunInputs
from hybrid_distill.pipeline.run import prepare
from hybrid_distill.train.config import Distill

SOURCE = "hf:somebody/texts:small:train"
DATA = {"small/a.jsonl": "1", "small/b.jsonl": "2", "large/a.jsonl": "3"}
CARD = {"configs": [{"config_name": "small", "data_files": [{"split": "train", "path": "small/*"}]},
                    {"config_name": "large", "data_files": "large/*"}]}  # fmt: skip


class FakeHub:
    """A hub with one data set; it counts what it is asked, and can be out of reach."""

    def __init__(self, place: Path) -> None:
        self.place, self.asked, self.loaded = place, 0, list[str]()
        self.is_there, self.files, self.card, self.commit = True, {**DATA, "README.md": "0"}, CARD, "c0"

    def dataset_info(self, name: str, **_: Any) -> DatasetInfo:
        self.asked += 1
        assert name == "somebody/texts"
        siblings = [{"rfilename": file, "blobId": blob} for file, blob in self.files.items()]
        return DatasetInfo(id=name, sha=self.commit, siblings=siblings, cardData=dict(self.card))

    def load_dataset(self, name: str, config: str, *, split: str, streaming: bool, revision: str) -> Any:
        if not self.is_there:
            raise ConnectionError("no route")
        self.loaded.append(revision)
        return LOAD(str(self.place), split=split, streaming=streaming)

    def change(self, commit: str, **files: str) -> None:
        self.commit, self.files = commit, {**self.files, **files}


LOAD = datasets.load_dataset


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    write_source(tmp_path / "hub" / "a.jsonl", word_texts(60))
    found = FakeHub(tmp_path / "hub")
    monkeypatch.setattr(huggingface_hub, "dataset_info", found.dataset_info)
    monkeypatch.setattr(datasets, "load_dataset", found.load_dataset)
    monkeypatch.setattr(hub, "hub_error", lambda: None if found.is_there else "HF_HUB_OFFLINE is set")
    monkeypatch.setenv("HYBRID_DISTILL_CACHE", str(tmp_path / "cache"))
    return found


@pytest.fixture
def run(tmp_path: Path) -> RunConfig:
    data = DataConfig((SOURCE,), hub_tokens=10_000, seq_len=16)
    return small_run(
        tmp_path / "run",
        data=data,
        stages=(ALIGN, DISTILL, Distill(name="post", steps=2, batch_size=2, data=data)),
    )


def test_a_run_asks_once_for_all_its_stages_and_a_later_start_not_at_all(fake, run):
    first = RunInputs(run)
    prepare(first)
    prints = [first.rows(stage).fingerprint for stage in run.stages]
    assert fake.asked == 1 and fake.loaded == ["c0"] and len(set(prints)) == 1
    written = json.loads((run.out / "sources.json").read_text())
    assert written[SOURCE]["revision"] == "c0"
    fake.change("c1", **{"small/a.jsonl": "changed"})
    for is_there in (True, False):
        fake.is_there = is_there
        again = RunInputs(run)
        prepare(again)
        assert [again.rows(stage).fingerprint for stage in run.stages] == prints
    assert fake.asked == 1 and fake.loaded == ["c0"]
    assert json.loads((run.out / "sources.json").read_text()) == written


def test_a_run_that_was_stopped_while_it_tokenized_goes_on_at_its_commit(fake, run, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(folder, "encode", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prepare(RunInputs(run))
    fake.change("c1", **{"small/a.jsonl": "changed"})
    prepare(RunInputs(run))
    assert fake.asked == 1 and set(fake.loaded) == {"c0"}


def test_a_run_that_starts_over_reads_the_newest_commit(fake, run):
    prepare(RunInputs(run))
    fake.change("c1", **{"small/a.jsonl": "changed"})
    over = replace(run, resume="never")
    prepare(RunInputs(over))
    assert json.loads((run.out / "sources.json").read_text())[SOURCE]["revision"] == "c1"
    assert fake.loaded == ["c0", "c1"]


@pytest.mark.parametrize(
    ("changed", "is_read_again"),
    [
        ({"README.md": "new"}, False),
        ({".gitattributes": "new"}, False),
        ({"large/a.jsonl": "new"}, False),
        ({"small/b.jsonl": "new"}, True),
        ({"small/c.jsonl": "more"}, True),
    ],
    ids=["card", "attributes", "another config", "data", "more data"],
)
def test_only_a_commit_to_the_data_is_tokenized_again(fake, run, tmp_path, changed, is_read_again):
    """In another run too."""
    prepare(RunInputs(run))
    fake.change("c1", **changed)
    other = replace(run, out=tmp_path / "other")
    prepare(RunInputs(other))
    assert fake.asked == 2 and fake.loaded == ["c0", *["c1"] * is_read_again]
    assert json.loads((other.out / "sources.json").read_text())[SOURCE]["revision"] == "c1"


@pytest.mark.parametrize(
    ("card", "same"),
    [
        ({"configs": [{"config_name": "small", "data_files": "small/b.jsonl"}]}, False),
        ({**CARD, "pretty_name": "Texts"}, True),
        ({"configs": [*CARD["configs"], {"config_name": "more", "data_files": "more/*"}]}, True),
    ],
    ids=["other files", "a name", "another config"],
)
def test_what_the_card_has_read_counts_and_nothing_else_of_it(fake, card, same):
    before = hub.resolve(SOURCE).files
    fake.card = card
    assert (hub.resolve(SOURCE).files == before) == same


@pytest.mark.parametrize("card", [{}, {"configs": [{"config_name": "small", "data_files": "elsewhere/*"}]}])
def test_without_patterns_that_name_files_every_data_file_counts(fake, card):
    fake.card = card
    before = hub.resolve(SOURCE).files
    fake.change("c1", **{"large/a.jsonl": "new"})
    assert hub.resolve(SOURCE).files != before


def test_a_new_run_without_a_network_reads_what_the_cache_knows(fake, run, tmp_path, caplog):
    prepare(RunInputs(run))
    fake.is_there = False
    other = replace(run, out=tmp_path / "other")
    prepare(RunInputs(other))
    assert fake.asked == 1 and "c0" in caplog.text
    assert json.loads((other.out / "sources.json").read_text()) == json.loads((run.out / "sources.json").read_text())
    unknown = replace(run, out=tmp_path / "unknown", data=replace(run.data, sources=("hf:somebody/else",)))
    with pytest.raises(ValueError, match="HF_HUB_OFFLINE"):
        prepare(RunInputs(unknown))
    assert not (tmp_path / "unknown" / "config.json").exists()


def test_a_run_of_every_head_asks_nobody(fake, run):
    prepare(RunInputs(replace(run, plan=replace(run.plan, selection="all"))))
    assert fake.asked == 0


def test_prepare_data_goes_on_at_its_commit_and_leaves_a_finished_folder_alone(fake, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_data, "load_tokenizer", lambda *_: word_tokenizer())
    job = PrepareJob("mine", (SOURCE,), tmp_path / "tokens", shard_tokens=100)
    add, calls = folder._Writer.add, iter(range(1))
    monkeypatch.setattr(hub, "now", lambda: "today")

    def stopped(self: Any, *args: Any) -> int:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return add(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(folder._Writer, "add", stopped)
        with pytest.raises(KeyboardInterrupt):
            prepare_data.prepare(job)
    fake.change("c1", **{"small/a.jsonl": "changed"})
    prepare_data.prepare(job)
    fake.is_there = False
    prepare_data.prepare(job)
    header = json.loads((job.out / "tokens.json").read_text())
    assert fake.asked == 1 and fake.loaded == ["c0", "c0"] and header["sources"][0]["pin"]["revision"] == "c0"


# Launches


def launched(monkeypatch: pytest.MonkeyPatch, *, main: bool, answers: dict[str, Any]) -> list[str]:
    """Stand in for one of eight processes; returns the order in which it does things."""
    order: list[str] = []

    def on_main_process(action: Any) -> None:
        order.append("main process works")
        if main:
            action()

    def agree_on(compute: Any) -> Any:
        order.append("all agree")
        return compute() if main else answers["agreed"]

    for module in (hub, data_config):
        monkeypatch.setattr(module, "on_main_process", on_main_process)
        monkeypatch.setattr(module, "agree_on", agree_on)
    monkeypatch.setenv("WORLD_SIZE", "8")
    return order


def test_another_process_asks_nobody_and_tokenizes_nothing(fake, tmp_path, monkeypatch):
    config, tokenizer = DataConfig((SOURCE,), hub_tokens=10_000, seq_len=16), word_tokenizer()
    with monkeypatch.context() as patch:
        launched(patch, main=True, answers={})
        patch.setattr(data_config, "agree_on", lambda compute: compute())
        expected = open_rows(config, tokenizer).fingerprint
    pin = {SOURCE: hub.resolve(SOURCE)}
    asked = fake.asked
    monkeypatch.setattr(folder, "write_tokens", lambda *_, **__: pytest.fail("it tokenized"))
    order = launched(monkeypatch, main=False, answers={"agreed": pin})
    assert open_rows(config, tokenizer).fingerprint == expected
    assert fake.asked == asked and order == ["main process works", "all agree", "main process works"]


def test_the_main_process_tokenizes_while_the_others_wait(fake, monkeypatch):
    order = launched(monkeypatch, main=True, answers={})
    write = folder.write_tokens
    monkeypatch.setattr(folder, "write_tokens", lambda *a, **k: order.append("tokenizes") or write(*a, **k))
    open_rows(DataConfig((SOURCE,), hub_tokens=10_000, seq_len=16), word_tokenizer())
    assert order == ["main process works", "all agree", "main process works", "tokenizes"]


def test_a_large_source_is_refused_in_several_processes_before_a_text_is_read(fake, run, capsys, monkeypatch):
    large = replace(run.data, hub_tokens=100_000_001)
    tokenizer = word_tokenizer()
    check_launch(large, tokenizer)  # one process may tokenize as much as it likes
    launched(monkeypatch, main=True, answers={})
    check_launch(replace(large, hub_tokens=100_000_000), tokenizer)
    for act in (check_launch, open_rows):
        with pytest.raises(ValueError, match="prepare-data") as error:
            act(large, tokenizer)
        assert SOURCE in str(error.value) and "100,000,001" in str(error.value) and "\n" not in str(error.value)
    assert fake.loaded == []
    monkeypatch.setattr(data_config, "LARGEST_IN_A_LAUNCH", 5)
    monkeypatch.setattr("hybrid_distill.pipeline.run.connect", lambda: SimpleNamespace(num_processes=2))
    monkeypatch.setattr("hybrid_distill.pipeline.run.own_device", lambda: torch.device("cpu"))
    with pytest.raises(ValueError, match="prepare-data"):
        prepare(RunInputs(run))
    assert fake.loaded == [] and not (run.out / "config.json").exists()


def test_a_large_source_that_is_in_the_cache_is_read_by_any_number_of_processes(fake, run, monkeypatch):
    tokenizer = word_tokenizer()
    rows = open_rows(run.data, tokenizer)
    launched(monkeypatch, main=True, answers={})
    monkeypatch.setattr(data_config, "LARGEST_IN_A_LAUNCH", 5)
    check_launch(run.data, tokenizer)
    assert open_rows(run.data, tokenizer).fingerprint == rows.fingerprint


def test_a_dry_run_names_the_commands_to_run_first(fake, run, capsys):
    large = replace(run, data=replace(run.data, hub_tokens=100_000_001), stages=(DISTILL,), gpus=2)
    run_recipe(large, ["--dry-run"])
    found = capsys.readouterr().out
    assert f"prepare-data --tokenizer tiny --max-tokens 100000001 --sources {SOURCE} --out tokens/1" in found
    run_recipe(replace(large, gpus=1), ["--dry-run"])
    assert "prepare-data" not in capsys.readouterr().out
    assert fake.asked == 0


def test_refusal_is_one_line(fake, run, capsys):
    fake.is_there = False
    line = refusal(capsys, run)
    assert SOURCE in line and "HF_HUB_OFFLINE" in line


@pytest.mark.launched
def test_of_two_processes_one_asks_the_hub_and_tokenizes(tmp_path):
    """The other has no network. Both refuse a large source."""
    write_source(tmp_path / "hub" / "a.jsonl", word_texts(60))
    (tmp_path / "local.txt").write_text("\n<|endoftext|>\n".join(word_texts(30)))
    done = launch(DDP, tmp_path, program=Path(__file__).with_name("two_readers.py"))
    assert done.returncode == 0, done.stderr
    one, other = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert (one["asked"], other["asked"]) == (2, 0)  # for each call of open_rows without a run
    assert (one["encoded"], other["encoded"]) == (90, 0)
    assert one["rows"] == other["rows"] and one["refused"] == other["refused"] and "prepare-data" in one["refused"]
