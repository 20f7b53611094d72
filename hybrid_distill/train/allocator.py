"""Memory that a training step frees on a CPU, kept for the next step.

By default glibc returns every large block to the kernel, which clears its pages again when the next
step asks for them: a fifth of a step of SmolLM2 on one core (docs/performance.md, "A training step").
"""

from __future__ import annotations

import ctypes
import os

import torch

# Parameters of glibc's mallopt, from malloc.h.
TRIM_THRESHOLD = -1
TOP_PAD = -2
MMAP_MAX = -4

MOST_KEPT = 2**31 - 1
"""Free bytes that stay with the process. A mallopt value is an int, so this is the largest."""
STRIDE = 2**28
"""Bytes by which the heap grows at least."""


def keep_freed_memory(device: torch.device) -> None:
    """Let glibc keep blocks that training on a CPU frees. Settings from ``MALLOC_`` variables stay.

    Without effect on a GPU, with another C library, or with another allocator loaded before it.
    """
    if device.type != "cpu" or any(name.startswith("MALLOC_") for name in os.environ):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    # Blocks that are mapped one by one could not be kept.
    mallopt(MMAP_MAX, 0)
    mallopt(TRIM_THRESHOLD, MOST_KEPT)
    mallopt(TOP_PAD, STRIDE)
