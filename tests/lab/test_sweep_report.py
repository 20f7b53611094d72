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
from messages import has_facts

from hybrid_distill.cache_size import cache_bytes
from hybrid_distill.cli.app import main
from hybrid_distill.lab.reporting.document import NO_FIGURES
from hybrid_distill.lab.sweep.flags import SweepJob
from hybrid_distill.lab.sweep.job import SweepFailed
from hybrid_distill.lab.sweep.measured import SweepResults, without
from hybrid_distill.lab.sweep.report import NO_TEACHER, write_sweep_report
from hybrid_distill.plan import HeadId, HeadPlan

SHAPE = HeadPlan(6, 8, 4, ())
HEAD_DIM = 16
EVERY = 48
RANKING: list[HeadId] = []
for _number in np.random.default_rng(0).permutation(EVERY):
    _layer, _head = divmod(int(_number), 8)
    RANKING.append(HeadId(_layer, _head))
TABLE = {"results.csv", "sweep.json"}
Truth = Callable[[str, int, int], float]


def saturating(selection: str, heads: int, d_state: int) -> float:
    """Share of the teacher's retrieval: a random head is worth a fifth of a chosen one; states matter little."""
    worth_of_head = {"top": 1.0, "layers": 0.4, "random": 0.2}.get(selection, 1.0)
    worth = heads * worth_of_head
    of_heads = 1 - math.exp(-((worth / 2.0) ** 1.5))
    of_states = 1 - 0.1 / d_state
    return of_heads * of_states


def held(heads: int, d_state: int, length: int, window: int = 0) -> tuple[int, int]:
    """(keys, values, rings and states; convolutions) of the first heads of RANKING, by the house's own formula."""
    plan = HeadPlan.from_pairs(SHAPE, RANKING[:heads])
    size = cache_bytes(plan, length=length, head_dim=HEAD_DIM, d_state=d_state, window=window)
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
    for d_state, selection, k in product(states, selections, heads):
        settings.append(("none" if k == 0 else selection, k, d_state))
    # Without heads, all selections are one setting.
    distinct = dict.fromkeys(settings)
    rows: list[dict[str, object]] = []
    for number, (selection, k, d_state) in product(range(seeds), distinct):
        share = 1.0
        if d_state:
            noisy = truth(selection, k, d_state) + noise * draw.normal()
            share = float(np.clip(noisy, 0.0, 1.0))
        rows.append(cell(selection, k, d_state, number, share))
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
    record = {"config": {"evaluation": {"stated_pairs": n_pairs}}}
    (folder / "sweep.json").write_text(json.dumps(record))
    return folder


def report_of(folder: Path) -> str:
    """Write a sweep's report; return its text."""
    return write_sweep_report(folder).with_suffix(".md").read_text()


def half_interval(values: Iterable[float]) -> float:
    """Half of the 95 % interval of a mean of three, after Student: 4.303 with two degrees of freedom."""
    variance = np.var(list(values), ddof=1)
    return 4.303 * math.sqrt(variance / 3)


def unfinished(
    rows: list[dict[str, object]], *names: str, state: str = "failed"
) -> list[dict[str, object]]:
    """Take the results of these cells away, and give them this state."""
    kept = ("cell", "selection", "heads", "d_state", "seed", "dir")
    changed: list[dict[str, object]] = []
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
    # 50, 80 and 90 % of the teacher's 98 %.
    retrieval = [49.0, 78.4, 88.2]
    for row in rows:
        if row["cell"] in ("top4-n16-s0", "top4-n16-s1", "top4-n16-s2"):
            row["kv_generation_8"] = retrieval[int(str(row["seed"]))] / 100
            row["kv_generation_16"] = 0.98

    text = report_of(write(tmp_path, rows))

    assert f"| 71.9 ± {half_interval(retrieval):.1f} | 98.0 ± 0.0 |" in text
    # A coverage is the mean over 8 and 16 pairs of the share of the teacher's.
    coverage = half_interval([75.0, 90.0, 95.0])
    changes = "+0.0 % | −26.7 % | +0.0 %"
    assert f"| 4 | top | 16 | 100.0 ± 0.0 | 86.7 ± {coverage:.1f} | {changes} |" in text
    megabytes = sum(held(4, 16, 4096)) / 1e6
    assert f"| {megabytes:.3f} |" in text
    assert has_facts(text, "9 of 9")


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
        for (_, heads, replacement), size in students.bytes.items():
            assert size == pytest.approx(sum(held(heads, int(replacement), length)))


def test_memory_beyond_a_window_is_the_formula(tmp_path: Path) -> None:
    """A ring that is not full yet at the shortest measured length must not tilt the line."""
    window = 440
    rows = cells(heads=(2,), states=(16,), selections=("top",))
    for row in rows:
        if row["selection"] == "top":
            row["window"] = window
            for length in (128, 2048, 4096):
                row[f"cache_bytes_{length}"], _ = held(2, 16, length, window)
    out = write(tmp_path, rows)
    for length in (3000, 32768):
        settings = SweepResults.read(out, length).settings
        assert settings.bytes.loc["top"].tolist() == [sum(held(2, 16, length, window))]


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

    def truth(selection: str, heads: int, d_state: int) -> float:
        return quality.get((heads, d_state), 0.0)

    rows = cells(truth, states=(4, 16), selections=("top",))
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
    # Names of XML and references within the page are none.
    from_elsewhere = r"https?://(?!www\.w3\.org/)| src=|<link|@import|url\((?!#)|fetch|import\("
    assert not re.search(from_elsewhere, text)
    assert text.count("<svg ") == 5
    assert "<title>random: " in text
    assert "aria-sort" in text
    assert len(text.splitlines()) < 300, "a committed page can be read as a difference"
    assert re.findall('<a href="#(.*?)"', text) == re.findall('<h2 id="(.*?)"', text) != []


def test_what_is_committed_is_complete_and_always_the_same(reported: Path, tmp_path: Path) -> None:
    names = {"coverage.png", "heads.png", "states.png", "selection.png", "pareto.png"}
    pages = {"report.md", "report.html"}
    assert {path.name for path in reported.iterdir()} == names | pages | TABLE
    links = re.findall(r"\]\((.*?)\)", (reported / "report.md").read_text())
    assert set(links) == names

    source = reported.parent / "tiny"
    write_sweep_report(source, to=tmp_path)
    first = {path.name: path.read_bytes() for path in reported.iterdir()}
    second = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert second == first
    assert {path.name for path in source.iterdir()} == TABLE


def test_an_unfinished_sweep_says_what_is_missing_and_failed_cells_are_an_exit_status(
    tmp_path: Path, no_figures: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = unfinished(cells(selections=("top",)), "top4-n16-s1")
    rows = unfinished(rows, "top8-n4-s0", "top8-n4-s1", "top8-n4-s2", state="waiting")

    def fail(job: SweepJob, recipe: object) -> None:
        write(job.out, rows)
        raise SweepFailed("1 of 48 cells failed")

    monkeypatch.setattr("hybrid_distill.cli.sweep.run_sweep", fail)
    with pytest.raises(SystemExit, match="1"):
        main(["sweep", "tiny", "--out", str(tmp_path)])

    main(["report", str(tmp_path), "--context", "32768", "--to", str(tmp_path / "docs")])
    assert "MB at 32,768" in (tmp_path / "docs" / "report.html").read_text()

    text = (tmp_path / "report.md").read_text()
    missing = text.partition("## Missing")[2]
    assert has_facts(text, "44 of 48")
    assert "| 4 | top | 16 | 2 of 3 |" in text
    assert "| 8 | top | 4 |" not in text
    for line in ("- top4-n16-s1: it diverged", "- top8-n4-s2: ", NO_FIGURES):
        assert line in missing

    every_cell = [str(row["cell"]) for row in rows]
    nothing = unfinished(rows, *every_cell, state="waiting")
    text = report_of(write(tmp_path, nothing))
    assert has_facts(text, "0 of 48")
    assert NO_TEACHER in text


def test_a_sweep_in_which_only_the_teacher_is_finished_has_a_report(
    tmp_path: Path, no_figures: None
) -> None:
    rows = [row for row in cells() if row["selection"] in ("teacher", "all")]
    record = {
        "grid": {"heads": ["all"], "seeds": [0, 1, 2]},
        "share_alignment": False,
        "command": "r.py",
    }
    write(tmp_path, rows)
    (tmp_path / "sweep.json").write_text(json.dumps(record))

    text = report_of(tmp_path)

    assert has_facts(text, "3 of 3")
    assert "`hybrid-distill sweep r.py --heads all --seeds 3 --no-share`" in text


def test_what_is_left_without_the_recurrence_is_shown(tmp_path: Path, no_figures: None) -> None:
    rows = cells(heads=(2, 4), states=(16,), selections=("top",))
    for row in rows:
        if row["selection"] == "top":
            row |= {
                "whole_kv_generation_8": 0.9,
                "zeroed_recurrence_kv_generation_8": 0.05,
                "recurrence_unused": int(row["heads"] == 4),
            }
    # The first row has all columns.
    rows.sort(key=lambda row: row["selection"] != "top")

    text = report_of(write(tmp_path, rows))

    section = text.partition("## Without the recurrence")[2]
    assert "| 2 | top | 16 | 90.0 → 5.0 | used |" in section
    assert "| 4 | top | 16 | 90.0 → 5.0 | unused |" in section


def test_questions_and_guessing_stand_above_the_results(tmp_path: Path, no_figures: None) -> None:
    sample = {
        "n_examples": 100,
        "n_knowledge": 40,
        "knowledge_chance": 0.25,
        "n_text_tokens": 12808,
    }
    rows = [row | sample for row in cells()]

    text = report_of(write(tmp_path, rows))

    questions = r"\| questions a seed \|.*\| 40 \| 100 \| 100 \| 100 \| 12,808 \| 12,808 \|"
    guessing = r"\| guessing \|.*\| 25.0 \| 12.5 \| 6.2 \| 12.5 \|  \|  \|"
    assert re.search(questions, text)
    assert re.search(guessing, text)
