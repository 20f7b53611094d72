"""Any decoder as a hybrid without training: its best KV groups stay attention, all other heads see a short window.

python recipes/hybrid_untrained.py
hybrid-distill run untrained --teacher HuggingFaceTB/SmolLM2-135M-Instruct
hybrid-distill run untrained --teacher PATH --cache 200MB --context 32768 --dry-run    # what that would keep

Time: a minute for the embedded teacher. Scoring the heads is most of it: some ten minutes for SmolLM2 on a CPU core
with bfloat16 instructions, a quarter of an hour on two others, and nothing with ``--scoring.file`` of an earlier run.
Expected result: 16 % of the cache; needles and knowledge as the teacher, and text within the window; of dictionaries
farther back, SmolLM2 keeps four fifths (docs/real_models.md). The embedded teacher answers dictionaries of 16 pairs as
before.
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


def config() -> RunConfig:
    return RunConfig(
        name="untrained",
        out=Path("runs/untrained"),
        teacher=TeacherConfig(dtype="auto"),
        cache="16%",
        scoring=ScoringConfig(n_pairs=8),
        # Stand for what the cache decides.
        plan=PlanConfig(selection="top", unit="kv-group", k=1),
        student=StudentConfig(d_state=0, window=16, sinks=4),
        stages=(),
        evaluation=EvaluationConfig(n_pairs=(4, 8, 16), n_examples=64, n_texts=32),
    )


def main() -> None:
    run_recipe(config(), description=__doc__)


if __name__ == "__main__":
    main()
