"""The KV-retrieval probe and the knowledge questions."""

import json
import re

import pytest

from hybrid_distill.probes import Example
from hybrid_distill.probes.knowledge import Knowledge
from hybrid_distill.probes.kv_retrieval import KVRetrieval
from hybrid_distill.probes.nouns import NOUNS

PROMPT = re.compile(
    r"Memorize the following dictionary:\n(?P<pairs>([a-z]+:\d+\n)+)The value of the key '(?P<key>[a-z]+)' is"
)


def test_the_exact_prompt() -> None:
    example = KVRetrieval(3, seed=0, keys=("present", "scallops", "dog")).examples(1)[0]
    assert example == Example(
        "Memorize the following dictionary:\nscallops:46\ndog:97\npresent:84\n"
        "The value of the key 'present' is",
        answer=" 84",
        choices=(" 46", " 97", " 84"),
    )


@pytest.mark.parametrize("n_pairs", [1, 5, 50, 100])
def test_keys_and_values_are_distinct_and_the_answer_stands_beside_its_key(n_pairs: int) -> None:
    for example in KVRetrieval(n_pairs, seed=3).examples(20):
        match = PROMPT.fullmatch(example.prompt)
        assert match
        pairs = dict(line.split(":") for line in match["pairs"].splitlines())
        assert len(pairs) == n_pairs == len(set(pairs.values()))
        assert all(0 <= int(value) <= 99 for value in pairs.values())
        assert example.answer == f" {pairs[match['key']]}"
        assert example.choices == tuple(f" {value}" for value in pairs.values())


def test_same_seed_same_prompts_other_seed_other_prompts() -> None:
    probe = KVRetrieval(8, seed=1)
    assert probe.examples(30) == KVRetrieval(8, seed=1).examples(30)
    assert probe.examples(30)[:10] == probe.examples(10)
    other = KVRetrieval(8, seed=2).examples(30)
    assert not {e.prompt for e in other} & {e.prompt for e in probe.examples(30)}
    assert len({e.prompt for e in other}) == 30


def test_every_position_is_asked_for() -> None:
    asked = {example.choices.index(example.answer) for example in KVRetrieval(4).examples(50)}
    assert asked == {0, 1, 2, 3}


@pytest.mark.parametrize("n_pairs", [0, -1, 101, 2.5, True, "8"])
def test_impossible_sizes_are_refused(n_pairs: object) -> None:
    with pytest.raises(ValueError, match="n_pairs"):
        KVRetrieval(n_pairs)  # type: ignore[arg-type]


def test_bad_keys_are_refused() -> None:
    with pytest.raises(ValueError, match="named twice: dog"):
        KVRetrieval(2, keys=("dog", "cat", "dog"))
    with pytest.raises(ValueError, match="2 keys cannot fill a dictionary of 3 pairs"):
        KVRetrieval(3, keys=("dog", "cat"))
    with pytest.raises(ValueError, match="n is 0"):
        KVRetrieval(3).examples(0)


def test_the_default_keys_fill_the_largest_dictionary() -> None:
    assert len(set(NOUNS)) == len(NOUNS) >= 300
    assert all(noun.isascii() and noun.isalpha() and noun.islower() for noun in NOUNS)


def test_description_names_the_keys() -> None:
    ours, other = KVRetrieval(2, keys=("dog", "cat")).describe(), KVRetrieval(2).describe()
    assert ours["keys_sha256"] != other["keys_sha256"]
    assert json.loads(json.dumps(ours)) == ours


def test_knowledge_reads_questions(tmp_path) -> None:
    path = tmp_path / "facts.jsonl"
    question = {"prompt": "Rome lies in", "answer": " Italy", "choices": [" Italy", " Spain"]}
    path.write_text(json.dumps(question) + "\n\n" + json.dumps(question) + "\n")
    knowledge = Knowledge(path)
    assert knowledge.examples() == 2 * [Example("Rome lies in", " Italy", (" Italy", " Spain"))]
    assert len(knowledge.examples(1)) == 1
    assert knowledge.chance == 0.5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no questions"),
        ('{"prompt": "a"}', "line 1 of .* is no question"),
        ('{"prompt": "a", "answer": " b", "choices": [" c"]}', "line 1 .* hold the answer"),
        ("nonsense", "line 1 of .* is no question"),
    ],
)
def test_knowledge_says_what_is_wrong_with_a_file(tmp_path, text: str, message: str) -> None:
    path = tmp_path / "facts.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        Knowledge(path).examples()
    with pytest.raises(ValueError, match="cannot be read"):
        Knowledge(tmp_path / "missing.jsonl").examples()
