"""`hybrid-distill serve`: an exported student behind an OpenAI-compatible address."""

from __future__ import annotations

from pathlib import Path

from ..lab.serve import serve


def main(words: list[str]) -> None:
    """Answer OpenAI-style requests over HTTP with an exported student: FOLDER, then flags of `transformers serve`."""
    if not words or words[0] in ("-h", "--help"):
        print(f"usage: hybrid-distill serve FOLDER [FLAGS]\n\n{main.__doc__} --help after FOLDER lists them.")
        return
    serve(Path(words[0]), words[1:])
