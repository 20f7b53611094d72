"""Head ranking by restoration: the gain from adding one attention head to a student that has none.

Single-head ablation misses redundant heads and overrates heads that a recurrent head imitates well.
Restoration measures how much an aligned, fully recurrent student gains from each head (arXiv
2504.18574, for whole layers). Heads that work in pairs show a gain only together, so
`greedy_restoration` adds the best head, one at a time.

Shapes: B batch, L length, H query head, P head dim, E example.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..distributed import from_main
from ..io import Record
from ..model.cache import HybridCache
from ..model.layout import cache_among
from ..model.mixer import ROW_ARGUMENTS
from ..model.modeling_hybrid import HybridForCausalLM
from ..plan import HeadId
from ..probes import Probe
from ..probes.answering import ChoiceResult, answer_choices
from ..progress import track
from ..teacher import (
    HeadSite,
    attention_sites,
    check_exists,
    fingerprint,
    replaced_forward,
    without_cache,
)
from .head_scores import HeadScores, describe_run, heads_of
from .resume_log import ResumeLog


@contextmanager
def restore_heads(
    student: HybridForCausalLM, teacher: PreTrainedModel, heads: Iterable[HeadId]
) -> Iterator[None]:
    """Replace these heads of the student by the teacher's heads, run on the student's own inputs.

    Raises ValueError for a head that does not exist, and for a forward with a cache.
    """
    student_sites = attention_sites(student)
    teacher_sites = attention_sites(teacher)
    # The teacher's attention runs once for all restored heads of a layer.
    by_layer: dict[int, list[int]] = {}
    for layer, head in heads:
        check_exists(student, student_sites, HeadId(layer, head))
        by_layer.setdefault(layer, []).append(head)
    with ExitStack() as hooks:
        hooks.enter_context(without_cache(student))
        for layer, restored in by_layer.items():
            merge = partial(_replace_heads, restored)
            hooks.enter_context(merged_heads(student_sites[layer], teacher_sites[layer], merge))
        yield


def _replace_heads(heads: list[int], own_BLHP: Tensor, teacher_BLHP: Tensor) -> Tensor:
    """Return the student's output with the teacher's in place of some heads'."""
    # A copy: the mixer may still hold its own output.
    merged_BLHP = own_BLHP.clone()
    merged_BLHP[:, :, heads] = teacher_BLHP[:, :, heads]
    return merged_BLHP


@contextmanager
def merged_heads(
    student: HeadSite, teacher: HeadSite, merge: Callable[[Tensor, Tensor], Tensor]
) -> Iterator[None]:
    """Run the teacher's attention on the student's inputs before the student's mixer.

    ``merge`` maps the heads' outputs of student and teacher, both [B, L, H, P], to those that the student's output
    projection reads. Raises ValueError for a forward with a cache.
    """
    # The teacher's heads of the latest forward, alone.
    recorded: list[Tensor] = []

    def record(o_proj: nn.Module, args: tuple[Tensor, ...]) -> None:
        recorded[:] = [args[0].unflatten(-1, (teacher.n_heads, teacher.head_dim))]

    def run_teacher(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        # Teacher and student would both write their keys and values to it.
        if cache_among(kwargs) is not None:
            raise ValueError(
                "restored heads do not support a cache; call the student with use_cache=False."
            )
        with teacher.o_proj.register_forward_pre_hook(record):
            teacher.module(*args, **_teacher_arguments(kwargs))

    def merge_both(o_proj: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        own_BLHP = args[0].unflatten(-1, (student.n_heads, student.head_dim))
        merged_BLHP = merge(own_BLHP, recorded[0])
        return (merged_BLHP.flatten(-2), *args[1:])

    with (
        student.module.register_forward_pre_hook(run_teacher, with_kwargs=True),
        student.o_proj.register_forward_pre_hook(merge_both),
    ):
        yield


@contextmanager
def restore_layers(
    student: HybridForCausalLM, teacher: PreTrainedModel, layers: Iterable[int]
) -> Iterator[None]:
    """Run the teacher's attention, output projection included, instead of these layers' mixers.

    Supports a cache that is created and used inside the context.
    """
    # The mixer's forward is replaced, not the module: its weights stay in the student.
    mixers = student.mixers()
    teacher_sites = attention_sites(teacher)
    with ExitStack() as hooks:
        for layer in set(layers):
            forward = partial(_teacher_forward, teacher_sites[layer])
            hooks.enter_context(replaced_forward(mixers[layer], forward))
        yield


def _teacher_forward(
    site: HeadSite, hidden_states: Tensor, *args: object, **kwargs: object
) -> object:
    output = site.module(hidden_states, *args, **_teacher_arguments(kwargs))
    cache = cache_among(kwargs)
    if cache is not None:
        assert isinstance(cache, HybridCache)
        # A student's mixer counts its tokens; the teacher's attention only stores keys and values.
        cache.layer(site.layer).advance(hidden_states.shape[1])
    return output


def _teacher_arguments(kwargs: dict[str, object]) -> dict[str, object]:
    """Drop the arguments that only a student's mixer accepts."""
    return {name: value for name, value in kwargs.items() if name not in ROW_ARGUMENTS}


def score_restoration(
    student: HybridForCausalLM,
    teacher: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    probe: Probe,
    *,
    restored: Sequence[HeadId] = (),
    n_examples: int = 128,
    progress: bool = True,
) -> HeadScores:
    """Score heads by what an aligned, fully recurrent student gains from each.

    The student already has the ``restored`` heads, which get 0. ``accuracy_drop_LH`` is the gain in
    accuracy from the head, ``logprob_drop_LH`` the gain in the answer's log-probability, each with
    paired standard errors. Control drops are not measured.
    """
    examples = probe.examples(n_examples)
    sites = attention_sites(student)
    heads = heads_of(sites)

    def measure(heads: Sequence[HeadId]) -> ChoiceResult:
        with restore_heads(student, teacher, heads):
            return answer_choices(student, tokenizer, examples)

    baseline = measure(restored)
    results = dict.fromkeys(heads, baseline)
    candidates = [head for head in heads if head not in restored]
    for head in track(candidates, "restoring heads", hidden=not progress):
        results[head] = measure([*restored, head])
    right_HE = torch.stack([results[head].correct_E for head in heads]).double()
    logprob_HE = torch.stack([results[head].answer_logprob_E for head in heads])
    return HeadScores.from_differences(
        student,
        sites,
        heads,
        {
            "accuracy": right_HE - baseline.correct_E.double(),
            "logprob": logprob_HE - baseline.answer_logprob_E,
        },
        baseline={
            "chance": probe.chance,
            "accuracy": baseline.accuracy,
            "restored": [list(head) for head in restored],
        },
        provenance={
            "method": "single-head restoration",
            "probe": probe.describe(),
            "n_examples": n_examples,
            **describe_run(teacher),
        },
    )


def greedy_restoration(
    student: HybridForCausalLM,
    teacher: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    probe: Probe,
    k: int,
    *,
    n_examples: int = 128,
    progress: bool = True,
    resume_path: str | Path | None = None,
) -> list[HeadId]:
    """Choose ``k`` heads one by one, each with the largest gain given the heads chosen before it.

    The gain is in the answer's log-probability: accuracy stays flat until a whole circuit is in
    place. ``resume_path`` is a file that saves each chosen head. Every connected process must call
    this; the main one measures, and each gets the same heads.
    """
    provenance = {
        "method": "greedy restoration",
        "probe": probe.describe(),
        "n_examples": n_examples,
        "student": fingerprint(student),
        **describe_run(teacher),
    }
    resume_log = ResumeLog(resume_path, provenance)
    chosen: list[HeadId] = []

    def choose_next() -> Record:
        scores = score_restoration(
            student,
            teacher,
            tokenizer,
            probe,
            restored=chosen,
            n_examples=n_examples,
            progress=progress,
        )
        # Heads already chosen have a gain of 0, which may be the largest.
        gain_LH = scores.logprob_drop_LH.clone()
        for head in chosen:
            gain_LH[head] = -torch.inf
        best = int(gain_LH.argmax())
        return HeadId(*divmod(best, scores.n_heads))._asdict()

    while len(chosen) < k:
        step = resume_log.next(lambda: from_main(choose_next))
        chosen.append(HeadId(**step))
    return chosen
