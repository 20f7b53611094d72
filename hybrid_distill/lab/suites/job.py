"""Options of `hybrid-distill evaluate-suite`: a model, and its teacher, on tasks of lm-evaluation-harness."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from ...limits import Count, CountOrZero, Limits, check_options, numbers
from ...teacher import TINY


@dataclass(frozen=True)
class SuiteJob:
    """A model to evaluate on tasks of lm-eval. Raises ValueError for a number out of range."""

    model: str | None = None
    """Local folder (a student's export too), hub id, or ``tiny`` for the embedded teacher."""
    suite: str = "paper"
    """``paper`` (its halves ``paper-knowledge`` and ``paper-retrieval``), ``probes``, or tasks by name, such as
    ``arc_easy,kv,kv_generate``; docs/evaluation.md lists them."""
    teacher: str | None = None
    """Teacher, for coverage: a model like ``--model``, or the results.json of one that was measured before."""
    data_dir: Path | None = None
    """Folder of the tasks' questions, instead of the hub; write-task-files writes one."""
    fewshot: CountOrZero | None = None
    """Examples in each prompt, instead of each task's own number."""
    limit: Count | None = None
    """Questions of each task, and of each part of mmlu, bbh and niah: only the first so many."""
    seed: CountOrZero = 1
    """Seed of our probes' questions, of needles, and of the choice of few-shot examples."""
    pairs: str = "16"
    """Dictionary sizes of kv, in turn for several (``10,25,50``); two_hop takes one."""
    lengths: str = "100,200,400,800"
    """Words of filler text in needle."""
    niah_lengths: str = "4096"
    """Tokens of the haystacks that RULER's generators make, where --data-dir holds none."""
    facts: Path | None = None
    """JSON lines of questions for knowledge and letters; by default the embedded facts."""
    texts: str = TINY
    """Plain text, ``tiny`` or a file, for text."""
    max_length: Annotated[int, Limits(2, whole=True)] | None = None
    """Context in tokens, instead of the one in the model's config."""
    truncate: bool = False
    """Cut prompts beyond the context on the left, and count them. By default their task has no figure."""
    batch_size: Count = 16
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Number format; by default bfloat16 on a GPU, float32 on a CPU."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Our own exports do not need it."""
    allow_bin: bool = False
    """Accept weights that are a pickle (``*.bin``)."""
    again: bool = False
    """Measure anew, replacing earlier results."""
    out: Path | None = None
    """Folder of results.json and results.md; by default one in runs/evaluation, named after the model."""

    def __post_init__(self) -> None:
        check_options(self, "--")

    @property
    def folder(self) -> Path:
        """Folder of the model's results."""
        return self.out or Path("runs/evaluation") / re.sub(r"[^\w.-]+", "-", str(self.model)).strip("-.")

    @property
    def sizes(self) -> dict[str, list[int]]:
        """Sizes of the probes, by option."""
        return {name: self.numbers(name) for name in ("pairs", "lengths")}

    def numbers(self, name: Literal["pairs", "lengths", "niah_lengths"]) -> list[int]:
        """Parse one of the options that hold several numbers."""
        return numbers(name.replace("_", "-"), getattr(self, name))
