"""Render messages by a tokenizer's chat template, for training data and for probes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from .io import Record

_DATE = "26 Jul 2024"
"""Date in conversations, Llama 3.1's default. Llama 3.2's template would insert today's: new tokens every day."""

Span = tuple[int, int]
"""Start and end in a text, in characters."""


def has_chat_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Check for a chat template; of several (Command R's), conversations take ``default``."""
    template = tokenizer.chat_template
    if isinstance(template, dict):
        return "default" in template
    return bool(template)


def render(
    messages: Sequence[Record], tokenizer: PreTrainedTokenizerBase, *, prompt: bool = False
) -> str:
    """Render messages as text; a ``prompt`` ends with the beginning of an answer.

    Raises ValueError for messages that the template cannot render.
    """
    with _naming(messages, tokenizer):
        text = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=prompt, date_string=_DATE
        )
    return str(text)


def render_marked(
    messages: Sequence[Record], tokenizer: PreTrainedTokenizerBase
) -> tuple[str, list[Span]]:
    """Render messages as text; return also the spans that the template marks with ``{% generation %}``.

    ``apply_chat_template(return_assistant_tokens_mask=True)`` is not used: if a mark begins or ends on whitespace that
    the tokenizer drops, it loses the answer or includes the user's next message (transformers issue 47325).
    Raises ValueError as `render` does.
    """
    options = {
        "return_assistant_tokens_mask": True,
        "date_string": _DATE,
        **tokenizer.special_tokens_map,
    }
    template = tokenizer.get_chat_template()
    with _naming(messages, tokenizer):
        # Lists of one: it renders batches. Its annotation leaves out the spans.
        rendering: Any = render_jinja_template([list(messages)], chat_template=template, **options)
    texts, spans = rendering
    return texts[0], spans[0]


@contextmanager
def _naming(messages: Sequence[Record], tokenizer: PreTrainedTokenizerBase) -> Iterator[None]:
    """Turn an error into a ValueError that names the tokenizer and the messages."""
    try:
        yield
    except Exception as error:
        # A template is a program: it raises its own errors, and Python's where a field is not what it expects.
        raise ValueError(
            f"the chat template of {tokenizer.name_or_path or 'the tokenizer'} cannot render a conversation "
            f"({type(error).__name__}: {error}): {json.dumps(messages, default=str)[:60]} ...; leave such "
            "conversations out, or change the template."
        ) from error
