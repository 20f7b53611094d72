"""Heads kept in a layer: all others of that layer are removed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from transformers import PreTrainedModel

from ...plan import HeadId
from ...teacher import HeadKind, ablate_heads, check_exists, head_sites
from .experiment import Bench, ModelExperiment, Variant
from .figures import draw_bars
from .prune_layers import layers_above, without_layers
from .tables import Table

NONE = "none"

Kept = Mapping[int, tuple[int, ...]]  # layer -> the heads that stay there; other layers keep all


@dataclass(frozen=True, kw_only=True)
class KeepHeads(ModelExperiment):
    """Keep only some heads of a layer, or of several: which tasks mind?"""

    NAME = "keep-heads"

    keep: tuple[str, ...]
    """One row each: the heads that stay, by layer, such as ``16:22/17:24``, ``16:none/17:24`` or ``5:0,5``. Layers that
    are not named keep all."""
    last_layer: int | None = None
    """Leave out the layers above this one, in every row but the first."""
    kind: HeadKind | None = None
    """``ssm`` for the recurrent heads of a model that has attention too."""

    def run(self) -> str:
        variants = {text: parse_kept(text) for text in self.keep}
        table = keep_heads(self.load(), variants, last_layer=self.last_layer, kind=self.kind)
        return self.save(table, draw_bars)


def parse_kept(text: str) -> dict[int, tuple[int, ...]]:
    """Parse ``"16:22/17:none"`` as heads by layer. Raises ValueError for anything else."""
    kept: dict[int, tuple[int, ...]] = {}
    for part in text.split("/"):
        layer, colon, heads = part.strip().partition(":")
        words = [] if heads.strip() == NONE else [word.strip() for word in heads.split(",")]
        if not colon or not layer.isdigit() or not all(word.isdigit() for word in words):
            raise ValueError(
                f"--keep holds {part!r}; give a layer and the heads that stay, such as 5:0,5, or 5:none, layers with /."
            )
        kept[int(layer)] = tuple(map(int, words))
    return kept


def keep_heads(
    bench: Bench, kept_by_label: Mapping[str, Kept], *, last_layer: int | None = None, kind: HeadKind | None = None
) -> Table:
    """Make a row for the whole model, then one for each choice of kept heads.

    With a ``last_layer`` the layers above it are left out, in a second row without any head removed and in those of
    the variants. Raises ValueError for a layer or head that does not exist.
    """
    model = bench.model
    sites, above = head_sites(model, kind), layers_above(model, last_layer)
    n_heads = {site.layer: site.n_heads for site in sites}
    removed: dict[str, list[HeadId]] = {f"all of layers 0 to {last_layer}": []} if above else {}
    for label, kept in kept_by_label.items():
        for layer, heads in kept.items():
            for head in heads or (0,):
                check_exists(model, sites, HeadId(layer, head))
        removed[label] = [HeadId(i, h) for i, heads in kept.items() for h in range(n_heads[i]) if h not in heads]
    variants = [Variant("all", nullcontext())]
    variants += [Variant(label, _without(model, above, heads, kind)) for label, heads in removed.items()]
    return bench.table("heads kept (layer:heads; other layers keep all)", "kept", variants)


@contextmanager
def _without(
    model: PreTrainedModel, layers: Sequence[int], heads: Sequence[HeadId], kind: HeadKind | None
) -> Iterator[None]:
    with without_layers(model, layers), ablate_heads(model, heads, kind=kind):
        yield
