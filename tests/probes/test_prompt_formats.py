"""Forms of prompts, on tokenizers that treat digits, blanks and newlines as the large families do."""

from pathlib import Path

import pytest
import torch
from conftest import make_family_model
from families import STYLES, family_tokenizer
from head_tables import some_scores
from hybrid_distill.probes.forms import FormedProbe, accuracy_by_form, in_form
from planted import KEYS, planted_teacher
from test_answering import brute_force, sharp

from hybrid_distill.cli.score import ScoreJob
from hybrid_distill.lab.analysis.rankings import compare_files
from hybrid_distill.probes import Probe, forms
from hybrid_distill.probes.answering import answer_choices, answer_generation
from hybrid_distill.probes.encoding import encode_example, tokenize
from hybrid_distill.probes.knowledge import Knowledge, LetterChoice
from hybrid_distill.probes.kv_retrieval import KVRetrieval


@torch.no_grad()
@pytest.mark.parametrize("style", STYLES)
def test_values_are_scored_right_whatever_their_tokens(style: str) -> None:
    tokenizer = family_tokenizer(style)
    n_tokens = len(encode_example(tokenizer, KVRetrieval(1, seed=2).examples(1)[0]).choices[0])
    assert tokenizer.decode(tokenizer("The value is 84\n")["input_ids"]) == "The value is 84\n"
    assert (n_tokens > 2) == (style in ("qwen", "smollm2", "gemma")), "digits one by one, behind a blank"
    model = sharp(make_family_model("llama", vocab_size=len(tokenizer), num_hidden_layers=2))
    probe = KVRetrieval((1, 12), keys=KEYS)
    for form in ("plain", "shots=1", "chat"):
        examples = in_form(probe, form, tokenizer).examples(4)
        result = answer_choices(model, tokenizer, examples, batch_size=3)
        for row, example in zip(result.logprob_EC, examples, strict=True):
            assert row == pytest.approx(brute_force(model, tokenizer, example), abs=3e-4)


@pytest.mark.parametrize("style", STYLES)
def test_a_generated_number_is_read_back(style: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that writes the answer is right, one that writes more digits is not."""
    tokenizer = family_tokenizer(style)
    model = make_family_model("llama", vocab_size=len(tokenizer), num_hidden_layers=1)
    (example,) = FormedProbe(KVRetrieval(4, keys=KEYS), "chat", tokenizer).examples(1)
    for written, is_right in ((f"{example.answer}\n", True), (f"{example.answer}7", False), (" no", False)):
        row = tokenize(tokenizer, [example.prompt + written])[0]
        monkeypatch.setattr(model, "generate", lambda row=row, **_: torch.tensor([row]))
        assert answer_generation(model, tokenizer, [example]).tolist() == [is_right]


def test_the_template_is_the_tokenizers_and_its_beginning_stands_once() -> None:
    tokenizer = family_tokenizer("llama3")
    tokenizer.backend_tokenizer.post_processor = None
    probe = KVRetrieval(2)
    ((plain,), (chat,)) = probe.examples(1), FormedProbe(probe, "chat", tokenizer).examples(1)
    assert chat.prompt == f"<s><|turn|>user\n{plain.prompt}<|end|>\n<|turn|>assistant\nThe value is"
    assert (chat.answer, chat.choices) == (plain.answer, plain.choices)
    from tokenizers.processors import TemplateProcessing

    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    assert [row.count(0) for row in tokenize(tokenizer, [plain.prompt, chat.prompt])] == [1, 1]


PROBES = (KVRetrieval((2, 5)), KVRetrieval(5, n_queries=3), LetterChoice.from_file(), Knowledge())


@pytest.mark.parametrize("probe", PROBES)
def test_solved_examples_are_others_than_the_one_asked(probe: Probe) -> None:
    formed = FormedProbe(probe, "shots=2", family_tokenizer("qwen"))
    plain, examples = probe.examples(30), formed.examples(30)
    assert examples[:7] == formed.examples(7)
    for asked, example in zip(plain, examples, strict=True):
        *solved, last = example.prompt.split("\n\n")
        assert len(solved) == 2 and last == asked.prompt and f"{asked.prompt}{asked.answer}" not in example.prompt
    assert formed.describe() == {**probe.describe(), "prompt_form": "shots=2"}
    assert in_form(probe, "plain", formed.tokenizer) is probe


def test_what_a_teacher_answers_in_each_form_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "N_TRIED", 16)
    model, tokenizer = planted_teacher()
    probe = KVRetrieval(8, keys=KEYS)
    accuracies = accuracy_by_form(model, tokenizer, probe)
    assert list(accuracies) == ["plain", "shots=1", "shots=3"]
    assert accuracies["plain"] > 0.9
    model.lm_head.weight.data.zero_()
    assert accuracy_by_form(model, tokenizer, probe)["plain"] == 0
    model.config.max_position_embeddings = 100
    assert list(accuracy_by_form(model, tokenizer, probe)) == ["plain", "shots=1"], "the other is too long"
    assert accuracy_by_form(model, tokenizer, KVRetrieval(30, keys=KEYS)) == {}


@pytest.mark.parametrize("form", ["shots", "shots=0", "shots=-1", "Chat", "auto", ""])
def test_unknown_forms_are_refused(form: str) -> None:
    with pytest.raises(ValueError, match=r"--form is .* pass plain, shots=1"):
        ScoreJob(form=form)


@pytest.mark.parametrize(
    ("template", "message"), [(None, "has no chat template"), ("{{ raise_exception('no') }}", "rejects a question")]
)
def test_chats_that_cannot_be_written_are_refused(template: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FormedProbe(KVRetrieval(2), "chat", family_tokenizer("qwen", template)).examples(1)


def test_a_comparison_of_scores_of_other_forms_says_so(tmp_path: Path) -> None:
    for form in ("plain", "shots=1"):
        probe = in_form(KVRetrieval(4, keys=KEYS), form, family_tokenizer("qwen"))
        some_scores([[0.5, 0.1]], provenance={"probe": probe.describe()}).save(tmp_path / f"{form}.json")
    assert "other forms: plain and shots=1" in compare_files(tmp_path / "plain.json", tmp_path / "shots=1.json")
