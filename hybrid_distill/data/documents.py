"""Texts of data sources, in a fixed order and readable from any place."""

from __future__ import annotations

import gzip
import json
import logging
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from glob import glob
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import TextIO

from ..assets import corpus_documents
from ..assets.dictionaries import write_probe_documents
from ..io import Record, text_lines, whole_strings, whole_text
from .chat import COLUMNS as CHAT_COLUMNS
from .chat import conversation_of
from .files import SUFFIXES, source_files
from .hub import HUB, Pin, Pins, hub_documents, repository
from .tokens import hash_of

TXT_SEPARATOR = "<|endoftext|>"
PROBE_LIKE = "tiny:probe_like"
"""Control source outside the corpus: dictionaries with questions in the probe's own wording."""
PROBE_LIKE_DOCUMENTS = 2000
BATCH_CHARACTERS = 1_000_000
MISSING = "records without text (null or NaN)"
REPAIRED = "texts with half a surrogate pair, read as U+FFFD"
_BATCH_DOCUMENTS = 1000
_TXT_CHARACTERS = 1_000_000
_EMBEDDED: dict[str, Callable[[], Iterable[str]]] = {
    "tiny": partial(corpus_documents, "train"),
    "tiny:train": partial(corpus_documents, "train"),
    "tiny:held_out": partial(corpus_documents, "held_out"),
    PROBE_LIKE: partial(write_probe_documents, PROBE_LIKE_DOCUMENTS, "probe-like documents"),
}

log = logging.getLogger(__name__)

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
    texts = list(islice(read_documents("tiny:held_out" if source == "tiny" else source, text_column), n))
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
        return hash_of([source, pin.files])
    folder = repository(source)
    names = sorted(glob("**", root_dir=folder, recursive=True))  # except hidden ones
    paths = [folder / name for name in names]
    return hash_of([source, _stats(path for path in paths if path.is_file())])


def _stats(files: Iterable[Path]) -> list[object]:
    stats: list[object] = []
    for path in files:
        stat = path.stat()
        stats.append([str(path.resolve()), stat.st_size, stat.st_mtime_ns])
    return stats


def is_embedded(source: str) -> bool:
    """Check whether a source is part of the embedded corpus."""
    return source.split(":")[0] == "tiny"


class Tally:
    """Count of records that are not read as they stand, by reason; one line reports them."""

    def __init__(self) -> None:
        self.counts = Counter[str]()
        self.first: dict[str, str] = {}

    def add(self, reason: str, place: str) -> None:
        self.counts[reason] += 1
        self.first.setdefault(reason, place)

    def report(self) -> None:
        """Log the number of records and the first of each kind, if there are any."""
        parts = [f"{n} {reason} (first: {self.first[reason]})" for reason, n in self.counts.items()]
        if parts:
            log.info("%s", "; ".join(parts))


def text_of(record: object, text_column: str | None, place: str, tally: Tally, names: Sequence[str] = ()) -> str:
    """Return the text of a record, "" if it is null or NaN; repair a text that UTF-8 cannot hold (`whole_text`).

    Raises ValueError, naming what was found, for a record without text. ``names`` are the columns of its file, if only
    some are in the record.
    """
    if text_column is None:
        return _conversation_of(record, place, tally)
    columns: Record = record if isinstance(record, dict) else {}
    listed = ", ".join(names or columns) or "none"
    if text_column not in columns:
        raise ValueError(
            f"{place} has no text in column {text_column!r}; its columns are {listed}: "
            "choose one with --data.text-column, or --text-column of prepare-data."
        )
    text = columns[text_column]
    is_nan = isinstance(text, float) and math.isnan(text)  # how pandas writes a missing text
    if text is None or is_nan:
        tally.add(MISSING, place)
        return ""
    if not isinstance(text, str):
        raise ValueError(
            f"{place} holds {str(text)[:40]} in column {text_column!r}, of type {type(text).__name__}, not text; its "
            f"columns are {listed}: choose one of text with --data.text-column, or --text-column of prepare-data, or "
            "write this one as text."
        )
    whole = whole_text(text)
    if whole is not text:
        tally.add(REPAIRED, place)
    return whole


def _conversation_of(record: object, place: str, tally: Tally) -> str:
    conversation = conversation_of(record, place)
    # JSON escapes a pair, as of an emoji, and half of one alike; most conversations have neither.
    if "\\ud" not in conversation:
        return conversation
    whole = json.dumps(whole_strings(json.loads(conversation)))
    if whole != conversation:
        tally.add(REPAIRED, place)
    return whole


# Local sources. The readers of `datasets` serve the hub, and a local folder as ``hf:PATH``. Of plain files they would
# make other texts (tried with datasets 5.2): a text that looks like a date becomes a date, a record without the column
# is an empty text, a mark or half a surrogate pair inside a file is an error, and errors name no line. `data_files`
# are patterns, which a name with brackets does not match. Parquet reads the same, and would save two lines.


def _local_documents(source: str, text_column: str | None, place: Place) -> tuple[Iterator[str], Callable[[], Place]]:
    """Return a source's texts, and a function that returns the place after the last text read."""
    if is_embedded(source):
        if text_column is None:
            raise no_conversations(source)
        if source not in _EMBEDDED:
            part = source.partition(":")[2]
            raise ValueError(f"the embedded corpus has no split {part!r}; pass train, held_out or probe_like.")
        readers = [_EMBEDDED[source]]
    else:
        readers = [partial(_read_file, file, text_column) for file in source_files(source)]
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


def _read_file(path: Path, text_column: str | None) -> Iterator[str]:
    """Read the texts of a file. Raises ValueError if its content does not match its suffix or is truncated."""
    from pyarrow import ArrowException

    tally = Tally()
    try:
        if path.suffix == ".txt":
            if text_column is None:
                raise no_conversations(str(path))
            yield from _read_txt(path)
        elif path.suffix == ".parquet":
            yield from _read_parquet(path, text_column, tally)
        else:
            yield from _read_jsonl(path, text_column, tally)
    except (OSError, EOFError, UnicodeDecodeError, zlib.error, ArrowException) as error:
        line = ""
        if isinstance(error, UnicodeDecodeError) and path.suffix != ".parquet":
            line = _first_bad_line(path)
        raise ValueError(
            f"{path}{line} cannot be read ({error}); text is expected in UTF-8, whole files of {', '.join(SUFFIXES)}."
        ) from error
    finally:
        tally.report()


def _opened(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")


def _first_bad_line(path: Path) -> str:
    """Return ``, line N`` for the first line that is not UTF-8: decoders know the place only within a block."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return f", line {number},"
    return ""


def _read_txt(path: Path) -> Iterator[str]:
    """Read one document, or several separated by lines ``<|endoftext|>``.

    A document of more than a million characters is split at a line end, so that no file is held in memory.
    """
    lines: list[str] = []
    n_characters = 0
    with _opened(path) as file:
        for line in text_lines(file):
            is_separator = line.strip() == TXT_SEPARATOR
            if not is_separator:
                lines.append(line)
                n_characters += len(line)
            if is_separator or n_characters > _TXT_CHARACTERS:
                yield "".join(lines)
                lines = []
                n_characters = 0
    yield "".join(lines)


def _read_jsonl(path: Path, text_column: str | None, tally: Tally) -> Iterator[str]:
    with _opened(path) as file:
        for number, line in enumerate(text_lines(file), 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number} is not JSON ({error}); write one object a line.") from error
            yield text_of(record, text_column, f"{path}, line {number}", tally)


def _read_parquet(path: Path, text_column: str | None, tally: Tally) -> Iterator[str]:
    from pyarrow import parquet

    file = parquet.ParquetFile(path)
    names = file.schema_arrow.names
    text_columns = CHAT_COLUMNS if text_column is None else (text_column,)
    columns = [name for name in names if name in text_columns]
    number = 0
    # Without a column of text every column is read, and the error of the first row lists them.
    for batch in file.iter_batches(batch_size=_BATCH_DOCUMENTS, columns=columns or None):
        for record in batch.to_pylist():
            number += 1
            yield text_of(record, text_column, f"{path}, row {number}", tally, names)


def no_conversations(place: str) -> ValueError:
    """Make the error for plain text where conversations are expected."""
    return ValueError(
        f"{place} is plain text and holds no conversations; pass .jsonl or .parquet files whose records have "
        "`messages`, or `prompt` and `completion` (for the post stage: with --post.data.sources)."
    )


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
