"""Recipes as modules: their functions' results, and their run scaled down to the embedded teacher."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any

from .config import RunConfig
from .data import DataConfig
from .teacher import TINY
from .train.config import Distill, StageConfig


def on_embedded_teacher(config: RunConfig) -> RunConfig:
    """Return the run on the embedded teacher and corpus, scaled down to fit them and a laptop."""
    teacher = replace(config.teacher, path=TINY, revision=None, attn_implementation=None)
    # Many laptops emulate bfloat16.
    if teacher.dtype == "bfloat16":
        teacher = replace(teacher, dtype="auto")
    return replace(
        config,
        gpus=1,
        teacher=teacher,
        scoring=replace(config.scoring, file=None, other_weights=False),
        plan=replace(config.plan, k=min(config.plan.k, 48)),
        student=replace(config.student, window=min(config.student.window, 16)),
        data=replace(
            config.data,
            sources=(TINY,),
            weights=(),
            chat=False,
            seq_len=min(config.data.seq_len, 256),
        ),
        stages=tuple(map(_scaled_down, config.stages)),
        evaluation=replace(config.evaluation, knowledge=TINY),
    )


def _scaled_down(stage: StageConfig) -> StageConfig:
    """Scale a stage down to the embedded teacher and corpus, which has neither conversations nor a larger teacher."""
    small = replace(stage, steps=min(stage.steps, 100), batch_size=min(stage.batch_size, 8))
    if small.precision == "bf16":
        small = replace(small, precision="auto")
    if small.data is not None:
        small = replace(small, data=DataConfig(seq_len=min(small.data.seq_len, 256)))
    if small.seq_len is not None:
        small = replace(small, seq_len=min(small.seq_len, 512))
    if isinstance(small, Distill):
        segment_len = None if small.segment_len is None else min(small.segment_len, 256)
        small = replace(small, teacher=None, segment_len=segment_len)
    return small


def on_asked_teacher(config: RunConfig, words: Sequence[str]) -> RunConfig:
    """Scale a run down to the embedded teacher if the flags ask for it."""
    asked = None
    for word, following in zip(words, [*words[1:], ""]):
        name, joined, value = word.partition("=")
        if name in ("--teacher", "--teacher.path"):
            asked = value if joined else following
    return on_embedded_teacher(config) if asked == TINY else config


def config_of(recipe: ModuleType) -> RunConfig:
    """Return the config of a recipe module. Raises ValueError if config() fails or returns something else."""
    return checked_config(ask_recipe(recipe, "config"), f"config() of {recipe.__file__}")


def checked_config(config: object, source: str) -> RunConfig:
    """Return ``config``. Raises ValueError for another type: the command line would silently use its own defaults."""
    if not isinstance(config, RunConfig):
        raise ValueError(
            f"{source} is {type(config).__name__} {str(config)[:60]!r}; return a RunConfig."
        )
    return config


def ask_recipe(recipe: ModuleType, name: str) -> Any:
    """Call a function of a recipe module. Raises ValueError, naming the line, if it fails."""
    with in_recipe(str(recipe.__file__)):
        return getattr(recipe, name)()


@contextmanager
def in_recipe(file: str) -> Iterator[None]:
    """Turn any error in a recipe's code into a one-line ValueError that names the recipe and the line."""
    try:
        yield
    except Exception as error:
        path = os.path.abspath(file)
        frames = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if os.path.abspath(frame.filename) == path
        ]
        where = f"{file}, line {frames[-1].lineno}" if frames else file
        raise ValueError(
            f"{where}: {type(error).__name__}: {' '.join(str(error).split())}"
        ) from error
