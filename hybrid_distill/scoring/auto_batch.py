"""How many rows run together, as many as is fast and fits, and how a CPU multiplies them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TypeVar

import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from ..probes.plain_text import LOGITS_AT_ONCE
from ..teacher import replaced_forward, text_config
from .probe_batch import ProbeBatch

# More tokens in a batch make it no faster: on a CPU they leave its caches, a GPU is busy with these.
CPU_TOKENS, GPU_TOKENS = 2**11, 2**17
LEAST_WIDTH, FASTER, TIMED_ROWS = 512, 1.3, 512

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


@contextmanager
def fast_products(model: PreTrainedModel) -> Iterator[None]:
    """Multiply float32 matrices with oneDNN, without gradients, on a CPU where that is measured to be faster.

    Torch's default (MKL) leaves half of an AMD CPU unused. Narrow models stay as they are, to the last bit.
    """
    linears = [m for m in model.modules() if type(m) is nn.Linear]
    wide = text_config(model).hidden_size >= LEAST_WIDTH and linears and torch.backends.mkldnn.is_available()
    with ExitStack() as patches:
        if wide and model.device.type == "cpu" and model.dtype == torch.float32:
            weight = linears[len(linears) // 2].weight
            default, onednn = (_speed(way, weight) for way in (linear, _by_onednn))
            if onednn > FASTER * default:
                for each in linears:
                    patches.enter_context(
                        replaced_forward(each, partial(_by_onednn, weight=each.weight, bias=each.bias))
                    )
            best, half = max(default, onednn), _speed(linear, weight.bfloat16())
            log.info("float32 matrix products at %.0f GFLOP/s (MKL: %.0f), bfloat16 at %.0f", best, default, half)
            if half > FASTER * best:
                log.info("scoring would be up to %.1f times as fast in bfloat16: pass --dtype bfloat16", half / best)
        yield


def _by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _speed(multiply: Callable[[Tensor, Tensor], Tensor], weight: Tensor) -> float:
    """Return billions of operations a second of CPU time: the best of several tries, the first one aside."""
    x, seconds = weight.new_ones(TIMED_ROWS, weight.shape[1]), []
    for _ in range(6):
        start = time.process_time()
        multiply(x, weight)
        seconds.append(time.process_time() - start)
    return 2e-9 * TIMED_ROWS * weight.numel() / max(min(seconds[1:]), 1e-9)
