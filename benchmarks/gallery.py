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
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import tyro
from transformers import PreTrainedModel

from hybrid_distill.cli import main as run_command
from hybrid_distill.pipeline import RunInputs, last_stage, trained_student
from hybrid_distill.pipeline.run import align_all_heads, choose_heads, prepare, score, train
from hybrid_distill.teacher import TINY

ROOT = Path(__file__).parent.parent
ALIGN_STEPS = 200  # instead of the demo's 500
KEPT_OF_TINY = ("2:6", "2:none", "5:5", "5:none", "2:6/5:5", "2:none/5:none")


class Students(NamedTuple):
    """Folders of a student without attention, and of one that has some."""

    recurrent: Path
    hybrid: Path


@dataclass(frozen=True)
class Gallery:
    """Models, rankings and the folder for the figures."""

    model: str = TINY
    """A local folder, a hub id, or ``tiny`` for the embedded teacher, whose student is made here."""
    student: Path | None = None
    """The export of a student of that model. Without it, only the model is shown."""
    scores: Path | None = None
    """A scores.json of the model; by default its heads are scored first, unless an earlier call has done it."""
    counts: tuple[int, ...] = (2, 4, 6)
    """Numbers of heads to remove, in ranked order."""
    keep: tuple[str, ...] = ()
    """Heads that keep-heads keeps, one variant each, such as ``16:22/17:24 16:none/17:24``; for your own model,
    none skips keep-heads."""
    only: tuple[str, ...] = ()
    """Names of experiments; by default all."""
    work: Path | None = None
    """Scores and students; by default runs/gallery for the embedded teacher, OUT for a model of your own."""
    out: Path | None = None
    """Tables and figures; by default docs/gallery for the embedded teacher, runs/analysis for a model of your own."""

    @property
    def is_tiny(self) -> bool:
        return self.model == TINY

    @property
    def figures(self) -> Path:
        return self.out or Path("docs/gallery" if self.is_tiny else "runs/analysis")

    @property
    def made(self) -> Path:
        """Return the paths that the experiments need."""
        return self.work or (Path("runs/gallery") if self.is_tiny else self.figures)

    @property
    def ranking(self) -> Path:
        return self.scores or self.made / "scores.json"


def main(gallery: Gallery) -> None:
    """Run the commands; say how long each took."""
    students = None if gallery.student is None else Students(gallery.student, gallery.student)
    started = time.process_time()
    if gallery.is_tiny and students is None:
        students = make_students(gallery.made)
    seconds = {"students": time.process_time() - started}
    commands = experiments(gallery, students)
    if unknown := [name for name in gallery.only if name not in commands]:
        raise SystemExit(f"--only {' '.join(unknown)}: there are {', '.join(commands)}.")
    if not gallery.ranking.exists():
        _run(f"score --model {gallery.model} --out {gallery.ranking}")
    for name, command in commands.items():
        if name in gallery.only or not gallery.only:
            started = time.process_time()
            _run(command)
            seconds[name] = time.process_time() - started
    print("seconds of CPU time:", json.dumps({name: round(used) for name, used in seconds.items()}))
    print(f"in all: {sum(seconds.values()) / 60:.1f} minutes")


def make_students(work: Path) -> Students:
    """The embedded teacher's, from the demo's recipe with a shorter alignment; what is there is taken as it is."""
    config = runpy.run_path(str(ROOT / "recipes/hybrid_tiny.py"))["config"]()
    config = replace(config, name="gallery", out=work).with_stage("align", steps=ALIGN_STEPS)
    run = RunInputs(config)
    prepare(run)
    score(run)
    aligned = align_all_heads(run)
    students = Students(work / "recurrent", work / "hybrid")
    if not students.recurrent.exists():
        _save(trained_student(aligned)[0], run, students.recurrent)
    if not students.hybrid.exists():
        grafted = replace(config.student, aligned=last_stage(aligned.paths))
        # Aligned heads and the teacher's own side by side are the student: no stage is left to run.
        hybrid = RunInputs(replace(config, student=grafted, stages=()), run.teacher_and_tokenizer)
        model = train(hybrid, choose_heads(run))
        _save(model, run, students.hybrid)
    return students


def _save(student: PreTrainedModel, run: RunInputs, folder: Path) -> None:
    student.save_pretrained(folder)
    run.tokenizer.save_pretrained(folder)


def experiments(gallery: Gallery, students: Students | None) -> dict[str, str]:
    """The command of each, by name; without students, those that need none."""
    scores, counts = gallery.ranking, " ".join(map(str, gallery.counts))
    keep = gallery.keep or (KEPT_OF_TINY if gallery.is_tiny else ())
    of_model = {
        "remove-heads": f"--scores {scores} --counts {counts} --examples 64",
        "prune-layers": "--tasks kv,knowledge --examples 64",
        **({"keep-heads": f"--keep {' '.join(keep)} --examples 64"} if keep else {}),
        "formats": f"--scores {scores} --counts {counts} --examples 64",
        "maps": f"--scores {scores} --pairs 4 --k 2"
        + (" --heads L2H6 L5H5" if gallery.is_tiny else "")
        + (f" --beside {students.recurrent}" if students else ""),
        "mask": f"--scores {scores} --examples 32",
    }
    named = "" if gallery.is_tiny else f"--model {gallery.model} "
    commands = {name: named + options for name, options in of_model.items()}
    if students is not None:
        teacher = "" if gallery.is_tiny else f" --teacher {gallery.model}"
        commands |= {
            "replace-layer": f"--student {students.recurrent}{teacher} --tasks kv,knowledge --pairs 8 --examples 64",
            "carriers": f"--model {students.hybrid} --n-control-texts 4",
        }
    return {name: f"analyze {name} {options} --out {gallery.figures}" for name, options in commands.items()}


def _run(command: str) -> None:
    print(f"\nhybrid-distill {command}\n", flush=True)
    run_command(shlex.split(command))


if __name__ == "__main__":
    main(tyro.cli(Gallery, description=__doc__))
