"""Forward passes with single heads ablated, sharing all computation that the ablation does not change.

Ablating a head of layer l

- does not change the layers below l: they run once for all heads;
- changes one slice of the input of layer l's output projection: the attention also runs once, several heads are
  ablated in one batch, and each head costs only the output projection and the layers above.

The result is exact: every operation is the same as in a full forward, and skipped outputs are never read.

Shapes: G group (one ablation), B example, R = G*B rows, L length, H head, P head dim, D model width, Q value read
(`ProbeBatch.read`), X value that scores depend on (`ProbeBatch.outcome`), E question of a row.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..io import Record
from ..plan import HeadId
from ..probes.answering import forward
from ..teacher import (
    HeadKind,
    HeadSite,
    ablate_heads,
    ablate_heads_by_row,
    as_head_kind,
    decoder_blocks,
    record_heads,
    replaced_forward,
    replay_blocks,
    text_config,
)
from .probe_batch import ProbeBatch, Row, Rows

log = logging.getLogger(__name__)

# Largest error of a shortcut, as a multiple of the error from different rounding alone.
TIMES_THE_NOISE = 4


@dataclass(eq=False)
class Forwards:
    """Full forward passes: of the model as given, or with each of several heads of one layer ablated in turn."""

    model: PreTrainedModel
    sites: Sequence[HeadSite]
    rows: Rows

    def __post_init__(self) -> None:
        self.site_of = {site.layer: site for site in self.sites}
        self.kind: HeadKind | None = as_head_kind(self.sites[0].kind)

    def __str__(self) -> str:
        return "full forwards"

    def begin(self, batches: Sequence[ProbeBatch]) -> None:
        """Discard everything cached for other batches."""

    def work(self, rows: Sequence[Row], layers: Sequence[int]) -> int:
        """Return the cost, in tokens times layers, of running these rows once for each ablated head's layer."""
        return sum(len(row.tokens) for row in rows) * len(decoder_blocks(self.model)) * len(layers)

    def whole(self, batch: ProbeBatch) -> Tensor:
        """Return read_1Q of the model without any further ablation."""
        return self.rows.fitting(batch, lambda n_rows: self._whole(batch, n_rows))

    def without(self, batch: ProbeBatch, layer: int, heads: Sequence[int]) -> Tensor:
        """Return read_HQ with each of ``heads`` ablated in turn. Call for layers from bottom to top."""
        return self.rows.fitting(batch, lambda n_rows: self._without(batch, layer, heads, n_rows))

    def _whole(self, batch: ProbeBatch, n_rows: int) -> Tensor:
        return torch.cat([part.read_plainly(self.model) for _, part in batch.parts(n_rows)], dim=1)

    def _without(self, batch: ProbeBatch, layer: int, heads: Sequence[int], n_rows: int) -> Tensor:
        found = []
        for head in heads:
            with ablate_heads(self.model, [HeadId(layer, head)], kind=self.kind):
                found.append(self._whole(batch, n_rows))
        return torch.cat(found)


@dataclass(eq=False)
class FromLayer(Forwards):
    """Forward passes that start at the ablated layer, with several heads ablated in one batch.

    Caches the output of the layers below for each batch.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.blocks = [block for _, block in decoder_blocks(self.model)]
        self.begin([])
        self.as_output: Callable[[Tensor], object]
        self.as_mixed: Callable[[Tensor], object]

    def __str__(self) -> str:
        return "forwards from the ablated layer up"

    def begin(self, batches: Sequence[ProbeBatch]) -> None:
        self.reached: dict[ProbeBatch, tuple[int, Tensor]] = {}

    def work(self, rows: Sequence[Row], layers: Sequence[int]) -> int:
        return sum(len(row.tokens) for row in rows) * sum(len(self.blocks) - layer for layer in layers)

    def _whole(self, batch: ProbeBatch, n_rows: int) -> Tensor:
        return torch.cat([part.read(part.logits(self.model)) for _, part in batch.parts(n_rows)], dim=1)

    def _without(self, batch: ProbeBatch, layer: int, heads: Sequence[int], n_rows: int) -> Tensor:
        start, below = self.reached.get(batch, (0, None))
        found, above = [], []
        for place, part in batch.parts(n_rows):
            below_BLD, heads_BLHP, above_BLD = self._record(part, start, None if below is None else below[place], layer)
            above.append(above_BLD)
            at_once = max(1, n_rows // len(part))
            groups = [heads[i : i + at_once] for i in range(0, len(heads), at_once)]
            found.append(torch.cat([self._ablate(part, layer, group, below_BLD, heads_BLHP) for group in groups]))
        self.reached[batch] = (layer + 1, torch.cat(above))
        return torch.cat(found, dim=1)

    def _record(
        self, part: ProbeBatch, start: int, below_BLD: Tensor | None, layer: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run only layers ``start`` to ``layer``, on the output of the layers below.

        Returns the input of ``layer``, the input of its output projection, and its output.
        """
        found: list[Tensor] = []

        def mixed(module: nn.Module, args: object, output: object) -> None:
            self.as_mixed = _filled_like(output)

        def after(
            module: nn.Module, args: tuple[Tensor, ...], kwargs: Record, output: Tensor | tuple[Tensor, ...]
        ) -> None:
            self.as_output = _filled_like(output)
            found.append(args[0] if args else kwargs["hidden_states"])
            found.append(output[0] if isinstance(output, tuple) else output)
            raise _Enough

        with ExitStack() as hooks:
            if below_BLD is not None:
                hooks.enter_context(replay_blocks(self.model, start - 1, self.as_output(below_BLD)))
            recorded = hooks.enter_context(record_heads(self.model, layer, kind=self.kind))
            hooks.enter_context(self.site_of[layer].module.register_forward_hook(mixed))
            hooks.enter_context(self.blocks[layer].register_forward_hook(after, with_kwargs=True))
            hooks.enter_context(suppress(_Enough))
            part.logits(self.model)
        below, above = found
        return below, recorded[0], above

    def _ablate(
        self, part: ProbeBatch, layer: int, heads: Sequence[int], below_BLD: Tensor, heads_BLHP: Tensor
    ) -> Tensor:
        """Return read_GQ of one forward from this layer up, with the rows repeated for each head."""
        site = self.site_of[layer]
        heads_RLC = heads_BLHP.flatten(2).repeat(len(heads), 1, 1)
        with ExitStack() as patches:
            below = self.as_output(below_BLD.repeat(len(heads), 1, 1))
            patches.enter_context(replay_blocks(self.model, layer - 1, below))
            patches.enter_context(replaced_forward(site.module, lambda *_, **__: self.as_mixed(site.o_proj(heads_RLC))))
            patches.enter_context(ablate_heads_by_row(self.model, layer, heads, kind=self.kind))
            return part.read(part.logits(self.model, len(heads)))


class _Enough(Exception):
    """Signal that ends a forward once everything needed is computed."""


def _filled_like(output: object) -> Callable[[Tensor], object]:
    """Return a function that wraps a tensor like a module's output: bare, or first in a tuple filled with None."""
    n_others = len(output) - 1 if isinstance(output, tuple) else None
    return lambda tensor: tensor if n_others is None else (tensor, *[None] * n_others)


def fastest_exact(
    model: PreTrainedModel, sites: Sequence[HeadSite], rows: Rows, samples: Sequence[Sequence[Row]]
) -> Forwards:
    """Return the fastest forwards for this model that agree with its full forwards on sample rows.

    Models whose layers share modules, or pass on more than their output, cannot use the shortcut: they run in full.
    """
    in_full = Forwards(model, sites, rows)
    reason: str | None = "its layers share modules"
    if not any(site.shared for site in sites):
        short = FromLayer(model, sites, rows)
        reason = next((r for sample in samples if (r := _differs(short, in_full, sample))), None)
        if reason is None:
            return short
    log.warning("the shortcut is off for this %s (%s): all forwards run in full", type(model).__name__, reason)
    return in_full


def _drops(forwards: Forwards, batches: Sequence[ProbeBatch], layer: int, heads: Sequence[int]) -> Tensor:
    """Return the drop in outcome_XGBE of all batches, concatenated, from ablating each head; scores are such drops."""
    whole = [batch.outcome(forwards.whole(batch)) for batch in batches]
    without = [batch.outcome(forwards.without(batch, layer, heads)) for batch in batches]
    return torch.cat(whole, dim=2) - torch.cat(without, dim=2)


def _differs(short: FromLayer, in_full: Forwards, rows: Sequence[Row]) -> str | None:
    """Return the reason not to use a shortcut, if any, from two heads of the first, a middle and the last layer.

    Compares drops, because scores are drops. The shortcut may differ from full forwards about as much as full forwards
    whose layers round differently do, or as much as the rounding error of logits in the compute dtype.
    """
    layers = [site.layer for site in short.sites]
    batches = [ProbeBatch([row]) for row in rows]
    # Reading logits also rounds: it sums over the vocabulary in float32.
    reading = torch.finfo(torch.float32).eps * text_config(short.model).vocab_size ** 0.5
    rounding = torch.finfo(computed_in(short.model)).eps
    for layer in sorted({layers[0], layers[len(layers) // 2], layers[-1]}):
        short.begin(batches)
        last = short.site_of[layer].n_heads - 1
        heads = sorted({last // 3, last})
        try:
            # As in real scoring: every batch reaches a layer from the one below, after other batches have run.
            for batch in batches if layer > layers[0] else ():
                short.without(batch, layers[layers.index(layer) - 1], [0])
            found_XGBE = _drops(short, batches, layer, heads)
            plain_XGBE = _drops(in_full, batches, layer, heads)
            with _rounded_otherwise(short.blocks, rounding):
                rounded_XGBE = _drops(in_full, batches, layer, heads)
            size = _size(in_full, batches)
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        error, noise = (_rms(other - plain_XGBE) for other in (found_XGBE, rounded_XGBE))
        log.debug("layer %d: %.2g nats off, %.2g by rounding", layer, error, noise)
        if not error <= TIMES_THE_NOISE * max(noise, reading, rounding * size):
            return f"without a head of layer {layer} drops are {error:.2g} nats off, {noise:.2g} by rounding alone"
    return None


@contextmanager
def _rounded_otherwise(blocks: Sequence[nn.Module], rounding: float) -> Iterator[None]:
    """Perturb each layer's output by up to one rounding error, identically with and without a head."""

    def change(module: nn.Module, args: object, output: Tensor | tuple[Tensor, ...]) -> object:
        hidden_BLD = output[0] if isinstance(output, tuple) else output
        generator = torch.Generator().manual_seed(numbers[module])
        errors_BLD = rounding * (2 * torch.rand(hidden_BLD.shape, generator=generator) - 1)
        changed_BLD = (hidden_BLD * (1 + errors_BLD.to(hidden_BLD.device))).to(hidden_BLD.dtype)
        return (changed_BLD, *output[1:]) if isinstance(output, tuple) else changed_BLD

    numbers = {block: number for number, block in enumerate(blocks)}
    with ExitStack() as hooks:
        for block in blocks:
            hooks.enter_context(block.register_forward_hook(change))
        yield


def _size(in_full: Forwards, batches: Sequence[ProbeBatch]) -> float:
    """Return the magnitude of the logits and outcomes that rounding errors scale with."""
    ids_1L = batches[0].rows[0].ids_L[None]
    logits = forward(in_full.model, ids_1L, torch.ones_like(ids_1L), logits_to_keep=1).logits.float()
    return max(logits.abs().max().item(), *(_rms(batch.outcome(in_full.whole(batch))) for batch in batches))


def _rms(numbers: Tensor) -> float:
    return numbers.square().mean().sqrt().item()


def computed_in(model: PreTrainedModel) -> torch.dtype:
    """Return the dtype of forward passes, including autocast."""
    device = model.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else model.dtype
