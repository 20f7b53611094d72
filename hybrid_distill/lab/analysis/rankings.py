"""Measure the agreement of two rankings of the same model's heads; published rankings can be read too."""

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

    ``overlap[k]`` is the share of common heads among the first k of each, ``chance[k]`` that of two
    random rankings of as many heads as the longer one. ``spearman`` and ``kendall`` correlate the
    positions of the ``n_common`` heads that both rank (-1 to 1; NaN for fewer than two).
    """

    overlap: dict[int, float]
    chance: dict[int, float]
    spearman: float
    kendall: float
    n_common: int


def compare_rankings(
    a: Ranking, b: Ranking, ks: Sequence[int] = (5, 10, 20, 40)
) -> RankingComparison:
    """Compare two rankings, which may be scores or lists of heads, best first.

    The overlap compares the full rankings, for each k that both are long enough for; correlations
    use only the heads that both rank. Raises ValueError for scores of models of different shapes.
    """
    from scipy import stats  # slow to import

    if (
        isinstance(a, HeadScores)
        and isinstance(b, HeadScores)
        and a.logprob_drop_LH.shape != b.logprob_drop_LH.shape
    ):
        raise ValueError(
            f"the scores are of models with {a.n_layers} x {a.n_heads} and {b.n_layers} x "
            f"{b.n_heads} heads; pass scores of models of one shape."
        )
    ranked_a = _as_list(a)
    ranked_b = _as_list(b)
    longest = max(len(ranked_a), len(ranked_b))
    shortest = min(len(ranked_a), len(ranked_b))
    ks = sorted({k for k in ks if 0 < k <= shortest})
    # Positions in b of the heads that both rank, in a's order: they correlate as the two orders do.
    positions_in_b = [ranked_b.index(head) for head in ranked_a if head in ranked_b]
    spearman = math.nan
    kendall = math.nan
    if len(positions_in_b) > 1:
        in_order = range(len(positions_in_b))
        spearman = statistic(stats.spearmanr(in_order, positions_in_b))
        kendall = statistic(stats.kendalltau(in_order, positions_in_b))
    return RankingComparison(
        overlap={k: len(set(ranked_a[:k]) & set(ranked_b[:k])) / k for k in ks},
        chance={k: k / longest for k in ks},
        spearman=spearman,
        kendall=kendall,
        n_common=len(positions_in_b),
    )


def _as_list(ranking: Ranking) -> list[HeadId]:
    return ranking.ranking() if isinstance(ranking, HeadScores) else list(ranking)


@dataclass(frozen=True)
class CompareRankings:
    """Compare two rankings of heads: shares of common heads among the first k, and rank
    correlations."""

    a: tyro.conf.Positional[Path]
    """A scores.json, or a published ranking (docs/scores.md)."""
    b: tyro.conf.Positional[Path]
    """The ranking to compare it with."""

    def run(self) -> str:
        return compare_files(self.a, self.b)


def compare_files(a: Path, b: Path) -> str:
    """Return a table of the agreement of two files of head scores.

    One may be a published ranking (`load_ranking`). Raises ValueError for a file that does not
    exist, and unless one of them holds head scores.
    """
    scores: dict[Path, HeadScores] = {}
    for path in (a, b):
        if not path.exists():
            raise ValueError(
                f"{path} does not exist; pass two files, scores.json or published rankings."
            )
        # A published ranking is not a scores file; it is read below, by the other's shape.
        with suppress(ValueError):
            scores[path] = HeadScores.load(path)
    if not scores:
        raise ValueError(
            f"neither {a} nor {b} holds head scores; pass a scores.json as one of them."
        )
    shape = next(iter(scores.values()))
    rankings = [scores.get(path) or load_ranking(path, shape) for path in (a, b)]
    comparison = compare_rankings(rankings[0], rankings[1])
    rows = []
    for k, share in comparison.overlap.items():
        rows.append((f"overlap@{k}", f"{share:.0%}", f"by chance {comparison.chance[k]:.0%}"))
    rows.append(("Spearman", f"{comparison.spearman:+.2f}", ""))
    rows.append(("Kendall tau", f"{comparison.kendall:+.2f}", ""))
    rows.append(("heads in both", str(comparison.n_common), ""))
    text = text_table(pd.DataFrame(rows, columns=["agreement", "", " "]))
    formats = []
    for each in scores.values():
        formats.append(each.provenance.get("probe", {}).get("prompt_format", "plain"))
    if len(set(formats)) > 1:
        return f"the prompt formats differ: {' and '.join(formats)}\n{text}"
    return text


def load_ranking(path: Path, shape_of: object) -> list[HeadId]:
    """Load a ranking, most important head first, for a model of this shape (a config, model, plan
    or scores).

    The file holds [layer, head] lists, alone or under "ranking", or under "rankings" by model name;
    in that case, the one that fits the shape is used. Raises ValueError for anything else.
    """
    shape = HeadPlan.none(shape_of)
    with refused(
        f"{path} does not hold a ranking of these heads", "pass [layer, head] lists or scores.json"
    ):
        record = json.loads(path.read_text())
        if not isinstance(record, dict):
            record = {"ranking": record}
        by_model = record.get("rankings", {"": record})
        fitting = [entry for entry in by_model.values() if _fits(entry, shape)]
        if len(fitting) != 1:
            raise ValueError(f"{len(fitting)} of its rankings are of a model of this shape")
        ranking = [HeadId(layer, head) for layer, head in fitting[0]["ranking"]]
        HeadPlan.from_pairs(shape, ranking)  # checks that every head exists, and only once
        return ranking


def _fits(entry: Mapping[str, object], shape: HeadPlan) -> bool:
    """Check the numbers that an entry states; one that states none fits any model."""
    for name in ("n_layers", "n_heads", "n_kv_heads"):
        if name in entry and entry[name] != getattr(shape, name):
            return False
    return True
