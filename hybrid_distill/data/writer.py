"""Write token folders: sources are tokenized in order, and a stopped writer resumes after its last whole shard."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from ..io import Record, naming, read_json, sync
from ..progress import Phase
from ..provenance import now
from ..vocabulary import vocabulary_size
from .chat import template_hash
from .documents import BATCH_CHARACTERS, SourcePosition, document_batches, source_fingerprint
from .folder import SHARD_TOKENS, TokenHeader
from .hub import Pin, Pins, is_on_hub, resolve
from .tokens import Shard, encode, eos_id, hash_of, id_dtype, tokenizer_fingerprint

log = logging.getLogger(__name__)

Reader = Callable[[SourcePosition], Iterator[tuple[list[str], SourcePosition]]]
"""Function that reads texts in batches, starting at a position; it yields each batch with the position after it."""


@dataclass(frozen=True)
class Generated:
    """Source that is generated, not read from files."""

    settings: Record
    """Everything that decides the text, by the names of its options."""
    read: Reader


def write_tokens(
    folder: Path,
    sources: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    name: str | None = None,
    text_column: str | None = "text",
    max_tokens: int | None = None,
    shard_tokens: int = SHARD_TOKENS,
    generated: Generated | None = None,
    pins: Pins = MappingProxyType({}),
) -> TokenHeader:
    """Tokenize sources, in order, into a folder; only one process may call this.

    If ``text_column`` is None, records are conversations. A shard ends with the batch of documents in which it reaches
    ``shard_tokens``. With ``max_tokens``, documents are added as long as they fit. A finished folder stays unchanged;
    an unfinished one is resumed after its last complete shard, with the same bytes as without interruption. With
    ``generated``, the one source has no files. Sources on the hub are read at the commits in the folder's header, else
    in ``pins``; the hub is queried for any others.

    Raises ValueError for a source that is missing or empty, and for a folder that holds other tokens or other files.
    """
    chat = text_column is None
    if generated:
        origin = _generated_origin(sources, generated)
    else:
        # A shard ends with a batch. About 4 characters are a token, so a small shard gets small batches.
        characters = min(BATCH_CHARACTERS, 4 * shard_tokens)
        all_pins = _all_pins(sources, {**pins, **_pins_in(folder)})
        origin = _files_origin(sources, text_column, characters, all_pins)
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
        sources=origin.records,
    )
    existing = header.existing(folder)
    if existing is not None:
        existing.check_files(folder)
        if TokenHeader.file(folder).exists():
            return existing
    writer = ShardWriter(folder, existing or header)
    dtype = id_dtype(tokenizer)
    phase_name = "generating text" if generated else "tokenizing"
    with Phase(phase_name, max_tokens, done=writer.header.tokens, unit="tokens") as phase:
        for texts, position in origin.read(writer.position):
            documents = encode(texts, tokenizer, dtype, chat)
            phase.update(writer.add(documents, position))
            if writer.full:
                break
    return writer.finish()


class _Origin(NamedTuple):
    """Where the texts of a folder come from."""

    records: list[Record]
    """The header's entries of the sources."""
    read: Reader


def _generated_origin(sources: Sequence[str], generated: Generated) -> _Origin:
    (name,) = sources
    record = _source_record(name, hash_of(generated.settings), {})
    return _Origin([{**record, "settings": generated.settings}], generated.read)


def _files_origin(
    sources: Sequence[str], text_column: str | None, characters: int, pins: Pins
) -> _Origin:
    records = []
    for source in sources:
        fingerprint = source_fingerprint(source, pins.get(source))
        records.append(_source_record(source, fingerprint, pins))
    read = partial(document_batches, sources, text_column, characters, pins=pins)
    return _Origin(records, read)


def _source_record(source: str, fingerprint: str, pins: Pins) -> Record:
    """Make the header's entry of a source."""
    record: Record = {"name": source, "fingerprint": fingerprint, "tokens": 0, "documents": 0}
    if source in pins:
        record["pin"] = asdict(pins[source])
    return record


def _all_pins(sources: Sequence[str], pins: Pins) -> dict[str, Pin]:
    """Return ``pins``, and those of all other sources on the hub, for which it is queried."""
    all_pins = dict(pins)
    for source in sources:
        if is_on_hub(source) and source not in all_pins:
            all_pins[source] = resolve(source)
    return all_pins


def _pins_in(folder: Path) -> dict[str, Pin]:
    """Return the commits at which a folder, finished or not, reads its sources."""
    for is_partial in (False, True):
        path = TokenHeader.file(folder, is_partial)
        if path.is_file():
            pins = {}
            for record in TokenHeader.load(path).sources:
                if "pin" in record:
                    pins[record["name"]] = Pin(**record["pin"])
            return pins
    return {}


class ShardWriter:
    """Writer that appends documents to the shards of a folder. ``header`` counts them, ``position`` resumes reading."""

    def __init__(self, folder: Path, header: TokenHeader) -> None:
        self.folder = folder
        self.header = header
        self.position: SourcePosition = (0, None)
        self.full = False
        self._files: list[BinaryIO] = []
        folder.mkdir(parents=True, exist_ok=True)
        if header.shards:
            number, inside = read_json(header.file(folder, partial=True))["position"]
            self.position = (number, inside)
            log.info(
                "resuming after %s tokens, in shards 0 to %d",
                f"{header.tokens:,}",
                len(header.shards) - 1,
            )

    def add(self, documents: Shard, position: SourcePosition) -> int:
        """Append a batch that ends at ``position``, up to ``max_tokens``; return the number of tokens appended."""
        header = self.header
        if header.max_tokens is not None:
            documents = self._fitting(documents, header.max_tokens - header.tokens)
        if not len(documents.ids):
            return 0
        if not self._files:
            paths = header.shard_paths(self.folder, len(header.shards))
            self._files = [path.open("wb") for path in paths]
            header.shards.append({"tokens": 0, "documents": 0})
        shard = header.shards[-1]
        # Documents are counted from the beginning of their shard, a batch from its own.
        starts = (documents.starts + shard["tokens"]).astype("<i8")
        for file, array in zip(self._files, (documents.ids, starts, documents.learned)):
            if array is not None:
                with naming(Path(file.name)):
                    file.write(array.tobytes())
        number, _ = position
        for count in (shard, header.sources[number]):
            count["tokens"] += len(documents.ids)
            count["documents"] += len(starts)
        header.tokens += len(documents.ids)
        header.documents += len(starts)
        # The saved header counts whole shards only, so that a resumed writer overwrites an incomplete one. The last
        # shard of a full folder is left to `finish`.
        if shard["tokens"] >= header.shard_tokens and not self.full:
            self._close_shard()
            header.save(header.file(self.folder, partial=True), position=position)
        return len(documents.ids)

    def _fitting(self, documents: Shard, room: int) -> Shard:
        """Return the documents that end within ``room`` tokens."""
        # [documents]: one past each document's last token.
        ends = np.append(documents.starts[1:], len(documents.ids))
        n_fitting = int(np.searchsorted(ends, room, side="right"))
        self.full = n_fitting < len(ends)
        if self.full and n_fitting == 0 and self.header.tokens == 0:
            raise ValueError(
                f"max_tokens is {self.header.max_tokens}, but the first document has {ends[0]} tokens; raise it."
            )
        end = ends[n_fitting - 1] if n_fitting else 0
        learned = documents.learned
        if learned is not None:
            learned = learned[:end]
        return Shard(documents.ids[:end], documents.starts[:n_fitting], learned)

    def _close_shard(self) -> None:
        for file in self._files:
            with naming(Path(file.name)):
                file.close()
            # Before the header counts the shard: after a power cut, it must not name lost bytes.
            sync(Path(file.name))
        self._files = []

    def finish(self) -> TokenHeader:
        """Write the header. Raises ValueError if a source that was read held no text."""
        header = self.header
        sources = header.sources
        if self.full:
            # Sources after the last one with tokens were not read any more.
            while not sources[-1]["tokens"]:
                sources = sources[:-1]
        empty_names = [source["name"] for source in sources if not source["tokens"]]
        if empty_names:
            raise ValueError(
                f"data source {empty_names[0]!r} holds no text; pass one that does, or --data.sources tiny."
            )
        self._close_shard()
        header.sha256 = self._hash_of_ids()
        header.created = now()
        header.finish(self.folder)
        return header

    def _hash_of_ids(self) -> str:
        """Hash the ids of all shards, as if they were one file: the size of shards does not change it."""
        digest = hashlib.sha256()
        for number in range(len(self.header.shards)):
            ids_path = self.header.shard_paths(self.folder, number)[0]
            with ids_path.open("rb") as file:
                while block := file.read(2**24):
                    digest.update(block)
        return digest.hexdigest()
