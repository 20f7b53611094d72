"""Attention put back into a student, and heads of both kinds in one ranking."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from analyses import FILES, rows_of, run
from messages import naming
from planted import AGGREGATE, KEYS, PLANTED, planted_teacher
from test_head_sites import make_model
from training import ALIGN, small_run
from transformers import PreTrainedModel

from hybrid_distill.assets import tiny_teacher_path
from hybrid_distill.config import PlanConfig
from hybrid_distill.lab.analysis.experiment import Bench
from hybrid_distill.lab.analysis.hybrids import (
    HybridHeadRanking,
    ReplaceLayer,
    ZeroedRecurrence,
    rank_together,
)
from hybrid_distill.lab.analysis.tables import Column
from hybrid_distill.lab.analysis.tasks import Task, accuracy_task, perplexity_task
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


def generated(model: Any) -> torch.Tensor:
    return model.generate(IDS, max_new_tokens=4, min_new_tokens=4, do_sample=False)


def student_of(teacher: PreTrainedModel, kept: Any = ()) -> HybridForCausalLM:
    plan = HeadPlan.from_pairs(teacher, kept)
    student, _ = build_student(teacher, plan, d_state=4)
    return student.eval()


@torch.no_grad()
def test_with_every_layer_put_back_the_student_is_the_teacher(family: str, family_model) -> None:
    """And itself again afterwards."""
    teacher = family_model(family)
    student = student_of(teacher)
    before = student(IDS).logits
    weights = {name: parameter.clone() for name, parameter in student.named_parameters()}

    every_layer = range(teacher.config.num_hidden_layers)
    with restore_layers(student, teacher, every_layer):
        restored = student(IDS, use_cache=False).logits
        expected = teacher(IDS, use_cache=False).logits
        assert torch.equal(restored, expected)
        assert torch.equal(generated(student), generated(teacher))

    assert torch.equal(student(IDS).logits, before), "layers were not taken out again"
    for name, parameter in student.named_parameters():
        assert torch.equal(parameter, weights[name])
    # A layer is put back by a `forward` of its own, on the instance.
    assert not any("forward" in vars(mixer) for mixer in student.mixers())


@pytest.fixture(scope="module")
def half() -> tuple[Bench, PreTrainedModel]:
    """Make a student with the planted gather heads; the aggregate head of layer 2 is recurrent."""
    teacher, tokenizer = planted_teacher()
    student = student_of(teacher, PLANTED - {AGGREGATE})
    examples = KVRetrieval(4, seed=3, keys=KEYS).examples(12)
    task = accuracy_task("kv", examples, 1 / 4)
    return Bench(student, tokenizer, [task]), teacher


def replaced(bench: Bench, teacher: PreTrainedModel, by: Any = "layer") -> dict[str, float]:
    table = ReplaceLayer(student=Path(), by=by).table(bench, teacher)
    return {row.label: row.values[0] for row in table.rows}


def test_the_layer_that_is_missing_restores_retrieval(half: tuple) -> None:
    kv = replaced(*half)
    assert list(kv) == ["none", "layer 0", "layer 1", "layer 2", "layer 3", "teacher"]
    assert kv.pop("layer 2") == kv.pop("teacher") == 100
    assert max(kv.values()) < 50


@pytest.mark.parametrize("unit", ["%", ""])
def test_heads_are_put_back_best_first(half: tuple, unit: str) -> None:
    """Shares are good when high, numbers without a unit, perplexities, when low."""
    bench, teacher = half
    (kv,) = bench.tasks
    task = kv
    if not unit:
        # Low where retrieval works.
        task = Task(Column("p", ""), lambda *arguments: 101 - kv.measure(*arguments))

    value_of = replaced(bench._replace(tasks=[task]), teacher, by="head")

    _, *heads, last = value_of
    assert last == "teacher"
    assert heads[0] == str(AGGREGATE)
    assert len(heads) == 16
    values = [value_of[head] for head in heads]
    higher_is_better = bool(unit)
    assert values == sorted(values, reverse=higher_is_better)


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
    few = ["--tasks", "kv,kv:generate", "--pairs", 3, "--examples", 6]

    tables: list[list[dict[str, str]]] = []
    for source in (aligned, tmp_path / "student"):
        out = tmp_path / f"{source.name}-table"
        run("replace-layer", "--student", source, *few, "--out", out)
        assert {path.name for path in out.iterdir()} == {f"replace-layer.{end}" for end in FILES}
        tables.append(rows_of(out / "replace-layer.csv"))

    of_run, of_checkpoint = tables
    assert of_run == of_checkpoint
    layers = [f"layer {layer}" for layer in range(6)]
    assert [row["put back"] for row in of_run] == ["none", *layers, "teacher"]
    of_teacher = of_run[-1]
    assert float(of_teacher["kv"]) > 80
    assert float(of_teacher["kv:generate"]) > 80


def test_a_student_its_run_and_its_teacher_must_fit(aligned: Path, tmp_path: Path) -> None:
    make_model("student").save_pretrained(tmp_path / "other")
    # Read where it is, not where its config says that it was made.
    moved = tmp_path / "moved"
    shutil.copytree(aligned, moved)
    shutil.rmtree(moved / "stages")

    refused = [
        (ReplaceLayer(student=aligned, teacher="tiny"), ["--teacher"]),
        (ReplaceLayer(student=tiny_teacher_path()), ["'llama'"]),
        (ReplaceLayer(student=tmp_path / "other"), [3, 4, 8, 32]),
        (ReplaceLayer(student=moved), [moved]),
    ]
    for experiment, facts in refused:
        with pytest.raises(ValueError, match=naming(*facts)):
            experiment.load()


def test_a_students_kept_circuit_comes_first_and_its_recurrent_heads_carry_nothing() -> None:
    teacher, tokenizer = planted_teacher()
    student = student_of(teacher, PLANTED)
    probe = KVRetrieval(8, seed=1, keys=KEYS)
    assert head_kinds(student) == ["hybrid"]
    scores = score_heads(student, tokenizer, probe, n_examples=12, progress=False)
    ranking = rank_together(student, {"hybrid": scores})
    assert {ranked.head for ranked in ranking[:3]} == PLANTED
    assert [ranked.kind for ranked in ranking] == ["attention"] * 3 + ["ssm"] * 13

    task = accuracy_task("kv", probe.examples(12), 1 / 8)
    bench = Bench(student, tokenizer, [task])
    table = HybridHeadRanking(counts=(1, 10)).without_first(bench, ranking)
    kv = {row.label: row.values[0] for row in table.rows}
    assert list(kv) == [
        "nothing",
        "attention: first 1",
        "attention: first 3",
        "ssm: first 1",
        "ssm: first 10",
        "both: first 1",
        "both: first 10",
    ]
    assert kv["nothing"] == 100
    assert kv["attention: first 3"] < 50
    assert kv["both: first 10"] < 50
    assert kv["ssm: first 1"] > 85


@pytest.mark.parametrize(
    ("family", "n_attention", "n_ssm"),
    [("falcon_h1", 3 * 4, 3 * 6), ("zamba2", 3 * 4, 5 * 8)],
    ids=["falcon_h1", "zamba2"],
)
def test_the_two_kinds_of_a_hybrid_are_ranked_together(
    family: str, n_attention: int, n_ssm: int, random_models: Path, tmp_path: Path
) -> None:
    few = ["--tasks", "kv", "--pairs", 2, "--examples", 4, "--n-control-texts", 1]
    ranking = ["--k", 3, "--counts", 2, "--min-accuracy", 0]

    run("carriers", "--model", random_models / family, *few, *ranking, "--out", tmp_path)

    files = {f"carriers.{end}" for end in (*FILES, "attention.json", "ssm.json")}
    files.update(f"carriers.removed.{end}" for end in FILES)
    assert {path.name for path in tmp_path.iterdir()} == files
    rows = rows_of(tmp_path / "carriers.csv")
    for kind, n_heads in (("attention", n_attention), ("ssm", n_ssm)):
        own = [row["head"].split()[0] for row in rows if row["head"].endswith(f" {kind}")]
        scores = HeadScores.load(tmp_path / f"carriers.{kind}.json")
        assert own == [str(head) for head in scores.ranking()]
        assert len(own) == n_heads
    lost = [float(row["accuracy lost"]) for row in rows]
    assert lost == sorted(lost, reverse=True)

    of_removal = rows_of(tmp_path / "carriers.removed.csv")
    removed = [row["heads removed"] for row in of_removal]
    assert removed == ["nothing", "attention: first 2", "ssm: first 2", "both: first 2"]


def test_recurrent_heads_are_zeroed_layer_by_layer(half: tuple) -> None:
    """Each row is the model without the heads of its label; layers 0 and 3 are attention."""
    bench, teacher = half

    def heads_in(*layers: int) -> list[HeadId]:
        return [head for head in HeadPlan.all(teacher).kept if head.layer in layers]

    student = student_of(teacher, heads_in(0, 3))
    task = perplexity_task([" ".join(KEYS[:6])], batch_size=1)

    table = ZeroedRecurrence().table(bench._replace(model=student, tasks=[task]))

    perplexity = {row.label: row.values[0] for row in table.rows}
    assert list(perplexity) == ["nothing", "layer 1 (4 heads)", "layer 2 (4 heads)", "all layers"]
    zeroed = {
        "nothing": (),
        "layer 1 (4 heads)": (1,),
        "all layers": (1, 2),
    }
    for label, layers in zeroed.items():
        with ablate_heads(student, heads_in(*layers)):
            assert perplexity[label] == task.measure(student, bench.tokenizer)
    assert len(set(perplexity.values())) == 4


@pytest.mark.parametrize("family", ["falcon_h1", "zamba2", "falcon_mamba"])
def test_recurrent_layers_of_any_model_are_zeroed(
    family: str, random_models: Path, tmp_path: Path
) -> None:
    few = ["--tasks", "text", "--examples", 1]
    run("zeroed-recurrence", "--model", random_models / family, *few, "--out", tmp_path)
    rows = rows_of(tmp_path / "zeroed-recurrence.csv")
    labels = [row["zeroed"] for row in rows]
    assert labels[0] == "nothing"
    assert labels[1].startswith("layer 0 (")
    assert labels[-1] == "all layers"
    assert len({row["perplexity"] for row in rows}) > 1


def test_a_model_without_recurrent_heads_has_none_to_zero(tmp_path: Path, capsys) -> None:
    out = tmp_path / "none"
    with pytest.raises(SystemExit) as stopped:
        run("zeroed-recurrence", "--tasks", "kv", "--examples", 1, "--out", out)
    assert stopped.value.code == 2
    assert "tiny" in capsys.readouterr().err
    assert not out.exists()
