"""The dial: a size of the cache decides how many KV groups stay attention, and how far the other heads see."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random

import pytest
import torch
from conftest import make_family_model
from messages import has_facts
from transformers import LlamaConfig

from hybrid_distill.cli.app import main
from hybrid_distill.config import PlanConfig, RunConfig, StudentConfig
from hybrid_distill.data import DataConfig
from hybrid_distill.model.field_rules import RECURRENCES
from hybrid_distill.pipeline import RunInputs
from hybrid_distill.pipeline.budget import (
    SINKS,
    SMALLEST_WINDOW,
    allowed_bytes,
    student_cache,
    within_cache,
)
from hybrid_distill.plan import HeadPlan
from hybrid_distill.student.build import build_student
from hybrid_distill.train.config import Align, Distill

CONTEXT = 256


@pytest.fixture(scope="module")
def teacher():
    # Grouped queries, and in every second layer a sliding window of its own.
    return make_family_model("olmo3", sliding_window=64)


def run_of(**options) -> RunConfig:
    return RunConfig(data=DataConfig(seq_len=128), context=CONTEXT, **options)


def stored_bytes(student) -> int:
    """Bytes in the cache of a student that has read `CONTEXT` tokens, but for the convolutions'."""
    cache = student.new_cache()
    ids_1L = torch.randint(5, 90, (1, CONTEXT))
    with torch.no_grad():
        student.eval()(input_ids=ids_1L, cache=cache)
    n_bytes = cache.nbytes()
    return sum(n_bytes.values()) - n_bytes["conv"]


@pytest.mark.parametrize("share", [12, 30, 60, 90])
def test_a_student_holds_no_more_than_the_cache_that_was_asked_for(teacher, share: int) -> None:
    """Counted in tensors of a real cache; one more KV group would be too much."""
    run = within_cache(run_of(cache=f"{share}%"), teacher.config)

    # The layer in the middle is the one that sees everything.
    heads = list(product((1, 0, 2), range(8)))
    group_size = 2

    def bytes_with(n_groups: int) -> int:
        plan = HeadPlan.from_pairs(teacher, heads[: group_size * n_groups])
        student, _ = build_student(teacher, plan, init="random", **run.student.head_options)
        return stored_bytes(student)

    everything_kept, _ = build_student(teacher, HeadPlan.all(teacher), d_state=4, init="random")
    allowed = share / 100 * stored_bytes(everything_kept)
    assert bytes_with(run.plan.k) <= allowed < bytes_with(run.plan.k + 1)
    assert run.plan.unit == "kv-group"
    assert run.student.d_state == 0
    assert run.student.window >= SMALLEST_WINDOW
    assert run.student.sinks == SINKS


@pytest.mark.parametrize(
    ("n_layers", "n_heads", "n_kv_heads", "share"),
    [
        (30, 9, 3, 48),
        (30, 9, 3, 74),
        (24, 14, 2, 22),
        (24, 14, 2, 61),
        (6, 8, 4, 25),
        (6, 8, 1, 50),
    ],
)
def test_wherever_the_groups_are_they_fit(
    n_layers: int, n_heads: int, n_kv_heads: int, share: int
) -> None:
    """Which groups are kept is known after scoring only, which must not end in a refusal."""
    length = 4096
    teacher = LlamaConfig(
        num_hidden_layers=n_layers,
        num_attention_heads=n_heads,
        num_key_value_heads=n_kv_heads,
        hidden_size=64 * n_heads,
    )
    config = RunConfig(data=DataConfig(seq_len=512), context=length, cache=f"{share}%")

    run = within_cache(config, teacher)

    plans = [HeadPlan.spread(teacher, run.plan.k, "kv-group")]
    group_size = n_heads // n_kv_heads
    groups = list(product(range(n_layers), range(n_kv_heads)))
    for seed in range(8):
        heads: list[tuple[int, int]] = []
        for layer, group in Random(seed).sample(groups, run.plan.k):
            first = group * group_size
            heads += [(layer, head) for head in range(first, first + group_size)]
        plans.append(HeadPlan.from_pairs(teacher, heads))
    for plan in plans:
        assert student_cache(plan, teacher, run.student, length) <= allowed_bytes(run, teacher)


def test_states_and_sinks_take_their_part_of_the_cache(teacher) -> None:
    run = within_cache(run_of(cache="60%"), teacher.config, d_state=4, sinks=12)

    assert (run.student.d_state, run.student.sinks) == (4, 12)
    assert run.student.window >= 12
    plan = HeadPlan.spread(teacher, run.plan.k, "kv-group")
    stored = student_cache(plan, teacher.config, run.student, CONTEXT)
    assert stored <= allowed_bytes(run, teacher.config)


def test_more_cache_never_keeps_less(teacher) -> None:
    runs = [within_cache(run_of(cache=f"{share}%"), teacher.config) for share in range(10, 100, 5)]
    kept = [run.plan.k for run in runs]
    assert kept == sorted(kept)
    assert kept[0] < kept[-1]


@pytest.mark.parametrize("megabytes", [1, 3, 9.5, 15.9, 30])
def test_nothing_of_the_cache_is_left_over(megabytes: float) -> None:
    """Bytes that do not suffice for another KV group make the windows longer."""
    length = 4096
    smollm2 = LlamaConfig(
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        hidden_size=576,
    )
    config = RunConfig(
        data=DataConfig(seq_len=2048),
        context=length,
        stages=(),
        cache=f"{megabytes}MB",
    )

    run = within_cache(config, smollm2)

    spread = HeadPlan.spread(smollm2, run.plan.k, "kv-group")
    longer = replace(run.student, window=run.student.window + 1)
    stored = student_cache(spread, smollm2, run.student, length)
    stored_by_longer = student_cache(spread, smollm2, longer, length)
    assert stored <= megabytes * 1e6 < stored_by_longer


def test_windows_end_within_the_rows_that_train(teacher) -> None:
    """Else no row would have anything that only a kept head sees."""
    run = replace(run_of(cache="90%"), data=DataConfig(seq_len=20))
    assert within_cache(run, teacher.config).student.window == 10


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"cache": "1KB"}, "'1KB'"),
        ({"cache": "100%"}, "'100%'"),
        ({"cache": "15"}, "'15'"),
        ({"cache": "0MB"}, "'0MB'"),
        ({"cache": "much"}, "'much'"),
    ],
)
def test_a_cache_that_no_student_has_is_refused(teacher, options, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        within_cache(run_of(**options), teacher.config)


def test_a_plan_beyond_the_cache_is_refused_before_anything_is_computed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", "tiny", "--cache", "1MB", "--plan.k", "9", "--out", str(tmp_path / "run")])
    assert ended.value.code == 2
    assert "'1MB'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_flags_stand_over_what_the_cache_decides(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["run", "tiny", "--cache", "1MB", "--dry-run"]

    def line_of_heads() -> str:
        (line,) = [line for line in text.splitlines() if "kv-group" in line]
        return line

    main(command)
    text = capsys.readouterr().out
    assert has_facts(line_of_heads(), 3)
    # Replaced heads get windows alone.
    assert not any(has_facts(line_of_heads(), recurrence) for recurrence in RECURRENCES)

    main([*command, "--plan.k", "2", "--student.d-state", "8", "--align.steps", "7"])
    text = capsys.readouterr().out
    assert has_facts(line_of_heads(), 2, 8, "gdn")
    assert has_facts(text, "7 steps")


def test_stages_without_anything_to_align_are_left_out() -> None:
    stages = (Align(), Align(name="mixers", train="mixer"), Distill())
    windows = StudentConfig(d_state=0, window=8)
    run = RunConfig(stages=stages, student=windows, plan=PlanConfig(k=2), tokens="10M")

    steps = {stage.name: stage.steps for stage in RunInputs(run).config.stages}

    assert list(steps) == ["mixers", "distill"]
    # Their share of the tokens goes to the others.
    all_steps = 1e7 / run.tokens_per_step(stages[0])
    assert steps["mixers"] + steps["distill"] == pytest.approx(all_steps, abs=2)
