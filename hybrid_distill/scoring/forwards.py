"""Forward passes with single heads ablated, which share all computation below the ablation.

Ablating a head of layer l

- does not change the layers below l: they run once for all heads;
- changes one slice of the input of layer l's output projection: the attention also runs once,
  several heads are ablated in one batch, and each head costs only the output projection and the
  layers above.

The result is exact: every operation is the same as in a full forward, and skipped outputs are never
read.

Shapes: G group (one ablation), B row, R = G*B rows, L length, H head, P head dim, C = H*P, D model
width, Q value (`ProbeBatch.values`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..io import Record
from ..plan import HeadId
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
)
from .batch_sizer import BatchSizer
from .probe_batch import ProbeBatch
from .probe_rows import ProbeRow


@dataclass(eq=False)
class Forwards(ABC):
    """Forward passes of the model, whole or with heads of one layer ablated in turn."""

    model: PreTrainedModel
    sites: Sequence[HeadSite]
    sizer: BatchSizer

    def __post_init__(self) -> None:
        self.site_of = {site.layer: site for site in self.sites}
        self.kind: HeadKind | None = as_head_kind(self.sites[0].kind)
        self.blocks = [block for _, block in decoder_blocks(self.model)]

    def whole(self, batch: ProbeBatch) -> Tensor:
        """Return value_1Q of the model as it is."""
        return self.sizer.fit(batch, lambda n_rows: self._whole_in_parts(batch, n_rows))

    def without(
        self,
        batch: ProbeBatch,
        layer: int,
        heads: Sequence[int],
    ) -> Tensor:
        """Return value_HQ with each of ``heads`` ablated in turn.

        Call for layers from bottom to top.
        """
        return self.sizer.fit(
            batch, lambda n_rows: self._without_in_parts(batch, layer, heads, n_rows)
        )

    @abstractmethod
    def begin(self, batches: Sequence[ProbeBatch]) -> None:
        """Prepare for these batches; discard everything cached for others."""

    @abstractmethod
    def work(self, rows: Sequence[ProbeRow], layers: Sequence[int]) -> int:
        """Return the cost of these rows, in tokens times layers.

        ``layers`` holds the layer of each ablated head, one entry a head.
        """

    @abstractmethod
    def _whole_in_parts(self, batch: ProbeBatch, n_rows: int) -> Tensor:
        """Compute `whole`, at most ``n_rows`` rows at once."""

    @abstractmethod
    def _without_in_parts(
        self,
        batch: ProbeBatch,
        layer: int,
        heads: Sequence[int],
        n_rows: int,
    ) -> Tensor:
        """Compute `without`, at most ``n_rows`` rows at once."""


class FullForwards(Forwards):
    """Forward passes through all layers, for one ablated head after the other."""

    def __str__(self) -> str:
        return "full forwards"

    def begin(self, batches: Sequence[ProbeBatch]) -> None:
        """Do nothing: no batch has anything cached."""

    def work(self, rows: Sequence[ProbeRow], layers: Sequence[int]) -> int:
        return _n_tokens(rows) * len(self.blocks) * len(layers)

    def _whole_in_parts(self, batch: ProbeBatch, n_rows: int) -> Tensor:
        values = [part.values_by_plain_forwards(self.model) for _, part in batch.parts(n_rows)]
        return torch.cat(values, dim=1)

    def _without_in_parts(
        self,
        batch: ProbeBatch,
        layer: int,
        heads: Sequence[int],
        n_rows: int,
    ) -> Tensor:
        values = []
        for head in heads:
            with ablate_heads(self.model, [HeadId(layer, head)], kind=self.kind):
                values.append(self._whole_in_parts(batch, n_rows))
        return torch.cat(values)


class LayerRecord(NamedTuple):
    """One layer's tensors, and functions that wrap a tensor as its mixer and its block return it."""

    input_BLD: Tensor
    heads_BLHP: Tensor
    """Input of the output projection."""
    output_BLD: Tensor
    as_mixer_output: Callable[[Tensor], object]
    as_block_output: Callable[[Tensor], object]


class _Reached(NamedTuple):
    """Layers that have run for a batch: their number, and the output of the last one."""

    n_layers: int
    output_BLD: Tensor
    as_block_output: Callable[[Tensor], object]


@dataclass(eq=False)
class FromLayer(Forwards):
    """Forward passes that start at the ablated layer, with several heads ablated in one batch.

    Caches the output of the layers below for each batch.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.begin([])

    def __str__(self) -> str:
        return "forwards from the ablated layer up"

    def begin(self, batches: Sequence[ProbeBatch]) -> None:
        self.reached: dict[ProbeBatch, _Reached] = {}

    def work(self, rows: Sequence[ProbeRow], layers: Sequence[int]) -> int:
        return _n_tokens(rows) * sum(len(self.blocks) - layer for layer in layers)

    def _whole_in_parts(self, batch: ProbeBatch, n_rows: int) -> Tensor:
        values = [part.values(part.logits(self.model)) for _, part in batch.parts(n_rows)]
        return torch.cat(values, dim=1)

    def _without_in_parts(
        self,
        batch: ProbeBatch,
        layer: int,
        heads: Sequence[int],
        n_rows: int,
    ) -> Tensor:
        # Before the first layer nothing is cached: the forward begins with the embedding.
        below = self.reached.get(batch)
        values = []
        parts_reached: list[_Reached] = []
        for rows, part in batch.parts(n_rows):
            below_part = None
            if below is not None:
                below_part = below._replace(output_BLD=below.output_BLD[rows])
            record = self._record(part, below_part, layer)
            parts_reached.append(_Reached(layer + 1, record.output_BLD, record.as_block_output))
            # n_rows limits the rows of one forward, and each ablated head repeats the part's rows.
            n_at_once = max(1, n_rows // len(part))
            values_of_part = []
            for first in range(0, len(heads), n_at_once):
                group = heads[first : first + n_at_once]
                values_of_part.append(self._ablate(part, layer, group, record))
            values.append(torch.cat(values_of_part))
        output_BLD = torch.cat([part.output_BLD for part in parts_reached])
        # Only now: if memory runs out before, the retry needs the old entry.
        self.reached[batch] = parts_reached[0]._replace(output_BLD=output_BLD)
        return torch.cat(values, dim=1)

    def _record(self, part: ProbeBatch, below: _Reached | None, layer: int) -> LayerRecord:
        """Run the layers above ``below`` up to ``layer``, and record the last one."""
        mixer_outputs: list[object] = []
        records: list[LayerRecord] = []

        def after_mixer(module: nn.Module, args: object, output: object) -> None:
            mixer_outputs.append(output)

        def after_block(
            module: nn.Module,
            args: tuple[Tensor, ...],
            kwargs: Record,
            output: Tensor | tuple[Tensor, ...],
        ) -> None:
            record = LayerRecord(
                input_BLD=args[0] if args else kwargs["hidden_states"],
                heads_BLHP=recorded_heads[0],
                output_BLD=output[0] if isinstance(output, tuple) else output,
                as_mixer_output=_wrapper_like(mixer_outputs[0]),
                as_block_output=_wrapper_like(output),
            )
            records.append(record)
            # A hook cannot return early from the model; an exception skips the layers above.
            raise _Enough

        with ExitStack() as hooks:
            if below is not None:
                output = below.as_block_output(below.output_BLD)
                hooks.enter_context(replay_blocks(self.model, below.n_layers - 1, output))
            recorded_heads = hooks.enter_context(record_heads(self.model, layer, kind=self.kind))
            hooks.enter_context(self.site_of[layer].module.register_forward_hook(after_mixer))
            hooks.enter_context(
                self.blocks[layer].register_forward_hook(after_block, with_kwargs=True)
            )
            hooks.enter_context(suppress(_Enough))
            part.logits(self.model)
        return records[0]

    def _ablate(
        self,
        part: ProbeBatch,
        layer: int,
        heads: Sequence[int],
        record: LayerRecord,
    ) -> Tensor:
        """Return value_GQ of one forward from this layer up, the rows repeated for each head."""
        site = self.site_of[layer]
        n_groups = len(heads)
        heads_RLC = record.heads_BLHP.flatten(2).repeat(n_groups, 1, 1)
        # Group by group, as ablate_heads_by_row and ProbeBatch.logits count rows.
        input_RLD = record.input_BLD.repeat(n_groups, 1, 1)

        def project(*args: object, **kwargs: object) -> object:
            return record.as_mixer_output(site.o_proj(heads_RLC))

        with ExitStack() as patches:
            # The layer's norm and residual run again, on its recorded input; its mixer does not.
            below = record.as_block_output(input_RLD)
            patches.enter_context(replay_blocks(self.model, layer - 1, below))
            patches.enter_context(replaced_forward(site.module, project))
            patches.enter_context(ablate_heads_by_row(self.model, layer, heads, kind=self.kind))
            return part.values(part.logits(self.model, n_groups))


class _Enough(Exception):
    """Signal that ends a forward once everything needed is computed."""


def _n_tokens(rows: Sequence[ProbeRow]) -> int:
    return sum(len(row.tokens) for row in rows)


def _wrapper_like(output: object) -> Callable[[Tensor], object]:
    """Return a function that wraps a tensor like a module's output, in a tuple or bare."""
    if not isinstance(output, tuple):
        return lambda tensor: tensor
    # Callers read only the first entry; the others are maps or caches that are switched off.
    others = (None,) * (len(output) - 1)
    return lambda tensor: (tensor, *others)
