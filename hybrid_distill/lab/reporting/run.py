"""Report of a run (report.md, report.html and figures), from the files on disk alone."""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd

from .document import (
    ABSENT,
    NO_FIGURES,
    Block,
    Column,
    Figure,
    Section,
    change_table,
    pairs_of,
    sizes,
    task_name,
    value_table,
    with_error,
    write_report_files,
    zeroed_section,
)
from .figures import Look, PanelRow, draw_lines, has_matplotlib, look, shades_of
from .glance import READINGS, draw_glance, reading_shown
from .heads import score_map, score_table
from .record import CONTROL, STUDENT, TEACHER, RunRecord, read_run
from .speed import speed_table

NOTE = (
    "± is one standard error: binomial. "
    "Perplexity: per token of held-out text. "
    "Agreement: share of its tokens where student and teacher expect the same next token."
)
CACHE = (
    "Keys and values of one sequence in 16-bit numbers, states in 32-bit, 1 MB = 1e6 bytes. "
    "The few inputs that the convolutions remember do not grow and stand beside it."
)

CONTROLLED = (
    "Control: the teacher itself, trained through the stages that train whole models. What it loses, "
    "the training costs, not the heads."
)
RELATIVE = (
    "(student - guessing) / (teacher - guessing): 100 % for a student as good as its teacher, 0 % "
    "for one that guesses. Absent where the teacher itself is not above guessing by two standard errors."
)


def write_report(directory: str | Path) -> Path:
    """Write ``report.md`` with its PNG files, and ``report.html``, into a run's directory.

    Returns the path of report.html. The report lists what is missing. Raises as `read_run` does.
    """
    folder = Path(directory)
    record = read_run(folder)
    return write_report_files(folder, record.title, _sections(record, folder))


def _sections(record: RunRecord, folder: Path) -> list[Section]:
    """Return the report's sections; draw their figures into the folder."""
    columns = _columns(record.models)
    names = _names(record)
    missing = list(record.missing)
    if not has_matplotlib():
        missing.append(NO_FIGURES)
    return [
        Section("", draw_glance(record, folder / "glance.png")),
        Section("Results", _results(record, names, columns)),
        Section("What the student keeps", _kept(record)),
        zeroed_section(names, columns, record.models, "recurrence"),
        zeroed_section(names, columns, record.models, "window"),
        Section("Retrieval by dictionary size", _retrieval(record, names, folder)),
        Section("Head scores", _head_blocks(record, folder)),
        Section("Training", _training(record.losses, folder)),
        Section("Memory", [*_cache_figure(record, folder), *_cache_table(record.models)]),
        Section("Speed", _speed(record)),
        Section("Missing", [missing] if missing else []),
    ]


def _columns(models: pd.DataFrame) -> list[Column]:
    n_pairs = pairs_of(models, stated=None)
    far = []
    for n_far_pairs in sizes(models, "far_choice"):
        far.append(Column(f"far_choice_{n_far_pairs}", f"far away ({n_far_pairs} pairs), %"))
    return [
        Column("knowledge", "knowledge, %"),
        Column(f"kv_choice_{n_pairs}", f"KV by choice ({n_pairs} pairs), %"),
        Column(f"kv_generation_{n_pairs}", f"KV by generation ({n_pairs} pairs), %"),
        *far,
        Column("perplexity", "perplexity", 1, 3),
        Column("top1_agreement", "agreement with teacher, %"),
        Column("cache_bytes_4096", "cache at 4096, MB", 1e-6, 3),
    ]


def _names(record: RunRecord) -> pd.DataFrame:
    """Return the first columns of a table of models."""
    kept = pd.Series(ABSENT, record.models.index)
    if record.plan is not None:
        n_heads = record.plan.n_layers * record.plan.n_heads
        kept[kept.index.isin([TEACHER, CONTROL])] = f"{n_heads} of {n_heads}"
        kept[STUDENT] = f"{record.plan.k} of {n_heads}"
    return pd.DataFrame({("", "model"): kept.index, ("", "heads kept"): kept})


def _looks(record: RunRecord) -> dict[str, Look]:
    return {name: look(name) for name in record.models.index}


def _results(record: RunRecord, names: pd.DataFrame, columns: list[Column]) -> list[Block]:
    """Show the figures, and the student's changes relative to the teacher."""
    models = record.models
    blocks: list[Block] = [value_table(names, columns, models, record.errors)]
    if TEACHER in models.index:
        # The teacher agrees with itself.
        changing = [column for column in columns if column.name != "top1_agreement"]
        ratios = models.loc[[STUDENT]] / models.loc[TEACHER].replace(0, math.nan)
        label = pd.DataFrame({("", "change to the teacher"): [STUDENT]})
        blocks.append(change_table(label, changing, ratios))
    if record.questions:
        blocks.append(record.questions)
    if CONTROL in models.index:
        blocks.append(CONTROLLED)
    if 0 < record.text_length < record.window:
        blocks.append(
            f"The held-out texts have {record.text_length:.0f} tokens on average, fewer than the window of "
            f"{record.window}: what the student loses further back does not show here, nor in dictionaries that fit "
            "into the window. It shows in dictionaries that are far away (--evaluation.distance), and beside a window "
            "below 512 in longer texts (--evaluation.texts)."
        )
    return [*blocks, NOTE]


def _kept(record: RunRecord) -> list[Block]:
    """Show the student's accuracies relative to guessing and to the teacher."""
    if not record.kept:
        return []
    cells = [with_error(*kept, scale=100) if kept else ABSENT for kept in record.kept.values()]
    table = {"task": map(task_name, record.kept), "relative score, %": cells}
    return [pd.DataFrame(table), RELATIVE]


def _speed(record: RunRecord) -> list[Block]:
    return [] if record.speed.empty else [speed_table(record.speed)]


def _retrieval(record: RunRecord, names: pd.DataFrame, folder: Path) -> list[Block]:
    """Draw the accuracies of one reading by dictionary size; show those of both."""
    shown = reading_shown(record)[0] if record.kept else "kv_generation"
    points = _by_size(record, shown, 100)
    blocks: list[Block] = [
        *draw_lines(
            folder / "kv_retrieval.png",
            f"Accuracy {READINGS[shown]}, by the number of pairs in the dictionary; "
            "bars: one standard error.",
            [PanelRow(points, f"KV retrieval {READINGS[shown]}", percent=True)],
            _looks(record),
            "pairs in the dictionary",
        )
    ]
    for name, reading in READINGS.items():
        columns = [Column(f"{name}_{size}", f"{size} pairs") for size in sizes(record.models, name)]
        if columns:
            table = value_table(names.iloc[:, :1], columns, record.models, record.errors)
            blocks += [f"{reading.capitalize()}, %:", table]
    return blocks


def _head_blocks(record: RunRecord, folder: Path) -> list[Block]:
    """Show the top ten heads of the ranking, or more if more were kept, up to twenty."""
    scores = record.scores
    if scores is None:
        return []
    kept = record.plan.kept if record.plan else ()
    facts = {name: fact for name, fact in scores.provenance.items() if isinstance(fact, str | int)}
    method = facts.pop("method", "scores")
    n_shown = max(10, min(len(kept), 20))
    loss = "Loss without each head"
    if scores.is_additive:
        loss = "Share of each head in what windows lose"
    blocks: list[Block] = [
        *score_map(scores, folder / "heads.png", kept=kept, label=STUDENT),
        f"{loss} ({method}), ± one standard error:",
        score_table(scores, top=n_shown, kept=kept),
    ]
    if record.unit != "head":
        blocks.append(
            f"The plan keeps whole units ({record.unit}), ranked as such: of two heads the better one may be replaced."
        )
    if facts:
        conditions = ", ".join(f"{name} {fact}" for name, fact in facts.items())
        blocks.append(f"Measured with {conditions}.")
    return blocks


def _training(losses: pd.DataFrame, folder: Path) -> list[Figure]:
    """Draw the losses of alignment by layer and those of distillation, in a panel for each stage."""
    is_total = losses.line == "loss"
    by_layer = _by_stage(losses.loc[~is_total])
    layers = sorted(by_layer.line.unique(), key=lambda name: int(name.rpartition(".")[2]))
    alignment = draw_lines(
        folder / "alignment_loss.png",
        "Layer-to-layer alignment: each layer's loss on the teacher's own inputs (running mean).",
        [PanelRow(by_layer, "alignment loss")],
        dict(zip(layers, shades_of(len(layers)))),
        "optimizer step",
        evenly_spaced=False,
        log_scale=True,
    )
    total = _by_stage(losses.loc[is_total & ~losses.stage.isin(by_layer.stage)])
    distillation = draw_lines(
        folder / "distillation_loss.png",
        "End-to-end distillation: loss against the teacher's predictions (running mean).",
        [PanelRow(total.assign(line=STUDENT), "distillation loss")],
        {STUDENT: look(STUDENT)._replace(marker="")},
        "optimizer step",
        evenly_spaced=False,
        log_scale=True,
    )
    return [*alignment, *distillation]


def _by_stage(losses: pd.DataFrame) -> pd.DataFrame:
    """Give each stage a panel, with its name if there are several."""
    if losses.stage.nunique() > 1:
        return losses.assign(panel=losses.panel + ", " + losses.stage)
    return losses


def _cache_figure(record: RunRecord, folder: Path) -> list[Figure]:
    points = _by_size(record, "cache_bytes", 1e-6)
    return draw_lines(
        folder / "cache.png",
        "Bytes that the cache of one sequence takes, by the length of the context.",
        [PanelRow(points, "cache of one sequence, MB")],
        _looks(record),
        "tokens in the context",
        evenly_spaced=False,
    )


def _cache_table(models: pd.DataFrame) -> list[Block]:
    lengths = sizes(models, "cache_bytes")
    if len(lengths) < 2:
        return []
    models = models.dropna(subset=f"cache_bytes_{lengths[-1]}")
    table = {"model": list(models.index)}
    for length in lengths:
        table[f"at {length:,}, MB"] = _scaled(models[f"cache_bytes_{length}"], 1e-6, ".3f")
    # Beyond every window a cache is a line: a fixed part, and the same bytes for each further token.
    longest = models[f"cache_bytes_{lengths[-1]}"]
    second = models[f"cache_bytes_{lengths[-2]}"]
    per_token = (longest - second) / (lengths[-1] - lengths[-2])
    fixed = longest - per_token * lengths[-1]
    table["per token, kB"] = _scaled(per_token, 1e-3, ".3g")
    table["fixed, MB"] = _scaled(fixed, 1e-6, ".3g")
    table["convolutions (fixed), kB"] = _scaled(models["conv_state_bytes"], 1e-3, ".1f")
    return [pd.DataFrame(table), CACHE]


def _scaled(values: pd.Series, scale: float, form: str) -> list[str]:
    return [format(scale * value, form) for value in values]


def _by_size(record: RunRecord, name: str, scale: float) -> pd.DataFrame:
    """Return a figure measured at several sizes as points; empty if it was not measured."""
    # Sizes of caches are exact.
    errors_of_all = record.errors.reindex(columns=record.models.columns)
    points = []
    for size in sizes(record.models, name):
        column = f"{name}_{size}"
        values = scale * record.models[column]
        errors = scale * errors_of_all[column]
        part = pd.DataFrame({"x": size, "y": values, "error": errors, "line": values.index})
        points.append(part.assign(panel=""))
    return pd.concat(points).dropna(subset="y") if points else pd.DataFrame()
