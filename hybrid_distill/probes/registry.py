"""Probes by name, for the command line and for configs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from . import Probe, as_tuple
from .copying import Copying
from .kv_retrieval import KVRetrieval
from .letter_choice import Fact, LetterChoice
from .needle import Needle
from .nouns import NOUNS
from .two_hop import TwoHop


def make_probe(name: str, **options: object) -> Probe:
    """Make the probe called ``name``, one of ``PROBES``, with its options.

    Raises ValueError for an unknown name, an option that this probe does not have, and what the probe refuses.
    """
    if unknown := sorted(set(options) - set(known := options_of(name))):
        raise ValueError(f"the probe {name!r} has no option {', '.join(unknown)}; it has {', '.join(known)}.")
    return PROBES[name](**options)


def probe_with(name: str, given: Mapping[str, object]) -> Probe:
    """Make the probe called ``name`` with those of the given options that it has. Raises as `make_probe` does."""
    return make_probe(name, **{option: given[option] for option in options_of(name) if option in given})


def options_of(name: str) -> tuple[str, ...]:
    """Return the names of a probe's options. Raises ValueError for an unknown name."""
    if name not in PROBES:
        raise ValueError(f"there is no probe {name!r}; pass one of {', '.join(PROBES)}.")
    return tuple(inspect.signature(PROBES[name]).parameters)


def _kv(pairs: int | Sequence[int] = 16, seed: int = 0, keys: tuple[str, ...] | None = None) -> KVRetrieval:
    sizes = as_tuple("pairs", pairs)
    return KVRetrieval(sizes[0] if len(sizes) == 1 else sizes, seed, keys)


def _letters(facts: str | Path | Sequence[Fact] | None = None, n_options: int = 4, seed: int = 0) -> LetterChoice:
    """Ask facts of a file, by default the embedded teacher's, or facts in memory."""
    if facts is None or isinstance(facts, str | Path):
        return LetterChoice.from_file(facts, n_options, seed)
    return LetterChoice(tuple(facts), n_options, seed)


def _two_hop(pairs: int | Sequence[int] = 8, seed: int = 0, keys: tuple[str, ...] = NOUNS) -> TwoHop:
    sizes = as_tuple("pairs", pairs)
    if len(sizes) != 1:
        raise ValueError(f"pairs are {sizes}; two-hop dictionaries have one size: pass one number.")
    return TwoHop(*sizes, seed, keys)


PROBES: dict[str, Callable[..., Probe]] = {
    "kv": _kv,
    "letters": _letters,
    "needle": Needle,
    "copy": Copying,
    "two_hop": _two_hop,
}
