"""`hybrid-distill quantize`: an export in 8 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import tyro

from ..lab.quantize import quantize


def command(
    path: tyro.conf.Positional[Path],
    out: tyro.conf.Positional[Path],
    /,
    to: Literal["int8", "fp8"] = "int8",
    tolerance: float | None = None,
) -> None:
    """Write an export again with the weights of its linear projections in 8 bits; needs torchao.

    Another process loads what was written, and must compute nearly what the student does.

    Args:
        path: The folder of an export in its remote-code form.
        out: A new folder.
        to: The 8-bit numbers, one scale a row: integers, or floating point.
        tolerance: Largest difference of logits from the student's, as a share of its largest one: by default 0.05 for
            int8, 0.3 for fp8.
    """
    print(quantize(path, out, to, tolerance))
