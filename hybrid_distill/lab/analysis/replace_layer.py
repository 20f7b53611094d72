"""Attention put back into an aligned student, one layer or head at a time: which one restores retrieval?

The layer's mixer steps aside for the teacher's attention, on the student's own inputs (arXiv 2504.18574); afterwards
the student is as before, to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
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
from .experiment import Bench, Experiment
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
        self.save(table)
        shown = shortened(table)
        draw_bars(shown, self.out / f"{self.NAME}.png", first="the student as it is")
        return shown.text()

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
        check_pair(student, teacher)
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
    sites = head_sites(student)
    heads = [HeadId(site.layer, head) for site in sites for head in range(site.n_heads)]
    parts: Sequence[int | HeadId] = heads if by == "head" else [site.layer for site in sites]

    def restore(chosen: Sequence[int | HeadId]) -> AbstractContextManager[None]:
        if by == "head":
            return restore_heads(student, teacher, [part for part in chosen if isinstance(part, HeadId)])
        return restore_layers(student, teacher, [part for part in chosen if isinstance(part, int)])

    together = min(together, len(parts))

    def worth(row: Row) -> float:
        return row.values[0] if bench.columns[0].unit else -row.values[0]  # less perplexity is better

    with tqdm(total=2 + sum(range(len(parts), len(parts) - together, -1)), disable=None) as bar:
        bar.set_description(f"putting back a {by}")

        def row_of(restored: Sequence[int | HeadId], group: str = "") -> Row:
            with restore(restored):
                values = bench.measure()
            bar.update()
            return Row(_label(by, restored), values, group)

        rows = [row_of([])]
        alone = {part: row_of([part]) for part in parts}
        rows += alone.values() if by == "layer" else sorted(alone.values(), key=worth, reverse=True)
        chosen = [max(parts, key=lambda part: worth(alone[part]))]
        while len(chosen) < together:
            tried = {part: row_of([*chosen, part], "together") for part in parts if part not in chosen}
            chosen.append(max(tried, key=lambda part: worth(tried[part])))
            rows.append(tried[chosen[-1]])
        rows.append(Row("teacher", bench._replace(model=teacher).measure(), "teacher"))
        bar.update()
    title = f"{student.name_or_path}: one {by} of the teacher put back"
    return Table(title, "put back", bench.columns, tuple(rows))


def _label(by: By, restored: Sequence[int | HeadId]) -> str:
    named = " + ".join(map(str, restored))
    if len(restored) > 1:
        return f"{by}s {named}"
    return f"layer {named}" if restored and by == "layer" else named or "none"


def shortened(table: Table) -> Table:
    """Keep the first rows of those put back alone, and all others."""
    rows = [row for number, row in enumerate(table.rows) if number < SHOWN or row.group]
    left = len(table.rows) - len(rows)
    return replace(table, title=table.title + (f" ({left} more in the file)" if left else ""), rows=tuple(rows))


def check_pair(student: PreTrainedModel, teacher: PreTrainedModel) -> None:
    """Raise ValueError unless ``student`` is a student, and ``teacher`` has its shape."""
    if student.config.model_type != HybridConfig.model_type:
        raise ValueError(
            f"{student.name_or_path} is a {student.config.model_type} model; pass a student of this project, the "
            "folder of its run or its export."
        )
    ours, theirs = _shape(student), _shape(teacher)
    if ours != theirs:
        raise ValueError(
            f"the student has {ours}, the teacher {teacher.name_or_path!r} has {theirs}; pass the student's own with "
            "--teacher."
        )


def _shape(model: PreTrainedModel) -> str:
    sites = head_sites(model)
    site = sites[0]
    return f"{len(sites)} layers of {site.n_heads} heads of {site.head_dim}, {site.o_proj.out_features} wide"
