"""Heads kept in a layer: all others of that layer are removed (the source documents' table of that name)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...plan import HeadId
from ...teacher import HeadKind, ablate_heads, check_exists, decoder_blocks, head_sites
from .figures import draw_bars
from .prune_layers import check_layer, without_layers
from .tables import Row, Table
from .tasks import Questions, Subject, Task, measure

NAME = "keep-heads"
NONE, ALL = "none", "all"

Kept = Mapping[int, tuple[int, ...]]  # layer -> the heads that stay there; other layers keep all


@dataclass(frozen=True)
class KeepHeads:
    """Keep only some heads of a layer, or of several: which tasks mind?"""

    keep: tuple[str, ...]
    """One row each: the heads that stay, by layer, such as ``16:22/17:24``, ``16:none/17:24`` or ``5:0,5``. Layers that
    are not named keep all."""
    subject: Subject = field(default_factory=Subject)
    questions: Questions = field(default_factory=Questions)
    last_layer: int | None = None
    """Leave out the layers above this one, in every row but the first."""
    kind: HeadKind | None = None
    """``ssm`` for the recurrent heads of a model that has attention too."""
    out: Path = Path("runs/analysis")
    """The folder of the table and the figure, which take the place of earlier ones."""

    def run(self) -> str:
        """The table as text; writes it and its figure to ``out``."""
        variants = {text: parse_kept(text) for text in self.keep}
        model, tokenizer = self.subject.load()
        tasks = self.questions.make(model, tokenizer)
        table = keep_heads(model, tokenizer, tasks, variants, last_layer=self.last_layer, kind=self.kind)
        table.save(self.out, NAME)
        draw_bars(table, self.out / f"{NAME}.png")
        return table.text()


def parse_kept(text: str) -> dict[int, tuple[int, ...]]:
    """``"16:22/17:none"`` as heads by layer. Raises ValueError for anything else."""
    kept: dict[int, tuple[int, ...]] = {}
    for part in text.split("/"):
        layer, colon, heads = part.strip().partition(":")
        words = [] if heads.strip() == NONE else [word.strip() for word in heads.split(",")]
        if not colon or not layer.isdigit() or not all(word.isdigit() for word in words):
            raise ValueError(
                f"--keep holds {part!r}; give a layer and the heads that stay, such as 5:0,5, or 5:none, layers with /."
            )
        kept[int(layer)] = tuple(int(word) for word in words)
    return kept


def keep_heads(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[Task],
    variants: Mapping[str, Kept],
    *,
    last_layer: int | None = None,
    kind: HeadKind | None = None,
    progress: bool = True,
) -> Table:
    """A row for the whole model, then one for each variant, by its label.

    With a ``last_layer`` the layers above it are left out, in a second row without any head removed and in those of
    the variants. Raises ValueError for a layer or head that does not exist.
    """
    sites, n_layers = head_sites(model, kind), len(decoder_blocks(model))
    removed = {label: _others(model, sites, kept) for label, kept in variants.items()}
    top = n_layers - 1 if last_layer is None else last_layer
    check_layer(top, n_layers)
    rows = [Row("all", measure(model, tokenizer, tasks))]
    if top < n_layers - 1:
        removed = {f"all of layers 0 to {top}": [], **removed}
    for label, heads in tqdm(removed.items(), desc="keeping heads", disable=not progress):
        with without_layers(model, range(top + 1, n_layers)), ablate_heads(model, heads, kind=kind):
            rows.append(Row(label, measure(model, tokenizer, tasks)))
    title = f"{model.name_or_path}: heads kept (layer:heads; other layers keep all)"
    return Table(title, "kept", tuple(task.column for task in tasks), tuple(rows))


def _others(model: PreTrainedModel, sites: Sequence, kept: Kept) -> list[HeadId]:
    """The heads that go: all of the named layers but those that stay."""
    n_heads = {site.layer: site.n_heads for site in sites}
    for layer, heads in kept.items():
        for head in heads or (0,):
            check_exists(model, list(sites), HeadId(layer, head))
    return [HeadId(layer, h) for layer, heads in kept.items() for h in range(n_heads[layer]) if h not in heads]
