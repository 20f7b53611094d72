"""Promises of every entry of `FORMS`: scan, step and mixing matrix are one function of the same inputs."""

import pytest
import torch
from test_ssd import BATCH, HEAD_DIM, HEADS, STATE, documents, some_state
from torch import Tensor

from hybrid_distill.model.recurrences import FORMS, Recurrence

LENGTH = 45
EXACT = {"rtol": 1e-10, "atol": 1e-10}


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> Recurrence:
    return FORMS[request.param]


def inputs(form: Recurrence) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x, the raw rates, the keys and C of a row, in float64."""
    x = torch.randn(BATCH, LENGTH, HEADS, HEAD_DIM, dtype=torch.float64)
    rates = () if form.n_rates == 1 else (form.n_rates,)
    raw = 2 * torch.randn(BATCH, LENGTH, HEADS, *rates, dtype=torch.float64)
    b = torch.randn(BATCH, LENGTH, HEADS, STATE, dtype=torch.float64)
    c = torch.randn(BATCH, LENGTH, HEADS, STATE, dtype=torch.float64)
    return x, raw, form.scale_b(b, raw), c


def skip_and_gate() -> tuple[Tensor, Tensor]:
    """Return D and z; silu(z) is different from 1."""
    D = torch.randn(HEADS, dtype=torch.float64)
    z = torch.randn(BATCH, LENGTH, HEADS, HEAD_DIM, dtype=torch.float64)
    return D, z


def test_a_scan_is_its_steps(form: Recurrence) -> None:
    row = inputs(form)
    D, z = skip_and_gate()
    state = some_state()
    y, last = form.scan(*row, D, z, state_BHPN=state)
    for t in range(LENGTH):
        token = (part[:, t] for part in row)
        y_t, state = form.step(*token, D, z[:, t], state)
        torch.testing.assert_close(y[:, t], y_t, **EXACT)
    torch.testing.assert_close(last, state, **EXACT)


def test_a_scan_of_documents_is_their_mixing_matrix(form: Recurrence) -> None:
    x, raw, keys, c = inputs(form)
    D, z = skip_and_gate()
    seq_idx = documents(LENGTH)
    y, _ = form.scan(x, raw, keys, c, D, z, seq_idx_BL=seq_idx)
    mixing = form.matrix(raw, keys, c, seq_idx)
    without_gate = torch.einsum("bhts,bshp->bthp", mixing, x) + D.unsqueeze(-1) * x
    torch.testing.assert_close(y, without_gate * torch.nn.functional.silu(z), **EXACT)
    is_same_document = seq_idx.unsqueeze(2) == seq_idx.unsqueeze(1)
    assert not mixing.masked_fill(is_same_document.unsqueeze(1), 0).any()


def test_padding_leaves_the_state_as_it_is(form: Recurrence) -> None:
    """At padding, a layer passes x of zero and raw rates of -inf."""
    x, raw, b, c = inputs(form)
    D, z = skip_and_gate()
    state = some_state()
    raw = torch.full_like(raw, -torch.inf)
    _, last = form.scan(0 * x, raw, form.scale_b(b, raw), c, D, z, state_BHPN=state)
    torch.testing.assert_close(last, state, **EXACT)
