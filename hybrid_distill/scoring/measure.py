"""Measurements of each head: the same questions and texts for every ablated model.

Shapes: L layer, H query head (in `Measured`: every scored head), E prompt (in the order of measurement; mean over its
questions), T text, B row of a batch, X value that scores depend on (prompts: share of correct answers and the answer's
log-probability; texts: the loss).
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..distributed import agree_on, compute_everywhere, rank_and_world
from ..io import Record, write_json
from ..plan import HeadId
from ..progress import Phase
from ..teacher import HeadSite
from .forwards import Forwards
from .head_scores import HeadScores, spread
from .probe_batch import ProbeBatch, Question, Row, Text, own_batches
from .racing import Race
from .uncertainty import bootstrap_interval, split_half

AGREEMENT_AT = (1, 2, 5, 10, 20, 50, 100)
TRIED_TOKENS = 64
PARTIAL_FORMAT = "hybrid-distill/head-scores-partial/2"

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Measured:
    """Results of each of ``heads`` on each prompt, in the order of measurement; NaN marks prompts not tried."""

    model: PreTrainedModel
    questions: list[Question]
    texts: list[Text]
    heads: list[HeadId]
    race: Race | None

    def __post_init__(self) -> None:
        self.order = list(range(len(self.questions))) if self.race is None else self.race.order()
        self.rounds = [len(self.order)] if self.race is None else self.race.rounds
        self.right_HE = torch.full((len(self.heads), len(self.order)), math.nan, dtype=torch.float64)
        self.logprob_HE = self.right_HE.clone()
        self.loss_HT = torch.full((len(self.heads), len(self.texts)), math.nan, dtype=torch.float64)

    def samples(self) -> list[list[Row]]:
        """Choose rows for `fastest_exact`: questions of two lengths, one with a tree of choices, and short texts."""
        by_length = sorted(self.questions, key=lambda row: -len(row.tokens))
        chosen = [by_length[0], by_length[len(by_length) // 2], *[row for row in by_length if row.node][:1]]
        texts = sorted(self.texts, key=lambda row: -len(row.tokens))[:2]
        beginnings = [
            Text(row.number, row.tokens[: TRIED_TOKENS - n], self.model.device) for n, row in enumerate(texts)
        ]
        return [list(dict.fromkeys(chosen)), *([list(beginnings)] if texts else [])]

    def _collect(
        self, forwards: Forwards, batches: Sequence[ProbeBatch], heads: Sequence[HeadId], phase: Phase | None = None
    ) -> tuple[Tensor, Tensor]:
        """Measure every batch with each of a layer's heads ablated, or with none; share results among processes.

        Returns found_XHE of the prompts and found_XHT of the texts, by number; NaN where not measured.
        """
        n_rows = max(1, len(heads))
        found_XHE = torch.full((2, n_rows, len(self.questions)), math.nan, dtype=torch.float64)
        found_XHT = torch.full((1, n_rows, len(self.texts)), math.nan, dtype=torch.float64)

        def own() -> list[tuple[bool, list[int], Tensor]]:
            found, ablated = [], [head.head for head in heads]
            for batch in batches:
                read_HQ = forwards.without(batch, heads[0].layer, ablated) if heads else forwards.whole(batch)
                outcome_XHB_ = batch.outcome(read_HQ)
                _check_finite(outcome_XHB_[-1].sum(-1), batch, heads)
                if batch.kind is not Text:
                    outcome_XHB_[0] = outcome_XHB_[0] > 0  # from margins to correct answers
                found.append((batch.kind is Text, [row.number for row in batch.rows], outcome_XHB_.mean(-1)))
                if phase is not None:
                    phase.update(rank_and_world()[1] * forwards.work(batch.rows, [head.layer for head in heads]))
            return found

        for is_text, numbers, found_XHB in (each for shared in compute_everywhere(own) for each in shared):
            (found_XHT if is_text else found_XHE)[:, :, numbers] = found_XHB
        return found_XHE, found_XHT

    def baseline(self, forwards: Forwards) -> None:
        """Measure the model before ablation on all prompts and texts; log the estimated time for the ablations."""
        start = time.perf_counter()
        found_X1E, found_X1T = self._collect(forwards, [*own_batches(self.questions), *own_batches(self.texts)], [])
        self.right_E, self.logprob_E = found_X1E[:, 0, self.order]
        self.loss_T = found_X1T[0, 0]
        rows, layers = [*self.questions, *self.texts], [head.layer for head in self.heads]
        once = Forwards(self.model, forwards.sites, forwards.rows).work(rows, layers[:1])
        minutes = (time.perf_counter() - start) * forwards.work(rows, layers) / once / 60
        asked = f"{len(layers)} heads, {len(self.questions)} prompts, {len(self.texts)} texts: {forwards}"
        log.info("%s, about %.1f minutes%s", asked, minutes, "" if self.race is None else " or less, by racing")

    def ablate(self, forwards: Forwards, steps: Steps, progress: bool) -> None:
        """Measure every head on every example; in a race, only until it drops out."""
        try:
            with Phase("scoring heads", hidden=not progress) as phase:
                self._ablate(forwards, steps, phase)
        except KeyboardInterrupt:
            kept = "nothing is kept" if steps.path is None else f"the same call continues from {steps.path}"
            log.warning("scoring stopped after %d layers; %s", len(steps.measured), kept)
            raise

    def _ablate(self, forwards: Forwards, steps: Steps, phase: Phase) -> None:
        racing, seen, done = list(range(len(self.heads))), 0, 0
        for end in self.rounds:
            tried, untried = slice(seen, end), [self.questions[number] for number in self.order[seen:]]
            questions, texts = untried[: end - seen], self.texts if end == len(self.order) else []
            batches = [*own_batches(questions), *own_batches(texts)]
            forwards.begin(batches)
            phase.total = done + forwards.work([*untried, *self.texts], [self.heads[index].layer for index in racing])
            phase.note = f"{len(racing)} heads, prompts {seen + 1} to {end}"
            for layer in sorted({self.heads[index].layer for index in racing}):
                of_layer = [index for index in racing if self.heads[index].layer == layer]
                heads = [self.heads[index] for index in of_layer]
                step = steps.next(partial(self._step, forwards, batches, heads, tried, phase))
                self.right_HE[of_layer, tried] = torch.tensor(step["right"], dtype=torch.float64)
                self.logprob_HE[of_layer, tried] = torch.tensor(step["logprob"], dtype=torch.float64)
                if "loss" in step:
                    self.loss_HT[of_layer] = torch.tensor(step["loss"], dtype=torch.float64)
                done += forwards.work([*questions, *texts], [layer] * len(heads))
                phase.update(done - phase.done)  # includes steps read from the file
            if self.race is not None and end < len(self.order):
                stays = self.race.stay(self.right_E, self.right_HE[racing, :end])
                racing = [index for index, stay in zip(racing, stays) if stay]
            seen = end

    def _step(
        self, forwards: Forwards, batches: Sequence[ProbeBatch], heads: Sequence[HeadId], tried: slice, phase: Phase
    ) -> Record:
        """Measure one layer's heads on one round's examples, as JSON."""
        found_XHE, found_XHT = self._collect(forwards, batches, heads, phase)
        right_HE, logprob_HE = found_XHE[:, :, self.order[tried]]
        tables = {"right": right_HE, "logprob": logprob_HE}
        if tried.stop == len(self.order):
            tables["loss"] = found_XHT[0]  # even if this process had no text: results are shared
        return {name: table.tolist() for name, table in tables.items()}

    def scores(self, sites: Sequence[HeadSite], baseline: Record, provenance: Record) -> HeadScores:
        """Return the scores; heads that were not measured get NaN."""
        differences = {"accuracy": self.right_E - self.right_HE, "logprob": self.logprob_E - self.logprob_HE}
        if self.texts:
            differences["control"] = self.loss_HT - self.loss_T
        baseline = {
            **baseline,
            "accuracy": self.right_E.mean().item(),
            "answer_logprob": self.logprob_E.mean().item(),
            "control_loss": self.loss_T.mean().item() if self.texts else None,
        }
        model, heads = self.model, self.heads
        scores = HeadScores.from_differences(model, sites, heads, differences, baseline=baseline, provenance=provenance)
        ks = AGREEMENT_AT if self.race is None else (*AGREEMENT_AT, self.race.k)
        n_tried_LH = spread(model, sites, heads, (~self.right_HE.isnan()).sum(1))
        intervals = {
            f"{name}_interval_LH2": spread(model, sites, heads, bootstrap_interval(difference_HE))
            for name, difference_HE in differences.items()
        }
        halves = split_half(differences["accuracy"], differences["logprob"], ks) if len(self.order) > 1 else None
        return replace(scores, **intervals, n_examples_LH=n_tried_LH.nan_to_num(0).long(), agreement=halves)


def _check_finite(found_HB: Tensor, batch: ProbeBatch, heads: Sequence[HeadId]) -> None:
    """Raise ValueError for a non-finite result, naming the head and the example."""
    bad = (~found_HB.isfinite()).nonzero().tolist()
    if bad:
        index, row = bad[0]
        head = f"without {heads[index]}" if heads else "with all heads in place"
        raise ValueError(
            f"{head} the logits of {batch.rows[row]} are not finite, nor are those of {len(bad) - 1} more; load the "
            "model in float32 or bfloat16, check its weights, or leave the head out. Set resume_path to continue."
        )


class Steps:
    """File of measurements to resume from after an interruption; in scoring, a step is a layer's heads in one round.

    Without a path, nothing is read or written. Steps from another model, task or version are ignored with a warning.
    """

    def __init__(self, path: str | Path | None, provenance: Record) -> None:
        self.path = None if path is None else Path(path)
        self.task = json.loads(json.dumps({name: value for name, value in provenance.items() if name != "date"}))
        # All processes use what the main process reads: other machines may not have the file.
        self.measured: list[Record] = agree_on(self._read)
        self.n_used = 0

    def next(self, measure: Callable[[], Record]) -> Record:
        """Return the next step from the file; if it is not there, measure it and add it atomically."""
        if self.n_used == len(self.measured):
            self.measured.append(measure())
            if self.path is not None and rank_and_world()[0] == 0:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                record = {"format": PARTIAL_FORMAT, "provenance": self.task, "steps": self.measured}
                write_json(self.path, record, indent=None)
        self.n_used += 1
        return self.measured[self.n_used - 1]

    def _read(self) -> list[Record]:
        if self.path is None or not self.path.exists():
            return []
        try:
            record = json.loads(self.path.read_text())
            if (record["format"], record["provenance"]) == (PARTIAL_FORMAT, self.task):
                return record["steps"]
            reason = "they are from another model, task or version"
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            reason = f"they cannot be read: {error}"
        log.warning("measurements in %s are not used (%s); starting over", self.path, reason)
        return []
