"""Count what a training step of the 1B recipe moves and multiplies, with decoder layers as they are and compiled.

    python benchmarks/step_bytes.py            # prints both, writes benchmarks/results/step_bytes.json
    python benchmarks/step_bytes.py --small    # a model of two layers, written nowhere

Nothing is measured, and no GPU is needed: one micro-batch of recipes/hybrid_llama_1b.py runs forward, backward and
AdamW on fake tensors, in both ways. Each operator reads its inputs and writes its outputs once:

- *products*: matrix products and attention, the longer of their operations and their bytes. Attention is causal, and
  reads each key once for all heads that share it, as flash-attn and FlexAttention do;
- *kernels*: recurrence and convolution, by the tensors that they get and return;
- *other*: everything else that moves bytes. In a compiled layer, these are the kernels that Inductor fuses, as its own
  scheduler counts them (that for CPUs, since Triton's needs a GPU);
- *loss*: as benchmarks/traffic.py counts it.

Views move nothing. Compiled programs are those of torch's own partitioner, which also decides what the backward
recomputes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from counting import H100, CountOperators, Counts, kind_of
from hybrid_kernels import common
from hybrid_kernels import loss as fused_loss
from memory_plan import SHAPES, Case, large_cases, make_teacher
from records import RESULTS, about, parser_of, write
from torch import Tensor
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._inductor.compile_fx import (
    _recursive_post_grad_passes,
    compile_fx,
    fake_tensor_prop,
    record_original_output_strides,
)
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import BaseSchedulerNode, ExternKernelSchedulerNode
from torch._inductor.utils import shape_env_from_inputs
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.node import map_arg
from torch.library import custom_op
from torch.utils.flop_counter import register_flop_formula
from traffic import loss
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hybrid_distill.model import document_kernels, documents, local_attention
from hybrid_distill.model.document_mask import DocumentMask
from hybrid_distill.plan import HeadPlan
from hybrid_distill.student.build import empty_student
from hybrid_distill.train.compiling import compiled_layers
from hybrid_distill.train.end_to_end import EndToEnd
from hybrid_distill.train.optimizer import trainable
from hybrid_distill.train.parallel.copies import Bf16Copies
from hybrid_distill.train.stages import make_stage

RECORD = RESULTS / "step_bytes.json"
PACKAGES = ("torch", "transformers")
SHAPES["two layers"] = SHAPES["llama-3.2-1b"] | {"num_hidden_layers": 2}


class Pass(NamedTuple):
    """One fused kernel of a compiled layer."""

    operators: set[str]
    sizes: list[tuple[int, ...]]
    """Sizes of the tensors that it reads or writes."""
    moved: int

    def name(self, case: Case) -> str:
        """Say what it works on."""
        shape = SHAPES[case.model]
        is_cast = self.operators <= {"convert_element_type", "permute", "view", "cat"}
        if is_cast and all(len(size) < 3 for size in self.sizes):
            return "casts of weights and gradients"
        n_activations = case.rows * case.length * shape["intermediate_size"]
        if any(prod(size) == n_activations for size in self.sizes):
            return "MLP activations"
        if (case.rows, case.length, shape["hidden_size"]) in self.sizes:
            return "norms and residuals"
        return "heads"


def fused_passes(program: torch.fx.GraphModule, inputs: Any) -> list[Pass]:
    """Schedule a program as Inductor does; return its passes, apart from products and kernels."""
    record_original_output_strides(program)
    fake_mode = fake_tensor_prop(program, inputs)
    with ExitStack() as handlers:
        handlers.enter_context(V.set_fake_mode(fake_mode))
        _recursive_post_grad_passes(program, is_inference=False)
        graph = GraphLowering(program, shape_env=shape_env_from_inputs(inputs))
        handlers.enter_context(V.set_graph_handler(graph))
        handlers.enter_context(V.set_real_inputs(inputs))
        handlers.enter_context(V.set_debug_handler(DebugContext()))
        graph.run(*inputs)
        graph._update_scheduler()
        passes = []
        for node in graph.scheduler.nodes:
            if not isinstance(node, ExternKernelSchedulerNode):
                passes.append(described(node, graph))
    return passes


def described(node: BaseSchedulerNode, graph: GraphLowering) -> Pass:
    operators = set()
    for part in node.get_nodes():
        assert part.node is not None
        for origin in part.node.get_origins():
            operators.add(str(origin.target).split(".")[1])
    sizes = []
    for name in node.get_read_write_buffer_accesses(include_reads=True, include_writes=True):
        sizes.append(tuple(int(size) for size in graph.get_buffer(name).get_size()))
    return Pass(operators, sizes, node.get_read_write_buffers_sizes())


def add_program(program: torch.fx.GraphModule, inputs: Any, counts: Counts, case: Case) -> None:
    """Count a compiled program: its products and kernels by themselves, everything between them in passes."""
    for node in program.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        if kind_of(node.target) != "other":
            args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            counts.add_operator(node.target, args, kwargs, node.meta["val"])
    for fused in fused_passes(program, inputs):
        counts.add("other", fused.name(case), fused.moved)


def counting_compiler(mode: CountOperators, case: Case) -> Callable[..., Any]:
    """Return a backend whose programs count themselves each time they run."""

    def compiler(program: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        counts = Counts()
        with mode.paused():
            add_program(program, inputs, counts, case)

        def run(*arguments: Any) -> Any:
            mode.counts.bytes += counts.bytes
            for kind, seconds in counts.seconds.items():
                mode.counts.seconds[kind] += seconds
            mode.counts.names += counts.names
            with mode.paused():
                return program.forward(*arguments)

        return make_boxed_func(run)

    return partial(compile_fx, inner_compile=compiler)


@custom_op("step_bytes::attention", mutates_args=())
def attention(query: Tensor, key: Tensor, value: Tensor, n_seen: float) -> tuple[Tensor, Tensor]:
    """Stand for an attention kernel, [..., L, P]; a query sees ``n_seen`` keys on average."""
    return torch.empty_like(query), query.new_empty(query.shape[:-1], dtype=torch.float32)


@custom_op("step_bytes::attention_gradients", mutates_args=())
def attention_gradients(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    sums: Tensor,
    n_seen: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def save_for_gradients(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.n_seen = inputs
    ctx.save_for_backward(*tensors, *output)


def gradients(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Any, ...]:
    return *attention_gradients(gradient, *ctx.saved_tensors, ctx.n_seen), None


# What an operator returns is all that a fake one needs.
for operator in (attention, attention_gradients):
    operator.register_fake(operator._init_fn)
attention.register_autograd(gradients, setup_context=save_for_gradients)


@register_flop_formula(torch.ops.step_bytes.attention)
def attention_flops(query: Any, key: Any, value: Any, n_seen: float, **options: Any) -> int:
    return int(4 * prod(query) * n_seen)


@register_flop_formula(torch.ops.step_bytes.attention_gradients)
def gradient_flops(gradient: Any, query: Any, *tensors_and_seen: Any, **options: Any) -> int:
    return int(10 * prod(query) * tensors_and_seen[-1])


def attend_documents(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """Stand for `grouped.attend_in_groups`, whose kernels autocast to bfloat16."""
    query, key, value = (t.to(torch.bfloat16) for t in (query, key, value))
    output = attention(query, key, value, query.shape[2] / 2)[0]
    return output.transpose(1, 2).contiguous(), None


def attend_window(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> Tensor:
    """Stand for `window_kernels.attend_with_kernel`: the diagonal block, the one before, that of the sinks."""
    query, key, value = (t.to(torch.bfloat16) for t in (query, key, value))
    return attention(query, key, value, 3 * document_kernels.FLEX_BLOCK)[0]


def empty_mask(first_BL: Tensor, *options: Any) -> Tensor:
    """Stand for `DocumentMask.of`: a fake tensor cannot be of a subclass."""
    batch, length = first_BL.shape
    return first_BL.new_empty((), dtype=torch.bool).expand(batch, 1, length, length)


@contextmanager
def gpu_attention() -> Iterator[None]:
    """Run rows through attention kernels, as on a GPU."""
    with ExitStack() as patches:
        for owner, name, value in (
            (documents, "has_document_attention", lambda device: True),
            (DocumentMask, "of", empty_mask),
            (local_attention, "kernel_runs", lambda query, dropout: True),
            (local_attention, "attend_with_kernel", attend_window),
        ):
            patches.enter_context(patch.object(owner, name, value))
        repeating = ALL_ATTENTION_FUNCTIONS["sdpa"]
        patches.callback(ALL_ATTENTION_FUNCTIONS.__setitem__, "sdpa", repeating)
        ALL_ATTENTION_FUNCTIONS["sdpa"] = attend_documents
        yield


def count(case: Case, compile: str) -> dict[str, Any]:
    """Count a micro-batch of a case, and the optimizer's step."""
    teacher = make_teacher(case, "meta")
    plan = HeadPlan.random(teacher.config, case.kept, seed=1)
    student = empty_student(teacher, plan, **case.head_options)
    student.set_ssm_implementation("triton")
    # Fake tensors are on the CPU, since the backward of fake GPU tensors needs a GPU.
    common.INTERPRETED = True
    # A fake weight is not a plain tensor, and has no values to check.
    fused_loss.check_tensors = lambda *arguments: None
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
        torch.compile = partial(compile_with, backend=counting_compiler(mode, case))
        try:
            copies = Bf16Copies(stage)
            copies.refresh()
            with (
                gpu_attention(),
                compiled_layers(stage, torch.device("cpu"), flops=0.0),
                mode,
                copies.in_place(adds=True),
            ):
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
    record["optimizer_ms"] = milliseconds_of(7 * 4 * n_trained)
    # Read in fp32, written in bf16.
    record["copies_ms"] = milliseconds_of((4 + 2) * copies.n_weights())
    return record


def milliseconds_of(n_bytes: int) -> float:
    """Return the time in which an H100 moves so many bytes."""
    return round(1e3 * n_bytes / H100.bandwidth, 1)


def counted_cases(model: str) -> Iterator[tuple[Case, str]]:
    """Yield the cases of the table, and whether their layers are compiled."""
    for case in large_cases(model):
        if case.config.gradient_checkpointing:
            continue
        yield case, "off"
        yield case, "on"
        yield case._replace(window=44, d_state=8), "on"


def main() -> None:
    """Print each case as it is counted, write the JSON."""
    parser = parser_of(__doc__, RECORD)
    parser.add_argument("--small", action="store_true", help="two layers, written nowhere")
    options = parser.parse_args()
    model = "two layers" if options.small else "llama-3.2-1b"
    results = []
    for case, compile in counted_cases(model):
        setting = {"case": case.named(), "rows": case.rows, "compile": compile}
        results.append({**setting, **count(case, compile)})
        print(json.dumps(results[-1]), flush=True)
    if not options.small:
        what = "milliseconds and gigabytes of one micro-batch, counted from shapes; no measurement"
        record = about(what, "cpu", PACKAGES) | {"device": H100._asdict(), "results": results}
        write(options.out, record)


if __name__ == "__main__":
    main()
