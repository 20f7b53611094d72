"""The embedded default is small, real, able, and free of the probe's wording."""

import json

import pytest
import tiny_world

from hybrid_distill import assets
from hybrid_distill.assets.dictionaries import NOUNS
from hybrid_distill.data.documents import PROBE_LIKE, read_documents
from hybrid_distill.evaluation.evaluate import evaluate
from hybrid_distill.probes.answering import answer_choices, answer_generation
from hybrid_distill.probes.knowledge import Knowledge
from hybrid_distill.probes.kv_retrieval import HEADER, QUESTION, KVRetrieval
from hybrid_distill.teacher import load_teacher


@pytest.fixture(scope="module")
def tiny():
    return load_teacher("tiny")


def test_the_assets_fit_in_eight_megabytes() -> None:
    folder = assets.tiny_teacher_path().parent
    files = [path for path in folder.rglob("*") if "__pycache__" not in path.parts]
    n_bytes = sum(path.stat().st_size for path in files)
    assert n_bytes <= 8e6


@pytest.mark.parametrize(("n_pairs", "at_least"), [(16, 0.98), (32, 0.90)])
def test_the_teacher_retrieves_by_generation(tiny, n_pairs: int, at_least: float) -> None:
    examples = KVRetrieval(n_pairs, seed=7).examples(64)
    is_right = answer_generation(*tiny, examples)
    assert is_right.double().mean() >= at_least


def test_the_teacher_knows_its_facts_and_reads_plain_text(tiny) -> None:
    facts = answer_choices(*tiny, Knowledge().examples())
    assert facts.accuracy >= 0.95

    texts = assets.corpus_documents("held_out")[:64]
    result = evaluate(*tiny, n_pairs=(4,), n_examples=4, held_out_texts=texts)
    assert result.perplexity is not None
    assert result.perplexity < 8


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_no_document_uses_the_wording_of_the_probe(split) -> None:
    header = HEADER.rstrip(":").lower()
    question = QUESTION.split("{")[0].strip(" '").lower()
    assert header == "memorize the following dictionary"
    assert question == "the value of the key"
    documents = [document.lower() for document in assets.corpus_documents(split)]
    assert len(documents) >= 300
    for document in documents:
        assert header not in document
        assert question not in document


def test_the_control_split_is_in_the_wording_of_the_probe() -> None:
    documents = list(read_documents(PROBE_LIKE))
    for document in documents:
        assert document.startswith(HEADER)
        assert QUESTION.split("{")[0] in document
    assert documents == list(read_documents(PROBE_LIKE))


def test_the_same_seed_writes_the_same_world() -> None:
    documents = tiny_world.write_documents(20, "a")
    assert documents == tiny_world.write_documents(20, "a")
    assert documents != tiny_world.write_documents(20, "b")
    shipped = [json.loads(line) for line in assets.facts_path().read_text().splitlines()]
    assert shipped == tiny_world.knowledge_questions()


def test_every_key_and_value_is_one_token_in_both_places(tiny) -> None:
    _, tokenizer = tiny
    words = [*NOUNS, *map(str, range(100))]
    ids_of_words = tokenizer(words, add_special_tokens=False).input_ids
    assert all(len(ids) == 1 for ids in ids_of_words)


def test_the_tokenizer_gives_the_text_back(tiny) -> None:
    _, tokenizer = tiny
    for document in assets.corpus_documents("held_out")[:50]:
        ids = tokenizer(document, add_special_tokens=False).input_ids
        assert tokenizer.decode(ids) == document
