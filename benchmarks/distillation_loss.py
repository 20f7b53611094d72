"""How fast is the chunked distillation loss, and how much memory does it take, against Liger and plain torch?

    python benchmarks/distillation_loss.py            # writes benchmarks/results/distillation_loss.json
    python benchmarks/distillation_loss.py --small    # a tiny problem, also without a GPU, to see that it runs

Value and gradients for a student's hidden states and head, both in bf16, and a teacher of the same width. Every
contender must agree with torch in fp32 on 64 of the tokens before it is timed. Times are medians; memory is what the
pass takes over its inputs, with and without the head's gradient. The limit is that of the matrix products alone.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from hybrid_kernels.loss import TeacherHead, distillation_loss
from provenance import about, write
from torch import Tensor

from hybrid_distill.train import losses

RESULTS = Path(__file__).parent / "results" / "distillation_loss.json"
TENSOR_CORE_RATE = 800e12  # bf16 operations a second that a good product reaches on H100 and H200
AGREEMENT = 5e-2  # of value and gradients, relative to the largest entry; bf16
PACKAGES = ("torch", "triton", "liger-kernel")


class Problem(NamedTuple):
    """M tokens, V words, D width of student and teacher."""

    M: int
    V: int
    D: int


FULL, SMALL = Problem(16384, 128256, 2048), Problem(96, 500, 32)
Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def ours(kind: str) -> Loss:
    return lambda hidden, head, t_hidden, t_head: distillation_loss(
        hidden, head, TeacherHead(t_hidden, t_head), kind=kind
    )


def plain_torch(kind: str) -> Loss:
    """All logits at once, losses in fp32 chunk by chunk."""
    return lambda hidden, head, t_hidden, t_head: losses.distillation_loss(
        hidden @ head.mT, (t_hidden @ t_head.mT).detach(), kind=kind
    )


def liger(kind: str) -> Loss:
    """Its beta is 0 for forward KL; it has no labels to ignore here."""
    from liger_kernel.transformers.fused_linear_jsd import LigerFusedLinearJSD

    loss = LigerFusedLinearJSD(jsd_beta={"forward_kl": 0.0, "jsd": 0.5}[kind])
    return lambda hidden, head, t_hidden, t_head: loss(hidden, head, t_hidden, t_head, None)


CONTENDERS: dict[str, Callable[[str], Loss]] = {"ours": ours, "liger": liger, "torch": plain_torch}
KINDS = ("jsd", "forward_kl")


def draw(problem: Problem, device: str, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Hidden states and head of student and teacher; logits of a language model's size."""
    generator = torch.Generator(device).manual_seed(0)
    sizes = ((problem.M, problem.D), (problem.V, problem.D)) * 2
    scales = (1.0, 2.0 / problem.D**0.5) * 2
    return [(torch.randn(s, generator=generator, device=device) * k).to(dtype) for s, k in zip(sizes, scales)]


def value_and_gradients(loss: Loss, args: list[Tensor]) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in args[:2]]
    value = loss(leaves[0], leaves[1], *args[2:])
    return [value.detach(), *torch.autograd.grad(value, leaves)]


def disagreement(loss: Loss, kind: str, args: list[Tensor]) -> float:
    """With torch in fp32, on a few tokens."""
    few = [args[0][:64], args[1], args[2][:64], args[3]]
    expected = value_and_gradients(plain_torch(kind), [t.float() for t in few])
    pairs = zip(value_and_gradients(loss, few), expected)
    return max(((ours - theirs).abs().max() / theirs.abs().max()).item() for ours, theirs in pairs)


def one_pass(loss: Loss, args: list[Tensor]) -> float:
    """Milliseconds of value and gradients."""
    on_gpu = args[0].is_cuda
    if on_gpu:
        torch.cuda.synchronize()
    start = time.perf_counter()
    value_and_gradients(loss, args)
    if on_gpu:
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


def measure(make: Callable[[str], Loss], kind: str, args: list[Tensor], repeats: int) -> dict[str, Any]:
    """Milliseconds and bytes, or why there are none."""
    try:
        loss = make(kind)
        error = disagreement(loss, kind, args)
        if not error < AGREEMENT:
            return {"failed": f"differs by {error:.1e} of the largest entry; not timed"}
        one_pass(loss, args)
        found: dict[str, Any] = {"disagreement": error}
        if args[0].is_cuda:
            held = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            one_pass(loss, args)
            over_inputs = torch.cuda.max_memory_allocated() - held
            found["bytes_over_inputs"] = over_inputs
            found["bytes_over_inputs_and_fp32_head_gradient"] = over_inputs - 4 * args[1].numel()
        found["milliseconds"] = statistics.median(one_pass(loss, args) for _ in range(repeats))
        return found
    except Exception as error:  # of somebody else's package, or out of memory: it belongs into the table
        first_line = next(iter(str(error).strip().splitlines()), "")
        return {"failed": f"{type(error).__name__}: {first_line}"[:160]}
    finally:
        if args[0].is_cuda:
            torch.cuda.empty_cache()


def limit_milliseconds(problem: Problem) -> float:
    """Logits twice, gradients of hidden states and head."""
    return 1e3 * 8 * problem.M * problem.V * problem.D / TENSOR_CORE_RATE


def table(record: dict[str, Any]) -> str:
    lines = [f"{record['problem']} on {record['device']}, limit {record['limit_milliseconds']:.1f} ms"]
    for kind, rows in record["rows"].items():
        for name, found in rows.items():
            if "failed" in found:
                lines.append(f"{kind:<12}{name:<8}{found['failed']}")
                continue
            memory = found.get("bytes_over_inputs_and_fp32_head_gradient")
            extra = "" if memory is None else f"{memory / 1e9:8.2f} GB over inputs and head gradient"
            lines.append(f"{kind:<12}{name:<8}{found['milliseconds']:9.2f} ms{extra}")
    return "\n".join(lines)


def main() -> None:
    """Measure, print, write the JSON; exit status 2 where there is no GPU and the problem is the full one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a tiny problem on any device; written only with --out")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    if not on_gpu and not options.small:
        print("benchmarks/distillation_loss.py: no CUDA device; nothing was measured. --small runs without one.")
        raise SystemExit(2)
    problem = SMALL if options.small else FULL
    args = draw(problem, "cuda" if on_gpu else "cpu")
    record = {
        **about("value and gradients, bf16, median", "cuda" if on_gpu else "cpu", PACKAGES),
        "problem": problem._asdict(),
        "limit_milliseconds": limit_milliseconds(problem),
        "rows": {
            kind: {name: measure(make, kind, args, options.repeats) for name, make in CONTENDERS.items()}
            for kind in KINDS
        },
    }
    if out := options.out or (None if options.small else RESULTS):
        write(out, record)
    print(table(record))


if __name__ == "__main__":
    main()
