"""`hybrid-distill generate-data`: text from the teacher itself, as a token folder."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from ..data import PackedRows, open_tokens, write_logits
from ..data.config import TokensOfARow
from ..data.generate import SHARD_TOKENS, Sampling, generate_tokens
from ..limits import Count, check_options
from ..locking import locked
from ..teacher import load_on_own_device

UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}


@dataclass(frozen=True)
class GenerateJob:
    """Let a teacher write training text. Raises ValueError for an option out of range."""

    model: str
    """The teacher: a local folder, a hub id, or ``tiny`` for the embedded one."""
    tokens: str
    """Tokens to write, prompts included: ``20000``, ``20K``, ``2M``."""
    out: Path
    """Token folder to write. Left alone when it holds these tokens already, resumed when it is not finished."""
    form: Literal["auto", "text", "chat"] = "auto"
    """Documents, or conversations with the loss on the answers; ``auto``: conversations if the tokenizer has a chat
    template. Train on conversations with --data.chat, or mix them into text without it."""
    sampling: Annotated[Sampling, tyro.conf.arg(name="")] = field(default_factory=Sampling)
    top_k_logits: Count | None = None
    """Store this many of the teacher's likeliest next tokens too, in OUT/logits, as cache-logits does."""
    seq_len: TokensOfARow = 256
    """Tokens of a row of those logits; train with the same --data.seq-len."""
    shard_tokens: Count = SHARD_TOKENS
    """Tokens after which a new file begins. A stopped command repeats at most one file."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type of the teacher's weights; by default float32, on a GPU bfloat16."""

    def __post_init__(self) -> None:
        check_options(self, "--")
        check_options(self.sampling, "--")
        _ = self.max_tokens

    @property
    def max_tokens(self) -> int:
        """Value of ``tokens``. Raises ValueError for something else."""
        if not (found := re.fullmatch(r"(\d+\.?\d*)([KMB]?)", self.tokens.upper())):
            raise ValueError(f"--tokens is {self.tokens!r}; pass a number such as 20000, 20K or 2M.")
        return max(1, round(float(found[1]) * UNITS[found[2]]))


def generate(job: GenerateJob) -> str:
    """Do the job, or the rest of it; return a summary."""
    model, tokenizer = load_on_own_device(job.model, dtype=job.dtype, flag="--model")
    chat = job.form == "chat" or (job.form == "auto" and bool(tokenizer.chat_template))
    began = time.monotonic()
    with locked(job.out):
        header = generate_tokens(
            job.out, model, tokenizer, job.sampling, max_tokens=job.max_tokens, chat=chat, name=job.model,
            shard_tokens=job.shard_tokens,
        )  # fmt: skip
    lines = [f"{job.out}: {header}, {time.monotonic() - began:,.1f} s"]
    if job.top_k_logits is not None:
        rows = PackedRows([open_tokens(job.out, tokenizer)], seq_len=job.seq_len)
        options = {"name": job.model, "top_k": job.top_k_logits, "places": rows.n_rows, "vocab_size": len(tokenizer)}
        lines.append(write_logits(job.out / "logits", model, tokenizer, rows, **options))
    return "\n".join(lines)


def command(job: tyro.conf.OmitArgPrefixes[GenerateJob]) -> None:
    """Let a teacher write its own training text, a folder that --data.sources takes; resumes where it was stopped."""
    print(generate(job))
