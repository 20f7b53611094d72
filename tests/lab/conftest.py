"""Fixtures of the lab: a ranking of the embedded teacher's heads, and models of other kinds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_head_sites import FAMILIES, make_model

from hybrid_distill.scoring import HeadScores
from hybrid_distill.teacher import load_teacher


@pytest.fixture(scope="session")
def scores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that ranks the embedded teacher's circuit first (tests/cli/test_score.py finds it)."""
    drop_LH = torch.zeros(6, 8, dtype=torch.float64)
    for place, head in enumerate([(2, 6), (0, 1), (5, 5), (1, 2)]):
        drop_LH[head] = 0.9 - 0.1 * place
    nothing_LH = torch.zeros_like(drop_LH)
    path = tmp_path_factory.mktemp("scores") / "scores.json"
    HeadScores(4, drop_LH, nothing_LH, None, nothing_LH, nothing_LH, None).save(path)
    return path


@pytest.fixture(scope="session")
def random_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random models of other kinds that the embedded teacher's tokenizer fits, a folder each."""
    folder = tmp_path_factory.mktemp("models")
    _, tokenizer = load_teacher("tiny")
    for family in ("falcon_h1", "zamba2", "mamba2", "falcon_mamba"):
        model = make_model(family)
        config = type(model.config)(**{**FAMILIES[family][1], "vocab_size": len(tokenizer)})
        type(model)(config).save_pretrained(folder / family)
        tokenizer.save_pretrained(folder / family)
    return folder
