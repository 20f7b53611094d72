"""Token folders: tokenized text in memory-mapped shards, under a header that says what made them.

The header is written last, so a folder is complete or has none. ``tokens.partial.json`` lists what an interrupted
preparation had finished; the next one resumes there. docs/data.md describes the format.
"""

from __future__ import annotations

import hashlib
import json
import logging
import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from filelock import FileLock
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from ..provenance import now
from .chat import template_hash
from .documents import BATCH_CHARACTERS, Place, document_batches, source_fingerprint
from .header import FolderHeader
from .tokens import Shard, Tokens, encode, eos_id, hash_of, id_dtype, tokenizer_fingerprint, vocabulary_size

log = logging.getLogger(__name__)

HEADER = "tokens.json"
PARTIAL = "tokens.partial.json"
OWN_FILES = (".", "ids-", "starts-", PARTIAL)
SHARD_TOKENS = 2**30
_READ_BYTES = 2**24

SourcePlace = tuple[int, Place]
"""Number of a source, and where to resume in it."""


@dataclass
class TokenHeader(FolderHeader):
    """Entries of ``tokens.json``."""

    FORMAT = "hybrid-distill/tokens/2"
    CONTENT = "tokens"
    REMAKE = "prepare the text again with `hybrid-distill prepare-data`"
    RESULTS = (
        "tokenizer", "vocabulary_size", "eos_id", "dtype", "sources", "tokens", "documents", "shards", "sha256",
        "created",
    )  # fmt: skip

    tokenizer: str
    """Name or path when the folder was made; only the fingerprint is compared."""
    tokenizer_fingerprint: str
    vocabulary_size: int
    eos_id: int
    dtype: str
    """Type of the ids: uint16 or uint32, little-endian."""
    text_column: str
    shard_tokens: int
    max_tokens: int | None
    sources: list[dict[str, Any]]
    """``name``, ``fingerprint``, ``tokens`` and ``documents`` of each source, in the order they were read."""
    tokens: int = 0
    documents: int = 0
    shards: list[dict[str, int]] = field(default_factory=list)
    """``tokens`` and ``documents`` of each shard."""
    sha256: str = ""
    """Hash of the ids of all shards, one after the other."""
    created: str = ""
    chat_template: str = ""
    """Hash of the chat template; empty for plain text."""

    @property
    def chat(self) -> bool:
        """True for a folder of conversations."""
        return bool(self.chat_template)

    def check(self) -> None:
        counted = sum(shard["tokens"] for shard in self.shards)
        if self.dtype not in ("uint16", "uint32") or counted != self.tokens:
            raise ValueError(f"{counted} tokens in shards are not {self.tokens}, or {self.dtype!r} is not a type")

    def identity(self) -> dict[str, object]:
        prints = [source["fingerprint"] for source in self.sources]
        return {**super().identity(), "sources (or a file of theirs has changed)": prints}

    def shard_paths(self, folder: Path, number: int) -> tuple[Path, ...]:
        """Return the files of a shard, in the order of the fields of `Shard`."""
        names = ("ids", "starts", "learned") if self.chat else ("ids", "starts")
        return tuple(folder / f"{name}-{number:05d}.bin" for name in names)

    def sizes(self, folder: Path) -> dict[Path, int]:
        found: dict[Path, int] = {}
        for number, shard in enumerate(self.shards):
            sizes = (shard["tokens"] * np.dtype(self.dtype).itemsize, shard["documents"] * 8, shard["tokens"])
            found.update(zip(self.shard_paths(folder, number), sizes))
        return found


def is_token_folder(source: str | Path) -> bool:
    """Tell whether ``source`` is a token folder. Raises ValueError for an unfinished one."""
    folder = Path(source).expanduser()
    if not (folder / HEADER).is_file() and (folder / PARTIAL).is_file():
        raise ValueError(
            f"the token folder {folder} is not finished; run the `hybrid-distill prepare-data` that began it once more."
        )
    return (folder / HEADER).is_file()


def open_tokens(folder: str | Path, tokenizer: PreTrainedTokenizerBase) -> Tokens:
    """Memory-map the tokens of a folder. Raises ValueError for another tokenizer's, and where bytes are missing."""
    folder = Path(folder).expanduser()
    header = TokenHeader.load(folder / HEADER)
    check_tokenizer({folder: header}, tokenizer)
    header.check_files(folder)
    types = (np.dtype(header.dtype).newbyteorder("<"), np.dtype("<i8"), np.dtype(bool))
    shards = tuple(
        Shard(*(np.memmap(path, dtype, "r") for path, dtype in zip(header.shard_paths(folder, number), types)))
        for number in range(len(header.shards))
    )
    content = [header.sha256, header.chat_template] if header.chat else [header.sha256]
    return Tokens(shards, eos_id(tokenizer), hash_of(content))


def check_tokenizer(headers: dict[Path, TokenHeader], tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError, naming the tokenizers, unless ``tokenizer`` made all of these folders."""
    own, name = tokenizer_fingerprint(tokenizer), tokenizer.name_or_path or "unnamed"
    same = {tokenizer_fingerprint(tokenizer, chat=True): own}  # the fingerprint in folders of conversations
    made_with = {same.get(header.tokenizer_fingerprint, header.tokenizer_fingerprint) for header in headers.values()}
    if not made_with - {own}:
        return
    listed = ", ".join(
        f"{folder} with {header.tokenizer} ({header.tokenizer_fingerprint[:12]})" for folder, header in headers.items()
    )
    raise ValueError(
        f"data.sources {'mixes' if len(made_with) > 1 else 'has'} tokens of another tokenizer than the run's, {name} "
        f"({own[:12]}): {listed}; prepare the text again with `hybrid-distill prepare-data --tokenizer {name}`, or "
        "pass a teacher with that tokenizer."
    )


def cached_tokens(source: str, tokenizer: PreTrainedTokenizerBase, root: Path, text_column: str | None) -> Tokens:
    """Memory-map the tokens of a local source from the cache, after tokenizing them if they are not there.

    Safe when several processes begin together: one writes, the others wait.
    """
    how = template_hash(tokenizer) if text_column is None else text_column
    key = hash_of([TokenHeader.FORMAT, source_fingerprint(source), tokenizer_fingerprint(tokenizer), how])
    folder = root / "tokens" / key[:32]
    folder.parent.mkdir(parents=True, exist_ok=True)
    if not (folder / HEADER).exists():
        with FileLock(f"{folder}.lock"):
            try:
                write_tokens(folder, [source], tokenizer, text_column=text_column)
            except ValueError:
                shutil.rmtree(folder, ignore_errors=True)
                raise
    return open_tokens(folder, tokenizer)


def write_tokens(
    folder: Path,
    sources: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    name: str | None = None,
    text_column: str | None = "text",
    max_tokens: int | None = None,
    shard_tokens: int = SHARD_TOKENS,
    workers: int = 1,
) -> TokenHeader:
    """Tokenize sources, one after the other, into a folder; only one process may.

    Without a ``text_column``, records are conversations. A shard ends with the batch of documents in which it reaches
    ``shard_tokens``. With ``max_tokens``, documents are taken as long as they fit. A finished folder is left alone; an
    unfinished one is resumed after its last complete shard, with the same bytes as in one go.
    Raises ValueError for a source that is missing or empty, and for a folder that holds other tokens or other files.
    """
    chat = text_column is None
    header = TokenHeader(
        format=TokenHeader.FORMAT,
        tokenizer=name or tokenizer.name_or_path,
        tokenizer_fingerprint=tokenizer_fingerprint(tokenizer, chat),
        vocabulary_size=vocabulary_size(tokenizer),
        eos_id=eos_id(tokenizer),
        dtype=id_dtype(tokenizer).name,
        text_column=text_column or "",
        chat_template=template_hash(tokenizer) if chat else "",
        shard_tokens=shard_tokens,
        max_tokens=max_tokens,
        sources=[
            {"name": source, "fingerprint": source_fingerprint(source), "tokens": 0, "documents": 0}
            for source in sources
        ],
    )
    if (folder / HEADER).exists():
        finished = TokenHeader.load(folder / HEADER)
        finished.check_same_work(header, folder)
        finished.check_files(folder)
        return finished
    if foreign := sorted(path.name for path in folder.glob("*") if not path.name.startswith(OWN_FILES)):
        raise ValueError(f"{folder} holds {foreign[0]}, which is not of a token folder; pass a new folder.")
    writer = _Writer(folder, header)
    batches = _batches(sources, text_column, writer.place, min(BATCH_CHARACTERS, 4 * shard_tokens))
    start = writer.header.tokens
    try:
        with tqdm(total=max_tokens, initial=start, unit="tok", unit_scale=True, desc="tokens", disable=None) as bar:
            for shard, place in _encoded(batches, tokenizer, chat, workers):
                bar.update(writer.add(shard, place))
                if writer.full:
                    break
    except Exception as error:  # raised by a signal handler, so at any place
        if "DataLoader worker" not in str(error):
            raise
        raise OSError(
            f"one of {workers} worker processes died, perhaps for want of memory; run again with fewer --workers."
        ) from error
    return writer.finish()


def _batches(
    sources: Sequence[str], text_column: str | None, place: SourcePlace, max_characters: int
) -> Iterator[tuple[list[str], SourcePlace]]:
    first, inside = place
    for number in range(first, len(sources)):
        for batch, here in document_batches(sources[number], text_column, inside, max_characters):
            yield batch, (number, here)
        inside = None


class _Encoder(Dataset[tuple["Shard | ValueError", SourcePlace]]):
    """Tokenizer of batches of text; a `DataLoader` passes it the batches in place of indices."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, chat: bool) -> None:
        self.tokenizer, self.dtype, self.chat = tokenizer, id_dtype(tokenizer), chat

    def __getitem__(self, index: tuple[list[str], SourcePlace]) -> tuple[Shard | ValueError, SourcePlace]:
        texts, place = index
        try:
            return encode(texts, self.tokenizer, self.dtype, self.chat), place
        except ValueError as error:  # a DataLoader would put the worker's traceback into its message
            return error, place


def _encoded(
    batches: Iterable[tuple[list[str], SourcePlace]], tokenizer: PreTrainedTokenizerBase, chat: bool, workers: int
) -> Iterator[tuple[Shard, SourcePlace]]:
    """Tokenize batches in order, in this process or in several."""
    several = workers > 1
    loader = DataLoader(
        _Encoder(tokenizer, chat),
        sampler=batches,
        batch_size=None,
        collate_fn=tuple,  # arrays stay arrays
        num_workers=workers if several else 0,
        multiprocessing_context="fork" if several else None,  # copies no tokenizer, imports nothing again
        worker_init_fn=_start_worker,
        generator=torch.Generator(),  # the global one is the training's
    )
    for shard, place in loader:
        if isinstance(shard, ValueError):
            raise shard
        yield shard, place


def _start_worker(number: int) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()  # a DataLoader's own watch hangs in a full pipe


def _end_with_parent() -> None:
    if parent := multiprocessing.parent_process():
        parent.join()
        os._exit(1)


class _Writer:
    """Appends documents to the shards of a folder. ``header`` counts them; ``place`` is where to read on."""

    def __init__(self, folder: Path, header: TokenHeader) -> None:
        self.folder, self.header = folder, header
        self.place: SourcePlace = (0, None)
        self.full = False
        self._digest = hashlib.sha256()
        self._files: tuple[BinaryIO, ...] = ()
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / PARTIAL).exists():
            self._resume()

    def _resume(self) -> None:
        path = self.folder / PARTIAL
        finished, (number, inside) = TokenHeader.load(path), json.loads(path.read_text())["place"]
        finished.check_same_work(self.header, self.folder)
        finished.check_files(self.folder)
        for shard in range(len(finished.shards)):
            with finished.shard_paths(self.folder, shard)[0].open("rb") as file:
                while content := file.read(_READ_BYTES):
                    self._digest.update(content)
        self.header, self.place = finished, (number, inside)
        log.info("resuming after %s tokens, in shards 0 to %d", f"{finished.tokens:,}", len(finished.shards) - 1)

    def add(self, documents: Shard, place: SourcePlace) -> int:
        """Append a batch that ends at ``place``, as far as ``max_tokens`` allows; return the number of its tokens."""
        header = self.header
        if header.max_tokens is not None:
            documents = self._fitting(documents, header.max_tokens - header.tokens)
        if not len(documents.ids):
            return 0
        if not self._files:
            paths = header.shard_paths(self.folder, len(header.shards))
            self._files = tuple(path.open("wb") for path in paths)
            header.shards.append({"tokens": 0, "documents": 0})
        shard, source = header.shards[-1], header.sources[place[0]]
        ids = documents.ids.astype(np.dtype(header.dtype).newbyteorder("<"), copy=False)
        starts = (documents.starts + shard["tokens"]).astype("<i8")
        self._digest.update(ids.tobytes())
        for file, array in zip(self._files, (ids, starts, documents.learned)):
            if array is not None:
                file.write(array.tobytes())
        for count in (shard, source):
            count["tokens"] += len(ids)
            count["documents"] += len(starts)
        header.tokens += len(ids)
        header.documents += len(starts)
        if shard["tokens"] >= header.shard_tokens and not self.full:
            self._close_shard()
            header.save(self.folder / PARTIAL, place=place)
        return len(ids)

    def _fitting(self, documents: Shard, room: int) -> Shard:
        """Return the documents that end within ``room`` tokens."""
        ends = np.append(documents.starts[1:], len(documents.ids))
        n = int(np.searchsorted(ends, room, side="right"))
        self.full = n < len(ends)
        if self.full and not n and not self.header.tokens:
            raise ValueError(
                f"max_tokens is {self.header.max_tokens}, but the first document has {ends[0]} tokens; raise it."
            )
        end = ends[n - 1] if n else 0
        learned = None if documents.learned is None else documents.learned[:end]
        return Shard(documents.ids[:end], documents.starts[:n], learned)

    def _close_shard(self) -> None:
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())
            file.close()
        self._files = ()

    def finish(self) -> TokenHeader:
        """Write the header. Raises ValueError when a source that was read held no text."""
        read = self.header.sources
        if self.full:
            read = read[: 1 + max(n for n, source in enumerate(read) if source["tokens"])]
        for source in read:
            if not source["tokens"]:
                raise ValueError(
                    f"data source {source['name']!r} holds no text; pass one that does, or --data.sources tiny."
                )
        self._close_shard()
        self.header.sha256 = self._digest.hexdigest()
        self.header.created = now()
        self.header.save(self.folder / HEADER)
        (self.folder / PARTIAL).unlink(missing_ok=True)
        return self.header
