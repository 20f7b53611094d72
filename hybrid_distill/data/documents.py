"""Texts of data sources, in a fixed order and readable from any place."""

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
from .hub import HUB, Pin, Pins, hub_documents, repository
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

Place = list[int] | Record | None
"""Place to resume reading, as JSON: [files fully read, documents read of the next one], or the state of a stream."""
SourcePlace = tuple[int, Place]
"""Number of a source, and the place to resume in it."""


def read_documents(source: str, text_column: str | None = "text") -> Iterator[str]:
    """Read the texts of a local source, in the order of its sorted files. Raises ValueError naming the problem.

    If ``text_column`` is None, here and below, records are conversations, and a text is one conversation as JSON.
    """
    return _local_documents(source, text_column, None)[0]


def read_held_out(source: str, n: int, text_column: str | None = "text") -> list[str]:
    """Read the first ``n`` texts of a source; ``tiny`` is the held-out split of the embedded corpus.

    Raises ValueError as `read_documents` does, and if all of them are blank.
    """
    texts = list(
        islice(read_documents("tiny:held_out" if source == "tiny" else source, text_column), n)
    )
    if n and not any(text.strip() for text in texts):
        raise ValueError(f"{source} holds no text; pass a file that does, or tiny.")
    return texts


def document_batches(
    sources: Sequence[str],
    text_column: str | None,
    max_characters: int,
    place: SourcePlace = (0, None),
    pins: Pins = MappingProxyType({}),
) -> Iterator[tuple[list[str], SourcePlace]]:
    """Read the texts of sources in batches, starting at ``place``; yield each batch with the place after it.

    Sources on the hub are read at the commits in ``pins``, which names all of them. Files that were read to the end are
    not opened again. Raises ValueError naming the problem.
    """
    first, inside = place
    for number, source in enumerate(sources[first:], first):
        if source.startswith(HUB):
            texts, here = _hub_documents(source, text_column, inside, pins.get(source))
        else:
            texts, here = _local_documents(source, text_column, inside)
        inside = None
        for batch in _batches(texts, max_characters):
            # `texts` has given nothing beyond this batch yet, so `here` is the place after it.
            yield batch, (number, here())


def _batches(texts: Iterator[str], max_characters: int) -> Iterator[list[str]]:
    """Cut texts into lists that end at a number of texts or of characters; a list keeps whole texts."""
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
    """Hash a source: texts of the embedded corpus, data files of a hub dataset (by its pin), or names, sizes and times
    of local files."""
    if is_embedded(source):
        return hash_of(list(read_documents(source)))
    if not source.startswith(HUB):
        return hash_of(_stats(source_files(source)))
    if pin is not None:
        # The files' hash and not the commit: a new card alone must not tokenize everything again.
        return hash_of([source, pin.files])
    folder = repository(source)
    names = sorted(glob("**", root_dir=folder, recursive=True))  # except hidden ones
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


def _local_documents(
    source: str, text_column: str | None, place: Place
) -> tuple[Iterator[str], Callable[[], Place]]:
    """Return a source's texts, and a function that returns the place after the last text read."""
    if is_embedded(source):
        if text_column is None:
            raise no_conversations(source)
        if source not in _EMBEDDED:
            part = source.partition(":")[2]
            raise ValueError(
                f"the embedded corpus has no split {part!r}; pass train, held_out or probe_like."
            )
        readers = [_EMBEDDED[source]]
    else:
        readers = [partial(read_file, file, text_column) for file in source_files(source)]
    first_file, n_read = place if isinstance(place, list) else (0, 0)

    def read() -> Iterator[str]:
        nonlocal first_file, n_read
        for reader in readers[first_file:]:
            for text in islice(reader(), n_read, None):
                n_read += 1
                yield text
            first_file += 1
            n_read = 0

    return read(), lambda: [first_file, n_read]


def _hub_documents(
    source: str, text_column: str | None, place: Place, pin: Pin | None
) -> tuple[Iterator[str], Callable[[], Place]]:
    """Stream the texts of a data set on the hub; see `hub_documents`."""
    records, here = hub_documents(source, pin, place if isinstance(place, dict) else None)

    def read() -> Iterator[str]:
        tally = Tally()
        try:
            for record in records:
                yield text_of(record, text_column, source, tally)
        finally:
            tally.report()

    return read(), here
