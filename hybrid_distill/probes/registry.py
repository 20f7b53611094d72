"""Registry of probes by name, for the command line and for configs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial

from .knowledge import LetterChoice
from .kv_retrieval import KVRetrieval
from .probe import Probe
from .ruler import TASKS, RulerProbe
from .words import as_tuple


def make_probe(name: str, **options: object) -> Probe:
    """Make the probe ``name`` from ``PROBES`` or ``RULER``, ignoring options that it does not have.

    Raises ValueError for an unknown name, and for options that the probe rejects.
    """
    probes = {**PROBES, **RULER}
    if name not in probes:
        raise ValueError(f"there is no probe {name!r}; pass one of {', '.join(probes)}.")
    make = probes[name]
    # The command line passes the options of all probes.
    own_options = {option: value for option, value in options.items() if _takes(make, option)}
    return make(**own_options)


def probes_with(option: str) -> list[str]:
    """Return the names of the probes that have an option."""
    return [name for name, make in {**PROBES, **RULER}.items() if _takes(make, option)]


def _takes(make: Callable[..., Probe], option: str) -> bool:
    return option in inspect.signature(make).parameters


def _kv(
    pairs: int | Sequence[int] = 16, seed: int = 0, n_queries: int = 1, distance: int = 0
) -> KVRetrieval:
    """Make a `KVRetrieval` from the options of the command line."""
    sizes = as_tuple("pairs", pairs)
    # A single size, not a tuple of one: `describe` names it in files of scores.
    n_pairs = sizes[0] if len(sizes) == 1 else sizes
    return KVRetrieval(n_pairs, seed, n_queries=n_queries, distance=distance)


PROBES: dict[str, Callable[..., Probe]] = {"kv": _kv, "letters": LetterChoice.from_file}
RULER: dict[str, Callable[..., Probe]] = {task: partial(RulerProbe, task) for task in TASKS}
