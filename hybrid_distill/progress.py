"""Progress of long tasks on stderr: one line per phase, with the time left and the inner phase in progress.

On a terminal the line updates in place; elsewhere it is printed every `EVERY_S` seconds and when the phase ends.
``--quiet`` prints nothing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from .distributed import is_launched_main

if TYPE_CHECKING:
    from rich.progress import Progress

T = TypeVar("T")

EVERY_S = 20.0
"""Seconds between the lines of a phase without a terminal."""
QUICK_S = 1.0
"""Shortest phase, in seconds, that prints a line without a terminal."""
quiet = False
"""Set by ``--quiet``."""
_open: list[Phase] = []
"""Phases in progress, outermost first; the line of the outermost shows the others as its note."""


class Phase:
    """Phase of known or unknown length, as a context manager; ``unit`` None shows percent."""

    def __init__(
        self, name: str, total: float | None = None, *, done: float = 0, unit: str | None = None, hidden: bool = False
    ) -> None:
        self.name, self.total, self.done, self.unit, self.note = name, total, done, unit, ""
        self._hidden = hidden or quiet or not is_launched_main()
        self._first, self._lines, self._live = done, 0, None

    def __enter__(self) -> Phase:
        self._begun = time.monotonic()
        if not self._hidden:
            _open.append(self)
            if len(_open) == 1 and sys.stderr.isatty():
                self._live = _live_line()
                self._live.add_task(self.name, total=self.total, text="")
                self._live.start()
            self._show()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if not self._hidden:
            self._show(ended=kind is None)
            _open.remove(self)
        if self._live is not None:
            self._live.stop()

    def update(self, n: float = 1) -> None:
        """Advance by ``n``; the line also shows ``note``."""
        self.done += n
        if not self._hidden:
            self._show()

    def _text(self, ended: bool = False) -> str:
        seconds = time.monotonic() - self._begun
        count = f"{self.done:,.0f}" + ("" if self.total is None else f" of {self.total:,.0f}")
        if self.unit is None:
            count = "" if self.total is None else f"{100 * self.done / max(self.total, 1):.0f} %"
        left = self._seconds_left(seconds)
        clock = f"in {_clock(seconds)}" if ended else "" if left is None else f"{_clock(left)} left"
        return ", ".join(filter(None, [f"{count} {self.unit or ''}".strip(), clock, self.note]))

    def _seconds_left(self, seconds: float) -> float | None:
        if self.total is None or self.done <= self._first:
            return None
        return seconds * (self.total - self.done) / (self.done - self._first)

    def _show(self, ended: bool = False) -> None:
        outer, seconds = _open[0], time.monotonic() - self._begun
        if outer is not self:
            outer.note = "" if ended else f"{self.name} {self._text()}".strip()
            outer._show()
        elif self._live is not None:
            task, text = self._live.task_ids[0], self._text(ended)
            self._live.update(task, completed=self.done, total=self.done if ended else self.total, text=text)
        elif seconds >= (QUICK_S if ended else EVERY_S * (self._lines + 1)):
            self._lines = int(seconds / EVERY_S)
            print(f"{self.name}: {self._text(ended)}", file=sys.stderr, flush=True)


def track(items: Sequence[T], name: str, *, hidden: bool = False) -> Iterator[T]:
    """Yield the items, as a phase that counts them."""
    with Phase(name, len(items), unit="", hidden=hidden) as phase:
        for item in items:
            yield item
            phase.update()


def _clock(seconds: float) -> str:
    minutes, left = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{left:02}" if minutes >= 60 else f"{minutes}:{left:02}"


def _live_line() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = TextColumn("{task.description}"), BarColumn(24), TextColumn("{task.fields[text]}", markup=False)
    shared = sys.stdout.isatty()
    return Progress(*columns, console=Console(stderr=True), redirect_stdout=shared, refresh_per_second=4)
