"""Rows of tokenized sources in a seeded order, which any process reads at any step.

Shapes: B rows, L tokens of a row, K stored tokens.
"""

from __future__ import annotations

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
    """[B, L] int64: which document of its row a token belongs to, from 0, never decreasing."""
    mask: Tensor
    """[B, L] bool: whether the loss counts the prediction made here. False at padding, which only the last row of a
    source has, and in conversations where the next token is not the assistant's."""


class Batch(_Batch, total=False):
    """Rows of one optimizer step, or a part of them."""

    lengths: Tensor
    """[B, documents of a row at most] int64: their tokens, 0 behind a row's last."""


class TaughtBatch(Batch):
    """Batch with the teacher's cached top-k logits (`CachedLogitsDataset`)."""

    teacher_ids_BLK: Tensor
    """int64: the teacher's K likeliest next tokens, ascending."""
    teacher_log_probs_BLK: Tensor
    """float32."""


AnyBatch = TypeVar("AnyBatch", bound=Batch)


def pick_rows(batch: AnyBatch, rows: slice | list[int]) -> AnyBatch:
    """Return some rows of a batch, with all of its entries."""
    return _changed(batch, lambda tensor: tensor[rows])


def on_device(batch: AnyBatch, device: torch.device) -> AnyBatch:
    """Copy a batch to a device, if it is not there."""
    return _changed(batch, lambda tensor: tensor.to(device, non_blocking=True))


def _changed(batch: AnyBatch, change: Callable[[Tensor], Tensor]) -> AnyBatch:
    return {name: change(tensor) for name, tensor in batch.items()}  # type: ignore[return-value, arg-type]


def cu_seqlens(batch: Batch) -> Tensor | None:
    """Return the documents' borders in all rows laid end to end, as FlashAttention takes them; None without `lengths`.

    Rows with fewer documents repeat a border. The host waits for nothing.
    """
    lengths = batch.get("lengths")
    return None if lengths is None else F.pad(lengths.flatten().cumsum(0), (1, 0)).int()


class Rows(Protocol):
    """Source of a training loop's batches: a pure function of the step."""

    fingerprint: str

    def batch(self, step: int, batch_size: int, rank: int = 0, world: int = 1) -> Batch:
        """Return the share of process ``rank`` of ``world`` in the ``batch_size`` rows of a step."""
        ...


@dataclass(frozen=True)
class _Steps(Dataset[Batch]):
    """A process's batches, by step."""

    rows: Rows
    share: tuple[int, int, int]
    """Rows of a step over all processes, this process and their number."""

    def __getitem__(self, step: int) -> Batch:
        return self.rows.batch(step, *self.share)


def read_ahead(
    rows: Rows, steps: range, batch_size: int, rank: int = 0, world: int = 1, *, workers: int, pinned: bool
) -> Generator[Batch, None, None]:
    """Yield a process's batches of some steps, in order, made ahead by other processes if there are ``workers``.

    Workers block signals: one that a launcher sends to all of a job's processes is for the loop, which ends them.
    """
    made = _Steps(rows, (batch_size, rank, world))
    if not workers:
        yield from map(made.__getitem__, steps)
        return
    loader = DataLoader(
        made,
        batch_size=None,
        sampler=steps,
        worker_init_fn=_block_signals,
        generator=torch.Generator(),
        multiprocessing_context="fork",
        pin_memory=pinned,
        num_workers=workers,
    )
    batches: Any = iter(loader)
    try:
        yield from batches
    finally:  # not when it is collected: an error holds on to it, and Python does not exit before its workers
        batches._shutdown_workers()


def _block_signals(worker: int) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


class PackedRows:
    """Rows of tokenized sources: every ``seq_len`` tokens of a source are one, whatever documents they hold.

    An epoch holds each source whole, once. With ``weights`` it has the same number of rows, shared out by
    weight; a source then goes on in the next epoch where it stopped in this one. Rows are equally long, so
    shares of rows are shares of tokens, but for the padding of a source's last row.
    """

    def __init__(
        self, sources: Sequence[Tokens], *, seq_len: int, seed: int = 0, weights: Sequence[float] = ()
    ) -> None:
        self.sources, self.seq_len, self.seed = list(sources), seq_len, seed
        self._n_rows = [-(-len(tokens) // seq_len) for tokens in self.sources]
        self.n_rows = sum(self._n_rows)
        self._shares = [max(1, round(self.n_rows * w / sum(weights))) for w in weights] or self._n_rows
        self.rows_per_epoch = sum(self._shares)
        self._ends, self._row_ends = np.cumsum(self._shares), np.cumsum(self._n_rows)
        self.is_plain_epoch = not weights
        """True if an epoch holds every row once."""
        prints = [tokens.fingerprint for tokens in self.sources]
        self.fingerprint = hash_of([ORDER, prints, self._shares, seq_len, seed])
        self.text_fingerprint = hash_of(prints)
        """Hash of the tokens alone, whatever the length and the order of rows."""

    def batch(self, step: int, batch_size: int, rank: int = 0, world: int = 1) -> Batch:
        """Return rows ``step * batch_size ...`` of the endless row of epochs; each process takes an equal part.

        Raises ValueError for a ``batch_size`` that ``world`` does not divide.
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
        """Return which rows come at places ``first ... first + n - 1``, [n] int64, numbered over all sources.

        A row's number depends on the sources and ``seq_len`` alone, not on seed or weights.
        """
        return np.array([self._row_id(place) for place in range(first, first + n)], dtype=np.int64)

    def read(self, row_ids: Sequence[int] | np.ndarray) -> Batch:
        """Read rows by number."""
        columns = [np.stack(column) for column in zip(*(self._row(int(row_id)) for row_id in row_ids))]
        input_ids, seq_idx, mask = map(torch.from_numpy, columns)
        lengths = seq_idx.new_zeros(len(seq_idx), int(columns[1].max()) + 1)
        lengths.scatter_add_(1, seq_idx, torch.ones_like(seq_idx))
        return {"input_ids": input_ids, "seq_idx": seq_idx, "mask": mask, "lengths": lengths}

    def _row_id(self, index: int) -> int:
        epoch, place = divmod(index, self.rows_per_epoch)
        place = shuffled(place, self.rows_per_epoch, self.seed, 0, epoch)
        number = int(np.searchsorted(self._ends, place, side="right"))
        begin = int(self._ends[number]) - self._shares[number]
        n_rows = self._n_rows[number]
        own_epoch, own_place = divmod(epoch * self._shares[number] + place - begin, n_rows)
        row = shuffled(own_place, n_rows, self.seed, number + 1, own_epoch)
        return int(self._row_ends[number]) - n_rows + row

    def _row(self, row_id: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        number = int(np.searchsorted(self._row_ends, row_id, side="right"))
        row = row_id - (int(self._row_ends[number]) - self._n_rows[number])
        return self.sources[number].row(row, self.seq_len)


def shuffled(place: int, n: int, *key: int) -> int:
    """Return the index of ``place`` in a seeded permutation of 0 ... n - 1; every ``key`` is another permutation.

    A Feistel network permutes the numbers below a power of four, and a number above n - 1 goes through it again until
    it is below (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). There is no table: any place
    of any epoch costs the same microseconds and no memory, however long the data.
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = place >> half, place & mask
        for number in range(_ROUNDS):
            digest = blake2b(repr((key, number, right)).encode(), digest_size=8).digest()
            left, right = right, left ^ int.from_bytes(digest, "little") & mask
        place = left << half | right
        if place < n:
            return place
