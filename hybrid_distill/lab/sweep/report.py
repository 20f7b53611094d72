"""report.md, report.html and the figures of a sweep, finished or not, from its results.csv."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pandas as pd

from ...io import replacing
from ...progress import duration
from ..reporting import text_table
from ..reporting.document import (
    ABSENT,
    NO_FIGURES,
    Block,
    Column,
    Section,
    change_table,
    value_table,
    write_report_files,
    zeroed_section,
)
from ..reporting.figures import has_matplotlib
from .grid import ALL, NONE
from .measured import CONTEXT, SETTING, SweepResults, without
from .panels import draw_figures
from .paths import SweepPaths
from .results import TEACHER

NEEDED = 0.90
"""Share of the teacher's retrieval to keep, when selections are compared."""
KNOWLEDGE = "knowledge-focused"
RETRIEVAL = "retrieval-heavy"
TEXT = "plain text"
NO_TEACHER = "the teacher's evaluation, and with it all comparisons"
NOTE = (
    "± is half of the 95 % interval of the mean over seeds (Student's t); for a share, at most the distance to the "
    "farther of 0 and 100 %. A single seed has none. Guessing: naming any of a dictionary's values, or any of a "
    "question's choices. Perplexity is per token of held-out text. Agreement is the share of these tokens for which "
    "student and teacher expect the same next token. Memory is all that one sequence holds: keys and values in "
    "bfloat16, states, and the convolutions' inputs (`cache_bytes_L + conv_state_bytes` of results.csv), the "
    "largest of the seeds; 1 MB = 1e6 bytes."
)
CHANGE = (
    "Relative change of each number, student against teacher seed by seed. Coverage: student over teacher, the "
    "mean over a group's tasks; for retrieval-heavy these are the dictionaries of all sizes, by generation."
)


def write_sweep_report(
    out: str | Path,
    *,
    context: int = CONTEXT,
    to: str | Path | None = None,
) -> Path:
    """Write report.md with its PNG figures, report.html and the table into ``to``.

    ``to`` is the sweep's folder by default. Returns the path of report.html. Raises as
    `SweepResults.read` does.
    """
    results = SweepResults.read(out, context)
    source = SweepPaths(Path(out))
    target = SweepPaths(Path(to or out))
    target.out.mkdir(parents=True, exist_ok=True)
    if target.out.resolve() != source.out.resolve():
        _copy(source.table, target.table)
        _copy(source.record, target.record)
    return write_report_files(target.out, f"Sweep: {results.name}", _sections(results, target.out))


def _copy(source: Path, target: Path) -> None:
    if source.exists():
        with replacing(target) as temporary:
            shutil.copyfile(source, temporary)


def pareto_front(out: str | Path) -> str:
    """Describe the students that no other one beats in both quality and memory, smallest first.

    Quality is KV retrieval by generation, or perplexity if no cell has that. Raises as
    `SweepResults.read` does.
    """
    results = SweepResults.read(out, CONTEXT)
    quality = results.quality("retrieval") or results.quality("perplexity")
    if quality is None or results.students.empty:
        return "no cell is finished: there is no Pareto front yet."
    table = results.front_table(quality, results.front(quality))
    return f"Pareto front:\n{text_table(table)}"


def _sections(results: SweepResults, folder: Path) -> list[Section]:
    """Return the report's sections; draw their figures into the folder."""
    opening: list[Block] = [_extent(results)]
    sections = [Section("", opening)]
    if len(results.students):
        columns = _columns(results)
        names = _names(results.settings)
        means, _ = results.figures
        figures = draw_figures(results, folder, knowledge=KNOWLEDGE, retrieval=RETRIEVAL)
        opening += figures.pareto
        sections += [
            Section("Results", [_means(results, names, columns), NOTE], 2),
            zeroed_section(names, columns, means, "recurrence"),
            zeroed_section(names, columns, means, "window"),
            Section(
                "Against the teacher", [*figures.coverage, *_changes(results, names, columns)], 2
            ),
            Section("Heads kept", list(figures.heads)),
            Section("State size", list(figures.states)),
            Section("How heads are chosen", [*figures.selection, *_needed(results)]),
            Section("Memory", _memory(results)),
        ]
    missing = _missing(results)
    sections.append(Section("Missing", [missing] if missing else []))
    sections.append(Section("How it was made", _made(results)))
    return sections


def _extent(results: SweepResults) -> str:
    students = results.students
    n_cells = (results.rows.selection != TEACHER).sum()
    n_settings = len(students[SETTING].drop_duplicates())
    n_seeds = students.seed.nunique()
    seeds = "1 seed" if n_seeds == 1 else f"{n_seeds} seeds"
    return (
        f"{len(students)} of {n_cells} cells are finished, in {n_settings} settings, with {seeds}."
    )


def _missing(results: SweepResults) -> list[str]:
    """List what the report lacks."""
    missing = []
    unfinished = results.rows[results.rows.state != "done"]
    for row in unfinished.itertuples():
        reason = row.state if pd.isna(row.error) else row.error
        missing.append(f"{row.cell}: {reason}")
    if TEACHER not in results.settings.index:
        missing.append(NO_TEACHER)
    if not has_matplotlib():
        missing.append(NO_FIGURES)
    return missing


def _columns(results: SweepResults) -> list[Column]:
    columns = [Column("knowledge", "knowledge, %", group=KNOWLEDGE)]
    for n in results.pair_sizes:
        columns.append(Column(f"kv_generation_{n}", f"KV {n} pairs, %", group=RETRIEVAL))
    n = results.n_pairs
    columns.append(Column(f"kv_choice_{n}", f"by choice, {n} pairs, %", group=RETRIEVAL))
    columns.append(Column("perplexity", "perplexity", 1.0, 3, TEXT))
    columns.append(Column("top1_agreement", "agreement, %", group=TEXT))
    return columns


def _names(settings: pd.DataFrame) -> pd.DataFrame:
    """Return the first columns of a table of settings."""
    chosen_of = {NONE: "", ALL: "", TEACHER: "the teacher"}
    heads_of = {ALL: ALL, TEACHER: ABSENT}
    rows = []
    for setting, n_done, n in zip(settings.index, settings.n_done, settings.n):
        selection, heads, replacement = setting
        rows.append(
            (
                heads_of.get(selection, heads),
                chosen_of.get(selection, selection),
                replacement or ABSENT,
                n_done if n_done == n else f"{n_done} of {n}",
            )
        )
    columns = pd.MultiIndex.from_product([[""], ["heads", "chosen", "state", "seeds"]])
    names = pd.DataFrame(rows, settings.index, columns, dtype=object)
    all_alike = len(set(settings.n_done)) == 1 and (settings.n_done == settings.n).all()
    if all_alike:
        # The same in every row: it stands above the tables.
        return names.drop(columns=[("", "seeds")])
    return names


def _means(results: SweepResults, names: pd.DataFrame, columns: list[Column]) -> pd.DataFrame:
    """Return the means over seeds, below the number of questions and the accuracy of guessing."""
    table = value_table(names, columns, *results.figures)
    table["", f"MB at {results.context:,}"] = [
        f"{size / 1e6:.3f}" for size in results.settings.bytes
    ]
    head = pd.DataFrame("", [0, 1], table.columns)
    head["", "chosen"] = ["questions a seed", "guessing"]
    for column in columns:
        if (column.group, column.header) not in table:
            continue
        n_questions = results.questions(column.name)
        chance = results.chance(column.name)
        head[column.group, column.header] = [
            ABSENT if math.isnan(n_questions) else f"{n_questions:,.0f}",
            "" if math.isnan(chance) else f"{100 * chance:.1f}",
        ]
    return pd.concat([head, table])


def _changes(results: SweepResults, names: pd.DataFrame, columns: list[Column]) -> list[Block]:
    settings = results.settings
    if TEACHER not in settings.index:
        return []
    students = without(settings, TEACHER)
    compared = [column for column in columns if column.name in results.rows]
    # The teacher agrees with itself: a ratio to that is the figure again.
    compared = [column for column in compared if column.name != "top1_agreement"]
    # Numbers of seeds stand in the table of means.
    table = without(names, TEACHER).drop(columns=[("", "seeds")], errors="ignore")
    for group in (KNOWLEDGE, RETRIEVAL):
        own = []
        for column in compared:
            # Dictionaries count once, by generation.
            is_by_choice = "choice" in column.name
            if column.group == group and not is_by_choice:
                own.append(column.name)
        if own:
            means, margins = results.against_teacher(own)
            header = Column("all", group, group="coverage, %")
            table = value_table(
                table, [header], means.loc[students.index], margins.loc[students.index]
            )
    means, _ = results.against_teacher([column.name for column in compared])
    memory = students.bytes / settings.loc[TEACHER].bytes.max()
    ratios = means.loc[students.index].assign(memory=memory)
    return [change_table(table, [*compared, Column("memory", "memory")], ratios), CHANGE]


def _needed(results: SweepResults) -> list[Block]:
    """Name the fewest heads with most of the teacher's retrieval, by selection and state."""
    quality = results.quality("retrieval")
    if quality is None or TEACHER not in results.settings.index:
        return []
    means, _ = results.against_teacher([quality.name])
    kept = without(means, NONE, ALL).reset_index()
    if kept.empty:
        return []
    kept["enough"] = kept.heads.where(kept["all"] >= NEEDED)
    groups = kept.groupby(["selection", "replacement"], sort=False)
    fewest = groups.agg({"enough": "min", "heads": "max"})
    counts = fewest.enough.map("{:.0f}".format)
    # If no number was enough, more heads are needed than the most that were run.
    more_than_most = "> " + fewest.heads.astype(str)
    texts = counts.where(fewest.enough.notna(), more_than_most)
    table = texts.unstack()
    columns = [name for name in results.replacements if name in table]
    # These columns have no common name, unlike the unstacked ones; HTML would show it.
    table = table[columns].set_axis([f"state {name}" for name in columns], axis="columns")
    note = f"Fewest heads, of those that were run, that keep {100 * NEEDED:.0f} % of the teacher's retrieval"
    measure = quality.header.removesuffix(", %")
    return [table.rename_axis("chosen").reset_index(), f"{note} ({measure})."]


def _memory(results: SweepResults) -> list[Block]:
    """Show the settings on the Pareto front."""
    quality = results.quality("retrieval")
    if quality is None:
        return []
    table = results.front_table(quality, results.front(quality))
    return [table.rename(columns={"student": "on the front"})]


def _made(results: SweepResults) -> list[Block]:
    """Describe the grid, the training and the versions, as far as sweep.json has them."""
    record = results.record
    blocks: list[Block] = []
    if "grid" in record:
        blocks.append(f"`{_command(results)}`")
    if "train_seconds" in results.rows:
        spent = duration(results.students["train_seconds"].sum())
        blocks.append(f"The students' own stages took {spent} together.")
    versions = record.get("versions")
    if versions:
        blocks.append(", ".join(f"{name} {version}" for name, version in versions.items()) + ".")
    return blocks


def _command(results: SweepResults) -> str:
    """Return the command that makes the same grid."""
    record = results.record
    words = ["hybrid-distill sweep"]
    if record.get("command"):
        words.append(record["command"])
    for name, values in record["grid"].items():
        # Seeds are given by their number.
        value = str(len(values)) if name == "seeds" else ",".join(map(str, values))
        words.append(f"--{name.replace('_', '-')} {value}")
    if not record.get("share_alignment", True):
        words.append("--no-share")
    return " ".join(words)
