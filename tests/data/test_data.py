"""Every token once an epoch, documents that stay apart, and a position that is one integer."""

import gzip
import itertools
import json
import multiprocessing
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from messages import naming
from training import rows_of, word_tokenizer
from training import word_texts as texts
from transformers import PreTrainedTokenizerFast

from hybrid_distill import data
from hybrid_distill.data import DataConfig, PackedRows, Tokens, open_rows, token_cache
from hybrid_distill.data.rows import shuffled
from hybrid_distill.data.tokens import Shard, hash_of

EOS = 1
FIRST = 10_000
"""Distance between the first tokens of two numbered sources."""


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return word_tokenizer()


def numbered(n: int, *, shard: int, first: int = 0) -> Tokens:
    """Make a source whose tokens are their own numbers; a document begins at every seventh."""
    ids = np.arange(first, first + n, dtype=np.uint32)
    shards: list[Shard] = []
    for begin in range(0, n, shard):
        piece = ids[begin : begin + shard]
        document_starts = np.arange(0, len(piece), 7, dtype=np.int64)
        shards.append(Shard(piece, document_starts))
    return Tokens(tuple(shards), pad_id=0, fingerprint=f"{first}-{n}")


def numbered_sources(sizes: tuple[int, ...], shard: int) -> list[Tokens]:
    """Make sources whose tokens begin at 0, 10,000, 20,000 ..."""
    sources: list[Tokens] = []
    for number, n in enumerate(sizes):
        sources.append(numbered(n, shard=shard, first=FIRST * number))
    return sources


# Rows


def test_batches_of_a_seed_are_those_of_the_first_version() -> None:
    """Checkpoints and published results name a seed: it must go on meaning the same bits."""
    sources = [numbered(700, shard=90), numbered(90, shard=90, first=1000)]
    rows = PackedRows(sources, seq_len=8, seed=5, weights=(2, 1))

    contents: list[dict[str, list]] = []
    for step, rank in itertools.product((0, 7, 10**9), range(2)):
        batch = rows.batch(step, 6, rank, 2)
        # Added later, and a function of `seq_idx`.
        lengths = batch.pop("lengths")
        tokens_of_rows = (batch["seq_idx"] >= 0).sum(1)
        assert torch.equal(lengths.sum(1), tokens_of_rows)
        contents.append({name: tensor.tolist() for name, tensor in batch.items()})

    assert hash_of(contents)[:16] == "866d76ec256f005a"
    assert rows.fingerprint[:16] == "95fa545a012af308"
    assert rows.text_fingerprint[:16] == "fa8b19c78636b6e7"


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("sizes", [(1000,), (1003, 77, 500)], ids=["one source", "three sources"])
def test_every_token_once_an_epoch_on_any_number_of_processes(world, sizes):
    rows = PackedRows(numbered_sources(sizes, shard=123), seq_len=16, seed=3)
    n_rows = rows.rows_per_epoch
    batch_size = 12

    # As many steps as an epoch has rows read as many epochs as a step has rows.
    ids: list[torch.Tensor] = []
    masks: list[torch.Tensor] = []
    for step, rank in itertools.product(range(n_rows), range(world)):
        batch = rows.batch(step, batch_size, rank, world)
        assert len(batch["mask"]) == batch_size // world
        ids.append(batch["input_ids"])
        masks.append(batch["mask"])

    every_token: list[int] = []
    for number, n in enumerate(sizes):
        every_token += range(FIRST * number, FIRST * number + n)
    ids_of_epochs = torch.cat(ids).split(n_rows)
    masks_of_epochs = torch.cat(masks).split(n_rows)
    for epoch_ids, epoch_mask in zip(ids_of_epochs, masks_of_epochs, strict=True):
        assert sorted(epoch_ids[epoch_mask].tolist()) == every_token


def test_processes_that_do_not_divide_a_batch_are_refused():
    rows = PackedRows([numbered(100, shard=90)], seq_len=8)
    with pytest.raises(ValueError, match=naming(6, 5)):
        rows.batch(0, 6, 0, 5)


def test_rows_come_in_another_order_in_each_epoch_and_for_each_seed():
    n_rows = 200 // 8

    def order(seed: int, epoch: int) -> tuple[int, ...]:
        rows = PackedRows([numbered(200, shard=90)], seq_len=8, seed=seed)
        row_ids = rows.row_ids(epoch * n_rows, n_rows)
        return tuple(row_ids.tolist())

    first = order(seed=0, epoch=0)
    next_epoch = order(seed=0, epoch=1)
    other_seed = order(seed=1, epoch=0)

    for row_ids in (first, next_epoch, other_seed):
        assert sorted(row_ids) == list(range(n_rows))
    assert order(seed=0, epoch=0) == first
    assert len({first, next_epoch, other_seed}) == 3


def test_segments_are_the_documents_cut_at_row_ends(tokenizer):
    seq_len = 16
    rows = rows_of(texts(30), tokenizer, seq_len)

    segments: list[list[int]] = []
    batch = rows.batch(0, rows.rows_per_epoch)
    for ids, seq_idx, mask in zip(batch["input_ids"], batch["seq_idx"], batch["mask"]):
        for number in seq_idx[mask].unique():
            is_segment = mask & (seq_idx == number)
            segments.append(ids[is_segment].tolist())

    expected: list[list[int]] = []
    position = 0
    for text in texts(30):
        ids = [*tokenizer(text)["input_ids"], EOS]
        while ids:
            room = seq_len - position % seq_len
            piece = ids[:room]
            expected.append(piece)
            position += len(piece)
            ids = ids[room:]
    assert sorted(segments) == sorted(expected)


def test_a_shuffle_is_a_permutation_in_which_every_place_is_as_likely():
    for n in (1, 2, 3, 4, 5, 17, 64, 65, 1000):
        assert sorted(shuffled(place, n, 5) for place in range(n)) == list(range(n))

    n_places = 5
    n_keys = 2000
    counts = np.zeros((n_places, n_places))
    for key, place in itertools.product(range(n_keys), range(n_places)):
        counts[place, shuffled(place, n_places, key, 0, 1)] += 1
    # Binomial: the variance is n p (1 - p).
    expected = n_keys / n_places
    deviation = np.sqrt(expected * (1 - 1 / n_places))
    assert abs(counts - expected).max() < 5 * deviation


@pytest.mark.parametrize("weights", [(1, 1, 1), (5, 1, 0.5), (0.01, 0.5, 0.49)])
def test_shares_of_tokens_are_the_weights_to_within_a_row_and_no_token_is_lost(weights):
    sizes = (4000, 800, 1600)
    seq_len = 16
    rows = PackedRows(numbered_sources(sizes, shard=1000), seq_len=seq_len, weights=weights)
    n_rows = rows.rows_per_epoch

    epoch = rows.batch(0, n_rows)["input_ids"]
    counts = np.bincount(epoch.flatten() // FIRST, minlength=3)
    for count, weight in zip(counts, weights):
        share = sum(sizes) * weight / sum(weights)
        assert abs(count - share) <= seq_len

    if weights == (1, 1, 1):
        # An epoch reads about half of the larger source.
        two_epochs = rows.batch(0, 2 * n_rows)["input_ids"]
        assert set(range(4000)) <= set(two_epochs.flatten().tolist())


# Sources


def write_source(path: Path, records: list[str]) -> None:
    path.parent.mkdir(exist_ok=True)
    lines = ""
    for text in records:
        lines += json.dumps({"text": text, "n": 1}) + "\n"
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
    with pytest.raises(ValueError, match=naming("'body'", "text")):
        list(data.read_documents(str(tmp_path), "body"))


def test_the_embedded_corpus_is_a_source(tokenizer, tmp_path):
    train = set(data.read_documents("tiny"))
    held_out = set(data.read_documents("tiny:held_out"))
    assert train
    assert held_out
    assert not train & held_out
    rows = open_rows(DataConfig(sources=("tiny:held_out",)), tokenizer, cache_dir=tmp_path)
    assert rows.batch(0, 2)["input_ids"].shape == (2, 256)
    with pytest.raises(ValueError, match=naming("'test'", "train", "held_out")):
        list(data.read_documents("tiny:test"))


@pytest.mark.parametrize(
    ("name", "content", "facts"),
    [
        (None, "", ["nowhere"]),
        ("a.csv", "w1", ["a.csv", ".txt"]),
        ("a.txt", " \n", ["a.txt", "tiny"]),
        ("a.jsonl", '{"text": "w1"}\n{"text"', ["a.jsonl", "line 2"]),
        ("a.parquet", "w1", ["a.parquet"]),
    ],
)
def test_a_bad_source_is_named(tokenizer, tmp_path, name, content, facts):
    source = tmp_path / (name or "nowhere")
    if name:
        source.write_text(content)
    with pytest.raises(ValueError, match=naming(*facts)):
        open_rows(DataConfig(sources=(str(source),)), tokenizer, cache_dir=tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.bin")), "a failed source leaves nothing behind"


def test_tokenized_once_then_read_from_the_cache(tokenizer, tmp_path, monkeypatch):
    source = tmp_path / "a.txt"
    source.write_text("\n<|endoftext|>\n".join(texts(30)))
    cache = tmp_path / "cache"
    config = DataConfig(sources=(str(source),), seq_len=16)

    state = torch.get_rng_state()
    first = open_rows(config, tokenizer, cache_dir=cache)
    has_drawn = not torch.equal(torch.get_rng_state(), state)
    assert not has_drawn, "tokenizing must not draw from the training's randomness"
    assert isinstance(first.sources[0].shards[0].ids, np.memmap)

    with monkeypatch.context() as patch:
        patch.setattr(token_cache, "write_tokens", pytest.fail)
        second = open_rows(config, tokenizer, cache_dir=cache)
    in_memory = rows_of(texts(30), tokenizer)
    for other in (second, in_memory):
        assert other.fingerprint == first.fingerprint
        assert torch.equal(other.batch(3, 4)["input_ids"], first.batch(3, 4)["input_ids"])

    source.write_text("w1 w2")
    changed = open_rows(config, tokenizer, cache_dir=cache)
    assert changed.fingerprint != first.fingerprint


def test_processes_that_begin_together_write_one_cache(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("\n<|endoftext|>\n".join(texts(300)))
    config = DataConfig(sources=(str(tmp_path / "a.txt"),))
    context = multiprocessing.get_context("fork")
    fingerprints = context.Queue()
    begin = context.Barrier(4)

    def work() -> None:
        begin.wait()
        rows = open_rows(config, tokenizer, cache_dir=tmp_path / "cache")
        fingerprints.put(rows.fingerprint)

    workers = [context.Process(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    # A process that has put something into a queue ends only after somebody has read it.
    distinct = {fingerprints.get(timeout=60) for _ in workers}
    for worker in workers:
        worker.join()

    assert len(distinct) == 1
    written = (tmp_path / "cache" / "tokens").glob("*/tokens.json")
    assert len(list(written)) == 1


def test_only_what_splits_a_text_counts_in_the_fingerprint(tokenizer):
    before = data.tokenizer_fingerprint(tokenizer)
    padded = word_tokenizer()
    padded.pad_token = "<eos>"
    padded(["w1", "w1 w2"], padding=True, truncation=True, max_length=2)
    other_class = type("Other", (PreTrainedTokenizerFast,), {})
    of_other_class = other_class(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<eos>")
    for same in (padded, of_other_class):
        assert data.tokenizer_fingerprint(same) == before

    other_end = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, eos_token="w0"
    )
    more_words = word_tokenizer()
    more_words.add_tokens(["w1 w2"])
    for different in (other_end, more_words):
        assert data.tokenizer_fingerprint(different) != before


# The hub


def test_the_hub_is_read_once_as_far_as_asked(tokenizer, tmp_path):
    """A local folder stands for a repository of the hub."""
    write_source(tmp_path / "hub" / "a.jsonl", texts(60))
    source = f"hf:{tmp_path / 'hub'}"
    most_tokens = 200
    config = DataConfig((source,), hub_tokens=most_tokens, seq_len=16)

    rows = open_rows(config, tokenizer, cache_dir=tmp_path / "cache")

    # Whole documents, as many as fit.
    whole = rows_of(texts(60), tokenizer).sources[0].shards[0]
    n_tokens = max(start for start in whole.starts if start <= most_tokens)
    assert rows.sources[0].shards[0].ids.tolist() == whole.ids[:n_tokens].tolist()

    write_source(tmp_path / "hub" / "a.jsonl", texts(60, first=1))
    changed = open_rows(config, tokenizer, cache_dir=tmp_path / "cache")
    assert changed.text_fingerprint != rows.text_fingerprint, "a local folder has no revision"

    with pytest.raises(ValueError, match=r"--data\.hub-tokens N"):
        open_rows(DataConfig((source, "tiny")), tokenizer)
