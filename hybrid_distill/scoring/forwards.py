"""Run a decoder without some of its heads, and compute nothing twice.

Without a head of layer l

- the layers below l do what they always do: they run once, for all heads;
- the attention of layer l does what it always does, but for one slice of what its output projection reads: it too runs
  once, several heads are taken out in one batch, and each costs the output projection and what comes after it;
- of the last layer only the positions that are read need queries and an MLP: of all others, keys and values are enough.

All of it is exact: nothing is computed in another way than in a full forward, and nothing that is left out is read.

Shapes: G group (one ablation), B example, R = G*B rows, L length, H head, P head dim, D model width, Q number read
(`Sheet.read`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..model.layout import CACHE_NAMES
from ..plan import HeadId
from ..probes.answering import Tokens, forward
from ..teacher import (
    HeadKind,
    HeadSite,
    ablate_heads,
    ablate_heads_by_row,
    asked_for,
    decoder_blocks,
    record_heads,
    replaced_forward,
    replay_blocks,
)
from .auto_batch import Rows
from .probe_batch import Sheet, text_sheets
from .ranks import share, together

log = logging.getLogger(__name__)

POSITION_NAMES = ("position_ids", "cache_position")
# By how many nats two ways of computing the same thing may differ.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
TOLERANCE_16_BIT = 0.25


class Forwards:
    """Reads what a model makes of sheets: as it is, and without each of some heads of one layer.

    ``values`` holds, by layer, the vectors [H, P] that ablated heads get; zeros where a layer is not in it.
    """

    def __init__(
        self, model: PreTrainedModel, sites: Sequence[HeadSite], rows: Rows, values: Mapping[int, Tensor] | None = None
    ) -> None:
        self.model, self.rows, self.values = model, rows, values or {}
        self.sites = {site.layer: site for site in sites}
        self.kind: HeadKind | None = asked_for(sites[0].kind)

    def begin(self, sheets: Sequence[Sheet]) -> None:
        """Forget all that is kept of other sheets."""

    def whole(self, sheet: Sheet) -> Tensor:
        """read_1Q of the model as it is."""
        return self.rows.fitting(sheet, lambda rows: self._whole(sheet, rows))

    def without(self, sheet: Sheet, layer: int, heads: Sequence[int]) -> Tensor:
        """read_HQ: each of the layer's heads is ablated in turn. Layers are asked for bottom to top."""
        return self.rows.fitting(sheet, lambda rows: self._without(sheet, layer, heads, rows))

    @contextmanager
    def ablated(self, head: HeadId) -> Iterator[None]:
        """Every forward lacks this head."""
        values = {head: self.values[head.layer][head.head]} if head.layer in self.values else None
        with ablate_heads(self.model, [head], values, kind=self.kind):
            yield

    def _whole(self, sheet: Sheet, rows: int) -> Tensor:
        return torch.cat([part.read_plainly(self.model) for _, part in _parts(sheet, rows)], dim=1)

    def _without(self, sheet: Sheet, layer: int, heads: Sequence[int], rows: int) -> Tensor:
        found = []
        for head in heads:
            with self.ablated(HeadId(layer, head)):
                found.append(self._whole(sheet, rows))
        return torch.cat(found)


@dataclass
class _Recorded:
    """What one layer reads, what its output projection reads, and what the layer gives out."""

    below_BLD: Tensor
    heads_BLHP: Tensor
    above_BLD: Tensor


class FromLayer(Forwards):
    """Forwards that begin at the ablated layer, with several heads ablated in one batch.

    What the layers below give out is kept for each sheet. ``answers_only`` spares the last layer the positions that
    are not read.
    """

    def __init__(self, *args: Any, answers_only: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.blocks = [block for _, block in decoder_blocks(self.model)]
        self.last = len(self.blocks) - 1
        self.answers_only = answers_only and self.last > 0
        self.reached: dict[Sheet, tuple[int, Tensor | None]] = {}
        self.as_output: Callable[[Tensor], Any]
        self.as_mixed: Callable[[Tensor], Any]

    def begin(self, sheets: Sequence[Sheet]) -> None:
        self.reached = {sheet: (0, None) for sheet in sheets}

    def _whole(self, sheet: Sheet, rows: int) -> Tensor:
        found = []
        for _, part in _parts(sheet, rows):
            with self._short_last_layer(part):
                found.append(part.read(part.logits(self.model)))
        return torch.cat(found, dim=1)

    def _without(self, sheet: Sheet, layer: int, heads: Sequence[int], rows: int) -> Tensor:
        start, below = self.reached.get(sheet, (0, None))
        if layer < start:
            start, below = 0, None
        found, above = [], []
        for place, part in _parts(sheet, rows):
            recorded = self._record(part, start, None if below is None else below[place], layer)
            above.append(recorded.above_BLD)
            at_once = max(1, rows // len(part))
            groups = [heads[i : i + at_once] for i in range(0, len(heads), at_once)]
            found.append(torch.cat([self._ablate(part, layer, group, recorded) for group in groups]))
        self.reached[sheet] = (layer + 1, torch.cat(above))
        return torch.cat(found, dim=1)

    def _record(self, part: Sheet, start: int, below_BLD: Tensor | None, layer: int) -> _Recorded:
        """Run layers ``start`` to ``layer`` on what the layers below gave out, and no others."""
        site, block = self.sites[layer], self.blocks[layer]
        read: list[Tensor] = []

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            read.append(args[0] if args else kwargs["hidden_states"])

        def mixed(module: nn.Module, args: Any, output: Any) -> None:
            self.as_mixed = _filled_like(output)

        def after(module: nn.Module, args: Any, output: Any) -> None:
            self.as_output = _filled_like(output)
            read.append(output[0] if isinstance(output, tuple) else output)
            raise _Enough

        with ExitStack() as hooks:
            hooks.enter_context(self._replaying(start, below_BLD))
            recorded = hooks.enter_context(record_heads(self.model, layer, kind=self.kind))
            for handle in (
                block.register_forward_pre_hook(before, with_kwargs=True),
                site.module.register_forward_hook(mixed),
                block.register_forward_hook(after),
            ):
                hooks.callback(handle.remove)
            hooks.enter_context(suppress(_Enough))
            part.logits(self.model)
        below, above = read
        return _Recorded(below, recorded[0], above)

    def _ablate(self, part: Sheet, layer: int, heads: Sequence[int], recorded: _Recorded) -> Tensor:
        """read_GQ: one forward from this layer up, its rows once for each head."""
        n_groups, site = len(heads), self.sites[layer]
        kept = part.n_read if layer == self.last and self.answers_only else part.length
        below_RLD = recorded.below_BLD[:, -kept:].repeat(n_groups, 1, 1)
        heads_RLC = recorded.heads_BLHP[:, -kept:].flatten(2).repeat(n_groups, 1, 1)
        with ExitStack() as patches:
            patches.enter_context(self._replaying(layer, below_RLD))
            patches.enter_context(replaced_forward(site.module, lambda *_, **__: self.as_mixed(site.o_proj(heads_RLC))))
            if layer < self.last:
                patches.enter_context(self._short_last_layer(part))
            patches.enter_context(
                ablate_heads_by_row(self.model, layer, heads, self.values.get(layer), kind=self.kind)
            )
            return part.read(part.logits(self.model, n_groups))

    @contextmanager
    def _replaying(self, layer: int, below: Tensor | None) -> Iterator[None]:
        """The layers below ``layer`` hand out what they gave out before."""
        if layer == 0 or below is None:
            yield
        else:
            with replay_blocks(self.model, layer - 1, self.as_output(below)):
                yield

    @contextmanager
    def _short_last_layer(self, part: Sheet) -> Iterator[None]:
        if not self.answers_only or part.n_read == part.length:
            yield
        else:
            block, site = self.blocks[self.last], self.sites.get(self.last)
            queries = getattr(site.module, "q_proj", None) if site is not None else None
            with replaced_forward(block, _reading_only(block.forward, part.n_read, self.model, queries)):
                yield


class _Enough(Exception):
    """All that was wanted of a forward has been computed."""


class _KeysAndValues:
    """Stands in for a layer's cache: takes the keys and values of all positions, then hands them out."""

    def __init__(self) -> None:
        self.found: tuple[Tensor, Tensor] | None = None

    def update(self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.found is None:
            self.found = key, value
            raise _Enough
        return self.found


def _reading_only(
    forward: Callable[..., Any], n_read: int, model: PreTrainedModel, queries: nn.Linear | None
) -> Callable[..., Any]:
    """A decoder layer's forward that gives out the last ``n_read`` positions alone.

    Attention modules hand their keys and values to a cache before they attend. A first call stops there, with those
    of all positions and no ``queries``; a second one runs on the positions that are read, as if the others had come
    before.
    """

    def no_queries(hidden_RLD: Tensor) -> Tensor:
        assert queries is not None
        return hidden_RLD.new_zeros(1).expand(*hidden_RLD.shape[:-1], queries.out_features)

    def short(hidden_RLD: Tensor, *args: Any, **kwargs: Any) -> Any:
        length = hidden_RLD.shape[1]
        cache = next((name for name in CACHE_NAMES if name in kwargs), CACHE_NAMES[0])
        kwargs[cache] = _KeysAndValues()
        try:
            with nullcontext() if queries is None else replaced_forward(queries, no_queries):
                forward(hidden_RLD, *args, **kwargs)
        except _Enough:
            pass
        else:
            raise TypeError("the last layer hands no keys and values to a cache")
        read = {name: _last_positions(value, name, n_read, length) for name, value in kwargs.items()}
        if read.get("attention_mask") is None and n_read > 1 and model.config._attn_implementation == "sdpa":
            # Without a mask, queries would be taken for the first positions.
            seen = torch.ones(n_read, length, dtype=torch.bool, device=hidden_RLD.device)
            read["attention_mask"] = seen.tril(length - n_read)[None, None]
        return forward(hidden_RLD[:, -n_read:], *(_last_positions(a, "", n_read, length) for a in args), **read)

    return short


def _last_positions(value: Any, name: str, n_read: int, length: int) -> Any:
    """The part of a layer's argument (rotations, masks, positions) that belongs to the last positions."""
    if isinstance(value, tuple):
        return tuple(_last_positions(each, name, n_read, length) for each in value)
    if not isinstance(value, Tensor):
        return value
    if name in POSITION_NAMES:
        return value[..., -n_read:]
    if value.ndim >= 3 and value.shape[-2] == length:
        return value[..., -n_read:, :]
    return value


def _filled_like(output: Any) -> Callable[[Tensor], Any]:
    """How a module returns a tensor: by itself, or at the head of a tuple."""
    n_others = len(output) - 1 if isinstance(output, tuple) else None
    return lambda tensor: tensor if n_others is None else (tensor, *[None] * n_others)


def _parts(sheet: Sheet, rows: int) -> Iterator[tuple[slice, Sheet]]:
    """Up to ``rows`` of a sheet's rows at a time, and where they stand in it."""
    for start in range(0, len(sheet), rows):
        stop = min(start + rows, len(sheet))
        yield slice(start, stop), sheet.part(start, stop)


def fastest_exact(
    model: PreTrainedModel,
    sites: Sequence[HeadSite],
    rows: Rows,
    values: Mapping[int, Tensor] | None,
    sheets: Sequence[Sheet],
) -> Forwards:
    """The fastest way of running this model that agrees with its own full forwards on some rows of each sort.

    Layers that pass on more than their output, or share modules, and attention that knows no cache cannot be cut
    short: such models run in full, which is said in the log.
    """
    in_full = Forwards(model, sites, rows, values)
    reason: str | None = "its layers share modules"
    if not any(site.shared for site in sites):
        for answers_only in (True, False):
            short = FromLayer(model, sites, rows, values, answers_only=answers_only)
            reason = next((r for sheet in sheets if (r := _differs(short, in_full, sheet.part(0, 1)))), None)
            if reason is None:
                return short
            log.debug("answers_only=%s cannot be used: %s", answers_only, reason)
    log.warning("forwards of this %s cannot be cut short (%s): all run in full", type(model).__name__, reason)
    return in_full


def _differs(short: FromLayer, in_full: Forwards, sheet: Sheet) -> str | None:
    """Why a shortcut cannot be taken, judged by one head of the first, a middle and the last layer."""
    layers = list(short.sites)
    tolerance = TOLERANCE.get(_computed_in(short.model), TOLERANCE_16_BIT)
    short.begin([sheet])
    for layer in sorted({layers[0], layers[len(layers) // 2], layers[-1]}):
        heads = [0, short.sites[layer].n_heads - 1]
        try:
            found, expected = (way.without(sheet, layer, heads) for way in (short, in_full))
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        if not torch.allclose(found, expected, rtol=tolerance / 10, atol=tolerance, equal_nan=True):
            error = (found - expected).abs().max().item()
            return f"without a head of layer {layer} log-probabilities are {error:.2g} nats off"
    return None


def head_means(
    model: PreTrainedModel, sites: Sequence[HeadSite], rows: Rows, prompts: Sequence[Tokens]
) -> dict[int, Tensor]:
    """By layer, each head's mean output [H, P] over all tokens of all prompts; processes share the prompts."""
    kind = asked_for(sites[0].kind)

    def sums(sheet: Sheet, n_rows: int) -> list[Tensor]:
        total: list[Any] = [0.0] * len(sites)
        for _, part in _parts(sheet, n_rows):
            with ExitStack() as hooks:
                recorded = [hooks.enter_context(record_heads(model, site.layer, kind=kind)) for site in sites]
                forward(model, part.ids_BL, torch.ones_like(part.ids_BL), logits_to_keep=1)
            total = [t + heads[0].double().sum((0, 1)).cpu() for t, heads in zip(total, recorded)]
        return total

    def mine() -> list[list[Tensor]]:
        longest_first = sorted(range(len(prompts)), key=lambda n: (-len(prompts[n]), n))
        sheets = text_sheets(prompts, share(longest_first), model.device)
        return [rows.fitting(sheet, lambda n_rows, sheet=sheet: sums(sheet, n_rows)) for sheet in sheets]

    n_tokens = sum(map(len, prompts))
    by_sheet = [each for shares in together(mine) for each in shares]
    return {
        site.layer: (torch.stack(total).sum(0) / n_tokens).to(model.device)
        for site, total in zip(sites, zip(*by_sheet, strict=True))
    }


def _computed_in(model: PreTrainedModel) -> torch.dtype:
    device = model.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else model.dtype
