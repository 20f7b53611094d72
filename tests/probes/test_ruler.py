"""RULER's questions: lm-eval's settings and wording, at any length, from a seed alone."""

import random
import re
from typing import Any

import numpy as np
import pytest
from families import family_tokenizer
from messages import naming

from hybrid_distill.probes.registry import make_probe
from hybrid_distill.probes.ruler import (
    NEEDLES,
    TASKS,
    load_generators,
    ruler_questions,
    tokens_to_generate,
)

pytest.importorskip("lm_eval", reason="the extra eval is not installed")
pytest.importorskip("wonderwords", reason="the extra ruler of lm-eval is not installed")

TOKENIZER = family_tokenizer("smollm2")


def test_needles_are_asked_for_with_lm_evals_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    load_generators()
    from lm_eval.tasks.ruler import niah_utils

    options_of_task: dict[str, Any] = {}

    def note_options(haystack: object, **options: object) -> list[dict[str, int]]:
        options_of_task.update(options)
        return [{"x": 1}]

    monkeypatch.setattr(niah_utils, "get_tokenizer", lambda name: None)
    monkeypatch.setattr(niah_utils, "get_haystack", lambda type_haystack: type_haystack)
    monkeypatch.setattr(niah_utils, "generate_samples", note_options)
    for task, needles in NEEDLES.items():
        options_of_task.clear()
        getattr(niah_utils, task)(max_seq_lengths=[512])
        expected = {name: options_of_task.get(name, 1) for name in needles._fields}
        # As generate_samples does.
        expected["num_needle_k"] = max(expected["num_needle_k"], expected["num_needle_q"])
        assert needles._asdict() == expected, task


def wording(prompt: str) -> set[str]:
    """Return a prompt's lines with needles of the same form made equal."""
    needle = re.compile(r" for .+?-.+? (is|mentioned)(: \S+)?")
    return {needle.sub(r" for X \1", line) for line in prompt.split("\n")}


@pytest.mark.parametrize("task", ["niah_single_1", "niah_multikey_2", "niah_multikey_3"])
def test_prompts_are_worded_as_lm_evals(task: str) -> None:
    length = 2000
    generators = load_generators()
    options = NEEDLES[task]._asdict()
    (row,) = generators.niah.generate_samples(
        generators.niah.get_haystack(options["type_haystack"]),
        TOKENIZER=TOKENIZER,
        template=generators.niah_template,
        max_seq_length=length,
        num_samples=1,
        **options,
    )
    (question,) = ruler_questions(task, length, TOKENIZER, 1, 1)
    assert wording(question.prompt) == wording(f"{row['input']} {row['gen_prefix']}")


@pytest.mark.parametrize("task", TASKS)
def test_questions_fill_a_length_and_follow_from_the_seed(task: str) -> None:
    random.seed(5)
    np.random.seed(7)
    state = random.getstate()
    next_number = np.random.RandomState(7).random()
    length = 2000
    questions = list(ruler_questions(task, length, TOKENIZER, seed=1, n=3))
    # The program's own random state is left alone.
    assert random.getstate() == state
    assert np.random.random() == next_number

    first_two = list(ruler_questions(task, length, TOKENIZER, seed=1, n=2))
    of_another_seed = next(ruler_questions(task, length, TOKENIZER, seed=2, n=1))
    assert questions[:2] == first_two
    assert questions[0] != of_another_seed
    assert questions[0] != questions[1]

    for question in questions:
        n_tokens = len(TOKENIZER(question.prompt)["input_ids"])
        assert 1700 < n_tokens + tokens_to_generate(task, length) <= length
        assert all(answer in question.prompt for answer in question.answers)


@pytest.mark.parametrize(
    "task", ["niah_single_3", "niah_multikey_2", "niah_multivalue", *TASKS[-3:]]
)
def test_a_probe_asks_for_one_answer(task: str) -> None:
    length = 1500
    probe = make_probe(task, n_tokens=length, tokenizer=TOKENIZER)
    examples = probe.examples(3)
    questions = ruler_questions(task, length, TOKENIZER, 0, 3)
    assert examples[:2] == probe.examples(2)
    for example, question in zip(examples, questions, strict=True):
        # The prompt gives all answers but the last.
        *others, answer = question.answers
        assert example.prompt == " ".join([question.prompt, *others])
        assert example.answer == f" {answer}"
        assert len(example.choices) == 10 == 1 / probe.chance
        wrong = {choice.strip() for choice in example.choices} - {*question.answers}
        assert len(wrong) == 9
        if task in ("niah_multikey_2", "ruler_cwe"):
            assert all(word in example.prompt for word in wrong)
    assert probe.describe()["length"] == length


def test_a_length_that_is_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match=naming("ruler_cwe", 128)):
        list(ruler_questions("ruler_cwe", 128, TOKENIZER, 1, 1))
