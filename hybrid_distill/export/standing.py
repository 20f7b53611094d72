"""Recognition of an export that stands: a run that has ended does not write and check it again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..evaluation.evaluate import EvalResult
from ..export_paths import GATE, REPORT
from ..io import Record, file_hash, read_json
from ..model import HybridForCausalLM
from ..safe_loading import foreign_code
from . import check as program
from .checkpoint import measurements
from .errors import ExportError
from .formats import FORMATS
from .gate import check_unchanged
from .record import program_files


def is_exported(
    folder: Path,
    student: HybridForCausalLM,
    results: Mapping[str, EvalResult],
    training: Sequence[Record],
) -> bool:
    """Check for an export of this student, with these results, by this version's code, that passed its gate and has
    not changed since."""
    report = folder / REPORT
    if not report.is_file() or not read_json(report).get("ok"):
        return False
    # What is cheap to compare comes before the hashes of all weights.
    for name, content in measurements(results, training).items():
        file = folder / name
        if not file.is_file() or read_json(file) != content:
            return False
    try:
        record = program.read_record(folder / GATE)
        if _code_differs(folder, record["form"]):
            return False
        check_unchanged(folder)
    except (ExportError, OSError, ValueError):
        return False
    tensors = FORMATS[record["form"]].tensors
    if tensors is None:
        return False
    hashes = {name: program.tensor_hash(tensor) for name, tensor in tensors(student).items()}
    return hashes == record["tensors"]


def _code_differs(folder: Path, export_format: str) -> bool:
    """Check whether the folder's model or check program is another version's."""
    if foreign_code(folder):
        return True
    own = {file.name: file_hash(file) for file in program_files(export_format)}
    stored = {file.name: file_hash(file) for file in (folder / GATE).glob("*.py")}
    return stored != own
