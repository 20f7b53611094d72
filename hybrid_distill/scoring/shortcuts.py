"""Choose the fastest forwards that are exact for a model: the shortcut, if it agrees with full ones.

Shapes: G group (one ablation), B row, E question of a row, L length, D model width, X outcome
(`ProbeBatch.outcome`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..model.self_check import rounded_output
from ..probes.answering import forward
from ..teacher import HeadSite, text_config
from .batch_sizer import BatchSizer
from .forwards import Forwards, FromLayer, FullForwards
from .probe_batch import ProbeBatch
from .probe_rows import ProbeRow, PromptRow, TextRow

# Largest error of a shortcut, as a multiple of the error from different rounding alone. Both grow
# with depth, so no constant number of nats separates rounding from a mistake.
TIMES_THE_NOISE = 4
SAMPLE_TOKENS = 64
"""Tokens of the texts on which the shortcut is tested."""

log = logging.getLogger(__name__)


def sample_rows(
    prompts: Sequence[PromptRow], texts: Sequence[TextRow], device: torch.device
) -> list[list[ProbeRow]]:
    """Choose rows for `fastest_exact`: two lengths, a tree of choices, and short texts."""
    longest_first = sorted(prompts, key=_longest_first)
    median = longest_first[len(longest_first) // 2]
    chosen: list[ProbeRow] = [longest_first[0], median]
    chosen += [row for row in longest_first if row.node_of][:1]
    # A dict, not a set: it keeps their order.
    samples = [list(dict.fromkeys(chosen))]
    if texts:
        beginnings: list[ProbeRow] = []
        longest_texts = sorted(texts, key=_longest_first)[:2]
        for index, row in enumerate(longest_texts):
            # Different lengths, so that each is a batch of its own, as in scoring.
            tokens = row.tokens[: SAMPLE_TOKENS - index]
            beginnings.append(TextRow(row.number, tokens, device))
        samples.append(beginnings)
    return samples


def _longest_first(row: ProbeRow) -> int:
    return -len(row.tokens)


def fastest_exact(
    model: PreTrainedModel,
    sites: Sequence[HeadSite],
    sizer: BatchSizer,
    samples: Sequence[Sequence[ProbeRow]],
) -> Forwards:
    """Return the fastest forwards for this model that agree with its full forwards on sample rows.

    Models whose layers share modules, or pass on more than their output, cannot use the shortcut:
    they run in full.
    """
    in_full = FullForwards(model, sites, sizer)
    if any(site.shared for site in sites):
        reason = "its layers share modules"
    else:
        shortcut = FromLayer(model, sites, sizer)
        reason = _first_difference(shortcut, in_full, samples)
        if reason is None:
            return shortcut
    log.warning(
        "the shortcut is off for this %s (%s): all forwards run in full",
        type(model).__name__,
        reason,
    )
    return in_full


def _first_difference(
    shortcut: FromLayer,
    in_full: Forwards,
    samples: Sequence[Sequence[ProbeRow]],
) -> str | None:
    for sample in samples:
        reason = _difference(shortcut, in_full, sample)
        if reason is not None:
            return reason
    return None


def _difference(shortcut: FromLayer, in_full: Forwards, rows: Sequence[ProbeRow]) -> str | None:
    """Return the reason not to use a shortcut, if any, by two heads of the first, a middle and the last layer.

    Compares drops, because scores are drops. The shortcut may differ from full forwards about as
    much as they differ from full forwards whose layers round differently, or by the rounding error
    of logits in the compute dtype.
    """
    layers = [site.layer for site in shortcut.sites]
    # A batch for each row: they differ in length.
    batches = [ProbeBatch([row]) for row in rows]
    # Reading logits also rounds: it sums over the vocabulary in float32.
    reading = torch.finfo(torch.float32).eps * text_config(shortcut.model).vocab_size ** 0.5
    rounding = torch.finfo(compute_dtype(shortcut.model)).eps
    for layer in sorted({layers[0], layers[len(layers) // 2], layers[-1]}):
        shortcut.begin(batches)
        last = shortcut.site_of[layer].n_heads - 1
        # Two heads: with one, a mistake in the order of heads would not show.
        heads = sorted({last // 3, last})
        # An unknown family may raise any of these inside the shortcut; it then runs in full.
        try:
            if layer > layers[0]:
                # As in real scoring: every batch reaches a layer from the one below, after other
                # batches have run.
                layer_below = layers[layers.index(layer) - 1]
                for batch in batches:
                    shortcut.without(batch, layer_below, [0])
            short_XGBE = _drops(shortcut, batches, layer, heads)
            full_XGBE = _drops(in_full, batches, layer, heads)
            with _perturbed(shortcut.blocks, rounding):
                rounded_XGBE = _drops(in_full, batches, layer, heads)
            magnitude = _magnitude(in_full, batches)
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        deviation = _rms(short_XGBE - full_XGBE)
        noise = _rms(rounded_XGBE - full_XGBE)
        log.debug("layer %d: %.2g nats off, %.2g by rounding", layer, deviation, noise)
        tolerance = TIMES_THE_NOISE * max(noise, reading, rounding * magnitude)
        # "not <=" and not ">": a NaN must not pass.
        if not deviation <= tolerance:
            return (
                f"without a head of layer {layer} drops are {deviation:.2g} nats off, "
                f"{noise:.2g} by rounding alone"
            )
    return None


def _drops(
    forwards: Forwards,
    batches: Sequence[ProbeBatch],
    layer: int,
    heads: Sequence[int],
) -> Tensor:
    """Return the drop in outcome_XGBE of all batches, concatenated, from ablating each head.

    Scores are such drops.
    """
    whole = [batch.outcome(forwards.whole(batch)) for batch in batches]
    without = [batch.outcome(forwards.without(batch, layer, heads)) for batch in batches]
    return torch.cat(whole, dim=2) - torch.cat(without, dim=2)


@contextmanager
def _perturbed(blocks: Sequence[nn.Module], rounding: float) -> Iterator[None]:
    """Perturb each layer's output by up to one rounding error, the same with and without a head."""
    seed_of = {block: number for number, block in enumerate(blocks)}

    def perturb(module: nn.Module, args: object, output: object) -> object:
        generator = torch.Generator().manual_seed(seed_of[module])
        return rounded_output(output, generator, rounding)

    with ExitStack() as hooks:
        for block in blocks:
            hooks.enter_context(block.register_forward_hook(perturb))
        yield


def _magnitude(in_full: Forwards, batches: Sequence[ProbeBatch]) -> float:
    """Return the magnitude of logits and outcomes, with which rounding errors scale."""
    ids_1L = batches[0].rows[0].ids_L[None]
    output = forward(in_full.model, ids_1L, torch.ones_like(ids_1L), logits_to_keep=1)
    magnitudes = [output.logits.float().abs().max().item()]
    magnitudes += [_rms(batch.outcome(in_full.whole(batch))) for batch in batches]
    return max(magnitudes)


def _rms(numbers: Tensor) -> float:
    return numbers.square().mean().sqrt().item()


def compute_dtype(model: PreTrainedModel) -> torch.dtype:
    """Return the dtype of forward passes: autocast's if it is on, else the model's."""
    device = model.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return model.dtype
