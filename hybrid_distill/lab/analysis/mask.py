"""Heads left with only the gather or the aggregate pattern (arXiv 2504.18574): is the pattern what they do?

A mask is made for each prompt (`gather_mask`, `aggregate_mask`) and multiplied into the head's matrix, attention map or
materialized SSM; rows are not normalized anew. Beside it: the head removed, and the head without the pattern.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...plan import HeadId
from ...probes import Example, check_counts
from ...probes.answering import EncodedExample, Tokens, choice_result, encode_example, forward
from ...scoring import HeadScores
from ...teacher import HeadKind, check_exists, eval_mode
from .experiment import ModelExperiment, parse_head
from .figures import draw_bars
from .maps import AGGREGATE, GATHER, find_patterns
from .mixing import MAX_BYTES, check_prompt, mask_heads, mixing_sites
from .patterns import MarkedPrompt, aggregate_mask, gather_mask, mark_example
from .tables import Column, Row, Table
from .tasks import Questions, check_readable

SEARCHED = 8  # questions that heads are searched on

Pattern = Callable[[MarkedPrompt], Tensor]
"""mask_TS of a prompt."""
Roles = Mapping[HeadId, Sequence[Pattern]]
"""Patterns of each head; a head may have both."""
VARIANTS: dict[str, Callable[[Tensor], Tensor]] = {
    "removed": torch.zeros_like,
    "pattern alone": lambda pattern_TS: pattern_TS,
    "pattern taken out": lambda pattern_TS: ~pattern_TS,
}


@dataclass(frozen=True, kw_only=True)
class Mask(ModelExperiment):
    """Leave of some heads only their gather or aggregate pattern; compare with the heads intact and removed.

    Tasks are those whose answer is in one line of the prompt: kv, letters, needle, two_hop.
    """

    NAME = "mask"

    questions: Questions = field(default_factory=lambda: Questions(tasks="kv", pairs=8, examples=64))
    gather: tuple[str, ...] = ()
    """Gather heads, such as ``L2H6``. Where no heads are named they are searched by pattern."""
    aggregate: tuple[str, ...] = ()
    """Aggregate heads, such as ``L5H5``."""
    k: int = 1
    """Heads of each pattern to take, where none are named."""
    scores: Path | None = None
    """A scores.json: heads are searched among the first of its ranking only."""
    first: int = 10
    """Length of that ranking."""
    kind: HeadKind | None = None
    """Only attention heads, or only ``ssm`` heads."""
    max_gb: float = MAX_BYTES / 2**30
    """Largest matrices, in GiB; larger ones are refused."""

    def run(self) -> str:
        check_counts(k=self.k, first=self.first)
        gather, aggregate = (list(map(parse_head, heads)) for heads in (self.gather, self.aggregate))
        among = None if self.scores is None else HeadScores.load(self.scores).ranking()[: self.first]
        model, tokenizer = self.subject.load()
        max_bytes = int(self.max_gb * 2**30)
        asked = {name: self.questions.examples_of(name) for name in self.questions.names()}
        for examples, _ in asked.values():
            check_readable(model, tokenizer, examples)
        tasks = {name: MaskedTask.of(tokenizer, *questions) for name, questions in asked.items()}
        if not gather and not aggregate:
            examples, _ = next(iter(asked.values()))
            found = find_patterns(model, tokenizer, examples[:SEARCHED], kind=self.kind, max_bytes=max_bytes)
            gather, aggregate = (
                [head for head in found.ranking(by) if among is None or head in among][: self.k]
                for by in (GATHER, AGGREGATE)
            )
        table = mask_patterns(model, tasks, gather, aggregate, kind=self.kind, max_bytes=max_bytes)
        return self.save(table, draw_bars)


@dataclass(frozen=True)
class MaskedTask:
    """Questions as tokens and with their marks; ``chance`` is what guessing gets right of them, 0 to 1."""

    encoded: Sequence[EncodedExample]
    prompts: Sequence[MarkedPrompt]
    chance: float

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example], chance: float) -> MaskedTask:
        """Encode questions. Raises ValueError for one whose answer is in none of its lines, or in several."""
        encoded = [encode_example(tokenizer, example) for example in examples]
        return cls(encoded, [mark_example(tokenizer, example) for example in examples], chance)


def mask_patterns(
    model: PreTrainedModel,
    tasks: Mapping[str, MaskedTask],
    gather: Sequence[HeadId],
    aggregate: Sequence[HeadId],
    *,
    kind: HeadKind | None = None,
    max_bytes: int = MAX_BYTES,
) -> Table:
    """Make a row for the intact model, then three each for gather heads, aggregate heads, and both: `VARIANTS`.

    Raises ValueError for a head that does not exist, for no heads at all, and as `check_prompt` does.
    """
    patterns: tuple[tuple[str, Sequence[HeadId], Pattern], ...] = (
        ("gather", gather, gather_mask),
        ("aggregate", aggregate, aggregate_mask),
    )
    roles: dict[str, dict[HeadId, list[Pattern]]] = {}
    for role, heads, pattern in patterns:
        for name in (role, "both") if gather and aggregate else (role,):
            for head in heads:
                roles.setdefault(name, {}).setdefault(head, []).append(pattern)
    every = sorted({*gather, *aggregate})
    if not every:
        raise ValueError("there are no heads to mask; pass some with --gather or --aggregate.")
    sites = mixing_sites(model, kind)
    for head in every:
        check_exists(model, sites, head)
    for task in tasks.values():
        longest = max((prompt.ids for prompt in task.prompts), key=len)
        check_prompt(model, longest, every, sites, max_bytes)
    wanted: list[tuple[str, Roles, Callable[[Tensor], Tensor]]] = [("intact", {}, torch.ones_like)]
    wanted += [
        (f"{role}: {name}", roles[role], variant)
        for role in ("gather", "aggregate", "both")
        if role in roles
        for name, variant in VARIANTS.items()
    ]
    rows = []
    for label, masked, variant in tqdm(wanted, desc="masking", disable=None):
        values = [_accuracy(model, task, masked, variant, kind) for task in tasks.values()]
        rows.append(Row(label, tuple(100 * value for value in values)))
    named = [f"{role} {' '.join(map(str, heads))}" for role, heads, _ in patterns if heads]
    title = f"{model.name_or_path}: {', '.join(named)}"
    columns = tuple(Column(name, "%", 100 * task.chance) for name, task in tasks.items())
    return Table(title, "heads", columns, tuple(rows))


def _accuracy(
    model: PreTrainedModel, task: MaskedTask, roles: Roles, variant: Callable[[Tensor], Tensor], kind: HeadKind | None
) -> float:
    """Return the share of questions answered right, each prompt with masks of its own."""

    def masks_of(prompt: MarkedPrompt) -> dict[HeadId, Tensor]:
        patterns = {head: torch.stack([pattern(prompt) for pattern in own]).any(0) for head, own in roles.items()}
        return {head: variant(pattern_TS) for head, pattern_TS in patterns.items()}

    with eval_mode(model):
        logprob_EC = [
            masked_logprobs(model, encoded, lambda ids, prompt=prompt: masks_of(replace(prompt, ids=ids)), kind=kind)
            for encoded, prompt in zip(task.encoded, task.prompts, strict=True)
        ]
    return choice_result(logprob_EC, [encoded.answer for encoded in task.encoded]).accuracy


def masked_logprobs(
    model: PreTrainedModel,
    encoded: EncodedExample,
    masks_of: Callable[[Tokens], Mapping[HeadId, Tensor]],
    *,
    kind: HeadKind | None = None,
) -> list[float]:
    """Return the log-probability of each choice, as `answer_choices` finds it, with masks made for each row of tokens.

    Every beginning of a choice is read in a forward of its own: masks do not fit a cache.
    """
    after: dict[Tokens, Tensor] = {}
    for path in encoded.contexts() or [encoded.choices[0][: encoded.n_shared]]:
        ids = encoded.prompt + path
        ids_1L = torch.tensor([ids], device=model.device)
        with mask_heads(model, masks_of(ids), kind=kind):
            logits_1TV = forward(model, ids_1L, torch.ones_like(ids_1L), logits_to_keep=len(path) + 1).logits
        logprob_TV = logits_1TV[0].float().log_softmax(-1)
        after |= {path[:t]: logprob_TV[t] for t in range(len(path) + 1)}
    return encoded.choice_logprobs(lambda path, token: after[path][token].item())
