"""Embedded default: a tiny teacher, its tokenizer, a small corpus and the facts that the teacher was taught.

Made by ``recipes/train_tiny_teacher.py`` from a seed; nothing here needs a network.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Literal

Split = Literal["train", "held_out"]

_HERE = Path(__file__).parent


def tiny_teacher_path() -> Path:
    """Return the Hugging Face folder of the tiny teacher (Llama, grouped-query attention) and its tokenizer."""
    return _HERE / "tiny_teacher"


def facts_path() -> Path:
    """Return the JSON lines ``{"prompt", "answer", "choices"}``: the facts the teacher was taught."""
    return _HERE / "knowledge.jsonl"


def prompts_path() -> Path:
    """Return the parts of the prompts that teachers write text on: openings, instructions, facts and questions."""
    return _HERE / "prompts.json"


def corpus_path(split: Split) -> Path:
    """Return gzipped JSON lines ``{"text"}``: stories, facts, in-context references; none in the probe's wording."""
    return _HERE / f"corpus_{split}.jsonl.gz"


def corpus_documents(split: Split) -> list[str]:
    """Read the documents of a split."""
    if split not in ("train", "held_out"):
        raise ValueError(f"the embedded corpus has no split {split!r}; pass train, held_out or probe_like.")
    with gzip.open(corpus_path(split), "rt", encoding="utf-8") as lines:
        return [json.loads(line)["text"] for line in lines]
