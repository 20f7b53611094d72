"""Old spellings of commands and flags, still accepted; a note on stderr names the new one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

from ..distributed import is_launched_main

DROPPED = {
    ("memory", "--no-published"): 0,
    ("memory", "--published"): 0,
    ("prepare-data", "--workers"): 1,
    ("cache-logits", "--student-run"): 1,
    ("analyze", "--together"): 1,
    **{("score", flag): 1 for flag in ("--combine", "--method", "--prefilter", "--weights")},
}
"""Flags that no longer do anything, and how many values each took."""
RENAMED = {"quantise": "quantize", "analyse": "analyze"}
SAME = {("score", "--n-examples"): "--examples", ("analyze", "--n-examples"): "--examples"} | {
    ("evaluate", "--examples"): "--n-examples"
}
"""Flags that people type under the name they have in other commands."""
FIRST = {("demo", "--recipe"), ("sweep", "--recipe")}
"""Flags whose value is now the command's first word, as in ``run``."""


class Moved(NamedTuple):
    """Command that replaces a flag and takes its values first; other flags are dropped unless ``others_stay``."""

    command: str
    n_values: int
    others_stay: bool = False


MOVED = {
    ("score", "--compare"): Moved("compare-scores", 2),
    ("sweep", "--status"): Moved("sweep-status", 1),
    ("evaluate", "--write-task-files"): Moved("write-task-files", 1, others_stay=True),
}


def in_current_words(words: Sequence[str]) -> list[str]:
    """Translate old names in a command line to current ones."""
    name, rest = words[0].replace("_", "-"), list[str]()
    if name in RENAMED:
        _notice(name, RENAMED[name])
        name = RENAMED[name]
    for word in words[1:]:
        flag, *value = word.split("=", maxsplit=1)
        is_old = (name, flag := flag.replace("_", "-")) in {*DROPPED, *MOVED, *SAME, *FIRST}
        rest += [flag, *value] if is_old else [word]
    for (command, flag), n_values in DROPPED.items():
        while name == command and flag in rest:
            at = rest.index(flag)
            del rest[at : at + 1 + n_values]
            if is_launched_main():
                print(f"note: {flag} of `hybrid-distill {name}` no longer does anything.", file=sys.stderr)
    for (command, flag), new in MOVED.items():
        if name == command and flag in rest:
            _notice(f"{name} {flag}", new.command)
            at = rest.index(flag)
            end = at + 1 + new.n_values
            return [new.command, *rest[at + 1 : end], *([*rest[:at], *rest[end:]] if new.others_stay else [])]
    for command, flag in FIRST:
        if name == command and flag in rest[:-1]:
            _notice(f"{name} {flag} RECIPE", f"{name} RECIPE")
            at = rest.index(flag)
            rest = [rest[at + 1], *rest[:at], *rest[at + 2 :]]
    if name == "evaluate" and any(word.partition("=")[0] == "--model" for word in rest):
        _notice("evaluate --model", "evaluate-suite --model")
        return ["evaluate-suite", *rest]
    return [name, *(SAME.get((name, word), word) for word in rest)]


def _notice(old: str, new: str) -> None:
    if is_launched_main():
        print(f"note: `hybrid-distill {old}` is now `hybrid-distill {new}`.", file=sys.stderr)
