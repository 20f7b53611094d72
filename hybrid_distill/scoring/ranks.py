"""Several processes score together: each takes a share of the prompts, all get every result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


class OtherProcessError(RuntimeError):
    """Another process of this launch has failed; its own message says how."""


def rank_and_world() -> tuple[int, int]:
    """This process's number and how many there are: 0 and 1 where none are connected."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def share(items: Sequence[T]) -> list[T]:
    """What this process does of a job: every n-th item, n being the number of processes."""
    rank, world = rank_and_world()
    return list(items[rank::world])


def together(compute: Callable[[], T]) -> list[T]:
    """The result of each process, in order, on all of them; every process has to call this.

    An error on one is raised there, and as `OtherProcessError` on the others, none of which goes on waiting.
    """
    _, world = rank_and_world()
    if world == 1:
        return [compute()]
    mine, error = None, None
    try:
        mine = compute()
    except Exception as raised:
        error = raised
    told: list[tuple[T | None, str | None]] = [(None, None)] * world
    dist.all_gather_object(told, (mine, None if error is None else f"{type(error).__name__}: {error}"))
    if error is not None:
        raise error
    for number, (_, message) in enumerate(told):
        if message is not None:
            raise OtherProcessError(f"process {number} of {world} has failed ({message})")
    return [result for result, _ in told]  # type: ignore[misc]
