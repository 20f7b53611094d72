"""Students by `AutoModel` and `AutoModelForSequenceClassification`."""

from pathlib import Path

import pytest
import torch
from conftest import make_family_model
from datasets import Dataset
from messages import naming
from students import close, left_padded, mixed_student, tokens
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Trainer,
    TrainingArguments,
)

from hybrid_distill.model import (
    HybridForCausalLM,
    HybridForSequenceClassification,
    HybridModel,
    self_check,
)

AUTO_CLASSES = (AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification)


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def student(request: pytest.FixtureRequest) -> HybridForCausalLM:
    return mixed_student(make_family_model("qwen2", tie_word_embeddings=request.param))


@torch.no_grad()
def test_auto_model_is_the_decoder_alone(student: HybridForCausalLM, tmp_path: Path) -> None:
    student.save_pretrained(tmp_path / "student")
    model = AutoModel.from_pretrained(tmp_path / "student")
    assert type(model) is HybridModel
    assert not hasattr(model, "lm_head")
    ids, mask = left_padded([tokens(9), tokens(4)])
    expected = student.model(ids, mask).last_hidden_state
    close(model(ids, mask).last_hidden_state, expected)
    model.save_pretrained(tmp_path / "decoder")
    again = AutoModel.from_pretrained(tmp_path / "decoder")
    close(again(ids, mask).last_hidden_state, expected)


@torch.no_grad()
def test_shared_embeddings_that_the_config_unties_are_saved_each_time(tmp_path: Path) -> None:
    """As by the second checkpoint of a Trainer."""
    student = mixed_student(make_family_model("qwen2", tie_word_embeddings=True))
    student.config.tie_word_embeddings = False
    ids = tokens(1, 9)
    expected = student(ids).logits
    for name in ("first", "second"):
        student.save_pretrained(tmp_path / name)
        again = HybridForCausalLM.from_pretrained(tmp_path / name)
        close(again(ids).logits, expected)


def test_every_class_checks_itself_under_an_unknown_transformers(
    student: HybridForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    student.config.checked_transformers = ["5.2.0"]
    student.save_pretrained(tmp_path)
    monkeypatch.setattr(self_check, "__version__", "5.99.0")
    for auto_class in AUTO_CLASSES:
        for flags in ({}, {"return_dict": False}, {"use_cache": False}):
            assert auto_class.from_pretrained(tmp_path, **flags) in self_check._checked
    # A decoder that computes something else with a cache.
    monkeypatch.setattr(self_check, "cache_of", lambda output: None)
    for auto_class in AUTO_CLASSES:
        with pytest.raises(ValueError, match=naming(self_check.CACHED)):
            auto_class.from_pretrained(tmp_path)


def test_a_classifier_reads_the_last_token_and_is_saved(
    student: HybridForCausalLM, tmp_path: Path
) -> None:
    student.save_pretrained(tmp_path / "student")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "student", num_labels=3)
    assert type(model) is HybridForSequenceClassification
    ids, mask = left_padded([tokens(9), tokens(4)])
    labels = torch.tensor([2, 0])
    output = model(ids, attention_mask=mask, labels=labels)
    last_hidden = student.model(ids, mask).last_hidden_state[:, -1]
    close(output.logits, model.score(last_hidden))
    close(output.loss, torch.nn.functional.cross_entropy(output.logits, labels))
    output.loss.backward()
    assert all(heads.D.grad is not None for heads in model.recurrent_heads())

    model.save_pretrained(tmp_path / "classifier")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "classifier")
    close(again(ids, attention_mask=mask).logits, output.logits)
    with pytest.raises(ValueError, match=naming("score.weight")):
        AutoModelForCausalLM.from_pretrained(tmp_path / "classifier")


def test_a_classifier_learns_the_same_from_any_micro_batches(
    student: HybridForCausalLM, tmp_path: Path
) -> None:
    """transformers#47688: accumulated losses were added up instead of averaged."""
    student.save_pretrained(tmp_path / "student")
    rows = [{"input_ids": tokens(9).tolist(), "labels": n % 2} for n in range(4)]
    losses = []
    for batch_size in (4, 1):
        torch.manual_seed(0)
        model = HybridForSequenceClassification.from_pretrained(tmp_path / "student", num_labels=2)
        options = TrainingArguments(
            str(tmp_path / "trained"),
            max_steps=1,
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=4 // batch_size,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
        )
        trainer = Trainer(model, options, train_dataset=Dataset.from_list(rows))
        losses.append(trainer.train().training_loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
