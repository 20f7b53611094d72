"""What a run trains on, checked before it starts, and opened when it is needed."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from ..limits import POSITIVE, Limits, check_fields
from .chat import check_template
from .documents import HUB, no_conversations, source_files
from .folder import HEADER, TokenHeader, cached_tokens, check_tokenizer, is_token_folder, open_tokens
from .rows import PackedRows
from .streaming import StreamingRows

TOKENS_OF_A_ROW = Limits(2, whole=True)


@dataclass(frozen=True)
class DataConfig:
    """What to train on. Raises ValueError for a field out of range."""

    sources: tuple[str, ...] = ("tiny",)
    """``tiny`` (the embedded corpus); folders written by ``hybrid-distill prepare-data`` or by ``save_to_disk`` of
    `datasets`; files or folders of .txt, .jsonl, .jsonl.gz or .parquet; or ``hf:repo:config:split``, which is streamed.
    """
    weights: tuple[float, ...] = ()
    """Share of each source in the tokens. Without weights, local sources are read whole, once an epoch, and
    streamed ones in equal parts."""
    text_column: str = "text"
    """Where records hold their text."""
    chat: bool = False
    """Sources hold conversations, in a column ``messages`` or in ``prompt`` and ``completion``: they are put into the
    chat template, and the loss is on what the assistant says."""
    seq_len: int = 256
    """Tokens of a row."""
    seed: int = 0
    """Of the order of rows."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise ValueError("data.sources is empty; name a source, for example --data.sources tiny.")
        if self.weights and len(self.weights) != len(self.sources):
            raise ValueError(f"data.weights is {self.weights} for {len(self.sources)} sources; give each one above 0.")
        check_fields(self, "data.", weights=POSITIVE, seq_len=TOKENS_OF_A_ROW)


def check_sources(config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ValueError for what would stop `open_rows`, as far as names and headers tell; reads no text.

    A source that is missing, hub and local sources together, a token folder of another tokenizer, text where
    conversations are asked for or the other way round, conversations without a chat template.
    """
    streamed = [source.startswith(HUB) for source in config.sources]
    if any(streamed) and not all(streamed):
        raise ValueError(
            f"data.sources mixes hub and local data: {', '.join(config.sources)}; make the hub's part local with "
            "`hybrid-distill prepare-data --sources hf:...` and name its folder."
        )
    local = [source for source in config.sources if not source.startswith(HUB) and source.split(":")[0] != "tiny"]
    folders = [Path(source).expanduser() for source in local if is_token_folder(source)]
    headers = {folder: TokenHeader.load(folder / HEADER) for folder in folders}
    check_tokenizer(headers, tokenizer)
    files = [file for source in local if not is_token_folder(source) for file in source_files(source)]
    for folder, header in headers.items():
        if header.chat != config.chat:
            held, flag = ("conversations", "--data.chat") if header.chat else ("plain text", "--data.no-chat")
            raise ValueError(f"the token folder {folder} holds {held} and data.chat is {config.chat}; use {flag}.")
    if config.chat:
        _check_conversations(config, tokenizer, files)


def _check_conversations(config: DataConfig, tokenizer: PreTrainedTokenizerBase, files: list[Path]) -> None:
    plain = [source for source in config.sources if source.split(":")[0] == "tiny"]
    plain += [str(file) for file in files if file.suffix == ".txt"]
    if plain:
        raise no_conversations(plain[0])
    if config.sources[0].startswith(HUB):
        raise ValueError(
            f"conversations cannot be streamed ({config.sources[0]}); make them local with "
            "`hybrid-distill prepare-data --chat --sources hf:...` and name its folder."
        )
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
    """Rows of the configured sources. Every process calls it; the first to come tokenises, the others wait.

    ``cache_dir`` defaults to ``$HYBRID_DISTILL_CACHE``, then ``~/.cache/hybrid-distill``.
    Raises ValueError for a source that is missing, empty or without its text column, and for a token folder of
    another tokenizer.
    """
    check_sources(config, tokenizer)
    if config.sources[0].startswith(HUB):
        return StreamingRows.from_hub(
            config.sources,
            tokenizer,
            seq_len=config.seq_len,
            text_column=config.text_column,
            weights=config.weights,
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
