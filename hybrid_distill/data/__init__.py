"""Rows of tokens from text: packed, shuffled by a seed, resumable from one integer.

A source (`documents`, `readers`, `hub`) is tokenized once (`tokens`) into memory-mapped shards (`writer`, `folder`), in
a folder of the user's or in the `token_cache`. `PackedRows` splits them into rows of ``seq_len`` tokens, so that any
process can read any row of any step. Several documents share a row; ``seq_idx`` numbers them, and the rest of a
document that continues in the next row counts as a separate document there. `chat` renders conversations and marks the
assistant's tokens. `caching` stores a teacher's logits, `generate` its text. `DataConfig` names the sources,
`open_rows` opens them. docs/data.md describes the file formats.
"""

from .caching import write_logits
from .config import (
    DataConfig,
    check_launch,
    check_sources,
    open_rows,
    preparations,
)
from .documents import read_documents, read_held_out
from .folder import TokenHeader, open_tokens
from .hub import Pin, Pins, pinned, read_pins, write_pins
from .logits import CachedLogitsDataset, LogitFolder, LogitHeader, open_logits
from .rows import Batch, PackedRows, Rows, TaughtBatch, cu_seqlens, on_device, pick_rows, read_ahead
from .token_cache import cache_root
from .tokens import Tokens, check_same_vocabulary, tokenizer_fingerprint
from .writer import write_tokens
