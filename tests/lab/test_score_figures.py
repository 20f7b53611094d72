"""The pictures of a scoring: bars and heat map."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from head_tables import whole_scores

from hybrid_distill.lab.reporting.heads import score_bars, score_map
from hybrid_distill.scoring.head_scores import INTERVALS


@pytest.mark.parametrize("change", [{}, {"control_drop_LH": None}, {name: None for name in INTERVALS}])
def test_pictures(tmp_path: Path, change: dict[str, Any]) -> None:
    """The bars name the heads of the ranking, best first, and no head beyond."""
    scores = dataclasses.replace(whole_scores(), **change)
    bars, heat_map = tmp_path / "bars.svg", tmp_path / "map.svg"
    score_bars(scores, bars, top=6, k=3)
    score_map(scores, heat_map, kept=scores.ranking()[:3])
    comments = re.findall(r"<!-- (.*?) -->", bars.read_text())
    assert [text for text in comments if re.fullmatch(r"L\dH\d", text)] == list(map(str, scores.ranking()[:6]))
    assert comments.count("Accuracy lost") == 1
    assert ("Control: plain text" in comments) == (scores.control_drop_LH is not None)
    assert "grey: no attention head" in heat_map.read_text()
