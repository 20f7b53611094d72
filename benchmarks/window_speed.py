"""Speed of windowed students against students without windows and the teacher: training and decoding on a CPU.

    python benchmarks/window_speed.py                       # random weights of SmolLM2-135M's shape
    python benchmarks/window_speed.py --layers 4 --rounds 1 # a quick look

All models take turns in one process, and CPU time is counted, as others may use the machine. A training step is the
forward and backward of 2 rows of 512 tokens in bfloat16 autocast with fp32 weights; decoding is one token at a time
after a prompt of 1,024, in bfloat16. Each figure is the median of the rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from statistics import median

import pandas as pd
import torch
from records import RESULTS, about, cpu_time, parser_of, write
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from hybrid_distill.lab.reporting import text_table
from hybrid_distill.plan import HeadPlan
from hybrid_distill.student.build import build_student

N_LAYERS = 30
N_HEADS = 9
N_KV_HEADS = 3
N_GROUPS = 12
"""KV groups that every student keeps."""
ROWS = 2
ROW = 512
PROMPT = 1024
NEW_TOKENS = 32
STUDENTS = {
    "state 16": {"d_state": 16},
    "window 44 + 4": {"d_state": 0, "window": 44, "sinks": 4},
    "window 128 + 4": {"d_state": 0, "window": 128, "sinks": 4},
    "window 20 + 4, state 8": {"d_state": 8, "window": 20, "sinks": 4},
    "window 20 + 4, gdn state 8": {"d_state": 8, "window": 20, "sinks": 4, "recurrence": "gdn"},
}


def main() -> None:
    """Time every model in turns, print a table and write the record."""
    parser = parser_of(__doc__, RESULTS / "window_speed.json")
    parser.add_argument("--layers", type=int, default=N_LAYERS)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    models = make_models(options.layers)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(1000, (ROWS, ROW), generator=generator)
    prompt = torch.randint(1000, (1, PROMPT), generator=generator)

    training = in_turns(models, options.rounds, lambda model: train_step(model, rows))
    for model in models.values():
        torch.nn.Module.to(model, torch.bfloat16)
    decoding = in_turns(models, options.rounds, lambda model: decode(model, prompt))
    table = pd.DataFrame(
        {
            "model": list(models),
            "training, tokens a second": [round(ROWS * ROW / training[name]) for name in models],
            "decoding, tokens a second": [round(NEW_TOKENS / decoding[name], 1) for name in models],
        }
    )
    print(text_table(table))
    record = {
        "rows": table.to_dict("records"),
        "layers": options.layers,
        "rounds": options.rounds,
        **about("training and decoding with windows", threads=1),
    }
    write(options.out, record)


def make_models(n_layers: int, students: Iterable[str] = STUDENTS) -> dict[str, PreTrainedModel]:
    """Return the teacher and the named students, which keep the same KV groups."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=n_layers,
        num_attention_heads=N_HEADS,
        num_key_value_heads=N_KV_HEADS,
        vocab_size=49152,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
    )
    teacher = LlamaForCausalLM(config).eval()
    # Spread over the layers, and in each over its KV heads in turn.
    group_size = N_HEADS // N_KV_HEADS
    kept: list[tuple[int, int]] = []
    for number in range(min(N_GROUPS, n_layers)):
        layer = number * n_layers // N_GROUPS % n_layers
        first = number % N_KV_HEADS * group_size
        kept += [(layer, head) for head in range(first, first + group_size)]
    plan = HeadPlan.from_pairs(teacher, kept)
    models: dict[str, PreTrainedModel] = {"teacher": teacher}
    for name in students:
        student, _ = build_student(teacher, plan, init="random", **STUDENTS[name])
        models[name] = student.eval()
    return models


def in_turns(
    models: dict[str, PreTrainedModel], rounds: int, work: Callable[[PreTrainedModel], float]
) -> dict[str, float]:
    """Return the median CPU seconds of each model's work; one more round warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(rounds + 1):
        for name, model in models.items():
            seconds[name].append(work(model))
    return {name: median(times[1:]) for name, times in seconds.items()}


def train_step(model: PreTrainedModel, rows: Tensor) -> float:
    """Return the CPU seconds of a forward and a backward."""

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(rows, labels=rows, use_cache=False).loss
        loss.backward()

    _, seconds = cpu_time(step)
    model.zero_grad()
    return seconds


@torch.no_grad()
def decode(model: PreTrainedModel, prompt: Tensor) -> float:
    """Return the CPU seconds of the new tokens, without the prompt's."""

    def generate(n_tokens: int) -> float:
        options = {"max_new_tokens": n_tokens, "min_new_tokens": n_tokens, "do_sample": False}
        _, seconds = cpu_time(lambda: model.generate(prompt, **options))  # pyright: ignore[reportCallIssue]
        return seconds

    return generate(NEW_TOKENS + 1) - generate(1)


if __name__ == "__main__":
    main()
