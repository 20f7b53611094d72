"""The probes beside KV retrieval: every answer is found again by reading the prompt alone."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from planted import KEYS, planted_teacher, probe_texts, word_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

from hybrid_distill.assets import facts_path
from hybrid_distill.probes import Example, Probe
from hybrid_distill.probes.answering import answer_choices
from hybrid_distill.probes.checks import check_answerable, missing_words
from hybrid_distill.probes.copying import Copying
from hybrid_distill.probes.growing import GrowingKV
from hybrid_distill.probes.kv_retrieval import HEADER, KVRetrieval
from hybrid_distill.probes.letter_choice import Fact, LetterChoice
from hybrid_distill.probes.needle import Needle, default_filler
from hybrid_distill.probes.nouns import NOUNS
from hybrid_distill.probes.registry import PROBES, make_probe, options_of
from hybrid_distill.probes.two_hop import TwoHop

COLOURS = [(f"The colour of {thing} is", colour, (), "colour") for thing, colour in (
    ("snow", "white"), ("coal", "black"), ("grass", "green"), ("blood", "red"), ("the sky", "blue"))]  # fmt: skip
CITIES = [Fact(f"{city} lies in", land, kind="land") for city, land in (("Rome", "Italy"), ("Oslo", "Norway"))]


def small_probes(seed: int = 0) -> dict[str, Probe]:
    return {
        "kv": KVRetrieval(4, seed),
        "growing": GrowingKV((2, 5, 9), seed),
        "letters": LetterChoice(tuple(COLOURS), 3, seed),
        "needle": Needle(lengths=(20, 60), depths=(0, 0.5, 1), seed=seed),
        "copy": Copying(6, seed),
        "two_hop": TwoHop(7, seed),
    }


def test_there_is_one_of_each() -> None:
    assert set(small_probes()) == set(PROBES)


@pytest.mark.parametrize("name", PROBES)
def test_examples_follow_from_the_seed_alone(name: str) -> None:
    probe, again, other = small_probes()[name], small_probes()[name], small_probes(seed=1)[name]
    examples = probe.examples(40)
    assert examples == again.examples(40)
    assert examples[:7] == probe.examples(7)
    assert sum(a == b for a, b in zip(examples, other.examples(40), strict=True)) < 5
    with pytest.raises(ValueError, match="n is 0"):
        probe.examples(0)


@pytest.mark.parametrize("name", PROBES)
def test_choices_begin_with_the_space_that_the_prompt_leaves_out(name: str) -> None:
    for example in small_probes()[name].examples(40):
        assert example.prompt == example.prompt.strip()
        assert all(re.fullmatch(r" \w+", choice) for choice in example.choices)


@pytest.mark.parametrize("name", PROBES)
def test_chance_is_the_share_that_guessing_gets(name: str) -> None:
    probe = small_probes()[name]
    examples = probe.examples(36)  # whole rounds of all settings
    assert probe.chance == pytest.approx(sum(1 / len(e.choices) for e in examples) / len(examples))


@pytest.mark.parametrize("name", PROBES)
def test_the_answers_place_among_the_choices_gives_nothing_away(name: str) -> None:
    examples = [e for e in small_probes()[name].examples(600) if len(e.choices) > 2]
    places = Counter(e.choices.index(e.answer) / (len(e.choices) - 1) for e in examples)
    assert max(places.values()) < 0.5 * len(examples)
    assert len(places) >= 3


@pytest.mark.parametrize("name", PROBES)
def test_a_description_is_json_and_changes_with_the_seed(name: str) -> None:
    ours, other = small_probes()[name].describe(), small_probes(seed=1)[name].describe()
    assert json.loads(json.dumps(ours)) == ours
    assert {key for key in ours if ours[key] != other[key]} == {"seed"}


EXACT: dict[Probe, Example] = {
    LetterChoice((Fact("The capital of Peru is", "Lima", ("Quito", "Bogota")),), n_options=3): Example(
        "The capital of Peru is\nA. Bogota\nB. Lima\nC. Quito\nAnswer:", " B", (" A", " B", " C")
    ),
    Needle(("One. Two. Three.",), lengths=(3,), depths=(0.5,), n_choices=2, keys=("dog",)): Example(
        "Three. The number of the dog is 34. One. Two.\nThe number of the dog is", " 34", (" 88", " 34")
    ),
    Copying(3, words=("do", "re", "mi")): Example("mi re do\nmi", " re", (" mi", " re", " do")),
    TwoHop(4, keys=("do", "re", "mi", "fa")): Example(
        "In this list a word stands for a number, or for another word of the list:\nfa:mi\nmi:42\ndo:85\nre:do\n"
        "Followed to its end, 're' stands for the number",
        " 85",
        (" 42", " 85"),
    ),
}


@pytest.mark.parametrize(("probe", "example"), EXACT.items(), ids=lambda x: type(x).__name__)
def test_the_exact_prompt(probe: Probe, example: Example) -> None:
    """Published scores name a probe and its seed: the same name must go on meaning the same prompts."""
    assert probe.examples(1) == [example]


def test_growing_takes_its_sizes_in_turn() -> None:
    examples = GrowingKV((3, 8), seed=5, keys=KEYS).examples(7)
    three, eight = KVRetrieval(3, 5, KEYS).examples(4), KVRetrieval(8, 5, KEYS).examples(3)
    assert examples == [three[0], eight[0], three[1], eight[1], three[2], eight[2], three[3]]
    assert {len(e.choices) for e in GrowingKV().examples(10)} == {5, 10, 25, 50, 100}


def test_a_known_circuit_answers_dictionaries_of_every_size() -> None:
    result = answer_choices(*planted_teacher(), make_probe("kv", pairs=(2, 5, 12), keys=KEYS).examples(30))
    assert result.accuracy > 0.9


def options(example: Example) -> tuple[str, dict[str, str]]:
    """(question, option of each letter) as a reader sees them."""
    question, *lines, last = example.prompt.splitlines()
    assert last == "Answer:"
    return question, {f" {line[0]}": line[3:] for line in lines}


def test_the_letter_is_that_of_the_facts_answer() -> None:
    probe = LetterChoice((*COLOURS, *CITIES), n_options=2)
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


def test_a_facts_own_distractors_come_first() -> None:
    facts = (Fact("The colour of milk is", "white", ("yellow", "grey"), "colour"), *COLOURS[1:])
    probe = LetterChoice(facts, n_options=4)
    milk = [options(e)[1].values() for e in probe.examples(50) if e.prompt.startswith("The colour of milk")]
    assert all({"white", "yellow", "grey"} < set(shown) for shown in milk)
    assert {option for shown in milk for option in shown} == {
        "white", "yellow", "grey", "black", "green", "red", "blue",
    }  # fmt: skip


def test_an_own_distractor_is_not_drawn_again() -> None:
    facts = (Fact("The colour of milk is", "white", ("black", "green"), "colour"), *COLOURS[1:])
    for example in LetterChoice(facts, n_options=4).examples(50):
        shown = options(example)[1].values()
        assert len(set(shown)) == 4


def test_facts_are_read_from_the_file_of_knowledge_questions(tmp_path: Path) -> None:
    lines = facts_path().read_text().splitlines()
    records = {record["prompt"]: record for record in map(json.loads, lines)}
    for example in LetterChoice.from_file(seed=3).examples(200):
        question, shown = options(example)
        record = records[question]
        assert f" {shown[example.answer]}" == record["answer"]
        assert {f" {option}" for option in shown.values()} == set(record["choices"])
    path = tmp_path / "facts.jsonl"
    path.write_text("".join(json.dumps({"prompt": q, "answer": a, "kind": kind}) + "\n\n" for q, a, _, kind in COLOURS))
    assert LetterChoice.from_file(path, 5, 2) == LetterChoice(tuple(COLOURS), 5, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no facts"),
        ("nonsense", "line 1 of .* is no fact"),
        ('{"prompt": "a"}', "line 1 of .* is no fact"),
        ("[1]", "line 1 of .* is no fact"),
        ('{"prompt": "a", "answer": 3}', "line 1 of .* is no fact"),
        ('{"prompt": "a", "answer": "b", "choices": ["c", " c"]}', "line 1 .* must differ"),
    ],
)
def test_a_bad_file_of_facts_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "facts.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        LetterChoice.from_file(path, 2)
    with pytest.raises(ValueError, match="cannot be read"):
        LetterChoice.from_file(tmp_path / "missing.jsonl")


@pytest.mark.parametrize(
    ("facts", "n_options", "message"),
    [
        (COLOURS, 1, "n_options is 1"),
        (COLOURS, 27, "n_options is 27"),
        (COLOURS, 6, "has 4 wrong answers, 6 options need 5"),
        ([*COLOURS, *CITIES], 3, "'Rome lies in' has 1 wrong answers"),
        ([], 2, "facts is"),
        (["only a question"], 2, "fact 1 is 'only a question'"),
        ([("a question", 7)], 2, "fact 1"),
        ([("a question", "b", ("b", "c"))], 2, "answers must differ"),
        ([(" ", "b", ("c",))], 2, "may be empty"),
    ],
)
def test_bad_facts_are_refused(facts: list, n_options: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LetterChoice(tuple(facts), n_options)


FACT = re.compile(r"The number of the (\w+) is (\d+)\. ?")


@pytest.mark.parametrize("filler", [None, ("All is well. " * 3, "One\nlong   line, 42 words it has not! Why?")])
def test_the_needle_stands_where_it_should(filler: tuple[str, ...] | None) -> None:
    lengths, depths = (10, 90, 300), (0, 0.3, 1)
    probe = Needle(filler, lengths, depths, seed=2)
    source = " ".join((default_filler() if filler is None else " ".join(filler)).split())
    longest = max(len(sentence.split()) for sentence in re.split(r"(?<=[.!?]) ", source))
    seen = set()
    for index, example in enumerate(probe.examples(18)):
        text, question = example.prompt.split("\n")
        (match,) = FACT.finditer(text)
        assert question == f"The number of the {match[1]} is" and example.answer == f" {match[2]}"
        rest = text.replace(match[0], "").strip()
        assert rest in f"{source} " * (300 // len(source.split()) + 3)
        length, depth = lengths[index % 3], depths[index // 3 % 3]
        seen.add((length, depth))
        n_words, n_before = len(rest.split()), len(text[: match.start()].split())
        assert length <= n_words < length + longest
        assert abs(n_before - depth * n_words) <= longest / 2
        used = set(re.findall(r"\w+", rest.lower()))
        assert match[1] not in used and not {choice.strip() for choice in example.choices} & used
        assert len(example.choices) == 10
    assert len(seen) == 9


def test_the_default_filler_is_one_text_without_numbers_or_keys() -> None:
    words = re.findall(r"\w+", default_filler().lower())
    assert len(words) > 4000 and default_filler() == default_filler()
    assert not set(words) & {*NOUNS, *map(str, range(100))}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"filler": ()}, "filler is"),
        ({"filler": " \n"}, "filler holds no words"),
        ({"filler": " ".join(map(str, range(95)))}, "leaves 5 of the numbers"),
        ({"filler": "the dog", "keys": ("dog",)}, "0 keys that the filler does not hold"),
        ({"lengths": (0,)}, "lengths is 0"),
        ({"lengths": (5, 5)}, "lengths names 5 twice"),
        ({"lengths": None}, "lengths is None"),
        ({"depths": (0.5, 1.5)}, "depth 1.5"),
        ({"depths": ()}, "depths is"),
        ({"n_choices": 0}, "n_choices"),
        ({"n_choices": 101}, "leaves 100 of the numbers"),
    ],
)
def test_bad_needles_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Needle(**settings)


def test_copying_asks_for_the_next_word_of_the_list() -> None:
    stops = set()
    for example in Copying(5, seed=4).examples(60):
        first, second = (line.split(" ") for line in example.prompt.split("\n"))
        assert len(set(first)) == 5 and set(first) < set(NOUNS)
        assert second == first[: len(second)]
        assert example.answer == f" {first[len(second)]}"
        assert example.choices == tuple(f" {word}" for word in first)
        stops.add(len(second))
    assert stops == {1, 2, 3, 4}


def entries(example: Example) -> tuple[dict[str, str], str]:
    """(value of each key, key asked for)."""
    _, *lines, question = example.prompt.split("\n")
    asked = re.fullmatch(r"Followed to its end, '(\w+)' stands for the number", question)
    assert asked
    return dict(line.split(":") for line in lines), asked[1]


@pytest.mark.parametrize("n_pairs", [4, 9, 200])
def test_two_hops_lead_to_the_answer_and_one_does_not(n_pairs: int) -> None:
    sides = set()
    for example in TwoHop(n_pairs, seed=1).examples(30):
        values, asked = entries(example)
        middle = values[asked]
        assert middle in values and example.answer == f" {values[middle]}"
        leading = {key: value for key, value in values.items() if not value.isdigit()}
        assert len(values) == n_pairs and len(leading) == n_pairs // 2 >= 2
        assert len({values[end] for end in leading.values()}) == len(leading), "every other chain ends elsewhere"
        numbers = [value for value in values.values() if value.isdigit()]
        assert set(example.choices) == {f" {number}" for number in numbers}
        assert len(set(numbers)) == len(numbers)
        sides.add(list(values).index(asked) < list(values).index(middle))
    assert sides == {True, False}, "the order of the entries gives nothing away"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GrowingKV((5, 5)), "5 is there twice"),
        (lambda: GrowingKV(()), "pairs is"),
        (lambda: GrowingKV((5, 101)), "n_pairs is 101"),
        (lambda: GrowingKV((2, 9), keys=("dog", "cat")), "2 keys cannot fill"),
        (lambda: Copying(1), "length is 1"),
        (lambda: Copying(2.5), "length is 2.5"),  # type: ignore[arg-type]
        (lambda: Copying(3, words=("dog", "cat")), "2 words are too few, 3"),
        (lambda: Copying(2, words=("dog", "cat", "dog")), "words named twice: dog"),
        (lambda: Copying(2, words=("dog", "hot dog")), "'hot dog'; each must be one word"),
        (lambda: TwoHop(3), "n_pairs is 3"),
        (lambda: TwoHop(201), "n_pairs is 201"),
        (lambda: TwoHop(4, keys=("dog", "cat", "cow")), "3 keys are too few, 4"),
    ],
)
def test_impossible_settings_are_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_words_may_be_given() -> None:
    words = ("do", "re", "mi", "fa", "so")
    assert {w for e in Copying(4, words=words).examples(20) for w in e.prompt.split()} == set(words)
    assert {w for e in TwoHop(5, keys=words).examples(20) for w in entries(e)[0]} == set(words)
    needles = Needle(lengths=(10,), depths=0.5, keys=words).examples(20)
    assert all(FACT.search(e.prompt)[1] in words for e in needles)  # type: ignore[index]
    assert Copying(4, words=words).describe() != Copying(4).describe()


def test_probes_are_made_by_name() -> None:
    assert make_probe("kv", pairs=10, seed=3) == make_probe("kv", pairs=(10,), seed=3) == KVRetrieval(10, 3)
    assert make_probe("kv", pairs=[10, 25, 50]) == GrowingKV((10, 25, 50))
    assert make_probe("growing", keys=KEYS, pairs=(2,)) == GrowingKV((2,), keys=KEYS)
    assert make_probe("letters") == LetterChoice.from_file()
    assert make_probe("letters", facts=COLOURS, n_options=2, seed=1) == LetterChoice(tuple(COLOURS), 2, 1)
    assert make_probe("needle", lengths=50, depths=(0, 1)) == Needle(lengths=(50,), depths=(0, 1))
    assert make_probe("copy", length=4) == Copying(4)
    assert make_probe("two_hop", pairs=6) == TwoHop(6)
    assert all("seed" in options_of(name) for name in PROBES)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("haystack", {}, "no probe 'haystack'; there are kv, growing, letters, needle, copy, two_hop"),
        ("copy", {"pairs": 3, "depths": 1}, "'copy' has no option depths, pairs; it has length, seed, words"),
        ("kv", {"pairs": 0}, "n_pairs is 0"),
        ("kv", {"pairs": None}, "pairs is None"),
        ("two_hop", {"pairs": (4, 8)}, "one size"),
    ],
)
def test_unknown_names_and_options_are_refused(name: str, settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make_probe(name, **settings)


def test_words_without_a_token_are_named() -> None:
    tokenizer = word_tokenizer([*probe_texts(), "In this list"])
    check_answerable(KVRetrieval(8, keys=KEYS).examples(20), tokenizer, 512)
    with pytest.raises(ValueError, match=r"no token for 'wolf', 'zebra', so the model"):
        check_answerable(KVRetrieval(2, keys=("zebra", "wolf")).examples(1), tokenizer, 512)
    with pytest.raises(ValueError, match=r"and \d+ more"):
        check_answerable(Needle(lengths=(50,)).examples(1), tokenizer, 512)
    choice = Example("the value", " wolf", (" wolf", f" {KEYS[0]}"))
    assert missing_words(tokenizer, [*choice.choices]) == ["wolf"]
    # In a tokenizer that splits at spaces alone, a pair is one word; its parts are known on their own.
    split = Tokenizer(models.WordLevel({"<unk>": 0, "lamp": 1, ":": 2, "42": 3}, unk_token="<unk>"))
    split.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    whole = PreTrainedTokenizerFast(tokenizer_object=split, unk_token="<unk>")
    assert missing_words(whole, ["lamp : 42"]) == []
    assert missing_words(whole, ["lamp:42 lamp"]) == ["lamp", ":", "42"]


class SlowTokenizer(PreTrainedTokenizer):
    """One token a word, in Python: such a tokenizer does not say where in the text its tokens stand."""

    vocab = {"<unk>": 0, "the": 1, "dog": 2}

    @property
    def vocab_size(self) -> int:
        return len(self.vocab)

    def get_vocab(self) -> dict[str, int]:
        return self.vocab

    def _tokenize(self, text: str, **kwargs) -> list[str]:
        return text.split()

    def _convert_token_to_id(self, token: str) -> int:
        return self.vocab.get(token, 0)

    def _convert_id_to_token(self, index: int) -> str:
        return list(self.vocab)[index]


def test_words_without_a_token_are_named_by_slow_tokenizers_too() -> None:
    tokenizer = SlowTokenizer(unk_token="<unk>")
    assert not tokenizer.is_fast
    assert missing_words(tokenizer, ["the dog", "the cat and the dog"]) == ["cat", "and"]
    assert missing_words(tokenizer, ["the dogthe"]) == ["dogthe"]


def test_letters_that_vanish_are_named() -> None:
    """A tokenizer without an unknown token leaves out what it does not know."""
    characters = Tokenizer(models.BPE({c: i for i, c in enumerate("abcdeĠ")}, []))
    characters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters)
    assert tokenizer("bed zebra")["input_ids"] == tokenizer("bed eba")["input_ids"]
    assert missing_words(tokenizer, ["bed zebra cab", "zebra"]) == ["zebra"]


def test_a_prompt_beyond_the_context_is_named() -> None:
    tokenizer = word_tokenizer(probe_texts())
    examples = GrowingKV((3, 12), keys=KEYS).examples(6)
    longest = max(len(tokenizer(e.prompt + e.answer)["input_ids"]) for e in examples)
    check_answerable(examples, tokenizer, longest)
    with pytest.raises(ValueError, match=f"3 of 6 .* context of {longest - 1} tokens; example 1 .* with {longest}:"):
        check_answerable(examples, tokenizer, longest - 1)


def test_the_longest_choice_counts() -> None:
    tokenizer = word_tokenizer(["the town lies in north by west"])
    examples = [Example("the town lies", " in", (" in", " in north by west"))]
    check_answerable(examples, tokenizer, 7)
    with pytest.raises(ValueError, match="context of 6 tokens"):
        check_answerable(examples, tokenizer, 6)


def test_no_other_probe_has_the_wording_of_the_first() -> None:
    for name in ("letters", "needle", "copy", "two_hop"):
        assert not any(HEADER in e.prompt or "value of the key" in e.prompt for e in small_probes()[name].examples(9))
