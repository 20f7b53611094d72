"""Parsing of flags into typed values with tyro; its boxed errors become one line."""

from __future__ import annotations

import argparse
import difflib
import functools
import inspect
import io
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from typing import Annotated, TypeVar, cast, get_type_hints

import tyro

from ..validation import check_value

T = TypeVar("T")
Parsed = Callable[[], object]
_BAD_NUMBER = re.compile(r"(?:invalid literal for (int)\(\).*|could not convert string to float): (.*)")


def parse(command: Callable[..., object], words: Sequence[str], prog: str) -> Parsed:
    """Bind flags to the parameters of a command; calling the result runs it. Raises ValueError for bad flags."""

    signature, hints = inspect.signature(command), get_type_hints(command, include_extras=True)

    def bound(*args: object, **options: object) -> Parsed:
        given = signature.bind(*args, **options).arguments
        for name, value in given.items():
            check_value(f"--{name.replace('_', '-')}", hints[name], value)
        return functools.partial(command, *args, **options)

    parameters = []
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.POSITIONAL_ONLY:  # tyro would show PATH
            hints[name] = Annotated[hints[name], tyro.conf.arg(metavar=name.upper())]
        parameters.append(parameter.replace(annotation=hints[name]))
    bound.__signature__ = signature.replace(parameters=parameters)  # pyright: ignore[reportFunctionMemberAccess]
    bound.__name__, bound.__doc__, bound.__annotations__ = command.__name__, command.__doc__, hints
    return _in_one_line(lambda: tyro.cli(bound, args=words, prog=prog), words)


def parse_as(kind: type[T], words: Sequence[str], *, default: T, prog: str | None, description: str | None) -> T:
    """Override the fields of a dataclass with flags. Raises ValueError for bad flags."""
    return _in_one_line(lambda: tyro.cli(kind, default=default, args=words, prog=prog, description=description), words)


def flags_of(kind: Callable[..., T], default: T | None = None) -> argparse.ArgumentParser:
    """Return the parser for a function's or dataclass's flags, for inspection only."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        parser = tyro.extras.get_parser(kind) if default is None else tyro.extras.get_parser(kind, default=default)
    return cast(argparse.ArgumentParser, parser)  # tyro's own copy of that class


def short_help(parser: argparse.ArgumentParser, shown: Iterable[str], prog: str, description: str | None) -> str:
    """Format help for only the flags ``shown``."""
    short = argparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} [FLAGS]",
        description=(description or "").strip(),
        epilog="--help-all lists all flags, docs/reference.md too.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
    )
    wanted = set(shown)
    for action in parser._actions:
        if wanted.isdisjoint(action.option_strings):
            continue
        text = (action.help or "").replace("``", "")
        if action.metavar is None:
            short.add_argument(*action.option_strings, action="store_true", help=text)
        else:
            short.add_argument(
                *action.option_strings, metavar=re.sub(r"\{None\}\||\|\{None\}", "", str(action.metavar)), help=text
            )
    return short.format_help()


def usage(main: Callable[..., None], takes: str) -> str:
    """Format the help of a command that passes its flags on."""
    name = main.__module__.rpartition(".")[2].replace("_", "-")
    return f"usage: hybrid-distill {name} {takes} [FLAGS]\n\n{inspect.getdoc(main)}"


def _in_one_line(parse: Callable[[], T], words: Sequence[str]) -> T:
    if not {"-h", "--help"}.isdisjoint(words):
        shown = io.TextIOWrapper(io.BytesIO(), encoding=sys.stdout.encoding)
        try:
            with redirect_stdout(shown):
                return parse()
        finally:  # hide None, which nobody types: it means that an option is omitted
            shown.seek(0)
            text = re.sub(r"(?m)^(│.*?)\{None\}\|(\S+)", r"\1\2       ", shown.read())
            print(text.replace("{None}|", "").replace("(default: None)", " " * 15), end="")
    said, columns = io.StringIO(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "10000"  # keep each paragraph on one line
    try:
        with redirect_stderr(said):
            return parse()
    except SystemExit:
        raise ValueError(_one_line(said.getvalue())) from None
    finally:
        del os.environ["COLUMNS"]
        if columns is not None:
            os.environ["COLUMNS"] = columns


def _one_line(box: str) -> str:
    """Shorten tyro's error box to its first section, plus the flag named in the next one."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip(" │") for line in box.splitlines()]
    sections: list[list[str]] = [[]]
    for line in lines:
        if re.fullmatch("[─-]+", line):
            sections.append([])
        elif line and line[0] not in "╭╰":
            sections[-1].append(line)
    first, *others = sections if "│" in box else sections[1:]
    flag = next((line for section in others for line in section if line.startswith("--")), "")
    said = " ".join(first)
    if error := re.match(r"Error parsing (\S+?): (.*)", said):
        name, reason = error.groups()
        if bad := _BAD_NUMBER.fullmatch(reason):
            return f"{name} is {bad[2]}; it must be a {'whole number' if bad[1] else 'number'}."
        return f"{name}: {reason}; pass {flag}." if name.startswith("-") else reason
    if said.startswith("Unrecognized options:"):
        words = said.removeprefix("Unrecognized options: ").split(", ")
        unknown = [word for word in words if word.startswith("--")] or words[:1]
        flags = [line.split()[0].rstrip(",") for section in others for line in section if line.startswith("--")]
        similar = dict.fromkeys(near for word in unknown for near in difflib.get_close_matches(word, flags, n=1))
        meant = f" did you mean {', '.join(similar)}?" if similar else ""
        verb = "is" if len(unknown) == 1 else "are"
        return f"{', '.join(unknown)} {verb} not recognized;{meant} --help lists the flags."
    if missing := re.match(r"Missing value for argument '(\S+)'", said):
        return f"{missing[1]} is missing; --help lists the flags."
    if said.startswith("Missing from"):
        return f"{', '.join(first[1::2])} is missing; --help lists the flags."
    return said
