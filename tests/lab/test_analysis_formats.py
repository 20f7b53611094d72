"""The same questions in every format; what a chat template does to them; what is refused."""

from __future__ import annotations

import csv
from pathlib import Path

from hybrid_distill.cli.app import main
from hybrid_distill.lab.analysis.formats import Formats, in_chat
from hybrid_distill.probes import Example
from hybrid_distill.probes.knowledge import Form, LetterChoice
from hybrid_distill.probes.kv_retrieval import DIALOGUE, KVRetrieval
from hybrid_distill.teacher import load_teacher

TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"


def test_the_questions_and_their_options_are_the_same_in_every_form() -> None:
    forms: tuple[Form, ...] = ("letter", "text", "completion")
    letter, text, completion = (LetterChoice.from_file(seed=3, form=form).examples(5) for form in forms)
    for asked, named, alone in zip(letter, text, completion, strict=True):
        assert asked.prompt == named.prompt and asked.prompt.splitlines()[0] == alone.prompt
        assert named.choices == alone.choices and named.answer == alone.answer
        assert f"{asked.answer.strip()}.{named.answer}" in asked.prompt.splitlines()
        assert [f"{c.strip()}.{t}" for c, t in zip(asked.choices, named.choices)] == asked.prompt.splitlines()[1:-1]


def test_a_dictionary_in_other_words_has_the_same_pairs_and_the_same_answer() -> None:
    plain, spoken = KVRetrieval(3, seed=1).examples(1)[0], KVRetrieval(3, seed=1, wording=DIALOGUE).examples(1)[0]
    assert plain.choices == spoken.choices and plain.answer == spoken.answer
    key = plain.prompt.split("'")[1]
    assert f"Anna: I have{plain.answer} of the {key}." in spoken.prompt.splitlines()
    assert spoken.prompt.endswith(f"Ben: How many of the {key}?\nAnna: You said")


def test_a_chat_is_the_template_around_the_prompt_with_one_beginning() -> None:
    _, tokenizer = load_teacher("tiny")
    tokenizer.chat_template = TEMPLATE
    example = Example("heart:8\nbench:72\nbench", " 72", (" 8", " 72"))
    begins = tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    start = "" if begins else tokenizer.bos_token or ""
    assert in_chat(example, tokenizer) == Example(f"{start}[user]{example.prompt}[assistant]", "72", ("8", "72"))


def test_chat_is_asked_where_there_is_a_template() -> None:
    model, tokenizer = load_teacher("tiny")
    job = Formats(examples=2)
    assert [task.column.name for task in job.tasks(model, tokenizer)] == ["completion", "text", "letter"]
    assert [task.column.chance for task in job.tasks(model, tokenizer)] == [25, 25, 25]


def test_the_command_shows_that_other_words_need_the_same_heads(scores: Path, tmp_path: Path) -> None:
    argv = ["--of", "kv", "--formats", "completion,reworded", "--scores", str(scores), "--counts", "4"]
    main(["analyze", "formats", *argv, "--examples", "16", "--out", str(tmp_path)])
    assert {p.name for p in tmp_path.iterdir()} == {f"formats.{end}" for end in ("md", "csv", "png")}
    intact, without = csv.DictReader((tmp_path / "formats.csv").open())
    for name in ("completion", "reworded"):
        assert float(intact[name]) > 80 and float(without[name]) < 40
