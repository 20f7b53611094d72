"""Tasks of lm-eval: our own accuracies, offline task files, resume, comparison with a teacher."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from harness_rows import write_task
from messages import naming
from test_launch import launch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hybrid_distill.cli.app import main
from hybrid_distill.io import Record
from hybrid_distill.lab import probe_tasks, suite
from hybrid_distill.lab.suite import load_tasks, run_suite
from hybrid_distill.lab.suite_job import PROBES, SUITES, SuiteJob
from hybrid_distill.lab.suite_results import (
    HEADLINES,
    coverage,
    headline,
    render,
    ruler_by_length,
    summary,
)
from hybrid_distill.plan import HeadId, HeadPlan
from hybrid_distill.probes.answering import answer_choices, answer_generation
from hybrid_distill.probes.knowledge import Knowledge
from hybrid_distill.probes.registry import make_probe
from hybrid_distill.probes.ruler import RulerQuestion
from hybrid_distill.student.build import build_student
from hybrid_distill.teacher import ablate_heads, load_teacher

pytest.importorskip("lm_eval", reason="the extra eval is not installed")

N = 10
MODEL_AND_TOKENIZER = tuple[PreTrainedModel, PreTrainedTokenizerBase]


@pytest.fixture(scope="module")
def tiny() -> MODEL_AND_TOKENIZER:
    return load_teacher("tiny")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out lm-eval's description of the machine, which takes seconds."""
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)


def measured(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    names: str,
    cache: Path,
    **options: Any,
) -> Record:
    """Run tasks of lm-eval on ten questions each; answers that are in ``cache`` are read."""
    settings = {"limit": N, "batch_size": 7, "cache": cache, **options}
    if "kv" in names:
        settings.setdefault("pairs", "8")
    job = SuiteJob(suite=names, **settings)
    return run_suite(model, tokenizer, job, load_tasks(job))


def values(results: Record) -> dict[str, float]:
    """Return the reported figure of each task."""
    table = summary(results)
    return dict(zip(table.task, table.value))


def damaged_student(teacher: PreTrainedModel) -> PreTrainedModel:
    """Build a student, untrained, that keeps three of six layers."""
    plan = HeadPlan.layers(teacher, [0, 1, 3])
    student, _ = build_student(teacher, plan, d_state=8)
    return student


def our_own(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, float]:
    """The same questions by this package's own evaluation."""
    probes = {
        "kv": make_probe("kv", pairs=8, seed=1),
        "letters": make_probe("letters", pairs=8, seed=1),
        "knowledge": Knowledge(),
    }
    figures: dict[str, float] = {}
    for name, probe in probes.items():
        examples = probe.examples(N)
        is_right = answer_generation(model, tokenizer, examples)
        figures[name] = answer_choices(model, tokenizer, examples).accuracy
        figures[f"{name}_generate"] = is_right.double().mean().item()
    return figures


@pytest.mark.parametrize("which", ["teacher", "damaged", "student"])
def test_a_probe_as_a_task_of_lm_eval_gives_our_own_accuracy(
    which: str, tiny: MODEL_AND_TOKENIZER, tmp_path: Path
) -> None:
    model, tokenizer = tiny
    with ExitStack() as stack:
        if which == "damaged":
            layer_of_gather_heads = [HeadId(2, head) for head in range(8)]
            stack.enter_context(ablate_heads(model, layer_of_gather_heads))
        if which == "student":
            model = damaged_student(model)
        ours = our_own(model, tokenizer)
        results = measured(model, tokenizer, ",".join(ours), tmp_path)

    assert values(results) == ours
    n_questions = {counts["effective"] for counts in results["n-samples"].values()}
    assert n_questions == {N}

    if which == "teacher":
        assert ours["kv"] > 0.9
        assert ours["kv_generate"] > 0.9
    else:
        # Damage must show, or the test could not fail, and must leave something.
        assert ours["kv"] < 0.9
        assert ours["kv_generate"] < 0.9
        assert sum(ours.values()) > 0


def test_each_task_of_the_paper_has_the_papers_metric() -> None:
    """lm-eval defines each of them, or this package does; none needs its 10,000 other files."""
    index = suite._task_manager(None, suite.PAPER_FOLDERS).task_index
    stock = [name for name in SUITES["paper"] if name not in (*PROBES, *suite.RULER)]
    assert len(stock) == 11
    for name in stock:
        if name != "swde":  # its metrics are in Python
            config = index[name].cfg or {}
            metrics = config.get("metric_list") or config["aggregate_metric_list"]
            keys = [f"{entry['metric']},{entry.get('filter_list', 'none')}" for entry in metrics]
            reported = headline(name, keys).split(",")[0]
            assert reported in [entry["metric"] for entry in metrics]
            assert HEADLINES.get(name) or reported in ("acc", "exact_match")


def test_a_task_file_replaces_the_hub(tiny: MODEL_AND_TOKENIZER, tmp_path: Path) -> None:
    """As docs/evaluation.md shows: lm-eval's own definition, with rows from a local file."""
    write_task(tmp_path / "tasks", "arc_easy", n_rows=4)
    options = {"include_path": tmp_path / "tasks", "fewshot": 1}

    results = measured(*tiny, "arc_easy,kv", tmp_path / "answers", **options)

    assert results["n-shot"] == {"arc_easy": 1, "kv": 0}
    assert results["n-samples"]["arc_easy"] == {"original": 4, "effective": 4}
    assert 4 * values(results)["arc_easy"] in range(5)
    assert {"acc,none", "acc_norm,none"} < results["results"]["arc_easy"].keys()
    for name in ("made_up_tag", "made_up_group"):
        of_members = measured(*tiny, name, tmp_path / "answers", **options)
        assert values(of_members) == {"arc_easy": values(results)["arc_easy"]}


def test_a_stopped_evaluation_asks_only_what_was_not_answered(
    tiny: MODEL_AND_TOKENIZER, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch holds the choices of a question, of which there are ten."""
    model, tokenizer = tiny
    n_batches = 0
    stop_at = 0
    forward = model.forward

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal n_batches
        n_batches += 1
        if n_batches == stop_at:
            raise KeyboardInterrupt
        return forward(*args, **options)

    def measure(name: str, **options: Any) -> Record:
        nonlocal n_batches
        n_batches = 0
        return measured(model, tokenizer, "kv", tmp_path / name, batch_size=1, **options)

    monkeypatch.setattr(model, "forward", counted)
    whole = measure("whole")
    assert n_batches == N

    stop_at = 6
    with pytest.raises(KeyboardInterrupt):
        measure("stopped")

    stop_at = 0
    resumed = measure("stopped")
    assert n_batches == N - 5
    assert resumed["results"] == whole["results"]

    measure("stopped")
    assert n_batches == 0
    measure("stopped", again=True)
    assert n_batches == N


def test_answers_of_one_model_are_not_those_of_another(
    tiny: MODEL_AND_TOKENIZER, tmp_path: Path
) -> None:
    teacher, tokenizer = tiny
    of_teacher = measured(teacher, tokenizer, "kv", tmp_path)
    of_student = measured(damaged_student(teacher), tokenizer, "kv", tmp_path)
    assert values(of_student) != values(of_teacher)
    assert len(list(tmp_path.iterdir())) == 2


def test_prompts_beyond_the_context_are_refused_or_counted(
    tiny: MODEL_AND_TOKENIZER, tmp_path: Path
) -> None:
    for name, n_prompts in (("kv", 80), ("kv_generate", 10)):
        with pytest.raises(ValueError, match=naming(f"{n_prompts} of {n_prompts}", name)):
            measured(*tiny, name, tmp_path, max_length=48)
    with pytest.raises(ValueError, match=naming("kv_generate", 4)):
        measured(*tiny, "kv_generate", tmp_path, max_length=4, truncate=True)
    assert not list(tmp_path.iterdir()), "nothing was computed"
    cut = measured(*tiny, "kv,kv_generate", tmp_path, max_length=48, truncate=True)
    assert cut["truncated"] == {"kv": 80, "kv_generate": 10}
    assert values(cut)["kv_generate"] < 0.9, "what was cut off is not known"


def test_ruler_is_measured_length_by_length(
    tiny: MODEL_AND_TOKENIZER, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A question counts by the share of its answers that are found; lengths count alike."""

    def questions(task: str, length: int, *_: Any) -> list[RulerQuestion]:
        # One answer at 100 tokens; two at 200, of which the second is in no prompt.
        n_answers = length // 100
        padding = ("nowhere",) * (n_answers - 1)
        made: list[RulerQuestion] = []
        for example in make_probe("kv", pairs=4, seed=length).examples(N):
            answers = (example.answer.strip(), *padding)
            made.append(RulerQuestion(example.prompt, "", "", answers))
        return made

    # Importing lm-eval's word lists takes seconds.
    monkeypatch.setattr(suite, "load_generators", lambda: None)
    monkeypatch.setattr(probe_tasks, "ruler_questions", questions)

    results = measured(*tiny, "ruler_vt", tmp_path, ruler_lengths="100,200")

    figures = results["results"]
    assert [name for name in figures if name != "ruler_vt"] == ["ruler_vt_100", "ruler_vt_200"]
    at_100 = figures["ruler_vt_100"]["acc,none"]
    at_200 = figures["ruler_vt_200"]["acc,none"]
    assert at_100 > 0.8
    assert 0.4 < at_200 <= 0.5
    assert values(results) == {"ruler_vt": pytest.approx((at_100 + at_200) / 2)}

    table = ruler_by_length(results, teacher=results)
    assert table.columns.tolist() == ["task", "", "100", "200"]
    model, teacher = table.values.tolist()
    assert model[:2] == ["ruler_vt", "model"]
    assert model[3].startswith(f"{at_200:.3f}")
    assert teacher == ["ruler_vt", "teacher", *model[2:]]


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"suite": "arc_easy,piqa"}, ["arc_easy, piqa", "--include-path"]),
        ({"suite": "papers,kv"}, ["papers", "paper-knowledge"]),
        ({"suite": " , "}, ["' , '", "paper"]),
        ({"suite": "kv", "pairs": "many"}, ["--pairs is 'many'"]),
        ({"suite": "niah", "ruler_lengths": "0"}, ["--ruler-lengths is '0'"]),
        ({"suite": "kv", "limit": 0}, ["--limit is 0"]),
        ({"suite": "kv", "include_path": Path("no/such")}, ["no/such"]),
    ],
    ids=[
        "tasks of the hub",
        "unknown name",
        "no name",
        "pairs",
        "length",
        "no questions",
        "no folder",
    ],
)
def test_what_cannot_run_is_refused_by_its_name(
    options: dict[str, Any], names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite, "EVERYTHING", ("arc",))  # all 10,000 files take 10 seconds
    with pytest.raises(ValueError) as refusal:
        load_tasks(SuiteJob(**options))
    error = str(refusal.value)
    assert len(error.splitlines()) == 1
    for name in names:
        assert name in error


def results_of(**tasks: tuple[str, float, bool]) -> Record:
    """Results as lm-eval writes them: a metric, its value and whether higher is better, by task."""
    figures = {}
    better = {}
    for name, (metric, value, higher_is_better) in tasks.items():
        figures[name] = {f"{metric},none": value, f"{metric}_stderr,none": 0.01}
        better[name] = {metric: higher_is_better}
    return {"asked": list(tasks), "results": figures, "higher_is_better": better, "truncated": {}}


def test_coverage_is_the_mean_ratio_over_a_suites_tasks() -> None:
    student = results_of(
        arc_easy=("acc", 0.6, True),
        piqa=("acc", 0.8, True),
        kv=("acc", 0.5, True),
        mmlu=("acc", 0.3, True),
        text=("byte_perplexity", 2.0, False),
    )
    teacher = results_of(
        arc_easy=("acc", 0.8, True),
        piqa=("acc", 0.8, True),
        kv=("acc", 1.0, True),
        mmlu=("acc", 0.0, True),
        text=("byte_perplexity", 1.5, False),
    )
    table = summary(student, teacher)
    ratios = dict(zip(table.task, table.ratio))
    assert ratios["arc_easy"] == pytest.approx(0.75)
    assert ratios["kv"] == 0.5
    # A teacher at 0, and a figure of which less is better.
    without_ratio = table[table.ratio.isna()].task
    assert without_ratio.tolist() == ["mmlu", "text"]
    assert coverage(table) == pytest.approx({"paper-knowledge": 0.875, "paper-retrieval": 0.5})
    shown = render(student, teacher)
    assert "| arc_easy | acc | 0.600 ± 0.010 | 0.800 ± 0.010 | −25.0 % |" in shown


def test_the_reported_figure_is_the_papers_or_the_first() -> None:
    figures = {"alias": "x", "acc_stderr,none": 0.1, "acc,none": 0.5, "acc_norm,none": 0.6}
    assert headline("arc_challenge", figures) == "acc_norm,none"
    assert headline("boolq", figures) == "acc,none"


def test_the_command_writes_results_and_compares_with_the_teacher(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    flags = ["--model", "tiny", "--teacher", "tiny"]
    flags += ["--suite", "kv,kv_generate", "--limit", "4", "--pairs", "4"]
    flags += ["--out", str(out), "--cache", str(tmp_path / "answers")]

    main(["evaluate", *flags])

    shown = capsys.readouterr().out
    assert str(out / "results.json") in shown
    record = json.loads((out / "results.json").read_text())
    of_teacher = json.loads((out / "teacher" / "results.json").read_text())
    assert record["comparison"]["coverage"] == {"paper-retrieval": 1.0}
    assert record["results"] == of_teacher["results"]
    assert record["config"]["fewshot_seed"] == 1
    assert record["described"]["fingerprint"]
    assert "|kv " in (out / "results.md").read_text(), "lm-eval's own table"


@pytest.mark.launched
def test_two_processes_measure_what_one_does(tiny: MODEL_AND_TOKENIZER, tmp_path: Path) -> None:
    flags = ["--model", "tiny", "--suite", "kv,kv_generate", "--limit", "5", "--pairs", "4"]
    flags += ["--max-length", "16", "--truncate"]
    flags += ["--cache", str(tmp_path / "answers"), "--out", str(tmp_path / "two")]
    launcher = ("--multi_gpu", "--num_processes", "2", "-m")

    done = launch(launcher, "evaluate", *flags, program=Path("hybrid_distill"))
    one = measured(
        *tiny,
        "kv,kv_generate",
        tmp_path / "one",
        limit=5,
        pairs="4",
        max_length=16,
        truncate=True,
    )

    assert done.returncode == 0, done.stderr
    two = json.loads((tmp_path / "two" / "results.json").read_text())
    assert two["results"] == one["results"]
    # Every prompt: four choices of five questions, and five to continue.
    assert one["truncated"] == {"kv": 20, "kv_generate": 5}
    assert two["truncated"] == one["truncated"]
