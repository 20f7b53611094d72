"""Memory of what runs on a CPU: its largest tensor, and all bytes that it allocates."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LargestTensor(TorchDispatchMode):
    """Number of elements in the memory of the largest tensor that any operation returns.

    Of its memory: an expanded tensor has more elements than it holds, a slice fewer."""

    def __init__(self) -> None:
        super().__init__()
        self.n_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor):
                n_elements = leaf.untyped_storage().size() // leaf.element_size()
                self.n_elements = max(self.n_elements, n_elements)
        return output


def allocations(run: Callable[[], object]) -> tuple[int, int]:
    """Return how many bytes are left of what a function allocates, and how many at the fullest."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as record:
        # Bound to a name, the result is not freed before the record ends.
        _kept = run()
    events = []
    for event in record.profiler.kineto_results.events():
        if event.name() == "[memory]":
            events.append(event)
    events.sort(key=lambda event: event.start_ns())
    in_use = list(accumulate(event.nbytes() for event in events))
    return in_use[-1], max(in_use)
