"""A sweep's report and recommendation, on tables whose truth is known."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from hybrid_distill.cli.app import main
from hybrid_distill.lab.sweep.flags import SweepJob
from hybrid_distill.lab.sweep.job import SweepFailed
from hybrid_distill.lab.sweep.measured import SweepResults, without
from hybrid_distill.lab.sweep.report import write_sweep_report
from hybrid_distill.plan import HeadId, HeadPlan, cache_bytes

SHAPE = HeadPlan(6, 8, 4, ())
HEAD_DIM, EVERY = 16, 48
RANKING = [HeadId(*divmod(int(i), 8)) for i in np.random.default_rng(0).permutation(EVERY)]
TABLE = {"results.csv", "sweep.json"}
Truth = Callable[[str, int, int], float]


def saturating(selection: str, heads: int, d_state: int) -> float:
    """Share of the teacher's retrieval: a random head is worth a fifth of a chosen one; states matter little."""
    worth = heads * {"random": 0.2, "layers": 0.4}.get(selection, 1.0)
    return (1 - math.exp(-((worth / 2.0) ** 1.5))) * (1 - 0.1 / d_state)


def held(heads: int, d_state: int, length: int) -> tuple[int, int]:
    """(keys, values and states; convolutions) of the first heads of RANKING, by the house's own formula."""
    plan = HeadPlan.from_pairs(SHAPE, RANKING[:heads])
    size = cache_bytes(plan, length=length, head_dim=HEAD_DIM, d_state=d_state)
    return size.total, size.conv


def cells(
    truth: Truth = saturating,
    *,
    heads: Iterable[int] = (0, 1, 2, 4, 8),
    states: Iterable[int] = (4, 16, 64),
    selections: Iterable[str] = ("top", "random"),
    seeds: int = 3,
    noise: float = 0.0,
    seed: int = 0,
) -> list[dict[str, object]]:
    """Rows of a finished results.csv: the teacher is always at 0.98, noise is of one seed's retrieval."""
    draw = np.random.default_rng(seed)
    settings = [("teacher", 0, 0), ("all", EVERY, 0)]
    for n, selection, k in product(states, selections, heads):
        settings.append(("none" if k == 0 else selection, k, n))
    rows = []
    for s in range(seeds):
        # Without heads, all selections are one setting.
        for selection, k, n in dict.fromkeys(settings):
            share = 1.0
            if n:
                share = float(np.clip(truth(selection, k, n) + noise * draw.normal(), 0.0, 1.0))
            rows.append(cell(selection, k, n, s, share))
    return rows


def cell(selection: str, heads: int, d_state: int, seed: int, share: float) -> dict[str, object]:
    """A row with this share of the teacher's retrieval."""
    row: dict[str, object] = {
        "cell": f"{selection}{heads}-n{d_state}-s{seed}",
        "state": "done",
        "selection": selection,
        "heads": "" if selection == "teacher" else heads,
        "d_state": d_state or "",
        "window": "0" if d_state else "",
        "seed": seed,
        "knowledge": 0.9,
        "perplexity": 6.0 - share - 0.001 * d_state,
        "top1_agreement": 0.9,
        "train_seconds": 36.0,
        "dir": "x",
        "error": "",
    }
    for n_pairs in (8, 16):
        row[f"kv_choice_{n_pairs}"] = 0.98 * share
        row[f"kv_generation_{n_pairs}"] = 0.98 * share
    n_kept = heads if d_state else EVERY
    for length in (128, 2048, 4096):
        row[f"cache_bytes_{length}"], row["conv_state_bytes"] = held(n_kept, d_state, length)
    return row


def write(folder: Path, rows: list[dict[str, object]], n_pairs: int = 8) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "results.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]), restval="")
        table.writeheader()
        table.writerows(rows)
    (folder / "sweep.json").write_text(
        json.dumps({"config": {"evaluation": {"stated_pairs": n_pairs}}})
    )
    return folder


def unfinished(
    rows: list[dict[str, object]], *names: str, state: str = "failed"
) -> list[dict[str, object]]:
    kept = ("cell", "selection", "heads", "d_state", "seed", "dir")
    changed = []
    for row in rows:
        if row["cell"] in names:
            row = {name: value if name in kept else "" for name, value in row.items()}
            row |= {"state": state, "error": "it diverged"}
        changed.append(row)
    return changed


@pytest.fixture
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes seconds, and is tested once."""
    monkeypatch.setattr("hybrid_distill.lab.reporting.figures.find_spec", lambda name: None)


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished sweep with three selections, and its report in a folder of its own."""
    rows = cells(heads=(0, 2, 8, 16), selections=("top", "random", "layers"), noise=0.02)
    rows = [row for row in rows if row["selection"] != "layers" or row["heads"] in (8, 16)]
    out = tmp_path_factory.mktemp("sweep")
    write_sweep_report(write(out / "tiny", rows), to=out / "docs")
    return out / "docs"


def test_numbers_of_the_report(tmp_path: Path, no_figures: None) -> None:
    rows = cells(heads=(0, 4), states=(16,), selections=("top",))
    # 50, 80 and 90 % of the teacher's.
    shares_of_teacher = (0.49, 0.784, 0.882)
    for row in rows:
        if row["cell"] in ("top4-n16-s0", "top4-n16-s1", "top4-n16-s2"):
            row["kv_generation_8"] = shares_of_teacher[int(str(row["seed"]))]
            row["kv_generation_16"] = 0.98
    text = write_sweep_report(write(tmp_path, rows)).with_suffix(".md").read_text()
    margin = 4.303 * math.sqrt((22.867**2 + 6.533**2 + 16.333**2) / 2 / 3)
    assert f"| 71.9 ± {margin:.1f} | 98.0 ± 0.0 |" in text, (
        "values, with half of Student's interval"
    )
    coverage = 4.303 * 100 * math.sqrt(np.var([0.75, 0.9, 0.95], ddof=1) / 3)
    assert (
        f"| 4 | top | 16 | 100.0 ± 0.0 | 86.7 ± {coverage:.1f} | +0.0 % | −26.7 % | +0.0 % |"
        in text
    )
    n_bytes = sum(held(4, 16, 4096))
    assert f"| {n_bytes / 1e6:.3f} |" in text
    assert "9 of 9 cells" in text


def test_cells_are_compared_with_the_teacher_of_their_seed(tmp_path: Path) -> None:
    rows = cells(heads=(0, 4), states=(16,), selections=("top",))
    for row in rows:
        if row["seed"] == 1:
            row["kv_generation_8"] = 0.5 * float(str(row["kv_generation_8"]))
    _, margins = SweepResults.read(write(tmp_path, rows)).against_teacher(["kv_generation_8"])
    assert margins["all"].to_numpy() == pytest.approx(0.0, abs=1e-9)


def test_memory_at_any_length_is_the_formula(tmp_path: Path) -> None:
    out = write(tmp_path, cells())
    for length in (1, 4096, 32768):
        students = without(SweepResults.read(out, length).settings, "teacher", "all")
        for (_, heads, d_state), size in students.bytes.items():
            assert size == pytest.approx(sum(held(heads, d_state, length)))


def front_of(folder: Path, rows: list[dict[str, object]], quality: str = "retrieval") -> list[str]:
    results = SweepResults.read(write(folder, rows))
    column = results.quality(quality)
    assert column is not None
    return list(results.front(column).label)


def test_the_front_is_the_known_one(tmp_path: Path) -> None:
    quality = {
        (1, 4): 0.3,
        (1, 16): 0.2,
        (2, 4): 0.6,
        (2, 16): 0.6,
        (4, 4): 0.5,
        (4, 16): 0.9,
        (8, 4): 0.9,
    }
    rows = cells(lambda _, k, n: quality.get((k, n), 0.0), states=(4, 16), selections=("top",))
    students = [
        "0 heads, state 4",
        "top 1 head, state 4",
        "top 2 heads, state 4",
        "top 4 heads, state 16",
    ]
    assert front_of(tmp_path, rows) == [*students, "all 48 heads"]
    rows = [row for row in rows if row["selection"] != "all"]
    assert front_of(tmp_path, rows) == [*students, "the teacher"]


def test_the_page_needs_nothing_else(reported: Path) -> None:
    text = (reported / "report.html").read_text()
    assert not re.search(
        r"https?://(?!www\.w3\.org/)| src=|<link|@import|url\((?!#)|fetch|import\(", text
    )
    assert text.count("<svg ") == 5
    assert "<title>random: " in text
    assert "aria-sort" in text
    assert len(text.splitlines()) < 300, "a committed page can be read as a difference"
    assert re.findall('<a href="#(.*?)"', text) == re.findall('<h2 id="(.*?)"', text) != []


def test_what_is_committed_is_complete_and_always_the_same(reported: Path, tmp_path: Path) -> None:
    names = {"coverage.png", "heads.png", "states.png", "selection.png", "pareto.png"}
    assert {path.name for path in reported.iterdir()} == {
        *names,
        "report.md",
        "report.html",
        *TABLE,
    }
    text = (reported / "report.md").read_text()
    assert set(re.findall(r"\]\((.*?)\)", text)) == names
    source = reported.parent / "tiny"
    write_sweep_report(source, to=tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        path.name: path.read_bytes() for path in reported.iterdir()
    }
    assert {path.name for path in source.iterdir()} == TABLE


def test_an_unfinished_sweep_says_what_is_missing_and_failed_cells_are_an_exit_status(
    tmp_path: Path, no_figures: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = unfinished(cells(selections=("top",)), "top4-n16-s1")
    rows = unfinished(rows, "top8-n4-s0", "top8-n4-s1", "top8-n4-s2", state="waiting")

    def fail(job: SweepJob, recipe: object) -> None:
        write(job.out, rows)
        raise SweepFailed("1 of 48 cells failed")

    monkeypatch.setattr("hybrid_distill.cli.sweep.sweep", fail)
    with pytest.raises(SystemExit, match="1"):
        main(["sweep", "tiny", "--out", str(tmp_path)])
    main(["report", str(tmp_path), "--context", "32768", "--to", str(tmp_path / "docs")])
    assert "MB at 32,768" in (tmp_path / "docs" / "report.html").read_text()
    text = (tmp_path / "report.md").read_text()
    missing = text.partition("## Missing")[2]
    assert "44 of 48 cells" in text
    assert "| 4 | top | 16 | 2 of 3 |" in text
    assert "| 8 | top | 4 |" not in text
    for line in ("- top4-n16-s1: it diverged", "- top8-n4-s2: ", "the figures: "):
        assert line in missing

    nothing = unfinished(rows, *[str(row["cell"]) for row in rows], state="waiting")
    text = write_sweep_report(write(tmp_path, nothing)).with_suffix(".md").read_text()
    assert "0 of 48 cells" in text
    assert "the teacher's evaluation" in text


def test_a_sweep_in_which_only_the_teacher_is_finished_has_a_report(
    tmp_path: Path, no_figures: None
) -> None:
    rows = [row for row in cells() if row["selection"] in ("teacher", "all")]
    record = {
        "grid": {"heads": ["all"], "seeds": [0, 1, 2]},
        "share_alignment": False,
        "command": "r.py",
    }
    (write(tmp_path, rows) / "sweep.json").write_text(json.dumps(record))
    text = write_sweep_report(tmp_path).with_suffix(".md").read_text()
    assert "3 of 3 cells are finished" in text
    assert "`hybrid-distill sweep r.py --heads all --seeds 3 --no-share`" in text


def test_what_is_left_without_the_recurrence_is_shown(tmp_path: Path, no_figures: None) -> None:
    rows = cells(heads=(2, 4), states=(16,), selections=("top",))
    for row in rows:
        if row["selection"] == "top":
            row |= {
                "whole_kv_generation_8": 0.9,
                "without_recurrence_kv_generation_8": 0.05,
                "recurrence_unused": int(row["heads"] == 4),
            }
    # The first row has all columns.
    rows.sort(key=lambda row: row["selection"] != "top")
    report = write_sweep_report(write(tmp_path, rows)).with_suffix(".md")
    section = report.read_text().partition("## Without the recurrence")[2]
    assert "| 2 | top | 16 | 90.0 → 5.0 | used |" in section
    assert "| 4 | top | 16 | 90.0 → 5.0 | NOT USED |" in section


def test_questions_and_guessing_stand_above_the_results(tmp_path: Path, no_figures: None) -> None:
    sample = {
        "n_examples": 100,
        "n_knowledge": 40,
        "knowledge_chance": 0.25,
        "n_text_tokens": 12808,
    }
    text = (
        write_sweep_report(write(tmp_path, [row | sample for row in cells()]))
        .with_suffix(".md")
        .read_text()
    )
    assert re.search(
        r"\| questions a seed \|.*\| 40 \| 100 \| 100 \| 100 \| 12,808 \| 12,808 \|", text
    )
    assert re.search(r"\| guessing \|.*\| 25.0 \| 12.5 \| 6.2 \| 12.5 \|  \|  \|", text)
