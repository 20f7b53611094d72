"""Probes: the prompt alone gives every answer, and a seed goes on meaning the same prompts."""

import hashlib
import json
import logging
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from messages import naming
from planted import KEYS, probe_texts, word_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hybrid_distill.assets import facts_path
from hybrid_distill.probes import Example, Probe
from hybrid_distill.probes.checks import NAMED, CannotAnswer, check_answerable, missing_words
from hybrid_distill.probes.knowledge import Fact, Knowledge, LetterChoice
from hybrid_distill.probes.kv_retrieval import HEADER, KVRetrieval
from hybrid_distill.probes.registry import PROBES, make_probe

COLORS = (
    Fact("The color of snow is", "white", kind="color"),
    Fact("The color of coal is", "black", kind="color"),
    Fact("The color of grass is", "green", kind="color"),
    Fact("The color of blood is", "red", kind="color"),
    Fact("The color of the sky is", "blue", kind="color"),
)
CITIES = (
    Fact("Rome lies in", "Italy", kind="land"),
    Fact("Oslo lies in", "Norway", kind="land"),
)


def small_probe(name: str, seed: int = 0) -> Probe:
    if name == "kv":
        return KVRetrieval((2, 5, 9), seed)
    return LetterChoice(COLORS, 3, seed)


# All probes


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("kv", {}, "bbf431fed9f658f7"),
        ("kv", {"pairs": (5, 10, 25), "seed": 3}, "0d517997b4520b9d"),
        ("letters", {"seed": 2}, "6c609720ef4cb892"),
    ],
)
def test_a_seed_goes_on_meaning_the_same_prompts(name: str, options: dict, expected: str) -> None:
    """Published scores name a probe and its seed."""
    examples = make_probe(name, **options).examples(60)
    text = json.dumps([[e.prompt, e.answer, e.choices] for e in examples])
    digest = hashlib.sha256(text.encode()).hexdigest()
    assert digest[:16] == expected


@pytest.mark.parametrize("name", PROBES)
def test_examples_follow_from_the_seed_alone(name: str) -> None:
    probe = small_probe(name)
    examples = probe.examples(40)
    assert examples == small_probe(name).examples(40)
    assert examples[:7] == probe.examples(7)
    with pytest.raises(ValueError, match=naming("n", 0)):
        probe.examples(0)

    other = small_probe(name, seed=1)
    n_same = 0
    for example, of_other in zip(examples, other.examples(40), strict=True):
        n_same += example == of_other
    assert n_same < 5

    settings = probe.describe()
    assert json.loads(json.dumps(settings)) == settings
    assert other.describe() == {**settings, "seed": 1}


@pytest.mark.parametrize("name", PROBES)
def test_guessing_and_places_give_nothing_away(name: str) -> None:
    probe = small_probe(name)
    examples = probe.examples(600)  # whole rounds of all settings
    chances = [1 / len(example.choices) for example in examples]
    assert probe.chance == pytest.approx(sum(chances) / len(chances))
    for example in examples[:40]:
        assert example.prompt == example.prompt.strip()
        # The prompt leaves out the space before the answer.
        assert all(re.fullmatch(r" \w+", choice) for choice in example.choices)
        if name != "kv":
            assert HEADER not in example.prompt
            assert "value of the key" not in example.prompt

    # The answer's place, from 0 for the first choice to 1 for the last.
    places: Counter[float] = Counter()
    for example in examples:
        n_choices = len(example.choices)
        if n_choices > 2:
            place = example.choices.index(example.answer) / (n_choices - 1)
            places[place] += 1
    assert max(places.values()) < 0.5 * places.total()
    assert len(places) >= 3


def test_probes_are_made_by_name() -> None:
    assert make_probe("kv", pairs=10, seed=3) == KVRetrieval(10, 3)
    assert make_probe("kv", pairs=(10,), seed=3) == KVRetrieval(10, 3)
    assert make_probe("kv", pairs=[10, 25, 50]) == KVRetrieval((10, 25, 50))
    assert make_probe("letters") == LetterChoice.from_file()


@pytest.mark.parametrize(
    ("name", "settings", "facts"),
    [
        ("growing", {}, ["'growing'", "kv", "letters"]),
        ("kv", {"pairs": None}, ["pairs", None]),
        ("kv", {"pairs": (5, 101)}, ["n_pairs", 101]),
        ("kv", {"pairs": (5, 5)}, ["n_pairs", "'5'"]),
    ],
)
def test_impossible_settings_are_refused(name: str, settings: dict, facts: list) -> None:
    with pytest.raises(ValueError, match=naming(*facts)):
        make_probe(name, **settings)


@pytest.mark.parametrize(
    ("make", "settings", "facts"),
    [
        (KVRetrieval, {"n_pairs": (2, 3), "keys": ("dog", "cat")}, ["keys", 2]),
        (LetterChoice, {"facts": COLORS, "n_options": 27}, ["n_options", 27]),
        (LetterChoice, {"facts": (*COLORS, *CITIES), "n_options": 3}, ["'Rome lies in'", 1]),
    ],
)
def test_too_few_words_or_facts_are_refused(make: Any, settings: dict, facts: list) -> None:
    with pytest.raises(ValueError, match=naming(*facts)):
        make(**settings)


# Retrieval


@pytest.mark.parametrize("n_pairs", [1, 100])
def test_keys_and_values_are_distinct_and_the_answer_stands_beside_its_key(n_pairs: int) -> None:
    for example in KVRetrieval(n_pairs, seed=3).examples(20):
        header, *lines, question = example.prompt.split("\n")
        key = re.fullmatch(r"The value of the key '([a-z]+)' is", question)
        assert header == HEADER
        assert key is not None
        pairs = dict(line.split(":") for line in lines)
        assert len(pairs) == n_pairs == len(set(pairs.values()))
        assert all(0 <= int(value) <= 99 for value in pairs.values())
        assert example.answer == f" {pairs[key[1]]}"
        assert example.choices == tuple(f" {value}" for value in pairs.values())


def test_sizes_are_taken_in_turn() -> None:
    first, second = KVRetrieval(7, 5).examples(2)
    (other,) = KVRetrieval(3, 5).examples(1)
    assert KVRetrieval((7, 3), 5).examples(3) == [first, other, second]


# Facts


def read_options(example: Example) -> tuple[str, dict[str, str]]:
    """Return (question, option of each letter) as a reader sees them."""
    question, *lines, last = example.prompt.splitlines()
    assert last == "Answer:"
    return question, {f" {line[0]}": line[3:] for line in lines}


def test_the_letter_is_that_of_the_facts_answer() -> None:
    facts = (*COLORS, *CITIES)
    n_facts = len(facts)
    fact_of = {fact.question: fact for fact in facts}
    kind_of = {fact.answer: fact.kind for fact in facts}
    examples = LetterChoice(facts, n_options=2).examples(4 * n_facts)
    questions = []
    for example in examples:
        question, options = read_options(example)
        questions.append(question)
        fact = fact_of[question]
        assert list(options) == list(example.choices)
        assert options[example.answer] == fact.answer
        assert len(set(options.values())) == 2
        assert {kind_of[option] for option in options.values()} == {fact.kind}

    # Every fact is asked before one comes again, and then with other options.
    first_round = questions[:n_facts]
    second_round = questions[n_facts : 2 * n_facts]
    assert len(set(first_round)) == n_facts
    assert first_round == second_round
    assert len({example.prompt for example in examples}) > 2 * n_facts


def test_a_facts_own_distractors_come_first_and_once() -> None:
    milk = Fact("The color of milk is", "white", ("black", "green"), "color")
    options_of_milk: set[str] = set()
    for example in LetterChoice((milk, *COLORS[1:]), 4).examples(50):
        question, options = read_options(example)
        if question == milk.question:
            words = set(options.values())
            assert len(words) == 4
            assert {"white", "black", "green"} < words
            options_of_milk |= words
    assert options_of_milk == {"white", "black", "green", "red", "blue"}


def test_facts_are_those_of_the_knowledge_questions() -> None:
    records = [json.loads(line) for line in facts_path().read_text().splitlines()]
    record_of = {record["prompt"]: record for record in records}
    for example in LetterChoice.from_file(seed=3).examples(200):
        question, options = read_options(example)
        record = record_of[question]
        assert f" {options[example.answer]}" == record["answer"]
        assert {f" {option}" for option in options.values()} == set(record["choices"])


def test_facts_are_read_from_a_file_with_empty_lines(tmp_path: Path) -> None:
    lines = []
    for fact in COLORS:
        record = {"prompt": fact.question, "answer": fact.answer, "kind": fact.kind}
        lines.append(json.dumps(record))
    path = tmp_path / "facts.jsonl"
    path.write_text("\n\n".join(lines))
    assert LetterChoice.from_file(path, 5, 2) == LetterChoice(COLORS, 5, 2)


def test_questions_are_read_from_a_file_with_empty_lines(tmp_path: Path) -> None:
    record = {"prompt": "Rome is in", "answer": " Italy", "choices": [" Italy", " Spain"]}
    line = json.dumps(record)
    path = tmp_path / "facts.jsonl"
    path.write_text(f"{line}\n\n{line}\n")
    example = Example("Rome is in", " Italy", (" Italy", " Spain"))
    assert Knowledge(path).examples() == [example, example]
    assert Knowledge(path).examples(1) == [example]
    assert Knowledge(path).chance == 0.5


def read_questions(path: Path) -> list[Example]:
    return Knowledge(path).examples()


@pytest.mark.parametrize(
    "read", [read_questions, LetterChoice.from_file], ids=["questions", "facts"]
)
@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("", []),
        ("nonsense", ["line 1"]),
        ('\n{"prompt": "a"}', ["line 2"]),
        ("[1]", ["line 1"]),
        ('{"prompt": "a", "answer": "b", "choices": ["c", "c"]}', ["line 1", "choices"]),
        (None, []),
    ],
    ids=["empty", "not JSON", "no answer", "not an object", "equal choices", "no file"],
)
def test_a_bad_file_of_questions_is_named(
    tmp_path: Path, read: Any, text: str | None, facts: list[str]
) -> None:
    path = tmp_path / "facts.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=naming(path, *facts)):
        read(path)


# Tokenizers and contexts that cannot hold a probe


def test_words_without_a_token_are_named() -> None:
    tokenizer = word_tokenizer([*probe_texts(), "In this list"])
    of_its_words = KVRetrieval(8, keys=KEYS).examples(20)
    check_answerable(of_its_words, tokenizer, 512)
    with_two_others = KVRetrieval(2, keys=("zebra", "wolf")).examples(1)
    with pytest.raises(ValueError, match=naming("'wolf'", "'zebra'")):
        check_answerable(with_two_others, tokenizer, 512)
    with_many_others = LetterChoice(COLORS, 3).examples(1)
    with pytest.raises(CannotAnswer) as error:
        check_answerable(with_many_others, tokenizer, 512)
    assert str(error.value).count("'") == 2 * NAMED


def test_words_of_a_tokenizer_that_splits_at_spaces_alone_are_named() -> None:
    """To it, a pair is one word; the pair's parts are known on their own."""
    vocabulary = {"<unk>": 0, "lamp": 1, ":": 2, "42": 3}
    backend = Tokenizer(models.WordLevel(vocabulary, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    assert missing_words(tokenizer, ["lamp : 42"]) == []
    assert missing_words(tokenizer, ["lamp:42 lamp"]) == ["lamp:42"]


def test_letters_that_vanish_are_named() -> None:
    """A tokenizer without an unknown token leaves out what it does not know."""
    vocabulary = {character: index for index, character in enumerate("abcdeĠ")}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert tokenizer("bed zebra")["input_ids"] == tokenizer("bed eba")["input_ids"]
    assert missing_words(tokenizer, ["bed zebra cab", "zebra"]) == ["zebra"]


def test_a_prompt_beyond_the_context_is_named() -> None:
    tokenizer = word_tokenizer(probe_texts())
    examples = KVRetrieval((3, 12), keys=KEYS).examples(6)
    longest = max(len(tokenizer(e.prompt + e.answer)["input_ids"]) for e in examples)
    check_answerable(examples, tokenizer, longest)
    # Every other example has twelve pairs.
    with pytest.raises(ValueError, match=naming("3 of 6", longest - 1)):
        check_answerable(examples, tokenizer, longest - 1)


def test_the_longest_choice_counts() -> None:
    tokenizer = word_tokenizer(["the town lies in north by west"])
    examples = [Example("the town lies", " in", (" in", " in north by west"))]
    check_answerable(examples, tokenizer, 7)
    with pytest.raises(ValueError, match=naming(6)):
        check_answerable(examples, tokenizer, 6)


def test_examples_longer_than_the_context_are_refused_by_us_alone() -> None:
    """transformers would add that they "will result in indexing errors", though nothing runs them."""
    tokenizer = word_tokenizer(probe_texts())
    tokenizer.model_max_length = 8
    examples = KVRetrieval(4, 0, KEYS).examples(2)
    warned: list[logging.LogRecord] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = warned.append  # type: ignore[method-assign]
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    try:
        with pytest.raises(CannotAnswer):
            check_answerable(examples, tokenizer, 8)
    finally:
        logger.removeHandler(handler)
    assert not warned
