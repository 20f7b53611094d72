"""Render the model card of an export: heads kept, results, memory, loading, limitations.

The text is in card.md.jinja.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

from jinja2 import Environment, PackageLoader, StrictUndefined

from ..cache_size import cache_bytes, falcon_h1_cache_bytes
from ..evaluation.evaluate import EvalResult
from ..evaluation.result import binomial_error, size_shown
from ..io import Record
from ..model import HybridForCausalLM, layer_windows
from ..model.recurrences import FORMS
from ..plan import HeadPlan
from ..scoring import HeadScores
from .falcon_h1 import to_falcon_h1
from .formats import FORMATS
from .license import UNKNOWN
from .versions import TRIED, oldest_transformers

N_BEST_HEADS = 10
ABSENT = "–"


def model_card(
    student: HybridForCausalLM,
    plan: HeadPlan,
    results: Mapping[str, EvalResult] | None,
    scores: HeadScores | None,
    *,
    export_format: str = "remote-code",
    license: str,
    base_model: str,
    training: Sequence[Record] | None = None,
    kernels: Record | None = None,
) -> str:
    """Render the model card (README.md) of an export: Markdown with the hub's YAML header.

    ``training`` holds the ``name``, ``steps`` and ``tokens`` of each stage; None if they are
    unknown. If the student does not compute as its export does, ``kernels`` holds its
    ``implementation`` and the ``difference`` of its logits from the export's.
    """
    facts = {
        "license": license,
        "unknown": UNKNOWN,
        "training": training,
        "kernels": kernels,
        **_identity(student, plan, base_model, export_format),
        **_memory(student, plan, export_format),
        **_results(plan, results or {}, scores),
    }
    environment = Environment(
        loader=PackageLoader(__package__ or "", "."),
        # A misspelled name in the template is an error, not a gap in the card.
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    template = environment.get_template("card.md.jinja")
    return template.render(**facts)


def _identity(
    student: HybridForCausalLM, plan: HeadPlan, base_model: str, export_format: str
) -> Record:
    """Collect the facts on the model, its teacher, its format and the versions that load it."""
    config = student.config
    model_type = config.backbone["model_type"]
    return {
        "base_model": base_model,
        "teacher": base_model or f"a {model_type} model",
        "plan": plan,
        "n_heads": plan.n_layers * plan.n_heads,
        "config": config,
        "recurrence": FORMS[config.recurrence].title,
        "export_format": export_format,
        "library": FORMATS[export_format].library,
        "is_for_other_program": FORMATS[export_format].is_for_other_program,
        "oldest": oldest_transformers(model_type),
        "newest": TRIED["tried"][-1],
        "falcon_h1_versions": ", ".join(TRIED["falcon-h1"]),
    }


def _memory(student: HybridForCausalLM, plan: HeadPlan, export_format: str) -> Record:
    """Collect parameters and cache sizes, of the student and as a Falcon-H1."""
    config = student.config
    n_falcon_h1_parameters = 0
    if export_format == "falcon-h1":
        n_falcon_h1_parameters = to_falcon_h1(student).parameters()
    cache = partial(
        cache_bytes,
        head_dim=config.head_dim,
        d_state=config.d_state,
        conv_width=config.conv_width,
        window=config.window,
        sinks=config.sinks,
        layer_windows=layer_windows(config),
    )
    return {
        "n_parameters": student.num_parameters(),
        "cache": cache,
        "falcon_h1_parameters": n_falcon_h1_parameters,
        "falcon_h1_bytes": falcon_h1_cache_bytes(
            plan, length=4096, head_dim=config.head_dim, d_state=config.d_state
        ),
    }


def _results(
    plan: HeadPlan, results: Mapping[str, EvalResult], scores: HeadScores | None
) -> Record:
    """Collect scores and evaluations, and the functions that format them."""
    dictionary_sizes: set[int] = set()
    for evaluation in results.values():
        dictionary_sizes.update(evaluation.kv_generation)
    return {
        "best_heads": [] if scores is None else _best_heads(scores, plan),
        "is_share": scores is not None and scores.is_additive,
        "results": results,
        "n_pairs": size_shown(dictionary_sizes),
        "share": _share,
        "number": _number,
    }


def _best_heads(scores: HeadScores, plan: HeadPlan) -> list[str]:
    """List the heads with the highest scores; mark those not kept."""
    value_LH = scores.value_LH()
    # Shares in nats, relative to their sum; drops of accuracy as they are.
    whole = value_LH.nansum().item() if scores.is_additive else 1.0
    entries = []
    for head in scores.ranking()[:N_BEST_HEADS]:
        percent = 100 * value_LH[head].item() / whole
        mark = "" if head in plan.kept else " (not kept)"
        entries.append(f"{head} {percent:.1f}{mark}")
    return entries


def _number(value: float | None, scale: float, digits: int) -> str:
    """Format a number, scaled; None and what is not finite are absent."""
    if value is None or not math.isfinite(value):
        return ABSENT
    return f"{scale * value:.{digits}f}"


def _share(share: float | None, n: int) -> str:
    """Format a share in percent, with its standard error."""
    if share is None or not n:
        return _number(share, 100, 1)
    return f"{100 * share:.1f} ± {100 * binomial_error(share, n):.1f}"
