"""Progress of long tasks on stderr: one line per phase, with the time left and the inner phase.

On a terminal the line updates in place; elsewhere it is printed every `EVERY_S` seconds and when
the phase ends. ``--quiet`` prints nothing.
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
    """Phase of known or unknown length, as a context manager; ``unit`` None shows percent.

    ``slow_start`` says that the first update takes far longer than the others, as a step does that
    compiles: the time left does not follow from it.
    """

    def __init__(
        self,
        name: str,
        total: float | None = None,
        *,
        done: float = 0,
        unit: str | None = None,
        hidden: bool = False,
        slow_start: bool = False,
    ) -> None:
        self.name = name
        self.total = total
        self.done = done
        self.unit = unit
        self.note = ""
        """Text at the end of the line."""
        self._hidden = hidden or quiet or not is_launched_main()
        self._slow_start = slow_start
        # A phase that resumes was done in part: the time left follows from what is done since.
        self._done_before = done
        self._intervals_shown = 0
        self._live: Progress | None = None

    def __enter__(self) -> Phase:
        self._begun = time.monotonic()
        self._measured_from = self._begun
        if not self._hidden:
            _open.append(self)
            is_outermost = len(_open) == 1
            if is_outermost and sys.stderr.isatty():
                self._live = _live_line()
                self._live.add_task(self.name, total=self.total, text="")
                self._live.start()
            self._show()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if not self._hidden:
            # After an error, the line must not read as if the phase were complete.
            self._show(ended=kind is None)
            _open.remove(self)
        if self._live is not None:
            self._live.stop()

    def update(self, n: float = 1) -> None:
        """Advance by ``n``; the line also shows ``note``."""
        self.done += n
        if self._slow_start:
            self._slow_start = False
            self._done_before = self.done
            self._measured_from = time.monotonic()
        if not self._hidden:
            self._show()

    def _text(self, ended: bool = False) -> str:
        parts = [self._count(), self._time(ended), self.note]
        return ", ".join(part for part in parts if part)

    def _count(self) -> str:
        if self.unit is not None:
            count = f"{self.done:,.0f}"
            if self.total is not None:
                count += f" of {self.total:,.0f}"
            return f"{count} {self.unit}".strip()
        if self.total is None:
            return ""
        return f"{100 * self.done / max(self.total, 1):.0f} %"

    def _time(self, ended: bool) -> str:
        now = time.monotonic()
        if ended:
            return f"in {_clock(now - self._begun)}"
        if self.total is None or self.done <= self._done_before:
            return ""
        if self.done >= self.total and _open[0] is not self:
            # What follows within the outermost phase may take long.
            return ""
        seconds_each = (now - self._measured_from) / (self.done - self._done_before)
        seconds_left = seconds_each * (self.total - self.done)
        return f"{_clock(seconds_left)} left"

    def _show(self, ended: bool = False) -> None:
        outermost = _open[0]
        if outermost is not self:
            outermost.note = ""
            if not ended:
                outermost.note = f"{self.name} {self._text()}".strip()
            outermost._show()
        elif self._live is not None:
            self._update_live(self._live, ended)
        else:
            self._print(ended)

    def _update_live(self, live: Progress, ended: bool) -> None:
        total = self.total
        if ended:
            # A phase of unknown length has a full bar at its end too.
            total = self.done
        live.update(live.task_ids[0], completed=self.done, total=total, text=self._text(ended))

    def _print(self, ended: bool) -> None:
        seconds = time.monotonic() - self._begun
        print_after = EVERY_S * (self._intervals_shown + 1)
        if ended:
            print_after = QUICK_S
        if seconds >= print_after:
            self._intervals_shown = int(seconds / EVERY_S)
            print(f"{self.name}: {self._text(ended)}", file=sys.stderr, flush=True)


def track(items: Sequence[T], name: str, *, hidden: bool = False) -> Iterator[T]:
    """Yield the items, as a phase that counts them."""
    with Phase(name, len(items), unit="", hidden=hidden) as phase:
        for item in items:
            yield item
            phase.update()


def duration(seconds: float) -> str:
    """Format a time: 42 s, 12 min, 3 h 20 min."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    return f"{minutes // 60:,} h {minutes % 60} min"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}:{rest:02}"
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def _live_line() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(24),
        # Without markup: a note may hold brackets.
        TextColumn("{task.fields[text]}", markup=False),
        console=Console(stderr=True),
        # rich prints stdout above the line, on stderr: a file or a pipe must get it itself.
        redirect_stdout=sys.stdout.isatty(),
        refresh_per_second=4,
    )
