"""Compare uses of the same steps: learning rates by part, divergences, the teacher's answers.

    python benchmarks/training_choices.py    # resumes; writes benchmarks/results/training_choices.json

For each seed one alignment of all heads serves every student. Each keeps six heads and takes 250 steps of distillation
from there, with one thing changed. ``answers``: documents whose last question the teacher answers are mixed into the
text, with the loss on the answers alone. About an hour of one core.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from by_seed import FIGURES, differences, rounded
from more_itertools import chunked
from records import RESULTS, ROOT, about, environment, parser_of, write

from hybrid_distill.assets import corpus_documents, tiny_teacher_path
from hybrid_distill.evaluation.evaluate import EvalResult
from hybrid_distill.probes.answering import left_pad
from hybrid_distill.teacher import load_teacher

KEPT = 6
ASKED = ["--evaluation.n-pairs", "8", "16", "32", "--evaluation.n-examples", "128", "--no-export"]
SCORING = ["--pairs", "16", "--queries", "16", "--examples", "36", "--k", str(KEPT), "--exhaustive"]
STAGE = Path("stages") / "1-align"
STANDARD = "forward KL"
CHOICES = {
    STANDARD: "",
    "reverse KL": "--distill.kind reverse_kl",
    "JSD": "--distill.kind jsd",
    "rates 1, 0.07, 0.07": "--distill.lr-scale 1 0.07 0.07",
    "rates 1, 1, 0.1": "--distill.lr-scale 1 1 0.1",
    "answers, a quarter": "--data.sources tiny {answers} --data.weights 3 1",
    "answers, half": "--data.sources tiny {answers} --data.weights 1 1",
}
TEMPLATE = """{%- for message in messages -%}{%- if message.role == "assistant" -%}
{% generation %}{{ message.content + eos_token }}{% endgeneration %}
{%- else -%}{{ message.content }}{%- endif -%}{%- endfor -%}"""
"""Chat template without any words: a prompt, and the answer right behind it."""


def main() -> None:
    """Train what is missing, write the record, print the table."""
    parser = parser_of(__doc__, RESULTS / "training_choices.json")
    parser.add_argument(
        "--runs", type=Path, default=Path("runs/choices"), help="folder of the runs"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    # Other flags are those of every run, such as --align.steps 2.
    options, flags = parser.parse_known_args()
    torch.set_num_threads(1)
    answers = answers_of_teacher(options.runs)
    rows = []
    for seed in options.seeds:
        rows += train(options.runs, seed, answers, flags)
    students = pd.DataFrame(rows)
    means = students.groupby("choice", sort=False)[list(FIGURES)].agg(["mean", "std"])
    record = {
        "students": {name: rounded(row) for name, row in means.iterrows()},
        f"less {STANDARD}, same seed": differences(students, "choice", STANDARD),
        "seeds": options.seeds,
        **about("ways to distill for 250 steps"),
    }
    write(options.out, record)
    print(means.round(4).to_string())


def train(out: Path, seed: int, answers: Path, flags: list[str]) -> list[dict[str, object]]:
    """Train a seed's students, and return the figures of each."""
    scores = out / f"scores-{seed}.json"
    aligned = out / f"aligned-{seed}"
    if not scores.exists():
        command("score", "--model", "tiny", *SCORING, "--seed", str(seed), "--out", str(scores))
    no_heads = ["--plan.selection", "none", "--plan.k", "0", "--stages", "align"]
    command("run", "tiny", *seeded(seed, aligned), *ASKED, *no_heads, *flags)

    begun = ["--scoring.file", str(scores), "--plan.k", str(KEPT)]
    begun += ["--student.aligned", str(aligned / STAGE), "--stages", "distill"]
    rows: list[dict[str, object]] = []
    for name, changed in CHOICES.items():
        words = "-".join(name.replace(",", "").split())
        run = out / f"{words}-{seed}"
        # The teacher's evaluation is the same for all: it is measured once.
        shutil.copytree(aligned / "teacher", run / "teacher", dirs_exist_ok=True)
        more = changed.format(answers=answers).split()
        command("run", "tiny", *seeded(seed, run), *ASKED, *begun, *more, *flags)
        figures = EvalResult.load(run / "evaluation.json").figures()
        rows.append({"choice": name, "seed": seed, **figures})
    return rows


def command(*arguments: str) -> None:
    """Run hybrid-distill on one thread; what is finished is skipped."""
    words = [sys.executable, "-m", "hybrid_distill", *arguments]
    subprocess.run(words, check=True, env=environment(ROOT))


def seeded(seed: int, out: Path) -> list[str]:
    return ["--seed", str(seed), "--data.seed", str(seed), "--out", str(out)]


def answers_of_teacher(out: Path) -> Path:
    """Return a token folder of the corpus's last questions, answered by the teacher; the loss is on its answers."""
    teacher = out / "teacher"
    answers = out / "answers"
    written_to = out / "answers.jsonl"
    if not written_to.exists():
        shutil.copytree(tiny_teacher_path(), teacher, dirs_exist_ok=True)
        (teacher / "chat_template.jinja").write_text(TEMPLATE)
        lines = [json.dumps(pair) + "\n" for pair in answered(teacher)]
        written_to.write_text("".join(lines))
    sources = ["--sources", str(written_to), "--tokenizer", str(teacher)]
    command("prepare-data", "--chat", *sources, "--out", str(answers))
    return answers


def last_questions() -> list[str]:
    """Return the corpus's documents up to their last number, of those whose end refers to what stands before."""
    questions = []
    for text in corpus_documents("train"):
        end = re.search(r"(?s)\A(.+?) *\d+\D*\Z", text)
        if end is not None and end[1].count("\n") > 3:
            questions.append(end[1])
    return questions


def answered(teacher: Path) -> Iterator[dict[str, str]]:
    """Yield each question with the line that the teacher continues it with."""
    model, tokenizer = load_teacher(str(teacher))
    for prompts in chunked(sorted(last_questions(), key=len), 64):
        ids_BL, mask_BL = left_pad(tokenizer(prompts)["input_ids"], model.device)
        generate: Any = model.generate
        generated_BL = generate(
            ids_BL,
            attention_mask=mask_BL,
            max_new_tokens=4,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
        )
        new_BL = generated_BL[:, ids_BL.shape[1] :]
        texts = tokenizer.batch_decode(new_BL, skip_special_tokens=True)
        for prompt, text in zip(prompts, texts):
            yield {"prompt": prompt, "completion": text.partition("\n")[0]}


if __name__ == "__main__":
    main()
