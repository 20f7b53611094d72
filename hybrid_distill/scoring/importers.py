"""Published rankings of heads, read from the files they come in."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..plan import HeadId, HeadPlan
from .head_scores import READABLE, HeadScores

DUO_FILE = "full_attention_heads.tsv"


def load_ranking(path: str | Path, shape_of: Any, *, model: str | None = None) -> list[HeadId]:
    """List heads, most important first, of a model of this shape (a config, model, plan or scores).

    The contents decide how a file is read:

    - [layer, head] lists, alone or under "ranking"; or under "rankings" by model name: then ``model`` chooses, or
      the shape where only one fits;
    - duo-attention (arXiv 2410.10819): a matrix of gates, tab separated, a row per layer and a column per KV head;
      the folder that holds it will do. All query heads of a KV head take its gate;
    - Retrieval_Head (arXiv 2404.15574): {"layer-head": [scores]}, ranked by their mean;
    - head scores of this project.

    Equal heads stand in the order of (layer, head). Raises ValueError for anything else, and for heads that a
    model of this shape does not have.
    """
    path = Path(path)
    path = path / DUO_FILE if path.is_dir() else path
    shape = HeadPlan.none(shape_of)
    try:
        text = path.read_text()
        record = json.loads(text) if text.lstrip().startswith(("[", "{")) else None
        if record is None:
            ranking = _duo_attention(text, shape)
        elif isinstance(record, list):
            ranking = _pairs(record)
        elif record.get("format") in READABLE:
            scores = HeadScores.load(path)
            shape.check_fits(scores)
            ranking = scores.ranking()
        elif "ranking" in record or "rankings" in record:
            ranking = _pairs(_of_model(record, shape, model))
        else:
            ranking = _retrieval_head(record)
        HeadPlan.from_pairs(shape, ranking)  # every head exists, none comes twice
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} does not hold a ranking of these heads ({error}); pass [layer, head] lists, duo-attention's "
            f"{DUO_FILE}, Retrieval_Head's json or scores.json."
        ) from error
    return ranking


def _pairs(entries: Any) -> list[HeadId]:
    if not entries or not all(isinstance(pair, list) and len(pair) == 2 for pair in entries):
        raise ValueError("expected a list of [layer, head] pairs, at least one")
    return [HeadId(*pair) for pair in entries]


def _of_model(record: dict[str, Any], shape: HeadPlan, model: str | None) -> Any:
    """Pick the list of one model from a file that may hold those of several."""

    def fits(entry: Any) -> bool:
        names = ("n_layers", "n_heads", "n_kv_heads")
        return isinstance(entry, list) or all(entry.get(n, getattr(shape, n)) == getattr(shape, n) for n in names)

    named = record.get("rankings", {model: record})
    fitting = [entry for name, entry in named.items() if model in (None, name) and fits(entry)]
    if len(fitting) != 1:
        raise ValueError(f"{len(fitting)} of its {len(named)} models are meant: {', '.join(map(str, named))}")
    return fitting[0] if isinstance(fitting[0], list) else fitting[0]["ranking"]


def _duo_attention(text: str, shape: HeadPlan) -> list[HeadId]:
    rows = [[float(cell) for cell in line.split("\t")] for line in text.splitlines() if line.strip()]
    widths = {len(row) for row in rows}
    if len(rows) != shape.n_layers or widths != {shape.n_kv_heads}:
        raise ValueError(
            f"it has {len(rows)} rows of {' or '.join(map(str, sorted(widths)))} gates, "
            f"expected {shape.n_layers} layers of {shape.n_kv_heads} KV heads"
        )
    if not all(0 <= gate <= 1 for row in rows for gate in row):
        raise ValueError("a gate is not between 0 and 1")
    group_size = shape.n_heads // shape.n_kv_heads
    return _by_score((head, rows[head.layer][head.head // group_size]) for head in HeadPlan.all(shape).kept)


def _retrieval_head(record: dict[str, Any]) -> list[HeadId]:
    scored = []
    for name, scores in record.items():
        layer, dash, head = name.partition("-")
        if not (dash and layer.isdecimal() and head.isdecimal()):
            raise ValueError(f'expected "layer-head" as names, found {name!r}')
        scored.append((HeadId(int(layer), int(head)), sum(scores) / len(scores) if scores else math.nan))
    if not scored or any(math.isnan(score) for _, score in scored):
        raise ValueError("a head has no scores")
    return _by_score(scored)


def _by_score(scored: Iterable[tuple[HeadId, float]]) -> list[HeadId]:
    return [head for head, _ in sorted(scored, key=lambda entry: (-entry[1], entry[0]))]
