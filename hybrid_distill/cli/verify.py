"""`hybrid-distill verify`: check of an export against the record made with it."""

from __future__ import annotations

import sys
from pathlib import Path

import tyro

from ..io import write_json
from ..validation import first_line


def command(
    path: tyro.conf.Positional[Path],
    /,
    device: str = "cpu",
    to: Path | None = None,
    trust_remote_code: bool = False,
) -> None:
    """Check an export of any format against the record made with it; prints a table.

    Exit status: 0 if every check passes, 1 if one fails, 2 if there is nothing to check.

    Args:
        path: The folder of the export.
        device: The device to run the model on: cpu, cuda, cuda:1 ...
        to: A JSON file for the results.
        trust_remote_code: Run Python code that comes with a model. Our own exports do not need it, unless it was
            changed or is of another version.
    """
    import torch

    from ..export import verify_export

    try:
        torch.empty(0, device=torch.device(device))
    except (RuntimeError, AssertionError) as error:
        reason = first_line(error)
        raise ValueError(
            f"--device is {device!r}, which is not usable ({reason}); pass cpu or cuda."
        ) from error
    report = verify_export(path, device=device, trust_remote_code=trust_remote_code)
    print(report.table())
    if to is not None:
        write_json(to, report.to_dict())
    if not report.ok:
        sys.exit(1)
