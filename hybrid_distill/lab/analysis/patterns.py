"""Gather and aggregate as patterns in a matrix (arXiv 2504.18574), and measures of how sharply a head follows them.

A prompt that contains its answer has *segments*: lines, one of which has the answer. A segment's last tokens are its
*summary*. A gather head moves a segment's content to its summary; an aggregate head reads the summaries where the
answer is predicted, ideally the right one.

An SSM's matrix has signed entries, and its rows are not normalized. So each row is converted to shares of its absolute
sum, which an attention map's rows already are.

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
from ...probes.answering import Tokens, encode_example, tokenize
from ...progress import track
from ...teacher import HeadKind
from .mixing import HeadMix, find_heads, mix_heads


class Segment(NamedTuple):
    """Positions of one line: its content, and the tokens at its end that may summarize it, including the line break."""

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
        return [position for segment in self.segments for position in segment.summary]


def mark_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str, choices: Sequence[str] = ()) -> MarkedPrompt:
    """Mark the lines before the last one as segments; with ``choices``, only those with one as a word or number.

    The summary of a line is the choice it ends with, or else its last token. Raises ValueError for a slow tokenizer.
    """
    if not tokenizer.is_fast:
        raise ValueError(f"{type(tokenizer).__name__} does not locate its tokens in a text; load a fast tokenizer.")
    ids = tokenize(tokenizer, [prompt])[0]
    encoding = tokenizer(prompt, add_special_tokens=False, return_offsets_mapping=True)
    own: list[tuple[int, int]] = encoding["offset_mapping"]  # type: ignore[assignment]
    spans = [(0, 0)] * (len(ids) - len(own)) + own
    texts = [prompt[start:end] for start, end in spans]
    segments = []
    for line in re.finditer(r"[^\n]+\n+", prompt):
        found = _find(choices, line[0])
        if choices and not found:
            continue
        tokens = [i for i, (start, end) in enumerate(spans) if start < line.end() and line.start() < end]
        words = [i for i in tokens if re.search(r"\w", texts[i])]
        first = (words or tokens)[-1]
        if ends := [match.start() for match in found if match.end() == len(line[0].rstrip("\n"))]:
            first = next(i for i in tokens if spans[i][1] > line.start() + min(ends))
        content, summary = ([i for i in tokens if (i < first) == before] for before in (True, False))
        segments.append(Segment(tuple(content), tuple(summary)))
    separators = [i for i, text in enumerate(texts) if re.fullmatch(r" *([^\w ] *)+", text)]
    return MarkedPrompt(ids, _labels(tokenizer, ids), tuple(segments), tuple(separators))


def mark_example(tokenizer: PreTrainedTokenizerBase, example: Example) -> MarkedPrompt:
    """Mark a probe's question, up to where its answer is predicted (after the space before a number, if a token).

    Raises ValueError for a question whose answer is in none of its lines, or in several.
    """
    marked, encoded = mark_prompt(tokenizer, example.prompt, example.choices), encode_example(tokenizer, example)
    ids = encoded.prompt + encoded.choices[encoded.answer][: encoded.n_shared]
    lines = [line for line in re.findall(r"[^\n]+\n+", example.prompt) if _find(example.choices, line)]
    holding = [index for index, line in enumerate(lines) if _find([example.answer], line)]
    if len(holding) != 1:
        raise ValueError(
            f"the answer {example.answer!r} appears in {len(holding)} lines of its prompt; use a probe whose answer "
            "is in exactly one, such as kv."
        )
    return replace(marked, ids=ids, labels=_labels(tokenizer, ids), answer=holding[0])


def _find(choices: Sequence[str], text: str) -> list[re.Match[str]]:
    """Find choices in a text as whole words or numbers."""
    return [match for choice in choices for match in re.finditer(rf"(?<!\w){re.escape(choice.strip())}(?!\w)", text)]


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
    """Return mask_TS of an aggregate head: from the tokens after the last segment to all summaries."""
    mask_TS = torch.zeros(len(prompt.ids), len(prompt.ids), dtype=torch.bool)
    mask_TS[max(prompt.summaries) + 1 :, prompt.summaries] = True
    return mask_TS


PATTERNS: dict[str, Callable[[MarkedPrompt], Tensor]] = {"gather": gather_mask, "aggregate": aggregate_mask}
"""mask_TS of a prompt, by the role of a head."""


class Sharpness(NamedTuple):
    """Measures of one matrix on one prompt: shares 0 to 1, the entropy in bits; NaN if the prompt has no such position.

    The last row predicts the answer: ``entropy`` is its spread, ``answer``, ``separators`` and ``aggregate`` its shares
    on the answer's summary, on punctuation and line breaks, and on any summary. ``gather`` is the share of a segment's
    content in the best row of its summary, averaged over segments.
    """

    entropy: float
    answer: float
    separators: float
    gather: float
    aggregate: float


def sharpness(prompt: MarkedPrompt, mix: HeadMix) -> Sharpness:
    """Measure one head on a prompt."""
    share_TS = row_shares(mix.matrix_TS)
    last_S, segments = share_TS[-1], [segment for segment in prompt.segments if segment.content]
    gathered = [share_TS[list(own.summary)][:, list(own.content)].sum(1).max().item() for own in segments]
    answer = [] if prompt.answer is None else list(prompt.segments[prompt.answer].summary)
    return Sharpness(
        entropy=abs((last_S * last_S.clamp(min=1e-30).log2()).sum().item()),
        answer=last_S[answer].sum().item() if answer else math.nan,
        separators=last_S[list(prompt.separators)].sum().item(),
        gather=sum(gathered) / len(gathered) if gathered else math.nan,
        aggregate=last_S[prompt.summaries].sum().item() if prompt.segments else math.nan,
    )


def row_shares(matrix_TS: Tensor) -> Tensor:
    """Return absolute values, each row divided by its sum (in float64); a row of zeros stays zero."""
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
    every = find_heads(model, kind)
    site = next(iter(every.values()))
    if site.kind == "channel":
        raise ValueError(
            f"this model has {site.n_heads} channels a layer, too many to look through; name some with --heads."
        )
    total_HM = torch.zeros(len(every), len(Sharpness._fields), dtype=torch.float64)
    for prompt in track([mark_example(tokenizer, example) for example in examples], "matrices"):
        measure = partial(sharpness, prompt)
        measured = mix_heads(model, prompt.ids, list(every), measure, kind=kind, max_gb=math.inf)
        total_HM += torch.tensor(measured, dtype=torch.float64)
    return {head: Sharpness(*means) for head, means in zip(every, (total_HM / len(examples)).tolist(), strict=True)}


def rank_by(found: dict[HeadId, Sharpness], measure: str) -> list[HeadId]:
    """Rank heads by "gather" or "aggregate", most first."""
    return sorted(found, key=lambda head: -getattr(found[head], measure))
