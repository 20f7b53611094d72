"""Export a student as a checkpoint that others can load, in one of several forms, and prove that it works."""

from .card import origin
from .checkpoint import Form, export_checkpoint
from .gate import ExportError, GateReport, verify_export
