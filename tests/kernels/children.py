"""Child processes in which kernels are tried: what runs in them before anything else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def plant(code: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run ``code`` when a child's interpreter starts; keep its verdicts in a folder of their own.

    ``HYBRID_KERNELS_CACHE`` is where processes of a machine share verdicts."""
    (folder / "sitecustomize.py").write_text(code)
    others = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{others}")
    monkeypatch.setenv("HYBRID_KERNELS_CACHE", str(folder / "verdicts"))
