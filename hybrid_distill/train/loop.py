"""Training loop of a stage: the same code for one process, DDP, DeepSpeed and FSDP2.

A step is `batch_size` rows. However they are split into micro-batches and over processes, loss and gradient equal those
of all rows at once: each loss is divided by its denominator over the whole step (`Stage.totals`), so the parts add up.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from ..data import Batch, Rows, on_device, read_ahead
from ..distributed import (
    agree_on,
    check_shared,
    compute_everywhere,
    is_deepspeed,
    is_fsdp2,
    limit_collectives,
    make_accelerator,
    on_main_process,
    set_batch,
    wait_for_all,
)
from ..io import Record
from ..progress import Phase
from . import checkpoint
from .checkpoint import Checkpoints, Snapshot, StageManifest
from .config import COLLECTIVE_TIMEOUT
from .end_to_end import EndToEnd
from .kernels import agree_on_kernels
from .meter import Meter, flops_per_token
from .optimizer import load_trainable_tensors, set_learning_rate, wsd
from .parallel.strategy import Strategy
from .profiling import profiler
from .resume import (
    METRICS,
    Interrupted,
    StageParentError,
    check_same_run,
    clear,
    cut_metrics,
    rng_state,
    set_rng_state,
    stop_requests,
)
from .spikes import SpikeDetector
from .stage import Stage, Totals, add_totals
from .tracking import TrackedRun

logger = logging.getLogger(__name__)

GPU_WORKERS = 2
"""Worker processes that prepare batches for a GPU. On a CPU, making a batch takes under a thousandth of a step."""
NO_LOSS: Record = {"loss": None, "grad_norm": None, "per_layer": {}}
"""Metrics of a step that has no loss, or one that JSON cannot hold."""


class Diverged(RuntimeError):
    """A loss or gradient is not finite, or a loss is far above the recent median."""


def train_stage(
    stage: Stage,
    rows: Rows,
    out_dir: str | Path,
    *,
    seed: int = 0,
    parent_hash: str = "",
    resume: str = "auto",
    trackers: Sequence[str] = (),
    tracked: TrackedRun | None = None,
    progress: bool = True,
    profile: bool = False,
    teacher_sharding: str = "replicated",
    collective_timeout: float = COLLECTIVE_TIMEOUT,
) -> StageManifest:
    """Train a stage's student; the result is in ``stage.student`` and in ``out_dir``.

    ``out_dir`` gets ``metrics.jsonl``, ``checkpoints/`` while the stage runs, and ``model.safetensors`` with
    ``manifest.json`` at the end; a finished stage is loaded, not run again. ``parent_hash`` is the
    `checkpoint.weights_hash` that the student must have at the start (empty: any). ``resume`` is ``auto`` or ``never``;
    ``teacher_sharding`` is ``replicated`` or ``sharded``; ``profile`` writes ``trace-<process>.json``; ``tracked``
    names the run in ``trackers``; ``collective_timeout`` is in minutes (`RunConfig`).

    Raises StageParentError for a student with another hash, ValueError for a folder of a run with other settings,
    CorruptCheckpoint if no checkpoint is intact, SaveFailed if the disk is full, Diverged, and, after saving,
    Interrupted.
    """
    config, out = stage.config, Path(out_dir)
    tracked = tracked or TrackedRun(out, config.name, config=config.to_dict())
    accelerator = make_accelerator(trackers=trackers, logging_dir=tracked.folder)
    dtype = next(iter(stage.teachers), stage.student).dtype
    if config.precision == "fp32" and dtype.itemsize < 4:
        raise ValueError(
            f"{config.name}.precision is 'fp32' and the teacher is {dtype}; load it with --teacher.dtype float32, or "
            "use precision bf16."
        )
    parent = checkpoint.weights_hash(stage.student)
    if parent_hash and parent != parent_hash:
        raise StageParentError(
            f"stage {config.name!r} must start from the weights {parent_hash[:16]}, but the student has "
            f"{parent[:16]}; load the result of the stage before it."
        )
    identity = {"parent": parent, "data": rows.fingerprint, "seed": seed, "config": config.identity()}
    check_shared(out)
    checkpoints = Checkpoints(out / "checkpoints", config.keep_checkpoints)
    if resume == "never":
        on_main_process(lambda: clear(out, checkpoints))
    if manifest := agree_on(lambda: StageManifest.read(out)):
        check_same_run(identity, asdict(manifest), out)
        return checkpoint.load_stage(out, stage.student)
    config.check_world(accelerator.num_processes)
    if snapshot := checkpoints.latest():
        check_same_run(identity, snapshot.states[0]["identity"], checkpoints.folder)
    training = _Training(stage, rows, out, accelerator, identity, checkpoints, tracked)
    try:
        training.begin(snapshot, teacher_sharding, collective_timeout)
        with stop_requests() as stop_requested:
            trace = out / f"trace-{accelerator.process_index}.json" if profile else None
            training.run(stop_requested, progress, trace)
            manifest = training.finish()
            if any(compute_everywhere(stop_requested)):
                raise Interrupted(f"{config.name} is finished and saved in {out}; run the same command to resume.")
        return manifest
    finally:
        training.close()


@dataclass
class _Training:
    """State of a stage during training."""

    stage: Stage
    rows: Rows
    out: Path
    accelerator: Accelerator
    identity: Record
    checkpoints: Checkpoints
    tracked: TrackedRun

    def __post_init__(self) -> None:
        self.config = self.stage.config
        self.rank, self.world = self.accelerator.process_index, self.accelerator.num_processes
        self.n_rows = self.config.batch_size // self.world
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        self.empty_steps = 0
        """Steps without a token in their loss (`_note_empty_step`)."""
        self.spikes = SpikeDetector(self.config.spike)

    def begin(self, snapshot: Snapshot | None, teacher_sharding: str, collective_timeout: float) -> None:
        """Set everything to the state in the snapshot, or to the start."""
        torch.manual_seed(self.identity["seed"] + self.rank)
        if snapshot is not None:
            load_trainable_tensors(self.stage, snapshot.weights)
        self.stage.train()
        micro_batch_size, clip = self.config.micro_batch_size, self.config.clip
        set_batch(self.accelerator, rows=self.n_rows, micro_batch_size=micro_batch_size, clip=clip)
        teacher_forced = not isinstance(self.stage, EndToEnd)  # count now: ZeRO-3 empties weights
        self.flops = flops_per_token(self.stage.student, self.stage.teachers, teacher_forced=teacher_forced)
        # From here on, processes meet in collectives. First those of the groups that exist are limited, then those of
        # the groups that the strategy has made.
        wait_for_all()
        limit_collectives(collective_timeout)
        self.strategy = _spread(self.stage, self.accelerator, teacher_sharding)
        limit_collectives(collective_timeout)
        self.model, self.optimizer = self.strategy.model, self.strategy.optimizer
        agree_on_kernels(self.strategy.stage, self.accelerator.device)
        if snapshot is not None:
            self._restore(snapshot)
        if self.accelerator.is_main_process:
            self.out.mkdir(parents=True, exist_ok=True)
            self.checkpoints.clear(after=self.step)
            cut_metrics(self.out / METRICS, self.step)
        self.tracked.start(self.accelerator)

    def run(self, stop_requested: Callable[[], bool], progress: bool, trace: Path | None) -> None:
        """Run the remaining steps. Raises Diverged, Interrupted (before the last step only) and SaveFailed."""
        config = self.config
        phase = Phase(config.name, config.steps, done=self.step, unit="steps", hidden=not progress)
        self.meter = Meter(self.flops, self.accelerator.device, self.world, self.tokens)
        on_gpu = self.accelerator.device.type == "cuda"
        share = (range(self.step, config.steps), config.batch_size, self.rank, self.world)
        workers = GPU_WORKERS * on_gpu if config.data_workers is None else config.data_workers
        batches = read_ahead(self.rows, *share, workers=workers, pinned=on_gpu)
        with phase, profiler(trace) as profiled, closing(batches):
            while self.step < config.steps:
                begun = time.perf_counter()
                log = self.step == 0 or (self.step + 1) % config.log_every == 0 or self.step + 1 == config.steps
                metrics, stop = self._train_step(batches, lambda: stop_requested() or self.checkpoints.failed())
                self.step += 1
                self.seconds += time.perf_counter() - begun
                profiled()
                if log or "skipped" in metrics:
                    self._log({**metrics, **self.meter.read(self.tokens), "seconds": round(self.seconds, 3)})
                    if metrics["loss"] is not None:
                        phase.note = f"loss {metrics['loss']:.4g}"
                phase.update()
                if self.step == config.steps:
                    return
                if stop:
                    path = self._save()
                    self.checkpoints.wait()
                    raise Interrupted(
                        f"{config.name} stopped at step {self.step} of {config.steps} and is saved in {path}; "
                        "run the same command to resume."
                    )
                if self.step % config.checkpoint_every == 0:
                    self._save()

    def _train_step(self, batches: Iterator[Batch], stop: Callable[[], bool]) -> tuple[Record, bool]:
        """Run one optimizer step; return (metrics, whether any process was asked to stop)."""
        config = self.config
        learning_rate = config.learning_rate * wsd(self.step, config.steps, config.warmup, config.decay)
        set_learning_rate(self.optimizer, learning_rate)
        with self.meter.waiting_for_data():
            batch = on_device(next(batches), self.accelerator.device)
        first = self.step * config.batch_size + self.rank * self.n_rows
        seeds = [row_seed(self.identity["seed"], place) for place in range(first, first + self.n_rows)]
        micro_batches = self.strategy.stage.micro_batches(batch, config.micro_batch_size, seeds)
        n_tokens, totals = self._totals(micro_batches)
        loss = torch.zeros((), device=self.accelerator.device)
        layers: dict[str, Tensor] = {}
        # DeepSpeed's step is part of the backward pass: for it alone, an empty step costs a sync.
        if not self.strategy.steps_in_backward or n_tokens.item():
            loss, layers = self._forward_backward(micro_batches, totals)
        norm = self.strategy.clip_gradients(config.clip)
        sums = self._sum(torch.stack([loss, loss.new_full((), float(stop())), *layers.values()]))
        known = torch.cat([sums.double(), torch.stack([n_tokens.double(), norm.double()])])
        # Read all that the host needs from the device in one transfer, before the weights change.
        mean_loss, stops, *layer_losses, tokens, grad_norm = known.tolist()
        per_layer = dict(zip(layers, layer_losses))
        metrics: Record = {
            "step": self.step + 1,
            "loss": mean_loss,
            "per_layer": per_layer,
            "lr": learning_rate,
            "grad_norm": grad_norm,
            "tokens": self.tokens + int(tokens),
        }
        if tokens == 0:
            self._note_empty_step()
            metrics |= NO_LOSS
        elif (skipped := self._reason_to_skip(mean_loss, grad_norm, per_layer)) is None:
            self.optimizer.step()
        else:
            metrics |= {"skipped": skipped}
        self.optimizer.zero_grad()
        self.tokens = metrics["tokens"]
        if self.empty_steps:
            metrics["empty_steps"] = self.empty_steps
        return metrics, stops > 0

    def _note_empty_step(self) -> None:
        """Count a step that has no token in its loss: rows of a conversation's questions alone, for example.

        Its loss of 0 is not one to compare others with, and its gradient of 0 would still move the weights (AdamW's
        momentum and weight decay), so the step is left out of both. The first is reported, metrics count all.
        """
        self.empty_steps += 1
        if self.empty_steps > 1 or not self.accelerator.is_main_process:
            return
        size = self.config.batch_size
        logger.warning(
            "%s: no token of step %d is in the loss (rows %d to %d of the data's order). Such steps leave the weights "
            "as they are and have no loss; metrics.jsonl counts them as empty_steps. To have fewer, pass a larger "
            "--%s.batch-size.",
            self.config.name, self.step + 1, self.step * size, (self.step + 1) * size - 1,
            self.config.name.replace("_", "-"),
        )  # fmt: skip

    def _forward_backward(self, micro_batches: list[Batch], totals: Totals) -> tuple[Tensor, dict[str, Tensor]]:
        """Accumulate the gradients of a step; return this process's loss, in total and per layer."""
        loss = torch.zeros((), device=self.accelerator.device)
        layers: dict[str, Tensor] = {}
        for number, micro_batch in enumerate(micro_batches, start=1):
            with self.strategy.micro_batch(is_last=number == len(micro_batches)):
                found = self.model(micro_batch, totals)
                loss += found.total.detach()
                for name, value in found.per_layer.items():
                    layers[name] = layers.get(name, 0.0) + value
                # accelerate divides by the number of micro-batches; DDP, DeepSpeed and FSDP2 by that of processes.
                self.accelerator.backward(found.total * (len(micro_batches) * self.world))
        return loss, layers

    def _totals(self, micro_batches: list[Batch]) -> tuple[Tensor, Totals]:
        """Count the tokens in the loss of a step, and sum the denominators of its losses. There are none if one
        micro-batch is the whole step: its losses then compute their own."""
        stage = self.strategy.stage
        if len(micro_batches) * self.world == 1:
            return stage.n_tokens(micro_batches[0]), {}
        mine = add_totals(stage.totals(part) for part in micro_batches)
        totals = dict(zip(mine, self._sum(torch.stack(list(mine.values())))))
        return totals["tokens"], totals

    def _sum(self, values: Tensor) -> Tensor:
        """Sum over all processes."""
        if self.world == 1:
            return values
        reduced = self.accelerator.reduce(values.to(self.accelerator.device), reduction="sum")
        assert isinstance(reduced, Tensor)
        return reduced

    def _reason_to_skip(self, loss: float, grad_norm: float, layers: Mapping[str, float]) -> str | None:
        """Return the reason to skip this step, or None for a good one. Raises Diverged if it may not be skipped."""
        reason = self.spikes.reason(loss, grad_norm, layers)
        if reason is None:
            return None
        size = self.config.batch_size
        found = (
            f"{self.config.name} diverged at step {self.step + 1}: {reason}, on rows {self.step * size} to "
            f"{(self.step + 1) * size - 1} of the data's order."
        )
        if self.config.on_divergence == "stop" or self.spikes.skipped > self.config.max_skips:
            raise Diverged(
                f"{found} Earlier checkpoints are untouched; resume with another on_divergence, max_skips or spike, or "
                "start over with a lower learning rate or clip."
            )
        if self.accelerator.is_main_process:
            logger.warning("%s Skipping the batch.", found)
        return reason

    def _log(self, metrics: Record) -> None:
        if self.accelerator.is_main_process:
            if "skipped" in metrics:  # JSON has neither NaN nor infinity
                metrics = metrics | NO_LOSS
            with (self.out / METRICS).open("a") as file:
                file.write(json.dumps(metrics) + "\n")
        if self.accelerator.trackers and metrics["loss"] is not None and "skipped" not in metrics:
            flat = {name: value for name, value in metrics.items() if name not in ("step", "per_layer")}
            self.tracked.log(self.accelerator, self.config.name, {**flat, **metrics["per_layer"]}, metrics["step"])

    def _save(self) -> Path:
        """Start saving a checkpoint of the current state; every process writes its share."""
        state: Record = {"identity": self.identity, "tokens": self.tokens, "seconds": self.seconds}
        state |= {"empty_steps": self.empty_steps}
        state |= {"watch": self.spikes.state_dict(), "rng": rng_state()}
        self.checkpoints.save(self.step, self.strategy.shares, state)
        return self.checkpoints.path(self.step)

    def _restore(self, snapshot: Snapshot) -> None:
        self.strategy.load_optimizer(snapshot.optimizer)
        self.step, state = snapshot.step, snapshot.states[0]
        self.tokens, self.seconds, self.empty_steps = state["tokens"], state["seconds"], state["empty_steps"]
        self.spikes.load_state_dict(state["watch"])
        if self.rank < len(snapshot.states):
            set_rng_state(snapshot.states[self.rank]["rng"])

    def finish(self) -> StageManifest:
        """Write the result and delete the checkpoints."""
        self.checkpoints.wait()
        if self.empty_steps and self.accelerator.is_main_process:
            logger.warning(
                "%s: %d of %d steps had no token in their loss", self.config.name, self.empty_steps, self.config.steps
            )
        is_whole = self.strategy.unshard()
        student = self.stage.student.eval()
        nn.Module.to(student, student.device)  # all of it: with a sharded teacher, only the parts that ran may be there

        def write() -> None:
            name, steps = self.config.name, self.config.steps
            checkpoint.save_stage(self.out, student, name=name, steps=steps, **self.identity)
            self.checkpoints.clear()

        on_main_process(write)
        if not is_whole:
            checkpoint.load_trained(self.out, student)
        manifest = agree_on(lambda: StageManifest.read(self.out))
        assert manifest is not None
        return manifest

    def close(self) -> None:
        """Close files and trackers and free accelerate's memory; the process group stays for the next stage."""
        self.checkpoints.close()
        for tracker in self.accelerator.trackers:
            tracker.finish()
        if self.accelerator.device.type != "cpu":
            self.accelerator.free_memory()


def row_seed(seed: int, place: int) -> int:
    """Derive a row's seed from the run's seed and the row's place in the data's order."""
    return int.from_bytes(blake2b(repr((seed, place)).encode(), digest_size=8).digest(), "little")


def _spread(stage: Stage, accelerator: Accelerator, teacher_sharding: str) -> Strategy:
    """Distribute the student by the strategy of the launch file, and the teacher by ``teacher_sharding``."""
    if teacher_sharding == "sharded" and stage.teachers and accelerator.num_processes > 1:
        from .parallel.fsdp2 import process_mesh, with_sharded_teacher

        stage = with_sharded_teacher(stage, process_mesh(accelerator))
    if is_deepspeed(accelerator):
        from .parallel.zero import Zero

        return Zero(stage, accelerator)
    if is_fsdp2(accelerator):
        from .parallel.fsdp2 import Fsdp2

        return Fsdp2(stage, accelerator)
    return Strategy(stage, accelerator)
