"""Training data of a run: options, checks before the run starts, and opening of the rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

from transformers import PreTrainedTokenizerBase

from ..distributed import agree_on, is_launched_with_others, on_main_process
from ..validation import Count, Limits, Positive, Seed, check_options
from .chat import check_template
from .documents import is_embedded, read_documents
from .files import source_files
from .folder import TokenHeader, check_tokenizer, is_token_folder, open_tokens
from .hub import HUB, Pins, pinned
from .readers import no_conversations
from .rows import PackedRows
from .token_cache import CachedSource, cache_root, cached_source

LARGEST_IN_A_LAUNCH = 100_000_000
"""Largest number of tokens of a source on the hub that a launch of several processes tokenizes: minutes, not hours."""
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
    seed: Seed = 0
    """Seed for the order of rows."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise ValueError(
                "data.sources is empty; pass a source, for example --data.sources tiny."
            )
        if self.weights and len(self.weights) != len(self.sources):
            raise ValueError(
                f"data.weights is {self.weights} for {len(self.sources)} sources; pass one for each."
            )
        check_options(self, "data.")


def check_sources(config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError for sources that `open_rows` would reject, by names, headers and the first text of each.

    Rejects missing sources, hub sources without a limit, token folders of another tokenizer, text where conversations
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
        elif is_embedded(source):
            if config.chat:
                raise no_conversations(source)
        else:
            files = source_files(source)
            if config.chat and any(file.suffix == ".txt" for file in files):
                raise no_conversations(source)
            column = None if config.chat else config.text_column
            if next(read_documents(source, column), None) is None:
                raise ValueError(f"{source} holds no text; pass a file or folder that does.")
    check_tokenizer(headers, tokenizer)
    if not config.chat:
        return
    for folder, header in headers.items():
        if not header.chat:
            raise ValueError(
                f"the token folder {folder} holds plain text and data.chat is on; pass --data.no-chat."
            )
    # Token folders were rendered when they were made.
    if len(headers) < len(set(config.sources)):
        check_template(tokenizer)


def open_rows(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    cache_dir: str | Path | None = None,
    pins: Pins = MappingProxyType({}),
) -> PackedRows:
    """Open the rows of the configured sources. Every process calls this; the main process tokenizes, the others wait.

    ``cache_dir`` defaults as in `cache_root`. ``pins`` are the commits of sources on the hub; the hub is queried for
    any that are missing. Raises ValueError for a source that is missing, empty or without its text column, for a token
    folder of another tokenizer, and as `check_launch` does.
    """
    # First of all: a missing source must not come up after hours of tokenizing another one.
    check_sources(config, tokenizer)
    cached = _cached_sources(config, tokenizer, cache_dir, pins)
    _check_small(cached.values())
    if is_launched_with_others():
        on_main_process(lambda: _write(cached.values(), tokenizer))
    # Again, on machines that do not share the main process's cache: there a lock lets one process tokenize.
    _write(cached.values(), tokenizer)
    tokens = []
    for source in config.sources:
        folder = cached[source].folder if source in cached else Path(source)
        tokens.append(open_tokens(folder, tokenizer))
    return PackedRows(tokens, seq_len=config.seq_len, seed=config.seed, weights=config.weights)


def preparations(config: DataConfig, tokenizer: str) -> dict[str, str]:
    """Map each source that is too large for a launch (`check_launch`) to the command that tokenizes it, but for --out.

    Does not look into the cache, which may have their tokens already.
    """
    if config.hub_tokens is None or config.hub_tokens <= LARGEST_IN_A_LAUNCH:
        return {}
    options = f"--tokenizer {tokenizer} --max-tokens {config.hub_tokens}"
    if config.chat:
        options += " --chat"
    elif config.text_column != DataConfig.text_column:
        options += f" --text-column {config.text_column}"
    commands = {}
    for source in config.sources:
        if source.startswith(HUB):
            commands[source] = f"hybrid-distill prepare-data {options} --sources {source}"
    return commands


def check_launch(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    pins: Pins = MappingProxyType({}),
) -> None:
    """Raise ValueError, in a launch, for sources on the hub that would keep its processes waiting for hours.

    These are sources of more than `LARGEST_IN_A_LAUNCH` tokens that are not in the cache yet.
    """
    if is_launched_with_others():
        _check_small(_cached_sources(config, tokenizer, None, pins).values())


def _cached_sources(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, cache_dir: str | Path | None, pins: Pins
) -> dict[str, CachedSource]:
    """Map each source that is not a token folder to its place in the cache."""
    root = cache_root(cache_dir)
    column = None if config.chat else config.text_column
    sources = [source for source in config.sources if not is_token_folder(source)]
    pins = pinned(sources, pins, root)
    cached = {}
    for source in sources:
        cached[source] = cached_source(source, tokenizer, root, column, config.hub_tokens, pins)
    return cached


def _check_small(cached: Iterable[CachedSource]) -> None:
    """Raise ValueError, in a launch, for a large source that is not in the cache."""
    if not is_launched_with_others():
        return
    large = [each for each in cached if each.limit is not None and each.limit > LARGEST_IN_A_LAUNCH]
    if not large:
        return
    # The main process decides: it may be ahead of the others, or the only one that sees the cache.
    missing = agree_on(lambda: [each.source for each in large if not each.is_complete])
    if not missing:
        return
    limit = large[0].limit
    raise ValueError(
        f"{missing[0]} is to be read up to {limit:,} tokens and is not tokenized yet; a launch of several processes "
        f"tokenizes at most {LARGEST_IN_A_LAUNCH:,} of a source, as all would wait for hours. Run `hybrid-distill "
        f"prepare-data --tokenizer TEACHER --sources {missing[0]} --max-tokens {limit} --out FOLDER` first, on a "
        "machine without GPUs, and pass --data.sources FOLDER."
    )


def _write(cached: Iterable[CachedSource], tokenizer: PreTrainedTokenizerBase) -> None:
    for each in cached:
        each.write(tokenizer)
