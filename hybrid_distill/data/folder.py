"""Token folders: tokenized text in memory-mapped shards, with a header that records their origin (docs/data.md)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from ..io import Record
from .header import FolderHeader
from .tokens import Shard, Tokens, eos_id, hash_of, tokenizer_fingerprint

SHARD_TOKENS = 2**30


@dataclass
class TokenHeader(FolderHeader):
    """Entries of ``tokens.json``."""

    FORMAT = "hybrid-distill/tokens/2"
    CONTENT = "tokens"
    REMAKE = "prepare the text again with `hybrid-distill prepare-data`"
    FILES = ("ids-", "starts-", "learned-")
    RESULTS = (
        "tokenizer", "vocabulary_size", "eos_id", "dtype", "sources", "tokens", "documents", "shards", "sha256",
        "created",
    )  # fmt: skip

    tokenizer: str
    """Name or path when the folder was made; only the fingerprint is compared."""
    tokenizer_fingerprint: str
    vocabulary_size: int
    eos_id: int
    dtype: str
    """Type of the ids: uint16 or uint32, little-endian."""
    text_column: str
    shard_tokens: int
    max_tokens: int | None
    sources: list[Record]
    """``name``, ``fingerprint``, ``tokens`` and ``documents`` of each source, in the order they were read. One on the
    hub also has a ``pin``, the commit (`Pin`); one that was generated has the ``settings`` of its generation."""
    tokens: int = 0
    documents: int = 0
    shards: list[dict[str, int]] = field(default_factory=list)
    """``tokens`` and ``documents`` of each shard."""
    sha256: str = ""
    """Hash of the ids of all shards, one after the other."""
    created: str = ""
    chat_template: str = ""
    """Hash of the chat template; empty for plain text."""

    @property
    def chat(self) -> bool:
        """True for a folder of conversations."""
        return bool(self.chat_template)

    def identity(self) -> dict[str, object]:
        identity = super().identity()
        fingerprints = []
        for source in self.sources:
            if "settings" in source:
                # By name, so that a command with other settings is told which.
                identity.update(source["settings"])
            else:
                fingerprints.append(source["fingerprint"])
        return {**identity, "content of the sources": fingerprints}

    def shard_paths(self, folder: Path, number: int) -> tuple[Path, ...]:
        """Return the files of a shard, in the order of the fields of `Shard`."""
        names = self.FILES if self.chat else self.FILES[:2]
        return tuple(folder / f"{name}{number:05d}.bin" for name in names)

    def sizes(self, folder: Path) -> dict[Path, int]:
        id_bytes = np.dtype(self.dtype).itemsize
        sizes: dict[Path, int] = {}
        for number, shard in enumerate(self.shards):
            # ids, starts (int64), and learned, for which only conversations have a path.
            shard_sizes = (shard["tokens"] * id_bytes, shard["documents"] * 8, shard["tokens"])
            sizes.update(zip(self.shard_paths(folder, number), shard_sizes))
        return sizes

    def __str__(self) -> str:
        id_bytes = self.tokens * np.dtype(self.dtype).itemsize
        start_bytes = self.documents * 8
        megabytes = (id_bytes + start_bytes) / 1e6
        return (
            f"{self.tokens:,} tokens of {self.documents:,} documents, files: {len(self.shards)} "
            f"({self.dtype}, {megabytes:,.1f} MB)"
        )


def is_token_folder(source: str | Path) -> bool:
    """Check whether ``source`` is a token folder. Raises ValueError for an unfinished one."""
    return TokenHeader.is_in(Path(source).expanduser())


def open_tokens(folder: str | Path, tokenizer: PreTrainedTokenizerBase) -> Tokens:
    """Memory-map the tokens of a folder. Raises ValueError if another tokenizer made them or bytes are missing."""
    folder = Path(folder).expanduser()
    header = TokenHeader.open(folder)
    check_tokenizer({folder: header}, tokenizer)
    shards = tuple(_open_shard(folder, header, number) for number in range(len(header.shards)))
    # The template decides which tokens count in the loss, which the hash of the ids does not show.
    content = [header.sha256]
    if header.chat:
        content.append(header.chat_template)
    return Tokens(shards, eos_id(tokenizer), hash_of(content))


def _open_shard(folder: Path, header: TokenHeader, number: int) -> Shard:
    """Memory-map a shard's files: ids, starts and, for conversations, learned."""
    types = (np.dtype(header.dtype).newbyteorder("<"), np.dtype("<i8"), np.dtype(bool))
    # Plain text has one path fewer than there are types.
    paths = header.shard_paths(folder, number)
    arrays = [np.memmap(path, dtype, "r") for path, dtype in zip(paths, types)]
    return Shard(*arrays)


def check_tokenizer(headers: dict[Path, TokenHeader], tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError, naming the tokenizers, unless ``tokenizer`` made all of these folders."""
    own = tokenizer_fingerprint(tokenizer)
    # Folders of conversations have a fingerprint of another kind.
    accepted = {own, tokenizer_fingerprint(tokenizer, chat=True)}
    if all(header.tokenizer_fingerprint in accepted for header in headers.values()):
        return
    name = tokenizer.name_or_path or "unnamed"
    folders = []
    for folder, header in headers.items():
        folders.append(f"{folder} with {header.tokenizer} ({header.tokenizer_fingerprint[:12]})")
    raise ValueError(
        f"data.sources has tokens made with a tokenizer other than the run's {name} ({own[:12]}): "
        f"{', '.join(folders)}; prepare the text again with `hybrid-distill prepare-data --tokenizer {name}`, or pass "
        "a teacher with that tokenizer."
    )
