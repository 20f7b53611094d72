"""`hybrid-distill evaluate-suite`: a model, and its teacher, on tasks of lm-evaluation-harness."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import nn

from ...distributed import alone_in, connect, on_main_process
from ...io import write_text
from ...limits import COUNT, COUNT_OR_NONE, Limits, check_fields, numbers
from ...teacher import TINY, load_teacher, read_teacher
from .results import FILE, SuiteResult, compare, tables
from .suites import tasks_of

TABLE = "results.md"
NAMED = 6


class SuiteReport(NamedTuple):
    """The tables, the file that holds them, and the parts of tasks that have no figure."""

    tables: str
    path: Path
    failed: tuple[str, ...]


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
    fewshot: int | None = None
    """Examples in each prompt, instead of each task's own number."""
    limit: int | None = None
    """Questions of each task, and of each part of mmlu, bbh and niah: only the first so many."""
    seed: int = 1
    """Seed of our probes' questions, of needles, and of the choice of few-shot examples."""
    pairs: str = "16"
    """Dictionary sizes of kv, growing and two_hop; ``10,25,50`` takes them in turn."""
    lengths: str = "100,200,400,800"
    """Words of filler text in needle."""
    niah_lengths: str = "4096"
    """Tokens of the haystacks that RULER's generators make, where --data-dir holds none."""
    facts: Path | None = None
    """JSON lines of questions for knowledge and letters; by default the embedded facts."""
    texts: str = TINY
    """Plain text, ``tiny`` or a file, for text."""
    max_length: int | None = None
    """Context in tokens, instead of the one in the model's config."""
    truncate: bool = False
    """Cut prompts beyond the context on the left, and count them. By default their task has no figure."""
    batch_size: int = 16
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
        context = Limits(2, whole=True)
        check_fields(self, "--", fewshot=COUNT_OR_NONE, limit=COUNT, max_length=context, batch_size=COUNT)

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


def evaluate_suite(job: SuiteJob) -> SuiteReport:
    """Evaluate the model, or finish an evaluation that was stopped.

    Raises ValueError for what can be refused before a model is loaded. Tasks that fail later are in the report.
    """
    if job.model is None:
        raise ValueError("there is nothing to evaluate; name a model with --model, or the folder of a run.")
    check_job(job)
    with alone_in(job.folder):
        result = _measure(job, job.model, "--model", job.folder)
        teacher = None if job.teacher is None else _teacher(job, job.teacher)
        text = tables(result, teacher)
        if teacher is not None:
            result.comparison = {"teacher": teacher.model, **asdict(compare(result, teacher))}
        on_main_process(lambda: (result.save(job.folder / FILE), write_text(job.folder / TABLE, f"{text}\n")))
    return SuiteReport(text, job.folder / TABLE, tuple(result.failed))


def write_questions(job: SuiteJob, folder: Path) -> tuple[str, str]:
    """Write the questions of a suite into a folder; return (files written, tasks without and why)."""
    check_job(job)
    from .running import write_files

    tokenizer = None if job.model is None else read_teacher(job.model, flag="--model")[1]
    written, failed = write_files(folder, job, tokenizer)
    # Names with one reason together, whatever data set it names: without a network there is one for all.
    named: dict[str, list[str]] = {}
    for name, reason in failed.items():
        named.setdefault(re.sub(r"(?<=\s)'[^']+'", "...", reason), []).append(name)
    reasons = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in named.items())
    return "\n".join(written) or f"{folder}: nothing new", reasons


def check_job(job: SuiteJob) -> None:
    """Raise ValueError for unknown tasks, lists that are not numbers, missing files, and where lm-eval is missing."""
    tasks = tasks_of(job.suite)
    for name in ("pairs", "lengths", "niah_lengths"):
        job.numbers(name)
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError("lm-eval, which asks the tasks, is not installed; pip install lm-eval.")
    from .tasks import missing_files

    if not (missing := missing_files(tasks, job)):
        return
    more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
    shots = "" if job.fewshot is None else f" --fewshot {job.fewshot}"
    command = f"hybrid-distill write-task-files {job.data_dir} --suite {job.suite}{shots}"
    raise ValueError(
        f"--data-dir {job.data_dir} lacks {', '.join(missing[:NAMED])}{more}; with a network, `{command}` writes them "
        "(docs/evaluation.md lists their fields), or pass with --suite the tasks whose files are there."
    )


def _measure(job: SuiteJob, name: str, flag: str, out: Path) -> SuiteResult:
    """Run all tasks on the model that ``flag`` names."""
    from .running import run_suite

    device = torch.device(connect().device or "cpu")
    dtype = job.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    try:
        model, tokenizer = load_teacher(
            name, dtype=dtype, trust_remote_code=job.trust_remote_code, allow_bin=job.allow_bin, flag=flag
        )
    except ValueError as error:
        if "custom code" not in str(error):
            raise
        raise ValueError(
            f"{flag} {name!r} comes with Python code of its own, which is not run unasked; read it, and if you "
            "trust it, add --trust-remote-code."
        ) from error
    nn.Module.to(model, device)
    return run_suite(model, tokenizer, job, out)


def _teacher(job: SuiteJob, given: str) -> SuiteResult:
    """Read the results of a teacher that was measured before, or measure it, in a folder below the model's."""
    path = Path(given)
    if path.is_file() or (path / FILE).is_file():
        return SuiteResult.load(path)
    return _measure(job, given, "--teacher", job.folder / "teacher")
