"""Prompts with their questions, and texts, as rows of tokens, and how a forward pass answers them.

All questions about one prompt are one row: the tokens that they share (the trunk), then a tree of
continuations. Two questions about a dictionary, for a tokenizer that splits digits:

    trunk                                nodes
    apple:84 bell:8 The value of ─┬─ apple ─ is ─ 8
                                  └─ bell ── is ─ 8

    in the row:  apple:84 bell:8 The value of | apple is 8 | bell is 8

Each token attends to the trunk, to its ancestors and to itself. Its position id is its distance
from the start of the prompt along its path, so both nodes "is" have the same one. One forward then
gives the logits of every path: " 84" as the value of apple is read as 8 after "apple is", and 4
after "apple is 8".

Shapes: G group (of rows with the same head ablated), B row, L length, S final position (whose logits
are computed), V vocabulary, Q value (questions: the log-probability of a target; texts: the loss),
C choice, X outcome (questions: the answer's margin over the best other choice, and its
log-probability; texts: the loss), E question of a row (texts have one).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..probes import Example
from ..probes.answering import ChoiceBatch
from ..probes.encoding import EncodedExample, Tokens, common_prefix
from ..probes.plain_text import LOGITS_AT_ONCE, TextBatch

# Logits that a CPU sums at once: 2 MiB in float32, which fit into its cache.
CPU_LOGITS = 2**19


class ProbeRow(ABC):
    """A prompt with its questions, or a text.

    ``number`` is its index among all prompts or all texts, ``n_positions`` the number of final positions
    whose logits are computed, ``n_values`` the number of values that these logits give.
    """

    def __init__(
        self,
        number: int,
        tokens: Tokens,
        *,
        n_positions: int,
        n_values: int,
        device: torch.device,
    ) -> None:
        self.number = number
        self.tokens = tokens
        self.n_positions = n_positions
        self.n_values = n_values
        self.ids_L = torch.tensor(tokens, device=device)

    # Static: a batch gathers the values of all its rows in one indexing call.
    @staticmethod
    @abstractmethod
    def values(rows: Sequence[Any], logits_GBSV: Tensor) -> Tensor:
        """Return value_GQ in nats, row after row, from the logits of the final positions."""

    @staticmethod
    @abstractmethod
    def values_by_plain_forwards(rows: Sequence[Any], model: PreTrainedModel) -> Tensor:
        """Return value_1Q by ordinary forwards, for models that do not support trees."""

    @abstractmethod
    def outcome(self, value_GQ: Tensor) -> Tensor:
        """Return outcome_XGE: a question's margin and answer log-probability, a text's loss."""


class TextRow(ProbeRow):
    """A text, measured by its mean next-token loss."""

    def __init__(
        self,
        number: int,
        tokens: Tokens,
        device: torch.device,
    ) -> None:
        super().__init__(number, tokens, n_positions=len(tokens), n_values=1, device=device)

    def __str__(self) -> str:
        return f"text {self.number}"

    @staticmethod
    def values(rows: Sequence[TextRow], logits_GBSV: Tensor) -> Tensor:
        next_BS1 = torch.stack([row.ids_L[1:] for row in rows])[..., None]
        next_GBS1 = next_BS1.expand(len(logits_GBSV), -1, -1, -1)
        logit_GBS = logits_GBSV[:, :, :-1].gather(-1, next_GBS1)[..., 0].float()
        # Sliced last: a slice of logits would be copied.
        return (_normalizers(logits_GBSV)[:, :, :-1] - logit_GBS).mean(-1)

    @staticmethod
    def values_by_plain_forwards(rows: Sequence[TextRow], model: PreTrainedModel) -> Tensor:
        batch = TextBatch([row.tokens for row in rows], model.device)
        return batch.text_losses(model).cpu()[None]

    def outcome(self, value_GQ: Tensor) -> Tensor:
        return value_GQ[None]


class PromptRow(ProbeRow):
    """Questions about one prompt, measured by the log-probabilities that make up their choices.

    The tokens are ``n_trunk`` shared ones, then the nodes of a tree. ``node_of`` maps the path to a
    node (its tokens after the trunk) to the node's index in the row.
    """

    def __init__(
        self,
        number: int,
        examples: Sequence[Example],
        encoded: Sequence[EncodedExample],
        device: torch.device,
    ) -> None:
        self.examples = examples
        self.encoded = encoded
        targets: list[tuple[Tokens, int]] = []
        for question in encoded:
            targets += [(question.prompt + path, token) for path, token in question.targets]
        contexts = sorted({context for context, _ in targets})
        leaves = _without_prefixes(contexts)
        self.n_trunk = common_prefix(leaves)
        self.node_of = _number_nodes(leaves, self.n_trunk)
        tokens = leaves[0][: self.n_trunk] + tuple(path[-1] for path in self.node_of)

        index_of: dict[Tokens, int] = {}
        for context in contexts:
            path = context[self.n_trunk :]
            index_of[context] = self.node_of[path] if path else len(context) - 1
        # Logits of the whole prompt would take gigabytes for a large vocabulary.
        n_positions = len(tokens) - min(index_of.values())
        super().__init__(
            number,
            tokens,
            n_positions=n_positions,
            n_values=len(targets),
            device=device,
        )
        # Counted from the end: a forward returns only the logits of the last positions.
        addresses = [(index_of[context] - len(tokens), token) for context, token in targets]
        self.address_2Q = torch.tensor(addresses, device=device).T

    def __str__(self) -> str:
        return f"prompt {self.number} ({self.examples[0].prompt[:60]!r} ...)"

    @cached_property
    def sees_LL(self) -> Tensor:
        """Mask of the tokens (columns) that each token (row) attends to."""
        sees_LL = torch.ones(len(self.tokens), len(self.tokens), dtype=torch.bool).tril()
        # A parent's path sorts before its children's, so its row is complete when they copy it.
        for path, index in self.node_of.items():
            parent = self.node_of.get(path[:-1], self.n_trunk - 1)
            sees_LL[index] = sees_LL[parent]
            sees_LL[index, index] = True
        return sees_LL.to(self.ids_L.device)

    @cached_property
    def position_L(self) -> Tensor:
        """Position id of each token along its path in the tree."""
        positions = list(range(self.n_trunk))
        positions += [self.n_trunk + len(path) - 1 for path in self.node_of]
        return torch.tensor(positions, device=self.ids_L.device)

    @staticmethod
    def values(rows: Sequence[PromptRow], logits_GBSV: Tensor) -> Tensor:
        row_of_value: list[int] = []
        for index, row in enumerate(rows):
            row_of_value += [index] * row.n_values
        row_Q = torch.tensor(row_of_value, device=logits_GBSV.device)
        position_Q, token_Q = torch.cat([row.address_2Q for row in rows], dim=1)
        normalizer_GBS = _normalizers(logits_GBSV)
        logit_GQ = logits_GBSV[:, row_Q, position_Q, token_Q].float()
        return logit_GQ - normalizer_GBS[:, row_Q, position_Q]

    @staticmethod
    def values_by_plain_forwards(rows: Sequence[PromptRow], model: PreTrainedModel) -> Tensor:
        encoded: list[EncodedExample] = []
        for row in rows:
            encoded += row.encoded
        target_logprobs = ChoiceBatch(encoded, model.device).target_logprobs(model)
        return torch.cat(list(target_logprobs))[None]

    def outcome(self, value_GQ: Tensor) -> Tensor:
        outcomes = []
        sizes = [len(question.targets) for question in self.encoded]
        for question, own_GQ in zip(self.encoded, value_GQ.split(sizes, dim=1)):
            logprob_GC = question.choice_logprobs(own_GQ)
            answer_G = logprob_GC[:, question.answer].clone()
            # The maximum below is then over the other choices alone.
            logprob_GC[:, question.answer] = -torch.inf
            margin_G = answer_G - logprob_GC.amax(1)
            outcomes.append(torch.stack([margin_G, answer_G]))
        return torch.stack(outcomes, dim=-1)


def _normalizers(logits_GBSV: Tensor) -> Tensor:
    """Return the logarithm of the sum of exponentials at each position, in float32."""
    # A CPU spends four times as long on new memory for all positions as on their sums.
    at_once = CPU_LOGITS if logits_GBSV.device.type == "cpu" else LOGITS_AT_ONCE
    logits_NV = logits_GBSV.flatten(0, -2)
    n_at_once = max(1, at_once // logits_NV.shape[1])
    # In float32: a sum over the vocabulary loses too much in 16 bits.
    parts = [part_NV.float().logsumexp(-1) for part_NV in logits_NV.split(n_at_once)]
    return torch.cat(parts).view(logits_GBSV.shape[:-1])


def _without_prefixes(contexts: Sequence[Tokens]) -> list[Tokens]:
    """Drop contexts that begin another one; the contexts are sorted."""
    leaves = []
    for context, following in zip(contexts, [*contexts[1:], ()]):
        # In sorted order, a prefix of other contexts comes right before one of them.
        if following[: len(context)] != context:
            leaves.append(context)
    return leaves


def _number_nodes(leaves: Sequence[Tokens], n_trunk: int) -> dict[Tokens, int]:
    """Map each path that leaves the trunk to the index of its last token in the row."""
    paths: set[Tokens] = set()
    for leaf in leaves:
        branch = leaf[n_trunk:]
        paths.update(branch[: depth + 1] for depth in range(len(branch)))
    return {path: index for index, path in enumerate(sorted(paths), start=n_trunk)}
