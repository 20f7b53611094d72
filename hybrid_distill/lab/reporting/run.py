"""Write report.md and its figures for a run or a comparison of runs, from the files on disk alone.

A run directory holds evaluation.json, plan.json, scores.json, stages/*/metrics.jsonl and
teacher/evaluation.json. A compare directory holds scores.json and compare.json, which names the teacher's
evaluation and one run directory a student, and perhaps a run ``aligned`` whose stages the students share:

    {"students": [{"name", "label", "dir", "selection", "k"}, ...], "teacher": "teacher/evaluation.json"}

``selection`` is "none", "random", or what ranked the heads: "top" (single ablation), "restoration" ... A student may
also have "data", the name of a control data set, and "scores", the file of the ranking (default scores.json). Optional
at the top: "title", and "n_pairs", the dictionary size of the results.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
import pandas as pd

from ...evaluation.evaluate import EvalResult
from ...io import Record, write_text
from ...plan import HeadId, HeadPlan
from ...scoring import HeadScores
from .document import Block, Figure, Section, render
from .figures import GREY, can_draw, figure, log_ticks, look, percent_axis
from .heads import score_map, score_table
from .tables import ABSENT, percent_change, with_error

if TYPE_CHECKING:
    from matplotlib.axes import Axes

T = TypeVar("T")
DEFAULT_PAIRS = 16
RANKED = ("top", "top_k", "restoration", "joint")


@dataclass(frozen=True)
class Model:
    """One model: how its heads were chosen, what was measured (names of `EvalResult.figures`), how its stages trained.

    ``data`` names a control data set, empty for the main one. ``draws`` is the number of models that this one is the
    mean of. ``losses`` has a frame for each stage: the loss, and that of every layer, by step.
    """

    label: str
    selection: str
    k: int | None = None
    values: Mapping[str, float] = field(default_factory=dict)
    errors: Mapping[str, float] = field(default_factory=dict)
    data: str = ""
    draws: int = 1
    losses: Mapping[str, pd.DataFrame] = field(default_factory=dict)

    def by_size(self, name: str) -> dict[int, float]:
        """Return what was measured at several sizes (``cache_bytes``, ``kv_generation``), ascending."""
        found = {key.removeprefix(f"{name}_"): value for key, value in self.values.items() if key.startswith(name)}
        return dict(sorted((int(size), value) for size, value in found.items()))


class HeadMap(NamedTuple):
    """One file of head scores, and the heads that the student ``label`` kept by it."""

    name: str
    scores: HeadScores
    kept: frozenset[HeadId]
    label: str


@dataclass
class RunRecord:
    """Everything a report shows; ``missing`` lists what could not be read."""

    title: str
    n_pairs: int = 0
    n_heads: int | None = None
    models: list[Model] = field(default_factory=list)
    head_maps: list[HeadMap] = field(default_factory=list)
    teacher: EvalResult | None = None
    shared_losses: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    def read(self, load: Callable[[Path], T], path: Path, what: str) -> T | None:
        """Load a file; note what is missing where that cannot be."""
        try:
            return load(path)
        except ValueError as error:
            reason = "not there" if isinstance(error.__cause__, FileNotFoundError) else error
            self.missing.append(f"{what} (`{path.parent.name}/{path.name}`: {reason})")
            return None

    def read_teacher(self, path: Path) -> None:
        self.teacher = self.read(EvalResult.load, path, "the teacher's evaluation")
        if self.teacher is not None:
            self.add(Model("teacher", "teacher"), self.teacher)

    def add(self, model: Model, result: EvalResult | None) -> None:
        """Add a model with what was measured."""
        measured = {} if result is None else {"values": result.figures(), "errors": errors(result)}
        self.models.append(replace(model, **measured))


def write_report(directory: str | Path) -> Path:
    """Write ``report.md`` and its PNG files into a run or compare directory; return the path of report.md.

    The report lists what the directory lacks. Raises ValueError for a directory that is neither.
    """
    directory = Path(directory)
    record = read_record(directory)
    figures: dict[str, list[Block]] = {}
    if can_draw():
        figures = _draw(record, directory)
    else:
        record.missing.append("the figures: matplotlib is not installed (`pip install matplotlib`)")
    write_text(directory / "report.md", render(record.title, _sections(record, figures)))
    return directory / "report.md"


def _sections(record: RunRecord, figures: Mapping[str, list[Block]]) -> list[Section]:
    """Return the report's sections; ``figures`` are the figures of a section by its title."""
    models, n_pairs = record.models, record.n_pairs
    results: list[Block] = [results_table(models, n_pairs, n_heads=record.n_heads)]
    if record.teacher is not None and len(models) > 1:
        results.append(_change_table(models[0], models[1:], n_pairs))
    by_size = [
        block
        for name, reading in (("kv_generation", "By generation"), ("kv_choice", "By choice"))
        if any(model.by_size(name) for model in models)
        for block in (f"{reading}, %:", _size_table(models, name))
    ]
    sections = {"Results": [*results, _notes(record)], "Retrieval by dictionary size": by_size}
    sections |= {_title(head_map): _head_blocks(head_map) for head_map in record.head_maps}
    sections |= {"Training": [], "Memory": [], "Missing": [record.missing] if record.missing else []}
    return [Section(title, [*figures.get(title, []), *blocks]) for title, blocks in sections.items()]


def _columns(n_pairs: int) -> list[tuple[str, str, float, int]]:
    """Return (figure, header, scale, digits) of the results at one dictionary size."""
    return [
        ("knowledge", "knowledge, %", 100, 1),
        (f"kv_choice_{n_pairs}", f"KV by choice ({n_pairs} pairs), %", 100, 1),
        (f"kv_generation_{n_pairs}", f"KV by generation ({n_pairs} pairs), %", 100, 1),
        ("perplexity", "perplexity", 1, 3),
        ("top1_agreement", "agreement with teacher, %", 100, 1),
        ("cache_bytes_128", "cache at 128, MB", 1e-6, 3),
        ("cache_bytes_2048", "at 2048, MB", 1e-6, 3),
        ("cache_bytes_4096", "at 4096, MB", 1e-6, 3),
        ("conv_state_bytes", "convolutions, kB", 1e-3, 1),
    ]


def results_table(models: Sequence[Model], n_pairs: int, *, n_heads: int | None = None) -> pd.DataFrame:
    """Return one row a model, values with standard errors; the teacher has ``n_heads`` heads."""
    kept = [n_heads if model.selection == "teacher" else model.k for model in models]
    heads = [ABSENT if k is None else str(k) if n_heads is None else f"{k} of {n_heads}" for k in kept]
    table = pd.DataFrame({"model": [model.label for model in models], "heads kept": heads})
    for name, header, scale, digits in _columns(n_pairs):
        table[header] = [_cell(model, name, scale, digits) for model in models]
    return table


def _cell(model: Model, name: str, scale: float = 100, digits: int = 1) -> str:
    return with_error(model.values.get(name), model.errors.get(name) or None, digits, scale=scale)


def _change_table(teacher: Model, students: Sequence[Model], n_pairs: int) -> pd.DataFrame:
    table = pd.DataFrame({"change to the teacher": [model.label for model in students]})
    for name, header, *_ in _columns(n_pairs):
        if (whole := teacher.values.get(name)) and name not in ("top1_agreement", "conv_state_bytes"):
            ratios = [model.values.get(name, math.nan) / whole for model in students]
            table[header.rsplit(",", 1)[0]] = [percent_change(ratio) for ratio in ratios]
    return table


def _size_table(models: Sequence[Model], name: str) -> pd.DataFrame:
    """Return accuracy in percent: a row a model, a column a dictionary size."""
    table = pd.DataFrame({"model": [*(model.label for model in models), "chance (1 / pairs)"]})
    for size in sorted({size for model in models for size in model.by_size(name)}):
        cells = [_cell(model, f"{name}_{size}") for model in models]
        table[f"{size} pairs"] = [*cells, f"{100 / size:.1f}"]
    return table


def _notes(record: RunRecord) -> str:
    """Explain the columns, how many questions were asked, and what guessing gives."""
    teacher = record.teacher
    chance = f"{100 / record.n_pairs:.1f} % for KV retrieval with {record.n_pairs} pairs"
    if teacher and teacher.knowledge_chance:
        chance += f", {100 * teacher.knowledge_chance:.1f} % for knowledge"
    asked = f"{teacher.n_examples} for each dictionary size, {teacher.n_knowledge} on knowledge" if teacher else ABSENT
    return (
        f"± is one standard error: binomial, or over the draws for a mean. Chance level: {chance}. Questions: {asked}. "
        "Perplexity: per token of held-out text. Agreement: share of its tokens where student and teacher expect the "
        "same next token. Cache: keys and values of one sequence in 16-bit numbers, states in 32-bit, 1 MB = 1e6 "
        "bytes; the few inputs that the convolutions remember do not grow and stand beside it."
    )


def _title(head_map: HeadMap) -> str:
    return "Head scores" if head_map.name == "scores" else f"Head scores: {head_map.name}"


def _head_blocks(head_map: HeadMap) -> list[Block]:
    """Show the head of the ranking: ten heads, or all that were kept up to twenty."""
    scores, kept = head_map.scores, head_map.kept
    facts = {name: value for name, value in scores.provenance.items() if isinstance(value, str | int)}
    caption = f"What a single head is worth ({facts.pop('method', 'scores')}), ± one standard error:"
    table = score_table(scores, top=max(10, min(len(kept), 20)), kept=kept)
    made = f"Measured with {', '.join(f'{name} {value}' for name, value in facts.items())}."
    return [caption, table, *([made] if facts else [])]


def read_record(directory: Path) -> RunRecord:
    """Collect what a report needs. Raises ValueError for a directory that is neither a run nor a comparison."""
    if (directory / "compare.json").is_file():
        record = _read_comparison(directory)
    elif any((directory / name).exists() for name in ("config.json", "plan.json", "evaluation.json", "stages")):
        record = RunRecord(directory.resolve().name)
        record.read_teacher(directory / "teacher" / "evaluation.json")
        plan = _read_student(record, directory, {"label": "student", "selection": "student"})
        if plan is not None:
            label = f"student, {plan.k} head{'s' * (plan.k != 1)} kept"
            record.models[-1] = replace(record.models[-1], label=label)
        _read_scores(record, directory / "scores.json", plan, record.models[-1].label)
    else:
        raise ValueError(
            f"{directory} is neither a run nor a comparison: it has no compare.json, config.json, plan.json, "
            "evaluation.json or stages/; pass the output directory of a run."
        )
    record.models = with_means(record.models)
    measured = {size for model in record.models for size in model.by_size("kv_generation")}
    wanted = [n_pairs for n_pairs in (record.n_pairs, DEFAULT_PAIRS) if n_pairs in measured]
    record.n_pairs = wanted[0] if wanted else max(measured, default=DEFAULT_PAIRS)
    return record


def _read_comparison(directory: Path) -> RunRecord:
    try:
        comparison = json.loads((directory / "compare.json").read_text())
        entries = [(entry, directory / entry["dir"]) for entry in comparison["students"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{directory / 'compare.json'} cannot be read ({error!r}); it needs "
            '{"students": [{"name", "label", "dir", "selection", "k"}], "teacher": path}.'
        ) from error
    record = RunRecord(comparison.get("title") or directory.resolve().name, comparison.get("n_pairs", 0))
    record.shared_losses = _read_losses(directory / "aligned")
    record.read_teacher(directory / comparison.get("teacher", "teacher/evaluation.json"))
    kept_by: dict[str, tuple[HeadPlan, str]] = {}
    for entry, folder in entries:
        plan, model = _read_student(record, folder, entry), record.models[-1]
        if plan is not None and model.selection in RANKED and not model.data:
            kept_by.setdefault(entry.get("scores", "scores.json"), (plan, model.label))
    for file in dict.fromkeys(["scores.json", *kept_by]):
        _read_scores(record, directory / file, *kept_by.get(file, (None, "")))
    return record


def _read_student(record: RunRecord, folder: Path, entry: Record) -> HeadPlan | None:
    label, data = entry.get("label") or entry.get("name") or folder.name, entry.get("data", "")
    label += f" ({data})" if data else ""
    result = record.read(EvalResult.load, folder / "evaluation.json", f"the evaluation of {label!r}")
    plan = record.read(HeadPlan.load, folder / "plan.json", f"the plan of {label!r}")
    losses = _read_losses(folder)
    if not losses:
        record.missing.append(f"the loss curves of {label!r} (`{folder.name}/stages/*/metrics.jsonl`)")
    record.n_heads = plan.n_layers * plan.n_heads if plan else record.n_heads
    k = plan.k if plan else entry.get("k")
    record.add(Model(label, entry.get("selection", "student"), k, data=data, losses=losses), result)
    return plan


def _read_scores(record: RunRecord, path: Path, plan: HeadPlan | None, label: str) -> None:
    if (scores := record.read(HeadScores.load, path, "head scores")) is not None:
        record.n_heads = scores.n_layers * scores.n_heads
        record.head_maps.append(HeadMap(path.stem, scores, frozenset(plan.kept if plan else ()), label))


def _read_losses(folder: Path) -> dict[str, pd.DataFrame]:
    """Read the metrics of a run's stages, without skipped steps; a step repeated after a resume counts once."""
    found = {}
    for path in sorted((folder / "stages").glob("*/metrics.jsonl")):
        records = []
        for line in path.read_text().splitlines():
            with suppress(ValueError):  # torn by a kill
                records.append(json.loads(line))
        shown = [record for record in records if "step" in record and "skipped" not in record]
        rows = [{"step": each["step"], "loss": each.get("loss"), **each.get("per_layer", {})} for each in shown]
        frame = pd.DataFrame(rows, columns=None if rows else ["step", "loss"], dtype=float)
        frame = frame.drop_duplicates("step", keep="last").set_index("step").sort_index()
        found[path.parent.name] = frame.where((frame > 0) & np.isfinite(frame))
    return found


def errors(result: EvalResult) -> dict[str, float]:
    """Return binomial standard errors, those of (k + 1/2) / (n + 1), which are not zero at 0 % and 100 %."""
    asked = {f"{name}_{n}": result.n_examples for name in ("kv_choice", "kv_generation") for n in result.kv_choice}
    asked["knowledge"] = result.n_knowledge
    figures = result.figures()
    smoothed = {name: (figures[name] * n + 0.5) / (n + 1) for name, n in asked.items() if n and name in figures}
    return {name: math.sqrt(share * (1 - share) / asked[name]) for name, share in smoothed.items()}


def with_means(models: Sequence[Model]) -> list[Model]:
    """Return the models; random draws of one size are followed by their mean and its standard error over the draws."""
    found: list[Model] = []
    for model in models:
        found.append(model)
        same = (model.selection, model.k, model.data)
        group = [m for m in models if (m.selection, m.k, m.data) == same and m.values]
        if model.selection == "random" and len(group) > 1 and model is group[-1]:
            cells = pd.DataFrame([m.values for m in group]).dropna(axis=1)
            label = f"{model.k} random heads (mean of {len(group)}{f', {model.data}' if model.data else ''})"
            means, spread = cells.mean().to_dict(), cells.sem().to_dict()
            found.append(replace(model, label=label, values=means, errors=spread, draws=len(group), losses={}))
    return found


def _draw(record: RunRecord, directory: Path) -> dict[str, list[Block]]:
    """Draw every figure that the record has numbers for; return them by the title of their section."""
    found: dict[str, list[Block]] = {"Training": []}
    is_mean = any(model.draws > 1 for model in record.models)
    faint = {model.label for model in record.models if is_mean and model.draws == 1 and model.selection == "random"}
    if models := [model for model in record.models if model.by_size("kv_generation")]:
        _draw_retrieval(models, faint, directory / "kv_retrieval.png")
        caption = "Accuracy by generation, by the number of pairs in the dictionary; bars: one standard error."
        found["Retrieval by dictionary size"] = [Figure("kv_retrieval.png", caption)]
    for head_map in record.head_maps:
        file = "heads.png" if head_map.name == "scores" else f"heads_{head_map.name}.png"
        score_map(head_map.scores, directory / file, kept=head_map.kept, label=head_map.label)
        outlined = f"; outlined: {head_map.label}" if head_map.kept else ""
        caption = f"What each head is worth, for KV retrieval and for plain text{outlined}."
        found[_title(head_map)] = [Figure(file, caption)]
    panels = {"all heads, once for every student": record.shared_losses} | {m.label: m.losses for m in record.models}
    frames = {label: _stage(losses, "align").filter(regex=r"\d+$") for label, losses in panels.items()}
    if frames := {label: frame for label, frame in frames.items() if frame.size}:
        _draw_alignment(frames, directory / "alignment_loss.png")
        caption = "Layer-to-layer alignment: each layer's loss on the teacher's own inputs (running mean)."
        found["Training"].append(Figure("alignment_loss.png", caption))
    curves = [(model, _stage(model.losses, "distill").filter(["loss"]).dropna()) for model in record.models]
    if curves := [(model, frame) for model, frame in curves if frame.size]:
        _draw_distillation(curves, directory / "distillation_loss.png")
        caption = "End-to-end distillation: loss against the teacher's predictions."
        found["Training"].append(Figure("distillation_loss.png", caption))
    shown = [model for model in record.models if not model.data and model.label not in faint]
    if models := [model for model in shown if model.by_size("cache_bytes")]:
        _draw_cache(models, directory / "cache.png")
        caption = "Bytes that the cache of one sequence takes, by the length of the context."
        found["Memory"] = [Figure("cache.png", caption)]
    return found


def _draw_sizes(axes: Axes, models: Sequence[Model], name: str, scale: float, faint: Collection[str] = ()) -> list[int]:
    """Draw a line a model over the sizes at which something was measured; return those sizes."""
    for model in models:
        color, marker, dash = look(model.selection)
        x, y = zip(*model.by_size(name).items())
        y = scale * np.array(y)
        if model.label in faint:
            axes.plot(x, y, color=color, linewidth=0.9, alpha=0.5)
            continue
        axes.errorbar(
            x, y, yerr=[scale * model.errors.get(f"{name}_{size}", 0.0) for size in x], color=color, marker=marker,
            linestyle="--" if model.data else dash, markerfacecolor="white" if model.data else color, elinewidth=1.2,
            capsize=2, label=model.label,
        )  # fmt: skip
    return sorted({size for model in models for size in model.by_size(name)})


def _draw_retrieval(models: Sequence[Model], faint: Collection[str], path: Path) -> None:
    with figure(path, size=(8.2, 4.4)) as grid:
        axes = grid[0, 0]
        sizes = _draw_sizes(axes, models, "kv_generation", 100, faint)
        axes.plot(sizes, [100 / n for n in sizes], color=GREY, linewidth=1.2, linestyle=":", label="chance (1 / pairs)")
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(n) for n in sizes])
        axes.minorticks_off()
        percent_axis(axes)
        axes.set(xlabel="pairs in the dictionary", title="KV retrieval by generation: accuracy")
        axes.figure.legend(loc="outside right upper", labelcolor="linecolor")


def _draw_cache(models: Sequence[Model], path: Path) -> None:
    largest = max(max(model.by_size("cache_bytes").values()) for model in models)
    unit, divisor = ("MB", 1e6) if largest >= 1e6 else ("kB", 1e3)
    with figure(path, size=(8.2, 4.0)) as grid:
        axes = grid[0, 0]
        lengths = _draw_sizes(axes, models, "cache_bytes", 1 / divisor)
        axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.set_title(f"Cache of one sequence, {unit}")
        axes.set_xlabel("tokens in the context (16-bit keys and values, 32-bit states)")
        axes.figure.legend(loc="outside right upper", labelcolor="linecolor")


def _stage(losses: Mapping[str, pd.DataFrame], word: str) -> pd.DataFrame:
    """Return the losses of the stage with a word in its name; empty without one."""
    return pd.concat([pd.DataFrame(), *(frame for name, frame in losses.items() if word in name)])


def _smooth(losses: pd.DataFrame) -> pd.DataFrame:
    """Return the mean over a window of a fortieth of the curve or 5 points, whichever is longer, cut at the ends."""
    half = max(len(losses) // 80, min(2, len(losses) // 10))
    return pd.DataFrame(losses.rolling(2 * half + 1, center=True, min_periods=1).mean())


def _draw_alignment(frames: Mapping[str, pd.DataFrame], path: Path) -> None:
    """Draw a panel a student, a line a layer."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize

    columns = min(math.ceil(math.sqrt(len(frames))), 3)
    rows = math.ceil(len(frames) / columns)
    layers = sorted({int(name.rpartition(".")[2]) for frame in frames.values() for name in frame})
    colors = ListedColormap(colormaps["viridis"](np.linspace(0, 0.78, 256)))  # dark enough to read on white
    depth = ScalarMappable(Normalize(layers[0], layers[-1]), colors)
    with figure(path, rows, columns, size=(3.5 * columns + 0.9, 2.7 * rows + 0.5), sharex=True, sharey=True) as grid:
        for axes, (label, frame) in zip(grid.flat, frames.items()):
            for name, losses in _smooth(frame).items():
                axes.plot(losses.index, losses, color=colors(depth.norm(np.array(int(str(name).rpartition(".")[2])))))
            axes.set_title(label)
        log_ticks(grid[0, 0])
        for axes in grid.flat[len(frames) :]:
            axes.set_axis_off()
        ticks = layers[:: math.ceil(len(layers) / 8)]
        grid[0, 0].figure.colorbar(depth, ax=list(grid.flat), ticks=ticks, shrink=0.8, aspect=25, label="layer")
        grid[0, 0].figure.supxlabel("optimizer step", fontsize=10)
        grid[0, 0].figure.supylabel("alignment loss", fontsize=10)


def _draw_distillation(curves: Sequence[tuple[Model, pd.DataFrame]], path: Path) -> None:
    with figure(path, size=(8.2, 3.8)) as grid:
        axes = grid[0, 0]
        for model, frame in curves:
            color, _, dash = look(model.selection)
            axes.plot(frame, color=color, alpha=0.22, linewidth=0.8)
            axes.plot(_smooth(frame), color=color, linestyle="--" if model.data else dash, label=model.label)
        log_ticks(axes)
        axes.set(xlabel="optimizer step", title="Distillation loss (running mean; faint: every logged step)")
        axes.figure.legend(loc="outside right upper", labelcolor="linecolor")
