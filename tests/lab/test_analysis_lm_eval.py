"""Tasks of lm-eval as columns of `hybrid-distill analyse`: the figures of our own answering of the same questions."""

from __future__ import annotations

import csv
import importlib.util
from pathlib import Path

import pytest
from harness_rows import row, write_all, write_rows

from hybrid_distill.cli.app import main
from hybrid_distill.lab.analysis.tasks import Questions
from hybrid_distill.plan import HeadId
from hybrid_distill.probes import Example
from hybrid_distill.probes.answering import answer_choices
from hybrid_distill.teacher import TINY, ablate_heads, load_teacher

pytest.importorskip("lm_eval")


def arc_rows(n: int) -> list[dict]:
    """Questions in the embedded teacher's words, on which it is neither always right nor never."""
    rows = [row("arc_easy", number) for number in range(n)]
    for number, made in enumerate(rows):
        made["question"] = f"Memorize the following dictionary: bird:{number}"
    return rows


def as_example(made: dict) -> Example:
    """Ask as lm-eval does in arc_easy: the choice with the highest summed log-probability."""
    choices = tuple(f" {text}" for text in made["choices"]["text"])
    answer = choices[made["choices"]["label"].index(made["answerKey"])]
    return Example(f"Question: {made['question']}\nAnswer:", answer, choices)


def test_the_figure_is_our_own_of_the_same_questions_with_and_without_heads(tmp_path: Path) -> None:
    model, tokenizer = load_teacher(TINY)
    rows = arc_rows(12)
    write_rows(tmp_path / "arc_easy/test.jsonl", rows)
    (task,) = Questions(tasks="lm_eval:arc_easy", data_dir=tmp_path, examples=10).make(model, tokenizer)
    assert task.column.header == "arc_easy, %"
    for heads in ([], [HeadId(5, 5), HeadId(0, 1), HeadId(2, 6)]):
        with ablate_heads(model, heads):
            found = task.measure(model, tokenizer)
            own = answer_choices(model, tokenizer, [as_example(made) for made in rows[:10]]).accuracy
        assert found == pytest.approx(100 * own)


def test_the_command_takes_them_beside_probes(tmp_path: Path) -> None:
    write_all(tmp_path / "data", 4, ("arc_easy", "piqa"))
    tasks = ["--tasks", "knowledge,lm_eval:arc_easy,lm_eval:piqa", "--data-dir", str(tmp_path / "data")]
    main(["analyze", "keep-heads", "--keep", "5:none", *tasks, "--examples", "4", "--out", str(tmp_path)])
    rows = list(csv.DictReader((tmp_path / "keep-heads.csv").open()))
    figures = [float(made[name]) for made in rows for name in ("arc_easy", "piqa")]
    assert len(figures) == 4 and set(figures) <= {0.0, 25.0, 50.0, 75.0, 100.0}


def test_without_lm_eval_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "lm_eval" else find_spec(name))
    model, tokenizer = load_teacher(TINY)
    with pytest.raises(ValueError, match="is not installed; pip install lm-eval"):
        Questions(tasks="lm_eval:piqa").make(model, tokenizer)
