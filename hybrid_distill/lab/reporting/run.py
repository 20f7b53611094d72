"""Reports (report.md, report.html and figures) on a run or a comparison of runs, from the files on disk alone.

A run directory holds evaluation.json, plan.json, scores.json, stages/*/metrics.jsonl and teacher/evaluation.json. A
comparison also holds compare.json, which names a run directory for each student, and optionally a run ``aligned``
whose stages the students share::

    {"students": [{"label", "dir", "selection", "k", "data"}, ...], "n_pairs": 8}

``selection`` is "none", "random" or the ranking of the heads; ``data`` names a control data set, if any.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd

from ...evaluation.evaluate import EvalResult
from ...export.card import binomial_error
from ...io import Record, read_json
from ...plan import HeadPlan
from ...scoring import HeadScores
from .document import (
    ABSENT,
    NO_FIGURES,
    Block,
    Column,
    Section,
    change_table,
    pairs_of,
    sizes,
    value_table,
    write_report_files,
    zeroed_section,
)
from .figures import Look, Row, draw_lines, has_matplotlib, look, shades_of
from .heads import score_map, score_table

T = TypeVar("T")
RANKED = ("top", "student", "restoration")
SHARED = "all heads, once for every student"
NOTE = (
    "± is one standard error: binomial, or over the draws for a mean. Perplexity: per token of held-out text. "
    "Agreement: share of its tokens where student and teacher expect the same next token. Cache: keys and values of "
    "one sequence in 16-bit numbers, states in 32-bit, 1 MB = 1e6 bytes; the few inputs that the convolutions remember "
    "do not grow and stand beside it."
)


class RunRecord:
    """Everything a report shows. Raises ValueError for a directory that is neither a run nor a comparison.

    ``models`` has a row for each model, the teacher first: label, selection, k, n_heads, data and figures; ``errors``
    has their standard errors. ``losses`` are the points of training curves. ``plan`` is shown with the head scores,
    ``missing`` lists what could not be read.
    """

    def __init__(self, directory: Path) -> None:
        directory = directory.resolve()
        comparison, self.title, self.questions = _comparison(directory), directory.name, ""
        self.missing = list[str]()
        self.plan: HeadPlan | None = None
        self.plan_of = ""
        rows, errors, losses = list[Record](), list[dict[str, float]](), [_losses(directory / "aligned", SHARED)]

        def add(result: EvalResult | None, **chosen: object) -> None:
            rows.append({**chosen, **(all_figures(result) if result else {})})
            errors.append(standard_errors(result) if result else {})

        teacher = self._read(EvalResult.load, directory / "teacher" / "evaluation.json", "the teacher's evaluation")
        chance: dict[str, float] = {}
        if teacher is not None:
            add(teacher, label="teacher", selection="teacher", data="")
            asked = f"{teacher.n_examples} for each dictionary size, {teacher.n_knowledge} on knowledge"
            self.questions = f"Questions: {asked}."
            chance = {name: 1 / int(name.rpartition("_")[2]) for name in teacher.figures() if name.startswith("kv_")}
            chance |= {"knowledge": teacher.knowledge_chance} if teacher.knowledge_chance else {}
        for entry in comparison["students"]:
            folder, data = directory / entry["dir"], entry.get("data", "")
            label = entry["label"] + (f" ({data})" if data else "")
            result = self._read(EvalResult.load, folder / "evaluation.json", f"the evaluation of {label!r}")
            plan = self._read(HeadPlan.load, folder / "plan.json", f"the plan of {label!r}")
            k, n_heads = (plan.k, plan.n_layers * plan.n_heads) if plan else (entry.get("k"), math.nan)
            add(result, label=label, selection=entry["selection"], data=data, k=k, n_heads=n_heads)
            losses.append(_losses(folder, label))
            if losses[-1].empty:
                self.missing.append(f"the loss curves of {label!r} (`{folder.name}/stages/*/metrics.jsonl`)")
            if self.plan is None and entry["selection"] in RANKED and not data:
                self.plan, self.plan_of = plan, label
        add(None, label="guessing", selection="guessing", data="", **chance)
        self.losses = pd.concat(losses)
        self.scores = self._read(HeadScores.load, directory / "scores.json", "head scores")
        self.models, self.errors = with_means(pd.DataFrame(rows), pd.DataFrame(errors))
        self.n_pairs = pairs_of(self.models, comparison.get("n_pairs"))

    def _read(self, load: Callable[[Path], T], path: Path, what: str) -> T | None:
        """Load a file, or note that it is missing."""
        try:
            return load(path)
        except ValueError as error:
            reason = "not there" if isinstance(error.__cause__, FileNotFoundError) else error
            self.missing.append(f"{what} (`{path.parent.name}/{path.name}`: {reason})")
            return None


def write_report(directory: str | Path) -> Path:
    """Write ``report.md`` with its PNG files, and ``report.html``, into a run or compare directory.

    Returns the path of report.md. The report lists what is missing. Raises as `RunRecord` does.
    """
    directory = Path(directory)
    record = RunRecord(directory)
    record.missing += [] if has_matplotlib() else [NO_FIGURES]
    return write_report_files(directory, record.title, _sections(record, directory))


def _comparison(directory: Path) -> Record:
    """Read compare.json; a run counts as a comparison of one student with the teacher."""
    path = directory / "compare.json"
    if path.is_file():
        comparison = read_json(path)
        students = comparison.get("students")
        if isinstance(students, list) and all({"label", "dir", "selection"} <= set(entry) for entry in students):
            return comparison
        raise ValueError(f"{path} has no students with label, dir and selection; make the comparison again.")
    if any((directory / name).exists() for name in ("config.json", "plan.json", "evaluation.json", "stages")):
        return {"students": [{"label": "student", "dir": ".", "selection": "student"}]}
    raise ValueError(
        f"{directory} is neither a run nor a comparison nor a sweep: it has no config.json, compare.json or "
        "results.csv. Pass the --out of `hybrid-distill run` or `sweep`."
    )


def all_figures(result: EvalResult) -> dict[str, float]:
    """Return an evaluation's figures, with and without the recurrent heads (`zeroed_section`)."""
    figures = result.figures()
    zeroed = result.recurrent_heads_zeroed
    if zeroed:
        for name, measured in zeroed["figures"].items():
            figures[f"whole_{name}"] = measured["whole"]
            figures[f"zeroed_{name}"] = measured["zeroed"]
        figures["recurrence_unused"] = float(zeroed["unused"])
    return figures


def standard_errors(result: EvalResult) -> dict[str, float]:
    """Return the binomial standard errors of an evaluation's accuracies."""
    n_questions = {"knowledge": result.n_knowledge}
    for size in result.kv_choice:
        n_questions[f"kv_choice_{size}"] = result.n_examples
        n_questions[f"kv_generation_{size}"] = result.n_examples
    figures = result.figures()
    errors = {}
    for name, n in n_questions.items():
        if n and name in figures:
            errors[name] = binomial_error(figures[name], n)
    return errors


def metrics(path: Path) -> list[Record]:
    """Read the complete lines of a metrics.jsonl; a killed process may have left a partial one."""
    records = []
    for line in path.read_text().splitlines():
        with suppress(ValueError):
            records.append(json.loads(line))
    return records


def _losses(folder: Path, label: str) -> pd.DataFrame:
    """Read the losses of a run's stages, and of every layer, as running means, one row per point.

    Leaves out skipped steps; a step repeated after a resume counts once.
    """
    points = []
    for path in sorted((folder / "stages").glob("*/metrics.jsonl")):
        stage = path.parent.name
        for record in metrics(path):
            if "step" not in record or "skipped" in record:
                continue
            losses = {"loss": record.get("loss"), **record.get("per_layer", {})}
            for line, loss in losses.items():
                points.append((label, stage, record["step"], line, loss))
    frame = pd.DataFrame(points, columns=["panel", "stage", "x", "line", "y"]).dropna()
    frame = frame.drop_duplicates(["stage", "x", "line"], keep="last")
    frame = frame.sort_values(["stage", "x"], kind="stable")
    frame = frame.loc[(frame.y > 0) & (frame.y < math.inf)]
    smooth = frame.groupby(["stage", "line"]).y.transform(_running_mean)
    return frame.assign(y=smooth)


def _running_mean(losses: pd.Series) -> Any:
    window = max(len(losses) // 40, 5)
    return losses.rolling(window, center=True, min_periods=1).mean()


def with_means(models: pd.DataFrame, errors: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return models and errors; after the random draws of one size, add their mean and its standard error."""
    models = models.reindex(columns=models.columns.union(["k", "n_heads"], sort=False))
    figures = models.columns.difference(["label", "selection", "data", "k", "n_heads"])
    for _, draws in models[models.selection == "random"].groupby(["k", "data"]):
        found = draws.loc[:, figures].dropna(how="all").astype(float)
        if len(found) > 1:
            k, data = draws.k.iloc[0], draws.data.iloc[0]
            label = f"{k:.0f} random heads (mean of {len(found)}{f', {data}' if data else ''})"
            place = draws.index[-1] + 0.5
            mean = draws.iloc[[-1]].assign(label=label, **found.mean()).set_axis([place])
            models = pd.concat([models, mean])
            errors = pd.concat([errors, pd.DataFrame([found.sem()], [place])])
    return models.sort_index(), errors.where(errors > 0).reindex(models.index).sort_index()


def _sections(record: RunRecord, directory: Path) -> list[Section]:
    """Return the report's sections; draw their figures into the directory."""
    models, errors, n_pairs = record.models, record.errors, record.n_pairs
    columns = [
        Column("knowledge", "knowledge, %"),
        Column(f"kv_choice_{n_pairs}", f"KV by choice ({n_pairs} pairs), %"),
        Column(f"kv_generation_{n_pairs}", f"KV by generation ({n_pairs} pairs), %"),
        Column("perplexity", "perplexity", 1, 3),
        Column("top1_agreement", "agreement with teacher, %"),
        Column("cache_bytes_128", "cache at 128, MB", 1e-6, 3),
        Column("cache_bytes_2048", "at 2048, MB", 1e-6, 3),
        Column("cache_bytes_4096", "at 4096, MB", 1e-6, 3),
        Column("conv_state_bytes", "convolutions, kB", 1e-3, 1),
    ]
    most = models.n_heads.max()
    kept = models.k.where(models.selection != "teacher", most)
    of = f" of {most:.0f}" if most > 0 else ""
    heads = [ABSENT if pd.isna(k) else f"{k:.0f}{of}" for k in kept]
    names = pd.DataFrame({("", "model"): models.label, ("", "heads kept"): heads})
    results: list[Block] = [value_table(names, columns, models, errors)]
    students = models[~models.selection.isin(["teacher", "guessing"])]
    if models.selection.iloc[0] == "teacher" and len(students):
        changed = [c for c in columns if c.name in models and c.name not in ("top1_agreement", "conv_state_bytes")]
        ratios = pd.DataFrame({c.name: students[c.name] / (models[c.name].iloc[0] or math.nan) for c in changed})
        label = pd.DataFrame({("", "change to the teacher"): students.label})
        results.append(change_table(label, changed, ratios))
    zeroed = zeroed_section(names, columns, models)
    looks = {label: look(selection, hollow=bool(data)) for label, selection, data in
             zip(models.label, models.selection, models.data)}  # fmt: skip
    caption = "Accuracy by generation, by the number of pairs in the dictionary; bars: one standard error."
    row = Row(_by_size(record, "kv_generation", 100), "KV retrieval by generation", percent=True)
    by_size: list[Block] = [
        *draw_lines(directory / "kv_retrieval.png", caption, [row], looks, "pairs in the dictionary")
    ]
    for name, reading in (("kv_generation", "By generation"), ("kv_choice", "By choice")):
        if shown := [Column(f"{name}_{size}", f"{size} pairs") for size in sizes(models, name)]:
            by_size += [f"{reading}, %:", value_table(names.iloc[:, :1], shown, models, errors)]
    caption = "Bytes that the cache of one sequence takes, by the length of the context."
    row = Row(_by_size(record, "cache_bytes", 1e-6), "cache of one sequence, MB")
    cache = draw_lines(directory / "cache.png", caption, [row], looks, "tokens in the context", even=False)
    return [
        Section("Results", [*results, *filter(None, [record.questions]), NOTE]),
        zeroed,
        Section("Retrieval by dictionary size", by_size),
        Section("Head scores", _head_blocks(record, directory)),
        Section("Training", _training(record.losses, directory, looks)),
        Section("Memory", cache),
        Section("Missing", [record.missing] if record.missing else []),
    ]


def _head_blocks(record: RunRecord, directory: Path) -> list[Block]:
    """Show the top ten heads of the ranking, or more if more were kept, up to twenty."""
    if record.scores is None:
        return []
    kept = record.plan.kept if record.plan else ()
    facts = {name: x for name, x in record.scores.provenance.items() if isinstance(x, str | int)}
    caption = f"What a single head is worth ({facts.pop('method', 'scores')}), ± one standard error:"
    table = score_table(record.scores, top=max(10, min(len(kept), 20)), kept=kept)
    made = f"Measured with {', '.join(f'{name} {value}' for name, value in facts.items())}."
    drawn = score_map(record.scores, directory / "heads.png", kept=kept, label=record.plan_of)
    return [*drawn, caption, table, *([made] if facts else [])]


def _training(losses: pd.DataFrame, directory: Path, looks: Mapping[str, Look]) -> list[Block]:
    """Draw the losses of alignment by layer, three models per row, and the losses of distillation."""
    layers = losses[losses.stage.str.contains("align") & (losses.line != "loss")]
    names = sorted(layers.line.unique(), key=lambda name: int(name.rpartition(".")[2]))
    panels = layers.panel.unique()
    rows = [Row(layers.loc[layers.panel.isin(panels[i : i + 3])], "alignment loss") for i in range(0, len(panels), 3)]
    ends = losses[losses.stage.str.contains("distill") & (losses.line == "loss")]
    end = Row(ends.assign(line=ends.panel, panel=""), "distillation loss")
    plain = {label: style._replace(marker="") for label, style in looks.items()}
    aligned = "Layer-to-layer alignment: each layer's loss on the teacher's own inputs (running mean)."
    distilled = "End-to-end distillation: loss against the teacher's predictions (running mean)."
    options = {"xlabel": "optimizer step", "even": False, "log": True}
    return [
        *draw_lines(
            directory / "alignment_loss.png", aligned, rows, dict(zip(names, shades_of(len(names)))), **options
        ),
        *draw_lines(directory / "distillation_loss.png", distilled, [end], plain, **options),
    ]


def _by_size(record: RunRecord, name: str, scale: float) -> pd.DataFrame:
    """Return a figure measured at several sizes as points; empty if it was not measured."""
    columns = {f"{name}_{size}": size for size in sizes(record.models, name)}
    if not columns:
        return pd.DataFrame()
    values, errors = (
        scale * frame.reindex(columns=list(columns)).rename(columns=columns) for frame in (record.models, record.errors)
    )
    points = values.melt(var_name="x", value_name="y", ignore_index=False)
    errors = errors.melt(value_name="error")["error"].to_numpy()
    return points.assign(line=record.models.label, panel="", error=errors).dropna(subset="y")
