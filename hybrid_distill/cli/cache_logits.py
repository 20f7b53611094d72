"""`hybrid-distill cache-logits`: precompute the teacher's top-k logits, to distill without a teacher in memory."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

import tyro

from ..config import RunConfig, config_of, on_asked_teacher
from ..data import open_rows, write_logits
from ..data.caching import CHECK_ROWS, SHARD_TOKENS
from ..distributed import is_launched_main
from ..limits import Count, check_options
from ..pipeline import Run
from ..student.teachers import check_teacher
from ..train.config import DistillConfig
from ..vocabulary import vocabulary_size
from .parsing import usage
from .recipes import load_recipe, override, recipe_of


@dataclass(frozen=True)
class CacheJob:
    """Precompute the teacher's top-k logits for the rows of a run. Raises ValueError for a number out of range."""

    run: Annotated[RunConfig, tyro.conf.arg(name="")]
    """Run that will train from the logits."""
    stage: Literal["distill", "long", "post"] = "distill"
    """Stage whose rows are read; its ``teacher_logits`` is the folder to write."""
    top_k: Count = 64
    """Most likely next tokens stored at each position, about 4 bytes each. All others are stored as one sum."""
    shard_tokens: Count = SHARD_TOKENS
    """Tokens after which a new file starts. A stopped command repeats at most one file."""
    check_rows: Count = CHECK_ROWS
    """Rows read back at the end, to report what share of the teacher's probability is stored."""

    def __post_init__(self) -> None:
        check_options(self, "--")

    @property
    def config(self) -> DistillConfig:
        """Config of ``stage``."""
        return getattr(self.run, self.stage)

    @property
    def folder(self) -> Path:
        """Folder to write. Raises ValueError when the run names none."""
        if self.config.teacher_logits is None:
            raise ValueError(f"there is no folder to write to; pass one with --{self.stage}.teacher-logits DIR.")
        return self.config.teacher_logits.expanduser()


def cache_logits(job: CacheJob) -> str:
    """Run or resume the job on all launched processes; return a one-line summary.

    Raises ValueError for a teacher or data that cannot be loaded, and as `write_logits` does.
    """
    run, config, folder = Run(job.run), job.config, job.folder
    shape, tokenizer = run.stage_shape_and_tokenizer(config)
    run.check_teachers()
    teacher = config.teacher_within(job.run.teacher)
    check_teacher(shape, tokenizer, name=teacher.path)  # of a stage that the run may not have
    return write_logits(
        folder,
        run.stage_teacher(config),
        tokenizer,
        open_rows(config.data_within(job.run.data), tokenizer, pins=run.pins),
        name=teacher.path,
        top_k=job.top_k,
        places=config.rows_read,
        vocab_size=vocabulary_size(run.tokenizer),
        temperature=config.temperature,
        precision=config.precision,
        micro_batch_size=config.micro_batch_size,
        shard_tokens=job.shard_tokens,
        check_rows=job.check_rows,
        dry_run=job.run.dry_run,
    )


def main(words: list[str]) -> None:
    """Precompute the teacher's top-k logits for a recipe's rows, so that distillation needs no teacher in memory.

    Takes the flags of the run and a few more; RECIPE --help lists them. --distill.teacher-logits names the folder to
    write. Resumes where it was stopped. `accelerate launch -m hybrid_distill cache-logits ...` splits the rows between
    processes.
    """
    if words and words[0] in ("-h", "--help"):
        print(usage(main, "RECIPE"))
        return
    path, flags = recipe_of(words, "cache-logits")
    default = CacheJob(on_asked_teacher(config_of(load_recipe(path)), flags))
    own = [f"--{field.name.replace('_', '-')}" for field in fields(CacheJob)]
    own += [f"--{stage}.teacher-logits" for stage in ("distill", "long", "post")]
    line = cache_logits(override(default, flags, f"hybrid-distill cache-logits {path}", CacheJob.__doc__, own))
    if is_launched_main():
        print(line)
