r"""Leaderboard of small hybrids: what is kept of SmolLM2-135M-Instruct, by bytes of cache and tokens of training.

    python benchmarks/leaderboard.py enter EXPORT --name NAME --tokens 3M --by WHO --how "one line" \
        --teacher smollm2 --text text
    python benchmarks/leaderboard.py page                  # writes docs/leaderboard.md from the records

``EXPORT`` is a folder that `from_pretrained` loads, ours or not, with SmolLM2's tokenizer; ``--tokens`` are all that
its training read. ``--teacher`` is the folder that `hybrid-distill import-gguf` made, ``--text`` that of
benchmarks/debian_text.py, whose held-out pages no entry may train on. Measuring takes some ten minutes of an idle core
and goes on where it was stopped. The record goes to benchmarks/results/leaderboard/NAME.json: commit it with the page.
Models of other people may run their own code here: pass --trust-remote-code for those that you trust.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from records import RESULTS, ROOT, about, parser_of, read, write
from smollm2_measures import LENGTHS, N_EXAMPLES, SIZES, Measures, measure_one, n_needles
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hybrid_distill.assets import general_facts_path
from hybrid_distill.evaluation.result import binomial_error, relative_score
from hybrid_distill.lab.reporting.document import markdown_table
from hybrid_distill.model.layout import cache_argument, cache_of
from hybrid_distill.probes.knowledge import Knowledge
from hybrid_distill.validation import number_of_tokens

__all__ = ["enter_measured", "page"]

FOLDER = RESULTS / "leaderboard"
PAGE = ROOT / "docs" / "leaderboard.md"
TEACHER = "teacher"
CONTEXT = 4096
PIECE = 512
CLASSES = (10, 17)
"""Largest shares of the teacher's cache, in whole percent, in which entries compete."""
NEAR = tuple(f"{size} pairs" for size in SIZES[:2])
FAR = (
    *(f"{task} before filler" for task in NEAR),
    *(f"niah_single_1 at {length}" for length in LENGTHS),
)
KEYS = tuple(f"niah_multikey_2 at {length}" for length in LENGTHS)
GROUPS = {"knowledge": ("knowledge",), "near": NEAR, "far": FAR, "keys": KEYS}
"""Tasks of each column."""
FIGURES = {"held", "entry", "text"}.union(*GROUPS.values())
"""Keys of a complete record."""
NEEDLE_CHANCE = 0.1
"""Accuracy of guessing among the choices that `niah` questions offer."""
HEAD = """# Leaderboard

What small hybrids keep of SmolLM2-135M-Instruct, in two classes: at most {classes} % (rounded) of the teacher's
cache of one sequence of {context:,} tokens ({whole:.1f} MB). Made from the records in
`benchmarks/results/leaderboard` by `python benchmarks/leaderboard.py page`. In each class retrieval decides (far and
keys together), then closeness to the teacher on text.

To enter a model that `from_pretrained` loads, with SmolLM2's tokenizer, in some ten minutes of an idle core:

```
hybrid-distill import-gguf SmolLM2-135M-Instruct.Q4_1.gguf smollm2    # the teacher (docs/atlas.md)
apt-get download anarchism aptitude-doc-en debian-faq debian-handbook jargon-text maint-guide python3.11-doc
python benchmarks/debian_text.py *.deb --out text                     # no entry may train on its held-out pages
python benchmarks/leaderboard.py enter EXPORT --name NAME --tokens 3M --by WHO --how "one line" \\
    --teacher smollm2 --text text --trust-remote-code
git add benchmarks/results/leaderboard/NAME.json docs/leaderboard.md
```

`--trust-remote-code` runs the code in the folder, as exports of this package need.

"Near" are dictionaries of 4 and 8 pairs, "far" the same before 1,000 tokens of other text, and needles in 512, 1,024
and 2,048 tokens; "keys" are needles among keys (`niah_multikey_2`). Shown is the mean relative score,
(score - guessing) / (teacher - guessing), in %, with its standard error. Perplexity and agreement are over {tokens:,}
tokens of held-out text; the teacher's perplexity is {perplexity:.2f}.
"""


def main() -> None:
    """Enter a model, or write the page."""
    parser = parser_of(__doc__)
    parser.add_argument("work", choices=["enter", "page"])
    parser.add_argument("export", nargs="?", help="folder of the model to enter")
    parser.add_argument("--name", help="name of the entry: letters, digits, dots, - and _")
    parser.add_argument("--tokens", default="0", help="tokens of all its training, such as 3M")
    parser.add_argument("--by", default="hybrid-distill", help="whose entry it is")
    parser.add_argument("--how", default="", help="how it was made, in one line")
    parser.add_argument("--teacher", default="smollm2", help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--text", type=Path, default=Path("text"), help="folder of held_out.jsonl")
    parser.add_argument("--trust-remote-code", action="store_true")
    options = parser.parse_args()
    if options.work == "enter":
        enter(options, parser)
    page()


def enter(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Measure a model, and the teacher if it has no record yet."""
    if options.export is None or not re.fullmatch(r"[\w.-]+", options.name or ""):
        parser.error("enter needs EXPORT and --name, of letters, digits, dots, - and _")
    held_out = options.text / "held_out.jsonl"
    for flag, path in {
        "EXPORT": options.export,
        "--teacher": options.teacher,
        "--text": held_out,
    }.items():
        if not Path(path).exists():
            parser.error(
                f"{flag}: {path} does not exist; docs/leaderboard.md has the commands that make it"
            )
    tokens = 0 if options.tokens == "0" else number_of_tokens("--tokens", options.tokens)
    torch.set_num_threads(1)
    FOLDER.mkdir(exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(options.teacher)
    teacher = AutoModelForCausalLM.from_pretrained(options.teacher, dtype=torch.bfloat16).eval()
    measures = Measures(teacher, tokenizer, held_out)
    _measure(teacher, measures, TEACHER, {"tokens": 0, "by": "", "how": ""})
    model = AutoModelForCausalLM.from_pretrained(
        options.export, dtype=torch.bfloat16, trust_remote_code=options.trust_remote_code
    )
    entry = {"tokens": tokens, "by": options.by, "how": options.how}
    _measure(model.eval(), measures, options.name, entry)


def _measure(model: PreTrainedModel, measures: Measures, name: str, entry: dict[str, Any]) -> None:
    path = FOLDER / f"{name}.json"
    before = read(path)
    record = before | {"entry": entry}
    if "held" not in record:
        record |= {**about("an entry", threads=1), "held": held_bytes(model)}
    # The teacher's record stays as it is.
    if record != before:
        write(path, record)
    measure_one(model, measures, path)


def enter_measured(name: str, measured: dict[str, Any], entry: dict[str, Any]) -> None:
    """Enter a student of ours from its measured.json, whose cache is counted, not held."""
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{name}.json"
    figures = {"held": measured["cache"], "entry": entry, **measured}
    before = read(path)
    # A record with the same figures, or some of them, keeps its date, device and versions.
    if before | figures != figures | before:
        before = {}
    write(path, {**about("an entry", threads=1), **before, **figures})


@torch.no_grad()
def held_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of all tensors in a model's cache after `CONTEXT` tokens, whatever its class."""
    caller: Any = model
    name = cache_argument(model.forward)
    ids_1L = torch.randint(1000, (1, CONTEXT), generator=torch.Generator().manual_seed(0))
    cache = None
    for piece_1L in ids_1L.split(PIECE, dim=1):
        output = caller(input_ids=piece_1L, use_cache=True, logits_to_keep=1, **{name: cache})
        cache = cache_of(output)
    seen: dict[int, int] = {}
    _collect(cache, seen, set())
    return sum(seen.values())


def _collect(value: Any, sizes: dict[int, int], visited: set[int]) -> None:
    """Note the bytes of every tensor's storage that is reachable from ``value``, each once."""
    if isinstance(value, torch.Tensor):
        storage = value.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return
    if id(value) in visited:
        return
    visited.add(id(value))
    if isinstance(value, dict):
        children = list(value.values())
    elif isinstance(value, list | tuple):
        children = list(value)
    else:
        children = list(getattr(value, "__dict__", {}).values())
    for child in children:
        _collect(child, sizes, visited)


def page() -> None:
    """Write the page from the records."""
    records = {}
    for path in sorted(FOLDER.glob("*.json")):
        record = read(path)
        if record.keys() >= FIGURES:
            records[path.stem] = record
        else:
            print(f"{path.stem} was stopped and is left out; repeat its command to go on.")
    teacher = records.pop(TEACHER)
    text = teacher["text"]
    head = HEAD.format(
        classes=" and ".join(map(str, CLASSES)),
        context=CONTEXT,
        whole=teacher["held"] / 1e6,
        tokens=text["tokens"],
        perplexity=text["perplexity"],
    )
    parts = [head]
    above = 0.0
    for share in CLASSES:
        # The share is rounded to whole percent.
        most = (share + 0.5) / 100 * teacher["held"]
        entries = _between(records, above, most)
        parts.append(f"## At most {share} % of the cache\n\n{_table(entries, teacher)}\n")
        above = most
    larger = _between(records, above, float("inf"))
    if larger:
        parts.append(f"## Larger\n\n{_table(larger, teacher)}\n")
    PAGE.write_text("\n".join(parts))


def _between(records: dict[str, dict[str, Any]], above: float, most: float) -> dict[str, Any]:
    """Return the records of caches of more than ``above`` bytes, and at most ``most``."""
    return {name: record for name, record in records.items() if above < record["held"] <= most}


def _table(entries: dict[str, dict[str, Any]], teacher: dict[str, Any]) -> str:
    if not entries:
        return "No entry yet."
    ranked = []
    for name, record in entries.items():
        entry = record["entry"]
        text = record["text"]
        scores = {group: _kept(record, teacher, tasks) for group, tasks in GROUPS.items()}
        row: dict[str, Any] = {
            "entry": name,
            "by": entry["by"],
            "how": entry["how"],
            "cache, MB": f"{record['held'] / 1e6:.1f}",
            "tokens, millions": f"{entry['tokens'] / 1e6:g}",
        }
        for group, (value, error) in scores.items():
            row[f"{group}, %"] = f"{100 * value:.0f} ± {100 * error:.0f}"
        row["perplexity"] = f"{text['perplexity']:.2f}"
        row["agreement, %"] = f"{100 * text['agreement']:.1f}"
        # Retrieval decides, then text.
        far, _ = scores["far"]
        keys, _ = scores["keys"]
        ranked.append((far + keys, -text["kl"], row))
    ranked.sort(key=lambda item: item[:2], reverse=True)
    return markdown_table(pd.DataFrame([row for *_, row in ranked]), text_columns=3)


def _kept(
    record: dict[str, Any], teacher: dict[str, Any], tasks: tuple[str, ...]
) -> tuple[float, float]:
    """Return the mean relative score of tasks, and its standard error."""
    values = []
    squares = []
    for task in tasks:
        n = _questions(task)
        own = (record[task], binomial_error(record[task], n))
        best = (teacher[task], binomial_error(teacher[task], n))
        kept = relative_score(own, best, _chance(task))
        if kept is not None:
            value, error = kept
            values.append(value)
            squares.append(error**2)
    mean = sum(values) / len(values)
    # Errors of independent questions add in squares.
    error = sum(squares) ** 0.5 / len(squares)
    return mean, error


def _chance(task: str) -> float:
    if task == "knowledge":
        return Knowledge(general_facts_path()).chance
    if task.startswith("niah"):
        return NEEDLE_CHANCE
    return 1 / int(task.split()[0])


def _questions(task: str) -> int:
    if task == "knowledge":
        return len(Knowledge(general_facts_path()).examples())
    if not task.startswith("niah"):
        return N_EXAMPLES
    return n_needles(int(task.rpartition(" ")[2]))


if __name__ == "__main__":
    main()
