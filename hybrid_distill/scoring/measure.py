"""Measure a model on prompts and texts: whole, or with heads of one layer ablated in turn.

Shapes: H head (ablated in turn; one entry for the whole model), M prompt, T text, B row of a batch,
E question of a row, X figure (prompts: share of correct answers and the answer's log-probability;
texts: the loss).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..distributed import compute_everywhere, rank_and_world
from ..plan import HeadId
from ..progress import Phase
from .forwards import Forwards
from .probe_batch import ProbeBatch, own_batches
from .probe_rows import PromptRow, TextRow


class Baseline(NamedTuple):
    """The model before ablation; its prompts are in the order in which they were passed."""

    accuracy_M: Tensor
    logprob_M: Tensor
    loss_T: Tensor
    seconds: float
    """Time that the measurement took."""


class Measured(NamedTuple):
    """Figures by the number of prompt and text; NaN where not measured."""

    accuracy_HM: Tensor
    logprob_HM: Tensor
    loss_HT: Tensor


class _BatchFigures(NamedTuple):
    """Figures of the rows with these numbers, which are all texts or all prompts."""

    is_text: bool
    numbers: list[int]
    figure_XHB: Tensor


def measure_baseline(
    forwards: Forwards, prompts: Sequence[PromptRow], texts: Sequence[TextRow]
) -> Baseline:
    """Measure the model before ablation on all prompts and texts."""
    began = time.perf_counter()
    batches = [*own_batches(prompts), *own_batches(texts)]
    measured = measure(forwards, batches, [], n_prompts=len(prompts), n_texts=len(texts))
    seconds = time.perf_counter() - began
    numbers = [row.number for row in prompts]
    return Baseline(
        accuracy_M=measured.accuracy_HM[0, numbers],
        logprob_M=measured.logprob_HM[0, numbers],
        loss_T=measured.loss_HT[0],
        seconds=seconds,
    )


def measure(
    forwards: Forwards,
    batches: Sequence[ProbeBatch],
    heads: Sequence[HeadId],
    *,
    n_prompts: int,
    n_texts: int,
    phase: Phase | None = None,
) -> Measured:
    """Measure every batch with each of a layer's heads ablated, or once with none.

    Processes share their results: ``batches`` is this process's part of ``n_prompts`` and ``n_texts``.
    """
    layers = [head.layer for head in heads]

    def measure_own() -> list[_BatchFigures]:
        figures = []
        for batch in batches:
            figures.append(_measure_batch(forwards, batch, heads))
            if phase is not None:
                # All processes have about the same share, so all advance at this one's pace.
                n_processes = rank_and_world()[1]
                phase.update(n_processes * forwards.work(batch.rows, layers))
        return figures

    n_models = max(1, len(heads))
    prompt_XHM = not_measured(2, n_models, n_prompts)
    text_XHT = not_measured(1, n_models, n_texts)
    for figures_of_process in compute_everywhere(measure_own):
        for figures in figures_of_process:
            table = text_XHT if figures.is_text else prompt_XHM
            table[:, :, figures.numbers] = figures.figure_XHB
    accuracy_HM, logprob_HM = prompt_XHM
    return Measured(accuracy_HM, logprob_HM, text_XHT[0])


def not_measured(*shape: int) -> Tensor:
    """Make a table of figures before they are measured: all NaN."""
    return torch.full(shape, math.nan, dtype=torch.float64)


def _measure_batch(forwards: Forwards, batch: ProbeBatch, heads: Sequence[HeadId]) -> _BatchFigures:
    """Measure a batch with each of a layer's heads ablated, or once with none.

    Figures are means over each row's questions.
    """
    if heads:
        value_HQ = forwards.without(batch, heads[0].layer, [head.head for head in heads])
    else:
        value_HQ = forwards.whole(batch)
    figure_XHBE = batch.outcome(value_HQ)
    _check_finite(figure_XHBE[-1].sum(-1), batch, heads)
    if not batch.is_text:
        margin_HBE, logprob_HBE = figure_XHBE
        # A tie is wrong: the answer has to be above every other choice.
        is_right_HBE = (margin_HBE > 0).to(logprob_HBE.dtype)
        figure_XHBE = torch.stack([is_right_HBE, logprob_HBE])
    numbers = [row.number for row in batch.rows]
    return _BatchFigures(batch.is_text, numbers, figure_XHBE.mean(-1))


def _check_finite(outcome_HB: Tensor, batch: ProbeBatch, heads: Sequence[HeadId]) -> None:
    """Raise ValueError for a non-finite result, naming the head and the prompt or text."""
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
