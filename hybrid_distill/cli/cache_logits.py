"""`hybrid-distill cache-logits`: precompute the teacher's top-k logits, to distill without a teacher in memory.

Shapes: B rows, L tokens of a row, K stored tokens, V vocabulary, M tokens of a chunk.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
import torch
import tyro
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..config import RunConfig, config_of
from ..data import (
    Batch,
    CachedLogitsDataset,
    LogitFolder,
    LogitHeader,
    PackedRows,
    TaughtBatch,
    on_device,
    open_rows,
    tokenizer_fingerprint,
)
from ..data.logits import HEADER, PARTIAL, ROW_IDS, SHARD_TOKENS, numbered, pack, row_ids_of, shard_path
from ..distributed import alone_in, connect, is_launched_main, on_main_process
from ..io import replacing
from ..limits import Count, check_options
from ..pipeline import Run, finished_run
from ..provenance import now
from ..teacher import fingerprint
from ..train.config import DistillConfig
from ..train.end_to_end import OutputEmbedding, teacher_hidden
from ..train.losses import CHUNK_LOGITS
from ..train.stage import add_totals
from ..train.stages import make_stage
from .parsing import usage
from .recipes import load_recipe, on_asked_teacher, override, own_flags, recipe_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CacheJob:
    """Precompute the teacher's top-k logits for the rows of a run. Raises ValueError for a number out of range."""

    run: Annotated[RunConfig, tyro.conf.arg(name="")]
    """The run that will train from the logits."""
    stage: Literal["distill", "long", "post"] = "distill"
    """The stage whose rows are read; its ``teacher_logits`` is the folder to write."""
    top_k: Count = 64
    """Likeliest tokens stored for each token, about 4 bytes each. All others are one sum."""
    shard_tokens: Count = SHARD_TOKENS
    """Tokens after which a new file begins. A stopped command repeats at most one file."""
    check_rows: Count = 8
    """Rows that are read back at the end and compared with the teacher."""
    student_run: Path | None = None
    """Directory of a run with a finished stage; its student's loss to these logits is compared to that to the teacher.
    """

    def __post_init__(self) -> None:
        check_options(self, "--")

    @property
    def config(self) -> DistillConfig:
        """Config of the stage."""
        return getattr(self.run, self.stage)

    @property
    def folder(self) -> Path:
        """Folder to write. Raises ValueError when the run names none."""
        if self.config.teacher_logits is None:
            raise ValueError(f"there is no folder to write to; pass one with --{self.stage}.teacher-logits DIR.")
        return self.config.teacher_logits.expanduser()


class TopK(NamedTuple):
    """Stored part of a teacher's next-token distribution."""

    ids_BLK: Tensor
    log_probs_BLK: Tensor
    log_tail_BL: Tensor
    """Log-probability of all other tokens together."""


def cache_logits(job: CacheJob) -> str:
    """Do the job, or the rest of it, on as many processes as were launched; return a summary of one line.

    Raises ValueError for a teacher or data that cannot be had, a ``top_k`` above the vocabulary, a disk without room,
    and a folder that holds other logits or that another command writes to.
    """
    run, state, folder = Run(job.run), connect(), job.folder
    teacher, tokenizer = run.stage_teacher(job.config), run.stage_tokenizer(job.config)
    named = job.config.teacher_within(job.run.teacher)
    rows = numbered(open_rows(job.config.data_within(job.run.data), tokenizer))
    row_ids = row_ids_of(rows, job.config.rows_read)
    if job.top_k > (n_words := len(run.tokenizer)):
        raise ValueError(f"--top-k is {job.top_k}, but the vocabulary has {n_words} tokens; pass at most {n_words}.")
    header = LogitHeader(
        format=LogitHeader.FORMAT,
        teacher=named.path,
        teacher_fingerprint=fingerprint(teacher),
        dtype=named.dtype,
        precision=job.config.precision,
        tokenizer_fingerprint=tokenizer_fingerprint(tokenizer),
        vocabulary_size=n_words,
        temperature=job.config.temperature,
        top_k=job.top_k,
        seq_len=rows.seq_len,
        text_fingerprint=rows.text_fingerprint,
        order=rows.fingerprint,
        places=job.config.rows_read,
        rows=len(row_ids),
        shard_rows=max(1, job.shard_tokens // rows.seq_len),
    )
    on_main_process(lambda: log.info("%s: %s; %.3f GB are free", folder, _size(header), _free(folder) / 1e9))
    if job.run.dry_run:
        return "nothing was written (--dry-run)"
    began = time.monotonic()
    with alone_in(folder):
        on_main_process(lambda: _start(folder, header, row_ids))
        if not (folder / HEADER).exists():
            torch.nn.Module.to(teacher, state.device)
            _write_shards(job, header, teacher, rows, row_ids)
            state.wait_for_everyone()
            on_main_process(lambda: _finish(job, header, run, teacher, rows))
    return summary(LogitHeader.load(folder / HEADER), folder, time.monotonic() - began)


def top_k_of(
    teacher: PreTrainedModel, batch: Batch, k: int, *, vocab_size: int, temperature: float = 1.0, bf16: bool = False
) -> TopK:
    """Compute the teacher's ``k`` likeliest next tokens after every token, likeliest first, and the rest as one sum.

    The forward pass is that of `EndToEnd`; logits become float32 a chunk of tokens at a time.
    """
    parts = []
    for log_probs_MV in _log_probs(teacher, batch, vocab_size, temperature, bf16):
        log_probs_MK, ids_MK = log_probs_MV.topk(k, dim=-1)
        parts.append((ids_MK, log_probs_MK, log_probs_MV.scatter_(1, ids_MK, -torch.inf).logsumexp(-1)))
    return TopK(*(torch.cat(part).unflatten(0, batch["input_ids"].shape) for part in zip(*parts)))


@torch.no_grad()
def _log_probs(
    teacher: PreTrainedModel, batch: Batch, vocab_size: int, temperature: float, bf16: bool
) -> Iterator[Tensor]:
    """Yield log-probabilities of the real vocabulary, [M, V] float32, for one chunk of tokens after the other."""
    with torch.autocast(batch["input_ids"].device.type, torch.bfloat16, enabled=bf16):
        hidden_BLE, embedding = teacher_hidden(teacher, batch), OutputEmbedding.of(teacher)
    for hidden_ME in hidden_BLE.flatten(0, 1).split(_chunk(vocab_size)):
        with torch.autocast(hidden_ME.device.type, torch.bfloat16, enabled=bf16):
            logits_MV = embedding(hidden_ME)[:, :vocab_size]
        yield (logits_MV.float() / temperature).log_softmax(-1)


def _chunk(vocab_size: int) -> int:
    return max(1, CHUNK_LOGITS // vocab_size)


def summary(header: LogitHeader, folder: Path, seconds: float) -> str:
    """Return the content and the quality of a folder in one line."""
    found = header.measured
    line = (
        f"{folder}: top {header.top_k}, {_size(header)}, {seconds:,.1f} s; they cover "
        f"{found['covered']:.2%} of the teacher's probability (lowest 1 % of tokens: {found['covered_p01']:.2%})"
    )
    if student := found.get("student"):
        line += (
            f"; loss of {student['run']}: {student['top_k_loss']:.6f} to these, {student['teacher_loss']:.6f} to the "
            f"teacher, {student['difference']:+.2e}"
        )
    return line


def _size(header: LogitHeader) -> str:
    gigabytes = header.rows * header.seq_len * header.bytes_per_token / 1e9
    return (
        f"{header.rows:,} rows x {header.seq_len:,} tokens x {header.bytes_per_token:.0f} bytes = {gigabytes:,.3f} GB"
    )


def _free(folder: Path) -> int:
    """Return the bytes free on the disk where a folder is or will be."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(there).free


def _start(folder: Path, header: LogitHeader, row_ids: np.ndarray) -> None:
    """Make the folder. Raises ValueError when it holds other logits, or when these cannot fit."""
    for name in (HEADER, PARTIAL):
        if (folder / name).exists():
            LogitHeader.load(folder / name).check_same_work(header, folder)
    for left in folder.glob(".*.tmp"):  # of a writer that was killed
        left.unlink()
    if (folder / HEADER).exists():
        return
    with replacing(folder / ROW_IDS) as path:
        row_ids.tofile(path)
    header.save(folder / PARTIAL)
    sizes, missing = header.sizes(folder), header.missing_shards(folder)
    needed = sum(sizes[shard_path(folder, number)] for number in missing)
    if needed > (free := _free(folder)):
        raise ValueError(
            f"{folder} has {free / 1e9:,.3f} GB free and the logits need {needed / 1e9:,.3f} GB more; make room, "
            "pass a folder on another disk, or store less with --top-k or --distill.steps."
        )
    log.info("%d of %d files are written already", len(header.shard_sizes) - len(missing), len(header.shard_sizes))


def _write_shards(
    job: CacheJob, header: LogitHeader, teacher: PreTrainedModel, rows: PackedRows, row_ids: np.ndarray
) -> None:
    """Write every n-th shard for n processes, where it is missing: the same bytes for any n."""
    state, missing = connect(), set(header.missing_shards(job.folder))
    mine = [n for n in range(state.process_index, len(header.shard_sizes), state.num_processes) if n in missing]
    n_tokens = sum(header.shard_sizes[number] for number in mine) * header.seq_len
    hidden = None if state.is_main_process else True  # None: shown on a terminal
    with tqdm(total=n_tokens, unit="tok", unit_scale=True, desc="logits", disable=hidden) as bar:
        for number in mine:
            first = number * header.shard_rows
            ids = row_ids[first : first + header.shard_rows]
            with replacing(shard_path(job.folder, number)) as path, path.open("wb") as file:
                for begin in range(0, len(ids), job.config.micro_batch_size):
                    batch = on_device(rows.read(ids[begin : begin + job.config.micro_batch_size]), teacher.device)
                    known = top_k_of(
                        teacher,
                        batch,
                        header.top_k,
                        vocab_size=header.vocabulary_size,
                        temperature=header.temperature,
                        bf16=header.precision == "bf16",
                    )
                    file.write(pack(*known, batch["mask"], header).tobytes())
                    bar.update(batch["mask"].numel())


def _finish(job: CacheJob, header: LogitHeader, run: Run, teacher: PreTrainedModel, rows: PackedRows) -> None:
    """Read some rows back, measure them against the teacher, and write the header."""
    cached = CachedLogitsDataset(rows, LogitFolder(job.folder, header))
    n_rows = min(job.check_rows, header.places)
    batches = [on_device(cached.batch(place, 1), teacher.device) for place in range(n_rows)]
    header.measured = {"rows": n_rows, **_coverage(teacher, batches, header)}
    if job.student_run is not None:
        header.measured["student"] = _loss_difference(job, job.student_run, run, teacher, batches)
    header.created = now()
    header.save(job.folder / HEADER)
    (job.folder / PARTIAL).unlink(missing_ok=True)


def _coverage(teacher: PreTrainedModel, batches: Sequence[TaughtBatch], header: LogitHeader) -> dict[str, float]:
    """Measure the probability that the stored tokens have, and the rounding of what is stored.

    ``covered`` is the mean over tokens and ``covered_p01`` the lowest percentile; ``rounding`` is the mean over tokens
    of ``sum p |log p - stored|``.
    """
    covered, distances = [], []
    for batch in batches:
        ids_MK, stored_MK = batch["teacher_ids_BLK"].flatten(0, 1), batch["teacher_log_probs_BLK"].flatten(0, 1)
        mask_M = batch["mask"].flatten()
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
def _loss_difference(
    job: CacheJob, student_run: Path, run: Run, teacher: PreTrainedModel, batches: Sequence[TaughtBatch]
) -> dict[str, str | float]:
    """Compare losses of a finished run's student: to the stored logits, to the whole teacher."""
    student, _ = finished_run(student_run, run.teacher_and_tokenizer).trained_student()

    def loss(config: DistillConfig) -> float:
        stage = make_stage(config, student, teacher, vocab_size=len(run.tokenizer)).eval()
        stage.place(teacher.device)
        totals = add_totals(stage.totals(batch) for batch in batches)
        return sum(float(stage(batch, totals).total) for batch in batches)

    top_k, whole = loss(job.config), loss(replace(job.config, teacher_logits=None))
    return {"run": str(student_run), "top_k_loss": top_k, "teacher_loss": whole, "difference": top_k - whole}


def main(words: list[str]) -> None:
    """Precompute the teacher's top-k logits for a recipe's rows, so that distillation needs no teacher in memory.

    Takes the flags of the run, of which --distill.teacher-logits names the folder, and a few of its own; --help after
    the recipe lists them. Resumes where it was stopped. `accelerate launch -m hybrid_distill cache-logits ...` shares
    the rows between processes.
    """
    if words and words[0] in ("-h", "--help"):
        print(usage(main, "RECIPE"))
        return
    path, flags = recipe_of(words, "cache-logits")
    default = CacheJob(on_asked_teacher(config_of(load_recipe(path)), flags))
    own = [*own_flags(CacheJob), *(f"--{stage}.teacher-logits" for stage in ("distill", "long", "post"))]
    line = cache_logits(override(default, flags, f"hybrid-distill cache-logits {path}", CacheJob.__doc__, own))
    if is_launched_main():
        print(line)
