"""Fine-tune an export with LoRA on packed rows (TRL, peft), merge the adapter, and export it again through the gate.

python examples/finetune.py                # after examples/build_student.py; pip install 'hybrid-distill[finetune]'
python examples/finetune.py STUDENT TEXTS.txt OUT STEPS
"""

import sys
from pathlib import Path

from datasets import Dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

from hybrid_distill import HeadPlan, export_checkpoint, load_student


def main(
    path: str = "student", texts: str = __file__, out: str = "tuned", steps: str = "20"
) -> None:
    student, tokenizer = load_student(path)
    rows = Dataset.from_list(
        [{"text": line} for line in Path(texts).read_text().splitlines() if line.strip()]
    )
    mixers = [
        "x_proj",
        "b_proj",
        "c_proj",
        "z_proj",
        "a_proj",
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
    ]
    trainer = SFTTrainer(
        student,
        SFTConfig("trainer", max_steps=int(steps), learning_rate=1e-3, packing=True, max_length=256, report_to="none",
                  save_strategy="no", bf16=False, logging_steps=10),
        train_dataset=rows,
        processing_class=tokenizer,
        peft_config=LoraConfig(r=8, target_modules=mixers, task_type="CAUSAL_LM"),
    )  # fmt: skip
    trainer.train()
    tuned = trainer.model.merge_and_unload()
    export_checkpoint(tuned, tokenizer, out, plan=HeadPlan.load(Path(path) / "plan.json"))
    print(f"export: {out}")


if __name__ == "__main__":
    main(*sys.argv[1:])
