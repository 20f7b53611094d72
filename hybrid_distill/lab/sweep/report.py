"""report.md, report.html and the figures of a sweep, finished or not, from its results.csv."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from scipy import stats

from ...io import replacing, write_text
from ..reporting.document import Block, Figure, Section, render
from ..reporting.figures import can_draw
from ..reporting.tables import ABSENT, percent_change, with_error
from .figures import draw
from .grid import ALL
from .measured import CONTEXT, NONE, SETTING, SweepResults, without
from .recommend import best_under, front, measured_text, size_text
from .results import FILE, TEACHER, duration

NEEDED = 0.90
"""Share of the teacher's retrieval by which selections are compared."""
BUDGETS = (1 / 16, 1 / 8, 1 / 4, 1 / 2)
"""Shares of the teacher's memory for which the report names a student."""


class Column(NamedTuple):
    """A figure of results.csv, and how it is shown."""

    name: str
    header: str
    group: str
    scale: float = 100.0
    digits: int = 1


def write_sweep_report(out: str | Path, *, context: int = CONTEXT, to: str | Path | None = None) -> Path:
    """Write report.md with its PNG figures, report.html and results.csv into ``to`` (by default the sweep's folder).

    Returns the path of report.md. Raises what `SweepResults.read` raises.
    """
    results, folder = SweepResults.read(out, context), Path(to or out)
    folder.mkdir(parents=True, exist_ok=True)
    captions = draw(results, folder) if len(results.students) and can_draw() else {}
    sections = _sections(results, captions)
    for form in ("md", "html"):
        text = render(f"Sweep: {results.name}", sections, form, folder=folder)
        write_text(folder / f"report.{form}", text)
    if folder.resolve() != Path(out).resolve():
        with replacing(folder / FILE) as temporary:
            shutil.copyfile(Path(out) / FILE, temporary)
    return folder / "report.md"


def _sections(results: SweepResults, captions: dict[str, str]) -> list[Section]:
    def drawn(name: str) -> list[Block]:
        return [Figure(f"{name}.png", captions[name])] if name in captions else []

    unfinished = results.rows[results.rows.state != "done"]
    missing = [f"{row.cell}: {row.state if pd.isna(row.error) else row.error}" for row in unfinished.itertuples()]
    missing += [] if TEACHER in results.settings.index else ["the teacher's evaluation, and with it all comparisons"]
    missing += [] if can_draw() else ["the figures: matplotlib is not installed (`pip install matplotlib`)"]
    sections = [Section("", [_extent(results)])]
    if len(results.students):
        sections += [
            Section("Results", [_means(results), _notes(results)], 2),
            Section("Against the teacher", [*drawn("coverage"), *_changes(results)], 2),
            Section("Heads kept", drawn("heads")),
            Section("State size", drawn("states")),
            Section("How heads are chosen", [*drawn("selection"), *_needed(results)]),
            Section("Memory", [*drawn("pareto"), *_memory(results)]),
        ]
    return [*sections, Section("Missing", [missing] if missing else []), Section("How it was made", _made(results))]


def _extent(results: SweepResults) -> str:
    students, cells = results.students, (results.rows.selection != TEACHER).sum()
    text = f"{len(students)} of {cells} cells are finished, in {len(students[SETTING].drop_duplicates())} settings"
    if students.seed.nunique() == 1:
        return f"{text}, with **one seed**: nothing here has an interval, and small differences mean nothing."
    return f"{text}, with {students.seed.nunique()} seeds."


def _columns(results: SweepResults) -> list[Column]:
    every = [
        Column("knowledge", "knowledge, %", "knowledge-focused"),
        *(Column(f"kv_generation_{n}", f"KV {n} pairs, %", "retrieval-heavy") for n in results.pair_sizes),
        Column(f"kv_choice_{results.n_pairs}", f"by choice, {results.n_pairs} pairs, %", "retrieval-heavy"),
        Column("perplexity", "perplexity", "plain text", 1.0, 3),
        Column("top1_agreement", "agreement, %", "plain text"),
    ]
    return [column for column in every if column.name in results.rows and results.done[column.name].notna().any()]


def _names(settings: pd.DataFrame) -> pd.DataFrame:
    """Return the first columns of a table of settings."""
    rows = []
    for (selection, heads, d_state), n_done, n in zip(settings.index, settings.n_done, settings.n):
        chosen = {NONE: "", ALL: "", TEACHER: "the teacher"}.get(selection, selection)
        k = {ALL: ALL, TEACHER: ABSENT}.get(selection, heads)
        rows.append((k, chosen, d_state or ABSENT, n_done if n_done == n else f"{n_done} of {n}"))
    names = pd.MultiIndex.from_product([[""], ["heads", "chosen", "state", "seeds"]])
    return pd.DataFrame(rows, settings.index, names, dtype=object)


def _means(results: SweepResults) -> pd.DataFrame:
    """Return the means over seeds, below the number of questions and what guessing gives."""
    settings = results.settings
    table = _names(settings)
    head = pd.DataFrame([["", "questions a seed", "", ""], ["", "guessing", "", ""]], columns=table.columns)
    for column in _columns(results):
        found = results.estimate(column.name, is_share=column.scale == 100).loc[settings.index]
        n, chance = results.n_questions(column.name), results.chance(column.name)
        guess = "" if math.isnan(chance) else f"{column.scale * chance:.{column.digits}f}"
        head[column.group, column.header] = [ABSENT if math.isnan(n) else f"{n:,.0f}", guess]
        table[column.group, column.header] = _shown(found, column.scale, column.digits)
    memory = ("", f"MB at {results.context:,}")
    head[memory], table[memory] = "", [f"{size / 1e6:.3f}" for size in settings.bytes]
    return pd.concat([head, table])


def _shown(found: pd.DataFrame, scale: float = 100, digits: int = 1) -> list[str]:
    return [with_error(mean, margin, digits, scale=scale) for mean, margin in zip(found["mean"], found["margin"])]


def _changes(results: SweepResults) -> list[Block]:
    settings = results.settings
    if TEACHER not in settings.index:
        return []
    students = without(settings, TEACHER)
    table, columns = _names(students).iloc[:, :3], [c for c in _columns(results) if c.name != "top1_agreement"]
    for group in ("knowledge-focused", "retrieval-heavy"):
        of_group = [column.name for column in columns if column.group == group and "choice" not in column.name]
        if of_group:
            table["coverage, %", group] = _shown(results.against_teacher(of_group).loc[students.index])
    for column in columns:
        change = results.against_teacher([column.name]).loc[students.index, "mean"]
        table[f"{column.group}, change", column.header.removesuffix(", %")] = [percent_change(x) for x in change]
    whole = settings.loc[TEACHER].bytes.max()
    table["", "memory"] = [percent_change(size / whole) for size in students.bytes]
    note = (
        "Relative change of each number, student against teacher seed by seed. Coverage: student over teacher, the "
        "mean over a group's tasks; for retrieval-heavy these are the dictionaries of all sizes, by generation."
    )
    return [table, note]


def _notes(results: SweepResults) -> str:
    n_seeds = max(without(results.settings, TEACHER)["n_done"])
    interval = "One seed: no interval can be given."
    if n_seeds > 1:
        interval = (
            "± is half of the 95 % interval of the mean over seeds, by Student's t: with "
            f"{n_seeds} seeds {stats.t.ppf(0.975, n_seeds - 1):.1f} standard errors, and of a share no more than "
            "reaches 0 and 100 %."
        )
    asked = results.n_questions(f"kv_generation_{results.n_pairs}")
    if results.pair_sizes and not math.isnan(asked):
        alone, together = (196 * math.sqrt(0.25 / (asked * n)) for n in (1, n_seeds))
        over_seeds = f", by {together:.1f} over {n_seeds}" if n_seeds > 1 else ""
        interval += (
            f" Of {asked:.0f} questions alone, a share near 50 % is uncertain by {alone:.1f} points in one seed"
            f"{over_seeds}: do not read into less than that."
        )
    return (
        f"{interval} Guessing: of a dictionary, naming one of its values; of the facts, one of the choices. "
        "Our probes stand for the published tasks: multiple-choice facts for the knowledge-focused ones, "
        "dictionaries by generation for the retrieval-heavy ones. Perplexity is per token of held-out text; agreement "
        "is the share of its tokens where student and teacher expect the same next one. Memory: all that one sequence "
        f"holds after {results.context:,} tokens, that is keys and values in bfloat16, states, and the convolutions' "
        "inputs (`cache_bytes_L + conv_state_bytes` of results.csv), the largest of the seeds; 1 MB = 1e6 bytes."
    )


def _needed(results: SweepResults) -> list[Block]:
    """Name the fewest heads with most of the teacher's retrieval, by selection and state."""
    quality = results.quality("retrieval")
    if quality is None or TEACHER not in results.settings.index:
        return []
    kept = without(results.against_teacher([quality.column]), NONE, ALL).reset_index()
    table = pd.DataFrame({"chosen": kept.selection.unique()})
    for d_state in sorted(kept.d_state.unique()):
        cells = []
        for selection in table.chosen:
            line = kept.loc[(kept.selection == selection) & (kept.d_state == d_state)]
            enough = line.loc[line["mean"] >= NEEDED, "heads"]
            cells.append(ABSENT if line.empty else f"> {line.heads.max()}" if enough.empty else enough.min())
        table[f"state {d_state}"] = cells
    percent = f"{100 * NEEDED:.0f} %"
    note = f"Fewest heads, of those that were run, that keep {percent} of the teacher's retrieval ({quality.label})."
    return [] if kept.empty else [table, note]


def _memory(results: SweepResults) -> list[Block]:
    """Show the front, and the best student under some shares of the teacher's memory."""
    quality = results.quality("retrieval")
    if quality is None:
        return []
    found = front(results, quality)
    sizes = [size_text(size) for size in found.bytes]
    heads = ["on the front", f"{quality.label}, %", f"memory at {results.context:,}"]
    table = pd.DataFrame(dict(zip(heads, (found.label, _shown(found), sizes))))
    if TEACHER not in results.settings.index:
        return [table]
    whole = results.settings.loc[TEACHER].bytes.max()
    budgets = {f"1/{round(1 / share)} of the teacher's, {size_text(share * whole)}": share * whole for share in BUDGETS}
    best = {name: best_under(found, budget) for name, budget in budgets.items() if found.bytes.min() <= budget}
    rows = [(name, measured_text(results, quality, student)) for name, student in best.items()]
    return [table, *([pd.DataFrame(rows, columns=["under a budget of", "best that was run"])] if rows else [])]


def _made(results: SweepResults) -> list[Block]:
    """Describe the grid, the training and the versions, as far as sweep.json tells."""
    record, made = results.record, []
    if "grid" in record:
        grid = {name.replace("_", "-"): ",".join(map(str, values)) for name, values in record["grid"].items()}
        grid["seeds"] = str(len(record["grid"].get("seeds", [])))
        flags = [f"--{name} {values}" for name, values in grid.items()]
        made.append(f"`{' '.join(['hybrid-distill sweep', *flags, record.get('command', '')]).rstrip()}`")
    if (saved := record.get("saving", {})).get("steps"):
        served = f"{saved['alignments']} alignments served {saved['students']} students"
        made.append(f"{served}, which spared {saved['steps']:,} training steps.")
    if "train_seconds" in results.rows:
        made.append(f"The students' own stages took {duration(results.students['train_seconds'].sum())} together.")
    if versions := record.get("versions"):
        made.append(", ".join(f"{name} {version}" for name, version in versions.items()) + ".")
    return made
