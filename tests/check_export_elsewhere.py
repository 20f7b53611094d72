"""Export tiny students, then check them with another environment's Python: torch and transformers only.

    python tests/check_export_elsewhere.py /path/to/other-venv/bin/python [more interpreters ...]

Needs no GPU and no network. Fails when an exported folder computes anything else there than it did here.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from conftest import FAMILIES, make_family_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from hybrid_distill.build import build_student
from hybrid_distill.plan import HeadPlan

SPECIAL = ["<pad>", "<s>", "</s>", "<tool>", "<image>"]


def tiny_student(family: str, *, d_state: int = 8) -> tuple[PreTrainedModel, HeadPlan]:
    """A student that keeps 4 heads in two layers and none in the third; Qwen2 with tied embeddings."""
    teacher = make_family_model(family, vocab_size=300, tie_word_embeddings=family == "qwen2")
    plan = HeadPlan.from_pairs(teacher, [(0, 1), (1, 2), (1, 3), (1, 7)])
    return build_student(teacher, plan, d_state=d_state)[0], plan


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and special tokens with and without a role."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(SPECIAL + alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    roles = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, additional_special_tokens=["<tool>", "<image>"], **roles
    )


def main(interpreters: list[str]) -> int:
    from hybrid_distill.export import export_checkpoint

    torch.set_num_threads(1)
    failures = 0
    with tempfile.TemporaryDirectory() as scratch:
        for family in FAMILIES:
            student, plan = tiny_student(family)
            export_checkpoint(
                student, byte_tokenizer(), Path(scratch) / family, plan=plan, max_shard_size="100KB"
            )
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment |= {"HF_MODULES_CACHE": f"{scratch}/modules", "HF_HUB_OFFLINE": "1"}
        for interpreter in interpreters:
            for family in FAMILIES:
                command = [interpreter, f"{scratch}/{family}/gate/check.py"]
                failures += subprocess.run(command, cwd=scratch, env=environment).returncode != 0
    print(f"{failures} of {len(interpreters) * len(FAMILIES)} exports failed elsewhere")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) if len(sys.argv) > 1 else __doc__)
