"""report.md and report.html of a sweep, finished or not, from its results.csv."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...io import replacing, write_text
from ..report.tables import ABSENT, signed
from ..sweep.grid import ALL
from ..sweep.results import FILE, TEACHER
from ..sweep.status import duration
from .document import Block, Bullets, Figure, Heading, Table, Text, to_html, to_markdown
from .figures import draw
from .findings import NEEDED, findings, headline, heads_needed
from .recommend import Advisor, measured_text, predicted_text, size_text
from .settings import NONE, Estimate, Setting, SweepResults, t_95

CONTEXT = 4096
Z_95 = 1.96
BUDGETS = (1 / 16, 1 / 8, 1 / 4, 1 / 2)
"""Of the teacher's memory, for which the report recommends a student."""


@dataclass(frozen=True)
class Column:
    """A column of results: what it shows, times ``scale``, with so many ``digits``."""

    name: str
    header: str
    group: str
    scale: float = 100.0
    digits: int = 1


def write_sweep_report(out: str | Path, *, context: int = CONTEXT, to: str | Path | None = None) -> Path:
    """Write report.md with its PNG figures, report.html and results.csv into ``to`` (by default the sweep's folder).

    Returns the path of report.md. Raises ValueError for a folder without results, and for a ``context`` (tokens at
    which memory is compared) whose cache sizes cannot be told from those measured.
    """
    if context < 1:
        raise ValueError(f"the context is {context} tokens; give at least 1.")
    results, folder = SweepResults.read(out), Path(to or out)
    folder.mkdir(parents=True, exist_ok=True)
    for setting in results.done:
        setting.bytes_at(context)
    with tempfile.TemporaryDirectory() as drawn:
        captions, reason = _draw(results, context, folder, Path(drawn))
        blocks = list(_blocks(results, context, captions, reason))
        title = f"Sweep: {results.name}"
        write_text(folder / "report.md", to_markdown(title, blocks))
        svg = {name: Path(drawn) / f"{name}.svg" for name in captions}
        write_text(folder / "report.html", to_html(title, blocks, svg))
    if folder.resolve() != Path(out).resolve():
        with replacing(folder / FILE) as temporary:
            shutil.copyfile(Path(out) / FILE, temporary)
    return folder / "report.md"


def _draw(results: SweepResults, context: int, folder: Path, svg_folder: Path) -> tuple[dict[str, str], str]:
    """Captions by figure, and why there are none."""
    if not results.done:
        return {}, ""
    try:
        return draw(results, context, folder, svg_folder), ""
    except ImportError as error:
        return {}, f"the figures ({error}; `pip install matplotlib`)"


def _blocks(results: SweepResults, context: int, captions: dict[str, str], missing_figures: str) -> Iterator[Block]:
    def figure(name: str) -> list[Figure]:
        return [Figure(name, captions[name])] if name in captions else []

    yield Text(_extent(results))
    yield Text(f"**{headline(results, context)}**")
    if found := list(findings(results)):
        yield Heading("What it shows")
        yield Bullets(found)
    if results.done:
        yield Heading("Results")
        yield _means(results, context)
        yield Text(_notes(results, context))
        yield Heading("Against the teacher")
        yield from figure("coverage")
        yield _changes(results, context)
        yield Text(
            "Relative change of each number, student against teacher seed by seed. Coverage: student over teacher, the "
            "mean over a group's tasks; for retrieval-heavy these are the dictionaries of all sizes, by generation."
        )
        yield from _section("Heads kept", figure("heads"))
        yield from _section("State size", figure("states"))
        yield from _section("How heads are chosen", [*figure("selection"), *_needed(results)])
        yield from _section("Memory", [*figure("pareto"), *_memory(results, context)])
    yield from _section("Missing", _missing(results, missing_figures))
    yield from _section("How it was made", list(_made(results)))


def _section(title: str, blocks: Sequence[Block]) -> list[Block]:
    return [Heading(title), *blocks] if blocks else []


def _extent(results: SweepResults) -> str:
    """Cells and seeds, in a sentence."""
    done = sum(len(setting.rows) for setting in results.settings)
    total = done + sum(len(setting.unfinished) for setting in results.settings)
    seeds = sorted({seed for setting in results.settings for seed in setting.rows})
    text = f"{done} of {total} cells are finished, in {len(results.done)} settings"
    if not seeds:
        return f"{done} of {total} cells are finished."
    if len(seeds) == 1:
        return f"{text}, with **one seed**: nothing here has an interval, and small differences mean nothing."
    return f"{text}, with {len(seeds)} seeds."


def _columns(results: SweepResults) -> list[Column]:
    every = [
        Column("knowledge", "knowledge, %", "knowledge-focused"),
        *(Column(f"kv_generation_{n}", f"KV {n} pairs, %", "retrieval-heavy") for n in results.pair_sizes),
        Column(f"kv_choice_{results.n_pairs}", f"by choice, {results.n_pairs} pairs, %", "retrieval-heavy"),
        Column("perplexity", "perplexity", "plain text", 1.0, 3),
        Column("top1_agreement", "agreement, %", "plain text"),
    ]
    everyone = [results.teacher, *results.done]
    return [column for column in every if any(setting.values(column.name) for setting in everyone)]


def _grouped(columns: Sequence[Column], before: int) -> list[tuple[str, int]]:
    groups = list(dict.fromkeys(column.group for column in columns))
    return [("", before), *((group, sum(column.group == group for column in columns)) for group in groups)]


def _means(results: SweepResults, context: int) -> Table:
    columns = _columns(results)
    rows = [
        ["", "questions a seed", "", "", *(_count(results.n_questions(c.name)) for c in columns), ""],
        ["", "guessing", "", "", *(_guess(results.chance(c.name), c) for c in columns), ""],
    ]
    rows += [
        [*_name(setting), *(_cell(setting.estimate(c.name), c) for c in columns), _bytes_cell(setting, context)]
        for setting in [results.teacher, *results.done]
        if setting.rows
    ]
    headers = ["heads", "chosen", "state", "seeds", *(c.header for c in columns), f"MB at {context:,}"]
    return Table(headers, rows, _grouped(columns, 4), n_text=2)


def _changes(results: SweepResults, context: int) -> Table:
    columns = [column for column in _columns(results) if column.name != "top1_agreement"]
    groups = {"knowledge-focused": ["knowledge"], "retrieval-heavy": [f"kv_generation_{n}" for n in results.pair_sizes]}
    rows = []
    for setting in results.done:
        coverage = [results.against_teacher(setting, names) for names in groups.values()]
        changes = [results.against_teacher(setting, [column.name]) for column in columns]
        memory = setting.bytes_at(context) / results.teacher.bytes_at(context) if results.teacher.rows else None
        rows.append(
            [
                *_name(setting)[:3],
                *(ABSENT if e is None else _with_margin(100 * e.mean, e.share_margin, 100, 1) for e in coverage),
                *(ABSENT if e is None else _change(e.mean) for e in changes),
                ABSENT if memory is None else _change(memory),
            ]
        )
    spans = [("", 3), ("coverage, %", 2), *((f"{name}, change" if name else "", n) for name, n in _grouped(columns, 0))]
    headers = ["heads", "chosen", "state", *groups, *(c.header.removesuffix(", %") for c in columns), "memory"]
    return Table(headers, rows, [span for span in spans if span[1]], n_text=2)


def _name(setting: Setting) -> list[str]:
    chosen = {NONE: "", ALL: "", TEACHER: "the teacher"}.get(setting.selection, setting.selection)
    heads = {ALL: ALL, TEACHER: ABSENT}.get(setting.selection, str(setting.heads))
    return [heads, chosen, ABSENT if setting.d_state is None else str(setting.d_state), setting.n_seeds]


def _count(n: int | None) -> str:
    return ABSENT if n is None else f"{n:,}"


def _guess(chance: float | None, column: Column) -> str:
    return "" if chance is None else f"{column.scale * chance:.{column.digits}f}"


def _cell(value: Estimate | None, column: Column) -> str:
    if value is None:
        return ABSENT
    margin = value.share_margin if column.scale == 100 else value.margin
    return _with_margin(column.scale * value.mean, margin, column.scale, column.digits)


def _with_margin(shown: float, margin: float | None, scale: float, digits: int) -> str:
    return f"{shown:.{digits}f}" + ("" if margin is None else f" ± {scale * margin:.{digits}f}")


def _change(ratio: float) -> str:
    return f"{signed(100 * (ratio - 1))} %"


def _bytes_cell(setting: Setting, context: int) -> str:
    return f"{setting.bytes_at(context) / 1e6:.3f}"


def _notes(results: SweepResults, context: int) -> str:
    n_seeds = max(len(setting.rows) for setting in results.done)
    interval = "One seed: no interval can be given."
    if n_seeds > 1:
        interval = (
            "± is half of the 95 % interval of the mean over seeds, by Student's t: with "
            f"{n_seeds} seeds {t_95(n_seeds - 1):.1f} standard errors, and of a share no more than reaches 0 and 100 %."
        )
    if results.pair_sizes and (asked := results.n_questions(f"kv_generation_{results.n_pairs}")):
        alone, together = (100 * Z_95 * math.sqrt(0.25 / (asked * n)) for n in (1, n_seeds))
        interval += (
            f" Of {asked} questions alone, a share near 50 % is uncertain by {alone:.1f} points in one seed"
            f"{f', by {together:.1f} over {n_seeds}' if n_seeds > 1 else ''}: do not read into less than that."
        )
    return (
        f"{interval} Guessing: of a dictionary, naming one of its values; of the facts, one of the choices. "
        "Our probes stand for the published tasks: multiple-choice facts for the knowledge-focused ones, "
        "dictionaries by generation for the retrieval-heavy ones. Perplexity is per token of held-out text; agreement "
        "is the share of its tokens where student and teacher expect the same next one. Memory: all that one sequence "
        f"holds after {context:,} tokens, that is keys and values in bfloat16, states, and the convolutions' inputs "
        "(`cache_bytes_L + conv_state_bytes` of results.csv), the largest of the seeds; 1 MB = 1e6 bytes."
    )


def _needed(results: SweepResults) -> list[Block]:
    """A table of the fewest heads with most of the teacher's retrieval, by selection and state."""
    states, measured = results.states(), results.qualities("retrieval")
    selections = [s for s in dict.fromkeys(s.selection for s in results.done) if s not in (NONE, ALL)]
    if not measured or not selections or not results.teacher.rows:
        return []
    quality = measured[0]

    def cell(selection: str, state: int) -> str:
        of_line = [s.heads for s in results.done if s.selection == selection and s.d_state == state]
        needed = heads_needed(results, quality, selection, state)
        return ABSENT if not of_line else f"> {max(of_line)}" if needed is None else str(needed)

    rows = [[selection, *(cell(selection, state) for state in states)] for selection in selections]
    percent = f"{100 * NEEDED:.0f} %"
    return [
        Table(["chosen", *(f"state {state}" for state in states)], rows),
        Text(
            f"Fewest heads, of those that were run, that keep {percent} of the teacher's retrieval ({quality.label})."
        ),
    ]


def _memory(results: SweepResults, context: int) -> Iterator[Block]:
    for quality in results.qualities("retrieval"):
        advisor = Advisor(results, quality, context)
        yield from _front(advisor)
        if results.teacher.rows:
            yield from _recommendations(advisor)


def _front(advisor: Advisor) -> Iterator[Block]:
    quality, context = advisor.quality, advisor.context
    rows = [
        [
            choice.setting.label,
            _with_margin(100 * choice.quality.mean, choice.quality.share_margin, 100, 1),
            size_text(choice.n_bytes),
        ]
        for choice in advisor.measured
    ]
    yield Table(["on the front", f"{quality.label}, %", f"memory at {context:,}"], rows)


def _recommendations(advisor: Advisor) -> Iterator[Block]:
    """What `hybrid-distill recommend` says at some shares of the teacher's memory, and how far to trust it."""
    whole, rows = advisor.results.teacher.bytes_at(advisor.context), []
    for share in BUDGETS:
        if advisor.measured[0].n_bytes > share * whole:
            continue
        best, predicted = advisor.best_measured(share * whole), advisor.better_predicted(share * whole)
        shown = "none" if predicted is None else predicted_text(predicted, advisor.quality)
        budget = f"1/{round(1 / share)} of the teacher's, {size_text(share * whole)}"
        rows.append([budget, measured_text(best, advisor.quality) + advisor.doubt(best), shown])
    if rows:
        yield Table(["under a budget of", "best that was run", "predicted to be better, not run"], rows, n_text=3)
    if advisor.surfaces:
        yield Text(
            f"Predictions are off by this much, on average, for settings that were left out (mean absolute error): "
            f"{advisor.error_text}. `hybrid-distill recommend` answers for other budgets, contexts and qualities."
        )
    for selection, reason in advisor.too_few.items():
        yield Text(f"No predictions for {selection}: {reason}")


def _missing(results: SweepResults, figures: str) -> list[Block]:
    items = [f"{cell}: {state}" for setting in results.settings for cell, state in setting.unfinished.items()]
    if not results.teacher.rows:
        items.append("the teacher's evaluation, and with it all comparisons")
    return [Bullets([*items, *([figures] if figures else [])])] if items or figures else []


def _made(results: SweepResults) -> Iterator[Block]:
    """The grid, the training and the versions, as far as sweep.json tells."""
    record = results.record
    if "grid" in record:
        grid = {name.replace("_", "-"): values for name, values in record["grid"].items()}
        grid["seeds"] = [len(grid.get("seeds", []))]
        flags = [f"--{name} {','.join(map(str, values))}" for name, values in grid.items()]
        yield Text(f"`{' '.join(['hybrid-distill sweep', *flags, record.get('command', '')]).rstrip()}`")
    if saved := record.get("saving", {}).get("steps"):
        shared = record["saving"]
        served = f"{shared['alignments']} alignments served {shared['students']} students"
        yield Text(f"{served}, which spared {saved:,} training steps.")
    seconds = sum(row.get("train_seconds", 0.0) for setting in results.done for row in setting.rows.values())
    if seconds:
        yield Text(f"The students' own stages took {duration(seconds)} together.")
    if versions := record.get("versions"):
        yield Text(", ".join(f"{name} {version}" for name, version in versions.items()) + ".")
