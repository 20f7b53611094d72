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
from hybrid_kernels.loss_types import KINDS
from hybrid_kernels.ssd_tiles import TILES, Tile

PROVE = os.environ.get("PROVE") == "1"
BF16 = torch.bfloat16
FP32 = torch.float32
TileKey = tuple[torch.dtype, int, int, int]
"""dtype, capability, state size and head dim, as in `TILES`."""
# Row: x, B and C are slices of one
OPTIONS = ("plain", "packed", "gated", "gated-packed", "gated-packed-row")
QUICK = [
    ((BF16, 90, 64, 64), "gated-packed-row"),
    ((BF16, 80, 16, 64), "gated"),
    ((BF16, 80, 16, 64), "packed"),
    ((FP32, 80, 16, 16), "plain"),
]
CAPABILITIES = (80, 90) if PROVE else (90,)
SYNCHRONIZING = ("bar.sync", "cp.async.wait", "wgmma.wait", "fence.proxy")
RECORD = Path(__file__).parents[2] / "benchmarks" / "results" / "prove.json"
"""By version of triton, kernel and options: the largest error against float64, or why there is
none."""
KERNELS = {"convolution": "conv", "decoding step": "step", "distillation loss": "loss_triton"}
"""The files of kernels; the others are of the recurrence."""


# The record


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
        *arguments: object,
        tile: Tile | None = None,
    ) -> None:
        key = code_and_tile(kernel, tile)
        if PROVE:
            with open_record() as record:
                outcomes = of_kernel(record, kernel, key)
                if isinstance(outcomes.get(options), float):
                    pytest.skip("on record")
        outcome: object = "stopped"
        try:
            error_of_proof = compiled(proof, *arguments)
            outcome = float(f"{error_of_proof:.1e}")
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


# Proofs. They run in a process in which triton compiles; there the tests of interpreted kernels are
# modules, whose checks are called with the emulator in place of the interpreter.


def run_ssd(key: TileKey, options: str, n_segments: int = 1) -> float:
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
    length = 70
    inputs = interpreted.draw(length, 72, 4, dtype, packed)
    with emulated(capability):
        seq_idx = interpreted.documents(length) if packed else None
        return interpreted.check(inputs, seq_idx, activation)


def run_step(capability: int, head_dim: int, d_state: int, dtype: torch.dtype) -> float:
    import test_step_kernel as interpreted
    from emulated_device import emulated

    torch.manual_seed(0)
    without_padding = interpreted.draw(3, head_dim, d_state, dtype=dtype)
    padded = interpreted.draw(3, head_dim, d_state, dtype=dtype)
    with emulated(capability):
        interpreted.check_padding(padded)
        return interpreted.check(without_padding, dtype)


def run_loss(capability: int, kind: str) -> float:
    """A vocabulary longer than a block, and not divisible by 16; the teacher's own head, then its
    top 5."""
    import test_loss_kernel as interpreted
    from emulated_device import emulated

    torch.manual_seed(0)
    temperature = 2.0
    hard_weight = 0.25
    options = {
        "kind": kind,
        "temperature": temperature,
        "hard_weight": hard_weight,
        "beta": 0.3,
    }
    tolerance = interpreted.TOLERANCE["triton", BF16]
    with mock.patch.multiple(interpreted, V=5003, W=5008, REAL=4999):
        case = interpreted.Case(BF16)
        top = interpreted.stored(case, 5, temperature)
        with emulated(capability):
            ours = case.ours(chunk_size=8, impl="triton", **options)
            of_top = case.ours(top, chunk_size=8, impl="triton", **options)
        expected = case.expected(**options)
        expected_of_top = interpreted.coarse_loss(case, top, kind, temperature, hard_weight)
        return max(
            interpreted.close(ours, expected, tolerance),
            interpreted.close(of_top, expected_of_top, tolerance),
        )


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


def share_noticed(key: TileKey, one_by_one: bool) -> float:
    """Leave `SYNCHRONIZING` instructions out of the main kernels, one or all of a kind; return the
    share that is noticed, by a finding or by another result."""
    import test_ssd_kernel as interpreted
    from emulated_device import Race, emulated, execute
    from hybrid_kernels.ssd import ssd
    from ptx import Fault

    dtype, capability, d_state, head_dim = key
    torch.manual_seed(0)
    given = interpreted.problem(1, 100, 1, head_dim, d_state, dtype=dtype)
    given = interpreted.in_dtype(given, dtype)
    tried = []
    missed = []

    def leave_out(launch) -> None:
        before = copies(launch)
        execute(launch)
        right = copies(launch)
        for kind, nth in omissions(launch, one_by_one):
            restore(launch, before)
            tried.append(kind)
            with contextlib.suppress(Race, Fault):
                launch.run(launch.program(without=kind, nth=nth))
                if all(torch.equal(*pair) for pair in zip(launch.tensors, right)):
                    missed.append(f"{launch.name} without {kind} {nth}")
        restore(launch, right)

    with emulated(capability, leave_out):
        y, state = ssd(*given[:4], D_H=given.D, z_BLHP=given.z, state_BHPN=given.state)
        torch.autograd.grad(y.float().sum() + state.sum(), given.leaves())
    share = 1 - len(missed) / len(tried)
    assert len(set(tried)) >= 2, missed
    assert share >= (0.95 if one_by_one else 1.0), missed
    return share


def omissions(launch, one_by_one: bool) -> list[tuple[str, int | None]]:
    """List the kinds of instructions to leave out of a main kernel; one by one, their places too."""
    from emulated_device import instructions

    if not launch.name.endswith(("_forward", "_backward")):
        return []
    text = launch.files["ptx"].read_text()
    places: list[tuple[str, int | None]] = []
    for kind in SYNCHRONIZING:
        n_found = len(instructions(kind).findall(text))
        if one_by_one:
            places += [(kind, nth) for nth in range(n_found)]
        elif n_found:
            places.append((kind, None))
    return places


def copies(launch) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in launch.tensors]


def restore(launch, values: list[torch.Tensor]) -> None:
    for tensor, value in zip(launch.tensors, values):
        tensor.copy_(value)


def named(*options: object) -> str:
    return " ".join(str(option).removeprefix("torch.") for option in options)


def tile_name(key: TileKey) -> str:
    dtype, capability, d_state, head_dim = key
    return named("recurrence", f"sm_{capability}", dtype, f"N={d_state}", f"P={head_dim}")


# Tests


@pytest.mark.parametrize(
    ("key", "options"), list(itertools.product(TILES, OPTIONS)) if PROVE else QUICK, ids=str
)
def test_a_tile_of_the_recurrence(key, options: str, prove) -> None:
    prove(tile_name(key), options, run_ssd, key, options, tile=TILES[key])


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_segments_of_a_row(capability: int, prove) -> None:
    key = (BF16, capability, 16, 64)
    n_segments = 2
    options = "gated-packed-row"
    prove("two segments of a row", f"sm_{capability}", run_ssd, key, options, n_segments)


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


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_the_loss_of_a_row_shorter_than_a_block(temperature: float, prove) -> None:
    options = named("sm_90", "short", f"{temperature=}")
    prove("distillation loss", options, run_short_loss, 90, temperature)


@pytest.mark.parametrize("one_by_one", [False, True] if PROVE else [False])
def test_a_barrier_wait_or_fence_that_is_left_out_is_noticed(one_by_one: bool, prove) -> None:
    # One by one, each instruction is a run of its own: with the smaller state.
    d_state = 64 if PROVE and not one_by_one else 16
    key = (BF16, 90, d_state, 64)
    options = named(*key, f"{one_by_one=}")
    prove("share of left out instructions noticed", options, share_noticed, key, one_by_one)


@pytest.mark.parametrize("version", ["3.5.1", "3.6.0", "3.7.1", "3.8.0", "3.9.0"])
def test_every_tile_is_on_record_as_it_is_now(version: str) -> None:
    record = json.loads(RECORD.read_text())[f"triton {version}"]
    proven = {kernel: outcomes.pop("of") for kernel, outcomes in record.items()}
    expected = {kernel: code_and_tile(kernel) for kernel in proven}
    for key, tile in TILES.items():
        name = tile_name(key)
        expected[name] = code_and_tile(name, tile)
    assert proven == expected, "run `make prove`, or a part of it"

    # An error is a number, its absence a text.
    failed = []
    for outcomes in record.values():
        failed += [outcome for outcome in outcomes.values() if isinstance(outcome, str)]
    assert not failed
