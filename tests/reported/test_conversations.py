"""Conversations as people have them: which tokens are the assistant's."""

import json

import pytest
from test_post import MARKED, PLAIN, chat_tokenizer

from hybrid_distill.data.chat import encode_conversation

WITH_SYSTEM = "{% if messages[0].role != 'system' %}<user> w90 <end> {% endif %}" + PLAIN
"""Template that writes a default system message, and needs messages to render anything."""
OTHER_FIRST = PLAIN.replace(
    "<{{ m.role }}>", "{% if loop.first %}w80{% else %}<{{ m.role }}>{% endif %}"
)
"""A template that begins the first message of a conversation in another way than an answer."""


def learned_words(template: str, *said: tuple[str, str]) -> list[str]:
    tokenizer = chat_tokenizer(template)
    messages = [{"role": role, "content": content} for role, content in said]
    ids, learned = encode_conversation(json.dumps(messages), tokenizer)
    tokens = tokenizer.convert_ids_to_tokens(ids)
    return [after for after, counts in zip(tokens[1:], learned) if counts]


@pytest.mark.parametrize(
    "template",
    [PLAIN, MARKED, WITH_SYSTEM],
    ids=["by prefixes", "marked", "default system"],
)
def test_a_conversation_that_begins_with_the_assistant_learns_no_role_header(template):
    """OpenRLHF#393: without a mark, the answer's span began at the first token of the text."""
    alone = learned_words(template, ("assistant", "w3 w4"))
    assert alone == ["w3", "w4", "<end>"]
    longer = learned_words(template, ("assistant", "w3 w4"), ("user", "w5"), ("assistant", "w6"))
    assert longer == ["w3", "w4", "<end>", "w6", "<end>"]
    twice = learned_words(template, ("assistant", "w3"), ("assistant", "w4"))
    assert twice == ["w3", "<end>", "w4", "<end>"]


def test_a_template_that_hides_where_the_first_answer_begins_is_refused():
    with pytest.raises(ValueError, match="<assistant>"):
        learned_words(OTHER_FIRST, ("assistant", "w3"))
    assert learned_words(OTHER_FIRST, ("user", "w2"), ("assistant", "w3")) == [
        "w3",
        "<end>",
    ]
