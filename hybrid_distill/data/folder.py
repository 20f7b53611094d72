"""Token folders: tokenized text in memory-mapped shards, with a header that records their origin (docs/data.md)."""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

import numpy as np
from filelock import FileLock
from transformers import PreTrainedTokenizerBase

from ..io import Record, read_json, sync
from ..progress import Phase
from ..provenance import now
from ..vocabulary import vocabulary_size
from .chat import template_hash
from .documents import BATCH_CHARACTERS, SourcePlace, document_batches, source_fingerprint
from .header import FolderHeader
from .hub import HUB, Pin, Pins, is_on_hub, resolve
from .tokens import Shard, Tokens, encode, eos_id, hash_of, id_dtype, tokenizer_fingerprint

log = logging.getLogger(__name__)

SHARD_TOKENS, CACHE_SHARD_TOKENS = 2**30, 2**24

Reader = Callable[[SourcePlace], Iterator[tuple[list[str], SourcePlace]]]
"""Function that reads texts in batches, starting at a place; it yields each batch with the place after it."""


@dataclass
class TokenHeader(FolderHeader):
    """Entries of ``tokens.json``."""

    FORMAT = "hybrid-distill/tokens/2"
    CONTENT = "tokens"
    REMAKE = "prepare the text again with `hybrid-distill prepare-data`"
    FILES = ("ids-", "starts-", "learned-")
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
    sources: list[Record]
    """``name``, ``fingerprint``, ``tokens`` and ``documents`` of each source, in the order they were read. One on the
    hub also has a ``pin``, the commit (`Pin`)."""
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

    def identity(self) -> dict[str, object]:
        prints = [source["fingerprint"] for source in self.sources]
        return {**super().identity(), "sources (or a file of theirs has changed)": prints}

    def shard_paths(self, folder: Path, number: int) -> tuple[Path, ...]:
        """Return the files of a shard, in the order of the fields of `Shard`."""
        names = self.FILES if self.chat else self.FILES[:2]
        return tuple(folder / f"{name}{number:05d}.bin" for name in names)

    def sizes(self, folder: Path) -> dict[Path, int]:
        found: dict[Path, int] = {}
        for number, shard in enumerate(self.shards):
            sizes = (shard["tokens"] * np.dtype(self.dtype).itemsize, shard["documents"] * 8, shard["tokens"])
            found.update(zip(self.shard_paths(folder, number), sizes))
        return found

    def __str__(self) -> str:
        size = self.tokens * np.dtype(self.dtype).itemsize + self.documents * 8
        return (
            f"{self.tokens:,} tokens of {self.documents:,} documents, files: {len(self.shards)} "
            f"({self.dtype}, {size / 1e6:,.1f} MB)"
        )


def is_token_folder(source: str | Path) -> bool:
    """Check whether ``source`` is a token folder. Raises ValueError for an unfinished one."""
    return TokenHeader.is_in(Path(source).expanduser())


def open_tokens(folder: str | Path, tokenizer: PreTrainedTokenizerBase) -> Tokens:
    """Memory-map the tokens of a folder. Raises ValueError if another tokenizer made them or bytes are missing."""
    folder = Path(folder).expanduser()
    header = TokenHeader.open(folder)
    check_tokenizer({folder: header}, tokenizer)
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
        f"data.sources {'mixes' if len(made_with) > 1 else 'has'} tokens made with a tokenizer other than the run's "
        f"{name} ({own[:12]}): {listed}; prepare the text again with `hybrid-distill prepare-data --tokenizer {name}`, "
        "or pass a teacher with that tokenizer."
    )


@dataclass(frozen=True)
class CachedSource:
    """A source and its place in the cache of tokens."""

    source: str
    text_column: str | None
    limit: int | None
    """Largest number of tokens to read of a source on the hub."""
    pin: Pin | None
    folder: Path

    @property
    def is_there(self) -> bool:
        """True if the tokens are complete."""
        return TokenHeader.file(self.folder).exists()

    def write(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Tokenize the source, unless that is done. Several processes may call this: one writes, the others wait."""
        if self.is_there:
            return
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{self.folder}.lock"):
            try:
                write_tokens(
                    self.folder,
                    [self.source],
                    tokenizer,
                    text_column=self.text_column,
                    max_tokens=self.limit,
                    shard_tokens=CACHE_SHARD_TOKENS,
                    pins={} if self.pin is None else {self.source: self.pin},
                )
            except ValueError:  # a local file must change to become readable, and then has another folder
                if self.limit is None or not TokenHeader.file(self.folder, partial=True).exists():
                    shutil.rmtree(self.folder, ignore_errors=True)
                raise


def cached_source(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    root: Path,
    text_column: str | None,
    hub_tokens: int | None,
    pins: Pins,
) -> CachedSource:
    """Find the place of a source's tokens in the cache. ``pins`` has the commit of every source on the hub."""
    limit, pin = None, pins.get(source)
    if source.startswith(HUB):
        limit = hub_tokens
    how = template_hash(tokenizer) if text_column is None else text_column
    key = [TokenHeader.FORMAT, source_fingerprint(source, pin), tokenizer_fingerprint(tokenizer), how]
    if limit:
        key = [*key, limit]
    return CachedSource(source, text_column, limit, pin, root / "tokens" / hash_of(key)[:32])


def write_tokens(
    folder: Path,
    sources: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    name: str | None = None,
    text_column: str | None = "text",
    max_tokens: int | None = None,
    shard_tokens: int = SHARD_TOKENS,
    made_by: tuple[str, Reader] | None = None,
    pins: Pins = MappingProxyType({}),
) -> TokenHeader:
    """Tokenize sources, in order, into a folder; only one process may call this.

    If ``text_column`` is None, records are conversations. A shard ends with the batch of documents in which it reaches
    ``shard_tokens``. With ``max_tokens``, documents are added as long as they fit. A finished folder stays unchanged;
    an unfinished one is resumed after its last complete shard, with the same bytes as without interruption. ``made_by``
    is the fingerprint and the reader of a single source that is generated, not read. Sources on the hub are read at the
    commits in ``pins``; the hub is asked for those that are not there, unless the folder names them: it then goes on
    with its own.
    Raises ValueError for a source that is missing or empty, and for a folder that holds other tokens or other files.
    """
    chat = text_column is None
    if made_by:
        pins, prints = {}, [made_by[0]]
    else:
        pins = {**pins, **_pins_in(folder)}
        pins |= {source: resolve(source) for source in sources if is_on_hub(source) and source not in pins}
        prints = [source_fingerprint(source, pins.get(source)) for source in sources]
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
        sources=[_source_record(s, p, pins.get(s)) for s, p in zip(sources, prints)],
    )
    if (begun := header.begun(folder)) is not None:
        begun.check_files(folder)
        if TokenHeader.file(folder).exists():
            return begun
    writer = _Writer(folder, begun or header)
    characters = min(BATCH_CHARACTERS, 4 * shard_tokens)
    read = made_by[1] if made_by else partial(document_batches, sources, text_column, characters, pins=pins)
    dtype, start = id_dtype(tokenizer), writer.header.tokens
    with Phase("tokenizing", max_tokens, done=start, unit="tokens") as phase:
        for texts, place in read(writer.place):
            phase.update(writer.add(encode(texts, tokenizer, dtype, chat), place))
            if writer.full:
                break
    return writer.finish()


def _source_record(source: str, fingerprint: str, pin: Pin | None) -> Record:
    """Make the header's entry of a source."""
    record: Record = {"name": source, "fingerprint": fingerprint, "tokens": 0, "documents": 0}
    return record if pin is None else {**record, "pin": asdict(pin)}


def _pins_in(folder: Path) -> dict[str, Pin]:
    """Return the commits at which a folder, finished or not, reads its sources."""
    for is_partial in (False, True):
        if (path := TokenHeader.file(folder, is_partial)).is_file():
            sources = TokenHeader.load(path).sources
            return {record["name"]: Pin(**record["pin"]) for record in sources if "pin" in record}
    return {}


class _Writer:
    """Writer that appends documents to the shards of a folder. ``header`` counts them; reading resumes at ``place``."""

    def __init__(self, folder: Path, header: TokenHeader) -> None:
        self.folder, self.header = folder, header
        self.place: SourcePlace = (0, None)
        self.full = False
        self._files: list[BinaryIO] = []
        folder.mkdir(parents=True, exist_ok=True)
        if header.shards:
            number, inside = read_json(header.file(folder, partial=True))["place"]
            self.place = number, inside
            log.info("resuming after %s tokens, in shards 0 to %d", f"{header.tokens:,}", len(header.shards) - 1)

    def add(self, documents: Shard, place: SourcePlace) -> int:
        """Append a batch that ends at ``place``, up to ``max_tokens``; return the number of tokens appended."""
        header = self.header
        if header.max_tokens is not None:
            documents = self._fitting(documents, header.max_tokens - header.tokens)
        if not len(documents.ids):
            return 0
        if not self._files:
            self._files = [path.open("wb") for path in header.shard_paths(self.folder, len(header.shards))]
            header.shards.append({"tokens": 0, "documents": 0})
        shard, source = header.shards[-1], header.sources[place[0]]
        starts = (documents.starts + shard["tokens"]).astype("<i8")
        for file, array in zip(self._files, (documents.ids, starts, documents.learned)):
            if array is not None:
                file.write(array.tobytes())
        for count in (shard, source):
            count["tokens"] += len(documents.ids)
            count["documents"] += len(starts)
        header.tokens += len(documents.ids)
        header.documents += len(starts)
        if shard["tokens"] >= header.shard_tokens and not self.full:
            self._close_shard()
            header.save(header.file(self.folder, partial=True), place=place)
        return len(documents.ids)

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
            file.close()
            sync(Path(file.name))
        self._files = []

    def finish(self) -> TokenHeader:
        """Write the header. Raises ValueError if a source that was read held no text."""
        read = self.header.sources
        if self.full:
            read = read[: 1 + max(n for n, source in enumerate(read) if source["tokens"])]
        if empty := [source["name"] for source in read if not source["tokens"]]:
            raise ValueError(f"data source {empty[0]!r} holds no text; pass one that does, or --data.sources tiny.")
        self._close_shard()
        digest = hashlib.sha256()
        for number in range(len(self.header.shards)):
            with self.header.shard_paths(self.folder, number)[0].open("rb") as file:
                while content := file.read(2**24):
                    digest.update(content)
        self.header.sha256, self.header.created = digest.hexdigest(), now()
        self.header.finish(self.folder)
        return self.header
