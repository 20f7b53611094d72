"""Number of rows in a forward pass: chosen by tokens, halved when memory runs out."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from transformers import PreTrainedModel

from ..probes.plain_text import LOGITS_AT_ONCE
from ..teacher import text_config
from ..validation import first_line
from .probe_batch import ProbeBatch

# Larger batches are not faster: they overflow a CPU's caches, and a GPU is already saturated.
CPU_TOKENS = 2**11
GPU_TOKENS = 2**17

T = TypeVar("T")

log = logging.getLogger(__name__)


class BatchSizer:
    """Number of rows in a batch: ``batch_size``, or chosen automatically if None.

    It is halved whenever memory runs out.
    """

    def __init__(self, model: PreTrainedModel, batch_size: int | None = None) -> None:
        self.model = model
        self.batch_size = batch_size
        self.n_halvings = 0

    def n_rows(self, batch: ProbeBatch) -> int:
        """Return the number of rows of this length to run together, at least one."""
        n_rows = self.batch_size
        if n_rows is None:
            tokens = GPU_TOKENS if self.model.device.type == "cuda" else CPU_TOKENS
            # A power of two: it can be halved down to one row.
            n_rows = _power_of_two(tokens // batch.length)
        # With a large vocabulary, logits take more memory than all layers together.
        n_logits = batch.n_positions * text_config(self.model).vocab_size
        n_rows = min(n_rows, LOGITS_AT_ONCE // n_logits)
        return max(1, n_rows >> self.n_halvings)

    def fit(self, batch: ProbeBatch, work: Callable[[int], T]) -> T:
        """Run ``work(n_rows)``; while memory runs out, retry with half the rows.

        Raises MemoryError if not even one row fits.
        """
        while True:
            n_rows = self.n_rows(batch)
            try:
                return work(n_rows)
            except RuntimeError as error:
                # By accelerate, which knows each backend's message: on a CPU, it is a plain RuntimeError.
                if not should_reduce_batch_size(error):
                    raise
                if n_rows == 1:
                    raise MemoryError(
                        f"one row of {batch.length} tokens does not fit into the memory of "
                        f"{self.model.device}; load the model in bfloat16, ask shorter questions, "
                        "or use a larger device."
                    ) from error
                reason = first_line(error)
            # Outside the handler: its traceback keeps the tensors of the failed batch alive.
            while self.n_rows(batch) >= n_rows:
                self.n_halvings += 1
            clear_device_cache(garbage_collection=True)
            log.warning(
                "out of memory with %d rows (%s): continuing with %d",
                n_rows,
                reason,
                self.n_rows(batch),
            )


def _power_of_two(limit: int) -> int:
    """Return the largest power of two up to the limit, at least 1."""
    return 2 ** (max(1, limit).bit_length() - 1)
