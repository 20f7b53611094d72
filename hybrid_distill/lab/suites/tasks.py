"""Tasks of a suite as lm-eval tasks, with questions from local files, from our generators, or from the hub."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from datasets import Dataset, DatasetDict
from transformers import PreTrainedTokenizerBase

from ...data import read_held_out
from ...io import Record, write_text
from ...probes import Example
from ...probes.answering import begins_with
from ...probes.checks import check_answerable
from ...probes.knowledge import Knowledge, read_questions
from ...probes.registry import make_probe
from ...probes.ruler import load_generators, ruler_questions, tokens_to_generate
from .job import SuiteJob, SuiteTask, tasks_of

if TYPE_CHECKING:
    from lm_eval.api.task import Task
    from lm_eval.tasks import TaskManager

NAMED = 6
TEST = "test"
PROBE_EXAMPLES, RULER_EXAMPLES, VERSION = 1000, 500, 1


class Part(NamedTuple):
    """One lm-eval task: the splits it needs from DIR/``folder`` (questions first), and its number of shots."""

    task: SuiteTask
    name: str
    folder: str
    splits: tuple[str, ...]
    n_shots: int
    ruler: tuple[str, int] | None = None
    """Task and length."""


@cache
def task_manager(folder: str) -> TaskManager:
    """Index only one folder of lm-eval's tasks; all of them together are 10,000 files."""
    import lm_eval.tasks

    root = Path(lm_eval.tasks.__file__).parent
    return lm_eval.tasks.TaskManager(include_path=root / folder, include_defaults=False)


def parts_of(task: SuiteTask, job: SuiteJob) -> list[Part]:
    """List the lm-eval tasks that make up a task of a suite: 57 for mmlu, one for most."""
    if task.probe:
        return [Part(task, task.name, task.probe, (TEST,), 0)]
    if task.ruler:
        asked = [(name, length) for name in task.ruler for length in job.numbers("ruler_lengths")]
        return [Part(task, f"{n}_{length}", f"ruler/{n}_{length}", (TEST,), 0, (n, length)) for n, length in asked]
    found = task_manager(task.folder).all_subtasks  # for a group, all tasks in its folder
    return [_part(task, name, job.fewshot) for name in ([task.name] if task.name in found else found)]


def _part(task: SuiteTask, name: str, fewshot: int | None) -> Part:
    config = task_manager(task.folder).task_index[name].cfg or {}
    folder = name if name == task.name else f"{task.name}/{config.get('dataset_name') or name}"
    if "class" in config:
        return Part(task, name, folder, ("validation",), 0)  # swde
    questions = config.get("test_split") or config["validation_split"]
    has_samples = "samples" in (config.get("fewshot_config") or {})
    drawn_from = None if has_samples else config.get("fewshot_split") or config.get("training_split")
    shots = config.get("num_fewshot", 0) if fewshot is None else fewshot
    if shots and drawn_from:
        return Part(task, name, folder, (questions, drawn_from), shots)
    return Part(task, name, folder, (questions,), shots if has_samples else 0)


def check_job(job: SuiteJob) -> None:
    """Raise ValueError for unknown tasks, lists that are not numbers, missing files, and if lm-eval is missing."""
    tasks = tasks_of(job.suite)
    for name in ("pairs", "lengths", "ruler_lengths"):
        job.numbers(name)
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError("lm-eval is not installed; pip install 'lm-eval[ruler]'.")
    parts = [part for task in tasks for part in parts_of(task, job)]
    if any(part.ruler and not find_split(job.data_dir, part, TEST) for part in parts):
        load_generators()
    files = [(part, split) for part in parts for split in part.splits if part.task.folder and job.data_dir]
    if absent := [f"{part.folder}/{split}.jsonl" for part, split in files if not find_split(job.data_dir, part, split)]:
        more = " ..." if len(absent) > NAMED else ""
        shots = "" if job.fewshot is None else f" --fewshot {job.fewshot}"
        raise ValueError(
            f"--data-dir {job.data_dir} lacks {', '.join(absent[:NAMED])}{more}; write them, with a network, by "
            f"`hybrid-distill write-task-files {job.data_dir} --suite {job.suite}{shots}`, or leave out their tasks."
        )


def find_split(data_dir: Path | None, part: Part, split: str) -> Path | None:
    """Return the file of a split if it exists."""
    path = None if data_dir is None else data_dir / part.folder / f"{split}.jsonl"
    return path if path and path.is_file() else None


def read_rows(path: Path, fields: str) -> list[Record]:
    """Read a file of questions. Raises ValueError for a line that lacks a field, and for an unreadable file."""

    def read(row: Record) -> Record:
        return {**row, **{name: row[name] for name in fields.split()}}

    return read_questions(path, read, f"one JSON object a line, with {', '.join(fields.split())}")


def questions_of(
    part: Part, job: SuiteJob, tokenizer: PreTrainedTokenizerBase | None, data_dir: Path | None
) -> tuple[dict[str, list[Record]], str]:
    """Return (rows by split, their source: files, generator or hub). lm-eval itself loads the hub's rows."""
    if found := {split: path for split in part.splits if (path := find_split(data_dir, part, split))}:
        return {split: read_rows(path, part.task.fields) for split, path in found.items()}, "files"
    if part.ruler:
        if tokenizer is None:
            raise ValueError("RULER's lengths are counted in tokens; pass the model with --model.")
        questions = ruler_questions(*part.ruler, tokenizer, job.seed, job.limit or RULER_EXAMPLES)
        return {TEST: [{"prompt": asked.prompt, "answers": list(asked.answers)} for asked in questions]}, "generator"
    if part.task.probe:
        return {TEST: _probe_rows(part.task.probe, job, tokenizer)}, "generator"
    return {}, "hub"


def _probe_rows(probe: str, job: SuiteJob, tokenizer: PreTrainedTokenizerBase | None) -> list[Record]:
    n = job.limit or PROBE_EXAMPLES
    if probe == "text":
        return [{"text": text} for text in read_held_out(job.texts, n)]
    if probe == "knowledge":
        examples = Knowledge(job.facts).examples()[:n]
    else:
        options = {"pairs": job.numbers("pairs"), "lengths": job.numbers("lengths"), "tokenizer": tokenizer}
        examples = make_probe(probe, **options, facts=job.facts, seed=job.seed).examples(n)
    return [
        {"prompt": e.prompt, "answer": e.answer, "choices": list(e.choices), "gold": e.choices.index(e.answer)}
        for e in examples
    ]


def load_part(part: Part, job: SuiteJob, tokenizer: PreTrainedTokenizerBase) -> tuple[Task, str]:
    """Return (lm-eval task, the source of its questions). Raises ValueError for bad files and unknown words."""
    from lm_eval.api.task import ConfigurableTask

    rows, source = questions_of(part, job, tokenizer, job.data_dir)
    if not part.task.folder:
        asked = [Example(row["prompt"], row["answer"], tuple(row["choices"])) for row in rows[TEST] if "choices" in row]
        check_answerable(asked, tokenizer, sys.maxsize)
        return ConfigurableTask(config=_own_config(part, rows)), source
    own = {"task": part.name} | _local(part, _dataset(rows)) if rows else part.name
    return task_manager(part.task.folder).load([{"group": "local", "task": [own]}])["tasks"][part.name], source


def _dataset(rows: dict[str, list[Record]]) -> DatasetDict:
    return DatasetDict({split: Dataset.from_list(part) for split, part in rows.items()})


def _local(part: Part, dataset: DatasetDict) -> Record:
    """Return the settings that make an lm-eval task use these rows instead of the hub's."""
    config = task_manager(part.task.folder).task_index[part.name].cfg or {}
    if "class" in config:
        from lm_eval.tasks.swde.task import SWDE

        class LocalSWDE(SWDE):
            def download(self, *args: object, **kwargs: object) -> None:
                self.dataset = dataset

        return {"class": LocalSWDE}
    splits = ("training_split", "validation_split", "fewshot_split")
    absent = {key: None for key in splits if config.get(key) and config[key] not in dataset}
    return {"custom_dataset": lambda **_: dataset, **absent}


def _own_config(part: Part, rows: dict[str, list[Record]]) -> Record:
    """Define a probe as an lm-eval task: its own accuracy by choice, our reading of the text by generation."""
    dataset = _dataset(rows)
    config: Record = {"task": part.name, "test_split": TEST, "metadata": {"version": VERSION}}
    config["custom_dataset"] = lambda **_: dataset
    if part.task.probe == "text":
        return config | {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "text"}
    config |= {
        "doc_to_text": "prompt",
        "target_delimiter": "",  # answers and choices begin with their own space
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    if part.task.reading == "likelihood":
        return config | {"output_type": "multiple_choice", "doc_to_choice": "choices", "doc_to_target": "gold"}
    if part.ruler:
        longest = tokens_to_generate(*part.ruler)
    else:  # one token more than any answer, to see that a number has ended
        longest = 1 + max(len(row["answer"].encode()) for row in rows[TEST])
    return config | {
        "output_type": "generate_until",
        "doc_to_target": "answers" if part.ruler else "answer",
        "generation_kwargs": {"until": [], "max_gen_toks": longest, "do_sample": False},
        "process_results": lambda doc, results: {"acc": _share_right(doc, results[0])},
    }


def _share_right(doc: Record, text: str) -> float:
    """Return 1 for text that begins with the answer; for RULER, the share of its answers found anywhere in it."""
    if "answers" not in doc:
        return float(begins_with(text, doc["answer"]))
    return sum(answer.lower() in text.lower() for answer in doc["answers"]) / len(doc["answers"])


def write_part(folder: Path, part: Part, job: SuiteJob, tokenizer: PreTrainedTokenizerBase | None) -> Iterable[str]:
    """Write the splits that ``folder`` lacks, from the hub or our generators; yield a line for each."""
    absent = [split for split in part.splits if not find_split(folder, part, split)]
    if not absent:
        return
    rows, _ = questions_of(part, job, tokenizer, None)
    if not rows:
        rows = task_manager(part.task.folder).load([part.name])["tasks"][part.name].dataset
    for split in absent:
        path = folder / part.folder / f"{split}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows[split]))
        yield f"{path}: {len(rows[split]):,} questions"
