"""`hybrid-distill prepare-data`: tokenise text once, into a folder that any number of processes train from."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ..assets import tiny_teacher_path
from ..data import TokenHeader, write_tokens
from ..data.folder import SHARD_TOKENS
from ..locking import locked
from ..teacher import TINY


@dataclass(frozen=True)
class PrepareJob:
    """What to tokenise, with what, into which folder. Raises ValueError for a number out of range."""

    tokenizer: str
    """The teacher's: a local folder, a hub id, or ``tiny`` for the embedded one."""
    sources: tuple[str, ...]
    """Read one after the other: ``tiny``; files or folders of .txt, .jsonl, .jsonl.gz or .parquet; folders written by
    ``save_to_disk`` of `datasets`; ``hf:repo:config:split``, which is streamed. For a mixture with weights, prepare
    each part in a folder of its own."""
    out: Path
    """The token folder. It is left as it is when it holds these tokens already, and gone on with when they are not all
    there."""
    text_column: str = "text"
    """Where records hold their text."""
    chat: bool = False
    """Records are conversations: a list ``messages`` (or ``conversations``), or ``prompt`` and ``completion``. They are
    put into the tokenizer's chat template, and what the assistant says is marked."""
    workers: int = 1
    """Processes that tokenise. The result is the same for any number."""
    max_tokens: int | None = None
    """Stop before the first document that would exceed this many tokens."""
    shard_tokens: int = SHARD_TOKENS
    """Begin a new file after about this many tokens. What a stopped command has to do again is at most one file."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise ValueError("--sources is empty; name what to tokenise, for example --sources tiny.")
        for name in ("workers", "max_tokens", "shard_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} is {value}; give a whole number of at least 1.")


def prepare(job: PrepareJob) -> str:
    """Do the job, or what is left of it; what was made, in one line.

    Raises ValueError for a tokenizer or a source that cannot be had, and for a folder that holds other tokens or that
    another process writes to.
    """
    tokenizer = load_tokenizer(job.tokenizer)
    began = time.monotonic()
    with locked(job.out):
        header = write_tokens(
            job.out,
            job.sources,
            tokenizer,
            name=job.tokenizer,
            text_column=None if job.chat else job.text_column,
            max_tokens=job.max_tokens,
            shard_tokens=job.shard_tokens,
            workers=job.workers,
        )
    return summary(header, job.out, time.monotonic() - began)


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a local folder, a hub id or ``tiny``. Raises ValueError, in one line, when it cannot be had."""
    try:
        return AutoTokenizer.from_pretrained(tiny_teacher_path() if name == TINY else name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"the tokenizer {name!r} cannot be loaded ({reason}); give the teacher's folder with --tokenizer PATH, "
            f"or the embedded one with --tokenizer {TINY}."
        ) from error


def summary(header: TokenHeader, folder: Path, seconds: float) -> str:
    """What a token folder holds, in one line."""
    size = header.tokens * np.dtype(header.dtype).itemsize + header.documents * 8
    return (
        f"{folder}: {header.tokens:,} tokens of {header.documents:,} documents in {len(header.shards)} "
        f"{'file' if len(header.shards) == 1 else 'files'} ({header.dtype}, {size / 1e6:,.1f} MB), {seconds:,.1f} s"
    )


def command(job: tyro.conf.OmitArgPrefixes[PrepareJob]) -> None:
    """Tokenize text once, into a folder that --data.sources takes; goes on where it was stopped."""
    print(prepare(job))
