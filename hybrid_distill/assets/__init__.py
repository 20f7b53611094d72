"""Embedded defaults: a tiny teacher, its tokenizer, a small corpus and the facts that the teacher
was taught, which ``recipes/train_tiny_teacher.py`` made from a seed; head scores of real models
(docs/atlas.md), and general knowledge to ask them. Nothing here needs network access.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Literal

Split = Literal["train", "held_out"]

_HERE = Path(__file__).parent


def tiny_teacher_path() -> Path:
    """Locate the folder of the tiny teacher (Llama, grouped-query attention) and tokenizer."""
    return _HERE / "tiny_teacher"


def facts_path() -> Path:
    """Locate the teacher's facts: JSON Lines of ``{"prompt", "answer", "choices"}``."""
    return _HERE / "knowledge.jsonl"


def general_facts_path() -> Path:
    """Locate questions of general knowledge, in the format of `facts_path`."""
    return _HERE / "general_facts.jsonl"


def atlas_path(model: str) -> Path:
    """Locate the head scores of a real model: ``smollm2-135m-instruct`` or ``gemma-3-270m``, by ablation;
    ``smollm2-135m-instruct-window300``, by what windows take from each head."""
    return _HERE / "atlas" / f"{model}.json"


def prompts_path() -> Path:
    """Locate the parts of the prompts for text generation."""
    return _HERE / "prompts.json"


def corpus_path(split: Split) -> Path:
    """Locate a split, gzipped JSON Lines ``{"text"}``: stories, facts, in-context references.

    It has no wording of the probes.
    """
    return _HERE / f"corpus_{split}.jsonl.gz"


def corpus_documents(split: Split) -> list[str]:
    """Read the documents of a split."""
    if split not in ("train", "held_out"):
        raise ValueError(f"the embedded corpus has no split {split!r}; pass train or held_out.")
    with gzip.open(corpus_path(split), "rt", encoding="utf-8") as lines:
        return [json.loads(line)["text"] for line in lines]
