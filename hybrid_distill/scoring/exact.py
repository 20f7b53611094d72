"""Rank attention heads: zero one head at a time, measure the loss, put the head back.

The drop in accuracy on a retrieval probe is a head's score (arXiv 2504.18574); the log-probability of the
answer orders heads where accuracy does not, and the loss on plain text tells heads that matter for all tasks.

    the model as it is, on all examples                                                  -> baseline
    for each round of examples (one round; in a race several, each for the heads left)
        for each layer, bottom to top
            several heads at once, from that layer up (`forwards`)                       -> right, logprob
    drops, standard errors, intervals, agreement of halves (`measure`)                   -> HeadScores
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from hybrid_kernels.products import on_fast_cpu
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..plan import HeadId
from ..probes import Probe, check_counts, queries_of
from ..probes.answering import encode_example
from ..probes.plain_text import text_rows
from ..progress import Phase
from ..teacher import HeadKind, HeadSite, ablate_heads, check_exists, eval_mode, head_sites
from .forwards import computed_in, fastest_exact
from .head_scores import HeadScores, describe_run, heads_of
from .measure import Measured, Steps
from .probe_batch import Question, Rows, Text
from .racing import Race

CONTROL_TOKENS = 256


def score_heads(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    probe: Probe,
    *,
    n_examples: int = 128,
    batch_size: int | None = None,
    control_texts: Sequence[str] | None = None,
    min_accuracy: float | None = None,
    race_k: int | None = None,
    heads: Collection[HeadId] | None = None,
    removed: Collection[HeadId] = (),
    kind: HeadKind | None = None,
    progress: bool = True,
    resume_path: str | Path | None = None,
) -> HeadScores:
    """Score every head of an unmodified Hugging Face decoder by exact single-head ablation.

    Several connected processes share the prompts; all of them must call this, and get the same scores.

    Args:
        n_examples: Prompts, at most, for each head; one with several questions (``n_queries`` of the probe) counts
            once, by the share of them that is answered right.
        batch_size: Rows in a forward, a row being one prompt without one head; None finds it. Halved whenever memory
            runs out.
        control_texts: Plain texts whose first 256 tokens make the control loss.
        min_accuracy: Accuracy that the model needs with all its heads; None: half way from guessing to always right.
        race_k: Drop heads as soon as they cannot be among the first k any more (`racing`): with 99 % confidence the
            first k are those of exhaustive scoring. A dropped head's figures are those of the examples it was tried on
            (``n_examples_LH``), its control loss is NaN. None scores every head on every example.
        heads: Heads to score; others get NaN.
        removed: Heads that are off all the time, in the baseline too (joint ablation); they get NaN.
        kind: Kind of heads, as in `head_sites`.
        resume_path: File that keeps the measurements after each layer; those found there, of the same task, are used.

    Raises ValueError for a model below ``min_accuracy``, and, naming head and example, for logits that are not finite.
    """
    check_counts(n_examples=n_examples, **({} if batch_size is None else {"batch_size": batch_size}))
    sites = head_sites(model, kind)
    candidates = _candidates(model, sites, heads, removed)
    n_queries, texts = queries_of(probe), list(control_texts or [])
    examples = probe.examples(n_examples * n_queries)
    encoded = [encode_example(tokenizer, example) for example in examples]
    of_prompt = [slice(n, n + n_queries) for n in range(0, len(examples), n_queries)]
    questions = [Question(n, examples[of], encoded[of], model.device) for n, of in enumerate(of_prompt)]
    text_tokens = text_rows(tokenizer, texts, max_tokens=CONTROL_TOKENS)
    controls = [Text(n, tokens, model.device) for n, tokens in enumerate(text_tokens)]
    race = None if race_k is None else Race(race_k, len(candidates), n_examples, n_queries=n_queries)
    sha256 = hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]
    in_bfloat16 = torch.autocast("cuda", torch.bfloat16, model.device.type == "cuda" and model.dtype == torch.float32)
    with eval_mode(model), in_bfloat16, on_fast_cpu(model.device):
        provenance = {
            "method": "single-head zero ablation",
            "probe": probe.describe(),
            "n_examples": n_examples,
            "by": "choice",
            "control": {"texts": len(texts), "tokens": CONTROL_TOKENS, "sha256": sha256} if texts else None,
            "race": None if race is None else {**asdict(race), "rounds": race.rounds},
            "heads": None if heads is None else _pairs(heads),
            "removed": _pairs(removed),
            "kind": sites[0].kind,
            "computed_in": str(computed_in(model)).removeprefix("torch."),
            **describe_run(model),
        }
        with ablate_heads(model, removed, kind=kind):
            measured = Measured(model, questions, controls, candidates, race)
            with Phase("measuring the model with all its heads", hidden=not progress):
                rows = Rows(model, batch_size)
                forwards = fastest_exact(model, sites, rows, measured.samples())
                measured.baseline(forwards)
            _check_accuracy(measured.right_E.mean().item(), min_accuracy, probe)
            measured.ablate(forwards, Steps(resume_path, provenance), progress)
    return measured.scores(sites, {"chance": probe.chance}, provenance)


def _candidates(
    model: PreTrainedModel, sites: list[HeadSite], heads: Collection[HeadId] | None, removed: Collection[HeadId]
) -> list[HeadId]:
    """List the heads to score, bottom to top. Raises ValueError for one that does not exist, and for none at all."""
    for head in heads or ():
        check_exists(model, sites, HeadId(*head))
    wanted = [head for head in heads_of(sites) if (heads is None or head in heads) and head not in removed]
    if not wanted:
        raise ValueError("no head is left to score; name some in heads that are not in removed.")
    return wanted


def _pairs(heads: Collection[HeadId]) -> list[list[int]]:
    return sorted([int(layer), int(head)] for layer, head in heads)


def _check_accuracy(accuracy: float, min_accuracy: float | None, probe: Probe) -> None:
    if min_accuracy is None:
        min_accuracy = (probe.chance + 1) / 2
    if accuracy < min_accuracy:
        settings = ", ".join(f"{name} {value}" for name, value in probe.describe().items())
        raise ValueError(
            f"this teacher answers {accuracy:.1%} of the probe ({settings}); guessing gives "
            f"{probe.chance:.1%}, scoring asks for {min_accuracy:.1%}: accuracy is too low for ablation to be "
            "informative. Take an easier probe (fewer pairs), another teacher, or lower --min-accuracy."
        )
