"""Checkpoints that may be damaged or hostile: looked at before anything in them is loaded (docs/security.md)."""

from .checkpoint import VOCABULARIES, check_checkpoint, check_in_full, check_no_run, is_student, load_student
from .code import code_differs, review_code
from .files import is_bin_only, read_json

__all__ = [
    "VOCABULARIES",
    "check_checkpoint",
    "check_in_full",
    "check_no_run",
    "code_differs",
    "is_bin_only",
    "is_student",
    "load_student",
    "read_json",
    "review_code",
]
