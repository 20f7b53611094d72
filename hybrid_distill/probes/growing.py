"""Key-value retrieval in dictionaries of several sizes: one size saturates where another still tells heads apart."""

from __future__ import annotations

from dataclasses import dataclass, field

from . import Example, as_tuple, check_counts, duplicates
from .kv_retrieval import KVRetrieval


@dataclass(frozen=True)
class GrowingKV:
    """`KVRetrieval` whose number of pairs goes through ``pairs``, example by example, and begins again.

    The examples of one size are those of ``KVRetrieval(size, seed, keys)``, in their order. Raises ValueError for a
    size named twice (its examples would repeat) and for what `KVRetrieval` refuses.
    """

    pairs: tuple[int, ...] = (5, 10, 25, 50, 100)
    seed: int = 0
    keys: tuple[str, ...] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "pairs", as_tuple("pairs", self.pairs))
        if self.keys is not None:
            object.__setattr__(self, "keys", as_tuple("keys", self.keys))
        if repeated := duplicates(map(str, self.pairs)):
            raise ValueError(f"pairs are {self.pairs}: {repeated[0]} is there twice; name each size once.")
        self._probes()

    def _probes(self) -> list[KVRetrieval]:
        return [KVRetrieval(size, self.seed, self.keys) for size in self.pairs]

    @property
    def chance(self) -> float:
        """Accuracy of naming any value of the dictionary, over a whole round of sizes."""
        return sum(probe.chance for probe in self._probes()) / len(self.pairs)

    def examples(self, n: int) -> list[Example]:
        """The first ``n`` examples: example i has ``pairs[i % len(pairs)]`` pairs."""
        check_counts(n=n)
        rounds, probes = -(-n // len(self.pairs)), self._probes()
        by_round = zip(*(probe.examples(rounds) for probe in probes), strict=True)
        return [example for one_round in by_round for example in one_round][:n]

    def describe(self) -> dict[str, object]:
        """The settings every prompt follows from; the keys as a hash."""
        keys = self._probes()[0].describe()["keys_sha256"]
        return {"name": "growing_kv", "pairs": list(self.pairs), "seed": self.seed, "keys_sha256": keys}
