"""Batches of text tokenised by several processes, in order and within bounded memory."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from .documents import Place
from .tokens import Shard, encode

_AHEAD = 2
"""Batches per worker that are read before the first of them is taken back."""

Encode = Callable[[Iterable[tuple[list[str], Place]]], Iterator[tuple[Shard, Place]]]
"""Batches, each with its place, to arrays with theirs."""

_job: tuple[PreTrainedTokenizerBase, np.dtype, bool] | None = None


@contextmanager
def encoder(
    tokenizer: PreTrainedTokenizerBase, dtype: np.dtype, workers: int, chat: bool = False
) -> Iterator[Encode]:
    """What turns batches of text into arrays, in their order: the same for any number of workers.

    One worker is this process, in which fast tokenizers use threads. Raises OSError when a worker dies.
    Enter it before sources are opened: they may start threads, and it forks.
    """
    if workers == 1:
        yield lambda batches: ((encode(texts, tokenizer, dtype, chat), place) for texts, place in batches)
        return
    # A fork copies no tokenizer and imports nothing again; every source is opened by this process alone.
    method = "fork" if "fork" in multiprocessing.get_all_start_methods() else None
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context(method), _begin, (tokenizer, dtype, chat))
    try:
        pool.submit(os.getpid).result()
        yield partial(_in_order, pool, _AHEAD * workers)
    except BrokenProcessPool as error:
        raise OSError(
            f"one of {workers} worker processes died, perhaps for want of memory; run again with fewer --workers."
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _in_order(
    pool: ProcessPoolExecutor, ahead: int, batches: Iterable[tuple[list[str], Place]]
) -> Iterator[tuple[Shard, Place]]:
    waiting: deque[tuple[Future[Shard], Place]] = deque()
    for texts, place in batches:
        waiting.append((pool.submit(_encode, texts), place))
        if len(waiting) == ahead:
            future, place = waiting.popleft()
            yield future.result(), place
    for future, place in waiting:
        yield future.result(), place


def _begin(tokenizer: PreTrainedTokenizerBase, dtype: np.dtype, chat: bool) -> None:
    global _job
    _job = tokenizer, dtype, chat
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent: Any = multiprocessing.parent_process()
    parent.join()
    os._exit(1)


def _encode(texts: list[str]) -> Shard:
    assert _job is not None
    return encode(texts, *_job)
