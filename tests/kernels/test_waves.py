"""Rows are cut so that the device is full: waves of programs times the chunks of each."""

from __future__ import annotations

import itertools
import math

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from hybrid_kernels.ssd_tiles import MIN_CHUNKS_PER_SEGMENT, segments

# Programs at once, two on each multiprocessor.
H100 = 2 * 132
A100 = 2 * 108
PLACES = (132, A100, H100, 3 * 132)
N_CHUNKS = (1, 7, 64, 512, 1024)
N_PROGRAMS = (1, 9, 29, 32, 100, 132, 160, 200, 263, 264, 265, 300, 4096)


def chunks_in_turn(programs: int, n_chunks: int, places: int, n_segments: int) -> int:
    """Return how many chunks are computed one after another: the time of a launch."""
    chunks_of_segment = math.ceil(n_chunks / n_segments)
    segments_of_row = math.ceil(n_chunks / chunks_of_segment)
    waves = math.ceil(programs * segments_of_row / places)
    return waves * chunks_of_segment


def test_rows_are_cut_until_the_device_is_full() -> None:
    assert segments(32, 64, H100) == 8, "256 programs fill it"
    assert segments(264, 64, H100) == 1, "so many need no cut"


def test_no_cut_takes_longer_than_none_and_no_segment_is_too_short() -> None:
    for places, n_chunks, programs in itertools.product(PLACES, N_CHUNKS, N_PROGRAMS):
        n_segments = segments(programs, n_chunks, places)
        assert 1 <= n_segments <= max(1, n_chunks // MIN_CHUNKS_PER_SEGMENT)
        cut = chunks_in_turn(programs, n_chunks, places, n_segments)
        whole = chunks_in_turn(programs, n_chunks, places, 1)
        assert cut <= whole
