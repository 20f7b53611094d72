"""Which layers a task needs: dropping them from the end, and leaving out one at a time (arXiv 2504.18574).

A layer that is left out returns its input and does not run, except for a forward with a cache, which it fills.
Nothing of the model is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal

from torch import nn

from ...model.layout import CACHE_NAMES
from ...teacher import decoder_blocks, replaced_forward
from .experiment import Bench, ModelExperiment, Variant
from .figures import draw_lines
from .tables import Table

CACHES = (*CACHE_NAMES, "cache_params")


@dataclass(frozen=True, kw_only=True)
class PruneLayers(ModelExperiment):
    """Drop layers from the end, and leave out each layer by itself: which tasks mind?"""

    NAME = "prune-layers"

    how: Literal["gradual", "individual", "both"] = "both"
    """``gradual`` drops more and more layers from the end, ``individual`` one at a time and puts it back."""
    last_layer: int | None = None
    """Individual pruning without the layers above this one; by default all are there."""

    def run(self) -> str:
        model, tokenizer = self.subject.load()
        layers_above(model, self.last_layer)
        bench, shown = Bench(model, tokenizer, self.questions.make(model, tokenizer)), []
        if self.how != "individual":
            table = prune_from_the_end(bench)
            shown.append(self.save(table, partial(draw_lines, x_label="layers left"), ".gradual"))
        if self.how != "gradual":
            table = prune_each_layer(bench, last_layer=self.last_layer)
            shown.append(self.save(table, partial(draw_lines, x_label="layer left out"), ".individual"))
        return "\n\n".join(shown)


@contextmanager
def without_layers(model: nn.Module, layers: Iterable[int]) -> Iterator[None]:
    """Let the named decoder layers return their input; restore them afterwards.

    Raises ValueError for a layer that does not exist.
    """
    blocks = decoder_blocks(model)
    with ExitStack() as replaced:
        for layer in sorted(set(layers)):
            _check_layer(layer, len(blocks))
            block = blocks[layer][1]
            replaced.enter_context(replaced_forward(block, _hand_on(block.forward)))
        yield


def _hand_on(own: Callable[..., object]) -> Callable[..., object]:
    """Make a layer's forward that returns the hidden states it is given.

    The layer's ``own`` runs once, to see what else it returns (None, in most families), and to fill a cache.
    """
    beside: tuple[object, ...] = ()
    has_run = is_tuple = False

    def forward(*args: object, **kwargs: object) -> object:
        nonlocal beside, has_run, is_tuple
        hidden_BLD = args[0] if args else kwargs["hidden_states"]
        has_cache = any(kwargs.get(name) is not None for name in CACHES)
        if not has_run or has_cache or any(part is not None for part in beside):
            output = own(*args, **kwargs)
            has_run, is_tuple = True, isinstance(output, tuple)
            beside = output[1:] if isinstance(output, tuple) else ()
        return (hidden_BLD, *beside) if is_tuple else hidden_BLD

    return forward


def layers_above(model: nn.Module, last_layer: int | None) -> range:
    """Return the layers above the last one that stays. Raises ValueError where that does not exist."""
    n_layers = len(decoder_blocks(model))
    if last_layer is None:
        return range(0)
    _check_layer(last_layer, n_layers)
    return range(last_layer + 1, n_layers)


def _check_layer(layer: int, n_layers: int) -> None:
    if not 0 <= layer < n_layers:
        raise ValueError(f"layer {layer} does not exist: this model has layers 0..{n_layers - 1}.")


def prune_from_the_end(bench: Bench) -> Table:
    """Make a row for each number of layers left, from all to one."""
    model = bench.model
    n_layers = len(decoder_blocks(model))
    labels = {left: f"0 to {left - 1}" for left in range(n_layers, 0, -1)} | {1: "0", n_layers: "all"}
    variants = [
        Variant(label, without_layers(model, range(left, n_layers)), "layers from the end", left)
        for left, label in labels.items()
    ]
    return bench.table("layers dropped from the end", "layers left", variants)


def prune_each_layer(bench: Bench, *, last_layer: int | None = None) -> Table:
    """Make a row for each layer that is left out, all others being there; those above ``last_layer`` never are.

    Raises ValueError for a ``last_layer`` that does not exist.
    """
    model = bench.model
    above = layers_above(model, last_layer)
    n_layers = len(decoder_blocks(model)) - len(above)
    variants = [Variant("none", without_layers(model, above))]
    variants += [Variant(str(i), without_layers(model, [i, *above]), "one layer", i) for i in range(n_layers)]
    title = "one layer left out" + (f", of layers 0 to {last_layer}" if above else "")
    return bench.table(title, "layer left out", variants)
