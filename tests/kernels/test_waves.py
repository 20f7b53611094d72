"""Rows are cut so that the device is full: waves of programs times the chunks of each."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from hybrid_kernels.ssd_tiles import MIN_CHUNKS_PER_SEGMENT, segments

# programs at once, two on each multiprocessor
H100 = 2 * 132
A100 = 2 * 108


def waves_and_chunks(programs: int, n_chunks: int, places: int, n_segments: int) -> tuple[int, int]:
    chunks = -(-n_chunks // n_segments)
    return -(-programs * -(-n_chunks // chunks) // places), chunks


def test_no_cut_is_worse_than_none_and_none_is_too_short() -> None:
    assert segments(32, 64, H100) == 8, "256 programs fill it; so many need no cut"
    assert segments(264, 64, H100) == 1, "256 programs fill it; so many need no cut"
    for places, n_chunks, programs in itertools.product(
        (132, A100, H100, 3 * 132),
        (1, 7, 64, 512, 1024),
        (1, 9, 29, 32, 100, 132, 160, 200, 263, 264, 265, 300, 4096),
    ):
        n_segments = segments(programs, n_chunks, places)
        assert 1 <= n_segments <= max(1, n_chunks // MIN_CHUNKS_PER_SEGMENT)
        cut, whole = (waves_and_chunks(programs, n_chunks, places, n) for n in (n_segments, 1))
        assert cut[0] * cut[1] <= whole[0] * whole[1]
