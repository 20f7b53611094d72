"""`hybrid-distill cache-logits`: precompute the teacher's top-k logits, to distill without a
teacher in memory."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated

import tyro

from ..config import RunConfig
from ..data import open_rows, write_logits
from ..data.caching import SHARD_TOKENS
from ..distributed import is_launched_main
from ..pipeline import RunInputs
from ..pipeline.checks import check_contexts, check_teachers
from ..pipeline.folder import as_started
from ..recipe import config_of, on_asked_teacher
from ..stage_flags import with_stage_flags, without_stage_flags
from ..train.config import Distill
from ..validation import Count, check_options
from ..vocabulary import vocabulary_size
from .recipes import fit_to_cache, load_recipe, override, recipe_of, usage


@dataclass(frozen=True)
class CacheJob:
    """Precompute the teacher's top-k logits for the rows of a run. Raises ValueError for a
    number out of range."""

    run: Annotated[RunConfig, tyro.conf.arg(name="")]
    """Run that will train from the logits."""
    stage: str = "distill"
    """Name of the stage whose rows are read; its ``teacher_logits`` is the folder to write."""
    top_k: Count = 64
    """Most likely next tokens stored at each position, about 4 bytes each. All others are stored
    as one sum."""
    shard_tokens: Count = SHARD_TOKENS
    """Tokens after which a new file starts. A stopped command repeats at most one file."""

    def __post_init__(self) -> None:
        check_options(self, "--")

    @property
    def config(self) -> Distill:
        """Config of ``stage``. Raises ValueError unless it distills from logits."""
        stage = self.run.stage(self.stage)
        if not isinstance(stage, Distill):
            raise ValueError(
                f"--stage is {self.stage!r}, which reads no logits; name a stage that distills."
            )
        return stage

    @property
    def folder(self) -> Path:
        """Folder to write. Raises ValueError when the run names none."""
        if self.config.teacher_logits is None:
            raise ValueError(
                f"there is no folder to write to; pass one with --{self.stage}.teacher-logits DIR."
            )
        return self.config.teacher_logits.expanduser()


def cache_logits(job: CacheJob) -> str:
    """Run or resume the job on all launched processes; return a one-line summary.

    Raises ValueError for a teacher or data that cannot be loaded, and as `write_logits` does.
    """
    job = replace(job, run=as_started(job.run))
    config = job.config
    # Asked for first: a run that names no folder is refused before a model is loaded.
    folder = job.folder
    inputs = RunInputs(job.run)
    check_teachers(inputs)
    check_contexts(inputs, config)
    _, tokenizer = inputs.stage_config_and_tokenizer(config)
    return write_logits(
        folder,
        inputs.stage_teacher(config),
        tokenizer,
        open_rows(job.run.data_of(config), tokenizer, pins=inputs.pins),
        name=job.run.teacher_of(config).path,
        top_k=job.top_k,
        rows_read=config.rows_read,
        vocab_size=vocabulary_size(inputs.tokenizer),
        temperature=config.temperature,
        precision=config.precision,
        micro_batch_size=config.micro_batch_size,
        shard_tokens=job.shard_tokens,
        dry_run=job.run.dry_run,
    )


def main(words: list[str]) -> None:
    """Precompute the teacher's top-k logits for a recipe's rows, so that distillation needs no
    teacher in memory.

    Takes the flags of the run and a few more; RECIPE --help lists them. --distill.teacher-logits
    names the folder to write. Resumes where it was stopped. `accelerate launch -m hybrid_distill
    cache-logits ...` splits the rows between processes.
    """
    if words and words[0] in ("-h", "--help"):
        print(usage(main))
        return
    path, flags = recipe_of(words, "cache-logits")
    config = on_asked_teacher(config_of(load_recipe(path)), flags)
    shown_in_help = [f"--{field.name.replace('_', '-')}" for field in fields(CacheJob)]
    for stage in config.student_stages:
        shown_in_help.append(f"--{stage.name}.teacher-logits")

    def parse(defaults: RunConfig) -> CacheJob:
        prog = f"hybrid-distill cache-logits {path}"
        job = override(CacheJob(defaults), flags, prog, CacheJob.__doc__, shown_in_help)
        return replace(job, run=without_stage_flags(job.run, config))

    defaults = with_stage_flags(config)
    job = parse(defaults)
    if job.run.cache is not None:
        run = fit_to_cache(defaults, job.run, lambda others: parse(others).run)
        job = replace(job, run=run)
    summary = cache_logits(job)
    if is_launched_main():
        print(summary)
