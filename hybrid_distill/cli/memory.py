"""`hybrid-distill memory`: what a cache costs."""

from __future__ import annotations

import tyro

from ..lab.memory.table import MemoryJob, memory_table
from ..limits import COUNT


def command(job: tyro.conf.OmitArgPrefixes[MemoryJob] = MemoryJob()) -> None:  # noqa: B008
    """Tabulate what a cache costs by kept heads, state size and context, before anything is trained."""
    COUNT.check("--batch", job.batch)
    COUNT.check("--conv-width", job.conv_width)
    print(memory_table(job))
