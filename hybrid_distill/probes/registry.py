"""Registry of probes by name, for the command line and for configs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial

from transformers import PreTrainedTokenizerBase

from ..assets.dictionaries import NOUNS
from . import Probe, as_tuple
from .knowledge import LetterChoice
from .kv_retrieval import KVRetrieval
from .needle import Needle
from .ruler import TASKS, RulerProbe
from .words import MQAR, Copying, TwoHop, single_token_words


def make_probe(name: str, **options: object) -> Probe:
    """Make the probe ``name`` from ``PROBES`` or ``RULER``, ignoring options that it does not have.

    Raises ValueError for an unknown name, and for options that the probe rejects.
    """
    probes = {**PROBES, **RULER}
    if name not in probes:
        raise ValueError(f"there is no probe {name!r}; pass one of {', '.join(probes)}.")
    known = inspect.signature(probes[name]).parameters
    return probes[name](**{option: value for option, value in options.items() if option in known})


def _kv(pairs: int | Sequence[int] = 16, seed: int = 0, n_queries: int = 1) -> KVRetrieval:
    sizes = as_tuple("pairs", pairs)
    return KVRetrieval(sizes[0] if len(sizes) == 1 else sizes, seed, n_queries=n_queries)


def _two_hop(pairs: int | Sequence[int] = 8, seed: int = 0) -> TwoHop:
    return TwoHop(_one("two_hop", pairs), seed)


def _mqar(
    pairs: int | Sequence[int] = 16, n_queries: int = 4, seed: int = 0, tokenizer: PreTrainedTokenizerBase | None = None
) -> MQAR:
    """Draw keys and values from the tokenizer's single-token words; without a tokenizer, from common nouns."""
    words = NOUNS if tokenizer is None else single_token_words(tokenizer)
    return MQAR(_one("mqar", pairs), n_queries, seed, words)


def _one(name: str, pairs: int | Sequence[int]) -> int:
    sizes = as_tuple("pairs", pairs)
    if len(sizes) != 1:
        raise ValueError(f"pairs are {sizes}, but rows of {name} have one size; pass one number.")
    return sizes[0]


PROBES: dict[str, Callable[..., Probe]] = {
    "kv": _kv,
    "letters": LetterChoice.from_file,
    "needle": Needle,
    "copy": Copying,
    "two_hop": _two_hop,
    "mqar": _mqar,
}
RULER: dict[str, Callable[..., Probe]] = {task: partial(RulerProbe, task) for task in TASKS}
