"""The tasks of a suite as tasks of lm-evaluation-harness, which ask local files, our generators, or the hub."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any
from unittest.mock import patch

from transformers import PreTrainedTokenizerBase

from ...data import read_held_out
from ...probes import Example
from ...probes.answering import begins_with
from ...probes.checks import check_answerable
from ...probes.knowledge import Knowledge
from ...probes.registry import probe_with
from ...teacher import TINY
from .files import Rows, find_split, missing_fields, read_rows
from .suites import NIAH, ProbeTask, StockTask

TEST = "test"
PROBE_EXAMPLES = 1000
PROBE_VERSION = 1


@dataclass(frozen=True)
class Part:
    """One task of lm-eval: what is run at once, and kept when a later one is interrupted.

    ``folder`` holds its files, below a data folder; ``splits`` are those that it needs, the questions first. A prompt
    begins with ``n_shots`` examples.
    """

    task: StockTask | ProbeTask
    name: str
    folder: str
    splits: tuple[str, ...]
    n_shots: int


@dataclass(frozen=True)
class Questions:
    """Where questions come from, and which.

    ``n_shots`` replaces the number of examples of each task that has any to show; by default None.
    """

    data_dir: Path | None = None
    n_shots: int | None = None
    limit: int | None = None
    seed: int = 1
    pairs: tuple[int, ...] = (16,)
    lengths: tuple[int, ...] = (100, 200, 400, 800)
    niah_lengths: tuple[int, ...] = (4096,)
    facts: Path | None = None
    texts: str = TINY

    def parts(self, task: StockTask | ProbeTask) -> list[Part]:
        """What lm-eval runs for a task of a suite: 57 parts for mmlu, one for most."""
        if isinstance(task, ProbeTask):
            return [Part(task, task.name, task.probe, (TEST,), 0)]
        return stock_tasks(task).parts(self.n_shots)

    def missing(self, parts: Iterable[Part]) -> list[Path]:
        """Files of the data folder that stock tasks need and that are not there, each without its suffix."""
        if self.data_dir is None:
            return []
        wanted = [(part, split) for part in parts if isinstance(part.task, StockTask) for split in part.splits]
        folders = [(self.data_dir / part.folder, split) for part, split in wanted]
        return list(dict.fromkeys(folder / split for folder, split in folders if not find_split(folder, split)))

    def load(self, part: Part, tokenizer: PreTrainedTokenizerBase) -> tuple[Any, str]:
        """(task of lm-eval, where its questions come from: files, generator or hub).

        Raises ValueError for files that are missing, unreadable or without the fields that the task reads.
        """
        rows, task = self.rows_from_files(part), part.task
        if isinstance(task, ProbeTask):
            rows, source = (rows, "files") if rows else ({TEST: self.probe_rows(task)}, "generator")
            check_known(rows[TEST], tokenizer)
            return probe_task(task, rows[TEST]), source
        if task.name == "niah":
            rows, source = (rows, "files") if rows else ({TEST: self.niah_rows(part.name, tokenizer)}, "generator")
            return niah_task(task, part.name, rows[TEST]), source
        return stock_tasks(task).load(part.name, rows), "files" if rows else "hub"

    def rows_from_files(self, part: Part) -> dict[str, Rows]:
        """The rows of each split that a data folder holds; none without a data folder."""
        if self.data_dir is None:
            return {}
        found = {split: find_split(self.data_dir / part.folder, split) for split in part.splits}
        rows = {split: read_rows(path) for split, path in found.items() if path}
        fields = part.task.fields if isinstance(part.task, StockTask) else ()
        for split, path in found.items():
            if path and (lacking := missing_fields(rows[split], fields)):
                raise ValueError(f"{path} has no {', '.join(lacking)}; {part.task.name} reads {', '.join(fields)}.")
        return rows

    def probe_rows(self, task: ProbeTask) -> Rows:
        """The questions of a probe: at most ``limit``, or `PROBE_EXAMPLES`."""
        n = self.limit or PROBE_EXAMPLES
        if task.probe == "text":
            return [{"text": text} for text in read_held_out(self.texts, n)]
        if task.probe == "knowledge":
            return example_rows(Knowledge(self.facts).examples()[:n])
        given: dict[str, Any] = {
            "pairs": self.pairs, "lengths": self.lengths, "facts": self.facts, "seed": self.seed,
        }  # fmt: skip
        return example_rows(probe_with(task.probe, given).examples(n))

    def niah_rows(self, name: str, tokenizer: PreTrainedTokenizerBase) -> Rows:
        """Needles in haystacks by RULER's generators, as long in this tokenizer's tokens as ``niah_lengths`` say.

        Raises ValueError where the generators lack a package, or the essays that most of them hide needles in.
        """
        try:
            from lm_eval.tasks.ruler import niah_utils
        except ImportError as error:
            raise ValueError(
                f"RULER's generators are not installed ({error}); pip install 'lm-eval[ruler]', or give files of niah "
                "with --data-dir."
            ) from error
        random.seed(self.seed)
        generate = getattr(niah_utils, name)
        # By itself it would load the tokenizer again, by name, and run code that comes with it.
        with patch.object(niah_utils, "get_tokenizer", lambda name: tokenizer):
            return list(generate(max_seq_lengths=list(self.niah_lengths))[TEST])


class StockTasks:
    """The definitions that lm-eval has of one task and its parts; nothing is downloaded before `load`."""

    def __init__(self, task: StockTask) -> None:
        self.task = task

    @cached_property
    def manager(self) -> Any:
        import lm_eval.tasks

        root = Path(lm_eval.tasks.__file__).parent
        # All of lm-eval's tasks are 10,000 files.
        return lm_eval.tasks.TaskManager(include_path=root / self.task.folder, include_defaults=False)

    def parts(self, n_shots: int | None) -> list[Part]:
        """The parts with their files and shots: `Questions.parts`."""
        names = NIAH if self.task.name == "niah" else self._leaves(self.task.name)
        return [self._part(name, n_shots) for name in names]

    def _part(self, name: str, n_shots: int | None) -> Part:
        config = self._config(name)
        folder = name if name == self.task.name else f"{self.task.name}/{config.get('dataset_name') or name}"
        if "class" in config:
            return Part(self.task, name, folder, ("validation",), 0)  # swde
        questions = config.get("test_split") or config["validation_split"]
        own = (config.get("fewshot_config") or {}).get("samples")
        drawn_from = None if own else config.get("fewshot_split") or config.get("training_split")
        shots = config.get("num_fewshot", 0) if n_shots is None else n_shots
        if shots and drawn_from:
            return Part(self.task, name, folder, (questions, drawn_from), shots)
        return Part(self.task, name, folder, (questions,), shots if own else 0)

    def _leaves(self, name: str) -> tuple[str, ...]:
        """Tasks that a task, group or tag of lm-eval stands for."""
        entry = self.manager.task_index[name]
        if entry.tags and not entry.yaml_path:
            return tuple(leaf for member in sorted(entry.tags) for leaf in self._leaves(member))
        if "group" in entry.cfg:
            return tuple(leaf for member in entry.cfg["task"] for leaf in self._leaves(member))
        return (name,)

    def _config(self, name: str) -> dict[str, Any]:
        return self.manager.task_index[name].cfg

    def load(self, name: str, rows: dict[str, Rows]) -> Any:
        """The task, of these rows where there are any."""
        if not rows:
            return self.manager.load([name])["tasks"][name]
        own = {"task": name, **self._on(name, rows)}
        return self.manager.load([{"group": "local", "task": [own]}])["tasks"][name]

    def _on(self, name: str, rows: dict[str, Rows]) -> dict[str, Any]:
        """What makes a task of the hub one of these rows."""
        config, dataset = self._config(name), as_dataset(rows)
        if "class" in config:
            return {"class": _swde_on(dataset)}
        absent = {
            key: None for key in ("training_split", "validation_split", "fewshot_split")
            if config.get(key) and config[key] not in rows
        }  # fmt: skip
        return {"custom_dataset": lambda **_: dataset, **absent}


@cache
def stock_tasks(task: StockTask) -> StockTasks:
    """What lm-eval defines, read once: bbh alone is half a megabyte."""
    return StockTasks(task)


def as_dataset(rows: dict[str, Rows]) -> Any:
    """The splits as lm-eval wants them, in memory."""
    from datasets import Dataset, DatasetDict

    return DatasetDict({split: Dataset.from_list(part) for split, part in rows.items()})


def _swde_on(dataset: Any) -> type:
    from lm_eval.tasks.swde.task import SWDE

    class LocalSWDE(SWDE):
        def download(self, *args: Any, **kwargs: Any) -> None:
            self.dataset = dataset

    return LocalSWDE


def niah_task(task: StockTask, name: str, rows: Rows) -> Any:
    """A needle task of RULER on given rows; a metric for each ``max_length`` among them.

    Its definition is lm-eval's but for the generator, which needs packages and essays that rows do without.
    """
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks.ruler.common_utils import aggregate_metrics, process_results

    config = stock_tasks(task).manager.task_index[name].cfg
    lengths = sorted({str(row["max_length"]) for row in rows}, key=int)

    def by_length(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
        """-1 at the lengths that a row does not have, which their mean leaves out."""
        own = str(doc["max_length"])
        return {**dict.fromkeys(lengths, -1.0), own: process_results(doc, results)[own]}

    metrics = [{"metric": length, "aggregation": aggregate_metrics, "higher_is_better": True} for length in lengths]
    dataset = as_dataset({TEST: rows})
    own = {"custom_dataset": lambda **_: dataset, "process_results": by_length, "metric_list": metrics}
    unused = ("tag", "dataset_path", "dataset_name")
    return ConfigurableTask(config={key: value for key, value in config.items() if key not in unused} | own)


def example_rows(examples: Sequence[Example]) -> Rows:
    """Questions of a probe as rows of a file."""
    return [
        {
            "prompt": example.prompt,
            "answer": example.answer,
            "choices": list(example.choices),
            "gold": example.choices.index(example.answer),
        }
        for example in examples
    ]


def probe_task(task: ProbeTask, rows: Rows) -> Any:
    """A probe as a task of lm-eval: by choice its own accuracy, by generation our reading of what was generated."""
    from lm_eval.api.task import ConfigurableTask

    dataset, config = as_dataset({TEST: rows}), probe_config(task, rows)
    if task.reading == "generation":
        config["process_results"] = answered
    return ConfigurableTask(config={**config, "custom_dataset": lambda **_: dataset})


def check_known(rows: Rows, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError for questions with words that the tokenizer has no token for."""
    questions = [Example(row["prompt"], row["answer"], tuple(row["choices"])) for row in rows if "prompt" in row]
    check_answerable(questions, tokenizer, sys.maxsize)


def probe_config(task: ProbeTask, rows: Rows) -> dict[str, Any]:
    """The definition of a probe's task, but for its data and its reading of generated text."""
    config: dict[str, Any] = {"task": task.name, "test_split": TEST, "metadata": {"version": PROBE_VERSION}}
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
    longest = 1 + max(len(row["answer"].encode()) for row in rows)
    generation = {"until": [], "max_gen_toks": longest, "do_sample": False}
    return config | {"output_type": "generate_until", "doc_to_target": "answer", "generation_kwargs": generation}


def answered(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Whether the generated text begins with the answer as a whole word or number."""
    return {"acc": float(begins_with(results[0], doc["answer"]))}


