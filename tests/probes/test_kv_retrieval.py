"""Dictionaries and questions about them, near and far."""

from hybrid_distill.probes.kv_retrieval import KVRetrieval


def test_other_text_stands_between_dictionary_and_question() -> None:
    near = KVRetrieval(4, seed=3, n_queries=2).examples(4)
    probe = KVRetrieval(4, seed=3, n_queries=2, distance=1500)
    far = probe.examples(4)
    between = []
    for before, after in zip(near, far):
        dictionary, _, question = before.prompt.rpartition("\n")
        assert after.prompt.startswith(f"{dictionary}\n")
        assert after.prompt.endswith(question)
        assert (after.answer, after.choices) == (before.answer, before.choices)
        text = after.prompt.removeprefix(dictionary).removesuffix(question)
        assert len(text.split()) >= 1500
        assert not set(text.split()) & set(before.choices)
        between.append(text)
    assert between[0] == between[1], "questions about a dictionary share its tokens"
    assert between[1] != between[2]
    assert probe.describe()["distance"] == 1500
    assert "distance" not in KVRetrieval(4).describe()
