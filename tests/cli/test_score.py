"""`hybrid-distill score`: from a model to scores.json, and two files compared."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_distill.cli.app import main
from hybrid_distill.cli.score import ScoreJob, compare_files, run_score, table
from hybrid_distill.plan import HeadId
from hybrid_distill.scoring import HeadScores
from hybrid_distill.scoring.combine import combine_scores
from hybrid_distill.scoring.resume import Steps

CIRCUIT = {HeadId(2, 6), HeadId(0, 1), HeadId(5, 5), HeadId(1, 2)}
"""What the embedded teacher retrieves with: see docs/results_tiny.md."""


def run(*argv: object) -> None:
    main(["score", *map(str, argv)])


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded teacher, raced for its first 4 heads."""
    out = tmp_path_factory.mktemp("score") / "new" / "scores.json"
    run("--out", out, "--examples", 48, "--k", 4, "--n-control-texts", 4)
    return out


def test_the_embedded_teachers_circuit_ranks_first(scored: Path) -> None:
    scores = HeadScores.load(scored)
    assert set(scores.ranking()[:4]) == CIRCUIT
    assert scores.accuracy_interval_LH2 is not None and scores.agreement is not None
    assert scores.control_drop_LH is not None
    assert scores.n_examples_LH is not None and scores.provenance["race"]["k"] == 4


def test_nothing_but_results_is_left(scored: Path) -> None:
    assert {path.name for path in scored.parent.iterdir()} == {"scores.json", "scores.map.png", "scores.bars.png"}


def test_the_table_names_heads_and_ties(scored: Path) -> None:
    scores = HeadScores.load(scored)
    shown = table(scores, 4)
    first = scores.ranking()[0]
    assert f"  1 {first}" in shown and "halves of the prompts agree: top 1" in shown
    assert "warning" not in shown
    assert "the cut at k = 20 falls inside a tie" in table(scores, 20)


def test_a_prefilter_records_what_it_misses(tmp_path: Path) -> None:
    job = ScoreJob(out=tmp_path / "s.json", examples=16, k=4, prefilter=8, n_control_texts=1)
    scores = run_score(job)
    assert len(scores.ranking()) == 8
    found = HeadScores.load(job.out).provenance["prefilter"]
    assert found["width"] == 8 and 0.5 <= found["recall"] <= 1.0


def test_several_probes_make_one_ranking(tmp_path: Path) -> None:
    job = ScoreJob(out=tmp_path / "s.json", probe="kv,growing", pairs="8,16", examples=8, k=4, n_control_texts=1)
    scores = run_score(job)
    assert [part["probe"]["name"] for part in scores.provenance["parts"]] == ["growing_kv", "growing_kv"]
    own = {path.name: HeadScores.load(path) for path in tmp_path.glob("*.json")}
    assert set(own) == {"s.json", "s.kv.json", "s.growing.json"}
    # The figures say what the combined numbers are: the mean of a head's places in the files beside.
    places = [own[name].ranking() for name in ("s.kv.json", "s.growing.json")]
    first = scores.ranking()[0]
    mean = sum(ranking.index(first) + 1 for ranking in places) / 2
    assert scores.reading(scores.accuracy_drop_LH[first].item()) == pytest.approx(mean)
    shown = table(scores, 4)
    assert f"  1 {first!s:<9}{mean:>12.1f}" in shown and "mean rank over growing_kv, growing_kv (1: first" in shown
    assert "points" not in shown and " p" not in shown.splitlines()[2]
    assert "cut after k = 4" in shown.splitlines()[6]


def test_a_stopped_run_keeps_the_probes_that_are_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = ScoreJob(out=tmp_path / "s.json", probe="kv,growing", pairs="8", examples=4, k=4, n_control_texts=1)
    add, added = Steps.add, []

    def stop_in_the_second(steps: Steps, step: dict[str, Any]) -> None:
        added.append(str(steps.path and steps.path.name))
        if added[-1] == "s.growing.partial.json" and len(set(added)) == 2:
            raise KeyboardInterrupt
        add(steps, step)

    monkeypatch.setattr(Steps, "add", stop_in_the_second)
    with pytest.raises(KeyboardInterrupt):
        run_score(job)
    assert "s.kv.partial.json" in added and HeadScores.load(tmp_path / "s.kv.json").ranking()
    added.clear()
    run_score(job)
    assert set(added) == {"s.growing.partial.json"}  # of kv, nothing was measured again
    assert not list(tmp_path.glob("*.partial.json"))


def test_nothing_is_scored_before_all_probes_are_checked(tmp_path: Path) -> None:
    job = ScoreJob(out=tmp_path / "s.json", probe="kv,needle", examples=4)
    with pytest.raises(ValueError, match=r"take a shorter filler \(--lengths\)"):
        run_score(job)
    assert not list(tmp_path.iterdir())


def test_weights_are_those_of_the_flag(tmp_path: Path) -> None:
    out = tmp_path / "s.json"
    flags = ["--out", out, "--probe", "kv,growing", "--pairs", 8, "--examples", 4, "--method", "attribution"]
    run(*flags, "--combine", "weighted", "--weights", "3,1")
    parts = [HeadScores.load(tmp_path / f"s.{name}.json") for name in ("kv", "growing")]
    expected = combine_scores(parts, "weighted", [3, 1])
    torch.testing.assert_close(HeadScores.load(out).logprob_drop_LH, expected.logprob_drop_LH)


def test_estimates_need_no_ablation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("--out", tmp_path / "copy.json", "--method", "copy", "--examples", 8)
    assert "copy score" in capsys.readouterr().out
    assert HeadScores.load(tmp_path / "copy.json").ranking()[0].layer == 5


def test_files_are_compared_also_with_a_published_ranking(scored: Path, tmp_path: Path, capsys) -> None:
    published = tmp_path / "ranking.json"
    published.write_text(json.dumps([list(head) for head in HeadScores.load(scored).ranking()[:8]]))
    run("--compare", scored, published)
    assert "overlap@5 100%" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(ValueError, match="holds head scores"):
        compare_files(published, published)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--pairs", "10,x"], "--pairs is '10,x'; give whole numbers"),
        (["--probe", "sudoku"], "there is no probe 'sudoku'; there are kv"),
        (["--pairs", "99"], "scoring asks for 50.5%"),
        (["--probe", "needle"], "longest"),
        (["--probe", "copy", "--min-accuracy", "0.99"], "Take another probe, another teacher"),
        (["--probe", "kv,kv"], "names 'kv' twice"),
        (["--probe", "kv,growing", "--combine", "weighted"], "give 2 numbers, one for each probe in order"),
        (["--probe", "kv,growing", "--combine", "weighted", "--weights", "1,2,3"], "give 2 numbers"),
        (["--probe", "kv,growing", "--combine", "weighted", "--weights", "1,x"], "--weights is '1,x'"),
        (["--probe", "kv,growing", "--weights", "1,2"], "add --combine weighted"),
        (["--compare", "nosuch.json", "nosuch.json"], "nosuch.json does not exist"),
        (["--pairs", "8,0"], "--pairs is '8,0'; give whole numbers of at least 1"),
        (["--model", "./nosuch"], "--model './nosuch' is not a folder"),
    ],
)
def test_bad_input_ends_in_one_line(flags: list[str], message: str, tmp_path: Path, capsys) -> None:
    with pytest.raises(SystemExit) as exited:
        run("--out", tmp_path / "s.json", "--examples", 20, "--n-control-texts", 1, *flags)
    assert exited.value.code == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and message in error
