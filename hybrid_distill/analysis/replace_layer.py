"""Attention put back into an aligned student, one layer or head at a time: which one restores retrieval?

The layer's mixer steps aside for the teacher's attention, on the student's own inputs (arXiv 2504.18574); afterwards
the student is as before, to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..distill.accelerator import connect
from ..model.configuration_hybrid import HybridConfig
from ..model.modeling_hybrid import HybridForCausalLM
from ..pipeline import finished_run, is_run
from ..plan import HeadId
from ..probes import check_counts
from ..restoration import restore_heads, restore_layers
from ..teacher import TINY, head_sites, load_teacher
from .figures import draw_bars
from .tables import Row, Table
from .tasks import Questions, Subject, Task, measure

NAME = "replace-layer"
DRAWN = 24  # bars

By = Literal["layer", "head"]


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
    """The folder of the table and the figure."""

    def run(self) -> str:
        """The table as text; writes it and its figure to ``out``."""
        check_counts(together=self.together)
        student, teacher, tokenizer = self.load()
        tasks = self.questions.make(student, tokenizer)
        table = replace_each(student, teacher, tokenizer, tasks, by=self.by, together=self.together)
        table.save(self.out, NAME)
        draw_bars(table, self.out / f"{NAME}.png", first="the student as it is", most=DRAWN)
        return table.text()

    def load(self) -> tuple[HybridForCausalLM, PreTrainedModel, PreTrainedTokenizerBase]:
        """Student, teacher and tokenizer. Raises ValueError for what is no student, and for another one's teacher."""
        if is_run(self.student / "config.json"):
            if self.teacher is not None:
                raise ValueError(f"{self.student} is a run, which knows its teacher; leave out --teacher.")
            run = finished_run(self.student)
            (student, _), (teacher, tokenizer) = run.trained_student(), run.teacher_and_tokenizer
        else:
            loaded: Any = Subject(str(self.student)).load()
            student, tokenizer = loaded
            teacher, _ = load_teacher(self.teacher or TINY, dtype=str(student.dtype).removeprefix("torch."))
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
    sites = head_sites(student)
    parts: list[Any] = [site.layer for site in sites]
    restore: Callable[[list[Any]], AbstractContextManager[None]] = partial(restore_layers, student, teacher)
    if by == "head":
        parts = [HeadId(site.layer, head) for site in sites for head in range(site.n_heads)]
        restore = partial(restore_heads, student, teacher)
    n_tried = sum(len(parts) - done for done in range(min(together, len(parts))))
    with tqdm(total=2 + n_tried, desc=f"putting back a {by}", disable=not progress) as bar:

        def row(label: str, restored: list[Any]) -> Row:
            with restore(restored):
                found = Row(label, measure(student, tokenizer, tasks))
            bar.update()
            return found

        def worth(found: Row) -> float:
            return found.values[0] if tasks[0].column.unit else -found.values[0]  # of a perplexity less is more

        rows = [row("none", [])]
        alone = {part: row(f"layer {part}" if by == "layer" else str(part), [part]) for part in parts}
        chosen, company = [max(parts, key=lambda part: worth(alone[part]))], []
        while len(chosen) < min(together, len(parts)):
            tried = {part: row(_joined(by, [*chosen, part]), [*chosen, part]) for part in parts if part not in chosen}
            best = max(tried, key=lambda part: worth(tried[part]))
            chosen.append(best)
            company.append(tried[best])
        rows += alone.values() if by == "layer" else sorted(alone.values(), key=worth, reverse=True)
        rows += [*company, Row("teacher", measure(teacher, tokenizer, tasks))]
        bar.update()
    title = f"{student.name_or_path}: one {by} of the teacher put back"
    return Table(title, "put back", tuple(task.column for task in tasks), tuple(rows))


def _joined(by: By, parts: Sequence[int | HeadId]) -> str:
    return f"{'layers' if by == 'layer' else 'heads'} {' + '.join(map(str, parts))}"


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
