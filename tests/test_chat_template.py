"""Chats as text: the same every day, whatever a template asks the clock."""

import pytest
from families import family_tokenizer

from hybrid_distill.chat_template import render, render_marked
from hybrid_distill.data.chat import check_template
from hybrid_distill.probes.kv_retrieval import KVRetrieval
from hybrid_distill.probes.prompt_formats import FormattedProbe

QUESTION = [{"role": "user", "content": "w1"}]
LLAMA_3_2 = (
    "{% if not date_string is defined %}{% if strftime_now is defined %}"
    "{% set date_string = strftime_now('%d %b %Y') %}{% endif %}{% endif %}{{ date_string }}"
)


@pytest.mark.parametrize(
    ("template", "date"),
    [
        ('{%- set today = strftime_now("%Y-%m-%d") %}{{ today }}', "2024-07-26"),
        ("{{ strftime_now( '%d' ) | int - 1 }} {{ strftime_now(\"%b '%y\") }}", "25 Jul '24"),
        ("{{ strftime_now('%H:%M') }}", "00:00"),
        (LLAMA_3_2, "26 Jul 2024"),
        (LLAMA_3_2.replace("if not date_string is defined", "if true"), "26 Jul 2024"),
    ],
    ids=["mistral", "two calls", "time", "llama 3.2", "llama 3.2 by its clock"],
)
def test_the_date_is_fixed_in_training_data_and_in_probes(template: str, date: str) -> None:
    tokenizer = family_tokenizer("qwen", template)
    check_template(tokenizer)
    assert render(QUESTION, tokenizer, thinking=False) == date
    assert render_marked(QUESTION, tokenizer, thinking=False) == (date, [])
    (example,) = FormattedProbe(KVRetrieval(2), "chat", tokenizer).examples(1)
    assert example.prompt == f"{date}The value is"


def test_a_date_that_cannot_be_fixed_is_refused() -> None:
    call = "strftime_now('%d ' ~ '%b')"
    tokenizer = family_tokenizer("qwen", "{{ " + call + " }}")
    for refuse in (
        lambda: check_template(tokenizer),
        lambda: render(QUESTION, tokenizer, thinking=False),
        lambda: FormattedProbe(KVRetrieval(2), "chat", tokenizer).examples(1),
    ):
        with pytest.raises(ValueError, match="strftime_now"):
            refuse()
