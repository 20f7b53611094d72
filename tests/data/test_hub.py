"""Sources on the hub: asked for once by one process, pinned, and read again without a network."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import huggingface_hub
import pytest
import torch
from huggingface_hub import DatasetInfo
from messages import naming
from test_data import write_source
from test_launch import DDP, launch
from training import ALIGN, DISTILL, small_run, word_texts, word_tokenizer

from hybrid_distill.cli import prepare_data
from hybrid_distill.cli.app import run_recipe
from hybrid_distill.cli.prepare_data import PrepareJob
from hybrid_distill.config import RunConfig
from hybrid_distill.data import DataConfig, check_launch, hub, open_rows, writer
from hybrid_distill.data import config as data_config
from hybrid_distill.flags import parse_as
from hybrid_distill.pipeline import RunInputs
from hybrid_distill.pipeline.run import prepare
from hybrid_distill.stage_flags import with_stage_flags
from hybrid_distill.train.config import Distill

SOURCE = "hf:somebody/texts:small:train"
DATA = {"small/a.jsonl": "1", "small/b.jsonl": "2", "large/a.jsonl": "3"}
CARD = {
    "configs": [
        {"config_name": "small", "data_files": [{"split": "train", "path": "small/*"}]},
        {"config_name": "large", "data_files": "large/*"},
    ]
}


class FakeHub:
    """A hub with one data set; it counts what it is asked, and can be out of reach."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.is_there = True
        self.files = {**DATA, "README.md": "0"}
        self.card = CARD
        self.commit = "c0"
        self.asked = 0
        self.loaded: list[str] = []

    def dataset_info(self, name: str, **_: Any) -> DatasetInfo:
        self.asked += 1
        assert name == "somebody/texts"
        siblings = [{"rfilename": file, "blobId": blob} for file, blob in self.files.items()]
        return DatasetInfo(id=name, sha=self.commit, siblings=siblings, cardData=dict(self.card))

    def load_dataset(
        self, name: str, config: str, *, split: str, streaming: bool, revision: str
    ) -> Any:
        if not self.is_there:
            raise ConnectionError("no route")
        self.loaded.append(revision)
        return LOAD(str(self.place), split=split, streaming=streaming)

    def change(self, commit: str, **files: str) -> None:
        self.commit = commit
        self.files.update(files)


LOAD = datasets.load_dataset


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    write_source(tmp_path / "hub" / "a.jsonl", word_texts(60))
    fake = FakeHub(tmp_path / "hub")
    monkeypatch.setattr(huggingface_hub, "dataset_info", fake.dataset_info)
    monkeypatch.setattr(datasets, "load_dataset", fake.load_dataset)
    monkeypatch.setattr(
        hub, "hub_error", lambda: None if fake.is_there else "HF_HUB_OFFLINE is set"
    )
    monkeypatch.setenv("HYBRID_DISTILL_CACHE", str(tmp_path / "cache"))
    return fake


def pins(run: RunConfig) -> dict[str, Any]:
    """The commits that a run has written down."""
    return json.loads((run.out / "sources.json").read_text())


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
    assert fake.asked == 1
    assert fake.loaded == ["c0"]
    assert len(set(prints)) == 1
    pinned = pins(run)
    assert pinned[SOURCE]["revision"] == "c0"

    fake.change("c1", **{"small/a.jsonl": "changed"})
    for is_there in (True, False):
        fake.is_there = is_there
        again = RunInputs(run)
        prepare(again)
        assert [again.rows(stage).fingerprint for stage in run.stages] == prints
    assert fake.asked == 1
    assert fake.loaded == ["c0"]
    assert pins(run) == pinned


def test_a_run_that_was_stopped_while_it_tokenized_goes_on_at_its_commit(fake, run, monkeypatch):
    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(writer, "encode", stopped)
        with pytest.raises(KeyboardInterrupt):
            prepare(RunInputs(run))
    fake.change("c1", **{"small/a.jsonl": "changed"})
    prepare(RunInputs(run))
    assert fake.asked == 1
    assert set(fake.loaded) == {"c0"}


def test_a_run_that_starts_over_reads_the_newest_commit(fake, run):
    prepare(RunInputs(run))
    fake.change("c1", **{"small/a.jsonl": "changed"})
    over = replace(run, resume="never")
    prepare(RunInputs(over))
    assert pins(run)[SOURCE]["revision"] == "c1"
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
    assert fake.asked == 2
    assert fake.loaded == (["c0", "c1"] if is_read_again else ["c0"])
    assert pins(other)[SOURCE]["revision"] == "c1"


@pytest.mark.parametrize(
    ("card", "same"),
    [
        ({"configs": [{"config_name": "small", "data_files": "small/b.jsonl"}]}, False),
        ({**CARD, "pretty_name": "Texts"}, True),
        (
            {"configs": [*CARD["configs"], {"config_name": "more", "data_files": "more/*"}]},
            True,
        ),
    ],
    ids=["other files", "a name", "another config"],
)
def test_what_the_card_has_read_counts_and_nothing_else_of_it(fake, card, same):
    before = hub.resolve(SOURCE).files
    fake.card = card
    after = hub.resolve(SOURCE).files
    assert (after == before) == same


@pytest.mark.parametrize(
    "card",
    [{}, {"configs": [{"config_name": "small", "data_files": "elsewhere/*"}]}],
    ids=["no patterns", "patterns of no file"],
)
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
    assert fake.asked == 1
    assert "c0" in caplog.text
    assert pins(other) == pins(run)

    somebody_elses = replace(run.data, sources=("hf:somebody/else",))
    unknown = replace(run, out=tmp_path / "unknown", data=somebody_elses)
    with pytest.raises(ValueError, match="HF_HUB_OFFLINE"):
        prepare(RunInputs(unknown))
    assert not (tmp_path / "unknown" / "config.json").exists()


def test_a_run_of_every_head_asks_nobody(fake, run):
    prepare(RunInputs(replace(run, plan=replace(run.plan, selection="all"))))
    assert fake.asked == 0


def test_prepare_data_goes_on_at_its_commit_and_leaves_a_finished_folder_alone(
    fake, tmp_path, monkeypatch
):
    monkeypatch.setattr(prepare_data, "load_tokenizer", lambda *_: word_tokenizer())
    job = PrepareJob("mine", (SOURCE,), tmp_path / "tokens", shard_tokens=100)
    add = writer.ShardWriter.add
    lives = iter(range(1))

    def stopped(self: Any, *args: Any) -> int:
        if next(lives, None) is None:
            raise KeyboardInterrupt
        return add(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(writer.ShardWriter, "add", stopped)
        with pytest.raises(KeyboardInterrupt):
            prepare_data.prepare(job)
    fake.change("c1", **{"small/a.jsonl": "changed"})
    prepare_data.prepare(job)
    fake.is_there = False
    prepare_data.prepare(job)
    header = json.loads((job.out / "tokens.json").read_text())
    assert fake.asked == 1
    assert fake.loaded == ["c0", "c0"]
    assert header["sources"][0]["pin"]["revision"] == "c0"


# Launches


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for the main one of eight processes."""
    monkeypatch.setattr(hub, "from_main", lambda compute: compute())
    monkeypatch.setattr(data_config, "on_main_process", lambda action: action())
    monkeypatch.setattr(data_config, "agree_on", lambda compute: compute())
    monkeypatch.setenv("WORLD_SIZE", "8")


def test_a_large_source_is_refused_in_several_processes_before_a_text_is_read(
    fake, run, monkeypatch, request
):
    large = replace(run.data, hub_tokens=100_000_001)
    tokenizer = word_tokenizer()
    check_launch(large, tokenizer)  # one process may tokenize as much as it likes
    request.getfixturevalue("launched")
    check_launch(replace(large, hub_tokens=100_000_000), tokenizer)
    for act in (check_launch, open_rows):
        with pytest.raises(ValueError, match=naming(SOURCE, "100,000,001")):
            act(large, tokenizer)
    assert fake.loaded == []
    monkeypatch.setattr(data_config, "LARGEST_IN_A_LAUNCH", 5)
    monkeypatch.setattr(
        "hybrid_distill.pipeline.run.connect", lambda: SimpleNamespace(num_processes=2)
    )
    monkeypatch.setattr("hybrid_distill.pipeline.run.own_device", lambda: torch.device("cpu"))
    with pytest.raises(ValueError, match="prepare-data"):
        prepare(RunInputs(run))
    assert fake.loaded == []
    assert not (run.out / "config.json").exists()


def test_a_large_source_that_is_in_the_cache_is_read_by_any_number_of_processes(
    fake, run, monkeypatch, request
):
    tokenizer = word_tokenizer()
    rows = open_rows(run.data, tokenizer)
    request.getfixturevalue("launched")
    monkeypatch.setattr(data_config, "LARGEST_IN_A_LAUNCH", 5)
    check_launch(run.data, tokenizer)
    assert open_rows(run.data, tokenizer).fingerprint == rows.fingerprint


def test_a_dry_run_names_the_commands_to_run_first(fake, run, capsys):
    data = replace(run.data, hub_tokens=100_000_001)
    large = replace(run, data=data, stages=(DISTILL,), gpus=2)

    run_recipe(large, ["--dry-run"])
    printed = capsys.readouterr().out
    command = "prepare-data --tokenizer tiny --max-tokens 100000001"
    assert f"{command} --sources {SOURCE} --out tokens/1" in printed
    assert re.search(r"^Launch.* --data\.sources tokens/1$", printed, re.MULTILINE)

    run_recipe(replace(large, gpus=1), ["--dry-run"])
    assert "prepare-data" not in capsys.readouterr().out
    assert fake.asked == 0


def test_a_dry_run_prepares_what_stages_read_by_themselves(fake, run, capsys):
    """Once, though the run and a stage read it; the run's data counts only where it is read."""
    large = replace(run.data, hub_tokens=100_000_001)
    post = replace(run.stage("post"), data=large)
    own = replace(run, data=DataConfig(seq_len=16), stages=(DISTILL, post), gpus=2)
    alone = replace(own, data=large, stages=(post,))
    both = replace(alone, stages=(DISTILL, post))
    of_run = "--data.sources tokens/1"
    of_stage = "--post.data.sources tokens/1"
    for config, flags in (
        (own, [of_stage]),
        (alone, [of_stage]),
        (both, [of_run, of_stage]),
    ):
        run_recipe(config, ["--dry-run"])
        printed = capsys.readouterr().out
        commands = re.findall(r"^ *hybrid-distill prepare-data .*$", printed, re.MULTILINE)
        (command,) = commands
        assert command.endswith(f"--sources {SOURCE} --out tokens/1")
        (launch_line,) = re.findall(r"^Launch.*$", printed, re.MULTILINE)
        assert re.findall(r"--\S*data\.sources \S+", launch_line) == flags

    default = with_stage_flags(both)
    words = " ".join(flags).split()
    parsed: Any = parse_as(type(default), words, default=default, prog="run", description=None)
    assert parsed.data.sources == parsed.post.data.sources == ("tokens/1",)


@pytest.mark.launched
def test_of_two_processes_one_asks_the_hub_and_tokenizes(tmp_path):
    """The other has no network. Both refuse a large source."""
    write_source(tmp_path / "hub" / "a.jsonl", word_texts(60))
    (tmp_path / "local.txt").write_text("\n<|endoftext|>\n".join(word_texts(30)))
    done = launch(DDP, tmp_path, program=Path(__file__).with_name("two_readers.py"))
    assert done.returncode == 0, done.stderr
    main = json.loads((tmp_path / "0.json").read_text())
    other = json.loads((tmp_path / "1.json").read_text())
    assert main["asked"] == 2, "once for each call of open_rows without a run"
    assert main["encoded"] == 90
    assert other["asked"] == other["encoded"] == 0
    assert main["rows"] == other["rows"]
    assert "prepare-data" in main["refused"]
    assert main["refused"] == other["refused"]
