"""`hybrid-distill prepare-data`: text tokenized once, in a folder that any number of processes
can train from."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import tyro

from ..data import write_tokens
from ..data.folder import SHARD_TOKENS
from ..locking import locked
from ..teacher import load_tokenizer
from ..validation import Count, check_options


@dataclass(frozen=True)
class PrepareJob:
    """Sources to tokenize into a folder. Raises ValueError for a number out of range."""

    tokenizer: str
    """Teacher's tokenizer: a local folder, a hub id, or ``tiny`` for the embedded one."""
    sources: tuple[str, ...]
    """Sources, read in this order: ``tiny``; files or folders of .txt, .jsonl, .jsonl.gz or
    .parquet; ``hf:repo:config:split`` on the hub. For a weighted mixture, prepare each source in
    a separate folder."""
    out: Path
    """Token folder to write. Skipped if it already holds these tokens, resumed if unfinished."""
    text_column: str = "text"
    """Column with the text of each record."""
    chat: bool = False
    """Treat records as conversations: a list ``messages`` (or ``conversations``), or ``prompt``
    and ``completion``. The tokenizer's chat template renders them, and the assistant's tokens
    are marked."""
    max_tokens: Count | None = None
    """Stop before the first document that would exceed this many tokens."""
    shard_tokens: Count = SHARD_TOKENS
    """Tokens after which a new file starts. A stopped command repeats at most one file."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise ValueError(
                "--sources is empty; pass what to tokenize, for example --sources tiny."
            )
        check_options(self, "--")
        if self.chat and self.text_column != PrepareJob.text_column:
            raise ValueError(
                f"--text-column is {self.text_column!r}, and --chat reads conversations, which have columns of their "
                "own; leave out one of them."
            )


def prepare(job: PrepareJob) -> str:
    """Run or resume the job; return a one-line summary.

    Raises ValueError for a tokenizer or source that cannot be loaded, and for a folder that
    holds other tokens or that another process is writing to.
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
    """Tokenize text once, into a folder for --data.sources; resumes where it was stopped."""
    print(prepare(job))
