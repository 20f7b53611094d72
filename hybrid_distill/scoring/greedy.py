"""Joint ablation: heads that stand in for one another show only when the others are off."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..plan import HeadId
from ..probes import Probe, check_counts
from .exact import score_heads


def greedy_ablation(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, probe: Probe, k: int, **options: Any
) -> list[HeadId]:
    """``k`` heads, each the one that is missed most once all before it are off.

    ``options`` are those of `score_heads`; ``race_k=1`` makes each choice a race. Only the first round asks for a
    minimal accuracy: later ones begin with what is left of it.
    """
    check_counts(k=k)
    removed: list[HeadId] = list(options.pop("removed", ()))
    chosen: list[HeadId] = []
    for _ in range(k):
        scores = score_heads(model, tokenizer, probe, removed=[*removed, *chosen], **options)
        chosen.append(scores.ranking()[0])
        options["min_accuracy"] = 0.0
    return chosen
