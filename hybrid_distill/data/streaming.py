"""Rows of data that stays on the hub, packed as they arrive.

Shapes: B rows, L tokens of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
from transformers import PreTrainedTokenizerBase

from .chat import Record
from .documents import records_of, text_of
from .rows import Batch, State, batch_of, rows_of_each
from .tokens import encode_documents, hash_of, tokenizer_fingerprint

if TYPE_CHECKING:
    from datasets import IterableDataset

_DOCUMENTS_AT_ONCE = 32


class StreamingRows:
    """Rows of streamed data sets; each process reads its own part.

    Rows come in order, so ``batch`` must be asked for one step after the other; `state_dict` holds the place
    in each source and the tokens that are left over from its last documents.
    """

    def __init__(
        self,
        datasets: Sequence[IterableDataset],
        tokenizer: PreTrainedTokenizerBase,
        *,
        seq_len: int,
        text_column: str = "text",
        weights: Sequence[float] = (),
        names: Sequence[str] = (),
        rank: int = 0,
        world: int = 1,
    ) -> None:
        from datasets.distributed import split_dataset_by_node

        names = names or [f"source {number}" for number in range(len(datasets))]
        parts = (split_dataset_by_node(d, rank=rank, world_size=world) for d in datasets)
        self._packers = [_Packer(part, tokenizer, seq_len, text_column, name) for part, name in zip(parts, names)]
        self._weights = np.asarray(weights or [1.0] * len(self._packers)) / (sum(weights) or len(self._packers))
        self._counts = np.zeros(len(self._packers), dtype=np.int64)
        self._step, self._place = 0, (rank, world)
        self.fingerprint = hash_of(
            ["streaming", list(names), self._weights.tolist(), seq_len, tokenizer_fingerprint(tokenizer)]
        )

    def batch(self, step: int, batch_size: int, rank: int = 0, world: int = 1) -> Batch:
        """Return the next rows of this process. Raises ValueError for another step or another process."""
        if (rank, world) != self._place or step != self._step:
            raise ValueError(
                f"streamed rows are at step {self._step} of process {self._place[0]} of {self._place[1]} and "
                f"cannot jump to step {step} of process {rank} of {world}; resume with as many processes."
            )
        self._step += 1
        return batch_of(self._next_row() for _ in range(rows_of_each(batch_size, world)))

    def _next_row(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return a row of the source that is furthest behind its share."""
        number = int(np.argmax(self._weights * (self._counts.sum() + 1) - self._counts))
        self._counts[number] += 1
        return self._packers[number].next_row()

    def state_dict(self) -> State:
        """Return where this process stands, as JSON."""
        packers = [packer.state_dict() for packer in self._packers]
        return {"step": self._step, "counts": self._counts.tolist(), "place": list(self._place), "packers": packers}

    def load_state_dict(self, state: State) -> None:
        """Return to where `state_dict` was taken. Raises ValueError for the state of another process."""
        if tuple(state["place"]) != self._place:
            raise ValueError(
                f"the state belongs to process {state['place'][0]} of {state['place'][1]}, this is process "
                f"{self._place[0]} of {self._place[1]}; resume with as many processes as before."
            )
        self._step, self._counts = state["step"], np.asarray(state["counts"], dtype=np.int64)
        for packer, packed in zip(self._packers, state["packers"]):
            packer.load_state_dict(packed)


class _Packer:
    """Cutter of one stream of documents into rows; tokens beyond a row's end begin the next one."""

    def __init__(
        self, dataset: IterableDataset, tokenizer: PreTrainedTokenizerBase, seq_len: int, text_column: str, name: str
    ) -> None:
        self.dataset, self.tokenizer, self.seq_len = dataset, tokenizer, seq_len
        self.text_column, self.name = text_column, name
        self._start = dataset.state_dict()
        self._records: Iterator[Record] | None = None
        self._left: list[list[int]] = []

    def next_row(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (input_ids, seq_idx, mask), each of ``seq_len``."""
        room, pieces = self.seq_len, []
        while room:
            if not self._left:
                self._left = self._next_documents()
            document = self._left.pop(0)
            pieces.append(np.asarray(document[:room], dtype=np.int64))
            if document[room:]:
                self._left.insert(0, document[room:])
            room -= len(pieces[-1])
        seq_idx = np.repeat(np.arange(len(pieces)), [len(piece) for piece in pieces])
        return np.concatenate(pieces), seq_idx, np.ones(self.seq_len, dtype=bool)

    def _next_documents(self) -> list[list[int]]:
        """Return documents of the next records; the data begins again at its end."""
        ends = 0
        while ends < 2:
            self._records = self._records or records_of(self.dataset, self.name)
            records = list(islice(self._records, _DOCUMENTS_AT_ONCE))
            texts = [text_of(record, self.text_column, self.name) for record in records]
            if documents := encode_documents(texts, self.tokenizer):
                return documents
            if not records:
                ends += 1
                self._restart_at(self._start)
        raise ValueError(f"data source {self.name} holds no text in column {self.text_column!r}.")

    def _restart_at(self, state: State) -> None:
        self.dataset.load_state_dict(state)
        self._records = None

    def state_dict(self) -> State:
        return {"dataset": self.dataset.state_dict(), "left": list(self._left)}

    def load_state_dict(self, state: State) -> None:
        self._restart_at(state["dataset"])
        self._left = [list(document) for document in state["left"]]
