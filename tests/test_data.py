"""Every token once an epoch, documents that stay apart, and a position that is one integer."""

import gzip
import json
import multiprocessing
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from training import word_texts as texts
from training import word_tokenizer
from transformers import PreTrainedTokenizerFast

from hybrid_distill import data
from hybrid_distill.data import DataConfig, PackedRows, StreamingRows, open_rows

EOS = 1


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return word_tokenizer()


def documents_of(rows: PackedRows, steps: int, batch_size: int) -> list[tuple[int, ...]]:
    """Every segment of the first rows, padding left out, sorted."""
    found = []
    for step in range(steps):
        batch = rows.batch(step, batch_size)
        for ids, seq_idx, mask in zip(batch["input_ids"], batch["seq_idx"], batch["mask"]):
            for number in seq_idx[mask].unique():
                found.append(tuple(ids[mask & (seq_idx == number)].tolist()))
    return sorted(found)


def test_an_epoch_holds_every_token_once(tokenizer):
    rows = PackedRows.from_texts(texts(40), tokenizer, seq_len=16)
    for epoch in range(2):
        first = epoch * rows.rows_per_epoch
        seen = torch.cat(
            [
                b["input_ids"][b["mask"]]
                for b in (rows.batch(s, 1) for s in range(first, first + rows.rows_per_epoch))
            ]
        )
        assert sorted(seen.tolist()) == sorted(rows.sources[0].ids.tolist())
        assert len(seen) == rows.n_tokens


def test_rows_come_in_another_order_in_each_epoch_and_for_each_seed(tokenizer):
    def order(seed: int, epoch: int) -> list[int]:
        rows = PackedRows.from_texts(texts(60), tokenizer, seq_len=8, seed=seed)
        return rows.batch(epoch, rows.rows_per_epoch)["input_ids"].flatten().tolist()

    assert order(0, 0) == order(0, 0)
    assert order(0, 0) != order(0, 1)
    assert order(0, 0) != order(1, 0)


def test_segments_are_the_documents_cut_at_row_ends(tokenizer):
    rows = PackedRows.from_texts(texts(30), tokenizer, seq_len=16)
    expected, position = [], 0
    for text in texts(30):
        ids = [*tokenizer(text)["input_ids"], EOS]
        while ids:
            room = 16 - position % 16
            expected.append(tuple(ids[:room]))
            position, ids = position + len(ids[:room]), ids[room:]
    assert documents_of(rows, rows.rows_per_epoch, 1) == sorted(expected)


def test_a_document_longer_than_a_row_begins_again_in_the_next(tokenizer):
    rows = PackedRows.from_texts([" ".join(["w5"] * 20), "w6"], tokenizer, seq_len=8)
    assert [rows.sources[0].row(i, 8)[1].tolist() for i in range(3)] == [
        [0] * 8,
        [0] * 8,
        [0] * 5 + [1] * 2 + [2],
    ]
    assert rows.sources[0].row(2, 8)[2].tolist() == [True] * 7 + [False]


@pytest.mark.parametrize("world", [2, 4])
def test_processes_share_the_rows_of_one(tokenizer, world):
    rows = PackedRows.from_texts(texts(50), tokenizer, seq_len=8)
    for step in (0, 3, 100):
        whole = rows.batch(step, 8)
        parts = [rows.batch(step, 8, rank, world) for rank in range(world)]
        for name in whole:
            assert torch.equal(whole[name], torch.cat([part[name] for part in parts]))


def test_a_batch_that_cannot_be_shared_is_refused(tokenizer):
    with pytest.raises(ValueError, match="batch of 6 rows cannot be shared by 4 processes"):
        PackedRows.from_texts(texts(50), tokenizer, seq_len=8).batch(0, 6, 0, 4)


def test_weights_share_out_the_tokens_and_lose_none(tokenizer):
    big, small = data.tokens_of(texts(200), tokenizer), data.tokens_of(["w96 " * 39], tokenizer)
    rows = PackedRows([big, small], seq_len=8, weights=(1, 1))
    epoch = torch.cat([rows.batch(s, 1)["input_ids"] for s in range(rows.rows_per_epoch)])
    from_small = (epoch == 98).float().mean(-1) > 0.5
    assert abs(from_small.float().mean() - 0.5) < 0.02
    seen = torch.cat([rows.batch(s, 1)["input_ids"] for s in range(2 * rows.rows_per_epoch)])
    rows_of_big = {tuple(big.row(i, 8)[0].tolist()) for i in range(-(-len(big.ids) // 8))}
    assert rows_of_big <= {tuple(row) for row in seen.tolist()}, "two half epochs cover the larger source"


def test_tokenised_once_then_read_from_the_cache(tokenizer, tmp_path, monkeypatch):
    source = tmp_path / "a.txt"
    source.write_text("\n<|endoftext|>\n".join(texts(30)))
    config = DataConfig(sources=(str(source),), seq_len=16)
    first = open_rows(config, tokenizer, cache_dir=tmp_path / "cache")
    assert isinstance(first, PackedRows) and isinstance(first.sources[0].ids, np.memmap)
    with monkeypatch.context() as patch:
        patch.setattr(data, "_write_tokens", pytest.fail)
        second = open_rows(config, tokenizer, cache_dir=tmp_path / "cache")
        assert torch.equal(first.batch(3, 4)["input_ids"], second.batch(3, 4)["input_ids"])
        assert first.fingerprint == second.fingerprint
    in_memory = PackedRows.from_texts(texts(30), tokenizer, seq_len=16)
    assert torch.equal(first.batch(3, 4)["input_ids"], in_memory.batch(3, 4)["input_ids"])
    source.write_text("w1 w2")
    assert open_rows(config, tokenizer, cache_dir=tmp_path / "cache").fingerprint != first.fingerprint


def test_padding_left_in_the_tokenizer_does_not_change_its_fingerprint(tokenizer):
    before = data.tokenizer_fingerprint(tokenizer)
    tokenizer.pad_token, pad_token = "<eos>", tokenizer.pad_token
    special = data.tokenizer_fingerprint(tokenizer)
    tokenizer(["w1", "w1 w2"], padding=True)
    assert data.tokenizer_fingerprint(tokenizer) == special
    tokenizer.pad_token = pad_token
    assert data.tokenizer_fingerprint(tokenizer) == before


def write_source(path: Path, records: list[str]) -> None:
    lines = "".join(json.dumps({"text": text, "n": 1}) + "\n" for text in records)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines.encode()))
    elif path.suffix == ".parquet":
        datasets.Dataset.from_dict({"text": records}).to_parquet(path)
    else:
        path.write_text(lines)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_every_format_reads_the_same(tmp_path, name):
    write_source(tmp_path / name, texts(5))
    assert list(data.read_documents(str(tmp_path))) == texts(5)


def test_the_embedded_corpus_is_a_source(tokenizer, tmp_path):
    train, held_out = (list(data.read_documents(name)) for name in ("tiny", "tiny:held_out"))
    assert train and held_out and not set(train) & set(held_out)
    rows = open_rows(DataConfig(sources=("tiny:held_out",)), tokenizer, cache_dir=tmp_path)
    assert rows.batch(0, 2)["input_ids"].shape == (2, 256)
    with pytest.raises(ValueError, match="no split 'test'"):
        list(data.read_documents("tiny:test"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (None, "", "nowhere.* does not exist; --data.sources takes files or folders"),
        ("a.csv", "w1", "a.csv.* holds no .txt"),
        ("a.txt", " \n", "holds no text"),
        ("a.jsonl", "", "holds no text"),
        ("a.jsonl", '{"body": "w1"}\n', "line 1 has no text in column 'text'; its columns are body"),
        ("a.jsonl", '{"text": "w1"}\n{"text"', "line 2 is not JSON"),
    ],
)
def test_a_bad_source_is_named(tokenizer, tmp_path, name, content, message):
    source = tmp_path / (name or "nowhere")
    if name:
        source.write_text(content)
    with pytest.raises(ValueError, match=message):
        open_rows(DataConfig(sources=(str(source),)), tokenizer, cache_dir=tmp_path / "cache")
    left = [p for p in (tmp_path / "cache").rglob("*") if p.suffix == ".bin"]
    assert not left, "a failed source leaves nothing behind"


def test_a_parquet_file_without_the_column_is_named(tmp_path):
    write_source(tmp_path / "a.parquet", texts(2))
    with pytest.raises(ValueError, match=r"no text in column 'body'; its columns are text"):
        list(data.read_documents(str(tmp_path / "a.parquet"), "body"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sources": ()}, "data.sources is empty"),
        ({"weights": (1.0, 2.0)}, "for 1 sources"),
        ({"weights": (0.0,)}, "above 0"),
        ({"seq_len": 1}, "seq_len is 1"),
    ],
)
def test_a_bad_config_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**fields)


def test_processes_that_begin_together_write_one_cache(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("\n<|endoftext|>\n".join(texts(300)))
    config = DataConfig(sources=(str(tmp_path / "a.txt"),))
    context = multiprocessing.get_context("fork")
    prints, begin = context.Queue(), context.Barrier(4)

    def work() -> None:
        begin.wait()
        prints.put(open_rows(config, tokenizer, cache_dir=tmp_path / "cache").fingerprint)

    workers = [context.Process(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    assert len({prints.get(timeout=60) for _ in workers}) == 1
    for worker in workers:
        worker.join()
    assert len([p for p in (tmp_path / "cache" / "tokens").iterdir() if p.is_dir()]) == 1


def stream(tmp_path: Path, n: int = 60, first: int = 0) -> datasets.IterableDataset:
    path = tmp_path / f"stream-{first}.jsonl"
    write_source(path, texts(n, first))
    loaded = datasets.load_dataset(
        "json", data_files=str(path), split="train", streaming=True, cache_dir=str(tmp_path / "hf")
    )
    return loaded


def take(rows: StreamingRows, steps: range, **place: int) -> list[torch.Tensor]:
    return [rows.batch(step, 2, **place)["input_ids"] for step in steps]


def test_a_stream_packs_every_token_and_begins_again_at_its_end(tokenizer, tmp_path):
    rows = StreamingRows([stream(tmp_path)], tokenizer, seq_len=16)
    expected = data.tokens_of(texts(60), tokenizer).ids
    seen = torch.cat(take(rows, range(40))).flatten()
    twice = np.concatenate([expected] * 3)[: len(seen)]
    assert len(seen) > len(expected) and seen.tolist() == twice.tolist()


def test_a_stream_resumes_where_its_state_was_taken(tokenizer, tmp_path):
    def open_stream() -> StreamingRows:
        sources = [stream(tmp_path), stream(tmp_path, first=60)]
        return StreamingRows(sources, tokenizer, seq_len=16, weights=(3.0, 1.0))

    rows = open_stream()
    take(rows, range(13))
    state = json.loads(json.dumps(rows.state_dict()))
    expected = take(rows, range(13, 45))
    resumed = open_stream()
    resumed.load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(expected, take(resumed, range(13, 45))))
    with pytest.raises(ValueError, match="cannot jump to step 0"):
        resumed.batch(0, 2)


def test_a_streams_rows_hold_the_documents_apart_and_the_weights(tokenizer, tmp_path):
    rows = StreamingRows(
        [stream(tmp_path), stream(tmp_path, first=60)], tokenizer, seq_len=16, weights=(3.0, 1.0)
    )
    batch = rows.batch(0, 16)
    ends = (batch["input_ids"] == EOS)[:, :-1]
    assert torch.equal(batch["seq_idx"].diff(dim=1).bool(), ends)
    assert rows.state_dict()["counts"] == [12, 4]


def test_processes_read_different_parts_of_a_stream(tokenizer, tmp_path):
    parts = [StreamingRows([stream(tmp_path)], tokenizer, seq_len=8, rank=r, world=2) for r in range(2)]
    first, second = (rows.batch(0, 8, rank, 2)["input_ids"] for rank, rows in enumerate(parts))
    assert first.shape == (4, 8) and not torch.equal(first, second)
    with pytest.raises(ValueError, match="process 1 of 2"):
        parts[1].load_state_dict(parts[0].state_dict())


def test_an_unreachable_hub_says_what_to_do_in_one_line(tokenizer):
    config = DataConfig(sources=("hf:somebody/nothing:sample:train",))
    with pytest.raises(ValueError) as caught:
        open_rows(config, tokenizer)
    message = str(caught.value)
    assert "--data.sources PATH" in message and "--data.sources tiny" in message and "\n" not in message


def test_hub_and_local_sources_do_not_mix(tokenizer):
    with pytest.raises(ValueError, match="mixes hub and local data"):
        open_rows(DataConfig(sources=("hf:somebody/nothing", "tiny")), tokenizer)
