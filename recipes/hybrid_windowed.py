"""Any decoder as a hybrid with windows: its best KV groups stay attention, all other heads see a short window.

python recipes/hybrid_windowed.py --stages                  # without training, the embedded teacher
hybrid-distill run windowed --stages --teacher HuggingFaceTB/SmolLM2-135M-Instruct
hybrid-distill run windowed --stages --teacher PATH --cache 200MB --context 32768 --dry-run   # what that would keep
hybrid-distill run windowed --teacher PATH --tokens 0.3M --data.sources MY_TEXT --data.no-chat --out runs/trained

Time: a minute for the embedded teacher without training. Scoring the heads is most of it: some ten minutes for SmolLM2
on a CPU core with bfloat16 instructions, a quarter of an hour on two others, and nothing with ``--scoring.file`` of an
earlier run. Training takes SmolLM2 half an hour of such a core for 0.3 million tokens; ``--dry-run`` estimates yours.
Expected result: a cache of 16 % of the teacher's. The student matches the teacher on needles, knowledge and text within
the window. Of dictionaries farther back, SmolLM2 keeps four fifths (docs/real_models.md); the embedded teacher's
student still answers those of 16 pairs.
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
    # Rows longer than the window: only there does a student learn what it has lost beyond the window.
    tokens_per_step = 2048
    steps = 300_000 // tokens_per_step
    return RunConfig(
        name="windowed",
        out=Path("runs/windowed"),
        teacher=TeacherConfig(dtype="auto"),
        cache="16%",
        scoring=ScoringConfig(n_pairs=8),
        # Placeholders: the command line derives plan and window from ``cache``.
        plan=PlanConfig(selection="top", unit="kv-group", k=1),
        student=StudentConfig(d_state=0, window=16, sinks=4),
        # Conversations that the teacher wrote (`hybrid-distill generate-data`); --data.sources names other text.
        data=DataConfig(sources=("tokens/self",), chat=True, seq_len=2048),
        stages=(
            # Skipped while the student has no state. With --student.d-state 8, it aligns recurrent heads beside the
            # windows.
            Align(
                steps=steps,
                batch_size=1,
                micro_batch_size=1,
                learning_rate=1e-3,
                target="head",
                precision="auto",
                checkpoint_every=50,
            ),
            Distill(
                steps=steps,
                batch_size=1,
                micro_batch_size=1,
                # A student that has lost little gains nothing at 1e-4 (docs/real_models.md).
                learning_rate=2e-5,
                precision="auto",
                checkpoint_every=25,
            ),
        ),
        evaluation=EvaluationConfig(n_pairs=(4, 8, 16), n_examples=64, n_texts=32),
    )


def main() -> None:
    run_recipe(config(), description=__doc__)


if __name__ == "__main__":
    main()
