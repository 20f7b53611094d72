"""Format of cached top-k logits: the teacher's likeliest next tokens on disk, in shards with a header.

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
# Ids are stored by their lower 16 bits. Whole ids of large vocabularies would make a folder half as large again.
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
    rows_read: int
    """Number of rows, from the first in that order, that are stored; a row may be among them twice."""
    rows: int
    """Number of distinct rows among them."""
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
        gigabytes = self.rows * self.seq_len * self.bytes_per_token / 1e9
        return f"{self.rows:,} rows x {self.seq_len:,} tokens x {self.bytes_per_token:.0f} bytes = {gigabytes:,.3f} GB"

    def shards(self, folder: Path) -> list[tuple[Path, int]]:
        """Return the file of each shard and its number of rows."""
        shards = []
        for number, first in enumerate(range(0, self.rows, self.shard_rows)):
            n_rows = min(self.shard_rows, self.rows - first)
            shards.append((folder / f"logits-{number:05d}.bin", n_rows))
        return shards

    def sizes(self, folder: Path) -> dict[Path, int]:
        row_bytes = record_dtype(self).itemsize
        sizes = {folder / ROW_IDS: 8 * self.rows}
        for path, n_rows in self.shards(folder):
            sizes[path] = n_rows * row_bytes
        return sizes

    def missing_shards(self, folder: Path) -> list[int]:
        """Return the numbers of the shards that are not written yet."""
        sizes = self.sizes(folder)
        paths = [path for path, _ in self.shards(folder)]
        return [number for number, path in enumerate(paths) if size_of(path) != sizes[path]]


def record_dtype(header: LogitHeader) -> np.dtype:
    """Return the type of one row on disk: 4 bytes per stored token, 2 for the tail, 2 per further 65,536 token ids.

    ids: lower 16 bits of the token ids, which ascend; log_probs: their log-probabilities; log_tail: that of all other
    tokens together; splits: number of ids below 65,536, below twice 65,536, and so on, which gives the upper bits.
    """
    length = header.seq_len
    k = header.top_k
    n_splits = (header.vocabulary_size - 1) // _HALF
    return np.dtype(
        [
            ("ids", "<u2", (length, k)),
            ("log_probs", "<f2", (length, k)),
            ("log_tail", "<f2", (length,)),
            ("splits", "<u2", (length, n_splits)),
        ]
    )


def pack(
    ids_BLK: Tensor,
    log_probs_BLK: Tensor,
    log_tail_BL: Tensor,
    mask_BL: Tensor,
    header: LogitHeader,
) -> np.ndarray:
    """Return records of rows, [B]; tokens that ``mask_BL`` leaves out get zeros and no tail."""
    # Whatever the teacher predicts for padding: the bytes of a folder must not depend on that.
    masked_BL1 = ~mask_BL[..., None]
    ids_BLK, order_BLK = ids_BLK.masked_fill(masked_BL1, 0).sort(dim=-1)
    log_probs_BLK = log_probs_BLK.gather(-1, order_BLK).masked_fill(masked_BL1, 0.0)
    ids = ids_BLK.cpu().numpy()
    records = np.empty(len(ids), record_dtype(header))
    records["ids"] = ids % _HALF
    records["log_probs"] = log_probs_BLK.cpu().numpy()
    records["log_tail"] = log_tail_BL.masked_fill(~mask_BL, -torch.inf).cpu().numpy()
    n_splits = records["splits"].shape[-1]
    for number in range(n_splits):
        # Ids ascend, so the upper bits change after as many of them as are below a multiple of 65,536.
        threshold = (number + 1) * _HALF
        records["splits"][..., number] = (ids < threshold).sum(-1)
    return records


def unpack(records: np.ndarray) -> tuple[Tensor, Tensor]:
    """Return (ids_BLK in ascending order, log_probs_BLK in float32); with the tail, the probabilities sum to 1.

    The stored tail has a small relative error; the remainder of the rounded probabilities would be all rounding error.
    """
    n_stored = records["ids"].shape[-1]
    # [B, L, K, splits]: whether the k-th id is at least each multiple of 65,536.
    is_above = np.arange(n_stored)[:, None] >= records["splits"][..., None, :]
    upper_bits = is_above.sum(-1)
    ids = records["ids"].astype(np.int64) + _HALF * upper_bits
    log_probs = torch.from_numpy(records["log_probs"].astype(np.float32))
    log_tail = torch.from_numpy(records["log_tail"].astype(np.float32))
    # The stored tokens were rounded one by one: they are scaled so that their sum is 1 - tail. With expm1, because
    # 1 - exp(log_tail) would lose all digits of a tail close to 1.
    log_covered = torch.log(-torch.expm1(log_tail))
    correction = log_covered - log_probs.logsumexp(-1)
    return torch.from_numpy(ids), log_probs + correction.unsqueeze(-1)


def open_logits(folder: str | Path) -> LogitFolder:
    """Open a finished folder. Raises ValueError if it has no logits, is unfinished, or has a truncated file."""
    folder = Path(folder).expanduser()
    return LogitFolder(folder, LogitHeader.open(folder))


class LogitFolder:
    """Stored logits: memory-mapped shards, and the numbers of their rows."""

    def __init__(self, folder: Path, header: LogitHeader) -> None:
        self.folder = folder
        self.header = header
        self.row_ids = np.fromfile(folder / ROW_IDS, dtype="<i8")
        self._shards = [
            np.memmap(path, record_dtype(header), "r") for path, _ in header.shards(folder)
        ]

    def read(self, row_ids: np.ndarray) -> np.ndarray:
        """Return the records of rows by number; all of the rows must be stored."""
        stored_index = np.searchsorted(self.row_ids, row_ids)
        assert (self.row_ids[stored_index] == row_ids).all(), (
            "`check_rows` rejects rows that are not stored"
        )
        records = []
        for index in stored_index:
            shard, row = divmod(int(index), self.header.shard_rows)
            records.append(self._shards[shard][row : row + 1])
        return np.concatenate(records)

    def check_settings(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        vocab_size: int,
        seq_len: int,
        temperature: float,
    ) -> None:
        """Raise ValueError unless the logits were computed with a run's settings. Reads no text and no weights."""
        header = self.header
        own_tokenizer = tokenizer_fingerprint(tokenizer)
        self._compare("tokenizer", header.tokenizer_fingerprint, own_tokenizer)
        self._compare("vocabulary size", header.vocabulary_size, vocab_size)
        self._compare("data.seq_len", header.seq_len, seq_len)
        self._compare("temperature", header.temperature, temperature)

    def check_rows(self, rows: PackedRows, teacher: str, *, rows_read: int) -> None:
        """Raise ValueError unless the logits are a teacher's, of the first ``rows_read`` rows of ``rows``.

        ``teacher`` is its `teacher.fingerprint`, or its name if the weights are not loaded.
        """
        header = self.header
        stored_teacher = f"{header.teacher} ({header.teacher_fingerprint})"
        if teacher in (header.teacher, header.teacher_fingerprint):
            stored_teacher = teacher
        self._compare("teacher", stored_teacher, teacher)
        self._compare("text of data.sources", header.text_fingerprint, rows.text_fingerprint)
        # A folder of every row serves any seed and weights. A part of the rows fits one order only: another one needs
        # other rows.
        if header.rows != rows.n_rows:
            self._compare("order of data.seed and data.weights", header.order, rows.fingerprint)
            if rows_read > header.rows_read:
                self._compare("number of rows (steps x batch_size)", header.rows_read, rows_read)

    def _compare(self, name: str, stored: object, own: object) -> None:
        """Raise ValueError unless the logits were computed with the same as this run has."""
        if stored != own:
            raise ValueError(
                f"the logits in {self.folder} were made with the {name} {stored}, but this run has {own}; "
                f"{self.header.REMAKE}."
            )


class CachedLogitsDataset:
    """Rows together with the teacher's cached logits, for a stage without a teacher in memory."""

    def __init__(self, rows: PackedRows, logits: LogitFolder) -> None:
        self.rows = rows
        self.logits = logits
        self.seq_len = rows.seq_len
        self.fingerprint = hash_of([rows.fingerprint, logits.header.fingerprint])

    def batch(self, step: int, batch_size: int, rank: int = 0, world: int = 1) -> TaughtBatch:
        """Read a process's share of a step, as `PackedRows.batch` does."""
        row_ids = self.rows.step_row_ids(step, batch_size, rank, world)
        batch = self.rows.read(row_ids)
        ids_BLK, log_probs_BLK = unpack(self.logits.read(row_ids))
        return {**batch, "teacher_ids_BLK": ids_BLK, "teacher_log_probs_BLK": log_probs_BLK}


def row_ids_of(rows: PackedRows, rows_read: int) -> np.ndarray:
    """Return the numbers of the distinct rows among the first ``rows_read``, ascending."""
    if rows.is_plain_epoch and rows_read >= rows.n_rows:
        # Every row once: no need to compute the order of billions.
        return np.arange(rows.n_rows, dtype="<i8")
    return np.unique(rows.row_ids(0, rows_read)).astype("<i8")
