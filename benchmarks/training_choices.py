"""Compare uses of the same steps: learning rates by part, divergences, the teacher's answers, staged replacement.

    python benchmarks/training_choices.py    # resumes; writes benchmarks/results/training_choices.json

For each seed one alignment of all heads serves every student. Each keeps six heads and takes 250 steps of distillation
from there, with one thing changed. ``answers``: documents whose last question the teacher answers are mixed into the
text, with the loss on the answers alone. ``staged``: a student that keeps 24 heads learns for half of the
steps; then its 18 lowest-scored heads become recurrent, as they were aligned. About an hour of one core.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pandas as pd
import torch
from init import trained
from mixers import FIGURES, differences
from more_itertools import chunked
from provenance import ROOT, about, environment, write
from transformers import PreTrainedModel

from hybrid_distill.assets import corpus_documents, tiny_teacher_path
from hybrid_distill.config import from_json
from hybrid_distill.data import Batch
from hybrid_distill.evaluation.evaluate import EvalResult
from hybrid_distill.model import HybridForCausalLM
from hybrid_distill.pipeline import RunInputs
from hybrid_distill.plan import HeadPlan
from hybrid_distill.probes.answering import left_pad
from hybrid_distill.scoring import HeadScores
from hybrid_distill.student.build import build_student, graft_recurrent_heads
from hybrid_distill.teacher import attention_sites, load_teacher
from hybrid_distill.train.checkpoint import load_stage
from hybrid_distill.train.end_to_end import EndToEnd

RESULTS = ROOT / "benchmarks" / "results" / "training_choices.json"
KEPT, KEPT_FIRST = 6, 24
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
STAGED = "staged, 24 heads first"
TEMPLATE = """{%- for message in messages -%}{%- if message.role == "assistant" -%}
{% generation %}{{ message.content + eos_token }}{% endgeneration %}
{%- else -%}{{ message.content }}{%- endif -%}{%- endfor -%}"""
"""Chat template without any words: a prompt, and the answer right behind it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/choices"), help="folder of the runs")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    options = parser.parse_args()
    torch.set_num_threads(1)
    answers = answers_of_teacher(options.out)
    rows = []
    for seed in options.seeds:
        scores, aligned = options.out / f"scores-{seed}.json", options.out / f"aligned-{seed}"
        if not scores.exists():
            command("score", "--model", "tiny", *SCORING, "--seed", str(seed), "--out", str(scores))
        no_heads = ["--plan.selection", "none", "--plan.k", "0", "--stages", "align"]
        command("run", "tiny", *seeded(seed, aligned), *ASKED, *no_heads)
        begun = ["--scoring.file", str(scores), "--plan.k", str(KEPT), "--student.aligned", str(aligned / STAGE)]
        for name, flags in CHOICES.items():
            out = options.out / f"{'-'.join(name.replace(',', '').split())}-{seed}"
            shutil.copytree(aligned / "teacher", out / "teacher", dirs_exist_ok=True)
            changed = flags.format(answers=answers).split()
            command("run", "tiny", *seeded(seed, out), *ASKED, *begun, "--stages", "distill", *changed)
            rows.append({"choice": name, "seed": seed, **EvalResult.load(out / "evaluation.json").figures()})
        rows.append({"choice": STAGED, "seed": seed, **staged(options.out, seed).figures()})
    students = pd.DataFrame(rows)
    means = students.groupby("choice", sort=False)[list(FIGURES)].agg(["mean", "std"]).round(4)
    record = {
        "students": {name: {" ".join(key): value for key, value in row.items()} for name, row in means.iterrows()},
        f"less {STANDARD}, same seed": differences(students, "choice", STANDARD),
        "seeds": options.seeds,
        **about("ways to distill for 250 steps"),
    }
    write(RESULTS, record)
    print(means.to_string())


def command(*arguments: str) -> None:
    """Run hybrid-distill on one thread; what is finished is skipped."""
    subprocess.run([sys.executable, "-m", "hybrid_distill", *arguments], check=True, env=environment(ROOT))


def seeded(seed: int, out: Path) -> list[str]:
    return ["--seed", str(seed), "--data.seed", str(seed), "--out", str(out)]


def answers_of_teacher(out: Path) -> Path:
    """Return a token folder of the corpus's last questions, answered by the teacher; the loss is on its answers."""
    teacher, answers, written_to = out / "teacher", out / "answers", out / "answers.jsonl"
    if not written_to.exists():
        shutil.copytree(tiny_teacher_path(), teacher, dirs_exist_ok=True)
        (teacher / "chat_template.jinja").write_text(TEMPLATE)
        model, tokenizer = load_teacher(str(teacher))
        # Up to the last number of a document whose end refers to what stands before.
        ends = (re.search(r"(?s)\A(.+?) *\d+\D*\Z", text) for text in corpus_documents("train"))
        prompts = [end[1] for end in ends if end is not None and end[1].count("\n") > 3]
        lines = list[str]()
        for some in chunked(sorted(prompts, key=len), 64):
            ids_BL, mask_BL = left_pad(tokenizer(some)["input_ids"], model.device)
            options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": tokenizer.pad_token_id}
            written = model.generate(ids_BL, attention_mask=mask_BL, **options)[:, ids_BL.shape[1] :]
            for prompt, said in zip(some, tokenizer.batch_decode(written, skip_special_tokens=True)):
                lines.append(json.dumps({"prompt": prompt, "completion": said.partition("\n")[0]}) + "\n")
        written_to.write_text("".join(lines))
    sources = ["--sources", str(written_to), "--tokenizer", str(teacher)]
    command("prepare-data", "--chat", *sources, "--out", str(answers))
    return answers


def staged(out: Path, seed: int) -> EvalResult:
    """Distill a student of more heads, then one of fewer that goes on from its weights."""
    path = out / f"staged-{seed}" / "evaluation.json"
    if path.exists():
        return EvalResult.load(path)
    like = RunInputs(replace(from_json(out / f"forward-KL-{seed}" / "config.json"), out=path.parent))
    scores, steps = HeadScores.load(out / f"scores-{seed}.json"), like.config.stage("distill").steps // 2
    teacher, d_state = like.teacher, like.config.student.d_state
    aligned, _ = build_student(teacher, HeadPlan.none(teacher), d_state=d_state, init="random")
    load_stage(out / f"aligned-{seed}" / STAGE, aligned)

    def distilled(student: HybridForCausalLM, first: int) -> HybridForCausalLM:
        graft_recurrent_heads(student, aligned)
        config = like.config.stage("distill")
        rows = like.rows(config)

        def batches(step: int) -> list[Batch]:
            return [rows.batch(first + step, config.batch_size)]

        for _ in trained(EndToEnd(student, teacher, config), batches, steps, config.learning_rate):
            pass
        return student

    wide, _ = build_student(teacher, HeadPlan.top_k(scores, KEPT_FIRST), d_state=d_state, init="random")
    learned = written_back(distilled(wide, 0), aligned, teacher)
    plan = replace(HeadPlan.top_k(scores, KEPT), teacher="")
    student = distilled(build_student(learned, plan, d_state=d_state, init="random")[0], steps)
    shutil.copytree(out / f"aligned-{seed}" / "teacher", path.parent / "teacher", dirs_exist_ok=True)
    return like.evaluate(student)


@torch.no_grad()
def written_back(student: HybridForCausalLM, aligned: HybridForCausalLM, teacher: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of the teacher with the student's weights for its own; ``aligned`` gets its recurrent heads."""
    learned = copy.deepcopy(teacher)
    own = student.state_dict()
    for name, tensor in learned.state_dict().items():
        if name in own:
            tensor.copy_(own[name])
    for site, mixer, donor in zip(attention_sites(learned), student.mixers(), aligned.mixers(), strict=True):
        site.o_proj.load_state_dict(mixer.o_proj.state_dict())
        if mixer.attention is not None and site.layout is not None:
            for name, tensor in mixer.attention.state_dict().items():
                heads = mixer.kept, mixer.kv_groups, site.n_heads, len(site.linear("k_proj").weight) // site.head_dim
                blocks = site.layout.blocks(name.partition(".")[0], *heads)
                site.module.get_parameter(name).unflatten(0, (-1, site.head_dim))[blocks] = tensor.unflatten(
                    0, (-1, site.head_dim)
                )
        if mixer.ssm is not None and donor.ssm is not None:
            some, every = mixer.ssm, donor.ssm
            for name, tensor in some.named_parameters():
                is_conv = name == "conv_weight"  # its channels are x, B and C, each with all its heads
                whole = every.get_parameter(name)
                targets = whole.split(every.sizes) if is_conv else [whole]
                for target, source in zip(targets, tensor.split(some.sizes) if is_conv else [tensor]):
                    rows = target.view(every.n_heads, -1, *target.shape[1:])
                    rows[list(mixer.recurrent)] = source.view(some.n_heads, -1, *source.shape[1:])
    return learned


if __name__ == "__main__":
    main()
