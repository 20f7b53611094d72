"""`hybrid-distill serve`: an OpenAI-compatible API for an exported student, by transformers' own server."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import Any, get_args

import transformers

from ..distributed import own_device
from ..guard import MARK, check_checkpoint, check_no_run
from ..io import read_json
from ..kernels import Kernels, check_kernels
from ..model import HybridConfig, HybridForCausalLM
from .parsing import usage

PACKAGES = ("fastapi", "uvicorn", "openai")


def main(words: list[str]) -> None:
    """Serve an exported student over an OpenAI-compatible HTTP API.

    Takes the flags of `transformers serve` after the folder; FOLDER --help lists them. --kernels auto, triton,
    mamba_ssm or torch selects the implementation of recurrent heads.
    """
    if not words or words[0] in ("-h", "--help"):
        print(usage(main, "FOLDER"))
        return
    folder = Path(words[0])
    flags, kernels = _without_kernels(words[1:])
    check_no_run(folder)
    found = read_json(folder / "config.json").get("model_type") if (folder / "config.json").is_file() else None
    if found != HybridConfig.model_type and not (folder / MARK).is_file():
        content = f"holds a model of type {found!r}" if found else "holds no config.json"
        raise ValueError(f"{folder} {content}, so it is not an export; pass what `hybrid-distill export` wrote.")
    check_checkpoint(folder)
    if absent := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        raise ValueError(f"serving needs {', '.join(absent)}: pip install 'transformers[serving]'.")
    if importlib.util.find_spec("transformers.cli") is None:
        raise ValueError(f"transformers {transformers.__version__} has no server; serving needs version 5 or newer.")
    from transformers.cli.transformers import app

    check_kernels(kernels, own_device())

    # The server looks up a model's class in transformers by name; the folder's own code is not run.
    served = HybridForCausalLM if kernels == "auto" else _on_kernels(kernels)
    setattr(transformers, HybridForCausalLM.__name__, served)
    app(["serve", str(folder), *flags])


def _on_kernels(kernels: Kernels) -> type[HybridForCausalLM]:
    """Make a class of students that are on these kernels from the start: the server builds them itself."""

    class Served(HybridForCausalLM):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.set_ssm_implementation(kernels)

    return Served


def _without_kernels(words: list[str]) -> tuple[list[str], Kernels]:
    """Take --kernels out of the flags. Raises ValueError for an unknown value."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False, exit_on_error=False)
    parser.add_argument("--kernels", default="auto")
    options, flags = parser.parse_known_args(words)
    choices = get_args(Kernels)
    if options.kernels not in choices:
        raise ValueError(f"--kernels is {options.kernels!r}; pass one of {', '.join(choices)}.")
    return flags, options.kernels
