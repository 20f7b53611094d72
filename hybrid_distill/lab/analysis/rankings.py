"""Agreement of two rankings of the same model's heads; published rankings can be read too."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import tyro

from ...io import refused
from ...plan import HeadId, HeadPlan
from ...scoring import HeadScores
from ...scoring.uncertainty import statistic
from ..reporting import text_table

Ranking = HeadScores | Sequence[HeadId]


class RankingComparison(NamedTuple):
    """Agreement of two rankings.

    ``overlap[k]`` is the share of common heads among the first k of each, ``chance[k]`` that of two random rankings of
    as many heads as the longer one. ``spearman`` and ``kendall`` correlate the positions of the ``n_common`` heads that
    both rank (-1 to 1; NaN for fewer than two).
    """

    overlap: dict[int, float]
    chance: dict[int, float]
    spearman: float
    kendall: float
    n_common: int


def compare_rankings(a: Ranking, b: Ranking, ks: Sequence[int] = (5, 10, 20, 40)) -> RankingComparison:
    """Compare two rankings, which may be scores or lists of heads, best first.

    The overlap compares the full rankings, for each k that both are long enough for; correlations use only the heads
    that both rank. Raises ValueError for scores of models of different shapes.
    """
    from scipy import stats  # slow to import

    if isinstance(a, HeadScores) and isinstance(b, HeadScores) and a.accuracy_drop_LH.shape != b.accuracy_drop_LH.shape:
        raise ValueError(
            f"the scores are of models with {a.n_layers} x {a.n_heads} and {b.n_layers} x {b.n_heads} heads; "
            "pass scores of models of one shape."
        )
    ranked_a, ranked_b = ([*each.ranking()] if isinstance(each, HeadScores) else [*each] for each in (a, b))
    n_heads, shortest = max(len(ranked_a), len(ranked_b)), min(len(ranked_a), len(ranked_b))
    ks = sorted({k for k in ks if 0 < k <= shortest})
    places = [ranked_b.index(head) for head in ranked_a if head in ranked_b]
    in_order, few = range(len(places)), len(places) < 2
    return RankingComparison(
        overlap={k: len(set(ranked_a[:k]) & set(ranked_b[:k])) / k for k in ks},
        chance={k: k / n_heads for k in ks},
        spearman=math.nan if few else statistic(stats.spearmanr(in_order, places)),
        kendall=math.nan if few else statistic(stats.kendalltau(in_order, places)),
        n_common=len(places),
    )


@dataclass(frozen=True)
class CompareRankings:
    """Compare two rankings of heads: shares of common heads among the first k, and rank correlations."""

    a: tyro.conf.Positional[Path]
    """A scores.json, or a published ranking (docs/scores.md)."""
    b: tyro.conf.Positional[Path]
    """The ranking to compare it with."""

    def run(self) -> str:
        return compare_files(self.a, self.b)


def compare_files(a: Path, b: Path) -> str:
    """Return a table of the agreement of two files of head scores; one may be a published ranking (`load_ranking`).

    Raises ValueError for a file that does not exist, and unless one of them holds head scores.
    """
    scores: dict[Path, HeadScores] = {}
    for path in (a, b):
        if not path.exists():
            raise ValueError(f"{path} does not exist; pass two files, scores.json or published rankings.")
        with suppress(ValueError):
            scores[path] = HeadScores.load(path)
    if not scores:
        raise ValueError(f"neither {a} nor {b} holds head scores; pass a scores.json as one of them.")
    shape = next(iter(scores.values()))
    first, second = (scores.get(path) or load_ranking(path, shape) for path in (a, b))
    forms = [r.provenance.get("probe", {}).get("prompt_form", "plain") for r in scores.values()]
    note = f"prompts have other forms: {' and '.join(forms)}\n" if len(set(forms)) > 1 else ""
    found = compare_rankings(first, second)
    rows = [(f"overlap@{k}", f"{share:.0%}", f"by chance {found.chance[k]:.0%}") for k, share in found.overlap.items()]
    rows += [("Spearman", f"{found.spearman:+.2f}", ""), ("Kendall tau", f"{found.kendall:+.2f}", "")]
    rows.append(("heads in both", str(found.n_common), ""))
    return note + text_table(pd.DataFrame(rows, columns=["agreement", "", " "]))


def load_ranking(path: Path, shape_of: object) -> list[HeadId]:
    """Load a ranking, most important head first, for a model of this shape (a config, model, plan or scores).

    The file holds [layer, head] lists, alone or under "ranking", or under "rankings" by model name; in that case, the
    one that fits the shape is used. Raises ValueError for anything else.
    """
    shape = HeadPlan.none(shape_of)
    with refused(f"{path} does not hold a ranking of these heads", "pass [layer, head] lists or scores.json"):
        record = json.loads(path.read_text())
        entries = record if isinstance(record, dict) else {"ranking": record}
        fitting = [entry for entry in entries.get("rankings", {"": entries}).values() if _fits(entry, shape)]
        if len(fitting) != 1:
            raise ValueError(f"{len(fitting)} of its rankings are of a model of this shape")
        ranking = [HeadId(layer, head) for layer, head in fitting[0]["ranking"]]
        HeadPlan.from_pairs(shape, ranking)  # checks that every head exists, and only once
        return ranking


def _fits(entry: Mapping[str, object], shape: HeadPlan) -> bool:
    names = ("n_layers", "n_heads", "n_kv_heads")
    return all(entry.get(name, getattr(shape, name)) == getattr(shape, name) for name in names)
