"""Tasks in RULER's form for the embedded teacher's shape: how many heads do their students need?

    python benchmarks/ruler_form.py    # resumes; writes benchmarks/results/ruler_form.json

From an empty folder: a teacher of the embedded one's shape and tokenizer learns five tasks (`ruler_tasks.py`,
`ruler_teacher.py`), and its heads are ranked on them. Students are aligned and distilled on documents of the same tasks
and measured twice: in one of the wordings they learned from, and in one that only the teacher has seen.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd
import torch
import tyro
from more_itertools import chunked
from records import RESULTS, about, read, write
from ruler_tasks import LENGTHS, TASKS, WORDING, Document, Writer, as_rows, draw_wording
from ruler_teacher import train_teacher
from training import trained
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hybrid_distill.assets.dictionaries import NOUNS
from hybrid_distill.data import Batch
from hybrid_distill.model import HybridForCausalLM
from hybrid_distill.plan import HeadPlan
from hybrid_distill.probes import Example, SeededProbe
from hybrid_distill.probes.answering import left_pad
from hybrid_distill.probes.encoding import tokenize
from hybrid_distill.scoring import HeadScores, score_heads
from hybrid_distill.scoring.restoration import greedy_restoration
from hybrid_distill.student.build import build_student
from hybrid_distill.student.grafting import graft_recurrent_heads
from hybrid_distill.teacher import eval_mode, load_teacher
from hybrid_distill.train.align import LayerAlignment
from hybrid_distill.train.config import Align, Distill
from hybrid_distill.train.end_to_end import EndToEnd

N_KEPT = 6
SHAPE = {"d_state": 16, "recurrence": "gdn"}
ALIGN_RATE = 3e-3
DISTILL_RATE = 1e-3
TOKEN_MULTIPLE = {"needles": 1, "codes": 1, "variables": 2, "common": 3, "frequent": 2}
"""Multiple of the tokens that a step of distillation has of a task: more where few of them are answers."""
# Of a task's wordings.
SEEN_WORDING = -2
UNSEEN_WORDING = -1

CHOSEN = "6 heads"
"""Students with heads chosen by greedy restoration."""
EQUAL = "6 heads of equal lessons"
"""Students with the same heads and equal lessons. The next two are compared with them."""
ABLATION = "6 heads by ablation"
FEW_WORDINGS = "6 heads of few wordings"
"""Students with the chosen heads whose lessons have no combined wordings."""
LAYERS = "2 spread layers"
EQUAL_LESSONS = (EQUAL, ABLATION, FEW_WORDINGS)


@dataclass(frozen=True)
class Settings:
    """Sizes of the experiment, and its folder."""

    out: Path = Path("runs/ruler-form")
    """Folder of the teacher and students."""
    record: Path = RESULTS / "ruler_form.json"
    """Where means and deviations are written."""
    steps: int = 1800
    """Steps of the teacher."""
    tokens: int = 1600
    """Tokens of each task in a step of the teacher, about."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the students with the chosen heads."""
    control_seeds: tuple[int, ...] = (0,)
    """Seeds of the other students."""
    student_tokens: int = 700
    """Tokens of a task in a student's step, at least."""
    align_steps: int = 150
    distill_steps: int = 1400
    scoring_examples: int = 100
    """Prompts of each round of the greedy search; ablation takes five times as many."""
    restoration_tokens: int = 128
    """Tokens of the documents that heads are chosen on."""
    questions: int = 64
    """Questions of each task and length that a model is asked."""
    lengths: tuple[int, ...] = (256, 512, 1000)
    """Tokens of the documents that a model is asked about."""
    processes: int = 2
    """Processes for gradients of the teacher, then for students."""


@dataclass(frozen=True)
class RulerForm(SeededProbe):
    """Questions of the five tasks in turn, in the wordings that students see: what heads are scored on.

    Of several words of an answer one is asked for, behind those before it.
    """

    name: ClassVar[str] = "ruler_form"

    tokenizer: PreTrainedTokenizerBase = field(repr=False)
    length: int = 256
    seed: int = 0
    n_choices: int = 10

    def _example(self, index: int) -> Example:
        rng = random.Random(f"{self.name} {self.seed} {index}")
        task = TASKS[index % len(TASKS)]
        wording = draw_wording(task, rng)
        writer = Writer(self.tokenizer)
        document = writer.write(task, wording, self.length, rng, n_questions=1)
        question = document.questions[0]
        place = rng.randrange(len(question.answers))
        answer = question.answers[place]
        # Sorted: the order of a set of words differs between processes.
        others = sorted(words_like(answer, document.text) - set(question.answers))
        n_others = min(len(others), self.n_choices - 1)
        choices = [answer, *rng.sample(others, n_others)]
        shuffled = rng.sample(choices, len(choices))
        answers_before = question.answers[:place]
        prompt = " ".join([f"{document.text}\n{question.text}", *answers_before])
        return Example(prompt, f" {answer}", tuple(f" {choice}" for choice in shuffled))

    def describe(self) -> dict[str, object]:
        return {"name": self.name, "length": self.length, "seed": self.seed}


def words_like(answer: str, text: str) -> set[str]:
    """Return the numbers of a text if the answer is one, otherwise its nouns."""
    if answer.isdigit():
        return set(re.findall(r"\d+", text))
    return set(re.findall(r"[a-z]+", text)) & set(NOUNS)


def answered(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: Settings,
    wording: int,
) -> dict[str, float]:
    """Return the share of each task's answers that a model generates, by length."""
    writer = Writer(tokenizer)
    shares: dict[str, float] = {}
    for length, task in product(settings.lengths, TASKS):
        rng = random.Random(f"measured {task} {length}")
        words = WORDING[task][wording]
        documents: list[Document] = []
        for _ in range(settings.questions):
            documents.append(writer.write(task, words, length, rng, n_questions=1))
        total = 0.0
        for batch in chunked(documents, 16):
            for document, line in zip(batch, generated(model, tokenizer, batch)):
                total += share_right(task, document.questions[0].answers, line)
        shares[f"{task} {length}"] = total / settings.questions
    return shares


def generated(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, documents: list[Document]
) -> list[str]:
    """Return the line that a model writes behind each document's question."""
    texts = [f"{document.text}\n{document.questions[0].text}" for document in documents]
    ids_BL, mask_BL = left_pad(tokenize(tokenizer, texts), model.device)
    # A number is two tokens.
    n_words = len(documents[0].questions[0].answers)
    n_new = 2 * n_words + 1
    with eval_mode(model):
        generate: Any = model.generate
        output_BL = generate(
            ids_BL,
            attention_mask=mask_BL,
            max_new_tokens=n_new,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
        )
    new_BL = output_BL[:, ids_BL.shape[1] :]
    continuations = tokenizer.batch_decode(new_BL, skip_special_tokens=True)
    return [text.partition("\n")[0] for text in continuations]


def share_right(task: str, answers: tuple[str, ...], line: str) -> float:
    """Return the share of the words that a line names. As in RULER, a code counts whole."""
    words = re.findall(r"\w+", line)[: len(answers)]
    if task == "codes":
        return float(words == list(answers))
    return len(set(words) & set(answers)) / len(answers)


@dataclass(frozen=True)
class Lessons:
    """Batches that students learn from, one of each task: a pure function of the step.

    The longest documents grow from 96 to 1,000 tokens over the first third of the steps. Equal lessons have as many
    tokens of each task, the others more of those with few answers.
    """

    writer: Writer
    seed: int
    steps: int
    tokens: int
    on_answers: bool
    is_varied: bool = True
    is_equal: bool = False

    def __call__(self, step: int) -> list[Batch]:
        rng = random.Random(f"lessons {self.seed} {step}")
        lengths = LENGTHS[: 3 + len(LENGTHS) * 3 * step // self.steps]
        batches = []
        for task in TASKS:
            length = max(rng.choices(lengths, k=2))
            batches.append(self.batch(task, length, rng))
        return batches

    def batch(self, task: str, length: int, rng: random.Random) -> Batch:
        tokenizer = self.writer.tokenizer
        tokens = self.tokens
        if not self.is_equal:
            tokens *= TOKEN_MULTIPLE[task]
        n = max(1, round(tokens / length))
        wordings = [draw_wording(task, rng, is_varied=self.is_varied) for _ in range(n)]
        documents = [self.writer.write(task, words, length, rng) for words in wordings]
        rows = as_rows(tokenizer, documents, rng)
        padding: Any = tokenizer.pad_token_id
        # The loss of a token is that of predicting the next one.
        mask_BL = rows.inside.roll(-1, 1)
        if not self.on_answers:
            mask_BL = rows.ids != padding
        return {"input_ids": rows.ids, "seq_idx": torch.zeros_like(rows.ids), "mask": mask_BL}


class Students:
    """Students of one teacher: all heads are aligned once for each seed, then every plan starts from there."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.teacher, self.tokenizer = load_teacher(str(settings.out / "teacher"))

    def lessons(self, seed: int, steps: int, **kind: bool) -> Lessons:
        return Lessons(Writer(self.tokenizer), seed, steps, self.settings.student_tokens, **kind)

    def build(self, plan: HeadPlan, seed: int, **start: Any) -> HybridForCausalLM:
        student, _ = build_student(self.teacher, plan, **SHAPE, seed=seed, **start)
        return student

    def aligned(self, seed: int) -> HybridForCausalLM:
        """Return the student without attention, aligned layer by layer, from its file if there is one."""
        steps = self.settings.align_steps
        file = self.settings.out / f"aligned-{seed}.pt"
        plan = HeadPlan.none(self.teacher)
        if file.exists():
            student = self.build(plan, seed, init="random")
            student.load_state_dict(torch.load(file))
            return student
        lessons = self.lessons(seed, steps, on_answers=False, is_equal=True)
        calibration = lessons.batch("needles", 512, random.Random(seed))
        student = self.build(plan, seed, init="fitted", calibration=calibration)
        stage = LayerAlignment(student, self.teacher, Align(target="head"))
        for step in trained(stage, lessons, steps, ALIGN_RATE):
            show(f"alignment, seed {seed}", step, steps)
        torch.save(student.state_dict(), file)
        return student

    def restore_heads(self) -> None:
        """Choose heads by greedy restoration in the first seed's aligned student."""
        path = self.settings.out / "restored.json"
        if path.exists():
            return
        heads = greedy_restoration(
            self.aligned(self.settings.seeds[0]),
            self.teacher,
            self.tokenizer,
            RulerForm(self.tokenizer, length=self.settings.restoration_tokens),
            N_KEPT,
            n_examples=self.settings.scoring_examples,
        )
        HeadPlan.from_pairs(self.teacher, heads).save(path)

    def ablate_heads(self) -> None:
        """Score heads by single ablation."""
        path = self.settings.out / "scores.json"
        if path.exists():
            return
        scores = score_heads(
            self.teacher,
            self.tokenizer,
            RulerForm(self.tokenizer),
            n_examples=5 * self.settings.scoring_examples,
            min_accuracy=0.0,
        )
        scores.save(path)

    def plan(self, kept: str) -> HeadPlan:
        if kept == LAYERS:
            return HeadPlan.layers(self.teacher, [1, 4])
        if kept == ABLATION:
            scores = HeadScores.load(self.settings.out / "scores.json")
            return HeadPlan.top_k(scores, N_KEPT)
        return HeadPlan.load(self.settings.out / "restored.json")

    def distill(self, kept: str, seed: int) -> None:
        """Train a student and write what it answers."""
        steps = self.settings.distill_steps
        file = self.settings.out / f"{kept.replace(' ', '-')}-{seed}.json"
        if file.exists():
            return
        plan = self.plan(kept)
        student = self.build(plan, seed, init="random")
        graft_recurrent_heads(student, self.aligned(seed))
        stage = EndToEnd(student, self.teacher, Distill())
        lessons = self.lessons(
            seed,
            steps,
            on_answers=True,
            is_varied=kept != FEW_WORDINGS,
            is_equal=kept in EQUAL_LESSONS,
        )
        for step in trained(stage, lessons, steps, DISTILL_RATE):
            show(f"{kept}, seed {seed}", step, steps)
        student.save_pretrained(file.with_suffix(""))
        heads = [list(layer) for layer in plan.kept]
        write(file, {"kept": kept, "seed": seed, "heads": heads, **self.measured(student)})

    def measure_teacher(self) -> None:
        path = self.settings.out / "teacher.json"
        if not path.exists():
            write(path, self.measured(self.teacher))

    def measured(self, model: PreTrainedModel) -> dict[str, dict[str, float]]:
        """Return what a model answers in a wording that students never see, and in one that they do."""
        return {
            "answered": answered(model, self.tokenizer, self.settings, UNSEEN_WORDING),
            "in a wording seen": answered(model, self.tokenizer, self.settings, SEEN_WORDING),
        }


def show(name: str, step: int, steps: int) -> None:
    if step % 50 == 0:
        print(f"{time.strftime('%H:%M:%S')} {name}: step {step} of {steps}", flush=True)


class Answers:
    """Answers of students in one wording, as means over seeds, beside the teacher's."""

    def __init__(
        self, students: Sequence[dict[str, Any]], teacher: dict[str, Any], wording: str
    ) -> None:
        rows = [{"kept": student["kept"], **student[wording]} for student in students]
        by_kept = pd.DataFrame(rows).groupby("kept")
        self.teacher = pd.Series(teacher[wording])
        self.n_seeds = by_kept.size()
        # By plan, a column for each task and length.
        self.means: pd.DataFrame = by_kept.mean()  # pyright: ignore[reportAttributeAccessIssue]
        self.deviations = by_kept.std().fillna(0)

    def as_text(self) -> dict[str, dict[str, str]]:
        """Return means and deviations by plan, task and length."""
        texts: dict[str, dict[str, str]] = {}
        for kept, means in self.means.iterrows():
            deviations = self.deviations.loc[kept]
            by_task = texts.setdefault(str(kept), {})
            for task in means.index:
                by_task[str(task)] = f"{means[task]:.3f} ± {deviations[task]:.3f}"
        return texts

    def shares(self) -> dict[str, dict[str, float]]:
        """Return the means of the five tasks' shares of the teacher, by length, each at most 1."""
        by_task = (self.means / self.teacher).clip(upper=1).T
        by_length = by_task.groupby(lambda name: name.split()[1], sort=False)
        return by_length.mean().round(4).to_dict()


def report(settings: Settings) -> None:
    """Write means and deviations over seeds, beside the teacher, and the students' share of it."""
    students = [read(file) for file in sorted(settings.out.glob("*-[0-9].json"))]
    teacher = read(settings.out / "teacher.json")
    unseen = Answers(students, teacher, "answered")
    seen = Answers(students, teacher, "in a wording seen")
    sizes = asdict(settings)
    del sizes["out"], sizes["record"]
    record = {
        "teacher": teacher,
        "students": unseen.as_text(),
        "students, in a wording seen": seen.as_text(),
        "share of the teacher, mean of the five tasks, by tokens": unseen.shares(),
        "the same, in a wording that students have seen": seen.shares(),
        "seeds": unseen.n_seeds.to_dict(),
        "heads": {student["kept"]: student["heads"] for student in students},
        "settings": {**SHAPE, "align_rate": ALIGN_RATE, "distill_rate": DISTILL_RATE, **sizes},
        **about("tasks in RULER's form, answered by generation"),
    }
    write(settings.record, record)
    print((100 * unseen.means).round(1).T.to_string())
    print(pd.DataFrame(unseen.shares()))


def main(settings: Settings) -> None:
    """Make what is missing, then write the record."""
    settings.out.mkdir(parents=True, exist_ok=True)
    folder = settings.out / "teacher"
    if not (folder / "config.json").exists():
        train_teacher(
            folder, settings.processes, steps=settings.steps, tokens=settings.tokens, seed=0
        )
    students = [
        *product((CHOSEN, EQUAL), settings.seeds),
        *product((ABLATION, FEW_WORDINGS, LAYERS), settings.control_seeds),
    ]
    distilled = [("distill", *student) for student in students]
    stages: list[list[tuple[Any, ...]]] = [
        [("measure_teacher",), *(("aligned", seed) for seed in settings.seeds)],
        [("restore_heads",), ("ablate_heads",)],
        distilled,
    ]
    # Spawned, not forked: torch's threads do not survive a fork.
    with ProcessPoolExecutor(settings.processes, mp_context=get_context("spawn")) as pool:
        for jobs in stages:
            futures = [pool.submit(work, settings, *job) for job in jobs]
            for future in futures:
                future.result()
    report(settings)


def work(settings: Settings, method: str, *arguments: Any) -> None:
    """Call a method of `Students` in a process of its own; what it returns stays there."""
    torch.set_num_threads(1)
    getattr(Students(settings), method)(*arguments)


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
