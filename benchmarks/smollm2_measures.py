"""Measures of what a student keeps of SmolLM2-135M-Instruct: questions near and far, needles, text, bytes of cache."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from records import read, write
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hybrid_distill.assets import general_facts_path
from hybrid_distill.evaluation.evaluate import model_cache_bytes
from hybrid_distill.evaluation.measure import agreement
from hybrid_distill.model.mixer import zero_part
from hybrid_distill.probes import Example
from hybrid_distill.probes.answering import answer_choices, answer_generation
from hybrid_distill.probes.knowledge import Knowledge
from hybrid_distill.probes.kv_retrieval import KVRetrieval
from hybrid_distill.probes.plain_text import text_batches
from hybrid_distill.probes.prompt_formats import with_prompt_format
from hybrid_distill.probes.registry import make_probe

__all__ = [
    "LENGTHS",
    "N_EXAMPLES",
    "SIZES",
    "Measures",
    "measure_one",
    "missing_figures",
    "n_needles",
]

N_EXAMPLES = 64
N_NEEDLES = 32
SIZES = (4, 8, 16)
NEEDLES = ("niah_single_1", "niah_multikey_2")
LENGTHS = (512, 1024, 2048)
BANDS = (128, 512, 2048)
"""Ends of the bands of positions whose perplexity is measured."""
PIECE = 9000
"""Characters of a held-out text: enough for 2,048 tokens."""
N_FILLER = 1000

Measure = Callable[[PreTrainedModel], Any]


class Measures:
    """Questions and texts of all rows, and what a model makes of each."""

    def __init__(
        self, teacher: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, held_out: Path
    ) -> None:
        self.teacher = teacher
        self.tokenizer = tokenizer
        pages = [json.loads(line)["text"] for line in held_out.read_text().splitlines()]
        self.texts = list(_pieces(pages))
        self.needles_file = held_out.with_name("needles.json")
        self.kept_needles = read(self.needles_file)
        ids = tokenizer(pages[-1])["input_ids"][:N_FILLER]
        self.filler = str(tokenizer.decode(ids, skip_special_tokens=True))
        self.knowledge = Knowledge(general_facts_path()).examples()

    def all(self) -> dict[str, Measure]:
        """Return every measure by its name in measured.json."""
        measures: dict[str, Measure] = {"text": self.text}
        measures["knowledge"] = lambda model: self.by_choice(model, self.knowledge)
        far = [
            replace(question, prompt=f"{self.filler}\n\n{question.prompt}")
            for question in self.knowledge[:64]
        ]
        measures["knowledge after filler"] = lambda model: self.by_choice(model, far, batch_size=4)
        for size in SIZES:
            examples = KVRetrieval(size, seed=1).examples(N_EXAMPLES)
            measures[f"{size} pairs"] = self._choice(examples)
            measures[f"{size} pairs, generated"] = self._generation(examples)
            chat = with_prompt_format(KVRetrieval(size, seed=1), "chat", self.tokenizer).examples(
                N_EXAMPLES
            )
            measures[f"{size} pairs, chat"] = self._generation(chat)
            measures[f"{size} pairs before filler"] = self._choice(
                [self.apart(e) for e in examples], batch_size=4
            )
        for task in NEEDLES:
            for length in LENGTHS:
                examples = self.needles(task, length, n_needles(length), seed=1)
                measures[f"{task} at {length}"] = self._choice(examples, batch_size=4)
        return measures

    def needles(self, task: str, length: int, n: int, seed: int) -> list[Example]:
        """Return RULER's questions.

        They are kept beside the text: a machine without RULER's generators can ask them too.
        """
        kept = self.kept_needles
        name = f"{task} at {length}, seed {seed}"
        if name not in kept:
            probe = make_probe(task, n_tokens=length, seed=seed, tokenizer=self.tokenizer)
            kept[name] = [asdict(example) for example in probe.examples(n)]
            write(self.needles_file, kept)
        return [Example(e["prompt"], e["answer"], tuple(e["choices"])) for e in kept[name]]

    def apart(self, example: Example) -> Example:
        """Return the question with filler between its dictionary and its last line."""
        dictionary, _, question = example.prompt.rpartition("\n")
        return replace(example, prompt=f"{dictionary}\n\n{self.filler}\n\n{question}")

    def _choice(self, examples: list[Example], batch_size: int = 16) -> Measure:
        return lambda model: self.by_choice(model, examples, batch_size)

    def _generation(self, examples: list[Example]) -> Measure:
        return lambda model: (
            answer_generation(model, self.tokenizer, examples, batch_size=16).double().mean().item()
        )

    def by_choice(
        self, model: PreTrainedModel, examples: list[Example], batch_size: int = 16
    ) -> float:
        return answer_choices(model, self.tokenizer, examples, batch_size=batch_size).accuracy

    @torch.no_grad()
    def text(self, model: PreTrainedModel) -> dict[str, Any]:
        """Return perplexity by position, and over all positions agreement with the teacher and KL to it."""
        counts = dict.fromkeys(BANDS, 0)
        losses = dict.fromkeys(BANDS, 0.0)
        n_same = 0.0
        divergence = 0.0
        for batch in text_batches(
            model, self.tokenizer, self.texts, max_tokens=max(BANDS), batch_size=1
        ):
            logits = batch.logits(model)
            same, kl = agreement(logits, batch.logits(self.teacher))
            n_same += same.sum().item()
            divergence += kl.sum().item()
            loss_T = batch.token_losses(logits)[0].double()
            first = 0
            for last in BANDS:
                losses[last] += loss_T[first:last].sum().item()
                counts[last] += len(loss_T[first:last])
                first = last
        total = sum(counts.values())
        by_position = {
            f"perplexity to {last}": math.exp(losses[last] / counts[last]) for last in BANDS
        }
        return {
            **by_position,
            "perplexity": math.exp(sum(losses.values()) / total),
            "agreement": n_same / total,
            "kl": divergence / total,
            "tokens": total,
        }


def n_needles(length: int) -> int:
    """Return how many needles are asked for in texts of this length."""
    return N_NEEDLES if length <= 1024 else N_NEEDLES // 2


def _pieces(pages: list[str]) -> Iterator[str]:
    for page in pages:
        for start in range(0, len(page) - PIECE, PIECE):
            yield page[start : start + PIECE]


def missing_figures(
    model: PreTrainedModel, measures: Mapping[str, Measure], record: dict[str, Any], path: Path
) -> Iterator[tuple[str, Any]]:
    """Measure what a row's record lacks; write and yield each figure as soon as it is known."""
    for name, measure in measures.items():
        if name not in record:
            record[name] = measure(model)
            write(path, record)
            yield name, record[name]


def measure_one(model: PreTrainedModel, measures: Measures, path: Path) -> None:
    """Write what a model's measured.json lacks, each figure as soon as it is known."""
    record = read(path)
    dtype = str(model.dtype).removeprefix("torch.")
    if record.setdefault("dtype", dtype) != dtype:
        raise SystemExit(
            f"{path} was measured in {record['dtype']}; pass --dtype {record['dtype']}"
        )
    record["cache"] = model_cache_bytes(model)["cache_bytes"][4096]
    for name, figure in missing_figures(model, measures.all(), record, path):
        print(f"{path.parent.name}: {name}: {figure}", flush=True)
    mixers = getattr(model, "mixers_with", None)
    for part in ("recurrence", "window"):
        name = f"text without {part}"
        if mixers is not None and mixers(part) and name not in record:
            with zero_part(mixers(part), part):
                record[name] = measures.text(model)
            write(path, record)
