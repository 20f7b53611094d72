"""Training data of a run: checked before the run starts, opened when it is needed."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from transformers import PreTrainedTokenizerBase

from ..limits import CountOrZero, Limits, Positive, check_options
from .chat import check_template
from .documents import HUB, is_embedded, no_conversations, open_hub, source_files
from .folder import HEADER, TokenHeader, cached_tokens, check_tokenizer, is_token_folder, open_tokens
from .rows import PackedRows
from .streaming import StreamingRows

TokensOfARow = Annotated[int, Limits(2, whole=True)]


@dataclass(frozen=True)
class DataConfig:
    """Training data. Raises ValueError for a field out of range."""

    sources: tuple[str, ...] = ("tiny",)
    """``tiny`` (the embedded corpus); folders written by ``hybrid-distill prepare-data`` or by ``save_to_disk`` of
    `datasets`; files or folders of .txt, .jsonl, .jsonl.gz or .parquet; or ``hf:repo:config:split``, which is streamed.
    """
    weights: tuple[Positive, ...] = ()
    """Share of each source in the tokens. Without weights, local sources are read whole, once an epoch, and
    streamed ones in equal parts."""
    text_column: str = "text"
    """Column of the records that holds their text."""
    chat: bool = False
    """Sources hold conversations, in a column ``messages`` or in ``prompt`` and ``completion``. The chat template
    renders them, and the loss is on the assistant's tokens."""
    seq_len: TokensOfARow = 256
    """Tokens of a row."""
    seed: CountOrZero = 0
    """Seed of the order of rows."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise ValueError("data.sources is empty; pass a source, for example --data.sources tiny.")
        if self.weights and len(self.weights) != len(self.sources):
            raise ValueError(f"data.weights is {self.weights} for {len(self.sources)} sources; pass one for each.")
        check_options(self, "data.")


def check_sources(config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError for what would stop `open_rows`, as far as names and headers tell, without reading text.

    Refused are missing sources, hub and local sources together, token folders of another tokenizer, text where
    conversations are expected or the other way round, and conversations without a chat template.
    """
    streamed = [source for source in config.sources if source.startswith(HUB)]
    if streamed and len(streamed) < len(config.sources):
        raise ValueError(
            f"data.sources mixes hub and local data: {', '.join(config.sources)}; make the hub's part local with "
            "`hybrid-distill prepare-data --sources hf:...` and pass its folder."
        )
    if streamed and config.chat:
        raise ValueError(
            f"conversations cannot be streamed ({streamed[0]}); make them local with "
            "`hybrid-distill prepare-data --chat --sources hf:...` and pass its folder."
        )
    embedded = [source for source in config.sources if is_embedded(source)]
    local = [source for source in config.sources if source not in (*streamed, *embedded)]
    folders = [Path(source).expanduser() for source in local if is_token_folder(source)]
    headers = {folder: TokenHeader.load(folder / HEADER) for folder in folders}
    check_tokenizer(headers, tokenizer)
    files = [file for source in local if not is_token_folder(source) for file in source_files(source)]
    for folder, header in headers.items():
        if header.chat != config.chat:
            held, flag = ("conversations", "--data.chat") if header.chat else ("plain text", "--data.no-chat")
            raise ValueError(f"the token folder {folder} holds {held} and data.chat is {config.chat}; pass {flag}.")
    if config.chat:
        if plain := [*embedded, *(str(file) for file in files if file.suffix == ".txt")]:
            raise no_conversations(plain[0])
        if files:
            check_template(tokenizer)


def open_rows(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    cache_dir: str | Path | None = None,
    rank: int = 0,
    world: int = 1,
) -> PackedRows | StreamingRows:
    """Open the rows of the configured sources. Every process calls it; the first one tokenizes, the others wait.

    ``cache_dir`` defaults to ``$HYBRID_DISTILL_CACHE``, then ``~/.cache/hybrid-distill``.
    Raises ValueError for a source that is missing, empty or without its text column, and for a token folder of
    another tokenizer.
    """
    check_sources(config, tokenizer)
    if config.sources[0].startswith(HUB):
        return StreamingRows(
            [open_hub(source) for source in config.sources],
            tokenizer,
            seq_len=config.seq_len,
            text_column=config.text_column,
            weights=config.weights,
            names=config.sources,
            rank=rank,
            world=world,
        )
    root = Path(cache_dir or os.environ.get("HYBRID_DISTILL_CACHE", Path.home() / ".cache" / "hybrid-distill"))
    tokens = [
        open_tokens(source, tokenizer)
        if is_token_folder(source)
        else cached_tokens(source, tokenizer, root, None if config.chat else config.text_column)
        for source in config.sources
    ]
    return PackedRows(tokens, seq_len=config.seq_len, seed=config.seed, weights=config.weights)
