"""The random generators that training draws from, torch's: seeded, and saved as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

import torch

from ..io import Record


def row_seeds(seed: int, places: Iterable[int]) -> list[int]:
    """Return a seed for each row, by the run's seed and the row's place in the data's order."""
    return [int.from_bytes(blake2b(repr((seed, place)).encode(), digest_size=8).digest(), "little") for place in places]


def rng_state() -> Record:
    """Return the states of the CPU's generator and the current GPU's."""
    state = {"torch": torch.get_rng_state().tolist()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state().tolist()
    return state


def set_rng_state(state: Record) -> None:
    """Restore a state that `rng_state` returned."""
    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.tensor(state["cuda"], dtype=torch.uint8))
