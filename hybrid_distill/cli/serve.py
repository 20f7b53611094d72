"""`hybrid-distill serve`: an exported student behind an OpenAI-compatible address."""

from __future__ import annotations

from pathlib import Path

from ..lab.serve import serve
from .parsing import usage


def main(words: list[str]) -> None:
    """Answer OpenAI-style requests over HTTP with an exported student.

    Takes the flags of `transformers serve` after the folder; --help there lists them.
    """
    if not words or words[0] in ("-h", "--help"):
        print(usage(main, "FOLDER"))
        return
    serve(Path(words[0]), words[1:])
