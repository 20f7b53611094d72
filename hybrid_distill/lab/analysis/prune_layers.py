"""Which layers a task needs: dropping them from the end, and leaving out one at a time (arXiv 2504.18574).

A layer that is left out hands on what it gets and does not run, but for a forward with a cache, which it fills as ever.
Nothing of the model is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...model.layout import CACHE_NAMES
from ...teacher import decoder_blocks, replaced_forward
from .figures import draw_lines
from .tables import Row, Table
from .tasks import Questions, Subject, Task, measure

NAME = "prune-layers"
How = Literal["gradual", "individual", "both"]
CACHES = (*CACHE_NAMES, "cache_params")


@dataclass(frozen=True)
class PruneLayers:
    """Drop layers from the end, and leave out each layer by itself: which tasks mind?"""

    subject: Subject = field(default_factory=Subject)
    questions: Questions = field(default_factory=Questions)
    how: How = "both"
    """``gradual`` drops more and more layers from the end, ``individual`` one at a time and puts it back."""
    last_layer: int | None = None
    """Individual pruning without the layers above this one; by default all are there."""
    out: Path = Path("runs/analysis")
    """The folder of the tables and figures."""

    def run(self) -> str:
        """The tables as text; writes them and their figures to ``out``."""
        model, tokenizer = self.subject.load()
        if self.last_layer is not None:
            check_layer(self.last_layer, len(decoder_blocks(model)))
        tasks = self.questions.make(model, tokenizer)
        shown = []
        if self.how != "individual":
            table = prune_from_the_end(model, tokenizer, tasks)
            shown.append(_saved(table, self.out, "gradual", "layers left"))
        if self.how != "gradual":
            table = prune_each_layer(model, tokenizer, tasks, last_layer=self.last_layer)
            shown.append(_saved(table, self.out, "individual", "layer left out"))
        return "\n\n".join(shown)


def _saved(table: Table, folder: Path, how: str, x_label: str) -> str:
    table.save(folder, f"{NAME}.{how}")
    draw_lines(table, folder / f"{NAME}.{how}.png", x_label)
    return table.text()


@contextmanager
def without_layers(model: nn.Module, layers: Iterable[int]) -> Iterator[None]:
    """Let the named decoder layers hand on what they get; the model is as before afterwards.

    Raises ValueError for a layer that does not exist.
    """
    blocks = decoder_blocks(model)
    with ExitStack() as replaced:
        for layer in sorted(set(layers)):
            check_layer(layer, len(blocks))
            block = blocks[layer][1]
            replaced.enter_context(replaced_forward(block, _hand_on(block.forward)))
        yield


def _hand_on(own: Callable[..., Any]) -> Callable[..., Any]:
    """A layer's forward that gives back the hidden states it is given.

    The layer's ``own`` runs once, to see what else it gives back (None, in most families), and to fill a cache.
    """
    beside: tuple[Any, ...] = ()
    has_run = is_tuple = False

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal beside, has_run, is_tuple
        hidden_BLD = args[0] if args else kwargs["hidden_states"]
        has_cache = any(kwargs.get(name) is not None for name in CACHES)
        if not has_run or has_cache or any(part is not None for part in beside):
            output = own(*args, **kwargs)
            has_run, is_tuple = True, isinstance(output, tuple)
            beside = output[1:] if is_tuple else ()
        return (hidden_BLD, *beside) if is_tuple else hidden_BLD

    return forward


def check_layer(layer: int, n_layers: int) -> None:
    """Raise ValueError for a layer that a model of so many does not have."""
    if not 0 <= layer < n_layers:
        raise ValueError(f"layer {layer} does not exist: this model has layers 0..{n_layers - 1}.")


def prune_from_the_end(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tasks: Sequence[Task], *, progress: bool = True
) -> Table:
    """A row for each number of layers left, from all to one."""
    n_layers = len(decoder_blocks(model))
    rows = []
    for left in tqdm(range(n_layers, 0, -1), desc="dropping layers", disable=not progress):
        with without_layers(model, range(left, n_layers)):
            label = "all" if left == n_layers else f"0 to {left - 1}" if left > 1 else "0"
            rows.append(Row(label, measure(model, tokenizer, tasks), "layers from the end", left))
    title = f"{model.name_or_path}: layers dropped from the end"
    return Table(title, "layers left", tuple(task.column for task in tasks), tuple(rows))


def prune_each_layer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[Task],
    *,
    last_layer: int | None = None,
    progress: bool = True,
) -> Table:
    """A row for each layer that is left out, all others being there; none above ``last_layer`` is, in any row.

    Raises ValueError for a ``last_layer`` that does not exist.
    """
    n_layers = len(decoder_blocks(model))
    top = n_layers - 1 if last_layer is None else last_layer
    check_layer(top, n_layers)
    rows = []
    for layer in tqdm([None, *range(top + 1)], desc="leaving out layers", disable=not progress):
        gone = [*range(top + 1, n_layers), *([] if layer is None else [layer])]
        with without_layers(model, gone):
            label, group, x = ("none", "", 0) if layer is None else (str(layer), "one layer", layer)
            rows.append(Row(label, measure(model, tokenizer, tasks), group, x))
    above = "" if top == n_layers - 1 else f", of layers 0 to {top}"
    title = f"{model.name_or_path}: one layer left out{above}"
    return Table(title, "layer left out", tuple(task.column for task in tasks), tuple(rows))
