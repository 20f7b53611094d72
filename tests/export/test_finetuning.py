"""An exported student trains on with the trainers that people use, and exports again through the gate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from students import byte_tokenizer, tiny_student
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForLanguageModeling,
    DataCollatorWithFlattening,
    Trainer,
    TrainingArguments,
)

from hybrid_distill import HybridForCausalLM, export_checkpoint, load_student
from hybrid_distill.plan import HeadPlan

TEXTS = [
    f"The flag of town {number} is {color}." * (1 + number % 3) for number in range(8) for color in ("red", "blue")
]
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


@pytest.fixture
def exported(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    student, plan = tiny_student("llama", recurrence=request.param)
    export_checkpoint(student, byte_tokenizer(), tmp_path / "student", plan=plan, gate=False)
    return tmp_path / "student"


def load(folder: Path) -> HybridForCausalLM:
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)


def changed(before: Path, after: HybridForCausalLM) -> set[str]:
    """Names of the tensors that training has changed, without their layer."""
    old, new = load(before).state_dict(), after.state_dict()
    assert old.keys() == new.keys()
    return {name.partition(".self_attn.")[2] or name for name in old if not torch.equal(old[name], new[name])}


def assert_exports_again(model: HybridForCausalLM, before: Path, path: Path) -> None:
    report = export_checkpoint(model, byte_tokenizer(), path, plan=HeadPlan.load(before / "plan.json"))
    assert report.checks
    again, tokenizer = load_student(path)
    assert tokenizer is not None
    prompt = tokenizer("The flag", return_tensors="pt")
    with torch.no_grad():
        torch.testing.assert_close(again(**prompt).logits, model.eval()(**prompt).logits)


@pytest.mark.launched
@pytest.mark.parametrize("exported", ["discrete"], indirect=True)
def test_trainer_trains_a_student_padded_and_flattened_alike(exported: Path, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    rows = Dataset.from_list([{"input_ids": tokenizer(text)["input_ids"]} for text in TEXTS])
    losses, collators = {}, [DataCollatorForLanguageModeling(tokenizer, mlm=False), DataCollatorWithFlattening()]
    for collator in collators:
        arguments = TrainingArguments(str(tmp_path / "trainer"), gradient_checkpointing=True, **SETTINGS)
        trainer = Trainer(load(exported), arguments, train_dataset=rows, data_collator=collator)
        assert trainer.model_accepts_loss_kwargs, "else each micro-batch would count alike, however many tokens it has"
        trainer.train()
        losses[type(collator).__name__] = [line["loss"] for line in trainer.state.log_history if "loss" in line]
        model = trainer.model
    padded, flattened = losses.values()
    assert padded == pytest.approx(flattened, rel=1e-3) and padded[1] < padded[0]
    assert {"ssm.conv_weight", "ssm.x_proj.weight", "attention.q_proj.weight", "o_proj.weight"} <= changed(
        exported, model
    )
    assert_exports_again(model, exported, tmp_path / "again")


@pytest.mark.launched
@pytest.mark.parametrize("exported", ["mamba2"], indirect=True)  # whose biases stand apart from their projections
def test_sft_trainer_trains_adapters_of_mixers_on_packed_rows(exported: Path, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="pip install 'hybrid-distill[finetune]'")
    peft = pytest.importorskip("peft", reason="pip install 'hybrid-distill[finetune]'")
    targets = ["x_proj", "b_proj", "c_proj", "z_proj", "a_proj", "q_proj", "k_proj", "v_proj", "o_proj"]
    trainer = trl.SFTTrainer(
        load(exported),
        trl.SFTConfig(str(tmp_path / "sft"), packing=True, max_length=128, bf16=False, **SETTINGS),
        train_dataset=Dataset.from_list([{"text": text} for text in TEXTS]),
        processing_class=byte_tokenizer(),
        peft_config=peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM"),
    )
    seen: list[torch.Tensor] = []
    mixer = trainer.model.get_base_model().mixers()[0]
    mixer.ssm.register_forward_pre_hook(lambda _, args: seen.append(args[2]))
    trainer.train()
    assert seen[0] is not None and seen[0].max() > 0, "recurrent heads must know where packed documents begin"
    model = trainer.model.merge_and_unload()
    assert type(model).__name__ == "HybridForCausalLM"
    parts = {*(f"ssm.{name}_proj.weight" for name in "xbcza"), *(f"attention.{name}_proj.weight" for name in "qkv")}
    assert changed(exported, model) == parts | {"o_proj.weight"}  # tests/test_examples.py exports such a model again
