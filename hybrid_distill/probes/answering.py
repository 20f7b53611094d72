"""Read a model's answers in two ways: the most likely of some choices, and greedy generation.

Shapes: B batch, E example, C choice, L length, S position with logits, R context row, T new token, V
vocabulary, Q target of an example (`EncodedExample.targets`), A target of any example of a batch.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

from ..model.layout import cache_argument, cache_of
from ..model.self_check import check_not_nan
from ..progress import track
from ..teacher import eval_mode, generate_ids, may_cache
from ..validation import check_counts
from .encoding import EncodedExample, Tokens, encode_example, tokenize
from .probe import Example


class Output(Protocol):
    """Output of a causal language model."""

    logits: Tensor


@dataclass(frozen=True)
class ChoiceResult:
    """A model's answers to E examples.

    ``logprob_EC`` holds the log-probability of each whole choice, in nats: one list per example,
    because the number of choices may differ. ``answer_logprob_E`` is the log-probability of the
    correct answer; ``correct_E`` is true where it exceeds every other choice's.
    """

    logprob_EC: list[list[float]]
    answer_logprob_E: Tensor
    correct_E: Tensor

    @property
    def accuracy(self) -> float:
        """Share of examples answered correctly, 0 to 1."""
        return self.correct_E.double().mean().item()


class ChoiceBatch:
    """Examples that are answered together; everything independent of the model is computed once.

    One forward pass over the prompts reads the first tokens after the shared prefix of each
    example's choices. Where choices have more tokens, each context (`EncodedExample.contexts`)
    extends the prompts' cache; a model that may not cache reads the prompt again.
    """

    def __init__(self, encoded: Sequence[EncodedExample], device: torch.device) -> None:
        self.encoded = list(encoded)
        prompts = [example.prompt + example.choices[0][: example.n_shared] for example in encoded]
        # Left, so that every prompt ends at the last position, where its answer is read.
        self.input_ids_BL, self.mask_BL = left_pad(prompts, device)
        self.n_logits = 1 + max(example.n_shared for example in encoded)
        # Example and path of each context: the rows of the second forward.
        self.contexts: list[tuple[int, Tokens]] = []
        for index, example in enumerate(encoded):
            self.contexts += [(index, path) for path in example.contexts()]
        self.address_4A = self._addresses().to(device)

    def _addresses(self) -> Tensor:
        """Return the address of each target: in a context (1) or not (0), row, position, token.

        The position is an index into the logits: of prompts from the end (-1 is the last), of
        contexts from 0.
        """
        row_of: dict[tuple[int, Tokens], int] = {}
        for row, (index, context) in enumerate(self.contexts):
            for length in range(len(context) + 1):
                row_of[index, context[:length]] = row
        addresses = []
        for index, example in enumerate(self.encoded):
            for path, token in example.targets:
                position = len(path) - example.n_shared - 1
                in_context = position >= 0
                row = row_of[index, path] if in_context else index
                addresses.append((in_context, row, position, token))
        return torch.tensor(addresses).T

    def target_logprobs(self, model: PreTrainedModel) -> Sequence[Tensor]:
        """Return the log-probabilities of each example's targets, [Q], running each prompt once."""
        # In float64: choices add up several of them.
        logprob_A = torch.empty(self.address_4A.shape[1], dtype=torch.float64)
        use_cache = bool(self.contexts) and may_cache(model)
        output = forward(
            model,
            self.input_ids_BL,
            self.mask_BL,
            logits_to_keep=self.n_logits,
            use_cache=use_cache,
        )
        self._fill(output.logits, logprob_A, in_contexts=False)
        if self.contexts:
            cache = cache_of(output) if use_cache else None
            logits_RTV = self._context_logits(model, cache)
            self._fill(logits_RTV, logprob_A, in_contexts=True)
        return logprob_A.split([len(example.targets) for example in self.encoded])

    def _context_logits(self, model: PreTrainedModel, cache: Cache | None) -> Tensor:
        """Run the contexts, one row each, on the prompts' cache or after the prompts."""
        device = self.mask_BL.device
        example_R = torch.tensor([index for index, _ in self.contexts], device=device)
        tails = []
        for index, path in self.contexts:
            # The first forward has read the shared prefix.
            n_shared = self.encoded[index].n_shared
            tails.append(torch.tensor(path[n_shared:]))
        # Right padding needs no mask: no position that is read comes after it.
        ids_RT = pad_sequence(tails, batch_first=True).to(device)
        mask_RL = torch.cat([self.mask_BL[example_R], torch.ones_like(ids_RT)], dim=1)
        if cache is None:
            ids_RL = torch.cat([self.input_ids_BL[example_R], ids_RT], dim=1)
            return forward(model, ids_RL, mask_RL, logits_to_keep=ids_RT.shape[1]).logits
        # Each context extends a copy of its prompt's keys and values.
        cache.batch_select_indices(example_R)
        return forward(model, ids_RT, mask_RL, cache=cache, use_cache=True).logits

    def _fill(
        self,
        logits_BSV: Tensor,
        logprob_A: Tensor,
        *,
        in_contexts: bool,
    ) -> None:
        """Fill in the log-probabilities of the targets in these logits, computed in float32."""
        is_here_A = self.address_4A[0] == in_contexts
        row, position, token = self.address_4A[1:, is_here_A]
        # Only the normalizer needs the whole vocabulary: log_softmax would store it once more.
        normalizer_BS = logits_BSV.float().logsumexp(-1)
        logprob = logits_BSV[row, position, token].float() - normalizer_BS[row, position]
        logprob_A[is_here_A.cpu()] = logprob.double().cpu()


def choice_result(logprob_EC: list[list[float]], answers: Sequence[int]) -> ChoiceResult:
    """Grade the choices: a correct answer is strictly above every other choice."""
    answer_logprobs = []
    correct = []
    for logprobs, answer in zip(logprob_EC, answers, strict=True):
        # By index, not by value: another choice may be as likely as the answer.
        others = logprobs[:answer] + logprobs[answer + 1 :]
        answer_logprobs.append(logprobs[answer])
        correct.append(all(other < logprobs[answer] for other in others))
    answer_logprob_E = torch.tensor(answer_logprobs, dtype=torch.float64)
    return ChoiceResult(logprob_EC, answer_logprob_E, torch.tensor(correct))


def answer_choices(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    *,
    batch_size: int = 32,
    progress: bool = False,
    name: str = "answers by choice",
) -> ChoiceResult:
    """Score every choice by the summed log-probability of its tokens, and grade the model's answers.

    If a choice is a prefix of another, only the probability that the model stops after it counts.
    Works for any decoder and any tokenizer, with or without a pad token. ``name`` is what progress calls it.
    """
    logprob_EC: list[list[float]] = []
    answers: list[int] = []
    with eval_mode(model):
        for part in _parts(examples, batch_size, name, progress):
            encoded = [encode_example(tokenizer, example) for example in part]
            batch = ChoiceBatch(encoded, model.device)
            target_logprobs = batch.target_logprobs(model)
            # Not in the batch: scoring names the head and the prompt of what is NaN.
            check_not_nan(torch.cat(list(target_logprobs)), model)
            for example, target_logprob_Q in zip(encoded, target_logprobs):
                logprob_C = example.choice_logprobs(target_logprob_Q[None])[0]
                logprob_EC.append(logprob_C.tolist())
                answers.append(example.answer)
    return choice_result(logprob_EC, answers)


def answer_generation(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    *,
    batch_size: int = 32,
    progress: bool = False,
    name: str = "answers by generation",
) -> Tensor:
    """Return correct_E: true where the generated text begins with the answer (`begins_with`)."""
    correct: list[bool] = []
    with eval_mode(model):
        for part in _parts(examples, batch_size, name, progress):
            texts = generate_greedily(model, tokenizer, part)
            for text, example in zip(texts, part, strict=True):
                correct.append(begins_with(text, example.answer))
    return torch.tensor(correct)


def _parts(
    examples: Sequence[Example],
    size: int,
    name: str,
    progress: bool,
) -> Iterator[Sequence[Example]]:
    """Split examples into batches, with a progress bar."""
    check_counts(batch_size=size)
    for start in track(range(0, len(examples), size), name, hidden=not progress):
        yield examples[start : start + size]


def generate_greedily(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example]
) -> list[str]:
    """Continue each prompt greedily, just long enough to check the answer."""
    prompts = tokenize(tokenizer, [example.prompt for example in examples])
    with_answers = tokenize(tokenizer, [example.prompt + example.answer for example in examples])
    # Together: alone, an answer may have other tokens.
    lengths = [len(both) - len(prompt) for prompt, both in zip(prompts, with_answers, strict=True)]
    longest = max(lengths)
    input_ids_BL, mask_BL = left_pad(prompts, model.device)
    output_BL = generate_ids(
        model,
        input_ids=input_ids_BL,
        attention_mask=mask_BL,
        # One more token than the answer, to see whether a number has ended.
        max_new_tokens=max(longest, 1) + 1,
        do_sample=False,
        pad_token_id=_pad_token(model, tokenizer),
    )
    new_BT = output_BL[:, input_ids_BL.shape[1] :]
    return tokenizer.batch_decode(new_BT, skip_special_tokens=True)


def _pad_token(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """Choose a token to pad finished rows with: any special one, because decoding skips it."""
    eos = getattr(model.generation_config, "eos_token_id", None)
    if isinstance(eos, list):
        eos = eos[0]
    for token in (tokenizer.pad_token_id, eos, tokenizer.eos_token_id):
        if isinstance(token, int):
            return token
    return 0


def begins_with(text: str, answer: str) -> bool:
    """Check whether ``text`` begins with ``answer`` as a whole word or number."""
    answer = answer.strip()
    # A letter may follow a number ("84th"); neither letter nor digit may follow a word.
    boundary = r"(?!\d)" if answer[-1:].isdigit() else r"(?!\w)"
    return re.match(re.escape(answer) + boundary, text.lstrip()) is not None


def left_pad(rows: Sequence[Tokens], device: torch.device) -> tuple[Tensor, Tensor]:
    """Left-pad rows and return (input_ids_BL, mask_BL); the mask is 0 at pads."""
    longest = max(map(len, rows))
    ids = []
    mask = []
    for row in rows:
        n_pads = longest - len(row)
        ids.append([0] * n_pads + list(row))
        mask.append([0] * n_pads + [1] * len(row))
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


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

    Returns only the logits of the last ``logits_to_keep`` positions (0: all). A model that accepts
    the argument computes only these.
    """
    arguments: dict[str, object] = {"use_cache": use_cache}
    # Recurrent models take no position ids.
    if accepts(model, "position_ids"):
        # Counted from each row's first token; pads before it get 0.
        position_BL = (mask_BL.cumsum(1) - 1).clamp(min=0)
        arguments["position_ids"] = position_BL[:, -input_ids_BT.shape[1] :]
    if accepts(model, "logits_to_keep"):
        arguments["logits_to_keep"] = logits_to_keep
    if cache is not None:
        arguments[cache_argument(model.forward)] = cache
    output = model(input_ids=input_ids_BT, attention_mask=mask_BL, **arguments)
    # Some models compute all positions. With 0 to keep, the slice is from -0: all of them.
    output.logits = output.logits[:, -logits_to_keep:]
    return output


def accepts(model: PreTrainedModel, argument: str) -> bool:
    """Check whether the model's forward method names this argument."""
    return argument in inspect.signature(model.forward).parameters
