"""`hybrid-distill evaluate --suite`: a model, and its teacher, on tasks of lm-evaluation-harness."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ...distributed import alone_in, make_accelerator, on_main_process
from ...io import write_text
from ...teacher import TINY, load_teacher, read_teacher
from .results import FILE, SuiteResult, compare, tables
from .running import SuiteTasks, run_suite
from .suites import tasks_of
from .tasks import Questions
from .writing import write_task_files

TABLE = "results.md"
NAMED = 6


class SuiteReport(NamedTuple):
    """The tables, the file that they stand in too, and the parts of tasks that have no figure."""

    tables: str
    path: Path
    failed: tuple[str, ...]


@dataclass(frozen=True)
class SuiteJob:
    """What to evaluate on which tasks of lm-eval. Raises ValueError for a number out of range."""

    model: str | None = None
    """A local folder (a student's export too), a hub id, or ``tiny`` for the embedded teacher."""
    suite: str = "paper"
    """``paper`` (its halves ``paper-knowledge`` and ``paper-retrieval``), ``probes``, or tasks by name, such as
    ``arc_easy,kv,kv_generate``; docs/evaluation.md lists them."""
    teacher: str | None = None
    """The teacher, for coverage: a model like ``--model``, or the results.json of one that was measured before."""
    data_dir: Path | None = None
    """Where the tasks' questions are as files, instead of the hub; write-task-files writes such a folder."""
    fewshot: int | None = None
    """Examples in each prompt, instead of each task's own number."""
    limit: int | None = None
    """Only the first so many questions of each task, and of each part of mmlu, bbh and niah."""
    seed: int = 1
    """Of our probes' questions, of needles, and of the choice of few-shot examples."""
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
    max_length: int | None = None
    """Context in tokens, instead of what the model's config says."""
    truncate: bool = False
    """Cut prompts that the context cannot hold, on the left, and count them. By default their task has no figure."""
    batch_size: int = 16
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """By default bfloat16 on a GPU, float32 on a CPU."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Our own exports do not need it."""
    allow_bin: bool = False
    """Take weights that are a pickle (``*.bin``) too."""
    again: bool = False
    """Measure anew, in the place of what was measured before."""
    out: Path | None = None
    """Where results.json and results.md go; by default a folder in runs/evaluation, named after the model."""

    def __post_init__(self) -> None:
        for name, at_least in (("fewshot", 0), ("limit", 1), ("max_length", 2), ("batch_size", 1)):
            value = getattr(self, name)
            if value is not None and value < at_least:
                flag = name.replace("_", "-")
                raise ValueError(f"--{flag} is {value}; give a whole number of at least {at_least}.")

    @property
    def folder(self) -> Path:
        """Where the model's results go."""
        return self.out or Path("runs/evaluation") / re.sub(r"[^\w.-]+", "-", str(self.model)).strip("-.")


def evaluate_suite(job: SuiteJob) -> SuiteReport:
    """Do the job, or what is left of it.

    Raises ValueError for what can be refused before a model is loaded. Tasks that fail later are in the report.
    """
    _check_installed()
    if job.model is None:
        raise ValueError("there is nothing to evaluate; name a model with --model, or the folder of a run.")
    tasks, questions = tasks_of(job.suite), _questions(job)
    if missing := questions.missing(part for task in tasks for part in questions.parts(task)):
        raise ValueError(_missing(missing, job))
    with alone_in(job.folder):
        result = _measure(job, "--model", job.folder, tasks, questions)
        teacher = None if job.teacher is None else _teacher(job, tasks, questions)
        text = tables(result, teacher)
        if teacher is not None:
            result.comparison = {"teacher": teacher.model, **asdict(compare(result, teacher))}
        on_main_process(lambda: (result.save(job.folder / FILE), write_text(job.folder / TABLE, f"{text}\n")))
    return SuiteReport(text, job.folder / TABLE, tuple(result.failed))


def write_questions(job: SuiteJob, folder: Path) -> tuple[str, str]:
    """Write the questions of a suite into a folder; returns (what was written, what was not and why)."""
    _check_installed()
    tasks = tasks_of(job.suite)
    tokenizer = None if job.model is None else read_teacher(job.model, flag="--model")[1]
    written, failed = write_task_files(folder, tasks, _questions(job), tokenizer)
    return "\n".join(written) or f"{folder}: nothing new", _by_reason(failed)


def _by_reason(failed: Mapping[str, str]) -> str:
    """Names with one reason together, whatever data set it names: without a network there is one for all."""
    named: dict[str, list[str]] = {}
    for name, reason in failed.items():
        named.setdefault(re.sub(r"(?<=\s)'[^']+'", "...", reason), []).append(name)
    return "; ".join(f"{', '.join(names)}: {reason}" for reason, names in named.items())


def _check_installed() -> None:
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError("lm-eval is not installed, which asks the tasks; pip install lm-eval.")


def _questions(job: SuiteJob) -> Questions:
    return Questions(
        data_dir=job.data_dir,
        n_shots=job.fewshot,
        limit=job.limit,
        seed=job.seed,
        pairs=_numbers("--pairs", job.pairs),
        lengths=_numbers("--lengths", job.lengths),
        niah_lengths=_numbers("--niah-lengths", job.niah_lengths),
        facts=job.facts,
        texts=job.texts,
    )


def _numbers(flag: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{flag} is {text!r}; give whole numbers, such as 16 or 10,25,50.") from None


def _missing(missing: Sequence[Path], job: SuiteJob) -> str:
    """Which files a data folder lacks, and how to get them."""
    named = ", ".join(f"{path}.jsonl" for path in missing[:NAMED])
    more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
    shots = "" if job.fewshot is None else f" --fewshot {job.fewshot}"
    command = f"hybrid-distill write-task-files {job.data_dir} --suite {job.suite}{shots}"
    return (
        f"--data-dir {job.data_dir} lacks {named}{more}; where there is a network, `{command}` writes them "
        "(docs/evaluation.md says what is in them), or name with --suite the tasks whose files are there."
    )


def _measure(job: SuiteJob, flag: str, out: Path, tasks: SuiteTasks, questions: Questions) -> SuiteResult:
    """The model that is named by ``flag``, on all tasks."""
    name = str(job.model if flag == "--model" else job.teacher)
    accelerator = make_accelerator()
    device: Any = accelerator.device
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
    model.to(device)
    return run_suite(
        model,
        tokenizer,
        tasks,
        questions,
        out,
        accelerator,
        max_length=job.max_length,
        batch_size=job.batch_size,
        truncate=job.truncate,
        again=job.again,
    )


def _teacher(job: SuiteJob, tasks: SuiteTasks, questions: Questions) -> SuiteResult:
    """What was measured of the teacher before, or now, in a folder below the model's."""
    given = Path(str(job.teacher))
    if given.is_file() or (given / FILE).is_file():
        return SuiteResult.load(given)
    return _measure(job, "--teacher", job.folder / "teacher", tasks, questions)
