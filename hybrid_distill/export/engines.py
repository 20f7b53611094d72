"""Forms other than the student itself: a table, of which only the module that is asked for is imported.

Each module has ``obstacles(student)``, the reasons why its form cannot express a student. Those for programs other than
transformers have ``write(student, tokenizer, folder)`` too, which trusts that there were none.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from types import ModuleType

from ..model import HybridForCausalLM
from .check import PACKAGES

WRITTEN_WITH = {"falcon-h1": None, "vllm": None, "gguf": "gguf", "mlx": None, "onnx": "onnxscript"}
"""The package that writes each form, if it needs one; the extra that brings it has the form's name."""
EXTRA = {"gguf": "llama-cpp"}
"""The extra that brings the program, where it does not have the form's name."""


def writer(form: str, student: HybridForCausalLM) -> ModuleType | None:
    """Import the module of a form; None for the student itself, with or without remote code.

    Raises ValueError, with all reasons, for a student that the form cannot express, and where it needs a package that
    is not installed.
    """
    if form not in WRITTEN_WITH:
        return None
    module = importlib.import_module(f".{form.replace('-', '_')}", __package__)
    if reasons := module.obstacles(student):
        raise ValueError(
            f"this student cannot be exported as {form}: {'; '.join(reasons)}. Export it as remote-code, which takes "
            "every student, or train one that fits (docs/export.md)."
        )
    if (package := WRITTEN_WITH[form]) and find_spec(package) is None:
        raise ValueError(
            f"--form {form} is written with {package}, which is not installed; pip install 'hybrid-distill[{form}]'."
        )
    return module


def absent_program(form: str) -> str | None:
    """Say which package runs a form, and how to install it, if it is not installed here."""
    package = PACKAGES.get(form)
    if package is None or find_spec(package) is not None:
        return None
    return f"{package}, which runs it, is not installed here (pip install 'hybrid-distill[{EXTRA.get(form, form)}]')"
