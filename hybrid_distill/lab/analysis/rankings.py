"""Do two rankings of the same model's heads agree? Published rankings are read too."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...plan import HeadId, HeadPlan
from ...scoring.head_scores import READABLE, HeadScores
from ...scoring.uncertainty import statistic

Ranking = HeadScores | Sequence[HeadId]


@dataclass(frozen=True)
class RankingComparison:
    """Agreement of two rankings.

    ``overlap[k]`` is the share of common heads among the first k of each, ``chance[k]`` that of two random rankings of
    as many heads as the longer one. ``spearman`` and ``kendall`` correlate the places of the ``n_common`` heads that
    both rank (-1 to 1; NaN for fewer than two).
    """

    overlap: dict[int, float]
    chance: dict[int, float]
    spearman: float
    kendall: float
    n_common: int

    def table(self) -> str:
        """Return plain text, for a terminal."""
        rows = [[f"overlap@{k}", f"{self.overlap[k]:.0%}", f"by chance {self.chance[k]:.0%}"] for k in self.overlap]
        correlated = [["Spearman", f"{self.spearman:+.2f}", ""], ["Kendall tau", f"{self.kendall:+.2f}", ""]]
        return _aligned([*rows, *correlated, ["heads in both", str(self.n_common), ""]])


def compare_rankings(a: Ranking, b: Ranking, ks: Sequence[int] = (5, 10, 20, 40)) -> RankingComparison:
    """Compare two rankings, which may be scores or lists of heads, best first.

    The overlap compares both rankings as they are, for each k that both are long enough for; correlations look only
    at heads that both rank. Raises ValueError for scores of models of different shapes.
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


def compare_files(a: Path, b: Path) -> str:
    """Return a table of how two files of head scores agree; one may be a published ranking (`load_ranking`).

    Raises ValueError for a file that does not exist, and unless one of them holds head scores.
    """
    rankings: list[HeadScores | Path] = []
    for path in (a, b):
        if not path.exists():
            raise ValueError(f"{path} does not exist; pass two files, scores.json or published rankings.")
        try:
            rankings.append(HeadScores.load(path))
        except ValueError:
            rankings.append(path)
    shape = next((ranking for ranking in rankings if isinstance(ranking, HeadScores)), None)
    if shape is None:
        raise ValueError(f"neither {a} nor {b} holds head scores; pass a scores.json as one of them.")
    first, second = (load_ranking(r, shape) if isinstance(r, Path) else r for r in rankings)
    forms = [r.provenance.get("probe", {}).get("prompt_form", "plain") for r in rankings if isinstance(r, HeadScores)]
    note = f"prompts have other forms: {' and '.join(forms)}\n" if len(set(forms)) > 1 else ""
    return note + compare_rankings(first, second).table()


def load_ranking(path: str | Path, shape_of: Any, *, model: str | None = None) -> list[HeadId]:
    """List heads, most important first, of a model of this shape (a config, model, plan or scores).

    The file holds [layer, head] lists, alone or under "ranking", or under "rankings" by model name: then ``model``
    chooses, or the shape where only one fits. It may also hold head scores. Raises ValueError for anything else.
    """
    shape = HeadPlan.none(shape_of)
    try:
        record = json.loads(Path(path).read_text())
        if isinstance(record, dict) and record.get("format") in READABLE:
            shape.check_fits(scores := HeadScores.load(path))
            return scores.ranking()
        named = record.get("rankings", {model: record}) if isinstance(record, dict) else {model: {"ranking": record}}
        fitting = [entry for name, entry in named.items() if model in (None, name) and _fits(entry, shape)]
        if len(fitting) != 1:
            raise ValueError(f"{len(fitting)} of its {len(named)} models are meant: {', '.join(map(str, named))}")
        ranking = [HeadId(layer, head) for layer, head in fitting[0]["ranking"]]
        HeadPlan.from_pairs(shape, ranking)  # every head exists, none comes twice
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} does not hold a ranking of these heads ({error}); pass [layer, head] lists or scores.json."
        ) from error
    return ranking


def _fits(entry: Mapping[str, object], shape: HeadPlan) -> bool:
    names = ("n_layers", "n_heads", "n_kv_heads")
    return all(entry.get(name, getattr(shape, name)) == getattr(shape, name) for name in names)


def comparison_table(named: Mapping[str, Ranking], k: int) -> str:
    """Compare every ranking with every other: overlap@k above the diagonal, Spearman's correlation below it.

    Plain text. A dash stands where two rankings cannot be compared: too short for k, or no two heads in both.
    """
    names = list(named)
    rows = [[f"overlap@{k} \\ Spearman", *(f"({i + 1})" for i in range(len(names)))]]

    def cell(i: int, j: int) -> str:
        if i == j:
            return ""
        compared = compare_rankings(named[names[i]], named[names[j]], [k])
        if i < j:
            return f"{compared.overlap[k]:.0%}" if k in compared.overlap else "-"
        return "-" if math.isnan(compared.spearman) else f"{compared.spearman:+.2f}"

    rows += [[f"({i + 1}) {name}", *(cell(i, j) for j in range(len(names)))] for i, name in enumerate(names)]
    return _aligned(rows)


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    """Set columns side by side: the first flush left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ([first.ljust(widths[0]), *map(str.rjust, others, widths[1:])] for first, *others in rows)
    return "\n".join("  ".join(line).rstrip() for line in lines)
