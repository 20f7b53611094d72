"""`hybrid-distill run`: a recipe, from start to report."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..distributed import is_launched_main

if TYPE_CHECKING:
    from ..config import RunConfig

OF_DRY_RUN = ("--dry-run", "--show-config")


def main(words: list[str]) -> None:
    """Run a recipe, by name or as a file with config(); flags after it override its fields.

    RECIPE --help lists the flags. Resumes where it was stopped.
    """
    from .recipes import load_recipe, recipe_of, usage

    if words and words[0] in ("-h", "--help"):
        print(usage(main))
        return
    from ..recipe import config_of

    path, flags = recipe_of(words, "run")
    recipe = load_recipe(path)
    prog = f"hybrid-distill run {path}"
    run_with_flags(config_of(recipe), flags, str(path), recipe.__doc__, prog)


def run_with_flags(
    default: RunConfig,
    words: Sequence[str],
    recipe: str,
    description: str | None,
    prog: str | None = None,
) -> None:
    """Run a recipe's config, overridden by flags; write its report."""
    from ..lab.reporting.run import write_report
    from ..pipeline.run import run
    from ..recipe import checked_config, on_asked_teacher
    from ..stage_flags import with_stage_flags, without_stage_flags
    from .recipes import fit_to_cache, override

    base = on_asked_teacher(checked_config(default, recipe), words)
    defaults = with_stage_flags(base)

    def parse(run_config: RunConfig) -> RunConfig:
        return without_stage_flags(override(run_config, words, prog, description), base)

    config = parse(defaults)
    if config.cache is not None:
        config = fit_to_cache(defaults, config, parse)
    if config.dry_run:
        from .dry_run import describe

        # The command to launch is this one, without the flags that keep it from starting.
        others = [word for word in words if word.replace("_", "-") not in OF_DRY_RUN]
        text = describe(config, shlex.join([recipe, *others]))
        if is_launched_main():
            print(text)
        return
    out = run(config)
    if is_launched_main():
        report = write_report(out)
        print(f"report: {report}")
