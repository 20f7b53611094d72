"""Serve an exported student at an OpenAI-compatible address, with transformers' own server."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import transformers

from ..guard import MARK, check_checkpoint, check_no_run
from ..io import read_json
from ..model import HybridConfig, HybridForCausalLM

PACKAGES = ("fastapi", "uvicorn", "openai")


def serve(folder: Path, options: Sequence[str] = ()) -> None:
    """Run ``transformers serve FOLDER OPTIONS`` until it is stopped.

    That server takes a model's class from transformers by its name, so this puts it there; the folder's own code is not
    run. Raises ValueError for a folder that is not an export, absent packages and transformers before 5.
    """
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

    setattr(transformers, HybridForCausalLM.__name__, HybridForCausalLM)
    app(["serve", str(folder), *options])
