"""What is asked of every ablated model, and what each head is found to do.

Shapes: L layer, H query head (in `Measured`: of all heads that are scored), E example (in the order they are tried),
T text, K kind of judgement, B example of a sheet.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..plan import HeadId
from ..probes import Example
from ..probes.answering import EncodedExample, Tokens, encode_example
from ..probes.plain_text import text_rows
from ..teacher import HeadSite
from .forwards import Forwards
from .head_scores import HeadScores
from .probe_batch import QuestionSheet, Sheet, TextSheet, question_sheets, row_length, text_sheets
from .racing import Race
from .ranks import rank_and_world, share, together
from .resume import Steps
from .uncertainty import bootstrap_interval, split_half

AGREEMENT_AT = (1, 2, 5, 10, 20, 50, 100)

log = logging.getLogger(__name__)


@dataclass
class Task:
    """The questions and texts that every ablated model is run on."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    examples: Sequence[Example]
    encoded: list[EncodedExample]
    texts: list[Tokens]
    generates: bool

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        examples: Sequence[Example],
        texts: Sequence[str],
        control_tokens: int,
        by: str,
    ) -> Task:
        encoded = [encode_example(tokenizer, example) for example in examples]
        rows = text_rows(tokenizer, texts, max_tokens=control_tokens)
        return cls(model, tokenizer, examples, encoded, rows, by == "generation")

    def describe_control(self, texts: Sequence[str], control_tokens: int) -> dict[str, Any] | None:
        if not self.texts:
            return None
        sha256 = hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]
        return {"texts": len(texts), "tokens": control_tokens, "sha256": sha256}

    def sheets(self, numbers: Sequence[int], texts: bool) -> list[Sheet]:
        """This process's share of some examples, and of all texts if asked for."""
        longest_first = sorted(numbers, key=lambda n: (-row_length(self.encoded[n]), n))
        sheets = question_sheets(self.examples, self.encoded, share(longest_first), self.model.device)
        if texts:
            longest_first = sorted(range(len(self.texts)), key=lambda n: (-len(self.texts[n]), n))
            sheets += text_sheets(self.texts, share(longest_first), self.model.device)
        return sheets

    def samples(self) -> list[Sheet]:
        """The longest question, one whose choices need a tree, the longest text: to try shortcuts on."""
        longest = max(range(len(self.encoded)), key=lambda n: row_length(self.encoded[n]))
        trees = [n for n, e in enumerate(self.encoded) if e.contexts()]
        numbers = list(dict.fromkeys([longest, *trees[:1]]))
        sheets = question_sheets(self.examples, self.encoded, numbers, self.model.device)
        if self.texts:
            text = max(range(len(self.texts)), key=lambda n: len(self.texts[n]))
            sheets += text_sheets(self.texts, [text], self.model.device)
        return sheets

    def collect(
        self, sheets: Sequence[Sheet], n_heads: int, read: Callable[[Sheet], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """(answers_KHE by example number, loss_HT by text number) of all processes; NaN where nothing was read."""
        answers_KHE = torch.full((2, n_heads, len(self.examples)), math.nan, dtype=torch.float64)
        loss_HT = torch.full((n_heads, len(self.texts)), math.nan, dtype=torch.float64)
        mine = together(lambda: [(isinstance(sheet, TextSheet), sheet.numbers, read(sheet)) for sheet in sheets])
        for is_text, numbers, found_KHB in (each for shares in mine for each in shares):
            if is_text:
                loss_HT[:, numbers] = found_KHB[0]
            else:
                answers_KHE[:, :, numbers] = found_KHB
        return answers_KHE, loss_HT


class Measured:
    """What each head is found to do on the examples, in the order in which they are tried; NaN: not tried."""

    def __init__(self, task: Task, heads: list[HeadId], race: Race | None) -> None:
        self.task, self.heads, self.race = task, heads, race
        self.order = list(range(len(task.examples))) if race is None else race.order()
        self.rounds = [len(self.order)] if race is None else race.rounds
        self.right_HE = torch.full((len(heads), len(self.order)), math.nan, dtype=torch.float64)
        self.logprob_HE = self.right_HE.clone()
        self.loss_HT = torch.full((len(heads), len(task.texts)), math.nan, dtype=torch.float64)

    def baseline(self, forwards: Forwards) -> None:
        """The model as it is, on everything."""

        def read(sheet: Sheet) -> Tensor:
            found_K1B = sheet.judge(forwards.whole(sheet))
            if self.task.generates and isinstance(sheet, QuestionSheet):
                found_K1B[0, 0] = self._generated(forwards, sheet)
            _check_numbers(found_K1B, sheet, [None])
            return found_K1B

        answers_K1E, loss_1T = self.task.collect(self.task.sheets(self.order, texts=True), 1, read)
        (self.right_E, self.logprob_E), self.loss_T = answers_K1E[:, 0, self.order], loss_1T[0]

    def ablate(self, forwards: Forwards, steps: Steps, progress: bool) -> None:
        """Every head on every example, or in a race as long as a head stays in it."""
        racing, seen = list(range(len(self.heads))), 0
        hidden = not progress or rank_and_world()[0] > 0
        with tqdm(desc="ablating heads", unit="row", total=0, disable=hidden) as bar, _interruptible(steps):
            for end in self.rounds:
                sheets = self.task.sheets(self.order[seen:end], texts=end == len(self.order))
                forwards.begin(sheets)
                bar.total += len(racing) * sum(map(len, sheets))
                for layer in sorted({self.heads[index].layer for index in racing}):
                    of_layer = [index for index in racing if self.heads[index].layer == layer]
                    step = steps.next()
                    if step is None:
                        step = self._step(forwards, sheets, layer, of_layer, slice(seen, end), bar)
                        steps.add(step)
                    else:
                        bar.update(len(of_layer) * sum(map(len, sheets)))
                    self._keep(step, of_layer, slice(seen, end))
                if self.race is not None and end < len(self.order):
                    stays = self.race.stay(self.right_E, self.right_HE[racing, :end])
                    racing = [index for index, stay in zip(racing, stays) if stay]
                seen = end

    def _step(
        self, forwards: Forwards, sheets: Sequence[Sheet], layer: int, indices: Sequence[int], tried: slice, bar: Any
    ) -> dict[str, Any]:
        """One layer's heads on one round's examples, as JSON."""
        heads = [self.heads[index] for index in indices]

        def read(sheet: Sheet) -> Tensor:
            found_KHB = sheet.judge(forwards.without(sheet, layer, [head.head for head in heads]))
            if self.task.generates and isinstance(sheet, QuestionSheet):
                for index, head in enumerate(heads):
                    with forwards.ablated(head):
                        found_KHB[0, index] = self._generated(forwards, sheet)
            _check_numbers(found_KHB, sheet, heads)
            bar.update(len(heads) * len(sheet))
            return found_KHB

        (right_HE, logprob_HE), loss_HT = self.task.collect(sheets, len(heads), read)
        tables = {"right": right_HE[:, self.order[tried]].int(), "logprob": logprob_HE[:, self.order[tried]]}
        if tried.stop == len(self.order):
            tables["loss"] = loss_HT  # this process may have had no text, but others have
        return {name: table.tolist() for name, table in tables.items()}

    def _generated(self, forwards: Forwards, sheet: QuestionSheet) -> Tensor:
        model, tokenizer = self.task.model, self.task.tokenizer
        return forwards.rows.fitting(sheet, lambda rows: sheet.generated(model, tokenizer, rows))

    def _keep(self, step: dict[str, Any], indices: Sequence[int], tried: slice) -> None:
        for name, table in (("right", self.right_HE), ("logprob", self.logprob_HE)):
            table[indices, tried] = torch.tensor(step[name], dtype=torch.float64)
        if "loss" in step:
            self.loss_HT[indices] = torch.tensor(step["loss"], dtype=torch.float64)

    def scores(
        self, sites: Sequence[HeadSite], n_layers: int, baseline: dict[str, Any], provenance: dict[str, Any]
    ) -> HeadScores:
        """All tables; heads that were not measured get NaN."""
        differences = {
            "accuracy": self.right_E - self.right_HE,
            "logprob": self.logprob_E - self.logprob_HE,
            "control": self.loss_HT - self.loss_T,
        }
        spread = _Spread(self.heads, n_layers, max(site.n_heads for site in sites))
        tables: dict[str, Any] = {}
        for name, difference_HE in differences.items():
            measured = difference_HE.shape[1] > 0
            tables[f"{name}_drop_LH"] = spread(difference_HE.nanmean(1)) if measured else None
            tables[f"{name}_se_LH"] = spread(_standard_error(difference_HE)) if measured else None
            tables[f"{name}_interval_LH2"] = spread(bootstrap_interval(difference_HE)) if measured else None
        n_tried_H = (~self.right_HE.isnan()).sum(1)
        ks = {*AGREEMENT_AT, *([] if self.race is None else [self.race.k])}
        return HeadScores(
            sites[0].n_kv_heads,
            **tables,
            baseline={
                **baseline,
                "accuracy": self.right_E.mean().item(),
                "answer_logprob": self.logprob_E.mean().item(),
                "control_loss": self.loss_T.mean().item() if len(self.loss_T) else None,
            },
            provenance=provenance,
            n_examples_LH=spread(n_tried_H.double()).nan_to_num(0).long(),
            agreement=(
                split_half(differences["accuracy"], differences["logprob"], sorted(ks)) if len(self.order) > 1 else None
            ),
        )


class _Spread:
    """Puts one entry per head into a table [L, H, ...]; NaN where there is none."""

    def __init__(self, heads: Sequence[HeadId], n_layers: int, n_heads: int) -> None:
        self.shape = (n_layers, n_heads)
        self.layers, self.heads = [head.layer for head in heads], [head.head for head in heads]

    def __call__(self, entry_H: Tensor) -> Tensor:
        table_LH = torch.full((*self.shape, *entry_H.shape[1:]), math.nan, dtype=torch.float64)
        table_LH[self.layers, self.heads] = entry_H
        return table_LH


def _standard_error(difference_HE: Tensor) -> Tensor:
    """Of the mean over the examples that were tried; 0 for a single one."""
    n_H = (~difference_HE.isnan()).sum(1)
    from_mean_HE = (difference_HE - difference_HE.nanmean(1, keepdim=True)).nan_to_num()
    return (from_mean_HE.square().sum(1) / (n_H - 1).clamp(min=1) / n_H).sqrt()


def _check_numbers(found_KHB: Tensor, sheet: Sheet, heads: Sequence[HeadId | None]) -> None:
    """Raise ValueError, naming head and example, for a reading that is no number."""
    bad = (~found_KHB.isfinite()).any(0).nonzero().tolist()
    if bad:
        index, row = bad[0]
        head = "with all heads in place" if heads[index] is None else f"without {heads[index]}"
        which = f"text {sheet.numbers[row]}"
        if isinstance(sheet, QuestionSheet):
            which = f"example {sheet.numbers[row]} ({sheet.examples[row].prompt[:60]!r} ...)"
        raise ValueError(
            f"{head} the logits of {which} are not numbers, nor are those of {len(bad) - 1} more; load the model in "
            "float32 or bfloat16, check its weights, or leave the head out of heads. Layers measured before are in the "
            "file of resume_path, if that is set: the same call goes on from there."
        )


@contextmanager
def _interruptible(steps: Steps) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        log.warning("scoring was interrupted; %s", steps.describe())
        raise
