"""Rank attention heads: zero one head at a time, see what the model can no longer do, put the head back.

The drop in accuracy on a retrieval probe is a head's score (arXiv 2504.18574); the log-probability of the
answer orders heads where accuracy does not, and the loss on plain text tells heads that matter for all tasks.

    the model as it is, on all examples                                                  -> baseline
    for each round of examples (one round; in a race several, each for the heads left)
        for each layer, bottom to top
            several heads at once, from that layer up (`forwards`)                       -> right, logprob
    drops, standard errors, intervals, agreement of halves (`measure`)                   -> HeadScores
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..plan import HeadId
from ..probes import Probe, check_counts
from ..teacher import HeadKind, HeadSite, ablate_heads, decoder_blocks, eval_mode, head_sites
from .auto_batch import Rows
from .forwards import fastest_exact, head_means
from .head_scores import HeadScores, describe_run
from .measure import Measured, Task
from .racing import Race
from .resume import Steps

Replacement = Literal["zero", "mean"]


def score_heads(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    probe: Probe,
    *,
    n_examples: int = 128,
    batch_size: int | None = None,
    control_texts: Sequence[str] | None = None,
    control_tokens: int = 256,
    min_accuracy: float | None = None,
    by: Literal["choice", "generation"] = "choice",
    race_k: int | None = None,
    race_confidence: float = 0.99,
    heads: Collection[HeadId] | None = None,
    removed: Collection[HeadId] = (),
    replacement: Replacement = "zero",
    kind: HeadKind | None = None,
    precision: Literal["auto", "model", "bfloat16"] = "auto",
    progress: bool = True,
    resume_path: str | Path | None = None,
) -> HeadScores:
    """Exact single-head ablation of every head of an unmodified Hugging Face decoder.

    ``by`` says how accuracy is read; the log-probability is always the answer's (`answer_choices`). The first
    ``control_tokens`` tokens of each control text make the control loss.

    ``race_k`` drops heads as soon as they cannot be among the first k any more (`racing`): the first k are those of
    exhaustive scoring with ``race_confidence``. A dropped head's figures are those of the examples it was tried on
    (``n_examples_LH``); the control loss is measured for heads that reached the end, NaN for others. None scores every
    head on every example.

    ``heads`` limits scoring to these; others get NaN. ``removed`` heads are off all the time, in the baseline too, and
    get NaN (joint ablation). ``replacement`` says what an ablated head is replaced by: zeros, or its mean over all
    prompts' tokens. ``kind`` is that of `head_sites`.

    ``batch_size`` is the number of rows in a forward, a row being one prompt without one head; None finds it, and what
    does not fit into memory is halved. ``precision`` "auto" computes in bfloat16 on a GPU, else as the model is.

    With ``resume_path``, what is measured is saved there after each layer, and what is found there is not measured
    again, provided that everything it depends on is the same. Several connected processes share the prompts; all of
    them must call this, get the same scores, and the first one writes.

    Raises ValueError when the model, with all its heads, is right less often than ``min_accuracy`` (None: half way from
    guessing to always right): what it cannot do with a head it cannot lose without it; and, naming head and example,
    for logits that are no numbers.
    """
    check_counts(n_examples=n_examples, **({} if batch_size is None else {"batch_size": batch_size}))
    for name, value, known in (
        ("by", by, ("choice", "generation")),
        ("replacement", replacement, ("zero", "mean")),
        ("precision", precision, ("auto", "model", "bfloat16")),
    ):
        if value not in known:
            raise ValueError(f"{name} is {value!r}; use {' or '.join(map(repr, known))}.")
    sites = head_sites(model, kind)
    candidates = _candidates(sites, heads, removed)
    task = Task.of(model, tokenizer, probe.examples(n_examples), list(control_texts or []), control_tokens, by)
    race = None if race_k is None else Race(race_k, len(candidates), n_examples, race_confidence)
    with eval_mode(model), _computing(model, precision) as dtype:
        provenance = {
            "method": f"single-head {replacement} ablation",
            "probe": probe.describe(),
            "n_examples": n_examples,
            "by": by,
            "control": task.describe_control(control_texts or [], control_tokens),
            "race": None if race is None else {**asdict(race), "rounds": race.rounds},
            "heads": None if heads is None else _names(heads),
            "removed": _names(removed),
            "kind": sites[0].kind,
            "computed_in": dtype,
            **describe_run(model),
        }
        rows = Rows(model, batch_size)
        means = head_means(model, sites, rows, [e.prompt for e in task.encoded]) if replacement == "mean" else {}
        off = {head: means[head.layer][head.head] for head in removed} if means else None
        with ablate_heads(model, removed, off, kind=kind):
            forwards = fastest_exact(model, sites, rows, means, task.samples())
            measured = Measured(task, candidates, race)
            measured.baseline(forwards)
            _refuse_below(min_accuracy, measured.right_E.mean().item(), probe, by)
            measured.ablate(forwards, Steps(resume_path, provenance), progress)
    return measured.scores(sites, len(decoder_blocks(model)), {"chance": probe.chance}, provenance)


def _candidates(
    sites: Sequence[HeadSite], heads: Collection[HeadId] | None, removed: Collection[HeadId]
) -> list[HeadId]:
    """The heads to score, bottom to top. Raises ValueError for one that does not exist, and for none at all."""
    every = [HeadId(site.layer, head) for site in sites for head in range(site.n_heads)]
    if missing := sorted({HeadId(*head) for head in [*(heads or []), *removed]} - set(every)):
        raise ValueError(f"heads {missing} do not exist: this model's heads are {every[0]} to {every[-1]}.")
    wanted = set(every if heads is None else heads) - set(removed)
    if not wanted:
        raise ValueError("no head is left to score; name some in heads that are not in removed.")
    return [head for head in every if head in wanted]


def _names(heads: Collection[HeadId]) -> list[list[int]]:
    return sorted([int(layer), int(head)] for layer, head in heads)


@contextmanager
def _computing(model: PreTrainedModel, precision: str) -> Iterator[str]:
    """Yield the name of the type that forwards are computed in."""
    device = model.device.type
    cast = model.dtype == torch.float32 and (precision == "bfloat16" or (precision == "auto" and device == "cuda"))
    with torch.autocast(device, dtype=torch.bfloat16) if cast else nullcontext():
        yield "bfloat16" if cast else str(model.dtype).removeprefix("torch.")


def _refuse_below(min_accuracy: float | None, accuracy: float, probe: Probe, by: str) -> None:
    if min_accuracy is None:
        min_accuracy = (probe.chance + 1) / 2
    if accuracy < min_accuracy:
        described = probe.describe()
        settings = ", ".join(f"{name} {value}" for name, value in described.items())
        easier = "fewer pairs" if described.keys() & {"pairs", "n_pairs"} else "another probe"
        raise ValueError(
            f"this teacher answers {accuracy:.1%} of the probe ({settings}) by {by}; guessing gives "
            f"{probe.chance:.1%}, scoring asks for {min_accuracy:.1%}: what is not there cannot be lost. "
            f"Take {easier}, another teacher, or lower --min-accuracy."
        )
