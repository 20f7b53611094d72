"""Triton's interpreter with programs in a random order, which checks bounds and races between
programs."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator
from unittest import mock

import numpy as np
import torch
import triton.runtime.interpreter as interpreter

NOBODY = -1
SEVERAL = -2


class Access(AssertionError):
    """An access out of bounds, or one of two programs that depend on their order."""


class View:
    """The elements of one tensor argument, and which programs of this launch have read and written
    each."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.start = tensor.data_ptr()
        self.itemsize = tensor.element_size()
        offsets = np.zeros(1, np.int64)
        for size, stride in zip(tensor.shape, tensor.stride()):
            offsets = (offsets[:, None] + np.arange(size) * stride).reshape(-1)
        self.mine = np.zeros(offsets.max(initial=0) + 1, bool)
        self.mine[offsets] = True
        self.reader, self.writer = np.full((2, len(self.mine)), NOBODY)


class Watch:
    """State of the launch that is being interpreted. ``order`` is that of its programs."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.views: list[View] = []
        self.order: list[tuple[int, ...]] = []
        self.program = 0

    def launch(self, arguments: list[object]) -> None:
        self.views = [
            View(one) for one in arguments if isinstance(one, torch.Tensor) and one.numel()
        ]

    def shuffle(self, *grid: int) -> None:
        self.order = list(itertools.product(*map(range, grid)))
        self.random.shuffle(self.order)
        self.grid = grid

    def place(self, *index: int) -> tuple[int, ...]:
        """Return the program that runs as the one of this index."""
        self.program = int(np.ravel_multi_index(index, self.grid))
        return self.order[self.program]

    def touch(self, pointers: np.ndarray, mask: np.ndarray, store: bool) -> None:
        """Check one load or store. Raises Access."""
        left = pointers[np.broadcast_to(mask, pointers.shape)].astype(np.int64)
        for view in self.views:
            place = (left - view.start) // view.itemsize
            inside = (place >= 0) & (place < len(view.mine))
            inside[inside] = view.mine[place[inside]]
            self._note(view, place[inside], store)
            left = left[~inside]
        if len(left):
            raise Access(
                f"{len(left)} elements {'stored' if store else 'loaded'} outside every argument"
            )

    def _note(self, view: View, place: np.ndarray, store: bool) -> None:
        me = self.program
        if (~np.isin(view.writer[place], (NOBODY, me))).any():
            raise Access(f"{'stores' if store else 'loads'} what another program has stored")
        if store and (~np.isin(view.reader[place], (NOBODY, me))).any():
            raise Access("stores what another program has loaded")
        if store:
            view.writer[place] = me
        else:
            view.reader[place] = np.where(np.isin(view.reader[place], (NOBODY, me)), me, SEVERAL)


@contextlib.contextmanager
def watched(seed: int = 0) -> Iterator[Watch]:
    """Shuffle and check every interpreted launch."""
    watch = Watch(seed)
    plain = interpreter._interpreter
    builder = interpreter.interpreter_builder
    to_host = interpreter.GridExecutor._init_args_hst
    set_dim = builder.set_grid_dim
    set_index = builder.set_grid_idx

    def note_arguments(executor, arguments, options):
        on_host = to_host(executor, arguments, options)
        watch.launch([*on_host[0], *on_host[1].values()])
        return on_host

    class Memory:
        def __getattr__(self, name: str) -> object:
            return getattr(plain, name)

        def load(self, pointers, mask, other, dtype):
            watch.touch(pointers, mask, store=False)
            return plain.load(pointers, mask, other, dtype)

        def store(self, pointers, value, mask):
            watch.touch(pointers, mask, store=True)
            return plain.store(pointers, value, mask)

    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (interpreter, "_interpreter", Memory()),
            (interpreter.GridExecutor, "_init_args_hst", note_arguments),
            (builder, "set_grid_dim", lambda *grid: (watch.shuffle(*grid), set_dim(*grid))),
            (builder, "set_grid_idx", lambda *index: set_index(*watch.place(*index))),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield watch
