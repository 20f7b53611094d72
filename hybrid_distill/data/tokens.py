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
"""Entries of tokenizer.json that decide how a text is split."""


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
        begin = index * seq_len
        input_ids = np.full(seq_len, self.pad_id, dtype=np.int64)
        is_start = np.zeros(seq_len, dtype=np.int64)
        mask = np.zeros(seq_len, dtype=bool)
        n_filled = 0
        first_shard = int(np.searchsorted(self._ends, begin, side="right"))
        for number in range(first_shard, len(self.shards)):
            shard = self.shards[number]
            shard_begin = int(self._ends[number]) - len(shard.ids)
            # The part of the shard that goes into the row, and its columns there.
            start = begin + n_filled - shard_begin
            stop = min(start + seq_len - n_filled, len(shard.ids))
            columns = slice(n_filled, n_filled + stop - start)
            input_ids[columns] = shard.ids[start:stop]
            mask[columns] = True if shard.learned is None else shard.learned[start:stop]
            first, last = np.searchsorted(shard.starts, (start, stop))
            is_start[shard.starts[first:last] - start + n_filled] = 1
            n_filled = columns.stop
            if n_filled == seq_len:
                break
        if n_filled < seq_len:
            # Padding is a document of its own: no convolution or attention reaches it from the text.
            is_start[n_filled] = 1
        # A row may begin with a document's first token; the numbers begin at 0 anyway.
        is_start[0] = 0
        return input_ids, is_start.cumsum(), mask


def encode(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, dtype: np.dtype, chat: bool = False
) -> Shard:
    """Tokenize the documents that are not blank, each closed by the tokenizer's EOS token.

    With ``chat``, they are conversations (`encode_conversation`).
    """
    not_blank = [text for text in texts if text.strip()]
    learned = None
    if chat:
        documents = []
        masks = []
        for text in not_blank:
            ids, mask = encode_conversation(text, tokenizer)
            documents.append(ids)
            masks.append(mask)
        learned = np.fromiter(chain.from_iterable(masks), bool)
    else:
        documents = _encode_texts(not_blank, tokenizer)
    lengths = [0, *map(len, documents)]
    starts = np.cumsum(lengths, dtype=np.int64)[:-1]
    return Shard(np.fromiter(chain.from_iterable(documents), dtype), starts, learned)


def _encode_texts(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    if not texts:  # tokenizers refuse an empty batch
        return []
    # Not verbose: it would warn of every text longer than the model's context, which rows cut anyway.
    documents = tokenizer(texts, return_attention_mask=False, verbose=False)["input_ids"]
    eos = eos_id(tokenizer)
    for ids in documents:
        # Some tokenizers close a text themselves.
        if ids[-1:] != [eos]:
            ids.append(eos)
    return documents


def eos_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the id of the token that closes a document. Raises ValueError if the tokenizer has none."""
    eos = tokenizer.eos_token_id
    if not isinstance(eos, int):
        raise ValueError(
            f"the tokenizer's EOS token is {eos!r}; packing needs one to close documents: set eos_token."
        )
    return eos


def id_dtype(tokenizer: PreTrainedTokenizerBase) -> np.dtype:
    """Return the smallest unsigned type that holds every id."""
    if vocabulary_size(tokenizer) <= 2**16:
        return np.dtype("<u2")
    return np.dtype("<u4")


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase, chat: bool = False) -> str:
    """Hash everything that decides how the tokenizer splits a text and closes a document.

    Ignores class, padding and decoding, in which versions of transformers differ for the same tokenizer. With ``chat``,
    also ignores the tokens around a text, which the template sets: a base model and its instruct model may then have
    the same fingerprint.
    """
    # A slow tokenizer has no backend. Its class then stands for how it splits.
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content: list[object]
    if backend is None:
        content = [
            type(tokenizer).__name__,
            sorted(tokenizer.get_vocab().items()),
            tokenizer.special_tokens_map,
        ]
    else:
        parts = json.loads(backend.to_str())
        names = [name for name in _SPLITS_A_TEXT if not (chat and name == "post_processor")]
        content = [parts[name] for name in names]
    if chat:
        return hash_of([content])
    return hash_of([content, tokenizer.eos_token_id])


def check_same_vocabulary(own: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> None:
    """Raise ValueError, naming both, unless every id is the same token in both.

    Otherwise logits and prompts of one have no meaning for the other.
    """
    own_vocabulary = own.get_vocab()
    other_vocabulary = other.get_vocab()
    if own_vocabulary == other_vocabulary:
        return
    different = own_vocabulary.items() ^ other_vocabulary.items()
    token, token_id = min(different, key=lambda entry: (entry[1], entry[0]))
    names = []
    for tokenizer in (own, other):
        vocabulary_hash = hash_of(tokenizer.get_vocab())[:12]
        names.append(f"{tokenizer.name_or_path or 'unnamed'} ({vocabulary_hash})")
    raise ValueError(
        f"mixed tokenizers: {' and '.join(names)} differ from token {token_id} ({token!r}) on; pass a model of the "
        "same family, which has the same vocabulary."
    )


def hash_of(content: object) -> str:
    """Return the SHA-256 of JSON values, in hexadecimal."""
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
