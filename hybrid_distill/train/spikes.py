"""Loss spike detection, and measurement of a run's time and memory."""

from __future__ import annotations

import math
import resource
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from ..io import Record
from ..model.modeling_hybrid import HybridForCausalLM

WINDOW = 64
"""Number of past losses whose median a loss is compared with; until there are that many, only NaN and Inf count."""
PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}
"""Dense bf16 FLOP/s, from the vendors' data sheets."""
PROFILED = range(3, 6)
"""Steps in a trace; earlier steps compile and allocate."""


class SpikeDetector:
    """Comparison of each step's loss with those before it; its state is saved in checkpoints."""

    def __init__(self, factor: float) -> None:
        self.factor = factor
        """Multiple of the median above which a loss is a spike."""
        self.recent: deque[float] = deque(maxlen=WINDOW)
        self.skipped = 0
        """Bad steps in a row."""

    def reason(self, loss: float, grad_norm: float, layers: Mapping[str, float]) -> str | None:
        """Return the reason why a step is bad, or None for a good one, whose loss is recorded."""
        self.skipped += 1
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            bad = [name for name, value in layers.items() if not math.isfinite(value)]
            return f"loss {loss}, gradient norm {grad_norm}" + (f" in {', '.join(bad)}" if bad else "")
        usual = statistics.median(self.recent) if len(self.recent) == WINDOW else math.inf
        if loss > self.factor * usual:
            highest = f", highest in {max(layers, key=lambda name: layers[name])}" if layers else ""
            return f"loss {loss:.4g} is more than {self.factor:g} times the usual {usual:.4g}{highest}"
        self.recent.append(loss)
        self.skipped = 0
        return None

    def state_dict(self) -> Record:
        return {"recent": list(self.recent), "skipped": self.skipped}

    def load_state_dict(self, state: Record) -> None:
        self.recent = deque(state["recent"], maxlen=WINDOW)
        self.skipped = state["skipped"]


class Meter:
    """Time and memory of a process between two lines of the metrics."""

    def __init__(self, flops_per_token: float, device: torch.device, world: int, tokens: int = 0) -> None:
        self.flops_per_token, self.device = flops_per_token, device
        self.peak = peak_flops(device) * world
        self.waited = 0.0
        self._since, self._tokens = time.perf_counter(), tokens

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self.waited += time.perf_counter() - begun

    def read(self, tokens: int) -> dict[str, float]:
        """Measure since the last reading: tokens per second over all processes, share of time spent waiting for data,
        and MFU of the matrix products (if the devices' peak is known). Also return the process's peak memory in bytes.
        """
        now = time.perf_counter()
        elapsed = now - self._since
        speed = (tokens - self._tokens) / elapsed
        found = {
            "tokens_per_s": round(speed, 1),
            "data_wait": round(self.waited / elapsed, 4),
            "memory_bytes": self._memory(),
        }
        if self.peak:
            found["mfu"] = round(speed * self.flops_per_token / self.peak, 4)
        self._since, self._tokens, self.waited = now, tokens, 0.0
        return found

    def _memory(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def flops_per_token(student: HybridForCausalLM, teachers: Sequence[nn.Module], *, teacher_forced: bool) -> float:
    """Count the FLOPs per token of the matrix products in a training step. Per weight: 2 in the forward pass, 2 for the
    gradient of its input, 2 for its own if it is trained. Attention, scans and recomputation are not counted.

    ``teacher_forced`` stages run the teacher and only the mixers of the student; other stages run the whole student.
    """
    forward = 2 * sum(p.numel() for teacher in teachers for p in _matrices(teacher))
    student_part: Sequence[nn.Module] = student.mixers() if teacher_forced else [student]
    weights = [p for module in student_part for p in _matrices(module)]
    return forward + sum((6 if p.requires_grad else 4) * p.numel() for p in weights)


def _matrices(module: nn.Module) -> list[torch.Tensor]:
    """Return the weights of linear layers, including the output embedding, each once."""
    return list({id(m.weight): m.weight for m in module.modules() if isinstance(m, nn.Linear)}.values())


def peak_flops(device: torch.device) -> float:
    """Return the peak bf16 FLOP/s of a device, 0 if unknown."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((flops for model, flops in PEAK_FLOPS.items() if model in name), 0.0)


@contextmanager
def profiler(path: Path | None) -> Iterator[Callable[[], None]]:
    """Yield a function to call after every step; it writes a trace of the steps in `PROFILED` to ``path``, if given.

    Open the file with chrome://tracing or ui.perfetto.dev.
    """
    if path is None:
        yield lambda: None
        return

    def write(found: torch.profiler.profile) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        found.export_chrome_trace(str(path))

    plan = torch.profiler.schedule(wait=PROFILED.start - 2, warmup=1, active=len(PROFILED), repeat=1)
    with torch.profiler.profile(schedule=plan, on_trace_ready=write, record_shapes=True) as running:
        yield running.step
