"""Head ranking by ablation: zero one head, measure what the model loses, restore the head.

A head's score is the drop in accuracy on a retrieval probe (arXiv 2504.18574). The log-probability
of the answer breaks ties in accuracy; the loss on plain text reveals heads that matter for every
task.

    model before ablation, on all prompts                               -> baseline
    for each round of prompts (one; a race has several, for the remaining heads)
        for each layer, bottom to top
            several heads at once, from that layer up (`forwards`)      -> accuracy, logprob
    drops, standard errors, intervals, split-half agreement (`results`) -> HeadScores
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..io import Record
from ..plan import HeadId
from ..probes import Probe, queries_of
from ..probes.checks import CannotAnswer
from ..probes.encoding import encode_example
from ..probes.plain_text import text_rows
from ..progress import Phase
from ..teacher import HeadKind, HeadSite, ablate_heads, check_exists, eval_mode, head_sites
from ..validation import check_counts
from .batch_sizer import BatchSizer
from .head_scores import HeadScores, describe_run, heads_of
from .measure import measure_baseline
from .probe_rows import PromptRow, TextRow
from .racing import Race
from .results import scores_of
from .resume_log import ResumeLog
from .rounds import AblationRun
from .shortcuts import compute_dtype, fastest_exact, sample_rows

CONTROL_TOKENS = 256
"""Tokens of each plain text on which the control loss is measured."""
ENOUGH = 1 / 3
"""Accuracy that a model needs for a ranking of its heads: 0 for guessing, 1 for always right. On 8 pairs SmolLM2-135M
and Gemma 3 270M reach 0.43, and were ranked well (docs/atlas.md)."""


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

    Connected processes split the prompts: every process must call this, and each gets the same
    scores.

    Args:
        n_examples: Maximum number of prompts per head. A prompt with several questions (the probe's
            ``n_queries``) counts once, by the share of them answered correctly.
        batch_size: Rows per forward pass; a row is one prompt with one head ablated. None chooses
            it automatically. Halved whenever memory runs out.
        control_texts: Plain texts; the control loss is measured on the first `CONTROL_TOKENS` of each.
        min_accuracy: Accuracy required of the model with all its heads. None: `ENOUGH`.
        race_k: Drop heads once they cannot be among the top k (`racing`). With about 99 %
            confidence, the top k are the same as in exhaustive scoring. A dropped head's scores cover only the
            prompts it was measured on (``n_examples_LH``), and its control loss is NaN. None scores
            every head on every prompt.
        heads: Heads to score; others get NaN.
        removed: Heads ablated throughout, including in the baseline (joint ablation); they get NaN.
        kind: Kind of heads, as in `head_sites`.
        resume_path: File that saves the measurements after each layer; saved measurements of the
            same task are reused.

    Raises ValueError for a model below ``min_accuracy``, and for non-finite logits, naming the head
    and the prompt.
    """
    check_counts(n_examples=n_examples)
    if batch_size is not None:
        check_counts(batch_size=batch_size)
    sites = head_sites(model, kind)
    candidates = _candidates(model, sites, heads, removed)
    # Encoded once: every ablated model reads the same tokens.
    prompts = _prompt_rows(model, tokenizer, probe, n_examples)
    control_texts = list(control_texts or [])
    texts = _control_rows(model, tokenizer, control_texts)
    race = None
    in_order = prompts
    if race_k is not None:
        race = Race(race_k, n_examples, n_questions=queries_of(probe))
        in_order = [prompts[number] for number in race.order()]

    with eval_mode(model), _bfloat16_on_gpu(model):
        provenance = {
            "method": "single-head zero ablation",
            "probe": probe.describe(),
            "n_examples": n_examples,
            "by": "choice",
            "control": _describe_texts(control_texts),
            "race": _describe_race(race),
            "heads": None if heads is None else _pairs(heads),
            "removed": _pairs(removed),
            "kind": sites[0].kind,
            **_describe_computation(model),
        }
        # The provenance holds everything that decides the numbers: only measurements of the same task are reused.
        resume_log = ResumeLog(resume_path, provenance)
        # The baseline too: each head's drop is relative to the reduced model.
        with ablate_heads(model, removed, kind=kind):
            with Phase("measuring the model with all its heads", hidden=not progress):
                sizer = BatchSizer(model, batch_size)
                samples = sample_rows(prompts, texts, model.device)
                forwards = fastest_exact(model, sites, sizer, samples)
                baseline = measure_baseline(forwards, in_order, texts)
            run = AblationRun(forwards, in_order, texts, candidates, race, resume_log)
            run.log_estimate(baseline.seconds)
            check_accuracy(baseline.accuracy_M.mean().item(), min_accuracy, probe)
            run.ablate(progress)
    return scores_of(run, baseline, chance=probe.chance, provenance=provenance)


def _describe_computation(model: PreTrainedModel) -> Record:
    """Describe where a model computes, and in which dtype: that of autocast, where it is on."""
    dtype = str(compute_dtype(model)).removeprefix("torch.")
    return {"computed_in": dtype, **describe_run(model)}


def _bfloat16_on_gpu(model: PreTrainedModel) -> torch.autocast:
    """Return an autocast to bfloat16, many times faster, that is on for float32 models on a GPU."""
    is_on = model.device.type == "cuda" and model.dtype == torch.float32
    return torch.autocast("cuda", torch.bfloat16, is_on)


def _candidates(
    model: PreTrainedModel,
    sites: list[HeadSite],
    heads: Collection[HeadId] | None,
    removed: Collection[HeadId],
) -> list[HeadId]:
    """List the heads to score, bottom to top.

    Raises ValueError if one does not exist, or if none is left.
    """
    for head in heads or ():
        check_exists(model, sites, HeadId(*head))
    candidates = []
    for head in heads_of(sites):
        if (heads is None or head in heads) and head not in removed:
            candidates.append(head)
    if not candidates:
        raise ValueError("no head is left to score; pass heads that are not in removed.")
    return candidates


def _prompt_rows(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    probe: Probe,
    n_prompts: int,
) -> list[PromptRow]:
    """Make a row for each prompt, with all the questions that the probe asks about it."""
    n_questions = queries_of(probe)
    examples = probe.examples(n_prompts * n_questions)
    encoded = [encode_example(tokenizer, example) for example in examples]
    rows = []
    for start in range(0, len(examples), n_questions):
        # Consecutive examples ask about the same prompt.
        questions = slice(start, start + n_questions)
        row = PromptRow(len(rows), examples[questions], encoded[questions], model.device)
        rows.append(row)
    return rows


def _control_rows(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]
) -> list[TextRow]:
    """Make a row for the beginning of each plain text."""
    rows = []
    for number, tokens in enumerate(text_rows(tokenizer, texts, max_tokens=CONTROL_TOKENS)):
        rows.append(TextRow(number, tokens, model.device))
    return rows


def _describe_race(race: Race | None) -> Record | None:
    if race is None:
        return None
    return {
        "k": race.k,
        "n_examples": race.n_prompts,
        "confidence": race.confidence,
        "seed": race.seed,
        "n_queries": race.n_questions,
        "rounds": race.rounds,
    }


def _describe_texts(texts: Sequence[str]) -> Record | None:
    if not texts:
        return None
    # Joined with a character that no text has: the same words cut otherwise are other texts.
    sha256 = hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]
    return {
        "texts": len(texts),
        "tokens": CONTROL_TOKENS,
        "sha256": sha256,
    }


def _pairs(heads: Collection[HeadId]) -> list[list[int]]:
    """Return heads as sorted [layer, head] lists, for JSON."""
    # Plain integers: a head may come from a tensor, which JSON cannot hold.
    return sorted([int(layer), int(head)] for layer, head in heads)


def check_accuracy(accuracy: float, min_accuracy: float | None, probe: Probe) -> None:
    """Raise CannotAnswer if a model's ``accuracy`` on the probe is below ``min_accuracy``, by default `ENOUGH`."""
    # If the model only guesses, ablation cannot lower its accuracy.
    if min_accuracy is None:
        min_accuracy = probe.chance + ENOUGH * (1 - probe.chance)
    if accuracy >= min_accuracy:
        return
    settings = ", ".join(f"{name} {value}" for name, value in probe.describe().items())
    raise CannotAnswer(
        f"this teacher answers {accuracy:.1%} of the probe ({settings}); guessing gives {probe.chance:.1%}, scoring "
        f"requires {min_accuracy:.1%}: accuracy is too low for a ranking to be informative. Take an easier probe "
        "(fewer pairs), another teacher, or lower --min-accuracy."
    )
