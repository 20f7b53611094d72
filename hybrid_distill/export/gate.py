"""Check an export against its record, in a separate process without this package."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError

from ..export_paths import GATE, MARK
from ..io import Record, file_hash, read_json
from ..progress import Phase
from ..safe_loading import check_checkpoint, check_no_run, foreign_code
from . import check
from .check import Check
from .errors import ExportError
from .formats import FORMATS, missing_program
from .record import program_files

PACKAGE_ROOT = Path(__file__).resolve().parents[2]
LAUNCHER_PREFIXES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "MASTER_",
    "ACCELERATE_",
    "TORCHELASTIC_",
    "FSDP_",
)
"""Prefixes of a launcher's environment variables. With these variables, the check would wait for other processes."""


@dataclass(frozen=True)
class GateReport:
    """Checks of an export, in order; empty if the gate did not run."""

    checks: tuple[Check, ...] = ()

    @property
    def ok(self) -> bool:
        """True if no check failed."""
        return all(result.ok for result in self.checks)

    def require(self, path: Path) -> GateReport:
        """Return the report. Raises ExportError, naming ``path``, when a check failed."""
        if not self.ok:
            raise ExportError(f"{path} failed the export gate:\n{self.table()}")
        return self

    def table(self) -> str:
        """Format the checks as text, one per line, with the measured differences."""
        return check.table(self.checks)

    def to_dict(self) -> Record:
        """Return the report as JSON values."""
        checks = [{**asdict(result), "ok": result.ok} for result in self.checks]
        return {"ok": self.ok, "checks": checks}


def verify_export(
    path: str | Path, *, device: str = "cpu", trust_remote_code: bool = False
) -> GateReport:
    """Check an export of any format in a separate process.

    Compares the folder with the record made at export; the reloaded model runs on ``device``. That
    process can import this package only for the format safetensors. Checking runs the folder's
    code, which must be this package's own, byte for byte, unless ``trust_remote_code``.

    Raises ExportError when the process ends without a result or a file for another program has
    changed; ValueError for a folder that is not an export, that `check_checkpoint` rejects (unless
    ``trust_remote_code``), or whose program is not installed.
    """
    folder = Path(path)
    if not (folder / MARK).is_file():
        check_no_run(folder)
        raise ValueError(f"{folder} is not an export: it has no {MARK}; pass an export's folder.")
    export_format = format_of(folder)
    if FORMATS[export_format].is_for_other_program:
        check_unchanged(folder)
        if not trust_remote_code:
            _refuse_code(_foreign_files(folder), folder)
        missing = missing_program(export_format)
        if missing is not None:
            raise ValueError(
                f"only the files of {folder} were checked: {missing}; install it, or run "
                f"{folder / GATE / 'check.py'} with a Python that has it."
            )
    elif not trust_remote_code:
        _refuse_code(foreign_code(folder), folder)
        # It refuses foreign code too, which the caller trusts; then only the gate looks for damage.
        check_checkpoint(folder)
    return run_gate(folder, device)


def _foreign_files(folder: Path) -> list[str]:
    """List the Python files of an export for another program that are not this package's."""
    own_hashes = {file_hash(file) for file in Path(__file__).parent.glob("*.py")}
    return [file.name for file in folder.glob("*.py") if file_hash(file) not in own_hashes]


def format_of(folder: Path) -> str:
    """Return the format of an export, as its record names it. Raises ValueError for an unknown one."""
    export_format = str(read_json(folder / MARK).get("export_format"))
    if export_format not in FORMATS:
        raise ValueError(
            f"{folder / MARK} names the export format {export_format!r}, expected one of {', '.join(FORMATS)}; it is "
            "damaged or another version's: export the student again."
        )
    return export_format


def _refuse_code(names: Sequence[str], folder: Path) -> None:
    if names:
        raise ValueError(
            f"{', '.join(names)} in {folder} is not the code that this version of hybrid-distill exports, and "
            "verifying runs it; export the student again, or read that code and pass --trust-remote-code."
        )


def check_unchanged(folder: Path) -> None:
    """Raise ExportError, naming tensors or files, if an export has changed since its gate."""
    if not (folder / MARK).is_file():
        raise ValueError(f"{folder} has no {MARK}; pass an export as it was written.")
    record = check.read_record(folder / GATE)
    if FORMATS[format_of(folder)].is_for_other_program:
        result = check.check_files(folder, record)
    else:
        try:
            result = check.check_tensors_on_disk(folder, record)
        except SafetensorError as error:
            raise ExportError(f"{folder} has changed since its export: {error}.") from error
    if not result.ok:
        raise ExportError(
            f"{folder} has changed since its export: {result.name} {result.measured:g} ({result.detail})."
        )


def check_not_quantized(folder: Path) -> None:
    """Raise ValueError for a quantized student, which cannot be exported again."""
    if read_json(folder / "config.json").get("quantization_config") is not None:
        raise ValueError(f"{folder} is quantized; pass the unquantized export.")


def run_gate(folder: Path, device: str, *, shown_path: Path | None = None) -> GateReport:
    """Compare a folder with its record, in a new interpreter without cached remote code.

    ``shown_path`` is the path to show the user while ``folder`` is temporary. Raises ExportError when
    the process ends without a result.
    """
    with tempfile.TemporaryDirectory(prefix="export-gate-") as name:
        scratch = Path(name)
        # Copies: an export's own gate/check.py may have changed, or be another version's.
        for file in program_files(format_of(folder)):
            shutil.copyfile(file, scratch / file.name)
        results = scratch / "checks.json"
        options = ["--device", device, "--json", results]
        with Phase(f"checking {shown_path or folder} in a separate process"):
            process = subprocess.run(
                [sys.executable, scratch / "check.py", folder.resolve(), *options],
                cwd=scratch,
                env=_environment(scratch),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
            )
        if not results.is_file():
            raise ExportError(
                f"the check of {folder} ended with status {process.returncode}:\n"
                f"{process.stdout}{process.stderr}"
            )
        checks = [Check(**fields) for fields in json.loads(results.read_text())]
        return GateReport(tuple(checks))


def _environment(scratch: Path) -> dict[str, str]:
    """Return the environment variables of the check: this process's, without its launcher's."""
    environment = {}
    for name, value in os.environ.items():
        if not name.startswith(LAUNCHER_PREFIXES):
            environment[name] = value
    # The format safetensors needs this package; for all others, check.py blocks its import.
    search_path = str(PACKAGE_ROOT)
    if os.environ.get("PYTHONPATH"):
        search_path += os.pathsep + os.environ["PYTHONPATH"]
    environment["PYTHONPATH"] = search_path
    environment["HF_MODULES_CACHE"] = str(scratch / "modules")
    # An export must be complete: no missing file may come from the hub.
    environment["HF_HUB_OFFLINE"] = "1"
    # Another number of threads sums in another order.
    environment["OMP_NUM_THREADS"] = str(torch.get_num_threads())
    return environment
