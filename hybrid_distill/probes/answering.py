"""Two ways of reading a model's answer: the most likely of the given choices, and greedy generation.

Shapes: B batch, E example, C choice, L length, S positions read, R context row, T new tokens, V vocabulary,
Q log-probability read (`EncodedExample.reads`), A all of a batch's, G model.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

from ..model.layout import cache_argument, cache_of
from ..progress import track
from ..teacher import eval_mode, generated
from . import Example, check_counts

Tokens = tuple[int, ...]


class Output(Protocol):
    """Output of a causal language model."""

    logits: Tensor


@dataclass(frozen=True)
class ChoiceResult:
    """A model's answers to E examples.

    ``logprob_EC`` holds one list per example (the number of choices may differ) with the log-probability of each
    whole choice, in nats. ``answer_logprob_E`` is the log-probability of the correct answer; ``correct_E`` is true
    where it exceeds every other choice's.
    """

    logprob_EC: list[list[float]]
    answer_logprob_E: Tensor
    correct_E: Tensor

    @property
    def accuracy(self) -> float:
        """Share of examples answered correctly, 0 to 1."""
        return self.correct_E.double().mean().item()


@dataclass(frozen=True)
class EncodedExample:
    """One example as tokens: the prompt, and each choice as a continuation of the prompt.

    All choices begin with the same ``n_shared`` tokens (for some tokenizers, the space before a number), followed by
    at least one more token. ``stops[c]`` holds the tokens that would extend choice c to a longer choice: for a
    tokenizer that splits digits, " 8" must not count where the model is about to write " 84".
    """

    prompt: Tokens
    choices: tuple[Tokens, ...]
    n_shared: int
    stops: tuple[Tokens, ...]
    answer: int

    def contexts(self) -> list[Tokens]:
        """Return prefixes of choices, longer than the shared one, after which a token must be predicted."""
        return sorted({choice[:-1] for choice in self.choices if len(choice) > self.n_shared + 1})

    @cached_property
    def reads(self) -> list[tuple[Tokens, int]]:
        """Pairs (tokens after the prompt, next token) whose log-probabilities make up those of the choices."""
        needed = {(choice[:t], token) for choice in self.choices for t, token in enumerate(choice)}
        needed |= {(choice, token) for choice, stop in zip(self.choices, self.stops) for token in stop}
        return sorted(needed)

    def choice_logprobs(self, reads_GQ: Tensor) -> Tensor:
        """Return log-probabilities of the choices, [G, C], from those of `reads`, for G models.

        Sums over a choice's tokens, then excludes the probability of continuing to a longer choice.
        """
        logprob_G = dict(zip(self.reads, reads_GQ.unbind(1)))
        totals, nothing = [], torch.zeros(())
        for choice, stop in zip(self.choices, self.stops):
            total_G = sum((logprob_G[choice[:t], token] for t, token in enumerate(choice)), nothing)
            if stop:
                going_on_G = sum((logprob_G[choice, token].exp() for token in stop), nothing)
                total_G = total_G + (1 - going_on_G).clamp(min=1e-30).log()
            totals.append(total_G)
        return torch.stack(totals, dim=1)


def encode_example(tokenizer: PreTrainedTokenizerBase, example: Example) -> EncodedExample:
    """Tokenize ``prompt + choice`` as the model would read it, for every choice.

    Raises ValueError if two choices have the same tokens: the tokenizer cannot distinguish them.
    """
    texts = [example.prompt, *(example.prompt + choice for choice in example.choices)]
    prompt, *rows = tokenize(tokenizer, texts)
    if len(set(rows)) < len(rows):
        raise ValueError(
            f"some of the choices {example.choices} become the same tokens; "
            "use a tokenizer that tells them apart, or other choices."
        )
    n_common = min(common_prefix(rows), min(map(len, rows)) - 1)
    # A tokenizer may merge the prompt's end with a choice's beginning: a merged token belongs to the choice.
    n_prompt = min(n_common, common_prefix([prompt, *rows]))
    choices = tuple(row[n_prompt:] for row in rows)
    stops = tuple(
        tuple(sorted({c[len(choice)] for c in choices if c != choice and c[: len(choice)] == choice}))
        for choice in choices
    )
    answer = example.choices.index(example.answer)
    return EncodedExample(rows[0][:n_prompt], choices, n_common - n_prompt, stops, answer)


def tokenize(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[Tokens]:
    """Tokenize each text, with the tokenizer's beginning-of-text token if it adds one; without end-of-text.

    A text that already begins with that token, as chat templates write it, does not get a second one.
    """
    rows: list[list[int]] = tokenizer(list(texts), add_special_tokens=False)["input_ids"] if texts else []
    first: list[int] = tokenizer("a")["input_ids"]
    start = first[:1] if tokenizer.bos_token_id is not None and first[:1] == [tokenizer.bos_token_id] else []
    return [tuple(row) if start and row[:1] == start else (*start, *row) for row in rows]


def common_prefix(rows: Sequence[Tokens]) -> int:
    """Return the length of the longest common prefix of all rows, in tokens."""
    columns = enumerate(zip(*rows))
    return next((place for place, column in columns if len(set(column)) > 1), min(map(len, rows)))


class ChoiceBatch:
    """Examples that are answered together; everything independent of the model is computed once.

    One forward pass over the prompts reads the first tokens after the shared prefix of each example's choices. Where
    choices have more tokens, each context (`EncodedExample.contexts`) extends the prompts' cache.
    """

    def __init__(self, encoded: Sequence[EncodedExample], device: torch.device) -> None:
        self.encoded = list(encoded)
        self.input_ids_BL, self.mask_BL = left_pad([e.prompt + e.choices[0][: e.n_shared] for e in encoded], device)
        self.n_logits = 1 + max(e.n_shared for e in encoded)
        self.contexts = [(example, path) for example, e in enumerate(encoded) for path in e.contexts()]
        row_of = {
            (example, path[:t]): row for row, (example, path) in enumerate(self.contexts) for t in range(len(path) + 1)
        }
        # For each log-probability: in a context or not, row, offset from prompt end or context start, token.
        self.address_4A = torch.tensor(
            [
                (place >= 0, row_of[example, path] if place >= 0 else example, place, token)
                for example, e in enumerate(encoded)
                for path, token in e.reads
                for place in [len(path) - e.n_shared - 1]
            ],
            device=device,
        ).T

    def reads(self, model: PreTrainedModel) -> Sequence[Tensor]:
        """Compute the log-probabilities of each example's `EncodedExample.reads`, running each prompt once."""
        found_A = torch.empty(self.address_4A.shape[1], dtype=torch.float64)
        has_contexts = bool(self.contexts)
        output = forward(model, self.input_ids_BL, self.mask_BL, logits_to_keep=self.n_logits, use_cache=has_contexts)
        self._read(output.logits, found_A, in_contexts=False)
        if has_contexts:
            example_R = torch.tensor([example for example, _ in self.contexts], device=self.mask_BL.device)
            # Right padding needs no mask: no position that is read comes after it.
            tails = [path[self.encoded[example].n_shared :] for example, path in self.contexts]
            ids_RT = pad_sequence([torch.tensor(tail) for tail in tails], batch_first=True).to(example_R.device)
            mask_RL = torch.cat([self.mask_BL[example_R], torch.ones_like(ids_RT)], dim=1)
            cache = cache_of(output)
            cache.batch_select_indices(example_R)
            output = forward(model, ids_RT, mask_RL, cache=cache, use_cache=True)
            self._read(output.logits, found_A, in_contexts=True)
        return found_A.split([len(e.reads) for e in self.encoded])

    def _read(self, logits_BSV: Tensor, found_A: Tensor, in_contexts: bool) -> None:
        """Fill in the log-probabilities that these logits contain, in float32 regardless of the model's dtype."""
        here_A = self.address_4A[0] == in_contexts
        row, position, token = self.address_4A[1:, here_A]
        normalizer_BS = logits_BSV.float().logsumexp(-1)
        found = logits_BSV[row, position, token].float() - normalizer_BS[row, position]
        found_A[here_A.cpu()] = found.double().cpu()


def choice_result(logprob_EC: list[list[float]], answers: Sequence[int]) -> ChoiceResult:
    """Grade the choices: an answer is correct if its log-probability is strictly above every other choice's."""
    answer_logprob = [row[answer] for row, answer in zip(logprob_EC, answers, strict=True)]
    correct = [
        all(value < row[answer] for choice, value in enumerate(row) if choice != answer)
        for row, answer in zip(logprob_EC, answers, strict=True)
    ]
    return ChoiceResult(logprob_EC, torch.tensor(answer_logprob, dtype=torch.float64), torch.tensor(correct))


def answer_choices(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    *,
    batch_size: int = 32,
    progress: bool = False,
) -> ChoiceResult:
    """Score every choice by the summed log-probability of its tokens, and grade the model's answers.

    If a choice is a prefix of another, only the probability that the model stops after it counts. Works for any
    decoder and any tokenizer, with or without a pad token.
    """
    logprob_EC: list[list[float]] = []
    answers: list[int] = []
    with eval_mode(model):
        for part in _parts(examples, batch_size, "answers by choice", progress):
            batch = ChoiceBatch([encode_example(tokenizer, example) for example in part], model.device)
            logprob_EC += [
                e.choice_logprobs(read_Q[None])[0].tolist() for e, read_Q in zip(batch.encoded, batch.reads(model))
            ]
            answers += [example.answer for example in batch.encoded]
    return choice_result(logprob_EC, answers)


def answer_generation(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    *,
    batch_size: int = 32,
    progress: bool = False,
) -> Tensor:
    """Return correct_E: true where the greedily generated text begins with the answer as a whole word or number."""
    correct: list[bool] = []
    with eval_mode(model):
        for part in _parts(examples, batch_size, "answers by generation", progress):
            texts = generate_greedily(model, tokenizer, part)
            correct += [begins_with(text, example.answer) for text, example in zip(texts, part, strict=True)]
    return torch.tensor(correct)


def _parts(examples: Sequence[Example], size: int, name: str, progress: bool) -> Iterator[Sequence[Example]]:
    """Split examples into batches, with a progress bar."""
    check_counts(batch_size=size)
    for start in track(range(0, len(examples), size), name, hidden=not progress):
        yield examples[start : start + size]


def generate_greedily(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example]
) -> list[str]:
    """Continue each prompt greedily, just long enough to check the answer."""
    prompts = tokenize(tokenizer, [example.prompt for example in examples])
    answers = tokenize(tokenizer, [example.prompt + example.answer for example in examples])
    longest = max(len(answer) - len(prompt) for prompt, answer in zip(prompts, answers, strict=True))
    input_ids_BL, mask_BL = left_pad(prompts, model.device)
    eos = getattr(model.generation_config, "eos_token_id", None)
    # Any special token can pad rows after their end: pads are masked.
    pads = (tokenizer.pad_token_id, eos[0] if isinstance(eos, list) else eos, tokenizer.eos_token_id, 0)
    output_BL = generated(
        model,
        input_ids=input_ids_BL,
        attention_mask=mask_BL,
        # One more token than the answer shows that a number has ended.
        max_new_tokens=max(longest, 1) + 1,
        # All set explicitly: the model's own generation settings would fill in any that are missing.
        do_sample=False,
        num_beams=1,
        temperature=None,
        top_k=None,
        top_p=None,
        repetition_penalty=1.0,
        pad_token_id=next(pad for pad in pads if isinstance(pad, int)),
    )
    return tokenizer.batch_decode(output_BL[:, input_ids_BL.shape[1] :], skip_special_tokens=True)


def begins_with(text: str, answer: str) -> bool:
    """Check whether ``text`` begins with ``answer`` as a whole word or number: "845" does not begin with "84"."""
    answer = answer.strip()
    boundary = r"(?!\d)" if answer[-1:].isdigit() else r"(?!\w)"
    return re.match(re.escape(answer) + boundary, text.lstrip()) is not None


def left_pad(rows: Sequence[Tokens], device: torch.device) -> tuple[Tensor, Tensor]:
    """Left-pad rows and return (input_ids_BL, mask_BL); the mask is 0 at pads."""
    longest = max(map(len, rows))
    ids = torch.tensor([(0,) * (longest - len(row)) + tuple(row) for row in rows], device=device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=device)
    return ids, mask


def forward(
    model: PreTrainedModel,
    input_ids_BT: Tensor,
    mask_BL: Tensor,
    *,
    logits_to_keep: int = 0,
    use_cache: bool = False,
    cache: Cache | None = None,
) -> Output:
    """Run the model on tokens that occupy the mask's last positions; position ids skip pads.

    Returns only the logits of the last ``logits_to_keep`` positions (0: all). A model that accepts the argument
    computes only these.
    """
    extras: dict[str, object] = {}
    if accepts(model, "position_ids"):
        extras["position_ids"] = (mask_BL.cumsum(1) - 1).clamp(min=0)[:, -input_ids_BT.shape[1] :]
    if accepts(model, "logits_to_keep"):
        extras["logits_to_keep"] = logits_to_keep
    extras["use_cache"] = use_cache
    if cache is not None:
        extras[cache_argument(model.forward)] = cache
    output = model(input_ids=input_ids_BT, attention_mask=mask_BL, **extras)
    output.logits = output.logits[:, -logits_to_keep:]
    return output


def accepts(model: PreTrainedModel, argument: str) -> bool:
    """Check whether the model's forward method names this argument."""
    return argument in inspect.signature(model.forward).parameters
