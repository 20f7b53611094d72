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
    states = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return {name: state.numpy().tobytes().hex() for name, state in states.items()}


def set_rng_state(state: Record) -> None:
    """Restore a state that `rng_state` returned."""
    states = {name: torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8) for name, text in state.items()}
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
