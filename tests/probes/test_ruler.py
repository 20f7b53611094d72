"""RULER's questions: lm-eval's settings and wording, at any length, from a seed alone."""

from __future__ import annotations

import random
import re
from typing import Any

import numpy as np
import pytest
from families import family_tokenizer

from hybrid_distill.probes.ruler import NEEDLES, TASKS, load_generators, ruler_questions, tokens_to_generate

pytest.importorskip("lm_eval", reason="the extra eval is not installed")
pytest.importorskip("wonderwords", reason="the extra ruler of lm-eval is not installed")


def test_needles_are_asked_for_with_lm_evals_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    load_generators()
    from lm_eval.tasks.ruler import niah_utils

    given: dict[str, Any] = {}
    monkeypatch.setattr(niah_utils, "get_tokenizer", lambda name: None)
    monkeypatch.setattr(niah_utils, "get_haystack", lambda type_haystack: type_haystack)
    monkeypatch.setattr(niah_utils, "generate_samples", lambda haystack, **options: given.update(options) or [{"x": 1}])
    for task, needles in NEEDLES.items():
        given.clear()
        getattr(niah_utils, task)(max_seq_lengths=[512])
        theirs = {name: given.get(name, 1) for name in needles._fields}
        theirs["num_needle_k"] = max(theirs["num_needle_k"], theirs["num_needle_q"])  # as generate_samples does
        assert needles._asdict() == theirs, task


@pytest.mark.parametrize("task", ["niah_single_1", "niah_multikey_2", "niah_multikey_3"])
def test_prompts_are_worded_as_lm_evals(task: str) -> None:
    niah, tokenizer, options = load_generators().niah, family_tokenizer("smollm2"), NEEDLES[task]._asdict()
    options |= {"template": load_generators().niah_template, "max_seq_length": 2000, "num_samples": 1}
    (row,) = niah.generate_samples(niah.get_haystack(options["type_haystack"]), TOKENIZER=tokenizer, **options)
    (ours,) = ruler_questions(task, 2000, tokenizer, 1, 1)
    theirs = f"{row['input']} {row['gen_prefix']}"
    lines = [
        {re.sub(r" for .+?-.+? (is|mentioned)(: \S+)?", r" for X \1", line) for line in text.split("\n")}
        for text in (ours.prompt, theirs)
    ]
    assert lines[0] == lines[1]


@pytest.mark.parametrize("task", TASKS)
def test_questions_fill_a_length_and_follow_from_the_seed(task: str) -> None:
    tokenizer = family_tokenizer("smollm2")
    random.seed(5)
    before, drawn = random.getstate(), np.random.RandomState(7).random()
    np.random.seed(7)
    found = list(ruler_questions(task, 2000, tokenizer, 1, 3))
    assert random.getstate() == before and np.random.random() == drawn, "the program's own random state is left alone"
    assert found[:2] == list(ruler_questions(task, 2000, tokenizer, 1, 2))
    assert found[0] != next(ruler_questions(task, 2000, tokenizer, 2, 1)) and found[0] != found[1]
    for question in found:
        n_tokens = len(tokenizer(question.prompt)["input_ids"]) + tokens_to_generate(task, 2000)
        assert 1700 < n_tokens <= 2000
        assert all(answer in question.prompt for answer in question.answers)


def test_what_cannot_be_asked_is_refused_in_one_line() -> None:
    tokenizer = family_tokenizer("smollm2")
    with pytest.raises(ValueError, match="ruler_cwe does not fit into 128 tokens"):
        list(ruler_questions("ruler_cwe", 128, tokenizer, 1, 1))
