"""Rows are cut so that the device is full: waves of programs times the chunks of each."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from hybrid_kernels.ssd_tiles import MIN_CHUNKS_PER_SEGMENT, segments

H100, A100 = 2 * 132, 2 * 108  # programs at once, two on each multiprocessor


def waves_and_chunks(programs: int, n_chunks: int, places: int, n_segments: int) -> tuple[int, int]:
    chunks = -(-n_chunks // n_segments)
    return -(-programs * -(-n_chunks // chunks) // places), chunks


@pytest.mark.parametrize(
    ("programs", "n_chunks", "places", "waves", "chunks"),
    [
        (32, 64, H100, 1, 8),  # 2,048 tokens: 256 programs; one more segment would need a second wave
        (32, 1024, H100, 1, 128),
        (29, 1024, H100, 1, 114),
        (64, 64, H100, 1, 16),
        (132, 64, H100, 1, 32),  # one program on each multiprocessor leaves half of the places empty
        (256, 64, H100, 1, 64),
        (264, 64, H100, 1, 64),
        (32, 64, A100, 1, 11),
        (128, 64, A100, 3, 13),
        (256, 64, A100, 6, 13),  # uncut, 40 programs would run in a wave of their own
        (32, 4, H100, 1, 4),  # too short to cut
    ],
)
def test_a_row_is_cut_into_what_ends_first(programs: int, n_chunks: int, places: int, waves: int, chunks: int) -> None:
    assert waves_and_chunks(programs, n_chunks, places, segments(programs, n_chunks, places)) == (waves, chunks)


def test_no_cut_is_worse_than_none_and_none_is_too_short() -> None:
    for places, n_chunks, programs in itertools.product(
        (132, A100, H100, 3 * 132), (1, 7, 64, 512, 1024), (1, 9, 29, 32, 100, 132, 160, 200, 263, 264, 265, 300, 4096)
    ):
        n_segments = segments(programs, n_chunks, places)
        assert 1 <= n_segments <= max(1, n_chunks // MIN_CHUNKS_PER_SEGMENT)
        cut, whole = (waves_and_chunks(programs, n_chunks, places, n) for n in (n_segments, 1))
        assert cut[0] * cut[1] <= whole[0] * whole[1]
