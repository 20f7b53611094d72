"""Reuse of a prompt's state and speculation, on SmolLM2-135M's student of 12 KV groups and windows of 44 + 4.

    python benchmarks/prefix.py --teacher smollm2    # the folder that `hybrid-distill import-gguf` made

Times are CPU seconds of one thread, the least of several rounds in which every way has its turn. The student is not
trained; it is in float32. Writes benchmarks/results/prefix.json.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from records import RESULTS, ROOT, about, cpu_time, parser_of, write
from smollm2_windows import SINKS, plan_of
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybrid_distill.student.build import build_student

WINDOW = 44
N_PREFIX = 2000
N_NEW = 64
N_DRAFTED = 6
QUESTION = "\n\nIn one sentence, this page says that"
GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
PASSAGE = """def area(shape):
    if shape.kind == "circle":
        return 3.14159 * shape.radius ** 2
    if shape.kind == "square":
        return shape.side ** 2
    raise ValueError(f"unknown shape {shape.kind}")
"""


def main() -> None:
    parser = parser_of(__doc__, RESULTS / "prefix.json")
    parser.add_argument("--teacher", default="smollm2", help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(options.teacher)
    teacher = AutoModelForCausalLM.from_pretrained(options.teacher, dtype=torch.float32).eval()
    plan = plan_of("12 groups")
    student, _ = build_student(teacher, plan, d_state=0, window=WINDOW, sinks=SINKS)
    student.eval()
    page = (ROOT / "docs" / "training.md").read_text()
    prefix = tokenizer(page, return_tensors="pt")["input_ids"][:, :N_PREFIX]
    question = tokenizer(QUESTION, return_tensors="pt")["input_ids"]
    passage = tokenizer(PASSAGE * 3, return_tensors="pt")["input_ids"]
    record = {
        "rounds": options.rounds,
        "prefix": first_token(student, prefix, question, options.rounds),
        "speculation": speculation(student, passage, options.rounds),
        **about(
            "CPU seconds to the first token after a prefix, and tokens a CPU second", threads=1
        ),
    }
    write(options.out, record)
    print(record)


def least(ways: dict[str, Callable[[], Tensor]], rounds: int) -> tuple[dict[str, float], bool]:
    """Return the least CPU seconds of each way, and whether all gave the same tokens."""
    seconds: dict[str, float] = {}
    texts = []
    for _ in range(rounds):
        for name, way in ways.items():
            text, spent = cpu_time(way)
            texts.append(text)
            seconds[name] = min(spent, seconds.get(name, spent))
    return seconds, all(torch.equal(text, texts[0]) for text in texts)


def first_token(student: Any, prefix: Tensor, question: Tensor, rounds: int) -> dict[str, Any]:
    """Time the first token after prefix and question: all read anew, from a copy, from a file."""
    ids = torch.cat([prefix, question], dim=1)
    cache = student.prefill(prefix)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prefix.safetensors"
        cache.save(path)
        size = path.stat().st_size

        def first(**options: Any) -> Tensor:
            return student.generate(ids, max_new_tokens=1, **GREEDY, **options)

        seconds, same = least(
            {
                "whole text": first,
                "copy of the prefix": lambda: first(cache=cache.copy()),
                "prefix from a file": lambda: first(cache=student.load_cache(path, prefix)),
            },
            rounds,
        )
    return {
        "prefix_tokens": prefix.shape[1],
        "question_tokens": question.shape[1],
        "cpu_seconds_to_first_token": {name: round(s, 3) for name, s in seconds.items()},
        "file_bytes": size,
        "same_token": same,
    }


def speculation(student: Any, passage: Tensor, rounds: int) -> dict[str, Any]:
    """Time plain greedy decoding and prompt lookup on a text that repeats itself."""
    n_forwards = 0

    def count(*args: Any) -> None:
        nonlocal n_forwards
        n_forwards += 1

    def generate(**options: Any) -> Tensor:
        return student.generate(passage, max_new_tokens=N_NEW, **GREEDY, **options)

    hook = student.register_forward_pre_hook(count)
    generate(prompt_lookup_num_tokens=N_DRAFTED)
    hook.remove()
    _, prompt_seconds = cpu_time(lambda: student.prefill(passage))
    seconds, same = least(
        {
            "plain": generate,
            "prompt lookup": lambda: generate(prompt_lookup_num_tokens=N_DRAFTED),
        },
        rounds,
    )
    rates = {}
    for name in ("plain", "prompt lookup"):
        rates[name] = round(N_NEW / (seconds[name] - prompt_seconds), 1)
    return {
        "prompt_tokens": passage.shape[1],
        "new_tokens": N_NEW,
        "drafted_tokens": N_DRAFTED,
        "forward_passes": {"plain": N_NEW, "prompt lookup": n_forwards},
        "tokens_per_cpu_second": rates,
        "same_text": same,
    }


if __name__ == "__main__":
    main()
