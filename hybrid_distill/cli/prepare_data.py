"""`hybrid-distill prepare-data`: tokenize text once, into a folder that any number of processes train from."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import tyro

from ..data import write_tokens
from ..data.folder import SHARD_TOKENS
from ..limits import Count, check_options
from ..locking import locked
from ..teacher import load_tokenizer


@dataclass(frozen=True)
class PrepareJob:
    """Tokenize sources into a folder. Raises ValueError for a number out of range."""

    tokenizer: str
    """The teacher's: a local folder, a hub id, or ``tiny`` for the embedded one."""
    sources: tuple[str, ...]
    """Sources, read one after the other: ``tiny``; files or folders of .txt, .jsonl, .jsonl.gz or .parquet;
    ``hf:repo:config:split`` on the hub. For a mixture with weights, prepare each part in a folder of its own."""
    out: Path
    """Token folder to write. Left alone when it holds these tokens already, resumed when it is not finished."""
    text_column: str = "text"
    """Column of the records that holds their text."""
    chat: bool = False
    """Records are conversations: a list ``messages`` (or ``conversations``), or ``prompt`` and ``completion``. They are
    rendered by the tokenizer's chat template, and the assistant's tokens are marked."""
    max_tokens: Count | None = None
    """Stop before the first document that would exceed this many tokens."""
    shard_tokens: Count = SHARD_TOKENS
    """Tokens after which a new file begins, about. A stopped command repeats at most one file."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise ValueError("--sources is empty; pass what to tokenize, for example --sources tiny.")
        check_options(self, "--")


def prepare(job: PrepareJob) -> str:
    """Do the job, or the rest of it; return a summary of one line.

    Raises ValueError for a tokenizer or a source that cannot be had, and for a folder that holds other tokens or that
    another process writes to.
    """
    tokenizer = load_tokenizer(job.tokenizer, "--tokenizer")
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
        )
    return f"{job.out}: {header}, {time.monotonic() - began:,.1f} s"


def command(job: tyro.conf.OmitArgPrefixes[PrepareJob]) -> None:
    """Tokenize text once, into a folder that --data.sources takes; resumes where it was stopped."""
    print(prepare(job))
