"""Rows of tokenized sources in a seeded order; any process can read any step.

Shapes: B rows, L tokens of a row, K stored tokens.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol, TypedDict, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from .tokens import Tokens, hash_of

ORDER = "hybrid-distill/rows/2"
_ROUNDS = 6


class _Batch(TypedDict):
    """Entries of every batch."""

    input_ids: Tensor
    """[B, L] int64."""
    seq_idx: Tensor
    """[B, L] int64: index of a token's document within its row, from 0, never decreasing."""
    mask: Tensor
    """[B, L] bool: True if the loss counts the prediction made at this token. False at padding, which only the last row
    of a source has, and in conversations if the next token is not the assistant's."""


class Batch(_Batch, total=False):
    """Rows of one optimizer step, or a part of them."""

    lengths: Tensor
    """[B, maximum documents in a row] int64: number of tokens in each document, 0 after a row's last document."""


class TaughtBatch(Batch):
    """Batch with the teacher's cached top-k logits (`CachedLogitsDataset`)."""

    teacher_ids_BLK: Tensor
    """int64: ids of the teacher's K likeliest next tokens, ascending."""
    teacher_log_probs_BLK: Tensor
    """float32: their log-probabilities."""


AnyBatch = TypeVar("AnyBatch", bound=Batch)


def pick_rows(batch: AnyBatch, rows: slice | list[int]) -> AnyBatch:
    """Select some rows from all entries of a batch."""
    return _changed(batch, lambda tensor: tensor[rows])


def on_device(batch: AnyBatch, device: torch.device) -> AnyBatch:
    """Copy a batch to a device, if it is not there yet."""
    return _changed(batch, lambda tensor: tensor.to(device, non_blocking=True))


def _changed(batch: AnyBatch, change: Callable[[Tensor], Tensor]) -> AnyBatch:
    return {name: change(tensor) for name, tensor in batch.items()}  # type: ignore[return-value, arg-type]


def cu_seqlens(batch: Batch) -> Tensor | None:
    """Return the cumulative document lengths over all rows, end to end, for FlashAttention; None without `lengths`.

    Rows with fewer documents repeat a value. There is no host-device sync.
    """
    lengths = batch.get("lengths")
    if lengths is None:
        return None
    # int32, as flash-attn asks for.
    return F.pad(lengths.flatten().cumsum(0), (1, 0)).int()


class Rows(Protocol):
    """Source of a training loop's batches: a pure function of the step."""

    fingerprint: str
    seq_len: int
    """Tokens per row."""

    def batch(self, step: int, batch_size: int, rank: int = 0, world: int = 1) -> Batch:
        """Return the share of process ``rank`` of ``world`` in the ``batch_size`` rows of a step."""
        ...


@dataclass(frozen=True)
class _Steps(Dataset[Batch]):
    """Batches of one process, by step."""

    rows: Rows
    share: tuple[int, int, int]
    """Rows of a step over all processes, rank, and world size."""

    def __getitem__(self, step: int) -> Batch:
        return self.rows.batch(step, *self.share)


def read_ahead(
    rows: Rows,
    steps: range,
    batch_size: int,
    rank: int = 0,
    world: int = 1,
    *,
    workers: int,
    pinned: bool,
) -> Generator[Batch, None, None]:
    """Yield a process's batches of some steps, in order; ``workers`` processes, if any, prepare them ahead.

    Workers block signals: a signal that a launcher sends to all processes of a job is for the loop, which ends them.
    """
    batch_of_step = _Steps(rows, (batch_size, rank, world))
    if not workers:
        for step in steps:
            yield batch_of_step[step]
        return
    loader = DataLoader(
        batch_of_step,
        batch_size=None,
        sampler=steps,
        worker_init_fn=_block_signals,
        # Otherwise the loader draws a seed from torch's global generator, and training would depend on `workers`.
        generator=torch.Generator(),
        # A forked worker has the memory maps already; one that is spawned would import torch again.
        multiprocessing_context="fork",
        pin_memory=pinned,
        num_workers=workers,
    )
    batches: Any = iter(loader)
    try:
        yield from batches
    finally:
        # Not left to garbage collection: an error keeps a reference, and Python waits for workers at exit.
        batches._shutdown_workers()


def _block_signals(worker: int) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


class PackedRows:
    """Rows of tokenized sources: every ``seq_len`` tokens of a source form a row, across document boundaries.

    An epoch contains each source once in full. With ``weights`` it has the same number of rows, divided by weight; each
    source then continues in the next epoch where it stopped in this one. Rows are equally long, so shares of rows are
    shares of tokens, except for the padding of a source's last row.
    """

    def __init__(
        self,
        sources: Sequence[Tokens],
        *,
        seq_len: int,
        seed: int = 0,
        weights: Sequence[float] = (),
    ) -> None:
        self.sources = list(sources)
        self.seq_len = seq_len
        self.seed = seed
        self._n_rows = [math.ceil(len(tokens) / seq_len) for tokens in self.sources]
        self.n_rows = sum(self._n_rows)
        self._shares = self._n_rows
        if weights:
            self._shares = []
            for weight in weights:
                share = round(self.n_rows * weight / sum(weights))
                # At least one row, or a source of a tiny weight would never be read.
                self._shares.append(max(1, share))
        self.rows_per_epoch = sum(self._shares)
        self._share_ends = np.cumsum(self._shares)
        self._row_ends = np.cumsum(self._n_rows)
        self.is_plain_epoch = not weights
        """True if an epoch contains every row once."""
        fingerprints = [tokens.fingerprint for tokens in self.sources]
        self.fingerprint = hash_of([ORDER, fingerprints, self._shares, seq_len, seed])
        self.text_fingerprint = hash_of(fingerprints)
        """Hash of the tokens only, independent of the length and order of rows."""

    def batch(self, step: int, batch_size: int, rank: int = 0, world: int = 1) -> Batch:
        """Return rows ``step * batch_size ...`` of the endless sequence of epochs; each process gets an equal part.

        Raises ValueError if ``world`` does not divide ``batch_size``.
        """
        return self.read(self.step_row_ids(step, batch_size, rank, world))

    def step_row_ids(self, step: int, batch_size: int, rank: int = 0, world: int = 1) -> np.ndarray:
        """Return the numbers of the rows that `batch` returns."""
        if batch_size % world:
            raise ValueError(
                f"a batch of {batch_size} rows cannot be shared by {world} processes; use a multiple of {world}."
            )
        share = batch_size // world
        return self.row_ids(step * batch_size + rank * share, share)

    def row_ids(self, first: int, n: int) -> np.ndarray:
        """Return the numbers, over all sources, of the rows at places ``first ... first + n - 1``, [n] int64.

        A row's number depends only on the sources and ``seq_len``, not on seed or weights.
        """
        places = range(first, first + n)
        return np.array([self._row_id(place) for place in places], dtype=np.int64)

    def read(self, row_ids: Sequence[int] | np.ndarray) -> Batch:
        """Read rows by number."""
        rows = [self._row(int(row_id)) for row_id in row_ids]
        columns = [np.stack(column) for column in zip(*rows)]
        # By NumPy: reading a tensor's value would count as a wait for the device (tests/train/test_loop.py).
        n_documents = int(columns[1].max()) + 1
        input_ids, seq_idx, mask = map(torch.from_numpy, columns)
        lengths = seq_idx.new_zeros(len(seq_idx), n_documents)
        # [B, documents]: each token adds 1 to the length of its document.
        lengths.scatter_add_(1, seq_idx, torch.ones_like(seq_idx))
        return {"input_ids": input_ids, "seq_idx": seq_idx, "mask": mask, "lengths": lengths}

    def _row_id(self, index: int) -> int:
        """Return the number of the row at place ``index`` of the endless sequence of epochs."""
        epoch, place = divmod(index, self.rows_per_epoch)
        # First over all sources together, to mix them.
        mixed_place = shuffled(place, self.rows_per_epoch, self.seed, 0, epoch)
        number = int(np.searchsorted(self._share_ends, mixed_place, side="right"))
        share = self._shares[number]
        n_rows = self._n_rows[number]
        first_of_share = int(self._share_ends[number]) - share
        # Then over the rows of one source, in its own epochs, which are longer or shorter than the common ones if it
        # has a weight.
        n_read_before = epoch * share + mixed_place - first_of_share
        own_epoch, own_place = divmod(n_read_before, n_rows)
        row = shuffled(own_place, n_rows, self.seed, number + 1, own_epoch)
        return int(self._row_ends[number]) - n_rows + row

    def _row(self, row_id: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        number = int(np.searchsorted(self._row_ends, row_id, side="right"))
        first = int(self._row_ends[number]) - self._n_rows[number]
        return self.sources[number].row(row_id - first, self.seq_len)


def shuffled(place: int, n: int, *key: int) -> int:
    """Return the index of ``place`` under a seeded permutation of 0 ... n - 1; each ``key`` gives another permutation.

    A Feistel network permutes the numbers below a power of four; a result above n - 1 goes through it again until it is
    below (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). There is no table: any place of any epoch
    takes the same few microseconds and no memory, however long the data.
    """
    # Bits of each half: together they number at most four times as many places as there are.
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left = place >> half
        right = place & mask
        for number in range(_ROUNDS):
            # Unlike `hash`, the same in every process and version of Python: results name a seed.
            digest = blake2b(repr((key, number, right)).encode(), digest_size=8).digest()
            left, right = right, left ^ int.from_bytes(digest, "little") & mask
        place = left << half | right
        if place < n:
            return place
