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
from functools import partial
from pathlib import Path
from typing import Literal

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...chat_template import has_chat_template
from ...data.chat import check_template
from ...plan import HeadId
from ...probes import Probe
from ...probes.knowledge import AnswerFormat, LetterChoice
from ...probes.kv_retrieval import DIALOGUE, DICTIONARY, REWORDED, KVRetrieval
from ...probes.prompt_formats import CHAT, with_prompt_format
from ...scoring import HeadScores, describe_run
from ...scoring.head_scores import heads_of
from ...scoring.resume_log import ResumeLog
from ...teacher import HeadKind, ablate_heads, check_exists, decoder_blocks, fingerprint, head_sites
from ...validation import Count, CountOrZero, words
from .experiment import Bench, Experiment, ModelExperiment, Subject, Variant
from .figures import draw_bars, draw_groups
from .tables import Table
from .tasks import QuestionDraw, Questions, Task, accuracy_task, check_readable

WORDINGS = {
    "completion": DICTIONARY,
    "reworded": REWORDED,
    "dialogue": DIALOGUE,
    CHAT: DICTIONARY,
}
ANSWER_FORMATS: dict[str, AnswerFormat] = {
    "completion": "completion",
    "text": "text",
    "letter": "letter",
    CHAT: "letter",
}

N_OPTIONS = 4
"""Options that the formats with lettered options list for a fact."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class HeadRemoval(Experiment):
    """Remove the top heads of a ranking, and as many random ones."""

    subject: Subject = field(default_factory=Subject)
    scores: Path | None
    """Path to a scores.json of this model, from ``hybrid-distill score``; its top heads are
    removed."""
    counts: tuple[Count, ...] = (10, 20, 30)
    """Numbers of heads to remove."""
    by: str = "retrieval"
    """Order of the ranking: retrieval, retrieval_minus_control or ratio."""
    random_draws: CountOrZero
    """Number of random selections of as many heads; the table shows their mean."""
    kind: HeadKind | None = None
    """Kind of the heads: ``ssm`` for the recurrent heads of a model that also has attention."""

    def measure_removals(
        self, make_tasks: Callable[[PreTrainedModel, PreTrainedTokenizerBase], list[Task]]
    ) -> Table:
        """Load the model and measure it with and without heads.

        A stopped call leaves OUT/NAME.partial.json.
        """
        # Read before the model, which takes minutes to load.
        scores = None if self.scores is None else HeadScores.load(self.scores)
        model, tokenizer = self.subject.load()
        bench = Bench(model, tokenizer, make_tasks(model, tokenizer))
        if scores is None:
            return bench.table(
                self.title(model), "heads removed", [Variant("nothing", nullcontext())]
            )
        # Scores that were written by hand may have none.
        if scores.fingerprint not in ("", fingerprint(model)):
            log.warning("%s was made for another model than %s", self.scores, model.name_or_path)
        ranking = scores.ranking(self.by)
        self.check_counts(model, ranking)
        options = json.loads(json.dumps(asdict(self), default=str))  # paths become text
        task = {
            **describe_run(model),
            **options,
            "ranking": ranking,
        }
        resume_log = ResumeLog(self.out / f"{self.NAME}.partial.json", task)
        return self.table(bench._replace(resume_log=resume_log), ranking)

    def title(self, model: PreTrainedModel) -> str:
        """Return the title of the table, after the model's name."""
        n_heads = len(heads_of(head_sites(model, self.kind)))
        return f"without some of its {n_heads} heads"

    def check_counts(self, model: PreTrainedModel, ranking: Sequence[HeadId]) -> None:
        """Raise ValueError for more heads than the ranking or the model has."""
        n_heads = len(heads_of(head_sites(model, self.kind)))
        most = min(len(ranking), n_heads)
        for count in self.counts:
            if count > most:
                raise ValueError(
                    f"--counts has {count}, the ranking {len(ranking)} heads, the model {n_heads}; ask for 1 to "
                    f"{most}, of a ranking of this model (hybrid-distill score)."
                )

    def table(self, bench: Bench, ranking: Sequence[HeadId]) -> Table:
        """Make a row per count of top heads, and one for as many random heads: the mean of several draws.

        Random heads are drawn from all heads, including those of the ranking. Raises ValueError for
        a head that the model does not have.
        """
        model = bench.model
        all_heads = heads_of(head_sites(model, self.kind))

        def without(label: str, heads: Sequence[HeadId], group: str) -> Variant:
            return Variant(label, ablate_heads(model, heads, kind=self.kind), group, len(heads))

        variants = [Variant("nothing", nullcontext())]
        for n in self.counts:
            variants.append(without(f"first {n}", ranking[:n], "first"))
        # Draws with the same label become one row, their mean.
        mean = f" (mean of {self.random_draws})" if self.random_draws > 1 else ""
        for n in self.counts:
            for seed in range(self.random_draws):
                # By count and draw: a row is the same whatever else is in the table.
                drawn = random.Random(f"remove-heads {n} {seed}").sample(all_heads, n)
                variants.append(without(f"random {n}{mean}", drawn, "random"))
        return bench.table(self.title(model), "heads removed", variants)


@dataclass(frozen=True, kw_only=True)
class RemoveHeads(HeadRemoval):
    """Remove the top heads of a ranking, and as many random ones: which tasks suffer?"""

    NAME = "remove-heads"

    scores: Path
    random_draws: CountOrZero = 3
    questions: Questions = field(default_factory=Questions)

    def run(self) -> str:
        return self.save(self.measure_removals(self.questions.make), draw_groups)


@dataclass(frozen=True, kw_only=True)
class Formats(HeadRemoval):
    """Ask the same questions in several formats, with all heads and without the top ones of a
    ranking.

    Facts are asked alone (``completion``), or with lettered options for an option's ``text``, for
    its ``letter``, or for the letter in a ``chat``. Dictionaries are a ``completion`` as the probe
    has it, ``reworded``, a ``dialogue`` in plain text, or the probe's text in a ``chat``.
    """

    NAME = "formats"

    scores: Path | None = None
    random_draws: CountOrZero = 0
    of: Literal["facts", "kv"] = "facts"
    """Questions: facts with options, or dictionaries of keys and values."""
    formats: str | None = None
    """For facts: completion, text, letter, chat; for kv: completion, reworded, dialogue, chat. By
    default all, ``chat`` only if the tokenizer has a chat template."""
    questions: QuestionDraw = field(default_factory=lambda: QuestionDraw(pairs=8))
    batch_size: Count = 32
    """Questions or texts per forward pass."""

    def run(self) -> str:
        choices = list(WORDINGS if self.of == "kv" else ANSWER_FORMATS)
        names = choices if self.formats is None else words(self.formats)
        if not names or set(names) - set(choices):
            raise ValueError(
                f"--formats is {self.formats!r}; with --of {self.of}, pass any of {', '.join(choices)}."
            )
        return self.save(self.measure_removals(partial(self._tasks, names)), draw_groups)

    def title(self, model: PreTrainedModel) -> str:
        questions = "facts"
        if self.of == "kv":
            questions = f"dictionaries of {self.questions.pairs} pairs"
        return f"the same {self.questions.examples} {questions} in several formats"

    def _tasks(
        self,
        names: Sequence[str],
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
    ) -> list[Task]:
        """Make a task per format. Raises ValueError for unreadable questions."""
        tasks = []
        for name in names:
            if name == CHAT and self.formats is None and not has_chat_template(tokenizer):
                continue
            probe = self._probe(name)
            if name == CHAT:
                check_template(tokenizer)
                probe = with_prompt_format(probe, CHAT, tokenizer)
            examples = probe.examples(self.questions.examples)
            check_readable(model, tokenizer, examples)
            tasks.append(accuracy_task(name, examples, probe.chance, self.batch_size))
        return tasks

    def _probe(self, name: str) -> Probe:
        draw = self.questions
        if self.of == "kv":
            return KVRetrieval(draw.pairs, draw.seed, wording=WORDINGS[name])
        return LetterChoice.from_file(draw.facts, N_OPTIONS, draw.seed, ANSWER_FORMATS[name])


@dataclass(frozen=True, kw_only=True)
class PruneLayers(ModelExperiment):
    """Drop layers from the end, and leave out each layer alone: which tasks suffer?

    ``--last-layer`` is for layers left out alone.
    """

    NAME = "prune-layers"

    how: Literal["gradual", "individual", "both"] = "both"
    """``gradual`` drops layers from the end, one by one; ``individual`` drops each alone."""
    last_layer: CountOrZero | None = None
    """Last layer to use; those above it are left out."""

    def run(self) -> str:
        bench = self.load()
        layers_above(bench.model, self.last_layer)  # checks it before hours of pruning
        tables: list[str] = []
        if self.how in ("gradual", "both"):
            tables.append(self.save(self.from_the_end(bench), draw_groups, suffix=".gradual"))
        if self.how in ("individual", "both"):
            tables.append(self.save(self.one_by_one(bench), draw_groups, suffix=".individual"))
        return "\n\n".join(tables)

    def from_the_end(self, bench: Bench) -> Table:
        """Make a row for each number of layers left, from all to one."""
        n_layers = len(decoder_blocks(bench.model))
        labels = {n_layers: "all", 1: "0"}
        variants = []
        for n_left in range(n_layers, 0, -1):
            label = labels.get(n_left, f"0 to {n_left - 1}")
            dropped = without_layers(bench.model, range(n_left, n_layers))
            variants.append(Variant(label, dropped, "layers from the end", n_left))
        return bench.table("layers dropped from the end", "layers left", variants)

    def one_by_one(self, bench: Bench) -> Table:
        """Make a row for each layer that is left out alone.

        Layers above ``last_layer`` are always left out.
        """
        model = bench.model
        above = layers_above(model, self.last_layer)
        variants = [Variant("none", without_layers(model, above))]
        for layer in range(len(decoder_blocks(model)) - len(above)):
            left_out = without_layers(model, [layer, *above])
            variants.append(Variant(str(layer), left_out, "one layer", layer))
        title = "one layer left out"
        if above:
            title += f", of layers 0 to {self.last_layer}"
        return bench.table(title, "layer left out", variants)


@dataclass(frozen=True, kw_only=True)
class KeepHeads(ModelExperiment):
    """Keep only some heads of one or more layers: which tasks suffer?

    The first row, of the intact model, has all layers even with ``--last-layer``.
    """

    NAME = "keep-heads"

    keep: tuple[str, ...]
    """Heads to keep, by layer, one row per value: ``16:22/17:24``, ``16:none/17:24`` or ``5:0,5``.
    Layers that are not named keep all heads."""
    last_layer: CountOrZero | None = None
    """Last layer to use; those above it are left out."""
    kind: HeadKind | None = None
    """Kind of the heads: ``ssm`` for the recurrent heads of a model that also has attention."""

    def run(self) -> str:
        kept = {text: parse_kept(text) for text in self.keep}
        return self.save(self.table(self.load(), kept), draw_bars)

    def table(
        self, bench: Bench, kept_by_label: Mapping[str, Mapping[int, Sequence[int]]]
    ) -> Table:
        """Make a row for the whole model, then one for each choice of kept heads by layer.

        Other layers keep all heads. With a ``last_layer``, the layers above it are left out in the
        variants' rows, and in a second row with no head removed. Raises ValueError for a layer or
        head that does not exist.
        """
        model = bench.model
        above = layers_above(model, self.last_layer)
        sites = head_sites(model, self.kind)

        @contextmanager
        def without(heads: Sequence[HeadId]) -> Iterator[None]:
            with without_layers(model, above), ablate_heads(model, heads, kind=self.kind):
                yield

        variants = [Variant("all", nullcontext())]
        if above:
            variants.append(Variant(f"all of layers 0 to {self.last_layer}", without([])))
        for label, kept in kept_by_label.items():
            for layer, heads in kept.items():
                for head in heads or (0,):
                    check_exists(model, sites, HeadId(layer, head))
            in_layers = [head for head in heads_of(sites) if head.layer in kept]
            removed = [head for head in in_layers if head.head not in kept[head.layer]]
            variants.append(Variant(label, without(removed)))
        return bench.table("heads kept (layer:heads; other layers keep all)", "kept", variants)


def parse_kept(text: str) -> dict[int, tuple[int, ...]]:
    """Parse ``"16:22/17:none"`` as heads by layer. Raises ValueError for anything else."""
    kept: dict[int, tuple[int, ...]] = {}
    for part in text.split("/"):
        layer, colon, heads = part.strip().partition(":")
        numbers = []
        if heads.strip() != "none":
            numbers = [number.strip() for number in heads.split(",")]
        if not colon or not all(number.isdigit() for number in [layer, *numbers]):
            raise ValueError(
                f"--keep holds {part!r}; give a layer and the heads that stay, such as 5:0,5, or "
                "5:none, layers with /."
            )
        kept[int(layer)] = tuple(map(int, numbers))
    return kept


def layers_above(model: nn.Module, last_layer: int | None) -> range:
    """Return the layers above the last one that stays. Raises ValueError if that does not exist."""
    n_layers = len(decoder_blocks(model))
    if last_layer is not None and not 0 <= last_layer < n_layers:
        raise ValueError(
            f"layer {last_layer} does not exist: this model has layers 0..{n_layers - 1}."
        )
    n_used = n_layers if last_layer is None else last_layer + 1
    return range(n_used, n_layers)


@contextmanager
def without_layers(model: nn.Module, layers: Iterable[int]) -> Iterator[None]:
    """Make these decoder layers return their input; the model itself is not modified."""
    blocks = decoder_blocks(model)
    with ExitStack() as hooks:
        for layer in layers:
            _, block = blocks[layer]
            # A hook, not a replaced forward: the layer still runs, so every cache keeps its length.
            hooks.enter_context(block.register_forward_hook(_return_input, with_kwargs=True))
        yield


def _return_input(
    block: nn.Module,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    output: object,
) -> object:
    hidden_BLD = args[0] if args else kwargs["hidden_states"]
    return (hidden_BLD, *output[1:]) if isinstance(output, tuple) else hidden_BLD
