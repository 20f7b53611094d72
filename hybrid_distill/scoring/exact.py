"""Rank attention heads: zero one head at a time, see what the model can no longer do, put the head back.

The drop in accuracy on a retrieval probe is a head's score (arXiv 2504.18574); the log-probability of the
answer orders heads where accuracy does not, and the loss on plain text tells heads that matter for all tasks.

Shapes: L layer, H query head, E example.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..distill.checkpoint import write_json
from ..plan import HeadId
from ..probes import Example, Probe, check_counts
from ..probes.answering import ChoiceBatch, answer_generation, choice_batches, choice_result, forward
from ..probes.plain_text import TextBatch, text_batches
from ..teacher import ablate_heads, attention_sites, eval_mode, record_block, replay_blocks, text_config
from .artefact import DROPS, ERRORS, HeadScores, describe_run, tensor_or_none

PARTIAL_FORMAT = "hybrid-distill/head-scores-partial/1"

Row = dict[str, list[float]]  # one layer of each table

log = logging.getLogger(__name__)


def score_heads(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    probe: Probe,
    *,
    n_examples: int = 128,
    batch_size: int = 32,
    control_texts: Sequence[str] | None = None,
    control_tokens: int = 256,
    min_accuracy: float = 0.5,
    by: Literal["choice", "generation"] = "choice",
    progress: bool = True,
    resume_path: str | Path | None = None,
) -> HeadScores:
    """Exact single-head zero ablation of every head of an unmodified Hugging Face decoder.

    ``by`` says how accuracy is read; the log-probability is always the answer's (`answer_choices`). The first
    ``control_tokens`` tokens of each control text make the control loss. With ``resume_path``, scores are
    saved there after each layer, and layers found there are not scored again, provided that everything they
    depend on is the same.

    Raises ValueError when the model, with all its heads, is right less often than ``min_accuracy``: what it
    cannot do with a head it cannot lose without it.
    """
    check_counts(n_examples=n_examples, batch_size=batch_size)
    if by not in ("choice", "generation"):
        raise ValueError(f"by is {by!r}; accuracy is read by 'choice' or by 'generation'.")
    examples = probe.examples(n_examples)
    texts = list(control_texts or [])
    task = _Task(
        model,
        tokenizer,
        examples,
        choices=list(choice_batches(tokenizer, examples, batch_size=batch_size, device=model.device)),
        control=list(text_batches(model, tokenizer, texts, max_tokens=control_tokens, batch_size=batch_size)),
        generates=by == "generation",
    )
    control = {"texts": len(texts), "tokens": control_tokens, "sha256": _hash(texts)} if texts else None
    provenance = {
        "method": "single-head zero ablation",
        "probe": probe.describe(),
        "n_examples": n_examples,
        "by": by,
        "control": control,
        **describe_run(model),
    }
    with eval_mode(model):
        baseline = task.measure()
        _refuse_below(min_accuracy, baseline, probe, by)
        rows = _score_layers(task, baseline, provenance, resume_path, progress)
    tables: dict[str, Any] = {
        name: tensor_or_none([row[name] for row in rows]) if name in rows[0] else None for name in (*DROPS, *ERRORS)
    }
    return HeadScores(
        attention_sites(model)[0].n_kv_heads,
        **tables,
        baseline={"chance": probe.chance, **baseline.summary()},
        provenance=provenance,
    )


def _hash(texts: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def _refuse_below(min_accuracy: float, baseline: _Measured, probe: Probe, by: str) -> None:
    accuracy = baseline.correct_E.mean().item()
    if accuracy < min_accuracy:
        settings = ", ".join(f"{name} {value}" for name, value in probe.describe().items())
        raise ValueError(
            f"this teacher answers {accuracy:.1%} of the probe ({settings}) by {by}; guessing gives "
            f"{probe.chance:.1%}, scoring asks for {min_accuracy:.1%}: what is not there cannot be lost. "
            "Take an easier dictionary (fewer pairs), another teacher, or lower --min-accuracy."
        )


@dataclass(frozen=True)
class _Measured:
    """What the model does on every example, and its loss on every control text."""

    correct_E: Tensor
    logprob_E: Tensor
    control_E: Tensor

    def summary(self) -> dict[str, Any]:
        loss = self.control_E.mean().item() if len(self.control_E) else None
        accuracy, logprob = self.correct_E.mean().item(), self.logprob_E.mean().item()
        return {"accuracy": accuracy, "answer_logprob": logprob, "control_loss": loss}

    def lost_in(self, ablated: _Measured) -> dict[str, float]:
        """One head's entry in each table."""
        entries = {}
        for name, difference_E in (
            ("accuracy", self.correct_E - ablated.correct_E),
            ("logprob", self.logprob_E - ablated.logprob_E),
            ("control", ablated.control_E - self.control_E),
        ):
            if len(difference_E):
                n = len(difference_E)
                entries[f"{name}_drop_LH"] = difference_E.sum().item() / n
                spread = difference_E.std(correction=min(1, n - 1)).item()
                entries[f"{name}_se_LH"] = spread / math.sqrt(n)
        return entries


@dataclass
class _Task:
    """The batches every ablated model is run on."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    examples: Sequence[Example]
    choices: list[ChoiceBatch]
    control: list[TextBatch]
    generates: bool

    def measure(self, shortcut: _Shortcut | None = None) -> _Measured:
        shortcut = shortcut or _Shortcut(self)
        logprob_EC: list[list[float]] = []
        for batch in self.choices:
            with shortcut.taken(batch):
                logprob_EC += batch.logprobs(self.model)
        chosen = choice_result(logprob_EC, [e.answer for batch in self.choices for e in batch.encoded])
        correct_E = chosen.correct_E
        if self.generates:
            batch_size = len(self.choices[0])
            correct_E = answer_generation(self.model, self.tokenizer, self.examples, batch_size=batch_size)
        control = [torch.zeros(0, dtype=torch.float64)]
        for batch in self.control:
            with shortcut.taken(batch):
                control.append(batch.text_losses(self.model).cpu())
        return _Measured(correct_E.double(), chosen.answer_logprob_E, torch.cat(control))


class _Shortcut:
    """Without a head in layer l the layers below l do what they always do: they need not run again.

    Keeps what one layer returned for every batch; a forward may then start above that layer.
    """

    def __init__(self, task: _Task) -> None:
        self.task = task
        self.layer = -1
        self.outputs: dict[ChoiceBatch | TextBatch, Any] = {}

    @contextmanager
    def taken(self, batch: ChoiceBatch | TextBatch) -> Iterator[None]:
        """Forwards on this batch start above the recorded layer; from the bottom if there is none."""
        if batch in self.outputs:
            with replay_blocks(self.task.model, self.layer, self.outputs[batch]):
                yield
        else:
            yield

    def move_to(self, layer: int) -> None:
        """Record what ``layer`` returns. Batches that extend a cache are left out: it needs all layers."""
        outputs: dict[ChoiceBatch | TextBatch, Any] = {}
        for batch in [*self.task.choices, *self.task.control]:
            if layer >= 0 and not batch.needs_cache:
                with self.taken(batch), record_block(self.task.model, layer) as returned:
                    forward(self.task.model, batch.input_ids_BL, batch.mask_BL, logits_to_keep=1)
                outputs[batch] = returned[0]
        self.layer, self.outputs = layer, outputs

    def changes_nothing(self, baseline: _Measured) -> bool:
        """Whether this model's layers pass on nothing but their output, so that the shortcut is exact."""
        self.move_to(text_config(self.task.model).num_hidden_layers - 2)
        measured = self.task.measure(self)
        self.move_to(-1)
        pairs = ((measured.logprob_E, baseline.logprob_E), (measured.control_E, baseline.control_E))
        return all(torch.allclose(a, b, atol=1e-4) for a, b in pairs)


def _score_layers(
    task: _Task,
    baseline: _Measured,
    provenance: dict[str, Any],
    resume_path: str | Path | None,
    progress: bool,
) -> list[Row]:
    """Each layer's entries, bottom to top, after those that an interrupted run has left."""
    sites = attention_sites(task.model)
    rows = _read_partial(resume_path, provenance) if resume_path else []
    shortcut = _Shortcut(task)
    exact = shortcut.changes_nothing(baseline)
    if not exact:
        log.warning(
            "layers of %s share more than their outputs: every forward is run in full",
            task.model.name_or_path,
        )
    total, done = sum(site.n_heads for site in sites), sum(site.n_heads for site in sites[: len(rows)])
    with tqdm(total=total, initial=done, desc="ablating heads", unit="head", disable=not progress) as bar:
        for site in sites[len(rows) :]:
            if exact:
                shortcut.move_to(site.layer - 1)
            row: Row = {}
            for head in range(site.n_heads):
                with ablate_heads(task.model, [HeadId(site.layer, head)]):
                    lost = baseline.lost_in(task.measure(shortcut))
                for name, value in lost.items():
                    row.setdefault(name, []).append(value)
                bar.update()
            rows.append(row)
            if resume_path:
                partial = {"format": PARTIAL_FORMAT, "provenance": provenance, "rows": rows}
                write_json(Path(resume_path), partial)
    return rows


def _read_partial(path: str | Path, provenance: dict[str, Any]) -> list[Row]:
    """Layers that an earlier run of the very same task has scored; none without such a file."""
    if not Path(path).exists():
        return []
    try:
        record = json.loads(Path(path).read_text())
        if record["format"] == PARTIAL_FORMAT and _undated(record["provenance"]) == _undated(provenance):
            return record["rows"]
        reason = "they are of another model, probe or version"
    except (KeyError, TypeError, ValueError) as error:
        reason = f"they cannot be read: {error}"
    log.warning("partial scores in %s are not used (%s); scoring starts again", path, reason)
    return []


def _undated(provenance: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in provenance.items() if name != "date"}
