"""Failure of an export."""

from __future__ import annotations


class ExportError(RuntimeError):
    """Failure of an export: it cannot be written, or does not compute the same as the student."""
