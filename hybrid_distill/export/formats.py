"""Table of the export formats: how each is written, which students it can express, what it needs.

Three formats are for transformers: ``remote-code``, the student with its Python files;
``safetensors``, the student for this package to reload; ``falcon-h1``, the same function as a stock
`FalconH1ForCausalLM`. The others are for other programs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, Protocol

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..model import HybridForCausalLM
from . import falcon_h1, gguf, mlx, native, onnx, vllm
from .check import PACKAGES

ExportFormat = Literal["remote-code", "falcon-h1", "safetensors", "vllm", "gguf", "mlx", "onnx"]


class Write(Protocol):
    """Writer of a student's files in one format, for students without obstacles."""

    def __call__(
        self,
        student: HybridForCausalLM,
        tokenizer: PreTrainedTokenizerBase | None,
        folder: Path,
        max_shard_size: int | str,
    ) -> None: ...


def no_obstacles(student: HybridForCausalLM) -> list[str]:
    """Return no reasons: the format can express every student."""
    return []


@dataclass(frozen=True)
class Format:
    """Export format: how it is written, and what that and running it need."""

    write: Write
    obstacles: Callable[[HybridForCausalLM], list[str]] = no_obstacles
    """Function that lists the reasons why the format cannot express a student."""
    tensors: Callable[[HybridForCausalLM], dict[str, Tensor]] | None = None
    """Function that returns the stored tensors, tied ones included; None if another program reads the format."""
    written_with: str | None = None
    """Package needed to write it; the extra that installs it is named after the format."""
    holds_windows: bool = False
    """True if replaced heads may attend to a window."""
    in_one_file: bool = False
    """True if the weights are always in one file, however large."""
    extra: str | None = None
    """Extra that installs the program that runs it, if it is not named after the format."""
    library: str | None = None
    """Library that the hub shows code for, on the model card. The hub knows GGUF and ONNX by their files, as formats
    and not as libraries, and this package not at all."""

    @property
    def is_for_other_program(self) -> bool:
        """True if another program runs the export, not transformers or this package."""
        return self.tensors is None


FORMATS = {
    "remote-code": Format(
        native.write_with_code,
        tensors=native.tensors,
        holds_windows=True,
        library="transformers",
    ),
    "safetensors": Format(native.write, tensors=native.tensors, holds_windows=True),
    "falcon-h1": Format(
        falcon_h1.write,
        falcon_h1.obstacles,
        falcon_h1.tensors,
        library="transformers",
    ),
    # Transformers reads it too.
    "vllm": Format(vllm.write, vllm.obstacles, library="transformers"),
    "gguf": Format(
        gguf.write, gguf.obstacles, written_with="gguf", in_one_file=True, extra="llama-cpp"
    ),
    "mlx": Format(mlx.write, mlx.obstacles, library="mlx"),
    "onnx": Format(
        onnx.write,
        onnx.obstacles,
        written_with="onnxscript",
        holds_windows=True,
        in_one_file=True,
    ),
}


def check_expressible(student: HybridForCausalLM, export_format: str) -> None:
    """Raise ValueError if a format cannot express a student, or if its writer is not installed."""
    if student.config.window and not FORMATS[export_format].holds_windows:
        raise ValueError(
            f"this student has a window of {student.config.window} tokens beside its recurrence, "
            f"which {export_format} cannot hold; export it as remote-code."
        )
    reasons = FORMATS[export_format].obstacles(student)
    if reasons:
        raise ValueError(
            f"this student cannot be exported as {export_format}: {'; '.join(reasons)}. Export it "
            "as remote-code, which takes every student, or train one that fits (docs/export.md)."
        )
    package = FORMATS[export_format].written_with
    if package is not None and find_spec(package) is None:
        raise ValueError(
            f"--format {export_format} is written with {package}, which is not installed; pip "
            f"install 'hybrid-distill[{export_format}]'."
        )


def missing_program(export_format: str) -> str | None:
    """Return how to install the program that runs a format; None if nothing is missing."""
    package = PACKAGES.get(export_format)
    if package is None or find_spec(package) is not None:
        return None
    extra = FORMATS[export_format].extra or export_format
    return (
        f"{package}, which runs it, is not installed here (pip install 'hybrid-distill[{extra}]')"
    )
