"""`hybrid-distill memory-published`: the formula of `memory` beside published figures."""

from __future__ import annotations

from ..lab.memory.table import published_table


def command() -> None:
    """Print the cache sizes that the method's authors have published for Llama-3.2-1B, and this package's formula."""
    print(published_table())
