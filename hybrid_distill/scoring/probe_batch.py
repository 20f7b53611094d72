"""Questions and texts as rows of tokens, batches of rows of equal length, and reading answers from logits.

Rows of equal length need no padding and no mask. Several questions about one prompt, and choices of several tokens,
form a tree after their shared prefix. Each token attends only to the path it continues, so one forward reads them all.

Shapes: G group (of rows with the same head ablated), B example, L length, S positions read (the last ones),
V vocabulary, Q value read (many per question, one per text), X value that scores depend on (questions: the answer's
margin over the best other choice, and its log-probability; texts: the loss), E question of a row (texts have one).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import ClassVar, TypeVar

import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from ..distributed import own_share
from ..limits import first_line
from ..probes import Example
from ..probes.answering import ChoiceBatch, EncodedExample, Tokens, accepts, common_prefix
from ..probes.plain_text import LOGITS_AT_ONCE, TextBatch
from ..teacher import text_config

# Larger batches are not faster: they overflow a CPU's caches, and a GPU is already saturated.
CPU_TOKENS, GPU_TOKENS = 2**11, 2**17

T = TypeVar("T")

log = logging.getLogger(__name__)


class Row:
    """A prompt with its questions, or a text. ``number`` is its index among all prompts or all texts, ``n_read`` the
    number of final positions whose logits are read, ``n_numbers`` the number of values read from them."""

    read: ClassVar[Callable[..., Tensor]]
    """Function that reads read_GQ, in nats, row after row, from the logits of the last positions."""
    read_plainly: ClassVar[Callable[..., Tensor]]
    """Function that reads read_1Q by ordinary forwards, for models that support no others."""

    def __init__(self, number: int, tokens: Tokens, n_read: int, n_numbers: int, device: torch.device) -> None:
        self.number, self.tokens, self.n_read, self.n_numbers = number, tokens, n_read, n_numbers
        self.ids_L = torch.tensor(tokens, device=device)

    def outcome(self, read_GQ: Tensor) -> Tensor:
        """Return outcome_XGE: a question's margin and its answer's log-probability, a text's loss."""
        return read_GQ[None]


class Text(Row):
    """A text, measured by its mean next-token loss."""

    def __init__(self, number: int, tokens: Tokens, device: torch.device) -> None:
        super().__init__(number, tokens, len(tokens), 1, device)

    def __str__(self) -> str:
        return f"text {self.number}"

    @staticmethod
    def read(rows: Sequence[Text], logits_GBSV: Tensor) -> Tensor:
        losses = [
            cross_entropy(logits_SV[:-1].float(), row.ids_L[1:])
            for logits_BSV in logits_GBSV
            for logits_SV, row in zip(logits_BSV, rows)
        ]
        return torch.stack(losses).view(-1, len(rows))

    @staticmethod
    def read_plainly(rows: Sequence[Text], model: PreTrainedModel) -> Tensor:
        return TextBatch([row.tokens for row in rows], model.device).text_losses(model).cpu()[None]


class Question(Row):
    """Questions about one prompt, measured by the log-probabilities that make up their choices.

    The tokens are the prefix shared by everything read, then the tree of continuations.
    """

    def __init__(
        self, number: int, examples: Sequence[Example], encoded: Sequence[EncodedExample], device: torch.device
    ) -> None:
        self.examples, self.encoded = examples, encoded
        reads = [(e.prompt + path, token) for e in encoded for path, token in e.reads]
        ends = sorted({end for end, _ in reads})
        # In sorted order, a prefix of other ends comes right before one of them.
        leaves = [end for end, after in zip(ends, [*ends[1:], ()]) if after[: len(end)] != end]
        base = leaves[0][: common_prefix(leaves)]
        paths = {leaf[len(base) : t] for leaf in leaves for t in range(len(base) + 1, len(leaf) + 1)}
        self.n_base = len(base)
        self.node = {path: self.n_base + index for index, path in enumerate(sorted(paths))}
        tokens = base + tuple(path[-1] for path in self.node)
        place = {end: self.node[end[self.n_base :]] if len(end) > self.n_base else len(end) - 1 for end in ends}
        super().__init__(number, tokens, len(tokens) - min(place.values()), len(reads), device)
        self.address_2Q = torch.tensor([(place[end] - len(tokens), token) for end, token in reads], device=device).T

    def __str__(self) -> str:
        return f"prompt {self.number} ({self.examples[0].prompt[:60]!r} ...)"

    @cached_property
    def sees_LL(self) -> Tensor:
        """Mask of the tokens (columns) that each token (row) attends to."""
        sees_LL = torch.ones(len(self.tokens), len(self.tokens), dtype=torch.bool).tril()
        for path, index in self.node.items():
            sees_LL[index] = sees_LL[self.node.get(path[:-1], self.n_base - 1)]
            sees_LL[index, index] = True
        return sees_LL.to(self.ids_L.device)

    @cached_property
    def position_L(self) -> Tensor:
        """Position id of each token along its path in the tree."""
        depths = [self.n_base + len(path) - 1 for path in self.node]
        return torch.tensor([*range(self.n_base), *depths], device=self.ids_L.device)

    @staticmethod
    def read(rows: Sequence[Question], logits_GBSV: Tensor) -> Tensor:
        row_Q = torch.tensor([b for b, row in enumerate(rows) for _ in range(row.n_numbers)], device=logits_GBSV.device)
        position_Q, token_Q = torch.cat([row.address_2Q for row in rows], dim=1)
        normalizer_GBS = logits_GBSV.float().logsumexp(-1)
        return logits_GBSV[:, row_Q, position_Q, token_Q].float() - normalizer_GBS[:, row_Q, position_Q]

    @staticmethod
    def read_plainly(rows: Sequence[Question], model: PreTrainedModel) -> Tensor:
        return torch.cat([*ChoiceBatch([e for row in rows for e in row.encoded], model.device).reads(model)])[None]

    def outcome(self, read_GQ: Tensor) -> Tensor:
        found = []
        for e, of_example_GQ in zip(self.encoded, read_GQ.split([len(e.reads) for e in self.encoded], dim=1)):
            others_GC = e.choice_logprobs(of_example_GQ)
            answer_G = others_GC[:, e.answer].clone()
            others_GC[:, e.answer] = -torch.inf
            found.append(torch.stack([answer_G - others_GC.amax(1), answer_G]))
        return torch.stack(found, dim=-1)


class ProbeBatch:
    """Rows of one kind and length that run together."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows, self.kind = list(rows), type(rows[0])
        self.n_read = max(row.n_read for row in rows)
        self.length = max(len(row.tokens) for row in rows)

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def ids_BL(self) -> Tensor:
        """Token ids of rows of equal length."""
        return torch.stack([row.ids_L for row in self.rows])

    def parts(self, n_rows: int) -> Iterator[tuple[slice, ProbeBatch]]:
        """Split into batches of up to ``n_rows`` rows; yield each with its slice of this batch."""
        for start in range(0, len(self), n_rows):
            place = slice(start, start + n_rows)
            yield place, ProbeBatch(self.rows[place])

    def logits(self, model: PreTrainedModel, groups: int = 1) -> Tensor:
        """Compute logits_GBSV of ``groups`` consecutive copies of the rows."""
        extras: dict[str, object] = {"logits_to_keep": self.n_read} if accepts(model, "logits_to_keep") else {}
        questions = [row for row in self.rows if isinstance(row, Question)]
        if any(row.node for row in questions):
            mask_B1LL = torch.stack([row.sees_LL for row in questions])[:, None]
            if model.config._attn_implementation != "sdpa":  # only sdpa accepts a Boolean mask
                unseen = torch.finfo(model.dtype).min
                mask_B1LL = torch.zeros_like(mask_B1LL, dtype=model.dtype).masked_fill(~mask_B1LL, unseen)
            position_BL = torch.stack([row.position_L for row in questions])
            extras |= {
                "attention_mask": mask_B1LL.repeat(groups, 1, 1, 1),
                "position_ids": position_BL.repeat(groups, 1),
            }
        output = model(input_ids=self.ids_BL.repeat(groups, 1), use_cache=False, **extras)
        return output.logits[:, -self.n_read :].unflatten(0, (groups, len(self)))

    def read(self, logits_GBSV: Tensor) -> Tensor:
        """Return read_GQ, the values that determine each row's outcome, in float64 on the CPU."""
        return self.kind.read(self.rows, logits_GBSV).double().cpu()

    def read_plainly(self, model: PreTrainedModel) -> Tensor:
        """Return read_1Q by ordinary forwards: the fallback and the reference for `read`."""
        return self.kind.read_plainly(self.rows, model)

    def outcome(self, read_GQ: Tensor) -> Tensor:
        """Return outcome_XGBE; all rows must have the same number of questions."""
        by_row = zip(self.rows, read_GQ.split([row.n_numbers for row in self.rows], dim=1))
        return torch.stack([row.outcome(of_row_GQ) for row, of_row_GQ in by_row], dim=2)


class Rows:
    """Number of rows in a batch: ``batch_size``, or chosen automatically if None; halved when memory runs out."""

    def __init__(self, model: PreTrainedModel, batch_size: int | None = None) -> None:
        self.model, self.batch_size, self.halvings = model, batch_size, 0

    def number(self, batch: ProbeBatch) -> int:
        """Return the number of rows of this length to run together, at least one."""
        tokens = GPU_TOKENS if self.model.device.type == "cuda" else CPU_TOKENS
        wanted = self.batch_size or 2 ** (max(1, tokens // batch.length).bit_length() - 1)
        wanted = min(wanted, LOGITS_AT_ONCE // (batch.n_read * text_config(self.model).vocab_size))
        return max(1, wanted >> self.halvings)

    def fitting(self, batch: ProbeBatch, work: Callable[[int], T]) -> T:
        """Run ``work(n_rows)``; while memory runs out, retry with half the rows.

        Raises MemoryError if not even one row fits.
        """
        while True:
            n_rows = self.number(batch)
            try:
                return work(n_rows)
            except RuntimeError as error:
                if not should_reduce_batch_size(error):
                    raise
                if n_rows == 1:
                    raise MemoryError(
                        f"one row of {batch.length} tokens does not fit into the memory of {self.model.device}; "
                        "load the model in bfloat16, ask shorter questions, or use a larger device."
                    ) from error
                reason = first_line(error)
            # Outside the handler: its traceback keeps the tensors of the failed batch alive.
            while self.number(batch) >= n_rows:
                self.halvings += 1
            clear_device_cache(garbage_collection=True)
            log.warning("out of memory with %d rows (%s): continuing with %d", n_rows, reason, self.number(batch))


def batches_of(rows: Iterable[Row]) -> list[ProbeBatch]:
    """Group rows of one kind into one batch per length."""
    by_length: dict[int, list[Row]] = {}
    for row in rows:
        by_length.setdefault(len(row.tokens), []).append(row)
    return [ProbeBatch(group) for group in by_length.values()]


def own_batches(rows: Iterable[Row]) -> list[ProbeBatch]:
    """Batch this process's share of rows of one kind, longest first."""
    return batches_of(own_share(sorted(rows, key=lambda row: (-len(row.tokens), row.number))))
