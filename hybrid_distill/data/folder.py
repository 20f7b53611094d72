"""Token folders: tokenised text in memory-mapped shards, under a header that says what made them.

The header is written last, so a folder is whole or has none. What an interrupted preparation had finished is in
``tokens.partial.json``, and the next one goes on from there. docs/data.md describes the format.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from filelock import FileLock
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from ..io import write_json
from .chat import template_hash
from .documents import BATCH_CHARACTERS, Place, document_batches, source_fingerprint
from .tokens import Shard, Tokens, eos_id, hash_of, id_dtype, tokenizer_fingerprint, vocabulary_size
from .workers import encoder

log = logging.getLogger(__name__)

FORMAT = "hybrid-distill/tokens/2"
HEADER = "tokens.json"
PARTIAL = "tokens.partial.json"
SHARD_TOKENS = 2**30
_MADE_FROM = ("format", "tokenizer_fingerprint", "text_column", "chat_template", "max_tokens", "shard_tokens")


@dataclass
class TokenHeader:
    """What a token folder holds. ``tokens.json`` is this, field by field."""

    format: str
    tokenizer: str
    """Its name or path when the folder was made; the fingerprint is what counts."""
    tokenizer_fingerprint: str
    vocabulary_size: int
    eos_id: int
    dtype: str
    """Of the ids: uint16 or uint32, little-endian."""
    text_column: str
    shard_tokens: int
    max_tokens: int | None
    sources: list[dict[str, Any]]
    """For each one its ``name``, ``fingerprint``, ``tokens`` and ``documents``, in the order they were read."""
    tokens: int = 0
    documents: int = 0
    shards: list[dict[str, int]] = field(default_factory=list)
    """``tokens`` and ``documents`` of each."""
    sha256: str = ""
    """Of the ids of all shards, one after the other."""
    created: str = ""
    chat_template: str = ""
    """Hash of the template, of conversations; headers of plain text may be without this entry."""

    @property
    def chat(self) -> bool:
        """Whether the folder holds conversations."""
        return bool(self.chat_template)

    @classmethod
    def load(cls, path: Path) -> TokenHeader:
        """Raises ValueError for a file that is no header, or one of another format."""
        try:
            record = json.loads(path.read_text())
            if record["format"] != FORMAT:
                raise ValueError(f"its format is {record['format']!r}, not {FORMAT!r}")
            record.setdefault("chat_template", "")
            header = cls(**{entry.name: record[entry.name] for entry in fields(cls)})
            counted = sum(shard["tokens"] for shard in header.shards)
            if header.dtype not in ("uint16", "uint32") or counted != header.tokens:
                raise ValueError(f"{counted} tokens in shards are not {header.tokens}, or {header.dtype!r} is no type")
            return header
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path} is not the header of a token folder ({error}); prepare the text again with "
                "`hybrid-distill prepare-data`."
            ) from error

    def save(self, path: Path, **more: Any) -> None:
        """Replace the file at once."""
        write_json(path, {**asdict(self), **more})

    def check_same_work(self, other: TokenHeader, folder: Path) -> None:
        """Raises ValueError where ``other`` is not made from the same text in the same way."""
        differ = [name for name in _MADE_FROM if getattr(self, name) != getattr(other, name)]
        read = [[source["fingerprint"] for source in header.sources] for header in (self, other)]
        if read[0] != read[1]:
            differ.append("sources (or a file of theirs has changed)")
        if differ:
            raise ValueError(
                f"{folder} holds tokens made with another {', '.join(differ)}; name another folder, or delete this one."
            )


def is_token_folder(source: str | Path) -> bool:
    """Whether ``source`` is a token folder. Raises ValueError for one whose preparation was not finished."""
    folder = Path(source).expanduser()
    if not (folder / HEADER).is_file() and (folder / PARTIAL).is_file():
        raise ValueError(
            f"the token folder {folder} is not finished; run the `hybrid-distill prepare-data` that began it once more."
        )
    return (folder / HEADER).is_file()


def open_tokens(folder: str | Path, tokenizer: PreTrainedTokenizerBase) -> Tokens:
    """The tokens of a folder, memory-mapped. Raises ValueError for another tokenizer's, and where bytes are missing."""
    folder = Path(folder).expanduser()
    header = TokenHeader.load(folder / HEADER)
    check_tokenizer({folder: header}, tokenizer)
    _check_sizes(folder, header)
    ids_dtype = np.dtype(header.dtype).newbyteorder("<")
    types = (ids_dtype, np.dtype("<i8"), np.dtype(bool))
    shards = tuple(
        Shard(*(np.memmap(path, dtype, "r") for path, dtype in zip(_shard_paths(folder, number, header.chat), types)))
        for number in range(len(header.shards))
    )
    content = [header.sha256, header.chat_template] if header.chat else [header.sha256]
    return Tokens(shards, eos_id(tokenizer), hash_of(content))


def check_tokenizer(headers: dict[Path, TokenHeader], tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ValueError, naming the tokenizers, unless ``tokenizer`` made all of these folders."""
    own, name = tokenizer_fingerprint(tokenizer), tokenizer.name_or_path or "unnamed"
    same = {tokenizer_fingerprint(tokenizer, chat=True): own}  # what a folder of conversations holds
    made_with = {same.get(header.tokenizer_fingerprint, header.tokenizer_fingerprint) for header in headers.values()}
    listed = ", ".join(
        f"{folder} with {header.tokenizer} ({header.tokenizer_fingerprint[:12]})" for folder, header in headers.items()
    )
    fix = f"prepare the text again with `hybrid-distill prepare-data --tokenizer {name}`"
    if len(made_with) > 1:
        raise ValueError(
            f"data.sources mixes tokens of different tokenizers: {listed}; the run's is {name} ({own[:12]}): {fix}."
        )
    if made_with - {own}:
        raise ValueError(
            f"data.sources names tokens of another tokenizer than the run's, {name} ({own[:12]}): {listed}; "
            f"{fix}, or name a teacher with that tokenizer."
        )


def cached_tokens(source: str, tokenizer: PreTrainedTokenizerBase, root: Path, text_column: str | None) -> Tokens:
    """Tokens of a local source, memory-mapped from the cache; tokenised first when they are not there.

    Safe when several processes begin together: one writes, the others wait.
    """
    how = template_hash(tokenizer) if text_column is None else text_column
    key = hash_of([FORMAT, source_fingerprint(source), tokenizer_fingerprint(tokenizer), how])
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
    """Tokenise sources, one after the other, into a folder; only one process may.

    Without a ``text_column``, records are conversations. A shard ends with the batch of documents in which it reaches
    ``shard_tokens``. With ``max_tokens``, documents are taken as long as they fit. A folder that is whole is left as it
    is, an unfinished one is gone on with from its last whole shard: the bytes are the same as in one go.
    Raises ValueError for a source that is missing or empty, and for a folder that holds other tokens.
    """
    chat = text_column is None
    header = TokenHeader(
        format=FORMAT,
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
        whole = TokenHeader.load(folder / HEADER)
        whole.check_same_work(header, folder)
        _check_sizes(folder, whole)
        return whole
    writer = _Writer(folder, header)
    batches = _batches(sources, text_column, writer.place, min(BATCH_CHARACTERS, 4 * shard_tokens))
    start = writer.header.tokens
    with (
        encoder(tokenizer, id_dtype(tokenizer), workers, chat) as encoded,
        tqdm(total=max_tokens, initial=start, unit="tok", unit_scale=True, desc="tokens", disable=None) as bar,
    ):
        for shard, place in encoded(batches):
            bar.update(writer.add(shard, place))
            if writer.full:
                break
    return writer.finish()


def _batches(
    sources: Sequence[str], text_column: str | None, place: tuple[int, Place], max_characters: int
) -> Iterator[tuple[list[str], tuple[int, Place]]]:
    """Batches of all sources; a place is the number of the source and the place in it."""
    first, inside = place
    for number in range(first, len(sources)):
        for batch, here in document_batches(sources[number], text_column, inside, max_characters):
            yield batch, (number, here)
        inside = None


class _Writer:
    """Appends documents to the shards of a folder; ``header`` counts what it has taken, in whole shards at first."""

    def __init__(self, folder: Path, header: TokenHeader) -> None:
        self.folder, self.header = folder, header
        self.place: tuple[int, Place] = (0, None)
        self.full = False
        self._digest = hashlib.sha256()
        self._files: tuple[BinaryIO, ...] = ()
        self._dtype = np.dtype(header.dtype).newbyteorder("<")
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / PARTIAL).exists():
            self._go_on()

    def _go_on(self) -> None:
        path = self.folder / PARTIAL
        before, place = TokenHeader.load(path), json.loads(path.read_text())["place"]
        before.check_same_work(self.header, self.folder)
        _check_sizes(self.folder, before)
        for number in range(len(before.shards)):
            with _shard_paths(self.folder, number)[0].open("rb") as file:
                while content := file.read(2**24):
                    self._digest.update(content)
        self.header, self.place = before, (place[0], place[1])
        log.info("going on after %s tokens, in shards 0 to %d", f"{before.tokens:,}", len(before.shards) - 1)

    def add(self, documents: Shard, place: tuple[int, Place]) -> int:
        """Append a batch that ends at ``place``, or what ``max_tokens`` leaves room for; the number of its tokens."""
        if self.header.max_tokens is not None:
            documents = self._fitting(documents, self.header.max_tokens - self.header.tokens)
        if not len(documents.ids):
            return 0
        if not self._files:
            paths = _shard_paths(self.folder, len(self.header.shards), self.header.chat)
            self._files = tuple(path.open("wb") for path in paths)
            self.header.shards.append({"tokens": 0, "documents": 0})
        shard, source = self.header.shards[-1], self.header.sources[place[0]]
        content = documents.ids.astype(self._dtype, copy=False).tobytes()
        self._digest.update(content)
        self._files[0].write(content)
        self._files[1].write((documents.starts + shard["tokens"]).astype("<i8").tobytes())
        if documents.learned is not None:
            self._files[2].write(documents.learned.tobytes())
        for count in (shard, source):
            count["tokens"] += len(documents.ids)
            count["documents"] += len(documents.starts)
        self.header.tokens += len(documents.ids)
        self.header.documents += len(documents.starts)
        if shard["tokens"] >= self.header.shard_tokens and not self.full:
            self._close_shard()
            self.header.save(self.folder / PARTIAL, place=place)
        return len(documents.ids)

    def _fitting(self, documents: Shard, room: int) -> Shard:
        """The documents that end within ``room`` tokens."""
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
                    f"data source {source['name']!r} holds no text; name one that does, or --data.sources tiny."
                )
        self._close_shard()
        self.header.sha256 = self._digest.hexdigest()
        self.header.created = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self.header.save(self.folder / HEADER)
        (self.folder / PARTIAL).unlink(missing_ok=True)
        return self.header


def _shard_paths(folder: Path, number: int, chat: bool = False) -> tuple[Path, ...]:
    """Files of a shard, in the order of the fields of `Shard`."""
    return tuple(folder / f"{name}-{number:05d}.bin" for name in ("ids", "starts", *(["learned"] if chat else [])))


def _check_sizes(folder: Path, header: TokenHeader) -> None:
    """Raises ValueError naming the file that is missing, truncated or too long."""
    for number, shard in enumerate(header.shards):
        expected = (shard["tokens"] * np.dtype(header.dtype).itemsize, shard["documents"] * 8, shard["tokens"])
        for path, size in zip(_shard_paths(folder, number, header.chat), expected):
            found = path.stat().st_size if path.exists() else 0
            if found != size:
                raise ValueError(
                    f"{path} has {found} bytes where the header says {size}; copy the folder again, or delete it "
                    "and prepare it again."
                )
