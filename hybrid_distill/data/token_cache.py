"""Cache of tokens: each source that is not a token folder becomes one, on first use."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock
from transformers import PreTrainedTokenizerBase

from .chat import template_hash
from .documents import source_fingerprint
from .folder import TokenHeader
from .hub import HUB, Pin, Pins
from .tokens import hash_of, tokenizer_fingerprint
from .writer import write_tokens

CACHE_SHARD_TOKENS = 2**24
"""Smaller than a prepared folder's: a stopped run resumes after the last complete shard."""


def cache_root(cache_dir: str | Path | None = None) -> Path:
    """Return the cache: ``cache_dir``, ``$HYBRID_DISTILL_CACHE``, or ``~/.cache/hybrid-distill``."""
    if cache_dir:
        return Path(cache_dir)
    if "HYBRID_DISTILL_CACHE" in os.environ:
        return Path(os.environ["HYBRID_DISTILL_CACHE"])
    return Path.home() / ".cache" / "hybrid-distill"


@dataclass(frozen=True)
class CachedSource:
    """A source and its place in the cache of tokens."""

    source: str
    text_column: str | None
    limit: int | None
    """Largest number of tokens to read from a source on the hub; None for a local source."""
    pin: Pin | None
    folder: Path

    @property
    def is_complete(self) -> bool:
        """True if the tokens are complete."""
        return TokenHeader.file(self.folder).exists()

    def write(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Tokenize the source, unless that is done. Several processes may call this: one writes, the others wait."""
        if self.is_complete:
            return
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        pins = {} if self.pin is None else {self.source: self.pin}
        with FileLock(f"{self.folder}.lock"):
            try:
                write_tokens(
                    self.folder,
                    [self.source],
                    tokenizer,
                    text_column=self.text_column,
                    max_tokens=self.limit,
                    shard_tokens=CACHE_SHARD_TOKENS,
                    pins=pins,
                )
            except ValueError:
                # A local file must change to become readable, and then has another folder. On the hub, what was read
                # before the network failed is kept.
                is_on_hub = self.limit is not None
                if not is_on_hub or not TokenHeader.file(self.folder, partial=True).exists():
                    shutil.rmtree(self.folder, ignore_errors=True)
                raise


def cached_source(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    root: Path,
    text_column: str | None,
    hub_tokens: int | None,
    pins: Pins,
) -> CachedSource:
    """Find the place of a source's tokens in the cache. ``pins`` has the commit of every source on the hub."""
    limit = hub_tokens if source.startswith(HUB) else None
    pin = pins.get(source)
    rendering = template_hash(tokenizer) if text_column is None else text_column
    # Everything that can change a token is in the folder's name, so nothing in the cache is ever out of date.
    key: list[object] = [
        TokenHeader.FORMAT,
        source_fingerprint(source, pin),
        tokenizer_fingerprint(tokenizer),
        rendering,
    ]
    if limit:
        key.append(limit)
    folder = root / "tokens" / hash_of(key)[:32]
    return CachedSource(source, text_column, limit, pin, folder)
