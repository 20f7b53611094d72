"""Writers of the forms that do not store the student itself: one module per form, imported only when needed.

Each module has ``obstacles(student)``: the reasons why its form cannot express a student. Modules for programs other
than transformers also have ``write(student, tokenizer, folder)``, which assumes that there are no obstacles.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from types import ModuleType

from ..model import HybridForCausalLM
from .check import PACKAGES

WRITTEN_WITH = {"falcon-h1": None, "vllm": None, "gguf": "gguf", "mlx": None, "onnx": "onnxscript"}
"""Package needed to write each form, if any; the extra that installs it is named after the form."""
EXTRA = {"gguf": "llama-cpp"}
"""Extra that installs the program of a form, if it is not named after the form."""


def writer(form: str, student: HybridForCausalLM) -> ModuleType | None:
    """Import the module that writes a form; return None for forms that store the student itself.

    Raises ValueError, with all reasons, for a student that the form cannot express, or for a missing package.
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
    """Return a message on how to install the program that runs a form; None if it is installed or none is needed."""
    package = PACKAGES.get(form)
    if package is None or find_spec(package) is not None:
        return None
    return f"{package}, which runs it, is not installed here (pip install 'hybrid-distill[{EXTRA.get(form, form)}]')"
