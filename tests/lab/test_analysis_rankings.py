"""Rankings that others have published, and how far two rankings agree."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from head_tables import some_scores
from messages import naming

from hybrid_distill.lab.analysis.rankings import compare_rankings, load_ranking
from hybrid_distill.plan import HeadId

SHAPE = SimpleNamespace(n_layers=2, n_heads=4, n_kv_heads=2)


def heads(*pairs: tuple[int, int]) -> list[HeadId]:
    return [HeadId(*pair) for pair in pairs]


def written(tmp_path: Path, content: Any) -> Path:
    path = tmp_path / "ranking"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


# A file that others have published: a list of heads, a ranking with its shape, several with names.
PAIRS = [[1, 3], [0, 0], [1, 0]]
THIS = {
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "ranking": PAIRS,
}
OTHER = {
    "n_layers": 3,
    "n_heads": 4,
    "n_kv_heads": 2,
    "ranking": [[2, 1]],
}
PUBLISHED = {"what": "published", "rankings": {"other": OTHER, "this": THIS}}


@pytest.mark.parametrize(
    "content",
    [PAIRS, THIS, PUBLISHED],
    ids=["pairs", "with a shape", "one of several"],
)
def test_lists_of_layer_and_head(tmp_path: Path, content: Any) -> None:
    ranking = load_ranking(written(tmp_path, content), SHAPE)
    assert ranking == heads((1, 3), (0, 0), (1, 0))


BAD: dict[str, Any] = {
    "empty": "",
    "missing head": [[0, 1], [0, 9]],
    "repeated head": [[0, 1], [0, 1]],
    "three numbers": [[0, 1, 2]],
    "other model": OTHER,
    "two of this shape": {"rankings": {"one": THIS, "two": THIS}},
    "no names": {"rankings": [[0, 1]]},
}


@pytest.mark.parametrize("content", BAD.values(), ids=BAD)
def test_a_file_that_is_not_a_ranking(tmp_path: Path, content: Any) -> None:
    with pytest.raises(ValueError, match=str(tmp_path / "ranking")):
        load_ranking(written(tmp_path, content), SHAPE)


def test_overlap_and_correlation_of_a_small_case() -> None:
    a = heads((0, 0), (0, 1), (0, 2), (0, 3))
    b = heads((0, 1), (0, 0), (0, 3), (0, 2))

    compared = compare_rankings(a, b, [1, 2, 3, 4, 9])

    # 9 is more than there are.
    assert compared.overlap == {1: 0.0, 2: 1.0, 3: pytest.approx(2 / 3), 4: 1.0}
    assert compared.chance == {1: 0.25, 2: 0.5, 3: 0.75, 4: 1.0}
    # Two of six pairs are the other way round.
    assert compared.kendall == pytest.approx(1 - 2 * 2 / 6)
    # 1 - 6 sum(d²) / (n (n² - 1)): every head is one place off.
    assert compared.spearman == pytest.approx(1 - 6 * 4 / (4 * 15))
    assert compared.n_common == 4


def test_scores_against_a_short_list() -> None:
    """A head that the list leaves out counts against the overlap, and is not part of the
    correlation."""
    scores = some_scores([[0.9, 0.8, 0.7, 0.6], [0.5, 0.4, 0.3, math.nan]])

    compared = compare_rankings(scores, heads((0, 0), (0, 3)), [1, 2, 3])

    assert compared.overlap == {1: 1.0, 2: 0.5}
    assert compared.chance[1] == pytest.approx(1 / 7), "seven heads: the eighth does not exist"
    assert compared.n_common == 2
    assert compared.spearman == pytest.approx(1)


def test_rankings_that_cannot_be_compared() -> None:
    one_layer = some_scores([[0.1, 0.2]])
    two_layers = some_scores([[0.1], [0.2]])
    with pytest.raises(ValueError, match=naming("1 x 2", "2 x 1")):
        compare_rankings(one_layer, two_layers)
