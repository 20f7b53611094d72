"""Rows of data that stays on the hub, packed as they arrive.

Shapes: B rows, L tokens of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from .documents import open_hub, text_of, unreachable
from .rows import Batch, rows_of_each
from .tokens import encode_documents, hash_of, tokenizer_fingerprint

_DOCUMENTS_AT_ONCE = 32


class StreamingRows:
    """Rows of data that stays on the hub, packed as they arrive; each process reads its own part.

    Rows come in order, so ``batch`` must be asked for one step after the other; `state_dict` holds the place
    in each source and the tokens that are left over from its last documents.
    """

    def __init__(
        self,
        datasets: Sequence[Any],
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

    @classmethod
    def from_hub(
        cls, sources: Sequence[str], tokenizer: PreTrainedTokenizerBase, *, seq_len: int, **options: Any
    ) -> StreamingRows:
        """Streams of ``hf:repo:config:split`` sources. Raises DataUnavailable when one cannot be reached."""
        datasets = [open_hub(source) for source in sources]
        return cls(datasets, tokenizer, seq_len=seq_len, names=sources, **options)

    def batch(self, step: int, batch_size: int, rank: int = 0, world: int = 1) -> Batch:
        """The next rows of this process. Raises ValueError for another step or another process."""
        if (rank, world) != self._place or step != self._step:
            raise ValueError(
                f"streamed rows are at step {self._step} of process {self._place[0]} of {self._place[1]} and "
                f"cannot jump to step {step} of process {rank} of {world}; resume with as many processes."
            )
        self._step += 1
        columns = zip(*(self._next_row() for _ in range(rows_of_each(batch_size, world))))
        input_ids, seq_idx = (torch.from_numpy(np.stack(column)) for column in columns)
        return {
            "input_ids": input_ids,
            "seq_idx": seq_idx,
            "mask": torch.ones_like(input_ids, dtype=torch.bool),
        }

    def _next_row(self) -> tuple[np.ndarray, np.ndarray]:
        """A row of the source that is furthest behind its share."""
        number = int(np.argmax(self._weights * (self._counts.sum() + 1) - self._counts))
        self._counts[number] += 1
        return self._packers[number].next_row()

    def state_dict(self) -> dict[str, Any]:
        """Where this process stands, as JSON."""
        packers = [packer.state_dict() for packer in self._packers]
        place = list(self._place)
        return {"step": self._step, "counts": self._counts.tolist(), "place": place, "packers": packers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to where `state_dict` was taken. Raises ValueError for the state of another process."""
        if tuple(state["place"]) != self._place:
            raise ValueError(
                f"the state belongs to process {state['place'][0]} of {state['place'][1]}, this is process "
                f"{self._place[0]} of {self._place[1]}; resume with as many processes as before."
            )
        self._step, self._counts = state["step"], np.asarray(state["counts"], dtype=np.int64)
        for packer, packed in zip(self._packers, state["packers"]):
            packer.load_state_dict(packed)


class _Packer:
    """Cuts one stream of documents into rows; what does not fill a row waits for the next."""

    def __init__(
        self, dataset: Any, tokenizer: PreTrainedTokenizerBase, seq_len: int, text_column: str, name: str
    ) -> None:
        self.dataset, self.tokenizer, self.seq_len = dataset, tokenizer, seq_len
        self.text_column, self.name = text_column, name
        self._start = dataset.state_dict() if hasattr(dataset, "state_dict") else None
        self._documents: Iterator[dict[str, Any]] | None = None
        self._left: list[list[int]] = []

    def next_row(self) -> tuple[np.ndarray, np.ndarray]:
        """(input_ids, seq_idx), each of ``seq_len``."""
        room, pieces = self.seq_len, []
        while room:
            if not self._left:
                self._left = self._next_documents()
            document = self._left.pop(0)
            pieces.append(document[:room])
            if document[room:]:
                self._left.insert(0, document[room:])
            room -= len(pieces[-1])
        seq_idx = np.repeat(np.arange(len(pieces)), [len(piece) for piece in pieces])
        return np.concatenate([np.asarray(piece, dtype=np.int64) for piece in pieces]), seq_idx

    def _next_documents(self) -> list[list[int]]:
        """Documents of the next records; the data begins again at its end."""
        ends = 0
        while ends < 2:
            records = list(self._take(_DOCUMENTS_AT_ONCE))
            texts = [text_of(record, self.text_column, self.name) for record in records]
            if documents := encode_documents(texts, self.tokenizer):
                return documents
            if not records:
                ends += 1
                self._documents = None
                self.dataset.load_state_dict(self._start)
        raise ValueError(f"data source {self.name} holds no text in column {self.text_column!r}.")

    def _take(self, n: int) -> Iterator[dict[str, Any]]:
        try:
            if self._documents is None:
                self._documents = iter(self.dataset)
            for _, record in zip(range(n), self._documents):
                yield record
        except Exception as error:
            raise unreachable(self.name, error) from error

    def state_dict(self) -> dict[str, Any]:
        return {"dataset": self.dataset.state_dict(), "left": list(self._left)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.dataset.load_state_dict(state["dataset"])
        self._documents, self._left = None, [list(document) for document in state["left"]]
