"""Answers and text losses of one model, alone or next to its teacher.

Shapes: B batch, T predicted token, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..io import Record
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

    def first(self, n: int) -> EvalInputs:
        """Return the first ``n`` questions and texts of each kind, without the far ones, which take long."""
        examples = {size: prompts[:n] for size, prompts in self.examples.items()}
        return replace(
            self,
            examples=examples,
            far_examples={},
            questions=self.questions[:n],
            texts=self.texts[:n],
            progress=False,
        )


def measure(model: PreTrainedModel, inputs: EvalInputs) -> Record:
    """Return the fields of an `EvalResult` that depend on what the model answers."""

    def by_choice(name: str, examples: list[Example]) -> float:
        result = answer_choices(
            model,
            inputs.tokenizer,
            examples,
            batch_size=inputs.batch_size,
            progress=inputs.progress,
            name=name,
        )
        return result.accuracy

    def by_generation(name: str, examples: list[Example]) -> float:
        correct_E = answer_generation(
            model,
            inputs.tokenizer,
            examples,
            batch_size=inputs.batch_size,
            progress=inputs.progress,
            name=name,
        )
        return correct_E.double().mean().item()

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
    return {
        "kv_choice": choice,
        "kv_generation": generation,
        "far_choice": far,
        "knowledge": by_choice("knowledge,", inputs.questions) if inputs.questions else None,
        **compare_on_text(model, inputs.teacher, list(batches), progress=inputs.progress),
    }


def compare_on_text(
    model: PreTrainedModel,
    teacher: PreTrainedModel | None,
    batches: Sequence[TextBatch],
    *,
    progress: bool = False,
) -> Record:
    """Measure a model's perplexity and its agreement with a teacher, over every predicted token of
    the batches.

    Vocabularies padded to different sizes are compared on the tokens they share.
    """
    n_tokens = 0
    loss = 0.0
    n_same = 0.0
    kl = 0.0
    for batch in track(batches, "plain text", hidden=not progress):
        counts_BT = batch.counts_BT
        with eval_mode(model):
            logits_BTV = batch.logits(model)
        n_tokens += int(counts_BT.sum())
        # float64: a sum over many thousand tokens would lose digits in float32.
        loss += batch.token_losses(logits_BTV).double().sum().item()
        if teacher is model:
            # A second forward and two softmaxes over the vocabulary would say the same.
            n_same = n_tokens
        elif teacher is not None:
            with eval_mode(teacher):
                same_BT, kl_BT = agreement(logits_BTV, batch.logits(teacher))
            n_same += same_BT[counts_BT].double().sum().item()
            kl += kl_BT[counts_BT].double().sum().item()
    result: Record = {
        "perplexity": None,
        "top1_agreement": None,
        "kl_to_teacher": None,
        "n_text_tokens": n_tokens,
    }
    if n_tokens:
        # Of the mean over all tokens; the mean of the texts' perplexities would weigh short ones
        # more.
        # Of a student that diverged, infinite: math.exp would raise an error.
        result["perplexity"] = torch.tensor(loss / n_tokens, dtype=torch.float64).exp().item()
        if teacher is not None:
            result["top1_agreement"] = n_same / n_tokens
            result["kl_to_teacher"] = kl / n_tokens
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
