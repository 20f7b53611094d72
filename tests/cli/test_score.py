"""`hybrid-distill score`: from a model to scores.json, and two files compared."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from messages import has_facts, naming

from hybrid_distill.cli import score
from hybrid_distill.cli.app import main
from hybrid_distill.cli.score import ScoreJob, run_score, table
from hybrid_distill.lab.analysis.rankings import compare_files
from hybrid_distill.plan import HeadId
from hybrid_distill.probes import queries_of
from hybrid_distill.probes.registry import make_probe
from hybrid_distill.scoring import HeadScores
from hybrid_distill.scoring.defaults import default_prompts
from hybrid_distill.scoring.resume_log import ResumeLog

CIRCUIT = {HeadId(2, 6), HeadId(0, 1), HeadId(5, 5), HeadId(1, 2)}
"""Heads that the embedded teacher retrieves with: see docs/results_tiny.md."""


def run(*argv: object) -> None:
    main(["score", *map(str, argv)])


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded teacher, raced for its first 4 heads."""
    out = tmp_path_factory.mktemp("score") / "new" / "scores.json"
    run("--out", out, "--examples", 16, "--k", 4, "--n-control-texts", 2)
    return out


def test_the_embedded_teachers_circuit_ranks_first(scored: Path) -> None:
    scores = HeadScores.load(scored)
    assert set(scores.ranking()[:4]) == CIRCUIT
    assert scores.accuracy_interval_LH2 is not None
    assert scores.agreement is not None
    assert scores.control_drop_LH is not None
    assert scores.n_examples_LH is not None
    assert scores.provenance["race"]["k"] == 4
    assert {path.name for path in scored.parent.iterdir()} == {"scores.json", "scores.map.png"}


def test_the_table_names_heads_and_ties(scored: Path) -> None:
    scores = HeadScores.load(scored)
    first = scores.ranking()[0]

    text = table(scores, 4)

    assert f"1     {first}   yes" in text
    assert text.count(" yes ") == 4
    assert scores.tie(4) is None
    tie = scores.tie(20)
    assert tie is not None
    assert str(tie) in table(scores, 20)
    assert str(replace(tie, k=4)) not in text


def test_a_stopped_run_continues_from_its_measurements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = ScoreJob(out=tmp_path / "s.json", pairs="8", examples=4, k=4, n_control_texts=1)
    original = ResumeLog.next
    from_log: list[bool] = []

    def stop_after_two(log: ResumeLog, measure: Any) -> Any:
        from_log.append(log.n_used < len(log.steps))
        if len(from_log) == 3:
            raise KeyboardInterrupt
        return original(log, measure)

    monkeypatch.setattr(ResumeLog, "next", stop_after_two)
    monkeypatch.setattr(score, "has_matplotlib", lambda: False)
    with pytest.raises(KeyboardInterrupt):
        run_score(job)
    assert [path.name for path in tmp_path.glob("*.json")] == ["s.partial.json"]

    run_score(job)
    of_second_run = from_log[3:]
    assert of_second_run[:3] == [True, True, False], "two layers are read, the others measured"
    assert [path.name for path in tmp_path.glob("*.json")] == ["s.json"]


def test_scores_whose_names_have_dots_share_no_file() -> None:
    names = ("llama-3.1-8b", "llama-3.2-1b", "llama-3.2-1b.v2.json", "llama-3.json")
    assert len({ScoreJob(out=Path(name)).partial_path for name in names}) == len(names)


def test_finished_scores_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = ScoreJob(out=tmp_path / "s.json", pairs="8", examples=4, k=4, n_control_texts=1)
    scores = run_score(job)
    before = job.out.read_bytes()

    # A call would fail.
    monkeypatch.setattr(score, "score_heads", None)
    assert run_score(job).ranking() == scores.ranking()
    with pytest.raises(ValueError, match=naming("examples", 4, 8)):
        run_score(replace(job, examples=8))
    # Without a race, the number of heads that will be kept changes no score.
    exhaustive = replace(job, exhaustive=True)
    assert exhaustive.settings == replace(exhaustive, k=7).settings
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match=naming(tmp_path / "other.json")):
        run_score(replace(job, out=tmp_path / "other.json"))
    assert job.out.read_bytes() == before


def test_files_are_compared_also_with_a_published_ranking(scored: Path, tmp_path: Path) -> None:
    published = tmp_path / "ranking.json"
    first = HeadScores.load(scored).ranking()[:8]
    published.write_text(json.dumps([list(head) for head in first]))

    report = compare_files(scored, published)

    in_one_line = " ".join(report.split())
    assert "overlap@5 100%" in in_one_line
    with pytest.raises(ValueError, match=naming(published)):
        compare_files(published, published)
    with pytest.raises(ValueError, match=naming("nosuch.json")):
        compare_files(scored, Path("nosuch.json"))


@pytest.mark.parametrize(
    ("options", "n_queries", "n_prompts"),
    [
        ({}, 8, 24),
        ({"pairs": "4,16"}, 4, 48),
        ({"queries": 1}, 1, 128),
        ({"queries": 16}, 16, 24),
    ],
    ids=["default", "fewer pairs", "one question", "more questions"],
)
def test_questions_share_prompts_unless_told_otherwise(
    options: dict[str, Any], n_queries: int, n_prompts: int
) -> None:
    probe = make_probe("kv", **ScoreJob(**options).probe_options)
    assert queries_of(probe) == n_queries
    assert default_prompts(n_queries) == n_prompts


def test_with_a_window_heads_are_ranked_by_their_shares(tmp_path: Path) -> None:
    out = tmp_path / "far.json"
    run("--out", out, "--window", 16, "--pairs", 4, "--examples", 6, "--k", 4)
    scores = HeadScores.load(out)
    assert scores.is_additive
    assert scores.provenance["probe"]["distance"] == 16
    assert scores.provenance["probe"]["name"] == "kv_retrieval"
    assert scores.ranking()[0] == HeadId(5, 5), "of its circuit, the head that reads far"
    assert str(scores.ranking()[0]) in table(scores, 4)
    assert {path.name for path in tmp_path.iterdir()} == {"far.json", "far.map.png"}


def test_a_question_within_the_window_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "far.json"
    with pytest.raises(SystemExit) as exit:
        run("--out", out, "--window", 64, "--distance", 0, "--pairs", 4, "--examples", 2)
    assert exit.value.code == 2
    assert has_facts(capsys.readouterr().err, 64, "--distance")
    assert not out.exists()
