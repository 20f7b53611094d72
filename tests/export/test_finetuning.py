"""An exported student trains on with the Trainer of transformers, and exports again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
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
