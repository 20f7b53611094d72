"""Tasks of lm-eval: the same accuracies as our own evaluation, every task on made-up rows, nothing lost."""

from __future__ import annotations

import copy
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from harness_rows import KnowsHalf, write_all
from test_launch import launch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hybrid_distill.cli.app import main
from hybrid_distill.lab.suites import running
from hybrid_distill.lab.suites.job import STOCK, SuiteJob
from hybrid_distill.lab.suites.results import FILE, SuiteResult, TaskScore, compare, tables
from hybrid_distill.lab.suites.running import write_questions
from hybrid_distill.plan import HeadId, HeadPlan
from hybrid_distill.probes.answering import answer_choices, answer_generation
from hybrid_distill.probes.knowledge import Knowledge
from hybrid_distill.probes.registry import make_probe
from hybrid_distill.student.build import build_student
from hybrid_distill.teacher import ablate_heads, load_teacher

pytest.importorskip("lm_eval", reason="the extra eval is not installed")

N = 10
MODEL_AND_TOKENIZER = tuple[PreTrainedModel, PreTrainedTokenizerBase]


@pytest.fixture(scope="module")
def tiny() -> MODEL_AND_TOKENIZER:
    return load_teacher("tiny")


def measured(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, names: str, out: Path, **options: Any
) -> SuiteResult:
    given = {"limit": N, "pairs": "8", "lengths": "60", "max_length": 1024, "batch_size": 7, **options}
    return running.run_suite(model, tokenizer, SuiteJob(suite=names, **given), out)


def our_own(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, float]:
    """The same questions by this package's own evaluation."""
    probes = {name: make_probe(name, pairs=8, lengths=60, seed=1) for name in ("kv", "letters", "needle")}
    figures = {}
    for name, probe in {**probes, "knowledge": Knowledge()}.items():
        examples = probe.examples(N)
        figures[name] = answer_choices(model, tokenizer, examples).accuracy
        figures[f"{name}_generate"] = answer_generation(model, tokenizer, examples).double().mean().item()
    return figures


@pytest.mark.parametrize("which", ["teacher", "damaged", "student"])
def test_a_probe_as_a_task_of_lm_eval_gives_our_own_accuracy(
    which: str, tiny: MODEL_AND_TOKENIZER, tmp_path: Path
) -> None:
    model, tokenizer = tiny
    with ExitStack() as stack:
        if which == "damaged":
            stack.enter_context(ablate_heads(model, [HeadId(2, head) for head in range(8)]))
        if which == "student":
            plan = HeadPlan.from_pairs(model, [(layer, head) for layer in (0, 1, 3) for head in range(8)])
            model = build_student(model, plan, d_state=8)[0]
        ours = our_own(model, tokenizer)
        theirs = measured(model, tokenizer, ",".join(ours), tmp_path)
    assert {name: score.value for name, score in theirs.tasks.items()} == ours
    assert all(score.n_examples == N and score.n_cut == 0 for score in theirs.tasks.values())
    if which == "teacher":
        assert ours["kv"] > 0.9 and ours["kv_generate"] > 0.9
    else:
        assert ours["kv"] < 0.9 and ours["kv_generate"] < 0.9, "damage must show, or the test could not fail"
        assert sum(ours.values()) > 0, "and must leave something"


@pytest.fixture
def knows_half(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "make_lm", lambda *args: KnowsHalf())


def test_every_task_of_the_paper_on_made_up_rows(knows_half: None, tiny: MODEL_AND_TOKENIZER, tmp_path: Path) -> None:
    """The model knows rows 0 and 2 of 4: half, in whatever form a task asks for its answer."""
    parts = write_all(tmp_path / "data", 4)
    assert len(parts) == 9 + 57 + 27
    names = ",".join(task.name for task in STOCK)
    result = measured(*tiny, names, tmp_path / "out", data_dir=tmp_path / "data")
    assert not result.failed
    assert {name: score.value for name, score in result.tasks.items()} == {task.name: 0.5 for task in STOCK}
    assert result.tasks["mmlu"].n_examples == 57 * 4
    assert result.tasks["gsm8k"].n_shots == 5 and result.tasks["bbh"].n_shots == 3
    assert {part["source"] for part in result.parts.values()} == {"files"}
    assert result.tasks["arc_easy"].stderr == pytest.approx((0.25 / 3) ** 0.5)


def test_a_killed_evaluation_goes_on_with_the_next_task(
    knows_half: None, tiny: MODEL_AND_TOKENIZER, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = {"data_dir": tmp_path / "data"}
    write_all(tmp_path / "data", 2, ("piqa", "gsm8k", "swde"))
    real, calls, killed_at = running.measure_part, list[str](), "gsm8k"

    def measure(part: Any, *args: Any) -> Any:
        calls.append(part.name)
        if part.name == killed_at:
            raise KeyboardInterrupt
        return real(part, *args)

    monkeypatch.setattr(running, "measure_part", measure)
    with pytest.raises(KeyboardInterrupt):
        measured(*tiny, "piqa,gsm8k,swde", tmp_path, **data)
    first = SuiteResult.load(tmp_path)
    assert set(first.tasks) == {"piqa"}
    killed_at = None
    result = measured(*tiny, "piqa,gsm8k,swde", tmp_path, **data)
    assert calls == ["piqa", "gsm8k", "gsm8k", "swde"] and result.parts["piqa"] == first.parts["piqa"]
    with pytest.raises(ValueError, match=r"limit \(10 there, 3 here\).*--out"):
        measured(*tiny, "piqa", tmp_path, limit=3)
    model, tokenizer = tiny
    with pytest.raises(ValueError, match=r"dtype \('float32' there, 'bfloat16' here\)"):
        measured(copy.deepcopy(model).bfloat16(), tokenizer, "piqa", tmp_path, **data)


def test_a_task_that_fails_loses_no_other(knows_half: None, tiny: MODEL_AND_TOKENIZER, tmp_path: Path) -> None:
    write_all(tmp_path / "data", 2, ("piqa", "gsm8k", "swde"))
    (tmp_path / "data/gsm8k/test.jsonl").write_text('{"question": "How many?"}\n')
    result = measured(*tiny, "piqa,gsm8k,swde", tmp_path, data_dir=tmp_path / "data")
    assert set(result.tasks) == {"piqa", "swde"}
    assert "gsm8k/test.jsonl is not a question ('answer')" in result.failed["gsm8k"]
    assert result.failed["gsm8k"] in tables(result)


def test_prompts_beyond_the_context_are_refused_or_counted(tiny: MODEL_AND_TOKENIZER, tmp_path: Path) -> None:
    short = {"max_length": 48}
    refused = measured(*tiny, "kv,kv_generate", tmp_path / "refused", **short)
    assert not refused.tasks and "of 80 prompts do not fit" in refused.failed["kv"]
    assert "of 10 prompts do not fit" in refused.failed["kv_generate"] and "--truncate" in refused.failed["kv"]
    cut = measured(*tiny, "kv,kv_generate", tmp_path / "cut", truncate=True, **short)
    assert cut.tasks["kv"].n_cut == 80 and cut.tasks["kv_generate"].n_cut == 10
    assert cut.tasks["kv_generate"].value < 0.9, "what was cut off is not known"
    assert "kv (80)" in tables(cut)


def test_written_files_ask_what_the_generators_ask(tiny: MODEL_AND_TOKENIZER, tmp_path: Path) -> None:
    written, missing = write_questions(SuiteJob(suite="kv,copy,text", limit=5, pairs="4"), tmp_path / "data")
    assert "kv/test.jsonl: 5 questions" in written and not missing
    prompts = []
    for folder in (None, tmp_path / "data"):
        result = measured(*tiny, "kv,copy,text", tmp_path / str(folder is None), data_dir=folder, limit=5, pairs="4")
        prompts.append({name: score.prompts_sha256 for name, score in result.tasks.items()})
        assert {part["source"] for part in result.parts.values()} == {"generator" if folder is None else "files"}
    assert prompts[0] == prompts[1] and len(set(prompts[0].values())) == 3


def test_ruler_is_measured_length_by_length(knows_half: None, tiny: MODEL_AND_TOKENIZER, tmp_path: Path) -> None:
    """A length that cannot hold a task leaves that part without a figure; niah shares its parts with the tasks."""
    pytest.importorskip("wonderwords", reason="the extra ruler of lm-eval is not installed")
    names = "ruler_vt,niah_single_1,niah"
    result = measured(*tiny, names, tmp_path, limit=2, ruler_lengths="512,1400")
    assert "ruler_vt does not fit into 512 tokens" in result.failed["ruler_vt_512"]
    assert {name: score.value for name, score in result.tasks.items()} == {"niah_single_1": 0.5, "niah": 0.5}
    assert result.tasks["niah"].n_examples == 8 * result.tasks["niah_single_1"].n_examples == 32
    shown = tables(result)
    assert "| by length | 512 | 1400 |" in shown and "| ruler_vt | – |" in shown


def test_processes_that_get_no_figures_measure_each_part_once(
    knows_half: None, tiny: MODEL_AND_TOKENIZER, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the main process: one that asked a part again would wait for the others forever."""
    measured_parts: list[str] = []
    monkeypatch.setattr(running, "measure_part", lambda part, *args: measured_parts.append(part.name))
    measured(*tiny, "niah_single_1,niah", tmp_path, ruler_lengths="512")
    assert len(measured_parts) == len(set(measured_parts)) == 8


def test_questions_of_the_hub_need_a_network_and_say_so(tmp_path: Path) -> None:
    _, missing = write_questions(SuiteJob(suite="piqa,niah,kv", limit=2), tmp_path)
    assert missing.startswith("piqa: ") and "niah: RULER's lengths" in missing and "kv" not in missing
    assert (tmp_path / "kv/test.jsonl").exists()


def score(value: float, group: str, prompts: str = "same", **fields: Any) -> TaskScore:
    given = {"reading": "likelihood", "metric": "acc,none", "higher_is_better": True, "stderr": 0.01, "n_examples": 100}
    rest = {"n_shots": 0, "n_cut": 0, "version": "1", **fields}
    return TaskScore(group=group, value=value, prompts_sha256=prompts, **{**given, **rest})  # type: ignore[arg-type]


def test_coverage_is_the_mean_over_a_groups_tasks_that_were_asked_alike() -> None:
    model = SuiteResult({}, {}, tasks={
        "arc_easy": score(0.6, "knowledge"), "piqa": score(0.8, "knowledge"), "kv": score(0.5, "retrieval"),
        "mmlu": score(0.3, "retrieval"), "text": score(2.0, "text", higher_is_better=False),
    })  # fmt: skip
    teacher = SuiteResult({}, {}, tasks={
        "arc_easy": score(0.8, "knowledge"), "piqa": score(0.8, "knowledge"), "kv": score(1.0, "retrieval"),
        "mmlu": score(0.4, "retrieval", prompts="others"), "text": score(1.5, "text", higher_is_better=False),
    })  # fmt: skip
    found = compare(model, teacher)
    assert found["groups"] == pytest.approx({"knowledge": 0.875, "retrieval": 0.5})
    assert found["asked_differently"] == ["mmlu"]
    shown = tables(model, teacher)
    assert "| arc_easy | knowledge | likelihood | acc | 0 | 100 | 60.0 ± 1.0 | 80.0 ± 1.0 | −25.0 % |" in shown
    assert "| knowledge | 87.5 % |" in shown and "settings: mmlu" in shown
    assert "| text | text | likelihood | acc | 0 | 100 | 2.000 | 1.500 | – |" in shown


def test_the_command_prints_tables_and_fails_where_a_figure_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--model", "tiny", "--suite", "kv,kv_generate", "--limit", "4", "--pairs", "4", "--out", str(tmp_path)]
    main(["evaluate", *flags, "--teacher", "tiny"])
    shown = capsys.readouterr().out
    assert "| retrieval | 100.0 % |" in shown and (tmp_path / "results.md").read_text() in f"{shown}\n"
    record = json.loads((tmp_path / FILE).read_text())
    assert record["comparison"]["groups"] == {"retrieval": 1.0}
    assert record["settings"]["seed"] == 1 and record["settings"]["versions"]["lm_eval"]
    with pytest.raises(SystemExit) as stopped:
        main(["evaluate", *flags[:-1], str(tmp_path / "other"), "--max-length", "20"])
    assert stopped.value.code == 2 and "failed parts: 2" in capsys.readouterr().err


@pytest.mark.launched
def test_two_processes_measure_what_one_does(tiny: MODEL_AND_TOKENIZER, tmp_path: Path) -> None:
    flags = ["--model", "tiny", "--suite", "kv,kv_generate", "--limit", "5", "--pairs", "4", "--max-length", "16"]
    launcher = ("--multi_gpu", "--num_processes", "2", "-m")
    done = launch(launcher, "evaluate", *flags, "--truncate", "--out", tmp_path / "two", program=Path("hybrid_distill"))
    assert done.returncode == 0, done.stderr
    two = SuiteResult.load(tmp_path / "two")
    one = measured(*tiny, "kv,kv_generate", tmp_path / "one", limit=5, pairs="4", max_length=16, truncate=True)
    assert two.tasks == one.tasks and one.tasks["kv"].n_cut == 20
