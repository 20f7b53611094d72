"""Is a run well? What is wrong with a step's loss, and what the machine does with its time."""

from __future__ import annotations

import math
import resource
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .config import StageConfig

WINDOW = 64
"""Steps whose median loss is what a loss is compared with; before there are so many, only NaN and Inf count."""
PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}
"""Dense bf16 operations a second that the makers state."""
PROFILED = range(3, 6)
"""Steps of a run that a trace holds; those before them compile and allocate."""


class Watch:
    """Compares every step with those before it; what it remembers goes into checkpoints."""

    def __init__(self, config: StageConfig) -> None:
        self.config = config
        self.recent: deque[float] = deque(maxlen=WINDOW)
        self.skipped = 0
        """Steps skipped one after the other."""

    def complaint(self, loss: float, grad_norm: float, layers: Mapping[str, float]) -> str | None:
        """What is wrong with a step, None if nothing is; a good step's loss is remembered."""
        bad = [name for name, value in layers.items() if not math.isfinite(value)]
        where = f" in {', '.join(bad)}" if bad else ""
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return f"loss {loss}, gradient norm {grad_norm}{where}"
        usual = statistics.median(self.recent) if len(self.recent) == WINDOW else math.inf
        if loss > self.config.spike * usual:
            times = f"more than {self.config.spike:g} times the usual {usual:.4g}"
            return f"loss {loss:.4g} is {times}{self._highest(layers)}"
        self.recent.append(loss)
        return None

    def _highest(self, layers: Mapping[str, float]) -> str:
        return f", highest in {max(layers, key=lambda name: layers[name])}" if layers else ""

    def state_dict(self) -> dict[str, Any]:
        return {"recent": list(self.recent), "skipped": self.skipped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.recent = deque(state["recent"], maxlen=WINDOW)
        self.skipped = state["skipped"]


class Meter:
    """Where the time and the memory of a process go, between two lines of the metrics."""

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
        """Since the last reading: tokens a second over all processes, the share of the time that went into waiting for
        data, the share of the devices' peak that the model's products are (where it is known); and the most bytes held.
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
        """The most this process has held: on a GPU what torch allocated there, else resident memory."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def flops_per_token(student: nn.Module, teachers: Sequence[nn.Module], *, teacher_forced: bool) -> float:
    """Operations of the matrix products of one training step, per token: 2 a weight forward, 2 for the gradient of its
    input, 2 for its own where it is trained. Attention, scans and recomputation are not counted.

    ``teacher_forced`` stages run only the mixers of the student beside the teacher; a stage without one, the student.
    """
    forward = 2 * sum(p.numel() for teacher in teachers for p in _matrices(teacher))
    student_part: Sequence[nn.Module] = student.mixers() if teacher_forced else [student]  # type: ignore[operator]
    weights = [p for module in student_part for p in _matrices(module)]
    return forward + sum((6 if p.requires_grad else 4) * p.numel() for p in weights)


def _matrices(module: nn.Module) -> list[torch.Tensor]:
    """The weights of linear layers, the output embedding's included, each once."""
    return list({id(m.weight): m.weight for m in module.modules() if isinstance(m, nn.Linear)}.values())


def peak_flops(device: torch.device) -> float:
    """Bf16 operations a second of a device, 0 where that is not known."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((flops for model, flops in PEAK_FLOPS.items() if model in name), 0.0)


def profiler(path: Path | None) -> Any:
    """A context whose value is called after every step; it writes a trace of `PROFILED` to ``path`` (None: nothing).

    Open the file with chrome://tracing or ui.perfetto.dev.
    """
    if path is None:
        return nullcontext(lambda: None)
    return _profiler(path)


@contextmanager
def _profiler(path: Path) -> Iterator[Any]:
    def write(found: Any) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        found.export_chrome_trace(str(path))

    plan = torch.profiler.schedule(wait=PROFILED.start - 2, warmup=1, active=len(PROFILED), repeat=1)
    with torch.profiler.profile(schedule=plan, on_trace_ready=write, record_shapes=True) as running:
        yield running.step
