"""Attention put back into a student, and heads of both kinds in one ranking: planted circuits, hybrids, commands."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from planted import AGGREGATE, KEYS, PLANTED, planted_teacher
from test_head_sites import make_model
from training import ALIGN, small_run
from transformers import PreTrainedModel

from hybrid_distill.assets import tiny_teacher_path
from hybrid_distill.cli.app import main
from hybrid_distill.config import PlanConfig
from hybrid_distill.lab.analysis.experiment import Bench, Column, Questions, Task, accuracy_task, perplexity_task
from hybrid_distill.lab.analysis.hybrids import HybridHeadRanking, ReplaceLayer, ZeroedRecurrence, rank_together
from hybrid_distill.model.modeling_hybrid import HybridForCausalLM
from hybrid_distill.pipeline import RunInputs
from hybrid_distill.pipeline.run import choose_heads, prepare, train
from hybrid_distill.plan import HeadId, HeadPlan
from hybrid_distill.probes.kv_retrieval import KVRetrieval
from hybrid_distill.scoring import HeadScores, score_heads
from hybrid_distill.scoring.restoration import restore_layers
from hybrid_distill.student.build import build_student
from hybrid_distill.teacher import ablate_heads, head_kinds

IDS = torch.arange(2, 40).view(2, 19)
FEW = ["--tasks", "kv", "--pairs", "2", "--examples", "4", "--k", "3", "--counts", "2", "--n-control-texts", "1"]


def generated(model: PreTrainedModel, use_cache: bool = True) -> torch.Tensor:
    return model.generate(IDS, use_cache=use_cache, max_new_tokens=4, min_new_tokens=4, do_sample=False)  # type: ignore


def recurrent_student(teacher: PreTrainedModel) -> HybridForCausalLM:
    return build_student(teacher, HeadPlan.none(teacher), d_state=4)[0].eval()


@torch.no_grad()
def test_with_every_layer_put_back_the_student_is_the_teacher_and_then_itself_again(family: str, family_model) -> None:
    teacher = family_model(family)
    student = recurrent_student(teacher)
    before, weights = student(IDS).logits, {name: p.clone() for name, p in student.named_parameters()}
    with restore_layers(student, teacher, range(teacher.config.num_hidden_layers)):
        assert torch.equal(student(IDS, use_cache=False).logits, teacher(IDS, use_cache=False).logits)
        assert torch.equal(generated(student), generated(teacher))
    assert torch.equal(student(IDS).logits, before), "layers were not taken out again"
    assert all(torch.equal(p, weights[name]) for name, p in student.named_parameters())
    assert not any("forward" in vars(mixer) for mixer in student.mixers())


@pytest.fixture(scope="module")
def half() -> tuple[Bench, PreTrainedModel]:
    """A student of the planted teacher that has the gather heads; the aggregate head of layer 2 is recurrent."""
    teacher, tokenizer = planted_teacher()
    student = build_student(teacher, HeadPlan.from_pairs(teacher, PLANTED - {AGGREGATE}), d_state=4)[0].eval()
    examples = KVRetrieval(4, seed=3, keys=KEYS).examples(12)
    return Bench(student, tokenizer, [accuracy_task("kv", examples, 1 / 4)]), teacher


def replaced(bench: Bench, teacher: PreTrainedModel, by: Any = "layer") -> dict[str, float]:
    table = ReplaceLayer(student=Path(), by=by).table(bench, teacher)
    return {row.label: row.values[0] for row in table.rows}


def test_the_layer_that_is_missing_restores_retrieval(half: tuple) -> None:
    found = replaced(*half)
    assert list(found) == ["none", "layer 0", "layer 1", "layer 2", "layer 3", "teacher"]
    assert found["layer 2"] == found["teacher"] == 100
    assert max(found[label] for label in ("none", "layer 0", "layer 1", "layer 3")) < 50


@pytest.mark.parametrize("unit", ["%", ""])
def test_heads_are_put_back_best_first(half: tuple, unit: str) -> None:
    """A low perplexity is good."""
    bench, teacher = half
    (kv,) = bench.tasks
    task = kv if unit else Task(Column("p", ""), lambda *of: 101 - kv.measure(*of))
    found = replaced(bench._replace(tasks=[task]), teacher, by="head")
    *alone, last = list(found)[1:]
    assert alone[0] == str(AGGREGATE) and last == "teacher" and len(alone) == 16
    assert [found[head] for head in alone] == sorted((found[head] for head in alone), reverse=bool(unit))


@pytest.fixture(scope="module")
def aligned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that aligned every head, for a few steps."""
    out = tmp_path_factory.mktemp("run") / "aligned"
    this = RunInputs(small_run(out, plan=PlanConfig("none", k=0), stages=(ALIGN,)))
    prepare(this)
    train(this, choose_heads(this))
    return this.paths.out


def test_a_run_and_its_checkpoint_give_the_same_table(aligned: Path, tmp_path: Path) -> None:
    student, _, tokenizer = ReplaceLayer(student=aligned).load()
    student.save_pretrained(tmp_path / "student")
    tokenizer.save_pretrained(tmp_path / "student")
    few = ["--tasks", "kv,kv:generate", "--pairs", "3", "--examples", "6"]
    for source, name in ((aligned, "run"), (tmp_path / "student", "checkpoint")):
        main(["analyze", "replace-layer", "--student", str(source), *few, "--out", str(tmp_path / name)])
        assert {p.name for p in (tmp_path / name).iterdir()} == {f"replace-layer.{end}" for end in ("md", "csv", "png")}
    rows = [list(csv.reader((tmp_path / name / "replace-layer.csv").open())) for name in ("run", "checkpoint")]
    assert rows[0] == rows[1]
    assert [row[0] for row in rows[0][1:]] == ["none", *(f"layer {i}" for i in range(6)), "teacher"]
    assert float(rows[0][-1][1]) > 80 and float(rows[0][-1][4]) > 80, "the teacher, by choice and by generation"


def test_a_student_its_run_and_its_teacher_must_fit(aligned: Path, tmp_path: Path) -> None:
    make_model("student").save_pretrained(tmp_path / "other")
    shutil.copytree(aligned, tmp_path / "moved")  # read where it is, not where its config says that it was made
    shutil.rmtree(tmp_path / "moved/stages")
    for student, teacher, message in (
        (aligned, "tiny", "is a run and records its teacher; leave out --teacher"),
        (tiny_teacher_path(), None, "holds a model of type 'llama'; pass a finished run, or an export"),
        (tmp_path / "other", None, "3 layers of 4 heads of 8, 32 wide, the teacher 'tiny' has 6 layers of"),
        (tmp_path / "moved", None, f"{tmp_path / 'moved'} does not hold a finished stage"),
    ):
        with pytest.raises(ValueError, match=message):
            ReplaceLayer(student=student, teacher=teacher).load()
    with pytest.raises(ValueError, match="restored heads do not support a cache"):
        ReplaceLayer(student=aligned, by="head", questions=Questions(tasks="kv:generate", pairs=3, examples=2)).run()


def test_a_students_kept_circuit_comes_first_and_its_recurrent_heads_carry_nothing() -> None:
    teacher, tokenizer = planted_teacher()
    student = build_student(teacher, HeadPlan.from_pairs(teacher, PLANTED), d_state=4)[0].eval()
    probe = KVRetrieval(8, seed=1, keys=KEYS)
    assert head_kinds(student) == ["hybrid"]
    ranking = rank_together(student, {"hybrid": score_heads(student, tokenizer, probe, n_examples=12, progress=False)})
    assert {ranked.head for ranked in ranking[:3]} == PLANTED
    assert [ranked.kind for ranked in ranking] == ["attention"] * 3 + ["ssm"] * 13
    bench = Bench(student, tokenizer, [accuracy_task("kv", probe.examples(12), 1 / 8)])
    removed = HybridHeadRanking(counts=(1, 10)).without_first(bench, ranking)
    found = {row.label: row.values[0] for row in removed.rows}
    assert list(found) == [
        "nothing", "attention: first 1", "attention: first 3", "ssm: first 1", "ssm: first 10", "both: first 1",
        "both: first 10",
    ]  # fmt: skip
    assert found["nothing"] == 100 and found["attention: first 3"] < 50 and found["both: first 10"] < 50
    assert found["ssm: first 1"] > 85


@pytest.mark.parametrize(("family", "n_attention", "n_ssm"), [("falcon_h1", 3 * 4, 3 * 6), ("zamba2", 3 * 4, 5 * 8)])
def test_the_two_kinds_of_a_hybrid_are_ranked_together(
    family: str, n_attention: int, n_ssm: int, random_models: Path, tmp_path: Path
) -> None:
    argv = ["--model", str(random_models / family), "--min-accuracy", "0", *FEW]
    main(["analyze", "carriers", *argv, "--out", str(tmp_path)])
    files = {f"carriers.{end}" for end in ("md", "csv", "png", "attention.json", "ssm.json")}
    assert {p.name for p in tmp_path.iterdir()} == files | {f"carriers.removed.{end}" for end in ("md", "csv", "png")}
    rows = list(csv.DictReader((tmp_path / "carriers.csv").open()))
    for kind, n_heads in (("attention", n_attention), ("ssm", n_ssm)):
        own = [row["head"].split()[0] for row in rows if row["head"].endswith(f" {kind}")]
        assert own == list(map(str, HeadScores.load(tmp_path / f"carriers.{kind}.json").ranking()))
        assert len(own) == n_heads
    lost = [float(row["accuracy lost"]) for row in rows]
    assert lost == sorted(lost, reverse=True)
    removed = [row["heads removed"] for row in csv.DictReader((tmp_path / "carriers.removed.csv").open())]
    assert removed == ["nothing", "attention: first 2", "ssm: first 2", "both: first 2"]


def test_recurrent_heads_are_zeroed_layer_by_layer(half: tuple) -> None:
    """Each row is the model without exactly the heads that its label names; layers 0 and 3 are attention alone."""
    bench, teacher = half
    kept = [head for head in HeadPlan.all(teacher).kept if head.layer in (0, 3)]
    student = build_student(teacher, HeadPlan.from_pairs(teacher, kept), d_state=4)[0].eval()
    task = perplexity_task([" ".join(KEYS[:6])], batch_size=1)
    table = ZeroedRecurrence().table(bench._replace(model=student, tasks=[task]))
    values = {row.label: row.values[0] for row in table.rows}
    assert list(values) == ["nothing", "layer 1 (4 heads)", "layer 2 (4 heads)", "all layers"]
    for label, layers in (("nothing", ()), ("layer 1 (4 heads)", (1,)), ("all layers", (1, 2))):
        heads = [HeadId(layer, head) for layer in layers for head in range(4)]
        with ablate_heads(student, heads):
            assert values[label] == task.measure(student, bench.tokenizer)
    assert len(set(values.values())) == 4


@pytest.mark.parametrize("family", ["falcon_h1", "zamba2", "falcon_mamba"])
def test_recurrent_layers_of_any_model_are_zeroed(family: str, random_models: Path, tmp_path: Path) -> None:
    argv = ["--model", str(random_models / family), "--tasks", "text", "--examples", "1"]
    main(["analyze", "zeroed-recurrence", *argv, "--out", str(tmp_path)])
    rows = list(csv.DictReader((tmp_path / "zeroed-recurrence.csv").open()))
    labels = [row["zeroed"] for row in rows]
    assert labels[0] == "nothing" and labels[1].startswith("layer 0 (") and labels[-1] == "all layers"
    assert len({row["perplexity"] for row in rows}) > 1


def test_a_model_without_recurrent_heads_has_none_to_zero(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["analyze", "zeroed-recurrence", "--tasks", "kv", "--examples", "1", "--out", str(tmp_path / "none")])
    assert stopped.value.code == 2 and "tiny" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
