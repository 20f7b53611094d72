"""Evaluation of a teacher or student: retrieval, knowledge, plain text, agreement with the teacher, memory."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..assets.dictionaries import NOUNS
from ..io import Record, refused, write_json
from ..model import HybridConfig, layer_windows
from ..plan import HeadId, HeadPlan, cache_bytes
from ..probes import Example
from ..probes.answering import answer_choices, answer_generation
from ..probes.forms import PLAIN, in_form
from ..probes.knowledge import Knowledge
from ..probes.kv_retrieval import KVRetrieval
from ..probes.plain_text import TextBatch, text_batches
from ..progress import track
from ..scoring import describe_run
from ..teacher import ablate_heads, attention_sites, eval_mode, text_config

FORMAT = "hybrid-distill/evaluation/1"
CACHE_LENGTHS = (128, 2048, 4096)
FEW = 24
"""Number of examples and texts of each kind for a student with zeroed recurrent heads."""
BY_SIZE = ("kv_choice", "kv_generation", "cache_bytes")
FIGURES = ("kv_choice", "kv_generation", "knowledge", "perplexity", "top1_agreement", "kl_to_teacher")


@dataclass(frozen=True)
class EvalResult:
    """Measurements of one model; None if not measured.

    Accuracies are fractions from 0 to 1. ``perplexity`` is per predicted token of the held-out texts. Over the same
    tokens, ``top1_agreement`` is the fraction where model and teacher have the same most likely token, and
    ``kl_to_teacher`` is the mean KL(teacher || model) in nats. ``cache_bytes`` is the size for one sequence by number
    of tokens, in bfloat16 with states in float32; ``conv_state_bytes`` is extra and does not grow.
    ``recurrent_heads_zeroed`` is the result of `without_recurrence`.
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
    provenance: Record = field(default_factory=dict)

    def to_dict(self) -> Record:
        """Convert to JSON values; sizes and lengths become strings."""
        return json.loads(json.dumps({"format": FORMAT, **dataclasses.asdict(self)}))

    def figures(self) -> dict[str, float]:
        """Return every measured number under a separate name: ``kv_choice_16``, ``cache_bytes_2048`` and so on."""
        return _flat(vars(self), *FIGURES, "conv_state_bytes", "cache_bytes")

    @classmethod
    def from_dict(cls, record: Record) -> EvalResult:
        """Rebuild a result from the output of `to_dict`. Raises ValueError for anything else."""
        with refused("this is not an evaluation", "write one with EvalResult.save"):
            fields = dict(record)
            if (found := fields.pop("format")) != FORMAT:
                raise ValueError(f"its format is {found!r}, expected {FORMAT!r}")
            for name in BY_SIZE:
                fields[name] = {int(key): value for key, value in fields[name].items()}
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


def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    teacher: PreTrainedModel | None = None,
    n_pairs: Sequence[int] = (4, 8, 16, 32),
    n_examples: int = 128,
    seed: int = 1,
    form: str = PLAIN,
    keys: Sequence[str] | None = None,
    held_out_texts: Sequence[str] | None = None,
    max_text_tokens: int = 512,
    knowledge: Knowledge | None = None,
    batch_size: int = 32,
    progress: bool = False,
) -> EvalResult:
    """Measure a Hugging Face decoder or a hybrid student; only agreement needs the ``teacher``.

    KV retrieval is measured by choice and by generation for every dictionary size. ``seed`` (use another than for
    scoring heads) and ``keys`` (default: common nouns) determine the prompts, ``form`` their format (`in_form`).
    Questions of ``knowledge`` are asked unchanged. Each of the ``held_out_texts`` is cut at ``max_text_tokens``.
    """
    probes = {n: KVRetrieval(n, seed, NOUNS if keys is None else tuple(keys)) for n in n_pairs}
    asked = Asked(
        tokenizer,
        teacher,
        examples={n: in_form(probe, form, tokenizer).examples(n_examples) for n, probe in probes.items()},
        questions=knowledge.examples() if knowledge else [],
        texts=list(held_out_texts or []),
        max_text_tokens=max_text_tokens,
        batch_size=batch_size,
        progress=progress,
    )
    return EvalResult(
        n_examples=n_examples,
        knowledge_chance=knowledge.chance if knowledge else None,
        n_knowledge=len(asked.questions),
        **measure(model, asked),
        **model_cache_bytes(model),
        recurrent_heads_zeroed=without_recurrence(model, asked),
        provenance={"seed": seed, "form": form, "max_text_tokens": max_text_tokens, **describe_run(model)},
    )


@dataclass(frozen=True)
class Asked:
    """Questions and texts for measuring a model, and the teacher to compare it with."""

    tokenizer: PreTrainedTokenizerBase
    teacher: PreTrainedModel | None
    examples: dict[int, list[Example]]
    """KV-retrieval prompts by dictionary size."""
    questions: list[Example]
    texts: list[str]
    max_text_tokens: int
    batch_size: int
    progress: bool = False

    def first(self, n: int) -> Asked:
        """Return the first ``n`` questions and texts of each kind."""
        examples = {size: every[:n] for size, every in self.examples.items()}
        return replace(self, examples=examples, questions=self.questions[:n], texts=self.texts[:n], progress=False)


def measure(model: PreTrainedModel, asked: Asked) -> Record:
    """Return the fields of an `EvalResult` that depend on what the model answers."""
    tokenizer = asked.tokenizer
    options: Record = {"batch_size": asked.batch_size, "progress": asked.progress}

    def by_choice(examples: list[Example]) -> float:
        return answer_choices(model, tokenizer, examples, **options).accuracy

    def by_generation(examples: list[Example]) -> float:
        return answer_generation(model, tokenizer, examples, **options).double().mean().item()

    batches = text_batches(model, tokenizer, asked.texts, max_tokens=asked.max_text_tokens, batch_size=asked.batch_size)
    return {
        "kv_choice": {n: by_choice(examples) for n, examples in asked.examples.items()},
        "kv_generation": {n: by_generation(examples) for n, examples in asked.examples.items()},
        "knowledge": by_choice(asked.questions) if asked.questions else None,
        **compare_on_text(model, asked.teacher, list(batches), progress=asked.progress),
    }


def without_recurrence(model: PreTrainedModel, asked: Asked) -> Record | None:
    """Measure a student on few examples, as it is and with all its recurrent heads zeroed.

    Return None for a model without recurrent heads. ``figures`` has each figure ``whole`` and ``zeroed``; ``unused`` is
    True if none of them changes. `hybrid-distill analyze zeroed-recurrence` zeroes layer by layer.
    """
    config = text_config(model)
    if config.model_type != HybridConfig.model_type:
        return None
    recurrent = [HeadId(n, head) for n in range(config.num_hidden_layers) for head in config.recurrent_in(n)]
    if not recurrent:
        return None
    few = asked.first(FEW)
    # KL has no unit in which a change would be small enough to count as none.
    names = [name for name in FIGURES if name != "kl_to_teacher"]
    whole = _flat(measure(model, few), *names)
    with ablate_heads(model, recurrent):
        zeroed = _flat(measure(model, few), *names)
    return {
        "n_examples": min([FEW, *map(len, asked.examples.values())]),
        "figures": {name: {"whole": whole[name], "zeroed": zeroed[name]} for name in whole},
        "unused": all(_is_same(name, whole[name], zeroed[name]) for name in whole),
    }


def _flat(fields: Record, *names: str) -> dict[str, float]:
    """Return the measured fields with these names; a field by size becomes one entry per size."""
    flat: dict[str, float] = {}
    for name in names:
        flat |= {f"{name}_{n}": value for n, value in fields[name].items()} if name in BY_SIZE else {name: fields[name]}
    return {name: value for name, value in flat.items() if value is not None}


def _is_same(name: str, whole: float, zeroed: float) -> bool:
    """Check whether a figure stays the same: perplexity to 1 %, agreement to 1 point, accuracy to one example."""
    if name == "perplexity":
        return abs(zeroed / whole - 1) <= 0.01
    return abs(zeroed - whole) <= (0.01 if name == "top1_agreement" else 1.01 / FEW)


def compare_on_text(
    model: PreTrainedModel,
    teacher: PreTrainedModel | None,
    batches: Sequence[TextBatch],
    *,
    progress: bool = False,
) -> Record:
    """Measure a model's perplexity and its agreement with a teacher, over every predicted token of the batches.

    Vocabularies padded to different sizes are compared on the tokens they share.
    """
    n_tokens, loss, same, kl = 0, 0.0, 0.0, 0.0
    for batch in track(batches, "plain text", hidden=not progress):
        counts_BT = batch.counts_BT
        with eval_mode(model):
            logits_BTV = batch.logits(model)
        n_tokens += int(counts_BT.sum())
        loss += batch.token_losses(logits_BTV).double().sum().item()
        if teacher is not None:
            with eval_mode(teacher):
                same_BT, kl_BT = agreement(logits_BTV, batch.logits(teacher))
            same += same_BT[counts_BT].double().sum().item()
            kl += kl_BT[counts_BT].double().sum().item()
    beside = teacher is not None and n_tokens > 0
    return {
        "perplexity": math.exp(loss / n_tokens) if n_tokens else None,
        "top1_agreement": same / n_tokens if beside else None,
        "kl_to_teacher": kl / n_tokens if beside else None,
        "n_text_tokens": n_tokens,
    }


def agreement(logits_BTV: Tensor, teacher_BTV: Tensor) -> tuple[Tensor, Tensor]:
    """Return (same_BT, kl_BT): equal top tokens, and KL(teacher || model) in nats, on the shared part of V.

    Works row by row, because intermediate results take several times the memory of the logits.
    """
    n_shared = min(logits_BTV.shape[-1], teacher_BTV.shape[-1])
    same, kl = [], []
    for ours_TV, theirs_TV in zip(logits_BTV[..., :n_shared], teacher_BTV[..., :n_shared].to(logits_BTV.device)):
        ours_log, theirs_log = ours_TV.log_softmax(-1), theirs_TV.log_softmax(-1)
        same.append(ours_TV.argmax(-1) == theirs_TV.argmax(-1))
        kl.append((theirs_log.exp() * (theirs_log - ours_log)).sum(-1))
    return torch.stack(same), torch.stack(kl)


def model_cache_bytes(model: PreTrainedModel) -> Record:
    """Return the memory fields of an `EvalResult`."""
    site = attention_sites(model)[0]
    config = text_config(model)
    shape = HeadPlan(config.num_hidden_layers, site.n_heads, site.n_kv_heads, kept=())
    plan, state = HeadPlan.all(shape), {"d_state": 0, "conv_width": 1}
    if config.model_type == HybridConfig.model_type:
        plan = HeadPlan.from_pairs(shape, [(layer, head) for layer, heads in enumerate(config.kept) for head in heads])
        state = {"d_state": config.d_state, "conv_width": config.conv_width}
        config = config.backbone_config()
    windows = layer_windows(config)
    sizes = [cache_bytes(plan, length=n, head_dim=site.head_dim, windows=windows, **state) for n in CACHE_LENGTHS]
    return {
        "cache_bytes": {n: size.total for n, size in zip(CACHE_LENGTHS, sizes)},
        "conv_state_bytes": sizes[0].conv,
    }
