"""Gather and aggregate patterns of heads on a prompt, and heads reduced to only that pattern (arXiv 2504.18574).

`Maps` draws attention maps and mixing matrices side by side. `Mask` multiplies matrices by a mask made for each prompt,
to test whether the pattern is what the heads do. For comparison it removes the head, or the pattern from the head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...data import check_same_vocabulary
from ...io import whole_text
from ...plan import HeadId
from ...probes import check_counts
from ...probes.answering import EncodedExample, Tokens, choice_result, encode_example, forward
from ...probes.registry import make_probe
from ...progress import track
from ...scoring import HeadScores
from ...teacher import HeadKind, eval_mode
from .experiment import Column, Experiment, ModelExperiment, Questions, Row, Subject, Table, check_readable, parse_head
from .figures import draw_bars, draw_maps
from .mixing import MAX_GB, HeadMix, check_prompt, mask_heads, mix_heads
from .patterns import PATTERNS, MarkedPrompt, Sharpness, find_patterns, mark_example, mark_prompt, rank_by, sharpness

COLUMNS_OF_ONE_MODEL = 3
SEARCHED = 8  # questions on which mask searches for heads
VARIANTS: dict[str, Callable[[Tensor], Tensor]] = {
    "removed": torch.zeros_like,
    "pattern alone": lambda pattern_TS: pattern_TS,
    "pattern taken out": lambda pattern_TS: ~pattern_TS,
}
Marked = Sequence[tuple[EncodedExample, MarkedPrompt]]
"""Questions as tokens, each with its marked prompt."""


@dataclass(frozen=True, kw_only=True)
class Maps(Experiment):
    """Show what heads mix on one prompt, which of them gather and aggregate, and whether ablation agrees."""

    NAME = "maps"

    subject: Subject = field(default_factory=Subject)
    beside: tuple[str, ...] = ()
    """More models to show, for the same heads and prompt: a student next to its teacher."""
    heads: tuple[str, ...] = ()
    """Heads to show, such as ``L2H6 L5H5``; by default those that gather and aggregate most."""
    ssm_heads: tuple[str, ...] = ()
    """Recurrent heads to show, for a model that also has attention (Zamba2, Falcon-H1)."""
    kind: HeadKind | None = None
    """Kind of the heads: only attention heads, or only ``ssm`` heads."""
    prompt: str | None = None
    """Your own text, whose lines are the segments; by default a question of the probe."""
    probe: str = "kv"
    """Probe for finding gather and aggregate heads and for the prompt: kv, letters or a RULER task."""
    pairs: int = 8
    """Dictionary size of kv."""
    examples: int = 16
    """Questions that the search averages over."""
    seed: int = 1
    k: int = 3
    """Heads of each pattern to show."""
    scores: Path | None = None
    """Path to a scores.json, to show each head's rank by ablation."""
    max_gb: float = MAX_GB
    """Largest matrices, in GiB; larger ones are refused."""

    def run(self) -> str:
        check_counts(examples=self.examples, k=self.k)
        ablation = [] if self.scores is None else HeadScores.load(self.scores).ranking()
        model, tokenizer = self.subject.load()
        chosen, ssm_heads = list(map(parse_head, self.heads)), list(map(parse_head, self.ssm_heads))
        asked, shown = make_probe(self.probe, pairs=self.pairs, seed=self.seed).examples(self.examples), []
        if ablation or not (chosen or ssm_heads):
            found = find_patterns(model, tokenizer, asked, kind=self.kind)
            named = {pattern: rank_by(found, pattern) for pattern in PATTERNS}
            first = list(dict.fromkeys(head for ranking in named.values() for head in ranking[: self.k]))
            title = f"{model.name_or_path}: heads that gather or aggregate, means over {len(asked)} prompts"
            table = sharpness_table(title, [(str(head), found[head]) for head in first])
            if ablation:
                places = [ablation.index(head) + 1 if head in ablation else math.nan for head in first]
                rows = [row._replace(values=(*row.values, place)) for row, place in zip(table.rows, places)]
                columns = [*table.columns, Column("place by ablation", "", digits=0)]
                table = table._replace(columns=columns, rows=rows)
            shown = [self.save(table, suffix=".patterns")]
            chosen = chosen if chosen or ssm_heads else first
        if self.prompt is None:
            prompt = mark_example(tokenizer, asked[0])
        else:
            prompt = mark_prompt(tokenizer, whole_text(self.prompt))
        panels = self._panels(model, self.subject.model, prompt, chosen, ssm_heads)
        for path in self.beside:
            other, its_tokenizer = replace(self.subject, model=path).load("--beside")
            check_same_vocabulary(tokenizer, its_tokenizer)
            panels += self._panels(other, path, prompt, chosen, ssm_heads)
        n_columns = len(chosen) + len(ssm_heads) if self.beside else COLUMNS_OF_ONE_MODEL
        title = f"one prompt of {len(prompt.ids)} tokens, {len(prompt.segments)} segments: where heads look"
        table = sharpness_table(title, [(label, sharpness(prompt, mix)) for label, mix in panels])
        drawn = self.save(table, lambda _, path: draw_maps(panels, prompt, path, n_columns=n_columns))
        return "\n\n".join([*shown, drawn])

    def _panels(
        self, model: PreTrainedModel, name: str, prompt: MarkedPrompt, heads: list[HeadId], ssm_heads: list[HeadId]
    ) -> list[tuple[str, HeadMix]]:
        label, panels = Path(name).name if self.beside else "", []
        asked: tuple[tuple[list[HeadId], HeadKind | None], ...] = ((heads, self.kind), (ssm_heads, "ssm"))
        for some, kind in asked:
            mixes = mix_heads(model, prompt.ids, some, kind=kind, max_gb=self.max_gb) if some else []
            panels += [(f"{label} {mix.head} {mix.kind}".strip(), mix) for mix in mixes]
        return panels


def sharpness_table(title: str, measured: Sequence[tuple[str, Sharpness]]) -> Table:
    """Make a table with a row per head; shares in percent."""
    columns = [Column("entropy", "bits", digits=2), *map(Column, Sharpness._fields[1:])]
    rows = [Row(label, (found.entropy, *(100 * share for share in found[1:]))) for label, found in measured]
    return Table(title, "head", columns, rows, compared=False)


@dataclass(frozen=True, kw_only=True)
class Mask(ModelExperiment):
    """Keep only the gather or aggregate pattern of some heads; compare with the heads intact and removed.

    The tasks must have their answer in one line of the prompt: kv, letters, niah_single_1 to 3.
    """

    NAME = "mask"

    questions: Questions = field(default_factory=lambda: Questions(tasks="kv", pairs=8, examples=64))
    gather: tuple[str, ...] = ()
    """Gather heads, such as ``L2H6``. If no heads are named, they are searched by pattern."""
    aggregate: tuple[str, ...] = ()
    """Aggregate heads, such as ``L5H5``."""
    k: int = 1
    """Heads of each pattern to use, if none are named."""
    scores: Path | None = None
    """Path to a scores.json; only the top heads of its ranking are searched."""
    first: int = 10
    """Number of those top heads."""
    kind: HeadKind | None = None
    """Only attention heads, or only ``ssm`` heads."""
    max_gb: float = MAX_GB
    """Largest matrices, in GiB; larger ones are refused."""

    def run(self) -> str:
        check_counts(k=self.k, first=self.first)
        heads = {"gather": list(map(parse_head, self.gather)), "aggregate": list(map(parse_head, self.aggregate))}
        among = None if self.scores is None else HeadScores.load(self.scores).ranking()[: self.first]
        model, tokenizer = self.subject.load()
        asked = {name: self.questions.examples_of(name) for name in self.questions.names}
        marked: dict[Column, Marked] = {}
        for name, (examples, chance) in asked.items():
            check_readable(model, tokenizer, examples)
            column = Column(name, chance=100 * chance)
            marked[column] = [(encode_example(tokenizer, e), mark_example(tokenizer, e)) for e in examples]
        if not any(heads.values()):
            (searched, _), *_ = asked.values()
            found = find_patterns(model, tokenizer, searched[:SEARCHED], kind=self.kind)
            own = {head: measures for head, measures in found.items() if among is None or head in among}
            heads = {pattern: rank_by(own, pattern)[: self.k] for pattern in PATTERNS}
        return self.save(self.table(model, marked, heads), draw_bars)

    def table(
        self, model: PreTrainedModel, tasks: Mapping[Column, Marked], heads: Mapping[str, Sequence[HeadId]]
    ) -> Table:
        """Make a row for the intact model, then three (`VARIANTS`) each for gather heads, aggregate heads, and both.

        Raises ValueError for a head that does not exist, for no heads at all, and as `check_prompt` does.
        """
        roles = {role: {role: own} for role, own in heads.items() if own}
        every = sorted({head for own in heads.values() for head in own})
        if not every:
            raise ValueError("there are no heads to mask; pass some with --gather or --aggregate.")
        for marked in tasks.values():
            check_prompt(model, max((prompt.ids for _, prompt in marked), key=len), every, self.kind, self.max_gb)
        title = ", ".join(f"{role} {' '.join(map(str, heads[role]))}" for role in roles)
        if len(roles) > 1:
            roles["both"] = dict(heads)
        wanted = [("intact", {}, torch.ones_like)]
        wanted += [(f"{role}: {name}", own, mask) for role, own in roles.items() for name, mask in VARIANTS.items()]
        rows = []
        with eval_mode(model):
            for label, own, variant in track(wanted, "masking"):
                values = []
                for marked in tasks.values():
                    masks = (partial(_masks, prompt, own, variant) for _, prompt in marked)
                    found = [masked_logprobs(model, e, m, kind=self.kind) for (e, _), m in zip(marked, masks)]
                    values.append(100 * choice_result(found, [encoded.answer for encoded, _ in marked]).accuracy)
                rows.append(Row(label, tuple(values)))
        return Table(f"{model.name_or_path}: {title}", "heads", list(tasks), rows)


def _masks(
    prompt: MarkedPrompt, roles: Mapping[str, Sequence[HeadId]], variant: Callable[[Tensor], Tensor], ids: Tokens
) -> dict[HeadId, Tensor]:
    """Make the masks for ``ids``, which continue a prompt; a head may have both roles."""
    patterns: dict[HeadId, Tensor] = {}
    for role, heads in roles.items():
        pattern_TS = PATTERNS[role](replace(prompt, ids=ids))
        patterns |= {head: pattern_TS | patterns.get(head, torch.zeros_like(pattern_TS)) for head in heads}
    return {head: variant(pattern_TS) for head, pattern_TS in patterns.items()}


def masked_logprobs(
    model: PreTrainedModel,
    encoded: EncodedExample,
    masks_of: Callable[[Tokens], Mapping[HeadId, Tensor]],
    *,
    kind: HeadKind | None = None,
) -> list[float]:
    """Return the log-probability of each choice, as `answer_choices` does, with masks made for each row of tokens.

    Runs a separate forward for every prefix of a choice, because masks do not work with a cache.
    """
    after: dict[Tokens, Tensor] = {}
    for path in encoded.contexts() or [encoded.choices[0][: encoded.n_shared]]:
        ids = encoded.prompt + path
        ids_1L = torch.tensor([ids], device=model.device)
        with mask_heads(model, masks_of(ids), kind=kind):
            logits_1TV = forward(model, ids_1L, torch.ones_like(ids_1L), logits_to_keep=len(path) + 1).logits
        logprob_TV = logits_1TV[0].float().log_softmax(-1)
        after |= {path[:t]: logprob_TV[t] for t in range(len(path) + 1)}
    read_1Q = torch.tensor([[after[path][token] for path, token in encoded.reads]], dtype=torch.float64)
    return encoded.choice_logprobs(read_1Q)[0].tolist()
