"""What is lost without the first heads of a ranking, and without as many random ones (arXiv 2504.18574)."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...plan import HeadId
from ...scoring import HeadScores
from ...teacher import HeadKind, ablate_heads, fingerprint, head_sites
from .figures import draw_lines
from .tables import Row, Table
from .tasks import Questions, Subject, Task, measure

NAME = "remove-heads"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RemoveHeads:
    """Remove the first heads of a ranking, and as many random ones: which tasks mind?"""

    scores: Path
    """The ranking: a scores.json of this model, as ``hybrid-distill score`` writes it."""
    subject: Subject = field(default_factory=Subject)
    questions: Questions = field(default_factory=Questions)
    counts: tuple[int, ...] = (10, 20, 30)
    """How many heads are removed."""
    by: str = "retrieval"
    """retrieval, retrieval_minus_control or ratio: what the ranking goes by."""
    random_draws: int = 3
    """Random choices of as many heads; their mean is shown."""
    kind: HeadKind | None = None
    """``ssm`` for the recurrent heads of a model that has attention too."""
    out: Path = Path("runs/analysis")
    """The folder of the table and the figure, which take the place of earlier ones."""

    def run(self) -> str:
        """The table as text; writes it and its figure to ``out``."""
        scores = HeadScores.load(self.scores)
        model, tokenizer = self.subject.load()
        warn_of_another_model(scores, model, self.scores)
        tasks = self.questions.make(model, tokenizer)
        options = {"n_draws": self.random_draws, "kind": self.kind}
        table = remove_heads(model, tokenizer, tasks, scores.ranking(self.by), self.counts, **options)
        table.save(self.out, NAME)
        draw_lines(table, self.out / f"{NAME}.png", "heads removed")
        return table.text()


def warn_of_another_model(scores: HeadScores, model: PreTrainedModel, path: Path) -> None:
    """Say so where ``scores`` rank the heads of another model."""
    if scores.fingerprint not in ("", fingerprint(model)):
        log.warning("%s was made for another model than %s", path, model.name_or_path)


def remove_heads(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[Task],
    ranking: Sequence[HeadId],
    counts: Sequence[int] = (10, 20, 30),
    *,
    n_draws: int = 3,
    kind: HeadKind | None = None,
    progress: bool = True,
) -> Table:
    """A row for each count of first heads, and one for as many random heads: the mean of ``n_draws`` choices.

    Random heads are drawn from all heads, those of the ranking included. Raises ValueError for a count that the
    ranking or the model does not have, and for a head that the model does not have.
    """
    every = [HeadId(site.layer, head) for site in head_sites(model, kind) for head in range(site.n_heads)]
    most = min(len(ranking), len(every))
    for count in counts:
        if not 0 < count <= most:
            raise ValueError(
                f"--counts has {count}, the ranking {len(ranking)} heads, the model {len(every)}; ask for 1 to {most}, "
                "of a ranking of this model (hybrid-distill score)."
            )
    with tqdm(total=1 + len(counts) * (1 + n_draws), desc="removing heads", disable=not progress) as bar:

        def without(heads: Sequence[HeadId]) -> tuple[float, ...]:
            with ablate_heads(model, heads, kind=kind):
                found = measure(model, tokenizer, tasks)
            bar.update()
            return found

        rows = [Row("nothing", without([]))]
        rows += [Row(f"first {n}", without(ranking[:n]), "first", n) for n in counts]
        for n in counts if n_draws else ():
            drawn = [random.Random(f"remove-heads {n} {seed}").sample(every, n) for seed in range(n_draws)]
            label = f"random {n}" + (f" (mean of {n_draws})" if n_draws > 1 else "")
            rows.append(Row.mean(label, [without(heads) for heads in drawn], "random", n))
    title = f"{model.name_or_path}: without some of its {len(every)} heads"
    return Table(title, "heads removed", tuple(task.column for task in tasks), tuple(rows))
