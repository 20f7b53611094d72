"""SmolLM2-135M-Instruct with 7 of its 90 KV groups kept, the other heads in windows; 17 % of its cache, on a CPU.

hybrid-distill run smollm2_135m --stages                  # without training: minutes
hybrid-distill generate-data --model HuggingFaceTB/SmolLM2-135M-Instruct --tokens 300K --out tokens/self
python recipes/hybrid_smollm2_135m.py --dry-run
python recipes/hybrid_smollm2_135m.py --teacher FOLDER    # for example from import-gguf

Time: without training three minutes of two cores with bfloat16 instructions, nine of others; head scores are shipped.
The 0.3 million tokens of this recipe take half an hour of an idle core with these instructions, ``--tokens 3M`` five
and a half; ``--dry-run`` estimates it on this machine. The run resumes where it was stopped.
Expected result: without training, the student matches the teacher on needles in 2,048 tokens, on knowledge and on
dictionaries within the window. It keeps nine tenths of what the teacher finds farther back, with a perplexity 5 %
higher. After half an hour of training on 0.3 million tokens, it keeps all of that, with a perplexity 2.5 % higher
(docs/real_models.md).
"""

from pathlib import Path

from hybrid_distill.assets import atlas_path
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
    # Rows longer than the window: only there does a student learn what it has lost beyond the window.
    tokens_per_step = 2048
    return RunConfig(
        name="hybrid-smollm2-135m",
        out=Path("runs/hybrid_smollm2_135m"),
        teacher=TeacherConfig(path="HuggingFaceTB/SmolLM2-135M-Instruct", dtype="auto"),
        # What windows of 300 take from each head: measured on a 4-bit copy of the weights, with 8 pairs.
        scoring=ScoringConfig(
            file=atlas_path("smollm2-135m-instruct-window300"),
            other_weights=True,
            n_pairs=8,
            min_accuracy=0.2,
        ),
        plan=PlanConfig(selection="top", unit="kv-group", k=7),
        student=StudentConfig(d_state=0, window=390, sinks=4),
        data=DataConfig(sources=("tokens/self",), chat=True, seq_len=2048),
        stages=(
            # Skipped while the student has no state. With --student.d-state 8, it aligns recurrent heads beside the
            # windows.
            Align(
                steps=300_000 // tokens_per_step,
                batch_size=1,
                micro_batch_size=1,
                learning_rate=1e-3,
                target="head",
                precision="auto",
                checkpoint_every=50,
            ),
            Distill(
                steps=300_000 // tokens_per_step,
                batch_size=1,
                micro_batch_size=1,
                # A student that has lost little gains nothing at 1e-4 (docs/real_models.md).
                learning_rate=2e-5,
                precision="auto",
                checkpoint_every=25,
            ),
        ),
        evaluation=EvaluationConfig(
            n_pairs=(4, 8, 16), n_examples=64, n_texts=32, knowledge="general"
        ),
    )


def main() -> None:
    run_recipe(config(), description=__doc__)


if __name__ == "__main__":
    main()
