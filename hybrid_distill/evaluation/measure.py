"""Answers and text losses of one model, alone or next to its teacher.

Shapes: B batch, T predicted token, V vocabulary, E question, X text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..io import Record
from ..model.self_check import check_not_nan
from ..probes import Example
from ..probes.answering import answer_choices, answer_generation
from ..probes.plain_text import TextBatch, text_batches
from ..progress import track
from ..teacher import eval_mode


@dataclass(frozen=True)
class EvalInputs:
    """Questions and texts for measuring a model, and the teacher to compare it with."""

    tokenizer: PreTrainedTokenizerBase
    teacher: PreTrainedModel | None
    examples: dict[int, list[Example]]
    """KV-retrieval prompts by dictionary size."""
    questions: list[Example]
    texts: list[str]
    max_text_tokens: int
    batch_size: int
    progress: bool = False
    far_examples: dict[int, list[Example]] = field(default_factory=dict)
    """The same with words between dictionary and question."""
    label: str = ""
    """Words before the name of each task in the progress."""

    def first(self, n: int) -> EvalInputs:
        """Return the first ``n`` questions and texts of each kind, without the far ones, which take long."""
        examples = {size: prompts[:n] for size, prompts in self.examples.items()}
        return replace(
            self,
            examples=examples,
            far_examples={},
            questions=self.questions[:n],
            texts=self.texts[:n],
        )


class TextSums(NamedTuple):
    """Sums over the predicted tokens of each text, in float64. Without a teacher, the last two are NaN."""

    n_tokens_X: Tensor
    loss_X: Tensor
    n_same_X: Tensor
    """Tokens whose first choice is the teacher's."""
    kl_X: Tensor
    """KL(teacher || model) in nats."""

    def first(self, n: int) -> TextSums:
        """Return the sums of the first ``n`` texts."""
        return TextSums(*(sums_X[:n] for sums_X in self))


@dataclass(frozen=True)
class Answers:
    """Answers to all questions, each right (True) or wrong, and the sums over texts."""

    choice: dict[int, Tensor]
    """By dictionary size, as ``generation`` and ``far``."""
    generation: dict[int, Tensor]
    far: dict[int, Tensor]
    knowledge: Tensor | None
    texts: TextSums

    def to_questions_of(self, few: Answers) -> Answers:
        """Return the answers to the questions and texts of ``few``, which are the first of these."""
        knowledge = self.knowledge
        if knowledge is not None and few.knowledge is not None:
            knowledge = knowledge[: len(few.knowledge)]
        return Answers(
            choice=_first_answers(self.choice, few.choice),
            generation=_first_answers(self.generation, few.generation),
            far=_first_answers(self.far, few.far),
            knowledge=knowledge,
            texts=self.texts.first(len(few.texts.n_tokens_X)),
        )

    def figures(self) -> Record:
        """Return the fields of an `EvalResult` that depend on the answers."""
        knowledge = None
        if self.knowledge is not None:
            knowledge = _accuracy(self.knowledge)
        return {
            "kv_choice": _accuracies(self.choice),
            "kv_generation": _accuracies(self.generation),
            "far_choice": _accuracies(self.far),
            "knowledge": knowledge,
            **text_figures(self.texts),
        }


def _first_answers(many: dict[int, Tensor], few: dict[int, Tensor]) -> dict[int, Tensor]:
    """Return as many answers of each dictionary size as ``few`` has."""
    return {n: many[n][: len(correct_E)] for n, correct_E in few.items()}


def _accuracies(correct: dict[int, Tensor]) -> dict[int, float]:
    return {n: _accuracy(correct_E) for n, correct_E in correct.items()}


def _accuracy(correct_E: Tensor) -> float:
    return correct_E.double().mean().item()


def measure(model: PreTrainedModel, inputs: EvalInputs) -> Answers:
    """Ask a model all questions, and read it all texts."""

    def by_choice(name: str, examples: list[Example]) -> Tensor:
        result = answer_choices(
            model,
            inputs.tokenizer,
            examples,
            batch_size=inputs.batch_size,
            progress=inputs.progress,
            name=inputs.label + name,
        )
        return result.correct_E

    def by_generation(name: str, examples: list[Example]) -> Tensor:
        return answer_generation(
            model,
            inputs.tokenizer,
            examples,
            batch_size=inputs.batch_size,
            progress=inputs.progress,
            name=inputs.label + name,
        )

    batches = text_batches(
        model,
        inputs.tokenizer,
        inputs.texts,
        max_tokens=inputs.max_text_tokens,
        batch_size=inputs.batch_size,
    )
    choice = {}
    generation = {}
    for n, examples in inputs.examples.items():
        choice[n] = by_choice(f"{n} pairs by choice,", examples)
        generation[n] = by_generation(f"{n} pairs by generation,", examples)
    far = {}
    for n, examples in inputs.far_examples.items():
        far[n] = by_choice(f"{n} pairs far away,", examples)
    knowledge = None
    if inputs.questions:
        knowledge = by_choice("knowledge,", inputs.questions)
    texts = compare_on_text(
        model,
        inputs.teacher,
        list(batches),
        progress=inputs.progress,
        name=f"{inputs.label}plain text",
    )
    return Answers(choice, generation, far, knowledge, texts)


def compare_on_text(
    model: PreTrainedModel,
    teacher: PreTrainedModel | None,
    batches: Sequence[TextBatch],
    *,
    progress: bool = False,
    name: str = "plain text",
) -> TextSums:
    """Measure a model's loss on texts, and how far its predictions are from its teacher's.

    Vocabularies padded to different sizes are compared on the tokens they share.
    """
    sums_X4 = [torch.zeros(0, 4, dtype=torch.float64)]
    for batch in track(batches, name, hidden=not progress):
        counts_BT = batch.counts_BT
        with eval_mode(model):
            logits_BTV = batch.logits(model)
        loss_BT = batch.token_losses(logits_BTV)
        if teacher is None:
            same_BT = kl_BT = torch.full_like(loss_BT, torch.nan)
        elif teacher is model:
            # A second forward and two softmaxes over the vocabulary would say the same.
            same_BT = torch.ones_like(loss_BT)
            kl_BT = torch.zeros_like(loss_BT)
        else:
            same_BT, kl_BT = _against_teacher(logits_BTV, teacher, batch)
        figures_BT4 = torch.stack([counts_BT, loss_BT, same_BT, kl_BT], dim=-1)
        # float64: a sum over many thousand tokens would lose digits in float32.
        counted_BT4 = figures_BT4.double().masked_fill(~counts_BT[..., None], 0)
        # One transfer: every read from the device costs a sync.
        sums_B4 = counted_BT4.sum(1).cpu()
        check_not_nan(TextSums(*sums_B4.T).loss_X, model)
        sums_X4.append(sums_B4)
    return TextSums(*torch.cat(sums_X4).T)


def _against_teacher(
    logits_BTV: Tensor, teacher: PreTrainedModel, batch: TextBatch
) -> tuple[Tensor, Tensor]:
    """Run the teacher on a batch; return its `agreement` with a model's logits."""
    with eval_mode(teacher):
        teacher_BTV = batch.logits(teacher)
    # One number a token to look at: a maximum is NaN if any of its logits is.
    largest_BT = teacher_BTV.amax(-1).to(batch.counts_BT.device)
    check_not_nan(largest_BT[batch.counts_BT], teacher)
    return agreement(logits_BTV, teacher_BTV)


def text_figures(texts: TextSums) -> Record:
    """Return means over all tokens; the mean of the texts' perplexities would weigh short ones more."""
    n_tokens, loss, n_same, kl = (sums_X.sum() for sums_X in texts)
    result: Record = {
        "perplexity": None,
        "top1_agreement": None,
        "kl_to_teacher": None,
        "n_text_tokens": int(n_tokens),
    }
    if n_tokens:
        # A diverged student's is infinite, for which math.exp would raise an error.
        result["perplexity"] = (loss / n_tokens).exp().item()
    if n_tokens and not n_same.isnan():
        result["top1_agreement"] = (n_same / n_tokens).item()
        result["kl_to_teacher"] = (kl / n_tokens).item()
    return result


def agreement(logits_BTV: Tensor, teacher_BTV: Tensor) -> tuple[Tensor, Tensor]:
    """Return (same_BT, kl_BT): equal top tokens, and KL(teacher || model) in nats, on shared V."""
    n_shared = min(logits_BTV.shape[-1], teacher_BTV.shape[-1])
    teacher_BTV = teacher_BTV.to(logits_BTV.device)
    same = []
    kl = []
    # Row by row: intermediate results take several times the memory of the logits.
    for ours_TV, theirs_TV in zip(logits_BTV[..., :n_shared], teacher_BTV[..., :n_shared]):
        ours_log = ours_TV.log_softmax(-1)
        theirs_log = theirs_TV.log_softmax(-1)
        same.append(ours_TV.argmax(-1) == theirs_TV.argmax(-1))
        # From log-probabilities: ratios of probabilities underflow.
        kl.append((theirs_log.exp() * (theirs_log - ours_log)).sum(-1))
    return torch.stack(same), torch.stack(kl)
