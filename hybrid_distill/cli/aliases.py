"""Old spellings of commands, which are still accepted: a line on stderr names the new one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

from ..distributed import is_launched_main

DROPPED = {
    ("memory", "--no-published"): 0,
    ("prepare-data", "--workers"): 1,
    ("cache-logits", "--student-run"): 1,
}
"""Flags that have lost their meaning, and how many values each had."""
RENAMED = {"quantise": "quantize", "analyse": "analyze"}
SAME = {("score", "--n-examples"): "--examples", ("analyze", "--n-examples"): "--examples"} | {
    ("evaluate", "--examples"): "--n-examples"
}
"""Flags of which people expect the name that they have in other commands."""


class Moved(NamedTuple):
    """The command that a flag has become; the flag's values come first. Other flags meant nothing, or stay."""

    command: str
    n_values: int
    others_stay: bool = False


MOVED = {
    ("score", "--compare"): Moved("compare-scores", 2),
    ("sweep", "--status"): Moved("sweep-status", 1),
    ("memory", "--published"): Moved("memory-published", 0),
    ("evaluate", "--write-task-files"): Moved("write-task-files", 1, others_stay=True),
}


def in_current_words(words: Sequence[str]) -> list[str]:
    """Translate a command line into today's words."""
    name = words[0].replace("_", "-")
    rest = _without_dropped(name, words[1:])
    if name in RENAMED:
        _notice(name, RENAMED[name])
        return [RENAMED[name], *rest]
    flags = [word.partition("=")[0].replace("_", "-") if word.startswith("--") else "" for word in rest]
    for (command, flag), new in MOVED.items():
        if name == command and flag in flags:
            _notice(f"{name} {flag}", new.command)
            at = flags.index(flag)
            values = [value for _, equals, value in [rest[at].partition("=")] if equals]
            end = at + 1 + new.n_values - len(values)
            others = [*rest[:at], *rest[end:]] if new.others_stay else []
            return [new.command, *values, *rest[at + 1 : end], *others]
    if name == "evaluate" and "--model" in flags:
        _notice("evaluate --model", "evaluate-suite --model")
        return ["evaluate-suite", *rest]
    return [name, *(word.replace(flag, SAME.get((name, flag), flag), 1) for word, flag in zip(rest, flags))]


def _without_dropped(name: str, words: Sequence[str]) -> list[str]:
    kept, at = list[str](), 0
    while at < len(words):
        flag, equals, _ = words[at].partition("=")
        n_values = DROPPED.get((name, flag.replace("_", "-")))
        if n_values is None:
            kept.append(words[at])
        else:
            print(f"note: {flag} of `hybrid-distill {name}` no longer does anything.", file=sys.stderr)
            at += 0 if equals else n_values
        at += 1
    return kept


def _notice(old: str, new: str) -> None:
    if is_launched_main():
        print(f"note: `hybrid-distill {old}` is now `hybrid-distill {new}`.", file=sys.stderr)
