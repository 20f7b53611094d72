"""How many rows run together: as many as is fast and fits, half of them whenever memory runs out."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from transformers import PreTrainedModel

from ..probes.plain_text import LOGITS_AT_ONCE
from ..teacher import text_config
from .probe_batch import Sheet

# More tokens in a batch make it no faster: on a CPU they leave its caches, a GPU is busy with these.
CPU_TOKENS, GPU_TOKENS = 2**11, 2**17
SHARE_OF_MEMORY = 0.4

T = TypeVar("T")

log = logging.getLogger(__name__)


class Rows:
    """The number of rows in a batch: ``batch_size``, or what the device holds where that is None."""

    def __init__(self, model: PreTrainedModel, batch_size: int | None = None) -> None:
        self.model, self.batch_size, self.halvings = model, batch_size, 0

    def number(self, sheet: Sheet) -> int:
        """Rows of this sheet's length, at least one; automatic numbers are powers of two."""
        wanted = self.batch_size or 2 ** (max(1, self._automatic(sheet)).bit_length() - 1)
        if self.model.device.type != "cuda":  # whose logits' memory is not asked about
            wanted = min(wanted, LOGITS_AT_ONCE // (sheet.n_read * text_config(self.model).vocab_size))
        return max(1, wanted >> self.halvings)

    def _automatic(self, sheet: Sheet) -> int:
        device = self.model.device
        if device.type != "cuda":
            return CPU_TOKENS // sheet.length
        free, _ = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return min(GPU_TOKENS // sheet.length, int(SHARE_OF_MEMORY * free / self._bytes_of_row(sheet)))

    def _bytes_of_row(self, sheet: Sheet) -> int:
        """About what one layer keeps of a row at a time, and the logits with their float32 copy."""
        config = text_config(self.model)
        per_token = 16 * config.hidden_size + 3 * getattr(config, "intermediate_size", 4 * config.hidden_size)
        return self.model.dtype.itemsize * per_token * sheet.length + 12 * config.vocab_size * sheet.n_read

    def fitting(self, sheet: Sheet, work: Callable[[int], T]) -> T:
        """``work(rows)``, again with half the rows for as long as memory runs out.

        Raises MemoryError where not even one row fits.
        """
        while True:
            rows = self.number(sheet)
            try:
                return work(rows)
            except RuntimeError as error:
                if not should_reduce_batch_size(error):
                    raise
                if rows == 1:
                    raise MemoryError(
                        f"one row of {sheet.length} tokens does not fit into the memory of {self.model.device}; "
                        "load the model in bfloat16, ask shorter questions, or take a larger device."
                    ) from error
                reason = str(error).splitlines()[0]
            # Outside of the handler, whose traceback holds the tensors of the batch that failed.
            while self.number(sheet) >= rows:
                self.halvings += 1
            clear_device_cache(garbage_collection=True)
            log.warning("out of memory with %d rows (%s): going on with %d", rows, reason, self.number(sheet))
