"""Options of a run that depend on each other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from messages import naming

from hybrid_distill.config import (
    PlanConfig,
    RunConfig,
    ScoringConfig,
    StudentConfig,
    from_record,
    to_json,
)
from hybrid_distill.data import DataConfig
from hybrid_distill.dependent_options import check_read
from hybrid_distill.train.config import Align, Distill, TeacherConfig
from hybrid_distill.validation import number_of_tokens

DATA = DataConfig(seq_len=512)


def run(*stages: Align | Distill, **options: object) -> RunConfig:
    return RunConfig(data=DATA, stages=stages, **options)  # pyright: ignore[reportArgumentType]


def steps(config: RunConfig) -> list[int]:
    return [stage.steps for stage in config.stages]


# Tokens of a step: a batch of 4 rows, and one of 8.
OF_4_ROWS = 4 * DATA.seq_len
OF_8_ROWS = 8 * DATA.seq_len


def test_tokens_set_the_steps_of_both_kinds_of_stages() -> None:
    config = run(Align(batch_size=4), Distill(batch_size=8), tokens="3M", align_share=0.1)
    assert steps(config.resolved()) == [round(3e5 / OF_4_ROWS), round(2.7e6 / OF_8_ROWS)]

    # Until the run starts, changes count: without alignment, the other stage gets everything.
    without_alignment = replace(config, stages=config.student_stages)
    assert steps(without_alignment.resolved()) == [round(3e6 / OF_8_ROWS)]


def test_tokens_for_a_run_that_trains_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match=naming("3M", "--stages", "--tokens")):
        run(tokens="3M").resolved()


def test_steps_from_tokens_are_final() -> None:
    """Parts of a started run, such as an alignment in a folder of its own, keep their steps."""
    stages = (Align(batch_size=4), Distill(steps=1000), Distill(name="post", steps=700))
    started = run(*stages, tokens="363K").resolved()

    read_back = from_record(to_json(started))
    assert read_back.resolved() == started

    alignment_alone = replace(started, stages=started.head_stages)
    assert alignment_alone.resolved().stages == started.head_stages


@pytest.mark.parametrize(
    ("is_native", "given", "expected"),
    [
        (True, ("auto", "auto"), ("bfloat16", "bf16")),
        (False, ("auto", "auto"), ("float32", "fp32")),
        (True, ("float32", "auto"), ("float32", "bf16")),
        # float32 stages refuse a teacher in half precision.
        (False, ("bfloat16", "auto"), ("bfloat16", "bf16")),
        (True, ("auto", "fp32"), ("bfloat16", "fp32")),
        (False, ("auto", "bf16"), ("float32", "bf16")),
    ],
)
def test_auto_stands_for_what_the_device_computes_fast_in(
    set_cpu_bf16, is_native: bool, given: tuple[Any, Any], expected: tuple[str, str]
) -> None:
    set_cpu_bf16(is_native)
    dtype, precision = given
    config = run(Distill(precision=precision), teacher=TeacherConfig(dtype=dtype)).resolved()
    assert (config.teacher.dtype, config.stages[0].precision) == expected
    assert config.resolved() == config


def test_stages_of_one_kind_share_in_proportion() -> None:
    """Each has 1.2 and 0.4 million tokens of its own: three to one."""
    short = Distill(steps=300, batch_size=4)
    long = Distill(name="long", steps=100, batch_size=1, seq_len=2048)
    config = run(short, long, tokens="4M")
    assert steps(config.resolved()) == [round(3e6 / OF_4_ROWS), round(1e6 / 2048)]


@pytest.mark.parametrize(
    "stage", [Align(batch_size=4), Distill(batch_size=4)], ids=["align", "distill"]
)
def test_stages_of_one_kind_alone_get_all_tokens(stage: Align | Distill) -> None:
    config = run(stage, tokens="2M")
    assert steps(config.resolved()) == [round(2e6 / OF_4_ROWS)]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"tokens": "many"}, "tokens"),
        ({"tokens": "0"}, "tokens"),
        ({"tokens": "4K"}, "align"),
        ({"tokens": "3M", "align_share": 1.5}, "align_share"),
    ],
    ids=["not a number", "no tokens", "less than a step", "more than all"],
)
def test_bad_budgets_are_refused(options: dict[str, object], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        config = run(Align(batch_size=4), Distill(batch_size=4), **options)
        config.resolved()


@pytest.mark.parametrize(("text", "number"), [("20000", 20000), ("20K", 20000), ("2.5m", 2500000)])
def test_numbers_of_tokens(text: str, number: int) -> None:
    assert number_of_tokens("tokens", text) == number


@pytest.mark.parametrize(
    "options",
    [
        {"window": 2, "sinks": 3},
        {"d_state": 0},
        {"window": 4, "recurrence": "mamba2-stock"},
        {"window": -1},
        {"d_state": 3},
        {"d_state": 129},
        {"conv_width": 17},
    ],
)
def test_bad_windows_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="student"):
        StudentConfig(**options)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("name", "options", "reader"),
    [
        ("align_share", {"align_share": 0.3}, {"tokens": "3M"}),
        ("context", {"context": 512}, {"cache": "1MB"}),
        (
            "plan.pairs",
            {"plan": PlanConfig(pairs=((5, 0),))},
            {"plan": PlanConfig("pairs", pairs=((5, 0),))},
        ),
        (
            "plan.k",
            {"plan": PlanConfig("none", k=3)},
            {"plan": PlanConfig("random", k=3)},
        ),
        (
            "plan.unit",
            {"plan": PlanConfig("all", unit="layer")},
            {"plan": PlanConfig("random", unit="layer")},
        ),
        (
            "plan.seed",
            {"plan": PlanConfig(seed=3)},
            {"plan": PlanConfig("random", seed=3)},
        ),
        (
            "scoring.method",
            {"scoring": ScoringConfig("ablation", file=Path("scores.json"))},
            {"scoring": ScoringConfig("ablation")},
        ),
        (
            "scoring.n_examples",
            {"scoring": ScoringConfig(n_examples=8, file=Path("scores.json"))},
            {"scoring": ScoringConfig(n_examples=8)},
        ),
        (
            "scoring.n_queries",
            {"scoring": ScoringConfig(n_queries=2, file=Path("scores.json"))},
            {"plan": PlanConfig("restoration"), "stages": (Align(), Distill())},
        ),
        (
            "scoring.restoration_examples",
            {"scoring": ScoringConfig(restoration_examples=8)},
            {"plan": PlanConfig("restoration"), "stages": (Align(), Distill())},
        ),
        (
            "distill.beta",
            {"stages": (Distill(beta=0.3),)},
            {"stages": (Distill(beta=0.3, kind="jsd"),)},
        ),
    ],
)
def test_an_option_is_refused_without_the_one_that_makes_it_read(
    name: str, options: dict[str, Any], reader: dict[str, Any]
) -> None:
    default = run(Distill())
    unread = replace(default, **options)
    with pytest.raises(ValueError, match=naming(name)):
        check_read(unread, default)

    read = replace(default, **{**options, **reader})
    check_read(read, default)

    # A recipe may set it for a flag that comes later.
    check_read(unread, unread)


def test_a_number_of_units_may_stand_beside_what_says_the_same_or_decides_it() -> None:
    default = run(Distill())
    check_read(replace(default, plan=PlanConfig("none", k=0)), default)
    of_cache = PlanConfig("layers", k=3, unit="kv-group", layers=(1,))
    check_read(replace(default, plan=of_cache, cache="1MB"), default)


def test_restoration_chooses_single_heads() -> None:
    with pytest.raises(ValueError, match=naming("plan.unit", "'layer'", "--plan.unit head")):
        PlanConfig("restoration", unit="layer")


@pytest.mark.parametrize(
    ("config", "options", "facts"),
    [
        (RunConfig, {"out": "runs/x"}, ["out", "Path"]),
        (RunConfig, {"teacher": "tiny"}, ["teacher", "TeacherConfig"]),
        (RunConfig, {"export": "yes"}, ["export", "bool"]),
        # Read letter by letter otherwise.
        (DataConfig, {"sources": "tiny"}, ["data.sources", "tuple"]),
        (DataConfig, {"sources": ["tiny"]}, ["data.sources", "tuple"]),
        (PlanConfig, {"file": "plan.json"}, ["plan.file", "Path"]),
    ],
)
def test_values_of_another_type_are_refused(config: type, options: dict, facts: list[str]) -> None:
    """A config in Python is not read by a command line, which would convert them."""
    with pytest.raises(ValueError, match=naming(*facts)):
        config(**options)
