"""The command line: ``hybrid-distill score | memory | run | demo | sweep | evaluate | export | ...``, and recipes."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from ..config import RunConfig, checked_config, config_of, in_recipe, on_embedded_teacher
from ..distributed import WorldError, alone_in, connect, disconnect, is_launched_main
from ..evaluation.evaluate import EvalResult
from ..export import ExportError, verify_export
from ..io import write_json
from ..lab import compare as comparison
from ..lab.analysis.carriers import HybridHeadRanking
from ..lab.analysis.formats import Formats
from ..lab.analysis.keep_heads import KeepHeads
from ..lab.analysis.maps import Maps
from ..lab.analysis.mask import Mask
from ..lab.analysis.prune_layers import PruneLayers
from ..lab.analysis.remove_heads import RemoveHeads
from ..lab.analysis.replace_layer import ReplaceLayer
from ..lab.memory.table import MemoryJob, memory_table
from ..lab.publish import publish
from ..lab.quantize import quantise
from ..lab.report import write_report
from ..lab.serve import serve
from ..lab.suites import SuiteJob, evaluate_suite, write_questions
from ..lab.sweep import SweepFailed, SweepJob, sweep
from ..lab.sweep import status as sweep_status
from ..lab.sweep_report import CONTEXT, RecommendJob, is_sweep, recommend, write_sweep_report
from ..locking import InUse
from ..pipeline import Run, finished_run, run
from ..teacher import TINY
from ..train.loop import Diverged, Interrupted
from .cache_logits import CacheJob, cache_logits
from .dry_run import describe, problems
from .export import ExportJob, export_student
from .prepare_data import PrepareJob, prepare
from .score import ScoreJob, compare_files, run_score, table

app = tyro.extras.SubcommandApp()

Experiment = (
    Annotated[RemoveHeads, tyro.conf.subcommand("remove-heads")]
    | Annotated[PruneLayers, tyro.conf.subcommand("prune-layers")]
    | Annotated[KeepHeads, tyro.conf.subcommand("keep-heads")]
    | Annotated[Formats, tyro.conf.subcommand("formats")]
    | Annotated[Mask, tyro.conf.subcommand("mask")]
    | Annotated[ReplaceLayer, tyro.conf.subcommand("replace-layer")]
    | Annotated[HybridHeadRanking, tyro.conf.subcommand("carriers")]
    | Annotated[Maps, tyro.conf.subcommand("maps")]
)


OF_DRY_RUNS = ("--dry-run", "--show-config")
"""Flags that are not repeated in the command that a dry run recommends."""


def run_recipe(
    default: RunConfig, argv: Sequence[str] | None = None, description: str | None = None, recipe: str | None = None
) -> None:
    """What a recipe's ``main`` calls: its config, overridden by flags, taken from start to report.

    ``--teacher tiny`` runs the very recipe on the embedded teacher and corpus, cut down to their size. ``recipe`` is
    the recipe's file where that is not the program.
    """
    argv = list(sys.argv[1:] if argv is None else argv)

    def go() -> None:
        base = checked_config(default, recipe or sys.argv[0])
        config = tyro.cli(
            RunConfig,
            default=on_embedded_teacher(base) if _asks_for_tiny(argv) else base,
            args=argv,
            description=description,
            prog=None if recipe is None else f"hybrid-distill run {recipe}",
        )
        if config.dry_run:
            _dry_run(config, [recipe or sys.argv[0], *argv])
            return
        out = run(config)
        if is_launched_main():
            print(f"report: {write_report(out)}")

    _exit_cleanly(go)


def _dry_run(config: RunConfig, words: Sequence[str]) -> None:
    """Print what it finds; ``words`` are the recipe and its flags. Raises ValueError for what the run would refuse."""
    if is_launched_main():
        print(describe(config, shlex.join(word for word in words if word.replace("_", "-") not in OF_DRY_RUNS)))
    if found := list(problems(config)):
        raise ValueError("the run would not start: " + " ".join(found))


def _asks_for_tiny(argv: Sequence[str]) -> bool:
    words = " ".join(argv).replace("=", " ").replace("--teacher.path", "--teacher")
    return f"--teacher {TINY} " in f"{words} "


@app.command(name="run")
def run_command(recipe: tyro.conf.Positional[Path], /) -> None:
    """Run a recipe, a Python file with config(). Flags after it override its fields; --help there lists them."""
    raise AssertionError("dispatched by main, because the recipe's own flags follow")


@app.command(name="cache-logits")
def cache_logits_command(recipe: tyro.conf.Positional[Path], /) -> None:
    """Write down what the teacher says of a recipe's rows, so that its distillation needs no teacher in memory.

    Takes the flags of the run, of which --distill.teacher-logits names the folder, and a few of its own; --help after
    the recipe lists them. Goes on where it was stopped. ``accelerate launch -m hybrid_distill cache-logits ...`` shares
    the rows between processes.
    """
    raise AssertionError("dispatched by main, because the recipe's own flags follow")


@app.command
def score(job: tyro.conf.OmitArgPrefixes[ScoreJob] = ScoreJob()) -> None:  # noqa: B008
    """Rank a model's attention heads by what their removal costs on a probe; writes scores.json and figures.

    Goes on where it was stopped. ``accelerate launch -m hybrid_distill score ...`` shares the work between processes.
    """
    if job.compare is not None:
        print(compare_files(*job.compare))
        return
    scores = run_score(job)
    if connect().is_main_process:
        print(table(scores, job.k))
        print(f"scores: {job.out}")


@app.command
def prepare_data(job: tyro.conf.OmitArgPrefixes[PrepareJob]) -> None:
    """Tokenise text once, into a folder that --data.sources takes; goes on where it was stopped."""
    print(prepare(job))


@app.command
def memory(job: tyro.conf.OmitArgPrefixes[MemoryJob] = MemoryJob()) -> None:  # noqa: B008
    """What a cache costs, by kept heads, state size and context, before anything is trained."""
    print(memory_table(job))


@app.command
def demo(
    recipe: Path = Path("recipes/hybrid_tiny.py"),
    out: Path = Path("runs/demo"),
    k: int | None = None,
    random_seeds: tuple[int, ...] = (0,),
    restoration: bool = False,
    probe_like: bool = False,
) -> None:
    """The central result in one table: teacher, 0 heads, k random heads, top k heads; writes OUT/report.md.

    Args:
        recipe: What everything but the kept heads is taken from.
        out: Where everything goes; a demo that was stopped goes on from there.
        k: Attention heads kept; by default as many as the recipe keeps.
        random_seeds: One student with k random heads for each.
        restoration: One more student, whose heads are chosen by what they restore instead of what they cost.
        probe_like: Distil each student once more with the probe's own questions mixed in, for comparison.
    """
    base = replace(config_of(_load_recipe(recipe)), out=out)
    students = comparison.entrants(
        base.plan.k if k is None else k, random_seeds=random_seeds, restoration=restoration, probe_like=probe_like
    )
    folder = comparison.compare(base, students)
    if is_launched_main():
        print(f"report: {folder / 'report.md'}")


@app.command(name="sweep")
def sweep_command(job: tyro.conf.OmitArgPrefixes[SweepJob] = SweepJob()) -> None:  # noqa: B008
    """Heads kept x selection x state size x seed: every cell a run, alignments shared, results in OUT/results.csv.

    Goes on where it was stopped. --status OUT says how far a sweep is.
    """
    if job.status is not None:
        print(sweep_status(job.status))
        return
    run_sweep(job)


def run_sweep(job: SweepJob) -> None:
    """What the command does, and the ``main`` of a recipe for sweeps; exit status 1 when cells have failed."""
    failed: SweepFailed | None = None
    try:
        sweep(job, _load_recipe(job.recipe))
    except SweepFailed as error:
        failed = error
    print(f"report: {write_sweep_report(job.out)}")
    if failed is not None:
        print(f"error: {failed}", file=sys.stderr)
        sys.exit(1)


@app.command
def evaluate(
    run_dir: tyro.conf.Positional[Path | None] = None,
    /,
    n_examples: int | None = None,
    job: tyro.conf.OmitArgPrefixes[SuiteJob] = SuiteJob(),  # noqa: B008
) -> None:
    """Measure the student of a finished run and its teacher; with --model, any model on tasks of lm-eval.

    RUN_DIR: writes RUN_DIR/evaluation.json. What was measured before is printed as it is, unless asked for --again; the
    run's report is then that of ``hybrid-distill report RUN_DIR``.

    --model: runs the tasks of --suite one by one and keeps each as it is finished (docs/evaluation.md), for example
    ``hybrid-distill evaluate --model PATH --suite paper --teacher PATH --data-dir questions/``. ``accelerate launch -m
    hybrid_distill evaluate ...`` shares the questions between processes.

    Args:
        run_dir: The folder of a run.
        n_examples: With RUN_DIR: questions for each dictionary size, instead of the run's own number; measures anew.
    """
    if run_dir is None:
        if n_examples is not None:
            raise ValueError(f"--n-examples is {n_examples}, which goes with the folder of a run; here it is --limit.")
        _evaluate_suite(job)
    elif (run_dir / "gate").is_dir():
        raise ValueError(f"{run_dir} is an export, not a run; evaluate it with --model {run_dir}.")
    elif job != SuiteJob(again=job.again):
        raise ValueError(f"{run_dir} is evaluated by its own settings; of its export, --model {run_dir / 'export'}.")
    else:
        _evaluate_run(run_dir, job.again, n_examples)


def _evaluate_run(run_dir: Path, again: bool, n_examples: int | None) -> None:
    this, path = finished_run(run_dir), run_dir / "evaluation.json"
    if n_examples is not None:
        options = replace(this.config.evaluation, n_examples=n_examples)
        this, again = Run(replace(this.config, evaluation=options)), True
    if path.exists() and not again:
        result = EvalResult.load(path)
        if is_launched_main():
            date = result.provenance.get("date", "at an unknown time")
            print(f"{path} was measured before ({date}); --again measures anew.", file=sys.stderr)
    else:
        with alone_in(run_dir):
            result = this.evaluate(this.trained_student()[0], again=again)
    if is_launched_main():
        print(json.dumps(result.to_dict(), indent=2))


def _evaluate_suite(job: SuiteJob) -> None:
    if job.write_task_files is not None:
        written, missing = write_questions(job)
        print(written)
        if missing:
            raise ValueError(f"no files of {missing}")
        return
    report = evaluate_suite(job)
    if is_launched_main():
        print(f"{report.tables}\n\ntable: {report.path}")
        if report.failed:
            raise ValueError(f"{len(report.failed)} without a figure: {report.path} says why; call again to retry.")


@app.command
def export(job: tyro.conf.OmitArgPrefixes[ExportJob]) -> None:
    """Write a student so that others can load it: remote code, a stock Falcon-H1, or safetensors (docs/export.md).

    What was written is loaded by another process, and must compute what the student does.
    """
    print(export_student(job).table())
    print(f"export: {job.out}")


@app.command(name="verify")
def verify_command(
    path: tyro.conf.Positional[Path], /, device: str = "cpu", to: Path | None = None, trust_remote_code: bool = False
) -> None:
    """Check an export, of any form, against what was recorded when it was made; prints a table.

    Exit status: 0 if every check holds, 1 if one does not, 2 if there is nothing to check.

    Args:
        path: The folder of the export.
        device: Where its model runs: cpu, cuda, cuda:1 ...
        to: A file for the checks in JSON.
        trust_remote_code: Run the folder's Python files even if they are not those of this version.
    """
    report = verify_export(path, device=device, trust_remote_code=trust_remote_code)
    print(report.table())
    if to is not None:
        write_json(to, report.to_dict())
    if not report.ok:
        sys.exit(1)


@app.command(name="quantise")
def quantise_command(
    path: tyro.conf.Positional[Path],
    out: tyro.conf.Positional[Path],
    /,
    to: Literal["int8", "fp8"] = "int8",
    tolerance: float | None = None,
) -> None:
    """Write an export again with the weights of its linear projections in 8 bits; needs torchao.

    What was written is loaded by another process, and must compute nearly what the student does.

    Args:
        path: The folder of an export in its remote-code form.
        out: A new folder.
        to: The 8-bit numbers, one scale a row: whole ones, or with an exponent.
        tolerance: How far logits may be from the student's, as a share of its largest one: 0.05 for int8, 0.3 for fp8.
    """
    print(quantise(path, out, to, tolerance))


@app.command(name="publish")
def publish_command(
    path: tyro.conf.Positional[Path], /, push_to_hub: str, public: bool = False, dry_run: bool = False
) -> None:
    """Upload an export to the Hugging Face hub, once nothing is found in it that does not belong there.

    Args:
        path: The folder of the export.
        push_to_hub: The repository, OWNER/NAME; it is made if it does not exist.
        public: Make a new repository public, not private.
        dry_run: Upload nothing: print the files, their sizes and the model card. Needs no network.
    """
    print(publish(path, push_to_hub, public=public, dry_run=dry_run))


@app.command
def analyse(experiment: tyro.conf.OmitArgPrefixes[tyro.conf.OmitSubcommandPrefixes[Experiment]]) -> None:
    """Look inside a model: an experiment, its table and its figure (docs/analysis.md); --help after it lists flags."""
    print(experiment.run())


@app.command
def report(path: tyro.conf.Positional[Path], /, context: int = CONTEXT, to: Path | None = None) -> None:
    """Write PATH/report.md anew from the results in the directory of a run, a comparison or a sweep.

    Args:
        path: The directory. A sweep need not be finished.
        context: Of a sweep: tokens at which memory is compared.
        to: Of a sweep: where report.md, its figures, report.html and results.csv go, instead of PATH.
    """
    if is_sweep(path):
        print(f"report: {write_sweep_report(path, context=context, to=to)}")
    elif to is not None:
        raise ValueError(f"--to is for the report of a sweep, and {path} has no results.csv; leave it out.")
    else:
        print(f"report: {write_report(path)}")


@app.command(name="recommend")
def recommend_command(
    path: tyro.conf.Positional[Path],
    /,
    job: tyro.conf.OmitArgPrefixes[RecommendJob],
) -> None:
    """The best student of a sweep under a budget of cache memory, measured and predicted.

    Args:
        path: The folder of a sweep, which need not be finished.
    """
    print(recommend(path, job))


@app.command(name="serve")
def serve_command(folder: tyro.conf.Positional[Path], /) -> None:
    """Answer OpenAI-style requests over HTTP with an exported student.

    Takes the flags of ``transformers serve`` after the folder, of which --help there is the list.
    """
    raise AssertionError("dispatched by main, because the server's own flags follow")


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of ``hybrid-distill``."""
    argv = list(sys.argv[1:] if argv is None else argv)
    with_others_flags = {"run": _run_recipe_file, "cache-logits": _cache_recipe_file, "serve": serve}
    if argv[:1] and argv[0] in with_others_flags and len(argv) > 1 and not argv[1].startswith("-"):
        _exit_cleanly(lambda: with_others_flags[argv[0]](Path(argv[1]), argv[2:]))
        return
    _exit_cleanly(lambda: app.cli(prog="hybrid-distill", args=argv, description=__doc__))


def _load_recipe(path: Path) -> Any:
    """The module of a recipe file. Raises ValueError for a file that is none."""
    spec = importlib.util.spec_from_file_location(path.stem, path) if path.suffix == ".py" else None
    if spec is None or spec.loader is None or not path.is_file():
        raise ValueError(f"{path} is no recipe; name a Python file with config(), such as recipes/hybrid_tiny.py.")
    sys.path.insert(0, str(path.parent.resolve()))  # recipes build on one another
    module = importlib.util.module_from_spec(spec)
    with in_recipe(str(path)):
        spec.loader.exec_module(module)
    if not callable(getattr(module, "config", None)):
        raise ValueError(f"{path} has no config(); a recipe has a function config() that returns a RunConfig.")
    return module


def _run_recipe_file(path: Path, argv: Sequence[str]) -> None:
    recipe = _load_recipe(path)
    run_recipe(config_of(recipe), argv, recipe.__doc__, recipe=str(path))


def _cache_recipe_file(path: Path, argv: Sequence[str]) -> None:
    recipe = _load_recipe(path)
    default = config_of(recipe)
    default = on_embedded_teacher(default) if _asks_for_tiny(argv) else default
    prog = f"hybrid-distill cache-logits {path}"
    job = tyro.cli(CacheJob, default=CacheJob(default), args=argv, description=CacheJob.__doc__, prog=prog)
    line = cache_logits(job)
    if is_launched_main():
        print(line)


def _exit_cleanly(action: Callable[[], Any]) -> None:
    """Errors that the user can mend end in one line and exit status 2; a saved interruption ends in status 0.

    So does the end of all work, which alone leaves the file that ``HYBRID_DISTILL_FINISHED`` names, if it names one.
    """
    logging.basicConfig(level=logging.INFO if is_launched_main() else logging.ERROR, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, _as_keyboard_interrupt)
    try:
        action()
        disconnect()
        if finished := os.environ.get("HYBRID_DISTILL_FINISHED"):
            Path(finished).touch()
    except Interrupted as stop:
        if is_launched_main():
            print(stop, file=sys.stderr)
        disconnect()
    except KeyboardInterrupt:
        print("stopped; the same command goes on from what was finished, or begins again.", file=sys.stderr)
        sys.exit(130)
    except (ValueError, OSError, ExportError, WorldError, Diverged) as error:
        if is_launched_main() or not isinstance(error, InUse):  # of which all processes of a launch are told
            print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def _as_keyboard_interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt
