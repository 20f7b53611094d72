"""The same questions in several formats: does a task need retrieval, or only the way it is asked (arXiv 2504.18574)?

Facts are asked alone (``completion``), with lettered options and for an option's ``text``, for its ``letter``, and for
the letter through the tokenizer's ``chat`` template. Dictionaries of keys and values are a ``completion`` as the probe
has it, ``reworded``, a ``dialogue`` in plain text, or the probe's text in a ``chat``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...data.chat import check_template
from ...limits import words
from ...probes import Example
from ...probes.answering import tokenize
from ...probes.knowledge import Form, LetterChoice
from ...probes.kv_retrieval import DIALOGUE, DICTIONARY, REWORDED, KVRetrieval
from ...scoring import HeadScores
from ...teacher import HeadKind
from .experiment import Bench, Experiment
from .figures import draw_together
from .remove_heads import remove_heads, warn_of_another_model
from .tasks import Subject, Task, accuracy_task, check_readable

CHAT = "chat"
WORDINGS = {"reworded": REWORDED, "dialogue": DIALOGUE}
FORMATS = {"facts": ("completion", "text", "letter", CHAT), "kv": ("completion", *WORDINGS, CHAT)}


@dataclass(frozen=True, kw_only=True)
class Formats(Experiment):
    """Ask the same questions in several formats, with all heads and without the first ones of a ranking."""

    NAME = "formats"

    subject: Subject = field(default_factory=Subject)
    of: Literal["facts", "kv"] = "facts"
    """Questions: facts with options, or dictionaries of keys and values."""
    formats: str | None = None
    """For facts: completion, text, letter, chat; for kv: completion, reworded, dialogue, chat. By default all, ``chat``
    where the tokenizer has a chat template."""
    scores: Path | None = None
    """A scores.json of this model: its first heads are removed."""
    counts: tuple[int, ...] = (10, 20, 30)
    """Numbers of heads to remove."""
    by: str = "retrieval"
    """Order of the ranking: retrieval, retrieval_minus_control or ratio."""
    random_draws: int = 0
    """Random choices of as many heads; their mean is shown."""
    kind: HeadKind | None = None
    """``ssm`` for the recurrent heads of a model that has attention too."""
    facts: Path | None = None
    """JSON lines of questions; by default the embedded facts."""
    options: int = 4
    """Options of a fact."""
    pairs: int = 8
    """Dictionary size of kv."""
    examples: int = 128
    """Questions, the same in every format."""
    seed: int = 1
    batch_size: int = 32

    def run(self) -> str:
        names = None if self.formats is None else words(self.formats)
        if names is not None and (not names or set(names) - set(FORMATS[self.of])):
            raise ValueError(f"--formats is {self.formats!r}; of {self.of} there are {', '.join(FORMATS[self.of])}.")
        scores = None if self.scores is None else HeadScores.load(self.scores)
        model, tokenizer = self.subject.load()
        if scores is not None and self.scores is not None:
            warn_of_another_model(scores, model, self.scores)
        tasks = self.tasks(model, tokenizer, names)
        ranking, counts = ([], ()) if scores is None else (scores.ranking(self.by), self.counts)
        bench = Bench(model, tokenizer, tasks)
        table = remove_heads(bench, ranking, counts, n_draws=self.random_draws, kind=self.kind)
        asked = "facts" if self.of == "facts" else f"dictionaries of {self.pairs} pairs"
        table = replace(table, title=f"{model.name_or_path}: the same {self.examples} {asked} in several formats")
        return self.save(table, partial(draw_together, x_label="heads removed"))

    def tasks(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, names: list[str] | None = None
    ) -> list[Task]:
        """Make a column for each format, all of the same questions. Raises ValueError for unreadable questions."""
        if names is None:
            names = [name for name in FORMATS[self.of] if name != CHAT or tokenizer.chat_template]
        made = []
        for name in names:
            examples, chance = self._asked(name, tokenizer)
            check_readable(model, tokenizer, examples)
            made.append(accuracy_task(name, examples, chance, batch_size=self.batch_size))
        return made

    def _asked(self, name: str, tokenizer: PreTrainedTokenizerBase) -> tuple[list[Example], float]:
        """Return the questions in one format, and the share that guessing gets right."""
        probe: KVRetrieval | LetterChoice
        if self.of == "kv":
            probe = KVRetrieval(self.pairs, self.seed, wording=WORDINGS.get(name, DICTIONARY))
        else:
            forms: dict[str, Form] = {"completion": "completion", "text": "text"}
            probe = LetterChoice.from_file(self.facts, self.options, self.seed, forms.get(name, "letter"))
        examples = probe.examples(self.examples)
        if name == CHAT:
            check_template(tokenizer)
            examples = [in_chat(example, tokenizer) for example in examples]
        return examples, probe.chance


def in_chat(example: Example, tokenizer: PreTrainedTokenizerBase) -> Example:
    """Put the prompt into the user's turn of the chat template; the answer begins the assistant's."""
    turn = [{"role": "user", "content": example.prompt}]
    text = str(tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True))
    begin = str(tokenizer.bos_token) if tokenize(tokenizer, [""])[0] else ""  # it is set once more with the tokens
    choices = tuple(choice.strip() for choice in example.choices)
    return Example(text.removeprefix(begin), example.answer.strip(), choices)
