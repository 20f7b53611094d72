"""Turn pretrained Transformers into Transformer-SSM hybrids that keep attention only where it is needed.

Public names load on first use (docs/api.md), so ``import hybrid_distill`` itself loads no third-party library. It
changes nothing in the process either: what a program needs is set by `hybrid_distill.cli`.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from .config import RunConfig
    from .evaluation.evaluate import evaluate
    from .export import export_checkpoint
    from .model import HybridConfig, HybridForCausalLM
    from .pipeline.run import run
    from .plan import HeadPlan
    from .probes.kv_retrieval import KVRetrieval
    from .scoring import HeadScores, attribute_heads, score_heads
    from .student.build import build_student
    from .teacher import load_teacher

    __version__: str

__all__ = [
    "HeadPlan",
    "HeadScores",
    "HybridConfig",
    "HybridForCausalLM",
    "KVRetrieval",
    "RunConfig",
    "__version__",
    "attribute_heads",
    "build_student",
    "evaluate",
    "export_checkpoint",
    "load_student",
    "load_teacher",
    "run",
    "score_heads",
]
_HOMES = {
    "HeadPlan": "plan",
    "HeadScores": "scoring",
    "HybridConfig": "model",
    "HybridForCausalLM": "model",
    "KVRetrieval": "probes.kv_retrieval",
    "RunConfig": "config",
    "attribute_heads": "scoring",
    "build_student": "student.build",
    "evaluate": "evaluation.evaluate",
    "export_checkpoint": "export",
    "load_teacher": "teacher",
    "run": "pipeline.run",
    "score_heads": "scoring",
}


def load_student(path: str | Path) -> tuple[HybridForCausalLM, PreTrainedTokenizerBase | None]:
    """Load a student and its tokenizer from an export or from the folder of a finished run.

    Never runs code from the folder. Raises ValueError if the folder is damaged or holds no student.
    """
    from . import safe_loading
    from .pipeline import finished_run, is_run, trained_student

    folder = Path(path)
    if is_run(folder):
        inputs = finished_run(folder)
        student, _ = trained_student(inputs)
        return student, inputs.tokenizer
    return safe_loading.load_student(folder)


def __getattr__(name: str) -> object:
    if name == "__version__":
        from .provenance import installed

        # Unknown in a clone without an install.
        value = installed(["hybrid-distill"]).get("hybrid-distill", "unknown")
    elif name in _HOMES:
        from .provenance import check_supported

        check_supported()
        value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
