"""Gather and aggregate patterns in a matrix (arXiv 2504.18574), and measures of how sharply a head has them.

A prompt that contains its answer has *segments*: lines, one of which has the answer. A segment's
last tokens are its *summary*. A gather head moves a segment's content to its summary; an aggregate
head reads the summaries where the answer is predicted, ideally the right one.

An SSM's matrix has signed entries, and its rows are not normalized. So each row is converted to
shares of its absolute sum, which an attention map's rows already are.

Shapes: T target token, S source token, H head, M measure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...plan import HeadId
from ...probes import Example
from ...probes.encoding import Tokens, encode_example, tokenize
from ...progress import track
from ...teacher import HeadKind
from .head_matrices import HeadMix
from .mixing import find_heads, mix_heads

LINE = re.compile(r"[^\n]+\n+")


class Segment(NamedTuple):
    """Positions of one line: its content, and the tokens at its end that may summarize it."""

    content: tuple[int, ...]
    summary: tuple[int, ...]


@dataclass(frozen=True)
class MarkedPrompt:
    """A prompt as tokens, with its marks. The answer is predicted from the last token.

    ``answer`` is the index of the segment that holds the answer, None if unknown.
    """

    ids: Tokens
    labels: tuple[str, ...]
    segments: tuple[Segment, ...]
    separators: tuple[int, ...]
    answer: int | None = None

    @property
    def summaries(self) -> list[int]:
        """Positions of all summaries."""
        positions: list[int] = []
        for segment in self.segments:
            positions += segment.summary
        return positions


def mark_prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: str, choices: Sequence[str] = ()
) -> MarkedPrompt:
    """Mark the lines before the last one as segments; with ``choices``, only those with one as a
    word or number.

    The summary of a line is the choice it ends with, or else its last token. Raises ValueError for
    a slow tokenizer.
    """
    if not tokenizer.is_fast:
        raise ValueError(
            f"{type(tokenizer).__name__} does not locate its tokens in a text; load a fast tokenizer."
        )
    ids = tokenize(tokenizer, [prompt])[0]
    encoding = tokenizer(
        prompt, add_special_tokens=False, return_offsets_mapping=True, verbose=False
    )
    own_spans: list[tuple[int, int]] = encoding["offset_mapping"]  # type: ignore[assignment]
    # The beginning-of-text token, if there is one, is nowhere in the text.
    spans = [(0, 0)] * (len(ids) - len(own_spans)) + own_spans
    texts = [prompt[start:end] for start, end in spans]
    segments = []
    for line in LINE.finditer(prompt):
        in_line = _find(choices, line[0])
        if choices and not in_line:
            continue
        tokens = []
        for i, (start, end) in enumerate(spans):
            if start < line.end() and line.start() < end:
                tokens.append(i)
        # A head may sum a line up at its answer, which for some tokenizers is several tokens.
        first = _first_of_summary(line, in_line, tokens, spans, texts)
        content = tuple(i for i in tokens if i < first)
        summary = tuple(i for i in tokens if i >= first)
        segments.append(Segment(content, summary))
    separators = [i for i, text in enumerate(texts) if re.fullmatch(r" *([^\w ] *)+", text)]
    return MarkedPrompt(ids, _labels(tokenizer, ids), tuple(segments), tuple(separators))


def _first_of_summary(
    line: re.Match[str],
    choices: Sequence[re.Match[str]],
    tokens: Sequence[int],
    spans: Sequence[tuple[int, int]],
    texts: Sequence[str],
) -> int:
    """Return the first token of the choice that ends the line, or else the line's last word."""
    n_characters = len(line[0].rstrip("\n"))
    starts = [choice.start() for choice in choices if choice.end() == n_characters]
    if starts:
        start = line.start() + min(starts)
        return next(i for i in tokens if spans[i][1] > start)
    words = [i for i in tokens if re.search(r"\w", texts[i])]
    return words[-1] if words else tokens[-1]


def mark_example(tokenizer: PreTrainedTokenizerBase, example: Example) -> MarkedPrompt:
    """Mark a probe's question, up to where its answer is predicted (after the space before a
    number, if a token).

    Raises ValueError for a question whose answer is in none of its lines, or in several.
    """
    marked = mark_prompt(tokenizer, example.prompt, example.choices)
    encoded = encode_example(tokenizer, example)
    ids = encoded.prompt + encoded.choices[encoded.answer][: encoded.n_shared]
    lines = [line for line in LINE.findall(example.prompt) if _find(example.choices, line)]
    with_answer = [index for index, line in enumerate(lines) if _find([example.answer], line)]
    if len(with_answer) != 1:
        raise ValueError(
            f"the answer {example.answer!r} appears in {len(with_answer)} lines of its prompt; "
            "use a probe whose answer is in exactly one, such as kv."
        )
    return replace(marked, ids=ids, labels=_labels(tokenizer, ids), answer=with_answer[0])


def _find(choices: Sequence[str], text: str) -> list[re.Match[str]]:
    """Find choices in a text as whole words or numbers."""
    matches: list[re.Match[str]] = []
    for choice in choices:
        matches += re.finditer(rf"(?<!\w){re.escape(choice.strip())}(?!\w)", text)
    return matches


def _labels(tokenizer: PreTrainedTokenizerBase, ids: Tokens) -> tuple[str, ...]:
    """Return each token's text, with line breaks and a lone space made visible."""
    labels = []
    for token in ids:
        text = str(tokenizer.decode([token])).replace("\n", "↵").strip()
        labels.append(text or "␣")
    return tuple(labels)


def gather_mask(prompt: MarkedPrompt) -> Tensor:
    """Return mask_TS of a gather head: from every token of a segment to those of the segment."""
    mask_TS = torch.zeros(len(prompt.ids), len(prompt.ids), dtype=torch.bool)
    for segment in prompt.segments:
        places = torch.tensor(segment.content + segment.summary)
        mask_TS[places[:, None], places] = True
    return mask_TS.tril()


def aggregate_mask(prompt: MarkedPrompt) -> Tensor:
    """Return mask_TS of an aggregate head: from tokens after the last segment to all summaries."""
    mask_TS = torch.zeros(len(prompt.ids), len(prompt.ids), dtype=torch.bool)
    mask_TS[max(prompt.summaries) + 1 :, prompt.summaries] = True
    return mask_TS


PATTERNS: dict[str, Callable[[MarkedPrompt], Tensor]] = {
    "gather": gather_mask,
    "aggregate": aggregate_mask,
}
"""mask_TS of a prompt, by the role of a head."""


class Sharpness(NamedTuple):
    """Measures of one matrix on one prompt: shares 0 to 1, the entropy in bits; NaN if the prompt
    has no such position.

    The last row predicts the answer: ``entropy`` is its spread, ``answer``, ``separators`` and
    ``aggregate`` its shares on the answer's summary, on punctuation and line breaks, and on any
    summary. ``gather`` is the share of a segment's content in the best row of its summary, averaged
    over segments.
    """

    entropy: float
    answer: float
    separators: float
    gather: float
    aggregate: float


def sharpness(prompt: MarkedPrompt, mix: HeadMix) -> Sharpness:
    """Measure one head on a prompt."""
    share_TS = row_shares(mix.matrix_TS)
    last_S = share_TS[-1]

    def share_on(positions: Sequence[int]) -> float:
        return last_S[list(positions)].sum().item() if positions else math.nan

    gathered = []
    for segment in prompt.segments:
        if segment.content:
            block_TS = share_TS[list(segment.summary)][:, list(segment.content)]
            # The best row: any of a summary's tokens may be the one that gathers.
            gathered.append(block_TS.sum(1).max().item())
    answer = () if prompt.answer is None else prompt.segments[prompt.answer].summary
    return Sharpness(
        # abs, not a minus, which would make -0 of the entropy of a single entry.
        entropy=abs((last_S * last_S.clamp(min=1e-30).log2()).sum().item()),
        answer=share_on(answer),
        separators=last_S[list(prompt.separators)].sum().item(),
        gather=sum(gathered) / len(gathered) if gathered else math.nan,
        aggregate=share_on(prompt.summaries),
    )


def row_shares(matrix_TS: Tensor) -> Tensor:
    """Divide each row's absolute values by their sum, in float64; a row of zeros stays zero."""
    # In float64: products of many decays are tiny.
    size_TS = matrix_TS.double().abs()
    return size_TS / size_TS.sum(-1, keepdim=True).clamp(min=1e-300)


def find_patterns(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    *,
    kind: HeadKind | None = None,
) -> dict[HeadId, Sharpness]:
    """Average every head's sharpness over some questions: one forward each, and one matrix at a time.

    Raises ValueError for Mamba-1, which has too many channels to search.
    """
    site_of = find_heads(model, kind)
    site = next(iter(site_of.values()))
    if site.kind == "channel":
        raise ValueError(
            f"this model has {site.n_heads} channels a layer, too many to look through; name some with --heads."
        )
    heads = list(site_of)
    total_HM = torch.zeros(len(heads), len(Sharpness._fields), dtype=torch.float64)
    # All prompts first: an unsuitable probe raises here, before any forward.
    prompts = [mark_example(tokenizer, example) for example in examples]
    for prompt in track(prompts, "matrices"):
        measure = partial(sharpness, prompt)
        measured = mix_heads(
            model,
            prompt.ids,
            heads,
            measure,
            kind=kind,
            max_gb=math.inf,
        )
        total_HM += torch.tensor(measured, dtype=torch.float64)
    mean_HM = total_HM / len(examples)
    return {head: Sharpness(*means) for head, means in zip(heads, mean_HM.tolist(), strict=True)}


def rank_by(sharpness_of: dict[HeadId, Sharpness], measure: str) -> list[HeadId]:
    """Rank heads by "gather" or "aggregate", most first."""
    return sorted(sharpness_of, key=lambda head: -getattr(sharpness_of[head], measure))
