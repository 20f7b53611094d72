"""CPU time of building a student, from random weights of Llama-3.2-1B's and Llama-3.1-8B's shapes.

    python benchmarks/build_speed.py                    # both shapes, at one layer and at two or three
    python benchmarks/build_speed.py --tree OTHER       # the sources of another clone, into the same record

The time of a whole model is that of one layer and of what is done once, multiplied. One thread; CPU time, as others may
use the machine; the smaller of the rounds. A student keeps one head, has a state of 16 and is fitted to 2,048 tokens.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from records import RESULTS, ROOT, about, environment, parser_of, read, write

SHAPES = {
    "Llama-3.2-1B": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128_256,
        "tie_word_embeddings": True,
    },
    "Llama-3.1-8B": {
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128_256,
    },
}
N_LAYERS = {"Llama-3.2-1B": 16, "Llama-3.1-8B": 32}
MEASURED = {"Llama-3.2-1B": (1, 3), "Llama-3.1-8B": (1, 2)}
"""Numbers of layers that are built, as many as fit into 24 GB beside other work."""
BUILD = """
import json, sys, time, torch
from transformers import LlamaConfig, LlamaForCausalLM
from hybrid_distill.plan import HeadPlan
from hybrid_distill.student.build import build_student
torch.set_num_threads(1)
torch.manual_seed(0)
config = LlamaConfig(**json.loads(sys.argv[1]))
torch.set_default_dtype(torch.bfloat16)
teacher = LlamaForCausalLM(config).eval()
torch.set_default_dtype(torch.float32)
ids_BL = torch.randint(1000, (4, 512))
batch = {"input_ids": ids_BL, "seq_idx": torch.zeros_like(ids_BL)}
plan = HeadPlan.from_pairs(teacher, [(0, 0)])
started = time.process_time()
build_student(teacher, plan, d_state=16, init="fitted", calibration=batch)
print(time.process_time() - started)
"""


def main() -> None:
    """Build students in processes of their own, print the times and write the record."""
    parser = parser_of(__doc__, RESULTS / "build_speed.json")
    parser.add_argument("--tree", type=Path, default=ROOT, help="clone whose sources build")
    parser.add_argument("--name", default="now", help="name of these times in the record")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    record = read(options.out)
    times = record.setdefault("times", {}).setdefault(options.name, {})
    for shape in options.shapes:
        least, most = MEASURED[shape]
        few = least_seconds(options.tree, shape, least, options.rounds)
        more = least_seconds(options.tree, shape, most, options.rounds)
        a_layer = (more - few) / (most - least)
        whole = few + a_layer * (N_LAYERS[shape] - least)
        times[shape] = {"a layer": a_layer, "once": few - a_layer, "whole model": whole}
        print(
            f"{shape}: {a_layer:.1f} s a layer, {whole:.0f} s for all, {few - a_layer:.1f} s once"
        )
    write(options.out, {**record, **about("building a student", threads=1)})


def least_seconds(tree: Path, shape: str, n_layers: int, rounds: int) -> float:
    """Return the least CPU seconds of the rounds."""
    config = json.dumps({**SHAPES[shape], "num_hidden_layers": n_layers})
    command = [sys.executable, "-c", BUILD, config]
    alone = environment(tree, OMP_WAIT_POLICY="passive")
    seconds = []
    for _ in range(rounds):
        output = subprocess.run(command, check=True, env=alone, capture_output=True, text=True)
        seconds.append(float(output.stdout.split()[-1]))
    return min(seconds)


if __name__ == "__main__":
    main()
