"""Gather and aggregate, as patterns in a matrix (arXiv 2504.18574), and how sharp a head's look is.

A prompt that holds what is asked for has *segments*: lines, one of which has the answer. Their last tokens are their
*summaries*. A gather head carries a segment's content to its summary; an aggregate head reads the summaries where the
answer is predicted, best of all the right one.

An SSM's matrix has signs and rows of any size: a row is read as shares of its absolute sum, which an attention map's
rows are already.

Shapes: T target token, S source token.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ...probes import Example
from ...probes.answering import Tokens, encode_example, tokenize

Positions = tuple[int, ...]


class Segment(NamedTuple):
    """Positions of one line: its content, and the tokens at its end that may sum it up, a line break included."""

    content: Positions
    summary: Positions


@dataclass(frozen=True)
class MarkedPrompt:
    """A prompt as tokens, with its marks. The answer is predicted from the last token.

    ``answer`` is the index of the segment that holds the answer, None where that is not known.
    """

    ids: Tokens
    labels: tuple[str, ...]
    segments: tuple[Segment, ...]
    separators: Positions
    answer: int | None = None

    @property
    def summaries(self) -> list[int]:
        """Positions of all summaries."""
        return [position for segment in self.segments for position in segment.summary]


def mark_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str, choices: Sequence[str] = ()) -> MarkedPrompt:
    """Mark the lines before the last one as segments; with ``choices``, those that hold one as a word or number.

    The summary of a line is the choice it ends with, or else its last token. Raises ValueError for a slow tokenizer.
    """
    if not tokenizer.is_fast:
        raise ValueError(f"{type(tokenizer).__name__} does not locate its tokens in a text; load a fast tokenizer.")
    ids = tokenize(tokenizer, [prompt])[0]
    encoding = tokenizer(prompt, add_special_tokens=False, return_offsets_mapping=True)
    own: list[tuple[int, int]] = [tuple(span) for span in encoding["offset_mapping"]]  # type: ignore[index]
    spans = [(0, 0)] * (len(ids) - len(own)) + own
    lines = [match.span() for match in re.finditer(r"[^\n]+\n+", prompt)]  # the last one has no line break
    segments = [_segment(prompt, spans, line, choices) for line in lines]
    separators = [i for i, span in enumerate(spans) if re.fullmatch(r" *([^\w ] *)+", prompt[slice(*span)])]
    return MarkedPrompt(ids, _labels(tokenizer, ids), tuple(filter(None, segments)), tuple(separators))


def mark_example(tokenizer: PreTrainedTokenizerBase, example: Example) -> MarkedPrompt:
    """Mark a probe's question, up to where its answer is predicted (behind the space before a number, if a token).

    Raises ValueError for a question whose answer is in none of its lines, or in several.
    """
    marked = mark_prompt(tokenizer, example.prompt, example.choices)
    encoded = encode_example(tokenizer, example)
    ids = encoded.prompt + encoded.choices[encoded.answer][: encoded.n_shared]
    lines = [line for line in re.findall(r"[^\n]+\n+", example.prompt) if _finds(example.choices, line)]
    holding = [index for index, line in enumerate(lines) if _finds([example.answer], line)]
    if len(holding) != 1:
        raise ValueError(
            f"the answer {example.answer!r} stands in {len(holding)} lines of its prompt; take a probe whose answer is "
            "in exactly one, such as kv."
        )
    return MarkedPrompt(ids, _labels(tokenizer, ids), marked.segments, marked.separators, holding[0])


def _segment(
    prompt: str, spans: Sequence[tuple[int, int]], line: tuple[int, int], choices: Sequence[str]
) -> Segment | None:
    start, end = line
    text = prompt[start:end].rstrip("\n")
    found = _finds(choices, text)
    if choices and not found:
        return None
    tokens = [i for i, (a, b) in enumerate(spans) if a < end and start < b]
    ends = [match.start() for match in found if match.end() == len(text)]
    if ends:
        summary_start = start + min(ends)
        summary = [i for i in tokens if spans[i][1] > summary_start]
    else:
        words = [i for i in tokens if re.search(r"\w", prompt[slice(*spans[i])])]
        summary = [i for i in tokens if i >= words[-1]] if words else tokens[-1:]
    return Segment(tuple(i for i in tokens if i < summary[0]), tuple(summary))


def _finds(choices: Sequence[str], text: str) -> list[re.Match[str]]:
    """Find choices in a text as whole words or numbers."""
    patterns = (rf"(?<!\w){re.escape(choice.strip())}(?!\w)" for choice in choices)
    return [match for pattern in patterns for match in re.finditer(pattern, text)]


def _labels(tokenizer: PreTrainedTokenizerBase, ids: Tokens) -> tuple[str, ...]:
    """Return each token's text, with line breaks and a lone space made visible."""
    return tuple(str(tokenizer.decode([token])).replace("\n", "↵").strip() or "␣" for token in ids)


def gather_mask(prompt: MarkedPrompt) -> Tensor:
    """Return mask_TS of a gather head: from every token of a segment to the tokens of the same segment."""
    mask_TS = torch.zeros(len(prompt.ids), len(prompt.ids), dtype=torch.bool)
    for segment in prompt.segments:
        places = torch.tensor(segment.content + segment.summary)
        mask_TS[places[:, None], places] = True
    return mask_TS.tril()


def aggregate_mask(prompt: MarkedPrompt) -> Tensor:
    """Return mask_TS of an aggregate head: from the tokens behind the last segment to all summaries."""
    mask_TS = torch.zeros(len(prompt.ids), len(prompt.ids), dtype=torch.bool)
    mask_TS[max(prompt.summaries) + 1 :, prompt.summaries] = True
    return mask_TS


class Sharpness(NamedTuple):
    """Measures of one matrix on one prompt: shares 0 to 1, the entropy in bits; NaN where there is no such place.

    The last row predicts the answer: ``entropy`` is its spread, ``answer``, ``separators`` and ``aggregate`` its shares
    on the answer's summary, on punctuation and line breaks, and on any summary. ``gather`` is the share of a segment's
    content in the best row of its summary, averaged over segments.
    """

    entropy: float
    answer: float
    separators: float
    gather: float
    aggregate: float


def sharpness(matrix_TS: Tensor, prompt: MarkedPrompt) -> Sharpness:
    """Measure one head's matrix on a prompt."""
    share_TS = row_shares(matrix_TS)
    last_S = share_TS[-1]
    gathered = [
        share_TS[list(segment.summary)][:, list(segment.content)].sum(1).max().item()
        for segment in prompt.segments
        if segment.content
    ]
    answer = () if prompt.answer is None else prompt.segments[prompt.answer].summary
    return Sharpness(
        entropy=abs((last_S * last_S.clamp(min=1e-30).log2()).sum().item()),
        answer=last_S[list(answer)].sum().item() if answer else math.nan,
        separators=last_S[list(prompt.separators)].sum().item(),
        gather=sum(gathered) / len(gathered) if gathered else math.nan,
        aggregate=last_S[prompt.summaries].sum().item() if prompt.segments else math.nan,
    )


def row_shares(matrix_TS: Tensor) -> Tensor:
    """Return absolute values, each row divided by its sum (in float64); a row of zeros stays one."""
    size_TS = matrix_TS.double().abs()
    return size_TS / size_TS.sum(-1, keepdim=True).clamp(min=1e-300)
