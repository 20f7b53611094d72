"""Text turned into rows of tokens: packed, shuffled by a seed, and resumable from one integer.

A source (`documents`) is tokenised once into memory-mapped shards (`tokens`, `folder`), by one or more processes
(`workers`). `PackedRows` cuts them into rows of ``seq_len`` tokens, so that any process can read any row of any step.
Several documents share a row; ``seq_idx`` numbers them, and what falls into the next row begins there as a document of
its own. Conversations (`chat`) are rows too, masked but for what the assistant says. `StreamingRows` packs data that
stays on the hub, one row after the other. `DataConfig` names the sources, `open_rows` opens them. docs/data.md has the
format of the files.
"""

from .config import DataConfig, check_sources, open_rows
from .documents import DataUnavailable, read_documents, read_held_out, source_files
from .folder import TokenHeader, open_tokens, write_tokens
from .logits import LogitFolder, LogitHeader, TaughtRows, open_logits
from .rows import Batch, PackedRows, Rows, TaughtBatch, on_device, pick_rows
from .streaming import StreamingRows
from .tokens import Tokens, check_same_vocabulary, tokenizer_fingerprint, tokens_of

__all__ = [
    "Batch",
    "DataConfig",
    "DataUnavailable",
    "LogitFolder",
    "LogitHeader",
    "PackedRows",
    "Rows",
    "StreamingRows",
    "TaughtBatch",
    "TaughtRows",
    "TokenHeader",
    "Tokens",
    "check_same_vocabulary",
    "check_sources",
    "on_device",
    "open_logits",
    "open_rows",
    "open_tokens",
    "pick_rows",
    "read_documents",
    "read_held_out",
    "source_files",
    "tokenizer_fingerprint",
    "tokens_of",
    "write_tokens",
]
