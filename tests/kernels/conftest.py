"""Kernels run in Triton's interpreter here: on any machine, one program after the other."""

from __future__ import annotations

import os
import sys

if "triton" not in sys.modules:  # it reads this when it is imported; too late, and the tests are skipped
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that a kernel forgets to write shows: ``torch.empty`` and ``empty_like`` return NaN."""
    for name in ("empty", "empty_like"):
        plain = getattr(torch, name)

        def poisoned(*args, plain=plain, **kwargs):
            tensor = plain(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        monkeypatch.setattr(torch, name, poisoned)
