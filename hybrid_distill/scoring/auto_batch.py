"""How many rows run together: as many as is fast and fits, half of them whenever memory runs out."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from transformers import PreTrainedModel

from ..probes.plain_text import LOGITS_AT_ONCE
from ..teacher import text_config
from .probe_batch import ProbeBatch

# More tokens in a batch make it no faster: on a CPU they leave its caches, a GPU is busy with these.
CPU_TOKENS, GPU_TOKENS = 2**11, 2**17

T = TypeVar("T")

log = logging.getLogger(__name__)


class Rows:
    """The number of rows in a batch: ``batch_size``, or as many as the device holds if that is None."""

    def __init__(self, model: PreTrainedModel, batch_size: int | None = None) -> None:
        self.model, self.batch_size, self.halvings = model, batch_size, 0

    def number(self, batch: ProbeBatch) -> int:
        """Return how many rows of this length run together, at least one; automatic numbers are powers of two."""
        tokens = GPU_TOKENS if self.model.device.type == "cuda" else CPU_TOKENS
        wanted = self.batch_size or 2 ** (max(1, tokens // batch.length).bit_length() - 1)
        wanted = min(wanted, LOGITS_AT_ONCE // (batch.n_read * text_config(self.model).vocab_size))
        return max(1, wanted >> self.halvings)

    def fitting(self, batch: ProbeBatch, work: Callable[[int], T]) -> T:
        """Run ``work(n_rows)``, again with half the rows for as long as memory runs out.

        Raises MemoryError if not even one row fits.
        """
        while True:
            n_rows = self.number(batch)
            try:
                return work(n_rows)
            except RuntimeError as error:
                if not should_reduce_batch_size(error):
                    raise
                if n_rows == 1:
                    raise MemoryError(
                        f"one row of {batch.length} tokens does not fit into the memory of {self.model.device}; "
                        "load the model in bfloat16, ask shorter questions, or use a larger device."
                    ) from error
                reason = str(error).splitlines()[0]
            # Outside of the handler, whose traceback holds the tensors of the batch that failed.
            while self.number(batch) >= n_rows:
                self.halvings += 1
            clear_device_cache(garbage_collection=True)
            log.warning("out of memory with %d rows (%s): continuing with %d", n_rows, reason, self.number(batch))
