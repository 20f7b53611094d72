"""Export a student as a checkpoint that needs torch and transformers only, and prove that it works."""

from .card import origin
from .checkpoint import export_checkpoint
from .gate import ExportError, GateReport, verify_export

__all__ = ["ExportError", "GateReport", "export_checkpoint", "origin", "verify_export"]
