"""List the files of this project that one training step enters, and how often.

    python benchmarks/step_files.py

The second step of a `distill` stage with default settings runs in this process, on a CPU, on the embedded teacher and
text. docs/architecture.md says what the files are for.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

from records import ROOT, parser_of

from hybrid_distill import HeadPlan, build_student, load_teacher
from hybrid_distill.data import DataConfig, open_rows
from hybrid_distill.train import loop
from hybrid_distill.train.config import Distill
from hybrid_distill.train.stages import make_stage

N_KEPT = 6
PACKAGES = ("hybrid_distill", "kernels")


def main() -> None:
    """Train two steps, and print the files that the second one enters."""
    parser_of(__doc__).parse_args()
    teacher, tokenizer = load_teacher("tiny")
    plan = HeadPlan.random(teacher.config, N_KEPT, seed=0)
    student, _ = build_student(teacher, plan, d_state=16)
    rows = open_rows(DataConfig(sources=("tiny",), seq_len=256), tokenizer)
    config = Distill(steps=2, batch_size=4, micro_batch_size=2)
    stage = make_stage(config, student, teacher, vocab_size=len(tokenizer))
    # The first step also reads what later ones keep: kernels' choices, rotary frequencies.
    with tempfile.TemporaryDirectory() as out, counted_in_step(1) as calls:
        loop.train_stage(stage, rows, out, progress=False)
    for file, n_calls in sorted(calls.items()):
        print(f"{n_calls:6,}  {file}")
    print(f"{len(calls)} files")


@contextmanager
def counted_in_step(number: int) -> Iterator[Counter[str]]:
    """Count the calls into each file of the project during one training step."""
    calls: Counter[str] = Counter()
    train_step = loop._Training._train_step

    def count(frame: FrameType, event: str, arg: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT):
            file = path.relative_to(ROOT)
            if file.parts[0] in PACKAGES:
                calls[str(file)] += 1

    def counted_step(training: Any, *args: Any) -> Any:
        if training.step == number:
            sys.setprofile(count)
        try:
            return train_step(training, *args)
        finally:
            sys.setprofile(None)

    with mock.patch.object(loop._Training, "_train_step", counted_step):
        yield calls


if __name__ == "__main__":
    main()
