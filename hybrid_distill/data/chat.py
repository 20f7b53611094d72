"""Render conversations by the tokenizer's chat template, and mark the assistant's tokens."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..chat_template import Span, dated_template, has_chat_template, render, render_marked
from ..io import Record

MESSAGES = ("messages", "conversations")
"""Columns that hold a list of messages: ``role`` and ``content``, or ``from`` and ``value``."""
PAIRS = (("prompt", "completion"), ("problem", "generated_solution"))
"""Columns that hold one question and one answer: the usual names, and those of OpenMathInstruct."""
COLUMNS = (*MESSAGES, *PAIRS[0], *PAIRS[1])
_ROLES = {"human": "user", "gpt": "assistant"}
_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""Mark of the beginning of the assistant's part in a template."""
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Fields of a message that templates read a thought from."""
_PLACEHOLDER = "\ue000answer\ue000"
"""Text that no message holds: U+E000 is for private use."""


def conversation_of(record: object, record_name: str) -> str:
    """Return a record's messages as JSON, "" if none is the assistant's. Raises ValueError if it has no messages."""
    columns: Record = record if isinstance(record, dict) else {}
    turns = _turns(columns)
    if turns is None:
        raise ValueError(
            f"{record_name} holds no conversation; its columns are {', '.join(columns) or 'none'}: give it a list "
            "`messages` of role and content, or `prompt` and `completion`."
        )
    messages = [_message(turn, record_name) for turn in turns]
    roles = [message["role"] for message in messages]
    if "assistant" not in roles:
        return ""
    return json.dumps(messages, default=str)  # parquet may hold dates


def _turns(columns: Record) -> Sequence[object] | None:
    """Return a record's messages as they are, or make them from a question and its answer; None if it has neither."""
    for name in MESSAGES:
        if isinstance(columns.get(name), (list, tuple)):
            return columns[name]
    for question_column, answer_column in PAIRS:
        question = columns.get(question_column)
        answer = columns.get(answer_column)
        if isinstance(question, str) and isinstance(answer, str):
            return [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
        # TRL's conversational form.
        if isinstance(question, (list, tuple)) and isinstance(answer, (list, tuple)):
            return [*question, *answer]
    return None


def _message(message: object, record_name: str) -> Record:
    """Return a message with its role and content as transformers names them. Raises ValueError if it lacks one."""
    fields: Record = _without_nulls(message) if isinstance(message, dict) else {}
    role = fields.get("role", fields.get("from"))
    content = _text_of(fields)
    if not isinstance(role, str) or content is None:
        raise ValueError(
            f"{record_name} holds the message {message!r}; give it a role and a content, both text."
        )
    # Other fields stay: templates read tool calls and names.
    return {**fields, "role": _ROLES.get(role, role), "content": content}


def _without_nulls(value: Any) -> Any:
    """Drop the fields that are null, at any depth.

    Parquet and the hub give every message the fields of all of them, with None where a message has none, and templates
    ask whether a field is defined.
    """
    if isinstance(value, dict):
        return {name: _without_nulls(field) for name, field in value.items() if field is not None}
    if isinstance(value, (list, tuple)):
        return [_without_nulls(item) for item in value]
    return value


def _text_of(message: Record) -> str | None:
    """Return a message's text; "" for a tool call without text, None for content of another type."""
    content = message.get("content", message.get("value"))
    if content is None and message.get("tool_calls"):
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        return None
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str):
            return None
        texts.append(text)
    return "".join(texts)


def check_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError for a tokenizer that has no chat template or does not locate its tokens in a text.

    Also raises it as `dated_template` does.
    """
    name = tokenizer.name_or_path or "unnamed"
    if not has_chat_template(tokenizer):
        raise ValueError(
            f"the tokenizer {name} has no chat template, or several of which none is named default, and conversations "
            "need one; put a chat_template.jinja (Jinja over `messages`, docs/data.md has one) into its folder, or use "
            "an instruct model's: as a stage's teacher (--post.teacher), in `prepare-data --chat --tokenizer INSTRUCT` "
            "or `generate-data --model INSTRUCT`."
        )
    if not tokenizer.is_fast:
        raise ValueError(
            f"the tokenizer {name} is slow and gives no offsets of its tokens; use a fast one."
        )
    _ = dated_template(tokenizer)  # raises for a date that cannot be fixed


def template_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash the chat template that conversations take. Raises ValueError as `check_template` does."""
    check_template(tokenizer)
    return hashlib.sha256(json.dumps(dated_template(tokenizer)).encode()).hexdigest()


def has_thought(messages: list[Record]) -> bool:
    """Check for a thought in an answer: a field of its own, or text that ``</think>`` ends.

    Templates of models that may think render other conversations as those of a model that is told not to.
    """
    for message in messages:
        if message["role"] != "assistant":
            continue
        if "</think>" in message["content"] or any(message.get(name) for name in _THOUGHTS):
            return True
    return False


def encode_conversation(
    conversation: str, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[int], list[bool]]:
    """Tokenize messages in JSON; return (ids, mask), where the mask is true if the *next* token is the assistant's.

    The assistant's part is marked in the template by ``{% generation %}``. In a template without that mark, it is the
    text that an answer adds to the conversation before it, or its own text and the end of its turn where the template
    renders the conversation before it differently once it continues. No tokens are added to the rendered text. Raises
    ValueError for a conversation whose answers cannot be located, and for one that the template refuses.
    """
    messages = json.loads(conversation)
    if _GENERATION_MARK.search(tokenizer.get_chat_template()):
        text, spans = render_marked(messages, tokenizer, thinking=has_thought(messages))
    else:
        text, spans = _answers_by_difference(messages, tokenizer)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    is_answer = [_is_within(token, spans) for token in encoded["offset_mapping"]]
    ids = encoded["input_ids"]
    # Shifted by one: the mask is at the token that predicts the answer's. Empty messages may have no token at all.
    predicts_answer = [*is_answer[1:], False][: len(ids)]
    return ids, predicts_answer


def _is_within(token: Span, spans: list[Span]) -> bool:
    """Check whether a token begins in an answer, or covers its first character.

    The token of `` No`` may begin at the space before the answer.
    """
    start, stop = token
    for begin, end in spans:
        begins_within = begin <= start < end
        covers_begin = start < end and stop > begin
        if begins_within or covers_begin:
            return True
    return False


def _answers_by_difference(
    messages: list[Record], tokenizer: PreTrainedTokenizerBase
) -> tuple[str, list[Span]]:
    """Return the conversation as text, and the span of each answer in it.

    The role header belongs to the prompt, as in generation. Raises ValueError for an answer that cannot be located.
    """
    # A part of the conversation is rendered as the whole is, with or without thoughts.
    render_part = partial(render, tokenizer=tokenizer, thinking=has_thought(messages))
    whole = render_part(messages)
    answers: list[Span] = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        span = _span_after_prompt(whole, messages, number, render_part)
        if span is None:
            span = _span_by_placeholder(whole, messages, number, render_part)
        if span is None:
            raise ValueError(
                f"the chat template of {tokenizer.name_or_path or 'the tokenizer'} renders message "
                f"{number + 1} differently once the conversation continues, so the assistant's tokens cannot be "
                "located; mark them in the template with {% generation %}, or keep one answer a conversation."
            )
        answers.append(span)
    return whole, answers


def _span_after_prompt(
    whole: str, messages: list[Record], number: int, render_part: Callable[..., str]
) -> Span | None:
    """Return what an answer adds to the conversation before it; None if the template renders either differently.

    Templates render an answer that another one follows differently if they drop its thought, as Qwen3's does.
    """
    if number == 0:
        # Nothing is before it, and many templates refuse an empty conversation.
        return None
    with_answer = render_part(messages[: number + 1])
    prompt = render_part(messages[:number], prompt=True)
    if with_answer.startswith(prompt) and whole.startswith(with_answer):
        return len(prompt), len(with_answer)
    return None


def _span_by_placeholder(
    whole: str, messages: list[Record], number: int, render_part: Callable[..., str]
) -> Span | None:
    """Return an answer's span from where a placeholder in its stead is rendered, including the end of its turn.

    Returns None unless the text around the placeholder is the one around the answer.
    """
    answer = {name: field for name, field in messages[number].items() if name not in _THOUGHTS}
    answer["content"] = _PLACEHOLDER
    until_answer = [*messages[:number], answer]
    whole_with_placeholder = render_part([*until_answer, *messages[number + 1 :]])
    until_placeholder = render_part(until_answer)
    for text in (whole_with_placeholder, until_placeholder):
        if text.count(_PLACEHOLDER) != 1:
            return None
    before, after = whole_with_placeholder.split(_PLACEHOLDER)
    _, end_of_turn = until_placeholder.split(_PLACEHOLDER)
    if not after.startswith(end_of_turn):
        return None
    next_turns = after.removeprefix(end_of_turn)
    begin = len(before)
    end = len(whole) - len(next_turns)
    if begin > end or not (whole.startswith(before) and whole.endswith(next_turns)):
        return None
    return begin, end


def prompt_of_answer(messages: list[Record], tokenizer: PreTrainedTokenizerBase) -> str:
    """Render messages up to where the text of their answer begins in the conversation.

    This is the template's prompt, except where conversations hold another text there: an empty thought that the prompt
    lacks, or none where the prompt begins one. So what a model writes after it stands in the conversation as written.
    """
    prompt = render(messages, tokenizer, thinking=False, prompt=True)
    answer = {"role": "assistant", "content": _PLACEHOLDER}
    conversation = render([*messages, answer], tokenizer, thinking=False)
    before_answer = conversation.partition(_PLACEHOLDER)[0]
    # A prompt ends before a space that belongs to the first token of the answer.
    if _without_space(before_answer) == _without_space(prompt):
        return prompt
    return before_answer


def is_rendered_as_written(
    messages: list[Record], prompt: str, tokenizer: PreTrainedTokenizerBase
) -> bool:
    """Check that a conversation is rendered as a prompt and what the model wrote after it, the last message.

    Templates take thoughts out of an answer. A student would learn what the model never wrote.
    """
    text = render(messages, tokenizer, thinking=has_thought(messages))
    written = prompt + messages[-1]["content"]
    # Templates strip answers too, which changes nothing that counts.
    return _without_space(text).startswith(_without_space(written))


def _without_space(text: str) -> str:
    return "".join(text.split())
