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
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..distributed import compute_everywhere, own_share, rank_and_world
from ..io import Record
from ..model.modeling_hybrid import HybridForCausalLM
from ..probes import Example, Probe
from ..probes.answering import answer_choices, forward, left_pad
from ..probes.checks import check_answerable
from ..probes.encoding import EncodedExample, encode_example
from ..progress import Phase
from ..teacher import attention_sites, eval_mode, fingerprint, longest_context
from ..validation import check_counts
from .ablation import check_accuracy
from .head_scores import HeadScores, describe_run, head_table, heads_of
from .restoration import merged_heads
from .resume_log import ResumeLog
from .uncertainty import AGREEMENT_AT, bootstrap_interval, split_half

METHOD = "integrated gradients from the student's heads to the teacher's"
N_EXAMPLES = 24
ROUND = 8
"""Examples between two saves, of all processes together: a call may resume on another number of processes."""
ROWS_ON_CPU = 1
"""Rows per pass: a CPU gains nothing from several."""
ROWS_ON_GPU = ROUND
LARGEST_ERROR = 0.2
"""Error of the integral, as a share of the gain, above which a warning is logged."""

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
        resume_path: File that saves the teacher's accuracy, then the measurements after every 8 examples.

    Raises ValueError for questions within the student's window, for a teacher below ``min_accuracy``, and if the
    student loses nothing.
    """
    check_counts(n_examples=n_examples, n_steps=n_steps)
    if batch_size is None:
        batch_size = ROWS_ON_CPU if teacher.device.type == "cpu" else ROWS_ON_GPU
    check_counts(batch_size=batch_size)
    examples = probe.examples(n_examples)
    # A recurrent model has no longest context.
    check_answerable(examples, tokenizer, longest_context(teacher.config) or sys.maxsize)
    encoded = [encode_example(tokenizer, example) for example in examples]
    _check_distance(encoded, student.config.window)

    provenance = {
        "method": METHOD,
        "probe": probe.describe(),
        "n_examples": n_examples,
        "n_steps": n_steps,
        "student": _describe_student(student),
        **describe_run(teacher),
    }
    resume_log = ResumeLog(resume_path, provenance)
    ask = partial(_ask_teacher, teacher, tokenizer, examples, batch_size, progress)
    accuracy = resume_log.next(ask)["accuracy"]
    check_accuracy(accuracy, min_accuracy, probe)

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
            # Also for a round that was read from the file.
            phase.update(numbers.stop - phase.done)
    gain_E = torch.tensor(gains)
    share_ELH = torch.tensor(shares).double()
    scores = _scores(teacher, share_ELH, gain_E, provenance)
    scores.baseline.update(accuracy=accuracy, chance=probe.chance)
    _check_gain(scores.baseline, probe, student)
    return scores


def _ask_teacher(
    teacher: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    batch_size: int,
    progress: bool,
) -> Record:
    answers = answer_choices(
        teacher,
        tokenizer,
        examples,
        batch_size=batch_size,
        progress=progress,
        name="answers of the teacher",
    )
    return {"accuracy": answers.accuracy}


def _check_distance(encoded: Sequence[EncodedExample], window: int) -> None:
    """Raise ValueError if the student's window covers every prompt: it then loses nothing."""
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
        "recurrence": config.recurrence,
        "kept": sum(len(heads) for heads in config.kept),
        # Numbers of heads do not say which, nor whether it was trained.
        "fingerprint": fingerprint(student),
    }


@dataclass
class _Gates:
    """Student whose heads are mixed with the teacher's, each by its own gate."""

    student: HybridForCausalLM
    shape: tuple[int, int]
    """Layers and heads."""
    value_BLH: Tensor
    """Gates of the next forward: 0 for the student's head, 1 for the teacher's."""

    def logprob(self, rows: Sequence[EncodedExample], value_BLH: Tensor) -> Tensor:
        """Return logprob_B of each row's answer under these gates, in float32."""
        # Read by the hooks of `_gated`.
        self.value_BLH = value_BLH
        answers = [row.choices[row.answer] for row in rows]
        device = self.student.device
        tokens = [row.prompt + answer for row, answer in zip(rows, answers)]
        ids_BL, mask_BL = left_pad(tokens, device)
        longest = max(map(len, answers))
        output = forward(self.student, ids_BL, mask_BL, logits_to_keep=longest + 1)
        # Nothing follows the last token.
        logits_BTV = output.logits[:, :-1]
        next_BT1 = ids_BL[:, -longest:, None]
        logprob_BTV = logits_BTV.float().log_softmax(-1)
        logprob_BT = logprob_BTV.gather(-1, next_BT1)[..., 0]
        # Left-padded: an answer is the last tokens of its row.
        from_end_T = torch.arange(longest, 0, -1, device=device)
        length_B = torch.tensor([len(answer) for answer in answers], device=device)
        is_answer_BT = from_end_T <= length_B[:, None]
        return (logprob_BT * is_answer_BT).sum(1)

    def constant(self, n_rows: int, value: float) -> Tensor:
        """Return value_BLH with the same value for all gates."""
        value_BLH = torch.full((n_rows, *self.shape), value, dtype=torch.float32)
        return value_BLH.to(self.student.device)


@contextmanager
def _gated(student: HybridForCausalLM, teacher: PreTrainedModel) -> Iterator[_Gates]:
    """Mix the teacher's heads into the student, by gates; gradients reach the gates alone."""
    student_sites = attention_sites(student)
    teacher_sites = attention_sites(teacher)
    n_heads = max(site.n_heads for site in teacher_sites)
    gates = _Gates(student, (len(teacher_sites), n_heads), torch.empty(0))

    # In this function, L of BLHP is the length: the layer is chosen by its index.
    def interpolate(layer: int, own_BLHP: Tensor, teacher_BLHP: Tensor) -> Tensor:
        # A layer may have fewer heads than the largest one.
        gate_BH = gates.value_BLH[:, layer, : own_BLHP.shape[2]]
        difference_BLHP = (teacher_BLHP - own_BLHP).float()
        added_BLHP = gate_BH[:, None, :, None] * difference_BLHP
        return own_BLHP + added_BLHP.to(own_BLHP.dtype)

    with ExitStack() as stack:
        for model in (student, teacher):
            stack.enter_context(eval_mode(model))
            stack.enter_context(_frozen(model))
        for layer, (own, other) in enumerate(zip(student_sites, teacher_sites, strict=True)):
            stack.enter_context(merged_heads(own, other, partial(interpolate, layer)))
        # `eval_mode` has turned gradients off.
        stack.enter_context(torch.enable_grad())
        yield gates


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Turn off the gradients of all parameters; turn those that were on back on afterwards."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trainable:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)


class _Attributed(NamedTuple):
    """Attribution of one example."""

    number: int
    gain: float
    share_LH: list[list[float]]


def _measure_round(
    gates: _Gates,
    encoded: Sequence[EncodedExample],
    numbers: range,
    n_steps: int,
    batch_size: int,
    phase: Phase,
) -> Record:
    """Attribute the gains on these examples, split among processes; return those of all, as JSON."""

    def measure_own() -> list[_Attributed]:
        own = own_share(numbers)
        results: list[_Attributed] = []
        for first in range(0, len(own), batch_size):
            batch = own[first : first + batch_size]
            rows = [encoded[number] for number in batch]
            gain_B, share_BLH = _attribute(gates, rows, n_steps)
            for number, gain, share_LH in zip(batch, gain_B.tolist(), share_BLH.tolist()):
                results.append(_Attributed(number, gain, share_LH))
            # All processes have about the same share, so all advance at this one's pace.
            n_processes = rank_and_world()[1]
            phase.update(len(batch) * n_processes)
        return results

    results: list[_Attributed] = []
    for results_of_process in compute_everywhere(measure_own):
        results += results_of_process
    results.sort(key=lambda result: result.number)
    return {
        "gain": [result.gain for result in results],
        "share": [result.share_LH for result in results],
    }


def _attribute(
    gates: _Gates, rows: Sequence[EncodedExample], n_steps: int
) -> tuple[Tensor, Tensor]:
    """Return gain_B of the answers' log-probabilities from all the teacher's heads, and share_BLH of each head."""
    n_rows = len(rows)
    with torch.no_grad():
        with_student_B = gates.logprob(rows, gates.constant(n_rows, 0))
        with_teacher_B = gates.logprob(rows, gates.constant(n_rows, 1))
    share_BLH = gates.constant(n_rows, 0)
    for step in range(n_steps):
        midpoint = (step + 0.5) / n_steps
        value_BLH = gates.constant(n_rows, midpoint).requires_grad_()
        logprob_B = gates.logprob(rows, value_BLH)
        # A row's gates change only that row, so the gradient of the sum is each row's own.
        (gradient_BLH,) = torch.autograd.grad(logprob_B.sum(), value_BLH)
        share_BLH += gradient_BLH / n_steps
    return with_teacher_B - with_student_B, share_BLH


def _check_gain(baseline: Record, probe: Probe, student: HybridForCausalLM) -> None:
    """Raise ValueError if the student loses nothing; warn if the shares do not add up to the gain."""
    gain = baseline["gain"]
    attributed = baseline["attributed"]
    if gain <= 0:
        raise ValueError(
            f"the student loses nothing on these questions ({probe.describe()}): the answer's "
            f"log-probability is {-gain:.3f} nats above the teacher's. Ask from farther away than its "
            f"window of {student.config.window} (--distance)."
        )
    if abs(attributed - gain) > LARGEST_ERROR * gain:
        log.warning(
            "the heads' shares add up to %.2f nats, the gain is %.2f: take more steps (n_steps)",
            attributed,
            gain,
        )


def _scores(
    teacher: PreTrainedModel, share_ELH: Tensor, gain_E: Tensor, provenance: Record
) -> HeadScores:
    """Return the means of the shares over the examples, with standard errors, intervals and agreement."""
    sites = attention_sites(teacher)
    # Only heads that exist: a layer of fewer heads has gates that nothing read.
    heads = heads_of(sites)
    index_of = {site.layer: index for index, site in enumerate(sites)}
    share_HE = torch.stack([share_ELH[:, index_of[layer], head] for layer, head in heads])
    scores = HeadScores.from_differences(
        teacher,
        sites,
        heads,
        {"logprob": share_HE},
        baseline={"gain": gain_E.mean().item(), "attributed": share_HE.sum(0).mean().item()},
        provenance=provenance,
    )
    interval_LH2 = head_table(teacher, sites, heads, bootstrap_interval(share_HE))
    agreement = None
    if len(gain_E) > 1:
        # Shares are of the log-probability: both rankings are the same.
        agreement = split_half(share_HE, share_HE, AGREEMENT_AT)
        del agreement["overlap_by_logprob"]
    return replace(scores, logprob_interval_LH2=interval_LH2, agreement=agreement)
