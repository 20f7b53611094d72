"""What an ablated model is asked: examples and texts as rows of one length, and how an answer is read from logits.

Rows of one length need no padding and no mask. Where choices have several tokens, all their beginnings stand behind
the prompt as a tree, each token seeing the prompt and its own choice's tokens before it: one forward reads them all,
without a cache.

Shapes: G group (of rows with the same head ablated), B example, L length, S positions read (the last ones),
V vocabulary, Q number read (of a question many, of a text one), C choice, K kind of judgement (of questions: correct,
log-probability; of texts: loss).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..probes import Example
from ..probes.answering import ChoiceBatch, EncodedExample, Tokens, accepts, answer_generation
from ..probes.plain_text import LOGITS_AT_ONCE, TextBatch


class Sheet(ABC):
    """Rows of one length that run together; ``numbers`` says which examples, or texts, of all they are."""

    ids_BL: Tensor
    numbers: list[int]
    n_read: int
    """Positions at the end of each row whose logits are read."""

    def __init__(self) -> None:
        self._parts: dict[tuple[int, int], Sheet] = {}

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def length(self) -> int:
        return self.ids_BL.shape[1]

    def part(self, start: int, stop: int) -> Any:
        """Some of the rows, as a sheet; made once."""
        if (start, stop) not in self._parts:
            self._parts[start, stop] = self._cut(slice(start, stop))
        return self._parts[start, stop]

    @abstractmethod
    def _cut(self, rows: slice) -> Sheet: ...

    def logits(self, model: PreTrainedModel, groups: int = 1) -> Tensor:
        """logits_GBSV of ``groups`` copies of the rows, one behind the other."""
        extras = {"logits_to_keep": self.n_read} if accepts(model, "logits_to_keep") else {}
        output = model(
            input_ids=self.ids_BL.repeat(groups, 1), use_cache=False, **self._layout(model, groups), **extras
        )
        return output.logits[:, -self.n_read :].unflatten(0, (groups, len(self)))

    def _layout(self, model: PreTrainedModel, groups: int) -> dict[str, Tensor]:
        """Mask and positions where rows are not plain text."""
        return {}

    @abstractmethod
    def read(self, logits_GBSV: Tensor) -> Tensor:
        """read_GQ: all numbers in nats that the rows are judged by, row after row; float64, on the CPU."""

    @abstractmethod
    def read_plainly(self, model: PreTrainedModel) -> Tensor:
        """read_1Q, by forwards with nothing special about them: for models that need such, and to compare with."""

    @abstractmethod
    def judge(self, read_GQ: Tensor) -> Tensor:
        """found_KGB."""


class TextSheet(Sheet):
    """Texts of one length; what is read is each one's mean next-token loss in nats."""

    def __init__(self, rows: Sequence[Tokens], numbers: Sequence[int], device: torch.device) -> None:
        super().__init__()
        self.rows, self.numbers = list(rows), list(numbers)
        self.ids_BL = torch.tensor(self.rows, device=device)
        self.n_read = self.length

    def _cut(self, rows: slice) -> TextSheet:
        return TextSheet(self.rows[rows], self.numbers[rows], self.ids_BL.device)

    def read(self, logits_GBSV: Tensor) -> Tensor:
        losses = [
            torch.nn.functional.cross_entropy(logits_SV[:-1].float(), ids_L[1:])
            for logits_BSV in logits_GBSV
            for logits_SV, ids_L in zip(logits_BSV, self.ids_BL)
        ]
        return torch.stack(losses).double().cpu().view(-1, len(self))

    def read_plainly(self, model: PreTrainedModel) -> Tensor:
        return TextBatch(self.rows, self.ids_BL.device).text_losses(model).cpu()[None]

    def judge(self, read_GQ: Tensor) -> Tensor:
        return read_GQ[None]


class QuestionSheet(Sheet):
    """Examples whose rows have one length; what is read is whether each is answered, and its log-probability."""

    def __init__(
        self,
        examples: Sequence[Example],
        encoded: Sequence[EncodedExample],
        numbers: Sequence[int],
        device: torch.device,
    ) -> None:
        super().__init__()
        self.examples, self.encoded, self.numbers = list(examples), list(encoded), list(numbers)
        self.rows = [_Row(e) for e in self.encoded]
        self.ids_BL = torch.tensor([row.tokens for row in self.rows], device=device)
        self.n_read = max(self.length - row.first_read for row in self.rows)
        self._index()

    def _cut(self, rows: slice) -> QuestionSheet:
        return QuestionSheet(self.examples[rows], self.encoded[rows], self.numbers[rows], self.ids_BL.device)

    def _index(self) -> None:
        """Where each log-probability stands, and which of them make up which choice."""
        reads: list[tuple[int, int, int]] = []  # row, position among those read, token
        terms: list[tuple[int, int]] = []  # choice, read: summed
        stops: list[tuple[int, int]] = []  # choice, read: the chance that the choice goes on
        choices: list[range] = []
        start = 0
        for number, (e, row) in enumerate(zip(self.encoded, self.rows)):
            at = {read: len(reads) + index for index, read in enumerate(e.reads())}
            before = self.length - self.n_read
            reads += [(number, row.place(path) - before, token) for path, token in at]
            choices.append(range(start, start + len(e.choices)))
            for choice, tokens, stop in zip(choices[-1], e.choices, e.stops):
                terms += [(choice, at[tokens[:t], token]) for t, token in enumerate(tokens)]
                stops += [(choice, at[tokens, token]) for token in stop]
            start += len(e.choices)
        widest = max(map(len, choices))
        # All choices but the answer; rows are filled up with one that is never likely.
        others = [[c for c in each if c != each[e.answer]] for each, e in zip(choices, self.encoded)]
        others = [each + [start] * (widest - len(each)) for each in others]
        self.read_3Q = torch.tensor(reads, device=self.ids_BL.device).T
        self.term_2T = torch.tensor(terms).T
        self.stop_2T = torch.tensor(stops, dtype=torch.long).view(-1, 2).T
        self.n_choices = start
        self.answer_B = torch.tensor([each[e.answer] for each, e in zip(choices, self.encoded)])
        self.other_BC = torch.tensor(others)

    @cached_property
    def _tree(self) -> tuple[Tensor, Tensor]:
        """(sees_B1LL, positions_BL)."""
        sees_BLL = torch.stack([row.sees(self.length) for row in self.rows])
        positions_BL = torch.tensor([row.positions for row in self.rows])
        return sees_BLL[:, None].to(self.ids_BL.device), positions_BL.to(self.ids_BL.device)

    def _layout(self, model: PreTrainedModel, groups: int) -> dict[str, Tensor]:
        if not any(row.parents for row in self.rows):
            return {}
        sees_B1LL, positions_BL = self._tree
        mask_B1LL = sees_B1LL
        if model.config._attn_implementation != "sdpa":  # which alone takes truth values
            seen = torch.zeros_like(sees_B1LL, dtype=model.dtype)
            mask_B1LL = seen.masked_fill(~sees_B1LL, torch.finfo(model.dtype).min)
        return {
            "attention_mask": mask_B1LL.repeat(groups, 1, 1, 1),
            "position_ids": positions_BL.repeat(groups, 1),
        }

    def read(self, logits_GBSV: Tensor) -> Tensor:
        row_Q, position_Q, token_Q = self.read_3Q
        normaliser_GBS = _logsumexp(logits_GBSV)
        read_GQ = logits_GBSV[:, row_Q, position_Q, token_Q].float() - normaliser_GBS[:, row_Q, position_Q]
        return read_GQ.double().cpu()

    def read_plainly(self, model: PreTrainedModel) -> Tensor:
        found = ChoiceBatch(self.encoded, self.ids_BL.device).reads(model)
        in_order = [found[row, path, token] for row, e in enumerate(self.encoded) for path, token in e.reads()]
        return torch.tensor([in_order], dtype=torch.float64)

    def judge(self, read_GQ: Tensor) -> Tensor:
        choice_GC = self._choices(read_GQ)
        answer_GB = choice_GC[:, self.answer_B]
        other_GBC = torch.nn.functional.pad(choice_GC, (0, 1), value=-torch.inf)[:, self.other_BC]
        return torch.stack([(answer_GB > other_GBC.amax(-1)).double(), answer_GB])

    def _choices(self, read_GQ: Tensor) -> Tensor:
        """As `EncodedExample.choice_logprobs`: the sum over tokens, less the chance of going on to a longer choice."""
        nothing_GC = read_GQ.new_zeros(len(read_GQ), self.n_choices)
        total_GC = nothing_GC.index_add(1, self.term_2T[0], read_GQ[:, self.term_2T[1]])
        going_on_GC = nothing_GC.index_add(1, self.stop_2T[0], read_GQ[:, self.stop_2T[1]].exp())
        return total_GC + (1 - going_on_GC).clamp(min=1e-30).log()

    def generated(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: int) -> Tensor:
        """correct_B: read from the text that the model writes (`answer_generation`)."""
        return answer_generation(model, tokenizer, self.examples, batch_size=rows).double().cpu()


class _Row:
    """One example: prompt, the beginning that all choices share, then the tree of what goes on from there."""

    def __init__(self, e: EncodedExample) -> None:
        base = e.prompt + e.choices[0][: e.n_shared]
        self.n_prompt, self.n_shared, self.n_base = len(e.prompt), e.n_shared, len(base)
        paths = {path[:t] for path in e.contexts() for t in range(e.n_shared + 1, len(path) + 1)}
        self.node = {path: self.n_base + index for index, path in enumerate(sorted(paths))}
        self.tokens = base + tuple(path[-1] for path in self.node)
        self.positions = [*range(self.n_base), *(len(e.prompt) + len(path) - 1 for path in self.node)]
        self.parents = [self.place(path[:-1]) for path in self.node]

    @property
    def first_read(self) -> int:
        return self.n_prompt - 1

    def place(self, path: Tokens) -> int:
        """Where the token stands that ends ``path``; its logits tell what follows."""
        return self.node[path] if len(path) > self.n_shared else self.n_prompt + len(path) - 1

    def sees(self, length: int) -> Tensor:
        """[L, L]: which tokens (columns) each token (row) attends to."""
        sees_LL = torch.ones(length, length, dtype=torch.bool).tril()
        for index, parent in enumerate(self.parents, start=self.n_base):
            sees_LL[index] = sees_LL[parent]
            sees_LL[index, index] = True
        return sees_LL


def _logsumexp(logits_GBSV: Tensor) -> Tensor:
    """In float32 whatever the model computes in, a few rows at a time."""
    rows = max(1, LOGITS_AT_ONCE // logits_GBSV.shape[-2:].numel())
    parts = [part.float().logsumexp(-1) for part in logits_GBSV.flatten(0, 1).split(rows)]
    return torch.cat(parts).unflatten(0, logits_GBSV.shape[:2])


def question_sheets(
    examples: Sequence[Example],
    encoded: Sequence[EncodedExample],
    numbers: Sequence[int],
    device: torch.device,
) -> list[Sheet]:
    """The examples called ``numbers``, one sheet for each length, the longest first."""
    return [
        QuestionSheet([examples[n] for n in group], [encoded[n] for n in group], group, device)
        for group in _by_length(numbers, lambda n: row_length(encoded[n]))
    ]


def text_sheets(rows: Sequence[Tokens], numbers: Sequence[int], device: torch.device) -> list[Sheet]:
    """The texts called ``numbers``, one sheet for each length, the longest first."""
    groups = _by_length(numbers, lambda n: len(rows[n]))
    return [TextSheet([rows[n] for n in group], group, device) for group in groups]


def row_length(encoded: EncodedExample) -> int:
    """Tokens of an example's row."""
    return len(_Row(encoded).tokens)


def _by_length(numbers: Sequence[int], length: Callable[[int], int]) -> list[list[int]]:
    groups: dict[int, list[int]] = {}
    for number in numbers:
        groups.setdefault(length(number), []).append(number)
    return [groups[length] for length in sorted(groups, reverse=True)]
