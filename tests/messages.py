"""Names and numbers that tests read in a message, and not its words."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest


def naming(*facts: object) -> str:
    """Return a pattern for messages that hold every fact, whole and in any order: a name, a value, a file."""
    pattern = r"(?s)\A"
    for fact in facts:
        # Not `\b`, which finds no edge beside the quote of "'kl'".
        pattern += rf"(?=.*(?<!\w){re.escape(str(fact))}(?!\w))"
    return pattern


def has_facts(text: str, *facts: object) -> bool:
    """Check that a text holds every fact, as `naming` does for a raised error."""
    return re.match(naming(*facts), text) is not None


def logged_by(
    caplog: pytest.LogCaptureFixture, function: Callable[..., Any]
) -> list[logging.LogRecord]:
    """Return the records that a function logged. Its own object names it: a renamed one is an error here."""
    # Under a cache, whose wrapper has no code.
    code = inspect.unwrap(function).__code__
    records = []
    for record in caplog.records:
        if (record.pathname, record.funcName) == (code.co_filename, code.co_name):
            records.append(record)
    return records
