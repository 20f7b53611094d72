"""Forms for programs other than transformers: a table, of which only the row that is asked for is imported.

Each row's module has ``obstacles(student)``, the reasons why the form cannot express it, and ``write(student,
tokenizer, folder)``. The program that runs what was written is asked by the gate (`check.ENGINES`).
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, Protocol, cast

from transformers import PreTrainedTokenizerBase

from ..model import HybridForCausalLM
from .check import ENGINES


class Writer(Protocol):
    """The module of a form."""

    def obstacles(self, student: HybridForCausalLM) -> list[str]: ...
    def write(self, student: HybridForCausalLM, tokenizer: PreTrainedTokenizerBase | None, folder: Path) -> None: ...


class Row(NamedTuple):
    """Module of this folder, the packages that it writes with (their extra has the form's name), and the extra that
    brings the program."""

    module: str
    packages: tuple[str, ...]
    program: str


ROWS = {
    "vllm": Row("vllm", (), "vllm"),
    "gguf": Row("gguf", ("gguf",), "llama-cpp"),
    "mlx": Row("mlx", (), "mlx"),
    "onnx": Row("onnx", ("onnxscript",), "onnx"),
}


def writer(form: str, student: HybridForCausalLM) -> Writer | None:
    """Import the module of a form; None for the forms of transformers.

    Raises ValueError, with all reasons, for a student that the form cannot express, and where it needs a package that
    is not installed.
    """
    if form not in ROWS:
        return None
    module = cast(Writer, importlib.import_module(f".{ROWS[form].module}", __package__))
    if reasons := module.obstacles(student):
        raise ValueError(
            f"this student cannot be exported as {form}: {'; '.join(reasons)}. Export it as remote-code, which takes "
            "every student, or train one that fits (docs/export.md)."
        )
    if absent := [name for name in ROWS[form].packages if find_spec(name) is None]:
        raise ValueError(
            f"--form {form} is written with {', '.join(absent)}, which is not installed; "
            f"pip install 'hybrid-distill[{form}]'."
        )
    return module


def absent_engine(form: str) -> str | None:
    """Return the package that runs a form, if it is not installed here."""
    package = ENGINES[form].package if form in ENGINES else None
    return package if package and find_spec(package) is None else None
