"""Comparison of the devices of all processes of a launch, before they connect.

NCCL in one process and gloo in another would wait for each other, so they must find that out
without a process group.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from .devices import ON_CPU, DeviceFacts, unusable_gpu
from .exchange import FAREWELL_S, wait_for_keys
from .launch import (
    LaunchRefused,
    WorldError,
    is_launched_main,
    is_launched_with_others,
    launched_world,
)

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

LABELS: Mapping[str, str] = {
    "kind": "device",
    "name": "GPU",
    "torch": "torch",
    "cuda": "CUDA version",
    "driver": "GPU driver",
}
"""Words for the fields of `DeviceFacts` that are compared."""

log = logging.getLogger(__name__)

_facts: DeviceFacts | None = None
"""Facts of this process, once those of all have been compared."""
_held_stores: list[Store] = []
"""Rendezvous stores that must stay open until the process group has opened them too."""


def check_devices() -> None:
    """Compare the devices of all processes of this launch, once in a process.

    The processes read one another's facts in the rendezvous store. Raises WorldError unless all may
    compute, and on the same kind of device.
    """
    global _facts
    if _facts is not None:
        return
    own = DeviceFacts.find()
    if not own.problem:
        warning = unusable_gpu()
        if warning:
            log.warning("warning: %s", warning)
    facts = _facts_of_launch(own)
    problem = problem_of_launch(facts)
    if problem and len(facts) > 1:
        # A type of its own: all processes raise it, and one of them reports it.
        raise LaunchRefused(problem)
    if problem:
        raise WorldError(problem)
    note = note_on_launch(facts)
    if note and is_launched_main():
        log.warning("warning: %s", note)
    _facts = own


def device_summary(kernels: str) -> str:
    """Describe device and kernels of this process, and how many processes there are."""
    check_devices()
    assert _facts is not None
    summary = _facts.summary(kernels)
    if is_launched_with_others():
        summary += f", {launched_world()} processes"
    return summary


def problem_of_launch(facts: Sequence[DeviceFacts]) -> str:
    """Return in one line why these processes must not compute together; empty if they may."""
    refused = [rank for rank, of_rank in enumerate(facts) if of_rank.problem]
    if not refused:
        return _difference(
            facts, "kind", f"Start all processes on GPUs, or {ON_CPU} on all machines."
        )
    first = facts[refused[0]]
    problem = (
        f"process {refused[0]} of {len(facts)} on {first.host} must not compute: {first.problem}"
    )
    if len(refused) > 1:
        problem += f" ({len(refused)} of {len(facts)} processes cannot.)"
    return problem


def note_on_launch(facts: Sequence[DeviceFacts]) -> str:
    """Return a note on devices or versions that differ between processes; empty if none do."""
    notes = [_difference(facts, field) for field in ("name", "torch", "cuda", "driver")]
    return " ".join(note for note in notes if note)


def _difference(facts: Sequence[DeviceFacts], field: str, advice: str = "") -> str:
    """Describe how processes differ in a field, by the first one of each value; empty if not."""
    first_rank: dict[str, int] = {}
    for rank, of_rank in enumerate(facts):
        value = str(getattr(of_rank, field))
        first_rank.setdefault(value, rank)
    if len(first_rank) < 2:
        return ""
    values: list[str] = []
    for value, rank in first_rank.items():
        values.append(f"process {rank} on {facts[rank].host} has {value or 'none'}")
    difference = f"the processes of this launch differ in their {LABELS[field]}: "
    return f"{difference}{', '.join(values)}. {advice}".strip()


def _facts_of_launch(own: DeviceFacts) -> list[DeviceFacts]:
    """Return the facts of all processes by rank; only this one's if it was started alone.

    Raises WorldError naming processes that do not come within the time that torch waits for them.
    """
    import torch

    dist: Any = torch.distributed
    has_local_rank = int(os.environ.get("LOCAL_RANK", -1)) >= 0
    if not (is_launched_with_others() and has_local_rank and "MASTER_ADDR" in os.environ):
        return [own]
    # The same store as the process group's. Process 0 may hold it, and must not close it before the
    # group opens it.
    whole_store, rank, world = next(dist.rendezvous("env://"))
    _held_stores.append(whole_store)
    store = dist.PrefixStore("hybrid-distill/devices", whole_store)
    store.set(str(rank), json.dumps(asdict(own)))
    keys = [str(number) for number in range(world)]
    # As long as torch itself would wait for them to connect.
    patience = dist.constants.default_pg_timeout.total_seconds()
    missing = wait_for_keys(store, keys, patience)
    if missing:
        raise WorldError(
            f"processes {', '.join(missing)} of {world} did not start within {patience:g} s; start "
            "the same command on every machine, each with its own NODE_RANK."
        )
    facts = [DeviceFacts(**json.loads(store.get(key))) for key in keys]
    store.set(f"{rank} has read", "")
    # Process 0 may hold the store: if all are about to end, it ends after the others have read.
    if rank == 0 and problem_of_launch(facts):
        confirmations = [f"{number} has read" for number in range(world)]
        wait_for_keys(store, confirmations, FAREWELL_S)
    return facts
