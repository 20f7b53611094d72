"""Conversations as people have them: which tokens are the assistant's."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from families import QWEN3
from pyarrow import parquet
from test_post import MARKED, PLAIN, chat_tokenizer, write_jsonl
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hybrid_distill.data.chat import conversation_of, encode_conversation
from hybrid_distill.data.documents import document_batches

WITH_SYSTEM = "{% if messages[0].role != 'system' %}<user> w90 <end> {% endif %}" + PLAIN
"""Template that writes a default system message, and needs messages to render anything."""
OTHER_FIRST = PLAIN.replace(
    "<{{ m.role }}>", "{% if loop.first %}w80{% else %}<{{ m.role }}>{% endif %}"
)
"""A template that begins the first message of a conversation in another way than an answer."""


def learned_tokens(tokenizer: PreTrainedTokenizerFast, *said: tuple[str, str]) -> list[str]:
    """Return the tokens that a student learns to predict of these messages of a role each."""
    return learned_of([{"role": role, "content": content} for role, content in said], tokenizer)


def learned_of(messages: list[dict[str, Any]], tokenizer: PreTrainedTokenizerFast) -> list[str]:
    ids, learned = encode_conversation(json.dumps(messages), tokenizer)
    tokens = tokenizer.convert_ids_to_tokens(ids)
    return [after for after, counts in zip(tokens[1:], learned) if counts]


def learned_words(template: str, *said: tuple[str, str]) -> list[str]:
    return learned_tokens(chat_tokenizer(template), *said)


@pytest.mark.parametrize(
    "template",
    [PLAIN, MARKED, WITH_SYSTEM],
    ids=["by prefixes", "marked", "default system"],
)
def test_a_conversation_that_begins_with_the_assistant_learns_no_role_header(template):
    """OpenRLHF#393: without a mark, the answer's span began at the first token of the text."""
    greeting = ("assistant", "w3 w4")
    alone = learned_words(template, greeting)
    assert alone == ["w3", "w4", "<end>"]

    longer = learned_words(template, greeting, ("user", "w5"), ("assistant", "w6"))
    assert longer == ["w3", "w4", "<end>", "w6", "<end>"]

    twice = learned_words(template, ("assistant", "w3"), ("assistant", "w4"))
    assert twice == ["w3", "<end>", "w4", "<end>"]


def test_a_conversation_without_a_token_learns_none():
    """A mask longer than its tokens would shift those of all conversations after it."""
    bare = chat_tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}")
    said = [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}]
    assert encode_conversation(json.dumps(said), bare) == ([], [])


def test_a_template_that_begins_the_first_answer_otherwise_learns_it_all_the_same():
    first = learned_words(OTHER_FIRST, ("assistant", "w3"))
    assert first == ["w3", "<end>"]

    after_a_question = learned_words(OTHER_FIRST, ("user", "w2"), ("assistant", "w3"))
    assert after_a_question == ["w3", "<end>"]


FORGETFUL = PLAIN.replace("{{ m.content }}", "{% if loop.last %}w96 {% endif %}{{ m.content }}")
"""A template that renders a message differently once another one follows."""
BEGINS_A_THOUGHT = PLAIN.replace("<assistant>", "<assistant> w97")
"""A template whose prompt ends with more than the beginning of an answer in a conversation, as DeepSeek-R1's."""


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (FORGETFUL, "w3 <end> w5 w6 <end>"),
        (BEGINS_A_THOUGHT, "w3 <end> w5 w6 <end>"),
        (QWEN3, "w3 <end> w5 w6 <end>"),
    ],
    ids=["forgetful", "begins a thought", "qwen3"],
)
def test_an_answer_is_found_behind_messages_that_are_rendered_otherwise(template, expected):
    asked = ("user", "w3 w5")
    turns = [asked, ("assistant", "w3"), asked, ("assistant", "w5 w6")]
    assert learned_words(template, *turns) == expected.split()


def test_a_call_of_tools_is_found_behind_messages_that_are_rendered_otherwise() -> None:
    template = FORGETFUL.replace(
        "{{ m.content }}", "{{ m.content }}{% if m.tool_calls %} w9{% endif %}"
    )
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "w8"}]}
    question = {"role": "user", "content": "w1"}
    assert learned_of([question, call, question], chat_tokenizer(template)) == ["w9", "<end>"]


def test_a_thought_is_learned_where_the_template_keeps_it_and_an_empty_one_is_not() -> None:
    tokenizer = chat_tokenizer(QWEN3)
    tokenizer.add_tokens(["<think>", "</think>"])
    question = ("user", "w1")
    thoughtful = ("assistant", "<think> w7 </think> w3")
    once = learned_tokens(tokenizer, question, thoughtful)
    assert once == "<think> w7 </think> w3 <end>".split()

    twice = learned_tokens(tokenizer, question, thoughtful, question, thoughtful)
    assert twice == ["w3", "<end>", *once]

    # Cut before its end, and written behind the empty thought of the prompt.
    cut = learned_tokens(tokenizer, question, ("assistant", "<think> w7"))
    assert cut == "<think> w7 <end>".split()

    greeting = ("assistant", "w5")
    greeted = learned_tokens(tokenizer, greeting, question, greeting)
    assert greeted == "w5 <end> w5 <end>".split()


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["by prefixes", "marked"])
def test_thinking_is_off_in_conversations_without_a_thought(template: str) -> None:
    tokenizer = chat_tokenizer("{{ 'w80 ' if enable_thinking else 'w81 ' }}" + template)
    question = {"role": "user", "content": "w1"}
    answer = {"role": "assistant", "content": "w2"}
    expected = {
        "w81": answer,
        "w80": {**answer, "reasoning_content": "w7"},
    }
    for first, message in expected.items():
        ids, _ = encode_conversation(json.dumps([question, message]), tokenizer)
        assert tokenizer.decode(ids) == f"{first} <user> w1 <end> <assistant> w2 <end>"


VICUNA = (
    "{% for m in messages %}{% if m.role == 'user' %}USER: {{ m.content }} "
    "{% else %}ASSISTANT: {{ m.content }}</s>{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    "template",
    [
        VICUNA + "{% if add_generation_prompt %}ASSISTANT: {% endif %}",
        VICUNA.replace(
            "{{ m.content }}</s>", "{% generation %}{{ m.content }}</s>{% endgeneration %}"
        ),
    ],
    ids=["by prefixes", "marked"],
)
def test_a_first_word_that_holds_the_space_before_it_is_learned(template: str) -> None:
    """As in byte-level tokenizers, whose offsets begin at the space."""
    words = ["USER", ":", " go", " ASSISTANT", " No", " way", "</s>", "[unk]"]
    vocabulary = {word: place for place, word in enumerate(words)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[unk]"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"</s>| ?\w+|:"), "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template)

    short = learned_tokens(tokenizer, ("user", "go"), ("assistant", "No"))
    longer = learned_tokens(tokenizer, ("user", "go"), ("assistant", "No way"))

    assert short == [" No", "</s>"]
    assert longer == [" No", " way", "</s>"]


def test_forms_of_conversations_that_others_write_are_read() -> None:
    question = {"role": "user", "content": "w1"}
    answer = {"role": "assistant", "content": "w2"}
    question_in_parts = {
        "role": "user",
        "content": [{"type": "text", "text": "w"}, {"type": "text", "text": "1"}],
    }
    expected = messages_of({"messages": [question, answer]})
    for record in (
        {"prompt": [question], "completion": [answer]},
        {"prompt": "w1", "completion": "w2"},
        {"messages": [question_in_parts, answer]},
    ):
        assert messages_of(record) == expected


def messages_of(record: dict[str, Any]) -> list[dict[str, Any]]:
    return json.loads(conversation_of(record, "line 1"))


def test_a_call_of_tools_needs_no_text() -> None:
    """OpenAI's form."""
    calls = [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]
    call = {"role": "assistant", "content": None, "tool_calls": calls}
    question = {"role": "user", "content": "w1"}
    _, read = messages_of({"messages": [question, call]})
    assert read == {**call, "content": ""}


NAMED = "{% if m.name is defined %}w80 {{ m.name }} {% endif %}"
CALLED = (
    "{% if 'tool_calls' in m %} w{{ m.tool_calls|length }}"
    "{% for w in m.tool_calls[0].args %} {{ w }}{% endfor %}{% endif %}"
)
READS_FIELDS = PLAIN.replace("{{ m.content }}", NAMED + "{{ m.content }}" + CALLED)


@pytest.mark.parametrize(
    "template",
    [READS_FIELDS, MARKED.replace("{{ m.content }}", NAMED + "{{ m.content }}" + CALLED)],
    ids=["by prefixes", "marked"],
)
@pytest.mark.parametrize("prefix", ["", "hf:"], ids=["parquet", "hub"])
def test_a_field_that_other_messages_have_is_not_defined(
    tmp_path: Path, prefix: str, template: str
) -> None:
    """Parquet gives every message, and every call of a tool, the fields of all of them."""
    calls = [{"args": {"w7": "w8"}}, {"args": {"w9": "w1"}}]
    question = {"role": "user", "content": "w1"}
    call = {"role": "assistant", "content": None, "tool_calls": calls}
    result = {"role": "user", "name": "w2", "content": "w3"}
    answer = {"role": "assistant", "content": "w4"}
    records = [
        {"messages": [question, call, result, answer]},
        {"messages": [{"from": "human", "value": "w1"}, {"from": "gpt", "value": "w5"}]},
    ]
    lines = write_jsonl(tmp_path / "chat.jsonl", records)
    (tmp_path / "table").mkdir()
    parquet.write_table(pa.Table.from_pylist(records), tmp_path / "table" / "chat.parquet")

    tokenizer = chat_tokenizer(template)
    encoded = []
    for source in (str(lines), f"{prefix}{tmp_path / 'table'}"):
        ((documents, _),) = document_batches([source], None, 10**6)
        encoded.append([encode_conversation(document, tokenizer) for document in documents])

    of_lines, of_table = encoded
    assert of_table == of_lines
    words = "<user> w1 <end> <assistant> w2 w7 <end> <user> w80 w2 w3 <end> <assistant> w4 <end>"
    assert tokenizer.decode(of_lines[0][0]) == words


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["by prefixes", "marked"])
@pytest.mark.parametrize("broken", ["{{ 'w'.missing.field }}", "{{ 1 + m.role }}", "{{ 1 / 0 }}"])
def test_any_error_of_a_template_names_the_conversation(template: str, broken: str) -> None:
    with pytest.raises(ValueError, match='"content": "w7"'):
        learned_words(
            template.replace("{{ m.content }}", broken), ("user", "w7"), ("assistant", "w")
        )


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "image", "url": "w"}]},
        {"role": "user", "content": None},
        {"content": "w1"},
    ],
    ids=["image", "no text", "no role"],
)
def test_a_message_without_role_or_text_is_refused(message: dict[str, Any]) -> None:
    answer = {"role": "assistant", "content": "w2"}
    with pytest.raises(ValueError, match="line 1"):
        messages_of({"messages": [message, answer]})
