"""Read the texts of local files: .txt, JSON lines and parquet. Errors name the line or row that is not text."""

# The readers of `datasets` serve the hub, and a local folder as ``hf:PATH``. From plain files they would read other
# texts (tried with datasets 5.2): a text that looks like a date becomes a date, a record without the column is an empty
# text, a byte-order mark or half a surrogate pair inside a file is an error, and errors name no line. `data_files` are
# patterns, which a name with brackets does not match. Parquet reads the same, and would save two lines.

from __future__ import annotations

import gzip
import json
import logging
import math
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from ..io import Record, text_lines, whole_strings, whole_text
from .chat import COLUMNS as CHAT_COLUMNS
from .chat import conversation_of
from .files import SUFFIXES

TXT_SEPARATOR = "<|endoftext|>"
MISSING = "records without text (null or NaN)"
REPAIRED = "texts with half a surrogate pair, read as U+FFFD"
_TXT_CHARACTERS = 1_000_000
_PARQUET_ROWS = 1000

log = logging.getLogger(__name__)


def read_file(path: Path, text_column: str | None) -> Iterator[str]:
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
    """Return ``, line N`` for the first line that is not UTF-8: decoders know the position only within a block."""
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
            # At a line's end: a tokenizer splits there anyway.
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
                raise ValueError(
                    f"{path}, line {number} is not JSON ({error}); write one object a line."
                ) from error
            yield text_of(record, text_column, f"{path}, line {number}", tally)


def _read_parquet(path: Path, text_column: str | None, tally: Tally) -> Iterator[str]:
    from pyarrow import parquet

    file = parquet.ParquetFile(path)
    names = file.schema_arrow.names
    text_columns = CHAT_COLUMNS if text_column is None else (text_column,)
    columns = [name for name in names if name in text_columns]
    number = 0
    # Without a column of text every column is read, and the error of the first row lists them.
    for batch in file.iter_batches(batch_size=_PARQUET_ROWS, columns=columns or None):
        for record in batch.to_pylist():
            number += 1
            yield text_of(record, text_column, f"{path}, row {number}", tally, names)


def no_conversations(source: str) -> ValueError:
    """Make the error for plain text where conversations are expected."""
    return ValueError(
        f"{source} is plain text and holds no conversations; pass .jsonl or .parquet files whose records have "
        "`messages`, or `prompt` and `completion` (for the post stage: with --post.data.sources)."
    )


class Tally:
    """Count of records that are not read as they stand, by reason; one line reports them."""

    def __init__(self) -> None:
        self.counts = Counter[str]()
        self.first: dict[str, str] = {}

    def add(self, reason: str, record_name: str) -> None:
        self.counts[reason] += 1
        self.first.setdefault(reason, record_name)

    def report(self) -> None:
        """Log the number of records and the first of each kind, if there are any."""
        parts = [f"{n} {reason} (first: {self.first[reason]})" for reason, n in self.counts.items()]
        if parts:
            log.info("%s", "; ".join(parts))


def text_of(
    record: object,
    text_column: str | None,
    record_name: str,
    tally: Tally,
    names: Sequence[str] = (),
) -> str:
    """Return the text of a record, "" if it is null or NaN; repair a text that UTF-8 cannot hold (`whole_text`).

    Raises ValueError, naming what was found, for a record without text. ``names`` are the columns of its file, if only
    some are in the record.
    """
    if text_column is None:
        return _conversation_of(record, record_name, tally)
    columns: Record = record if isinstance(record, dict) else {}
    listed = ", ".join(names or columns) or "none"
    if text_column not in columns:
        raise ValueError(
            f"{record_name} has no text in column {text_column!r}; its columns are {listed}: "
            "choose one with --data.text-column, or --text-column of prepare-data."
        )
    text = columns[text_column]
    is_nan = isinstance(text, float) and math.isnan(text)  # how pandas writes a missing text
    if text is None or is_nan:
        tally.add(MISSING, record_name)
        return ""
    if not isinstance(text, str):
        raise ValueError(
            f"{record_name} holds {str(text)[:40]} in column {text_column!r}, of type {type(text).__name__}, not text; "
            f"its columns are {listed}: choose one of text with --data.text-column, or --text-column of "
            "prepare-data, or write this one as text."
        )
    whole = whole_text(text)
    if whole is not text:
        tally.add(REPAIRED, record_name)
    return whole


def _conversation_of(record: object, record_name: str, tally: Tally) -> str:
    conversation = conversation_of(record, record_name)
    # JSON escapes a pair, as of an emoji, and half of one alike; most conversations have neither.
    if "\\ud" not in conversation:
        return conversation
    whole = json.dumps(whole_strings(json.loads(conversation)))
    if whole != conversation:
        tally.add(REPAIRED, record_name)
    return whole
