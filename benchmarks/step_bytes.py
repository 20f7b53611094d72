"""Count what a training step of the 1B recipe moves and multiplies, with decoder layers as they are and compiled.

    python benchmarks/step_bytes.py            # prints both, writes benchmarks/results/step_bytes.json
    python benchmarks/step_bytes.py --small    # a model of two layers, written nowhere

Nothing is measured, and no GPU is needed: one micro-batch of recipes/hybrid_llama_1b.py runs forward, backward and
AdamW on fake tensors, in both ways. Each operator reads its inputs and writes its outputs once:

- *products*: matrix products and attention, the longer of their operations and their bytes;
- *kernels*: recurrence and convolution, by the tensors that they get and return;
- *other*: everything else that moves bytes. In a compiled layer, operators between two products, kernels or sums over
  tokens are one pass: it reads what comes from outside of it once, and writes what is used outside of it once.
- *loss*: as benchmarks/traffic.py counts it.

Views move nothing. Compiled programs are those of torch's own partitioner, which also decides what the backward
recomputes. Their autocast casts weights in each program, as the layers do without it.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from hybrid_kernels import common
from hybrid_kernels import loss as fused_loss
from memory_plan import SHAPES, Case, large_cases, make_teacher
from records import RESULTS, about, parser_of, write
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.node import map_arg
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from traffic import Device, loss

from hybrid_distill.model.gated_delta import delta_scan
from hybrid_distill.plan import HeadPlan
from hybrid_distill.student.build import empty_student
from hybrid_distill.train.compiling import compiled_layers
from hybrid_distill.train.end_to_end import EndToEnd
from hybrid_distill.train.optimizer import trainable
from hybrid_distill.train.stages import make_stage

RECORD = RESULTS / "step_bytes.json"
PACKAGES = ("torch", "transformers")
H100 = Device(2.5e12, 600e12)
"""Assumed rates of large products and of passes over memory."""
SHAPES["two layers"] = SHAPES["llama-3.2-1b"] | {"num_hidden_layers": 2}
KERNELS = "hybrid_kernels"
LOSS = "hybrid_kernels.distillation_loss"
"""Operators of the loss, which benchmarks/traffic.py counts chunk by chunk."""


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


def is_view(operator: Any) -> bool:
    """Return True if an operator only returns other views of its inputs."""
    if not isinstance(operator, torch._ops.OpOverload) or operator.namespace == "prim":
        return True
    returns = operator._schema.returns
    is_alias = bool(returns) and all(r.alias_info and not r.alias_info.is_write for r in returns)
    return is_alias or operator is torch.ops.aten._unsafe_view.default


class Counts:
    """Seconds and bytes by kind of operator, and the bytes of each name."""

    def __init__(self) -> None:
        self.bytes: Counter[str] = Counter()
        self.seconds: dict[str, float] = defaultdict(float)
        self.names: Counter[str] = Counter()

    def add(self, kind: str, name: str, moved: int, flops: int = 0) -> None:
        self.bytes[kind] += moved
        self.names[name] += moved
        self.seconds[kind] += max(moved / H100.bandwidth, flops / H100.flops)

    def add_operator(self, operator: Any, inputs: Any, outputs: Any) -> None:
        """Count an operator that runs by itself."""
        if operator is torch.ops.aten.embedding.default:
            # It reads the rows that it returns, not the whole weight.
            inputs = outputs.clone()
        tensors = [t for t in tree_leaves((inputs, outputs)) if isinstance(t, Tensor)]
        name = str(operator)
        if name.startswith(LOSS):
            return
        flops = 0
        packet = operator._overloadpacket
        if packet in flop_registry:
            args, kwargs = inputs
            flops = flop_registry[packet](*args, **kwargs, out_val=outputs)
        self.add(kind_of(operator), name, n_bytes(tensors), flops)

    def record(self) -> dict[str, Any]:
        milliseconds = {kind: round(1e3 * s, 1) for kind, s in self.seconds.items()}
        gigabytes = {kind: round(moved / 1e9, 1) for kind, moved in self.bytes.items()}
        largest = {name: round(moved / 1e9, 2) for name, moved in self.names.most_common(12)}
        total = round(1e3 * sum(self.seconds.values()), 1)
        return {"total_ms": total, "ms": milliseconds, "gb": gigabytes, "largest_gb": largest}


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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        outputs = func(*args, **kwargs)
        if not self.is_paused and not is_view(func):
            self.counts.add_operator(func, (args, kwargs), outputs)
        return outputs


def add_program(graph: torch.fx.Graph, counts: Counts) -> None:
    """Count a compiled program: its products and kernels by themselves, everything between them in passes."""
    base: dict[Any, Any] = {}
    depth: dict[Any, int] = {}
    group: dict[Any, Any] = {}

    def root(node: Any) -> Any:
        while group[node] is not node:
            node = group[node]
        return node

    fused: list[Any] = []
    for node in graph.nodes:
        base[node] = node
        inputs = [base[source] for source in node.all_input_nodes]
        depth[node] = max((depth[source] for source in inputs), default=0)
        if node.op != "call_function":
            continue
        if is_view(node.target):
            base[node] = inputs[0] if inputs else node
            continue
        if not is_fused(node):
            args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            counts.add_operator(node.target, (args, kwargs), node.meta["val"])
            depth[node] += 1
            continue
        fused.append(node)
        group[node] = node
        for source in inputs:
            if source in group and depth[source] == depth[node]:
                group[root(source)] = node
    passes: dict[Any, set[Any]] = {}
    for node in fused:
        passes.setdefault(root(node), set()).add(node)
    for members in passes.values():
        counts.add("other", "pass of a compiled layer", bytes_of_pass(members, base))


def bytes_of_pass(members: set[Any], base: dict[Any, Any]) -> int:
    """Sum what a pass reads from outside, and what is used outside of it."""
    reads: dict[Any, Tensor] = {}
    writes: dict[Any, Tensor] = {}
    for node in members:
        for source in node.all_input_nodes:
            if base[source] not in members and isinstance(source.meta["val"], Tensor):
                reads[base[source]] = source.meta["val"]
        if any(base_user not in members for base_user in users(node, base)):
            for place, value in enumerate(tree_leaves(node.meta["val"])):
                writes[node, place] = value
    return n_bytes([*reads.values(), *writes.values()])


def users(node: Any, base: dict[Any, Any]) -> list[Any]:
    """Return the nodes that read a node, or a view of it."""
    readers = []
    for user in node.users:
        if base[user] is node:
            readers += users(user, base)
        else:
            readers.append(user)
    return readers


def is_fused(node: Any) -> bool:
    """Return True for an operator that a pass can hold: no product, no kernel, no sum over tokens."""
    if kind_of(node.target) != "other":
        return False
    if node.target is not torch.ops.aten.sum.dim_IntList:
        return True
    return 0 not in node.args[1]


def counting_compiler(mode: CountOperators) -> Callable[..., Any]:
    """Return a backend whose programs count themselves each time they run."""

    def compiler(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        counts = Counts()
        add_program(graph.graph, counts)

        def run(*arguments: Any) -> Any:
            mode.counts.bytes += counts.bytes
            for kind, seconds in counts.seconds.items():
                mode.counts.seconds[kind] += seconds
            mode.counts.names += counts.names
            mode.is_paused = True
            try:
                return graph.forward(*arguments)
            finally:
                mode.is_paused = False

        return make_boxed_func(run)

    return aot_autograd(
        fw_compiler=compiler,
        bw_compiler=compiler,
        partition_fn=min_cut_rematerialization_partition,
    )


def count(case: Case, compile: str) -> dict[str, Any]:
    """Count a micro-batch of a case, and the optimizer's step."""
    teacher = make_teacher(case, "meta")
    plan = HeadPlan.random(teacher.config, case.kept, seed=1)
    student = empty_student(teacher, plan, **case.head_options)
    student.set_ssm_implementation("triton")
    # Fake tensors are on the CPU, since the backward of fake GPU tensors needs a GPU.
    common.INTERPRETED = True
    # A fake weight is not a plain tensor, and has no values to check.
    fused_loss._check_tensors = lambda *arguments: None
    EndToEnd.is_fused = True  # pyright: ignore[reportAttributeAccessIssue]
    torch.compiler.reset()
    compile_with = torch.compile
    mode = CountOperators(Counts())
    with FakeTensorMode(allow_non_fake_inputs=True):
        for model in (teacher, student):
            model.to_empty(device="cpu")
        stage = make_stage(replace(case.config, compile=compile), student, teacher).train()
        ids = torch.zeros(case.rows, case.length, dtype=torch.long)
        batch = {"input_ids": ids, "seq_idx": ids, "mask": torch.ones_like(ids, dtype=torch.bool)}
        # Later micro-batches of a step add to a gradient that is there.
        for parameter in trainable(stage).values():
            parameter.grad = torch.zeros_like(parameter)
        torch.compile = partial(compile_with, backend=counting_compiler(mode))
        try:
            with compiled_layers(stage, torch.device("cpu")), mode:
                stage(batch).total.backward()
        finally:
            torch.compile = compile_with
        n_trained = sum(parameter.numel() for parameter in trainable(stage).values())
    counts = mode.counts
    if case.config.name == "distill":
        width = teacher.config.hidden_size
        edge = loss(ids.numel(), teacher.config.vocab_size, width, width)
        for kernel in edge.kernels["ours"]:
            counts.add("loss", "loss", kernel.moved, kernel.flops)
    record = counts.record()
    # Read and written: weight and two moments; read: the gradient, in fp32.
    record["optimizer_ms"] = round(1e3 * 7 * 4 * n_trained / H100.bandwidth, 1)
    return record


def count_delta_rule(
    batch: int, length: int, heads: int, head_dim: int, d_state: int, *, compiled: bool
) -> int:
    """Return the bytes of a forward and backward of the gated delta rule on torch and our recurrence, in bf16."""
    common.INTERPRETED = True
    torch.compiler.reset()
    mode = CountOperators(Counts())
    scan = partial(delta_scan, impl="triton")
    if compiled:
        scan = torch.compile(scan, backend=counting_compiler(mode), dynamic=False)
    tokens = batch, length, heads
    with FakeTensorMode():
        x, k, c = (
            torch.zeros(*tokens, size, dtype=torch.bfloat16, requires_grad=True)
            for size in (head_dim, d_state, d_state)
        )
        log_a, write = (torch.zeros(tokens, requires_grad=True) for _ in range(2))
        upstream = torch.zeros_like(x)
        with mode:
            y, _ = scan(x, log_a, write, k, c)
            torch.autograd.grad(y, [x, log_a, write, k, c], upstream)
    return mode.counts.bytes.total()


def main() -> None:
    """Print each case as it is counted, write the JSON."""
    parser = parser_of(__doc__, RECORD)
    parser.add_argument("--small", action="store_true", help="two layers, written nowhere")
    options = parser.parse_args()
    results = []
    for case in large_cases("two layers" if options.small else "llama-3.2-1b"):
        if case.config.gradient_checkpointing:
            continue
        for compile in ("off", "on"):
            counted = count(case, compile)
            results.append({"case": case.named(), "rows": case.rows, "compile": compile, **counted})
            print(json.dumps(results[-1]), flush=True)
    if not options.small:
        what = "milliseconds and gigabytes of one micro-batch, counted from shapes; no measurement"
        record = about(what, "cpu", PACKAGES) | {"device": H100._asdict(), "results": results}
        write(options.out, record)


if __name__ == "__main__":
    main()
