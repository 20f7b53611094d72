"""Every kernel, compiled as the launcher compiles it and run in the emulator of `ptx`,
equals float64.

Values, gradients, bounds and races. A few tiles; with PROVE=1 (`make prove`) all of them, and the
record says what was proven: benchmarks/results/prove.json."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

import hybrid_kernels
import triton
from hybrid_kernels.loss import KINDS
from hybrid_kernels.ssd_tiles import TILES, Tile

PROVE = os.environ.get("PROVE") == "1"
BF16 = torch.bfloat16
FP32 = torch.float32
# Row: x, B and C are slices of one
OPTIONS = ("plain", "packed", "gated", "gated-packed", "gated-packed-row")
QUICK = [
    ((BF16, 90, 64, 64), "gated-packed-row"),
    ((BF16, 80, 16, 64), "gated"),
    ((BF16, 80, 16, 64), "packed"),
]
QUICK += [((FP32, 80, 16, 16), "plain")]
CAPABILITIES = (80, 90) if PROVE else (90,)
SYNCHRONIZING = ("bar.sync", "cp.async.wait", "wgmma.wait", "fence.proxy")
RECORD = Path(__file__).parents[2] / "benchmarks" / "results" / "prove.json"
"""By version of triton, kernel and options: the largest error against float64, or why there is
none."""


KERNELS = {"convolution": "conv", "decoding step": "step", "distillation loss": "loss_triton"}
"""The files of kernels; the others are of the recurrence."""


@pytest.fixture
def prove(compiled) -> Callable[..., None]:
    """Call a proof where triton compiles; with PROVE=1, put its outcome on record, or skip it where
    it stands there.

    A proof fails on any race or access out of bounds, so an error on record means that there were
    none."""

    def call(
        kernel: str,
        options: str,
        proof: Callable[..., float],
        *given: object,
        tile: Tile | None = None,
    ) -> None:
        key = code_and_tile(kernel, tile)
        if PROVE:
            with open_record() as record:
                if isinstance(of_kernel(record, kernel, key).get(options), float):
                    pytest.skip("on record")
        outcome: object = "stopped"
        try:
            outcome = float(f"{compiled(proof, *given):.1e}")
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}"[:500]
            raise
        finally:
            if PROVE:
                with open_record() as record:
                    of_kernel(record, kernel, key)[options] = outcome

    return call


def code_and_tile(kernel: str, tile: Tile | None = None) -> str:
    """Name what was proven: a hash of the kernel's file and of what it shares with others, then how
    it is launched."""
    folder = Path(hybrid_kernels.__path__[0])
    files = [folder / f"{name}.py" for name in ("common", KERNELS.get(kernel, "ssd_triton"))]
    without_comments = [re.sub(r" *#.*", "", path.read_text()) for path in files]
    code = hashlib.sha256("".join(without_comments).encode()).hexdigest()[:16]
    return code if tile is None else f"{code} {tile._replace(spills=0)}"


@contextlib.contextmanager
def open_record() -> Iterator[dict]:
    """Read the record and write it back; one process at a time."""
    with RECORD.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        record = json.loads(file.read() or "{}")
        yield record
        file.truncate(0)
        file.write(json.dumps(record, indent=1, sort_keys=True) + "\n")


def of_kernel(record: dict, kernel: str, key: str) -> dict:
    """Return the outcomes of a kernel with this triton by options. Those of older code or another
    tile go."""
    of_version = record.setdefault(f"triton {triton.__version__}", {})
    if of_version.get(kernel, {}).get("of") != key:
        of_version[kernel] = {"of": key}
    return of_version[kernel]


def run_ssd(key: tuple[torch.dtype, int, int, int], options: str, n_segments: int = 1) -> float:
    """Compare values and gradients of two heads with the recurrence."""
    import test_ssd_kernel as interpreted
    from emulated_device import emulated

    dtype, capability, d_state, head_dim = key
    torch.manual_seed(0)
    gated = "gated" in options
    given = interpreted.problem(1, 70, 2, head_dim, d_state, dtype=dtype, gated=gated, state=gated)
    seq_idx = interpreted.documents(1, 70) if "packed" in options else None
    with emulated(capability):
        return interpreted.check(
            given, dtype=dtype, seq_idx=seq_idx, n_segments=n_segments, in_row="row" in options
        )


def run_conv(capability: int, dtype: torch.dtype, activation: str | None, packed: bool) -> float:
    import test_conv_kernel as interpreted
    from emulated_device import emulated

    torch.manual_seed(0)
    inputs = interpreted.draw(70, 72, 4, dtype, packed)
    with emulated(capability):
        return interpreted.check(inputs, interpreted.documents(70) if packed else None, activation)


def run_step(capability: int, head_dim: int, d_state: int, dtype: torch.dtype) -> float:
    import test_step_kernel as interpreted
    from emulated_device import emulated

    torch.manual_seed(0)
    both, first = (interpreted.draw(3, head_dim, d_state, dtype=dtype) for _ in range(2))
    with emulated(capability):
        interpreted.check_padding(first)
        return interpreted.check(both, dtype)


def run_loss(capability: int, kind: str) -> float:
    """A vocabulary longer than a block, and not divisible by 16; the teacher's own head, then its
    top 5."""
    import test_loss_kernel as interpreted
    from emulated_device import emulated

    torch.manual_seed(0)
    options = {"kind": kind, "temperature": 2.0, "hard_weight": 0.25, "beta": 0.3}
    tolerance = interpreted.TOLERANCE["triton", BF16]
    with mock.patch.multiple(interpreted, V=5003, W=5008, REAL=4999):
        case = interpreted.Case(BF16)
        top = interpreted.stored(case, 5, 2.0)
        with emulated(capability):
            ours, of_top = (
                case.ours(known, chunk_size=8, impl="triton", **options) for known in (None, top)
            )
        return max(
            interpreted.close(ours, case.expected(**options), tolerance),
            interpreted.close(
                of_top, interpreted.coarse_loss(case, top, kind, 2.0, 0.25), tolerance
            ),
        )


def share_noticed(key: tuple[torch.dtype, int, int, int], one_by_one: bool) -> float:
    """Leave `SYNCHRONIZING` instructions out of the main kernels, one or all of a kind: what share
    is noticed?"""
    import test_ssd_kernel as interpreted
    from emulated_device import Race, emulated, execute, instructions
    from hybrid_kernels.ssd import ssd
    from ptx import Fault

    dtype, capability, d_state, head_dim = key
    torch.manual_seed(0)
    given = interpreted.in_dtype(
        interpreted.problem(1, 100, 1, head_dim, d_state, dtype=dtype), dtype
    )
    tried = []
    missed = []

    def leave_out(launch) -> None:
        before = [tensor.clone() for tensor in launch.tensors]
        execute(launch)
        right = [tensor.clone() for tensor in launch.tensors]
        for kind in SYNCHRONIZING if launch.name.endswith(("_forward", "_backward")) else ():
            n_found = len(instructions(kind).findall(launch.files["ptx"].read_text()))
            for nth in range(n_found) if one_by_one else [None] if n_found else []:
                for tensor, old in zip(launch.tensors, before):
                    tensor.copy_(old)
                tried.append(kind)
                with contextlib.suppress(Race, Fault):
                    launch.run(launch.program(without=kind, nth=nth))
                    if all(torch.equal(*pair) for pair in zip(launch.tensors, right)):
                        missed.append(f"{launch.name} without {kind} {nth}")
        for tensor, new in zip(launch.tensors, right):
            tensor.copy_(new)

    with emulated(capability, leave_out):
        y, state = ssd(*given[:4], D_H=given.D, z_BLHP=given.z, state_BHPN=given.state)
        torch.autograd.grad(y.float().sum() + state.sum(), given.leaves())
    share = 1 - len(missed) / len(tried)
    assert len(set(tried)) >= 2, missed
    assert share >= (0.95 if one_by_one else 1.0), missed
    return share


def named(*options: object) -> str:
    return " ".join(str(option).removeprefix("torch.") for option in options)


def tile_name(key: tuple[torch.dtype, int, int, int]) -> str:
    dtype, capability, d_state, head_dim = key
    return named("recurrence", f"sm_{capability}", dtype, f"N={d_state}", f"P={head_dim}")


@pytest.mark.parametrize(
    ("key", "options"), list(itertools.product(TILES, OPTIONS)) if PROVE else QUICK, ids=str
)
def test_a_tile_of_the_recurrence(key, options: str, prove) -> None:
    prove(tile_name(key), options, run_ssd, key, options, tile=TILES[key])


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_segments_of_a_row(capability: int, prove) -> None:
    prove(
        "two segments of a row",
        f"sm_{capability}",
        run_ssd,
        (BF16, capability, 16, 64),
        "gated-packed-row",
        2,
    )


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(
    ("dtype", "activation", "packed"), [(BF16, "silu", True), (FP32, None, False)]
)
def test_the_convolution(capability: int, dtype, activation, packed: bool, prove) -> None:
    options = named(f"sm_{capability}", dtype, activation, f"packed={packed}")
    prove("convolution", options, run_conv, capability, dtype, activation, packed)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(
    ("head_dim", "d_state"), [(64, 16), (64, 64), (128, 128), (16, 4)] if PROVE else [(64, 16)]
)
@pytest.mark.parametrize("dtype", [BF16, FP32] if PROVE else [BF16])
def test_the_step(capability: int, head_dim: int, d_state: int, dtype, prove) -> None:
    options = named(f"sm_{capability}", dtype, f"N={d_state}", f"P={head_dim}")
    prove("decoding step", options, run_step, capability, head_dim, d_state, dtype)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("kind", KINDS if PROVE else ["jsd"])
def test_the_loss(capability: int, kind: str, prove) -> None:
    prove("distillation loss", f"sm_{capability} {kind}", run_loss, capability, kind)


def run_short_loss(capability: int, temperature: float) -> float:
    """A vocabulary shorter than a block: some lanes see nothing of a row."""
    import test_loss_kernel as interpreted
    from emulated_device import emulated

    torch.manual_seed(0)
    options = {"kind": "jsd", "temperature": temperature, "hard_weight": 0.25, "beta": 0.3}
    case = interpreted.Case()
    with emulated(capability):
        ours = case.ours(impl="triton", **options)
    return interpreted.close(ours, case.expected(**options), interpreted.TOLERANCE["triton", FP32])


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_the_loss_of_a_row_shorter_than_a_block(temperature: float, prove) -> None:
    options = named("sm_90", "short", f"{temperature=}")
    prove("distillation loss", options, run_short_loss, 90, temperature)


@pytest.mark.parametrize("one_by_one", [False, True] if PROVE else [False])
def test_a_barrier_wait_or_fence_that_is_left_out_is_noticed(one_by_one: bool, prove) -> None:
    key = (BF16, 90, 16 if one_by_one or not PROVE else 64, 64)
    prove(
        "share of left out instructions noticed",
        named(*key, f"{one_by_one=}"),
        share_noticed,
        key,
        one_by_one,
    )


@pytest.mark.parametrize("version", ["3.5.1", "3.6.0", "3.7.1", "3.8.0", "3.9.0"])
def test_every_tile_is_on_record_as_it_is_now(version: str) -> None:
    record = json.loads(RECORD.read_text())[f"triton {version}"]
    tiles = {tile_name(key): code_and_tile(tile_name(key), tile) for key, tile in TILES.items()}
    proven = {kernel: outcomes.pop("of") for kernel, outcomes in record.items()}
    assert proven == {kernel: code_and_tile(kernel) for kernel in proven} | tiles, (
        "run `make prove`, or a part of it"
    )
    assert not [
        value
        for outcomes in record.values()
        for value in outcomes.values()
        if isinstance(value, str)
    ]
