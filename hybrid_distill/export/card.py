"""Model card of an export: heads kept, results, memory, loading, limitations. The text is in card.md.jinja."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from huggingface_hub import ModelCard
from jinja2 import Environment, StrictUndefined

from ..evaluation.evaluate import EvalResult
from ..io import Record
from ..model import HybridForCausalLM, layer_windows
from ..plan import HeadPlan, cache_bytes, container_bytes
from ..scoring import HeadScores
from ..teacher import TINY
from .falcon_h1 import container
from .versions import TRIED, oldest_transformers

UNKNOWN = "unknown"
MOST_MISSED = 10
ABSENT = "–"


def model_card(
    student: HybridForCausalLM,
    plan: HeadPlan,
    results: Mapping[str, EvalResult] | None,
    scores: HeadScores | None,
    *,
    form: str = "remote-code",
    license: str,
    base_model: str,
    training: Sequence[Record] = (),
    kernels: Record | None = None,
) -> str:
    """Render the model card (README.md) of an export: Markdown with the hub's YAML header.

    ``training`` holds the ``name``, ``steps`` and ``tokens`` of each stage. If the student does not compute as its
    export does, ``kernels`` holds its ``implementation`` and the ``difference`` of its logits from the export's.
    """
    config, n_heads = student.config, plan.n_layers * plan.n_heads
    sizes = sorted({size for result in (results or {}).values() for size in result.kv_generation})
    n_pairs = 16 if 16 in sizes else max(sizes, default=16)
    text = Path(__file__).with_name("card.md.jinja").read_text(encoding="utf-8")
    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    return environment.from_string(text).render(
        license=license,
        unknown=UNKNOWN,
        base_model=base_model,
        teacher=base_model or f"a {config.backbone['model_type']} model",
        plan=plan,
        n_heads=n_heads,
        config=config,
        form=form,
        oldest=oldest_transformers(config.backbone["model_type"]),
        newest=TRIED["tried"][-1],
        right=", ".join(TRIED["falcon-h1"]),
        stock_parameters=container(student).parameters() if form == "falcon-h1" else 0,
        stock_bytes=container_bytes(plan, length=4096, head_dim=config.head_dim, d_state=config.d_state),
        n_parameters=student.num_parameters(),
        missed=_most_missed(scores, plan) if scores else [],
        training=training,
        kernels=kernels,
        results=results or {},
        n_pairs=n_pairs,
        share=_share,
        number=_number,
        cache=partial(
            cache_bytes,
            head_dim=config.head_dim,
            d_state=config.d_state,
            conv_width=config.conv_width,
            windows=layer_windows(config.backbone_config()),
        ),
    )


def origin(teacher: str) -> tuple[str, str]:
    """Return (license, base_model) for `export_checkpoint`: the license in the teacher's model card, and its name.

    The license is the hub's "unknown" if the card cannot be read or names none.
    """
    if teacher == TINY:
        return "apache-2.0", ""
    local = Path(teacher).expanduser()
    license, _ = on_card(local / "README.md" if local.is_dir() else teacher)
    return license, local.resolve().name if local.is_dir() else teacher


def on_card(card: str | Path) -> tuple[str, str]:
    """Read (license, base_model) from a model card: a file or a hub id."""
    try:
        data = ModelCard.load(card, ignore_metadata_errors=True).data.to_dict()
    except Exception:  # no file, no network, or a header that YAML or ModelCard rejects
        data = {}
    return data.get("license") or UNKNOWN, data.get("base_model") or ""


def _most_missed(scores: HeadScores, plan: HeadPlan) -> list[str]:
    """List the heads with the highest scores; mark those not kept."""
    value_LH = scores.value_LH()
    return [
        f"{head} {100 * value_LH[head.layer, head.head].item():.1f}{' (not kept)' * (head not in plan.kept)}"
        for head in scores.ranking()[:MOST_MISSED]
    ]


def _number(value: float | None, scale: float, digits: int) -> str:
    return ABSENT if value is None or not math.isfinite(value) else f"{scale * value:.{digits}f}"


def _share(share: float | None, n: int) -> str:
    """Format a share k / n in percent; the standard error is taken at (k + 1/2) / (n + 1), so it is never zero."""
    if share is None or not n:
        return _number(share, 100, 1)
    smoothed = (share * n + 0.5) / (n + 1)
    return f"{100 * share:.1f} ± {100 * math.sqrt(smoothed * (1 - smoothed) / n):.1f}"
