"""Attention put back into an aligned student, one layer or head at a time: which one restores retrieval?

The layer's mixer steps aside for the teacher's attention, on the student's own inputs (arXiv 2504.18574); afterwards
the student is as before, to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...distributed import connect
from ...model.configuration_hybrid import HybridConfig
from ...model.modeling_hybrid import HybridForCausalLM
from ...pipeline import finished_run
from ...plan import HeadId
from ...probes import check_counts
from ...run_folder import is_run
from ...scoring.restoration import restore_heads, restore_layers
from ...teacher import TINY, head_sites, load_teacher
from .figures import draw_bars
from .tables import Row, Table
from .tasks import Questions, Subject, Task, measure

NAME = "replace-layer"
SHOWN = 24  # rows, of a table that has more

By = Literal["layer", "head"]
Restore = Callable[[list[Any]], AbstractContextManager[None]]


@dataclass(frozen=True)
class ReplaceLayer:
    """Put the teacher's attention back into an aligned student, one layer at a time: which one restores retrieval?"""

    student: Path
    """The folder of a run with its alignment (of a demo: OUT/aligned), or a student's checkpoint."""
    teacher: str | None = None
    """A checkpoint's teacher, by default the embedded one; a run knows its own."""
    by: By = "layer"
    """One ``layer`` at a time, or one ``head``."""
    together: int = 1
    """Then add to the best one the layer, or head, that helps most beside it, up to so many."""
    questions: Questions = field(default_factory=Questions)
    out: Path = Path("runs/analysis")
    """The folder of the table and the figure, which take the place of earlier ones."""

    def run(self) -> str:
        """The table as text; writes it and its figure to ``out``."""
        check_counts(together=self.together)
        student, teacher, tokenizer = self.load()
        tasks = self.questions.make(student, tokenizer)
        table = replace_each(student, teacher, tokenizer, tasks, by=self.by, together=self.together)
        table.save(self.out, NAME)
        shown = shortened(table)
        draw_bars(shown, self.out / f"{NAME}.png", first="the student as it is")
        return shown.text()

    def load(self) -> tuple[HybridForCausalLM, PreTrainedModel, PreTrainedTokenizerBase]:
        """Student, teacher and tokenizer. Raises ValueError for what is no student, and for another one's teacher."""
        if is_run(self.student / "config.json"):
            if self.teacher is not None:
                raise ValueError(f"{self.student} is a run, which knows its teacher; leave out --teacher.")
            run = finished_run(self.student)
            (student, _), (teacher, tokenizer) = run.trained_student(), run.teacher_and_tokenizer
        else:
            loaded: Any = Subject(str(self.student)).load("--student")
            student, tokenizer = loaded
            dtype = str(student.dtype).removeprefix("torch.")
            teacher, _ = load_teacher(self.teacher or TINY, dtype=dtype, flag="--teacher")
        student.name_or_path = str(self.student)
        check_pair(student, teacher)
        device: Any = connect().device
        return student.to(device).eval(), teacher.to(device), tokenizer


def replace_each(
    student: HybridForCausalLM,
    teacher: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[Task],
    *,
    by: By = "layer",
    together: int = 1,
    progress: bool = True,
) -> Table:
    """A row for the student, one for each layer or head put back alone (heads: best first), one for the teacher.

    With ``together`` above 1, rows follow in which the best one gets company, one more in each: whatever does most for
    the first task.
    """
    parts, restore = _parts(student, teacher, by)
    together = min(together, len(parts))

    def worth(row: Row) -> float:
        return row.values[0] if tasks[0].column.unit else -row.values[0]  # of a perplexity less is more

    with tqdm(total=2 + sum(range(len(parts), len(parts) - together, -1)), disable=not progress) as bar:
        bar.set_description(f"putting back a {by}")

        def row_of(restored: list[Any], group: str = "") -> Row:
            with restore(restored):
                values = measure(student, tokenizer, tasks)
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
        rows.append(Row("teacher", measure(teacher, tokenizer, tasks), "teacher"))
        bar.update()
    title = f"{student.name_or_path}: one {by} of the teacher put back"
    return Table(title, "put back", tuple(task.column for task in tasks), tuple(rows))


def _parts(student: HybridForCausalLM, teacher: PreTrainedModel, by: By) -> tuple[list[Any], Restore]:
    """What can be put back, bottom to top, and how some of it is."""
    sites = head_sites(student)
    if by == "layer":
        return [site.layer for site in sites], partial(restore_layers, student, teacher)
    heads = [HeadId(site.layer, head) for site in sites for head in range(site.n_heads)]
    return heads, partial(restore_heads, student, teacher)


def _label(by: By, restored: Sequence[int | HeadId]) -> str:
    named = " + ".join(map(str, restored))
    if len(restored) > 1:
        return f"{by}s {named}"
    return f"layer {named}" if restored and by == "layer" else named or "none"


def shortened(table: Table) -> Table:
    """The first rows of those put back alone, and all others."""
    rows = [row for number, row in enumerate(table.rows) if number < SHOWN or row.group]
    left = len(table.rows) - len(rows)
    return replace(table, title=table.title + (f" ({left} more in the file)" if left else ""), rows=tuple(rows))


def check_pair(student: PreTrainedModel, teacher: PreTrainedModel) -> None:
    """Raise ValueError unless ``student`` is a student, and ``teacher`` has its shape."""
    if student.config.model_type != HybridConfig.model_type:
        raise ValueError(
            f"{student.name_or_path} is a {student.config.model_type} model; give a student of this project, the "
            "folder of its run or its export."
        )
    ours, theirs = head_sites(student), head_sites(teacher)
    shapes = [(len(s), s[0].n_heads, s[0].head_dim, s[0].o_proj.out_features) for s in (ours, theirs)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"the student has {_shape(*shapes[0])}, the teacher {teacher.name_or_path!r} has "
            f"{_shape(*shapes[1])}; name the student's own with --teacher."
        )


def _shape(n_layers: int, n_heads: int, head_dim: int, width: int) -> str:
    return f"{n_layers} layers of {n_heads} heads of {head_dim}, {width} wide"
