"""Every experiment of `hybrid-distill analyze` on one model and a student of it: the figures of docs/gallery.md.

    python benchmarks/gallery.py                                         # the embedded teacher; makes its students
    python benchmarks/gallery.py --model PATH --student PATH --out OUT   # a model and a student of your own
    python benchmarks/gallery.py --only maps mask                        # some of it again

Each experiment is a command that is printed before it runs and can be given by hand. The embedded teacher's students
are made in ``--work``, and kept there: one without attention, whose recurrent heads are aligned for a few steps
(``recurrent``), and one with the same recurrent heads beside the teacher's first heads (``hybrid``), which is not
distilled.
"""

from __future__ import annotations

import json
import runpy
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import tyro
from records import ROOT, cpu_time
from transformers import PreTrainedModel

from hybrid_distill.cli import main as run_command
from hybrid_distill.pipeline import RunInputs, last_stage, trained_student
from hybrid_distill.pipeline.run import align_all_heads, choose_heads, prepare, score, train
from hybrid_distill.teacher import TINY

ALIGN_STEPS = 200  # instead of the demo's 500
COUNTS = "2 4 6"
"""Numbers of heads to remove, in ranked order."""
KEPT_OF_TINY = "2:6 2:none 5:5 5:none 2:6/5:5 2:none/5:none"
"""Heads that keep-heads keeps of the embedded teacher, one variant each."""


class Students(NamedTuple):
    """Folders of a student without attention, and of one that has some."""

    recurrent: Path
    hybrid: Path


@dataclass(frozen=True)
class Gallery:
    """Models and the folder for the figures."""

    model: str = TINY
    """A local folder, a hub id, or ``tiny`` for the embedded teacher, whose student is made here."""
    student: Path | None = None
    """The export of a student of that model. Without it, only the model is shown."""
    only: tuple[str, ...] = ()
    """Names of experiments; by default all."""
    work: Path = Path("runs/gallery")
    """Scores and students; another folder for each model."""
    out: Path = Path("docs/gallery")
    """Tables and figures."""

    @property
    def is_tiny(self) -> bool:
        return self.model == TINY

    @property
    def ranking(self) -> Path:
        return self.work / "scores.json"


def main(gallery: Gallery) -> None:
    """Run the commands; say how long each took."""
    students = None
    seconds: dict[str, float] = {}
    if gallery.student is not None:
        students = Students(gallery.student, gallery.student)
    elif gallery.is_tiny:
        students, seconds["students"] = cpu_time(lambda: make_students(gallery.work))
    commands = experiments(gallery, students)
    unknown = [name for name in gallery.only if name not in commands]
    if unknown:
        raise SystemExit(f"--only {' '.join(unknown)}: there are {', '.join(commands)}.")
    if not gallery.ranking.exists():
        run_shown(f"score --model {gallery.model} --out {gallery.ranking}")
    for name in gallery.only or commands:
        _, seconds[name] = cpu_time(lambda name=name: run_shown(commands[name]))
    print("seconds of CPU time:", json.dumps({name: round(used) for name, used in seconds.items()}))
    print(f"in all: {sum(seconds.values()) / 60:.1f} minutes")


def make_students(work: Path) -> Students:
    """Make the embedded teacher's, by the demo's recipe with a shorter alignment; keep those that are there."""
    config = runpy.run_path(str(ROOT / "recipes/hybrid_tiny.py"))["config"]()
    config = replace(config, name="gallery", out=work).with_stage("align", steps=ALIGN_STEPS)
    run = RunInputs(config)
    prepare(run)
    score(run)
    aligned = align_all_heads(run)
    students = Students(work / "recurrent", work / "hybrid")
    if not students.recurrent.exists():
        save(trained_student(aligned)[0], run, students.recurrent)
    if not students.hybrid.exists():
        grafted = replace(config.student, aligned=last_stage(aligned.paths))
        # Aligned heads and the teacher's own side by side are the student: no stage is left to run.
        hybrid = RunInputs(replace(config, student=grafted, stages=()), run.teacher_and_tokenizer)
        model = train(hybrid, choose_heads(run))
        save(model, run, students.hybrid)
    return students


def save(student: PreTrainedModel, run: RunInputs, folder: Path) -> None:
    student.save_pretrained(folder)
    run.tokenizer.save_pretrained(folder)


def experiments(gallery: Gallery, students: Students | None) -> dict[str, str]:
    """Return the command of each experiment; without students, of those that need none."""
    ranked = f"--scores {gallery.ranking}"
    counted = f"{ranked} --counts {COUNTS} --examples 64"
    maps = f"{ranked} --pairs 4 --k 2"
    if gallery.is_tiny:
        maps += " --heads L2H6 L5H5"
    if students is not None:
        maps += f" --beside {students.recurrent}"
    options = {
        "remove-heads": counted,
        "prune-layers": "--tasks kv,knowledge --examples 64",
        "formats": counted,
        "maps": maps,
        "mask": f"{ranked} --examples 32",
    }
    if gallery.is_tiny:
        options["keep-heads"] = f"--keep {KEPT_OF_TINY} --examples 64"
    else:
        options = {name: f"--model {gallery.model} {words}" for name, words in options.items()}
    if students is not None:
        teacher = "" if gallery.is_tiny else f" --teacher {gallery.model}"
        replaced = f"--student {students.recurrent}{teacher}"
        options["replace-layer"] = f"{replaced} --tasks kv,knowledge --pairs 8 --examples 64"
        options["carriers"] = f"--model {students.hybrid} --n-control-texts 4"
    commands = {}
    for name, words in options.items():
        commands[name] = f"analyze {name} {words} --out {gallery.out}"
    return commands


def run_shown(command: str) -> None:
    """Print a command of hybrid-distill and run it."""
    print(f"\nhybrid-distill {command}\n", flush=True)
    run_command(shlex.split(command))


if __name__ == "__main__":
    main(tyro.cli(Gallery, description=__doc__))
