"""Train and measure students of SmolLM2-135M-Instruct at equal tokens: tables and figure of docs/real_models.md.

    python benchmarks/smollm2_students.py --teacher smollm2 --text text --out runs/smollm2    # resumes

``--teacher`` is the folder that `hybrid-distill import-gguf` made, ``--text`` that of benchmarks/debian_text.py. All
heads are aligned once, on 2.7 million tokens. Each student begins with those heads and is distilled on the same 0.3
million tokens from the teacher's stored logits. Every process has one thread, two run at a time: some three hours of
two cores with bfloat16 instructions.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from records import ROOT, about, environment, write
from transformers import PreTrainedModel

from hybrid_distill.assets import atlas_path
from hybrid_distill.evaluation.evaluate import model_cache_bytes
from hybrid_distill.evaluation.measure import EvalInputs, measure
from hybrid_distill.lab.reporting.figures import LOOKS, PanelRow, draw_lines
from hybrid_distill.lab.suite import load_tasks, run_suite
from hybrid_distill.lab.suite_job import SuiteJob
from hybrid_distill.lab.suite_results import summary
from hybrid_distill.pipeline import RunInputs, finished_run, trained_student
from hybrid_distill.pipeline.run import build
from hybrid_distill.plan import HeadId
from hybrid_distill.probes.answering import answer_choices
from hybrid_distill.probes.kv_retrieval import KVRetrieval
from hybrid_distill.probes.prompt_formats import with_prompt_format
from hybrid_distill.student.dtypes import cast_weights
from hybrid_distill.teacher import ablate_heads

RESULTS = ROOT / "benchmarks" / "results" / "smollm2_students.json"
FIGURE = ROOT / "docs" / "atlas" / "smollm2-students.png"
RECIPE = str(ROOT / "recipes" / "hybrid_smollm2_135m.py")
ALIGN_STEPS = 1320
DISTILL_STEPS = 147
# Of a batch: rows, and the tokens of each.
ROWS = 4
ROW = 512
TEACHER = "teacher"
STUDENTS = {
    "top 14": "--plan.unit head --plan.k 14",
    "0 heads": "--plan.selection none --plan.k 0",
    "top 27": "--plan.unit head --plan.k 27",
    "8 whole layers": "--plan.selection layers --plan.layers 2 6 10 14 18 22 25 29",
    "14 random, draw 1": "--plan.selection random --plan.unit head --plan.k 14 --plan.seed 1",
    "14 random, draw 2": "--plan.selection random --plan.unit head --plan.k 14 --plan.seed 2",
    "14 random, draw 3": "--plan.selection random --plan.unit head --plan.k 14 --plan.seed 3",
}
"""Flags that decide which heads a student keeps."""
SIZES = (4, 8)
EXAMPLES = 64
TEXTS = 16
RULER = "niah_single_1,niah_multikey_2,niah_multikey_3,ruler_vt,ruler_fwe"
"""Tasks that fit into so many tokens; some questions of ruler_cwe do not."""
RULER_LENGTH = 512
RULER_EXAMPLES = 32


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--teacher", required=True, help="folder of SmolLM2-135M-Instruct")
    parser.add_argument(
        "--text", type=Path, required=True, help="folder of train.jsonl and held_out.jsonl"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/smollm2"), help="folder of the runs")
    parser.add_argument("--measure", choices=[TEACHER, *STUDENTS], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        torch.set_num_threads(1)
        return measure_one(options.out, options.measure)
    train_shared(options)

    def measure_in_a_process(name: str) -> None:
        command([*sys.argv, "--measure", name])

    # Lists: an error of a thread is raised when its result is taken.
    with ThreadPoolExecutor(2) as two:
        list(two.map(partial(train_student, options), STUDENTS))
        list(two.map(measure_in_a_process, [*STUDENTS, TEACHER]))
    report(options.out)


def command(arguments: list[str], processes: int = 0) -> None:
    """Run a Python program on one thread, or on so many connected processes of one thread each."""
    launcher: list[str] = []
    if processes:
        launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(processes)]
    alone = environment(ROOT, OMP_WAIT_POLICY="passive", ACCELERATE_USE_CPU="true")
    subprocess.run([sys.executable, *launcher, *arguments], check=True, env=alone)


def common(options: argparse.Namespace) -> list[str]:
    """Return the flags of every run."""
    flags = ["--teacher", options.teacher]
    flags += ["--data.sources", str(options.text / "train.jsonl")]
    flags += ["--data.no-chat", "--data.seq-len", str(ROW)]
    flags += ["--student.d-state", "16"]
    flags += ["--scoring.prompt-format", "plain"]
    # The run's own evaluation is kept short: `measure_one` replaces it.
    flags += ["--evaluation.n-pairs", "4", "--evaluation.n-examples", "1"]
    flags += ["--evaluation.n-texts", "0", "--no-export"]
    return flags


def distillation(options: argparse.Namespace) -> list[str]:
    """Return the flags of a student's run."""
    flags = [*common(options), "--stages", "distill"]
    flags += ["--distill.batch-size", str(ROWS), "--distill.steps", str(DISTILL_STEPS)]
    flags += ["--distill.teacher-logits", str(options.out / "logits")]
    return flags


def train_shared(options: argparse.Namespace) -> None:
    """Align all heads and store the teacher's logits, on two processes."""
    no_heads = STUDENTS["0 heads"].split()
    if not (aligned(options.out) / "manifest.json").exists():
        words = [RECIPE, *common(options), *no_heads]
        words += ["--stages", "align", "--align.target", "head"]
        words += ["--align.batch-size", str(ROWS), "--align.micro-batch-size", "2"]
        words += ["--align.steps", str(ALIGN_STEPS)]
        words += ["--out", str(options.out / "aligned")]
        command(words, processes=2)

    words = ["-m", "hybrid_distill", "cache-logits", "smollm2_135m"]
    words += [*distillation(options), *no_heads]
    words += ["--out", str(options.out / "unused")]
    command(words, processes=2)


def aligned(out: Path) -> Path:
    return out / "aligned" / "stages" / "1-align"


def folder(out: Path, name: str) -> Path:
    return out / "-".join(name.replace(",", "").split())


def train_student(options: argparse.Namespace, name: str) -> None:
    if (folder(options.out, name) / "stages" / "1-distill" / "manifest.json").exists():
        return
    words = [RECIPE, *distillation(options)]
    words += ["--scoring.file", str(atlas_path("smollm2-135m-instruct"))]
    words += STUDENTS[name].split()
    words += ["--student.aligned", str(aligned(options.out))]
    words += ["--out", str(folder(options.out, name))]
    command(words)


def measure_one(out: Path, name: str) -> None:
    """Measure a student after each of its stages, or the teacher, and write measured.json."""
    path = folder(out, name) / "measured.json"
    if path.exists():
        return
    # Any student's run has the teacher, the questions and the texts.
    any_student = next(iter(STUDENTS))
    run = finished_run(folder(out, name if name in STUDENTS else any_student))
    everything = asked(run)
    retrieval = replace(everything, questions=[], texts=[])
    record: dict[str, Any] = {}
    if name == TEACHER:
        model = run.teacher
    else:
        model, plan = trained_student(run)
        record["heads"] = len(plan.kept)
        record["aligned"] = by_choice(build(run, plan), retrieval)
        recurrent: list[HeadId] = []
        for layer, mixer in enumerate(model.mixers()):
            recurrent += [HeadId(layer, head) for head in mixer.replaced]
        few_texts = replace(everything, examples={}, questions=[], texts=everything.texts[:4])
        with ablate_heads(model, recurrent):
            figures = measure(model, few_texts).figures()
        record["perplexity without recurrence"] = figures["perplexity"]

    record |= measure(model, everything).figures()
    record["cache"] = model_cache_bytes(model)["cache_bytes"][4096]
    record["chat"] = in_chat(retrieval, model)
    job = SuiteJob(
        suite=RULER,
        cache=out / "answers",
        ruler_lengths=str(RULER_LENGTH),
        limit=RULER_EXAMPLES,
        batch_size=32,
    )
    cast_weights(model, torch.bfloat16)
    ruler = summary(run_suite(model, run.tokenizer, job, load_tasks(job)))
    record["ruler"] = dict(zip(ruler.task, ruler.value))
    path.write_text(json.dumps(record, indent=1))


def asked(run: RunInputs) -> EvalInputs:
    """Choose the questions and texts to measure on."""
    text = Path(run.config.data.sources[0]).with_name("held_out.jsonl")
    evaluation = replace(run.config.evaluation, knowledge="general", texts=str(text))
    run = RunInputs(replace(run.config, evaluation=evaluation), run.teacher_and_tokenizer)
    knowledge = run.knowledge()
    return EvalInputs(
        run.tokenizer,
        run.teacher,
        examples={n: KVRetrieval(n, seed=1).examples(EXAMPLES) for n in SIZES},
        questions=knowledge.examples() if knowledge else [],
        texts=run.held_out_texts(TEXTS),
        max_text_tokens=ROW,
        batch_size=32,
    )


def by_choice(model: PreTrainedModel, retrieval: EvalInputs) -> dict[int, float]:
    """Measure retrieval by choice, by dictionary size."""
    accuracies: dict[int, float] = {}
    for size, examples in retrieval.examples.items():
        answers = answer_choices(
            model,
            retrieval.tokenizer,
            examples,
            batch_size=retrieval.batch_size,
        )
        accuracies[size] = answers.accuracy
    return accuracies


def in_chat(retrieval: EvalInputs, model: PreTrainedModel) -> dict[str, float]:
    """Measure retrieval in the tokenizer's chat template, with the smallest dictionaries."""
    size = SIZES[0]
    probe = with_prompt_format(KVRetrieval(size, seed=1), "chat", retrieval.tokenizer)
    in_template = replace(retrieval, examples={size: probe.examples(EXAMPLES)})
    figures = measure(model, in_template).figures()
    return {name: figures[name][size] for name in ("kv_choice", "kv_generation")}


def losses(out: Path, name: str) -> pd.DataFrame:
    """Read the logged losses of a student's distillation, by tokens seen."""
    path = folder(out, name) / "stages" / "1-distill" / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    logged = pd.DataFrame([line for line in lines if "loss" in line])
    million_tokens = logged.step * ROWS * ROW / 1e6
    return pd.DataFrame({"line": name, "x": million_tokens, "y": logged.loss})


def report(out: Path) -> None:
    """Write the record and the figure, print the tables."""
    measured: dict[str, dict[str, Any]] = {}
    for name in (TEACHER, *STUDENTS):
        measured[name] = json.loads((folder(out, name) / "measured.json").read_text())
    curves = {name: losses(out, name) for name in STUDENTS}
    for name, curve in curves.items():
        measured[name]["loss"] = loss_by_thirds(curve)
    head = about("students of SmolLM2-135M-Instruct at equal tokens", threads=1)
    write(RESULTS, {"students": measured, **head})
    draw(curves)
    table = pd.json_normalize(list(measured.values())).set_index(pd.Index(measured))
    print(table.T.round(3).to_string())


def loss_by_thirds(curve: pd.DataFrame) -> dict[str, float]:
    """Return the loss of the first step, and the means of the others over each third of the tokens."""
    third = np.ceil(3 * curve.x / curve.x.max())
    means = curve.iloc[1:].groupby(third).y.mean()
    by_third = {f"third {number:.0f}": mean for number, mean in means.items()}
    return {"first step": curve.y.iloc[0], **by_third}


def draw(curves: dict[str, pd.DataFrame]) -> None:
    """Draw the losses, each a mean of three logged ones."""
    smooth: list[pd.DataFrame] = []
    for curve in curves.values():
        means = curve.y.rolling(3, min_periods=1).mean()
        smooth.append(curve.assign(y=means))
    points = pd.concat(smooth).assign(panel="", error=float("nan"))
    rows = [PanelRow(points, "distillation loss, nats a token")]
    looks = dict(zip(curves, LOOKS))
    draw_lines(FIGURE, "", rows, looks, "million tokens of distillation", evenly_spaced=False)


if __name__ == "__main__":
    main()
