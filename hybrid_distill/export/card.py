"""The model card of an export: heads kept, results, memory, how to load it, what it cannot do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

from huggingface_hub import ModelCard
from transformers import PreTrainedModel

from ..evaluation.evaluate import EvalResult
from ..lab.report import Row, measured, results_table
from ..model import HybridForCausalLM, layer_windows
from ..plan import BF16_BYTES, CacheBytes, HeadPlan, cache_bytes
from ..scoring import HeadScores
from ..teacher import TINY, rope_by_length
from .falcon_h1 import container
from .versions import oldest_transformers, right_for_falcon_h1, tried_versions

UNKNOWN = "unknown"
MOST_MISSED = 10
CARD = """---
{front_matter}
---

# {title}

A hybrid of attention and recurrence, distilled from {teacher}: {kept} of its {heads} attention heads stay
attention; the others were replaced by recurrent ({recurrence}) heads with a state of {d_state} numbers
per channel, trained to do what the replaced heads did. Method:
[2504.18574](https://arxiv.org/abs/2504.18574), [2502.14458](https://arxiv.org/abs/2502.14458),
[2408.10189](https://arxiv.org/abs/2408.10189). Made with hybrid-distill.

## Load

{load}

`python gate/check.py` compares this copy, on your machine, with what the model computed when it was
exported: every tensor's hash, logits, generated tokens with and without cache, alone and in a left-padded
batch.

## Heads kept

{plan}

## Training

{training}

## Results

{results}

## Memory

Cache of one sequence, states in 32-bit and all else in 16-bit numbers, 1 MB = 1e6 bytes. The convolutions of the
recurrent heads remember {conv_kb:.1f} kB besides.

{memory}

## Licence

{licence}

## Limitations

- It inherits the teacher's knowledge, errors, biases and terms of use; nothing was done about its safety.
- A recurrent head remembers a fixed amount: what depends on heads that were not kept can fail in long or
  dense contexts, also where the figures above look fine. Test your own task, by generation.
- It is no drop-in for tools that roll a cache back (speculative decoding) or edit keys and values in place.
{rope}"""
ROPE = """\
- Its positions are its teacher's, whose RoPE ({kind}) depends on the length of the row: beyond {length:,} tokens, text
  that is read from a cache, or in a batch with longer rows, gets other logits than at once and alone.
"""

LOAD = {
    "remote-code": """\
Needs `torch` and `transformers` {oldest} or newer, nothing else; an older one is refused. Newest version tried:
{newest}.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True, dtype="auto")
```

`trust_remote_code=True` runs the Python files of this folder; they import torch and transformers only. They are
plain PyTorch; speed depends on kernels that the training package brings.""",
    "falcon-h1": """\
Needs `torch` and `transformers`, nothing else, and no remote code: the model is stored as a
`FalconH1ForCausalLM`, which computes the same function. Tried with transformers {right}.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(path)
model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
```

{cost}""",
    "safetensors": """\
Needs the package hybrid-distill.

```python
from hybrid_distill.model import HybridForCausalLM

model = HybridForCausalLM.from_pretrained(path, dtype="auto")
```""",
}

QUANTISED = """\
The linear projections are stored in 8 bits ({to}), one scale a row, by torchao {torchao} and transformers
{transformers}; other versions may read and write another layout. The figures below were measured before that: logits
differ by at most {limit:g} of the largest one over the prompts of `gate/`.
"""


def quantised_card(card: str, to: str, limit: float) -> str:
    """The card of an export, for its copy in 8 bits."""
    made_with = {name: version(name) for name in ("torchao", "transformers")}
    said = QUANTISED.format(to=to, limit=limit, **made_with)
    card = card.replace("or newer, nothing else;", "or newer, and `torchao`;", 1)
    return card.replace("\n## Heads kept\n", f"\n{said}\n## Heads kept\n", 1)


def origin(teacher: str) -> tuple[str, str]:
    """(license, base_model) for `export_checkpoint`, from the teacher's own model card.

    A card that cannot be had or names no licence leaves the hub's "unknown".
    """
    if teacher == TINY:
        return "apache-2.0", ""
    local = Path(teacher)
    card = local / "README.md" if local.is_dir() else teacher
    try:
        license = ModelCard.load(card, ignore_metadata_errors=True).data.to_dict().get("license")
    except (OSError, ValueError):
        license = None
    return license or UNKNOWN, local.resolve().name if local.is_dir() else teacher


def model_card(
    student: PreTrainedModel,
    plan: HeadPlan,
    results: Mapping[str, EvalResult] | None,
    scores: HeadScores | None,
    *,
    form: str = "remote-code",
    license: str,
    base_model: str,
    training: Sequence[Mapping[str, Any]] = (),
) -> str:
    """README.md of an export, in Markdown with the hub's YAML header.

    ``training`` has ``name``, ``steps`` and ``tokens`` of each stage.
    """
    config = student.config
    front_matter = [f"license: {license}", "library_name: transformers", "pipeline_tag: text-generation"]
    if base_model:
        front_matter.append(f"base_model: {base_model}")
    front_matter.append("tags: [hybrid, recurrent, distillation, hybrid-distill]")
    teacher = base_model or f"a {config.backbone['model_type']} model"
    conv = _cache(student, plan, 1).conv
    return CARD.format(
        front_matter="\n".join(front_matter),
        title=f"{base_model.split('/')[-1] or 'Hybrid'}, {plan.k} attention heads",
        teacher=teacher,
        kept=plan.k,
        heads=plan.n_layers * plan.n_heads,
        d_state=config.d_state,
        recurrence="Mamba-2" if config.recurrence == "mamba2" else "discrete Mamba-2",
        plan=_plan_section(plan, scores),
        training=_training_section(training),
        results=_results_section(plan, results),
        licence=_licence_section(license, teacher),
        load=LOAD[form].format(
            oldest=oldest_transformers(config.backbone["model_type"]),
            newest=tried_versions()[-1],
            right=", ".join(right_for_falcon_h1()),
            cost=container_cost(student, plan) if form == "falcon-h1" else "",
        ),
        conv_kb=conv / 1e3,
        memory=_memory_table(student, plan),
        rope=_rope_limitation(student),
    )


def _rope_limitation(student: PreTrainedModel) -> str:
    rope = rope_by_length(student.config.backbone_config())
    return "" if rope is None else ROPE.format(kind=rope[0], length=rope[1])


def _plan_section(plan: HeadPlan, scores: HeadScores | None) -> str:
    lines = ["| layer | attention heads | KV heads stored | recurrent heads |", "| ---: | --- | --- | ---: |"]
    for layer in range(plan.n_layers):
        kept, groups = (
            ", ".join(map(str, heads)) or "none" for heads in (plan.kept_in(layer), plan.kv_groups_in(layer))
        )
        lines.append(f"| {layer} | {kept} | {groups} | {len(plan.recurrent_in(layer))} |")
    text = "Counted from 0; `plan.json` holds the same for programs."
    if scores is not None:
        text += " `head_scores.json` holds the score of every head of the teacher and how it was measured."
        lines += ["", _most_missed(scores, plan)]
    return f"{text}\n\n" + "\n".join(lines)


def _most_missed(scores: HeadScores, plan: HeadPlan) -> str:
    """The heads with the highest scores, and whether they are kept."""
    value_LH = scores.value_LH()
    reading = scores.reading
    heads = ", ".join(
        f"{head} {reading(value_LH[head.layer, head.head].item()):.1f}{'' if head in plan.kept else ' (not kept)'}"
        for head in scores.ranking()[:MOST_MISSED]
    )
    return f"Heads with the highest scores ({reading.name}, {reading.unit}): {heads}."


def _training_section(training: Sequence[Mapping[str, Any]]) -> str:
    if not training:
        return "Tokens seen: not recorded."
    lines = ["| stage | steps | tokens seen |", "| --- | ---: | ---: |"]
    lines += [f"| {stage['name']} | {stage['steps']:,} | {stage['tokens']:,} |" for stage in training]
    lines.append(f"| all | | {sum(stage['tokens'] for stage in training):,} |")
    return "\n".join(lines)


def _licence_section(license: str, teacher: str) -> str:
    if license == UNKNOWN:
        return (
            f"**Not known.** No licence of {teacher} was found when this was exported. The weights here were made from "
            "its weights: find out what its authors allow before you use or pass them on."
        )
    return f"`{license}`, that of {teacher}: the weights here were made from its weights."


def _results_section(plan: HeadPlan, results: Mapping[str, EvalResult] | None) -> str:
    if not results:
        return "Not measured."
    rows = [
        Row(name, "teacher" if name == "teacher" else "student", plan.k, measured(result))
        for name, result in results.items()
    ]
    sizes = sorted({size for row in rows for size, _ in row.by_size("kv_generation")})
    n_pairs = 16 if 16 in sizes else max(sizes, default=16)
    table = results_table(rows, n_pairs, n_heads=plan.n_layers * plan.n_heads)
    return f"{table}\n\n± is one binomial standard error. Chance for KV retrieval is {100 / n_pairs:.1f} %."


def _memory_table(student: PreTrainedModel, plan: HeadPlan) -> str:
    every = HeadPlan.all(plan)
    lines = [
        "| tokens | student, MB | of which keys and values | teacher, MB |",
        "| ---: | ---: | ---: | ---: |",
    ]
    for length in (128, 2048, 4096, 32768):
        own, teachers = _cache(student, plan, length), _cache(student, every, length)
        lines.append(
            f"| {length:,} | {own.total / 1e6:.3f} | {own.kv / 1e6:.3f} | {teachers.total / 1e6:.3f} |"
        )
    return "\n".join(lines)


def container_cost(student: PreTrainedModel, plan: HeadPlan, length: int = 4096) -> str:
    """What a Falcon-H1 spends on heads that only fill up its layers, in a sentence."""
    stock, own = container(cast(HybridForCausalLM, student)), _cache(student, plan, length)
    n_own = sum(parameter.numel() for parameter in student.parameters())
    cache = stock.cache_bytes(length, BF16_BYTES)
    return (
        f"Heads of zeros make its layers equal in size: it has {stock.parameters():,} parameters\n(the student "
        f"{n_own:,}) and a cache of {cache / 1e6:.3f} MB at {length:,} tokens (the student {own.total / 1e6:.3f} MB)."
    )


def _cache(student: PreTrainedModel, plan: HeadPlan, length: int) -> CacheBytes:
    config = student.config
    return cache_bytes(
        plan,
        length=length,
        head_dim=config.head_dim,
        d_state=config.d_state,
        conv_width=config.conv_width,
        windows=layer_windows(config.backbone_config()),
    )
