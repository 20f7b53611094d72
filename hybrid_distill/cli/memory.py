"""`hybrid-distill memory`: what a cache costs."""

from __future__ import annotations

import tyro

from ..lab.memory.table import MemoryJob, memory_table


def command(job: tyro.conf.OmitArgPrefixes[MemoryJob] = MemoryJob()) -> None:  # noqa: B008
    """Tabulate what a cache costs by kept heads, state size and context, before anything is trained."""
    print(memory_table(job))
