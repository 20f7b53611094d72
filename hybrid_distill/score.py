"""`hybrid-distill score`: rank a model's heads, say how sure that is, draw it; compare two rankings."""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal, cast

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .data import read_documents
from .distill.accelerator import connect, on_main_process
from .plan import HeadId
from .probes import Probe
from .probes.checks import check_answerable
from .probes.registry import make_probe, options_of
from .scoring import HeadScores, score_heads
from .scoring.attention import attention_to_answer, copy_score
from .scoring.attribution import attribution_scores, measured_recall, prefilter
from .scoring.combine import combine_scores
from .scoring.comparison import compare_rankings
from .scoring.importers import load_ranking
from .teacher import TINY, load_teacher, text_config

log = logging.getLogger(__name__)

Method = Literal["ablation", "mean-ablation", "attribution", "attention", "copy"]
ESTIMATES: dict[str, Callable[..., HeadScores]] = {
    "attribution": attribution_scores,
    "attention": attention_to_answer,
    "copy": copy_score,
}
SHOWN = 20
PREFILTER_EXAMPLES, RECALL_EXAMPLES = 64, 16


@dataclass(frozen=True)
class ScoreJob:
    """What to score, on what, and how. Several probes, separated by commas, make one combined ranking."""

    model: str = TINY
    """A local folder, a hub id, or ``tiny`` for the embedded teacher."""
    probe: str = "kv"
    """kv, growing, letters, needle, copy or two_hop; several as ``kv,needle``."""
    pairs: str = "16"
    """Dictionary sizes of kv and two_hop; ``10,25,50`` takes them in turn."""
    facts: Path | None = None
    """JSON lines of questions for letters; by default the embedded facts."""
    examples: int = 128
    """Prompts, at most, for each head."""
    method: Method = "ablation"
    """``ablation`` zeroes a head, ``mean-ablation`` puts its mean output in its place: both are exact. The others are
    estimates from a pass or two: ``attribution``, ``attention`` to the answer, ``copy`` score."""
    k: int = 20
    """Heads that will be kept: racing is about the first k, and so is the warning at a tie."""
    prefilter: int | None = None
    """Score only the heads that attribution puts first, so many of them; what that misses is measured and recorded."""
    exhaustive: bool = False
    """Score every head on every prompt, instead of dropping heads that are surely not among the first k."""
    combine: Literal["mean_rank", "max_drop", "weighted"] = "mean_rank"
    """How the scores of several probes become one."""
    control_texts: str = TINY
    """Plain text, ``tiny`` or a file, on which heads that matter for everything show."""
    n_control_texts: int = 16
    min_accuracy: float | None = None
    """A model below this accuracy on the probe is refused: its heads cannot be ranked by a task that it fails. By
    default half way from guessing to always right."""
    batch_size: int | None = None
    """Rows at a time; by default as many as are fast and fit."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """By default bfloat16 on a GPU, float32 on a CPU."""
    seed: int = 0
    compare: tuple[Path, Path] | None = None
    """Score nothing: how do these two files agree? One may be a published ranking."""
    out: Path = Path("scores.json")
    """Where the scores go; figures stand beside it, and what an interrupted run had scored."""


def run_score(job: ScoreJob) -> HeadScores:
    """Score as the job says; writes ``out``, and figures where matplotlib is installed.

    Under ``accelerate launch`` processes share the work; all of them return the scores.
    """
    device: Any = connect().device
    dtype = job.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    model, tokenizer = load_teacher(job.model, dtype=dtype)
    model.to(device)
    on_main_process(lambda: job.out.parent.mkdir(parents=True, exist_ok=True))
    names = [name.strip() for name in job.probe.split(",")]
    parts = [_score(job, model, tokenizer, name, several=len(names) > 1) for name in names]
    scores = parts[0] if len(parts) == 1 else combine_scores(parts, job.combine)
    on_main_process(lambda: (scores.save(job.out), _draw(scores, job)))
    return scores


def _score(
    job: ScoreJob, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str, *, several: bool
) -> HeadScores:
    """The scores by one probe; kept in a file of their own where there are several."""
    probe = _probe(job, name)
    limit = getattr(text_config(model), "max_position_embeddings", sys.maxsize)  # a recurrent model has none
    check_answerable(probe.examples(job.examples), tokenizer, limit)
    asked = model, tokenizer, probe
    if job.method in ESTIMATES:
        return ESTIMATES[job.method](*asked, n_examples=job.examples)
    own = job.out.with_suffix(f".{name}.json") if several else job.out
    partial = own.with_suffix(".partial.json")
    heads, found = _prefiltered(job, asked) if job.prefilter else (None, {})
    scores = score_heads(
        *asked,
        n_examples=job.examples,
        batch_size=job.batch_size,
        control_texts=_texts(job),
        min_accuracy=job.min_accuracy,
        replacement="mean" if job.method == "mean-ablation" else "zero",
        race_k=None if job.exhaustive else job.k,
        heads=heads,
        resume_path=partial,
    )
    if connect().is_main_process:
        partial.unlink(missing_ok=True)
    return replace(scores, provenance={**scores.provenance, **found})


def _prefiltered(
    job: ScoreJob, asked: tuple[PreTrainedModel, PreTrainedTokenizerBase, Probe]
) -> tuple[set[HeadId], dict[str, Any]]:
    """The heads to score, and for the record how many of the first k a small exact sample finds among them."""
    width = cast(int, job.prefilter)
    estimate = attribution_scores(*asked, n_examples=min(job.examples, PREFILTER_EXAMPLES))
    recall = measured_recall(*asked, estimate, k=min(job.k, width), widths=[width], n_examples=RECALL_EXAMPLES)
    found = {"width": width, "k": min(job.k, width), "recall": recall[width], "examples": RECALL_EXAMPLES}
    log.info("the prefilter holds %.0f%% of the first %d heads of an exact sample", 100 * recall[width], found["k"])
    return prefilter(estimate, width), {"prefilter": found}


def _probe(job: ScoreJob, name: str) -> Probe:
    try:
        pairs = tuple(int(size) for size in job.pairs.split(","))
    except ValueError:
        raise ValueError(f"--pairs is {job.pairs!r}; give whole numbers, such as 16 or 10,25,50.") from None
    given: dict[str, Any] = {"pairs": pairs, "facts": job.facts, "seed": job.seed}
    return make_probe(name, **{option: given[option] for option in options_of(name) if option in given})


def _texts(job: ScoreJob) -> list[str]:
    source = f"{TINY}:held_out" if job.control_texts == TINY else job.control_texts
    return list(islice(read_documents(source), job.n_control_texts))


def _draw(scores: HeadScores, job: ScoreJob) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        log.info("no figures: matplotlib is not installed (pip install hybrid-distill[plot])")
        return
    from .plots import score_bars, score_map

    score_map(scores, job.out.with_suffix(".map.png"), kept=scores.ranking()[: job.k])
    score_bars(scores, job.out.with_suffix(".bars.png"), k=job.k)


def table(scores: HeadScores, k: int, shown: int = SHOWN) -> str:
    """The first heads with what is lost without them, and how sure the order is."""
    lines = [f"{scores.provenance.get('method', '')}; changes without the head:"]
    lines.append(f"{'':>4}{'head':<9}{'accuracy':>12}{'log-probability':>18}{'plain text':>14}")
    for place, head in enumerate(scores.ranking()[:shown], start=1):
        control = "" if scores.control_drop_LH is None else f"{scores.control_drop_LH[head].item():+.4f}"
        accuracy, logprob = 0.0 - scores.accuracy_drop_LH[head].item(), 0.0 - scores.logprob_drop_LH[head].item()
        lines.append(f"{place:>3} {head!s:<9}{100 * accuracy:>+10.1f} p{logprob:>+18.3f}{control:>14}")
    lines.append("accuracy in points, the others in nats: of an answer, of a token. An estimate is shown as a loss.")
    if scores.agreement:
        shares = [f"top {n} {share:.0%}" for n, share in scores.agreement.get("overlap", {}).items()]
        lines.append(f"halves of the prompts agree: {', '.join(shares)}")
    k = min(k, len(scores.ranking()))
    if warning := scores.tie_warning(k):
        lines.append(f"warning: {warning}")
    return "\n".join(lines)


def compare_files(a: Path, b: Path) -> str:
    """How two files of scores agree; one may be a published ranking (`scoring.importers`)."""
    rankings: list[HeadScores | Path] = []
    shape: HeadScores | None = None
    for path in (a, b):
        try:
            shape = HeadScores.load(path)
            rankings.append(shape)
        except ValueError:
            rankings.append(path)
    if shape is None:
        raise ValueError(f"neither {a} nor {b} holds head scores; a published ranking is compared with scores.json.")
    first, second = (load_ranking(r, shape) if isinstance(r, Path) else r for r in rankings)
    return compare_rankings(first, second).table()

