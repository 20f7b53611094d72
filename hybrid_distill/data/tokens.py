"""Tokenized texts: each document ends with the end-of-sequence token, and rows can be read from any position.

L: tokens of a row.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from ..vocabulary import vocabulary_size
from .chat import encode_conversation

_SPLITS_A_TEXT = ("added_tokens", "model", "normalizer", "post_processor", "pre_tokenizer")


class Shard(NamedTuple):
    """Complete documents, back to back."""

    ids: np.ndarray
    """[tokens] unsigned integers."""
    starts: np.ndarray
    """[documents] int64: position of each document's first token; 0 first."""
    learned: np.ndarray | None = None
    """[tokens] bool, for conversations: True if the next token is the assistant's. None if every token counts."""


@dataclass(frozen=True)
class Tokens:
    """One tokenized source. Its shards form one sequence without gaps: rows can cross shard boundaries."""

    shards: tuple[Shard, ...]
    pad_id: int
    fingerprint: str
    """Hash of the tokens."""

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum([len(shard.ids) for shard in self.shards])

    def __len__(self) -> int:
        """Count the tokens of all shards."""
        return int(self._ends[-1])

    def row(self, index: int, seq_len: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (input_ids, seq_idx, mask), each [L], of the row that begins at token ``index * seq_len``."""
        begin, filled = index * seq_len, 0
        input_ids = np.full(seq_len, self.pad_id, dtype=np.int64)
        boundary = np.zeros(seq_len, dtype=np.int64)
        mask = np.zeros(seq_len, dtype=bool)
        for number in range(int(np.searchsorted(self._ends, begin, side="right")), len(self.shards)):
            shard = self.shards[number]
            offset = begin + filled - (int(self._ends[number]) - len(shard.ids))
            piece = shard.ids[offset : offset + seq_len - filled]
            input_ids[filled : filled + len(piece)] = piece
            mask[filled : filled + len(piece)] = (
                True if shard.learned is None else shard.learned[offset : offset + len(piece)]
            )
            first, last = np.searchsorted(shard.starts, (offset, offset + len(piece)))
            boundary[shard.starts[first:last] - offset + filled] = 1
            filled += len(piece)
            if filled == seq_len:
                break
        boundary[filled:][:1] = 1
        boundary[0] = 0
        return input_ids, boundary.cumsum(), mask


def encode(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, dtype: np.dtype, chat: bool = False) -> Shard:
    """Tokenize the documents that are not blank, each closed by the tokenizer's EOS token.

    With ``chat``, they are conversations (`encode_conversation`).
    """
    written, learned = [text for text in texts if text.strip()], None
    if chat:
        both = [encode_conversation(text, tokenizer) for text in written]
        documents = [ids for ids, _ in both]
        learned = np.fromiter(chain.from_iterable(own for _, own in both), bool)
    else:
        eos = eos_id(tokenizer)
        found = tokenizer(written, return_attention_mask=False, verbose=False)["input_ids"] if written else []
        documents = [ids if ids[-1:] == [eos] else [*ids, eos] for ids in found]
    starts = np.cumsum([0, *map(len, documents)], dtype=np.int64)[:-1]
    return Shard(np.fromiter(chain.from_iterable(documents), dtype), starts, learned)


def eos_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the id of the token that closes a document. Raises ValueError if the tokenizer has none."""
    eos = tokenizer.eos_token_id
    if not isinstance(eos, int):
        raise ValueError(f"the tokenizer's EOS token is {eos!r}; packing needs one to close documents: set eos_token.")
    return eos


def id_dtype(tokenizer: PreTrainedTokenizerBase) -> np.dtype:
    """Return the smallest unsigned type that holds every id."""
    return np.dtype("<u2" if vocabulary_size(tokenizer) <= 2**16 else "<u4")


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase, chat: bool = False) -> str:
    """Hash everything that decides how the tokenizer splits a text and closes a document.

    Ignores class, padding and decoding, in which versions of transformers differ for the same tokenizer. With ``chat``,
    also ignores the tokens around a text, which the template sets: a base model and its instruct model may then have
    the same fingerprint.
    """
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is not None:
        parts = json.loads(backend.to_str())
        content = [parts[name] for name in _SPLITS_A_TEXT if not (chat and name == "post_processor")]
    else:
        content = [type(tokenizer).__name__, sorted(tokenizer.get_vocab().items()), tokenizer.special_tokens_map]
    return hash_of([content] if chat else [content, tokenizer.eos_token_id])


def check_same_vocabulary(own: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> None:
    """Raise ValueError, naming both, unless every id is the same token in both: otherwise logits and prompts of one
    have no meaning for the other."""
    ours, theirs = own.get_vocab(), other.get_vocab()
    if ours != theirs:
        odd = min(ours.items() ^ theirs.items(), key=lambda entry: (entry[1], entry[0]))
        names = (f"{t.name_or_path or 'unnamed'} ({hash_of(t.get_vocab())[:12]})" for t in (own, other))
        raise ValueError(
            f"mixed tokenizers: {' and '.join(names)} differ from token {odd[1]} ({odd[0]!r}) on; pass a model of the "
            "same family, which has the same vocabulary."
        )


def hash_of(content: object) -> str:
    """Return the SHA-256 of JSON values, in hexadecimal."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()
