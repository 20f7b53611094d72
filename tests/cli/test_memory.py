"""The memory table: both ends of what kept heads can share; tests/evaluation has real caches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from head_tables import some_scores

from hybrid_distill.cli.app import main
from hybrid_distill.cli.memory import MemoryJob, cache_sizes


def sizes(**options: Any) -> dict[tuple[str, int], int]:
    """Bytes after 10 tokens, by placement of the heads and state size."""
    table = cache_sizes(MemoryJob(lengths="10", **options))
    return {(row.kept, row.d_state): row.kv_bytes + row.ssm_bytes for row in table.itertuples()}


def test_heads_that_share_keys_and_values_cost_as_much_as_one() -> None:
    in_float32 = sizes(model="2x8x2x16", heads="4,all", d_state="4", dtype="float32")
    one_head = 2 * 16 * 10 * 4
    state = 12 * 16 * 4 * 4
    assert in_float32["4 heads, apart", 4] == 4 * one_head + state
    assert in_float32["4 heads, groups together", 4] == one_head + state
    assert in_float32["all heads", 0] == 4 * one_head
    in_int8 = sizes(model="2x8x2x16", heads="4,all", d_state="4", dtype="int8", state_dtype="int8")
    assert {setting: 4 * size for setting, size in in_int8.items()} == in_float32


def test_a_window_is_stored_for_kv_heads_that_no_kept_head_stores() -> None:
    options = {"model": "2x8x2x16", "heads": "4", "d_state": "0,4", "window": "0,5", "sinks": 2}
    table = cache_sizes(MemoryJob(lengths="10", **options))
    together = table[table.kept == "4 heads, groups together"]
    n_bytes = {(row.d_state, row.window): row.window_bytes for row in together.itertuples()}
    # One of four KV heads is stored whole; each slot of a layer has an index of 4 bytes.
    ring = 3 * 2 * 16 * (5 + 2) * 2 + 2 * (5 + 2) * 4
    assert n_bytes == {(4, 0): 0, (0, 5): ring, (4, 5): ring}


def test_both_ends_of_a_model_whose_layers_have_windows(family_model: Any, tmp_path: Path) -> None:
    """One of 3 layers with 4 KV heads sees everything; 4 heads cost most there, and least where windows are."""
    teacher = family_model("gemma3", sliding_window=6, sliding_window_pattern=2)
    teacher.config.save_pretrained(tmp_path)
    state = (24 - 4) * 8 * 4 * 4
    kv = 2 * 8 * 2
    assert sizes(model=str(tmp_path), heads="4,24", d_state="4") == {
        ("4 heads, apart", 4): 4 * kv * 10 + state,
        ("4 heads, groups together", 4): 2 * kv * 5 + state,
        ("all heads", 0): 4 * kv * (10 + 5 + 5),
    }


def test_scores_say_which_heads_share(tmp_path: Path) -> None:
    drops = [[0.9, 0.8, 0.0, 0.0], [0.0, 0.0, 0.7, 0.0]]
    path = tmp_path / "scores.json"
    some_scores(drops, drops, n_kv_heads=2).save(path)
    by_scores = sizes(model="2x4x2x8", heads="2,3", d_state="4", scores=path)
    assert by_scores["first 2", 4] == 1 * 2 * 8 * 10 * 2 + 6 * 8 * 4 * 4, "both in one group"
    assert by_scores["first 3", 4] == 2 * 2 * 8 * 10 * 2 + 5 * 8 * 4 * 4
    with pytest.raises(ValueError, match="another teacher"):
        sizes(heads="2", d_state="4", scores=path)


def test_the_command_prints_a_row_for_each_placement(capsys: pytest.CaptureFixture[str]) -> None:
    main(["memory", "--model", "tiny", "--heads", "6,all", "--lengths", "4096"])
    _, *rows = capsys.readouterr().out.splitlines()
    placements = ["6 heads, apart", "6 heads, groups together", "all heads"]
    for placement in placements:
        assert any(row.startswith(placement) for row in rows)
