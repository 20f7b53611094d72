"""Evaluation of a teacher or student: retrieval, knowledge, plain text, agreement, memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast, get_args

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..assets.dictionaries import NOUNS
from ..cache_size import cache_bytes
from ..io import Record
from ..model import HybridConfig, HybridForCausalLM, layer_windows
from ..model.mixer import HeadPart, zero_part
from ..plan import HeadId, HeadPlan
from ..probes import Example
from ..probes.knowledge import Knowledge
from ..probes.kv_retrieval import KVRetrieval
from ..probes.plain_text import predictable
from ..probes.prompt_formats import PLAIN, with_prompt_format
from ..scoring import describe_run
from ..teacher import attention_sites, text_config
from .measure import Answers, EvalInputs, measure
from .result import FIGURES, EvalResult, flatten

CACHE_LENGTHS = (128, 2048, 4096)
FEW = 24
"""Number of examples and texts of each kind for a student with zeroed recurrent heads."""
MOST_FAR = 24
"""Most dictionaries far from their question: each is a long prompt."""


def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    teacher: PreTrainedModel | None = None,
    n_pairs: Sequence[int] = (4, 8, 16, 32),
    n_examples: int = 128,
    distance: int = 0,
    seed: int = 1,
    prompt_format: str = PLAIN,
    keys: Sequence[str] | None = None,
    held_out_texts: Sequence[str] | None = None,
    max_text_tokens: int = 512,
    knowledge: Knowledge | None = None,
    batch_size: int = 32,
    progress: bool = False,
) -> EvalResult:
    """Measure a Hugging Face decoder or a hybrid student; only agreement needs the ``teacher``.

    KV retrieval is measured for every dictionary size, by choice and by generation. With a
    ``distance``, the smallest size is also measured by choice with that many words between
    dictionary and question, beyond a student's windows. ``seed`` and ``keys`` (default: common
    nouns) determine the prompts; use another seed than for scoring heads. ``prompt_format`` is
    their format (`with_prompt_format`); questions of ``knowledge`` are asked unchanged. Each of the
    ``held_out_texts`` is cut at ``max_text_tokens``.
    """
    keys = NOUNS if keys is None else tuple(keys)
    examples = {}
    for n in n_pairs:
        probe = with_prompt_format(KVRetrieval(n, seed, keys), prompt_format, tokenizer)
        examples[n] = probe.examples(n_examples)
    far_prompts = far_examples(
        n_pairs,
        distance,
        tokenizer,
        n_examples=n_examples,
        seed=seed,
        prompt_format=prompt_format,
        keys=keys,
    )
    inputs = EvalInputs(
        tokenizer,
        teacher,
        examples=examples,
        far_examples=far_prompts,
        questions=knowledge.examples() if knowledge else [],
        texts=predictable(tokenizer, held_out_texts or []),
        max_text_tokens=max_text_tokens,
        batch_size=batch_size,
        progress=progress,
    )
    answers = measure(model, inputs)
    zeroed = measure_with_parts_zeroed(model, inputs, answers)
    return EvalResult(
        n_examples=n_examples,
        n_far=sum(map(len, far_prompts.values())),
        distance=distance,
        n_texts=len(inputs.texts),
        knowledge_chance=knowledge.chance if knowledge else None,
        n_knowledge=len(inputs.questions),
        **answers.figures(),
        **model_cache_bytes(model),
        recurrent_heads_zeroed=zeroed.get("recurrence"),
        windows_zeroed=zeroed.get("window"),
        provenance={
            "seed": seed,
            "prompt_format": prompt_format,
            "max_text_tokens": max_text_tokens,
            **describe_run(model),
        },
    )


def far_examples(
    n_pairs: Sequence[int],
    distance: int,
    tokenizer: PreTrainedTokenizerBase,
    *,
    n_examples: int,
    seed: int,
    prompt_format: str,
    keys: tuple[str, ...] = NOUNS,
) -> dict[int, list[Example]]:
    """Return dictionaries of the smallest size, ``distance`` words before their question, by size.

    There are `MOST_FAR` at most, and none without a distance.
    """
    if not (distance and n_pairs):
        return {}
    smallest = min(n_pairs)
    far_probe = KVRetrieval(smallest, seed, keys, distance=distance)
    probe = with_prompt_format(far_probe, prompt_format, tokenizer)
    return {smallest: probe.examples(min(n_examples, MOST_FAR))}


def measure_with_parts_zeroed(
    model: PreTrainedModel, inputs: EvalInputs, answers: Answers
) -> dict[HeadPart, Record]:
    """Measure a student on few examples with each part of all replaced heads zeroed.

    ``answers`` are those of the whole student to all ``inputs``. Return a record for each part that
    the model has. ``figures`` has each figure ``whole`` and ``zeroed``; ``unused`` is True if none
    of them changes. `hybrid-distill analyze zeroed-recurrence` zeroes layer by layer.
    """
    if text_config(model).model_type != HybridConfig.model_type:
        return {}
    student = cast(HybridForCausalLM, model)
    parts = [part for part in get_args(HeadPart) if student.mixers_with(part)]
    if not parts:
        return {}
    # A whole evaluation would double its time for one row of the report.
    few = inputs.first(FEW)
    # KL has no unit in which a change would be small enough to count as none.
    names = [name for name in FIGURES if name != "kl_to_teacher"]
    n_examples = [FEW, *(len(examples) for examples in inputs.examples.values())]
    records = {}
    for part in parts:
        with zero_part(student.mixers_with(part), part):
            zeroed_answers = measure(model, replace(few, label=f"{part} zeroed, "))
        zeroed = flatten(zeroed_answers.figures(), names)
        whole = flatten(answers.to_questions_of(zeroed_answers).figures(), names)
        records[part] = {
            "n_examples": min(n_examples),
            "figures": {name: {"whole": whole[name], "zeroed": zeroed[name]} for name in whole},
            "unused": all(_is_same(name, whole[name], zeroed[name]) for name in whole),
        }
    return records


def _is_same(name: str, whole: float, zeroed: float) -> bool:
    """Check whether a figure stays the same, to 1 % or to one example."""
    if name == "perplexity":
        return abs(zeroed / whole - 1) <= 0.01
    if name == "top1_agreement":
        return abs(zeroed - whole) <= 0.01
    # One example of FEW; a little more, because accuracies are rounded floats.
    return abs(zeroed - whole) <= 1.01 / FEW


def model_cache_bytes(model: PreTrainedModel) -> Record:
    """Return the memory fields of an `EvalResult`."""
    site = attention_sites(model)[0]
    config = text_config(model)
    # Head counts by site: a config may name them differently.
    shape = HeadPlan(config.num_hidden_layers, site.n_heads, site.n_kv_heads, kept=())
    plan = HeadPlan.all(shape)
    # A teacher has no states.
    state = {"d_state": 0, "conv_width": 1}
    if config.model_type == HybridConfig.model_type:
        kept: list[HeadId] = []
        for layer, heads in enumerate(config.kept):
            kept += [HeadId(layer, head) for head in heads]
        plan = HeadPlan.from_pairs(shape, kept)
        names = ("d_state", "conv_width", "window", "sinks")
        state = {name: getattr(config, name) for name in names}
    sizes = {}
    for length in CACHE_LENGTHS:
        sizes[length] = cache_bytes(
            plan,
            length=length,
            head_dim=site.head_dim,
            layer_windows=layer_windows(config),
            **state,
        )
    return {
        "cache_bytes": {length: size.total for length, size in sizes.items()},
        "conv_state_bytes": sizes[CACHE_LENGTHS[0]].conv,  # the same at every length
    }
