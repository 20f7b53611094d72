"""Render messages by a tokenizer's chat template, for training data and for probes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from .io import Record

_DATE = datetime(2024, 7, 26)
"""Date in every chat, the default of Llama 3.1's template: today's would be new tokens every day."""
_DATE_CALL = re.compile(r"strftime_now\(\s*(['\"])((?:(?!\1).)*)\1\s*\)")
"""A template's call for today's date, with its format written out."""
_ANY_DATE_CALL = re.compile(r"strftime_now\s*\(")

Span = tuple[int, int]
"""Start and end in a text, in characters."""


def has_chat_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Check for a chat template; of several (Command R's), conversations take ``default``."""
    template = tokenizer.chat_template
    if isinstance(template, dict):
        return "default" in template
    return bool(template)


def dated_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the chat template with a fixed date in place of calls for today's.

    Raises ValueError for a call with a format that is not written out.
    """
    # Not by an argument of the same name: transformers turns the arguments of templates into plain data.
    template = _DATE_CALL.sub(_fixed_date, tokenizer.get_chat_template())
    call = _ANY_DATE_CALL.search(template)
    if call is not None:
        raise ValueError(
            f"the chat template of {tokenizer.name_or_path or 'the tokenizer'} writes today's date "
            f"({template[call.start() : call.start() + 40]!r}), so its tokens change every day; write the format out, "
            "as in strftime_now('%d %b %Y'), or the date itself."
        )
    return template


def _fixed_date(call: re.Match[str]) -> str:
    quote, date_format = call.groups()
    return f"{quote}{_DATE.strftime(date_format)}{quote}"


def render(
    messages: Sequence[Record],
    tokenizer: PreTrainedTokenizerBase,
    *,
    thinking: bool,
    prompt: bool = False,
) -> str:
    """Render messages as text; a ``prompt`` ends with the beginning of an answer.

    ``thinking`` is for templates of models that may think: without it, an answer begins behind an empty thought.
    Raises ValueError for messages that the template cannot render, and as `dated_template` does.
    """
    template = dated_template(tokenizer)
    with _naming(messages, tokenizer):
        text = tokenizer.apply_chat_template(
            list(messages),
            chat_template=template,
            tokenize=False,
            add_generation_prompt=prompt,
            **_variables(thinking),
        )
    return str(text)


def render_marked(
    messages: Sequence[Record], tokenizer: PreTrainedTokenizerBase, *, thinking: bool
) -> tuple[str, list[Span]]:
    """Render messages as text; return also the spans that the template marks with ``{% generation %}``.

    ``apply_chat_template(return_assistant_tokens_mask=True)`` is not used: if a mark begins or ends on whitespace that
    the tokenizer drops, it loses the answer or includes the user's next message (transformers issue 47325).
    Raises ValueError as `render` does.
    """
    template = dated_template(tokenizer)
    with _naming(messages, tokenizer):
        # Lists of one: it renders batches. Its annotation leaves out the spans.
        rendering: Any = render_jinja_template(
            [list(messages)],
            chat_template=template,
            return_assistant_tokens_mask=True,
            **tokenizer.special_tokens_map,
            **_variables(thinking),
        )
    texts, spans = rendering
    return texts[0], spans[0]


def _variables(thinking: bool) -> Record:
    return {"date_string": _DATE.strftime("%d %b %Y"), "enable_thinking": thinking}


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
