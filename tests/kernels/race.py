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
    """An access that a kernel must not make."""

    def __init__(self, message: str, is_store: bool) -> None:
        super().__init__(message)
        self.is_store = is_store


class OutOfBounds(Access):
    """A load or store outside every argument."""


class Race(Access):
    """An access of an element that another program stores: its value depends on their order."""


class View:
    """The elements of one tensor argument, and which program of this launch has read and written
    each."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.start = tensor.data_ptr()
        self.itemsize = tensor.element_size()
        offsets = np.zeros(1, np.int64)
        for size, stride in zip(tensor.shape, tensor.stride()):
            offsets = (offsets[:, None] + np.arange(size) * stride).reshape(-1)
        extent = offsets.max(initial=0) + 1
        # What lies between the elements of a view with strides belongs to another tensor.
        self.mine = np.zeros(extent, bool)
        self.mine[offsets] = True
        self.reader = np.full(extent, NOBODY)
        self.writer = np.full(extent, NOBODY)


class Watch:
    """State of the launch that is being interpreted. ``order`` is that of its programs."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.views: list[View] = []
        self.grid: tuple[int, ...] = ()
        self.order: list[tuple[int, ...]] = []
        self.program = 0

    def launch(self, arguments: list[object]) -> None:
        self.views = []
        for argument in arguments:
            if isinstance(argument, torch.Tensor) and argument.numel():
                self.views.append(View(argument))

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
            verb = "stored" if store else "loaded"
            raise OutOfBounds(f"{len(left)} elements {verb} outside every argument", store)

    def _note(self, view: View, place: np.ndarray, store: bool) -> None:
        me = self.program
        stored_by_others = ~np.isin(view.writer[place], (NOBODY, me))
        loaded_by_others = ~np.isin(view.reader[place], (NOBODY, me))
        if stored_by_others.any():
            verb = "stores" if store else "loads"
            raise Race(f"{verb} what another program has stored", store)
        if not store:
            view.reader[place] = np.where(loaded_by_others, SEVERAL, me)
            return
        if loaded_by_others.any():
            raise Race("stores what another program has loaded", store)
        view.writer[place] = me


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
        positional, by_name = on_host
        watch.launch([*positional, *by_name.values()])
        return on_host

    def set_shuffled_dim(*grid: int) -> None:
        watch.shuffle(*grid)
        set_dim(*grid)

    def set_shuffled_index(*index: int) -> None:
        set_index(*watch.place(*index))

    class Memory:
        def __getattr__(self, name: str) -> object:
            return getattr(plain, name)

        def load(self, pointers, mask, other, dtype):
            watch.touch(pointers, mask, store=False)
            return plain.load(pointers, mask, other, dtype)

        def store(self, pointers, value, mask):
            watch.touch(pointers, mask, store=True)
            return plain.store(pointers, value, mask)

    with (
        mock.patch.object(interpreter, "_interpreter", Memory()),
        mock.patch.object(interpreter.GridExecutor, "_init_args_hst", note_arguments),
        mock.patch.object(builder, "set_grid_dim", set_shuffled_dim),
        mock.patch.object(builder, "set_grid_idx", set_shuffled_index),
    ):
        yield watch
