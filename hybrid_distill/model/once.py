"""Cache of a function's results that torch.compile reads as constants."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch


def once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Cache a function's results; torch.compile calls it while tracing and treats the result as a
    constant."""
    cached = cache(function)
    return torch.compiler.assume_constant_result(
        wraps(function)(lambda *arguments: cached(*arguments))
    )
