"""Head ranking by attribution: each head's share of what a student has lost.

A student with windows keeps every head and loses what lies beyond the windows. Ablation cannot tell
a head that reads far from one that is needed nearby; attribution can. A gate on each head leads from
the student's head (0) to the teacher's (1). Integrated gradients (arXiv 1703.01365) split the gain in
the answer's log-probability among the gates: one backward pass serves all heads, and the shares add
up to the gain. Gates between a window and full attention are DuoAttention's (arXiv 2410.10819), which
trains them.

Shapes: B row of a batch, L attention layer (site), H query head, E example, T answer token, V
vocabulary.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..distributed import compute_everywhere, own_share, rank_and_world
from ..io import Record
from ..model.modeling_hybrid import HybridForCausalLM
from ..probes import Probe, check_counts
from ..probes.answering import answer_choices, forward, left_pad
from ..probes.checks import check_answerable
from ..probes.encoding import EncodedExample, encode_example
from ..progress import Phase
from ..teacher import attention_sites, eval_mode, longest_context
from .ablation import check_accuracy
from .head_scores import HeadScores, describe_run, heads_of, spread
from .measure import AGREEMENT_AT
from .restoration import merged_heads
from .resume_log import ResumeLog
from .uncertainty import bootstrap_interval, split_half

METHOD = "integrated gradients from the student's heads to the teacher's"
N_EXAMPLES = 24
ROUND = 8
"""Examples between two saves, of all processes together: a call may resume on another number of them."""
ON_CPU = 1
ON_GPU = ROUND
"""Rows per pass: a CPU gains nothing from several."""
INEXACT = 0.2
"""Share of the gain that the steps may miss before a warning."""

log = logging.getLogger(__name__)


def attribute_heads(
    student: HybridForCausalLM,
    teacher: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    probe: Probe,
    *,
    n_examples: int = N_EXAMPLES,
    n_steps: int = 5,
    batch_size: int | None = None,
    min_accuracy: float | None = None,
    progress: bool = True,
    resume_path: str | Path | None = None,
) -> HeadScores:
    """Score each head by its share of the answer's log-probability that the student loses.

    ``logprob_drop_LH`` is that share in nats, with standard errors and intervals over the examples;
    accuracy and control drops are not measured. Ask for what the student cannot see: with windows, a
    dictionary farther away than they reach (``KVRetrieval.distance``).

    Connected processes split the examples: every process must call this, and each gets the same
    scores.

    Args:
        student: Student whose heads are replaced: with windows, with a recurrence, or both.
        n_steps: Points of the integral (midpoint rule); each costs a forward and a backward pass.
        batch_size: Rows per pass, at most 8; None: 1 on a CPU, 8 on a GPU.
        min_accuracy: Accuracy required of the teacher. None: `ablation.ENOUGH`.
        resume_path: File that saves the measurements after every 8 examples.

    Raises ValueError for questions within the student's window, for a teacher below ``min_accuracy``, and if the
    student loses nothing.
    """
    check_counts(n_examples=n_examples, n_steps=n_steps)
    if batch_size is None:
        batch_size = ON_CPU if teacher.device.type == "cpu" else ON_GPU
    check_counts(batch_size=batch_size)
    examples = probe.examples(n_examples)
    # A recurrent model has no longest context.
    check_answerable(examples, tokenizer, longest_context(teacher.config) or sys.maxsize)
    encoded = [encode_example(tokenizer, example) for example in examples]
    _check_distance(encoded, student.config.window)
    answered = answer_choices(teacher, tokenizer, examples, batch_size=batch_size)
    check_accuracy(answered.accuracy, min_accuracy, probe)

    provenance = {
        "method": METHOD,
        "probe": probe.describe(),
        "n_examples": n_examples,
        "n_steps": n_steps,
        "student": _describe_student(student),
        **describe_run(teacher),
    }
    resume_log = ResumeLog(resume_path, provenance)
    gains: list[float] = []
    shares: list[list[list[float]]] = []
    with (
        _gated(student, teacher) as gates,
        Phase("attributing heads", hidden=not progress) as phase,
    ):
        phase.total = n_examples
        for first in range(0, n_examples, ROUND):
            numbers = range(first, min(first + ROUND, n_examples))
            measure = partial(_measure_round, gates, encoded, numbers, n_steps, batch_size, phase)
            step = resume_log.next(measure)
            gains += step["gain"]
            shares += step["share"]
            phase.update(numbers.stop - phase.done)  # includes rounds read from the file
    scores = _scores(teacher, torch.tensor(shares).double(), torch.tensor(gains), provenance)
    scores.baseline.update(accuracy=answered.accuracy, chance=probe.chance)
    _check_gain(scores.baseline, probe, student)
    return scores


def _check_distance(encoded: Sequence[EncodedExample], window: int) -> None:
    longest = max(len(row.prompt) for row in encoded)
    if longest <= window:
        raise ValueError(
            f"the questions have at most {longest} tokens, all within the window of {window}; ask from "
            "farther away (--distance), or take a shorter window."
        )


def _describe_student(student: HybridForCausalLM) -> Record:
    config = student.config
    return {
        "window": config.window,
        "sinks": config.sinks,
        "d_state": config.d_state,
        "kept": sum(len(heads) for heads in config.kept),
    }


@dataclass
class _Gates:
    """Student whose heads are mixed with the teacher's, each by its own gate."""

    student: HybridForCausalLM
    shape: tuple[int, int]
    value_BLH: Tensor

    def logprob(self, rows: Sequence[EncodedExample], value_BLH: Tensor) -> Tensor:
        """Return logprob_B of each row's answer under these gates, in float32."""
        self.value_BLH = value_BLH
        answers = [row.choices[row.answer] for row in rows]
        device = self.student.device
        tokens = [row.prompt + answer for row, answer in zip(rows, answers)]
        ids_BL, mask_BL = left_pad(tokens, device)
        longest = max(map(len, answers))
        output = forward(self.student, ids_BL, mask_BL, logits_to_keep=longest + 1)
        # The last token predicts nothing that is asked for.
        logits_BTV = output.logits[:, :-1]
        next_BT1 = ids_BL[:, -longest:, None]
        logprob_BT = logits_BTV.float().log_softmax(-1).gather(-1, next_BT1)[..., 0]
        # Left-padded: an answer is the last tokens of its row.
        places_T = torch.arange(longest, 0, -1, device=device)
        lengths_B = torch.tensor([len(answer) for answer in answers], device=device)
        is_answer_BT = places_T <= lengths_B[:, None]
        return (logprob_BT * is_answer_BT).sum(1)

    def constant(self, n_rows: int, value: float) -> Tensor:
        value_BLH = torch.full((n_rows, *self.shape), value, dtype=torch.float32)
        return value_BLH.to(self.student.device)


@contextmanager
def _gated(student: HybridForCausalLM, teacher: PreTrainedModel) -> Iterator[_Gates]:
    """Mix the teacher's heads into the student, by gates; gradients reach the gates alone."""
    student_sites = attention_sites(student)
    teacher_sites = attention_sites(teacher)
    n_heads = max(site.n_heads for site in teacher_sites)
    gates = _Gates(student, (len(teacher_sites), n_heads), torch.empty(0))

    def mixed(place: int, own_BLHP: Tensor, teacher_BLHP: Tensor) -> Tensor:
        gate_BH = gates.value_BLH[:, place, : own_BLHP.shape[2]]
        added = gate_BH[:, None, :, None] * (teacher_BLHP - own_BLHP).float()
        return own_BLHP + added.to(own_BLHP.dtype)

    with ExitStack() as stack:
        for model in (student, teacher):
            stack.enter_context(eval_mode(model))
            stack.enter_context(_frozen(model))
        for place, (own, other) in enumerate(zip(student_sites, teacher_sites, strict=True)):
            stack.enter_context(merged_heads(own, other, partial(mixed, place)))
        # `eval_mode` has turned gradients off.
        stack.enter_context(torch.enable_grad())
        yield gates


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Compute no gradients of parameters; restore which of them are trained afterwards."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def _measure_round(
    gates: _Gates,
    encoded: Sequence[EncodedExample],
    numbers: range,
    n_steps: int,
    batch_size: int,
    phase: Phase,
) -> Record:
    """Attribute the gain on these examples, this process's share of them here; return all, as JSON."""

    def measure_own() -> list[tuple[int, float, list[list[float]]]]:
        own = own_share(numbers)
        outcomes: list[tuple[int, float, list[list[float]]]] = []
        for first in range(0, len(own), batch_size):
            batch = own[first : first + batch_size]
            gain_B, share_BLH = _attribute(gates, [encoded[number] for number in batch], n_steps)
            outcomes += zip(batch, gain_B.tolist(), share_BLH.tolist())
            # All processes have about the same share, so all advance at this one's pace.
            phase.update(len(batch) * rank_and_world()[1])
        return outcomes

    outcomes = []
    for part in compute_everywhere(measure_own):
        outcomes += part
    outcomes.sort(key=lambda outcome: outcome[0])
    return {
        "gain": [gain for _, gain, _ in outcomes],
        "share": [share for _, _, share in outcomes],
    }


def _attribute(
    gates: _Gates, rows: Sequence[EncodedExample], n_steps: int
) -> tuple[Tensor, Tensor]:
    """Return gain_B, what all the teacher's heads add to the answer's log-probability, and share_BLH of each."""
    with torch.no_grad():
        with_student_B = gates.logprob(rows, gates.constant(len(rows), 0))
        with_teacher_B = gates.logprob(rows, gates.constant(len(rows), 1))
    share_BLH = gates.constant(len(rows), 0)
    for step in range(n_steps):
        value_BLH = gates.constant(len(rows), (step + 0.5) / n_steps).requires_grad_()
        logprob_B = gates.logprob(rows, value_BLH)
        # A row's gates touch that row alone, so the sum keeps rows apart.
        (gradient_BLH,) = torch.autograd.grad(logprob_B.sum(), value_BLH)
        share_BLH += gradient_BLH / n_steps
    return with_teacher_B - with_student_B, share_BLH


def _check_gain(baseline: Record, probe: Probe, student: HybridForCausalLM) -> None:
    gain = baseline["gain"]
    attributed = baseline["attributed"]
    if gain <= 0:
        raise ValueError(
            f"the student loses nothing on these questions ({probe.describe()}): the answer's "
            f"log-probability is {-gain:.3f} nats above the teacher's. Ask from farther away than its "
            f"window of {student.config.window} (--distance)."
        )
    if abs(attributed - gain) > INEXACT * gain:
        log.warning(
            "the heads' shares add up to %.2f nats, the gain is %.2f: take more steps (n_steps)",
            attributed,
            gain,
        )


def _scores(
    teacher: PreTrainedModel, share_ELH: Tensor, gain_E: Tensor, provenance: Record
) -> HeadScores:
    sites = attention_sites(teacher)
    heads = heads_of(sites)
    # Sites of fewer heads have gates that nothing read.
    places = {site.layer: place for place, site in enumerate(sites)}
    share_HE = torch.stack([share_ELH[:, places[layer], head] for layer, head in heads])
    scores = HeadScores.from_differences(
        teacher,
        sites,
        heads,
        {"logprob": share_HE},
        baseline={"gain": gain_E.mean().item(), "attributed": share_HE.sum(0).mean().item()},
        provenance=provenance,
    )
    interval_LH2 = spread(teacher, sites, heads, bootstrap_interval(share_HE))
    agreement = None
    if len(gain_E) > 1:
        agreement = split_half(share_HE, share_HE, AGREEMENT_AT)
        del agreement["overlap_by_logprob"]
    return replace(scores, logprob_interval_LH2=interval_LH2, agreement=agreement)
