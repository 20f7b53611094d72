"""Turn pretrained Transformers into Transformer-SSM hybrids that keep attention only where it is needed.

The public names below are imported when they are first used (docs/api.md); ``import hybrid_distill`` loads no library.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from .config import RunConfig
    from .evaluation.evaluate import evaluate
    from .export import export_checkpoint
    from .model import HybridConfig, HybridForCausalLM
    from .pipeline import run
    from .plan import HeadPlan
    from .probes.kv_retrieval import KVRetrieval
    from .scoring import HeadScores, score_heads
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
    "build_student": "student.build",
    "evaluate": "evaluation.evaluate",
    "export_checkpoint": "export",
    "load_teacher": "teacher",
    "run": "pipeline",
    "score_heads": "scoring",
}


def _is_busy() -> bool:
    """Return whether other processes kept a core busy for the last minute and still do (Linux: proc(5), loadavg)."""
    try:
        last_minute, _, _, running, _ = Path("/proc/loadavg").read_text().split()
    except (OSError, ValueError):
        return False
    return float(last_minute) > 0.7 and int(running.split("/")[0]) > 1


# torch's OpenMP threads (libgomp) spin at every barrier until the last one arrives. Beside another busy process that
# one waits for a core, and training is ten times slower than on one thread: sleeping threads are the fastest there,
# and threads that spin shortly on an idle machine (benchmarks/threads.py). libgomp reads this once, in `import torch`.
if "OMP_WAIT_POLICY" not in os.environ and "GOMP_SPINCOUNT" not in os.environ:
    os.environ.update({"OMP_WAIT_POLICY": "passive"} if _is_busy() else {"GOMP_SPINCOUNT": "1000"})


def load_student(path: str | Path) -> tuple[HybridForCausalLM, PreTrainedTokenizerBase | None]:
    """Load an export, or the trained student of a finished run's folder, and its tokenizer.

    Code in the folder is never run. Raises ValueError for a folder without a student, and for a damaged one.
    """
    from . import guard
    from .pipeline import finished_run
    from .pipeline.folder import is_run

    folder = Path(path)
    if is_run(folder / "config.json"):
        this = finished_run(folder)
        return this.trained_student()[0], this.tokenizer
    return guard.load_student(folder)


def __getattr__(name: str) -> object:
    if name == "__version__":
        from .provenance import installed

        value = installed(["hybrid-distill"]).get("hybrid-distill", "unknown")  # for a clone that was not installed
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
