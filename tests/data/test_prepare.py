"""A token folder: the same bytes however it was made, and refused where it does not fit."""

import hashlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from messages import has_facts, naming
from test_data import EOS, write_source
from tokenizers import Tokenizer, models, pre_tokenizers
from training import die, killed, rows_of, word_tokenizer
from training import word_texts as texts
from transformers import PreTrainedTokenizerFast

from hybrid_distill import data
from hybrid_distill.chat_template import render
from hybrid_distill.cli import prepare_data as prepare
from hybrid_distill.cli.app import main
from hybrid_distill.cli.prepare_data import PrepareJob
from hybrid_distill.data import (
    DataConfig,
    TokenHeader,
    check_sources,
    documents,
    open_rows,
    readers,
    writer,
)
from hybrid_distill.data.chat import conversation_of, encode_conversation
from hybrid_distill.data.header import Unfinished


@pytest.fixture
def tokenizer(monkeypatch: pytest.MonkeyPatch) -> PreTrainedTokenizerFast:
    """Also what `prepare` loads, by any name."""
    tokenizer = word_tokenizer()
    monkeypatch.setattr(prepare, "load_tokenizer", lambda *_: tokenizer)
    return tokenizer


@pytest.fixture
def sources(tmp_path: Path) -> tuple[str, ...]:
    """The 120 documents of ``texts(120)`` in order: files, a stream, and a table."""
    for part in range(3):
        write_source(tmp_path / "files" / f"{part}.jsonl", texts(20, 20 * part))
        write_source(tmp_path / "stream" / f"{part}.jsonl", texts(10, 60 + 10 * part))
    write_source(tmp_path / "table.parquet", texts(30, 90))
    return (
        str(tmp_path / "files"),
        f"hf:{tmp_path / 'stream'}",
        str(tmp_path / "table.parquet"),
    )


def ids_of(documents: list[str], tokenizer: PreTrainedTokenizerFast) -> list[int]:
    ids = []
    for text in documents:
        ids += [*tokenizer(text)["input_ids"], EOS]
    return ids


def contents(path: Path) -> dict[str, Any]:
    """Every file of a token folder, without the date."""
    contents: dict[str, Any] = {file.name: file.read_bytes() for file in path.iterdir()}
    header = json.loads(contents["tokens.json"])
    assert header.pop("created")
    contents["tokens.json"] = header
    return contents


def test_the_header_says_what_the_files_hold(tokenizer, sources, tmp_path):
    shard_tokens = 300
    out = tmp_path / "out"

    prepare.prepare(PrepareJob("mine", sources, out, shard_tokens=shard_tokens))

    expected = ids_of(texts(120), tokenizer)
    header = json.loads((out / "tokens.json").read_text())
    files = sorted(out.glob("ids-*.bin"))
    content = b"".join(file.read_bytes() for file in files)
    assert np.frombuffer(content, "<u2").tolist() == expected
    assert header["sha256"] == hashlib.sha256(content).hexdigest()
    assert header["tokens"] == len(expected)
    assert header["documents"] == 120
    assert header["tokenizer"] == "mine"
    assert header["vocabulary_size"] == 99
    assert header["eos_id"] == EOS

    sizes = [shard["tokens"] for shard in header["shards"]]
    assert sizes == [file.stat().st_size // 2 for file in files]
    assert len(sizes) > 2
    assert min(sizes[:-1]) >= shard_tokens

    of_sources = header["sources"]
    assert [source["documents"] for source in of_sources] == [60, 30, 30]
    assert sum(source["tokens"] for source in of_sources) == len(expected)

    # A document begins behind the end of the one before it.
    starts = np.fromfile(out / "starts-00001.bin", "<i8")
    ids = np.fromfile(files[1], "<u2")
    assert starts[0] == 0
    assert (ids[starts[1:] - 1] == EOS).all()
    assert len(starts) == (ids == EOS).sum()


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_ids_that_need_four_bytes_get_them(tmp_path, dtype):
    write_source(tmp_path / "a" / "a.jsonl", ["w1 w2"])
    names = {"<eos>": EOS, "w1": 3, "w2": 4}
    n_ids = 2**16 if dtype == "uint16" else 2**16 + 1
    for number in range(5, n_ids):
        names[f"x{number}"] = number
    backend = Tokenizer(models.WordLevel(names, unk_token="w1"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")

    header = writer.write_tokens(tmp_path / "out", [str(tmp_path / "a")], tokenizer)

    assert header.dtype == dtype
    tokens = data.open_tokens(tmp_path / "out", tokenizer)
    ids = tokens.row(0, 3)[0]
    assert ids.tolist() == [3, 4, EOS]


def killed_at_batch(number: int, job: PrepareJob) -> None:
    """Do a job in a process that is killed when it has written ``number`` batches."""
    add = writer.ShardWriter.add
    lives = iter(range(number))

    def counted(self: Any, *args: Any) -> int:
        if next(lives, None) is None:
            die()
        return add(self, *args)

    def work() -> None:
        pytest.MonkeyPatch().setattr(writer.ShardWriter, "add", counted)
        prepare.prepare(job)

    killed(work)


@pytest.mark.parametrize(
    ("killed_at", "whole", "max_tokens"),
    [(1, 0, None), (7, 2, None), (11, 3, 900)],
    ids=["in the first file", "in the third file", "near the limit"],
)
def test_resuming_after_a_kill_gives_the_bytes_of_one_go(
    tokenizer, sources, tmp_path, monkeypatch, killed_at, whole, max_tokens
):
    monkeypatch.setattr(documents, "_BATCH_DOCUMENTS", 7)
    job = PrepareJob("mine", sources, tmp_path / "killed", shard_tokens=200, max_tokens=max_tokens)
    killed_at_batch(killed_at, job)

    header = TokenHeader.file(job.out, partial=True)
    n_whole = 0
    if header.exists():
        n_whole = len(json.loads(header.read_text())["shards"])
    assert n_whole == whole
    times_of_whole: dict[Path, int] = {}
    for number in range(whole):
        path = job.out / f"ids-{number:05d}.bin"
        times_of_whole[path] = path.stat().st_mtime_ns
    with (job.out / f"ids-{whole:05d}.bin").open("ab") as torn:
        torn.write(b"half a write")

    prepare.prepare(job)

    prepare.prepare(replace(job, out=tmp_path / "one go"))
    assert contents(job.out) == contents(tmp_path / "one go")
    for path, written in times_of_whole.items():
        assert path.stat().st_mtime_ns == written, f"{path.name} was made again"


def test_max_tokens_takes_whole_documents_and_no_token_more(tokenizer, sources, tmp_path):
    n_tokens = len(ids_of(texts(41), tokenizer))
    n_with_next = len(ids_of(texts(42), tokenizer))
    for limit in (n_tokens, n_tokens + 1, n_with_next - 1):
        header = writer.write_tokens(
            tmp_path / str(limit),
            sources,
            tokenizer,
            max_tokens=limit,
            shard_tokens=100,
        )
        assert header.tokens == n_tokens
        assert header.documents == 41

    with pytest.raises(ValueError, match=naming("max_tokens", 1, 2)):
        writer.write_tokens(tmp_path / "none", sources, tokenizer, max_tokens=1)


def test_a_token_folder_is_a_source_of_the_same_rows(tokenizer, sources, tmp_path, monkeypatch):
    job = PrepareJob("mine", sources, tmp_path / "out", shard_tokens=300)
    report = prepare.prepare(job)
    expected = rows_of(texts(120), tokenizer)

    # From here on, nothing is tokenized: a finished folder is left alone.
    monkeypatch.setattr(writer, "encode", pytest.fail)
    second_report = prepare.prepare(job)
    # Up to the seconds that it took.
    assert second_report.split("(")[0] == report.split("(")[0]

    config = DataConfig(sources=(str(tmp_path / "out"),), seq_len=16)
    rows = open_rows(config, tokenizer, cache_dir=tmp_path / "cache")
    assert rows.fingerprint == expected.fingerprint
    for step in range(expected.rows_per_epoch):
        expected_batch = expected.batch(step, 2)
        for name, tensor in rows.batch(step, 2).items():
            assert torch.equal(tensor, expected_batch[name])
    assert not (tmp_path / "cache").exists()


def test_damage_is_named(tokenizer, sources, tmp_path):
    job = PrepareJob("mine", sources, tmp_path / "out", shard_tokens=300)
    prepare.prepare(job)
    damaged = job.out / "ids-00001.bin"
    whole = damaged.read_bytes()
    check = partial(check_sources, DataConfig((str(job.out),)), tokenizer)
    readers = [
        check,
        partial(data.open_tokens, job.out, tokenizer),
        partial(prepare.prepare, job),
    ]
    for read, content in itertools.product(readers, (whole[:-2], b"")):
        damaged.write_bytes(content)
        with pytest.raises(ValueError, match=naming(damaged, len(content))):
            read()

        damaged.write_bytes(whole)
        read()

    # A header of a version that does not exist yet.
    path = job.out / "tokens.json"
    path.write_text(path.read_text().replace("tokens/2", "tokens/99"))
    with pytest.raises(ValueError, match="'hybrid-distill/tokens/99'"):
        check()


@pytest.mark.parametrize("finished", [True, False])
def test_a_folder_of_other_tokens_is_not_written_over(tokenizer, sources, tmp_path, finished):
    job = PrepareJob("mine", sources, tmp_path / "out", shard_tokens=100)
    if finished:
        prepare.prepare(job)
    else:
        killed_at_batch(2, job)
        with pytest.raises(Unfinished):
            check_sources(DataConfig(sources=(str(job.out),)), tokenizer)

    def files() -> dict[Path, bytes]:
        """Read all but the hidden ones, such as locks."""
        return {path: path.read_bytes() for path in job.out.glob("[!.]*")}

    before = files()
    changes: dict[str, Any] = {"max_tokens": 50, "shard_tokens": 50, "sources": ("tiny",)}
    for option, value in changes.items():
        with pytest.raises(ValueError, match=naming(job.out, option)):
            prepare.prepare(replace(job, **{option: value}))

    write_source(tmp_path / "files" / "2.jsonl", ["w1"])
    with pytest.raises(ValueError, match=naming(job.out, "sources")):
        prepare.prepare(job)
    assert files() == before


def test_files_that_were_read_are_not_opened_again(tmp_path, monkeypatch):
    for number in range(3):
        write_source(tmp_path / "files" / f"{number}.jsonl", texts(10, 10 * number))
    sources = [str(tmp_path / "files")]
    batches, positions = zip(*documents.document_batches(sources, "text", 100))
    assert list(itertools.chain.from_iterable(batches)) == texts(30)
    assert len(batches) > 6
    read = documents.read_file
    opened = []

    def recorded(path: Path, column: str) -> Iterator[str]:
        opened.append(path.name)
        return read(path, column)

    monkeypatch.setattr(documents, "read_file", recorded)
    for number, position in enumerate(positions, 1):
        # A position is kept as JSON.
        read_back = json.loads(json.dumps(position))
        rest = documents.document_batches(sources, "text", 100, read_back)
        assert [batch for batch, _ in rest] == list(batches[number:])

    # Each position leaves fewer files to open; behind the last one nothing is left.
    n_opened = [opened.count(f"{number}.jsonl") for number in range(3)]
    assert n_opened[0] < n_opened[1] < n_opened[2]
    assert n_opened[2] == len(batches) - 1


def test_a_conversation_has_the_same_date_every_day_and_its_template_may_refuse_it(
    tokenizer,
):
    record = {"messages": [{"role": "assistant", "content": "w1", "at": datetime(2024, 1, 2)}]}
    conversation = conversation_of(record, "line 1")
    tokenizer.chat_template = "{{ date_string or strftime_now('%d %b %Y') }}"
    assert render(json.loads(conversation), tokenizer, thinking=False) == "26 Jul 2024"
    tokenizer.chat_template = "{{ raise_exception('no users') }}"
    with pytest.raises(ValueError, match="no users"):
        encode_conversation(conversation, tokenizer)


def test_a_long_txt_file_is_cut_at_line_ends_and_other_files_are_named(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(readers, "_TXT_CHARACTERS", 20)
    lines = [f"line {number} of some\n" for number in range(5)]
    (tmp_path / "a.txt").write_text("".join(lines) + "<|endoftext|>\nshort")
    for name in ("b.md", "c.csv", "d.rst", "e.html", ".hidden"):
        (tmp_path / name).write_text(name)

    with caplog.at_level("INFO"):
        pieces = list(data.read_documents(str(tmp_path)))

    assert pieces == [lines[0] + lines[1], lines[2] + lines[3], lines[4], "short"]
    assert has_facts(caplog.text, 4, "b.md")


def test_the_command(tmp_path, capsys):
    out = tmp_path / "held out"
    flags = ["--tokenizer", "tiny", "--sources", "tiny:held_out", "--out", str(out)]

    main(["prepare-data", *flags, "--max-tokens", "5000", "--shard-tokens", "2000"])

    line = capsys.readouterr().out.strip()
    header = TokenHeader.load(out / "tokens.json")
    assert "\n" not in line
    assert has_facts(line, f"{header.tokens:,}", f"{header.documents:,}")
    assert 4000 < header.tokens <= 5000
    assert header.tokenizer == "tiny"

    for flag, value in (("--tokenizer", "no/such/folder"), ("--sources", "no.txt")):
        with pytest.raises(SystemExit, match="2"):
            main(["prepare-data", *flags, flag, value, "--out", str(tmp_path / "new")])
        assert value in capsys.readouterr().err
        assert not (tmp_path / "new").exists()
