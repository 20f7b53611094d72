"""Detection of loss spikes."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping

from ..io import Record

WINDOW = 64
"""Number of past losses whose median a loss is compared with; until there are that many, only NaN and Inf count."""
LEAST_USUAL = 0.01
"""Least median that counts, in nats or as a share of the target: of a student that equals its teacher on most rows, the
median is rounding, and the first row on which it does not would seem to be a spike."""


class SpikeDetector:
    """Comparison of each step's loss with those before it; its state is saved in checkpoints."""

    def __init__(self, factor: float) -> None:
        self.factor = factor
        """Multiple of the median above which a loss is a spike."""
        self.recent: deque[float] = deque(maxlen=WINDOW)
        self.skipped = 0
        """Bad steps in a row."""

    def reason(
        self,
        loss: float,
        grad_norm: float,
        layers: Mapping[str, float],
    ) -> str | None:
        """Return the reason why a step is bad, or None for a good one, whose loss is recorded."""
        self.skipped += 1
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            description = f"loss {loss}, gradient norm {grad_norm}"
            bad_layers = [name for name, value in layers.items() if not math.isfinite(value)]
            if bad_layers:
                description += f" in {', '.join(bad_layers)}"
            return description
        usual = math.inf
        if len(self.recent) == WINDOW:
            usual = max(LEAST_USUAL, statistics.median(self.recent))
        if loss > self.factor * usual:
            description = f"loss {loss:.4g} is more than {self.factor:g} times the usual "
            description += f"{usual:.4g}"
            if layers:
                highest = max(layers, key=lambda name: layers[name])
                description += f", highest in {highest}"
            return description
        # Good losses only: a plateau of bad ones must not become the usual.
        self.recent.append(loss)
        self.skipped = 0
        return None

    def state_dict(self) -> Record:
        return {"recent": list(self.recent), "skipped": self.skipped}

    def load_state_dict(self, state: Record) -> None:
        self.recent = deque(state["recent"], maxlen=WINDOW)
        self.skipped = state["skipped"]
