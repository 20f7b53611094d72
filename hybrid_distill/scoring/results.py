"""Turn measurements into scores: drops with standard errors, intervals and split-half agreement.

Shapes: H scored head, M prompt, N sample (a prompt or a text), T text.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ..io import Record
from .head_scores import HeadScores, head_table
from .measure import Baseline
from .rounds import AblationRun
from .uncertainty import AGREEMENT_AT, bootstrap_interval, split_half


def scores_of(
    run: AblationRun, baseline: Baseline, *, chance: float, provenance: Record
) -> HeadScores:
    """Return the scores of a finished run; heads that were not measured get NaN."""
    model = run.forwards.model
    sites = run.forwards.sites

    def by_layer(entry_H: Tensor) -> Tensor:
        return head_table(model, sites, run.heads, entry_H)

    drops_HN = _drops(run, baseline)
    scores = HeadScores.from_differences(
        model,
        sites,
        run.heads,
        drops_HN,
        baseline={
            "chance": chance,
            "accuracy": baseline.accuracy_M.mean().item(),
            "answer_logprob": baseline.logprob_M.mean().item(),
            "control_loss": baseline.loss_T.mean().item() if run.texts else None,
        },
        provenance=provenance,
    )
    intervals = {}
    for name, drop_HN in drops_HN.items():
        intervals[name] = by_layer(bootstrap_interval(drop_HN))
    agreement = None
    if len(run.prompts) > 1:
        ks = AGREEMENT_AT if run.race is None else (*AGREEMENT_AT, run.race.k)
        agreement = split_half(drops_HN["accuracy"], drops_HN["logprob"], ks)
    n_prompts_H = (~run.accuracy_HM.isnan()).sum(1)
    return replace(
        scores,
        accuracy_interval_LH2=intervals["accuracy"],
        logprob_interval_LH2=intervals["logprob"],
        control_interval_LH2=intervals.get("control"),
        # Heads that were not scored have no prompts.
        n_examples_LH=by_layer(n_prompts_H).nan_to_num(0).long(),
        agreement=agreement,
    )


def _drops(run: AblationRun, baseline: Baseline) -> dict[str, Tensor]:
    """Return what each head's ablation costs, on every prompt and text."""
    drops_HN = {
        "accuracy": baseline.accuracy_M - run.accuracy_HM,
        "logprob": baseline.logprob_M - run.logprob_HM,
    }
    if run.texts:
        drops_HN["control"] = run.loss_HT - baseline.loss_T
    return drops_HN
