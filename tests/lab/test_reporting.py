"""Reports show what the files say: the kit's tables and pages, and the report of a run."""

import json
import math
import random
import re
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from head_tables import whole_scores
from messages import has_facts, naming
from PIL import Image

from hybrid_distill.evaluation.evaluate import EvalResult
from hybrid_distill.io import write_json
from hybrid_distill.lab.reporting import (
    Section,
    html_table,
    markdown_table,
    render,
    signed,
    text_table,
    with_error,
)
from hybrid_distill.lab.reporting.document import Figure
from hybrid_distill.lab.reporting.figures import PanelRow
from hybrid_distill.lab.reporting.heads import score_map
from hybrid_distill.lab.reporting.record import SHARED, STUDENT, read_run
from hybrid_distill.lab.reporting.run import write_report
from hybrid_distill.pipeline import RunPaths
from hybrid_distill.plan import HeadPlan
from hybrid_distill.scoring import HeadScores

N_LAYERS = 6
N_HEADS = 8
N_KV_HEADS = 4
SIZES = (4, 8, 16, 32)
SHAPE = HeadPlan(N_LAYERS, N_HEADS, N_KV_HEADS, kept=())
PLANTED = [(1, 3), (3, 5), (3, 2), (4, 7)]
TOP = HeadPlan.from_pairs(SHAPE, PLANTED)
RUN = {"teacher": {}, "scoring": {}}
"""Sections of a run's config that its report does not show."""


def test_a_table_in_three_forms() -> None:
    names = [("", "model"), ("text", "perplexity"), ("text", "agreement, %")]
    rows = [["a < b", 4.5, with_error(97.32, 1.4)], ["c", None, None]]
    frame = pd.DataFrame(rows, columns=pd.MultiIndex.from_tuples(names))
    assert markdown_table(frame).splitlines() == [
        "| model | text: perplexity | text: agreement, % |",
        "| --- | ---: | ---: |",
        "| a < b | 4.5 | 97.3 ± 1.4 |",
        "| c | – | – |",
    ]
    html = html_table(frame)
    assert 'colspan="2"' in html
    assert "a &lt; b" in html
    assert html.count("<tr") == 4

    frame.columns = ["model", "perplexity", "agreement, %"]
    assert text_table(frame).splitlines()[1] == "a < b         4.5    97.3 ± 1.4"


def test_numbers_in_a_table() -> None:
    assert signed(-0.04) == "+0.0"
    assert signed(-1.26) == "−1.3"
    assert with_error(math.nan) == "–"


def test_a_report_in_both_forms() -> None:
    sections = [
        Section("", ["`a` is **b** & c."]),
        Section("List", [["one", "two"]]),
        Section("Empty", []),
    ]
    assert render("T", sections) == "# T\n\n`a` is **b** & c.\n\n## List\n\n- one\n- two\n"
    page = render("T", sections, "html")
    assert "<p><code>a</code> is <strong>b</strong> &amp; c.</p>" in page
    assert '<h2 id="list">' in page
    assert "Empty" not in page


def evaluation(
    generation: tuple[float, ...], *, choice: tuple[float, ...] | None = None, kv_heads: int = 6
) -> EvalResult:
    """Accuracies at each of SIZES; ``kv_heads`` KV heads of dimension 16 that are stored."""
    return EvalResult(
        kv_choice=dict(zip(SIZES, choice or generation)),
        kv_generation=dict(zip(SIZES, generation)),
        n_examples=400,
        knowledge=0.9,
        knowledge_chance=0.25,
        n_knowledge=100,
        perplexity=9.5,
        top1_agreement=0.85,
        kl_to_teacher=0.2,
        n_text_tokens=5000,
        cache_bytes={n: 64 * kv_heads * n + 10000 for n in (128, 2048, 4096)},
        conv_state_bytes=6000,
    )


def write_scores(path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    retrieval_LH = 0.01 * torch.rand(N_LAYERS, N_HEADS, generator=draw, dtype=torch.float64)
    control_LH = 0.02 * torch.rand(N_LAYERS, N_HEADS, generator=draw, dtype=torch.float64)
    for drop, head in zip((0.62, 0.4, 0.3, 0.18), PLANTED):
        retrieval_LH[head] = drop
    error_LH = torch.full_like(retrieval_LH, 0.01)
    scores = HeadScores(
        N_KV_HEADS,
        accuracy_drop_LH=retrieval_LH,
        logprob_drop_LH=3 * retrieval_LH,
        control_drop_LH=control_LH,
        accuracy_se_LH=error_LH,
        logprob_se_LH=error_LH,
        control_se_LH=0.1 * error_LH,
        provenance={
            "model": "tiny",
            "n_examples": 128,
            "device": "cpu",
            "versions": {"torch": "x"},
        },
    )
    scores.save(path)


def write_stage(folder: Path, *, layers: int = 0) -> None:
    """Write the log of a stage that was killed in the middle of a line."""
    folder.mkdir(parents=True)
    draw = random.Random(str(folder))
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(0, 400, 4):
            loss = math.exp(-step / 100) + 0.1 + 0.02 * draw.random()
            per_layer = {f"layer.{layer}": loss * (layer + 1) for layer in range(layers)}
            line = {"step": step, "loss": loss, "per_layer": per_layer}
            file.write(json.dumps(line) + "\n")
        file.write('{"step": 400, "lo')


def write_student(paths: RunPaths) -> None:
    paths.out.mkdir(parents=True)
    TOP.save(paths.plan)
    evaluation((1.0, 0.99, 0.97, 0.9)).save(paths.evaluation)
    write_stage(paths.stages / "1-align", layers=N_LAYERS)
    write_stage(paths.stages / "2-distill")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    """A finished run whose heads aligned in a run of their own, with its report."""
    paths = RunPaths(tmp_path_factory.mktemp("tiny") / "run")
    write_student(paths)
    write_stage(paths.aligned.stages / "1-align", layers=N_LAYERS)
    paths.teacher_evaluation.parent.mkdir()
    evaluation((1.0, 1.0, 0.99, 0.93), kv_heads=24).save(paths.teacher_evaluation)
    write_scores(paths.scores)
    figures = {"length": 8192, "prefill": 1234.6, "decode": 20.54, "peak_bytes": 12_345_678}
    write_json(paths.speed, {"rows": [{"model": "student", **figures}]})
    write_report(paths.out)
    return paths


@pytest.mark.parametrize(
    "line",
    [
        "| teacher | 48 of 48 | 90.0 ± 3.1 | 99.0 ± 0.5 | 99.0 ± 0.5 | 9.500 |",
        "| student | 4 of 48 | 90.0 ± 3.1 | 97.0 ± 0.9 | 97.0 ± 0.9 |",
        "| 85.0 | 1.583 |",  # 64 x 6 bytes a token x 4096 + 10000 = 1,582,864 bytes
        "| student | +0.0 % | −2.0 % | −2.0 % |",
        "| guessing | – | 25.0 | 6.2 | 6.2 |",
        "Questions: 400 for each dictionary size, 100 on knowledge.",
        "| 1 | L1H3 | yes | 62.0 ± 1.0 |",
        "| guessing | 25.0 | 12.5 | 6.2 | 3.1 |",
        "| KV by choice, 16 pairs | 97.8 ± 1.1 |",  # (0.97 - 1/16) / (0.99 - 1/16)
        "| 1.583 | 0.384 | 0.01 | 6.0 |",  # 64 x 6 bytes a token, 10,000 bytes besides
        "| student | 8,192 | 1,235 | 20.5 | 12 |",
    ],
)
def test_numbers_of_the_report(run: RunPaths, line: str) -> None:
    assert line in run.report.read_text()


def test_nothing_is_missing_and_both_alignments_are_shown(run: RunPaths) -> None:
    record = read_run(run.out)
    assert record.missing == ()
    assert "## Missing" not in run.report.read_text()
    assert list(record.losses.panel.unique()) == [SHARED, STUDENT]


def test_every_stage_has_its_panel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunPaths(tmp_path / "run")
    write_student(run)
    write_stage(run.stages / "3-post")
    drawn: dict[str, list[str]] = {}

    def draw(
        path: Path, _caption: str, rows: list[PanelRow], *_: object, **_options: object
    ) -> list[Figure]:
        panels = drawn.setdefault(path.name, [])
        for row in rows:
            panels += row.points.panel.unique().tolist()
        return []

    monkeypatch.setattr("hybrid_distill.lab.reporting.run.draw_lines", draw)
    write_report(run.out)
    assert drawn["alignment_loss.png"] == ["student"]
    assert drawn["distillation_loss.png"] == ["student, 2-distill", "student, 3-post"]


def test_figures_are_there_readable_in_print_and_named_in_the_report(run: RunPaths) -> None:
    shown = set(re.findall(r"\]\((.*?)\)", run.report.read_text()))
    stems = ("glance", "kv_retrieval", "heads", "alignment_loss", "distillation_loss", "cache")
    names = {f"{stem}.png" for stem in stems}
    assert shown == names
    assert {path.name for path in run.out.glob("*.png")} == names
    for name in names:
        with Image.open(run.out / name) as image:
            assert image.width >= 1200
            assert round(image.info["dpi"][0]) == 200


@pytest.mark.parametrize("change", [{}, {"control_drop_LH": None}])
def test_a_map_of_heads_of_which_some_do_not_exist(tmp_path: Path, change: dict[str, None]) -> None:
    scores = replace(whole_scores(), **change)
    score_map(scores, tmp_path / "map.svg", kept=scores.ranking()[:3])
    comments = re.findall(r"<!-- (.*?) -->", (tmp_path / "map.svg").read_text())
    assert ("Control: plain text" in comments) == (not change)
    assert "Accuracy lost" in comments
    assert "outlined: kept heads; grey: no attention head" in comments


def test_report_of_a_run_and_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybrid_distill.lab.reporting.figures.find_spec", lambda name: None)
    run = RunPaths(tmp_path / "run")
    write_student(run)

    text = write_report(run.out).with_suffix(".md").read_text()

    missing = text.partition("## Missing")[2]
    for fact in ("teacher/evaluation.json", "run/scores.json", "matplotlib"):
        assert fact in missing
    assert "| student | 4 of 48 |" in text
    assert not list(run.out.glob("*.png"))


def test_a_run_without_training_and_texts_within_its_window(tmp_path: Path) -> None:
    run = RunPaths(tmp_path / "run")
    run.out.mkdir()
    TOP.save(run.plan)
    # Of 16 pairs and more, the teacher itself answers none but by chance.
    student = replace(evaluation((0.9, 0.8, 0.07, 0.03)), n_texts=50)
    student.save(run.evaluation)
    run.teacher_evaluation.parent.mkdir()
    evaluation((1.0, 0.9, 0.07, 0.03), kv_heads=24).save(run.teacher_evaluation)
    # Texts are counted as they were read: there may be fewer than asked for.
    settings = {**RUN, "stages": [], "student": {"window": 300}, "evaluation": {"n_texts": 200}}
    write_json(run.config, settings)

    text = write_report(run.out).with_suffix(".md").read_text()
    assert "metrics.jsonl" not in text
    assert has_facts(text, "100 tokens", "window of 300")
    assert has_facts(text, "8 pairs")

    write_json(run.config, {**settings, "student": {"window": 60}})
    text = write_report(run.out).with_suffix(".md").read_text()
    assert not has_facts(text, "window of 60")


def test_figures_show_what_the_teacher_can_answer(tmp_path: Path) -> None:
    """A chat model chooses the answer, and writes something else: no student of it could lose that."""
    run = RunPaths(tmp_path / "run")
    run.out.mkdir()
    TOP.save(run.plan)
    by_chance = tuple(1 / size for size in SIZES)
    evaluation(by_chance, choice=(0.9, 0.6, 0.1, 0.04)).save(run.evaluation)
    run.teacher_evaluation.parent.mkdir()
    evaluation(by_chance, choice=(1.0, 0.9, 0.8, 0.04)).save(run.teacher_evaluation)
    write_scores(run.scores)
    plan = {"unit": "kv-group"}
    write_json(run.config, {**RUN, "stages": [], "student": {}, "plan": plan, "evaluation": {}})

    text = write_report(run.out).with_suffix(".md").read_text()
    assert "kv-group" in text
    captions = re.findall(r"!\[(.*?)\]", text)
    assert any("16 pairs answered by choice" in caption for caption in captions)
    assert not any("by generation" in caption for caption in captions)


def test_a_run_that_asks_no_dictionaries_has_a_report(tmp_path: Path) -> None:
    run = RunPaths(tmp_path / "run")
    run.out.mkdir()
    TOP.save(run.plan)
    without = replace(evaluation(()), n_examples=0)
    without.save(run.evaluation)
    run.teacher_evaluation.parent.mkdir()
    without.save(run.teacher_evaluation)
    write_json(run.config, {**RUN, "stages": [], "student": {}, "plan": {}, "evaluation": {}})
    text = write_report(run.out).with_suffix(".md").read_text()
    # Knowledge.
    assert has_facts(text, "90.0 ± 3.1")


def test_a_model_has_no_report(tmp_path: Path) -> None:
    """Though an export also has a config.json, a plan and an evaluation."""
    TOP.save(RunPaths(tmp_path).plan)
    write_json(RunPaths(tmp_path).config, {"model_type": "llama"})
    with pytest.raises(ValueError, match=naming(tmp_path)):
        write_report(tmp_path)


def test_what_windows_lose_has_a_column_and_a_task(tmp_path: Path) -> None:
    run = RunPaths(tmp_path / "run")
    run.out.mkdir()
    TOP.save(run.plan)
    figures = evaluation((1.0, 0.9, 0.8, 0.7))
    far = {"n_far": 24, "distance": 300}
    replace(figures, far_choice={4: 0.5}, **far).save(run.evaluation)
    run.teacher_evaluation.parent.mkdir()
    replace(figures, far_choice={4: 0.75}, **far).save(run.teacher_evaluation)
    settings = {**RUN, "stages": [], "student": {"window": 300}, "plan": {}, "evaluation": {}}
    write_json(run.config, settings)

    record = read_run(run.out)
    assert record.models.loc["student", "far_choice_4"] == 0.5
    kept = record.kept["far_choice_4"]
    assert kept is not None
    assert kept[0] == pytest.approx((0.5 - 0.25) / (0.75 - 0.25))
    text = write_report(run.out).with_suffix(".md").read_text()
    # The teacher's accuracy, and the student's beside it.
    assert has_facts(text, "75.0", "50.0", 24, 300)


def test_a_model_that_answered_other_questions_is_named(tmp_path: Path) -> None:
    run = RunPaths(tmp_path / "run")
    in_chat = replace(evaluation((1.0,)), n_examples=8, provenance={"prompt_format": "chat"})
    for path in (run.teacher_evaluation, run.evaluation):
        path.parent.mkdir(parents=True, exist_ok=True)
        in_chat.save(path)
    run.control.out.mkdir()
    in_chat.save(run.control.evaluation)
    assert "plain" not in read_run(run.out).questions

    evaluation((1.0,)).save(run.control.evaluation)
    facts = ("control", "n_examples", 400, 8, "prompt_format", "plain", "chat")
    assert has_facts(read_run(run.out).questions, *facts)


def test_broken_files_are_named_and_stop_nothing(tmp_path: Path) -> None:
    RunPaths(tmp_path).evaluation.write_text("{")
    text = write_report(tmp_path).with_suffix(".md").read_text()
    missing = text.split("## Missing")[1]
    for file in ("evaluation.json", "plan.json", "scores.json", "stages/*/metrics.jsonl"):
        assert f"`{tmp_path.name}/{file}" in missing
    assert "`teacher/evaluation.json" in missing
    assert "| student | – |" in text
