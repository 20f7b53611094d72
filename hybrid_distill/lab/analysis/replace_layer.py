"""Attention put back into an aligned student, one layer or head at a time: which one restores retrieval?

The layer's mixer steps aside for the teacher's attention, on the student's own inputs (arXiv 2504.18574); afterwards
the student is as before, to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from torch import nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...model.configuration_hybrid import HybridConfig
from ...model.modeling_hybrid import HybridForCausalLM
from ...pipeline import finished_run
from ...pipeline.folder import is_run
from ...plan import HeadId
from ...probes import check_counts
from ...scoring.restoration import restore_heads, restore_layers
from ...teacher import TINY, head_sites, load_teacher
from .experiment import Bench, Experiment, Variant
from .figures import draw_bars
from .tables import Row, Table
from .tasks import Questions, Subject, own_device

SHOWN = 24  # rows, of a table that has more

By = Literal["layer", "head"]


@dataclass(frozen=True, kw_only=True)
class ReplaceLayer(Experiment):
    """Put the teacher's attention back into an aligned student, one layer at a time: which one restores retrieval?"""

    NAME = "replace-layer"

    student: Path
    """Folder of a run with its alignment (of a demo: OUT/aligned), or a student's checkpoint."""
    teacher: str | None = None
    """Teacher of a checkpoint, by default the embedded one; a run knows its own."""
    by: By = "layer"
    """One ``layer`` at a time, or one ``head``."""
    together: int = 1
    """Then add to the best one the layer, or head, that helps most beside it, up to so many."""
    questions: Questions = field(default_factory=Questions)

    def run(self) -> str:
        check_counts(together=self.together)
        student, teacher, tokenizer = self.load()
        bench = Bench(student, tokenizer, self.questions.make(student, tokenizer))
        table = replace_each(bench, teacher, by=self.by, together=self.together)
        return self.save(table, partial(draw_bars, first="the student as it is"), most=SHOWN)

    def load(self) -> tuple[PreTrainedModel, PreTrainedModel, PreTrainedTokenizerBase]:
        """Load student, teacher and tokenizer. Raises ValueError unless they fit each other."""
        if is_run(self.student / "config.json"):
            if self.teacher is not None:
                raise ValueError(f"{self.student} is a run, which knows its teacher; leave out --teacher.")
            run = finished_run(self.student)
            (student, _), (teacher, tokenizer) = run.trained_student(), run.teacher_and_tokenizer
        else:
            student, tokenizer = Subject(str(self.student)).load("--student")
            dtype = str(student.dtype).removeprefix("torch.")
            teacher, _ = load_teacher(self.teacher or TINY, dtype=dtype, flag="--teacher")
        student.name_or_path = str(self.student)
        if student.config.model_type != HybridConfig.model_type:
            raise ValueError(
                f"{self.student} is a {student.config.model_type} model; pass a student of this project, the "
                "folder of its run or its export."
            )
        if (ours := _shape(student)) != (theirs := _shape(teacher)):
            raise ValueError(
                f"the student has {ours}, the teacher {teacher.name_or_path!r} has {theirs}; pass the student's own "
                "with --teacher."
            )
        for model in (student, teacher):
            nn.Module.to(model, own_device())
        return student.eval(), teacher, tokenizer


def replace_each(bench: Bench, teacher: PreTrainedModel, *, by: By = "layer", together: int = 1) -> Table:
    """Make a row for the student, one for each layer or head put back alone (heads: best first), one for the teacher.

    With ``together`` above 1, rows follow in which the best one gets company, one more in each: whatever does most for
    the first task.
    """
    student = bench.model
    assert isinstance(student, HybridForCausalLM)
    sites, of_heads = head_sites(student), by == "head"
    parts = [HeadId(site.layer, head) for site in sites for head in range(site.n_heads if of_heads else 1)]

    def row_of(chosen: Sequence[HeadId], group: str = "") -> Row:
        layers = [part.layer for part in chosen]
        restored = restore_heads(student, teacher, chosen) if of_heads else restore_layers(student, teacher, layers)
        named = " + ".join(map(str, chosen if of_heads else layers))
        one = named if of_heads else f"layer {named}"
        return bench.row(Variant(f"{by}s {named}" if len(chosen) > 1 else one, restored, group))

    def worth(row: Row) -> float:
        return row.values[0] if bench.tasks[0].column.unit else -row.values[0]  # less perplexity is better

    rows, chosen = [bench.row(Variant("none", nullcontext()))], list[HeadId]()
    while len(chosen) < min(together, len(parts)):
        left = tqdm([part for part in parts if part not in chosen], desc=f"putting back a {by}", disable=None)
        tried = {part: row_of([*chosen, part], "together" if chosen else "") for part in left}
        best = max(tried, key=lambda part: worth(tried[part]))
        in_order = sorted(tried.values(), key=worth, reverse=True) if of_heads else list(tried.values())
        rows += [tried[best]] if chosen else in_order
        chosen.append(best)
    rows.append(bench._replace(model=teacher).row(Variant("teacher", nullcontext(), "teacher")))
    return bench.table_of(f"one {by} of the teacher put back", "put back", rows)


def _shape(model: PreTrainedModel) -> str:
    sites = head_sites(model)
    site = sites[0]
    return f"{len(sites)} layers of {site.n_heads} heads of {site.head_dim}, {site.o_proj.out_features} wide"
