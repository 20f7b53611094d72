"""Recipes: Python files whose ``config()`` a command runs, overridden by flags."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

from ..flags import flags_of, parse_as, short_help

if TYPE_CHECKING:
    from ..config import RunConfig

T = TypeVar("T")

FIRST = (
    "--teacher",
    "--out",
    "--seed",
    "--stages",
    "--resume",
    "--trackers",
    "--dry-run",
    "--gpus",
    "--gpu-memory",
    "--tokens",
    "--cache",
    "--scoring.file",
    "--scoring.n-pairs",
    "--plan.selection",
    "--plan.k",
    "--student.d-state",
    "--student.window",
    "--student.init",
    "--data.sources",
    "--data.weights",
    "--data.seq-len",
    "--align.steps",
    "--align.batch-size",
    "--align.learning-rate",
    "--distill.steps",
    "--distill.batch-size",
    "--distill.micro-batch-size",
    "--distill.learning-rate",
)
"""Flags that people change first; a recipe's ``--help`` shows these."""


def command(name: str | None = None, /) -> None:
    """List the recipes that `run`, `cache-logits` and `sweep` take by name.

    Args:
        name: The recipe to print instead; `hybrid-distill recipes tiny > mine.py` starts your own.
    """
    if name is not None:
        print(find_recipe(Path(name)).read_text(encoding="utf-8"), end="")
        return
    for line in summaries(shipped()):
        print(line)


def summaries(recipes: Mapping[str, Path]) -> list[str]:
    """Return a line for each recipe: its name and the first line of its docstring."""
    lines = []
    for short, path in sorted(recipes.items()):
        # Parsed, not imported: a recipe imports torch.
        recipe = ast.parse(path.read_text(encoding="utf-8"))
        summary, _, _ = (ast.get_docstring(recipe) or "").partition("\n")
        lines.append(f"{short:<16}{summary}")
    return lines


def usage(main: Callable[..., None]) -> str:
    """Format the help of a command that takes a recipe and its flags."""
    name = main.__module__.rpartition(".")[2].replace("_", "-")
    runs = {short: path for short, path in shipped().items() if not short.startswith("sweep_")}
    listed = "\n".join(["Recipes: a file of your own with config(), or", *summaries(runs)])
    return f"usage: hybrid-distill {name} RECIPE [FLAGS]\n\n{inspect.getdoc(main)}\n\n{listed}"


def shipped() -> dict[str, Path]:
    """Map names to the shipped recipes, which are next to the package in a wheel and in a clone."""
    folder = _shipped_folder()
    recipes = [*folder.glob("hybrid_*.py"), *folder.glob("sweep_*.py")]
    return {path.stem.removeprefix("hybrid_"): path for path in recipes}


def _shipped_folder() -> Path:
    home = Path(__file__).parents[2]
    folder = home / "hybrid_distill_recipes"
    if not folder.is_dir():
        folder = home / "recipes"
    return folder


def find_recipe(path: Path) -> Path:
    """Return ``path`` if it is a file, else the shipped recipe of that name. Raises ValueError for
    neither.

    The path ``recipes/hybrid_tiny.py``, as in the documentation, is also accepted as a name,
    even without a clone.
    """
    recipes = shipped()
    if not path.is_file() and path.parent in (Path(), Path("recipes")):
        path = recipes.get(path.stem.removeprefix("hybrid_"), path)
    if path.suffix != ".py" or not path.is_file():
        names = ", ".join(sorted(recipes))
        raise ValueError(
            f"{path} is not a recipe; pass a Python file with config(), or one of {names}."
        )
    return path


def load_recipe(path: Path) -> ModuleType:
    """Import a recipe: a file, or the name of a shipped one. Raises ValueError for anything
    else."""
    from ..recipe import in_recipe

    path = find_recipe(path)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    # Recipes import one another, a copy elsewhere the shipped ones.
    sys.path.insert(0, str(path.parent.resolve()))
    sys.path.append(str(_shipped_folder()))
    module = importlib.util.module_from_spec(spec)
    with in_recipe(str(path)):
        spec.loader.exec_module(module)
    if not callable(getattr(module, "config", None)):
        raise ValueError(
            f"{path} has no config(); a recipe has a function config() that returns a RunConfig."
        )
    return module


def recipe_of(words: Sequence[str], command: str) -> tuple[Path, list[str]]:
    """Split the words of a command into a recipe's path and flags."""
    if not words or words[0].startswith("-"):
        raise ValueError(
            f"no recipe given; pass its name or file first: `hybrid-distill {command} tiny ...`."
        )
    return Path(words[0]), list(words[1:])


def fit_to_cache(
    defaults: RunConfig, config: RunConfig, parse: Callable[[RunConfig], RunConfig]
) -> RunConfig:
    """Return the run with the plan and student that fit ``config.cache``; flags for these take precedence.

    ``parse`` applies the command line to a run: ``config`` is ``parse(defaults)``.
    """
    # Imported late: they load transformers, which flags and --help do without.
    from ..pipeline.budget import SINKS, longest_window, within_cache
    from ..teacher import load_config

    # Flags win over what the cache decides, so the command line is parsed on top of it, twice. First on the student
    # that a cache alone would get: flags may set its state and sinks, which take their part before groups and windows.
    longest = max(SINKS, longest_window(config))
    by_cache_alone = replace(defaults.student, d_state=0, window=longest, sinks=SINKS)
    flagged = parse(replace(defaults, student=by_cache_alone)).student
    teacher = load_config(config.teacher.path, config.teacher.revision)
    fitted = within_cache(config, teacher, d_state=flagged.d_state, sinks=flagged.sinks)
    # Then on the fitted plan and student.
    return parse(replace(defaults, plan=fitted.plan, student=fitted.student))


def override(
    default: T,
    words: Sequence[str],
    prog: str | None,
    description: str | None,
    own: Iterable[str] = (),
) -> T:
    """Override a config with flags. ``--help`` shows `FIRST` and a command's ``own``,
    ``--help-all`` every flag."""
    kind = type(default)
    if not {"-h", "--help"}.isdisjoint(words):
        parser = flags_of(kind, default=default)
        print(short_help(parser, {*FIRST, *own}, prog or sys.argv[0], description))
        sys.exit()
    words = ["--help" if word == "--help-all" else word for word in words]
    return parse_as(kind, words, default=default, prog=prog, description=description)
