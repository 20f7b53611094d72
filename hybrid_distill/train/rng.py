"""The random generators of a process: seeded, and saved as JSON."""

from __future__ import annotations

import random
from collections.abc import Iterable
from hashlib import blake2b

import numpy as np
import torch

from ..io import Record


def seed_all(seed: int) -> None:
    """Seed Python, numpy and torch (CPU and GPUs)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def row_seeds(seed: int, places: Iterable[int]) -> list[int]:
    """Return a seed for each row, by the run's seed and the row's place in the data's order."""
    return [int.from_bytes(blake2b(repr((seed, place)).encode(), digest_size=8).digest(), "little") for place in places]


def rng_state() -> Record:
    """Return the states of the generators that `seed_all` seeds; of the GPUs, the current one."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state = {
        "python": [version, list(words), gauss],
        "numpy": [name, np.asarray(keys).tolist(), position, has_gauss, cached],
        "torch": torch.get_rng_state().tolist(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state().tolist()
    return state


def set_rng_state(state: Record) -> None:
    """Restore a state that `rng_state` returned."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.asarray(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.tensor(state["cuda"], dtype=torch.uint8))
