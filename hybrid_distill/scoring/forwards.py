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


@dataclass(eq=False)
class FromLayer(Forwards):
    """Forward passes that start at the ablated layer, with several heads ablated in one batch.

    Caches the output of the layers below for each batch.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.begin([])
        # Wrap a tensor like the output of a layer and of its mixer, which differ by family; set by
        # the first forward.
        self.as_block_output: Callable[[Tensor], object]
        self.as_mixer_output: Callable[[Tensor], object]

    def __str__(self) -> str:
        return "forwards from the ablated layer up"

    def begin(self, batches: Sequence[ProbeBatch]) -> None:
        # By batch: the number of layers that have run, and the output of the last one.
        self.reached: dict[ProbeBatch, tuple[int, Tensor]] = {}

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
        start, below_BLD = self.reached.get(batch, (0, None))
        values = []
        outputs = []
        for rows, part in batch.parts(n_rows):
            below_part_BLD = None
            if below_BLD is not None:
                below_part_BLD = below_BLD[rows]
            input_BLD, heads_BLHP, output_BLD = self._record(part, start, below_part_BLD, layer)
            outputs.append(output_BLD)
            # n_rows limits the rows of one forward, and each ablated head repeats the part's rows.
            n_at_once = max(1, n_rows // len(part))
            values_of_part = []
            for first in range(0, len(heads), n_at_once):
                group = heads[first : first + n_at_once]
                values_of_part.append(self._ablate(part, layer, group, input_BLD, heads_BLHP))
            values.append(torch.cat(values_of_part))
        # Only now: if memory runs out before, the retry needs the old entry.
        self.reached[batch] = (layer + 1, torch.cat(outputs))
        return torch.cat(values, dim=1)

    def _record(
        self,
        part: ProbeBatch,
        start: int,
        below_BLD: Tensor | None,
        layer: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run only layers ``start`` to ``layer``, on the output of the layers below.

        Returns the input_BLD of ``layer``, the heads_BLHP that its output projection reads, and its
        output_BLD.
        """
        inputs: list[Tensor] = []
        outputs: list[Tensor] = []

        def after_mixer(module: nn.Module, args: object, output: object) -> None:
            self.as_mixer_output = _wrapper_like(output)

        def after_block(
            module: nn.Module,
            args: tuple[Tensor, ...],
            kwargs: Record,
            output: Tensor | tuple[Tensor, ...],
        ) -> None:
            self.as_block_output = _wrapper_like(output)
            inputs.append(args[0] if args else kwargs["hidden_states"])
            outputs.append(output[0] if isinstance(output, tuple) else output)
            # A hook cannot return early from the model; an exception skips the layers above.
            raise _Enough

        with ExitStack() as hooks:
            if below_BLD is not None:
                below = self.as_block_output(below_BLD)
                hooks.enter_context(replay_blocks(self.model, start - 1, below))
            recorded_heads = hooks.enter_context(record_heads(self.model, layer, kind=self.kind))
            hooks.enter_context(self.site_of[layer].module.register_forward_hook(after_mixer))
            hooks.enter_context(
                self.blocks[layer].register_forward_hook(after_block, with_kwargs=True)
            )
            hooks.enter_context(suppress(_Enough))
            part.logits(self.model)
        return inputs[0], recorded_heads[0], outputs[0]

    def _ablate(
        self,
        part: ProbeBatch,
        layer: int,
        heads: Sequence[int],
        input_BLD: Tensor,
        heads_BLHP: Tensor,
    ) -> Tensor:
        """Return value_GQ of one forward from this layer up, the rows repeated for each head."""
        site = self.site_of[layer]
        n_groups = len(heads)
        heads_RLC = heads_BLHP.flatten(2).repeat(n_groups, 1, 1)
        # Group by group, as ablate_heads_by_row and ProbeBatch.logits count rows.
        input_RLD = input_BLD.repeat(n_groups, 1, 1)

        def project(*args: object, **kwargs: object) -> object:
            return self.as_mixer_output(site.o_proj(heads_RLC))

        with ExitStack() as patches:
            # The layer's norm and residual run again, on its recorded input; its mixer does not.
            below = self.as_block_output(input_RLD)
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
