"""Cached top-k logits: the teacher's likeliest next tokens on disk, in shards with a header.

A shard is an array of rows, one record each (`record_dtype`), in ascending order of row number; ``rows.bin`` holds the
numbers. Shards are written atomically and the header last, so an interrupted writer resumes with the missing shards,
and several processes can write in parallel. docs/data.md describes the format.

Shapes: B rows, L tokens of a row, K stored tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from .header import FolderHeader, size_of
from .rows import PackedRows, TaughtBatch
from .tokens import hash_of, tokenizer_fingerprint

ROW_IDS = "rows.bin"
_HALF = 2**16


@dataclass
class LogitHeader(FolderHeader):
    """Entries of ``logits.json``."""

    FORMAT = "hybrid-distill/logits/1"
    CONTENT = "logits"
    REMAKE = "run `hybrid-distill cache-logits` for this run, into another folder"
    FILES = ("logits-", ROW_IDS)
    RESULTS = ("teacher", "created", "measured")

    teacher: str
    """Name or path when the folder was made; the fingerprint is compared if the weights are loaded."""
    teacher_fingerprint: str
    dtype: str
    """Type of the teacher's weights."""
    precision: str
    """Precision of the forward pass: ``fp32`` or ``bf16``."""
    tokenizer_fingerprint: str
    vocabulary_size: int
    """Number of real tokens, over which the probabilities sum to 1."""
    temperature: float
    top_k: int
    seq_len: int
    text_fingerprint: str
    """Hash of the tokens that rows are cut from (`PackedRows`)."""
    order: str
    """Fingerprint of the rows and their order."""
    places: int
    """Number of places, from the first of that order, whose rows are stored."""
    rows: int
    """Number of distinct rows at these places."""
    shard_rows: int
    created: str = ""
    measured: dict[str, float] = field(default_factory=dict)
    """Share of the teacher's probability that the stored tokens cover, measured on some rows."""

    @property
    def fingerprint(self) -> str:
        """Hash of all fields that determine the content of the shards."""
        return hash_of(self.identity())

    @property
    def bytes_per_token(self) -> float:
        """Bytes on disk per token of a row."""
        return record_dtype(self).itemsize / self.seq_len

    def __str__(self) -> str:
        size = self.rows * self.seq_len * self.bytes_per_token / 1e9
        return f"{self.rows:,} rows x {self.seq_len:,} tokens x {self.bytes_per_token:.0f} bytes = {size:,.3f} GB"

    def shards(self, folder: Path) -> list[tuple[Path, int]]:
        """Return the file of each shard and its number of rows."""
        n_rows = [min(self.shard_rows, self.rows - first) for first in range(0, self.rows, self.shard_rows)]
        return [(folder / f"logits-{number:05d}.bin", n) for number, n in enumerate(n_rows)]

    def sizes(self, folder: Path) -> dict[Path, int]:
        itemsize = record_dtype(self).itemsize
        return {folder / ROW_IDS: 8 * self.rows} | {path: n * itemsize for path, n in self.shards(folder)}

    def missing_shards(self, folder: Path) -> list[int]:
        """Return the numbers of the shards that are not written yet."""
        sizes = self.sizes(folder)
        return [number for number, (path, _) in enumerate(self.shards(folder)) if size_of(path) != sizes[path]]


def record_dtype(header: LogitHeader) -> np.dtype:
    """Return the type of one row on disk: 4 bytes per stored token, 2 for the tail, 2 per further 65,536 token ids.

    ids: lower 16 bits of the token ids, which ascend; log_probs: their log-probabilities; log_tail: that of all other
    tokens together; splits: number of ids below 65,536, below twice that, and so on, which gives the upper bits.
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
    """Return records of rows, [B]; masked tokens get zeros and no tail, whatever the teacher predicts there."""
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
    """Return (ids_BLK in ascending order, log_probs_BLK in float32); with the tail, the probabilities sum to 1.

    The stored tail has a small relative error; the remainder of the rounded probabilities would be all rounding error.
    """
    n_stored = records["ids"].shape[-1]
    is_above = np.arange(n_stored)[:, None] >= records["splits"][..., None, :]
    ids = records["ids"].astype(np.int64) + _HALF * is_above.sum(-1)
    log_probs = torch.from_numpy(records["log_probs"].astype(np.float32))
    log_tail = torch.from_numpy(records["log_tail"].astype(np.float32))
    covered = torch.log(-torch.expm1(log_tail)) - log_probs.logsumexp(-1)
    return torch.from_numpy(ids), log_probs + covered.unsqueeze(-1)


def open_logits(folder: str | Path) -> LogitFolder:
    """Open a finished folder. Raises ValueError if it has no logits, is unfinished, or has a truncated file."""
    folder = Path(folder).expanduser()
    return LogitFolder(folder, LogitHeader.open(folder))


class LogitFolder:
    """Stored logits: memory-mapped shards, and the numbers of their rows."""

    def __init__(self, folder: Path, header: LogitHeader) -> None:
        self.folder, self.header = folder, header
        self.row_ids = np.fromfile(folder / ROW_IDS, dtype="<i8")
        self._shards = [np.memmap(path, record_dtype(header), "r") for path, _ in header.shards(folder)]

    def read(self, row_ids: np.ndarray) -> np.ndarray:
        """Return the records of rows by number; all of the rows must be stored."""
        places = np.searchsorted(self.row_ids, row_ids)
        assert (self.row_ids[places] == row_ids).all(), "rows that `check` would have refused"
        located = (divmod(int(place), self.header.shard_rows) for place in places)
        return np.concatenate([self._shards[shard][row : row + 1] for shard, row in located])

    def check(
        self,
        rows: PackedRows,
        tokenizer: PreTrainedTokenizerBase,
        teacher: str,
        *,
        vocab_size: int,
        places: int,
        temperature: float,
    ) -> None:
        """Raise ValueError unless these are a teacher's logits of the first ``places`` rows of ``rows``.

        ``teacher`` is its `teacher.fingerprint`, or its name if the weights are not loaded.
        """
        header = self.header
        known = teacher in (header.teacher, header.teacher_fingerprint)
        compared: dict[str, tuple[object, object]] = {
            "teacher": (teacher if known else f"{header.teacher} ({header.teacher_fingerprint})", teacher),
            "tokenizer": (header.tokenizer_fingerprint, tokenizer_fingerprint(tokenizer)),
            "vocabulary size": (header.vocabulary_size, vocab_size),
            "data.seq_len": (header.seq_len, rows.seq_len),
            "text of data.sources": (header.text_fingerprint, rows.text_fingerprint),
            "temperature": (header.temperature, temperature),
        }
        if header.rows != rows.n_rows:  # a part of the rows fits one order only
            compared["order of data.seed and data.weights"] = (header.order, rows.fingerprint)
            if places > header.places:
                compared["number of rows (steps x batch_size)"] = (header.places, places)
        for name, (found, wanted) in compared.items():
            if found != wanted:
                raise ValueError(
                    f"the logits in {self.folder} were made with the {name} {found}, but this run has {wanted}; "
                    f"{header.REMAKE}."
                )


class CachedLogitsDataset:
    """Rows together with the teacher's cached logits, for a stage without a teacher in memory."""

    def __init__(self, rows: PackedRows, logits: LogitFolder) -> None:
        self.rows, self.logits = rows, logits
        self.fingerprint = hash_of([self.rows.fingerprint, logits.header.fingerprint])

    def batch(self, step: int, batch_size: int, rank: int = 0, world: int = 1) -> TaughtBatch:
        """Read a process's share of a step, as `PackedRows.batch` does."""
        row_ids = self.rows.step_row_ids(step, batch_size, rank, world)
        ids_BLK, log_probs_BLK = unpack(self.logits.read(row_ids))
        return {**self.rows.read(row_ids), "teacher_ids_BLK": ids_BLK, "teacher_log_probs_BLK": log_probs_BLK}


def row_ids_of(rows: PackedRows, places: int) -> np.ndarray:
    """Return the numbers of the distinct rows at the first ``places``, ascending."""
    if rows.is_plain_epoch and places >= rows.n_rows:
        return np.arange(rows.n_rows, dtype="<i8")
    return np.unique(rows.row_ids(0, places)).astype("<i8")
