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
from hybrid_distill.lab.reporting.figures import LOOKS, Row, draw_lines
from hybrid_distill.lab.suite import load_tasks, run_suite
from hybrid_distill.lab.suite_job import SuiteJob
from hybrid_distill.lab.suite_results import summary
from hybrid_distill.pipeline import RunInputs, finished_run, trained_student
from hybrid_distill.pipeline.run import build
from hybrid_distill.plan import HeadId
from hybrid_distill.probes.answering import answer_choices
from hybrid_distill.probes.kv_retrieval import KVRetrieval
from hybrid_distill.probes.prompt_formats import with_prompt_format
from hybrid_distill.teacher import ablate_heads

RESULTS = ROOT / "benchmarks" / "results" / "smollm2_students.json"
FIGURE = ROOT / "docs" / "atlas" / "smollm2-students.png"
ALIGN_STEPS, DISTILL_STEPS, ROWS, ROW = 1320, 147, 4, 512
TEACHER = "teacher"
STUDENTS = {
    "top 14": "--plan.k 14",
    "0 heads": "--plan.selection none --plan.k 0",
    "top 27": "--plan.k 27",
    "8 whole layers": "--plan.selection layers --plan.layers 2 6 10 14 18 22 25 29",
    **{
        f"14 random, draw {seed}": f"--plan.selection random --plan.k 14 --plan.seed {seed}"
        for seed in (1, 2, 3)
    },
}
SIZES = (4, 8)
EXAMPLES, TEXTS = 64, 16
RULER = "niah_single_1,niah_multikey_2,niah_multikey_3,ruler_vt,ruler_fwe"
"""Tasks that fit into so many tokens; some questions of ruler_cwe do not."""
RULER_LENGTH, RULER_EXAMPLES = 512, 32


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
    with ThreadPoolExecutor(2) as two:
        list(two.map(lambda name: train_student(options, name), STUDENTS))
        list(two.map(lambda name: command([*sys.argv, "--measure", name]), [*STUDENTS, TEACHER]))
    report(options.out)


def command(arguments: list[str], processes: int = 0) -> None:
    """Run a Python program on one thread, or on so many connected processes of one thread each."""
    launcher = (
        ["-m", "torch.distributed.run", "--nproc_per_node", str(processes)] if processes else []
    )
    alone = environment(ROOT, OMP_WAIT_POLICY="passive", ACCELERATE_USE_CPU="true")
    subprocess.run([sys.executable, *launcher, *arguments], check=True, env=alone)


def common(options: argparse.Namespace) -> list[str]:
    text = [
        "--data.sources",
        str(options.text / "train.jsonl"),
        "--data.no-chat",
        "--data.seq-len",
        str(ROW),
    ]
    # The run's own evaluation is kept short: `measure_one` replaces it.
    short = [
        "--evaluation.n-pairs",
        "4",
        "--evaluation.n-examples",
        "1",
        "--evaluation.n-texts",
        "0",
        "--no-export",
    ]
    return [
        "--teacher",
        options.teacher,
        *text,
        "--student.d-state",
        "16",
        "--scoring.prompt-format",
        "plain",
        *short,
    ]


def distillation(options: argparse.Namespace) -> list[str]:
    steps = [
        "--stages",
        "distill",
        "--distill.batch-size",
        str(ROWS),
        "--distill.steps",
        str(DISTILL_STEPS),
    ]
    return [*common(options), *steps, "--distill.teacher-logits", str(options.out / "logits")]


def train_shared(options: argparse.Namespace) -> None:
    """Align all heads and store the teacher's logits, on two processes."""
    recipe, no_heads = str(ROOT / "recipes" / "hybrid_smollm2_135m.py"), STUDENTS["0 heads"].split()
    if not (aligned(options.out) / "manifest.json").exists():
        steps = [
            "--align.batch-size",
            str(ROWS),
            "--align.micro-batch-size",
            "2",
            "--align.steps",
            str(ALIGN_STEPS),
        ]
        stage = [
            "--stages",
            "align",
            "--align.target",
            "head",
            *steps,
            "--out",
            str(options.out / "aligned"),
        ]
        command([recipe, *common(options), *no_heads, *stage], processes=2)
    unused = ["--out", str(options.out / "unused")]
    program = ["-m", "hybrid_distill", "cache-logits", "smollm2_135m"]
    command([*program, *distillation(options), *no_heads, *unused], processes=2)


def aligned(out: Path) -> Path:
    return out / "aligned" / "stages" / "1-align"


def folder(out: Path, name: str) -> Path:
    return out / "-".join(name.replace(",", "").split())


def train_student(options: argparse.Namespace, name: str) -> None:
    if (folder(options.out, name) / "stages" / "1-distill" / "manifest.json").exists():
        return
    plan = ["--scoring.file", str(atlas_path("smollm2-135m-instruct")), *STUDENTS[name].split()]
    begun = [
        "--student.aligned",
        str(aligned(options.out)),
        "--out",
        str(folder(options.out, name)),
    ]
    command(
        [str(ROOT / "recipes" / "hybrid_smollm2_135m.py"), *distillation(options), *plan, *begun]
    )


def measure_one(out: Path, name: str) -> None:
    """Measure a student after each of its stages, or the teacher, and write measured.json."""
    path = folder(out, name) / "measured.json"
    if path.exists():
        return
    run = finished_run(folder(out, name if name in STUDENTS else next(iter(STUDENTS))))
    everything = asked(run)
    retrieval = replace(everything, questions=[], texts=[])
    if name == TEACHER:
        model, record = run.teacher, {}
    else:
        model, plan = trained_student(run)
        aligned_only = by_choice(build(run, plan), retrieval)
        record: dict[str, Any] = {"heads": len(plan.kept), "aligned": aligned_only}
        recurrent = []
        for n, mixer in enumerate(model.mixers()):
            recurrent += [HeadId(n, head) for head in mixer.replaced]
        few_texts = replace(everything, examples={}, questions=[], texts=everything.texts[:4])
        with ablate_heads(model, recurrent):
            record["perplexity without recurrence"] = measure(model, few_texts)["perplexity"]
    record |= measure(model, everything) | {"cache": model_cache_bytes(model)["cache_bytes"][4096]}
    record["chat"] = in_chat(retrieval, model)
    options: dict[str, Any] = {
        "ruler_lengths": str(RULER_LENGTH),
        "limit": RULER_EXAMPLES,
        "batch_size": 32,
    }
    job = SuiteJob(suite=RULER, cache=out / "answers", **options)
    torch.nn.Module.to(model, torch.bfloat16)
    ruler = summary(run_suite(model, run.tokenizer, job, load_tasks(job)))
    record["ruler"] = dict(zip(ruler.task, ruler.value))
    path.write_text(json.dumps(record, indent=1))


def asked(run: RunInputs) -> EvalInputs:
    """Choose the questions and texts to measure on."""
    data = replace(run.config.evaluation, knowledge="general")
    text = str(Path(run.config.data.sources[0]).with_name("held_out.jsonl"))
    run = RunInputs(
        replace(run.config, evaluation=replace(data, texts=text)), run.teacher_and_tokenizer
    )
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
    accuracies = {}
    for size, examples in retrieval.examples.items():
        answers = answer_choices(
            model, retrieval.tokenizer, examples, batch_size=retrieval.batch_size
        )
        accuracies[size] = answers.accuracy
    return accuracies


def in_chat(retrieval: EvalInputs, model: PreTrainedModel) -> dict[str, float]:
    """Measure retrieval in the tokenizer's chat template, with the smallest dictionaries."""
    examples = with_prompt_format(
        KVRetrieval(SIZES[0], seed=1), "chat", retrieval.tokenizer
    ).examples(EXAMPLES)
    found = measure(model, replace(retrieval, examples={SIZES[0]: examples}))
    return {name: found[name][SIZES[0]] for name in ("kv_choice", "kv_generation")}


def losses(out: Path, name: str) -> pd.DataFrame:
    """Read the logged losses of a student's distillation, by tokens seen."""
    lines = (folder(out, name) / "stages" / "1-distill" / "metrics.jsonl").read_text().splitlines()
    logged = pd.DataFrame([row for row in map(json.loads, lines) if "loss" in row])
    return pd.DataFrame({"line": name, "x": logged.step * ROWS * ROW / 1e6, "y": logged.loss})


def report(out: Path) -> None:
    """Write the record and the figure, print the tables."""
    found = {
        name: json.loads((folder(out, name) / "measured.json").read_text())
        for name in [TEACHER, *STUDENTS]
    }
    curves = {name: losses(out, name) for name in STUDENTS}
    for name, curve in curves.items():
        thirds = curve.iloc[1:].groupby(np.ceil(3 * curve.x / curve.x.max())).y.mean()
        found[name]["loss"] = {
            "first step": curve.y.iloc[0],
            **{f"third {n:.0f}": mean for n, mean in thirds.items()},
        }
    write(
        RESULTS,
        {
            "students": found,
            **about("students of SmolLM2-135M-Instruct at equal tokens", threads=1),
        },
    )
    smooth = [curve.assign(y=curve.y.rolling(3, min_periods=1).mean()) for curve in curves.values()]
    points = pd.concat(smooth).assign(panel="", error=float("nan"))
    rows = [Row(points, "distillation loss, nats a token")]
    draw_lines(
        FIGURE, "", rows, dict(zip(curves, LOOKS)), "million tokens of distillation", even=False
    )
    table = pd.json_normalize(list(found.values())).set_index(pd.Index(found))
    print(table.T.round(3).to_string())


if __name__ == "__main__":
    main()
