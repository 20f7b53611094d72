"""A report says what the files say: the contrast, its absence, and what is missing."""

import json
import math
import random
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hybrid_distill.lab.plots import spread
from hybrid_distill.lab.report import write_report
from hybrid_distill.lab.report.finding import finding
from hybrid_distill.lab.report.record import Measured, Row, read_record, with_means
from PIL import Image

from hybrid_distill.evaluation.evaluate import EvalResult
from hybrid_distill.plan import HeadPlan
from hybrid_distill.scoring import HeadScores

N_LAYERS, N_HEADS, N_KV_HEADS = 6, 8, 4
SIZES = (4, 8, 16, 32)
SHAPE = HeadPlan(N_LAYERS, N_HEADS, N_KV_HEADS, kept=())
PLANTED = [(1, 3), (3, 5), (3, 2), (4, 7)]


def evaluation(generation: tuple[float, ...], *, knowledge: float = 0.9, kv_heads: int = 6) -> EvalResult:
    """Accuracies at each of SIZES; ``kv_heads`` KV heads of dimension 16 that are stored."""
    return EvalResult(
        kv_choice=dict(zip(SIZES, generation)),
        kv_generation=dict(zip(SIZES, generation)),
        n_examples=400,
        knowledge=knowledge,
        knowledge_chance=0.25,
        n_knowledge=100,
        perplexity=9.5,
        top1_agreement=0.85,
        kl_to_teacher=0.2,
        n_text_tokens=5000,
        cache_bytes={n: 64 * kv_heads * n + 10000 for n in (128, 2048, 4096)},
        conv_state_bytes=6000,
    )


def write_scores(path: Path) -> HeadScores:
    draw = torch.Generator().manual_seed(0)
    retrieval_LH = 0.01 * torch.rand(N_LAYERS, N_HEADS, generator=draw, dtype=torch.float64)
    control_LH = 0.02 * torch.rand(N_LAYERS, N_HEADS, generator=draw, dtype=torch.float64)
    for drop, head in zip((0.62, 0.4, 0.3, 0.18), PLANTED):
        retrieval_LH[head] = drop
    control_LH[0, 0] = 0.3
    error_LH = torch.full_like(retrieval_LH, 0.01)
    scores = HeadScores(
        N_KV_HEADS, retrieval_LH, 3 * retrieval_LH, control_LH, error_LH, error_LH, 0.1 * error_LH,
        provenance={"model": "tiny", "n_examples": 128, "device": "cpu", "versions": {"torch": "x"}},
    )  # fmt: skip
    scores.save(path)
    return scores


def write_stage(folder: Path, *, layers: int = 0, start: float = 1.0) -> None:
    folder.mkdir(parents=True)
    draw = random.Random(str(folder))
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(0, 1200, 4):
            loss = start * math.exp(-step / 300) + 0.1 + 0.02 * draw.random()
            per_layer = {f"layer.{i}": loss * (i + 1) for i in range(layers)}
            file.write(json.dumps({"step": step, "loss": loss, "per_layer": per_layer}) + "\n")
        file.write('{"step": 1200, "lo')


def write_run(folder: Path, plan: HeadPlan, result: EvalResult, *, start: float) -> None:
    folder.mkdir(parents=True)
    plan.save(folder / "plan.json")
    result.save(folder / "evaluation.json")
    write_stage(folder / "stages" / "1-align", layers=N_LAYERS, start=start)
    write_stage(folder / "stages" / "2-distill", start=start)


TEACHER = evaluation((1.0, 1.0, 0.99, 0.93), kv_heads=24)
STUDENTS = [
    ("none", "0 heads", "none", SHAPE, (0.6, 0.4, 0.2, 0.1), ""),
    (
        "random-0",
        "4 random heads (seed 0)",
        "random",
        HeadPlan.random(SHAPE, 4, 0),
        (0.7, 0.5, 0.3, 0.12),
        "",
    ),
    ("random-1", "4 random heads (seed 1)", "random", HeadPlan.random(SHAPE, 4, 1), (0.8, 0.6, 0.4, 0.2), ""),
    ("top", "top 4 heads", "top", HeadPlan.from_pairs(SHAPE, PLANTED), (1.0, 0.99, 0.97, 0.9), ""),
    (
        "probe",
        "top 4 heads",
        "top",
        HeadPlan.from_pairs(SHAPE, PLANTED),
        (1.0, 1.0, 0.98, 0.95),
        "with probe",
    ),
]


@pytest.fixture(scope="module")
def comparison(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("tiny")
    (out / "teacher").mkdir()
    TEACHER.save(out / "teacher" / "evaluation.json")
    write_scores(out / "scores.json")
    entries = []
    for name, label, selection, plan, generation, data in STUDENTS:
        write_run(out / name, plan, evaluation(generation), start=2 - generation[2])
        entry = {"name": name, "label": label, "dir": name, "selection": selection, "k": plan.k, "data": data}
        entries.append(entry)
    (out / "compare.json").write_text(json.dumps({"students": entries, "teacher": "teacher/evaluation.json"}))
    write_report(out)
    return out


def test_report_of_a_comparison(comparison):
    text = (comparison / "report.md").read_text()
    assert text.splitlines()[2].startswith("**Heads chosen by score carry retrieval: of 16-pair dictionaries")
    assert "| teacher | 48 of 48 | 90.0 ± 3.1 | 99.0 ± 0.5 | 99.0 ± 0.5 | 9.500 |" in text
    assert "| top 4 heads | 4 of 48 | 90.0 ± 3.1 | 97.0 ± 0.9 |" in text
    assert "| 4 random heads (mean of 2) | 4 of 48 | 90.0 | 35.0 ± 5.0 |" in text
    assert "| top 4 heads (with probe) | 4 of 48 |" in text
    assert "| 0 heads | +0.0 % | −79.8 % | −79.8 % |" in text
    assert "Chance level: 6.2 % for KV retrieval with 16 pairs, 25.0 % for knowledge." in text
    assert "| 1 | L1H3 | yes | 62.0 ± 1.0 |" in text
    assert "## Missing" not in text


def test_figures_are_there_readable_in_print_and_named_in_the_report(comparison):
    text = (comparison / "report.md").read_text()
    figures = {path.name for path in comparison.glob("*.png")}
    expected = {"kv_retrieval.png", "heads.png", "alignment_loss.png", "distillation_loss.png", "cache.png"}
    assert figures == expected
    for name in figures:
        assert f"]({name})" in text
        with Image.open(comparison / name) as image:
            assert image.width >= 1200 and round(image.info["dpi"][0]) == 200


def test_memory_is_in_millions_of_bytes(comparison):
    # 64 x 6 bytes a token x 4096 + 10000 = 1,582,864 bytes
    row = next(
        line for line in (comparison / "report.md").read_text().splitlines() if "top 4 heads |" in line
    )
    assert "| 1.583 | 6.0 |" in row


def test_report_of_a_single_run(tmp_path):
    write_run(tmp_path / "run", HeadPlan.from_pairs(SHAPE, PLANTED), evaluation((1, 1, 0.97, 0.9)), start=1.0)
    text = write_report(tmp_path / "run").read_text()
    assert "- the teacher's evaluation (`teacher/evaluation.json`: not there)" in text
    assert "- head scores (`scores.json`: not there)" in text
    assert "student, 4 heads kept" in text and "Nothing can be concluded: the teacher" in text
    (tmp_path / "run" / "teacher").mkdir()
    TEACHER.save(tmp_path / "run" / "teacher" / "evaluation.json")
    text = write_report(tmp_path / "run").read_text()
    assert (
        "the teacher answers 99.0 %, student, 4 heads kept 97.0 %; the contrast needs students with no head"
        in text
    )


def test_missing_and_broken_files_are_named_and_stop_nothing(tmp_path):
    (tmp_path / "top").mkdir()
    (tmp_path / "top" / "evaluation.json").write_text("{")
    entry = {"name": "top", "label": "top 4 heads", "dir": "top", "selection": "top", "k": 4}
    (tmp_path / "compare.json").write_text(json.dumps({"students": [entry]}))
    text = write_report(tmp_path).read_text()
    for what in (
        "the teacher's evaluation",
        "the evaluation of 'top 4 heads'",
        "the plan of",
        "head scores",
        "loss curves",
    ):
        assert what in text.split("## Missing")[1]
    assert "| top 4 heads | 4 |" in text


def test_without_matplotlib_the_report_has_no_figures_and_says_so(comparison, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    write_run(tmp_path / "run", SHAPE, evaluation((1, 1, 1, 1)), start=1.0)
    assert "the figures (" in write_report(tmp_path / "run").read_text()
    assert not list((tmp_path / "run").glob("*.png"))


def test_refuses_a_directory_that_is_no_run(tmp_path):
    with pytest.raises(ValueError, match="is neither a run nor a comparison"):
        write_report(tmp_path)
    (tmp_path / "compare.json").write_text('{"students": 3}')
    with pytest.raises(ValueError, match=r"compare\.json cannot be read"):
        write_report(tmp_path)


def row(
    label: str, selection: str, generation: float, *, knowledge: float = 0.9, data: str = "", k: int = 4
) -> Row:
    cells = {"kv_generation/16": Measured(generation), "knowledge": Measured(knowledge)}
    return Row(label, selection, k, cells, data)


def test_finding_says_when_the_contrast_appears():
    rows = [
        row("0 heads", "none", 0.2),
        row("a", "random", 0.5),
        row("b", "random", 0.3),
        row("top 4", "top", 0.96),
    ]
    sentence = finding(row("teacher", "teacher", 1.0), rows, 16)
    assert sentence.startswith(
        "Heads chosen by score carry retrieval: of 16-pair dictionaries by generation "
    )
    assert "top 4 96.0 % (96 % of that)" in sentence
    assert "4 random heads (mean of 2) 40.0 % (40 %)" in sentence
    assert "expected" not in sentence and sentence.count(".") == sentence.count(".", 0, -1) + 1


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (row("top 4", "top", 0.94), "top 4 94.0 % (94 % of that, expected 95 % or more)"),
        (row("0 heads", "none", 0.51), "0 heads 51.0 % (51 %, expected 50 % or less)"),
        (row("random", "random", 0.6), "random 60.0 % (60 %, expected 50 % or less)"),
        (row("0 heads", "none", 0.2, knowledge=0.8), "knowledge of 0 heads is 10.0 points away"),
    ],
)
def test_finding_says_when_the_contrast_does_not_appear_and_why(changed, reason):
    rows = {
        "none": row("0 heads", "none", 0.2),
        "random": row("random", "random", 0.3),
        "top": row("top 4", "top", 0.99),
    }
    rows[changed.selection] = changed
    sentence = finding(row("teacher", "teacher", 1.0), list(rows.values()), 16)
    assert sentence.startswith("The expected contrast did NOT appear: ") and reason in sentence


def test_one_ranking_that_works_is_enough_and_the_other_is_named():
    rows = [
        row("0 heads", "none", 0.2),
        row("by ablation", "top", 0.4),
        row("by restoration", "restoration", 0.97),
    ]
    sentence = finding(row("teacher", "teacher", 1.0), rows, 16)
    assert (
        sentence.startswith("Heads chosen by score")
        and "by ablation 40.0 % (40 % of that, expected 95 %" in sentence
    )


def test_control_data_sets_and_a_failing_teacher_do_not_make_a_finding():
    rows = [
        row("0 heads", "none", 0.2),
        row("top 4", "top", 0.3),
        row("top 4 probe", "top", 0.99, data="probe"),
    ]
    assert finding(row("teacher", "teacher", 1.0), rows, 16).startswith(
        "The expected contrast did NOT appear"
    )
    assert "the teacher itself answers only 40.0 %" in finding(row("teacher", "teacher", 0.4), rows, 16)
    assert finding(None, rows, 16).startswith("Nothing can be concluded")
    assert finding(row("teacher", "teacher", 1.0), rows[2:], 16).startswith("Nothing can be concluded")


def test_mean_of_random_draws_has_their_standard_error():
    rows = [row("a", "random", 0.2), row("b", "random", 0.4), row("c", "random", 0.9, k=8)]
    mean = with_means(rows)[2]
    assert mean.draws == 2 and mean.cells["kv_generation/16"] == pytest.approx((0.3, 0.1))
    assert len(with_means(rows)) == 4


def test_dictionary_size_of_the_finding(comparison, tmp_path):
    assert read_record(comparison).n_pairs == 16
    copy = shutil.copytree(comparison, tmp_path / "copy")
    record = json.loads((copy / "compare.json").read_text())
    (copy / "compare.json").write_text(json.dumps({**record, "n_pairs": 8}))
    assert read_record(copy).n_pairs == 8


def test_labels_never_overlap_and_move_as_little_as_needed():
    assert spread([0.1, 0.5, 0.9], 0.1) == pytest.approx([0.1, 0.5, 0.9])
    assert spread([0.5, 0.5], 0.1) == pytest.approx([0.45, 0.55])
    placed = spread([0.1, 0.11, 0.12, 0.8], 0.05)
    assert all(b - a >= 0.05 - 1e-9 for a, b in pairwise(placed))
    assert placed[3] == pytest.approx(0.8) and sum(placed[:3]) == pytest.approx(0.33)
