"""Decide whether a folder already holds a valid export of a student, which then is not written again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..evaluation.evaluate import EvalResult
from ..export_paths import GATE, REPORT
from ..io import Record, file_hash, read_json
from ..model import HybridForCausalLM
from ..safe_loading import foreign_code
from .check import read_record, tensor_hash
from .checkpoint import measurements
from .errors import ExportError
from .formats import FORMATS
from .gate import check_unchanged
from .record import program_files


def is_exported(
    folder: Path,
    student: HybridForCausalLM,
    export_format: str,
    results: Mapping[str, EvalResult],
    training: Sequence[Record],
) -> bool:
    """Check for an export of this student in this format, with these results, by this version's code.

    The export has passed its gate and has not changed since. Always False for formats of other programs.
    """
    tensors = FORMATS[export_format].tensors
    # Another program's files do not show which student is in them: such an export is always written again.
    if tensors is None:
        return False
    if not _has_passed(folder):
        return False
    # Cheap comparisons first: the hashes below read all weights.
    if not _has_measurements(folder, measurements(results, training)):
        return False
    try:
        record = read_record(folder / GATE)
        if record["export_format"] != export_format or _has_foreign_code(folder, export_format):
            return False
        check_unchanged(folder)
    except (ExportError, OSError, ValueError):
        return False
    hashes = {name: tensor_hash(tensor) for name, tensor in tensors(student).items()}
    return hashes == record["tensors"]


def _has_passed(folder: Path) -> bool:
    """Check for a gate report without a failed check."""
    report = folder / REPORT
    return report.is_file() and bool(read_json(report).get("ok"))


def _has_measurements(folder: Path, expected: Mapping[str, Record]) -> bool:
    """Check that a folder has the ``expected`` files of results, by name, with the same contents."""
    for name, content in expected.items():
        file = folder / name
        if not file.is_file() or read_json(file) != content:
            return False
    return True


def _has_foreign_code(folder: Path, export_format: str) -> bool:
    """Check whether the folder's model code or check program is another version's."""
    if foreign_code(folder):
        return True
    own = {file.name: file_hash(file) for file in program_files(export_format)}
    stored = {file.name: file_hash(file) for file in (folder / GATE).glob("*.py")}
    return stored != own
