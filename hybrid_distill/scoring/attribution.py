"""Estimate the score of every head from one forward and one backward pass: gradient times activation.

To first order, the answer loses ``gradient . activation`` of log-probability when a head's slice of the output
projection's input is set to zero (attribution patching, arXiv 2310.10348). The estimate is poor just where it matters:
a teacher that is sure of its answer stands on a plateau, where the gradient says little about how far it falls without
a head, not even the sign. More robust is how much the head moves the answer at all (the expected magnitude of arXiv
1905.10650), taken in log-odds, so that sure answers count as much as unsure ones. Neither is exact: they choose which
heads are ablated exactly (`prefilter`), and `measured_recall` measures what that choice misses.

Shapes: E example, B batch, K layer that has heads, H head, T token, S position read, P head dim, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..plan import HeadId
from ..probes import Probe, check_counts
from ..probes.answering import EncodedExample, encode_example, forward, left_pad
from ..teacher import HeadKind, eval_mode, head_sites, record_heads
from .exact import score_heads
from .head_scores import HeadScores

METHODS = {
    "sensitivity": "attribution: mean magnitude of gradient times activation, in nats of the answer's log-odds",
    "drop": "attribution: gradient times activation, a first-order estimate of single-head zero ablation",
}


def attribution_scores(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    probe: Probe,
    *,
    by: Literal["sensitivity", "drop"] = "sensitivity",
    kind: HeadKind | None = None,
    n_examples: int = 128,
    batch_size: int = 8,
    progress: bool = True,
) -> HeadScores:
    """Estimate single-head zero ablation for all heads at once; any kind of `head_sites`.

    ``by="drop"`` estimates the drop of the answer's log-probability (`answer_choices`), in nats and with its sign.
    ``by="sensitivity"`` is the mean over examples of that estimate's magnitude, for the log-odds of the answer: the
    better order where answers are sure. Either stands in ``logprob_drop_LH``; accuracy drops are 0 for every head, so
    that `HeadScores.ranking` goes by the estimate.

    The model's parameters get no gradient. A batch keeps the activations of its forward for the backward: pass a
    smaller ``batch_size`` than for ablation.
    """
    check_counts(n_examples=n_examples, batch_size=batch_size)
    if by not in METHODS:
        raise ValueError(f"by is {by!r}; pass {' or '.join(map(repr, METHODS))}.")
    encoded = [encode_example(tokenizer, example) for example in probe.examples(n_examples)]
    sites = head_sites(model, kind)
    parts: list[tuple[Tensor, Tensor]] = []
    with eval_mode(model), tqdm(total=n_examples, desc="attributing", disable=not progress) as bar:
        for start in range(0, n_examples, batch_size):
            batch = encoded[start : start + batch_size]
            with ExitStack() as stack:
                recorded = [stack.enter_context(record_heads(model, site.layer, kind=kind)) for site in sites]
                stack.enter_context(_gradients_of_activations(model))
                logprob_B = answer_logprobs(model, batch)
                moved_B = logprob_B if by == "drop" else _log_odds(logprob_B)
                parts.append((_attributed(moved_B, [x_BTHP for (x_BTHP,) in recorded]), logprob_B.detach()))
            bar.update(len(batch))
    moved, logprobs = zip(*parts)
    moved_EKH, logprob_E = torch.cat(moved), torch.cat(logprobs)
    baseline = {"accuracy": None, "answer_logprob": logprob_E.mean().item(), "control_loss": None}
    value_EKH = moved_EKH if by == "drop" else moved_EKH.abs()
    return HeadScores.from_estimates(model, probe, sites, value_EKH, "logprob", METHODS[by], baseline)


def _attributed(moved_B: Tensor, heads: Sequence[Tensor]) -> Tensor:
    """Return moved_BKH: each example's loss without each head, to first order, by its gradient at ``heads`` x_BTHP."""
    # Examples do not see one another: the gradient of the sum is that of each example's own number.
    gradients = torch.autograd.grad(moved_B.sum(), heads)
    products = [(g.float() * x.detach().float()).sum((1, 3)) for g, x in zip(gradients, heads)]
    return torch.stack(products, dim=1)


def answer_logprobs(model: PreTrainedModel, encoded: Sequence[EncodedExample]) -> Tensor:
    """Return logprob_B (float64) of each answer as `EncodedExample.choice_logprobs` defines it, with a gradient.

    The answer's tokens are read from one forward over prompt and answer. However sure an answer is, its distance from
    certainty is not rounded away.
    """
    answers = [e.choices[e.answer] for e in encoded]
    input_ids_BT, mask_BT = left_pad([e.prompt + answer for e, answer in zip(encoded, answers)], model.device)
    n_read = 1 + max(map(len, answers))
    logits_BSV = forward(model, input_ids_BT, mask_BT, logits_to_keep=n_read).logits.double()
    totals = []
    for logits_SV, e, answer in zip(logits_BSV, encoded, answers):
        token_T1 = torch.tensor(answer, device=model.device)[:, None]
        logits_TV, after_V = logits_SV[-1 - len(answer) : -1], logits_SV[-1]
        others_T1 = logits_TV.scatter(1, token_T1, -math.inf).logsumexp(1, keepdim=True)
        going_on = after_V.softmax(0)[list(e.stops[e.answer])].sum()
        totals.append(logsigmoid(logits_TV.gather(1, token_T1) - others_T1).sum() + torch.log1p(-going_on))
    return torch.stack(totals)


def _log_odds(logprob_B: Tensor) -> Tensor:
    """Return log(p / (1 - p)), in nats; flat where p is 1 in double precision."""
    return logprob_B - (-torch.expm1(logprob_B)).clamp(min=torch.finfo(torch.float64).tiny).log()


@contextmanager
def _gradients_of_activations(model: PreTrainedModel) -> Iterator[None]:
    """Build graphs from the embeddings on that keep nothing for parameters, whose settings are restored afterwards."""

    def begin(module: nn.Module, args: object, embedded_BTD: Tensor) -> Tensor:
        return embedded_BTD.requires_grad_()

    embedding: nn.Module = model.get_input_embeddings()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    hook = embedding.register_forward_hook(begin)
    try:
        with torch.enable_grad():
            yield
    finally:
        hook.remove()
        for parameter in trained:
            parameter.requires_grad_(True)


def prefilter(estimate: HeadScores, width: int) -> set[HeadId]:
    """Return the ``width`` heads that the estimate ranks first: those that exact scoring may be limited to.

    Raises ValueError unless ``width`` is between 1 and the number of heads.
    """
    check_counts(width=width)
    ranking = estimate.ranking()
    if width > len(ranking):
        raise ValueError(f"width is {width}, but {len(ranking)} heads are scored; pass at most {len(ranking)}.")
    return set(ranking[:width])


def recall_at_k(estimate: HeadScores, exact: HeadScores, k: int, width: int) -> float:
    """Return the share of the exact top ``k`` heads that are among the estimate's top ``width``."""
    return len(prefilter(estimate, width).intersection(exact.ranking()[:k])) / k


def measured_recall(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    probe: Probe,
    estimate: HeadScores,
    *,
    k: int,
    widths: Sequence[int],
    n_examples: int = 16,
    **options: Any,
) -> dict[int, float]:
    """Measure `recall_at_k` by width, against exact ablation of every head on ``n_examples`` examples only.

    The order of so few examples is itself uncertain, beyond the heads that matter most even random, which lowers the
    recall. A ``probe`` with another seed than the estimate's tells whether the recall holds for other prompts too.
    ``options`` are those of `score_heads`.
    """
    exact = score_heads(model, tokenizer, probe, n_examples=n_examples, **options)
    return {width: recall_at_k(estimate, exact, k, width) for width in widths}
