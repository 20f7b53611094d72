"""The helpers by which other tests read messages find what is there, and nothing else."""

import logging
from functools import cache

import pytest
from messages import has_facts, logged_by, naming

log = logging.getLogger(__name__)
MESSAGE = "k is 5, but 'kl' of\n/tmp/a.json has (2, 3); pass --k 4."


@pytest.mark.parametrize(
    "facts", [(), (5,), (4, "k"), ("'kl'", "/tmp/a.json"), ("(2, 3)", "--k", "a.json")]
)
def test_facts_are_found_in_any_order(facts: tuple[object, ...]) -> None:
    assert has_facts(MESSAGE, *facts)


@pytest.mark.parametrize("fact", [6, "kl2", "l", "a.jso", "--k 5", "(2, 4)", "K", "k.is"])
def test_what_is_not_there_or_a_part_of_a_word_is_not_found(fact: object) -> None:
    assert not has_facts(MESSAGE, "k", fact)
    with pytest.raises(AssertionError), pytest.raises(ValueError, match=naming("k", fact)):
        raise ValueError(MESSAGE)


@cache
def log_once() -> None:
    log.warning("once")


def log_always() -> None:
    log.warning("once")


def test_records_are_found_by_the_function_that_logged_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for _ in range(2):
        log_once()
        log_always()
    assert len(logged_by(caplog, log_once)) == 1
    assert len(logged_by(caplog, log_always)) == 2
