"""The text of report.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...io import write_text
from ...plan import HeadId
from ...scoring import HeadScores
from .figures import Figure, draw_figures, heads_section
from .finding import finding, percent
from .record import HeadMap, Record, read_record
from .tables import ABSENT, change_table, markdown_table, results_table, size_table, with_error

HEAD_COLUMNS = ("KV accuracy, points", "answer's log-probability, nats", "plain text, nats per token")


def write_report(directory: str | Path) -> Path:
    """Write ``report.md`` and its PNG files into a run or compare directory; returns the path of report.md.

    What a run lacks is listed in the report. Raises ValueError for a directory that is neither.
    """
    directory = Path(directory)
    record = read_record(directory)
    report = directory / "report.md"
    write_text(report, render(record, draw_figures(record, directory)))
    return report


def render(record: Record, figures: Sequence[Figure]) -> str:
    """The report as Markdown."""
    sections = [
        f"# {record.title}",
        f"**{finding(record.teacher, record.students, record.n_pairs)}**",
        _results(record),
        _retrieval(record, figures),
        *(_heads(head_map, figures) for head_map in record.head_maps),
        _with_figures("Training", figures),
        _with_figures("Memory", figures),
        _missing(record),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _results(record: Record) -> str:
    parts = ["## Results", results_table(record.rows, record.n_pairs, n_heads=record.n_heads)]
    students = [row for row in record.rows if row.selection != "teacher"]
    if record.teacher is not None and students:
        parts.append(change_table(record.teacher, students, record.n_pairs))
    return "\n\n".join([*parts, _notes(record)])


def _notes(record: Record) -> str:
    """What the columns mean, how many questions were asked, and what guessing gives."""
    chance = f"{percent(1 / record.n_pairs)} for KV retrieval with {record.n_pairs} pairs"
    if record.knowledge_chance:
        chance += f", {percent(record.knowledge_chance)} for knowledge"
    notes = [f"± is one standard error: binomial, or over the draws for a mean. Chance level: {chance}."]
    if record.questions:
        notes.append("Questions: {} for each dictionary size, {} on knowledge.".format(*record.questions))
    notes += [
        "Perplexity: per token of held-out text.",
        "Agreement: share of its tokens where student and teacher expect the same next token.",
        "Cache: keys and values of one sequence in 16-bit numbers, states in 32-bit, 1 MB = 1e6 bytes; the few inputs "
        "that the convolutions remember do not grow and stand beside it.",
    ]
    return " ".join(notes)


def _retrieval(record: Record, figures: Sequence[Figure]) -> str:
    title = "Retrieval by dictionary size"
    tables = [
        f"{reading}, %:\n\n{size_table(record.rows, name)}"
        for name, reading in (("kv_generation", "By generation"), ("kv_choice", "By choice"))
        if any(row.by_size(name) for row in record.rows)
    ]
    return "\n\n".join([_with_figures(title, figures) or f"## {title}", *tables]) if tables else ""


def _heads(head_map: HeadMap, figures: Sequence[Figure]) -> str:
    """Heat map, and the head of the ranking: ten heads, or all that were kept up to twenty."""
    title, scores = heads_section(head_map), head_map.scores
    shown = scores.ranking()[: max(10, min(len(head_map.kept), 20))]
    lines = [
        [str(rank), str(head), "yes" if head in head_map.kept else "", *_head_cells(scores, head)]
        for rank, head in enumerate(shown, start=1)
    ]
    facts = {name: value for name, value in scores.provenance.items() if isinstance(value, str | int)}
    method = facts.pop("method", "scores")
    parts = [
        _with_figures(title, figures) or f"## {title}",
        f"What a single head is worth ({method}), ± one standard error:",
        markdown_table(["rank", "head", "kept", *HEAD_COLUMNS], lines),
    ]
    if facts:
        parts.append(f"Measured with {', '.join(f'{name} {value}' for name, value in facts.items())}.")
    return "\n\n".join(parts)


def _head_cells(scores: HeadScores, head: HeadId) -> list[str]:
    tables = (
        (scores.logprob_drop_LH, scores.logprob_se_LH, 3),
        (scores.control_drop_LH, scores.control_se_LH, 4),
    )
    cells = [with_error(100 * scores.accuracy_drop_LH[head].item(), 100 * scores.accuracy_se_LH[head].item(), 1)]
    for drop_LH, error_LH, digits in tables:
        if drop_LH is None or error_LH is None:
            cells.append(ABSENT)
        else:
            cells.append(with_error(drop_LH[head].item(), error_LH[head].item(), digits))
    return cells


def _with_figures(title: str, figures: Sequence[Figure]) -> str:
    """A section of figures, each with its caption; empty without figures."""
    of_section = [figure for figure in figures if figure.section == title]
    shown = [f"![{figure.caption}]({figure.file})\n\n*{figure.caption}*" for figure in of_section]
    return "\n\n".join([f"## {title}", *shown]) if shown else ""


def _missing(record: Record) -> str:
    return "## Missing\n\n" + "\n".join(f"- {what}" for what in record.missing) if record.missing else ""
