"""Ablate every head: round by round, and in each round layer by layer, so that a stopped call resumes.

Shapes: H head, M prompt, T text.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from ..io import Record
from ..plan import HeadId
from ..progress import Phase
from .forwards import Forwards, FullForwards
from .measure import measure, not_measured
from .probe_batch import ProbeBatch, own_batches
from .probe_rows import PromptRow, TextRow
from .racing import Race
from .resume_log import ResumeLog

log = logging.getLogger(__name__)


class Round(NamedTuple):
    """Rows to measure before heads drop out of a race; without a race, all rows."""

    positions: slice
    """Its prompts, by their positions in the order of measurement."""
    prompts: list[PromptRow]
    texts: list[TextRow]
    batches: list[ProbeBatch]
    """This process's share of the prompts and texts."""
    is_last: bool


@dataclass(eq=False)
class AblationRun:
    """Results of each of ``heads`` on each prompt and text, filled in round by round.

    ``prompts`` are in the order of measurement, and so are the columns of the tables. NaN marks a
    prompt or a text that a head was not measured on.
    """

    forwards: Forwards
    prompts: list[PromptRow]
    texts: list[TextRow]
    heads: list[HeadId]
    race: Race | None
    resume_log: ResumeLog

    def __post_init__(self) -> None:
        self.accuracy_HM = not_measured(len(self.heads), len(self.prompts))
        self.logprob_HM = not_measured(len(self.heads), len(self.prompts))
        self.loss_HT = not_measured(len(self.heads), len(self.texts))

    def log_estimate(self, seconds: float) -> None:
        """Log how long the ablations will take, from the seconds of the baseline."""
        rows = [*self.prompts, *self.texts]
        layers = [head.layer for head in self.heads]
        # The baseline took as long as full forwards with one head ablated.
        forwards = self.forwards
        in_full = FullForwards(forwards.model, forwards.sites, forwards.sizer)
        n_baselines = forwards.work(rows, layers) / in_full.work(rows, layers[:1])
        or_less = "" if self.race is None else " or less, by racing"
        log.info(
            "%d heads, %d prompts, %d texts: %s, about %.1f minutes%s",
            len(layers),
            len(self.prompts),
            len(self.texts),
            forwards,
            n_baselines * seconds / 60,
            or_less,
        )

    def ablate(self, progress: bool) -> None:
        """Measure every head on every prompt and text; in a race, only until it drops out."""
        try:
            with Phase("scoring heads", hidden=not progress) as phase:
                self._run_rounds(phase)
        # Stopped by hand after hours: tell the user what is saved, before the traceback.
        except KeyboardInterrupt:
            consequence = "nothing is kept"
            if self.resume_log.path is not None:
                consequence = f"the same call continues from {self.resume_log.path}"
            n_layers = len(self.resume_log.steps)
            log.warning("scoring stopped after %d layers; %s", n_layers, consequence)
            raise

    def _run_rounds(self, phase: Phase) -> None:
        # Indices into the tables, which also hold the heads that have dropped out.
        racing = list(range(len(self.heads)))
        for current in self._rounds():
            self.forwards.begin(current.batches)
            start = current.positions.start
            stop = current.positions.stop
            layers = [self.heads[index].layer for index in racing]
            rows_left = [*self.prompts[start:], *self.texts]
            phase.total = phase.done + self.forwards.work(rows_left, layers)
            phase.note = f"{len(racing)} heads, prompts {start + 1} to {stop}"
            self._ablate_racing(racing, current, phase)
            # After the last round there is nothing to save by dropping heads.
            if self.race is not None and not current.is_last:
                stays = self.race.stay(self.accuracy_HM[racing, :stop])
                racing = [index for index, stay in zip(racing, stays) if stay]

    def _rounds(self) -> Iterator[Round]:
        """Yield the rounds, in the order of measurement."""
        stops = [len(self.prompts)] if self.race is None else self.race.rounds
        start = 0
        for stop in stops:
            is_last = stop == len(self.prompts)
            positions = slice(start, stop)
            prompts = self.prompts[positions]
            # In the last round only: heads that drop out never need their control loss.
            texts = self.texts if is_last else []
            batches = [*own_batches(prompts), *own_batches(texts)]
            yield Round(positions, prompts, texts, batches, is_last)
            start = stop

    def _ablate_racing(self, racing: list[int], current: Round, phase: Phase) -> None:
        """Measure the heads with these indices in one round, layer by layer."""
        by_layer: dict[int, list[int]] = {}
        for index in racing:
            by_layer.setdefault(self.heads[index].layer, []).append(index)
        rows = [*current.prompts, *current.texts]
        work_done = phase.done
        # Bottom to top: forwards continue from the layer below.
        for layer, in_layer in sorted(by_layer.items()):
            heads = [self.heads[index] for index in in_layer]
            step = self.resume_log.next(partial(self._measure_layer, current, heads, phase))
            self._store(step, in_layer, current.positions)
            work_done += self.forwards.work(rows, [layer] * len(heads))
            # Measuring has advanced the phase by estimates, and a step read from the file not at all.
            phase.update(work_done - phase.done)

    def _measure_layer(self, current: Round, heads: Sequence[HeadId], phase: Phase) -> Record:
        """Measure one layer's heads in one round, as JSON."""
        measured = measure(
            self.forwards,
            current.batches,
            heads,
            n_prompts=len(self.prompts),
            n_texts=len(self.texts),
            phase=phase,
        )
        numbers = [row.number for row in current.prompts]
        step = {
            "accuracy": measured.accuracy_HM[:, numbers].tolist(),
            "logprob": measured.logprob_HM[:, numbers].tolist(),
        }
        # By round, not by batches: this process may have had no text, but results are shared.
        if current.is_last:
            step["loss"] = measured.loss_HT.tolist()
        return step

    def _store(self, step: Record, in_layer: list[int], positions: slice) -> None:
        """Enter a step, measured or read from the file, into the tables."""
        self.accuracy_HM[in_layer, positions] = torch.tensor(step["accuracy"], dtype=torch.float64)
        self.logprob_HM[in_layer, positions] = torch.tensor(step["logprob"], dtype=torch.float64)
        if "loss" in step:
            self.loss_HT[in_layer] = torch.tensor(step["loss"], dtype=torch.float64)
