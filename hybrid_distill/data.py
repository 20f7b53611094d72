"""Text turned into rows of tokens: packed, shuffled by a seed, and resumable from one integer.

A source is tokenised once into a memory-mapped file. `PackedRows` cuts it into rows of ``seq_len`` tokens, so
any process can read any row of any step. Several documents share a row; ``seq_idx`` numbers them, and what
falls into the next row begins there as a document of its own. `StreamingRows` does the same for data that
stays on the hub, one row after the other.

Shapes: B rows, L tokens of a row.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypedDict, cast

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor
from transformers import PreTrainedTokenizerBase

FORMAT = "hybrid-distill/tokens/1"
SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".parquet")
TXT_SEPARATOR = "<|endoftext|>"
_BATCH_CHARACTERS = 4_000_000


class Batch(TypedDict):
    """Rows of one optimiser step, or a part of them."""

    input_ids: Tensor
    """[B, L] int64."""
    seq_idx: Tensor
    """[B, L] int64: which document of its row a token belongs to, from 0, never decreasing."""
    mask: Tensor
    """[B, L] bool: False at padding, which only the last row of a source has."""


class Rows(Protocol):
    """Where a training loop takes its batches from."""

    fingerprint: str

    def batch(self, step: int, batch_size: int, rank: int = 0, world: int = 1) -> Batch:
        """The share of process ``rank`` of ``world`` in the ``batch_size`` rows of a step."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class DataUnavailable(ValueError):
    """A source on the hub cannot be read."""


@dataclass(frozen=True)
class DataConfig:
    """What to train on. Raises ValueError for a field out of range."""

    sources: tuple[str, ...] = ("tiny",)
    """``tiny`` (the embedded corpus), files or folders of .txt, .jsonl, .jsonl.gz or .parquet, or
    ``hf:repo:config:split``, which is streamed."""
    weights: tuple[float, ...] = ()
    """Share of each source in the tokens. Without weights, local sources are read whole, once an epoch, and
    streamed ones in equal parts."""
    text_column: str = "text"
    seq_len: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.sources:
            raise ValueError("data.sources is empty; name a source, for example --data.sources tiny.")
        if self.weights and (len(self.weights) != len(self.sources) or min(self.weights) <= 0):
            raise ValueError(
                f"data.weights is {self.weights} for {len(self.sources)} sources; give each one above 0."
            )
        if not isinstance(self.seq_len, int) or self.seq_len < 2:
            raise ValueError(
                f"data.seq_len is {self.seq_len!r}; a row needs a whole number of at least 2 tokens."
            )


def open_rows(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    cache_dir: str | Path | None = None,
    rank: int = 0,
    world: int = 1,
) -> PackedRows | StreamingRows:
    """Rows of the configured sources. Every process calls it; the first to come tokenises, the others wait.

    ``cache_dir`` defaults to ``$HYBRID_DISTILL_CACHE``, then ``~/.cache/hybrid-distill``.
    Raises ValueError for a source that is missing, empty or without its text column.
    """
    streamed = [source.startswith("hf:") for source in config.sources]
    if all(streamed):
        return StreamingRows.from_hub(config, tokenizer, rank=rank, world=world)
    if any(streamed):
        raise ValueError(
            f"data.sources mixes hub and local data: {', '.join(config.sources)}; download the hub's part "
            "(`hf download --repo-type dataset REPO`) and name its folder."
        )
    root = Path(
        cache_dir or os.environ.get("HYBRID_DISTILL_CACHE", Path.home() / ".cache" / "hybrid-distill")
    )
    tokens = [cached_tokens(source, tokenizer, root, config.text_column) for source in config.sources]
    return PackedRows(tokens, seq_len=config.seq_len, seed=config.seed, weights=config.weights)


# Documents


def read_documents(source: str, text_column: str = "text") -> Iterator[str]:
    """Texts of a local source, in the order of its sorted files. Raises ValueError naming what is wrong."""
    if source.split(":")[0] == "tiny":
        from .assets import corpus_documents

        yield from corpus_documents(cast(Any, source.partition(":")[2] or "train"))
        return
    for path in source_files(source):
        if path.suffix == ".txt":
            yield from _read_txt(path)
        elif path.suffix == ".parquet":
            yield from _read_parquet(path, text_column)
        else:
            yield from _read_jsonl(path, text_column)


def source_files(source: str) -> list[Path]:
    """Files of a local source, sorted. Raises ValueError when there are none."""
    path = Path(source).expanduser()
    found = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    files = [p for p in found if p.name.endswith(SUFFIXES)]
    if not path.exists() or not files:
        problem = f"holds no {', '.join(SUFFIXES)} file" if path.exists() else "does not exist"
        raise ValueError(
            f"data source {source!r} {problem}; --data.sources takes files or folders of "
            f"{', '.join(SUFFIXES)}, hf:repo:config:split, or tiny."
        )
    return files


def _read_txt(path: Path) -> Iterator[str]:
    """A .txt file is one document, or several between lines that hold ``<|endoftext|>``."""
    lines: list[str] = []
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.strip() == TXT_SEPARATOR:
                yield "".join(lines)
                lines.clear()
            else:
                lines.append(line)
    yield "".join(lines)


def _read_jsonl(path: Path, text_column: str) -> Iterator[str]:
    with (
        gzip.open(path, "rt", encoding="utf-8")
        if path.suffix == ".gz"
        else path.open(encoding="utf-8") as file
    ):
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{path}, line {number} is not JSON ({error}); write one object a line."
                ) from error
            if not isinstance(record, dict) or not isinstance(record.get(text_column), str):
                raise _no_column(
                    f"{path}, line {number}", text_column, record if isinstance(record, dict) else ()
                )
            yield record[text_column]


def _read_parquet(path: Path, text_column: str) -> Iterator[str]:
    from pyarrow import parquet

    file = parquet.ParquetFile(path)
    if text_column not in file.schema_arrow.names:
        raise _no_column(str(path), text_column, file.schema_arrow.names)
    for batch in file.iter_batches(columns=[text_column]):
        yield from (text for text in batch.column(0).to_pylist() if text)


def _no_column(place: str, text_column: str, columns: Iterable[str]) -> ValueError:
    names = ", ".join(columns) or "none"
    return ValueError(
        f"{place} has no text in column {text_column!r}; its columns are {names}: "
        "choose one with --data.text-column."
    )


# Tokens


@dataclass(frozen=True)
class Tokens:
    """One tokenised source: every document's tokens, each document closed by the end-of-sequence token."""

    ids: np.ndarray
    """[tokens] unsigned integers."""
    starts: np.ndarray
    """[documents] int64: where each document begins."""
    pad_id: int
    fingerprint: str
    """Hash of the tokens."""

    def row(self, index: int, seq_len: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(input_ids, seq_idx, mask) of the row that begins at token ``index * seq_len``."""
        begin = index * seq_len
        found = self.ids[begin : begin + seq_len]
        input_ids = np.full(seq_len, self.pad_id, dtype=np.int64)
        input_ids[: len(found)] = found
        first, last = np.searchsorted(self.starts, (begin + 1, begin + len(found)))
        boundary = np.zeros(seq_len, dtype=np.int64)
        boundary[self.starts[first:last] - begin] = 1
        boundary[len(found) :][:1] = 1
        return input_ids, boundary.cumsum(), np.arange(seq_len) < len(found)


def cached_tokens(source: str, tokenizer: PreTrainedTokenizerBase, root: Path, text_column: str) -> Tokens:
    """Tokens of a local source, memory-mapped from the cache; tokenised first when they are not there.

    Safe when several processes begin together: one writes, and a folder appears only when it is whole.
    """
    key = _hash([FORMAT, _source_key(source), tokenizer_fingerprint(tokenizer), text_column])
    folder = root / "tokens" / key[:32]
    if not (folder / "meta.json").exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not (folder / "meta.json").exists():
                _write_tokens(folder, source, tokenizer, text_column)
    meta = json.loads((folder / "meta.json").read_text())
    return Tokens(
        ids=np.memmap(folder / "ids.bin", dtype=meta["dtype"], mode="r"),
        starts=np.memmap(folder / "starts.bin", dtype=np.int64, mode="r"),
        pad_id=meta["pad_id"],
        fingerprint=meta["fingerprint"],
    )


def tokens_of(texts: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> Tokens:
    """Tokens of texts in memory. Raises ValueError when there is no text."""
    documents = [np.asarray(ids, dtype=np.int64) for ids in _encode(texts, tokenizer)]
    if not documents:
        raise ValueError("there is no text to tokenise: every document is empty.")
    ids = np.concatenate(documents)
    starts = np.cumsum([0, *map(len, documents[:-1])], dtype=np.int64)
    fingerprint = _hash([hashlib.sha256(ids.tobytes()).hexdigest()])
    return Tokens(ids, starts, _eos(tokenizer), fingerprint)


def _write_tokens(folder: Path, source: str, tokenizer: PreTrainedTokenizerBase, text_column: str) -> None:
    dtype = np.dtype(np.uint16 if len(tokenizer) <= 2**16 else np.uint32)
    digest, position = hashlib.sha256(), 0
    temporary = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        with (
            (temporary / "ids.bin").open("wb") as ids_file,
            (temporary / "starts.bin").open("wb") as starts_file,
        ):
            for ids in _encode(read_documents(source, text_column), tokenizer):
                content = np.asarray(ids, dtype=dtype).tobytes()
                ids_file.write(content)
                digest.update(content)
                starts_file.write(np.int64(position).tobytes())
                position += len(ids)
        if not position:
            raise ValueError(
                f"data source {source!r} holds no text; name one that does, or --data.sources tiny."
            )
        meta = {
            "format": FORMAT,
            "source": source,
            "dtype": dtype.name,
            "pad_id": _eos(tokenizer),
            "tokens": position,
            "fingerprint": _hash([digest.hexdigest()]),
        }
        (temporary / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _encode(texts: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
    """Token ids of each document that is not blank, closed by the tokenizer's EOS token."""
    eos = _eos(tokenizer)
    for batch in _batches(text for text in texts if text.strip()):
        for ids in tokenizer(batch, return_attention_mask=False, verbose=False)["input_ids"]:
            yield ids if ids[-1:] == [eos] else [*ids, eos]


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if len(batch) == 1000 or characters > _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _eos(tokenizer: PreTrainedTokenizerBase) -> int:
    eos = tokenizer.eos_token_id
    if not isinstance(eos, int):
        raise ValueError(
            f"the tokenizer's EOS token is {eos!r}; packing needs one to close documents: set eos_token."
        )
    return eos


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of what decides how the tokenizer splits a text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        content: Any = sorted(tokenizer.get_vocab().items())
    else:
        content = json.loads(backend.to_str())
        # Calls leave their padding and truncation behind in the backend.
        content = {name: value for name, value in content.items() if name not in ("padding", "truncation")}
    return _hash([type(tokenizer).__name__, content, tokenizer.special_tokens_map])


def _source_key(source: str) -> Any:
    if source.split(":")[0] == "tiny":
        return ["tiny", _hash(list(read_documents(source)))]
    stats = [(path, path.stat()) for path in source_files(source)]
    return [[str(path.resolve()), stat.st_size, stat.st_mtime_ns] for path, stat in stats]


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


# Rows


class PackedRows:
    """Rows of tokenised sources in a seeded order, which any process reads at any step.

    An epoch holds each source whole, once. With ``weights`` it has the same number of rows, shared out by
    weight; a source then goes on in the next epoch where it stopped in this one.
    """

    def __init__(
        self, sources: Sequence[Tokens], *, seq_len: int, seed: int = 0, weights: Sequence[float] = ()
    ) -> None:
        self.sources, self.seq_len, self.seed = list(sources), seq_len, seed
        self._n_rows = [-(-len(tokens.ids) // seq_len) for tokens in self.sources]
        total = sum(self._n_rows)
        self._shares = [max(1, round(total * w / sum(weights))) for w in weights] or self._n_rows
        self._ends = np.cumsum(self._shares)
        prints = [tokens.fingerprint for tokens in self.sources]
        self.fingerprint = _hash([FORMAT, prints, self._shares, seq_len, seed])

    @classmethod
    def from_texts(
        cls, texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, *, seq_len: int, seed: int = 0
    ) -> PackedRows:
        """Rows of texts that are already in memory."""
        return cls([tokens_of(texts, tokenizer)], seq_len=seq_len, seed=seed)

    @property
    def rows_per_epoch(self) -> int:
        """Rows read before the first one comes again."""
        return int(self._ends[-1])

    @property
    def n_tokens(self) -> int:
        """Tokens of all sources."""
        return sum(len(tokens.ids) for tokens in self.sources)

    def batch(self, step: int, batch_size: int, rank: int = 0, world: int = 1) -> Batch:
        """Rows ``step * batch_size ...`` of the endless row of epochs; each process takes an equal part."""
        share = _share(batch_size, world)
        first = step * batch_size + rank * share
        columns = zip(*(self._row(index) for index in range(first, first + share)))
        input_ids, seq_idx, mask = (torch.from_numpy(np.stack(column)) for column in columns)
        return {"input_ids": input_ids, "seq_idx": seq_idx, "mask": mask}

    def _row(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        epoch, place = divmod(index, self.rows_per_epoch)
        place = int(_permutation(self.seed, 0, epoch, self.rows_per_epoch)[place])
        number = int(np.searchsorted(self._ends, place, side="right"))
        begin = int(self._ends[number]) - self._shares[number]
        n_rows = self._n_rows[number]
        own_epoch, own_place = divmod(epoch * self._shares[number] + place - begin, n_rows)
        row = int(_permutation(self.seed, number + 1, own_epoch, n_rows)[own_place])
        return self.sources[number].row(row, self.seq_len)

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the step says where the rows are."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The counterpart of `state_dict`."""


def _share(batch_size: int, world: int) -> int:
    if batch_size % world:
        raise ValueError(
            f"a batch of {batch_size} rows cannot be shared by {world} processes; use a multiple of {world}."
        )
    return batch_size // world


@functools.lru_cache(maxsize=8)
def _permutation(seed: int, stream: int, epoch: int, n: int) -> np.ndarray:
    # RandomState is the one generator whose stream numpy promises never to change.
    bits = np.random.MT19937(np.random.SeedSequence((seed, stream, epoch)))
    return np.random.RandomState(bits).permutation(n)


class StreamingRows:
    """Rows of data that stays on the hub, packed as they arrive; each process reads its own part.

    Rows come in order, so ``batch`` must be asked for one step after the other; `state_dict` holds the place
    in each source and the tokens that are left over from its last documents.
    """

    def __init__(
        self,
        datasets: Sequence[Any],
        tokenizer: PreTrainedTokenizerBase,
        *,
        seq_len: int,
        text_column: str = "text",
        weights: Sequence[float] = (),
        names: Sequence[str] = (),
        rank: int = 0,
        world: int = 1,
    ) -> None:
        from datasets.distributed import split_dataset_by_node

        names = names or [f"source {number}" for number in range(len(datasets))]
        parts = (split_dataset_by_node(d, rank=rank, world_size=world) for d in datasets)
        self._packers = [
            _Packer(part, tokenizer, seq_len, text_column, name) for part, name in zip(parts, names)
        ]
        self._weights = np.asarray(weights or [1.0] * len(self._packers)) / (
            sum(weights) or len(self._packers)
        )
        self._counts = np.zeros(len(self._packers), dtype=np.int64)
        self._step, self._place = 0, (rank, world)
        self.fingerprint = _hash(
            ["streaming", list(names), self._weights.tolist(), seq_len, tokenizer_fingerprint(tokenizer)]
        )

    @classmethod
    def from_hub(
        cls, config: DataConfig, tokenizer: PreTrainedTokenizerBase, *, rank: int = 0, world: int = 1
    ) -> StreamingRows:
        """Streams of ``hf:repo:config:split`` sources. Raises DataUnavailable when one cannot be reached."""
        return cls(
            [_open_hub(source) for source in config.sources],
            tokenizer,
            seq_len=config.seq_len,
            text_column=config.text_column,
            weights=config.weights,
            names=config.sources,
            rank=rank,
            world=world,
        )

    def batch(self, step: int, batch_size: int, rank: int = 0, world: int = 1) -> Batch:
        """The next rows of this process. Raises ValueError for another step or another process."""
        if (rank, world) != self._place or step != self._step:
            raise ValueError(
                f"streamed rows are at step {self._step} of process {self._place[0]} of {self._place[1]} and "
                f"cannot jump to step {step} of process {rank} of {world}; resume with as many processes."
            )
        self._step += 1
        columns = zip(*(self._next_row() for _ in range(_share(batch_size, world))))
        input_ids, seq_idx = (torch.from_numpy(np.stack(column)) for column in columns)
        return {
            "input_ids": input_ids,
            "seq_idx": seq_idx,
            "mask": torch.ones_like(input_ids, dtype=torch.bool),
        }

    def _next_row(self) -> tuple[np.ndarray, np.ndarray]:
        """A row of the source that is furthest behind its share."""
        number = int(np.argmax(self._weights * (self._counts.sum() + 1) - self._counts))
        self._counts[number] += 1
        return self._packers[number].next_row()

    def state_dict(self) -> dict[str, Any]:
        """Where this process stands, as JSON."""
        packers = [packer.state_dict() for packer in self._packers]
        place = list(self._place)
        return {"step": self._step, "counts": self._counts.tolist(), "place": place, "packers": packers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to where `state_dict` was taken. Raises ValueError for the state of another process."""
        if tuple(state["place"]) != self._place:
            raise ValueError(
                f"the state belongs to process {state['place'][0]} of {state['place'][1]}, this is process "
                f"{self._place[0]} of {self._place[1]}; resume with as many processes as before."
            )
        self._step, self._counts = state["step"], np.asarray(state["counts"], dtype=np.int64)
        for packer, packed in zip(self._packers, state["packers"]):
            packer.load_state_dict(packed)


class _Packer:
    """Cuts one stream of documents into rows; what does not fill a row waits for the next."""

    def __init__(
        self, dataset: Any, tokenizer: PreTrainedTokenizerBase, seq_len: int, text_column: str, name: str
    ) -> None:
        self.dataset, self.tokenizer, self.seq_len = dataset, tokenizer, seq_len
        self.text_column, self.name = text_column, name
        self._start = dataset.state_dict() if hasattr(dataset, "state_dict") else None
        self._documents: Iterator[dict[str, Any]] | None = None
        self._left: list[list[int]] = []

    def next_row(self) -> tuple[np.ndarray, np.ndarray]:
        """(input_ids, seq_idx), each of ``seq_len``."""
        room, pieces = self.seq_len, []
        while room:
            if not self._left:
                self._left = self._next_documents()
            document = self._left.pop(0)
            pieces.append(document[:room])
            if document[room:]:
                self._left.insert(0, document[room:])
            room -= len(pieces[-1])
        seq_idx = np.repeat(np.arange(len(pieces)), [len(piece) for piece in pieces])
        return np.concatenate([np.asarray(piece, dtype=np.int64) for piece in pieces]), seq_idx

    def _next_documents(self, n: int = 32) -> list[list[int]]:
        records = list(self._take(n))
        if not records:
            self._documents = None
            self.dataset.load_state_dict(self._start)
            records = list(self._take(n))
        encoded = list(_encode((self._text(record) for record in records), self.tokenizer))
        if not encoded:
            raise ValueError(f"data source {self.name} holds no text in column {self.text_column!r}.")
        return encoded

    def _take(self, n: int) -> Iterator[dict[str, Any]]:
        try:
            if self._documents is None:
                self._documents = iter(self.dataset)
            for _, record in zip(range(n), self._documents):
                yield record
        except Exception as error:
            raise _unreachable(self.name, error) from error

    def _text(self, record: dict[str, Any]) -> str:
        if not isinstance(record.get(self.text_column), str):
            raise _no_column(self.name, self.text_column, record)
        return record[self.text_column]

    def state_dict(self) -> dict[str, Any]:
        return {"dataset": self.dataset.state_dict(), "left": self._left}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.dataset.load_state_dict(state["dataset"])
        self._documents, self._left = None, [list(document) for document in state["left"]]


def _open_hub(source: str) -> Any:
    """A streamed data set ``hf:repo:config:split``; config and split may be left out."""
    from datasets import load_dataset

    repo, config, split = ([*source.split(":")[1:], "", ""])[:3]
    try:
        return load_dataset(repo, config or None, split=split or "train", streaming=True)
    except Exception as error:
        raise _unreachable(source, error) from error


def _unreachable(source: str, error: Exception) -> DataUnavailable:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return DataUnavailable(
        f"cannot read {source} ({reason}); pass local files with --data.sources PATH, "
        "or run on the embedded corpus with --data.sources tiny."
    )
