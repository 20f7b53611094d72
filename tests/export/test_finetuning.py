"""An exported student trains on with the Trainer of transformers, and exports again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from students import byte_tokenizer, tiny_student
from torch.testing import assert_close
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForLanguageModeling,
    DataCollatorWithFlattening,
    Trainer,
    TrainingArguments,
)

from hybrid_distill import export_checkpoint, load_student

TEXTS = []
for number in range(8):
    for color in ("red", "blue"):
        TEXTS.append(f"The flag of town {number} is {color}." * (1 + number % 3))
SETTINGS: dict[str, Any] = {
    "max_steps": 2,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
    "disable_tqdm": True,
}


def test_trainer_trains_a_student_padded_and_flattened_alike_and_it_exports_again(
    tmp_path: Path,
) -> None:
    """Train the whole student; tests/test_examples.py trains adapters with TRL."""
    student, plan = tiny_student("llama")
    tokenizer = byte_tokenizer()
    exported = tmp_path / "student"
    export_checkpoint(student, tokenizer, exported, plan=plan, gate=False)
    rows = Dataset.from_list([{"input_ids": tokenizer(text)["input_ids"]} for text in TEXTS])
    losses = []
    for collator in (
        DataCollatorForLanguageModeling(tokenizer, mlm=False),
        DataCollatorWithFlattening(),
    ):
        model = AutoModelForCausalLM.from_pretrained(exported, trust_remote_code=True)
        arguments = TrainingArguments(
            str(tmp_path / "trainer"), gradient_checkpointing=True, **SETTINGS
        )
        trainer = Trainer(model, arguments, train_dataset=rows, data_collator=collator)
        # Else each micro-batch would count alike, however many tokens it has.
        assert trainer.model_accepts_loss_kwargs
        trainer.train()
        losses.append([line["loss"] for line in trainer.state.log_history if "loss" in line])
    padded, flattened = losses
    assert padded == pytest.approx(flattened, rel=1e-3)
    assert padded[1] < padded[0]
    changed = set()
    trained = model.state_dict()
    for name, tensor in student.state_dict().items():
        if not torch.equal(tensor, trained[name]):
            changed.add(name.partition(".self_attn.")[2])
    for part in ("ssm.conv_weight", "ssm.x_proj.weight", "attention.q_proj.weight"):
        assert part in changed
    assert "o_proj.weight" in changed
    export_checkpoint(model, tokenizer, tmp_path / "again", plan=plan, gate=False)
    again, _ = load_student(tmp_path / "again")
    prompt = tokenizer("The flag", return_tensors="pt")
    with torch.no_grad():
        assert_close(again(**prompt).logits, model.eval()(**prompt).logits)


@pytest.mark.parametrize("adapted", [False, True])
def test_smoothed_labels_are_the_next_tokens(adapted: bool, tmp_path: Path) -> None:
    """Trainer shifts them for classes that it knows by name."""
    student, _ = tiny_student("llama")
    model: Any = student
    if adapted:
        lora = LoraConfig(target_modules="all-linear", init_lora_weights=False)
        model = get_peft_model(student, lora)
    tokenizer = byte_tokenizer()
    rows = [{"input_ids": tokenizer(text)["input_ids"]} for text in TEXTS[2:6]]
    batch = DataCollatorForLanguageModeling(tokenizer, mlm=False)(rows)
    smoothing = 0.1
    arguments = TrainingArguments(
        str(tmp_path), label_smoothing_factor=smoothing, use_cpu=True, report_to="none"
    )
    trainer = Trainer(model, arguments)
    with torch.no_grad():
        smoothed = trainer.compute_loss(model, dict(batch))
        log_probs = model(**batch).logits[:, :-1].log_softmax(-1)
    labels = batch["labels"][:, 1:]
    is_token = labels != -100
    nll = F.nll_loss(log_probs[is_token], labels[is_token])
    uniform = -log_probs[is_token].mean()
    assert_close(smoothed, (1 - smoothing) * nll + smoothing * uniform)
