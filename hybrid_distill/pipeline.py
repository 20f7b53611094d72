"""One run, start to finish: score, plan, build, align, distil, evaluate, export, report.

Every step leaves its result in the run directory and is skipped when that is there, so that a run that was stopped
anywhere goes on from there::

    config.json  scores.json  plan.json  build.json  stages/1-align/  stages/2-distill/
    teacher/evaluation.json  evaluation.json  export/  report.md

A run whose plan is made by restoration has ``aligned/`` besides, a run of its own that aligned every head.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import logging
import shutil
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from .config import (
    END_TO_END,
    PlanConfig,
    RunConfig,
    Stage,
    TeacherConfig,
    differences,
    from_json,
    to_json,
)
from .data import (
    Batch,
    CachedLogitsDataset,
    Rows,
    check_same_vocabulary,
    check_sources,
    open_logits,
    open_rows,
    read_held_out,
)
from .distributed import alone_in, check_trackers, connect, on_main_process
from .evaluation.evaluate import EvalResult, evaluate
from .export import GateReport, export_checkpoint, origin
from .io import replacing, write_json
from .model.modeling_hybrid import HybridForCausalLM
from .plan import HeadPlan
from .probes.knowledge import Knowledge
from .probes.kv_retrieval import KVRetrieval
from .probes.plain_text import text_rows
from .scoring import HeadScores, score_heads
from .scoring.restoration import greedy_restoration
from .student.build import build_student, check_plan, checked_student, graft_recurrent_heads, unshare_weights
from .student.init import DEFAULT_INIT, INITS
from .student.self_check import check_rows
from .teacher import DTYPES, TINY, fingerprint, load_config, load_teacher, longest_context, read_teacher
from .train.checkpoint import MANIFEST, StageManifest, load_stage, weights_hash
from .train.config import MAY_CHANGE as STAGE_MAY_CHANGE
from .train.config import DistillConfig
from .train.loop import train_stage
from .train.stages import make_stage
from .train.tracking import PROJECT, TrackedRun, log_figures

log = logging.getLogger(__name__)

MAY_CHANGE = (
    "out", "resume", "trackers", "group", "profile", "dry_run", "show_config", "gpus", "gpu_memory", "export",
    "teacher_sharding",
)  # fmt: skip
"""Fields of a config in which a continued run may differ from its directory's config.json."""
LEAVES = (
    "scores.json", "scores.partial.json", "plan.json", "restoration-*.json", "build.json", "aligned", "stages/*-*",
    "teacher/evaluation.json", "evaluation.json", "export", ".export.*.tmp", "report.md",
    f"{PROJECT}/events.out.tfevents.*",
)  # fmt: skip
"""What a run leaves in its directory beside config.json, and a new one in its place must not read."""
MEASURED = ("teacher/evaluation.json", "evaluation.json", "report.md")
"""What is made again, and nothing else, when the config asks for another evaluation."""
SHOWN_DIFFERENCES = 5
CALIBRATION_TOKENS = 2048
PROBE_SEEDS = {"scoring": 0, "evaluation": 1}
"""Added to the run's seed, so that heads are never ranked on the prompts that students are measured on."""


class Run:
    """A run directory and what its config asks for. Models are loaded when first needed, results read when there.

    ``teacher`` may be handed over by somebody who has loaded it already.
    """

    def __init__(
        self, config: RunConfig, teacher: tuple[PreTrainedModel, PreTrainedTokenizerBase] | None = None
    ) -> None:
        self.config, self.out, self.seed = config, Path(config.out), config.seed
        self._given = teacher

    @cached_property
    def teacher_and_tokenizer(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        options = self.config.teacher
        return self._given or load_teacher(
            options.path,
            dtype=options.dtype,
            revision=options.revision,
            attn_implementation=options.attn_implementation,
            allow_bin=options.allow_bin,
        )

    @property
    def teacher(self) -> PreTrainedModel:
        return self.teacher_and_tokenizer[0]

    @cached_property
    def shape_and_tokenizer(self) -> tuple[PretrainedConfig, PreTrainedTokenizerBase]:
        """The teacher's config and tokenizer, which are read without its weights."""
        if self._given:
            return self._given[0].config, self._given[1]
        return read_teacher(self.config.teacher.path, self.config.teacher.revision)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.shape_and_tokenizer[1]

    def prepare(self) -> None:
        """Make the directory, or check that it holds this run and no other; look at the processes and at all input
        before anything is written or spent. What is `outdated` there is removed.

        Raises ValueError naming the fields that differ, or what is wrong with the input; for a batch that the processes
        cannot share, before the teacher is loaded.
        """
        processes = connect().num_processes
        for name in self.config.stages:
            getattr(self.config, name).check_world(processes)
        left = self.outdated()
        for check in self.checks():
            check()
        if self.config.plan.selection != "all":
            for stage in self.config.stages:
                self._rows(stage, self._tokenizer_of(stage))  # tokenises what is local: it may be broken anywhere

        def begin() -> None:
            for found in left:
                shutil.rmtree(found) if found.is_dir() else found.unlink()
            self.out.mkdir(parents=True, exist_ok=True)
            write_json(self.out / "config.json", to_json(self.config))

        on_main_process(begin)

    def checks(self) -> list[Callable[[], object]]:
        """What raises ValueError for input that a run would stop at, by names, headers and shapes: reads no weights."""
        return [self.check_settings, self.check_data, self.check_evaluation, self.check_student]

    def check_settings(self) -> None:
        """Raises ValueError for a tracker that is not there, and for a checkpoint that is none."""
        check_trackers(self.config.trackers)
        if self.config.resume not in ("auto", "never") and not (Path(self.config.resume) / MANIFEST).is_file():
            raise ValueError(f"resume is {self.config.resume!r}; use auto, never, or the folder of a checkpoint.")

    def check_student(self, plan: PlanConfig | None = None) -> None:
        """Raises ValueError for a teacher that cannot become a student, a plan that is not for its shape, by default
        the config's own, and options that no student has."""
        options, own = self.config.student, plan is None
        teacher = self._given[0] if self._given else shape_of_teacher(self.config.teacher)
        path = self.out / "plan.json"
        if own and self.config.resume != "never" and path.exists():
            heads = HeadPlan.load(path)
        else:
            heads = self.known_plan(plan or self.config.plan, teacher)
        shape = (options.d_state, options.conv_width, options.recurrence, options.init)
        checked_student(teacher, heads or HeadPlan.none(teacher), *shape)
        if options.aligned is not None and not StageManifest.read(options.aligned):
            raise ValueError(f"student.aligned is {options.aligned}, which holds no finished stage; name another.")

    def known_plan(self, options: PlanConfig, teacher: PreTrainedModel) -> HeadPlan | None:
        """The plan for a teacher of this shape; None where its heads are not ranked yet. Raises ValueError for a plan
        that cannot be made."""
        if options.selection == "restoration" or (options.selection == "top" and self.config.scoring.file is None):
            HeadPlan.check_k(teacher, options.k)
            return None
        scores = partial(HeadScores.load, cast(Path, self.config.scoring.file))
        plan = make_plan(options, teacher, scores, fingerprinted=False)
        plan.check_fits(teacher)
        return plan

    def check_data(self) -> None:
        """Raises ValueError for what is wrong with the sources of the run and its stages, as far as names and headers
        tell; reads no text."""
        check_sources(self.config.data, self.tokenizer)
        for stage in self.config.stages:
            self._check_stage(stage)

    def check_evaluation(self) -> None:
        """Raises ValueError for texts or questions that cannot be had: better now than when the student is trained."""
        options = self.config.evaluation
        if options.texts != TINY:
            text_rows(self.tokenizer, self._held_out_texts(options.n_texts), max_tokens=2)
        if (knowledge := self._knowledge()) is not None:
            knowledge.examples(1)
        for n_pairs in options.n_pairs:
            KVRetrieval(n_pairs, seed=self.seed).examples(1)
        if self.config.plan.selection in ("top", "restoration"):
            self.scoring_probe().examples(1)

    def outdated(self) -> list[Path]:
        """What lies in the directory and this run must not read: with ``resume`` "never" all that an earlier run has
        left; after a change of ``evaluation`` alone, what was measured. A run that stopped before its first result has
        left nothing.

        Raises ValueError, naming the fields, when the directory holds a run with other settings.
        """
        path = self.out / "config.json"
        if self.config.resume == "never":
            return self._left_by_an_earlier_run()
        if not path.exists():
            return []
        if not has_result(self.out):
            return []
        before, now = json.loads(path.read_text()), to_json(self.config)
        self._check_same(before)
        measured = [record.get("evaluation", {}) for record in (before, now)]
        changed = differences(*measured, leave_out=("batch_size", "stated_pairs"), prefix="evaluation.")
        left = [found for name in MEASURED if changed and (found := self.out / name).exists()]
        if left:
            log.info("teacher and student are measured again: %s", ", ".join(changed))
        return left

    def _check_same(self, before: dict[str, Any]) -> None:
        """Raises ValueError unless ``before`` is the record of this run's config: what it measures, and settings of
        stages that it has not or has nothing of, may be others."""
        free = [name for name in self.config.stages if not self._has_begun(name)]
        may_change = {*MAY_CHANGE, *self.config.unused_stages, *free, "evaluation"}
        changed = differences(before, to_json(self.config), may_change, STAGE_MAY_CHANGE)
        if changed:
            more = len(changed) - SHOWN_DIFFERENCES
            shown = ", ".join(changed[:SHOWN_DIFFERENCES]) + (f" and {more} more" if more > 0 else "")
            raise ValueError(
                f"{self.out} holds a run with other settings: {shown}; "
                "use another --out, or --resume never to begin again."
            )

    def _has_begun(self, stage: Stage) -> bool:
        """Whether a stage has left a checkpoint or its result."""
        kept = (MANIFEST, "checkpoints/step-*")
        return any(True for name in kept for _ in self.out.glob(f"stages/*-{stage}/{name}"))

    def _left_by_an_earlier_run(self) -> list[Path]:
        """`LEAVES`, where there is the config of a run. Raises ValueError when this run is to read one of them."""
        if not is_run(self.out / "config.json"):
            return []  # what is there is somebody else's
        left = [found for name in LEAVES for found in sorted(self.out.glob(name))]
        read = _paths_in(to_json(self.config))
        for found in left:
            if inputs := [path for path in read if path.resolve().is_relative_to(found.resolve())]:
                raise ValueError(
                    f"{inputs[0]} is to be read, and is of the run that --resume never removes; copy it to another "
                    "place, or use another --out."
                )
        return left

    def _check_stage(self, stage: Stage) -> None:
        """Raises ValueError for another vocabulary, data that cannot be had, rows longer than the teacher reaches."""
        teacher, data = self.config.teacher_of(stage), self.config.data_of(stage)
        shape, tokenizer = self.shape_and_tokenizer
        if teacher != self.config.teacher:
            shape, tokenizer = read_teacher(teacher.path, teacher.revision)
            check_same_vocabulary(self.tokenizer, tokenizer)
        check_sources(data, tokenizer)
        longest = longest_context(shape)
        if longest is not None and data.seq_len > longest:
            field = {"long": "long.seq_len", "post": "post.data.seq_len"}.get(stage, "data.seq_len")
            raise ValueError(
                f"{field} is {data.seq_len}, but the positions of the teacher {teacher.path!r} reach over {longest} "
                f"tokens; use at most {longest}, or a teacher whose config scales its RoPE further (rope_parameters of "
                "type yarn)."
            )

    def scores(self) -> HeadScores:
        """Head scores: read from ``scoring.file`` or the run directory, else measured and written there."""
        options = self.config.scoring
        path = self.out / "scores.json"
        if options.file is not None:
            scores = HeadScores.load(options.file)
            if scores.fingerprint != fingerprint(self.teacher):
                raise ValueError(
                    f"{options.file} ranks the heads of another teacher ({scores.fingerprint or 'unknown'}); "
                    "score this one, or give its own scores.json."
                )
            on_main_process(lambda: scores.save(path))
            return scores

        if not path.exists():
            check_rows(self.teacher)  # what `build_student` would refuse after hours of scoring
            partial = self.out / "scores.partial.json"
            scores = score_heads(  # all processes share the work
                self.teacher.to(cast(Any, connect().device)),
                self.tokenizer,
                self.scoring_probe(),
                n_examples=options.n_examples,
                batch_size=options.batch_size,
                control_texts=self._held_out_texts(options.n_control_texts),
                min_accuracy=options.min_accuracy,
                resume_path=partial,
            )
            on_main_process(lambda: (scores.save(path), partial.unlink(missing_ok=True)))
        return HeadScores.load(path)

    def scoring_probe(self) -> KVRetrieval:
        """The prompts that heads are ranked on."""
        return KVRetrieval(self.config.scoring.n_pairs, seed=self.seed + PROBE_SEEDS["scoring"])

    def plan(self) -> HeadPlan:
        """The plan of the run directory, or the one that the config describes."""
        path = self.out / "plan.json"
        if path.exists():
            plan = HeadPlan.load(path)
        else:
            if self.config.plan.selection == "restoration":
                plan = self.restoration_plan(self.config.plan.k)
            else:
                plan = make_plan(self.config.plan, self.teacher, self.scores)
            check_plan(plan, self.teacher)
            on_main_process(lambda: plan.save(path))
        check_plan(plan, self.teacher)
        return plan

    def restoration_path(self, k: int) -> Path:
        """Where `restoration_plan` keeps its plan."""
        return self.out / f"restoration-{k}.json"

    def restoration_plan(self, k: int) -> HeadPlan:
        """The ``k`` heads that bring most back to the aligned student without attention; kept in the directory."""
        HeadPlan.check_k(self.teacher, k)
        path, aligned = self.restoration_path(k), self.aligned

        def choose() -> None:
            student, none = aligned.trained_student()
            options = self.config.scoring
            heads = greedy_restoration(
                student.eval(),
                self.teacher,
                self.tokenizer,
                self.scoring_probe(),
                k,
                n_examples=options.restoration_examples,
            )
            HeadPlan.from_pairs(none, heads).save(path)

        if not path.exists():
            on_main_process(choose)
        return HeadPlan.load(path)

    @cached_property
    def aligned(self) -> Run:
        """The run below this one that aligns every head, whatever heads are kept later; finished when asked for."""
        before = tuple(name for name in self.config.stages if name not in END_TO_END)
        config = dataclasses.replace(
            self.config,
            out=self.out / "aligned",
            plan=PlanConfig("none", k=0),
            align=dataclasses.replace(self.config.align, target="head"),
            stages=before or ("align",),
        )
        run = Run(config, self.teacher_and_tokenizer)
        run.prepare()
        run.train(run.plan())
        return run

    def last_stage(self) -> Path:
        """The folder of the last finished stage. Raises ValueError when none is finished."""
        finished = [f for f in sorted((self.out / "stages").glob("*-*")) if StageManifest.read(f)]
        if not finished:
            raise ValueError(f"{self.out} holds no finished stage; run it to its end first.")
        return finished[-1]

    def build(self, plan: HeadPlan) -> HybridForCausalLM:
        """The student before its first stage. build.json says where every tensor comes from."""
        options = self.config.student
        aligned = self.aligned.last_stage() if self.config.plan.selection == "restoration" else options.aligned
        student, report = build_student(
            self.teacher,
            plan,
            d_state=options.d_state,
            conv_width=options.conv_width,
            recurrence=options.recurrence,
            init=options.init if aligned is None else DEFAULT_INIT,
            calibration=self._calibration() if aligned is None else None,
            seed=self.seed,
        )
        if aligned is not None:
            graft_recurrent_heads(student, self._loaded_student(HeadPlan.none(self.teacher), aligned))
        on_main_process(
            lambda: write_json(self.out / "build.json", {"weights": weights_hash(student), **report.to_dict()})
        )
        return student

    def _calibration(self) -> Batch | None:
        """The run's first rows of text, for a start that is fitted to them."""
        init, data = INITS.get(self.config.student.init), self.config.data
        if init is None or not init.fitted:
            return None
        return open_rows(data, self.tokenizer).batch(0, max(1, CALIBRATION_TOKENS // data.seq_len))

    def _loaded_student(self, plan: HeadPlan, stage: Path) -> HybridForCausalLM:
        """A student with the weights that a stage has left in its folder."""
        options = self.config.student
        shape = {"d_state": options.d_state, "conv_width": options.conv_width, "recurrence": options.recurrence}
        student, _ = build_student(self.teacher, plan, **shape)
        load_stage(stage, student)
        return student

    def train(self, plan: HeadPlan) -> HybridForCausalLM:
        """Build the student and take it through its stages; finished stages are loaded instead."""
        student = self.build(plan)
        if plan.keeps_all:
            log.info("every head is kept: the student is the teacher, and there is nothing to train")
            return student
        parent = json.loads((self.out / "build.json").read_text())["weights"]
        stages: tuple[Stage, ...] = self.config.stages
        if self.config.plan.selection == "restoration":  # the others were run below aligned/
            stages = tuple(name for name in stages if name in END_TO_END)
        for number, name in enumerate(stages, start=1):
            folder = self.out / "stages" / f"{number}-{name}"
            steps_before = sum(getattr(self.config, earlier).steps for earlier in stages[: number - 1])
            parent = self._run_stage(student, name, folder, parent, steps_before).weights
        unshare_weights(student)
        return student

    def _run_stage(
        self, student: HybridForCausalLM, name: Stage, folder: Path, parent: str, steps_before: int
    ) -> StageManifest:
        options = getattr(self.config, name)
        state, from_disk = connect(), self._logits(name) is not None
        if from_disk:
            rows, teacher = self._rows(name, self._tokenizer_of(name)), None
            self._release_teacher(student)
        else:
            teacher, tokenizer = self.teacher_of(name)
            rows = self._rows(name, tokenizer)
        stage = make_stage(options, student, teacher, vocab_size=len(self.tokenizer))
        if teacher is not None and teacher is not self.teacher:
            self.teacher.cpu()  # makes room; `evaluate` wants it back
        manifest = train_stage(
            stage,
            rows,
            options,
            folder,
            seed=self.seed,
            parent_hash=parent,
            resume=self.config.resume,
            trackers=self.config.trackers,
            tracked=self._tracked(steps_before),
            profile=self.config.profile,
            teacher_sharding=self.config.teacher_sharding,
        )
        if not from_disk and self.config.teacher_sharding == "replicated":
            self.teacher.to(cast(Any, state.device))
        return manifest

    def teacher_of(self, stage: Stage) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Whom a stage distils from, and whose chat template it uses."""
        options = self.config.teacher_of(stage)
        if options == self.config.teacher:
            return self.teacher_and_tokenizer
        log.info("%s distils from %s: from its logits alone, for its hidden states are others", stage, options.path)
        return load_teacher(
            options.path,
            dtype=options.dtype,
            attn_implementation=options.attn_implementation,
            allow_bin=options.allow_bin,
        )

    def _tokenizer_of(self, stage: Stage) -> PreTrainedTokenizerBase:
        """The tokenizer of `teacher_of`, without the weights."""
        options = self.config.teacher_of(stage)
        same = options == self.config.teacher
        return self.tokenizer if same else read_teacher(options.path, options.revision)[1]

    def _logits(self, stage: Stage) -> Path | None:
        """Where a stage reads what the teacher says, if not from the teacher."""
        return getattr(getattr(self.config, stage), "teacher_logits", None)

    def _rows(self, stage: Stage, tokenizer: PreTrainedTokenizerBase) -> Rows:
        """What a stage reads; with the teacher's logits, if it takes them from disk, once they are found to fit."""
        state, folder = connect(), self._logits(stage)
        rows = open_rows(self.config.data_of(stage), tokenizer, rank=state.process_index, world=state.num_processes)
        if folder is None:
            return rows
        logits, options = open_logits(folder), cast(DistillConfig, getattr(self.config, stage))
        teacher = self.config.teacher_of(stage)
        logits.check(
            rows,
            tokenizer,
            fingerprint(self.teacher) if teacher == self.config.teacher else teacher.path,
            vocab_size=len(self.tokenizer),
            places=options.rows_read,
            temperature=options.temperature,
        )
        return CachedLogitsDataset(rows, logits)

    def _release_teacher(self, student: HybridForCausalLM) -> None:
        """No second model in memory. Who asks for the teacher later loads it again; one that was handed over is still
        its owner's, and goes to the CPU."""
        unshare_weights(student)
        if self._given is not None:
            nn.Module.to(self._given[0], "cpu")
            return
        for name in ("teacher_and_tokenizer", "aligned"):
            self.__dict__.pop(name, None)
        gc.collect()

    def _tracked(self, first_step: int) -> TrackedRun:
        return TrackedRun(self.out, self.config.name, self.config.group, first_step, to_json(self.config))

    def evaluate(self, student: HybridForCausalLM, *, again: bool = False) -> EvalResult:
        """Measure teacher and student; results are kept as teacher/evaluation.json and evaluation.json.

        ``again`` does not take what was measured before. What is measured now, not read, goes to the trackers too.
        """
        self.teacher.to(cast(Any, student.device))  # it may have been loaded again after the stages
        self.evaluate_teacher(again=again)
        path = self.out / "evaluation.json"
        is_new = again or not path.exists()
        result = self._evaluated(student, path, again)
        if is_new and self.config.trackers:
            steps = sum(getattr(self.config, name).steps for name in self.config.stages)
            log_figures(self.config.trackers, self._tracked(steps), result.figures())
        return result

    def evaluate_teacher(self, *, again: bool = False) -> EvalResult:
        return self._evaluated(self.teacher, self.out / "teacher" / "evaluation.json", again)

    def _evaluated(self, model: PreTrainedModel, path: Path, again: bool) -> EvalResult:
        options = self.config.evaluation

        def measure() -> None:
            evaluate(
                model,
                self.tokenizer,
                teacher=self.teacher,
                n_pairs=options.n_pairs,
                n_examples=options.n_examples,
                seed=self.seed + PROBE_SEEDS["evaluation"],
                held_out_texts=self._held_out_texts(options.n_texts),
                knowledge=self._knowledge(),
                batch_size=options.batch_size,
                progress=True,
            ).save(path)

        if again or not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            on_main_process(measure)
        return EvalResult.load(path)

    def _knowledge(self) -> Knowledge | None:
        source = self.config.evaluation.knowledge or (TINY if self.config.teacher.path == TINY else None)
        return None if source is None else Knowledge(None if source == TINY else source)

    def _held_out_texts(self, n: int) -> list[str]:
        return read_held_out(self.config.evaluation.texts, n, self.config.data.text_column)

    def export(
        self, student: HybridForCausalLM, plan: HeadPlan, path: Path | None = None, **options: Any
    ) -> GateReport | None:
        """Export the student behind the gate, with the scores and results that the directory holds.

        ``options`` are `export_checkpoint`'s.

        The gate's report, None on all processes but the main one. Raises ExportError when what was written is not the
        student.
        """
        reports: list[GateReport] = []
        license, base_model = origin(self.config.teacher.path)
        scores = self.out / "scores.json"
        measured = {"teacher": self.out / "teacher" / "evaluation.json", "student": self.out / "evaluation.json"}
        on_main_process(
            lambda: reports.append(
                export_checkpoint(
                    student,
                    self.tokenizer,
                    path or self.out / "export",
                    plan=plan,
                    results={name: EvalResult.load(file) for name, file in measured.items() if file.exists()},
                    scores=HeadScores.load(scores) if scores.exists() else None,
                    license=license,
                    base_model=base_model,
                    training=self._training(),
                    **options,
                )
            )
        )
        return next(iter(reports), None)

    def _training(self) -> list[dict[str, Any]]:
        """Steps and tokens of each finished stage, first those of the run that aligned the heads beforehand, if any."""
        aligned = self.config.student.aligned
        before = self.out / "aligned" if self.config.plan.selection == "restoration" else aligned and aligned.parents[1]
        stages = finished_run(before)._training() if before and (before / "config.json").is_file() else []
        for number, name in enumerate(self.config.stages, start=1):
            if StageManifest.read(self.out / "stages" / f"{number}-{name}"):
                options, seq_len = getattr(self.config, name), self.config.data_of(name).seq_len
                tokens = options.steps * options.batch_size * seq_len
                stages.append({"name": name, "steps": options.steps, "tokens": tokens})
        return stages

    def trained_student(self) -> tuple[HybridForCausalLM, HeadPlan]:
        """The student of a finished run, from its last stage. Raises ValueError when no stage is finished, naming the
        runs below this folder if there are any: that of a comparison is easily taken for one of its runs.
        """
        path = self.out / "plan.json"
        if not path.exists() and (below := sorted(str(plan.parent) for plan in self.out.glob("*/plan.json"))):
            raise ValueError(f"{self.out} is no run, it holds some; name one of {', '.join(below)}.")
        plan = HeadPlan.load(path)
        if plan.keeps_all:
            return self.build(plan), plan
        return self._loaded_student(plan, self.last_stage()), plan


def finished_run(folder: Path, teacher: tuple[PreTrainedModel, PreTrainedTokenizerBase] | None = None) -> Run:
    """The run in a folder, to be looked at: whatever its config says of resuming, nothing in it begins again.

    The folder may have been moved since. Raises ValueError for another folder.
    """
    return Run(dataclasses.replace(from_json(folder / "config.json"), resume="auto", out=folder), teacher)


def is_run(path: Path) -> bool:
    """Whether a config.json is that of a run, perhaps of another version."""
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError):
        return False
    return isinstance(record, dict) and {"teacher", "scoring", "stages"} <= record.keys()


def has_result(folder: Path) -> bool:
    """Whether a run has left anything in its directory that another one would lose: its settings alone are nothing."""
    found = (path for name in LEAVES for left in folder.glob(name) for path in (left, *left.rglob("*")))
    return any(path.name != "config.json" and path.is_file() and path.stat().st_size for path in found)


def shape_of_teacher(options: TeacherConfig) -> PreTrainedModel:
    """The teacher on the meta device: shapes without values. Raises ValueError where transformers cannot make it."""
    shape = load_config(options.path, options.revision)
    attention = options.attn_implementation
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                shape, dtype=DTYPES[options.dtype], **({"attn_implementation": attention} if attention else {})
            )
    except Exception as error:  # each version of transformers has errors of its own
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"the teacher {options.path!r} cannot be made ({reason}); name another model.") from error


def _paths_in(record: Any) -> list[Path]:
    """All texts of a config's record, as the paths that they may be."""
    if isinstance(record, dict):
        return _paths_in(list(record.values()))
    if isinstance(record, list):
        return [path for value in record for path in _paths_in(value)]
    return [Path(record).expanduser()] if isinstance(record, str) and record else []


def run(config: RunConfig) -> Path:
    """Take a run from its config to its report; returns the run directory. Goes on where it was stopped.

    Raises ValueError for a config that cannot be run, InUse while another process writes to the folder, Interrupted
    after saving on SIGINT or SIGTERM.
    """
    this = Run(config)
    with alone_in(this.out):
        this.prepare()
        plan = this.plan()
        student = this.train(plan)
        this.evaluate(student)
        if config.export:
            this.export(student, plan)
    return this.out


def run_beside(shared: Run, config: RunConfig) -> tuple[Run, HybridForCausalLM, HeadPlan]:
    """Train and measure a student in a run of its own; the teacher's evaluation is that of ``shared``, which has it.

    With every head kept, the student is the teacher, and so are its figures.
    """
    this = Run(config, shared.teacher_and_tokenizer)
    this.prepare()
    measured = shared.out / "teacher" / "evaluation.json"

    def copy_to(path: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        with replacing(path) as temporary:
            shutil.copy(measured, temporary)

    on_main_process(lambda: copy_to(this.out / "teacher" / "evaluation.json"))
    plan = this.plan()
    student = this.train(plan)
    if plan.keeps_all:
        on_main_process(lambda: copy_to(this.out / "evaluation.json"))
    this.evaluate(student)
    return this, student, plan


def make_plan(options: PlanConfig, teacher: Any, scores: Callable[[], Any], *, fingerprinted: bool = True) -> HeadPlan:
    """The plan that a config describes, for this teacher; ``scores`` is asked only for ``top``.

    Without ``fingerprinted`` the teacher's weights are not looked at, only its shape.
    """
    if options.selection == "top":
        HeadPlan.check_k(teacher, options.k)
        return HeadPlan.top_k(scores(), options.k)
    if options.selection == "file":
        if options.file is None:
            raise ValueError("plan.selection is 'file' without a file; name it with --plan.file.")
        return HeadPlan.load(options.file)
    make: dict[str, Callable[[], HeadPlan]] = {
        "random": lambda: HeadPlan.random(teacher, options.k, options.seed),
        "layers": lambda: HeadPlan.layers(teacher, options.layers),
        "all": lambda: HeadPlan.all(teacher),
        "none": lambda: HeadPlan.none(teacher),
        "pairs": lambda: HeadPlan.from_pairs(teacher, options.pairs),
    }
    plan = make[options.selection]()
    return dataclasses.replace(plan, teacher=fingerprint(teacher)) if fingerprinted else plan
