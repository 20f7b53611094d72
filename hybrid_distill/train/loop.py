"""Training loop of a stage: the same code for one process, DDP, DeepSpeed and FSDP2.

A step is `batch_size` rows. However they are split into micro-batches and over processes, loss and
gradient equal those of all rows at once: each loss is divided by its denominator over the whole
step (`Stage.totals`), so the parts add up.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from ..data import Batch, Rows, on_device, read_ahead
from ..distributed import (
    agree_on,
    check_shared,
    compute_everywhere,
    limit_collectives,
    on_main_process,
    wait_for_all,
)
from ..io import Record
from ..model.document_kernels import compiling_for
from ..progress import Phase
from .checkpoint import CHECKPOINTS, Checkpoints, Snapshot
from .compiling import compiled_layers, start_backward_thread
from .config import COLLECTIVE_TIMEOUT, StageConfig
from .end_to_end import EndToEnd
from .grouped import grouped_attention
from .meter import Meter, flops_per_token
from .metrics import NO_LOSS, append_metrics, cut_metrics
from .optimizer import load_trainable_tensors, set_learning_rate, wsd
from .parallel.choice import distribute, set_batch
from .profiling import profiler
from .result import StageManifest, load_stage, load_trained, save_stage
from .resume import StageParentError, check_same_run, clear, rng_state, set_rng_state
from .spikes import SpikeDetector
from .stage import Stage, Totals, add_totals
from .stage_kernels import agree_on_kernels
from .stop import Interrupted, stop_requests
from .tracking import TrackedRun, finish_trackers
from .weights import weights_hash

logger = logging.getLogger(__name__)

GPU_WORKERS = 2
"""Worker processes that prepare batches for a GPU. On a CPU, making a batch takes under a
thousandth of a step."""
HOW_TO_RESUME = {
    "auto": "run the same command to resume",
    # The same command would delete what is saved.
    "never": "run it again without --resume never to resume",
}


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

    ``out_dir`` gets ``metrics.jsonl``, ``checkpoints/`` while the stage runs, and
    ``model.safetensors`` with ``manifest.json`` at the end; a finished stage is loaded, not run
    again. ``parent_hash`` is the `weights.weights_hash` that the student must have at the start
    (empty: any). ``resume`` is ``auto`` or ``never``; ``teacher_sharding`` is ``replicated`` or
    ``sharded``; ``profile`` writes ``trace-<process>.json``; ``tracked`` names the run in
    ``trackers``; ``collective_timeout`` is in minutes (`RunConfig`).

    Raises StageParentError for a student with another hash, ValueError for a folder of a run with
    other settings, CorruptCheckpoint if no checkpoint is intact, SaveFailed if the disk is full,
    Diverged, and, after saving, Interrupted.
    """
    config = stage.config
    out = Path(out_dir)
    if tracked is None:
        tracked = TrackedRun(out, config.name, config=config.to_dict())
    accelerator = tracked.accelerator(trackers)
    # Without a teacher, the stage reads stored logits.
    source = stage.teacher if stage.teachers else stage.student
    check_precision(config, source.dtype)
    identity = _identity(stage, rows, seed, parent_hash)
    # Before anything is written there.
    check_shared(out)
    checkpoints = Checkpoints(out / CHECKPOINTS, config.keep_checkpoints)
    if resume == "never":
        on_main_process(lambda: clear(out, checkpoints))
    manifest = agree_on(lambda: StageManifest.read(out))
    if manifest is not None:
        check_same_run(identity, asdict(manifest), out)
        return load_stage(out, stage.student)
    # Only now: any number of processes can load a finished stage.
    config.check_world(accelerator.num_processes)
    trace = None
    if profile:
        trace = out / f"trace-{accelerator.process_index}.json"
    training = _Training(stage, rows, out, accelerator, identity, checkpoints, tracked, resume)
    try:
        # Not in a variable: as long as something refers to it, the checkpoint's deleted files keep their disk space.
        training.begin(_snapshot_of(checkpoints, identity), teacher_sharding, collective_timeout)
        return training.complete(progress, trace)
    finally:
        training.close()


def check_precision(config: StageConfig, dtype: torch.dtype) -> None:
    """Raise ValueError for a stage that computes in float32 with a teacher of a ``dtype`` in half precision."""
    if config.precision == "fp32" and dtype.itemsize < 4:
        raise ValueError(
            f"{config.name}.precision is 'fp32' and the teacher is {dtype}; load it with "
            "--teacher.dtype float32, or use precision bf16."
        )


def _identity(stage: Stage, rows: Rows, seed: int, parent_hash: str) -> Record:
    """Return what a run has in common with the one that it resumes.

    Raises StageParentError if the student has other weights than those of ``parent_hash``.
    """
    parent = weights_hash(stage.student)
    if parent_hash and parent != parent_hash:
        raise StageParentError(
            f"stage {stage.config.name!r} must start from the weights {parent_hash[:16]}, but the "
            f"student has {parent[:16]}; load the result of the stage before it."
        )
    return {
        "parent": parent,
        "data": rows.fingerprint,
        "seed": seed,
        "config": stage.config.identity(),
    }


def _snapshot_of(checkpoints: Checkpoints, identity: Record) -> Snapshot | None:
    """Read the checkpoint to resume from, if any. Raises ValueError if it is of a run with other settings."""
    snapshot = checkpoints.latest()
    if snapshot is not None:
        check_same_run(identity, snapshot.states[0]["identity"], checkpoints.folder)
    return snapshot


class _StepFigures(NamedTuple):
    """Figures of a step over all processes, on the host."""

    loss: float
    per_layer: dict[str, float]
    grad_norm: float
    n_tokens: int
    """Tokens in the loss."""
    stop: bool
    """True if any process was asked to stop."""


class _Training:
    """State of a stage during training."""

    def __init__(
        self,
        stage: Stage,
        rows: Rows,
        out: Path,
        accelerator: Accelerator,
        identity: Record,
        checkpoints: Checkpoints,
        tracked: TrackedRun,
        resume: str,
    ) -> None:
        self.stage = stage
        self.config = stage.config
        self.rows = rows
        self.out = out
        self.accelerator = accelerator
        self.rank = accelerator.process_index
        self.world = accelerator.num_processes
        self.n_rows = self.config.batch_size // self.world
        """Rows of a step in this process."""
        self.identity = identity
        self.how_to_resume = HOW_TO_RESUME[resume]
        self.checkpoints = checkpoints
        self.tracked = tracked
        self.spikes = SpikeDetector(self.config.spike)
        self.step = 0
        """Steps done."""
        self.tokens = 0
        """Tokens in the losses of these steps."""
        self.seconds = 0.0
        self.empty_steps = 0
        """Steps without a token in their loss (`_note_empty_step`)."""

    def begin(
        self, snapshot: Snapshot | None, teacher_sharding: str, collective_timeout: float
    ) -> None:
        """Set everything to the state in the snapshot, or to the start."""
        config = self.config
        torch.manual_seed(self.identity["seed"] + self.rank)
        # Before the weights are distributed: then, a process may hold parts of them.
        if snapshot is not None:
            load_trainable_tensors(self.stage, snapshot.weights)
        # The teacher is not a submodule and stays in eval mode.
        self.stage.train()
        set_batch(
            self.accelerator,
            rows=self.n_rows,
            micro_batch_size=config.micro_batch_size,
            clip=config.clip,
        )
        # Counted now, for ZeRO-3 leaves empty weights behind.
        self.flops = flops_per_token(
            self.stage.student,
            self.stage.teachers,
            teacher_forced=not isinstance(self.stage, EndToEnd),
        )
        # From here on, processes meet in collectives. First those of the groups that exist are
        # limited, then those of the groups that the strategy has made.
        wait_for_all()
        limit_collectives(collective_timeout)
        self.strategy = distribute(self.stage, self.accelerator, teacher_sharding)
        limit_collectives(collective_timeout)
        self.model = self.strategy.model
        self.optimizer = self.strategy.optimizer
        agree_on_kernels(self.strategy.stage, self.accelerator.device)
        if snapshot is not None:
            self._restore(snapshot)
        if self.accelerator.is_main_process:
            self.out.mkdir(parents=True, exist_ok=True)
            # If the newest checkpoint was broken, an older one is resumed: the steps after it come
            # again.
            self.checkpoints.clear(after=self.step)
            cut_metrics(self.out, self.step)
        self.tracked.start(self.accelerator)

    def complete(self, progress: bool, trace: Path | None) -> StageManifest:
        """Run the remaining steps and write the result.

        Raises what `run` and `finish` do, and Interrupted if the stop was requested too late for `run`.
        """
        with stop_requests() as stop_requested:
            rows_left = (self.config.steps - self.step) * self.n_rows
            flops_left = rows_left * self.rows.seq_len * self.flops
            # Before batches are read, which starts other threads.
            start_backward_thread(self.accelerator.device)
            attention = compiling_for(self.stage.compiled_length(self.rows.seq_len))
            compiled = compiled_layers(self.strategy.stage, self.accelerator.device, flops_left)
            with attention, grouped_attention(), compiled:
                self.run(stop_requested, progress, trace)
            manifest = self.finish()
            # A request in the last step, or while the result was written. One process may have it
            # alone.
            if any(compute_everywhere(stop_requested)):
                raise Interrupted(
                    f"{self.config.name} is finished and saved in {self.out}; {self.how_to_resume}.",
                    number=stop_requested(),
                )
        return manifest

    def run(
        self, stop_requested: Callable[[], int | None], progress: bool, trace: Path | None
    ) -> None:
        """Run the remaining steps.

        Raises Diverged, Interrupted (before the last step only) and SaveFailed.
        """
        config = self.config
        # Its clock starts here: distributing and restoring are not training.
        self.meter = Meter(self.flops, self.accelerator.device, self.world, self._tokens_read())
        phase = Phase(
            config.name,
            config.steps,
            done=self.step,
            unit="steps",
            hidden=not progress,
            slow_start=True,
        )
        batches = self._batches()
        # Closed here: workers of a generator that is left behind would outlive an error.
        with phase, profiler(trace) as profiled, closing(batches):
            while self.step < config.steps:
                begun = time.perf_counter()
                metrics, stop = self._train_step(batches, stop_requested)
                self.step += 1
                self.seconds += time.perf_counter() - begun
                profiled()
                if self._is_logged(metrics):
                    self._log(metrics)
                    if metrics["loss"] is not None:
                        phase.note = f"loss {metrics['loss']:.4g}"
                phase.update()
                if self.step == config.steps:
                    # `finish` saves the result; a stop is answered after that.
                    return
                if stop:
                    self._save_and_stop(stop_requested())
                if self.step % config.checkpoint_every == 0:
                    self._save()

    def _batches(self) -> Generator[Batch, None, None]:
        """Read this process's rows of the remaining steps, ahead if worker processes can."""
        on_gpu = self.accelerator.device.type == "cuda"
        workers = self.config.data_workers
        if workers is None:
            workers = 0
            if on_gpu:
                workers = GPU_WORKERS
        steps = range(self.step, self.config.steps)
        return read_ahead(
            self.rows,
            steps,
            self.config.batch_size,
            self.rank,
            self.world,
            workers=workers,
            pinned=on_gpu,
        )

    def _train_step(
        self,
        batches: Iterator[Batch],
        stop_requested: Callable[[], int | None],
    ) -> tuple[Record, bool]:
        """Run one optimizer step; return (metrics, whether any process was asked to stop)."""
        config = self.config
        factor = wsd(self.step, config.steps, config.warmup, config.decay)
        learning_rate = config.learning_rate * factor
        set_learning_rate(self.optimizer, learning_rate)
        micro_batches = self._next_micro_batches(batches)
        n_tokens, totals = self._totals(micro_batches)
        loss = torch.zeros((), device=self.accelerator.device)
        per_layer: dict[str, Tensor] = {}
        # DeepSpeed's step is part of the backward pass: for it alone, an empty step costs a sync.
        if not self.strategy.steps_in_backward or n_tokens.item():
            loss, per_layer = self._forward_backward(micro_batches, totals)
        norm = self.strategy.clip_gradients(config.clip)
        # A failed save stops all processes after this step, not at the next checkpoint.
        stop = stop_requested() is not None or self.checkpoints.failed()
        figures = self._read(loss, per_layer, norm, n_tokens, stop)
        self.tokens += figures.n_tokens
        metrics: Record = {
            "step": self.step + 1,
            "loss": figures.loss,
            "per_layer": figures.per_layer,
            "lr": learning_rate,
            "grad_norm": figures.grad_norm,
            "tokens": self.tokens,
        }
        if figures.n_tokens == 0:
            self._note_empty_step()
            metrics |= NO_LOSS
        else:
            skipped = self._reason_to_skip(figures)
            if skipped is None:
                self.optimizer.step()
            else:
                metrics["skipped"] = skipped
        # After skipped steps too: their gradients must not reach the next one.
        self.optimizer.zero_grad()
        if self.empty_steps:
            metrics["empty_steps"] = self.empty_steps
        return metrics, figures.stop

    def _next_micro_batches(self, batches: Iterator[Batch]) -> list[Batch]:
        with self.meter.waiting_for_data():
            batch = on_device(next(batches), self.accelerator.device)
        first_row = self.step * self.config.batch_size + self.rank * self.n_rows
        # A row's seed follows from its place alone: a run on more processes draws the same.
        seeds: list[int] = []
        for place in range(first_row, first_row + self.n_rows):
            seeds.append(row_seed(self.identity["seed"], place))
        return self.strategy.stage.micro_batches(batch, self.config.micro_batch_size, seeds)

    def _totals(self, micro_batches: list[Batch]) -> tuple[Tensor, Totals]:
        """Return (number of tokens in the loss of a step, denominators of its losses).

        There are no denominators if one micro-batch is the whole step: its losses then compute
        their own.
        """
        stage = self.strategy.stage
        if len(micro_batches) * self.world == 1:
            return stage.n_tokens(micro_batches[0]), {}
        own_totals = add_totals(stage.totals(part) for part in micro_batches)
        sums = self._sum(torch.stack(list(own_totals.values())))
        totals = dict(zip(own_totals, sums))
        return totals["tokens"], totals

    def _forward_backward(
        self,
        micro_batches: list[Batch],
        totals: Totals,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Accumulate the gradients of a step; return this process's loss, total and per layer."""
        loss = torch.zeros((), device=self.accelerator.device)
        per_layer: dict[str, Any] = {}
        # accelerate and DeepSpeed divide by the number of micro-batches, and every strategy
        # averages over processes. The losses are shares of a sum already.
        divisor = len(micro_batches) * self.world
        self.strategy.begin_step()
        for number, micro_batch in enumerate(micro_batches, start=1):
            with self.strategy.micro_batch(is_last=number == len(micro_batches)):
                share = self.model(micro_batch, totals)
                loss += share.total.detach()
                for name, layer_loss in share.per_layer.items():
                    per_layer[name] = per_layer.get(name, 0.0) + layer_loss
                self.accelerator.backward(share.total * divisor)
        return loss, per_layer

    def _read(
        self,
        loss: Tensor,
        per_layer: dict[str, Tensor],
        norm: Tensor,
        n_tokens: Tensor,
        stop: bool,
    ) -> _StepFigures:
        """Sum a step's losses and requests to stop over the processes; read all its figures."""
        sums = self._sum(torch.stack([loss, loss.new_full((), float(stop)), *per_layer.values()]))
        # These are sums over the processes already. Counts of tokens need more than float32.
        counts = torch.stack([n_tokens.double(), norm.double()])
        # One transfer, and before the weights change: every read from the device waits for all of
        # its work.
        on_host = torch.cat([sums.double(), counts]).tolist()
        mean_loss, n_stops = on_host[:2]
        layer_losses = on_host[2:-2]
        total_tokens, grad_norm = on_host[-2:]
        return _StepFigures(
            loss=mean_loss,
            per_layer=dict(zip(per_layer, layer_losses)),
            grad_norm=grad_norm,
            n_tokens=int(total_tokens),
            stop=n_stops > 0,
        )

    def _sum(self, values: Tensor) -> Tensor:
        """Sum over all processes."""
        if self.world == 1:
            return values
        reduced = self.accelerator.reduce(values.to(self.accelerator.device), reduction="sum")
        # accelerate's type also allows for collections of tensors.
        assert isinstance(reduced, Tensor)
        return reduced

    def _note_empty_step(self) -> None:
        """Count a step without a token in its loss: of rows with a user's words alone, for example.

        Its loss of 0 is not one to compare others with, and its gradient of 0 would still move the
        weights (AdamW's momentum and weight decay), so the step is left out of both. The first is
        reported, metrics count all.
        """
        self.empty_steps += 1
        if self.empty_steps > 1 or not self.accelerator.is_main_process:
            return
        name = self.config.name
        logger.warning(
            "%s: no token of step %d is in the loss (%s). Such steps leave the weights as they are and have no loss; "
            "metrics.jsonl counts them as empty_steps. To have fewer, pass a larger --%s.batch-size.",
            name,
            self.step + 1,
            self._rows_of_step(),
            name.replace("_", "-"),
        )

    def _rows_of_step(self) -> str:
        size = self.config.batch_size
        return f"rows {self.step * size} to {(self.step + 1) * size - 1} of the data's order"

    def _reason_to_skip(self, figures: _StepFigures) -> str | None:
        """Return the reason to skip this step, or None for a good one.

        Raises Diverged if it may not be skipped.
        """
        config = self.config
        reason = self.spikes.reason(figures.loss, figures.grad_norm, figures.per_layer)
        if reason is None:
            return None
        description = (
            f"{config.name} diverged at step {self.step + 1}: {reason}, on {self._rows_of_step()}."
        )
        if config.on_divergence == "stop" or self.spikes.skipped > config.max_skips:
            raise Diverged(
                f"{description} Earlier checkpoints are untouched; resume with another on_divergence, max_skips or "
                "spike, or start over with a lower learning rate or clip."
            )
        if self.accelerator.is_main_process:
            logger.warning("%s Skipping the batch.", description)
        return reason

    def _is_logged(self, metrics: Record) -> bool:
        if self.step in (1, self.config.steps) or "skipped" in metrics:
            return True
        return self.step % self.config.log_every == 0

    def _log(self, metrics: Record) -> None:
        """Write a step's metrics to the file of metrics and to the trackers."""
        speed = self.meter.read(self._tokens_read())
        metrics = {**metrics, **speed, "seconds": round(self.seconds, 3)}
        if self.accelerator.is_main_process:
            append_metrics(self.out, metrics)
        if metrics["loss"] is None or "skipped" in metrics:
            return
        if self.accelerator.trackers:
            step = metrics.pop("step")
            per_layer = metrics.pop("per_layer")
            self.tracked.log(self.accelerator, self.config.name, {**metrics, **per_layer}, step)

    def _tokens_read(self) -> int:
        """Count the tokens that all processes have computed, those outside of the loss too."""
        return self.step * self.config.batch_size * self.rows.seq_len

    def _save(self) -> Path:
        """Start saving a checkpoint of the current state; every process writes its share."""
        state: Record = {
            "identity": self.identity,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "empty_steps": self.empty_steps,
            "watch": self.spikes.state_dict(),
            "rng": rng_state(),
        }
        self.checkpoints.save(self.step, self.strategy.shares, state)
        return self.checkpoints.path(self.step)

    def _save_and_stop(self, number: int | None) -> None:
        path = self._save()
        # Raises SaveFailed, if that is why the stage stops.
        self.checkpoints.wait()
        raise Interrupted(
            f"{self.config.name} stopped at step {self.step} of {self.config.steps} and is saved "
            f"in {path}; {self.how_to_resume}.",
            number=number,
        )

    def _restore(self, snapshot: Snapshot) -> None:
        self.strategy.load_optimizer(snapshot.optimizer)
        # All but the random generators is the same in every process.
        state = snapshot.states[0]
        self.step = snapshot.step
        self.tokens = state["tokens"]
        self.seconds = state["seconds"]
        self.empty_steps = state["empty_steps"]
        self.spikes.load_state_dict(state["watch"])
        # A run that goes on with more processes has no state for the new ones: they keep their
        # seeds.
        if self.rank < len(snapshot.states):
            set_rng_state(snapshot.states[self.rank]["rng"])

    def finish(self) -> StageManifest:
        """Write the result and delete the checkpoints."""
        config = self.config
        self.checkpoints.wait()
        if self.empty_steps and self.accelerator.is_main_process:
            logger.warning(
                "%s: %d of %d steps had no token in their loss",
                config.name,
                self.empty_steps,
                config.steps,
            )
        is_whole = self.strategy.unshard()
        student = self.stage.student.eval()
        # All of it: with a sharded teacher, only the parts that ran may be there.
        nn.Module.to(student, student.device)

        def write() -> None:
            save_stage(self.out, student, name=config.name, steps=config.steps, **self.identity)
            # Only now: until the result counts, the stage resumes from them.
            self.checkpoints.clear()

        on_main_process(write)
        if not is_whole:
            load_trained(self.out, student)
        # The main process's: another machine may see the file later.
        manifest = agree_on(lambda: StageManifest.read(self.out))
        assert manifest is not None
        return manifest

    def close(self) -> None:
        """Close files and trackers and free accelerate's memory.

        The process group stays for the next stage.
        """
        self.checkpoints.close()
        finish_trackers(self.accelerator)
        if self.accelerator.device.type != "cpu":
            self.accelerator.free_memory()


def row_seed(seed: int, place: int) -> int:
    """Derive a row's seed from the run's seed and the row's place in the data's order."""
    # A hash, not `seed + place`: runs with neighboring seeds would draw the same, one row apart.
    digest = blake2b(repr((seed, place)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
