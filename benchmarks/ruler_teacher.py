"""Train a teacher of the embedded one's shape and tokenizer on the tasks of `ruler_tasks.py`; `ruler_form.py` calls it.

From random weights: copying, first of few words, until it works; then all tasks at once, in documents that become
longer as soon as they are answered. Several processes write documents of their own and average their gradients.
"""

from __future__ import annotations

import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from records import ROOT
from ruler_tasks import LENGTHS, TASKS, Rows, Writer, as_rows, draw_wording
from torch import Tensor
from torch.multiprocessing.spawn import spawn
from torch.nn.functional import cross_entropy, one_hot
from transformers import LlamaForCausalLM

from hybrid_distill.teacher import load_teacher

sys.path.insert(0, str(ROOT / "recipes"))
from train_tiny_teacher import Batches, TeacherRun, Trainer, make_model

SHARES = {"needles": 0.7, "codes": 0.7, "variables": 0.9, "common": 1.6, "frequent": 2.2}
"""Tokens of each task in a step, in units of ``tokens``."""
ENOUGH = {"needles": 0.85, "codes": 0.85, "variables": 0.85, "common": 0.72, "frequent": 0.68}
"""Accuracy from which a task's documents become longer."""
N_FEW_WORDS = 48
Hits = dict[str, float]
"""Share of the answers' tokens that are right, by task."""


@dataclass
class Progress:
    """How far a teacher has come: the length of each task's documents, as a place in `LENGTHS`, and its accuracy."""

    step: int = 0
    few_words: bool = True
    is_copying: bool = True
    level: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TASKS, 0))
    right: Hits = field(default_factory=lambda: dict.fromkeys((*TASKS, "copying"), 0.0))

    def update(self, hits: Hits) -> None:
        """Take a step's accuracies into account."""
        for task, hit in hits.items():
            weight = 0.1 if task == "copying" else 0.05
            self.right[task] += weight * (hit - self.right[task])
            if task in TASKS:
                self.lengthen(task)
        self.few_words &= self.right["copying"] < 0.8
        self.is_copying &= self.few_words or self.step < 250 or self.right["copying"] < 0.85
        self.step += 1

    def lengthen(self, task: str) -> None:
        """Go to the next length where enough is answered."""
        is_longest = self.level[task] == len(LENGTHS) - 1
        if self.right[task] > ENOUGH[task] and not is_longest:
            self.level[task] += 1
            # Longer documents are answered less often: without this, one good step would skip a length.
            self.right[task] -= 0.1

    def __str__(self) -> str:
        words = [f"step {self.step:5d}", f"copying: {self.right['copying']:.2f}"]
        for task in TASKS:
            words.append(f"{task} {LENGTHS[self.level[task]]}: {self.right[task]:.2f}")
        return "  ".join(words)


def losses(model: LlamaForCausalLM, rows: Rows, share: float = 0.1) -> tuple[Tensor, float]:
    """Return the loss on the answers plus a little on a share of the other tokens, and the share of answers right."""
    hidden = model.model(input_ids=rows.ids, use_cache=False).last_hidden_state[:, :-1]
    targets = rows.ids[:, 1:]
    is_answer = rows.answer[:, 1:]
    is_drawn = torch.rand(targets.shape) < share
    is_other = is_drawn & ~is_answer & (targets != model.config.pad_token_id)

    logits = model.lm_head(hidden[is_answer])
    wanted = wanted_tokens(rows, logits.shape[-1])
    loss = cross_entropy(logits, wanted)
    if is_other.any():
        other_logits = model.lm_head(hidden[is_other])
        loss = loss + 0.1 * cross_entropy(other_logits, targets[is_other])
    guesses = logits.argmax(-1, keepdim=True)
    is_right = wanted.gather(1, guesses) > 0
    return loss, is_right.float().mean().item()


def wanted_tokens(rows: Rows, n_tokens: int) -> Tensor:
    """Return the probability that each token should have, for each token of an answer.

    The words of a list may come in any order: each that is left has the same.
    """
    targets = rows.ids[:, 1:]
    is_answer = rows.answer[:, 1:]
    wanted = one_hot(targets[is_answer], n_tokens).float()
    for number, (row, place) in enumerate(is_answer.nonzero().tolist()):
        any_of = rows.any_of.get((row, place + 1))
        if any_of:
            wanted[number] = 0
            wanted[number, sorted(any_of)] = 1 / len(any_of)
    return wanted


class Lesson:
    """The teacher's training as one of several processes sees it."""

    def __init__(self, rank: int, n_processes: int, steps: int, tokens: int, seed: int) -> None:
        self.rank = rank
        self.n_processes = n_processes
        self.steps = steps
        self.tokens = tokens
        self.run = TeacherRun(seed=seed, adamw_lr=2e-3, batch_size=48)
        _, self.tokenizer = load_teacher("tiny")
        torch.manual_seed(seed)
        self.model = make_model(self.run, self.tokenizer)
        self.trainer = Trainer(self.run, self.model)
        self.batches = Batches(self.run, self.tokenizer)
        self.writer = Writer(self.tokenizer)
        self.words = self.batches.words
        self.few_words = self.words[torch.randperm(len(self.words))[:N_FEW_WORDS]]
        self.progress = Progress()

    def step(self) -> None:
        """Take one step on the mean of all processes' gradients."""
        step = self.progress.step
        rng = random.Random(f"tasks {self.run.seed} {step} {self.rank}")
        self.batches.rng = rng
        torch.manual_seed(rng.getrandbits(48))
        self.trainer.scale_lr(self.rate(step))

        hits: Hits = {}
        tasks = () if self.progress.is_copying else TASKS
        if not tasks or step % 4 == 0:
            rows = self.copied(is_alone=not tasks)
            hits["copying"] = self.learn(rows, share=0.0)
        for task in tasks:
            hits[task] = self.learn(self.documents(task, rng))

        hits = self.averaged(hits, n_losses=max(1, len(tasks)))
        # The gradients are there already; the trainer's own backward adds nothing to them.
        self.trainer.step(torch.zeros((), requires_grad=True))
        self.progress.update(hits)

    def rate(self, step: int) -> float:
        """Return the share of the learning rate: it rises for 50 steps and falls over the last 40 %."""
        warm_up = (step + 1) / 50
        decay = (self.steps - step) / (0.4 * self.steps)
        return min(warm_up, 1.0, decay)

    def learn(self, rows: Rows, **options: float) -> float:
        """Add the gradients of some rows; return the share of answers right."""
        loss, hit = losses(self.model, rows, **options)
        loss.backward()
        return hit

    def copied(self, *, is_alone: bool) -> Rows:
        """Return rows that say something twice; fewer and longer ones beside the tasks."""
        self.batches.words = self.few_words if self.progress.few_words else self.words
        shape = (96, 40)
        n_rows = 12
        if is_alone:
            shape = (64, 16)
            n_rows = 72
        ids_BL, again_BL = self.batches.copying(*shape)
        n = max(1, n_rows // self.n_processes)
        return Rows(ids_BL[:n], again_BL[:n], again_BL[:n], {})

    def documents(self, task: str, rng: random.Random) -> Rows:
        """Return documents of one length: mostly the longest that the task has come to."""
        level = self.progress.level[task]
        if rng.random() >= 0.6:
            level = rng.randrange(level + 1)
        length = LENGTHS[level]
        n_documents = round(SHARES[task] * self.tokens / length / self.n_processes)
        documents = []
        for _ in range(max(1, n_documents)):
            wording = draw_wording(task, rng, for_teacher=True)
            documents.append(self.writer.write(task, wording, length, rng))
        return as_rows(self.tokenizer, documents, rng)

    def averaged(self, hits: Hits, n_losses: int) -> Hits:
        """Average accuracies and gradients over the processes, in one message."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        tensors = [torch.tensor(list(hits.values())), *gradients]
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(flat)
        flat_means = flat / self.n_processes
        mean_hits, *mean_gradients = flat_means.split([tensor.numel() for tensor in tensors])
        for gradient, mean in zip(gradients, mean_gradients):
            gradient.copy_(mean.view_as(gradient) / n_losses)
        return dict(zip(hits, mean_hits.tolist()))


def teach(
    rank: int, meeting: str, n_processes: int, out: Path, lesson: tuple[int, int, int]
) -> None:
    """Train in one of several processes; the first one prints and saves."""
    dist.init_process_group("gloo", meeting, rank=rank, world_size=n_processes)
    torch.set_num_threads(1)
    training = Lesson(rank, n_processes, *lesson)
    progress = training.progress
    started = time.monotonic()
    while progress.step < training.steps:
        training.step()
        if rank == 0 and progress.step % 50 == 0:
            print(f"{time.monotonic() - started:6.0f}s  {progress}", flush=True)
    if rank == 0:
        training.model.save_pretrained(out)
        training.tokenizer.save_pretrained(out)
    dist.destroy_process_group()


def train_teacher(out: Path, n_processes: int, *, steps: int, tokens: int, seed: int) -> None:
    """Train a teacher and save it as a folder."""
    with TemporaryDirectory() as folder:
        meeting = f"file://{folder}/meeting"
        spawn(teach, (meeting, n_processes, out, (steps, tokens, seed)), n_processes)
