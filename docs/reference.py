"""Write docs/reference.md: every command, and every field of a recipe, as the command line has them.

python docs/reference.py            # after a change of either; tests/test_reference.py fails until it is done
"""

from __future__ import annotations

import argparse
import importlib
import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from hybrid_distill.cli.app import COMMANDS, NAMES
from hybrid_distill.cli.cache_logits import CacheJob
from hybrid_distill.cli.parsing import flags_of
from hybrid_distill.config import RunConfig
from hybrid_distill.stage_flags import with_stage_flags
from hybrid_distill.train.config import Align, AlignMatrix, Distill, DistillOnPolicy

PAGE = Path(__file__).with_suffix(".md")
COMMAND = "hybrid-distill"
FIRST = {"run": "RECIPE", "cache-logits": "RECIPE"}
"""The positional argument of commands whose other flags are a recipe's."""
HEAD = """\
# Reference

Every command and every field of a recipe, listed; the other pages of [docs/](README.md) explain them. Made from the
code by `python docs/reference.py`. The defaults of a recipe are those of its classes: what a recipe sets itself stands
in its `config()`, and `hybrid-distill run RECIPE --help-all` shows it.
"""
RECIPES = """\
## Fields of a recipe

A recipe's `config()` returns a `RunConfig`. Its fields are flags of `hybrid-distill run RECIPE` and of the recipe's own
file. Each stage that it lists has flags under its own name: `--align.batch-size 8` sets `batch_size` of the `Align` in
`stages`, `--long.steps 10` sets `steps` of a `Distill(name="long")`.
"""
KINDS = {"matrix": "AlignMatrix", "align": "Align", "distill": "Distill", "on-policy": "DistillOnPolicy"}
"""Classes of stages, by the names that they have unless a recipe gives others."""
_TAIL = re.compile(r"\s*\((?:default: (?P<default>.*)|required)\)$", re.DOTALL)
_RAISES = re.compile(r"Raises ValueError[^.]*\.")


class Flag(NamedTuple):
    """A row of a table."""

    name: str
    takes: str
    default: str
    says: str

    def of(self, section: str) -> Flag:
        """Name it as a field of any stage, to compare it with that of another ``section``."""
        return self._replace(name=self.name.replace(f"--{section}.", "--STAGE."))


class Group(NamedTuple):
    """Flags that stand together in the help; the outermost has no title."""

    title: str
    description: str
    flags: list[Flag]
    commands: dict[str, argparse.ArgumentParser]


def reference() -> str:
    """Compose the page."""
    return "\n".join([HEAD, *_commands(), RECIPES, *_recipe()]).rstrip() + "\n"


def command_file(name: str) -> ModuleType:
    """Import the file of a command."""
    return importlib.import_module(f"hybrid_distill.cli.{name.replace('-', '_')}")


def _commands() -> Iterator[str]:
    yield "## Commands\n"
    for title, names in COMMANDS.items():
        yield f"- {title}: {', '.join(f'[`{name}`](#{COMMAND}-{name})' for name in names)}"
    yield ""
    for name in NAMES:
        file = command_file(name)
        if name in FIRST:
            own = _own_of_cache_logits() if name == "cache-logits" else []
            yield f"### {COMMAND} {name}\n\n{_text(file.main.__doc__ or '')}\n"
            yield _table([Flag(FIRST[name], "PATH", "required", ""), *own])
        else:
            yield from _command(f"{COMMAND} {name}", flags_of(file.command))


def _own_of_cache_logits() -> list[Flag]:
    """List the flags that the command has beside those of the run."""
    flags = with_stage_flags(RunConfig())
    of_run = [flag for group in _groups(flags_of(type(flags), default=flags)) for flag in group.flags]
    outermost = next(_groups(flags_of(CacheJob, default=CacheJob(flags))))
    return [flag for flag in outermost.flags if flag not in of_run]


def _command(name: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    yield f"### {name}\n\n{_text(parser.description or '')}\n"
    groups = list(_groups(parser))
    if flags := [flag for group in groups for flag in group.flags]:
        yield _table(flags)
    for group in groups:
        for word, inner in group.commands.items():
            yield from _command(f"{name} {word}", inner)


def _recipe() -> Iterator[str]:
    stages = (AlignMatrix(), Align(), Distill(), DistillOnPolicy())
    flags = with_stage_flags(RunConfig(stages=stages))
    parser = flags_of(type(flags), default=flags)
    groups = {group.title: group for group in _groups(parser)}
    every = [flag.of("matrix") for flag in groups["matrix"].flags]
    of_distill = [flag.of("distill") for flag in groups["distill"].flags]
    for title, group in groups.items():
        if title not in KINDS:
            yield f"### {title or 'the run'}\n\n{_text(group.description or RunConfig.__doc__ or '')}\n"
            yield _table(group.flags)
            continue
        if title == "matrix":
            yield "### every stage\n\n`STAGE` is the name of the stage. A stage that has a `data` of its own has flags "
            yield f"for that too, as `data` of the run.\n\n{_table(every)}"
        known = every
        also = " Its other fields are those of every stage."
        if title == "on-policy":
            known = [*every, *of_distill]
            also = " Its other fields are those of `Distill`."
        own = [flag for flag in group.flags if flag.of(title) not in known]
        yield f"### {KINDS[title]}\n\n{_text(group.description)}{also}\n"
        if own:
            yield _table(own)


def _groups(parser: argparse.ArgumentParser) -> Iterator[Group]:
    for group in parser._action_groups:
        actions = [a for a in group._group_actions if a.dest != "help" and a.help != argparse.SUPPRESS]
        title = re.sub(r" ?(options|arguments)$", "", group.title or "")
        commands = [action.choices for action in actions if isinstance(action.choices, dict)]
        flags = [_flag(action) for action in actions if not isinstance(action.choices, dict)]
        if actions:
            outermost = title in ("positional", "subcommands")
            yield Group("" if outermost else title, group.description or "", flags, dict(*commands))


def _flag(action: argparse.Action) -> Flag:
    name = ", ".join(action.option_strings) or action.dest.rpartition(".")[2].upper()
    text = (action.help or "").replace("%%", "%")
    tail = _TAIL.search(text)
    default = tail["default"] if tail else None
    shown = "required" if default is None else "none" if default in ("", "None", "''") else f"`{default}`"
    says = _text(_TAIL.sub("", text))
    return Flag(name, _takes(action), shown, "" if says == action.dest else says)


def _takes(action: argparse.Action) -> str:
    """Describe the values of a flag: a type, or words to choose from."""
    if action.metavar is None:
        return "nothing"
    words = str(action.metavar).replace("{None}|", "").replace("|{None}", "")
    if choices := re.search(r"\{(.*?)\}", words):
        listed = ", ".join(f"`{word}`" for word in choices[1].split(",") if word != "None")
        return listed + (", several" if "..." in words else "")
    return re.sub(r"^\[(.*?) \[.*\]\]$", r"\1 ...", words).replace("|", " or ")


def _table(flags: Sequence[Flag]) -> str:
    rows = ["| flag | takes | default | |", "| --- | --- | --- | --- |"]
    rows += [f"| `{f.name}` | {f.takes} | {f.default} | {f.says.replace('|', chr(92) + '|')} |" for f in flags]
    return "\n".join(rows) + "\n"


def _text(text: str) -> str:
    """Turn a docstring into Markdown: a paragraph in a line, without what it raises."""
    paragraphs = re.split(r"\n\s*\n", textwrap.dedent(_RAISES.sub("", text)).replace("``", "`").strip())
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def main() -> None:
    PAGE.write_text(reference())
    print(PAGE)


if __name__ == "__main__":
    main()
