"""Cache the teacher's top-k logits: the same bytes for any number of processes, and after any interruption.

Shapes: B rows, L tokens of a row, K stored tokens, V vocabulary, M tokens of a chunk.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..distributed import alone_in, compute_everywhere, connect, from_main, on_main_process
from ..io import replacing
from ..model.documents import packed_inputs
from ..model.layout import decoder_of
from ..model.logits import logits_of
from ..model.self_check import check_not_nan
from ..progress import Phase
from ..provenance import now
from ..teacher import fingerprint
from .logits import ROW_IDS, CachedLogitsDataset, LogitFolder, LogitHeader, pack, row_ids_of
from .rows import Batch, PackedRows, cu_seqlens, on_device
from .tokens import tokenizer_fingerprint

log = logging.getLogger(__name__)

SHARD_TOKENS = 2**22
CHECK_ROWS = 8
"""Rows that are read back when all are written."""
# 256 MB in float32: the logits of a whole micro-batch would be the largest tensor of the run by far.
_CHUNK_LOGITS = 2**26


class TopK(NamedTuple):
    """Stored part of a teacher's next-token distribution."""

    ids_BLK: Tensor
    log_probs_BLK: Tensor
    log_tail_BL: Tensor
    """Log-probability of all other tokens together."""


@torch.no_grad()
def top_k_of(
    teacher: PreTrainedModel,
    batch: Batch,
    k: int,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    bf16: bool = False,
) -> TopK:
    """Compute the teacher's ``k`` likeliest next tokens after every token, likeliest first, and the sum of all others.

    The forward pass is the same as in `EndToEnd`; logits are converted to float32 in chunks of tokens.
    """
    chunk_tokens = max(1, _CHUNK_LOGITS // vocab_size)
    chunks = []
    with torch.autocast(teacher.device.type, torch.bfloat16, enabled=bf16):
        packed = packed_inputs(
            batch["seq_idx"], teacher.dtype, teacher.config, cu_seqlens=cu_seqlens(batch)
        )
        hidden_BLE = decoder_of(teacher)(input_ids=batch["input_ids"], use_cache=False, **packed)[0]
        for hidden_ME in hidden_BLE.flatten(0, 1).split(chunk_tokens):
            # Rows of the embedding beyond `vocab_size` are padding, without tokens.
            logits_MV = logits_of(teacher, hidden_ME)[:, :vocab_size]
            log_probs_MV = (logits_MV.float() / temperature).log_softmax(-1)
            log_probs_MK, ids_MK = log_probs_MV.topk(k, dim=-1)
            # In place: a chunk of logits is the largest tensor here.
            log_tail_M = log_probs_MV.scatter_(1, ids_MK, -torch.inf).logsumexp(-1)
            chunks.append((ids_MK, log_probs_MK, log_tail_M))
    shape = batch["input_ids"].shape
    columns = [torch.cat(column).unflatten(0, shape) for column in zip(*chunks)]
    return TopK(*columns)


def check_top_k(top_k: int, vocab_size: int, flag: str = "--top-k") -> None:
    """Raise ValueError, naming the flag, for more stored tokens than the vocabulary has."""
    if top_k > vocab_size:
        raise ValueError(
            f"{flag} is {top_k}, but the vocabulary has {vocab_size} tokens; pass at most {vocab_size}."
        )


def write_logits(
    folder: Path,
    teacher: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: PackedRows,
    *,
    name: str,
    top_k: int,
    rows_read: int,
    vocab_size: int,
    temperature: float = 1.0,
    precision: str = "fp32",
    micro_batch_size: int = 8,
    shard_tokens: int = SHARD_TOKENS,
    dry_run: bool = False,
) -> str:
    """Write the logits of the first ``rows_read`` rows that are still missing; return a one-line summary.

    All processes of a launch must call this. Raises ValueError for a ``top_k`` above the vocabulary size, and for a
    folder that holds something else or that another command is writing to.
    """
    check_top_k(top_k, vocab_size)
    row_ids = row_ids_of(rows, rows_read)
    header = LogitHeader(
        format=LogitHeader.FORMAT,
        teacher=name,
        teacher_fingerprint=fingerprint(teacher),
        dtype=str(teacher.dtype).removeprefix("torch."),
        precision=precision,
        tokenizer_fingerprint=tokenizer_fingerprint(tokenizer),
        vocabulary_size=vocab_size,
        temperature=temperature,
        top_k=top_k,
        seq_len=rows.seq_len,
        text_fingerprint=rows.text_fingerprint,
        order=rows.fingerprint,
        rows_read=rows_read,
        rows=len(row_ids),
        shard_rows=max(1, shard_tokens // rows.seq_len),
    )
    on_main_process(lambda: log.info("%s: %s", folder, header))
    if dry_run:
        return "nothing was written (--dry-run)"
    began = time.monotonic()
    # Until the header is written: two commands in one folder would delete each other's temporary files.
    with alone_in(folder):
        on_main_process(lambda: _start(folder, header, row_ids))
        if from_main(lambda: not LogitHeader.file(folder).exists()):
            # `PreTrainedModel.to` is decorated, and its type is lost.
            torch.nn.Module.to(teacher, connect().device)
            compute_everywhere(
                lambda: _write_shards(folder, header, teacher, rows, row_ids, micro_batch_size)
            )
            on_main_process(lambda: _finish(folder, header, rows))
    return _summary(folder, LogitHeader.open(folder), time.monotonic() - began)


def _summary(folder: Path, header: LogitHeader, seconds: float) -> str:
    coverage = header.measured
    line = f"{folder}: top {header.top_k}, {header}, {seconds:,.1f} s"
    if not coverage["tokens"]:
        return f"{line}; the loss counts no token of the {coverage['rows']} rows that were checked"
    return (
        f"{line}; they cover {coverage['covered']:.2%} of the teacher's probability (lowest 1 % of tokens: "
        f"{coverage['covered_p01']:.2%})"
    )


def _start(folder: Path, header: LogitHeader, row_ids: np.ndarray) -> None:
    """Prepare the folder. Raises ValueError if it holds something else."""
    # Left by a killed writer.
    leftovers = list(folder.glob(".*.tmp"))
    if header.existing(folder) is None:
        # Files without a header may be of another teacher: only their sizes are checked.
        leftovers += header.sizes(folder)
    for leftover in leftovers:
        leftover.unlink(missing_ok=True)
    if header.file(folder).exists():
        return
    with replacing(folder / ROW_IDS) as path:
        row_ids.tofile(path)
    header.save(header.file(folder, partial=True))
    n_missing = len(header.missing_shards(folder))
    n_shards = len(header.shards(folder))
    log.info("%d of %d files are written already", n_shards - n_missing, n_shards)


def _write_shards(
    folder: Path,
    header: LogitHeader,
    teacher: PreTrainedModel,
    rows: PackedRows,
    row_ids: np.ndarray,
    micro_batch_size: int,
) -> None:
    """Write this process's missing shards: every n-th of all for n processes, with the same bytes for any n."""
    state = connect()
    shards = header.shards(folder)
    own_shards = []
    for number in header.missing_shards(folder):
        # By the shard's number: written shards stay valid with another number of processes.
        if number % state.num_processes == state.process_index:
            own_shards.append(number)
    n_rows = sum(shards[number][1] for number in own_shards)
    with Phase("the teacher's logits", n_rows * header.seq_len, unit="tokens") as phase:
        for number in own_shards:
            shard, _ = shards[number]
            first = number * header.shard_rows
            shard_row_ids = row_ids[first : first + header.shard_rows]
            with replacing(shard) as path, path.open("wb") as file:
                for begin in range(0, len(shard_row_ids), micro_batch_size):
                    batch = rows.read(shard_row_ids[begin : begin + micro_batch_size])
                    file.write(_packed_logits(teacher, batch, header))
                    phase.update(batch["mask"].numel())


def _packed_logits(teacher: PreTrainedModel, batch: Batch, header: LogitHeader) -> bytes:
    """Run the teacher and return what a shard stores of its logits."""
    batch = on_device(batch, teacher.device)
    top_k = top_k_of(
        teacher,
        batch,
        header.top_k,
        vocab_size=header.vocabulary_size,
        temperature=header.temperature,
        bf16=header.precision == "bf16",
    )
    check_not_nan(top_k.log_probs_BLK[batch["mask"]], teacher)
    return pack(*top_k, batch["mask"], header).tobytes()


def _finish(folder: Path, header: LogitHeader, rows: PackedRows) -> None:
    """Read some rows back, record how much of the teacher's probability they cover, and write the header."""
    cached = CachedLogitsDataset(rows, LogitFolder(folder, header))
    # As the stage will read them, after rounding and unpacking.
    batch = cached.batch(0, min(CHECK_ROWS, header.rows_read))
    covered_BL = batch["teacher_log_probs_BLK"].exp().sum(-1)
    covered_M = covered_BL[batch["mask"]].sort().values
    n_tokens = len(covered_M)
    header.measured = {"rows": len(batch["mask"]), "tokens": n_tokens}
    if n_tokens:
        header.measured["covered"] = covered_M.mean().item()
        header.measured["covered_p01"] = covered_M[n_tokens // 100].item()
    header.created = now()
    header.finish(folder)
