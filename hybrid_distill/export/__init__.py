"""Exports: checkpoints of a student in formats that other software loads, and the gate that verifies them."""

from .checkpoint import export_checkpoint
from .errors import ExportError
from .existing import is_exported
from .formats import ExportFormat
from .gate import GateReport, verify_export
from .license import license_and_name
