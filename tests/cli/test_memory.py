"""The memory table: both ends of what kept heads can share; tests/evaluation has real caches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from head_tables import some_scores
from messages import naming

from hybrid_distill.cli.app import main
from hybrid_distill.cli.memory import MemoryJob, cache_sizes
from hybrid_distill.plan import Shape

LENGTH = 10
"""Tokens in the cache."""
SHAPE = "2x8x2x16"
"""Layers, heads of a layer, KV heads of a layer, head size: four KV heads in all."""
D_STATE = 4
FLOAT32 = 4
BFLOAT16 = 2
KEY_AND_VALUE = 2


def sizes(**options: Any) -> dict[tuple[str, int], int]:
    """Bytes of keys, values and states, by placement of the heads and state size."""
    job = MemoryJob(lengths=str(LENGTH), **options)
    by_setting: dict[tuple[str, int], int] = {}
    for row in cache_sizes(job).itertuples():
        by_setting[row.kept, row.d_state] = row.kv_bytes + row.ssm_bytes
    return by_setting


def kv_bytes(n_kv_heads: int, head_dim: int, dtype: int, length: int = LENGTH) -> int:
    return n_kv_heads * KEY_AND_VALUE * head_dim * length * dtype


def state_bytes(n_heads: int, head_dim: int) -> int:
    """Bytes of the float32 states of replaced heads."""
    return n_heads * head_dim * D_STATE * FLOAT32


def test_heads_that_share_keys_and_values_cost_as_much_as_one() -> None:
    """Four of 16 heads are kept, each with its own KV head or all with one."""
    in_float32 = sizes(model=SHAPE, heads="4,all", d_state="4", dtype="float32")

    one_head = kv_bytes(1, 16, FLOAT32)
    states = state_bytes(16 - 4, 16)
    assert in_float32["4 heads, apart", D_STATE] == 4 * one_head + states
    assert in_float32["4 heads, groups together", D_STATE] == one_head + states
    assert in_float32["all heads", 0] == 4 * one_head

    in_int8 = sizes(
        model=SHAPE,
        heads="4,all",
        d_state="4",
        dtype="int8",
        state_dtype="int8",
    )
    assert {setting: 4 * size for setting, size in in_int8.items()} == in_float32


def test_a_window_is_stored_for_kv_heads_that_no_kept_head_stores() -> None:
    job = MemoryJob(
        model=SHAPE,
        heads="4",
        d_state="0,4",
        window="0,5",
        sinks=2,
        lengths=str(LENGTH),
    )
    table = cache_sizes(job)
    together = table[table.kept == "4 heads, groups together"]
    window_bytes = {(row.d_state, row.window): row.window_bytes for row in together.itertuples()}

    # One of four KV heads is stored whole; each slot of a layer has an index of 4 bytes.
    n_slots = 5 + 2
    indices = 2 * n_slots * 4
    ring = kv_bytes(3, 16, BFLOAT16, length=n_slots) + indices
    assert window_bytes == {(4, 0): 0, (0, 5): ring, (4, 5): ring}


def test_both_ends_of_a_model_whose_layers_have_windows(family_model: Any, tmp_path: Path) -> None:
    """One of 3 layers with 4 KV heads sees everything; 4 heads cost most there, and least where windows are."""
    teacher = family_model("gemma3", sliding_window=6, sliding_window_pattern=2)
    teacher.config.save_pretrained(tmp_path)

    measured = sizes(model=str(tmp_path), heads="4,24", d_state="4")

    # A window of 6 tokens caches 5: the sixth is the one being read.
    in_window = 5
    states = state_bytes(24 - 4, 8)
    full_layer = kv_bytes(4, 8, BFLOAT16)
    window_layer = kv_bytes(4, 8, BFLOAT16, length=in_window)
    assert measured == {
        ("4 heads, apart", D_STATE): full_layer + states,
        ("4 heads, groups together", D_STATE): kv_bytes(2, 8, BFLOAT16, in_window) + states,
        ("all heads", 0): full_layer + 2 * window_layer,
    }


def test_scores_say_which_heads_share(tmp_path: Path) -> None:
    drops = [[0.9, 0.8, 0.0, 0.0], [0.0, 0.0, 0.7, 0.0]]
    path = tmp_path / "scores.json"
    some_scores(drops, drops, n_kv_heads=2).save(path)

    by_scores = sizes(model="2x4x2x8", heads="2,3", d_state="4", scores=path)

    both_in_one_group = kv_bytes(1, 8, BFLOAT16) + state_bytes(8 - 2, 8)
    the_third_in_another = kv_bytes(2, 8, BFLOAT16) + state_bytes(8 - 3, 8)
    assert by_scores["first 2", D_STATE] == both_in_one_group
    assert by_scores["first 3", D_STATE] == the_third_in_another

    with pytest.raises(ValueError, match=naming(Shape(2, 4, 2))):
        sizes(heads="2", d_state="4", scores=path)


def test_the_command_prints_a_row_for_each_placement(capsys: pytest.CaptureFixture[str]) -> None:
    main(["memory", "--model", "tiny", "--heads", "6,all", "--lengths", "4096"])
    _, *rows = capsys.readouterr().out.splitlines()
    placements = ["6 heads, apart", "6 heads, groups together", "all heads"]
    for placement in placements:
        assert any(row.startswith(placement) for row in rows)
