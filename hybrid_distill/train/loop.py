"""Run one stage: the same code on one process, with DDP, DeepSpeed and FSDP2.

A step is `batch_size` rows. However they are cut into micro-batches and spread over processes, loss and gradient are
those of all rows at once: each loss is divided by its denominator over the whole step (`Stage.totals`), and the parts
add up.
"""

from __future__ import annotations

import json
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor
from tqdm import tqdm

from ..data import Batch, Rows, on_device
from ..distributed import is_deepspeed, is_fsdp2, make_accelerator, on_main_process, set_batch
from ..io import write_text
from . import checkpoint
from .checkpoint import Checkpoints, Snapshot, StageManifest
from .config import MAY_CHANGE, AlignConfig, DistillConfig, MatrixConfig, StageConfig
from .optimizer import load_trainable_tensors, set_learning_rate, wsd
from .parallel.strategy import Replicated, Strategy
from .rng import rng_state, row_seeds, seed_all, set_rng_state
from .spikes import Meter, Watch, flops_per_token, profiler
from .stages import EndToEnd, Stage, Totals, add_totals
from .tracking import TrackedRun

__all__ = [
    "AlignConfig",
    "DistillConfig",
    "Diverged",
    "Interrupted",
    "MatrixConfig",
    "StageConfig",
    "StageParentError",
    "make_accelerator",
    "train_stage",
]

METRICS = "metrics.jsonl"
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # the last: what SLURM sends before preemption
SAME_REQUEST_S = 5.0
"""Signals to stop that come within so many seconds are one."""

logger = logging.getLogger(__name__)


class Interrupted(Exception):
    """A stage was asked to stop (SIGINT, SIGTERM or SIGUSR1) and has saved where it was, or its result."""


class Diverged(RuntimeError):
    """A loss or gradient is not finite, or far above the usual."""


class StageParentError(ValueError):
    """A stage's student, or what is already in its folder, does not come from the parent that was named."""


def train_stage(
    stage: Stage,
    rows: Rows,
    config: StageConfig,
    out_dir: str | Path,
    *,
    seed: int = 0,
    parent_hash: str = "",
    resume: str = "auto",
    trackers: Sequence[str] = (),
    tracked: TrackedRun | None = None,
    processes: int | None = None,
    progress: bool = True,
    profile: bool = False,
    teacher_sharding: str = "replicated",
) -> StageManifest:
    """Train a stage's student; the result is in ``stage.student`` and in ``out_dir``.

    ``out_dir`` gets ``metrics.jsonl``, ``checkpoints/`` while the stage runs, and ``model.safetensors`` with
    ``manifest.json`` when it is finished; a finished stage is loaded, not run again. ``parent_hash`` is the
    `checkpoint.weights_hash` that the student must have when the stage begins (empty: any).
    ``resume`` is ``auto`` (go on from the newest intact checkpoint, if there is one), ``never`` (begin again)
    or a checkpoint's folder. ``tracked`` says what ``trackers`` call the stage's run, which by default is one of its
    own in ``out_dir``. ``processes`` is how many must run, if not what the launcher announced. ``profile``
    writes a trace of a few steps, ``trace-<process>.json``. ``teacher_sharding`` is ``replicated``, or ``sharded``:
    each process holds a share of the teacher while the stage runs (`fsdp.with_divided_teacher`).

    Raises StageParentError for another parent, ValueError for a folder that holds a run with other settings,
    CorruptCheckpoint when no checkpoint is intact, SaveFailed when the disk is full, Diverged for a loss that is not
    finite or far above the usual, and Interrupted, after saving, on SIGINT, SIGTERM or SIGUSR1.
    """
    out = Path(out_dir)
    tracked = tracked or TrackedRun(out, config.name, config=config.to_dict())
    accelerator = make_accelerator(processes=processes, trackers=trackers, logging_dir=tracked.folder)
    _check_precision(stage, config)
    parent = checkpoint.weights_hash(stage.student)
    if parent_hash and parent != parent_hash:
        raise StageParentError(
            f"stage {config.name!r} must begin from the weights {parent_hash[:16]}, the student's are "
            f"{parent[:16]}; load the result of the stage before it."
        )
    identity = _Identity(parent, rows.fingerprint, seed, config)
    checkpoints = Checkpoints(out / "checkpoints", config.keep_checkpoints)
    if resume == "never":
        on_main_process(lambda: _clear(out, checkpoints))
    manifest = StageManifest.read(out)
    if manifest is not None:
        identity.check(asdict(manifest), out)
        return checkpoint.load_stage(out, stage.student)
    run = _Run(stage, rows, config, out, accelerator, identity, checkpoints, tracked)
    try:
        run.begin(_snapshot(accelerator, checkpoints, resume), teacher_sharding)
        with _stop_requests() as stop_requested:
            run.train(stop_requested, progress, out / f"trace-{accelerator.process_index}.json" if profile else None)
            manifest = run.finish()
            if run.on_any_process(stop_requested()):
                raise Interrupted(f"{config.name} is finished and saved in {out}; the same command goes on from there.")
        return manifest
    finally:
        run.close()


@dataclass(frozen=True)
class _Identity:
    """What makes a stage's run this run and no other."""

    parent: str
    data: str
    seed: int
    config: StageConfig

    def to_dict(self) -> dict[str, Any]:
        return {"parent": self.parent, "data": self.data, "seed": self.seed, "config": self.config.to_dict()}

    def check(self, found: Mapping[str, Any], place: Path) -> None:
        """Raise unless ``found``, read from ``place``, is the record of a run like this one."""
        if found["parent"] != self.parent:
            raise StageParentError(
                f"{place} was made from the weights {found['parent'][:16]}, the student's are "
                f"{self.parent[:16]}; load the parent it was made from, or begin again with --resume never."
            )
        ours = self.to_dict()
        changed = [name for name in ("data", "seed") if found[name] != ours[name]]
        for name, value in ours["config"].items():
            if name not in MAY_CHANGE and found["config"].get(name) != value:
                changed.append(f"{name} ({found['config'].get(name)!r} there, {value!r} here)")
        if changed:
            raise ValueError(
                f"{place} holds a run with other settings: {', '.join(changed)}; use those settings, another "
                "--out, or begin again with --resume never."
            )


class _Run:
    """A stage that is being trained."""

    def __init__(
        self,
        stage: Stage,
        rows: Rows,
        config: StageConfig,
        out: Path,
        accelerator: Accelerator,
        identity: _Identity,
        checkpoints: Checkpoints,
        tracked: TrackedRun,
    ) -> None:
        self.stage, self.rows, self.config, self.out = stage, rows, config, out
        self.accelerator, self.identity, self.checkpoints = accelerator, identity, checkpoints
        self.tracked = tracked
        self.rank, self.world = accelerator.process_index, accelerator.num_processes
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        self.watch = Watch(config)

    def begin(self, snapshot: Snapshot | None, teacher_sharding: str) -> None:
        """Bring everything to where the snapshot left it, or to the start."""
        config = self.config
        config.check_world(self.world)
        seed_all(self.identity.seed + self.rank)
        if snapshot is not None:
            self.identity.check(snapshot.state["identity"], self.checkpoints.folder)
            load_trainable_tensors(self.stage, snapshot.tensors["weights"])
        self.stage.train()
        self.stage.bf16 = config.precision == "bf16"
        share = config.batch_size // self.world
        set_batch(self.accelerator, rows=share, micro_batch_size=config.micro_batch_size, clip=config.clip)
        self.strategy = _spread(self.stage, config, self.accelerator, teacher_sharding)
        self.model, self.optimizer = self.strategy.model, self.strategy.optimizer
        self.flops = flops_per_token(
            self.stage.student, self.stage.teachers, teacher_forced=not isinstance(self.stage, EndToEnd)
        )
        if snapshot is not None:
            self._restore(snapshot)
        if self.accelerator.is_main_process:
            self.out.mkdir(parents=True, exist_ok=True)
            self.checkpoints.clear(after=self.step)
            _cut_metrics(self.out / METRICS, self.step)
        self.tracked.start(self.accelerator)

    def train(self, stop_requested: Callable[[], bool], progress: bool, trace: Path | None = None) -> None:
        """Run the steps that are left. Raises Diverged, Interrupted (before the last step only) and SaveFailed."""
        steps, every = self.config.steps, self.config.log_every
        show = progress and self.accelerator.is_main_process
        bar = tqdm(total=steps, initial=self.step, desc=self.config.name, disable=not show)
        self.meter = Meter(self.flops, self.accelerator.device, self.world, self.tokens)
        with bar, profiler(trace) as profiled:
            while self.step < steps:
                begun = time.perf_counter()
                log = self.step == 0 or (self.step + 1) % every == 0 or self.step + 1 == steps
                metrics, stop = self._train_step(stop_requested)
                self.step += 1
                self.seconds += time.perf_counter() - begun
                profiled()
                bar.update()
                if log or "skipped" in metrics:
                    self._log({**metrics, **self.meter.read(self.tokens), "seconds": round(self.seconds, 3)})
                    bar.set_postfix(loss=f"{metrics['loss']:.4g}", refresh=False)
                if stop and self.step < steps:
                    path = self._save()
                    raise Interrupted(
                        f"{self.config.name} stopped at step {self.step} of {steps} and is saved in {path}; "
                        "the same command goes on from there."
                    )
                if self.step % self.config.checkpoint_every == 0 and self.step < steps:
                    self._save()

    def _train_step(self, stop: Callable[[], bool]) -> tuple[dict[str, Any], bool]:
        """One optimiser step; (what to log, whether any process was asked to stop)."""
        config = self.config
        learning_rate = config.learning_rate * wsd(self.step, config.steps, config.warmup, config.decay)
        set_learning_rate(self.optimizer, learning_rate)
        with self.meter.waiting_for_data():
            batch = self.rows.batch(self.step, config.batch_size, self.rank, self.world)
        n_rows = config.batch_size // self.world
        first = self.step * config.batch_size + self.rank * n_rows
        seeds = row_seeds(self.identity.seed, range(first, first + n_rows))
        micro_batches = self.strategy.stage.micro_batches(batch, config.micro_batch_size, seeds)
        tokens, totals = self._totals(micro_batches)
        loss = torch.zeros((), device=self.accelerator.device)
        layers: dict[str, Tensor] = {}
        for micro_batch in micro_batches:
            with self.accelerator.accumulate(self.model):
                found = self.model(on_device(micro_batch, self.accelerator.device), totals)
                loss += found.total.detach()
                for name, value in found.per_layer.items():
                    layers[name] = layers.get(name, 0.0) + value
                # accelerate divides by the micro-batches, DDP, DeepSpeed and FSDP2 by the processes.
                self.accelerator.backward(found.total * (len(micro_batches) * self.world))
        grad_norm = self.strategy.clip_gradients(config.clip)
        values = torch.stack([loss, torch.tensor(float(stop()), device=loss.device), *layers.values()])
        mean_loss, stops, *layer_losses = self._sum(values).tolist()
        complaint = self._judge(mean_loss, grad_norm, dict(zip(layers, layer_losses)))
        if complaint is None:
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.tokens += tokens
        metrics = {
            "step": self.step + 1,
            "loss": mean_loss,
            "per_layer": dict(zip(layers, layer_losses)),
            "lr": learning_rate,
            "grad_norm": grad_norm,
            "tokens": self.tokens,
        }
        return metrics | ({} if complaint is None else {"skipped": complaint}), stops > 0

    def _totals(self, micro_batches: list[Batch]) -> tuple[int, Totals]:
        """Tokens that a step judges, and the denominators of its losses: none where a micro-batch is the whole step,
        which then measures its own as it goes."""
        stage = self.strategy.stage
        if len(micro_batches) * self.world == 1:
            return int(stage.n_tokens(micro_batches[0])), {}
        mine = add_totals(stage.totals(on_device(part, self.accelerator.device)) for part in micro_batches)
        totals = dict(zip(mine, self._sum(torch.stack(list(mine.values())))))
        return int(totals["tokens"]), totals

    def _sum(self, values: Tensor) -> Tensor:
        """Over all processes."""
        if self.world == 1:
            return values
        return cast(Tensor, self.accelerator.reduce(values.to(self.accelerator.device), reduction="sum"))

    def on_any_process(self, said: bool) -> bool:
        """Whether it is so on at least one process. All of them must ask."""
        return bool(self._sum(torch.tensor(float(said))) > 0)

    def _judge(self, loss: float, grad_norm: float, layers: Mapping[str, float]) -> str | None:
        """Why this step must be left out, None for a good one. Raises Diverged where nothing may be left out."""
        complaint = self.watch.complaint(loss, grad_norm, layers)
        if complaint is None:
            self.watch.skipped = 0
            return None
        size = self.config.batch_size
        found = (
            f"{self.config.name} diverged at step {self.step + 1}: {complaint}, on rows {self.step * size} to "
            f"{(self.step + 1) * size - 1} of the data's order."
        )
        self.watch.skipped += 1
        if self.config.on_divergence == "stop" or self.watch.skipped > self.config.max_skips:
            raise Diverged(f"{found} Earlier checkpoints are untouched; lower the learning rate or clip more.")
        if self.accelerator.is_main_process:
            logger.warning("%s The batch is left out.", found)
        return complaint

    def _log(self, metrics: dict[str, Any]) -> None:
        if self.accelerator.is_main_process:
            if "skipped" in metrics:  # what is not finite has no place in JSON
                metrics = metrics | {"loss": None, "grad_norm": None, "per_layer": {}}
            with (self.out / METRICS).open("a") as file:
                file.write(json.dumps(metrics) + "\n")
        if self.accelerator.trackers and "skipped" not in metrics:
            flat = {name: value for name, value in metrics.items() if name not in ("step", "per_layer")}
            self.tracked.log(self.accelerator, self.config.name, {**flat, **metrics["per_layer"]}, metrics["step"])

    def _save(self) -> Path:
        """A checkpoint of this moment; every process takes part and the main one writes."""
        tensors = {"weights": self.strategy.weights(), "optimizer": self.strategy.optimizer_tensors()}
        processes = gather_object([{"rng": rng_state(), "rows": self.rows.state_dict()}])
        state = {
            "identity": self.identity.to_dict(),
            "tokens": self.tokens,
            "seconds": self.seconds,
            "watch": self.watch.state_dict(),
            "processes": processes,
        }
        on_main_process(
            lambda: self.checkpoints.save(self.step, tensors, state), others=lambda: checkpoint.put_together(tensors)
        )
        return self.checkpoints.path(self.step)

    def _restore(self, snapshot: Snapshot) -> None:
        self.strategy.load_optimizer(snapshot.tensors["optimizer"])
        self.step = snapshot.step
        self.tokens, self.seconds = snapshot.state["tokens"], snapshot.state["seconds"]
        self.watch.load_state_dict(snapshot.state["watch"])
        processes = snapshot.state["processes"]
        if self.rank < len(processes):
            self.rows.load_state_dict(processes[self.rank]["rows"])
            set_rng_state(processes[self.rank]["rng"])

    def finish(self) -> StageManifest:
        """Write the result; the checkpoints have done their duty."""
        self.strategy.give_back()
        student: Any = self.stage.student.eval()
        student.to(student.device)  # all of it: beside a divided teacher only what ran may have been moved

        def write() -> None:
            checkpoint.save_stage(
                self.out, student, name=self.config.name, steps=self.config.steps,
                **self.identity.to_dict(),
            )  # fmt: skip
            self.checkpoints.clear()

        on_main_process(write)
        manifest = StageManifest.read(self.out)
        assert manifest is not None
        return manifest

    def close(self) -> None:
        """Let go of trackers and of what accelerate holds; the process group stays for the next stage."""
        for tracker in self.accelerator.trackers:
            tracker.finish()
        if self.accelerator.device.type != "cpu":
            self.accelerator.free_memory()


def _spread(stage: Stage, config: StageConfig, accelerator: Accelerator, teacher_sharding: str) -> Strategy:
    """The student by the strategy that the launch file chose, the teacher as asked for."""
    if teacher_sharding == "sharded" and stage.teachers and accelerator.num_processes > 1:
        from .parallel.fsdp import process_mesh, with_divided_teacher

        stage = with_divided_teacher(stage, process_mesh(accelerator))
    if is_deepspeed(accelerator):
        from .parallel.zero import Zero

        return Zero(stage, config, accelerator)
    if is_fsdp2(accelerator):
        from .parallel.fsdp import Fsdp2

        return Fsdp2(stage, config, accelerator)
    return Replicated(stage, config, accelerator)


def _snapshot(accelerator: Accelerator, checkpoints: Checkpoints, resume: str) -> Snapshot | None:
    """The checkpoint to go on from. The main process chooses and checks it, so that all read the same."""
    if resume not in ("auto", "never"):
        return checkpoint.load(resume)
    chosen: list[str | None] = [None]
    if accelerator.is_main_process and resume == "auto":
        path = checkpoints.latest()
        chosen = [None if path is None else str(path)]
    if accelerator.num_processes > 1:
        broadcast_object_list(chosen)
    return None if chosen[0] is None else checkpoint.load(chosen[0], verified=True)


def _clear(out: Path, checkpoints: Checkpoints) -> None:
    checkpoints.clear()
    for name in (checkpoint.MANIFEST, checkpoint.WEIGHTS, METRICS):
        (out / name).unlink(missing_ok=True)


def _check_precision(stage: Stage, config: StageConfig) -> None:
    dtype = next(iter(stage.teachers), stage.student).dtype
    if config.precision == "fp32" and dtype != torch.float32:
        raise ValueError(
            f"{config.name}.precision is 'fp32' and the teacher is {dtype}; load it with "
            "--teacher.dtype float32, or use precision bf16."
        )


def _cut_metrics(path: Path, step: int) -> None:
    """Drop the lines of steps that will be run again, and a torn last line."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except (ValueError, KeyError):
            continue
    write_text(path, "".join(kept))


@contextmanager
def _stop_requests() -> Iterator[Callable[[], bool]]:
    """A function that says whether one of `STOP_SIGNALS` came; one that comes again later acts as usual.

    Not at once: torchrun passes on to its processes what a terminal or SLURM has sent to all of them already.
    """
    requested: float | None = None
    before: dict[int, Any] = {}

    def request(number: int, frame: Any) -> None:
        nonlocal requested
        now = time.monotonic()
        if requested is None:
            requested = now
        elif now - requested > SAME_REQUEST_S:
            signal.signal(number, before[number])
            signal.raise_signal(number)

    if threading.current_thread() is threading.main_thread():
        for number in STOP_SIGNALS:
            before[number] = signal.signal(number, request)
    try:
        yield lambda: requested is not None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
