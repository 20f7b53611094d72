"""`hybrid-distill cache-logits`: write down what the teacher says of a run's rows, once, to distil from it without one.

Shapes: B rows, L tokens of a row, K stored tokens, V vocabulary, M tokens of a chunk.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, cast

import numpy as np
import torch
import tyro
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..config import RunConfig, config_of
from ..data import (
    Batch,
    LogitFolder,
    LogitHeader,
    PackedRows,
    TaughtRows,
    on_device,
    open_rows,
    tokenizer_fingerprint,
)
from ..data.logits import (
    FORMAT,
    HEADER,
    SHARD_TOKENS,
    finish_folder,
    missing_shards,
    numbered,
    pack,
    record_dtype,
    row_ids_of,
    shard_path,
    start_folder,
    write_whole,
)
from ..distributed import alone_in, connect, is_launched_main, on_main_process
from ..pipeline import Run, finished_run
from ..teacher import fingerprint
from ..train.config import DistillConfig
from ..train.losses import CHUNK_LOGITS
from ..train.stages import OutputEmbedding, add_totals, make_stage, teacher_hidden
from .recipes import load_recipe, on_asked_teacher, override, own_flags, recipe_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CacheJob:
    """Which teacher and rows, and how much of them. Raises ValueError for a number out of range."""

    run: Annotated[RunConfig, tyro.conf.arg(name="")]
    """The run that will train from the logits."""
    stage: Literal["distill", "long", "post"] = "distill"
    """The stage whose rows they are of; its ``teacher_logits`` is where they go."""
    top_k: int = 64
    """Tokens stored for each token, the likeliest ones; about 4 bytes each. All others are one sum."""
    shard_tokens: int = SHARD_TOKENS
    """Begin a new file after this many tokens. What a stopped command has to do again is at most one file."""
    check_rows: int = 8
    """Rows that are read back at the end and compared with the teacher."""
    student_run: Path | None = None
    """Directory of a run with a finished stage, whose student's loss is compared: to these logits, to the teacher."""

    def __post_init__(self) -> None:
        for name in ("top_k", "shard_tokens", "check_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}; give at least 1.")

    @property
    def config(self) -> DistillConfig:
        """The stage's."""
        return getattr(self.run, self.stage)

    @property
    def folder(self) -> Path:
        """Where the logits go. Raises ValueError when the run names no folder."""
        if self.config.teacher_logits is None:
            raise ValueError(f"there is no folder to write to; name one with --{self.stage}.teacher-logits DIR.")
        return self.config.teacher_logits.expanduser()


class Known(NamedTuple):
    """What is stored of a teacher's next-token distribution."""

    ids_BLK: Tensor
    log_probs_BLK: Tensor
    log_tail_BL: Tensor
    """Of all other tokens together."""


def cache_logits(job: CacheJob) -> str:
    """Do the job, or what is left of it, on as many processes as were launched; what was made, in one line.

    Raises ValueError for a teacher or data that cannot be had, a ``top_k`` above the vocabulary, a disk without room,
    and a folder that holds other logits or that another command writes to.
    """
    run, state, folder = Run(job.run), connect(), job.folder
    teacher, tokenizer = run.teacher_of(job.stage)
    rows = numbered(open_rows(job.run.data_of(job.stage), tokenizer))
    header, row_ids = _plan(job, teacher, tokenizer, len(run.tokenizer), rows)
    on_main_process(lambda: log.info(_estimate(folder, header)))
    if job.run.dry_run:
        return "nothing was written (--dry-run)"
    began = time.monotonic()
    with alone_in(folder):
        on_main_process(lambda: _start(folder, header, row_ids))
        if not (folder / HEADER).exists():
            teacher.to(cast(Any, state.device))
            _write_shards(job, header, teacher, rows, row_ids)
            state.wait_for_everyone()
            on_main_process(lambda: _finish(job, header, run, teacher, rows))
    return summary(LogitHeader.load(folder / HEADER), folder, time.monotonic() - began)


def top_k_of(
    teacher: PreTrainedModel, batch: Batch, k: int, *, vocab_size: int, temperature: float = 1.0, bf16: bool = False
) -> Known:
    """The teacher's ``k`` likeliest next tokens after every token, likeliest first, and the rest as one sum.

    The forward is that of `EndToEnd`; logits become float32 a chunk of tokens at a time.
    """
    parts = []
    for log_probs_MV in _log_probs(teacher, batch, vocab_size, temperature, bf16):
        log_probs_MK, ids_MK = log_probs_MV.topk(k, dim=-1)
        parts.append((ids_MK, log_probs_MK, log_probs_MV.scatter_(1, ids_MK, -torch.inf).logsumexp(-1)))
    return Known(*(torch.cat(part).unflatten(0, batch["input_ids"].shape) for part in zip(*parts)))


@torch.no_grad()
def _log_probs(
    teacher: PreTrainedModel, batch: Batch, vocab_size: int, temperature: float, bf16: bool
) -> Iterator[Tensor]:
    """Log-probabilities of the real vocabulary, [M, V] float32, for `_chunk` tokens after the other."""
    with torch.autocast(batch["input_ids"].device.type, torch.bfloat16, enabled=bf16):
        hidden_BLE, embedding = teacher_hidden(teacher, batch), OutputEmbedding.of(teacher)
    for hidden_ME in hidden_BLE.flatten(0, 1).split(_chunk(vocab_size)):
        with torch.autocast(hidden_ME.device.type, torch.bfloat16, enabled=bf16):
            logits_MV = embedding(hidden_ME)[:, :vocab_size]
        yield (logits_MV.float() / temperature).log_softmax(-1)


def _chunk(vocab_size: int) -> int:
    return max(1, CHUNK_LOGITS // vocab_size)


def summary(header: LogitHeader, folder: Path, seconds: float) -> str:
    """What a folder holds and how good it is, in one line."""
    found = header.measured
    line = (
        f"{folder}: top {header.top_k} of {header.rows:,} rows x {header.seq_len:,} tokens "
        f"({header.bytes_a_token:.0f} bytes a token, {_gigabytes(header)}), {seconds:,.1f} s; they cover "
        f"{found['covered']:.2%} of the teacher's probability (lowest 1 % of tokens: {found['covered_p01']:.2%})"
    )
    if student := found.get("student"):
        line += (
            f"; loss of {student['run']}: {student['top_k_loss']:.6f} to these, {student['teacher_loss']:.6f} to the "
            f"teacher, {student['difference']:+.2e}"
        )
    return line


def _plan(
    job: CacheJob, teacher: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, n_words: int, rows: PackedRows
) -> tuple[LogitHeader, np.ndarray]:
    """What the folder will be, and the numbers of its rows."""
    stage, named = job.config, job.run.teacher_of(job.stage)
    if job.top_k > n_words:
        raise ValueError(f"--top-k is {job.top_k}, but the vocabulary has {n_words} tokens; give at most {n_words}.")
    row_ids = row_ids_of(rows, stage.rows_read)
    header = LogitHeader(
        format=FORMAT,
        teacher=named.path,
        teacher_fingerprint=fingerprint(teacher),
        dtype=named.dtype,
        precision=stage.precision,
        tokenizer_fingerprint=tokenizer_fingerprint(tokenizer),
        vocabulary_size=n_words,
        temperature=stage.temperature,
        top_k=job.top_k,
        seq_len=rows.seq_len,
        text_fingerprint=rows.text_fingerprint,
        order=rows.fingerprint,
        places=stage.rows_read,
        rows=len(row_ids),
        shard_rows=max(1, job.shard_tokens // rows.seq_len),
    )
    return header, row_ids


def _gigabytes(header: LogitHeader) -> str:
    return f"{header.rows * header.seq_len * header.bytes_a_token / 1e9:,.3f} GB"


def _free(folder: Path) -> int:
    """Bytes on the disk where a folder is or will be."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(there).free


def _estimate(folder: Path, header: LogitHeader) -> str:
    return (
        f"{folder}: {header.rows:,} rows x {header.seq_len:,} tokens x {header.bytes_a_token:.0f} bytes = "
        f"{_gigabytes(header)}; {_free(folder) / 1e9:,.3f} GB are free"
    )


def _start(folder: Path, header: LogitHeader, row_ids: np.ndarray) -> None:
    """Make the folder, or check that it holds a part of these logits. Raises ValueError when they cannot fit."""
    start_folder(folder, header, row_ids)
    missing, n_shards = missing_shards(folder, header), len(header.shard_sizes)
    needed = sum(header.shard_sizes[number] for number in missing) * record_dtype(header).itemsize
    if needed > (free := _free(folder)):
        raise ValueError(
            f"{folder} has {free / 1e9:,.3f} GB free and the logits need {needed / 1e9:,.3f} GB more; make room, "
            "name a folder on another disk, or store less with --top-k or --distill.steps."
        )
    if 0 < len(missing) < n_shards:
        log.info("%d of %d files are there already", n_shards - len(missing), n_shards)


def _write_shards(
    job: CacheJob, header: LogitHeader, teacher: PreTrainedModel, rows: PackedRows, row_ids: np.ndarray
) -> None:
    """Every n-th shard for n processes, where it is missing: the same bytes for any n."""
    state, sizes = connect(), header.shard_sizes
    missing = set(missing_shards(job.folder, header))
    mine = [number for number in range(state.process_index, len(sizes), state.num_processes) if number in missing]
    n_tokens = sum(sizes[number] for number in mine) * header.seq_len
    hidden = None if state.is_main_process else True  # None: shown on a terminal
    with tqdm(total=n_tokens, unit="tok", unit_scale=True, desc="logits", disable=hidden) as bar:
        for number in mine:
            first = number * header.shard_rows
            records = _records(job, header, teacher, rows, row_ids[first : first + sizes[number]], bar)
            write_whole(shard_path(job.folder, number), records)


def _records(
    job: CacheJob, header: LogitHeader, teacher: PreTrainedModel, rows: PackedRows, row_ids: np.ndarray, bar: Any
) -> Iterator[bytes]:
    """Rows as they are on disk, a micro-batch of the stage at a time."""
    size = job.config.micro_batch_size
    options = {"vocab_size": header.vocabulary_size, "temperature": header.temperature}
    for first in range(0, len(row_ids), size):
        batch = on_device(rows.read(row_ids[first : first + size]), teacher.device)
        known = top_k_of(teacher, batch, header.top_k, bf16=header.precision == "bf16", **options)
        yield pack(*known, batch["mask"], header).tobytes()
        bar.update(batch["mask"].numel())


def _finish(job: CacheJob, header: LogitHeader, run: Run, teacher: PreTrainedModel, rows: PackedRows) -> None:
    """Read some rows back, measure them against the teacher, and write the header."""
    taught = TaughtRows(rows, LogitFolder(job.folder, header))
    n_rows = min(job.check_rows, header.places)
    batches = [on_device(taught.batch(place, 1), teacher.device) for place in range(n_rows)]
    header.measured = {"rows": n_rows, **_coverage(teacher, batches, header)}
    if job.student_run is not None:
        header.measured["student"] = _loss_difference(job, run, teacher, batches)
    header.created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    finish_folder(job.folder, header)


def _coverage(teacher: PreTrainedModel, batches: list[Any], header: LogitHeader) -> dict[str, float]:
    """The probability that the stored tokens have, mean and lowest percentile of tokens; and their distance from what
    the teacher says now, ``sum p |log p - stored|``, mean of tokens: rounding, and nothing else.
    """
    covered, distances = [], []
    for batch in batches:
        ids_MK, stored_MK, mask_M = (
            batch[name].flatten(0, 1) for name in ("teacher_ids_BLK", "teacher_log_probs_BLK", "mask")
        )
        chunks = _log_probs(teacher, batch, header.vocabulary_size, header.temperature, header.precision == "bf16")
        now_MK = torch.cat([c.gather(1, i) for c, i in zip(chunks, ids_MK.split(_chunk(header.vocabulary_size)))])
        covered.append(stored_MK.exp().sum(-1)[mask_M])
        distances.append((now_MK.exp() * (now_MK - stored_MK).abs()).sum(-1)[mask_M])
    covered_M = torch.cat(covered)
    return {
        "tokens": len(covered_M),
        "covered": covered_M.mean().item(),
        "covered_p01": covered_M.sort().values[len(covered_M) // 100].item(),
        "rounding": torch.cat(distances).mean().item(),
    }


@torch.no_grad()
def _loss_difference(job: CacheJob, run: Run, teacher: PreTrainedModel, batches: list[Any]) -> dict[str, Any]:
    """Losses of a finished run's student: to the stored logits, to the whole teacher."""
    assert job.student_run is not None
    other = finished_run(job.student_run, run.teacher_and_tokenizer)
    student, _ = other.trained_student()

    def loss(config: DistillConfig) -> float:
        stage = make_stage(config, student, teacher, vocab_size=len(run.tokenizer)).eval()
        stage.bf16 = config.precision == "bf16"
        stage.place(teacher.device)
        totals = add_totals(stage.totals(batch) for batch in batches)
        return sum(float(stage(batch, totals).total) for batch in batches)

    top_k, whole = loss(job.config), loss(replace(job.config, teacher_logits=None))
    return {"run": str(job.student_run), "top_k_loss": top_k, "teacher_loss": whole, "difference": top_k - whole}


def main(words: list[str]) -> None:
    """Precompute the teacher's top-k logits for a recipe's rows, so that distillation needs no teacher in memory.

    Takes the flags of the run, of which --distill.teacher-logits names the folder, and a few of its own; --help after
    the recipe lists them. Goes on where it was stopped. `accelerate launch -m hybrid_distill cache-logits ...` shares
    the rows between processes.
    """
    if words and words[0] in ("-h", "--help"):
        print(f"usage: hybrid-distill cache-logits RECIPE [FLAGS]\n\n{main.__doc__}")
        return
    path, flags = recipe_of(words, "cache-logits")
    default = CacheJob(on_asked_teacher(config_of(load_recipe(path)), flags))
    own = [*own_flags(CacheJob), *(f"--{stage}.teacher-logits" for stage in ("distill", "long", "post"))]
    line = cache_logits(override(default, flags, f"hybrid-distill cache-logits {path}", CacheJob.__doc__, own))
    if is_launched_main():
        print(line)
