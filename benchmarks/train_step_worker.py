"""Take training steps when told to: one side of `train_step.py --against`, with the hybrid_distill of PYTHONPATH.

    python benchmarks/train_step_worker.py align fp32    # a line in: one step; a line out: its loss and CPU seconds

The shape is SmolLM2-135M's, random weights, 14 of 270 heads kept, state 16, 4 rows of 256 tokens in two documents each.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import nullcontext
from dataclasses import replace

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from hybrid_distill.plan import HeadPlan
from hybrid_distill.student.build import build_student
from hybrid_distill.train.config import AlignConfig, DistillConfig
from hybrid_distill.train.optimizer import make_adamw, trainable
from hybrid_distill.train.stages import make_stage

try:
    from hybrid_kernels.products import on_fast_cpu  # as the loop does
except ImportError:  # an older commit

    def on_fast_cpu(device: torch.device):
        return nullcontext()


SHAPE = LlamaConfig(
    vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
    num_key_value_heads=3, head_dim=64, tie_word_embeddings=True,
)  # fmt: skip
CONFIGS = {"align": AlignConfig(), "distill": DistillConfig()}


def main() -> None:
    name, precision = sys.argv[1:]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    teacher = AutoModelForCausalLM.from_config(SHAPE, attn_implementation="sdpa")
    student, _ = build_student(teacher, HeadPlan.random(SHAPE, 14, seed=1), d_state=16, init="random")
    stage = make_stage(replace(CONFIGS[name], precision=precision), student, teacher).train()
    optimizer = make_adamw(stage, learning_rate=1e-6, betas=(0.9, 0.95), weight_decay=0.1)
    ids = torch.randint(SHAPE.vocab_size, (4, 256))
    seq_idx = (torch.arange(256) >= 85).long().expand(4, -1)
    batch = {"input_ids": ids, "seq_idx": seq_idx, "mask": torch.ones_like(ids, dtype=torch.bool)}
    for _ in sys.stdin:
        begun = time.process_time()
        with on_fast_cpu(torch.device("cpu")):
            loss = stage(batch).total
            loss.backward()
        torch.nn.utils.clip_grad_norm_(trainable(stage).values(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(json.dumps({"loss": loss.item(), "cpu_seconds": time.process_time() - begun}), flush=True)


if __name__ == "__main__":
    main()
