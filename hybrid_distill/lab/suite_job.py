"""Options of `hybrid-distill evaluate --suite`, and its suites; imports no torch, for --help."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from ..distributed import Dtype
from ..kernels import Kernels
from ..validation import Count, CountOrZero, Limits, Seed, check_options, numbers, words

PROBES = (
    "kv",
    "kv_generate",
    "letters",
    "letters_generate",
    "knowledge",
    "knowledge_generate",
    "text",
)
KNOWLEDGE = ("arc_challenge", "arc_easy", "piqa", "winogrande", "hellaswag", "openbookqa")
RETRIEVAL = ("lambada_openai", "mmlu", "gsm8k", "swde", "bbh", "niah", "kv", "kv_generate")
SUITES = {
    "paper": (*KNOWLEDGE, *RETRIEVAL),
    "paper-knowledge": KNOWLEDGE,
    "paper-retrieval": RETRIEVAL,
    "ruler": ("niah", "ruler_vt", "ruler_cwe", "ruler_fwe"),
    "probes": PROBES,
}
RESULTS = "results.json"


@dataclass(frozen=True)
class SuiteJob:
    """Model to evaluate on lm-eval tasks. Raises ValueError for a number out of range."""

    suite: str | None = None
    """``paper`` (its halves ``paper-knowledge`` and ``paper-retrieval``), ``ruler``, ``probes``, or
    tasks of lm-eval and of this package by name, such as ``arc_easy,kv``."""
    model: str | None = None
    """Local folder (a student's export too), hub id, or ``tiny`` for the embedded teacher."""
    teacher: str | None = None
    """Teacher, measured on the same tasks to compute coverage; named as in ``--model``."""
    include_path: Path | None = None
    """Folder with lm-eval task files, used before lm-eval's own; they may run Python code."""
    fewshot: CountOrZero | None = None
    """Few-shot examples per prompt, instead of each task's own number."""
    limit: Count | None = None
    """Number of questions, from the first, per task, per part of a group, and per length."""
    seed: Seed = 1
    """Seed of our probes' questions, of needles, and of the choice of few-shot examples."""
    pairs: str = "16"
    """Dictionary sizes of kv; several alternate (``10,25,50``)."""
    ruler_lengths: str = "4096"
    """Prompt lengths of ruler and niah, in tokens; several are measured separately
    (``256,512``)."""
    facts: Path | None = None
    """JSON Lines file of questions for knowledge and letters; by default the embedded facts."""
    texts: str = "tiny"
    """Plain text for the task text: ``tiny`` or a file."""
    max_length: Annotated[int, Limits(2, whole=True)] | None = None
    """Context length in tokens, instead of the model config's."""
    truncate: bool = False
    """Truncate prompts that exceed the context, on the left, and count them. By default they are
    an error."""
    batch_size: Count = 16
    """Questions or texts per forward pass."""
    dtype: Dtype | None = None
    """Dtype of the weights; by default bfloat16 on a GPU, float32 on a CPU. ``auto``: bfloat16 also
    on a CPU that has instructions for it."""
    kernels: Kernels | None = None
    """Implementation of a student's recurrent heads; by default the run's, else ``auto``."""
    trust_remote_code: bool = False
    """Run Python code that comes with a model. Our own exports do not need it, unless it was
    changed or is of another version."""
    allow_bin: bool = False
    """Allow pickled weights (``*.bin``)."""
    again: bool = False
    """Measure again and replace earlier results."""
    cache: Path = Path("runs/evaluation/answers")
    """Folder for the answers of each model, which later evaluations reuse."""
    out: Path | None = None
    """Folder for results.json and results.md; by default one in runs/evaluation, named after the
    model."""

    def __post_init__(self) -> None:
        check_options(self, "--")

    @property
    def folder(self) -> Path:
        """Folder of the model's results."""
        name = re.sub(r"[^\w.-]+", "-", str(self.model)).strip("-.")
        return self.out or Path("runs/evaluation") / name

    @property
    def names(self) -> list[str]:
        """Names of all tasks, each once."""
        names: list[str] = []
        for word in words(self.suite or ""):
            names += SUITES.get(word, (word,))
        return list(dict.fromkeys(names))

    def numbers(self, name: Literal["pairs", "ruler_lengths"]) -> list[int]:
        """Parse an option that holds several numbers."""
        return numbers(name.replace("_", "-"), getattr(self, name), least=1)
