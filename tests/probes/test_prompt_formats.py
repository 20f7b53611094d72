"""Prompt formats, on tokenizers that treat digits, blanks and newlines as the large families do."""

from pathlib import Path

import pytest
import torch
from conftest import make_family_model
from families import STYLES, TEMPLATE, family_tokenizer
from head_tables import some_scores
from messages import has_facts, naming
from planted import KEYS, planted_teacher
from test_answering import brute_force, sharp
from tokenizers.processors import TemplateProcessing

from hybrid_distill.cli.score import ScoreJob
from hybrid_distill.lab.analysis.rankings import compare_files
from hybrid_distill.probes import Probe, prompt_formats
from hybrid_distill.probes.answering import answer_choices, answer_generation
from hybrid_distill.probes.encoding import encode_example, tokenize
from hybrid_distill.probes.knowledge import Knowledge, LetterChoice
from hybrid_distill.probes.kv_retrieval import KVRetrieval
from hybrid_distill.probes.prompt_formats import (
    FormattedProbe,
    accuracy_by_prompt_format,
    with_prompt_format,
)


@torch.no_grad()
@pytest.mark.parametrize("style", STYLES)
def test_values_are_scored_right_whatever_their_tokens(style: str) -> None:
    tokenizer = family_tokenizer(style)
    model = sharp(make_family_model("llama", vocab_size=len(tokenizer), num_hidden_layers=2))
    probe = KVRetrieval((1, 12), keys=KEYS)
    for prompt_format in ("plain", "shots=1", "chat"):
        examples = with_prompt_format(probe, prompt_format, tokenizer).examples(4)
        result = answer_choices(model, tokenizer, examples, batch_size=3)
        for logprobs, example in zip(result.logprob_EC, examples, strict=True):
            expected = brute_force(model, tokenizer, example)
            assert logprobs == pytest.approx(expected, abs=3e-4)


REFUSING = "{{ raise_exception('begin with a system message') }}"


@pytest.mark.parametrize(
    ("template", "chats"),
    [
        ({"default": TEMPLATE, "tool_use": REFUSING}, True),
        ({"rag": TEMPLATE, "tool_use": TEMPLATE}, False),
        (REFUSING, False),
        (None, False),
    ],
    ids=["default of several", "no default", "refuses", "none"],
)
def test_a_template_that_renders_no_question_leaves_the_other_formats(
    template: str | dict[str, str] | None, chats: bool
) -> None:
    tokenizer = family_tokenizer("qwen")
    tokenizer.chat_template = template  # type: ignore[assignment]
    model = make_family_model("llama", vocab_size=len(tokenizer), num_hidden_layers=1)
    accuracies = accuracy_by_prompt_format(
        model, tokenizer, KVRetrieval(1, keys=KEYS), ("plain", "chat")
    )
    assert list(accuracies) == (["plain", "chat"] if chats else ["plain"])


@pytest.mark.parametrize("style", STYLES)
def test_the_tokenizers_of_these_tests_are_unlike(style: str) -> None:
    tokenizer = family_tokenizer(style)
    text = "The value is 84\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    (example,) = KVRetrieval(1, seed=2).examples(1)
    n_tokens = len(encode_example(tokenizer, example).choices[0])
    has_single_digits = style in ("qwen", "smollm2", "gemma")  # behind a blank
    assert (n_tokens > 2) == has_single_digits


@pytest.mark.parametrize("style", STYLES)
def test_a_generated_number_is_read_back(style: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that writes the answer is right, one that writes more digits is not."""
    tokenizer = family_tokenizer(style)
    model = make_family_model("llama", vocab_size=len(tokenizer), num_hidden_layers=1)
    (example,) = FormattedProbe(KVRetrieval(4, keys=KEYS), "chat", tokenizer).examples(1)
    expected = {
        f"{example.answer}\n": True,
        f"{example.answer}7": False,
        " no": False,
    }
    for text, is_right in expected.items():
        (row,) = tokenize(tokenizer, [example.prompt + text])
        monkeypatch.setattr(model, "generate", lambda row=row, **_: torch.tensor([row]))
        assert answer_generation(model, tokenizer, [example]).tolist() == [is_right]


def test_the_template_is_the_tokenizers_and_its_beginning_stands_once() -> None:
    tokenizer = family_tokenizer("llama3")
    tokenizer.backend_tokenizer.post_processor = None
    probe = KVRetrieval(2)
    (plain,) = probe.examples(1)
    (chat,) = FormattedProbe(probe, "chat", tokenizer).examples(1)
    expected = f"<s><|turn|>user\n{plain.prompt}<|end|>\n<|turn|>assistant\nThe value is"
    assert chat.prompt == expected
    assert chat.answer == plain.answer
    assert chat.choices == plain.choices

    # A tokenizer that adds the beginning itself.
    bos = 0
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bos)]
    )
    of_plain, of_chat = tokenize(tokenizer, [plain.prompt, chat.prompt])
    assert of_plain.count(bos) == 1
    assert of_chat.count(bos) == 1


PROBES = (
    KVRetrieval((2, 5)),
    KVRetrieval(5, n_queries=3),
    LetterChoice.from_file(),
    Knowledge(),
)


@pytest.mark.parametrize(
    "probe", PROBES, ids=["kv", "kv, several questions", "letters", "knowledge"]
)
def test_solved_examples_are_others_than_the_one_asked(probe: Probe) -> None:
    formatted = FormattedProbe(probe, "shots=2", family_tokenizer("qwen"))
    examples = formatted.examples(30)
    assert examples[:7] == formatted.examples(7)
    for plain, example in zip(probe.examples(30), examples, strict=True):
        *solved, last = example.prompt.split("\n\n")
        assert len(solved) == 2
        assert last == plain.prompt
        assert f"{plain.prompt}{plain.answer}" not in example.prompt
    assert formatted.describe() == {**probe.describe(), "prompt_format": "shots=2"}
    assert with_prompt_format(probe, "plain", formatted.tokenizer) is probe


def test_accuracy_in_each_format_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_formats, "N_TRIED", 16)
    model, tokenizer = planted_teacher()
    probe = KVRetrieval(8, keys=KEYS)
    accuracies = accuracy_by_prompt_format(model, tokenizer, probe)
    # The tokenizer has no chat template.
    assert list(accuracies) == ["plain", "shots=1", "shots=3"]
    assert accuracies["plain"] > 0.9

    model.lm_head.weight.data.zero_()
    model.config.max_position_embeddings = 100  # too few for three shots
    accuracies = accuracy_by_prompt_format(model, tokenizer, probe)
    assert list(accuracies) == ["plain", "shots=1"]
    assert accuracies["plain"] == 0
    too_long = KVRetrieval(30, keys=KEYS)
    assert accuracy_by_prompt_format(model, tokenizer, too_long) == {}


@pytest.mark.parametrize("prompt_format", ["shots", "shots=0", "shots=-1", "Chat", "auto", ""])
def test_unknown_formats_are_refused(prompt_format: str) -> None:
    with pytest.raises(ValueError, match=f"'{prompt_format}'"):
        ScoreJob(prompt_format=prompt_format)


@pytest.mark.parametrize("template", [None, "{{ raise_exception('no') }}"])
def test_chats_that_cannot_be_written_are_refused(template: str | None) -> None:
    with pytest.raises(ValueError, match=naming("plain", "shots=1")):
        FormattedProbe(KVRetrieval(2), "chat", family_tokenizer("qwen", template)).examples(1)


def test_a_comparison_names_prompt_formats_that_differ(tmp_path: Path) -> None:
    tokenizer = family_tokenizer("qwen")
    paths = []
    for prompt_format in ("plain", "shots=1"):
        probe = with_prompt_format(KVRetrieval(4, keys=KEYS), prompt_format, tokenizer)
        scores = some_scores([[0.5, 0.1]], provenance={"probe": probe.describe()})
        path = tmp_path / f"{prompt_format}.json"
        scores.save(path)
        paths.append(path)
    assert has_facts(compare_files(*paths), "plain", "shots=1")
