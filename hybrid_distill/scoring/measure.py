"""Measure each head's ablation: the same questions and texts for every ablated model.

Shapes: L layer, H query head (every head to score, or those of one layer), E prompt (mean over its
questions), T text, B row of a batch, X value that scores depend on (prompts: share of correct
answers and the answer's log-probability; texts: the loss).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..distributed import compute_everywhere, rank_and_world
from ..io import Record
from ..plan import HeadId
from ..progress import Phase
from ..teacher import HeadSite
from .forwards import Forwards, FullForwards
from .head_scores import HeadScores, head_table
from .probe_batch import ProbeBatch, own_batches
from .probe_rows import ProbeRow, QuestionRow, TextRow
from .racing import Race
from .resume_log import ResumeLog
from .uncertainty import bootstrap_interval, split_half

AGREEMENT_AT = (1, 2, 5, 10, 20, 50, 100)
"""Sizes of the top-k lists whose agreement between halves of the examples is measured."""
SAMPLE_TOKENS = 64
"""Tokens of the texts on which the shortcut is tested."""

log = logging.getLogger(__name__)


class Outcome(NamedTuple):
    """Outcome_XHB of the rows with these numbers, which are all texts or all prompts."""

    is_text: bool
    numbers: list[int]
    values_XHB: Tensor


class Round(NamedTuple):
    """Examples to measure before heads drop out of a race; without a race, all examples."""

    prompts: slice
    """Its prompts, by their positions in the order of measurement."""
    questions: list[QuestionRow]
    texts: list[TextRow]
    batches: list[ProbeBatch]
    """This process's share of the questions and texts."""
    is_last: bool


@dataclass(eq=False)
class AblationRun:
    """Results of each of ``heads`` on each prompt, in the order of measurement.

    NaN marks a prompt that a head was not measured on.
    """

    model: PreTrainedModel
    questions: list[QuestionRow]
    texts: list[TextRow]
    heads: list[HeadId]
    race: Race | None

    def __post_init__(self) -> None:
        n_prompts = len(self.questions)
        self.order = list(range(n_prompts)) if self.race is None else self.race.order()
        self.accuracy_HE = _not_measured(len(self.heads), n_prompts)
        self.logprob_HE = _not_measured(len(self.heads), n_prompts)
        self.loss_HT = _not_measured(len(self.heads), len(self.texts))

    def samples(self) -> list[list[ProbeRow]]:
        """Choose rows for `fastest_exact`: two lengths, a tree of choices, and short texts."""
        longest_first = sorted(self.questions, key=_longest_first)
        median = longest_first[len(longest_first) // 2]
        chosen: list[ProbeRow] = [longest_first[0], median]
        chosen += [row for row in longest_first if row.node_of][:1]
        # A dict, not a set: it keeps their order.
        samples = [list(dict.fromkeys(chosen))]
        if self.texts:
            beginnings: list[ProbeRow] = []
            longest_texts = sorted(self.texts, key=_longest_first)[:2]
            for index, row in enumerate(longest_texts):
                # Different lengths, so that each is a batch of its own, as in scoring.
                tokens = row.tokens[: SAMPLE_TOKENS - index]
                beginnings.append(TextRow(row.number, tokens, self.model.device))
            samples.append(beginnings)
        return samples

    def rounds(self) -> Iterator[Round]:
        """Yield the rounds, in the order of measurement."""
        stops = [len(self.order)] if self.race is None else self.race.rounds
        start = 0
        for stop in stops:
            is_last = stop == len(self.order)
            prompts = slice(start, stop)
            questions = [self.questions[number] for number in self.order[prompts]]
            # In the last round only: heads that drop out never need their control loss.
            texts = self.texts if is_last else []
            batches = [*own_batches(questions), *own_batches(texts)]
            yield Round(prompts, questions, texts, batches, is_last)
            start = stop

    def baseline(self, forwards: Forwards) -> None:
        """Measure the model before ablation on all prompts and texts.

        Log the estimated time for the ablations.
        """
        began = time.perf_counter()
        batches = [*own_batches(self.questions), *own_batches(self.texts)]
        prompt_X1E, text_11T = self._measure(forwards, batches, [])
        self.log_estimate(forwards, seconds=time.perf_counter() - began)
        # By number until here; from here in the order of measurement, like the tables of heads.
        self.accuracy_E, self.logprob_E = prompt_X1E[:, 0, self.order]
        self.loss_T = text_11T[0, 0]

    def log_estimate(self, forwards: Forwards, seconds: float) -> None:
        """Log how long the ablations will take, from the seconds of the baseline."""
        rows = [*self.questions, *self.texts]
        layers = [head.layer for head in self.heads]
        # The baseline took as long as full forwards with one head ablated.
        in_full = FullForwards(self.model, forwards.sites, forwards.sizer)
        n_baselines = forwards.work(rows, layers) / in_full.work(rows, layers[:1])
        or_less = "" if self.race is None else " or less, by racing"
        log.info(
            "%d heads, %d prompts, %d texts: %s, about %.1f minutes%s",
            len(layers),
            len(self.questions),
            len(self.texts),
            forwards,
            n_baselines * seconds / 60,
            or_less,
        )

    def ablate(
        self,
        forwards: Forwards,
        resume_log: ResumeLog,
        progress: bool,
    ) -> None:
        """Measure every head on every example; in a race, only until it drops out."""
        try:
            with Phase("scoring heads", hidden=not progress) as phase:
                self._run_rounds(forwards, resume_log, phase)
        # Stopped by hand after hours: tell the user what is saved, before the traceback.
        except KeyboardInterrupt:
            consequence = "nothing is kept"
            if resume_log.path is not None:
                consequence = f"the same call continues from {resume_log.path}"
            log.warning("scoring stopped after %d layers; %s", len(resume_log.steps), consequence)
            raise

    def _run_rounds(
        self,
        forwards: Forwards,
        resume_log: ResumeLog,
        phase: Phase,
    ) -> None:
        # Indices into the tables, which also hold the heads that have dropped out.
        racing = list(range(len(self.heads)))
        for current in self.rounds():
            forwards.begin(current.batches)
            start = current.prompts.start
            stop = current.prompts.stop
            layers = [self.heads[index].layer for index in racing]
            rest = [self.questions[number] for number in self.order[start:]]
            phase.total = phase.done + forwards.work([*rest, *self.texts], layers)
            phase.note = f"{len(racing)} heads, prompts {start + 1} to {stop}"
            self._ablate_racing(racing, forwards, current, resume_log, phase)
            # After the last round there is nothing to save by dropping heads.
            if self.race is not None and not current.is_last:
                stays = self.race.stay(self.accuracy_HE[racing, :stop])
                racing = [index for index, stay in zip(racing, stays) if stay]

    def _ablate_racing(
        self,
        racing: list[int],
        forwards: Forwards,
        current: Round,
        resume_log: ResumeLog,
        phase: Phase,
    ) -> None:
        """Measure the heads with these indices on one round's examples, layer by layer."""
        by_layer: dict[int, list[int]] = {}
        for index in racing:
            by_layer.setdefault(self.heads[index].layer, []).append(index)
        rows = [*current.questions, *current.texts]
        work_done = phase.done
        # Bottom to top: forwards continue from the layer below.
        for layer, in_layer in sorted(by_layer.items()):
            heads = [self.heads[index] for index in in_layer]
            measure = partial(self._measure_layer, forwards, current, heads, phase)
            step = resume_log.next(measure)
            self._store(step, in_layer, current.prompts)
            work_done += forwards.work(rows, [layer] * len(heads))
            # Measuring has advanced the phase by estimates, and a step read from the file not at all.
            phase.update(work_done - phase.done)

    def _measure_layer(
        self,
        forwards: Forwards,
        current: Round,
        heads: Sequence[HeadId],
        phase: Phase,
    ) -> Record:
        """Measure one layer's heads on one round's examples, as JSON."""
        prompt_XHE, text_1HT = self._measure(forwards, current.batches, heads, phase)
        accuracy_HE, logprob_HE = prompt_XHE[:, :, self.order[current.prompts]]
        step = {"right": accuracy_HE.tolist(), "logprob": logprob_HE.tolist()}
        # By round, not by batches: this process may have had no text, but results are shared.
        if current.is_last:
            step["loss"] = text_1HT[0].tolist()
        return step

    def _store(
        self,
        step: Record,
        in_layer: list[int],
        prompts: slice,
    ) -> None:
        """Enter a step, measured or read from the file, into the tables."""
        self.accuracy_HE[in_layer, prompts] = torch.tensor(step["right"], dtype=torch.float64)
        self.logprob_HE[in_layer, prompts] = torch.tensor(step["logprob"], dtype=torch.float64)
        if "loss" in step:
            self.loss_HT[in_layer] = torch.tensor(step["loss"], dtype=torch.float64)

    def _measure(
        self,
        forwards: Forwards,
        batches: Sequence[ProbeBatch],
        heads: Sequence[HeadId],
        phase: Phase | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Measure every batch with each of a layer's heads ablated, or with none.

        Processes share their results. Returns prompt_XHE and text_1HT, by number; NaN where not
        measured.
        """
        layers = [head.layer for head in heads]

        def measure_own() -> list[Outcome]:
            outcomes = []
            for batch in batches:
                outcomes.append(_measure_batch(forwards, batch, heads))
                if phase is not None:
                    # All processes have about the same share, so all advance at this one's pace.
                    n_processes = rank_and_world()[1]
                    phase.update(n_processes * forwards.work(batch.rows, layers))
            return outcomes

        n_models = max(1, len(heads))
        prompt_XHE = _not_measured(2, n_models, len(self.questions))
        text_1HT = _not_measured(1, n_models, len(self.texts))
        for outcomes in compute_everywhere(measure_own):
            for outcome in outcomes:
                table = text_1HT if outcome.is_text else prompt_XHE
                table[:, :, outcome.numbers] = outcome.values_XHB
        return prompt_XHE, text_1HT

    def scores(
        self,
        sites: Sequence[HeadSite],
        chance: float,
        provenance: Record,
    ) -> HeadScores:
        """Return the scores; heads that were not measured get NaN."""
        differences = {
            "accuracy": self.accuracy_E - self.accuracy_HE,
            "logprob": self.logprob_E - self.logprob_HE,
        }
        if self.texts:
            differences["control"] = self.loss_HT - self.loss_T
        baseline = {
            "chance": chance,
            "accuracy": self.accuracy_E.mean().item(),
            "answer_logprob": self.logprob_E.mean().item(),
            "control_loss": self.loss_T.mean().item() if self.texts else None,
        }
        scores = HeadScores.from_differences(
            self.model,
            sites,
            self.heads,
            differences,
            baseline=baseline,
            provenance=provenance,
        )

        def by_layer(entry_H: Tensor) -> Tensor:
            return head_table(self.model, sites, self.heads, entry_H)

        intervals = {}
        for name, difference_HE in differences.items():
            intervals[name] = by_layer(bootstrap_interval(difference_HE))
        agreement = None
        if len(self.order) > 1:
            ks = AGREEMENT_AT if self.race is None else (*AGREEMENT_AT, self.race.k)
            agreement = split_half(differences["accuracy"], differences["logprob"], ks)
        n_examples_H = (~self.accuracy_HE.isnan()).sum(1)
        return replace(
            scores,
            accuracy_interval_LH2=intervals["accuracy"],
            logprob_interval_LH2=intervals["logprob"],
            control_interval_LH2=intervals.get("control"),
            # Heads that were not scored have no examples.
            n_examples_LH=by_layer(n_examples_H).nan_to_num(0).long(),
            agreement=agreement,
        )


def _not_measured(*shape: int) -> Tensor:
    """Make a table of results before they are measured: all NaN."""
    return torch.full(shape, math.nan, dtype=torch.float64)


def _longest_first(row: ProbeRow) -> int:
    return -len(row.tokens)


def _measure_batch(forwards: Forwards, batch: ProbeBatch, heads: Sequence[HeadId]) -> Outcome:
    """Measure a batch with each of a layer's heads ablated, or once with none.

    Returns the means over each row's questions.
    """
    if heads:
        value_HQ = forwards.without(batch, heads[0].layer, [head.head for head in heads])
    else:
        value_HQ = forwards.whole(batch)
    # Here E is a row's questions: each has its own margin.
    values_XHBE = batch.outcome(value_HQ)
    _check_finite(values_XHBE[-1].sum(-1), batch, heads)
    if not batch.is_text:
        margin_HBE, logprob_HBE = values_XHBE
        # A tie is wrong: the answer has to be above every other choice.
        is_right_HBE = (margin_HBE > 0).to(logprob_HBE.dtype)
        values_XHBE = torch.stack([is_right_HBE, logprob_HBE])
    numbers = [row.number for row in batch.rows]
    return Outcome(batch.is_text, numbers, values_XHBE.mean(-1))


def _check_finite(outcome_HB: Tensor, batch: ProbeBatch, heads: Sequence[HeadId]) -> None:
    """Raise ValueError for a non-finite result, naming the head and the example."""
    non_finite = (~outcome_HB.isfinite()).nonzero().tolist()
    if not non_finite:
        return
    index, row = non_finite[0]
    model = f"without {heads[index]}" if heads else "with all heads in place"
    raise ValueError(
        f"{model} the logits of {batch.rows[row]} are not finite, nor are those of {len(non_finite) - 1} "
        "more; load the model in float32 or bfloat16, check its weights, or leave the head out. "
        "Set resume_path to continue."
    )
