"""How much faster exact scoring and racing are than a full forward per head, and per head and candidate answer.

    python benchmarks/scoring.py                 # speed on one CPU thread, about 45 minutes
    python benchmarks/scoring.py --seeds         # racing against exhaustive scoring, 20 seeds, about 2 hours; goes on
    python benchmarks/scoring.py --teacher smollm2    # the defaults on a real model, some minutes
    python benchmarks/scoring.py --small         # all of the CPU's parts in two minutes, written nowhere

The teacher is a Llama of 8 layers x 16 heads with a planted retrieval circuit (tests/planted.py): three heads that
dictionaries cannot be read without. All else is noise, so that who is found is known. Questions: 256 dictionaries of 25
pairs. What is compared, in CPU seconds of one thread, in one run:

- *plain*: for each head a forward of every prompt, as transformers is called by default, with the logits of all tokens;
- *plain, answers*: the same, but the logits of the last token alone are asked for;
- *plain, candidates*: for each head and each of the 25 values a forward of prompt and value;
- *exact*: `score_heads`, everything included, from tokens to intervals;
- *race*: the same with ``race_k``.

With ``--teacher``, the 9 heads of a middle layer of SmolLM2-135M-Instruct in bfloat16 are ranked by one question about
each of 128 dictionaries of 8 pairs, every head on all of them, and by the defaults of `hybrid-distill score`, racing;
both with 16 plain texts. The trial of the shortcut is left out: it takes as long for 9 heads as for all.

A plain forward costs the same for every head. It is measured for some, before, between and after the others, and the
fastest of these times counts for all 128. Writes benchmarks/results/scoring.json.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from records import RESULTS, ROOT, about, cpu_time, parser_of, read, versions, write

sys.path.insert(0, str(ROOT / "tests"))
from planted import KEYS, Circuit, Shape, planted_teacher

from hybrid_distill.data import read_held_out
from hybrid_distill.plan import HeadId
from hybrid_distill.probes import Example
from hybrid_distill.probes.kv_retrieval import KVRetrieval
from hybrid_distill.scoring import HeadScores, ablation, score_heads
from hybrid_distill.scoring.defaults import default_prompts, default_questions
from hybrid_distill.scoring.forwards import FromLayer
from hybrid_distill.teacher import ablate_heads, load_teacher

PACKAGES = ("torch", "transformers", "tokenizers")
PAIRS = 25
EXAMPLES = 256
BATCH = 16
CIRCUIT = Circuit(HeadId(2, 1), HeadId(2, 6), HeadId(5, 10))
# Widths of a small Llama, the vocabulary of Llama 3.
SPEED = Shape(8, 16, 4, head_dim=64, width=512, intermediate=2048, vocabulary=128256)
NARROW = Shape(8, 16, 4, head_dim=64, width=160, intermediate=8)
NOISE = {512: 0.003, 160: 0.006}
# Times as fast as plain, and as plain with candidates.
GOALS = {"exact": (5, 50), "race": (15, 150)}
# Of SmolLM2-135M-Instruct: a layer with three of its first 15 heads (docs/atlas.md).
REAL_HEADS = [HeadId(16, head) for head in range(9)]
REAL_PAIRS = 8
REAL_K = 3
Measured = dict[str, Any]


@torch.no_grad()
def plain(
    model: Any, tokenizer: Any, examples: Sequence[Example], head: HeadId, **options: Any
) -> float:
    """Return the share right without a head: batches of prompts, padded to the longest, one forward each."""
    n_right = 0
    with ablate_heads(model, [head]):
        for start in range(0, len(examples), BATCH):
            batch = examples[start : start + BATCH]
            prompts = [example.prompt for example in batch]
            inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
            mask_BL = inputs["attention_mask"]
            logits_BLV = model(inputs["input_ids"], attention_mask=mask_BL, **options).logits
            for logits_V, example in zip(logits_BLV[:, -1], batch):
                values = tokenizer(list(example.choices), return_tensors="pt")
                logits_of_values = logits_V[values["input_ids"][:, 0]]
                chosen = example.choices[int(logits_of_values.argmax())]
                n_right += chosen == example.answer
    return n_right / len(examples)


@torch.no_grad()
def with_candidates(model: Any, tokenizer: Any, examples: Sequence[Example], head: HeadId) -> float:
    """Return the share right without a head: one forward of each prompt with each of its values."""
    n_right = 0
    with ablate_heads(model, [head]):
        for example in examples:
            texts = [example.prompt + choice for choice in example.choices]
            rows_BL = tokenizer(texts, return_tensors="pt")["input_ids"]
            logprob_BLV = model(rows_BL).logits.log_softmax(-1)
            # A value is one token, predicted by the one before.
            logprob_of_value_B = logprob_BLV[:, -2].gather(1, rows_BL[:, -1:])[:, 0]
            chosen = example.choices[int(logprob_of_value_B.argmax())]
            n_right += chosen == example.answer
    return n_right / len(examples)


def measure_speed(n_examples: int, shape: Shape) -> Measured:
    """Return CPU seconds of each way for all heads, and how many times as fast ours are."""
    model, tokenizer = planted_teacher(NOISE[shape.width], shape=shape, circuit=CIRCUIT)
    tokenizer.pad_token = tokenizer.unk_token
    probe = KVRetrieval(PAIRS, keys=KEYS)
    examples = probe.examples(n_examples)
    few = examples[: max(1, n_examples // 32)]
    plain_ways: dict[str, Callable[[HeadId], float]] = {
        "plain": lambda head: plain(model, tokenizer, examples, head),
        "plain, answers": lambda head: plain(model, tokenizer, examples, head, logits_to_keep=1),
        "plain, candidates": lambda head: with_candidates(model, tokenizer, few, head),
    }
    times: dict[str, list[float]] = {name: [] for name in plain_ways}

    def measure_plain(head: HeadId) -> None:
        for name, way in plain_ways.items():
            accuracy, seconds = cpu_time(lambda way=way: way(head))
            times[name].append(seconds)
            print(f"{name} without {head}: {seconds:.1f} s, accuracy {accuracy:.1%}", flush=True)

    # A machine that others use slows down and speeds up: the plain ways are measured before, between and after.
    score = partial(score_heads, model, tokenizer, probe, n_examples=n_examples)
    measure_plain(HeadId(0, 3))
    race, race_seconds = cpu_time(partial(score, race_k=3))
    measure_plain(CIRCUIT.aggregate)
    full, full_seconds = cpu_time(score)
    measure_plain(HeadId(7, 8))

    n_heads = shape.n_layers * shape.n_heads
    totals = {name: n_heads * min(each) for name, each in times.items()}
    totals["plain, candidates"] *= len(examples) / len(few)
    seconds = {**totals, "race": race_seconds, "exact": full_seconds}
    return {
        "what": "CPU seconds for all 128 heads; plain ways measured for some and multiplied",
        "shape": asdict(shape),
        "parameters": model.num_parameters(),
        "prompts": {
            "n": n_examples,
            "pairs": PAIRS,
            "tokens": len(tokenizer(examples[0].prompt)["input_ids"]),
        },
        "measured_seconds": {name: rounded(each) for name, each in times.items()},
        "prompts_with_candidates": len(few),
        "seconds": {name: round(t, 1) for name, t in seconds.items()},
        "times_as_fast": {
            "race": times_as_fast("race", race_seconds, totals),
            "exact": times_as_fast("exact", full_seconds, totals),
        },
        **agreement(race, full, n_examples),
    }


def rounded(seconds: Sequence[float]) -> list[float]:
    return [round(each, 2) for each in seconds]


def times_as_fast(name: str, seconds: float, totals: dict[str, float]) -> Measured:
    """Return how many times as fast one of ours is as each plain way, and whether that is the goal."""
    ratios = {other: round(total / seconds, 1) for other, total in totals.items()}
    goal, goal_candidates = GOALS[name]
    is_met = ratios["plain"] >= goal and ratios["plain, candidates"] >= goal_candidates
    return {**ratios, "goal": [goal, goal_candidates], "met": is_met}


def agreement(race: HeadScores, full: HeadScores, n_examples: int) -> Measured:
    """Return whether racing finds the heads that exhaustive scoring finds, with the same scores."""
    finished = race.n_examples_LH == n_examples
    difference = (race.logprob_drop_LH - full.logprob_drop_LH)[finished].abs().max().item()
    first = full.ranking()[:3]
    return {
        "first_heads": [str(head) for head in first],
        "same_first_heads": race.ranking()[:3] == first,
        "planted_heads_first": set(first) == CIRCUIT.heads,
        "examples_per_head_in_the_race": counts(race),
        "largest_difference_of_logprob_drop": difference,
    }


def counts(scores: HeadScores) -> dict[str, int]:
    """Return how many heads were tried on how many examples."""
    assert scores.n_examples_LH is not None
    tried = scores.n_examples_LH.flatten().tolist()
    return {str(n): tried.count(n) for n in sorted(set(tried) - {0})}


def measure_questions(teacher: Path) -> Measured:
    """Return CPU seconds and the overlap of halves of one question a prompt and of the defaults."""
    model, tokenizer = load_teacher(str(teacher), dtype="bfloat16")
    ablation.fastest_exact = lambda model, sites, sizer, samples: FromLayer(model, sites, sizer)
    queries = default_questions([REAL_PAIRS])
    ways = {
        "one question, exhaustive": (1, default_prompts(1), None),
        "defaults": (queries, default_prompts(queries), REAL_K),
    }
    rows = {}
    for name, (n_queries, n_prompts, race_k) in ways.items():
        score = partial(
            score_heads,
            model,
            tokenizer,
            KVRetrieval(REAL_PAIRS, n_queries=n_queries),
            n_examples=n_prompts,
            race_k=race_k,
            heads=REAL_HEADS,
            control_texts=read_held_out("tiny", 16),
            min_accuracy=0.0,
            progress=False,
        )
        scores, seconds = cpu_time(score)
        assert scores.agreement is not None
        assert scores.accuracy_se_LH is not None
        rows[name] = {
            "prompts": n_prompts,
            "questions_per_prompt": n_queries,
            "cpu_seconds": round(seconds, 1),
            "overlap": scores.agreement["overlap"],
            "overlap_by_logprob": scores.agreement["overlap_by_logprob"],
            "mean_standard_error": round(scores.accuracy_se_LH.nanmean().item(), 4),
            "first": [str(head) for head in scores.ranking()[:REAL_K]],
            "examples_per_head": counts(scores),
        }
        print(name, json.dumps(rows[name]), flush=True)
    before, after = (row["cpu_seconds"] for row in rows.values())
    return {
        "what": "one question about each of 128 dictionaries against the defaults of score, 9 heads",
        "teacher": "SmolLM2-135M-Instruct, bfloat16",
        "heads": [str(head) for head in REAL_HEADS],
        "pairs": REAL_PAIRS,
        "k": REAL_K,
        "ways": rows,
        "times_as_fast": round(before / after, 2),
    }


def measure_seed(seed: int, n_examples: int) -> Measured:
    """Race and score exhaustively a planted teacher whose noise, prompts and order are those of the seed."""
    model, tokenizer = planted_teacher(NOISE[160], seed, shape=NARROW, circuit=CIRCUIT)
    probe = KVRetrieval(PAIRS, seed, keys=KEYS)
    score = partial(
        score_heads,
        model,
        tokenizer,
        probe,
        n_examples=n_examples,
        progress=False,
    )
    race, race_seconds = cpu_time(partial(score, race_k=3))
    full, full_seconds = cpu_time(score)
    ranking = full.ranking()
    row = {
        "seed": seed,
        "same": race.ranking()[:3] == ranking[:3],
        "planted": set(ranking[:3]) == CIRCUIT.heads,
        "baseline": full.baseline["accuracy"],
        "drops": [round(full.value_LH()[head].item(), 4) for head in ranking[:5]],
        "examples_per_head": counts(race),
        "cpu_seconds": [round(race_seconds, 1), round(full_seconds, 1)],
    }
    print(json.dumps(row), flush=True)
    return row


def summary(rows: Sequence[Measured]) -> Measured:
    n_same = sum(row["same"] for row in rows)
    n_planted = sum(row["planted"] for row in rows)
    return {
        "what": "first 3 heads by race (confidence 0.99) and by exhaustive scoring; one planted teacher a seed",
        "shape": asdict(NARROW),
        "prompts": {"n": EXAMPLES, "pairs": PAIRS},
        "same": f"{n_same} of {len(rows)}",
        "planted_first": f"{n_planted} of {len(rows)}",
        "rows": rows,
    }


def cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    if path.exists():
        for line in path.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":")[1].strip()
    return platform.machine()


def save(out: Path, part: str, measured: Measured) -> None:
    """Put a part into the record beside what is there."""
    head = about(measured.pop("what"), packages=PACKAGES) | {"device": f"{cpu_name()}, 1 thread"}
    write(out, read(out) | {part: head | measured})


def main() -> None:
    """Measure one part and put it into the results beside what is there."""
    parser = parser_of(__doc__, RESULTS / "scoring.json")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--seeds", nargs="?", type=int, const=20, help="how many")
    which.add_argument("--teacher", type=Path, help="folder of SmolLM2-135M-Instruct")
    which.add_argument("--small", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.small:
        print(json.dumps(measure_speed(32, NARROW), indent=1))
        measure_seed(0, 64)
    elif options.teacher:
        save(options.out, "questions", measure_questions(options.teacher))
    elif options.seeds:
        before = read(options.out).get("seeds", {})
        is_same = before and before["versions"] == versions(PACKAGES)
        rows = before["rows"] if is_same else []
        for seed in range(len(rows), options.seeds):
            rows.append(measure_seed(seed, EXAMPLES))
            save(options.out, "seeds", summary(rows))
    else:
        measured = measure_speed(EXAMPLES, SPEED)
        print(json.dumps(measured, indent=1))
        save(options.out, "speed", measured)


if __name__ == "__main__":
    main()
