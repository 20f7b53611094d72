"""Probes: every answer is found again by reading the prompt alone, and a seed goes on meaning the same prompts."""

import hashlib
import json
import re
from collections import Counter
from pathlib import Path

import pytest
from families import family_tokenizer
from planted import KEYS, probe_texts, word_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hybrid_distill.assets import facts_path
from hybrid_distill.probes import Example, Probe
from hybrid_distill.probes.checks import check_answerable, missing_words
from hybrid_distill.probes.knowledge import Fact, Knowledge, LetterChoice
from hybrid_distill.probes.kv_retrieval import HEADER, KVRetrieval
from hybrid_distill.probes.registry import PROBES, make_probe
from hybrid_distill.probes.ruler import TASKS as RULER_TASKS
from hybrid_distill.probes.ruler import ruler_questions

COLORS = [(f"The color of {thing} is", color, (), "color") for thing, color in (
    ("snow", "white"), ("coal", "black"), ("grass", "green"), ("blood", "red"), ("the sky", "blue"))]  # fmt: skip
CITIES = [Fact(f"{city} lies in", land, kind="land") for city, land in (("Rome", "Italy"), ("Oslo", "Norway"))]


def small_probes(seed: int = 0) -> dict[str, Probe]:
    return {
        "kv": KVRetrieval((2, 5, 9), seed),
        "letters": LetterChoice(tuple(COLORS), 3, seed),
    }


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
    examples = [[e.prompt, e.answer, e.choices] for e in make_probe(name, **options).examples(60)]
    assert hashlib.sha256(json.dumps(examples).encode()).hexdigest()[:16] == expected


@pytest.mark.parametrize("name", PROBES)
def test_examples_follow_from_the_seed_alone(name: str) -> None:
    probe, again, other = small_probes()[name], small_probes()[name], small_probes(seed=1)[name]
    examples = probe.examples(40)
    assert examples == again.examples(40)
    assert examples[:7] == probe.examples(7)
    assert sum(a == b for a, b in zip(examples, other.examples(40), strict=True)) < 5
    with pytest.raises(ValueError, match="n is 0"):
        probe.examples(0)
    ours, others = probe.describe(), other.describe()
    assert json.loads(json.dumps(ours)) == ours
    assert {key for key in ours if ours[key] != others[key]} == {"seed"}


@pytest.mark.parametrize("name", PROBES)
def test_guessing_and_places_give_nothing_away(name: str) -> None:
    probe = small_probes()[name]
    examples = probe.examples(600)  # whole rounds of all settings
    assert probe.chance == pytest.approx(sum(1 / len(e.choices) for e in examples) / len(examples))
    for example in examples[:40]:
        assert example.prompt == example.prompt.strip()
        assert all(re.fullmatch(r" \w+", choice) for choice in example.choices), "the prompt leaves out the space"
        assert name == "kv" or not (HEADER in example.prompt or "value of the key" in example.prompt)
    asked = [e for e in examples if len(e.choices) > 2]
    places = Counter(e.choices.index(e.answer) / (len(e.choices) - 1) for e in asked)
    assert max(places.values()) < 0.5 * len(asked)
    assert len(places) >= 3


def test_probes_are_made_by_name() -> None:
    assert make_probe("kv", pairs=10, seed=3) == make_probe("kv", pairs=(10,), seed=3) == KVRetrieval(10, 3)
    assert make_probe("kv", pairs=[10, 25, 50]) == KVRetrieval((10, 25, 50))
    assert make_probe("letters") == LetterChoice.from_file()
    assert set(PROBES) == set(small_probes())


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("growing", {}, "there is no probe 'growing'; pass one of kv, letters"),
        ("kv", {"pairs": None}, "pairs is None"),
        ("kv", {"pairs": (5, 101)}, "n_pairs is 101"),
        ("kv", {"pairs": (5, 5)}, "n_pairs: '5' appears twice"),
    ],
)
def test_impossible_settings_are_refused(name: str, settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make_probe(name, **settings)


def test_words_and_facts_that_do_not_suffice_are_refused() -> None:
    with pytest.raises(ValueError, match="2 keys are too few, 3"):
        KVRetrieval((2, 3), keys=("dog", "cat"))
    with pytest.raises(ValueError, match="n_options is 27"):
        LetterChoice(tuple(COLORS), 27)
    with pytest.raises(ValueError, match="'Rome lies in' has 1 wrong answers, 3 options need 2"):
        LetterChoice((*COLORS, *CITIES), 3)


# Retrieval


@pytest.mark.parametrize("n_pairs", [1, 100])
def test_keys_and_values_are_distinct_and_the_answer_stands_beside_its_key(n_pairs: int) -> None:
    for example in KVRetrieval(n_pairs, seed=3).examples(20):
        header, *lines, question = example.prompt.split("\n")
        asked = re.fullmatch(r"The value of the key '([a-z]+)' is", question)
        assert header == HEADER and asked
        pairs = dict(line.split(":") for line in lines)
        assert len(pairs) == n_pairs == len(set(pairs.values()))
        assert all(0 <= int(value) <= 99 for value in pairs.values())
        assert example.answer == f" {pairs[asked[1]]}"
        assert example.choices == tuple(f" {value}" for value in pairs.values())
    one, other = KVRetrieval(n_pairs, 5).examples(2), KVRetrieval(3, 5).examples(1)
    assert KVRetrieval((n_pairs, 3), 5).examples(3) == [one[0], *other, one[1]], "sizes are taken in turn"


@pytest.mark.parametrize("task", ["niah_single_3", "niah_multikey_2", "niah_multivalue", *RULER_TASKS[-3:]])
def test_a_question_of_ruler_asks_for_one_answer(task: str) -> None:
    pytest.importorskip("lm_eval")
    tokenizer = family_tokenizer("smollm2")
    probe = make_probe(task, n_tokens=1500, tokenizer=tokenizer)
    examples, plain = probe.examples(3), ruler_questions(task, 1500, tokenizer, 0, 3)
    assert examples[:2] == probe.examples(2)
    for example, question in zip(examples, plain, strict=True):
        assert example.prompt == " ".join([question.prompt, *question.answers[:-1]])
        assert example.answer == f" {question.answers[-1]}" and len(example.choices) == 10 == 1 / probe.chance
        wrong = {choice.strip() for choice in example.choices} - {*question.answers}
        assert len(wrong) == 9
        assert task not in ("niah_multikey_2", "ruler_cwe") or all(word in example.prompt for word in wrong)
    assert json.loads(json.dumps(probe.describe()))["length"] == 1500


# Facts


def options(example: Example) -> tuple[str, dict[str, str]]:
    """(question, option of each letter) as a reader sees them."""
    question, *lines, last = example.prompt.splitlines()
    assert last == "Answer:"
    return question, {f" {line[0]}": line[3:] for line in lines}


def test_the_letter_is_that_of_the_facts_answer() -> None:
    probe = LetterChoice((*COLORS, *CITIES), n_options=2)
    answers = {fact.question: fact for fact in probe.facts}
    kinds = {fact.answer: fact.kind for fact in probe.facts}
    asked = []
    for example in probe.examples(28):
        question, shown = options(example)
        asked.append(question)
        assert list(shown) == list(example.choices)
        assert shown[example.answer] == answers[question].answer
        assert len(set(shown.values())) == 2
        assert {kinds[option] for option in shown.values()} == {answers[question].kind}
    assert len(set(asked[:7])) == 7 and asked[:7] == asked[7:14], "every fact before one comes again"
    assert len({e.prompt for e in probe.examples(28)}) > 14, "and then with other options"


def test_a_facts_own_distractors_come_first_and_once() -> None:
    facts = (Fact("The color of milk is", "white", ("black", "green"), "color"), *COLORS[1:])
    milk = [options(e)[1].values() for e in LetterChoice(facts, 4).examples(50) if "milk" in e.prompt]
    assert all({"white", "black", "green"} < set(shown) and len(set(shown)) == 4 for shown in milk)
    assert {option for shown in milk for option in shown} == {"white", "black", "green", "red", "blue"}


def test_facts_are_read_from_the_file_of_knowledge_questions(tmp_path: Path) -> None:
    records = {record["prompt"]: record for record in map(json.loads, facts_path().read_text().splitlines())}
    for example in LetterChoice.from_file(seed=3).examples(200):
        question, shown = options(example)
        record = records[question]
        assert f" {shown[example.answer]}" == record["answer"]
        assert {f" {option}" for option in shown.values()} == set(record["choices"])
    path = tmp_path / "facts.jsonl"
    path.write_text("".join(json.dumps({"prompt": q, "answer": a, "kind": kind}) + "\n\n" for q, a, _, kind in COLORS))
    assert LetterChoice.from_file(path, 5, 2) == LetterChoice(tuple(COLORS), 5, 2)
    question = {"prompt": "Rome lies in", "answer": " Italy", "choices": [" Italy", " Spain"]}
    path.write_text(json.dumps(question) + "\n\n" + json.dumps(question) + "\n")
    assert Knowledge(path).examples() == 2 * [Example("Rome lies in", " Italy", (" Italy", " Spain"))]
    assert len(Knowledge(path).examples(1)) == 1 and Knowledge(path).chance == 0.5


@pytest.mark.parametrize("read", [lambda p: Knowledge(p).examples(), lambda p: LetterChoice.from_file(p, 2)])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no questions"),
        ("nonsense", "line 1 of .* is not a question"),
        ('\n{"prompt": "a"}', "line 2 of .* is not a question"),
        ("[1]", "line 1 of .* is not a question"),
        ('{"prompt": "a", "answer": "b", "choices": ["c", "c"]}', "line 1 .* must differ|line 1 .* choices must"),
        (None, "cannot be read"),
    ],
)
def test_a_bad_file_of_questions_is_named(tmp_path: Path, read, text: str | None, message: str) -> None:
    path = tmp_path / "facts.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read(path)


# Tokenizers and contexts that cannot hold a probe


def test_words_without_a_token_are_named() -> None:
    tokenizer = word_tokenizer([*probe_texts(), "In this list"])
    check_answerable(KVRetrieval(8, keys=KEYS).examples(20), tokenizer, 512)
    with pytest.raises(ValueError, match=r"no token for 'wolf', 'zebra', so the model"):
        check_answerable(KVRetrieval(2, keys=("zebra", "wolf")).examples(1), tokenizer, 512)
    with pytest.raises(ValueError, match=r"and \d+ more"):
        check_answerable(LetterChoice(tuple(COLORS), 3).examples(1), tokenizer, 512)
    # In a tokenizer that splits at spaces alone, a pair is one word; its parts are known on their own.
    split = Tokenizer(models.WordLevel({"<unk>": 0, "lamp": 1, ":": 2, "42": 3}, unk_token="<unk>"))
    split.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    whole = PreTrainedTokenizerFast(tokenizer_object=split, unk_token="<unk>")
    assert missing_words(whole, ["lamp : 42"]) == []
    assert missing_words(whole, ["lamp:42 lamp"]) == ["lamp:42"]


def test_letters_that_vanish_are_named() -> None:
    """A tokenizer without an unknown token leaves out what it does not know."""
    characters = Tokenizer(models.BPE({c: i for i, c in enumerate("abcdeĠ")}, []))
    characters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters)
    assert tokenizer("bed zebra")["input_ids"] == tokenizer("bed eba")["input_ids"]
    assert missing_words(tokenizer, ["bed zebra cab", "zebra"]) == ["zebra"]


def test_a_prompt_beyond_the_context_is_named_and_the_longest_choice_counts() -> None:
    tokenizer = word_tokenizer(probe_texts())
    examples = KVRetrieval((3, 12), keys=KEYS).examples(6)
    longest = max(len(tokenizer(e.prompt + e.answer)["input_ids"]) for e in examples)
    check_answerable(examples, tokenizer, longest)
    with pytest.raises(ValueError, match=f"3 of 6 .* context of {longest - 1} tokens; example 1 .* with {longest}:"):
        check_answerable(examples, tokenizer, longest - 1)
    words = word_tokenizer(["the town lies in north by west"])
    examples = [Example("the town lies", " in", (" in", " in north by west"))]
    check_answerable(examples, words, 7)
    with pytest.raises(ValueError, match="context of 6 tokens"):
        check_answerable(examples, words, 6)
