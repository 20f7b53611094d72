"""Measure a model, teacher or student: retrieval, knowledge, plain text, agreement with the teacher, memory."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..assets.dictionaries import NOUNS
from ..io import write_json
from ..model import HybridConfig, layer_windows
from ..plan import HeadPlan, cache_bytes
from ..probes.answering import answer_choices, answer_generation
from ..probes.forms import PLAIN, in_form
from ..probes.knowledge import Knowledge
from ..probes.kv_retrieval import KVRetrieval
from ..probes.plain_text import TextBatch, text_batches
from ..scoring import describe_run
from ..teacher import attention_sites, eval_mode

FORMAT = "hybrid-distill/evaluation/1"
CACHE_LENGTHS = (128, 2048, 4096)


@dataclass(frozen=True)
class EvalResult:
    """Measurements of one model; None where not measured.

    Accuracies are shares, 0 to 1. ``perplexity`` is per predicted token of the held-out texts. Over the same
    tokens, ``top1_agreement`` is the share with the same most likely token in model and teacher, and
    ``kl_to_teacher`` the mean KL(teacher || model) in nats. ``cache_bytes`` is for one sequence in bfloat16,
    states in float32, by number of tokens; ``conv_state_bytes`` comes on top and does not grow.
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
    provenance: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON values; sizes and lengths become strings."""
        return json.loads(json.dumps({"format": FORMAT, **dataclasses.asdict(self)}))

    def figures(self) -> dict[str, float]:
        """Return every measured number by a name of its own: ``kv_choice_16``, ``cache_bytes_2048`` and so on."""
        flat: dict[str, float] = {}
        for name in ("kv_choice", "kv_generation"):
            flat |= {f"{name}_{n_pairs}": value for n_pairs, value in getattr(self, name).items()}
        single = ("knowledge", "perplexity", "top1_agreement", "kl_to_teacher", "conv_state_bytes")
        flat |= {name: value for name in single if (value := getattr(self, name)) is not None}
        return flat | {f"cache_bytes_{length}": size for length, size in self.cache_bytes.items()}

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> EvalResult:
        """Make a result of `to_dict`'s values. Raises ValueError for anything else."""
        try:
            fields = dict(record)
            if (found := fields.pop("format")) != FORMAT:
                raise ValueError(f"its format is {found!r}, expected {FORMAT!r}")
            for name in ("kv_choice", "kv_generation", "cache_bytes"):
                fields[name] = {int(key): value for key, value in fields[name].items()}
            return cls(**fields)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"this is not an evaluation ({error}); write one with EvalResult.save.") from error

    def save(self, path: str | Path) -> None:
        """Write the result as JSON, whole or not at all."""
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

    KV retrieval is measured by choice and by generation for every dictionary size, on prompts that follow
    from ``seed`` (pass another than for scoring heads) and ``keys`` (default: common nouns), in a ``form`` of
    `in_form`; questions of ``knowledge`` are asked as they are.
    ``held_out_texts`` are cut at ``max_text_tokens``, each on its own.
    """
    options: dict[str, Any] = {"batch_size": batch_size, "progress": progress}
    choice, generation = {}, {}
    for n in n_pairs:
        probe = KVRetrieval(n, seed, NOUNS if keys is None else tuple(keys))
        examples = in_form(probe, form, tokenizer).examples(n_examples)
        choice[n] = answer_choices(model, tokenizer, examples, **options).accuracy
        generation[n] = answer_generation(model, tokenizer, examples, **options).double().mean().item()
    questions = knowledge.examples() if knowledge else []
    known = answer_choices(model, tokenizer, questions, **options) if questions else None
    texts = held_out_texts or []
    batches = text_batches(model, tokenizer, texts, max_tokens=max_text_tokens, batch_size=batch_size)
    on_text = compare_on_text(model, teacher, list(batches), progress=progress)
    return EvalResult(
        kv_choice=choice,
        kv_generation=generation,
        n_examples=n_examples,
        knowledge=known.accuracy if known else None,
        knowledge_chance=knowledge.chance if knowledge else None,
        n_knowledge=len(questions),
        **on_text,
        **model_cache_bytes(model),
        provenance={"seed": seed, "form": form, "max_text_tokens": max_text_tokens, **describe_run(model)},
    )


def compare_on_text(
    model: PreTrainedModel,
    teacher: PreTrainedModel | None,
    batches: Sequence[TextBatch],
    *,
    progress: bool = False,
) -> dict[str, Any]:
    """Measure a model's perplexity and its agreement with a teacher, over every predicted token of the batches.

    Vocabularies padded to different sizes are compared on the tokens they share.
    """
    n_tokens, loss, same, kl = 0, 0.0, 0.0, 0.0
    for batch in tqdm(batches, desc="plain text", disable=not progress):
        with eval_mode(model):
            logits_BTV = batch.logits(model)
        n_tokens += int(batch.counts_BT.sum())
        loss += batch.token_losses(logits_BTV).double().sum().item()
        if teacher is not None:
            with eval_mode(teacher):
                expected_BTV = batch.logits(teacher)
            same_BT, kl_BT = agreement(logits_BTV, expected_BTV)
            same += same_BT[batch.counts_BT].double().sum().item()
            kl += kl_BT[batch.counts_BT].double().sum().item()
    if n_tokens == 0:
        return {"perplexity": None, "top1_agreement": None, "kl_to_teacher": None, "n_text_tokens": 0}
    return {
        "perplexity": math.exp(loss / n_tokens),
        "top1_agreement": None if teacher is None else same / n_tokens,
        "kl_to_teacher": None if teacher is None else kl / n_tokens,
        "n_text_tokens": n_tokens,
    }


def agreement(logits_BTV: Tensor, teacher_BTV: Tensor) -> tuple[Tensor, Tensor]:
    """Return (same_BT, kl_BT): equal first choices, and KL(teacher || model) in nats, on the shared part of V."""
    n_shared = min(logits_BTV.shape[-1], teacher_BTV.shape[-1])
    ours, theirs = logits_BTV[..., :n_shared], teacher_BTV[..., :n_shared].to(logits_BTV.device)
    ours_log, theirs_log = ours.log_softmax(-1), theirs.log_softmax(-1)
    kl_BT = (theirs_log.exp() * (theirs_log - ours_log)).sum(-1)
    return ours.argmax(-1) == theirs.argmax(-1), kl_BT


def model_cache_bytes(model: PreTrainedModel) -> dict[str, Any]:
    """Return the memory fields of an `EvalResult`."""
    site = attention_sites(model)[0]
    config: Any = model.config
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
