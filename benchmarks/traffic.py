"""Count the bytes and operations of each kernel from the shapes alone, beside the limits of the hardware.

    python benchmarks/traffic.py            # prints a table, writes benchmarks/results/traffic.json

Bytes are those of a kernel's inputs and outputs, each counted once per kernel that touches it: what stays in registers
or in cache inside a kernel is free. bf16 tensors, fp32 decays, no gate and no skip, B and C per group of heads. The
limit is one kernel forward and one backward that recomputes C B^T and keeps no states. Peers as their sources are:

    mamba-ssm 2.3.2   five kernels forward; four of them again and about nine more backward; C B^T and its gradient
                      are written as fp32 [B, M, G, Q, Q]
    fla 0.6.0         chunk_simple_gla: three kernels forward, five backward; states written, C B^T recomputed

    fla's gated delta rule (chunk_gated_delta_rule): five kernels forward, eleven backward; the writes and the
                      states computed again

A second table holds the other kernels: the convolution (peer: causal-conv1d, one kernel each way), a decoding step of a
layer (peer: causal_conv1d_update, softplus and exp, selective_state_update, skip and gate, each on its own) and the
distillation loss (peer: Liger 0.8.5's fused_linear_jsd, about eleven passes over fp32 logits; plain torch in fp32).
Without fla, the gated delta rule is torch's operators, then our recurrence in fp32: counted operator by operator
(`counting.py`), on tensors that hold nothing.

Times are bytes over bandwidth or operations over the tensor cores' rate, whichever is longer: predictions, not
measurements.

Shapes: B batch, L length, H heads, P head dim, N state size, G groups (heads that share B and C), Q chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from counting import CountOperators, Counts, Device
from hybrid_kernels import common
from records import RESULTS, parser_of, write
from torch._subclasses.fake_tensor import FakeTensorMode

from hybrid_distill.model.gated_delta import delta_scan

RECORD = RESULTS / "traffic.json"
# Bytes of an element.
BF16 = 2
FP32 = 4
# Tokens between two states.
MAMBA_CHUNK = 128
FLA_CHUNK = 64
LIMIT_CHUNK = 64
# P = 64, sm_90: the tile table.
OUR_CHUNK = 32
CONV_WIDTH = 4
LIGER_PASSES = 11
# Tokens, on a GPU of 60 GB or more.
LOSS_CHUNK = 4096


class Shape(NamedTuple):
    """See the module docstring."""

    B: int
    L: int
    H: int
    P: int
    N: int
    G: int

    @property
    def tokens(self) -> int:
        """Count the tokens of all heads, each by itself."""
        return self.B * self.L * self.H

    def x(self, element: int = BF16) -> int:
        return self.tokens * self.P * element

    def bc(self, element: int = BF16) -> int:
        """One of B and C."""
        return self.B * self.L * self.G * self.N * element

    def decay(self) -> int:
        return self.tokens * FP32

    def states(self, chunk: int, element: int) -> int:
        """The states before every chunk."""
        return self.tokens * self.N * self.P * element // chunk

    def scores(self, chunk: int) -> int:
        """C B^T of every chunk, fp32."""
        return self.B * self.L * self.G * chunk * FP32


DEVICES = {
    "H100": Device(3.0e12, 800e12),
    "H200": Device(4.3e12, 800e12),
    "A100": Device(1.75e12, 250e12),
}


ROWS = ((8, 2048, 32), (8, 8192, 32), (8, 2048, 29), (1, 32768, 32))
"""Batch, length and heads of the first table; heads of the first row also share B and C."""
STATES = (4, 8, 16, 64, 128)
HEAD_DIM = 64


def shapes() -> list[Shape]:
    """Return the shapes of the first table."""
    listed = []
    for B, L, H in ROWS:
        for N in STATES:
            listed.append(Shape(B, L, H, HEAD_DIM, N, G=H))
            if ROWS[0] == (B, L, H):
                listed.append(Shape(B, L, H, HEAD_DIM, N, G=1))
    return listed


class Work(NamedTuple):
    """Bytes of each kernel, and operations of the minimal algorithm at the chunk length."""

    forward: dict[str, int]
    backward: dict[str, int]
    chunk: int

    def bytes_(self, *, backward: bool) -> int:
        total = sum(self.forward.values())
        if backward:
            total += sum(self.backward.values())
        return total


def limit(s: Shape) -> Work:
    """Each input read once, each output written once, in either direction."""
    forward = 2 * s.x() + 2 * s.bc() + s.decay()
    backward = 3 * s.x() + 4 * s.bc() + 2 * s.decay()
    return Work({"all": forward}, {"all": backward}, LIMIT_CHUNK)


def ours(s: Shape) -> Work:
    """Count our kernels. The forward writes three vectors of decays and reads them; the backward writes two more."""
    s = s._replace(G=s.H)  # B and C of groups are expanded first
    saved = s.states(OUR_CHUNK, BF16)
    inputs = 2 * s.x() + 2 * s.bc() + saved
    forward = {"decays": 4 * s.decay(), "forward": inputs + 3 * s.decay()}
    backward = {
        "decays": 4 * s.decay(),
        "backward": inputs + s.x() + 2 * s.bc() + 5 * s.decay(),
        "decay gradients": 4 * s.decay(),
    }
    return Work(forward, backward, OUR_CHUNK)


def mamba_ssm(s: Shape) -> Work:
    chunk = MAMBA_CHUNK
    states = s.states(chunk, FP32)
    states16 = s.states(chunk, BF16)
    scores = s.scores(chunk)
    # dB and dC are first written per head, in fp32.
    wide = s.tokens * s.N * FP32
    narrow = s.bc()
    forward = {
        "chunk_cumsum": 3 * s.decay(),
        "chunk_state": s.x() + s.bc() + 2 * s.decay() + states,
        "state_passing": states + states16,
        "bmm_chunk": 2 * s.bc() + scores,
        "chunk_scan": scores + 2 * s.x() + s.bc() + 2 * s.decay() + states16,
    }
    run_again = ("chunk_cumsum", "chunk_state", "state_passing", "bmm_chunk")
    again = {f"{name} again": forward[name] for name in run_again}
    backward = again | {
        "dstates": s.x() + s.bc() + s.decay() + states,
        "state_passing_bwd": states + 2 * states16 + states,
        "dx": scores + 3 * s.x() + s.bc() + 3 * s.decay() + states,
        "db": s.x() + s.bc() + states + wide + 2 * s.decay(),
        "dC": s.x() + s.bc() + states16 + wide + 2 * s.decay(),
        "dcb": 2 * s.x() + s.tokens * chunk * FP32 + 2 * s.decay(),
        "sums over heads": s.tokens * chunk * FP32 + scores + 2 * (wide + s.bc(FP32)),
        "bmm_bwd": 2 * (scores + narrow + s.bc(FP32) + narrow),
        "ddA": 2 * s.x() + scores + 6 * s.decay(),
    }
    return Work(forward, backward, chunk)


def fla(s: Shape) -> Work:
    states = s.states(FLA_CHUNK, FP32)
    states16 = s.states(FLA_CHUNK, BF16)
    per_head = s._replace(G=s.H).bc()  # dB and dC are written per head, then summed
    forward = {
        "local_cumsum": 2 * s.decay(),
        "chunk_fwd_h": s.bc() + s.x() + s.decay() + states16,
        "chunk_fwd_o": 2 * s.bc() + 2 * s.x() + s.decay() + states16,
    }
    backward = {
        "chunk_fwd_h again": s.bc() + s.x() + s.decay() + states,
        "chunk_bwd_dh": s.bc() + s.x() + s.decay() + states,
        "chunk_bwd_dqkwg": 2 * s.bc() + 2 * s.x() + 2 * s.decay() + 2 * states + 2 * per_head,
        "chunk_bwd_dv": 2 * s.bc() + 2 * s.x() + s.decay() + states,
        "reverse cumsum": 2 * s.decay(),
    }
    return Work(forward, backward, FLA_CHUNK)


CONTENDERS = {"limit": limit, "ours": ours, "mamba-ssm": mamba_ssm, "fla": fla}


def operations(s: Shape, chunk: int, *, backward: bool) -> int:
    """Causal half of each chunk's square, C B^T and the states recomputed in the backward."""
    per_token = chunk * (s.N + s.P) + 4 * s.N * s.P
    if backward:
        per_token += chunk * (3 * s.N + 2 * s.P) + 10 * s.N * s.P
    return s.tokens * per_token


def milliseconds(s: Shape, work: Work, device: Device, *, backward: bool) -> float:
    """Return the longer of moving and computing."""
    moving = work.bytes_(backward=backward) / device.bandwidth
    computing = operations(s, work.chunk, backward=backward) / device.flops
    return 1e3 * max(moving, computing)


class Kernel(NamedTuple):
    """Bytes and floating-point operations of one launch."""

    moved: int
    flops: int = 0

    def seconds(self, device: Device) -> float:
        """Return the longer of moving and computing."""
        return max(self.moved / device.bandwidth, self.flops / device.flops)


class Edge(NamedTuple):
    """One of the other kernels at one shape: what each contender runs one after the other."""

    name: str
    kernels: dict[str, list[Kernel]]

    def bytes_(self) -> dict[str, int]:
        moved = {}
        for name, kernels in self.kernels.items():
            moved[name] = sum(kernel.moved for kernel in kernels)
        return moved

    def milliseconds(self, device: Device) -> dict[str, float]:
        times = {}
        for name, kernels in self.kernels.items():
            times[name] = 1e3 * sum(kernel.seconds(device) for kernel in kernels)
        return times


def moving(**moved: int) -> dict[str, list[Kernel]]:
    """Return contenders that only move bytes; an underscore stands for a dash."""
    return {name.replace("_", "-"): [Kernel(count)] for name, count in moved.items()}


def convolution(s: Shape) -> Edge:
    """Forward and backward over x, B and C of all heads; in plain torch each tap is a pass of its own."""
    xbc = s.x() + 2 * s._replace(G=s.H).bc()
    # Forward: input and output. Backward: input, the output's gradient and the input's.
    fused = (2 + 3) * xbc
    # The first tap reads and writes; each further one also reads the sum so far. So do both gradients.
    taps_in_torch = 3 * (CONV_WIDTH - 1) + 2
    in_torch = 3 * taps_in_torch * xbc
    moved = moving(limit=fused, ours=fused, causal_conv1d=fused, torch=in_torch)
    return Edge(f"conv B={s.B} L={s.L} H={s.H} N={s.N}", moved)


def decoding_step(s: Shape) -> Edge:
    """One token of B sequences: the states read and written, everything else is small beside them."""
    rows = s._replace(L=1, G=s.H)
    state = 2 * rows.tokens * s.P * s.N * FP32
    xbc = rows.x() + 2 * rows.bc()
    conv_state = 2 * (CONV_WIDTH - 1) * xbc
    gate_and_output = 2 * rows.x()
    once = state + conv_state + xbc + gate_and_output + rows.decay()
    # What the kernels hand to each other.
    between = 2 * xbc + 2 * rows.decay() + 6 * rows.x()
    moved = moving(limit=state, ours=once, mamba_ssm=once + between)
    return Edge(f"step B={s.B} H={s.H} N={s.N}", moved)


def loss(
    tokens: int, vocabulary: int, student: int, teacher: int, kind: str = "forward_kl"
) -> Edge:
    """Products of both heads and of the gradient, and passes over the logits; ours writes and reads bf16 in place."""

    def product(m: int, k: int, n: int, element: int = BF16) -> Kernel:
        return Kernel((m * k + k * n) * BF16 + m * n * element, 2 * m * k * n)

    def chunk(m: int) -> list[Kernel]:
        """Logits twice, gradients of hidden states and, added to the sum in fp32, of the head."""
        return [
            product(m, student, vocabulary),
            product(m, teacher, vocabulary),
            product(m, vocabulary, student),
            product(vocabulary, m, student, 2 * FP32),
        ]

    logits = tokens * vocabulary
    whole = chunk(tokens)
    in_chunks = tokens // LOSS_CHUNK * chunk(LOSS_CHUNK)
    of_hidden = Kernel(4 * tokens * student * BF16)
    of_head = Kernel(vocabulary * student * (2 * FP32 + BF16))  # zeroed, read, scaled
    # What is read of the logits: the normalizers', for JSD the mean pull's, the gradient's pass, which also writes it.
    passes = 5 if kind == "forward_kl" else 7
    least = sum(kernel.moved for kernel in whole) - 3 * logits * BF16
    contenders = {
        "limit": [Kernel(least, sum(kernel.flops for kernel in whole))],
        "ours": [*in_chunks, Kernel(passes * logits * BF16), of_hidden, of_head],
        "Liger": [*whole, Kernel(LIGER_PASSES * 2 * logits * FP32)],
        "torch": [*whole, Kernel(2 * LIGER_PASSES * 2 * logits * FP32)],
    }
    return Edge(f"loss {kind} {tokens} x {vocabulary} x {student}/{teacher}", contenders)


def fla_delta_rule(s: Shape) -> int:
    """Count the bytes of flash-linear-attention's kernels, each with its inputs, then its outputs."""
    x = s.x()
    bc = s.bc()
    states = s.states(FLA_CHUNK, BF16)
    gate = s.decay()
    write = s.tokens * BF16
    # The inverse of each chunk's system, [Q, Q].
    inverse = s.tokens * FLA_CHUNK * BF16
    w_and_u = (bc + x + write + inverse + gate) + (bc + x)
    states_and_writes = (2 * bc + x + gate) + (states + x)
    forward = {
        "cumsum": 2 * gate,
        # It is zeroed first.
        "kkt_solve": (bc + gate + write) + 2 * inverse,
        "recompute_w_u": w_and_u,
        "fwd_h": states_and_writes,
        "fwd_o": (2 * bc + x + states + gate) + x,
    }
    backward = {
        "recompute_w_u again": w_and_u,
        "fwd_h again": states_and_writes,
        "bwd_dv_local": (2 * bc + x + gate) + x,
        "bwd_dhu": (3 * bc + 2 * x + gate) + (states + x),
        "bwd_dqkwg": (3 * bc + 3 * x + 2 * states + gate) + (3 * bc + gate),
        "wy_repr_bwd": (2 * bc + 2 * x + write + inverse + gate) + (bc + x + write + gate),
        "sums of both gradients": 3 * bc + 3 * gate,
        "reverse cumsum": 2 * gate,
    }
    return sum(forward.values()) + sum(backward.values())


def delta_rule_in_torch(s: Shape) -> int:
    """Count the bytes of torch's operators and of our recurrence, forward and backward, in bf16."""
    common.INTERPRETED = True
    mode = CountOperators(Counts())
    tokens = (s.B, s.L, s.H)

    def leaf(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(*tokens, *sizes, dtype=dtype, requires_grad=True)

    with FakeTensorMode(allow_non_fake_inputs=True):
        x = leaf(s.P, dtype=torch.bfloat16)
        k = leaf(s.N, dtype=torch.bfloat16)
        c = leaf(s.N, dtype=torch.bfloat16)
        log_a = leaf()
        write = leaf()
        upstream = torch.zeros_like(x)
        with mode:
            y, _ = delta_scan(x, log_a, write, k, c, impl="triton")
            torch.autograd.grad(y, [x, log_a, write, k, c], upstream)
    return mode.counts.bytes.total()


def delta_rule(s: Shape) -> Edge:
    """Forward and backward; the limit reads and writes gates of 4 bytes."""
    moved = moving(
        limit=5 * s.x() + 6 * s.bc() + 6 * s.decay(),
        fla=fla_delta_rule(s),
        ours=delta_rule_in_torch(s),
    )
    return Edge(f"gated delta rule B={s.B} L={s.L} H={s.H} N={s.N}", moved)


def edges() -> list[Edge]:
    """Return the rows of the second table."""

    def shape(N: int, B: int = 8, L: int = 2048) -> Shape:
        return Shape(B, L, 32, HEAD_DIM, N, G=32)

    listed = [convolution(shape(N)) for N in (4, 16, 64)]
    listed += [delta_rule(shape(N)) for N in (4, 16, 64, 128)]
    listed += [decoding_step(shape(N, B, L=1)) for B, N in ((1, 16), (64, 16), (64, 64))]
    for teacher in (2048, 4096):
        for kind in ("forward_kl", "jsd"):
            listed.append(loss(16_384, 128_256, 2048, teacher, kind))
    return listed


def row(s: Shape) -> dict[str, object]:
    """Return all contenders at one shape."""
    record: dict[str, object] = {"shape": s._asdict()}
    for name, model in CONTENDERS.items():
        work = model(s)
        times = {}
        for device, rates in DEVICES.items():
            times[device] = {
                "forward": milliseconds(s, work, rates, backward=False),
                "forward + backward": milliseconds(s, work, rates, backward=True),
            }
        record[name] = {
            "kernels_bytes": {"forward": work.forward, "backward": work.backward},
            "forward_bytes": work.bytes_(backward=False),
            "bytes": work.bytes_(backward=True),
            "forward_gflop": operations(s, work.chunk, backward=False) / 1e9,
            "gflop": operations(s, work.chunk, backward=True) / 1e9,
            "milliseconds": times,
        }
    return record


def edge_row(edge: Edge) -> dict[str, object]:
    times = {name: edge.milliseconds(rates) for name, rates in DEVICES.items()}
    return {"name": edge.name, "bytes": edge.bytes_(), "milliseconds": times}


def show(device: str) -> None:
    """Print both tables, of forward and backward."""
    rates = DEVICES[device]
    names = ", ".join(CONTENDERS)
    print(f"MB (ms on {device} at the limit of the bus or the tensor cores), {names}")
    for s in shapes():
        cells = []
        for model in CONTENDERS.values():
            work = model(s)
            time = milliseconds(s, work, rates, backward=True)
            megabytes = work.bytes_(backward=True) / 1e6
            cells.append(f"{megabytes:>9.0f} ({time:.3f})")
        print(s, *cells)
    for edge in edges():
        moved = edge.bytes_()
        times = edge.milliseconds(rates)
        cells = [f"{name} {moved[name] / 1e6:.0f} ({times[name]:.3f})" for name in times]
        print(edge.name, *cells, sep="  ")


def main() -> None:
    """Print the tables, write the JSON."""
    options = parser_of(__doc__, RECORD).parse_args()
    show("H100")
    record = {
        "what": "predictions from the shapes, bf16, without gate and skip; no measurement",
        "devices": {name: rates._asdict() for name, rates in DEVICES.items()},
        "rows": [row(s) for s in shapes()],
        "other kernels": [edge_row(edge) for edge in edges()],
    }
    write(options.out, record)


if __name__ == "__main__":
    main()
