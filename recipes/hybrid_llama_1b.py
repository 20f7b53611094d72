"""Llama-3.2-1B with 20 of its 512 attention heads kept, as published (arXiv 2602.11374).

python recipes/hybrid_llama_1b.py --dry-run  # says how to tokenize the text first, once, without GPUs
accelerate launch recipes/hybrid_llama_1b.py --data.sources tokens/1 tokens/2
python recipes/hybrid_llama_1b.py --teacher tiny

Time: 20 hours on 8 H100, counted from shapes, not measured (docs/training.md, "Day one on GPUs").
Expected result: published for 10 heads or more, over 95 % of the teacher on retrieval-heavy tasks. Not reproduced here:
nothing has been trained at this size.

Figures go to wandb: into your project after `wandb login`, else into files in the run's folder, which `wandb sync`
uploads. Without it, or to write metrics.jsonl alone, pass ``--trackers`` without a name.
"""

from pathlib import Path

from hybrid_distill.cli import run_recipe
from hybrid_distill.config import (
    EvaluationConfig,
    PlanConfig,
    RunConfig,
    ScoringConfig,
    StudentConfig,
    TeacherConfig,
)
from hybrid_distill.data import DataConfig
from hybrid_distill.train.config import Align, Distill


def config() -> RunConfig:
    tokens_per_step = 128 * 2048
    return RunConfig(
        name="hybrid-llama-1b",
        out=Path("runs/hybrid_llama_1b"),
        teacher=TeacherConfig(path="meta-llama/Llama-3.2-1B", dtype="bfloat16"),
        scoring=ScoringConfig(n_pairs=20, n_examples=1000, n_queries=1),
        plan=PlanConfig(selection="top", k=20),
        student=StudentConfig(d_state=64),
        data=DataConfig(
            sources=(
                "hf:HuggingFaceFW/fineweb-edu:sample-100BT:train",
                "hf:HuggingFaceTB/finemath:finemath-4plus:train",
            ),
            weights=(0.5, 0.5),
            hub_tokens=12_500_000_000,
            seq_len=2048,
        ),
        # Published further stages, longer rows and conversations: docs/training.md, "More stages".
        stages=(
            Align(
                steps=5_000_000_000 // tokens_per_step,
                batch_size=128,
                micro_batch_size=8,
                learning_rate=1e-4,
                precision="bf16",
                target="layer",
            ),
            Distill(
                steps=20_000_000_000 // tokens_per_step,
                batch_size=128,
                micro_batch_size=4,
                learning_rate=1e-5,
                precision="bf16",
            ),
        ),
        evaluation=EvaluationConfig(n_pairs=(10, 20, 30, 50), n_examples=1000),
        gpus=8,
        trackers=("wandb",),
    )


def main() -> None:
    run_recipe(config(), description=__doc__)


if __name__ == "__main__":
    main()
