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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Annotated, TypeVar, cast, get_type_hints

import tyro

from .validation import check_value

T = TypeVar("T")
Parsed = Callable[[], object]
_BAD_NUMBER = re.compile(
    r"(?:invalid literal for (int)\(\).*|could not convert string to float): (.*)"
)
_BAD_OPTIONAL = re.compile(
    r"no type matching .* could be instantiated from \[(.*?)\]\. Got errors: .*"
)
_KINDS = {"INT": "a whole number", "FLOAT": "a number", "FLOAT FLOAT FLOAT": "three numbers"}
"""Words for the types of optional flags, as tyro shows them."""
_NO_WRAPPING = "10000"
"""Columns of a terminal on which each paragraph of an error is one line."""


def parse(command: Callable[..., object], words: Sequence[str], prog: str) -> Parsed:
    """Bind flags to the parameters of a command; calling the result runs it. Raises ValueError
    for bad flags."""
    signature = inspect.signature(command)
    hints = get_type_hints(command, include_extras=True)

    def bound(*args: object, **options: object) -> Parsed:
        for name, value in signature.bind(*args, **options).arguments.items():
            check_value(f"--{name.replace('_', '-')}", hints[name], value)
        return functools.partial(command, *args, **options)

    parameters = []
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.POSITIONAL_ONLY:
            # By default, tyro shows the type instead: PATH.
            hints[name] = Annotated[hints[name], tyro.conf.arg(metavar=name.upper())]
        parameters.append(parameter.replace(annotation=hints[name]))
    # tyro reads these of the function that it is given.
    bound.__signature__ = signature.replace(parameters=parameters)  # pyright: ignore[reportFunctionMemberAccess]
    bound.__name__ = command.__name__
    bound.__doc__ = command.__doc__
    bound.__annotations__ = hints
    return _in_one_line(lambda: tyro.cli(bound, args=words, prog=prog), words)


def parse_as(
    kind: type[T], words: Sequence[str], *, default: T, prog: str | None, description: str | None
) -> T:
    """Override the fields of a dataclass with flags. Raises ValueError for bad flags."""
    return _in_one_line(
        lambda: tyro.cli(kind, default=default, args=words, prog=prog, description=description),
        words,
    )


def flags_of(kind: Callable[..., T], default: T | None = None) -> argparse.ArgumentParser:
    """Return the parser for a function's or dataclass's flags, for inspection only."""
    with warnings.catch_warnings():
        # tyro marks it as deprecated, and has nothing else to list flags with.
        warnings.simplefilter("ignore", DeprecationWarning)
        if default is None:
            parser = tyro.extras.get_parser(kind)
        else:
            parser = tyro.extras.get_parser(kind, default=default)
    # It is tyro's own copy of that class.
    return cast(argparse.ArgumentParser, parser)


def short_help(
    parser: argparse.ArgumentParser, shown: Iterable[str], prog: str, description: str | None
) -> str:
    """Format help for only the flags ``shown``."""
    short = argparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} [FLAGS]",
        description=(description or "").strip(),
        epilog="--help-all lists all flags, docs/reference.md too.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
    )
    for action in parser._actions:
        if set(shown).isdisjoint(action.option_strings):
            continue
        text = (action.help or "").replace("``", "")
        if action.metavar is None:
            short.add_argument(*action.option_strings, action="store_true", help=text)
        else:
            metavar = re.sub(r"\{None\}\||\|\{None\}", "", str(action.metavar))
            short.add_argument(*action.option_strings, metavar=metavar, help=text)
    return short.format_help()


def _in_one_line(parse: Callable[[], T], words: Sequence[str]) -> T:
    """Call tyro. Help is printed without None; an error becomes a ValueError of one line."""
    if not {"-h", "--help"}.isdisjoint(words):
        with _help_without_none():
            return parse()
    errors = io.StringIO()
    try:
        with _without_wrapping(), redirect_stderr(errors):
            return parse()
    except SystemExit:
        raise ValueError(_one_line(errors.getvalue())) from None


@contextmanager
def _help_without_none() -> Iterator[None]:
    """Hide None in what is printed inside: nobody types it, it means that an option is omitted."""
    # With an encoding, unlike StringIO: tyro draws boxes only where they can be shown.
    printed = io.TextIOWrapper(io.BytesIO(), encoding=sys.stdout.encoding)
    try:
        with redirect_stdout(printed):
            yield
    finally:
        printed.seek(0)
        text = printed.read()
        # Blanks keep the right edge of the box where it is.
        text = re.sub(r"(?m)^(│.*?)\{None\}\|(\S+)", r"\1\2       ", text)
        text = text.replace("{None}|", "").replace("(default: None)", " " * 15)
        print(text, end="")


@contextmanager
def _without_wrapping() -> Iterator[None]:
    """Let tyro write each paragraph on one line inside: it wraps at the terminal's width."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = _NO_WRAPPING
    try:
        yield
    finally:
        del os.environ["COLUMNS"]
        if before is not None:
            os.environ["COLUMNS"] = before


def _one_line(box: str) -> str:
    """Shorten tyro's error box to its first section, plus the flag named in the next one."""
    first, others = _sections(box)
    message = " ".join(first)
    flags = [line for line in others if line.startswith("--")]
    if error := re.match(r"Error parsing (\S+?): (.*)", message):
        return _unparsable(*error.groups(), flag=flags[0] if flags else "")
    if message.startswith("Unrecognized options:"):
        return _unrecognized(message.removeprefix("Unrecognized options: ").split(", "), flags)
    if missing := re.match(r"Missing value for argument '(\S+)'", message):
        return f"{missing[1]} is missing; --help lists the flags."
    if message.startswith("Missing from"):
        return f"{_with_verb(_missing(first[1:]))} missing; --help lists the flags."
    return message


def _missing(lines: list[str]) -> list[str]:
    """Return the missing flags: each stands on a line, and the help after it ends with (required)."""
    flags = []
    is_flag = True
    for line in lines:
        if is_flag:
            flags.append(line)
        is_flag = line.endswith("(required)")
    return flags


def _sections(box: str) -> tuple[list[str], list[str]]:
    """Return the lines of an error's first section, and of all others, without colors and the
    box."""
    sections: list[list[str]] = [[]]
    for line in box.splitlines():
        text = re.sub(r"\x1b\[[0-9;]*m", "", line).strip(" │")
        if re.fullmatch("[─-]+", text):
            sections.append([])
        elif text and text[0] not in "╭╰":
            sections[-1].append(text)
    if "│" not in box:
        # Where stderr has no characters for a box, the title is a section of its own.
        sections = sections[1:]
    others: list[str] = []
    for section in sections[1:]:
        others += section
    return sections[0], others


def _unparsable(name: str, reason: str, flag: str) -> str:
    bad_number = _BAD_NUMBER.fullmatch(reason)
    if bad_number is not None:
        kind = "whole number" if bad_number[1] else "number"
        return f"{name} is {bad_number[2]}; it must be a {kind}."
    if bad_optional := _BAD_OPTIONAL.fullmatch(reason):
        expected = flag.removeprefix(name).replace("{None}|", "").strip(" {}")
        return f"{name} is {bad_optional[1]}; pass {_KINDS.get(expected, expected)}."
    if name.startswith("-"):
        return f"{name}: {reason}; pass {flag}."
    return reason


def _unrecognized(words: Sequence[str], suggestions: Sequence[str]) -> str:
    unknown = [word for word in words if word.startswith("--")] or words[:1]
    flags = []
    for line in suggestions:
        flags += re.findall(r"--[^\s,]+", line)
    similar: list[str] = []
    for word in unknown:
        # The closest to --no-data.chat is --data.chat, its opposite.
        negated = re.sub(r"^--no-(.+\.)", r"--\1no-", word)
        similar += difflib.get_close_matches(negated, flags, n=1)
    question = ""
    if similar:
        question = f" did you mean {', '.join(dict.fromkeys(similar))}?"
    return f"{_with_verb(unknown)} not recognized;{question} --help lists the flags."


def _with_verb(flags: Sequence[str]) -> str:
    verb = "is" if len(flags) == 1 else "are"
    return f"{', '.join(flags)} {verb}"
