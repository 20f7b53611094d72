"""`hybrid-distill evaluate-suite`: any model on lm-eval tasks."""

from __future__ import annotations

from pathlib import Path

import tyro

from ..distributed import alone_in, is_launched_main, on_main_process, own_device
from ..io import write_text
from ..kernels import use_kernels
from ..lab.suites.job import SuiteJob
from ..lab.suites.results import FILE, SuiteResult, compare, tables
from ..lab.suites.running import run_suite
from ..lab.suites.tasks import check_job
from ..teacher import load_on_own_device

TABLE = "results.md"


def command(job: tyro.conf.OmitArgPrefixes[SuiteJob]) -> None:
    """Measure any model on lm-eval tasks: the papers' suite, or tasks by name.

    Runs tasks one by one and saves each result as soon as it is finished (docs/evaluation.md). Example:
    `hybrid-distill evaluate-suite --model PATH --suite paper --teacher PATH --data-dir questions/`.
    `accelerate launch -m hybrid_distill evaluate-suite ...` splits the questions between processes.
    """
    if job.model is None:
        raise ValueError("there is nothing to evaluate; name a model with --model, or the folder of a run.")
    check_job(job)
    with alone_in(job.folder):
        result, teacher = _measure(job, job.model, "--model", job.folder), None
        if job.teacher and (Path(job.teacher).is_file() or (Path(job.teacher) / FILE).is_file()):
            teacher = SuiteResult.load(Path(job.teacher))  # already measured
        elif job.teacher:
            teacher = _measure(job, job.teacher, "--teacher", job.folder / "teacher")
        if teacher is not None:
            result.comparison = {"teacher": teacher.model, **compare(result, teacher)}
        text, table = tables(result, teacher), job.folder / TABLE
        on_main_process(lambda: (result.save(job.folder / FILE), write_text(table, f"{text}\n")))
    if is_launched_main():
        print(f"{text}\n\ntable: {table}")
        if result.failed:
            raise ValueError(f"failed parts: {len(result.failed)}; {table} says why; run the same command to retry.")


def _measure(job: SuiteJob, name: str, flag: str, out: Path) -> SuiteResult:
    """Run all tasks on the model that ``flag`` names."""
    options = {"trust_remote_code": job.trust_remote_code, "allow_bin": job.allow_bin, "flag": flag}
    model, tokenizer = load_on_own_device(name, dtype=job.dtype, **options)
    if flag == "--model":
        use_kernels(model, job.kernels, own_device())
    return run_suite(model, tokenizer, job, out)
