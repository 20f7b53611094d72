"""One run from start to finish: score, plan, build, align, distill, evaluate, export.

Every step writes its result to the run directory and is skipped if the result exists, so an interrupted run resumes
where it stopped::

    config.json  sources.json  scores.json  plan.json  build.json  build.safetensors
    stages/1-align/  stages/2-distill/  teacher/evaluation.json  evaluation.json  export/

A run with a ``restoration`` plan also has ``aligned/``, a separate run that aligned every head.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import shutil
from collections.abc import Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from ..config import PlanConfig, RunConfig, from_json, to_json
from ..data import PINS, Batch, Rows, open_rows, write_pins
from ..devices import computes_on_gpu
from ..distributed import agree_on, alone_in, connect, device_summary, from_main, on_main_process, own_device
from ..evaluation.evaluate import EvalResult, evaluate
from ..export import ExportError, GateReport, export_checkpoint, origin
from ..io import Record, write_json, write_text
from ..kernels import check_kernels
from ..limits import first_line
from ..model.modeling_hybrid import HybridForCausalLM
from ..model.ssd import check_implementation
from ..plan import HeadPlan
from ..progress import Phase
from ..scoring import HeadScores, score_heads
from ..scoring.restoration import greedy_restoration
from ..student.build import (
    BuildReport,
    build_student,
    check_plan,
    check_teacher_rows,
    empty_student,
    graft_recurrent_heads,
    load_recurrent_heads,
    unshare_weights,
)
from ..student.dtypes import settle
from ..student.init import DEFAULT_INIT, Init
from ..teacher import fingerprint
from ..train.checkpoint import StageManifest, load_stage, stage_tensors
from ..train.config import StageConfig
from ..train.loop import train_stage
from ..train.stages import make_stage
from ..train.tracking import TrackedRun, log_figures
from ..vocabulary import vocabulary_size
from .built import built_weights, load_built, save_built
from .folder import outdated
from .inputs import PROBE_SEEDS, RunInputs, load, make_plan

log = logging.getLogger(__name__)

CALIBRATION_TOKENS = 2048
EVALUATION, TEACHER_EVALUATION = "evaluation.json", "teacher/evaluation.json"


def run(config: RunConfig) -> Path:
    """Run all steps, from the config to the export; return the run directory. Resumes an interrupted run.

    Raises ValueError for a config that cannot be run, InUse while another process writes to the folder, and Interrupted
    on SIGINT, SIGTERM or SIGUSR1, after saving.
    """
    this = Run(config)
    announce()
    with alone_in(this.out):
        this.prepare()
        plan = this.plan()
        student = this.train(plan)
        this.evaluate(student)
        if config.export:
            this.export(student, plan)
    return this.out


@cache
def announce() -> None:
    """Log what this process computes on, and with which kernels, once: the first line of every run."""
    log.info("%s", device_summary(kernels_in_use()))


def kernels_in_use() -> str:
    """Describe which implementation of the recurrent heads ``auto`` stands for on this process's device."""
    if not computes_on_gpu():
        return "kernels of torch"
    try:
        check_implementation("triton")
    except RuntimeError as error:
        return f"kernels of torch ({first_line(error)})"
    return "kernels in Triton"


def is_there(path: Path) -> bool:
    """Check on the main process whether a result exists. It may be ahead of the others, so all use its answer."""
    return agree_on(path.exists)


class Run(RunInputs):
    """Run directory and the steps that its config asks for."""

    def prepare(self) -> None:
        """Create the directory, or check that it holds this run. Check processes and all input before anything is
        written or computed, then remove results that are `outdated`.

        Raises ValueError naming the fields that differ, or the problem with the input.
        """
        announce()
        processes = connect().num_processes
        check_kernels(self.config.student.kernels, own_device(), "student.kernels")
        for stage in self.config.stage_configs:
            stage.check_world(processes)
        left = outdated(self.config)
        for check in self.checks():
            check()
        trains = self.config.plan.selection != "all"
        # All processes take part in asking for them.
        pins = self.pins if trains or self.config.student.init == "fitted" else {}

        def write_own_pins() -> None:
            """Write the commits of the sources on the hub: a later start reads the same ones, and asks nobody."""
            if pins:
                write_pins(self.out / PINS, pins)

        if trains:
            self.check_launch()
            if self.config.resume != "never":  # otherwise `begin` does, together with what it deletes
                on_main_process(write_own_pins)
            for stage in self.config.stage_configs:
                self.rows(stage)  # tokenizes local sources, which may be broken anywhere

        def begin() -> None:
            for found in left:
                shutil.rmtree(found) if found.is_dir() else found.unlink()
            self.out.mkdir(parents=True, exist_ok=True)
            write_json(self.out / "config.json", to_json(self.config))
            write_own_pins()

        on_main_process(begin)

    # score

    def scores(self) -> HeadScores:
        """Return head scores from ``scoring.file`` or the run directory; otherwise measure and write them there."""
        options, path = self.config.scoring, self.out / "scores.json"
        if options.file is not None:
            given = HeadScores.load(options.file)
            if given.fingerprint != fingerprint(self.teacher):
                raise ValueError(
                    f"{options.file} ranks the heads of another teacher ({given.fingerprint or 'unknown'}); "
                    "score this one, or pass its own scores.json."
                )
            on_main_process(lambda: given.save(path))
            return given
        if not is_there(path):
            check_teacher_rows(self.teacher)  # otherwise `build_student` refuses after hours of scoring
            partial = self.out / "scores.partial.json"
            nn.Module.to(self.teacher, connect().device)
            scores = score_heads(  # all processes share the work
                self.teacher,
                self.tokenizer,
                self.scoring_probe(),
                n_examples=options.n_examples,
                batch_size=options.batch_size,
                control_texts=self.held_out_texts(options.n_control_texts),
                min_accuracy=options.min_accuracy,
                resume_path=partial,
            )
            on_main_process(lambda: (scores.save(path), partial.unlink(missing_ok=True)))
        return HeadScores.load(path)

    # plan

    def plan(self) -> HeadPlan:
        """Return the plan in the run directory, or make the one that the config describes."""
        path = self.out / "plan.json"
        known = is_there(path)
        if known:
            plan = HeadPlan.load(path)
        elif self.config.plan.selection == "restoration":
            plan = self.restoration_plan(self.config.plan.k)
        else:
            plan = make_plan(self.config.plan, self.teacher, self.scores)
        check_plan(plan, self.teacher)
        if not known:
            on_main_process(lambda: plan.save(path))
        return plan

    def restoration_path(self, k: int) -> Path:
        return self.out / f"restoration-{k}.json"

    def restoration_plan(self, k: int) -> HeadPlan:
        """Return a plan of the ``k`` heads that recover most in the aligned student without attention."""
        HeadPlan.check_k(self.teacher, k)
        path = self.restoration_path(k)
        if not is_there(path):
            (student, none), probe = self.aligned.trained_student(), self.scoring_probe()  # all processes load together
            n_examples = self.config.scoring.restoration_examples

            def choose() -> None:
                teacher, tokenizer = self.teacher_and_tokenizer
                heads = greedy_restoration(student.eval(), teacher, tokenizer, probe, k, n_examples=n_examples)
                HeadPlan.from_pairs(none, heads).save(path)

            on_main_process(choose)
        return HeadPlan.load(path)

    @cached_property
    def aligned(self) -> Run:
        """Run in ``aligned/`` that aligns every head, independent of the final plan; completed on first access."""
        stages = zip(self.config.stages, self.config.stage_configs)
        before = tuple(name for name, stage in stages if not stage.is_per_plan)
        config = dataclasses.replace(
            self.config,
            out=self.out / "aligned",
            plan=PlanConfig("none", k=0),
            align=dataclasses.replace(self.config.align, target="head"),
            stages=before or ("align",),
        )
        run = Run(config, self.teacher_and_tokenizer, self.pins)
        run.prepare()
        run.train(run.plan())
        return run

    # build

    def build(self, plan: HeadPlan) -> HybridForCausalLM:
        """Return the student for its first stage. The main process builds and saves it once (`built`); all other
        processes and all later starts load it. build.json lists the source of every tensor."""
        nn.Module.to(self.teacher, connect().device)
        made_for = self._made_for(plan)
        if self._built_weights(made_for) is None:
            # All processes align together, before one of them builds alone.
            restores = self.config.plan.selection == "restoration"
            aligned = self.aligned.last_stage() if restores else self.config.student.aligned
            rows = None
            if aligned is None and self.config.student.init == "fitted":
                # All processes open them: the one that tokenizes tells the others.
                rows = open_rows(self.config.data, self.tokenizer, pins=self.pins)
            built: list[HybridForCausalLM] = []
            on_main_process(lambda: built.append(self._build_and_save(plan, aligned, rows, made_for)))
            if built:
                return built[0]
        return self._new_student(plan, recurrent=load_built(self.out))[0]

    def _build_and_save(
        self, plan: HeadPlan, aligned: Path | None, rows: Rows | None, made_for: Record
    ) -> HybridForCausalLM:
        """Build a student, its heads from a finished alignment or fitted to the run's first ``rows`` of text."""
        calibration = None
        if rows is not None:
            calibration = rows.batch(0, max(1, CALIBRATION_TOKENS // self.config.data.seq_len))
        with Phase("building the student"):
            if aligned:
                student, report = self._student_from_alignment(plan, aligned)
            else:
                student, report = self._new_student(plan, self.config.student.init, calibration)
            save_built(self.out, student, report, made_for)
        return student

    def _made_for(self, plan: HeadPlan) -> Record:
        """Return everything that the built student depends on and that a folder's owner may replace."""
        aligned = self.config.student.aligned
        manifest = StageManifest.read(aligned) if aligned else None
        student = dataclasses.asdict(self.config.student)
        del student["kernels"]  # may change when a run resumes, which must find the student it began with
        return {
            "plan": dataclasses.asdict(plan),
            "teacher": fingerprint(self.teacher),
            "student": {**student, "aligned": manifest and manifest.weights},
            "seed": self.seed,
        }

    def _built_weights(self, made_for: Record) -> str | None:
        return from_main(lambda: built_weights(self.out, made_for))

    def _donor(self, stage: Path) -> HybridForCausalLM:
        """Return a student without kept heads that holds the recurrent heads of a finished alignment, and no other
        weights: a second copy of a large model would not fit."""
        options = self.config.student
        none = HeadPlan.none(self.teacher)
        donor = empty_student(self.teacher, none, options.d_state, options.conv_width, options.recurrence)
        load_recurrent_heads(donor, stage_tensors(stage), str(stage))
        return donor

    def _new_student(
        self,
        plan: HeadPlan,
        init: Init = DEFAULT_INIT,
        calibration: Batch | None = None,
        recurrent: Mapping[str, Tensor] | None = None,
    ) -> tuple[HybridForCausalLM, BuildReport]:
        options = self.config.student
        student, report = build_student(
            self.teacher,
            plan,
            d_state=options.d_state,
            conv_width=options.conv_width,
            recurrence=options.recurrence,
            init=init,
            calibration=calibration,
            recurrent=recurrent,
            seed=self.seed,
            kernels=options.kernels,
        )
        student.name_or_path = self.config.name
        return student, report

    def _student_from_alignment(self, plan: HeadPlan, stage: Path) -> tuple[HybridForCausalLM, BuildReport]:
        """Build a student whose recurrent heads come from a finished alignment of all heads."""
        student, report = self._new_student(plan)
        graft_recurrent_heads(student, self._donor(stage))
        return student, report

    def _loaded_student(self, plan: HeadPlan, stage: Path) -> HybridForCausalLM:
        """Build a student and load the weights of a finished stage."""
        student, _ = self._new_student(plan)
        load_stage(stage, student)
        return student

    # align, distill

    def train(self, plan: HeadPlan) -> HybridForCausalLM:
        """Build the student and train it stage by stage; finished stages are loaded instead.

        The result has the teacher's dtype (`settle`); the float32 weights are in the last stage's folder.
        """
        student = self.build(plan)
        if plan.keeps_all:
            log.info("every head is kept: the student is the teacher, and there is nothing to train")
            return student
        parent, steps = self._built_weights(self._made_for(plan)) or "", 0
        for stage, folder in self._stage_folders():
            parent = self._train_stage(student, stage, folder, parent, steps).weights
            steps += stage.steps
        unshare_weights(student)
        return settle(student)

    def _stage_folders(self) -> list[tuple[StageConfig, Path]]:
        stages = enumerate(self.config.own_stages, start=1)
        return [(stage, self.out / "stages" / f"{number}-{stage.name}") for number, stage in stages]

    def _train_stage(
        self, student: HybridForCausalLM, config: StageConfig, folder: Path, parent: str, steps_before: int
    ) -> StageManifest:
        rows, teacher = self.rows(config), None
        if config.cached_logits is not None:
            self._release_teacher(student)
        elif (teacher := self.stage_teacher(config)) is not self.teacher:
            self.teacher.cpu()  # frees GPU memory; later steps move it back
        return train_stage(
            make_stage(config, student, teacher, vocab_size=vocabulary_size(self.tokenizer)),
            rows,
            folder,
            seed=self.seed,
            parent_hash=parent,
            resume=self.config.resume,
            trackers=self.config.trackers,
            tracked=self._tracked(steps_before),
            profile=self.config.profile,
            teacher_sharding=self.config.teacher_sharding,
            collective_timeout=self.config.collective_timeout,
        )

    def stage_teacher(self, stage: StageConfig) -> PreTrainedModel:
        """Return the teacher that a stage distills from."""
        options = stage.teacher_within(self.config.teacher)
        if options == self.config.teacher:
            return self.teacher
        log.info("%s distills from %s: from its logits alone, not its hidden states", stage.name, options.path)
        return load(options)[0]

    def _release_teacher(self, student: HybridForCausalLM) -> None:
        """Free the teacher's memory; it is loaded again on next use. A teacher given by the caller moves to the CPU."""
        unshare_weights(student)
        if self._given is not None:
            nn.Module.to(self._given[0], "cpu")
            return
        for name in ("teacher_and_tokenizer", "aligned"):
            self.__dict__.pop(name, None)
        gc.collect()

    def _tracked(self, first_step: int) -> TrackedRun:
        return TrackedRun(self.out, self.config.name, self.config.group, first_step, to_json(self.config))

    def last_stage(self) -> Path:
        """Return the folder of the last finished stage. Raises ValueError if none is finished."""
        finished = [f for f in sorted((self.out / "stages").glob("*-*")) if StageManifest.read(f)]
        if not finished:
            raise ValueError(f"{self.out} does not hold a finished stage; run it to its end first.")
        return finished[-1]

    def trained_student(self) -> tuple[HybridForCausalLM, HeadPlan]:
        """Load the student of a finished run from its last stage. Raises ValueError if no stage is finished, naming any
        runs inside this folder: a comparison is easily mistaken for one of its runs.
        """
        path = self.out / "plan.json"
        if not path.exists():
            if below := sorted(str(plan.parent) for plan in self.out.glob("*/plan.json")):
                raise ValueError(f"{self.out} contains several runs; pass one of {', '.join(below)}.")
            raise ValueError(f"{self.out} does not hold a plan of heads yet; run it to its end first.")
        plan = HeadPlan.load(path)
        if plan.keeps_all:
            return self._new_student(plan)[0], plan
        if not self.config.own_stages:  # `restoration` has aligned it in ``aligned/``, and nothing came after
            aligned = finished_run(self.out / "aligned").last_stage()
            return settle(self._student_from_alignment(plan, aligned)[0]), plan
        return settle(self._loaded_student(plan, self.last_stage())), plan

    # evaluate

    def evaluate(self, student: HybridForCausalLM, *, again: bool = False) -> EvalResult:
        """Measure teacher and student; write teacher/evaluation.json and evaluation.json.

        ``again`` repeats existing measurements. New results also go to the trackers.
        """
        self.evaluate_teacher(again=again)
        path = self.out / EVALUATION
        is_new = again or not is_there(path)
        result = self._evaluated(student, path, is_new)
        if is_new and self.config.trackers:
            steps = sum(stage.steps for stage in self.config.stage_configs)
            log_figures(self.config.trackers, self._tracked(steps), result.figures())
        return result

    def evaluate_teacher(self, *, again: bool = False) -> EvalResult:
        return self._evaluated(self.teacher, self.out / TEACHER_EVALUATION, again)

    def _evaluated(self, model: PreTrainedModel, path: Path, again: bool) -> EvalResult:
        options, device = self.config.evaluation, connect().device

        def measure() -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            for each in (model, self.teacher):  # a resumed run has loaded them on the CPU
                nn.Module.to(each, device)
            with Phase(f"measuring the {'teacher' if model is self.teacher else 'student'}"):
                evaluate(
                    model,
                    self.tokenizer,
                    teacher=self.teacher,
                    n_pairs=options.n_pairs,
                    n_examples=options.n_examples,
                    prompt_format=self.prompt_format,
                    seed=self.seed + PROBE_SEEDS["evaluation"],
                    held_out_texts=self.held_out_texts(options.n_texts),
                    knowledge=self.knowledge(),
                    batch_size=options.batch_size,
                    progress=True,
                ).save(path)

        if again or not is_there(path):
            on_main_process(measure)
        return EvalResult.load(path)

    # export

    def export(
        self, student: HybridForCausalLM, plan: HeadPlan, path: Path | None = None, **options: Any
    ) -> GateReport | None:
        """Export the student through the export gate, with the scores and results in the run directory.

        ``options`` go to `export_checkpoint`. Returns the gate's report on the main process, None on the others. Raises
        ExportError if the exported model does not compute the same as the student. Nothing is lost then: the student is
        in its last stage's folder, and the same command finds everything but the export.
        """
        reports: list[GateReport] = []
        license, base_model = origin(self.config.teacher.path)
        scores = self.out / "scores.json"
        measured = {"teacher": self.out / TEACHER_EVALUATION, "student": self.out / EVALUATION}
        known: Record = {
            "results": {name: EvalResult.load(file) for name, file in measured.items() if file.exists()},
            "scores": HeadScores.load(scores) if scores.exists() else None,
            "training": self._training(),
            "license": license,
            "base_model": base_model,
        }
        place = path or self.out / "export"

        def write() -> None:
            try:
                reports.append(export_checkpoint(student, self.tokenizer, place, plan=plan, **known, **options))
            except ExportError as error:
                raise ExportError(
                    f"{error}\nNothing else is lost: the trained student is in {self.out / 'stages'} and its "
                    "results are written; the same command repeats the export alone."
                ) from error

        on_main_process(write)
        return next(iter(reports), None)

    def _training(self) -> list[Record]:
        """List steps and tokens of each finished stage, first those of the run that aligned the heads, if any."""
        aligned = self.config.student.aligned
        shared = aligned and aligned.resolve().parents[1]
        before = self.out / "aligned" if self.config.plan.selection == "restoration" else shared
        stages = finished_run(before)._training() if before and (before / "config.json").is_file() else []
        for stage, folder in self._stage_folders():
            if StageManifest.read(folder):
                tokens = stage.rows_read * stage.data_within(self.config.data).seq_len
                stages.append({"name": stage.name, "steps": stage.steps, "tokens": tokens})
        return stages


def finished_run(folder: Path) -> Run:
    """Open the run in a folder for reading; nothing in it starts over, even if its config has ``resume`` "never".

    The folder may have been moved since. Raises ValueError for any other folder.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; pass the folder of a finished run.")
    return Run(dataclasses.replace(from_json(folder / "config.json"), resume="auto", out=folder))


def run_beside(shared: Run, config: RunConfig) -> tuple[Run, HybridForCausalLM, HeadPlan]:
    """Train and measure a student in a separate run that copies the teacher's evaluation from ``shared``.

    If every head is kept, the student is the teacher and has the same figures.
    """
    this = Run(config, shared.teacher_and_tokenizer, shared.pins)
    this.prepare()
    plan = this.plan()

    def copy() -> None:
        measured = (shared.out / TEACHER_EVALUATION).read_text()
        (this.out / TEACHER_EVALUATION).parent.mkdir(exist_ok=True)
        for name in (TEACHER_EVALUATION, *[EVALUATION] * plan.keeps_all):
            write_text(this.out / name, measured)

    on_main_process(copy)
    student = this.train(plan)
    this.evaluate(student)
    return this, student, plan
