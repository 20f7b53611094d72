"""Dictionaries and questions about them, near and far."""

from hybrid_distill.probes.kv_retrieval import KVRetrieval


def test_other_text_stands_between_dictionary_and_question() -> None:
    distance = 1500
    probe = KVRetrieval(4, seed=3, n_queries=2, distance=distance)
    near_examples = KVRetrieval(4, seed=3, n_queries=2).examples(4)
    between = []
    for near, far in zip(near_examples, probe.examples(4)):
        dictionary, _, question = near.prompt.rpartition("\n")
        assert far.prompt.startswith(f"{dictionary}\n")
        assert far.prompt.endswith(question)
        assert far.answer == near.answer
        assert far.choices == near.choices
        text = far.prompt.removeprefix(dictionary).removesuffix(question)
        words = text.split()
        assert len(words) >= distance
        assert not set(words) & set(near.choices)
        between.append(text)
    assert between[0] == between[1], "questions about a dictionary share its tokens"
    assert between[1] != between[2]
    assert probe.describe()["distance"] == distance
    assert "distance" not in KVRetrieval(4).describe()
