"""What a teacher says of rows of text, on disk: of every token the likeliest next ones, in shards under a header.

A shard is an array of rows, each one record (`record_dtype`), in ascending order of the rows' numbers; ``rows.bin``
holds those numbers. A shard appears whole or not at all and the header is written last: a writer that was stopped goes
on with the shards that are missing, and several may write side by side. docs/data.md describes the format.

Shapes: B rows, L tokens of a row, K stored tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..io import replacing, write_json
from .rows import PackedRows, Rows, TaughtBatch
from .tokens import hash_of, tokenizer_fingerprint

FORMAT = "hybrid-distill/logits/1"
HEADER = "logits.json"
PARTIAL = "logits.partial.json"
ROW_IDS = "rows.bin"
SHARD_TOKENS = 2**22
FIX = "run `hybrid-distill cache-logits` for this run, into another folder"
_HALF = 2**16
_RESULTS = ("teacher", "created", "measured")
"""Entries of a header that do not decide what the shards hold."""


@dataclass
class LogitHeader:
    """What a folder of logits holds. ``logits.json`` is this, field by field."""

    format: str
    teacher: str
    """Its name or path when the folder was made; the fingerprint is what counts."""
    teacher_fingerprint: str
    dtype: str
    """Of the teacher's weights."""
    precision: str
    """``fp32`` or ``bf16``: what was computed in."""
    tokenizer_fingerprint: str
    vocabulary_size: int
    """Real tokens, over which the probabilities sum to 1."""
    temperature: float
    top_k: int
    seq_len: int
    text_fingerprint: str
    """Of the tokens that rows are cut from (`PackedRows`)."""
    order: str
    """Fingerprint of the rows in their order."""
    places: int
    """The first places of that order, whose rows are here."""
    rows: int
    """Different rows among them."""
    shard_rows: int
    created: str = ""
    measured: dict[str, Any] = field(default_factory=dict)
    """How much of the teacher the stored tokens are."""

    @classmethod
    def load(cls, path: Path) -> LogitHeader:
        """Raises ValueError for a file that is no header, or one of another format."""
        try:
            record = json.loads(path.read_text())
            if record["format"] != FORMAT:
                raise ValueError(f"its format is {record['format']!r}, not {FORMAT!r}")
            header = cls(**{entry.name: record[entry.name] for entry in fields(cls)})
            if min(header.rows, header.shard_rows, header.seq_len, header.top_k, header.vocabulary_size) < 1:
                raise ValueError("it counts less than one row, token or word")
            return header
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not the header of a teacher's logits ({error}); {FIX}.") from error

    def save(self, path: Path) -> None:
        """Replace the file at once."""
        write_json(path, asdict(self))

    @property
    def fingerprint(self) -> str:
        """Of all that decides what the shards hold."""
        return hash_of({name: value for name, value in asdict(self).items() if name not in _RESULTS})

    @property
    def bytes_a_token(self) -> float:
        return record_dtype(self).itemsize / self.seq_len

    @property
    def shard_sizes(self) -> list[int]:
        """Rows of each shard."""
        return [min(self.shard_rows, self.rows - first) for first in range(0, self.rows, self.shard_rows)]

    def check_same_work(self, other: LogitHeader, folder: Path) -> None:
        """Raises ValueError where ``other`` describes other logits."""
        differ = [
            entry.name
            for entry in fields(self)
            if entry.name not in _RESULTS and getattr(self, entry.name) != getattr(other, entry.name)
        ]
        if differ:
            raise ValueError(
                f"{folder} holds logits made with another {', '.join(differ)}; name another folder, or delete this one."
            )


def record_dtype(header: LogitHeader) -> np.dtype:
    """One row on disk: 4 bytes a stored token, 2 for what is left over, and 2 for every 65,536 words beyond the first.

    ids: the lower 16 bits, of ids in ascending order; log_probs: of these; log_tail: of all other tokens together;
    splits: how many of the ids are below 65,536, below twice that, and so on, which is their upper bits.
    """
    length, k, n_splits = header.seq_len, header.top_k, (header.vocabulary_size - 1) // _HALF
    return np.dtype(
        [
            ("ids", "<u2", (length, k)),
            ("log_probs", "<f2", (length, k)),
            ("log_tail", "<f2", (length,)),
            ("splits", "<u2", (length, n_splits)),
        ]
    )


def pack(
    ids_BLK: Tensor, log_probs_BLK: Tensor, log_tail_BL: Tensor, mask_BL: Tensor, header: LogitHeader
) -> np.ndarray:
    """Records of rows, [B]; padding is stored as zeros and no tail, whatever the teacher says of it."""
    ids_BLK, order_BLK = ids_BLK.masked_fill(~mask_BL[..., None], 0).sort(dim=-1)
    log_probs_BLK = log_probs_BLK.gather(-1, order_BLK).masked_fill(~mask_BL[..., None], 0.0)
    ids = ids_BLK.cpu().numpy()
    records = np.empty(len(ids), record_dtype(header))
    records["ids"] = ids % _HALF
    records["log_probs"] = log_probs_BLK.cpu().numpy()
    records["log_tail"] = log_tail_BL.masked_fill(~mask_BL, -torch.inf).cpu().numpy()
    for number in range(records["splits"].shape[-1]):
        records["splits"][..., number] = (ids < (number + 1) * _HALF).sum(-1)
    return records


def unpack(records: np.ndarray) -> tuple[Tensor, Tensor]:
    """(ids_BLK in ascending order, log_probs_BLK in float32), the latter so that they and the tail sum to 1.

    The tail's own rounding is relative to it; as what rounded probabilities leave over, it would drown in theirs.
    """
    n_stored = records["ids"].shape[-1]
    is_above = np.arange(n_stored)[:, None] >= records["splits"][..., None, :]
    ids = records["ids"].astype(np.int64) + _HALF * is_above.sum(-1)
    log_probs = torch.from_numpy(records["log_probs"].astype(np.float32))
    log_tail = torch.from_numpy(records["log_tail"].astype(np.float32))
    covered = torch.log(-torch.expm1(log_tail)) - log_probs.logsumexp(-1)
    return torch.from_numpy(ids), log_probs + covered.unsqueeze(-1)


def open_logits(folder: str | Path) -> LogitFolder:
    """A finished folder. Raises ValueError for one that is none, is not finished, or lacks a part of a file."""
    folder = Path(folder).expanduser()
    if not (folder / HEADER).is_file():
        raise ValueError(_what_is_missing(folder))
    return LogitFolder(folder, LogitHeader.load(folder / HEADER))


class LogitFolder:
    """Logits to read. Rows are read one by one: nothing stays open, nothing in memory but the rows' numbers.

    Raises ValueError for a file that is not as long as the header says.
    """

    def __init__(self, folder: Path, header: LogitHeader) -> None:
        self.folder, self.header = folder, header
        self._dtype = record_dtype(header)
        self._check_sizes()
        self.row_ids = np.fromfile(folder / ROW_IDS, dtype="<i8")

    def read(self, row_ids: np.ndarray) -> np.ndarray:
        """Records of the rows of these numbers, all of which must be here."""
        places = np.searchsorted(self.row_ids, row_ids)
        assert (self.row_ids[places] == row_ids).all(), "rows that `check` would have refused"
        return np.concatenate([self._record(int(place)) for place in places])

    def _record(self, place: int) -> np.ndarray:
        shard, row = divmod(place, self.header.shard_rows)
        path = shard_path(self.folder, shard)
        record = np.fromfile(path, dtype=self._dtype, count=1, offset=row * self._dtype.itemsize)
        if not len(record):
            raise ValueError(f"{path} ends before its row {row}; copy the folder again, or make it again.")
        return record

    def check(
        self,
        rows: Rows,
        tokenizer: PreTrainedTokenizerBase,
        teacher: str,
        *,
        vocab_size: int,
        places: int,
        temperature: float,
    ) -> None:
        """Raises ValueError unless these are a teacher's logits of the first ``places`` rows of ``rows``.

        ``teacher`` is its `teacher.fingerprint`, or its name where the weights are not at hand.
        """
        header, rows = self.header, numbered(rows)
        made_by = f"{header.teacher} ({header.teacher_fingerprint})"
        own_tokenizer = tokenizer_fingerprint(tokenizer), vocab_size
        is_part = header.rows != rows.n_rows
        if teacher not in (header.teacher_fingerprint, header.teacher):
            problem = f"are those of another teacher, {made_by}; the run's is {teacher}"
        elif (header.tokenizer_fingerprint, header.vocabulary_size) != own_tokenizer:
            problem = f"were made with another tokenizer (of {header.vocabulary_size:,} tokens) than the run's"
        elif header.seq_len != rows.seq_len:
            problem = f"are of rows of {header.seq_len} tokens, data.seq_len is {rows.seq_len}"
        elif header.text_fingerprint != rows.text_fingerprint:
            problem = "are of another text than data.sources"
        elif header.temperature != temperature:
            problem = f"are at temperature {header.temperature:g}, the stage's is {temperature:g}"
        elif is_part and header.order != rows.fingerprint:
            problem = "are of a part of the rows, in the order of another data.seed or data.weights"
        elif is_part and header.places < places:
            problem = f"are of the first {header.places:,} rows, the stage reads {places:,} (steps x batch_size)"
        else:
            return
        raise ValueError(f"the logits in {self.folder} {problem}; {FIX}.")

    def _check_sizes(self) -> None:
        expected = {self.folder / ROW_IDS: 8 * self.header.rows}
        for number, rows in enumerate(self.header.shard_sizes):
            expected[shard_path(self.folder, number)] = rows * self._dtype.itemsize
        for path, size in expected.items():
            found = path.stat().st_size if path.exists() else 0
            if found != size:
                raise ValueError(
                    f"{path} has {found} bytes where the header says {size}; copy the folder again, or delete it and "
                    "make it again."
                )


class TaughtRows:
    """Rows together with what the teacher says of them, for a stage without a teacher in memory."""

    def __init__(self, rows: Rows, logits: LogitFolder) -> None:
        self.rows, self.logits = numbered(rows), logits
        self.fingerprint = hash_of([self.rows.fingerprint, logits.header.fingerprint])

    def batch(self, step: int, batch_size: int, rank: int = 0, world: int = 1) -> TaughtBatch:
        """As `PackedRows.batch`."""
        row_ids = self.rows.step_row_ids(step, batch_size, rank, world)
        ids_BLK, log_probs_BLK = unpack(self.logits.read(row_ids))
        return {
            **self.rows.read(row_ids),
            "teacher_ids_BLK": ids_BLK,
            "teacher_log_probs_BLK": log_probs_BLK,
        }

    def state_dict(self) -> dict[str, Any]:
        return self.rows.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows.load_state_dict(state)


def numbered(rows: Rows) -> PackedRows:
    """The same rows. Raises ValueError for streamed ones, which have no numbers."""
    if not isinstance(rows, PackedRows):
        raise ValueError(
            "streamed rows have no numbers to store logits by; make the data local with `hybrid-distill prepare-data` "
            "and name its folder with --data.sources."
        )
    return rows


def row_ids_of(rows: PackedRows, places: int) -> np.ndarray:
    """The different rows among the first ``places``, ascending."""
    if rows.is_plain_epoch and places >= rows.n_rows:
        return np.arange(rows.n_rows, dtype="<i8")
    return np.unique(rows.row_ids(0, places)).astype("<i8")


def start_folder(folder: Path, header: LogitHeader, row_ids: np.ndarray) -> None:
    """Make a folder ready for its shards. Raises ValueError when it holds other logits, or a part of such."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (HEADER, PARTIAL):
        if (folder / name).exists():
            LogitHeader.load(folder / name).check_same_work(header, folder)
    for left in folder.glob("*.tmp"):  # of a writer that was killed
        left.unlink()
    if not (folder / HEADER).exists():
        write_whole(folder / ROW_IDS, [row_ids.tobytes()])
        header.save(folder / PARTIAL)


def missing_shards(folder: Path, header: LogitHeader) -> list[int]:
    """Numbers of the shards that are still to be written."""
    itemsize = record_dtype(header).itemsize
    paths = {number: shard_path(folder, number) for number in range(len(header.shard_sizes))}
    sizes = {number: path.stat().st_size if path.exists() else -1 for number, path in paths.items()}
    return [number for number, rows in enumerate(header.shard_sizes) if sizes[number] != rows * itemsize]


def write_whole(path: Path, parts: Iterable[bytes]) -> None:
    """Write a file that is whole or is not there."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.writelines(parts)


def finish_folder(folder: Path, header: LogitHeader) -> None:
    """Write the header, now that every shard is there."""
    header.save(folder / HEADER)
    (folder / PARTIAL).unlink(missing_ok=True)


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"logits-{number:05d}.bin"


def _what_is_missing(folder: Path) -> str:
    """Of a folder without a header."""
    again = "the `hybrid-distill cache-logits` that began it goes on with them"
    if not (folder / PARTIAL).is_file():
        return f"{folder} holds no teacher's logits ({HEADER} is missing); {FIX}."
    header = LogitHeader.load(folder / PARTIAL)
    missing = missing_shards(folder, header)
    if not missing:
        return f"the logits in {folder} are all there but not checked yet; {again}."
    ranges = _ranges(missing, header.shard_rows, header.rows)
    return f"the logits in {folder} are not finished: rows {ranges} of {header.rows:,} are missing; {again}."


def _ranges(shards: list[int], shard_rows: int, rows: int) -> str:
    """``0 to 4,095, 8,192 to 9,000``: the rows of these shards, by their places in the folder."""
    spans: list[list[int]] = []
    for shard in shards:
        if spans and spans[-1][1] == shard * shard_rows:
            spans[-1][1] += shard_rows
        else:
            spans.append([shard * shard_rows, (shard + 1) * shard_rows])
    return ", ".join(f"{first:,} to {min(end, rows) - 1:,}" for first, end in spans)
