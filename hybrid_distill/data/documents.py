"""Read the texts of data sources, in a fixed order and from any position."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from glob import glob
from itertools import islice
from pathlib import Path
from types import MappingProxyType

from ..assets import corpus_documents
from ..assets.dictionaries import write_probe_documents
from ..io import Record
from .files import source_files
from .hub import HUB, Pin, Pins, open_stream, records_of, repository
from .readers import Tally, no_conversations, read_file, text_of
from .tokens import hash_of

PROBE_LIKE = "tiny:probe_like"
"""Control source outside the corpus: dictionaries with questions in the probe's own wording."""
PROBE_LIKE_DOCUMENTS = 2000
BATCH_CHARACTERS = 1_000_000
_BATCH_DOCUMENTS = 1000
_EMBEDDED: dict[str, Callable[[], Iterable[str]]] = {
    "tiny": partial(corpus_documents, "train"),
    "tiny:train": partial(corpus_documents, "train"),
    "tiny:held_out": partial(corpus_documents, "held_out"),
    PROBE_LIKE: partial(write_probe_documents, PROBE_LIKE_DOCUMENTS, "probe-like documents"),
}

ReadPosition = list[int] | Record | None
"""Position to resume reading, as JSON: [files fully read, documents read of the next one], or the state of a stream."""
SourcePosition = tuple[int, ReadPosition]
"""Number of a source, and the position to resume in it."""


def read_documents(source: str, text_column: str | None = "text") -> Iterator[str]:
    """Read the texts of a local source, in the order of its sorted files. Raises ValueError naming the problem.

    If ``text_column`` is None (in all functions here), records are conversations, and a text is one of them, in JSON.
    """
    return iter(LocalDocuments(source, text_column))


def read_held_out(source: str, n: int, text_column: str | None = "text") -> list[str]:
    """Read the first ``n`` texts of a source; ``tiny`` is the held-out split of the embedded corpus.

    Raises ValueError as `read_documents` does, and if all of them are blank.
    """
    split = "tiny:held_out" if source == "tiny" else source
    texts = list(islice(read_documents(split, text_column), n))
    if n and not any(text.strip() for text in texts):
        raise ValueError(f"{source} holds no text; pass a file that does, or tiny.")
    return texts


def document_batches(
    sources: Sequence[str],
    text_column: str | None,
    max_characters: int,
    position: SourcePosition = (0, None),
    pins: Pins = MappingProxyType({}),
) -> Iterator[tuple[list[str], SourcePosition]]:
    """Read the texts of sources in batches, starting at ``position``; yield each batch with the position after it.

    Sources on the hub are read at the commits in ``pins``, which names all of them. Files that were read to the end are
    not opened again. Raises ValueError naming the problem.
    """
    first, inside = position
    for number, source in enumerate(sources[first:], first):
        texts: LocalDocuments | HubDocuments
        if source.startswith(HUB):
            texts = HubDocuments(source, text_column, inside, pins.get(source))
        else:
            texts = LocalDocuments(source, text_column, inside)
        inside = None
        for batch in _batches(texts, max_characters):
            # The position after this batch: no further text has been read.
            yield batch, (number, texts.position)


def _batches(texts: Iterable[str], max_characters: int) -> Iterator[list[str]]:
    """Group texts into lists, each ending once it has enough texts or characters; texts stay whole."""
    batch: list[str] = []
    n_characters = 0
    for text in texts:
        batch.append(text)
        n_characters += len(text)
        if len(batch) == _BATCH_DOCUMENTS or n_characters >= max_characters:
            yield batch
            batch = []
            n_characters = 0
    if batch:
        yield batch


def source_fingerprint(source: str, pin: Pin | None = None) -> str:
    """Hash what identifies a source's content.

    This is the texts of the embedded corpus, the data files of a hub dataset (by its pin), or the names, sizes and
    times of local files.
    """
    if is_embedded(source):
        return hash_of(list(read_documents(source)))
    if not source.startswith(HUB):
        return hash_of(_stats(source_files(source)))
    if pin is not None:
        # The files' hash and not the commit: a new card alone must not tokenize everything again.
        return hash_of([source, pin.files])
    folder = repository(source)
    # Unlike rglob, glob leaves out hidden files.
    names = sorted(glob("**", root_dir=folder, recursive=True))
    paths = [folder / name for name in names]
    return hash_of([source, _stats(path for path in paths if path.is_file())])


def _stats(files: Iterable[Path]) -> list[object]:
    stats: list[object] = []
    for path in files:
        stat = path.stat()
        # Not the content, which would have to be read in full at every start.
        stats.append([str(path.resolve()), stat.st_size, stat.st_mtime_ns])
    return stats


def is_embedded(source: str) -> bool:
    """Check whether a source is part of the embedded corpus."""
    return source.split(":")[0] == "tiny"


class LocalDocuments:
    """Texts of a local source, from a position on; can be iterated once. Raises ValueError naming the problem."""

    def __init__(self, source: str, text_column: str | None, position: ReadPosition = None) -> None:
        self._readers = _local_readers(source, text_column)
        self._n_files = 0
        self._n_documents = 0
        if isinstance(position, list):
            self._n_files, self._n_documents = position

    def __iter__(self) -> Iterator[str]:
        for reader in self._readers[self._n_files :]:
            for text in islice(reader(), self._n_documents, None):
                self._n_documents += 1
                yield text
            self._n_files += 1
            self._n_documents = 0

    @property
    def position(self) -> ReadPosition:
        """Position after the last text read."""
        return [self._n_files, self._n_documents]


def _local_readers(source: str, text_column: str | None) -> list[Callable[[], Iterable[str]]]:
    """Return a reader of each file, or one of a part of the embedded corpus."""
    if not is_embedded(source):
        return [partial(read_file, file, text_column) for file in source_files(source)]
    if text_column is None:
        raise no_conversations(source)
    if source not in _EMBEDDED:
        part = source.partition(":")[2]
        raise ValueError(
            f"the embedded corpus has no split {part!r}; pass train, held_out or probe_like."
        )
    return [_EMBEDDED[source]]


class HubDocuments:
    """Texts of a data set on the hub, streamed from a position on, once. Raises as `open_stream` does."""

    def __init__(
        self, source: str, text_column: str | None, position: ReadPosition, pin: Pin | None
    ) -> None:
        self._source = source
        self._text_column = text_column
        state = position if isinstance(position, dict) else None
        self._stream = open_stream(source, pin, state)

    def __iter__(self) -> Iterator[str]:
        tally = Tally()
        try:
            for record in records_of(self._stream, self._source):
                yield text_of(record, self._text_column, self._source, tally)
        finally:
            tally.report()

    @property
    def position(self) -> ReadPosition:
        """Position after the last text read."""
        return self._stream.state_dict()
