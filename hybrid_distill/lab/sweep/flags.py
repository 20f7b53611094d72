"""Flags of `hybrid-distill sweep`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

RecipeArgument = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RECIPE")]


@dataclass(frozen=True)
class SweepJob:
    """Students to make, how, and where; the same command resumes a stopped sweep."""

    recipe: RecipeArgument = Path("recipes/hybrid_tiny.py")
    """Recipe of all cells, by name or as a file; the grid replaces its plan, state size and seed.
    Its grid() and jobs(), if any, set defaults."""
    heads: str | None = None
    """Numbers of heads to keep, over all layers: ``0,2,4,8,all``, the default. Single heads, whatever unit the recipe's
    plan keeps."""
    d_state: str | None = None
    """State sizes of the recurrent heads, by default ``4,8,16,64``; 0 for windows alone."""
    window: str | None = None
    """Windows of the replaced heads, in tokens: ``0,32,64``; by default none. The recipe's sinks stand beside each, and
    heads are ranked for each."""
    seeds: int | None = None
    """Number of seeds, counted up from the recipe's; by default 3."""
    selection: str | None = None
    """``top`` (scores) and ``random`` by default; ``layers`` (the best whole layers, by their heads' scores),
    ``restoration``."""
    set: tuple[str, ...] = ()
    """Fields of the recipe to change: ``distill.steps=100 export=False evaluation.n-pairs=4,8``."""
    out: Path = Path("runs/sweep")
    jobs: int | None = None
    """Cells to run in parallel; by default as many as this machine's GPUs serve, 1 without GPUs.
    1 runs in this process; more are submitit jobs."""
    gpus: int | None = None
    """GPUs of each job; by default 1, with --launcher all of this machine's. Jobs on this machine
    each get their own, and share its threads."""
    cluster: Literal["slurm", "local"] | None = None
    """Where jobs run (submitit); by default on this machine (``local``)."""
    minutes: int | None = None
    """Time limit of a SLURM job; by default 1440. A job out of time saves, is requeued and
    resumes."""
    options: tuple[str, ...] = ()
    """Other options of the jobs, as submitit names them: ``slurm_partition=gpu mem_gb=128``."""
    launcher: str | None = None
    """Command that starts a cell's processes, for example ``accelerate launch --config_file
    launch/ddp.yaml``."""
    share: bool = True
    """Share one head-by-head alignment between all cells of a state size and seed; otherwise
    each cell aligns as in the recipe."""
    trackers: tuple[str, ...] | None = None
    """``tensorboard``, ``trackio``, ``wandb``: one run per cell, grouped by sweep. By default the
    recipe's; without a name none."""
    dry_run: bool = False
    """Check everything and print cells and jobs; start nothing."""


def split_pairs(flag: str, pairs: tuple[str, ...], example: str) -> list[tuple[str, str]]:
    """Split ``NAME=VALUE`` words. Raises ValueError for any other word."""
    split = []
    for pair in pairs:
        name, _, value = pair.partition("=")
        if not (name and value):
            raise ValueError(
                f"--{flag} has {pair!r}; write NAME=VALUE, for example --{flag} {example}."
            )
        split.append((name, value))
    return split
