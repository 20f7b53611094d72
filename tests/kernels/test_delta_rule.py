"""The gated delta rule on flash-linear-attention's kernels: tried like ours before its first use."""

from __future__ import annotations

import importlib.util
import logging
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from messages import has_facts
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")
if importlib.util.find_spec("fla") is None:
    pytest.skip("flash-linear-attention is not installed", allow_module_level=True)

from children import plant
from choices import choice_on_gpu, forget_choices
from hybrid_kernels import common, definitions, delta_rule, known_bad, selftest
from interpreted_fla import interpret, spoil_gradients

from hybrid_distill.model import gated_delta, kernel_choice
from hybrid_distill.model.gated_delta import delta_scan
from hybrid_distill.model.kernel_choice import DELTA_RULE

pytestmark = pytest.mark.skipif(
    not common.INTERPRETED, reason="triton was imported before TRITON_INTERPRET=1 was set"
)

CPU = torch.device("cpu")
FP16 = torch.float16
FP32 = torch.float32
# Head dim and state size.
SIZES = (16, 4)
PLANTED = {
    "nothing": "pass",
    "wrong gradients": "interpreted_fla.spoil_gradients()",
    # At the first call, when the child has reported that its device works.
    "crash": "import hybrid_kernels.delta_rule as r; r.delta_rule = lambda *_, **__: os.abort()",
}
"""Faults of the package in a child process."""
CHILD = """
import os, sys
if "hybrid_kernels.selftest" in sys.orig_argv:
    sys.path.insert(0, {folder!r})
    import interpreted_fla
    interpreted_fla.interpret()
    {planted}
"""


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the kernels in the interpreter, on less than on a GPU; nothing is known of them."""
    interpret(monkeypatch.setattr)
    monkeypatch.setattr(definitions, "LENGTH", 70)
    monkeypatch.setattr(definitions, "N_HEADS", 2)
    monkeypatch.setattr(selftest, "_mistakes", {})
    definitions.mistake_of.cache_clear()
    forget_choices(monkeypatch)


@pytest.fixture
def tried_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try kernels in this process, where mistakes are planted."""
    monkeypatch.setattr(selftest, "check_kernel", definitions.mistake_of)


@pytest.fixture
def as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose as for a tensor on a GPU."""

    def choose(impl: str, kernel: str, x: Tensor, *sizes: int, **options: bool) -> str:
        return choice_on_gpu(kernel, x.dtype, sizes, **options)

    monkeypatch.setattr(gated_delta, "choose_implementation", choose)


def mistake(dtype: torch.dtype = FP32, *, training: bool = True, packed: bool = True) -> str | None:
    return definitions.mistake_of(DELTA_RULE, CPU, dtype, *SIZES, training=training, packed=packed)


def draw(dtype: torch.dtype) -> list[Tensor]:
    """Draw x, log a, write gates, keys and C of two rows."""
    head_dim, d_state = SIZES
    tokens = (2, 70, 3)
    x = torch.randn(*tokens, head_dim).to(dtype)
    keys = F.normalize(torch.randn(*tokens, d_state), dim=-1).to(dtype)
    c = torch.randn(*tokens, d_state).to(dtype)
    log_a = -torch.rand(tokens)
    write = torch.rand(tokens)
    return [x, log_a, write, keys, c]


@pytest.mark.parametrize("training, packed", [(True, True), (False, False)])
@pytest.mark.parametrize("dtype", [FP32, FP16])
def test_the_right_kernel_passes(dtype: torch.dtype, training: bool, packed: bool) -> None:
    assert mistake(dtype, training=training, packed=packed) is None


def test_wrong_gradients_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil_gradients(monkeypatch.setattr)
    assert has_facts(str(mistake()), "gradient of k")
    definitions.mistake_of.cache_clear()
    assert mistake(training=False) is None


def test_documents_that_leak_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    # Nothing decays at a document's first token.
    monkeypatch.setattr(delta_rule, "MIN_LOG_DECAY", -0.01)
    assert has_facts(str(mistake(training=False)), "output")


def test_what_another_version_raises_is_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_rule, "MODULE", "fla.ops.no_such_module")
    assert has_facts(str(mistake()), ModuleNotFoundError.__name__)


def test_values_and_gradients_are_those_of_torch() -> None:
    """Packed documents after a state; float32, which the interpreter multiplies as it is."""
    inputs = [t.requires_grad_() for t in draw(FP32)]
    state = torch.randn(2, 3, *SIZES, requires_grad=True)
    seq_idx = (torch.arange(70) > 40).long().expand(2, -1)

    def with_gradients(y: Tensor, last: Tensor) -> list[Tensor]:
        loss = y.sin().sum() + last.cos().sum()
        return [y, last, *torch.autograd.grad(loss, [*inputs, state])]

    options: dict[str, Any] = {"state_BHPN": state, "seq_idx_BL": seq_idx}
    on_kernel = with_gradients(*delta_rule.delta_rule(*inputs, **options))
    on_torch = with_gradients(*delta_scan(*inputs, **options, impl="torch"))
    for actual, expected in zip(on_kernel, on_torch, strict=True):
        assert (actual - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.usefixtures("tried_here", "as_on_gpu")
def test_auto_takes_the_right_kernel_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    inputs = draw(FP16)
    y, last = delta_scan(*inputs)
    expected, expected_last = delta_rule.delta_rule(*inputs)
    assert torch.equal(y, expected)
    assert torch.equal(last, expected_last)
    assert not caplog.records


@pytest.mark.usefixtures("tried_here", "as_on_gpu")
@pytest.mark.parametrize("case", ["wrong", "not installed", "float32"])
def test_torch_takes_over_with_one_warning(
    case: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    dtype = FP16
    if case == "wrong":
        spoil_gradients(monkeypatch.setattr)
    elif case == "not installed":
        monkeypatch.setattr(delta_rule, "PACKAGE", "no_such_package")
    else:
        # The kernel refuses it.
        dtype = FP32
    inputs = draw(dtype)
    with caplog.at_level(logging.WARNING):
        ours = [delta_scan(*inputs) for _ in range(2)]
    expected, expected_last = delta_scan(*inputs, impl="torch")
    for y, last in ours:
        assert torch.equal(y, expected)
        assert torch.equal(last, expected_last)
    # The recurrence that follows torch's products asks for its own kernel, which a CPU never gets.
    (record,) = caplog.records
    assert DELTA_RULE in record.message
    assert "\n" not in record.message


@pytest.mark.launched
@pytest.mark.usefixtures("as_on_gpu")
@pytest.mark.parametrize("planted", PLANTED)
def test_it_is_tried_in_a_child_process(
    planted: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    code = CHILD.format(folder=str(Path(__file__).parent), planted=PLANTED[planted])
    plant(code, tmp_path, monkeypatch)
    inputs = draw(FP16)
    on_torch, _ = delta_scan(*inputs, impl="torch")
    on_kernel, _ = delta_rule.delta_rule(*inputs)
    assert not torch.equal(on_kernel, on_torch), "no test could tell which of them ran"

    is_right = planted == "nothing"
    expected = on_kernel if is_right else on_torch
    for _ in range(2):
        y, _ = delta_scan(*inputs)
        assert torch.equal(y, expected)
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == (0 if is_right else 1)


@pytest.mark.parametrize(
    ("triton", "capability", "hip", "is_refused"),
    [
        ("3.6.0", (9, 0), None, True),
        ("3.4.0", (9, 0), None, True),
        ("3.7.0+git1234", (9, 0), None, True),
        ("3.7.1", (9, 0), None, False),
        ("3.10.0", (9, 0), None, False),
        ("3.3.1", (9, 0), None, False),
        ("3.6.0", (8, 0), None, False),
        ("3.6.0", (10, 0), None, False),
        ("3.6.0", (9, 0), "6.4", False),  # an MI200
    ],
)
def test_what_the_package_refuses_is_not_tried(
    triton: str,
    capability: tuple[int, int],
    hip: str | None,
    is_refused: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "triton", types.SimpleNamespace(__version__=triton))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name != "tilelang" or None)
    monkeypatch.setattr(selftest, "check_kernel", lambda *_, **__: None)
    monkeypatch.setattr(known_bad, "known_bad", lambda *_: None)
    monkeypatch.setattr(kernel_choice, "_import_kernels", lambda impl: None)

    reason = delta_rule.unusable()
    assert (reason is not None) == is_refused
    if reason is not None:
        assert triton in reason
        assert "\n" not in reason
    # Its forward is right.
    assert delta_rule.unusable(training=False) is None
    for training in (True, False):
        options = {"training": training, "packed": True}
        chosen = kernel_choice.describe_choice(
            "auto", DELTA_RULE, torch.device("cuda"), torch.bfloat16, *SIZES, **options
        )
        assert (chosen == "triton") == (not is_refused or not training)


def test_its_backward_on_tilelang_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", types.SimpleNamespace(__version__="3.6.0"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name != "tilelang" or None)
    assert delta_rule.unusable() is not None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    assert delta_rule.unusable() is None


def test_a_verdict_belongs_to_a_version_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = selftest._versions.__wrapped__
    before = versions()
    monkeypatch.setattr(selftest.importlib.metadata, "version", lambda name: "999")
    assert versions() != before


def test_its_programs_have_the_time_to_compile() -> None:
    assert selftest.TIME_LIMITS[DELTA_RULE] > selftest.TIME_LIMIT
    assert set(selftest.TIME_LIMITS) <= set(definitions.TESTS)
