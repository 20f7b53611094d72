"""Experiments that measure tasks without some heads or layers (arXiv 2504.18574).

They are `remove-heads`, `formats`, `prune-layers` and `keep-heads`.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...data.chat import check_template
from ...limits import words
from ...plan import HeadId
from ...probes.forms import CHAT, in_form
from ...probes.knowledge import Form, LetterChoice
from ...probes.kv_retrieval import DIALOGUE, DICTIONARY, REWORDED, KVRetrieval
from ...scoring import HeadScores, describe_run
from ...scoring.resume_log import ResumeLog
from ...teacher import HeadKind, ablate_heads, check_exists, decoder_blocks, fingerprint, head_sites
from .experiment import (
    Bench,
    Experiment,
    ModelExperiment,
    Questions,
    Subject,
    Table,
    Task,
    Variant,
    accuracy_task,
    check_readable,
)
from .figures import draw_bars, draw_lines

WORDINGS = {"completion": DICTIONARY, "reworded": REWORDED, "dialogue": DIALOGUE, CHAT: DICTIONARY}
FORMS: dict[str, Form] = {"completion": "completion", "text": "text", "letter": "letter", CHAT: "letter"}

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class HeadRemoval(Experiment):
    """Remove the top heads of a ranking, and as many random ones."""

    subject: Subject = field(default_factory=Subject)
    scores: Path | None
    """Path to a scores.json of this model, from ``hybrid-distill score``; its top heads are removed."""
    counts: tuple[int, ...] = (10, 20, 30)
    """Numbers of heads to remove."""
    by: str = "retrieval"
    """Order of the ranking: retrieval, retrieval_minus_control or ratio."""
    random_draws: int
    """Number of random selections of as many heads; the table shows their mean."""
    kind: HeadKind | None = None
    """``ssm`` for the recurrent heads of a model that also has attention."""

    def remove(self, make_tasks: Callable[[PreTrainedModel, PreTrainedTokenizerBase], list[Task]]) -> Table:
        """Load the model and measure it with and without heads. A stopped call leaves OUT/NAME.partial.json."""
        scores = None if self.scores is None else HeadScores.load(self.scores)
        model, tokenizer = self.subject.load()
        bench = Bench(model, tokenizer, make_tasks(model, tokenizer))
        if scores is None:
            return bench.table("", "heads removed", [Variant("nothing", nullcontext())])
        if scores.fingerprint not in ("", fingerprint(model)):
            log.warning("%s was made for another model than %s", self.scores, model.name_or_path)
        ranking = scores.ranking(self.by)
        asked = json.loads(json.dumps(asdict(self), default=str))
        steps = ResumeLog(self.out / f"{self.NAME}.partial.json", {**describe_run(model), **asked, "ranking": ranking})
        return self.table(bench._replace(steps=steps), ranking)

    def table(self, bench: Bench, ranking: Sequence[HeadId]) -> Table:
        """Make a row per count of top heads, and one for as many random heads: the mean of several draws.

        Random heads are drawn from all heads, including those of the ranking. Raises ValueError for a count or a head
        that the ranking or the model does not have.
        """
        model, n_draws = bench.model, self.random_draws
        every = [HeadId(site.layer, head) for site in head_sites(model, self.kind) for head in range(site.n_heads)]
        most = min(len(ranking), len(every))
        for count in self.counts:
            if not 0 < count <= most:
                raise ValueError(
                    f"--counts has {count}, the ranking {len(ranking)} heads, the model {len(every)}; ask for 1 to "
                    f"{most}, of a ranking of this model (hybrid-distill score)."
                )

        def without(label: str, heads: Sequence[HeadId], group: str) -> Variant:
            return Variant(label, ablate_heads(model, heads, kind=self.kind), group, len(heads))

        mean = f" (mean of {n_draws})" if n_draws > 1 else ""
        variants = [Variant("nothing", nullcontext())]
        variants += [without(f"first {n}", ranking[:n], "first") for n in self.counts]
        for n in self.counts:
            draws = [random.Random(f"remove-heads {n} {seed}").sample(every, n) for seed in range(n_draws)]
            variants += [without(f"random {n}{mean}", drawn, "random") for drawn in draws]
        return bench.table(f"without some of its {len(every)} heads", "heads removed", variants)


@dataclass(frozen=True, kw_only=True)
class RemoveHeads(HeadRemoval):
    """Remove the top heads of a ranking, and as many random ones: which tasks suffer?"""

    NAME = "remove-heads"

    scores: Path
    random_draws: int = 3
    questions: Questions = field(default_factory=Questions)

    def run(self) -> str:
        return self.save(self.remove(self.questions.make), draw_lines)


@dataclass(frozen=True, kw_only=True)
class Formats(HeadRemoval):
    """Ask the same questions in several formats, with all heads and without the top ones of a ranking.

    Facts are asked alone (``completion``), or with lettered options for an option's ``text``, for its ``letter``, or
    for the letter in a ``chat``. Dictionaries are a ``completion`` as the probe has it, ``reworded``, a ``dialogue`` in
    plain text, or the probe's text in a ``chat``.
    """

    NAME = "formats"

    scores: Path | None = None
    random_draws: int = 0
    of: Literal["facts", "kv"] = "facts"
    """Questions: facts with options, or dictionaries of keys and values."""
    formats: str | None = None
    """For facts: completion, text, letter, chat; for kv: completion, reworded, dialogue, chat. By default all, ``chat``
    only if the tokenizer has a chat template."""
    facts: Path | None = None
    """JSON Lines file of questions; by default the embedded facts."""
    options: int = 4
    """Options per fact."""
    pairs: int = 8
    """Dictionary size of kv."""
    examples: int = 128
    """Number of questions, the same in every format."""
    seed: int = 1
    batch_size: int = 32

    def run(self) -> str:
        known = list(WORDINGS if self.of == "kv" else FORMS)
        names = known if self.formats is None else words(self.formats)
        if not names or set(names) - set(known):
            raise ValueError(f"--formats is {self.formats!r}; of {self.of} there are {', '.join(known)}.")
        table = self.remove(lambda model, tokenizer: self._tasks(names, model, tokenizer))
        asked = "facts" if self.of == "facts" else f"dictionaries of {self.pairs} pairs"
        name, _, _ = table.title.rpartition(": ")
        table = table._replace(title=f"{name}: the same {self.examples} {asked} in several formats")
        return self.save(table, draw_lines)

    def _tasks(self, names: Sequence[str], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[Task]:
        """Make a task per format. Raises ValueError for unreadable questions."""
        tasks = []
        for name in names:
            if name == CHAT and self.formats is None and not tokenizer.chat_template:
                continue
            if self.of == "kv":
                probe = KVRetrieval(self.pairs, self.seed, wording=WORDINGS[name])
            else:
                probe = LetterChoice.from_file(self.facts, self.options, self.seed, FORMS[name])
            if name == CHAT:
                check_template(tokenizer)
                probe = in_form(probe, CHAT, tokenizer)
            examples = probe.examples(self.examples)
            check_readable(model, tokenizer, examples)
            tasks.append(accuracy_task(name, examples, probe.chance, self.batch_size))
        return tasks


@dataclass(frozen=True, kw_only=True)
class PruneLayers(ModelExperiment):
    """Drop layers from the end, and leave out each layer alone: which tasks suffer?"""

    NAME = "prune-layers"

    how: Literal["gradual", "individual", "both"] = "both"
    """``gradual`` drops more and more layers from the end, ``individual`` drops each layer alone."""
    last_layer: int | None = None
    """Last layer during individual pruning; the layers above it are left out. By default all stay."""

    def run(self) -> str:
        bench, parts = self.load(), {"gradual": self.from_the_end, "individual": self.one_by_one}
        layers_above(bench.model, self.last_layer)
        asked = {how: table for how, table in parts.items() if self.how in (how, "both")}
        return "\n\n".join(self.save(table(bench), draw_lines, suffix=f".{how}") for how, table in asked.items())

    def from_the_end(self, bench: Bench) -> Table:
        """Make a row for each number of layers left, from all to one."""
        model, n_layers, variants = bench.model, len(decoder_blocks(bench.model)), []
        for left in range(n_layers, 0, -1):
            label = "all" if left == n_layers else "0" if left == 1 else f"0 to {left - 1}"
            variants.append(Variant(label, without_layers(model, range(left, n_layers)), "layers from the end", left))
        return bench.table("layers dropped from the end", "layers left", variants)

    def one_by_one(self, bench: Bench) -> Table:
        """Make a row for each layer that is left out alone; layers above ``last_layer`` are always left out."""
        model, above = bench.model, layers_above(bench.model, self.last_layer)
        variants = [Variant("none", without_layers(model, above))]
        for layer in range(len(decoder_blocks(model)) - len(above)):
            variants.append(Variant(str(layer), without_layers(model, [layer, *above]), "one layer", layer))
        title = "one layer left out" + (f", of layers 0 to {self.last_layer}" if above else "")
        return bench.table(title, "layer left out", variants)


@dataclass(frozen=True, kw_only=True)
class KeepHeads(ModelExperiment):
    """Keep only some heads of one or more layers: which tasks suffer?"""

    NAME = "keep-heads"

    keep: tuple[str, ...]
    """Heads to keep, by layer, one row per value: ``16:22/17:24``, ``16:none/17:24`` or ``5:0,5``. Layers that are not
    named keep all heads."""
    last_layer: int | None = None
    """Last layer to use; the layers above it are left out in every row except the first."""
    kind: HeadKind | None = None
    """``ssm`` for the recurrent heads of a model that also has attention."""

    def run(self) -> str:
        kept = {text: parse_kept(text) for text in self.keep}
        return self.save(self.table(self.load(), kept), draw_bars)

    def table(self, bench: Bench, kept_by_label: Mapping[str, Mapping[int, Sequence[int]]]) -> Table:
        """Make a row for the whole model, then one for each choice of kept heads by layer; other layers keep all.

        With a ``last_layer``, the layers above it are left out in the variants' rows, and in a second row with no head
        removed. Raises ValueError for a layer or head that does not exist.
        """
        model, above = bench.model, layers_above(bench.model, self.last_layer)
        sites = head_sites(model, self.kind)
        n_heads = {site.layer: site.n_heads for site in sites}
        removed: dict[str, list[HeadId]] = {f"all of layers 0 to {self.last_layer}": []} if above else {}
        for label, kept in kept_by_label.items():
            for layer, heads in kept.items():
                for head in heads or (0,):
                    check_exists(model, sites, HeadId(layer, head))
            removed[label] = [HeadId(i, h) for i, heads in kept.items() for h in range(n_heads[i]) if h not in heads]

        @contextmanager
        def without(heads: Sequence[HeadId]) -> Iterator[None]:
            with without_layers(model, above), ablate_heads(model, heads, kind=self.kind):
                yield

        variants = [Variant("all", nullcontext()), *(Variant(name, without(heads)) for name, heads in removed.items())]
        return bench.table("heads kept (layer:heads; other layers keep all)", "kept", variants)


def parse_kept(text: str) -> dict[int, tuple[int, ...]]:
    """Parse ``"16:22/17:none"`` as heads by layer. Raises ValueError for anything else."""
    kept: dict[int, tuple[int, ...]] = {}
    for part in text.split("/"):
        layer, colon, heads = part.strip().partition(":")
        words = [] if heads.strip() == "none" else [word.strip() for word in heads.split(",")]
        if not colon or not layer.isdigit() or not all(word.isdigit() for word in words):
            raise ValueError(
                f"--keep holds {part!r}; give a layer and the heads that stay, such as 5:0,5, or 5:none, layers with /."
            )
        kept[int(layer)] = tuple(map(int, words))
    return kept


def layers_above(model: nn.Module, last_layer: int | None) -> range:
    """Return the layers above the last one that stays. Raises ValueError if that does not exist."""
    n_layers = len(decoder_blocks(model))
    if last_layer is not None and not 0 <= last_layer < n_layers:
        raise ValueError(f"layer {last_layer} does not exist: this model has layers 0..{n_layers - 1}.")
    return range(n_layers if last_layer is None else last_layer + 1, n_layers)


@contextmanager
def without_layers(model: nn.Module, layers: Iterable[int]) -> Iterator[None]:
    """Make the named decoder layers pass their input through; the model itself is not modified."""
    blocks = decoder_blocks(model)
    with ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(blocks[layer][1].register_forward_hook(_hand_on, with_kwargs=True))
        yield


def _hand_on(block: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: object) -> object:
    hidden_BLD = args[0] if args else kwargs["hidden_states"]
    return (hidden_BLD, *output[1:]) if isinstance(output, tuple) else hidden_BLD
