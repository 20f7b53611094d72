"""Fixtures of the kernels' tests: a watched interpreter, and a process in which triton compiles."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest

COMPILED = {"TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"}


@pytest.fixture(autouse=True)
def watch() -> Iterator[object]:
    """Run interpreted programs in a random order, and check bounds and races between them."""
    with contextlib.ExitStack() as stack:
        try:
            from hybrid_kernels.common import INTERPRETED
        except ModuleNotFoundError:  # triton
            INTERPRETED = False
        if not INTERPRETED:
            yield None
            return
        from race import watched

        yield stack.enter_context(watched())


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., object]]:
    """Call a function in a process in which triton compiles, into a cache of its own: here it interprets."""
    with (
        pytest.MonkeyPatch.context() as patch,
        ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process,
    ):
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        for name, value in COMPILED.items():
            patch.setenv(name, value)
        process.submit(os.getpid).result()  # starts it
        patch.undo()
        yield lambda function, *arguments: process.submit(function, *arguments).result()
