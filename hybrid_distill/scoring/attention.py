"""Two scores read from attention maps, for comparison with ablation.

`attention_to_answer` is the attention that falls on the answer where it stands in the prompt; `copy_score` the share
of the answer that is generated while the head looks at just that (retrieval heads, Wu et al., arXiv 2404.15574).
Both see where a head looks, not its effect: gather heads, which look elsewhere, get nothing.

Maps are read from the last position only: the prompt before it runs with the model's own attention and fills a cache.

Shapes: B batch, E example, K layer with attention, H query head, T new token, S position so far.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from tqdm.auto import tqdm
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

from ..probes import Example, Probe, check_counts
from ..probes.answering import EncodedExample, Tokens, encode_example, forward, left_pad, tokenize
from ..teacher import HeadSite, eval_mode, head_sites
from .head_scores import HeadScores


@dataclass(frozen=True)
class _Sought:
    """An example as tokens, its answer as it continues the prompt, and the answer's positions in the prompt."""

    encoded: EncodedExample
    answer: Tokens
    positions: Tokens


def attention_to_answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    probe: Probe,
    *,
    n_examples: int = 128,
    batch_size: int = 32,
    progress: bool = True,
) -> HeadScores:
    """Score heads by their mean attention from where the answer is predicted to the answer's tokens in the prompt.

    It is predicted from the question's last token, or from the last of those after it that all choices share (the
    space before a number). This share, 0 to 1, stands in ``accuracy_drop_LH``, though no accuracy is measured;
    log-probability drops are 0. ``baseline["uniform"]`` is the share of a head that looks everywhere alike. Raises
    ValueError for an answer that is not in its prompt, and for a model whose heads have no attention maps.
    """
    sites = head_sites(model, "attention")
    shares: list[Tensor] = []
    uniform: list[float] = []
    for batch in _batches(tokenizer, probe, n_examples, batch_size, progress):
        rows = [s.encoded.prompt + s.answer[: s.encoded.n_shared] for s in batch]
        input_ids_BS, mask_BS = left_pad(rows, model.device)
        with eval_mode(model):
            map_BKHS = _last_maps(model, sites, input_ids_BS, mask_BS)[0]
        sought_BS = torch.zeros_like(mask_BS)
        for row, (s, tokens) in enumerate(zip(batch, rows)):
            sought_BS[row, [len(mask_BS[0]) - len(tokens) + position for position in s.positions]] = 1
            uniform.append(len(s.positions) / len(tokens))
        shares.append((map_BKHS.double() * sought_BS[:, None, None]).sum(-1))
    method = "attention from where the answer is predicted to the answer in the prompt"
    baseline = {"accuracy": None, "uniform": sum(uniform) / len(uniform)}
    return HeadScores.from_estimates(model, probe, sites, torch.cat(shares), "accuracy", method, baseline)


def copy_score(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    probe: Probe,
    *,
    n_examples: int = 128,
    batch_size: int = 32,
    progress: bool = True,
) -> HeadScores:
    """Score heads by the share of the answer's different tokens in the prompt that they copy (arXiv 2404.15574).

    A head copies a token when that is generated (greedily, as many tokens as the answer has) while the position
    that the head attends to most holds this token and is one of the answer's. Tokens that differ in a leading space
    only are the same. This share, 0 to 1, stands in ``accuracy_drop_LH``, though no accuracy is measured;
    log-probability drops are 0. The mean is over all examples; ``baseline["accuracy"]`` is the share that is answered
    right, token by token. Raises ValueError as `attention_to_answer` does.
    """
    sites = head_sites(model, "attention")
    shares: list[Tensor] = []
    correct: list[bool] = []
    for batch in _batches(tokenizer, probe, n_examples, batch_size, progress):
        with eval_mode(model):
            prompts, n_new = [s.encoded.prompt for s in batch], max(len(s.answer) for s in batch)
            generated_BT, looked_BTKH = _generate(model, sites, prompts, n_new)
        for s, tokens, looked_TKH in zip(batch, generated_BT.tolist(), looked_BTKH):
            tokens = tokens[: len(s.answer)]
            shares.append(_copied(tokenizer, s, tokens, looked_TKH))
            correct.append(tuple(tokens) == s.answer)
    method = "copy score of retrieval heads (arXiv 2404.15574)"
    baseline = {"accuracy": sum(correct) / len(correct)}
    return HeadScores.from_estimates(model, probe, sites, torch.stack(shares), "accuracy", method, baseline)


def _copied(
    tokenizer: PreTrainedTokenizerBase, sought: _Sought, generated: Sequence[int], looked_TKH: Tensor
) -> Tensor:
    """Return share_KH of the distinct tokens sought that were generated while the head looked at them."""

    def word(token: int) -> str:
        """Return a token's text as the vocabulary writes it, without a leading space (Ġ or ▁ there)."""
        piece = str(tokenizer.convert_ids_to_tokens(token))
        return piece.lstrip("Ġ▁ ") or piece

    places: dict[str, list[int]] = {}
    for position in sought.positions:
        places.setdefault(word(sought.encoded.prompt[position]), []).append(position)
    copied = {each: torch.zeros(looked_TKH.shape[1:], dtype=torch.bool) for each in places}
    for token, looked_KH in zip(generated, looked_TKH):
        if (written := word(token)) in places:
            copied[written] |= torch.isin(looked_KH, torch.tensor(places[written]))
    return torch.stack(list(copied.values())).double().mean(0)


def _batches(
    tokenizer: PreTrainedTokenizerBase, probe: Probe, n_examples: int, batch_size: int, progress: bool
) -> Iterator[list[_Sought]]:
    check_counts(n_examples=n_examples, batch_size=batch_size)
    sought: list[_Sought] = []
    for example in probe.examples(n_examples):
        e, positions = encode_example(tokenizer, example), answer_positions(tokenizer, example)
        sought.append(_Sought(e, e.choices[e.answer], tuple(p for p in positions if p < len(e.prompt))))
    with tqdm(total=n_examples, desc="attention maps", disable=not progress) as bar:
        for start in range(0, n_examples, batch_size):
            yield sought[start : start + batch_size]
            bar.update(len(sought[start : start + batch_size]))


def answer_positions(tokenizer: PreTrainedTokenizerBase, example: Example) -> Tokens:
    """List the positions of the prompt's tokens at which the answer stands as a whole word or number.

    A token that holds more than the answer counts too. Raises ValueError for an answer that is not in the prompt,
    and for a tokenizer that does not report character offsets.
    """
    if not tokenizer.is_fast:
        raise ValueError(f"{type(tokenizer).__name__} does not report character offsets; load a fast tokenizer.")
    answer = example.answer.strip()
    pattern = re.compile(rf"(?<!\w){re.escape(answer)}(?!\w)")
    spans = [match.span() for match in pattern.finditer(example.prompt, example.begins)]
    if not spans:
        raise ValueError(
            f"the answer {answer!r} does not stand in its prompt; attention scores need a probe whose answers "
            "do, such as kv_retrieval."
        )
    encoding: Any = tokenizer(example.prompt, add_special_tokens=False, return_offsets_mapping=True)
    n_before = len(tokenize(tokenizer, [example.prompt])[0]) - len(encoding["input_ids"])
    return tuple(
        n_before + position
        for position, (start, end) in enumerate(encoding["offset_mapping"])
        if any(start < span_end and span_start < end for span_start, span_end in spans)
    )


def _generate(
    model: PreTrainedModel, sites: Sequence[HeadSite], prompts: Sequence[Tokens], n_new: int
) -> tuple[Tensor, Tensor]:
    """Return (generated_BT, looked_BTKH): greedy tokens, and the position each head looked at most before each.

    Positions count from a prompt's own start; generated tokens continue it.
    """
    input_ids_BS, mask_BS = left_pad(prompts, model.device)
    n_pads_B = (1 - mask_BS).sum(1)
    cache, tokens, looked = None, [], []
    for _ in range(n_new):
        map_BKHS, output = _last_maps(model, sites, input_ids_BS, mask_BS, cache)
        cache = output.past_key_values
        token_B1 = output.logits[:, -1].argmax(-1, keepdim=True)
        tokens.append(token_B1)
        looked.append(map_BKHS.argmax(-1) - n_pads_B[:, None, None])
        input_ids_BS = torch.cat([input_ids_BS, token_B1], dim=1)
        mask_BS = torch.cat([mask_BS, torch.ones_like(token_B1)], dim=1)
    return torch.cat(tokens, dim=1).cpu(), torch.stack(looked, dim=1).cpu()


def _last_maps(
    model: PreTrainedModel, sites: Sequence[HeadSite], input_ids_BS: Tensor, mask_BS: Tensor, cache: Cache | None = None
) -> tuple[Tensor, Any]:
    """Return (map_BKHS, output) of the last position; without a ``cache`` of the positions before it, make one."""
    if cache is None:
        before = forward(model, input_ids_BS[:, :-1], mask_BS[:, :-1], logits_to_keep=1, use_cache=True)
        cache = before.past_key_values
    with eager_attention(model), _recorded_maps(sites) as maps:
        output = forward(model, input_ids_BS[:, -1:], mask_BS, logits_to_keep=1, use_cache=True, past_key_values=cache)
    # A layer with a sliding window has kept the latest positions only.
    n_positions = mask_BS.shape[1]
    return torch.stack([pad(m, (n_positions - m.shape[-1], 0)) for m in maps], dim=1), output


@contextmanager
def _recorded_maps(sites: Sequence[HeadSite]) -> Iterator[list[Tensor]]:
    """Yield a list that receives each layer's map_BHS of the last position, bottom to top."""
    maps: list[Tensor] = []
    site_of = {site.module: site for site in sites}  # layers may share a module, which then runs once for each

    def record(module: nn.Module, args: object, output: object) -> None:
        weights = output[1] if isinstance(output, tuple) and len(output) > 1 else None
        if not isinstance(weights, Tensor) or weights.shape[1:2] != (site_of[module].n_heads,):
            raise ValueError(
                f"{site_of[module].name} ({type(module).__name__}) does not return attention maps; "
                "rank the heads of this model by ablation or attribution."
            )
        maps.append(weights[:, :, -1])

    with ExitStack() as hooks:
        for module in site_of:
            hooks.callback(module.register_forward_hook(record).remove)
        yield maps


@contextmanager
def eager_attention(model: PreTrainedModel) -> Iterator[None]:
    """Switch to eager attention, the only one that returns its maps; restore the model's own afterwards."""
    own: Any = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(own)
