"""Tasks in RULER's form for the embedded teacher's shape: how many heads do their students need?

    python benchmarks/ruler_form.py    # resumes; writes benchmarks/results/ruler_form.json

From an empty folder: a teacher of the embedded one's shape and tokenizer learns five tasks (arXiv 2404.06654) in the
embedded vocabulary, and its heads are ranked on them. Students are aligned and distilled on documents of the same tasks
and measured twice: in one of the wordings they learned from, and in one that only the teacher has seen.

``needles``: every line is a fact, one is asked for (niah_multikey_2). ``codes``: the same with keys and values of
several words (niah_multikey_3). ``variables``: names that were given one number, one of them directly, the others each
by the one before (vt). ``common``: three words listed about ten times as often as the rest, in any order (cwe).
``frequent``: the three most frequent words, whose counts fall with the square of their rank (fwe).
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import cycle, islice, product
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, NamedTuple

import pandas as pd
import torch
import torch.distributed as dist
from init import trained
from more_itertools import chunked
from records import ROOT, about, read, write
from torch import Tensor
from torch.multiprocessing import spawn
from torch.nn.functional import cross_entropy, one_hot
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from hybrid_distill.assets.dictionaries import N_VALUES, NOUNS
from hybrid_distill.data import Batch
from hybrid_distill.model import HybridForCausalLM
from hybrid_distill.plan import HeadPlan
from hybrid_distill.probes import Example, SeededProbe
from hybrid_distill.probes.answering import left_pad
from hybrid_distill.probes.encoding import tokenize
from hybrid_distill.scoring import HeadScores, score_heads
from hybrid_distill.scoring.restoration import greedy_restoration
from hybrid_distill.student.build import build_student, graft_recurrent_heads
from hybrid_distill.teacher import eval_mode, load_teacher
from hybrid_distill.train.align import LayerAlignment
from hybrid_distill.train.config import Align, Distill
from hybrid_distill.train.end_to_end import EndToEnd

sys.path.insert(0, str(ROOT / "recipes"))
from tiny_world import PEOPLE, TIMES
from train_tiny_teacher import Batches, TeacherRun, Trainer, make_model

LENGTHS = (48, 64, 96, 128, 192, 256, 384, 512, 768, 1000)


class Asked(NamedTuple):
    """A question at the end of a document, and the words of its answer; ``in_order`` if they have one order."""

    question: str
    answers: tuple[str, ...]
    in_order: bool = True


class Document(NamedTuple):
    text: str
    asked: list[Asked]


class Words(NamedTuple):
    """Wording of one task: a line, and the question."""

    line: str
    question: str


# The last of each is kept for measuring: only the teacher sees it.
WORDING = {
    "needles": [
        Words("{k} {v}", "{k}"),
        Words("{k}: {v}", "{k}:"),
        Words("the {k} has {v}.", "the {k} has"),
        Words("One number of the {k} is {v}.", "The number of the {k} is"),
        Words("The number for {k} was {v}.", "What is the number for {k}?"),
    ],
    "codes": [
        Words("{k} {v}", "{k}"),
        Words("{k}: {v}", "{k}:"),
        Words("the {k} has {v}.", "the {k} has"),
        Words("One code of the {k} is {v}.", "The code of the {k} is"),
        Words("The code for {k} was {v}.", "What is the code for {k}?"),
    ],
    "variables": [
        Words("set {k} {v}", "which are {v}"),
        Words("the {k} is {v}.", "Who is {v}?"),
        Words("set {k} = {v}.", "Names with {v}:"),
        Words("The {k} has the number of {v}.", "The number {v} is that of"),
    ],
    "common": [
        Words(" {w}", "most common:"),
        Words(" {w},", "The words that are there the most:"),
        Words("a {w}\n", "Common words:"),
        Words("- {w}\n", "What are the common words?"),
    ],
    "frequent": [
        Words(" {w}", "most frequent:"),
        Words(" {w},", "The three words that are there the most:"),
        Words("a {w}\n", "Frequent words:"),
        Words("- {w}\n", "What are the three frequent words?"),
    ],
}


def combined(questions: Sequence[str], *parts: Sequence[str]) -> list[Words]:
    """Return each combination of a line's parts with each question. An empty question is the line up to its value."""
    lines = map("".join, product(*parts))
    return [Words(line, asked or line.partition("{v}")[0].rstrip()) for line, asked in product(lines, questions)]


STARTS = ("the ", "one ", "The ", "Note the ", "In the ", "* ", "> ", "Here a ")
MIDDLES = (" ", ": ", " = ", " has ", " is ", " > ", ", ", " still has ", " costs ")
ENDS = ("", ".", ";", ",", " today.")
FACTS = (STARTS, ["{k}"], MIDDLES, ["{v}"], ENDS)
LISTED = (" {w};", "{w}\n", " the {w}", " one {w},", "* {w}\n", "> {w};\n", "the {w}\n", " {w}:")
COMBINED = {
    "needles": combined(["", "Which number has the {k}?", "Look up {k}:", "So the {k} has"], *FACTS),
    "codes": combined(["", "Which code has the {k}?", "Look up {k}:", "So the {k} has"], *FACTS),
    "variables": combined(
        ["Which have {v}?", "Like {v}:", "List those with {v}:", "Who has {v}?", "{v}:", "equal to {v}:"],
        ("set ", "the ", "Now ", "let ", "> ", "In the room ", "name "),
        ["{k}"],
        (" ", " = ", " is ", ": ", " as ", " like ", " has "),
        ["{v}"],
        ENDS,
    ),
    "common": combined(
        ["common:", "Which are common?", "Common ones:", "List the common ones:", "Words that are there often:"],
        LISTED,
    ),
    "frequent": combined(
        ["frequent:", "Which are frequent?", "Frequent ones:", "List the frequent ones:", "Three, by their count:"],
        LISTED,
    ),
}
TASKS = tuple(WORDING)
SHARES = {"needles": 0.7, "codes": 0.7, "variables": 0.9, "common": 1.6, "frequent": 2.2}
FEW_ANSWERS = {"needles": 1, "codes": 1, "variables": 2, "common": 3, "frequent": 2}
"""How many times as many tokens a step of distillation has of a task. A long list asks for three words alone."""
ENOUGH = {"needles": 0.85, "codes": 0.85, "variables": 0.85, "common": 0.72, "frequent": 0.68}
"""Accuracy from which a task's documents become longer."""


def drawn(task: str, rng: random.Random, *, for_teacher: bool = False, is_varied: bool = True) -> Words:
    """Draw a wording: as often a combined one as one of the others, of which the teacher alone sees the last."""
    if is_varied and rng.random() < 0.5:
        return rng.choice(COMBINED[task])
    return rng.choice(WORDING[task] if for_teacher else WORDING[task][:-1])


class Writer:
    """Writes documents of about so many tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, n_questions: int = 12) -> None:
        self.tokenizer, self.n_questions = tokenizer, n_questions

    def size(self, text: str) -> int:
        """Return how many tokens a line or question takes with words of one token each."""
        return len(self.tokenizer(text.format(k="apple", v="17", w="apple"), add_special_tokens=False)["input_ids"])

    def write(
        self, task: str, words: Words, length: int, rng: random.Random, n_questions: int | None = None
    ) -> Document:
        """Write a document of one task."""
        n_questions = self.n_questions if n_questions is None else n_questions
        line, question = self.size(words.line), self.size(words.question) + 2
        if task in ("common", "frequent"):
            return listing(rng, words, task == "common", (length - question - 6) // line)
        if task == "variables":
            return variables(rng, words, length, line + 1)
        return facts(rng, words, task == "codes", length, line + 1, question, n_questions)


def facts(
    rng: random.Random, words: Words, is_long: bool, length: int, line: int, question: int, n_asked: int
) -> Document:
    line, question = line + 5 * is_long, question + 4 * is_long
    n_asked = min(n_asked, max(1, length // (2 * question)))
    n = max(2, min((length - n_asked * question) // line, len(NOUNS)))
    numbers = list(map(str, range(N_VALUES)))
    if is_long:
        keys = [" ".join(pair) for pair in zip(rng.choices(NOUNS, k=n), rng.sample(NOUNS, n))]
        values = [" ".join(rng.sample(numbers, 3)) for _ in keys]
    else:
        keys, values = rng.sample(NOUNS, n), rng.choices(numbers, k=n)
    pairs = list(zip(keys, values))
    text = "\n".join(words.line.format(k=key, v=value) for key, value in pairs)
    asked = [Asked(words.question.format(k=key), tuple(value.split())) for key, value in rng.choices(pairs, k=n_asked)]
    return Document(text, asked)


def variables(rng: random.Random, words: Words, length: int, line: int) -> Document:
    """Two chains of five names in filler; with room for fewer, shorter ones."""
    n_chains = 1 if length < 64 else 2
    n_names = 3 if length < 96 else 5
    names, numbers = rng.sample(NOUNS, n_chains * n_names), rng.sample(range(N_VALUES), n_chains)
    chains = [names[i::n_chains] for i in range(n_chains)]
    lines = []
    order = [i for i in range(n_chains) for _ in range(n_names)]
    rng.shuffle(order)
    place = [0] * n_chains
    for i in order:
        value = chains[i][place[i] - 1] if place[i] else numbers[i]
        lines.append(words.line.format(k=chains[i][place[i]], v=value))
        place[i] += 1
    room = (length - len(lines) * line - n_chains * (n_names + 8)) // 11
    for _ in range(room):
        name, other = rng.sample(PEOPLE, 2)
        lines.insert(rng.randrange(len(lines) + 1), f"{name} talked to {other} {rng.choice(TIMES)}.")
    asked = [Asked(words.question.format(v=number), tuple(chain)) for number, chain in zip(numbers, chains)]
    rng.shuffle(asked)
    return Document("\n".join(lines), asked)


def listing(rng: random.Random, words: Words, is_common: bool, n: int) -> Document:
    n, vocabulary = max(15, n), rng.sample(NOUNS, len(NOUNS))  # with fewer, words would tie
    if is_common:
        rare = 1 if n < 350 else 3
        top, rest = vocabulary[:3], vocabulary[3:]
        often = 10 * rare if n > 96 else 6
        listed = [word for word in top for _ in range(min(often, n // 5))]
        listed += islice(cycle(rest), n - len(listed))
    else:
        top = vocabulary[:3]
        counts = [round(0.62 * n / (k + 1) ** 2) for k in range(len(vocabulary))]
        counts[:3] = (max(least, count) for least, count in zip((6, 4, 3), counts))
        counts[3:] = (max(1, min(count, counts[2] // 2)) for count in counts[3:])
        listed = [word for word, count in zip(vocabulary, counts) for _ in range(count)][:n]
    rng.shuffle(listed)
    text = "".join(words.line.format(w=word) for word in listed).rstrip("\n")
    return Document(text, [Asked(words.question, tuple(top), in_order=not is_common)])


@dataclass
class Rows:
    """Documents as tokens, [B, L]: which belong to an answer, which are its words, and of which words any will do."""

    ids: Tensor
    inside: Tensor
    answer: Tensor
    any_of: dict[tuple[int, int], set[int]]


def as_rows(tokenizer: PreTrainedTokenizerBase, documents: Sequence[Document], rng: random.Random) -> Rows:
    texts, spans = [], []
    for document in documents:
        text, inside = document.text, []
        for asked in document.asked:
            answers = list(asked.answers)
            if not asked.in_order:
                rng.shuffle(answers)
            text += f"\n{asked.question}"
            inside.append((len(text), len(text) + sum(len(answer) + 1 for answer in answers)))
            text += "".join(f" {answer}" for answer in answers)
        texts.append(text)
        spans.append(inside)
    found = tokenizer(texts, padding=True, return_tensors="pt", return_offsets_mapping=True, padding_side="right")
    starts, ends = found.offset_mapping.unbind(-1)
    within = torch.zeros_like(found.input_ids, dtype=torch.bool)
    any_of, blank = {}, tokenizer.convert_tokens_to_ids("\u0120")  # the token before a number
    for row, inside in enumerate(spans):
        for low, high in inside:
            within[row] |= (starts[row] >= low) & (ends[row] <= high) & (ends[row] > starts[row])
    answer = within & (found.input_ids != blank)
    for row, document in enumerate(documents):
        if not document.asked[0].in_order:
            places = answer[row].nonzero().flatten().tolist()
            for i, place in enumerate(places):
                any_of[row, place] = set(found.input_ids[row, places[i:]].tolist())
    return Rows(found.input_ids, within, answer, any_of)


def losses(model: LlamaForCausalLM, rows: Rows, share: float = 0.1) -> tuple[Tensor, float]:
    """Loss on the answers, plus a little on some of the other tokens; the share of answers' tokens that are right."""
    hidden = model.model(input_ids=rows.ids, use_cache=False).last_hidden_state[:, :-1]
    targets, answer = rows.ids[:, 1:], rows.answer[:, 1:]
    others = (torch.rand(targets.shape) < share) & ~answer & (targets != model.config.pad_token_id)
    logits = model.lm_head(hidden[answer])
    wanted = one_hot(targets[answer], logits.shape[-1]).float()
    for n, (row, place) in enumerate(answer.nonzero().tolist() if rows.any_of else ()):
        if any_of := rows.any_of.get((row, place + 1)):
            wanted[n] = 0
            wanted[n, sorted(any_of)] = 1 / len(any_of)
    loss = cross_entropy(logits, wanted)
    if others.any():
        loss = loss + 0.1 * cross_entropy(model.lm_head(hidden[others]), targets[others])
    hits = logits.argmax(-1)
    right = wanted.gather(1, hits[:, None]) > 0
    return loss, right.float().mean().item()


@dataclass
class Progress:
    """How far a teacher has come: the length of each task's documents, as a place in `LENGTHS`, and its accuracy."""

    step: int = 0
    few_words: bool = True
    is_copying: bool = True
    level: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TASKS, 0))
    right: dict[str, float] = field(default_factory=lambda: dict.fromkeys((*TASKS, "copying"), 0.0))

    def update(self, hits: dict[str, float]) -> None:
        """Take a step's accuracies into account. Documents become longer as soon as they are answered."""
        for task, hit in hits.items():
            self.right[task] += (0.1 if task == "copying" else 0.05) * (hit - self.right[task])
            if task in TASKS and self.right[task] > ENOUGH[task] and self.level[task] < len(LENGTHS) - 1:
                self.level[task] += 1
                self.right[task] -= 0.1
        self.few_words &= self.right["copying"] < 0.8
        self.is_copying &= self.few_words or self.step < 250 or self.right["copying"] < 0.85
        self.step += 1

    def __str__(self) -> str:
        shown = [f"{task} {LENGTHS[self.level[task]]}: {self.right[task]:.2f}" for task in TASKS]
        return f"step {self.step:5d}  copying: {self.right['copying']:.2f}  {'  '.join(shown)}"


def teach(rank: int, options: argparse.Namespace, meeting: str) -> None:
    """Train a teacher from random weights: copying, first of few words, until it works; then all tasks at once.

    One of several processes that meet there. Each writes documents of its own; gradients are averaged.
    """
    world, file = options.processes, options.out / "teacher.pt"
    dist.init_process_group("gloo", meeting, rank=rank, world_size=world)
    torch.set_num_threads(1)
    _, tokenizer = load_teacher("tiny")
    run = TeacherRun(seed=options.seed, adamw_lr=2e-3, batch_size=48)
    torch.manual_seed(run.seed)
    model = make_model(run, tokenizer)
    trainer, batches, writer = Trainer(run, model), Batches(run, tokenizer), Writer(tokenizer)
    words, few = batches.words, batches.words[torch.randperm(len(batches.words))[:48]]
    progress, started = Progress(), time.time()
    if file.exists():
        saved = torch.load(file, weights_only=False)
        model.load_state_dict(saved["model"])
        for optimizer, state in zip(trainer.optimizers, saved["optimizers"]):
            optimizer.load_state_dict(state)
        progress = saved["progress"]
    while progress.step < options.steps:
        step = progress.step
        rng = batches.rng = random.Random(f"tasks {run.seed} {step} {rank}")
        torch.manual_seed(rng.getrandbits(48))
        trainer.scale_lr(min((step + 1) / 50, 1.0, (options.steps - step) / (0.4 * options.steps)))
        hits, tasks = {}, () if progress.is_copying else TASKS
        if not tasks or step % 4 == 0:
            batches.words = few if progress.few_words else words
            ids, again = batches.copying(*((96, 40) if tasks else (64, 16)))
            n = max(1, (12 if tasks else 72) // world)
            loss, hits["copying"] = losses(model, Rows(ids[:n], again[:n], again[:n], {}), share=0.0)
            loss.backward()
        for task in tasks:
            top = progress.level[task]
            length = LENGTHS[top if rng.random() < 0.6 else rng.randrange(top + 1)]
            n = max(1, round(SHARES[task] * options.tokens / length / world))
            documents = [writer.write(task, drawn(task, rng, for_teacher=True), length, rng) for _ in range(n)]
            loss, hits[task] = losses(model, as_rows(tokenizer, documents, rng))
            loss.backward()
        averaged = torch.tensor(list(hits.values()))
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        flat = torch.cat([averaged, *(gradient.flatten() for gradient in gradients)])
        dist.all_reduce(flat)
        averaged, *parts = (flat / world).split([len(averaged), *(gradient.numel() for gradient in gradients)])
        for gradient, part in zip(gradients, parts):
            gradient.copy_(part.view_as(gradient) / max(1, len(tasks)))
        trainer.step(torch.zeros((), requires_grad=True))
        progress.update(dict(zip(hits, averaged.tolist())))
        if rank == 0 and progress.step % 50 == 0:
            print(f"{time.time() - started:6.0f}s  {progress}", flush=True)
        if rank == 0 and progress.step % 500 == 0:
            states = [optimizer.state_dict() for optimizer in trainer.optimizers]
            torch.save({"model": model.state_dict(), "optimizers": states, "progress": progress}, file)
    if rank == 0:
        model.save_pretrained(options.out / "teacher")
        tokenizer.save_pretrained(options.out / "teacher")
    dist.destroy_process_group()


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
        document = Writer(self.tokenizer).write(task, drawn(task, rng), self.length, rng, 1)
        asked = document.asked[0]
        place = rng.randrange(len(asked.answers))
        answer = asked.answers[place]
        alike = re.findall(r"\d+" if answer.isdigit() else r"[a-z]+", document.text)
        others = sorted({word for word in alike if answer.isdigit() or word in NOUNS} - {*asked.answers})
        choices = rng.sample(
            [answer, *rng.sample(others, min(len(others), self.n_choices - 1))],
            k=min(len(others), self.n_choices - 1) + 1,
        )
        prompt = " ".join([f"{document.text}\n{asked.question}", *asked.answers[:place]])
        return Example(prompt, f" {answer}", tuple(f" {choice}" for choice in choices))

    def describe(self) -> dict[str, object]:
        return {"name": self.name, "length": self.length, "seed": self.seed}


def answered(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, n: int, lengths: Sequence[int], wording: int = -1
) -> dict[str, float]:
    """Share of each task's answers that a model generates, by length.

    By default in the wording that students never see. As in RULER, a code counts whole, and of several words each one
    that is named.
    """
    writer, found = Writer(tokenizer), {}
    for length, task in product(lengths, TASKS):
        rng = random.Random(f"measured {task} {length}")
        documents = [writer.write(task, WORDING[task][wording], length, rng, 1) for _ in range(n)]
        shares = []
        for part in chunked(documents, 16):
            prompts = tokenize(tokenizer, [f"{text}\n{asked[0].question}" for text, asked in part])
            ids_BL, mask_BL = left_pad(prompts, model.device)
            most = 2 * len(part[0].asked[0].answers) + 1
            options = {"max_new_tokens": most, "do_sample": False, "pad_token_id": tokenizer.pad_token_id}
            with eval_mode(model):
                said_BT = model.generate(ids_BL, attention_mask=mask_BL, **options)[:, ids_BL.shape[1] :]
            for said, document in zip(tokenizer.batch_decode(said_BT, skip_special_tokens=True), part):
                answers, words = document.asked[0].answers, re.findall(r"\w+", said.partition("\n")[0])
                named = len({*words[: len(answers)]} & {*answers}) / len(answers)
                shares.append(float(words[: len(answers)] == [*answers]) if task == "codes" else named)
        found[f"{task} {length}"] = sum(shares) / n
    return found


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
        return [self.batch(task, max(rng.choices(lengths, k=2)), rng) for task in TASKS]

    def batch(self, task: str, length: int, rng: random.Random) -> Batch:
        tokenizer, tokens = self.writer.tokenizer, self.tokens * (1 if self.is_equal else FEW_ANSWERS[task])
        n = max(1, round(tokens / length))
        wordings = [drawn(task, rng, is_varied=self.is_varied) for _ in range(n)]
        documents = [self.writer.write(task, words, length, rng) for words in wordings]
        rows = as_rows(tokenizer, documents, rng)
        mask = rows.inside.roll(-1, 1) if self.on_answers else rows.ids != tokenizer.pad_token_id
        return {"input_ids": rows.ids, "seq_idx": torch.zeros_like(rows.ids), "mask": mask}


SEEN, UNSEEN = "in a wording seen", "answered"
CHOSEN = "6 heads"
"""Students with heads chosen by greedy restoration."""
EQUAL = "6 heads of equal lessons"
"""Students with the same heads and equal lessons. The next two are compared with them."""
ABLATION = "6 heads by ablation"
FEW = "6 heads of few wordings"
"""Students with the chosen heads whose lessons have no combined wordings."""
LAYERS = "2 spread layers"


class Students:
    """Students of one teacher: all heads are aligned once for each seed, then every plan starts from there."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.teacher, self.tokenizer = load_teacher(str(options.out / "teacher"))

    def lessons(self, seed: int, steps: int, **kind: bool) -> Lessons:
        return Lessons(Writer(self.tokenizer), seed, steps, self.options.student_tokens, **kind)

    def build(self, plan: HeadPlan, seed: int, **start: Any) -> HybridForCausalLM:
        shape = {"d_state": self.options.d_state, "recurrence": self.options.recurrence}
        return build_student(self.teacher, plan, **shape, seed=seed, **start)[0]

    def aligned(self, seed: int) -> HybridForCausalLM:
        """Return the student without attention, aligned layer by layer, from its file if there is one."""
        steps, file = self.options.align_steps, self.options.out / f"aligned-{seed}.pt"
        plan = HeadPlan.none(self.teacher)
        if file.exists():
            student = self.build(plan, seed, init="random")
            student.load_state_dict(torch.load(file))
            return student
        lessons = self.lessons(seed, steps, on_answers=False, is_equal=True)
        calibration = lessons.batch("needles", 512, random.Random(seed))
        student = self.build(plan, seed, init="fitted", calibration=calibration)
        stage = LayerAlignment(student, self.teacher, Align(target="head"))
        for step in trained(stage, lessons, steps, self.options.align_rate):
            show(f"alignment, seed {seed}", step, steps)
        torch.save(student.state_dict(), file)
        return student

    def choose_heads(self, file: str) -> None:
        """Choose heads by single ablation, or by greedy restoration in the first seed's aligned student."""
        n, path = self.options.scoring_examples, self.options.out / file
        if path.exists():
            return
        if file == "scores.json":
            probe = RulerForm(self.tokenizer)
            score_heads(self.teacher, self.tokenizer, probe, n_examples=5 * n, min_accuracy=0.0).save(path)
        else:
            probe = RulerForm(self.tokenizer, length=self.options.restoration_tokens)
            student = self.aligned(self.options.seeds[0])
            chosen = greedy_restoration(student, self.teacher, self.tokenizer, probe, 6, n_examples=n)
            HeadPlan.from_pairs(self.teacher, chosen).save(path)

    def plan(self, name: str) -> HeadPlan:
        if name == LAYERS:
            return HeadPlan.layers(self.teacher, [1, 4])
        if name == ABLATION:
            return HeadPlan.top_k(HeadScores.load(self.options.out / "scores.json"), 6)
        return HeadPlan.load(self.options.out / "restored.json")

    def distill(self, name: str, seed: int) -> None:
        """Train a student and write what it answers."""
        file, steps = self.options.out / student_file(name, seed), self.options.distill_steps
        if file.exists():
            return
        plan = self.plan(name)
        student = self.build(plan, seed, init="random")
        graft_recurrent_heads(student, self.aligned(seed))
        stage = EndToEnd(student, self.teacher, Distill())
        is_equal = name in (EQUAL, ABLATION, FEW)
        lessons = self.lessons(seed, steps, on_answers=True, is_varied=name != FEW, is_equal=is_equal)
        for step in trained(stage, lessons, steps, self.options.distill_rate):
            show(f"{name}, seed {seed}", step, steps)
        student.save_pretrained(file.with_suffix(""))
        found = {"kept": name, "seed": seed, "heads": [list(heads) for heads in plan.kept]}
        write(file, found | self.measured(student))

    def measured(self, model: PreTrainedModel) -> dict[str, dict[str, float]]:
        """Return what a model answers in a wording that students never see, and in one that they do."""
        asked = (model, self.tokenizer, self.options.questions, self.options.lengths)
        return {UNSEEN: answered(*asked), SEEN: answered(*asked, wording=-2)}


def student_file(name: str, seed: int) -> str:
    return f"{name.replace(' ', '-')}-{seed}.json"


def show(name: str, step: int, steps: int) -> None:
    if step % 50 == 0:
        print(f"{time.strftime('%H:%M:%S')} {name}{f': step {step} of {steps}' if steps else ''}", flush=True)


def report(options: argparse.Namespace) -> None:
    """Write means and deviations over seeds, beside the teacher, and the students' share of it."""
    found = [read(file) for file in sorted(options.out.glob("*-[0-9].json"))]
    teacher = pd.DataFrame(read(options.out / "teacher.json"))

    def of_kept(entry: str) -> pd.DataFrame:
        return pd.DataFrame([{"kept": one["kept"], **one[entry]} for one in found]).groupby("kept")

    def shares(entry: str) -> dict[str, dict[str, float]]:
        """Return the means of the five tasks' shares, by length. More than the teacher's counts as all of it."""
        of_task = (of_kept(entry).mean() / teacher[entry]).clip(upper=1).T
        return of_task.groupby(lambda name: name.split()[1], sort=False).mean().round(4).to_dict()

    by_length = shares(UNSEEN)

    def answers(entry: str) -> dict[str, dict[str, str]]:
        means, deviations = of_kept(entry).mean(), of_kept(entry).std().fillna(0)
        return {
            name: {task: f"{means.loc[name, task]:.3f} ± {deviations.loc[name, task]:.3f}" for task in means}
            for name in means.index
        }

    record = {
        "teacher": teacher.to_dict(),
        "students": answers(UNSEEN),
        "students, in a wording seen": answers(SEEN),
        "share of the teacher, mean of the five tasks, by tokens": by_length,
        "the same, in a wording that students have seen": shares(SEEN),
        "seeds": of_kept(UNSEEN).size().to_dict(),
        "heads": {one["kept"]: one["heads"] for one in found},
        "settings": {name: value for name, value in vars(options).items() if name != "out"},
        **about("tasks in RULER's form, answered by generation"),
    }
    write(ROOT / "benchmarks" / "results" / "ruler_form.json", record)
    print((100 * of_kept(UNSEEN).mean()).round(1).T.to_string(), pd.DataFrame(by_length), sep="\n\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/ruler-form"), help="folder of the teacher and students")
    parser.add_argument("--seed", type=int, default=0, help="of the teacher")
    parser.add_argument("--steps", type=int, default=1800, help="of the teacher")
    parser.add_argument("--tokens", type=int, default=1600, help="of each task in a step of the teacher, about")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="of students with the chosen heads")
    parser.add_argument("--control-seeds", nargs="+", type=int, default=[0], help="of the other students")
    parser.add_argument("--d-state", type=int, default=16)
    parser.add_argument("--recurrence", default="gdn")
    parser.add_argument("--student-tokens", type=int, default=700, help="of a task in a student's step, at least")
    parser.add_argument("--align-steps", type=int, default=150)
    parser.add_argument("--align-rate", type=float, default=3e-3)
    parser.add_argument("--distill-steps", type=int, default=1400)
    parser.add_argument("--distill-rate", type=float, default=1e-3)
    parser.add_argument("--scoring-examples", type=int, default=100)
    parser.add_argument("--restoration-tokens", type=int, default=128, help="of the documents that heads are chosen on")
    parser.add_argument("--questions", type=int, default=64)
    parser.add_argument("--lengths", nargs="+", type=int, default=[256, 512, 1000])
    parser.add_argument("--processes", type=int, default=2, help="for gradients of the teacher, then for students")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    folder, measured = options.out / "teacher", options.out / "teacher.json"
    if not (folder / "config.json").exists():
        with TemporaryDirectory() as met:
            spawn(teach, (options, f"file://{met}/meeting"), options.processes)
    torch.set_num_threads(1)
    if not measured.exists():
        students = Students(options)
        write(measured, students.measured(students.teacher))
    stages = (
        [("aligned", seed) for seed in options.seeds],
        [("choose_heads", file) for file in ("restored.json", "scores.json")],
        [("distill", name, seed) for name in (CHOSEN, EQUAL) for seed in options.seeds]
        + [("distill", name, seed) for name in (ABLATION, FEW, LAYERS) for seed in options.control_seeds],
    )
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        for stage in stages:
            list(pool.map(run_job, [(options, *job) for job in stage]))
    report(options)


def run_job(job: tuple[Any, ...]) -> None:
    """Call a method of `Students` in a process of its own."""
    torch.set_num_threads(1)
    options, method, *arguments = job
    getattr(Students(options), method)(*arguments)


if __name__ == "__main__":
    main()
