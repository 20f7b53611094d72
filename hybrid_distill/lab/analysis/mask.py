"""Heads of which only the gather or the aggregate pattern is left (arXiv 2504.18574): is the pattern what they do?

A mask is made for each prompt (`gather_mask`, `aggregate_mask`) and multiplied into the head's matrix, attention map or
materialised SSM; rows are not normalised anew. Beside it: the head removed, and the head without the pattern.
"""

from __future__ import annotations

import sys
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
from ...probes.checks import check_answerable
from ...scoring import HeadScores
from ...teacher import HeadKind, check_exists, eval_mode, longest_context
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
    """Leave of some heads only their gather or aggregate pattern; compare with the heads intact and removed.

    Tasks are those whose answer stands in one line of the prompt: kv, letters, needle, two_hop.
    """

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
    """The folder of the table and the figure, which take the place of earlier ones."""

    def run(self) -> str:
        """The table as text; writes it and its figure to ``out``."""
        check_counts(k=self.k, first=self.first)
        gather, aggregate = (list(map(parse_head, heads)) for heads in (self.gather, self.aggregate))
        among = None if self.scores is None else HeadScores.load(self.scores).ranking()[: self.first]
        model, tokenizer = self.subject.load()
        max_bytes = int(self.max_gb * 2**30)
        asked = {name: self.questions.examples_of(name) for name in self.questions.names()}
        for examples, _ in asked.values():
            check_answerable(examples, tokenizer, longest_context(model.config) or sys.maxsize)
        tasks = {name: MaskedTask.of(tokenizer, *questions) for name, questions in asked.items()}
        if not gather and not aggregate:
            examples, _ = next(iter(asked.values()))
            found = find_patterns(model, tokenizer, examples[:SEARCHED], kind=self.kind, max_bytes=max_bytes)
            gather, aggregate = (
                [head for head in found.ranking(by) if among is None or head in among][: self.k]
                for by in (GATHER, AGGREGATE)
            )
        table = mask_patterns(model, tasks, gather, aggregate, kind=self.kind, max_bytes=max_bytes)
        table.save(self.out, NAME)
        draw_bars(table, self.out / f"{NAME}.png")
        return table.text()


@dataclass(frozen=True)
class MaskedTask:
    """Questions as tokens and with their marks; ``chance`` is what guessing gets right of them, 0 to 1."""

    encoded: Sequence[EncodedExample]
    prompts: Sequence[MarkedPrompt]
    chance: float

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example], chance: float) -> MaskedTask:
        """Raises ValueError for a question whose answer is in none of its lines, or in several."""
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
    sites = mixing_sites(model, kind)
    for head in both:
        check_exists(model, sites, head)
    for task in tasks.values():
        longest = max((prompt.ids for prompt in task.prompts), key=len)
        check_prompt(model, longest, list(both), sites, max_bytes)
    wanted: list[tuple[str, Roles, Callable[[Tensor], Tensor]]] = [("intact", {}, torch.ones_like)]
    wanted += [
        (f"{role}: {name}", heads, variant)
        for role, heads in roles.items()
        if heads
        for name, variant in VARIANTS.items()
    ]
    rows = []
    for label, heads, variant in tqdm(wanted, desc="masking", disable=not progress):
        values = [_accuracy(model, task, heads, variant, kind) for task in tasks.values()]
        rows.append(Row(label, tuple(100 * value for value in values)))
    named = [f"{role} {' '.join(map(str, heads))}" for role, heads in roles.items() if heads and role != "both"]
    title = f"{model.name_or_path}: {', '.join(named)}"
    columns = tuple(Column(name, "%", 100 * task.chance) for name, task in tasks.items())
    return Table(title, "heads", columns, tuple(rows))


def _accuracy(
    model: PreTrainedModel, task: MaskedTask, roles: Roles, variant: Callable[[Tensor], Tensor], kind: HeadKind | None
) -> float:
    """The share of questions answered right, each prompt with masks of its own."""

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
    """Log-probability of each choice, as `answer_choices` finds it, with masks made for each row of tokens.

    A forward for each beginning of a choice that has to be read: none of them with a cache, which masks do not fit.
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
