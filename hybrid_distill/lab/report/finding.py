"""The sentence that says what was found, computed from the numbers, whatever they show."""

from __future__ import annotations

from collections.abc import Sequence

from .record import RANKED, Row, with_means

# What the method predicts, relative to the teacher's accuracy by generation, and for knowledge in points.
RANKED_AT_LEAST = 0.95
BASELINE_AT_MOST = 0.50
KNOWLEDGE_WITHIN = 0.03
TEACHER_AT_LEAST = 0.50


def finding(teacher: Row | None, students: Sequence[Row], n_pairs: int) -> str:
    """One sentence: does the predicted contrast appear, by the constants above, and in which numbers.

    It appears when some choice of heads by score keeps the teacher's retrieval, no head and random heads
    (the mean, with several draws) lose half of it or more, and every student keeps the teacher's knowledge.
    Students of control data sets do not count.
    """
    key = f"kv_generation/{n_pairs}"
    rows = [row for row in with_means(students) if key in row.cells and not row.data]
    if teacher is None or key not in teacher.cells:
        return "Nothing can be concluded: the teacher's retrieval was not measured."
    if not rows:
        return "Nothing can be concluded: no student's retrieval was measured."
    top = teacher.cells[key].value
    task = f"{n_pairs}-pair dictionaries by generation"
    if top < TEACHER_AT_LEAST:
        return f"Nothing can be concluded: the teacher itself answers only {percent(top)} of {task}."
    ranked = [row for row in rows if row.selection in RANKED]
    baselines = _baselines(rows)
    if not ranked or not baselines:
        others = _listed([f"{row.label} {percent(row.cells[key].value)}" for row in rows])
        absent = "heads chosen by score" if baselines else "no head and with random heads"
        facts = f"Of {task} the teacher answers {percent(top)}, {others}"
        return f"{facts}; the contrast needs students with {absent} beside it."
    kept = [row.cells[key].value >= RANKED_AT_LEAST * top for row in ranked]
    lost = [row.cells[key].value <= BASELINE_AT_MOST * top for row in baselines]
    failures = ["" if ok else f", expected {100 * RANKED_AT_LEAST:.0f} % or more" for ok in kept]
    failures += ["" if ok else f", expected {100 * BASELINE_AT_MOST:.0f} % or less" for ok in lost]
    clauses: list[str] = []
    for row, failure in zip(ranked + baselines, failures):
        share = f"{100 * row.cells[key].value / top:.0f} %" + ("" if clauses else " of that")
        clauses.append(f"{row.label} {percent(row.cells[key].value)} ({share}{failure})")
    knowledge, unharmed = _knowledge(teacher, rows)
    appears = any(kept) and all(lost) and unharmed
    verdict = "Heads chosen by score carry retrieval" if appears else "The expected contrast did NOT appear"
    return f"{verdict}: of {task} the teacher answers {percent(top)}, {_listed(clauses)}; {knowledge}."


def _baselines(rows: Sequence[Row]) -> list[Row]:
    """Students without a head, and with random heads (their mean, with several draws of one size)."""
    averaged = {row.k for row in rows if row.draws > 1}
    random = [row for row in rows if row.selection == "random" and (row.draws > 1 or row.k not in averaged)]
    return [row for row in rows if row.selection == "none"] + random


def _knowledge(teacher: Row, rows: Sequence[Row]) -> tuple[str, bool]:
    """A clause on knowledge, and whether every student kept it."""
    known = [row for row in rows if "knowledge" in row.cells and row.draws == 1]
    if "knowledge" not in teacher.cells or not known:
        return "knowledge was not measured", False
    expected = teacher.cells["knowledge"].value
    gap, label = max((abs(row.cells["knowledge"].value - expected), row.label) for row in known)
    points, level = f"{100 * gap:.1f} points", f"the teacher's {percent(expected)}"
    if round(gap, 6) <= KNOWLEDGE_WITHIN:
        return f"knowledge of every student is within {points} of {level}", True
    limit = f"expected {100 * KNOWLEDGE_WITHIN:.0f} or less"
    return f"knowledge of {label} is {points} away from {level}, {limit}", False


def _listed(items: Sequence[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def percent(share: float) -> str:
    """0.973 as "97.3 %"."""
    return f"{100 * share:.1f} %"
