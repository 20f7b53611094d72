"""`hybrid-distill score`: rank a model's heads, say how sure that is, draw it; compare two rankings."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import tyro
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..data import read_held_out
from ..distributed import alone_in, connect, on_main_process
from ..lab.analysis.figures import can_draw
from ..limits import COUNT, COUNT_OR_NONE, SHARE, check_fields, numbers, words
from ..plan import HeadId
from ..probes import Probe, duplicates
from ..probes.checks import check_answerable
from ..probes.plain_text import text_rows
from ..probes.registry import options_of, probe_with
from ..scoring import HeadScores, score_heads
from ..scoring.attention import attention_to_answer, copy_score
from ..scoring.attribution import attribution_scores, measured_recall, prefilter
from ..scoring.combine import combine_scores, shares
from ..scoring.comparison import compare_rankings
from ..scoring.head_scores import Reading
from ..scoring.importers import load_ranking
from ..teacher import TINY, load_teacher, text_config

log = logging.getLogger(__name__)

Method = Literal["ablation", "mean-ablation", "attribution", "attention", "copy"]
ESTIMATES: dict[str, Callable[..., HeadScores]] = {
    "attribution": attribution_scores,
    "attention": attention_to_answer,
    "copy": copy_score,
}
SHORTER = {
    "pairs": "fewer pairs (--pairs)",
    "lengths": "a shorter filler (--lengths)",
    "facts": "shorter questions (--facts)",
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
    lengths: str = "100,200,400,800"
    """Words of filler text in needle; several lengths are taken in turn."""
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
    """How the scores of several probes become one (docs/scores.md): by the mean place in their rankings, by the largest
    drop, or by the mean of the drops with --weights."""
    weights: str | None = None
    """With ``--combine weighted``: a number for each probe, in their order, as ``2,1``."""
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
    allow_bin: bool = False
    """Take weights that are a pickle (``*.bin``) too."""
    seed: int = 0
    out: Path = Path("scores.json")
    """Where the scores go; figures stand beside it, those of each of several probes (``scores.kv.json``), and what an
    interrupted run had scored."""

    def __post_init__(self) -> None:
        check_fields(
            self,
            "--",
            **dict.fromkeys(("examples", "k", "prefilter", "batch_size"), COUNT),
            n_control_texts=COUNT_OR_NONE,
            min_accuracy=SHARE,
        )


def run_score(job: ScoreJob) -> HeadScores:
    """Score as the job says; writes ``out``, and figures where matplotlib is installed.

    Under ``accelerate launch`` processes share the work; all of them return the scores. All that can be refused without
    scoring is refused before any probe is scored. Of several probes, each leaves its scores in a file of its own; what
    they measured (``*.partial.json``) goes when the last has ended, so that the same call goes on from there.
    """
    probes = _probes(job)
    weights = _weights(job, len(probes))
    if job.out.is_dir():
        raise ValueError(f"--out is {job.out}, which is a folder; name a file, such as {job.out / 'scores.json'}.")
    controls = read_held_out(job.control_texts, job.n_control_texts)
    with alone_in(job.out, beside=True):
        return _run_score(job, probes, weights, controls)


def _run_score(
    job: ScoreJob, probes: dict[str, Probe], weights: list[float] | None, controls: list[str]
) -> HeadScores:
    device: Any = connect().device
    dtype = job.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    model, tokenizer = load_teacher(job.model, dtype=dtype, allow_bin=job.allow_bin, flag="--model")
    model.to(device)
    limit = getattr(text_config(model), "max_position_embeddings", sys.maxsize)  # a recurrent model has none
    for name, probe in probes.items():
        check_answerable(probe.examples(job.examples), tokenizer, limit, shorter=_shorter(name))
    text_rows(tokenizer, controls, max_tokens=2)
    several = len(probes) > 1
    files = [job.out.with_suffix(f".{name}.json") if several else job.out for name in probes]
    parts = []
    for probe, file in zip(probes.values(), files, strict=True):
        scores = _score(job, (model, tokenizer, probe), controls, _partial(file))
        on_main_process(partial(scores.save, file))
        parts.append(scores)
    if several:
        scores = combine_scores(parts, job.combine, weights)
        on_main_process(partial(scores.save, job.out))
    on_main_process(lambda: (_draw(scores, job), _drop_partial(files)))
    return scores


def _score(
    job: ScoreJob,
    asked: tuple[PreTrainedModel, PreTrainedTokenizerBase, Probe],
    controls: list[str],
    resume_path: Path,
) -> HeadScores:
    """The scores by one probe."""
    if job.method in ESTIMATES:
        return ESTIMATES[job.method](*asked, n_examples=job.examples)
    heads, found = _prefiltered(job, asked) if job.prefilter else (None, {})
    scores = score_heads(
        *asked,
        n_examples=job.examples,
        batch_size=job.batch_size,
        control_texts=controls,
        min_accuracy=job.min_accuracy,
        replacement="mean" if job.method == "mean-ablation" else "zero",
        race_k=None if job.exhaustive else job.k,
        heads=heads,
        resume_path=resume_path,
    )
    return replace(scores, provenance={**scores.provenance, **found})


def _partial(own: Path) -> Path:
    return own.with_suffix(".partial.json")


def _drop_partial(files: Iterable[Path]) -> None:
    for own in files:
        _partial(own).unlink(missing_ok=True)


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


def _probes(job: ScoreJob) -> dict[str, Probe]:
    """The probes by name, in the order given. Raises ValueError for one named twice: their files would be one."""
    names = words(job.probe)
    if repeated := duplicates(names):
        raise ValueError(f"--probe is {job.probe!r}, which names {repeated[0]!r} twice; name each probe once.")
    pairs = tuple(numbers("pairs", job.pairs, least=1))
    lengths = tuple(numbers("lengths", job.lengths, least=1))
    given: dict[str, Any] = {"pairs": pairs, "lengths": lengths, "facts": job.facts, "seed": job.seed}
    return {name: probe_with(name, given) for name in names}


def _shorter(name: str) -> str:
    """What to take where a probe's questions are too long: only what this command has a flag for."""
    ways = [advice for option, advice in SHORTER.items() if option in options_of(name)]
    return ways[0] if ways else "another probe"


def _weights(job: ScoreJob, n_probes: int) -> list[float] | None:
    """A weight for each probe, None unless ``combine`` is weighted. Raises ValueError where the two do not fit."""
    if job.combine != "weighted":
        if job.weights is not None:
            raise ValueError(f"--weights is {job.weights!r}, --combine is {job.combine!r}; add --combine weighted.")
        return None
    wanted = f"{n_probes} numbers, one for each probe in order" if n_probes > 1 else "one number for the one probe"
    if job.weights is None:
        raise ValueError(f"--combine weighted has no --weights; give {wanted}, such as --weights 2,1.")
    weights = numbers("weights", job.weights, number=float)
    if len(weights) != n_probes:
        raise ValueError(f"--weights is {job.weights!r}, --probe is {job.probe!r}; give {wanted}.")
    shares(job.combine, weights, n_probes)
    return weights


def _draw(scores: HeadScores, job: ScoreJob) -> None:
    if not can_draw():
        return
    from ..lab.plots import score_bars, score_map

    score_map(scores, job.out.with_suffix(".map.png"), kept=scores.ranking()[: job.k])
    score_bars(scores, job.out.with_suffix(".bars.png"), k=job.k)


def table(scores: HeadScores, k: int, shown: int = SHOWN) -> str:
    """The first heads with what is lost without them, and how sure the order is."""
    reading, n_heads = scores.reading, len(scores.ranking())
    lines = [f"{scores.provenance.get('method', '')}; changes without the head:"]
    column = "mean rank" if reading.is_rank else "accuracy"
    lines.append(f"{'':>4}{'head':<9}{column:>12}{'log-probability':>18}{'plain text':>14}")
    for place, head in enumerate(scores.ranking()[:shown], start=1):
        control = "" if scores.control_drop_LH is None else f"{scores.control_drop_LH[head].item():+.4f}"
        value, logprob = reading(scores.accuracy_drop_LH[head].item()), 0.0 - scores.logprob_drop_LH[head].item()
        accuracy = f"{value:>12.1f}" if reading.is_rank else f"{0.0 - value:>+10.1f} p"
        lines.append(f"{place:>3} {head!s:<9}{accuracy}{logprob:>+18.3f}{control:>14}")
        if place == k < min(shown, n_heads):
            lines.append(f"    {f' cut after k = {k} ':-^53}")
    lines.append(_legend(reading))
    if scores.agreement:
        shares = [f"top {n} {share:.0%}" for n, share in scores.agreement.get("overlap", {}).items()]
        lines.append(f"halves of the prompts agree: {', '.join(shares)}")
    if warning := scores.tie_warning(min(k, n_heads)):
        lines.append(f"warning: {warning}")
    return "\n".join(lines)


def _legend(reading: Reading) -> str:
    """The units of `table`."""
    nats = "in nats: of an answer, of a token. An estimate is shown as a loss."
    if reading.is_rank:
        return f"{reading.label} (1: first in each); the others {nats}"
    return f"accuracy in points{f' ({reading.label})' if reading.probes else ''}, the others {nats}"


def compare_files(a: Path, b: Path) -> str:
    """How two files of scores agree; one may be a published ranking (`scoring.importers`)."""
    rankings: list[HeadScores | Path] = []
    shape: HeadScores | None = None
    for path in (a, b):
        if not path.exists():
            raise ValueError(f"{path} does not exist; pass two files, scores.json or published rankings.")
        try:
            shape = HeadScores.load(path)
            rankings.append(shape)
        except ValueError:
            rankings.append(path)
    if shape is None:
        raise ValueError(f"neither {a} nor {b} holds head scores; a published ranking is compared with scores.json.")
    first, second = (load_ranking(r, shape) if isinstance(r, Path) else r for r in rankings)
    return compare_rankings(first, second).table()



def command(job: tyro.conf.OmitArgPrefixes[ScoreJob] = ScoreJob()) -> None:
    """Rank a model's attention heads by what their removal costs on a probe; writes scores.json and figures.

    Goes on where it was stopped. `accelerate launch -m hybrid_distill score ...` shares the work between processes.
    """
    scores = run_score(job)
    if connect().is_main_process:
        print(table(scores, job.k))
        print(f"scores: {job.out}")
