"""Heads of which only the gather or the aggregate pattern is left (arXiv 2504.18574): is the pattern what they do?

A mask is made for each prompt (`gather_mask`, `aggregate_mask`) and multiplied into the head's matrix, attention map or
materialised SSM; rows are not normalised anew. Beside it: the head removed, and the head without the pattern.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..plan import HeadId
from ..probes import Example, check_counts
from ..probes.answering import answer_choices, encode_example
from ..probes.checks import check_answerable
from ..scoring import HeadScores
from ..teacher import HeadKind, eval_mode, longest_context
from .figures import draw_bars
from .maps import AGGREGATE, GATHER, find_patterns, parse_head
from .mixing import MAX_BYTES, check_prompt, mask_heads, mixing_sites
from .patterns import MarkedPrompt, aggregate_mask, gather_mask, mark_example
from .tables import Column, Row, Table
from .tasks import Questions, Subject

NAME = "mask"
SEARCHED = 8  # questions that heads are searched on

Pattern = Callable[[MarkedPrompt], Tensor]
"""mask_TS of a prompt."""
Roles = Mapping[HeadId, Sequence[Pattern]]
"""What each head is there for; a head may do both."""
VARIANTS: dict[str, Callable[[Tensor], Tensor]] = {
    "removed": torch.zeros_like,
    "pattern alone": lambda pattern_TS: pattern_TS,
    "pattern taken out": lambda pattern_TS: ~pattern_TS,
}


@dataclass(frozen=True)
class Mask:
    """Leave of some heads only their gather or aggregate pattern; compare with the heads intact and removed."""

    subject: Subject = field(default_factory=Subject)
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
    """How many of that ranking."""
    kind: HeadKind | None = None
    """Only attention heads, or only ``ssm`` heads."""
    max_gb: float = MAX_BYTES / 2**30
    """Larger matrices are refused."""
    out: Path = Path("runs/analysis")
    """The folder of the table and the figure."""

    def run(self) -> str:
        """The table as text; writes it and its figure to ``out``."""
        check_counts(k=self.k, first=self.first)
        gather, aggregate = (list(map(parse_head, heads)) for heads in (self.gather, self.aggregate))
        among = None if self.scores is None else HeadScores.load(self.scores).ranking()[: self.first]
        model, tokenizer = self.subject.load()
        max_bytes = int(self.max_gb * 2**30)
        tasks = {name: MaskedTask.of(model, tokenizer, name, self.questions) for name in self.questions.names()}
        if not gather and not aggregate:
            examples = next(iter(tasks.values())).examples[:SEARCHED]
            found = find_patterns(model, tokenizer, examples, kind=self.kind, max_bytes=max_bytes)
            gather, aggregate = (
                [head for head in found.ranking(by) if among is None or head in among][: self.k]
                for by in (GATHER, AGGREGATE)
            )
        table = mask_patterns(model, tokenizer, tasks, gather, aggregate, kind=self.kind, max_bytes=max_bytes)
        table.save(self.out, NAME)
        draw_bars(table, self.out / f"{NAME}.png")
        return table.text()


@dataclass(frozen=True)
class MaskedTask:
    """Questions with their marks, and what guessing gets right of them (a share)."""

    examples: Sequence[Example]
    prompts: Sequence[MarkedPrompt]
    chance: float

    @classmethod
    def of(
        cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str, questions: Questions
    ) -> MaskedTask:
        """Raises ValueError for questions without marks, and for those that one forward does not answer."""
        examples, chance = questions.examples_of(name)
        context = longest_context(model.config)
        if context is not None:
            check_answerable(examples, tokenizer, context)
        if any(encode_example(tokenizer, example).contexts() for example in examples):
            raise ValueError(
                f"the choices of {name} have several tokens for this tokenizer, and a mask is for one forward; "
                "take --tasks letters."
            )
        return cls(examples, [mark_example(tokenizer, example) for example in examples], chance)


def mask_patterns(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Mapping[str, MaskedTask],
    gather: Sequence[HeadId],
    aggregate: Sequence[HeadId],
    *,
    kind: HeadKind | None = None,
    max_bytes: int = MAX_BYTES,
    progress: bool = True,
) -> Table:
    """A row for the intact model, then three each for the gather heads, the aggregate heads, and both: `VARIANTS`.

    Raises ValueError for a head that does not exist, for no heads at all, and for what `check_prompt` refuses.
    """
    roles: dict[str, dict[HeadId, list[Pattern]]] = {
        "gather": {head: [gather_mask] for head in gather},
        "aggregate": {head: [aggregate_mask] for head in aggregate},
    }
    both: dict[HeadId, list[Pattern]] = {}
    for role in roles.values():
        for head, patterns in role.items():
            both.setdefault(head, []).extend(patterns)
    if gather and aggregate:
        roles["both"] = both
    if not both:
        raise ValueError("there are no heads to mask; name some with --gather or --aggregate.")
    for task in tasks.values():
        longest = max((prompt.ids for prompt in task.prompts), key=len)
        check_prompt(model, longest, list(both), mixing_sites(model, kind), max_bytes)
    wanted = [(f"{role}: {name}", roles[role], name) for role in roles if roles[role] for name in VARIANTS]
    rows = []
    for label, heads, name in tqdm([("intact", {}, ""), *wanted], desc="masking", disable=not progress):
        values = [_accuracy(model, tokenizer, task, heads, VARIANTS.get(name), kind) for task in tasks.values()]
        rows.append(Row(label, tuple(100 * value for value in values)))
    named = [f"{role} {' '.join(map(str, heads))}" for role, heads in roles.items() if heads and role != "both"]
    title = f"{model.name_or_path}: {', '.join(named)}"
    columns = tuple(Column(name, "%", 100 * task.chance) for name, task in tasks.items())
    return Table(title, "heads", columns, tuple(rows))


def _accuracy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: MaskedTask,
    roles: Roles,
    variant: Callable[[Tensor], Tensor] | None,
    kind: HeadKind | None,
) -> float:
    """The share of questions answered right, each prompt with masks of its own; without a variant, as the model is."""
    if variant is None:
        return answer_choices(model, tokenizer, task.examples).accuracy
    n_right = 0.0
    for example, prompt in zip(task.examples, task.prompts, strict=True):
        masks = {}
        for head, patterns in roles.items():
            pattern_TS = torch.stack([pattern(prompt) for pattern in patterns]).any(0)
            masks[head] = variant(pattern_TS)
        with eval_mode(model), mask_heads(model, masks, kind=kind):
            n_right += answer_choices(model, tokenizer, [example]).accuracy
    return n_right / len(task.examples)
