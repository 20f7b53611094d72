"""Heads of both kinds in one ranking: a planted circuit among recurrent heads, hybrids, what is refused."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from planted import KEYS, PLANTED, planted_teacher
from test_head_sites import make_model

from hybrid_distill.cli.app import main
from hybrid_distill.lab.analysis.carriers import rank_together, remove_kinds, score_kinds, summary
from hybrid_distill.lab.analysis.experiment import Bench
from hybrid_distill.lab.analysis.tasks import accuracy_task
from hybrid_distill.plan import HeadPlan
from hybrid_distill.probes.kv_retrieval import KVRetrieval
from hybrid_distill.scoring import HeadScores
from hybrid_distill.student.build import build_student
from hybrid_distill.teacher import head_kinds


def test_a_students_kept_circuit_comes_first_and_its_recurrent_heads_carry_nothing() -> None:
    teacher, tokenizer = planted_teacher()
    student = build_student(teacher, HeadPlan.from_pairs(teacher, PLANTED), d_state=4)[0].eval()
    probe = KVRetrieval(8, seed=1, keys=KEYS)
    scores = score_kinds(student, tokenizer, probe, n_examples=12, progress=False)
    ranking = rank_together(student, scores)
    assert list(scores) == ["hybrid"] and len(ranking) == 16
    assert {ranked.head for ranked in ranking[:3]} == PLANTED
    assert [ranked.kind for ranked in ranking] == ["attention"] * 3 + ["ssm"] * 13
    assert summary(ranking, 5).splitlines()[0] == f"attention: 3 of the first 5 heads, {ranking[0].head} at place 1"
    assert summary(ranking, 5).splitlines()[1].startswith("ssm: 2 of the first 5 heads, L")
    tasks = [accuracy_task("kv", probe.examples(12), 1 / 8, batch_size=12)]
    table = remove_kinds(Bench(student, tokenizer, tasks), ranking, (1, 10))
    found = {row.label: row.values[0] for row in table.rows}
    assert list(found) == [
        "nothing", "attention: first 1", "attention: first 3", "ssm: first 1", "ssm: first 10", "both: first 1",
        "both: first 10",
    ]  # fmt: skip
    assert found["nothing"] == 100 and found["attention: first 3"] < 50 and found["both: first 10"] < 50
    assert found["ssm: first 1"] > 85


FEW = ["--tasks", "kv", "--pairs", "2", "--examples", "4", "--k", "3", "--counts", "2"]


@pytest.mark.parametrize(("family", "n_attention", "n_ssm"), [("falcon_h1", 3 * 4, 3 * 6), ("zamba2", 3 * 4, 5 * 8)])
def test_the_two_kinds_of_a_hybrid_are_ranked_together(
    family: str, n_attention: int, n_ssm: int, random_models: Path, tmp_path: Path, capsys
) -> None:
    argv = ["--model", str(random_models / family), "--min-accuracy", "0", *FEW]
    main(["analyze", "carriers", *argv, "--out", str(tmp_path)])
    files = {f"carriers.{end}" for end in ("md", "csv", "png", "attention.json", "ssm.json")}
    assert {p.name for p in tmp_path.iterdir()} == files | {f"carriers.removed.{end}" for end in ("md", "csv", "png")}
    rows = list(csv.DictReader((tmp_path / "carriers.csv").open()))
    for kind, n_heads in (("attention", n_attention), ("ssm", n_ssm)):
        own = [row for row in rows if row["head"].endswith(f" {kind}")]
        assert [row["head"].split()[0] for row in own] == [
            str(head) for head in HeadScores.load(tmp_path / f"carriers.{kind}.json").ranking()
        ]
        assert len(own) == n_heads
    lost = [float(row["accuracy lost"]) for row in rows]
    assert lost == sorted(lost, reverse=True)
    removed = [row["heads removed"] for row in csv.DictReader((tmp_path / "carriers.removed.csv").open())]
    assert removed == ["nothing", "attention: first 2", "ssm: first 2", "both: first 2"]
    assert "of the first 3 heads" in capsys.readouterr().out


def test_kinds_of_models() -> None:
    kinds = {family: head_kinds(make_model(family)) for family in ("llama", "student", "mamba2", "zamba2")}
    assert kinds == {"llama": ["attention"], "student": ["hybrid"], "mamba2": ["ssm"], "zamba2": ["attention", "ssm"]}
