"""Exports: checkpoints of a student in forms that other software loads, and the gate that verifies them."""

from .card import origin
from .checkpoint import Form, export_checkpoint
from .gate import ExportError, GateReport, verify_export
