"""Old spellings of commands, which are still accepted: a line on stderr names the new one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

from ..distributed import is_launched_main

DROPPED = {("memory", "--no-published"), ("memory", "--published")}
"""Flags that have lost their meaning."""
RENAMED = {"quantise": "quantize", "analyse": "analyze"}


class Moved(NamedTuple):
    """The command that a flag has become; the flag's values come first. Other flags meant nothing, or stay."""

    command: str
    n_values: int
    others_stay: bool = False


MOVED = {
    ("score", "--compare"): Moved("compare-scores", 2),
    ("sweep", "--status"): Moved("sweep-status", 1),
    ("evaluate", "--write-task-files"): Moved("write-task-files", 1, others_stay=True),
}


def in_current_words(words: Sequence[str]) -> list[str]:
    """Translate a command line into today's words."""
    name = words[0].replace("_", "-")
    rest = [word for word in words[1:] if (name, word) not in DROPPED]
    if rest != list(words[1:]) and is_launched_main():
        print(f"note: ignored flags of `hybrid-distill {name}` that no longer mean anything.", file=sys.stderr)
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
    return [name, *rest]


def _notice(old: str, new: str) -> None:
    if is_launched_main():
        print(f"note: `hybrid-distill {old}` is now `hybrid-distill {new}`.", file=sys.stderr)
