"""No number gets in that cannot be meant: every numeric field of a run and a scoring is tried."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import pytest
from training import small_run

from hybrid_distill.cli.score import ScoreJob
from hybrid_distill.validation import numbers

OPTIONAL = {
    "min_accuracy": 0.5,
    "batch_size": 1,
    "examples": 24,
    "queries": 8,
    "n_queries": 4,
    "stated_pairs": 4,
    "prefilter": 1,
    "segment_len": 1,
}


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def numeric_fields(config: Any, prefix: str = "") -> Iterator[tuple[Any, str, str, Any]]:
    """Yield (config, field, name of its flag, a value) of every number in a config."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        name = f"{prefix}{field.name}"
        if field.name == "seed":
            # Any whole number is one.
            continue
        if field.name == "stages":
            for stage in value:
                yield from numeric_fields(stage, f"{stage.name}.")
        elif dataclasses.is_dataclass(value):
            yield from numeric_fields(value, f"{name}.")
        elif isinstance(value, tuple) and value and all(map(is_number, value)):
            yield config, field.name, name, value
        elif is_number(value) or field.name in OPTIONAL:
            yield config, field.name, name, OPTIONAL.get(field.name, value)


FIELDS: dict[str, tuple[Any, str, Any]] = {}
for _config in (small_run(), ScoreJob()):
    for _owner, _field, _flag, _value in numeric_fields(_config):
        FIELDS.setdefault(f"{type(_config).__name__} {_flag}", (_owner, _field, _value))


def test_fields_are_found() -> None:
    names = {name.split()[1] for name in FIELDS}
    assert len(names) > 50
    assert {"align.betas", "distill.temperature", "gpu_memory"} < names


@pytest.mark.parametrize("name", FIELDS)
def test_neither_nan_nor_infinite_nor_negative(name: str) -> None:
    config, field, value = FIELDS[name]
    negative = -1 if isinstance(value, int) else -1.0
    # As a field, or as a flag.
    pattern = rf"\b{field.replace('_', '[_-]')}\b"
    for bad in (math.nan, math.inf, -math.inf, negative):
        changed = (bad,) * len(value) if isinstance(value, tuple) else bad
        with pytest.raises(ValueError, match=pattern):
            dataclasses.replace(config, **{field: changed})


@pytest.mark.parametrize("text", ["nan", "1,0", "1,2.5"])
def test_a_list_holds_whole_numbers(text: str) -> None:
    with pytest.raises(ValueError, match=f"'{text}'"):
        numbers("pairs", text, least=1, named={"all": 48})
