"""The memory table: both ends of what kept heads can share; tests/evaluation has real caches."""

from __future__ import annotations

import csv

import pytest
from head_tables import some_scores

from hybrid_distill.cli.app import main
from hybrid_distill.cli.memory import MemoryJob, cache_sizes


def sizes(**options) -> dict[tuple[str, int], int]:
    found = cache_sizes(MemoryJob(lengths="10", **options)).itertuples()
    return {(row.kept, row.d_state): row.kv_bytes + row.ssm_bytes for row in found}


def test_heads_that_share_keys_and_values_cost_as_much_as_one() -> None:
    found = sizes(model="2x8x2x16", heads="4,all", d_state="3", dtype="float32")
    state = 12 * 16 * 3 * 4
    assert found["4 heads, apart", 3] == 4 * 2 * 16 * 10 * 4 + state
    assert found["4 heads, groups together", 3] == 1 * 2 * 16 * 10 * 4 + state
    assert found["all heads", 0] == 4 * 2 * 16 * 10 * 4
    half = sizes(model="2x8x2x16", heads="4,all", d_state="3", dtype="int8", state_dtype="int8")
    assert [4 * size for size in half.values()] == [*found.values()]


def test_both_ends_of_a_model_whose_layers_have_windows(family_model, tmp_path) -> None:
    """One of 3 layers with 4 KV heads sees everything; 4 heads cost most there, and least where windows are."""
    family_model("gemma3", sliding_window=6, sliding_window_pattern=2).config.save_pretrained(tmp_path)
    state, kv = (24 - 4) * 8 * 3 * 4, 2 * 8 * 2
    found = sizes(model=str(tmp_path), heads="4,24", d_state="3")
    assert found == {
        ("4 heads, apart", 3): 4 * kv * 10 + state,
        ("4 heads, groups together", 3): 2 * kv * 5 + state,
        ("all heads", 0): 4 * kv * (10 + 5 + 5),
    }


def test_scores_say_which_heads_share(tmp_path) -> None:
    drops = [[0.9, 0.8, 0.0, 0.0], [0.0, 0.0, 0.7, 0.0]]
    some_scores(drops, drops, n_kv_heads=2).save(tmp_path / "scores.json")
    found = sizes(model="2x4x2x8", heads="2,3", d_state="1", scores=tmp_path / "scores.json")
    assert found["first 2", 1] == 1 * 2 * 8 * 10 * 2 + 6 * 8 * 4, "both in one group"
    assert found["first 3", 1] == 2 * 2 * 8 * 10 * 2 + 5 * 8 * 4
    with pytest.raises(ValueError, match="made for another teacher"):
        sizes(heads="2", d_state="1", scores=tmp_path / "scores.json")


def test_the_command_prints_and_writes_it(tmp_path, capsys) -> None:
    main(["memory", "--model", "tiny", "--heads", "6,all", "--lengths", "4096", "--csv", str(tmp_path / "t.csv")])
    assert "6 layers, 8 heads, 4 KV heads" in capsys.readouterr().out
    written = list(csv.DictReader((tmp_path / "t.csv").open()))
    assert {row["kept"] for row in written} == {"6 heads, apart", "6 heads, groups together", "all heads"}
