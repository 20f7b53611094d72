"""The kernels of the recurrence equal the recurrence: values and gradients, in the interpreter,
against fp64."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import naming

pytest.importorskip("triton", reason="triton is not installed")

from hybrid_kernels import common
from hybrid_kernels import ssd_tiles as tiles
from hybrid_kernels.ssd import ssd
from hybrid_kernels.ssd_launch import ScanArguments, ssd_backward, ssd_forward
from ssd_problem import (
    BF16,
    FP32,
    Problem,
    compare,
    documents,
    in_dtype,
    problem,
    reference,
    relative_error,
    run_kernels,
)

from hybrid_distill.model.decays import log_decay

# dtype of the inputs -> largest error, relative to the largest element of the expected tensor
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
FORGETTING_TOLERANCE = 1e-4
"""In fp32, where a chunk holds many log decays of -30: their sum, near 1000, is exact to 1e-4 at
best."""

pytestmark = [
    pytest.mark.usefixtures("poison"),
    pytest.mark.skipif(
        not common.INTERPRETED, reason="triton was imported before TRITON_INTERPRET=1 was set"
    ),
]


def check(given: Problem, *, dtype: torch.dtype = FP32, **options: Any) -> float:
    """Return the largest error, after asserting that it is small."""
    actual, expected = compare(given, dtype=dtype, **options)
    errors = {}
    for name, tensor in expected.items():
        errors[name] = relative_error(actual[name], tensor)
    worst = max(errors.values())
    assert worst < TOLERANCE[dtype], errors
    return worst


SHAPES = [(1, 70, 1, 16, n) for n in (4, 8, 16, 32, 64, 128)]
SHAPES += [(1, 40, 1, p, 16) for p in (16, 20, 48, 64, 128)]
SHAPES += [(1, length, 2, 16, 4) for length in (1, 63, 64, 65, 150)]
SHAPES += [(2, 5, 1, 16, 8), (2, 5, 3, 16, 8), (1, 5, 29, 16, 8)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_batch_length_number_of_heads_head_dim_and_state_size(
    shape: tuple[int, int, int, int, int],
) -> None:
    check(problem(*shape))


@pytest.mark.parametrize(("d_state", "head_dim"), [(16, 32), (128, 32), (16, 128)])
def test_bf16_as_a_gpu_rounds_it(d_state: int, head_dim: int) -> None:
    check(problem(1, 70, 2, head_dim, d_state, dtype=BF16), dtype=BF16)


def test_blocks_of_a_float32_state_that_is_too_large_for_one_kernel() -> None:
    check(problem(1, 70, 1, 80, 72), seq_idx=documents(1, 70), n_segments=2)
    check(problem(1, 70, 2, 16, 72, gated=False, state=False))


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_the_backward_is_the_same_in_any_number_of_kernels(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit by bit, but for the decay's gradient, whose parts are summed in another order."""
    head_dim = 20
    d_state = 12
    given = problem(1, 70, 1, head_dim, d_state, dtype=dtype)
    seq_idx = documents(1, 70)
    tile = tiles.tile_for(90, dtype, d_state, head_dim)
    tile_key = (dtype, 90, 16, 32)  # sizes rounded up to powers of two
    results = {}
    for n_backward in tiles.BACKWARD_KERNELS:
        monkeypatch.setitem(tiles.TILES, tile_key, tile._replace(n_backward=n_backward))
        torch.manual_seed(1)
        results[n_backward], expected = compare(given, dtype=dtype, seq_idx=seq_idx, n_segments=2)

    for name, by_one in results[1].items():
        assert relative_error(by_one, expected[name]) < TOLERANCE[dtype], name
        for by_several in (results[2][name], results[3][name]):
            if name == "da":
                assert relative_error(by_several, by_one) < 1e-6
            else:
                assert torch.equal(by_several, by_one), name


@pytest.mark.parametrize(("batch", "d_state", "n_segments"), [(2, 8, 1), (2, 8, 3), (1, 128, 3)])
def test_packed_documents(batch: int, n_segments: int, d_state: int) -> None:
    check(problem(batch, 130, 1, 16, d_state), seq_idx=documents(batch, 130), n_segments=n_segments)


@pytest.mark.parametrize("changed", [slice(0, 45), slice(45, 90)])
def test_another_document_changes_no_bit(changed: slice) -> None:
    """Neither of a document's values nor of its gradients; the border lies inside a chunk."""
    given = in_dtype(problem(1, 90, 1, 16, 8, state=False), FP32)
    seq_idx = (torch.arange(90) >= 45).long()[None]
    kept = seq_idx[0] != seq_idx[0, changed.start]

    def values_and_gradients(factor: float) -> list[torch.Tensor]:
        leaves = []
        for tensor in (given.x, given.a, given.b, given.c):
            scaled = tensor.detach().clone()
            scaled[:, changed] *= factor
            leaves.append(scaled.requires_grad_())
        y, _ = ssd(*leaves, D_H=given.D, z_BLHP=given.z, seq_idx_BL=seq_idx)
        return [y, *torch.autograd.grad(y.sum(), leaves)]

    for one, other in zip(values_and_gradients(1.0), values_and_gradients(7.0)):
        assert torch.equal(one[:, kept], other[:, kept])
        assert not torch.equal(one[:, changed], other[:, changed])


@pytest.mark.parametrize("n_segments", [None, 3])
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_gate_skip_and_state_are_optional_in_segments_too(
    gated: bool, state: bool, n_segments: int | None
) -> None:
    check(problem(1, 200, 1, 16, 16, gated=gated, state=state), n_segments=n_segments)


def test_log_decays_may_be_given() -> None:
    given = problem(1, 70, 2, 16, 16)
    # Rounded to what the kernel gets: the decay stays in fp32.
    log_a = log_decay(given.a).detach().float().double()
    check(given._replace(a=log_a.requires_grad_()), softplus=False)


@pytest.mark.parametrize("raw", [-float("inf"), -1e4, -20.0, -6.0, 0.0, 30.0, 1e4, float("inf")])
def test_decays_far_outside_what_training_reaches(raw: float) -> None:
    given = problem(1, 70, 1, 16, 16)
    extreme = (slice(None), slice(10, 60, 2))
    with torch.no_grad():
        given.a[extreme] = raw
    tolerance = FORGETTING_TOLERANCE if raw >= 30 else TOLERANCE[FP32]

    narrow = in_dtype(given, FP32)
    y, state = run_kernels(narrow)
    gradients = torch.autograd.grad(y.sum() + state.sum(), narrow.leaves())
    assert all(gradient.isfinite().all() for gradient in gradients)
    expected_y, expected_state = reference(given, None)
    assert relative_error(y, expected_y) < tolerance
    assert relative_error(state, expected_state) < tolerance

    _, da, *_ = gradients
    loss = expected_y.sum() + expected_state.sum()
    (expected_da,) = torch.autograd.grad(loss, given.a)
    # The recurrence itself gives NaN for infinite decays.
    assert relative_error(da, expected_da.nan_to_num(0.0)) < tolerance
    if abs(raw) > 1e3:
        assert not da[extreme].any()


def test_small_decay_gradients_survive_beside_large_ones() -> None:
    """Gradients stay right where a state is almost forgotten at every token."""
    given = problem(1, 70, 1, 16, 16, gated=False, state=False)
    check(given._replace(a=torch.full_like(given.a, 12.0).requires_grad_()))


def test_only_the_final_state_is_used() -> None:
    given = in_dtype(problem(1, 70, 1, 16, 16), FP32)
    _, state = run_kernels(given)
    dx, dD, dz = torch.autograd.grad(state.sum(), [given.x, given.D, given.z], allow_unused=True)
    assert dx.any()
    assert not dD.any()
    assert dz is None  # the gate comes after the state


def test_slices_of_a_wider_tensor_need_no_copy() -> None:
    heads = 3
    given = in_dtype(problem(2, 70, heads, 16, 8), FP32)
    expected, _, _ = ssd_forward(ScanArguments(*given[:4]))

    wide = torch.cat([t.detach().flatten(2) for t in (given.x, given.b, given.c)], dim=-1)
    sizes = [heads * 16, heads * 8, heads * 8]
    slices = [part.unflatten(2, (heads, -1)) for part in wide.split(sizes, dim=-1)]
    for part in slices:
        used, *_ = common.rows(part)
        assert used is part, "it was copied"
    x, b, c = slices
    y_of_slices, _, _ = ssd_forward(ScanArguments(x, given.a, b, c))
    assert torch.equal(y_of_slices, expected)

    # Heads before tokens in memory.
    x, b, c = (part.clone().transpose(1, 2).contiguous().transpose(1, 2) for part in slices)
    assert not x.is_contiguous()
    y_of_transposed, _, _ = ssd_forward(ScanArguments(x, given.a, b, c))
    assert torch.equal(y_of_transposed, expected)


def test_the_same_bits_every_time_and_however_rows_are_batched() -> None:
    given = in_dtype(problem(2, 70, 1, 16, 8), FP32)
    runs = []
    for rows in (slice(0, 2), slice(0, 2), slice(0, 1)):
        x, a, b, c = (t.detach()[rows] for t in given[:4])
        arguments = ScanArguments(x, a, b, c, given.D)
        y, final, chunk_states = ssd_forward(arguments)
        assert chunk_states is not None
        gradients = ssd_backward(torch.ones_like(y), final, chunk_states, arguments)
        runs.append([y, final, *gradients[:4]])
    for once, again, alone in zip(*runs):
        assert torch.equal(once, again)
        assert torch.equal(once[:1], alone)


def test_one_row_is_prefill_then_the_rest() -> None:
    given = in_dtype(problem(1, 150, 2, 16, 8), FP32)
    inputs = given[:4]
    border = 37
    with torch.no_grad():
        y, final = ssd(*inputs, state_BHPN=given.state)
        y_first, between = ssd(*[t[:, :border] for t in inputs], state_BHPN=given.state)
        y_rest, final_of_rest = ssd(*[t[:, border:] for t in inputs], state_BHPN=between)
    y_in_parts = torch.cat([y_first, y_rest], dim=1)
    assert relative_error(y_in_parts, y) < TOLERANCE[FP32]
    assert relative_error(final_of_rest, final) < TOLERANCE[FP32]


def test_the_tile_table_has_every_block_size() -> None:
    for capability in (75, 80, 86, 89, 90, 100, 120):
        sizes = {BF16: tiles.LARGEST_STATE, FP32: tiles.LARGEST_FP32_BLOCK}
        for dtype, largest in sizes.items():
            head_dims = (1, 16, 17, largest // 2 + 1, largest)
            for d_state, head_dim in itertools.product(range(1, largest + 1), head_dims):
                tile = tiles.tile_for(capability, dtype, d_state, head_dim)
                assert tile.chunk >= 16


FALLING = torch.tensor([[0] * 9, [0, 0, 1, 1, 0, 0, 0, 0, 0]])


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ({"b_BLHN": torch.zeros(2, 9, 2, 8)}, ("b_BLHN", "(2, 9, 2, 8)")),
        ({"a_BLH": torch.zeros(2, 9, 3, 1)}, ("a_BLH", "(2, 9, 3, 1)")),
        ({"z_BLHP": torch.zeros(2, 9, 3, 16).double()}, ("z_BLHP", "float64")),
        ({"state_BHPN": torch.zeros(2, 3, 8, 16)}, ("state_BHPN", "(2, 3, 8, 16)")),
        ({"x_BLHP": torch.zeros(2, 9, 3, 16).half()}, ("x_BLHP", "float16")),
        ({"x_BLHP": torch.zeros(2, 0, 3, 16)}, ("x_BLHP", "(2, 0, 3, 16)")),
        (dict.fromkeys(("b_BLHN", "c_BLHN"), torch.zeros(2, 9, 3, 129)), ("N", 129)),
        ({"seq_idx_BL": FALLING}, ("seq_idx_BL", "row 1", "token 4")),
        ({"n_segments": 0}, ("n_segments", 0)),
    ],
)
def test_bad_input_is_named(change: dict[str, Any], facts: tuple[object, ...]) -> None:
    x, a, b, c, *_ = in_dtype(problem(2, 9, 3, 16, 8), FP32)
    good = {"x_BLHP": x, "a_BLH": a, "b_BLHN": b, "c_BLHN": c}
    with pytest.raises(ValueError, match=naming(*facts)):
        ssd(**{**good, **change})


def test_a_state_larger_than_one_kernel_holds_is_refused() -> None:
    x, a, *_ = in_dtype(problem(2, 9, 3, 16, 8), FP32)
    large = torch.zeros(2, 9, 3, 65)
    with pytest.raises(ValueError, match=naming("N=65", "P=16")):
        ssd_forward(ScanArguments(x, a, large, large))


@pytest.fixture
def mamba_scan(monkeypatch: pytest.MonkeyPatch):
    """mamba-ssm's own kernels, in the interpreter; its package cannot be imported without its CUDA
    extension."""
    spec = importlib.util.find_spec("mamba_ssm")
    if spec is None or spec.origin is None:
        pytest.skip("mamba-ssm is not installed (a pure wheel will do: MAMBA_SKIP_CUDA_BUILD=TRUE)")
    pytest.importorskip("einops")
    from triton.runtime.autotuner import Autotuner

    package = types.ModuleType("mamba_ssm")
    package.__path__ = [str(Path(spec.origin).parent)]
    monkeypatch.setitem(sys.modules, "mamba_ssm", package)
    # The interpreter cannot time, and there is no GPU to ask.
    monkeypatch.setattr(Autotuner, "_bench", lambda self, *args, config, **kwargs: [0.0, 0.0, 0.0])
    properties = types.SimpleNamespace(multi_processor_count=1)
    monkeypatch.setattr(torch.cuda, "device", lambda *args: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
    module = importlib.import_module("mamba_ssm.ops.triton.ssd_combined")
    return module.mamba_chunk_scan_combined


def test_equals_the_kernels_of_mamba_ssm(mamba_scan) -> None:
    """Which scale x by dt and decay by exp(-dt), so x is divided by it first."""
    given = in_dtype(problem(1, 70, 1, 16, 16, state=False), FP32)
    seq_idx = documents(1, 70).int()
    dt = -log_decay(given.a)
    leaves = given[:4]
    y, _ = ssd(*leaves, seq_idx_BL=seq_idx)
    their_y = mamba_scan(
        given.x / dt.unsqueeze(-1),
        dt,
        -torch.ones(1),
        given.b,
        given.c,
        chunk_size=32,
        D=None,
        seq_idx=seq_idx,
    )
    to_y = torch.randn_like(y)
    gradients = torch.autograd.grad(y, leaves, to_y)
    their_gradients = torch.autograd.grad(their_y, leaves, to_y)
    assert relative_error(y, their_y) < TOLERANCE[FP32]
    for actual, expected in zip(gradients, their_gradients):
        assert relative_error(actual, expected) < TOLERANCE[FP32]


@pytest.mark.parametrize("gap", [0, 3])
def test_gradients_of_slices_of_one_row_are_slices_of_one_row(gap: int) -> None:
    """The same bits as those of x, B and C that have places of their own."""
    heads = 3
    length = 37
    size_of_x = heads * 16
    size_of_b = size_of_c = heads * 5
    sizes = [size_of_x, gap, size_of_b, gap, size_of_c]
    raw = torch.linspace(-1, 1, 2 * length * heads).view(2, length, heads)
    row = torch.randn(2, length, sum(sizes))
    x, _, b, _, c = row.split(sizes, dim=-1)
    slices = [part.unflatten(-1, (heads, -1)) for part in (x, b, c)]

    def gradients(parts: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        x, b, c = (part.detach().requires_grad_() for part in parts)
        y, state = ssd(x, raw, b, c)
        return torch.autograd.grad(y.square().sum() + state.sum(), (x, b, c))

    of_slices = gradients(slices)
    of_copies = gradients([part.contiguous() for part in slices])
    assert n_storages(of_slices) == 1
    assert n_storages(of_copies) == 3
    for one, other in zip(of_slices, of_copies):
        assert torch.equal(one, other)


def n_storages(tensors: tuple[torch.Tensor, ...]) -> int:
    return len({tensor.untyped_storage().data_ptr() for tensor in tensors})
