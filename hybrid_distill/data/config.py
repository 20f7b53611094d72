"""Training data of a run: checked before the run starts, opened when needed."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from transformers import PreTrainedTokenizerBase

from ..limits import Count, CountOrZero, Limits, Positive, check_options
from .chat import check_template
from .documents import HUB, is_embedded, no_conversations
from .files import source_files
from .folder import TokenHeader, cached_tokens, check_tokenizer, is_token_folder, open_tokens
from .rows import PackedRows

TokensOfARow = Annotated[int, Limits(2, whole=True)]


@dataclass(frozen=True)
class DataConfig:
    """Training data. Raises ValueError for a field out of range."""

    sources: tuple[str, ...] = ("tiny",)
    """Data sources: ``tiny`` (the embedded corpus), folders written by ``hybrid-distill prepare-data`` or
    ``generate-data``, files or folders of .txt, .jsonl, .jsonl.gz or .parquet, or ``hf:repo:config:split`` on the hub.
    """
    weights: tuple[Positive, ...] = ()
    """Share of the tokens from each source. Without weights, an epoch reads each source once in full."""
    hub_tokens: Count | None = None
    """Tokens to read from each source on the hub, once, into the cache."""
    text_column: str = "text"
    """Column that holds the text of a record."""
    chat: bool = False
    """Read sources as conversations, from a column ``messages`` or from ``prompt`` and ``completion``. The chat
    template renders them, and the loss is on the assistant's tokens. Without this flag, token folders of conversations
    may be mixed with plain text; the loss on their rows is on the assistant's tokens too."""
    seq_len: TokensOfARow = 256
    """Tokens per row."""
    seed: CountOrZero = 0
    """Seed for the order of rows."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise ValueError("data.sources is empty; pass a source, for example --data.sources tiny.")
        if self.weights and len(self.weights) != len(self.sources):
            raise ValueError(f"data.weights is {self.weights} for {len(self.sources)} sources; pass one for each.")
        check_options(self, "data.")


def check_sources(config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError for sources that would stop `open_rows`, judging by names and headers, without reading text.

    Refuses missing sources, hub sources without a limit, token folders of another tokenizer, text where conversations
    are expected, and conversations without a chat template.
    """
    headers: dict[Path, TokenHeader] = {}
    for source in config.sources:
        if source.startswith(HUB):
            if config.hub_tokens is None:
                raise ValueError(
                    f"data.sources names {source}, of unknown length; pass --data.hub-tokens N, the tokens to read, "
                    f"or the folder that `hybrid-distill prepare-data --sources {source}` makes."
                )
        elif is_token_folder(source):
            folder = Path(source).expanduser()
            headers[folder] = TokenHeader.open(folder)
        else:
            files = [] if is_embedded(source) else source_files(source)
            if config.chat and (is_embedded(source) or any(file.suffix == ".txt" for file in files)):
                raise no_conversations(source)
    if headers:
        check_tokenizer(headers, tokenizer)
    if config.chat and (text := [folder for folder, header in headers.items() if not header.chat]):
        raise ValueError(f"the token folder {text[0]} holds plain text and data.chat is on; pass --data.no-chat.")
    if config.chat and not all(map(is_token_folder, config.sources)):
        check_template(tokenizer)


def open_rows(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, *, cache_dir: str | Path | None = None
) -> PackedRows:
    """Open the rows of the configured sources. Every process calls this; the first tokenizes, the others wait.

    ``cache_dir`` defaults to ``$HYBRID_DISTILL_CACHE``, then ``~/.cache/hybrid-distill``.
    Raises ValueError for a source that is missing, empty or without its text column, and for a token folder of
    another tokenizer.
    """
    check_sources(config, tokenizer)
    root = Path(cache_dir or os.environ.get("HYBRID_DISTILL_CACHE", Path.home() / ".cache" / "hybrid-distill"))
    column = None if config.chat else config.text_column
    tokens = [
        open_tokens(source, tokenizer)
        if is_token_folder(source)
        else cached_tokens(source, tokenizer, root, column, config.hub_tokens)
        for source in config.sources
    ]
    return PackedRows(tokens, seq_len=config.seq_len, seed=config.seed, weights=config.weights)
