"""Result of an evaluation: the numbers of one model and their provenance, in one file."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..io import Record, refused, write_json
from ..probes.prompt_formats import PLAIN

FORMAT = "hybrid-distill/evaluation/1"
BY_SIZE = ("kv_choice", "kv_generation", "far_choice", "cache_bytes")
DICTIONARIES = ("kv_choice", "kv_generation", "far_choice")
ACCURACIES = (*DICTIONARIES, "knowledge")
DEFAULT_PAIRS = 16
FIGURES = (*ACCURACIES, "perplexity", "top1_agreement", "kl_to_teacher")


@dataclass(frozen=True)
class EvalResult:
    """Measurements of one model; None if not measured.

    Accuracies are fractions from 0 to 1. ``far_choice`` is of dictionaries that stand
    ``distance`` words before their question, ``n_far`` of them. ``perplexity`` is per predicted token of the held-out
    texts. Over the same tokens, ``top1_agreement`` is the fraction where model and teacher have the
    same most likely token, and ``kl_to_teacher`` is the mean KL(teacher || model) in nats.
    ``cache_bytes`` is the size for one sequence by number of tokens, in bfloat16 with states in
    float32; ``conv_state_bytes`` is extra and does not grow. ``recurrent_heads_zeroed`` and
    ``windows_zeroed`` are results of `measure_with_parts_zeroed`.
    """

    kv_choice: dict[int, float]
    kv_generation: dict[int, float]
    n_examples: int
    knowledge: float | None
    knowledge_chance: float | None
    n_knowledge: int
    perplexity: float | None
    top1_agreement: float | None
    kl_to_teacher: float | None
    n_text_tokens: int
    cache_bytes: dict[int, int]
    conv_state_bytes: int
    recurrent_heads_zeroed: Record | None = None
    windows_zeroed: Record | None = None
    far_choice: dict[int, float] = field(default_factory=dict)
    n_far: int = 0
    distance: int = 0
    n_texts: int = 0
    provenance: Record = field(default_factory=dict)

    def to_dict(self) -> Record:
        """Convert to JSON values; sizes and lengths become strings."""
        # Through JSON, so that a result equals the one that is read back.
        return json.loads(json.dumps({"format": FORMAT, **dataclasses.asdict(self)}))

    def figures(self) -> dict[str, float]:
        """Return every measured number under a name of its own, such as ``kv_choice_16``."""
        return flatten(vars(self), [*FIGURES, "conv_state_bytes", "cache_bytes"])

    @property
    def prompt_format(self) -> str:
        return self.provenance.get("prompt_format", PLAIN)

    @property
    def question_settings(self) -> Record:
        """Settings that decide its questions."""
        return {"n_examples": self.n_examples, "prompt_format": self.prompt_format}

    @property
    def text_length(self) -> float:
        """Predicted tokens of a held-out text, on average; 0 without texts."""
        return self.n_text_tokens / self.n_texts if self.n_texts else 0.0

    def chances(self) -> dict[str, float]:
        """Return the accuracies of naming any of a dictionary's values, or of a question's choices."""
        chances = {}
        for name in DICTIONARIES:
            for size in getattr(self, name):
                chances[f"{name}_{size}"] = 1 / size
        if self.knowledge_chance:
            chances["knowledge"] = self.knowledge_chance
        return chances

    def standard_errors(self) -> dict[str, float]:
        """Return the binomial standard errors of the accuracies."""
        errors = {}
        for name, value in flatten(vars(self), ACCURACIES).items():
            n_questions = self.n_examples
            if name == "knowledge":
                n_questions = self.n_knowledge
            elif name.startswith("far_choice"):
                n_questions = self.n_far
            if n_questions:
                errors[name] = binomial_error(value, n_questions)
        return errors

    def relative_to(self, teacher: EvalResult) -> dict[str, tuple[float, float] | None]:
        """Return the share of each of the teacher's accuracies beyond guessing that is kept (`relative_score`)."""
        figures = self.figures()
        errors = self.standard_errors()
        teacher_figures = teacher.figures()
        teacher_errors = teacher.standard_errors()
        kept = {}
        for name, chance in teacher.chances().items():
            if name in errors and name in teacher_errors:
                own = (figures[name], errors[name])
                teachers = (teacher_figures[name], teacher_errors[name])
                kept[name] = relative_score(own, teachers, chance)
        return kept

    @classmethod
    def from_dict(cls, record: Record) -> EvalResult:
        """Rebuild a result from the output of `to_dict`. Raises ValueError for anything else."""
        with refused("this is not an evaluation", "write one with EvalResult.save"):
            fields = dict(record)
            file_format = fields.pop("format")
            if file_format != FORMAT:
                raise ValueError(f"its format is {file_format!r}, expected {FORMAT!r}")
            # JSON's keys are text.
            for name in BY_SIZE:
                fields[name] = {int(size): value for size, value in fields[name].items()}
            return cls(**fields)

    def save(self, path: str | Path) -> None:
        """Write the result as JSON, atomically."""
        write_json(Path(path), self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> EvalResult:
        """Read a file that `save` wrote. Raises ValueError for any other file."""
        try:
            return cls.from_dict(json.loads(Path(path).read_text()))
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} cannot be read as an evaluation: {error}") from error


def size_shown(measured: Iterable[int]) -> int:
    """Return the dictionary size that one figure stands for: 16 pairs, else the largest."""
    sizes = set(measured)
    if DEFAULT_PAIRS in sizes:
        return DEFAULT_PAIRS
    return max(sizes, default=DEFAULT_PAIRS)


def flatten(fields: Record, names: Sequence[str]) -> dict[str, float]:
    """Return the measured fields with these names; a field by size becomes one entry per size."""
    figures: dict[str, float | None] = {}
    for name in names:
        if name in BY_SIZE:
            figures.update({f"{name}_{size}": value for size, value in fields[name].items()})
        else:
            figures[name] = fields[name]
    return {name: value for name, value in figures.items() if value is not None}


def binomial_error(share: float, n: int) -> float:
    """Return the standard error of a share k / n, taken at (k + 1/2) / (n + 1).

    So it is never zero, not even at 0 % and 100 %.
    """
    smoothed = (share * n + 0.5) / (n + 1)
    return math.sqrt(smoothed * (1 - smoothed) / n)


def relative_score(
    student: tuple[float, float], teacher: tuple[float, float], guessing: float
) -> tuple[float, float] | None:
    """Return the share of its teacher's accuracy beyond guessing that a student keeps, and the standard error.

    (s - g) / (t - g): 1 for a student that equals its teacher and 0 for one that guesses. Accuracies come with their
    standard errors, which are propagated as if the two models had answered different questions: the true error of
    models that agree is smaller. None if the teacher is not above guessing by two standard errors.
    """
    accuracy, error = student
    teacher_accuracy, teacher_error = teacher
    span = teacher_accuracy - guessing
    if span <= 2 * teacher_error:
        return None
    kept = (accuracy - guessing) / span
    kept_error = math.hypot(error, kept * teacher_error) / span
    return kept, kept_error
