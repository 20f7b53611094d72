"""Tasks of a suite as lm-eval's tasks, with questions from local files, from our generators, or from the hub."""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple

import pyarrow.parquet
from datasets import Dataset, DatasetDict
from transformers import PreTrainedTokenizerBase

from ...data import read_held_out
from ...io import write_text
from ...probes import Example
from ...probes.answering import begins_with
from ...probes.checks import check_answerable
from ...probes.knowledge import Knowledge
from ...probes.registry import probe_with
from .job import SuiteJob
from .results import Row
from .suites import SuiteTask, tasks_of

if TYPE_CHECKING:
    from lm_eval.api.task import Task
    from lm_eval.tasks import TaskManager

NAMED = 6

TEST = "test"
PROBE_EXAMPLES, PROBE_VERSION = 1000, 1
NIAH = (
    *(f"niah_single_{n}" for n in (1, 2, 3)), *(f"niah_multikey_{n}" for n in (1, 2, 3)),
    "niah_multivalue", "niah_multiquery",
)  # fmt: skip


class Part(NamedTuple):
    """One of lm-eval's tasks: the splits it needs of DIR/``folder``, questions first, and its few-shot examples."""

    task: SuiteTask
    name: str
    folder: str
    splits: tuple[str, ...]
    n_shots: int


@cache
def task_manager(folder: str) -> TaskManager:
    """Index one folder of lm-eval's tasks; all of them are 10,000 files."""
    import lm_eval.tasks

    root = Path(lm_eval.tasks.__file__).parent
    return lm_eval.tasks.TaskManager(include_path=root / folder, include_defaults=False)


def parts_of(task: SuiteTask, fewshot: int | None = None) -> list[Part]:
    """List lm-eval's tasks that make up a task of a suite: 57 for mmlu, one for most."""
    if task.probe:
        return [Part(task, task.name, task.probe, (TEST,), 0)]
    names = NIAH if task.name == "niah" else _leaves(task.folder, task.name)
    return [_part(task, name, fewshot) for name in names]


def _config(folder: str, name: str) -> Row:
    return task_manager(folder).task_index[name].cfg or {}


def _leaves(folder: str, name: str) -> Iterable[str]:
    """Names of the tasks that a task, group or tag of lm-eval stands for."""
    entry, config = task_manager(folder).task_index[name], _config(folder, name)
    if entry.yaml_path and "group" not in config:
        return [name]
    members = config["task"] if "group" in config else sorted(entry.tags)
    return [leaf for member in members for leaf in _leaves(folder, member)]


def _part(task: SuiteTask, name: str, fewshot: int | None) -> Part:
    config = _config(task.folder, name)
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
    """Raise ValueError for unknown tasks, lists that are not numbers, missing files, and where lm-eval is missing."""
    tasks = tasks_of(job.suite)
    for name in ("pairs", "lengths", "niah_lengths"):
        job.numbers(name)
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError("lm-eval, which asks the tasks, is not installed; pip install lm-eval.")
    if not (missing := missing_files(tasks, job)):
        return
    more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
    shots = "" if job.fewshot is None else f" --fewshot {job.fewshot}"
    command = f"hybrid-distill write-task-files {job.data_dir} --suite {job.suite}{shots}"
    raise ValueError(
        f"--data-dir {job.data_dir} lacks {', '.join(missing[:NAMED])}{more}; with a network, `{command}` writes them "
        "(docs/evaluation.md lists their fields), or pass with --suite the tasks whose files are there."
    )


def missing_files(tasks: Sequence[SuiteTask], job: SuiteJob) -> list[str]:
    """List the files of stock tasks that ``data_dir`` lacks. Probes have generators."""
    if job.data_dir is None:
        return []
    parts = [part for task in tasks if not task.probe for part in parts_of(task, job.fewshot)]
    wanted = dict.fromkeys((job.data_dir / part.folder, split) for part in parts for split in part.splits)
    return [f"{folder / split}.jsonl" for folder, split in wanted if not find_split(folder, split)]


def find_split(folder: Path, split: str) -> Path | None:
    """Find the file of a split: ``SPLIT.jsonl``, ``.json`` or ``.parquet``."""
    paths = (folder / f"{split}{suffix}" for suffix in (".jsonl", ".json", ".parquet"))
    return next(filter(Path.is_file, paths), None)


def read_rows(path: Path, fields: str = "") -> list[Row]:
    """Read a file of questions. Raises ValueError for a file that is unreadable, empty or lacks a field."""
    expected = "Expected one JSON object per line, a question each."
    try:
        if path.suffix == ".parquet":
            rows = pyarrow.parquet.read_table(path).to_pylist()
        elif (text := path.read_text(encoding="utf-8")).startswith("["):
            rows = json.loads(text)
        else:  # not splitlines: it also cuts at separators inside JSON strings
            rows = [json.loads(line) for line in text.split("\n") if line.strip()]
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}). {expected}") from error
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path} holds no questions. {expected}")
    if lacking := [field for field in fields.split() if field not in rows[0]]:
        raise ValueError(f"{path} has no {', '.join(lacking)}. Its task reads {', '.join(fields.split())}.")
    return rows


def questions_of(
    part: Part, job: SuiteJob, tokenizer: PreTrainedTokenizerBase | None, data_dir: Path | None
) -> tuple[dict[str, list[Row]], str]:
    """Return (rows by split, their source: files, generator or hub). The hub's rows are left to lm-eval."""
    folder = data_dir and data_dir / part.folder
    if folder and (found := {split: path for split in part.splits if (path := find_split(folder, split))}):
        return {split: read_rows(path, part.task.fields) for split, path in found.items()}, "files"
    if part.task.probe:
        return {TEST: _probe_rows(part.task.probe, job)}, "generator"
    if part.task.name == "niah":
        return {TEST: _niah_rows(part.name, job, tokenizer)}, "generator"
    return {}, "hub"


def _probe_rows(probe: str, job: SuiteJob) -> list[Row]:
    n = job.limit or PROBE_EXAMPLES
    if probe == "text":
        return [{"text": text} for text in read_held_out(job.texts, n)]
    if probe == "knowledge":
        examples = Knowledge(job.facts).examples()[:n]
    else:
        examples = probe_with(probe, {**job.sizes, "facts": job.facts, "seed": job.seed}).examples(n)
    return [
        {"prompt": e.prompt, "answer": e.answer, "choices": list(e.choices), "gold": e.choices.index(e.answer)}
        for e in examples
    ]


def _niah_rows(name: str, job: SuiteJob, tokenizer: PreTrainedTokenizerBase | None) -> list[Row]:
    """Generate needles in haystacks as RULER does, ``--niah-lengths`` long in tokens of this tokenizer."""
    if tokenizer is None:
        raise ValueError("haystacks are as long as a model's tokens; pass the model with --model.")
    try:
        from lm_eval.tasks.ruler import niah_utils
    except ImportError as error:
        raise ValueError(
            f"RULER's generators are not installed ({error}); pip install 'lm-eval[ruler]', or pass files with "
            "--data-dir."
        ) from error
    random.seed(job.seed)
    with TemporaryDirectory() as folder:  # by a model's name the generators would run code that comes with it
        tokenizer.init_kwargs.pop("auto_map", None)
        tokenizer.save_pretrained(folder)
        generated = getattr(niah_utils, name)(max_seq_lengths=job.numbers("niah_lengths"), tokenizer=folder)
        return list(generated[TEST])


def load_part(part: Part, job: SuiteJob, tokenizer: PreTrainedTokenizerBase) -> tuple[Task, str]:
    """Return (lm-eval's task, the source of its questions). Raises ValueError for bad files and unknown words."""
    from lm_eval.api.task import ConfigurableTask

    rows, source = questions_of(part, job, tokenizer, job.data_dir)
    if part.task.probe:
        asked = [Example(row["prompt"], row["answer"], tuple(row["choices"])) for row in rows[TEST] if "prompt" in row]
        check_answerable(asked, tokenizer, sys.maxsize)
        return ConfigurableTask(config=probe_config(part.task, rows)), source
    if part.task.name == "niah":
        return _niah_task(part, rows), source
    manager, spec = task_manager(part.task.folder), {"task": part.name, **_local(part, rows)}
    return manager.load([{"group": "local", "task": [spec]}])["tasks"][part.name], source


def _niah_task(part: Part, rows: dict[str, list[Row]]) -> Task:
    """Define a needle task as lm-eval does, without its generator, which needs packages that rows do not."""
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks.ruler.common_utils import aggregate_metrics, process_results

    dataset, unused = _dataset(rows), ("tag", "dataset_path", "dataset_name")
    config = {key: value for key, value in _config(part.task.folder, part.name).items() if key not in unused}
    # Every row scores its own length, and -1 at this one.
    metrics = [{"metric": "4096", "aggregation": aggregate_metrics, "higher_is_better": True}]
    own = {"custom_dataset": lambda **_: dataset, "process_results": process_results, "metric_list": metrics}
    return ConfigurableTask(config={**config, **own})


def _local(part: Part, rows: dict[str, list[Row]]) -> Row:
    """Return the settings that give one of lm-eval's tasks these rows instead of the hub's."""
    if not rows:
        return {}
    dataset, config = _dataset(rows), _config(part.task.folder, part.name)
    if "class" in config:
        from lm_eval.tasks.swde.task import SWDE

        class LocalSWDE(SWDE):
            def download(self, *args: object, **kwargs: object) -> None:
                self.dataset = dataset

        return {"class": LocalSWDE}
    splits = ("training_split", "validation_split", "fewshot_split")
    absent = {key: None for key in splits if config.get(key) and config[key] not in rows}
    return {"custom_dataset": lambda **_: dataset, **absent}


def _dataset(rows: dict[str, list[Row]]) -> DatasetDict:
    return DatasetDict({split: Dataset.from_list(part) for split, part in rows.items()})


def probe_config(task: SuiteTask, rows: dict[str, list[Row]]) -> Row:
    """Define a probe as a task: by choice its own accuracy, by generation our reading of the generated text."""
    dataset = _dataset(rows)
    config: Row = {"task": task.name, "test_split": TEST, "metadata": {"version": PROBE_VERSION}}
    config["custom_dataset"] = lambda **_: dataset
    if task.probe == "text":
        return config | {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "text"}
    config |= {
        "doc_to_text": "prompt",
        "target_delimiter": "",  # answers and choices begin with their own space
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    if task.reading == "likelihood":
        return config | {"output_type": "multiple_choice", "doc_to_choice": "choices", "doc_to_target": "gold"}
    # One token more than an answer can have shows that a number has ended.
    longest = 1 + max(len(row["answer"].encode()) for row in rows[TEST])
    generation = {"until": [], "max_gen_toks": longest, "do_sample": False}
    return config | {
        "output_type": "generate_until",
        "doc_to_target": "answer",
        "generation_kwargs": generation,
        "process_results": lambda doc, results: {"acc": float(begins_with(results[0], doc["answer"]))},
    }


def write_part(folder: Path, part: Part, job: SuiteJob, tokenizer: PreTrainedTokenizerBase | None) -> Iterable[str]:
    """Write the splits that ``folder`` lacks, from the hub or our generators; yield a line for each."""
    absent = [split for split in part.splits if not find_split(folder / part.folder, split)]
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
