"""Choose how many prompts and questions rank heads, where the user does not say."""

from __future__ import annotations

from collections.abc import Iterable

# For a ranking: 24 prompts of 8 questions tell more heads apart than 128 of one, in half the time
# (docs/scores.md).
QUESTIONS = 8
MOST_PROMPTS = 128
FEWEST_PROMPTS = 24


def default_questions(sizes: Iterable[int]) -> int:
    """Return the number of questions per prompt of a ranking, for dictionaries of these sizes."""
    return min(QUESTIONS, *sizes)


def default_prompts(n_questions: int) -> int:
    """Return the number of prompts of a ranking, for this number of questions per prompt."""
    n_prompts = FEWEST_PROMPTS * QUESTIONS // n_questions
    return min(MOST_PROMPTS, max(FEWEST_PROMPTS, n_prompts))
