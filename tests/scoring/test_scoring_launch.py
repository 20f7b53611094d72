"""Several processes score what one does; also the program that they run.

``accelerate launch tests/scoring/test_scoring_launch.py OUT`` scores a planted teacher on all
launched processes.
"""

import json
import sys
from pathlib import Path

import pytest
import torch

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

from planted import KEYS, PLANTED, planted_teacher

from hybrid_distill.distributed import (
    OtherProcessError,
    connect,
    disconnect,
    rank_and_world,
)
from hybrid_distill.probes.kv_retrieval import KVRetrieval
from hybrid_distill.scoring import HeadScores, attribute_heads, score_heads
from hybrid_distill.scoring.forwards import Forwards
from hybrid_distill.scoring.head_scores import TABLES
from hybrid_distill.student.confined import confined

TEXTS = [f"{KEYS[0]} : 5 \n {KEYS[1]} {KEYS[0]}"]
PROBE = KVRetrieval(6, keys=KEYS)


def race(resume_path: Path | None = None) -> HeadScores:
    """Race with all that can be measured; 33 examples and one text are not shared evenly."""
    return score_heads(
        *planted_teacher(0.008),
        PROBE,
        n_examples=33,
        control_texts=TEXTS,
        race_k=3,
        resume_path=resume_path,
        progress=False,
    )


def attributed() -> HeadScores:
    """Attribute what windows lose; 11 examples are not shared evenly, and are two rounds."""
    teacher, tokenizer = planted_teacher(0.008)
    student = confined(teacher, window=6, sinks=0)
    probe = KVRetrieval(8, keys=KEYS)
    return attribute_heads(student, teacher, tokenizer, probe, n_examples=11, progress=False)


def main() -> None:
    """Score twice: once well, once with a second process that fails."""
    out = Path(sys.argv[1])
    rank = connect().process_index
    race(out / "partial.json").save(out / f"scores-{rank}.json")
    attributed().save(out / f"attributed-{rank}.json")
    original = Forwards.without

    def failing(self, batch, layer, heads):
        if layer == 1 and rank_and_world()[0] == 1:
            raise ValueError("the second process is broken")
        return original(self, batch, layer, heads)

    Forwards.without = failing  # type: ignore[method-assign]
    try:
        score_heads(*planted_teacher(0.008), PROBE, n_examples=4, progress=False)
    except (OtherProcessError, ValueError) as error:
        (out / f"error-{rank}.txt").write_text(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
    disconnect()


@pytest.mark.launched
def test_two_processes_give_the_scores_of_one(tmp_path) -> None:
    from test_launch import DDP, launch

    done = launch(DDP, tmp_path, program=Path(__file__))
    assert done.returncode == 0, done.stderr
    alone = race()
    attributed_alone = attributed()
    for rank in (0, 1):
        scores = HeadScores.load(tmp_path / f"scores-{rank}.json")
        assert torch.equal(scores.n_examples_LH, alone.n_examples_LH)
        assert torch.equal(scores.accuracy_drop_LH, alone.accuracy_drop_LH)
        for name in TABLES:
            table = getattr(scores, name)
            expected = getattr(alone, name)
            close = {"rtol": 1e-4, "atol": 1e-4, "equal_nan": True}
            torch.testing.assert_close(table, expected, msg=name, **close)
        assert set(scores.ranking()[:3]) == PLANTED

        shares_LH = HeadScores.load(tmp_path / f"attributed-{rank}.json").logprob_drop_LH
        expected_LH = attributed_alone.logprob_drop_LH
        torch.testing.assert_close(shares_LH, expected_LH, rtol=1e-4, atol=1e-5)
    assert (tmp_path / "error-0.txt").read_text().startswith("OtherProcessError: process 1 of 2")
    assert (tmp_path / "error-1.txt").read_text() == "ValueError: the second process is broken"

    # One process resumes from what two have measured.
    path = tmp_path / "partial.json"
    record = json.loads(path.read_text())
    all_steps = record["steps"]
    path.write_text(json.dumps({**record, "steps": all_steps[:5]}))
    resumed = race(path)
    assert torch.equal(resumed.accuracy_drop_LH, alone.accuracy_drop_LH)
    assert len(json.loads(path.read_text())["steps"]) == len(all_steps)
