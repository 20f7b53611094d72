"""Write docs/reference.md: every command, and every field of a recipe, as the command line has
them.

python docs/reference.py # after a change of either; tests/test_reference.py fails until it is
done
"""

from __future__ import annotations

import argparse
import importlib
import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from hybrid_distill.cli.app import COMMANDS, NAMES
from hybrid_distill.cli.cache_logits import CacheJob
from hybrid_distill.config import RunConfig
from hybrid_distill.flags import flags_of
from hybrid_distill.stage_flags import with_stage_flags
from hybrid_distill.train.config import Align, AlignMatrix, Distill, DistillOnPolicy

PAGE = Path(__file__).with_suffix(".md")
COMMAND = "hybrid-distill"
WITH_RECIPE_FLAGS = ("run", "cache-logits")
"""Commands whose other flags are a recipe's."""
HEAD = """\
# Reference

Every command and every field of a recipe, listed; the other pages of [docs/](README.md) explain them. Made from the
code by `python docs/reference.py`. The defaults of a recipe are those of its classes: what a recipe sets itself stands
in its `config()`, and `hybrid-distill run RECIPE --help-all` shows it.
"""
SHARED = """\
### Options of several commands

Commands that take one of these name it below their own, with their default if it is another.
"""
OF_ANALYSES = """\
### Options of the analyses

Each of the experiments below takes those that it names.
"""
ANALYSIS = "analyze "
RECIPES = """\
## Fields of a recipe

A recipe's `config()` returns a `RunConfig`. Its fields are flags of `hybrid-distill run RECIPE` and of the recipe's own
file. Each stage that it lists has flags under its own name: `--align.batch-size 8` sets `batch_size` of the `Align` in
`stages`, `--long.steps 10` sets `steps` of a `Distill(name="long")`.
"""
EVERY_STAGE = """\
### every stage

`STAGE` is the name of the stage. A stage that has a `data` of its own has flags for that too, as `data` of the run.
"""
KINDS = {
    "matrix": "AlignMatrix",
    "align": "Align",
    "distill": "Distill",
    "on-policy": "DistillOnPolicy",
}
"""Classes of stages, by the names that they have unless a recipe gives others."""
_TAIL = re.compile(r"\s*\((?:default: (?P<default>.*)|required)\)$", re.DOTALL)
_RAISES = re.compile(r"Raises ValueError[^.]*\.")


Meaning = tuple[str, str, str]


class Flag(NamedTuple):
    """A row of a table."""

    name: str
    takes: str
    default: str
    text: str

    @property
    def meaning(self) -> Meaning:
        """All of the flag except its default: flags with equal meanings share a row."""
        return self.name, self.takes, self.text

    def in_any_stage(self, section: str) -> Flag:
        """Name it as a field of any stage, to compare it with that of another ``section``."""
        return self._replace(name=self.name.replace(f"--{section}.", "--STAGE."))

    def with_default(self, name: str, default: str) -> Flag:
        """Change the default of the flag of this name, and leave others alone."""
        return self._replace(default=default) if self.name == name else self

    def briefly(self, common: Flag) -> str:
        """Name it, with its default where that of its shared row is another."""
        name = self.name.partition(",")[0]
        return f"`{name}`" if self.default == common.default else f"`{name}` ({self.default})"


class Group(NamedTuple):
    """Flags that stand together in the help; the outermost has no title."""

    title: str
    description: str
    flags: list[Flag]
    commands: dict[str, argparse.ArgumentParser]


class Command(NamedTuple):
    """A command, or a subcommand."""

    name: str
    text: str
    flags: list[Flag]


def reference() -> str:
    """Compose the page."""
    return "\n".join([HEAD, *_commands(), RECIPES, *_recipe()]).rstrip() + "\n"


def command_file(name: str) -> ModuleType:
    """Import the file of a command."""
    return importlib.import_module(f"hybrid_distill.cli.{name.replace('-', '_')}")


def _commands() -> Iterator[str]:
    yield "## Commands\n"
    for title, names in COMMANDS.items():
        links = [f"[`{name}`](#{COMMAND}-{name})" for name in names]
        yield f"- {title}: {', '.join(links)}"
    yield ""
    commands: list[Command] = []
    for name in NAMES:
        commands += _command(name)
    shared = _shared_flags(commands)
    meanings_elsewhere: set[Meaning] = set()
    for command in commands:
        if not command.name.startswith(ANALYSIS):
            meanings_elsewhere.update(flag.meaning for flag in command.flags)
    of_several = []
    of_analyses = []
    for flag in shared.values():
        table = of_several if flag.meaning in meanings_elsewhere else of_analyses
        table.append(flag)
    yield SHARED
    yield _table(of_several)
    for command in commands:
        yield f"### {COMMAND} {command.name}\n\n{command.text}\n"
        own = [flag for flag in command.flags if flag.meaning not in shared]
        if own:
            yield _table(own)
        used = [flag.briefly(shared[flag.meaning]) for flag in command.flags if flag not in own]
        if used:
            links = "[Shared options](#options-of-several-commands)"
            if command.name.startswith(ANALYSIS):
                links += ", [of the analyses](#options-of-the-analyses)"
            yield f"{links}: {', '.join(used)}.\n"
        if command.name == ANALYSIS.strip():
            yield OF_ANALYSES
            yield _table(of_analyses)


def _shared_flags(commands: Sequence[Command]) -> dict[Meaning, Flag]:
    """Return the flags that several commands have, by meaning, each with its commonest default."""
    flags: list[Flag] = []
    for command in commands:
        flags += command.flags
    shared: dict[Meaning, Flag] = {}
    for flag, _ in Counter(flags).most_common():
        n_commands = sum(flag.meaning == other.meaning for other in flags)
        if n_commands > 1:
            shared.setdefault(flag.meaning, flag)
    return dict(sorted(shared.items()))


def _command(name: str) -> Iterator[Command]:
    file = command_file(name)
    if name not in WITH_RECIPE_FLAGS:
        yield from _with_subcommands(name, flags_of(file.command))
        return
    flags = [Flag("RECIPE", "PATH", "required", "Recipe, by name or as a file.")]
    if name == "cache-logits":
        flags += _own_of_cache_logits()
    yield Command(name, _text(file.main.__doc__ or ""), flags)


def _own_of_cache_logits() -> list[Flag]:
    """List the flags that the command has beside those of the run."""
    flags = with_stage_flags(RunConfig())
    of_run: list[Flag] = []
    for group in _groups(flags_of(type(flags), default=flags)):
        of_run += group.flags
    outermost = next(_groups(flags_of(CacheJob, default=CacheJob(flags))))
    return [flag for flag in outermost.flags if flag not in of_run]


def _with_subcommands(name: str, parser: argparse.ArgumentParser) -> Iterator[Command]:
    flags: list[Flag] = []
    subcommands: dict[str, argparse.ArgumentParser] = {}
    for group in _groups(parser):
        flags += group.flags
        subcommands.update(group.commands)
    yield Command(name, _text(parser.description or ""), flags)
    for word, inner in subcommands.items():
        yield from _with_subcommands(f"{name} {word}", inner)


def _recipe() -> Iterator[str]:
    stages = (AlignMatrix(), Align(), Distill(), DistillOnPolicy())
    flags = with_stage_flags(RunConfig(stages=stages))
    groups = {group.title: group for group in _groups(flags_of(type(flags), default=flags))}
    # A matrix stage has no settings of its own.
    of_every = [flag.in_any_stage("matrix") for flag in groups["matrix"].flags]
    of_distill = [flag.in_any_stage("distill") for flag in groups["distill"].flags]
    for title, group in groups.items():
        if title in KINDS:
            if title == "matrix":
                yield EVERY_STAGE
                yield _table(of_every)
            if title == "on-policy":
                yield from _stage(group, [*of_every, *of_distill], "those of `Distill`")
            else:
                yield from _stage(group, of_every, "those of every stage")
        else:
            yield f"### {title or 'the run'}\n\n{_text(group.description or RunConfig.__doc__ or '')}\n"
            # These stages are the reference's; each recipe has its own.
            yield _table([flag.with_default("--stages", "all") for flag in group.flags])


def _stage(group: Group, known: Sequence[Flag], where: str) -> Iterator[str]:
    """Describe the fields of a stage that are not ``known``, and those of them with other
    defaults."""
    default_of = {flag.meaning: flag.default for flag in known}
    own = []
    others = []
    for flag in group.flags:
        as_known = flag.in_any_stage(group.title)
        if as_known.meaning not in default_of:
            own.append(flag)
        elif as_known.default != default_of[as_known.meaning]:
            others.append(f"`{flag.name}` ({flag.default})")
    also = f"Its other fields are {where}"
    if others:
        also += f", with the default of {', '.join(others)}"
    yield f"### {KINDS[group.title]}\n\n{_text(group.description)} {also}.\n"
    if own:
        yield _table(own)


def _groups(parser: argparse.ArgumentParser) -> Iterator[Group]:
    for group in parser._action_groups:
        actions = [
            a for a in group._group_actions if a.dest != "help" and a.help != argparse.SUPPRESS
        ]
        if not actions:
            continue
        flags = []
        commands = {}
        for action in actions:
            if isinstance(action.choices, dict):
                commands.update(action.choices)
            else:
                flags.append(_flag(action))
        title = re.sub(r" ?(options|arguments)$", "", group.title or "")
        if title in ("positional", "subcommands"):
            title = ""
        yield Group(title, group.description or "", flags, commands)


def _flag(action: argparse.Action) -> Flag:
    name = ", ".join(action.option_strings) or action.dest.rpartition(".")[2].upper()
    help_text = (action.help or "").replace("%%", "%")
    tail = _TAIL.search(help_text)
    default = tail["default"] if tail else None
    if default is None:
        shown = "required"
    elif default in ("", "None", "''"):
        shown = "none"
    else:
        shown = f"`{default}`"
    text = _text(_TAIL.sub("", help_text))
    # tyro describes an undocumented field by its name.
    return Flag(name, _takes(action), shown, "" if text == action.dest else text)


def _takes(action: argparse.Action) -> str:
    """Describe the values of a flag: a type, or words to choose from."""
    if action.metavar is None:
        return "nothing"
    words = str(action.metavar).replace("{None}|", "").replace("|{None}", "")
    choices = re.search(r"\{(.*?)\}", words)
    if choices is None:
        return re.sub(r"^\[(.*?) \[.*\]\]$", r"\1 ...", words).replace("|", " or ")
    listed = [f"`{word}`" for word in choices[1].split(",") if word != "None"]
    return ", ".join(listed) + (", several" if "..." in words else "")


def _table(flags: Sequence[Flag]) -> str:
    rows = ["| flag | takes | default | |", "| --- | --- | --- | --- |"]
    for flag in flags:
        text = flag.text.replace("|", r"\|")
        rows.append(f"| `{flag.name}` | {flag.takes} | {flag.default} | {text} |")
    return "\n".join(rows) + "\n"


def _text(text: str) -> str:
    """Turn a docstring into Markdown: a paragraph in a line, without what it raises."""
    plain = textwrap.dedent(_RAISES.sub("", text)).replace("``", "`").strip()
    paragraphs = [" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", plain)]
    return "\n\n".join(paragraphs)


def main() -> None:
    PAGE.write_text(reference())
    print(PAGE)


if __name__ == "__main__":
    main()
