"""Count where a training step would wait for a device: without a GPU, a test can hold the loop
to one read a step.
"""

import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from hybrid_kernels import loss_checks
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

OPERATORS = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "equal",
    "is_nonzero",
    "_unique2",
    "unique_consecutive",
)
INDEXING = ("index", "index_put", "index_put_", "_unsafe_index")
METHODS = (Tensor.tolist, Tensor.cpu, Tensor.numpy)
# Checks values of CPU tensors alone.
CPU_ONLY = Path(str(loss_checks.__file__)).name
NOT_PLACES = (Path(__file__).name, "overrides.py", "_tensor.py")


class HostReads(TorchDispatchMode):
    """Counts operators that read values, and indexing with a Boolean mask."""

    def __init__(self) -> None:
        super().__init__()
        self.places: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        indices = args[1] if name in INDEXING else ()
        by_mask = any(index is not None and index.dtype == torch.bool for index in indices)
        if name in OPERATORS or by_mask:
            self.count(name)
        return func(*args, **(kwargs or {}))

    def count(self, name: str) -> None:
        stack: list[tuple[str, str]] = []
        for frame in traceback.extract_stack():
            file = Path(frame.filename).name
            if file not in NOT_PLACES:
                stack.append((frame.name, file))
        if any(file == CPU_ONLY for _, file in stack):
            return
        function, file = stack[-1]
        self.places[f"{name} in {function}, {file}"] += 1


class _Methods(TorchFunctionMode):
    """Counts `METHODS`, which do not reach the dispatcher on a CPU."""

    def __init__(self, reads: HostReads) -> None:
        super().__init__()
        self.reads = reads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in METHODS:
            self.reads.count(func.__name__)
        return func(*args, **(kwargs or {}))


@contextmanager
def counting_reads() -> Iterator[HostReads]:
    """Yield the `HostReads` of what runs inside."""
    with HostReads() as reads, _Methods(reads):
        yield reads


def counted(step: Callable[..., Any], by_step: list[Counter[str]]) -> Callable[..., Any]:
    """Wrap a function; what each call reads is appended to ``by_step``."""

    def counting(*args: Any) -> Any:
        with counting_reads() as reads:
            result = step(*args)
        by_step.append(reads.places)
        return result

    return counting
