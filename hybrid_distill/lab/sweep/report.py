"""report.md, report.html and the figures of a sweep, finished or not, from its results.csv."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path

import pandas as pd

from ...io import replacing
from ..memory.timing import duration
from ..reporting import text_table
from ..reporting.document import (
    ABSENT,
    NO_FIGURES,
    Block,
    Column,
    Figure,
    Section,
    change_table,
    value_table,
    write_report_files,
    zeroed_section,
)
from ..reporting.figures import (
    GREY,
    LOOKS,
    Row,
    as_block,
    draw_lines,
    figure,
    has_matplotlib,
    legend,
    look,
    name_points,
    percent_axis,
)
from .folder import FILE as SWEEP
from .grid import ALL, NONE
from .measured import CONTEXT, NO_SHARES, SETTING, SweepResults, size_text, without
from .results import FILE, TEACHER

NEEDED = 0.90
"""Share of the teacher's retrieval to keep, when selections are compared."""
NAMES = {"top": "top, by score", "restoration": "restoration", "layers": "whole layers", "random": "random"}
KNOWLEDGE, RETRIEVAL, TEXT = "knowledge-focused", "retrieval-heavy", "plain text"
BARS = "bars: 95 % intervals of the mean over seeds"
NOTE = (
    "± is half of the 95 % interval of the mean over seeds, by Student's t, and of a share no more than reaches 0 and "
    "100 %; a single seed has none. Guessing: of a dictionary, naming one of its values; of the facts, one of the "
    "choices. Perplexity is per token of held-out text; agreement is the share of its tokens where student and teacher "
    "expect the same next one. Memory: all that one sequence holds, that is keys and values in bfloat16, states, and "
    "the convolutions' inputs (`cache_bytes_L + conv_state_bytes` of results.csv), the largest of the seeds; 1 MB = "
    "1e6 bytes."
)
CHANGE = (
    "Relative change of each number, student against teacher seed by seed. Coverage: student over teacher, the "
    "mean over a group's tasks; for retrieval-heavy these are the dictionaries of all sizes, by generation."
)


def write_sweep_report(out: str | Path, *, context: int = CONTEXT, to: str | Path | None = None) -> Path:
    """Write report.md with its PNG figures, report.html and the table into ``to`` (by default the sweep's folder).

    Returns the path of report.md. Raises as `SweepResults.read` does.
    """
    results, folder = SweepResults.read(out, context), Path(to or out)
    folder.mkdir(parents=True, exist_ok=True)
    for source in (Path(out) / name for name in (FILE, SWEEP)):
        if source.exists() and folder.resolve() != Path(out).resolve():
            with replacing(folder / source.name) as temporary:
                shutil.copyfile(source, temporary)
    return write_report_files(folder, f"Sweep: {results.name}", _sections(results, folder))


def pareto_front(out: str | Path, context: int = CONTEXT) -> str:
    """Describe the students that no other one beats in both quality and memory, smallest first.

    Quality is KV retrieval by generation, or perplexity if no cell has that. Raises as `SweepResults.read` does.
    """
    results = SweepResults.read(out, context)
    quality = results.quality("retrieval") or results.quality("perplexity")
    if quality is None or results.students.empty:
        return "no cell is finished: there is no Pareto front yet."
    table = results.front_table(quality, results.front(quality))
    return f"Pareto front:\n{text_table(table)}"


def _sections(results: SweepResults, folder: Path) -> list[Section]:
    """Return the report's sections; draw their figures into the folder."""
    students, rows = results.students, results.rows
    n_settings, n_seeds = len(students[SETTING].drop_duplicates()), students.seed.nunique()
    extent = f"{len(students)} of {(rows.selection != TEACHER).sum()} cells are finished, in {n_settings} settings, "
    extent += f"with {n_seeds} seed{'s' * (n_seeds != 1)}."
    unfinished = rows[rows.state != "done"]
    missing = [f"{row.cell}: {row.state if pd.isna(row.error) else row.error}" for row in unfinished.itertuples()]
    missing += [] if TEACHER in results.settings.index else ["the teacher's evaluation, and with it all comparisons"]
    missing += [] if has_matplotlib() else [NO_FIGURES]
    sections = [Section("", [extent])]
    if len(students):
        columns, names = _columns(results), _names(results.settings)
        figures = _draw(results, folder)
        sections += [
            Section("Results", [_means(results, names, columns), NOTE], 2),
            zeroed_section(names, columns, results.figures[0], "recurrence"),
            zeroed_section(names, columns, results.figures[0], "window"),
            Section("Against the teacher", [*figures["coverage"], *_changes(results, names, columns)], 2),
            Section("Heads kept", figures["heads"]),
            Section("State size", figures["states"]),
            Section("How heads are chosen", [*figures["selection"], *_needed(results)]),
            Section("Memory", [*figures["pareto"], *_memory(results)]),
        ]
    return [*sections, Section("Missing", [missing] if missing else []), Section("How it was made", _made(results))]


def _columns(results: SweepResults) -> list[Column]:
    return [
        Column("knowledge", "knowledge, %", group=KNOWLEDGE),
        *(Column(f"kv_generation_{n}", f"KV {n} pairs, %", group=RETRIEVAL) for n in results.pair_sizes),
        Column(f"kv_choice_{results.n_pairs}", f"by choice, {results.n_pairs} pairs, %", group=RETRIEVAL),
        Column("perplexity", "perplexity", 1.0, 3, TEXT),
        Column("top1_agreement", "agreement, %", group=TEXT),
    ]


def _names(settings: pd.DataFrame) -> pd.DataFrame:
    """Return the first columns of a table of settings."""
    rows = []
    for (selection, heads, d_state), n_done, n in zip(settings.index, settings.n_done, settings.n):
        chosen = {NONE: "", ALL: "", TEACHER: "the teacher"}.get(selection, selection)
        k = {ALL: ALL, TEACHER: ABSENT}.get(selection, heads)
        rows.append((k, chosen, d_state or ABSENT, n_done if n_done == n else f"{n_done} of {n}"))
    names = pd.MultiIndex.from_product([[""], ["heads", "chosen", "state", "seeds"]])
    return pd.DataFrame(rows, settings.index, names, dtype=object)


def _means(results: SweepResults, names: pd.DataFrame, columns: list[Column]) -> pd.DataFrame:
    """Return the means over seeds, below the number of questions and the accuracy of guessing."""
    table = value_table(names, columns, *results.figures)
    table["", f"MB at {results.context:,}"] = [f"{size / 1e6:.3f}" for size in results.settings.bytes]
    head = pd.DataFrame("", [0, 1], table.columns)
    head["", "chosen"] = ["questions a seed", "guessing"]
    for column in columns:
        n, chance = results.questions(column.name), results.chance(column.name)
        texts = [ABSENT if math.isnan(n) else f"{n:,.0f}", "" if math.isnan(chance) else f"{100 * chance:.1f}"]
        if (column.group, column.header) in table:
            head[column.group, column.header] = texts
    return pd.concat([head, table])


def _changes(results: SweepResults, names: pd.DataFrame, columns: list[Column]) -> list[Block]:
    settings = results.settings
    if TEACHER not in settings.index:
        return []
    students = without(settings, TEACHER)
    columns = [column for column in columns if column.name in results.rows and column.name != "top1_agreement"]
    table = without(names, TEACHER).iloc[:, :3]
    for group in (KNOWLEDGE, RETRIEVAL):
        if of_group := [c.name for c in columns if c.group == group and "choice" not in c.name]:
            shown = [frame.loc[students.index] for frame in results.against_teacher(of_group)]
            table = value_table(table, [Column("all", group, group="coverage, %")], *shown)
    ratios = results.against_teacher([column.name for column in columns])[0].loc[students.index]
    ratios = ratios.assign(memory=students.bytes / settings.loc[TEACHER].bytes.max())
    return [change_table(table, [*columns, Column("memory", "memory")], ratios), CHANGE]


def _needed(results: SweepResults) -> list[Block]:
    """Name the fewest heads with most of the teacher's retrieval, by selection and state."""
    quality = results.quality("retrieval")
    if quality is None or TEACHER not in results.settings.index:
        return []
    kept = without(results.against_teacher([quality.name])[0], NONE, ALL).reset_index()
    kept["enough"] = kept.heads.where(kept["all"] >= NEEDED)
    found = kept.groupby(["selection", "d_state"], sort=False).agg({"enough": "min", "heads": "max"})
    texts = found.enough.map("{:.0f}".format).where(found.enough.notna(), "> " + found.heads.astype(str))
    table = texts.unstack().rename(columns=lambda d_state: f"state {d_state}")
    note = f"Fewest heads, of those that were run, that keep {100 * NEEDED:.0f} % of the teacher's retrieval"
    return [] if kept.empty else [table.rename_axis("chosen").reset_index(), f"{note} ({quality.header[:-3]})."]


def _memory(results: SweepResults) -> list[Block]:
    """Show the settings on the Pareto front."""
    quality = results.quality("retrieval")
    if quality is None:
        return []
    found = results.front(quality)
    return [results.front_table(quality, found).rename(columns={"student": "on the front"})]


def _made(results: SweepResults) -> list[Block]:
    """Describe the grid, the training and the versions, as far as sweep.json has them."""
    record, made = results.record, []
    if "grid" in record:
        grid = {name.replace("_", "-"): ",".join(map(str, values)) for name, values in record["grid"].items()}
        grid["seeds"] = str(len(record["grid"].get("seeds", [])))
        flags = [f"--{name} {values}" for name, values in grid.items()]
        flags += [] if record.get("share_alignment", True) else ["--no-share"]
        recipe = [record["command"]] if record.get("command") else []
        made.append(f"`{' '.join(['hybrid-distill sweep', *recipe, *flags])}`")
    if "train_seconds" in results.rows:
        made.append(f"The students' own stages took {duration(results.students['train_seconds'].sum())} together.")
    if versions := record.get("versions"):
        made.append(", ".join(f"{name} {version}" for name, version in versions.items()) + ".")
    return made


def _draw(results: SweepResults, folder: Path) -> dict[str, list[Figure]]:
    """Draw the figures for which there are results; return them by name."""
    qualities = [quality for name in ("retrieval", "perplexity") if (quality := results.quality(name))]
    rows = [_row(results, quality) for quality in qualities]
    retrieval = [row for row in rows if row.percent]

    def varied(rows: list[Row], column: str) -> list[Row]:
        return [row for row in rows if row.points[column].nunique() > 1]

    groups = {"knowledge-focused": ["knowledge"]} if "knowledge" in results.rows else {}
    groups |= {"retrieval-heavy": [f"kv_generation_{n}" for n in results.pair_sizes]} if results.pair_sizes else {}
    covered, first = list[Row](), ""
    if TEACHER in results.settings.index and groups:
        parts = [_points(*results.against_teacher(names), "all", 100).assign(group=g) for g, names in groups.items()]
        points = pd.concat(parts)
        first = points.selection.iloc[0] if len(points) else ""
        shown = points.loc[points.selection == first]
        covered = [Row(shown, "student, of what the teacher has", True, {"teacher": 100})]
    by_group = f"Coverage, student over teacher, by group of tasks; heads: {first}"
    by_memory = (
        f"Quality against the memory of one sequence after {results.context:,} tokens: keys, values, states and "
        "convolutions. On the line are the settings that none beats in one without losing in the other; labels: "
        "heads / state."
    )
    return {
        "coverage": _panels(folder / "coverage.png", by_group, covered, "d_state", "group", "heads"),
        "heads": _panels(
            folder / "heads.png", "Against heads kept, by how they are chosen", varied(rows, "heads"),
            "selection", "d_state", "heads",
        ),
        "states": _panels(
            folder / "states.png", "Retrieval against state size, by heads kept", varied(retrieval, "d_state"),
            "selection", "heads", "d_state",
        ),
        "selection": _panels(
            folder / "selection.png", "How heads are chosen", varied(retrieval, "selection"),
            "d_state", "selection", "heads",
        ),
        "pareto": _pareto(results, qualities, folder / "pareto.png", by_memory),
    }  # fmt: skip


def _row(results: SweepResults, quality: Column) -> Row:
    """Return a row of panels for one measure, with levels for the teacher and for guessing."""
    mean, margin = results.figures
    levels = {"guessing": quality.scale * results.chance(quality.name)}
    if TEACHER in mean.index:
        levels["teacher"] = quality.scale * mean.loc[TEACHER][quality.name].iloc[0]
    levels = {name: level for name, level in levels.items() if not math.isnan(level)}
    label = quality.header.removesuffix(", %") + " (lower is better)" * (quality.name in NO_SHARES)
    points = _points(mean, margin, quality.name, quality.scale)
    return Row(points, label, quality.name not in NO_SHARES, levels)


def _points(mean: pd.DataFrame, margin: pd.DataFrame, name: str, scale: float) -> pd.DataFrame:
    """Return students with recurrent heads as points; those without kept heads belong to every selection."""
    rows = pd.DataFrame({"y": scale * mean[name], "error": scale * margin[name]}).dropna(subset=["y"]).reset_index()
    none = rows[rows.selection == NONE]
    present = [selection for selection in NAMES if (rows.selection == selection).any()] or ["top"]
    texts = pd.CategoricalDtype(list(NAMES.values()), ordered=True)
    parts = [pd.concat([none, rows[rows.selection == name]]).assign(selection=NAMES[name]) for name in present]
    return pd.concat(parts).astype({"selection": texts}).sort_values("heads", kind="stable")


def _panels(path: Path, caption: str, rows: list[Row], panel: str, line: str, x: str) -> list[Figure]:
    """Draw rows of panels: one panel per value of ``panel``, one line per value of ``line``."""
    words = {"heads": "{} heads", "d_state": "state {}"}
    labels = {"heads": "heads kept", "d_state": "state size of the recurrent heads"}
    styles = {text: look(selection) for selection, text in NAMES.items()}
    shown, looks = [], {}
    for row in rows:
        points = row.points.sort_values([panel, x], kind="stable")
        texts = {name: [words.get(c, "{}").format(value) for value in points[c]] for name, c in
                 (("panel", panel), ("line", line))}  # fmt: skip
        shown.append(replace(row, points=points.assign(x=points[x], **texts)))
        for value in points[line].sort_values().unique():
            looks.setdefault(words.get(line, "{}").format(value), styles.get(value, LOOKS[len(looks) % len(LOOKS)]))
    return draw_lines(path, f"{caption}; {BARS}.", shown, looks, labels[x])


def _pareto(results: SweepResults, qualities: list[Column], path: Path, caption: str) -> list[Figure]:
    """Draw quality against bytes: the settings, and their Pareto front."""
    if not qualities or not has_matplotlib():
        return []
    with figure(path, 1, len(qualities), size=(4.9 * len(qualities) + 0.6, 4.5)) as grid:
        for quality, axes in zip(qualities, grid[0]):
            is_share = quality.name not in NO_SHARES
            every, best = results.compared(quality), results.front(quality)
            every, best = (frame.assign(y=quality.scale * frame["mean"]) for frame in (every, best))
            every = without(every, TEACHER) if ALL in every.index else every
            axes.plot(best.bytes, best.y, drawstyle="steps-post", color=GREY, linewidth=1.3, label="front")
            for selection, found in every.groupby(level=0, sort=False):
                name = NAMES.get(str(selection), "no heads" if selection == NONE else "teacher")
                color, marker, _ = look(str(selection))
                points = axes.scatter(found.bytes, found.y, color=color, marker=marker, zorder=3, label=name)
                settings = (" / ".join(map(str, setting[1:])) for setting in found.index)
                titles = zip(settings, map(size_text, found.bytes), found.y)
                name_points(points, [f"{name}: {setting}, {size}, {y:.4g}" for setting, size, y in titles])
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(lambda value, _: size_text(value).replace(".00", "").replace(".0", ""))
            axes.set_title(quality.header + " (lower is better)" * (not is_share), fontsize=10)
            if is_share:
                percent_axis(axes)
            last = 0.0
            for (selection, heads, d_state), size, y in zip(best.index, best.bytes, best.y):
                if size > 1.4 * last:  # else it would overlap the previous label
                    text = "all" if selection in (ALL, TEACHER) else f"{heads} / {d_state}"
                    axes.annotate(text, (size, y), (-5, 6), textcoords="offset points", fontsize=8, ha="right")
                    last = size
        legend(grid)
        grid[0, 0].figure.supxlabel(f"held by one sequence after {results.context:,} tokens", fontsize=10)
    return [as_block(path, caption, grid)]
