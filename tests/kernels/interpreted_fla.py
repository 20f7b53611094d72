"""flash-linear-attention's kernels in triton's interpreter, which cannot time them and counts in
plain integers."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any


class Index(int):
    """A loop's number, which kernels cast."""

    def to(self, dtype: Any) -> int:
        return self


def indices(*bounds: Any) -> Iterator[Index]:
    return map(Index, range(*map(int, bounds)))


def take_the_first(self: Any, call: Any, quantiles: Any) -> list[float]:
    """Stand in for the time of one of the configurations to choose from."""
    return [1.0] * len(quantiles)


def interpret(replace: Callable[[Any, str, Any], None] = setattr) -> None:
    """Put in what the interpreter lacks."""
    autotuner = importlib.import_module("triton.runtime.autotuner").Autotuner
    replace(autotuner, "do_bench", take_the_first)
    # Nothing but a module's own name hides a builtin.
    importlib.import_module("fla.ops.common.chunk_delta_h").__dict__.setdefault("range", indices)


def spoil_gradients(replace: Callable[[Any, str, Any], None] = setattr) -> None:
    """Compute wrong gradients of keys after a right forward, as
    fla-org/flash-linear-attention#640 did."""
    module = importlib.import_module("fla.ops.gated_delta_rule.chunk")
    compute = module.chunk_bwd_dqkwg

    def compute_wrong(*args: Any, **options: Any) -> tuple[Any, ...]:
        dq, dk, dw, dg = compute(*args, **options)
        return dq, 0.5 * dk, dw, dg

    replace(module, "chunk_bwd_dqkwg", compute_wrong)
