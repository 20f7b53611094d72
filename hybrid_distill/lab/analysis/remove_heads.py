"""Losses without the first heads of a ranking, and without as many random ones (arXiv 2504.18574)."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from transformers import PreTrainedModel

from ...plan import HeadId
from ...scoring import HeadScores
from ...teacher import HeadKind, ablate_heads, fingerprint, head_sites
from .experiment import Bench, ModelExperiment, Variant
from .figures import draw_lines
from .tables import Table

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RemoveHeads(ModelExperiment):
    """Remove the first heads of a ranking, and as many random ones: which tasks mind?"""

    NAME = "remove-heads"

    scores: Path
    """Ranking: a scores.json of this model, as ``hybrid-distill score`` writes it."""
    counts: tuple[int, ...] = (10, 20, 30)
    """Numbers of heads to remove."""
    by: str = "retrieval"
    """Order of the ranking: retrieval, retrieval_minus_control or ratio."""
    random_draws: int = 3
    """Random choices of as many heads; their mean is shown."""
    kind: HeadKind | None = None
    """``ssm`` for the recurrent heads of a model that has attention too."""

    def run(self) -> str:
        scores = HeadScores.load(self.scores)
        bench = self.load()
        warn_of_another_model(scores, bench.model, self.scores)
        table = remove_heads(bench, scores.ranking(self.by), self.counts, n_draws=self.random_draws, kind=self.kind)
        return self.save(table, partial(draw_lines, x_label="heads removed"))


def warn_of_another_model(scores: HeadScores, model: PreTrainedModel, path: Path) -> None:
    """Log a warning where ``scores`` rank the heads of another model."""
    if scores.fingerprint not in ("", fingerprint(model)):
        log.warning("%s was made for another model than %s", path, model.name_or_path)


def remove_heads(
    bench: Bench,
    ranking: Sequence[HeadId],
    counts: Sequence[int] = (10, 20, 30),
    *,
    n_draws: int = 3,
    kind: HeadKind | None = None,
) -> Table:
    """Make a row for each count of first heads, and one for as many random heads: the mean of ``n_draws`` choices.

    Random heads are drawn from all heads, those of the ranking included. Raises ValueError for a count or a head that
    the ranking or the model does not have.
    """
    model = bench.model
    every = [HeadId(site.layer, head) for site in head_sites(model, kind) for head in range(site.n_heads)]
    most = min(len(ranking), len(every))
    for count in counts:
        if not 0 < count <= most:
            raise ValueError(
                f"--counts has {count}, the ranking {len(ranking)} heads, the model {len(every)}; ask for 1 to {most}, "
                "of a ranking of this model (hybrid-distill score)."
            )
    variants = [Variant("nothing", nullcontext())]
    variants += [Variant(f"first {n}", ablate_heads(model, ranking[:n], kind=kind), "first", n) for n in counts]
    for n in counts:
        for seed in range(n_draws):
            drawn = random.Random(f"remove-heads {n} {seed}").sample(every, n)
            label = f"random {n}" + (f" (mean of {n_draws})" if n_draws > 1 else "")
            variants.append(Variant(label, ablate_heads(model, drawn, kind=kind), "random", n))
    return bench.table(f"without some of its {len(every)} heads", "heads removed", variants)
