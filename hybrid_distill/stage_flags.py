"""Flags for the stages that a recipe lists: ``--align.steps 100`` sets an option of the stage named ``align``."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Annotated, Literal

import tyro

from .config import RunConfig
from .dependent_options import check_read, check_same_stage

CHOICE = (
    "Stages of the recipe to run, in this order; by default all. Without a name: none, no training."
)


def with_stage_flags(config: RunConfig) -> RunConfig:
    """Return the run as an object with a field for each stage, from which tyro makes a group of flags.

    Its field ``stages`` holds names. `without_stage_flags` turns it back.
    """
    names = config.stage_names
    choice = tuple[Literal[names], ...] if names else tuple[str, ...]  # pyright: ignore[reportInvalidTypeForm]
    fields: list[tuple[str, object, object]] = [
        ("stages", Annotated[choice, tyro.conf.arg(help=CHOICE)], dataclasses.field(default=names))
    ]
    for stage in config.stages:
        fields.append((stage.name, type(stage), dataclasses.field(default=stage)))
    kind = dataclasses.make_dataclass(
        "RunFlags",
        fields,  # pyright: ignore[reportArgumentType]
        bases=(RunConfig,),
        # The run is checked as a whole when it is turned back.
        namespace={"__post_init__": _unchecked},
        frozen=True,
    )
    options = {field.name: getattr(config, field.name) for field in dataclasses.fields(RunConfig)}
    return kind(**{**options, "stages": names})


def without_stage_flags(
    flags: RunConfig, default: RunConfig, unchecked: Collection[str] = ()
) -> RunConfig:
    """Return the run with the stages that the flags chose and changed; ``default`` is the run before that.

    Raises ValueError as `RunConfig` and `check_read`, which leaves out ``unchecked``, do.
    """
    options = {field.name: getattr(flags, field.name) for field in dataclasses.fields(RunConfig)}
    stages = tuple(getattr(flags, str(name)) for name in flags.stages)
    run = RunConfig(**{**options, "stages": stages})
    for stage in default.stages:
        if stage.name not in run.stage_names:
            changed = getattr(flags, stage.name)
            check_same_stage(changed, stage, f"with {stage.name} among --stages")
    check_read(run, default, unchecked)
    return run


def _unchecked(flags: RunConfig) -> None:
    """Skip the checks of `RunConfig`: flags are not a run yet."""
