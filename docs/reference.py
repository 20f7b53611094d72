"""Writes docs/reference.md: every command, and every field of a recipe, as the command line has them.

python docs/reference.py            # after a change of either; tests/test_reference.py fails until it is done
"""

from __future__ import annotations

import argparse
import re
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tyro

from hybrid_distill.cli.app import app as cli
from hybrid_distill.cli.cache_logits import CacheJob
from hybrid_distill.config import RunConfig

PAGE = Path(__file__).with_suffix(".md")
COMMAND = "hybrid-distill"
HEAD = """\
# Reference

Every command and every field of a recipe, listed; the other pages of [docs/](README.md) explain them. Made from the
code by `python docs/reference.py`. The defaults of a recipe are those of its classes: what a recipe sets itself stands
in its `config()`, and `hybrid-distill run RECIPE --help` shows it.
"""
RECIPES = """\
## Fields of a recipe

A recipe's `config()` returns a `RunConfig`. Its fields are flags of `hybrid-distill run RECIPE` and of the recipe's own
file; in Python a dash is an underscore: `--align.batch-size 8` is `config.align.batch_size`.
"""
STAGES = ("matrix", "align", "distill", "on-policy", "long", "post")
LIKE_DISTILL = ("on-policy", "long", "post")
_TAIL = re.compile(r"\s*\((?:default: (?P<default>.*)|required)\)$", re.DOTALL)
_RAISES = re.compile(r"Raises ValueError[^.]*\.")


class Flag(NamedTuple):
    """A row of a table."""

    name: str
    takes: str
    default: str
    says: str

    def of(self, section: str) -> Flag:
        """As a field of ``section``, to be compared with that of another."""
        return self._replace(name=self.name.replace(f"--{section}.", "--STAGE."))


class Group(NamedTuple):
    """Flags that stand together in the help; the outermost has no title."""

    title: str
    description: str
    flags: list[Flag]
    commands: dict[str, argparse.ArgumentParser]


def reference() -> str:
    """The page."""
    return "\n".join([HEAD, *_commands(), RECIPES, *_recipe()]).rstrip() + "\n"


def _commands() -> Iterator[str]:
    yield "## Commands\n"
    commands = {name.replace("_", "-"): spec.target for name, spec in vars(cli.app)["_subcommands"].items()}
    yield from (f"- [`{name}`](#{COMMAND}-{name})" for name in commands)
    yield ""
    for name, function in commands.items():
        own = _own_of_cache_logits() if name == "cache-logits" else []
        yield from _command(f"{COMMAND} {name}", _parser(function), own)


def _own_of_cache_logits() -> list[Flag]:
    """The flags that the command has besides those of the run."""
    of_run = [flag for group in _groups(_parser(RunConfig, default=RunConfig())) for flag in group.flags]
    outermost = next(_groups(_parser(CacheJob, default=CacheJob(RunConfig()))))
    return [flag for flag in outermost.flags if flag not in of_run]


def _command(name: str, parser: argparse.ArgumentParser, more: Sequence[Flag] = ()) -> Iterator[str]:
    yield f"### {name}\n\n{_text(parser.description or '')}\n"
    groups = list(_groups(parser))
    if flags := [flag for group in groups for flag in group.flags]:
        yield _table([*flags, *more])
    for group in groups:
        for word, inner in group.commands.items():
            yield from _command(f"{name} {word}", inner)


def _recipe() -> Iterator[str]:
    parser = _parser(RunConfig, default=RunConfig())
    groups = {group.title: group for group in _groups(parser)}
    every, of_distill = ([flag.of(name) for flag in groups[name].flags] for name in ("matrix", "distill"))
    for title, group in groups.items():
        if title == STAGES[0]:
            yield f"### every stage\n\n`STAGE` is {', '.join(f'`{stage}`' for stage in STAGES)}.\n\n{_table(every)}"
        known = [*every, *(of_distill if title in LIKE_DISTILL else [])] if title in STAGES else []
        own = [flag for flag in group.flags if flag.of(title) not in known]
        also = " Its other fields are those of `distill`." if title in LIKE_DISTILL else ""
        yield f"### {title or 'the run'}\n\n{_text(group.description or parser.description or '')}{also}\n"
        yield _table(own) if own else "It has no fields but those of every stage.\n"


def _parser(of: Any, **options: Any) -> argparse.ArgumentParser:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        parser: Any = tyro.extras.get_parser(of, **options)
    return parser


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
    name = ", ".join(action.option_strings) or action.dest.upper()
    text = (action.help or "").replace("%%", "%")
    tail = _TAIL.search(text)
    default = tail["default"] if tail else None
    shown = "required" if default is None else "none" if default in ("", "None", "''") else f"`{default}`"
    says = _text(_TAIL.sub("", text))
    return Flag(name, _takes(action), shown, "" if says == action.dest else says)


def _takes(action: argparse.Action) -> str:
    """The values of a flag: a type, or words to choose from."""
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
    """A docstring as Markdown: paragraphs in one line each; what it raises is said elsewhere."""
    paragraphs = re.split(r"\n\s*\n", textwrap.dedent(_RAISES.sub("", text)).replace("``", "`").strip())
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def main() -> None:
    PAGE.write_text(reference())
    print(PAGE)


if __name__ == "__main__":
    main()
