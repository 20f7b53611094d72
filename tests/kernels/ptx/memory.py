"""Memory that knows which warps have touched each byte since the last barrier."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .text import I16, U8, U64

MAX_WARPS = 16
"""Most warps of a program: each has a byte, so that several can note an access at once."""
Report = Callable[[str], None]
"""Notes what is wrong with an access."""


class Fault(Exception):
    """An access out of bounds, a collective instruction without all threads, an endless loop."""


def others(warp: np.ndarray) -> np.ndarray:
    """Mask `Memory.read_by` and `written_by` for all warps but one in each row."""
    mask = np.full((len(warp), MAX_WARPS), 255, U8)
    mask[np.arange(len(warp)), warp] = 0
    return mask.view(U64)[:, None]


class Memory:
    """Bytes, and which warps have read and written each of them since the last barrier."""

    def __init__(self, data: np.ndarray, name: str) -> None:
        self.data = data
        self.name = name
        size = len(data)
        self.readers = np.zeros((size, MAX_WARPS), U8)
        self.writers = np.zeros((size, MAX_WARPS), U8)
        # The same memory, eight warps a word.
        self.read_by = self.readers.view(U64)
        self.written_by = self.writers.view(U64)
        self.landing = np.zeros(size, I16)  # cp.async that will write a byte
        self.pinned = np.zeros(size, I16)  # wgmma that may still read a byte
        self.unpublished = np.zeros(size, bool)  # written, and not yet seen by wgmma
        self.touched: list[np.ndarray] = []

    def forget(self) -> None:
        """Pass a barrier."""
        for index in self.touched:
            self.read_by[index] = 0
            self.written_by[index] = 0
        self.touched = []

    def read(self, index: np.ndarray, warp: np.ndarray, report: Report) -> np.ndarray:
        """Return the bytes at ``index``, [n, width]; row i is read by ``warp[i]``."""
        if (self.written_by[index] & others(warp)).any():
            report("reads what another warp wrote since the last barrier")
        if self.landing[index].any():
            report("reads what cp.async has not delivered")
        self.readers[index, warp[:, None]] = 1
        self.touched.append(index)
        return self.data[index]

    def claim(
        self, index: np.ndarray, warp: np.ndarray, changed: np.ndarray, report: Report
    ) -> None:
        """Check that these warps may write here; ``changed`` says which bytes would get another
        value."""
        # Two warps that write the same value do not depend on their order.
        written_by_others = (self.written_by[index] & others(warp)).any(-1)
        if (written_by_others & changed).any():
            report("writes what another warp wrote since the last barrier")
        if (self.read_by[index] & others(warp)).any():
            report("writes what another warp read since the last barrier")
        if self.landing[index].any():
            report("writes where cp.async will deliver")
        if self.pinned[index].any():
            report("writes what wgmma may still read")

    def write(
        self, index: np.ndarray, warp: np.ndarray, values: np.ndarray, report: Report
    ) -> None:
        """Store ``values`` [n, width]; row i is written by ``warp[i]``."""
        self.claim(index, warp, self.data[index] != values, report)
        self.data[index] = values
        self.writers[index, warp[:, None]] = 1
        # Rows of this very instruction may share bytes: of those, one value was lost.
        written_by_others = (self.written_by[index] & others(warp)).any(-1)
        if (written_by_others & (self.data[index] != values)).any():
            report("writes one value, and another warp another")
        self.unpublished[index] = True
        self.touched.append(index)
