"""Config fields that may change when a run resumes: they decide speed, memory or reporting, not the result."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated, TypeVar, get_args, get_type_hints

from .io import Record

T = TypeVar("T")
_MARK = "may change when a run resumes"
Tunable = Annotated[T, _MARK]
"""Type of a field that may change when a run resumes: ``log_every: Tunable[Count] = 10``."""


def fixed_fields(config: object) -> Record:
    """Convert a config dataclass to JSON values, without its `Tunable` fields and those of its sections."""
    kept: Record = {}
    hints = get_type_hints(type(config), include_extras=True)
    for name in (field.name for field in dataclasses.fields(config)):  # pyright: ignore[reportArgumentType]
        value = getattr(config, name)
        if _MARK in get_args(hints[name]):
            continue
        if dataclasses.is_dataclass(value):
            kept[name] = fixed_fields(value)
        else:
            kept[name] = json.loads(json.dumps(value, default=str))
    return kept
