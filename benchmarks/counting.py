"""Bytes and operations of torch's operators, counted as they run on fake tensors.

Each operator reads its inputs and writes its outputs once; views move nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import hybrid_kernels.loss
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry


class Device(NamedTuple):
    """Bytes and floating-point operations a second that a good kernel reaches."""

    bandwidth: float
    flops: float


H100 = Device(2.5e12, 600e12)
"""Assumed rates of large products and of passes over memory."""
WORTH_NAMING = 5e7
"""Bytes of an operator in a step."""
KERNELS = hybrid_kernels.__name__
# Importing the module above registers it.
LOSS = torch.ops.hybrid_kernels.distillation_loss
"""Operator of the loss, which benchmarks/traffic.py counts chunk by chunk."""


def n_bytes(tensors: Iterable[Tensor]) -> int:
    """Sum the bytes of distinct tensors; expanded dimensions take none."""
    distinct = {id(tensor): tensor for tensor in tensors}
    total = 0
    for tensor in distinct.values():
        elements = 1
        for size, stride in zip(tensor.shape, tensor.stride()):
            if stride:
                elements *= size
        total += elements * tensor.itemsize
    return total


def tensors_in(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def is_view(operator: Any) -> bool:
    """Return True if an operator only returns other views of its inputs."""
    if not isinstance(operator, torch._ops.OpOverload) or operator.namespace == "prim":
        return True
    returns = operator._schema.returns
    is_alias = bool(returns) and all(r.alias_info and not r.alias_info.is_write for r in returns)
    return is_alias or operator is torch.ops.aten._unsafe_view.default


class Counts:
    """Seconds and bytes by kind of operator, the bytes of each name, and the number of operators."""

    def __init__(self) -> None:
        self.bytes: Counter[str] = Counter()
        self.seconds: dict[str, float] = defaultdict(float)
        self.names: Counter[str] = Counter()
        self.n_operators = 0

    def add(self, kind: str, name: str, moved: int, flops: int = 0) -> None:
        self.bytes[kind] += moved
        self.names[name] += moved
        self.seconds[kind] += max(moved / H100.bandwidth, flops / H100.flops)

    def add_operator(self, operator: Any, args: Any, kwargs: Any, outputs: Any) -> None:
        """Count an operator that runs by itself."""
        self.n_operators += 1
        packet = operator._overloadpacket
        if packet is LOSS:
            return
        flops = 0
        if packet in flop_registry:
            flops = flop_registry[packet](*args, **kwargs, out_val=outputs)
        # What is written into is an argument too.
        read = {key: value for key, value in kwargs.items() if key != "out"}
        inputs = tensors_in((args, read))
        written = tensors_in(outputs)
        if operator is torch.ops.aten.embedding.default:
            # It reads the rows that it returns, not the whole weight.
            inputs = written
        self.add(kind_of(operator), str(operator), n_bytes(inputs) + n_bytes(written), flops)

    def record(self) -> dict[str, Any]:
        milliseconds = {kind: round(1e3 * s, 1) for kind, s in self.seconds.items()}
        gigabytes = {kind: round(moved / 1e9, 1) for kind, moved in self.bytes.items()}
        parts = {}
        for name, moved in self.names.most_common():
            if moved >= WORTH_NAMING:
                parts[name] = round(moved / 1e9, 2)
        total = round(1e3 * sum(self.seconds.values()), 1)
        return {"total_ms": total, "ms": milliseconds, "gb": gigabytes, "parts_gb": parts}


def kind_of(operator: Any) -> str:
    if operator.namespace == KERNELS:
        return "kernels"
    if operator._overloadpacket in flop_registry or "scaled_dot_product" in str(operator):
        return "products"
    return "other"


class CountOperators(TorchDispatchMode):
    """Count each operator that runs, except within compiled programs."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self.counts = counts
        self.is_paused = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    @contextmanager
    def paused(self) -> Iterator[None]:
        self.is_paused = True
        try:
            yield
        finally:
            self.is_paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        outputs = func(*args, **kwargs)
        if not self.is_paused and not is_view(func):
            self.counts.add_operator(func, args, kwargs, outputs)
        return outputs
