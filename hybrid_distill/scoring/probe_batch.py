"""Questions and texts as rows of tokens, batches of rows of one length, and how answers are read from logits.

Rows of one length need no padding and no mask. Where choices have several tokens, the beginnings of all choices follow
the prompt as a tree, in which a token sees the prompt and its own choice's earlier tokens: one forward reads them all.

Shapes: G group (of rows with the same head ablated), B example, L length, S positions read (the last ones),
V vocabulary, Q number read (a question has many, a text has one), K kind of judgment (questions: correct,
log-probability; texts: loss), X number that judgments depend on (questions: margin, log-probability; texts: loss).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import Cache, PreTrainedModel

from ..distributed import own_share
from ..probes import Example
from ..probes.answering import ChoiceBatch, EncodedExample, Tokens, accepts
from ..probes.plain_text import TextBatch

# Fewer common tokens are not worth a mask and another forward.
LEAST_SHARED, LEAST_SHARE = 16, 1 / 6


class Row:
    """One question or text. ``number`` is its place among all of them, ``n_read`` counts the positions at its end
    whose logits are read, ``n_numbers`` the numbers read from them."""

    read: ClassVar[Callable[..., Tensor]]
    """Reads read_GQ of rows of this kind, in nats, row after row, from the logits of the last positions."""
    read_plainly: ClassVar[Callable[..., Tensor]]
    """Reads read_1Q of rows of this kind by ordinary forwards, for models that take no others."""

    def __init__(self, number: int, tokens: Tokens, n_read: int, n_numbers: int, device: torch.device) -> None:
        self.number, self.tokens, self.n_read, self.n_numbers = number, tokens, n_read, n_numbers
        self.ids_L = torch.tensor(tokens, device=device)

    def outcome(self, read_GQ: Tensor) -> Tensor:
        """Return outcome_XG."""
        return read_GQ.T

    def judge(self, read_GQ: Tensor) -> Tensor:
        """Return found_KG."""
        return self.outcome(read_GQ)


class Text(Row):
    """A text, read by its mean next-token loss."""

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
    """An example, read by the log-probabilities that its choices are made of.

    Its tokens are the prompt, the beginning that all choices share, then the tree of their continuations.
    """

    def __init__(self, number: int, example: Example, encoded: EncodedExample, device: torch.device) -> None:
        base = encoded.prompt + encoded.choices[0][: encoded.n_shared]
        paths = {path[:t] for path in encoded.contexts() for t in range(encoded.n_shared + 1, len(path) + 1)}
        self.example, self.encoded, self.n_base = example, encoded, len(base)
        self.node = {path: self.n_base + index for index, path in enumerate(sorted(paths))}
        self.reads = encoded.reads()
        n_tree = len(self.node) + encoded.n_shared
        tokens = base + tuple(path[-1] for path in self.node)
        super().__init__(number, tokens, n_tree + 1, len(self.reads), device)
        addresses = [(self._place(path) - len(tokens), token) for path, token in self.reads]
        self.address_2Q = torch.tensor(addresses, device=device).T

    def __str__(self) -> str:
        return f"example {self.number} ({self.example.prompt[:60]!r} ...)"

    def _place(self, path: Tokens) -> int:
        """Return the position of the token that ends ``path``; its logits predict the next one."""
        n_prompt, n_shared = len(self.encoded.prompt), self.encoded.n_shared
        return self.node[path] if len(path) > n_shared else n_prompt + len(path) - 1

    @cached_property
    def sees_LL(self) -> Tensor:
        """Which tokens (columns) each token (row) attends to."""
        sees_LL = torch.ones(len(self.tokens), len(self.tokens), dtype=torch.bool).tril()
        for index, path in enumerate(self.node, start=self.n_base):
            sees_LL[index] = sees_LL[self._place(path[:-1])]
            sees_LL[index, index] = True
        return sees_LL.to(self.ids_L.device)

    @cached_property
    def position_L(self) -> Tensor:
        """Position of each token in its own continuation of the prompt."""
        depths = [len(self.encoded.prompt) + len(path) - 1 for path in self.node]
        return torch.tensor([*range(self.n_base), *depths], device=self.ids_L.device)

    @staticmethod
    def read(rows: Sequence[Question], logits_GBSV: Tensor) -> Tensor:
        row_Q = torch.tensor([b for b, row in enumerate(rows) for _ in row.reads], device=logits_GBSV.device)
        position_Q, token_Q = torch.cat([row.address_2Q for row in rows], dim=1)
        normalizer_GBS = logits_GBSV.float().logsumexp(-1)
        return logits_GBSV[:, row_Q, position_Q, token_Q].float() - normalizer_GBS[:, row_Q, position_Q]

    @staticmethod
    def read_plainly(rows: Sequence[Question], model: PreTrainedModel) -> Tensor:
        found = ChoiceBatch([row.encoded for row in rows], model.device).reads(model)
        in_order = [found[b, path, token] for b, row in enumerate(rows) for path, token in row.reads]
        return torch.tensor([in_order], dtype=torch.float64)

    def outcome(self, read_GQ: Tensor) -> Tensor:
        """Return the answer's distance from the best other choice, and its log-probability.

        As `EncodedExample.choice_logprobs`, for all groups at once.
        """
        logprob_G, nothing = dict(zip(self.reads, read_GQ.unbind(1))), torch.zeros(())
        choices = []
        for choice, stop in zip(self.encoded.choices, self.encoded.stops):
            choices.append(sum((logprob_G[choice[:t], token] for t, token in enumerate(choice)), nothing))
            if stop:
                going_on_G = sum((logprob_G[choice, token].exp() for token in stop), nothing)
                choices[-1] = choices[-1] + (1 - going_on_G).clamp(min=1e-30).log()
        answer_G = choices.pop(self.encoded.answer)
        return torch.stack([answer_G - torch.stack(choices).amax(0), answer_G])

    def judge(self, read_GQ: Tensor) -> Tensor:
        """Return whether the answer is above all other choices, and its log-probability."""
        margin_G, answer_G = self.outcome(read_GQ)
        return torch.stack([(margin_G > 0).double(), answer_G])


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
        """Tokens of rows that have one length."""
        return torch.stack([row.ids_L for row in self.rows])

    def parts(self, n_rows: int) -> Iterator[tuple[slice, ProbeBatch]]:
        """Yield up to ``n_rows`` rows at a time as a batch of their own, and their place in this one."""
        for start in range(0, len(self), n_rows):
            place = slice(start, start + n_rows)
            yield place, ProbeBatch(self.rows[place])

    def logits(self, model: PreTrainedModel, groups: int = 1, start: int = 0, before: Cache | None = None) -> Tensor:
        """Compute logits_GBSV of ``groups`` copies of the rows, one behind the other.

        ``before`` holds the first ``start`` tokens of each.
        """
        extras: dict[str, Any] = {"logits_to_keep": self.n_read} if accepts(model, "logits_to_keep") else {}
        questions = [row for row in self.rows if isinstance(row, Question)]
        if start or any(row.node for row in questions):
            mask_B1LL = torch.stack([row.sees_LL[start:] for row in questions])[:, None]
            if model.config._attn_implementation != "sdpa":  # only sdpa takes a Boolean mask
                unseen = torch.finfo(model.dtype).min
                mask_B1LL = torch.zeros_like(mask_B1LL, dtype=model.dtype).masked_fill(~mask_B1LL, unseen)
            position_BL = torch.stack([row.position_L[start:] for row in questions])
            extras |= {
                "attention_mask": mask_B1LL.repeat(groups, 1, 1, 1),
                "position_ids": position_BL.repeat(groups, 1),
            }
        if before is not None:
            extras["past_key_values"] = before
        output = model(input_ids=self.ids_BL[:, start:].repeat(groups, 1), use_cache=False, **extras)
        return output.logits[:, -self.n_read :].unflatten(0, (groups, len(self)))

    def read(self, logits_GBSV: Tensor) -> Tensor:
        """Return read_GQ: the numbers that rows are judged by; float64, on the CPU."""
        return self.kind.read(self.rows, logits_GBSV).double().cpu()

    def read_plainly(self, model: PreTrainedModel) -> Tensor:
        """Return read_1Q by ordinary forwards: for models that take no others, and to compare with."""
        return self.kind.read_plainly(self.rows, model)

    def judge(self, read_GQ: Tensor) -> Tensor:
        """Return found_KGB."""
        return torch.stack([row.judge(of_row_GQ) for row, of_row_GQ in self._by_row(read_GQ)], dim=-1)

    def outcome(self, read_GQ: Tensor) -> Tensor:
        """Return outcome_XGB."""
        return torch.stack([row.outcome(of_row_GQ) for row, of_row_GQ in self._by_row(read_GQ)], dim=-1)

    def _by_row(self, read_GQ: Tensor) -> Iterable[tuple[Row, Tensor]]:
        return zip(self.rows, read_GQ.split([row.n_numbers for row in self.rows], dim=1))


def batches_of(rows: Iterable[Row]) -> list[ProbeBatch]:
    """Batch rows of one kind: one batch for each length."""
    by_length: dict[int, list[Row]] = {}
    for row in rows:
        by_length.setdefault(len(row.tokens), []).append(row)
    return [ProbeBatch(group) for group in by_length.values()]


def own_batches(rows: Iterable[Row]) -> list[ProbeBatch]:
    """Batch this process's share of rows of one kind, longest first."""
    return batches_of(own_share(sorted(rows, key=lambda row: (-len(row.tokens), row.number))))


def shared_start(questions: Sequence[Question]) -> int:
    """Return how many tokens all prompts begin with, if it pays to compute them once for all; else 0."""
    n_shared, shortest = 0, min(len(row.encoded.prompt) for row in questions) - 1
    for column in zip(*(row.tokens[:shortest] for row in questions)):
        if len(set(column)) > 1:
            break
        n_shared += 1
    pays = len(questions) > 1 and n_shared >= max(LEAST_SHARED, LEAST_SHARE * shortest)
    return n_shared if pays else 0
