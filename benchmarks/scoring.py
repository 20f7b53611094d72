"""How much faster exact scoring and racing are than a full forward per head, and per head and candidate answer.

    python benchmarks/scoring.py                 # speed on one CPU thread, about 45 minutes
    python benchmarks/scoring.py --seeds         # racing against exhaustive scoring, 20 seeds, about 2 hours; goes on
    python benchmarks/scoring.py --small         # all of the CPU's parts in two minutes, written nowhere

The teacher is a Llama of 8 layers x 16 heads with a planted retrieval circuit (tests/planted.py): three heads that
dictionaries cannot be read without. All else is noise, so that who is found is known. Questions: 256 dictionaries of 25
pairs. What is compared, in CPU seconds of one thread, in one run:

- *plain*: for each head a forward of every prompt, as transformers is called by default, with the logits of all tokens;
- *plain, answers*: the same, but the logits of the last token alone are asked for;
- *plain, candidates*: for each head and each of the 25 values a forward of prompt and value;
- *exact*: `score_heads`, everything included, from tokens to intervals;
- *race*: the same with ``race_k``.

A plain forward costs the same for every head. It is measured for some, before, between and after the others, and the
fastest of these times counts for all 128. Writes benchmarks/results/scoring.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from provenance import about, read, versions, write

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from planted import KEYS, Circuit, Shape, planted_teacher

from hybrid_distill.plan import HeadId
from hybrid_distill.probes import Example
from hybrid_distill.probes.kv_retrieval import KVRetrieval
from hybrid_distill.scoring import HeadScores, score_heads
from hybrid_distill.teacher import ablate_heads

RESULTS = Path(__file__).parent / "results" / "scoring.json"
PACKAGES = ("torch", "transformers", "tokenizers")
PAIRS, EXAMPLES, BATCH = 25, 256, 16
CIRCUIT = Circuit(HeadId(2, 1), HeadId(2, 6), HeadId(5, 10))
# Widths of a small Llama, the vocabulary of Llama 3.
SPEED = Shape(8, 16, 4, head_dim=64, width=512, intermediate=2048, vocabulary=128256)
NARROW = Shape(8, 16, 4, head_dim=64, width=160, intermediate=8)
NOISE = {512: 0.003, 160: 0.006}
Save = Callable[[dict[str, Any]], Any]
GOALS = {"exact": (5, 50), "race": (15, 150)}  # times as fast as plain, as plain with candidates


def seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds of this process, and the result: others may use the machine meanwhile."""
    start = time.process_time()
    result = work()
    return time.process_time() - start, result


@torch.no_grad()
def plain(model: Any, tokenizer: Any, examples: Sequence[Example], head: HeadId, **options: Any) -> float:
    """Share of right answers without a head: batches of prompts, padded to the longest, one forward each."""
    n_right = 0
    with ablate_heads(model, [head]):
        for start in range(0, len(examples), BATCH):
            batch = examples[start : start + BATCH]
            inputs = tokenizer([e.prompt for e in batch], return_tensors="pt", padding=True, padding_side="left")
            logits_BV = model(inputs["input_ids"], attention_mask=inputs["attention_mask"], **options).logits[:, -1]
            for logits_V, e in zip(logits_BV, batch):
                values = tokenizer(list(e.choices), return_tensors="pt")["input_ids"][:, 0]
                n_right += e.choices[int(logits_V[values].argmax())] == e.answer
    return n_right / len(examples)


@torch.no_grad()
def with_candidates(model: Any, tokenizer: Any, examples: Sequence[Example], head: HeadId) -> float:
    """Share of right answers without a head: one forward of each prompt with each of its values."""
    n_right = 0
    with ablate_heads(model, [head]):
        for e in examples:
            rows = tokenizer([e.prompt + choice for choice in e.choices], return_tensors="pt")["input_ids"]
            logprob_BLV = model(rows).logits.log_softmax(-1)
            value_B = logprob_BLV[:, -2].gather(1, rows[:, -1:])[:, 0]
            n_right += e.choices[int(value_B.argmax())] == e.answer
    return n_right / len(examples)


def measure_speed(n_examples: int, shape: Shape) -> dict[str, Any]:
    """CPU seconds of each way for all heads, and how many times as fast ours are."""
    model, tokenizer = planted_teacher(NOISE[shape.width], shape=shape, circuit=CIRCUIT)
    tokenizer.pad_token = tokenizer.unk_token
    probe = KVRetrieval(PAIRS, keys=KEYS)
    examples = probe.examples(n_examples)
    few = examples[: max(1, n_examples // 32)]
    n_heads = shape.n_layers * shape.n_heads
    for_all = {"plain": n_heads, "plain, answers": n_heads, "plain, candidates": n_heads * len(examples) / len(few)}
    times: dict[str, list[float]] = {name: [] for name in for_all}

    def measure_plain(head: HeadId) -> None:
        once = {
            "plain": lambda: plain(model, tokenizer, examples, head),
            "plain, answers": lambda: plain(model, tokenizer, examples, head, logits_to_keep=1),
            "plain, candidates": lambda: with_candidates(model, tokenizer, few, head),
        }
        for name, work in once.items():
            took, accuracy = seconds(work)
            times[name].append(took)
            print(f"{name} without {head}: {took:.1f} s, accuracy {accuracy:.1%}", flush=True)

    ours: dict[str, tuple[float, HeadScores]] = {}
    measure_plain(HeadId(0, 3))
    ours["race"] = seconds(lambda: score_heads(model, tokenizer, probe, n_examples=n_examples, race_k=3))
    measure_plain(CIRCUIT.aggregate)
    ours["exact"] = seconds(lambda: score_heads(model, tokenizer, probe, n_examples=n_examples))
    measure_plain(HeadId(7, 8))

    totals = {name: factor * min(times[name]) for name, factor in for_all.items()}
    race, exact = ours["race"][1], ours["exact"][1]
    record: dict[str, Any] = {
        "what": "CPU seconds for all 128 heads; plain ways measured for some and multiplied",
        "shape": asdict(shape),
        "parameters": model.num_parameters(),
        "prompts": {"n": n_examples, "pairs": PAIRS, "tokens": len(tokenizer(examples[0].prompt)["input_ids"])},
        "measured_seconds": {name: [round(t, 2) for t in each] for name, each in times.items()},
        "prompts_with_candidates": len(few),
        "seconds": {name: round(t, 1) for name, t in totals.items()},
        "times_as_fast": {},
        "first_heads": [str(head) for head in exact.ranking()[:3]],
        "same_first_heads": race.ranking()[:3] == exact.ranking()[:3],
        "planted_heads_first": set(exact.ranking()[:3]) == CIRCUIT.heads,
        "examples_per_head_in_the_race": _counts(race),
        "largest_difference_of_logprob_drop": None,
    }
    finished = race.n_examples_LH == n_examples
    difference = (race.logprob_drop_LH - exact.logprob_drop_LH)[finished].abs().max().item()
    record["largest_difference_of_logprob_drop"] = difference
    for name, (took, _) in ours.items():
        record["seconds"][name] = round(took, 1)
        ratios = {other: round(total / took, 1) for other, total in totals.items()}
        goal, goal_candidates = GOALS[name]
        met = ratios["plain"] >= goal and ratios["plain, candidates"] >= goal_candidates
        record["times_as_fast"][name] = {**ratios, "goal": [goal, goal_candidates], "met": met}
    return record


def _counts(scores: HeadScores) -> dict[str, int]:
    """How many heads were tried on how many examples."""
    tried = scores.n_examples_LH.flatten().tolist()
    return {str(n): tried.count(n) for n in sorted(set(tried))}


def measure_seeds(n_seeds: int, n_examples: int, known: Sequence[dict[str, Any]] = (), save: Save = print) -> None:
    """Races and exhaustive scoring of planted teachers that differ in their noise, prompts and order.

    ``known`` are rows of seeds that need no measuring; ``save`` gets the record after every seed.
    """
    rows = list(known)
    for seed in range(len(rows), n_seeds):
        model, tokenizer = planted_teacher(NOISE[160], seed, shape=NARROW, circuit=CIRCUIT)
        probe = KVRetrieval(PAIRS, seed, keys=KEYS)
        options = {"n_examples": n_examples, "progress": False}
        took_race, race = seconds(lambda: score_heads(model, tokenizer, probe, race_k=3, **options))  # noqa: B023
        took_exact, exact = seconds(lambda: score_heads(model, tokenizer, probe, **options))  # noqa: B023
        rows.append(
            {
                "seed": seed,
                "same": race.ranking()[:3] == exact.ranking()[:3],
                "planted": set(exact.ranking()[:3]) == CIRCUIT.heads,
                "baseline": exact.baseline["accuracy"],
                "drops": [round(exact.accuracy_drop_LH[head].item(), 4) for head in exact.ranking()[:5]],
                "examples_per_head": _counts(race),
                "cpu_seconds": [round(took_race, 1), round(took_exact, 1)],
            }
        )
        print(json.dumps(rows[-1]), flush=True)
        save(
            {
                "what": "first 3 heads by race (confidence 0.99) and by exhaustive scoring; one planted teacher a seed",
                "shape": asdict(NARROW),
                "prompts": {"n": n_examples, "pairs": PAIRS},
                "same": f"{sum(row['same'] for row in rows)} of {len(rows)}",
                "planted_first": f"{sum(row['planted'] for row in rows)} of {len(rows)}",
                "rows": rows,
            }
        )


def cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def main() -> None:
    """Measure one part and put it into the results beside what is there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--seeds", nargs="?", type=int, const=20, help="how many")
    which.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.small:
        print(json.dumps(measure_speed(32, NARROW), indent=1))
        measure_seeds(1, 64)
        return

    def save(part: str, measured: dict[str, Any]) -> None:
        head = about(measured.pop("what"), packages=PACKAGES) | {"device": f"{cpu_name()}, 1 thread"}
        record = read(options.out) | {part: head | measured}
        write(options.out, record)
        print(json.dumps({name: value for name, value in record[part].items() if name != "rows"}, indent=1))

    if options.seeds:
        before = read(options.out).get("seeds", {})
        same = before and before["versions"] == versions(PACKAGES)
        rows = before["rows"] if same else []
        measure_seeds(options.seeds, EXAMPLES, rows, lambda measured: save("seeds", measured))
    else:
        save("speed", measure_speed(EXAMPLES, SPEED))


if __name__ == "__main__":
    main()
