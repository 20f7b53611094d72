"""`hybrid-distill score`: a ranking of a model's heads, how reliable it is, and a figure."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import tyro
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..data import read_held_out
from ..distributed import Dtype, agree_on, alone_in, connect, is_launched_main, on_main_process
from ..io import differences
from ..lab.reporting import has_matplotlib, log_no_figures, text_table
from ..lab.reporting.heads import score_map, score_table
from ..model import HybridConfig
from ..model.field_rules import check_windows
from ..probes import Probe, queries_of
from ..probes.checks import check_answerable
from ..probes.prompt_formats import (
    CHAT,
    N_TRIED,
    PLAIN,
    TRIED,
    accuracy_by_prompt_format,
    check_prompt_format,
    with_prompt_format,
)
from ..probes.registry import make_probe, probes_with
from ..scoring import HeadScores, attribute_heads, score_heads
from ..scoring.attribution import N_EXAMPLES as N_ATTRIBUTED
from ..scoring.defaults import default_prompts, default_questions
from ..student.confined import confined
from ..student.teachers import check_teacher
from ..teacher import (
    TINY,
    fingerprint,
    head_sites,
    load_on_own_device,
    longest_context,
    read_teacher,
)
from ..validation import Count, CountOrZero, Seed, Share, check_options, check_task_reads, numbers

SHOWN = 20
PROBE_OPTIONS = {
    "pairs": "pairs",
    "queries": "n_queries",
    "distance": "distance",
    "length": "n_tokens",
    "facts": "facts",
}
"""Options of the command that not every probe has, and their names there."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ScoreJob:
    """Model, probe and method for scoring heads."""

    model: str = TINY
    """Local folder (a student's export too), hub id, or ``tiny`` for the embedded teacher."""
    probe: str = "kv"
    """kv, letters, or a RULER task (docs/scores.md lists them)."""
    prompt_format: str = PLAIN
    """Prompt format: ``plain``, ``shots=1`` (with one solved example) or ``chat`` (the tokenizer's
    template). The model's accuracy in each is printed before scoring."""
    pairs: str = "16"
    """Dictionary sizes of kv; several alternate (``10,25,50``)."""
    queries: Count | None = None
    """Questions per prompt of kv; by default 8, or one for each pair of smaller dictionaries; one
    with a ``window``."""
    length: Count = 512
    """Largest length of a RULER question, in tokens."""
    facts: Path | None = None
    """JSON Lines file of questions for knowledge and letters; by default the embedded facts."""
    examples: Count | None = None
    """Largest number of prompts per head; by default 24 of 8 questions, 128 of one, 24 with a
    ``window``."""
    window: CountOrZero = 0
    """Rank heads for a student whose heads see only this many tokens: by each head's share of the
    log-probability that all windows together lose. 0 ranks by ablation, one head at a time."""
    sinks: CountOrZero = 4
    """First tokens that heads see beside the ``window``."""
    distance: CountOrZero | None = None
    """Words of other text between dictionary and question of kv; by default as many as the
    ``window`` has tokens."""
    k: Count = 20
    """Heads that you will keep: racing and the warning about ties apply to the top k."""
    exhaustive: bool = False
    """Score every head on every prompt, instead of dropping those that are clearly not in the
    top k. Not with a ``window``."""
    control_texts: str = TINY
    """Control texts: ``tiny`` or a file."""
    n_control_texts: CountOrZero = 16
    """Plain texts that reveal heads which matter for any text. Not with a ``window``."""
    min_accuracy: Share | None = None
    """Lowest accuracy on the probe: a task that the model fails cannot rank its heads. By default
    a third of the way from guessing to always right."""
    batch_size: Count | None = None
    """Rows per forward pass; by default as many as fit and run fast."""
    dtype: Dtype | None = None
    """Dtype of the weights; by default bfloat16 on a GPU, float32 on a CPU. ``auto``: bfloat16 also
    on a CPU that has instructions for it."""
    allow_bin: bool = False
    """Allow pickled weights (``*.bin``)."""
    seed: Seed = 0
    out: Path = Path("scores.json")
    """File for the scores; the figure and the measurements of an interrupted run are saved next
    to it. Finished scores are kept: they are shown if the settings are the same, else refused."""

    def __post_init__(self) -> None:
        check_options(self, "--")
        check_prompt_format("--prompt-format", self.prompt_format)
        if self.window:
            self._refuse_ablation_options()
            names = {"window": "--window", "sinks": "--sinks"}
            check_windows(self.window, self.sinks, d_state=0, recurrence="discrete", names=names)
        elif self.sinks != ScoreJob.sinks:
            raise ValueError(
                f"--sinks is {self.sinks!r}, tokens that heads see beside a window, and there is none; leave out "
                "--sinks, or pass --window."
            )
        if "," in self.probe:
            raise ValueError(
                f"--probe is {self.probe!r}: a ranking is by one probe; pass one, with an --out for "
                "each."
            )
        if self.out.is_dir():
            path = self.out / "scores.json"
            raise ValueError(f"--out is {self.out}, a folder; pass a file, such as {path}.")

    def _refuse_ablation_options(self) -> None:
        """Raise ValueError for options of ablation, which a ``window`` replaces."""
        for name in ("exhaustive", "control_texts", "n_control_texts"):
            if getattr(self, name) != getattr(ScoreJob, name):
                flag = f"--{name.replace('_', '-')}"
                raise ValueError(
                    f"{flag} is {getattr(self, name)!r}, an option of ablation, and --window {self.window} ranks "
                    f"heads without it; leave out {flag}, or --window."
                )

    @property
    def probe_options(self) -> dict[str, object]:
        """Options of all probes; each takes its own."""
        sizes = tuple(numbers("pairs", self.pairs, least=1))
        n_queries = self.queries
        if n_queries is None:
            n_queries = 1 if self.window else default_questions(sizes)
        distance = self.distance
        if distance is None:
            # A word has a token or more: a window never reaches the dictionary.
            distance = self.window
        return {
            "pairs": sizes,
            "n_queries": n_queries,
            "distance": distance,
            "n_tokens": self.length,
            "facts": self.facts,
            "seed": self.seed,
        }

    @property
    def settings(self) -> dict[str, object]:
        """Options that decide the scores."""
        settings = asdict(self)
        for name in ("out", "batch_size", "allow_bin", "min_accuracy"):
            del settings[name]
        if self.window or self.exhaustive:
            # Only racing, which drops heads outside of the top k, reads it.
            del settings["k"]
        # Through JSON, as in the file that it is compared with.
        return json.loads(json.dumps(settings, default=str))

    @property
    def partial_path(self) -> Path:
        """File that an interrupted run leaves its measurements in."""
        return self.beside(".partial.json")

    def beside(self, suffix: str) -> Path:
        """Return a path beside ``out`` with its name, without .json, and a suffix."""
        # Not `with_suffix`: llama-3.1-8b and llama-3.2-1b would share their files.
        return self.out.with_name(self.out.name.removesuffix(".json") + suffix)

    def prompts_of(self, probe: Probe) -> int:
        """Return the number of prompts."""
        default = N_ATTRIBUTED if self.window else default_prompts(queries_of(probe))
        return self.examples or default


def run_score(job: ScoreJob) -> HeadScores:
    """Run a scoring job; write ``out``, and a figure if matplotlib is installed.

    Under ``accelerate launch``, processes share the work and all of them return the scores. Invalid
    input is rejected before scoring starts. A stopped run leaves its measurements
    (``*.partial.json``), from which the same call resumes.
    """
    # Made without a tokenizer first: unknown probes and bad options are refused before the model
    # is loaded.
    make_probe(job.probe, **job.probe_options)
    readers = {name: probes_with(option) for name, option in PROBE_OPTIONS.items()}
    check_task_reads(job, readers, "probe", [job.probe])
    controls = read_held_out(job.control_texts, job.n_control_texts)
    with alone_in(job.out, beside=True):
        _check_model(job.model)
        model, tokenizer = load_on_own_device(
            job.model, dtype=job.dtype, allow_bin=job.allow_bin, flag="--model"
        )
        _check_k(job, model)
        _check_reach(job, model)
        finished = _finished(job, model)
        if finished is not None:
            return finished
        scores = _measure(job, model, tokenizer, controls)
        # The measurements go last: without them, a stop in between would cost the whole scoring.
        on_main_process(lambda: scores.save(job.out))
        on_main_process(lambda: _draw(scores, job))
        on_main_process(lambda: job.partial_path.unlink(missing_ok=True))
    return scores


def _measure(
    job: ScoreJob,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    controls: Sequence[str],
) -> HeadScores:
    """Score the heads, after a line about what the model answers in each prompt format."""
    plain = make_probe(job.probe, **job.probe_options, tokenizer=tokenizer)
    probe = with_prompt_format(plain, job.prompt_format, tokenizer)
    _check_questions(job, probe, model, tokenizer)
    # Solved examples are as long as the question: from far away, they would take minutes.
    tried = (PLAIN, CHAT) if job.window else TRIED
    accuracies = agree_on(partial(accuracy_by_prompt_format, model, tokenizer, plain, tried))
    _log_accuracies(accuracies, plain.chance)
    if job.window:
        scores = _attributed(job, model, tokenizer, probe)
    else:
        scores = _ablated(job, model, tokenizer, probe, controls)
    provenance = {**scores.provenance, "prompt_formats": accuracies, "settings": job.settings}
    return replace(scores, provenance=provenance)


def _finished(job: ScoreJob, model: PreTrainedModel) -> HeadScores | None:
    """Return the scores that ``out`` holds. Raises ValueError if they are of another model or other settings."""
    if not agree_on(job.out.exists):
        return None
    scores = HeadScores.load(job.out)
    settings = scores.provenance.get("settings")
    changed = ["made by another command"]
    if isinstance(settings, dict):
        changed = differences(settings, job.settings)
    if scores.fingerprint != fingerprint(model):
        changed.append(f"of a model with other weights or settings ({scores.fingerprint[:16]})")
    if changed:
        raise ValueError(
            f"{job.out} holds other scores: {', '.join(changed)}; pass another --out, or delete it to score again."
        )
    log.info("%s holds these scores already; delete it to score again.", job.out)
    return scores


def _attributed(
    job: ScoreJob, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, probe: Probe
) -> HeadScores:
    return attribute_heads(
        confined(model, job.window, job.sinks),
        model,
        tokenizer,
        probe,
        n_examples=job.prompts_of(probe),
        batch_size=job.batch_size,
        min_accuracy=job.min_accuracy,
        resume_path=job.partial_path,
    )


def _ablated(
    job: ScoreJob,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    probe: Probe,
    controls: Sequence[str],
) -> HeadScores:
    return score_heads(
        model,
        tokenizer,
        probe,
        n_examples=job.prompts_of(probe),
        batch_size=job.batch_size,
        control_texts=controls,
        min_accuracy=job.min_accuracy,
        race_k=None if job.exhaustive else job.k,
        resume_path=job.partial_path,
    )


def _check_questions(
    job: ScoreJob, probe: Probe, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Raise ValueError for questions that the model cannot read."""
    questions = probe.examples(job.prompts_of(probe) * queries_of(probe))
    # A recurrent model has no longest context.
    check_answerable(questions, tokenizer, longest_context(model.config) or sys.maxsize)


def _check_model(name: str) -> None:
    """Raise ValueError for a model that cannot be a teacher; warn of heads that can be ranked but
    not replaced."""
    config, tokenizer = read_teacher(name, flag="--model")
    check_teacher(config, tokenizer, name=name)
    is_student = config.model_type == HybridConfig.model_type
    if is_student:
        return
    try:
        check_teacher(config, name=name, heads=True)
    except ValueError as error:
        if is_launched_main():
            log.warning(
                "note: heads of %s can be ranked, but no student can be made from it: %s",
                name,
                error,
            )


def _check_k(job: ScoreJob, model: PreTrainedModel) -> None:
    """Raise ValueError for more heads than the model has; the default may be more."""
    n_heads = sum(site.n_heads for site in head_sites(model))
    if job.k > n_heads and job.k != ScoreJob.k:
        raise ValueError(
            f"--k is {job.k}, and {job.model} has {n_heads} heads; pass at most {n_heads}."
        )


def _check_reach(job: ScoreJob, model: PreTrainedModel) -> None:
    """Raise ValueError for a distance or window beyond the model's context, before any text of this length is made."""
    longest = longest_context(model.config)
    # A word has a token or more.
    for name, size in {"--distance": job.distance or 0, "--window": job.window}.items():
        if longest is not None and size >= longest:
            raise ValueError(
                f"{name} is {size}, but {job.model} has a context of {longest} tokens; pass less than {longest}."
            )


def _log_accuracies(accuracies: Mapping[str, float], chance: float) -> None:
    shares = ", ".join(f"{name} {accuracy:.0%}" for name, accuracy in accuracies.items())
    log.info("accuracy on %d prompts: %s; guessing %.0f%%", N_TRIED, shares, 100 * chance)


def _draw(scores: HeadScores, job: ScoreJob) -> None:
    if has_matplotlib():
        score_map(scores, job.beside(".map.png"), kept=scores.ranking()[: job.k])
    else:
        log_no_figures()


def table(scores: HeadScores, k: int) -> str:
    """Format the top heads, the loss without each, and how reliable the order is."""
    ranking = scores.ranking()
    method = scores.provenance.get("method", "")
    loss = "share of what windows lose" if scores.is_additive else "lost without the head"
    lines = [
        f"{method}: {loss}, ± one standard error",
        text_table(score_table(scores, top=SHOWN, kept=ranking[:k])),
    ]
    for key, by in {"overlap": "", "overlap_by_logprob": " by log-probability"}.items():
        overlap = (scores.agreement or {}).get(key)
        if overlap:
            shares = [f"top {n} {share:.0%}" for n, share in overlap.items()]
            lines.append(f"split-half overlap{by}: {', '.join(shares)}")
    tie = scores.tie(min(k, len(ranking)))
    if tie is not None:
        lines.append(f"warning: {tie}")
    return "\n".join(lines)


def command(job: tyro.conf.OmitArgPrefixes[ScoreJob] = ScoreJob()) -> None:
    """Rank a model's attention heads by what their removal costs on a probe; writes scores.json and
    a figure.

    Resumes where it was stopped. `accelerate launch -m hybrid_distill score ...` splits the work
    between processes.
    """
    scores = run_score(job)
    if connect().is_main_process:
        print(f"{table(scores, job.k)}\nscores: {job.out}")
