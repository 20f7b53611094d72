"""Speed and memory of a model by length of its context: prefill, decoding, peak memory, cache."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..io import Record
from ..model.layout import cache_argument, cache_of
from ..probes.answering import accepts
from ..teacher import eval_mode, longest_context, text_config

LENGTHS = (2048, 8192, 32768)
PIECE = 2048
"""Tokens that are read at once, so that no tensor grows with the square of the context."""
NEW_TOKENS = 32
MAX_SECONDS = 300.0
"""A length that would take longer, going by the length before, is left out."""
_CLEAR_REFS = Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Speed:
    """Figures of one model at one length of context, of one row."""

    length: int
    prefill: float
    """Tokens a second of reading the context."""
    decode: float
    """Tokens a second of greedy decoding after it, one at a time."""
    peak_bytes: int | None
    """Most memory that both take beside the weights: of the GPU, or of the process under Linux; else None."""


def measure_speed(
    model: PreTrainedModel, lengths: Sequence[int] = LENGTHS, *, n_new: int = NEW_TOKENS
) -> Iterator[Speed]:
    """Time a model, as it is on its device, on random tokens; yield one `Speed` for each length, ascending.

    Lengths beyond the model's context are left out, and those that would take longer than `MAX_SECONDS`. A model whose
    context is shorter than all of them is timed at its end.
    """
    context = longest_context(model.config) or max(lengths) + n_new
    n_new = min(n_new, context // 2)
    longest = context - n_new
    within = [length for length in sorted(lengths) if length <= longest] or [longest]
    seconds_a_token = 0.0
    length_before = 1
    for length in within:
        # The cost of a token grows at most with the context.
        growth = length / length_before
        if seconds_a_token * growth * length > MAX_SECONDS:
            return
        with eval_mode(model):
            speed = _time_length(model, length, n_new)
        seconds_a_token = 1 / speed.prefill
        length_before = length
        yield speed


def _time_length(model: PreTrainedModel, length: int, n_new: int) -> Speed:
    generator = torch.Generator().manual_seed(0)
    vocab_size = text_config(model).vocab_size
    ids_1L = torch.randint(vocab_size, (1, length), generator=generator, device="cpu")
    ids_1L = ids_1L.to(model.device)
    reader = _CachedReader(model)
    # The first call of a shape allocates, tries kernels and compiles.
    reader.read(ids_1L[:, : min(length, PIECE)])
    reader.read(ids_1L[:, :1])
    reader = _CachedReader(model)
    peak = _PeakMemory(model.device)

    def read_context() -> None:
        for piece_1L in ids_1L.split(PIECE, dim=1):
            reader.read(piece_1L)

    def decode() -> None:
        for _ in range(n_new):
            reader.read(reader.next_11)

    reading = _seconds(model.device, read_context)
    decoding = _seconds(model.device, decode)
    return Speed(length, length / reading, n_new / decoding, peak.read())


class _CachedReader:
    """Calls of a model that follow one another in one cache."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model: Any = model
        self.cache_name = cache_argument(model.forward)
        self.cache: Any = None
        # Found once: it reads a signature, and every decoded token is timed.
        self.options: Record = {"use_cache": True}
        if accepts(model, "logits_to_keep"):
            self.options["logits_to_keep"] = 1

    def read(self, ids_1L: Tensor) -> None:
        """Read tokens, and choose the next one."""
        output = self.model(input_ids=ids_1L, **{self.cache_name: self.cache}, **self.options)
        self.cache = cache_of(output)
        self.next_11 = output.logits[:, -1:].argmax(-1)


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    """Return how long ``work`` takes, until the device is done."""
    _wait_for(device)
    start = time.perf_counter()
    work()
    _wait_for(device)
    return time.perf_counter() - start


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _PeakMemory:
    """Growth of memory since it was made, where it was largest."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        elif _CLEAR_REFS.exists():
            # 5 sets the peak of the process back to what it holds now: proc(5).
            _CLEAR_REFS.write_text("5")
        self.before = self._peak()

    def read(self) -> int | None:
        """Return the growth in bytes; None where it cannot be known."""
        peak = self._peak()
        if peak is None or self.before is None:
            return None
        growth = peak - self.before
        # Memory that the process had left over grows nothing.
        return growth if growth > 0 else None

    def _peak(self) -> int | None:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        if not _CLEAR_REFS.exists():
            return None
        peak = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
        return int(peak[1]) * 1024 if peak else None
