"""Work that the processes of a launch do together, or that one of them does for all.

Nothing here runs a collective: processes wait for one another through `exchange`, however long it
takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from .connection import connect, rank_and_world
from .exchange import Exchange, OtherProcessError, describe_error, open_exchange
from .launch import is_launched_with_others

T = TypeVar("T")


def on_main_process(action: Callable[[], object]) -> None:
    """Run ``action`` on the main process.

    All wait until it is done and all have come, however long it takes. An error is raised there
    and, as `OtherProcessError`, on the others.
    """

    def act() -> None:
        action()

    # `act` drops the action's result, which need not be a value that can travel.
    from_main(act)


def from_main(compute: Callable[[], T]) -> T:
    """Run ``compute`` on the main process; return its result on all, as `on_main_process` does."""
    exchange = _exchange()
    if exchange is None:
        return compute()
    return exchange.from_main(compute)


def wait_for_all() -> None:
    """Wait until all processes have come here, however long it takes."""
    compute_everywhere(lambda: None)


def compute_everywhere(compute: Callable[[], T]) -> list[T]:
    """Run ``compute`` on every process and return all results, in rank order, on each.

    Every process must call this. An error in one process is raised there and as `OtherProcessError`
    in the others, so that none keeps waiting. Takes as long as the slowest process.
    """
    exchange = _exchange()
    if exchange is None:
        return [compute()]
    try:
        own_result = compute()
    except Exception as error:
        # The others wait for a value of this process: it is the error.
        exchange.gather((None, describe_error(error)))
        raise
    results: list[T] = []
    for rank, (result, message) in enumerate(exchange.gather((own_result, ""))):
        if message:
            raise OtherProcessError(f"process {rank} of {exchange.world} has failed ({message})")
        results.append(result)
    return results


def agree_on(compute: Callable[[], T]) -> T:
    """Run ``compute`` on every process (`compute_everywhere`); return the main process's result."""
    return compute_everywhere(compute)[0]


def own_share(items: Sequence[T]) -> list[T]:
    """Return this process's share of the items: every n-th, for n processes."""
    rank, world = rank_and_world()
    return list(items[rank::world])


def _exchange() -> Exchange | None:
    """Return the exchange of the connected processes; None for one process alone."""
    from accelerate.state import is_initialized

    if not is_launched_with_others():
        return None
    if not is_initialized():
        connect()
    rank, world = rank_and_world()
    if world == 1:
        return None
    return open_exchange(rank, world)
