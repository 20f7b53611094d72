"""Is the ranking right? Without its first heads the teacher must lose retrieval; without random ones nothing much.

    python benchmarks/remove_heads.py        # writes benchmarks/results/remove_heads.json

Removes the first heads of the embedded teacher, up to a tenth of all, by the scores' two rankings (with and without
the control drop), and as many random ones, and measures KV retrieval of 16 pairs, knowledge and perplexity
(arXiv 2504.18574 removes the top 10, 20 and 30 heads of large models).
"""

from __future__ import annotations

import datetime
import json
from itertools import islice
from pathlib import Path
from typing import Any

from provenance import versions

from hybrid_distill.data import read_documents
from hybrid_distill.evaluation.evaluate import evaluate
from hybrid_distill.plan import HeadId, HeadPlan
from hybrid_distill.probes.knowledge import Knowledge
from hybrid_distill.probes.kv_retrieval import KVRetrieval
from hybrid_distill.scoring import score_heads
from hybrid_distill.teacher import ablate_heads, load_teacher

RESULTS = Path(__file__).parent / "results" / "remove_heads.json"
PAIRS, EXAMPLES, TEXTS, CONTROL_TEXTS = 16, 128, 64, 16


def main() -> None:
    """Print the table, write the JSON."""
    teacher, tokenizer = load_teacher("tiny")
    texts = list(islice(read_documents("tiny:held_out"), TEXTS))
    probe = KVRetrieval(PAIRS, seed=0)
    scores = score_heads(teacher, tokenizer, probe, n_examples=EXAMPLES, control_texts=texts[:CONTROL_TEXTS])
    tenth = round(0.1 * scores.n_layers * scores.n_heads)
    removed: dict[str, tuple[HeadId, ...]] = {"nothing": ()}
    for count in (tenth - 1, tenth):
        for by in ("retrieval", "retrieval_minus_control"):
            removed[f"first {count} by {by}"] = tuple(scores.ranking(by)[:count])
    for seed in range(5):
        removed[f"random {tenth}, seed {seed}"] = HeadPlan.random(teacher, tenth, seed).kept
    rows: dict[str, Any] = {}
    for name, heads in removed.items():
        with ablate_heads(teacher, heads):
            found = evaluate(
                teacher,
                tokenizer,
                teacher=teacher,
                n_pairs=(PAIRS,),
                n_examples=EXAMPLES,
                seed=1,
                held_out_texts=texts,
                knowledge=Knowledge(),
            )
        rows[name] = {
            "heads": [str(head) for head in heads],
            "retrieval": found.kv_generation[PAIRS],
            "knowledge": found.knowledge,
            "perplexity": found.perplexity,
        }
        print(
            f"without {name:<34} retrieval {found.kv_generation[PAIRS]:6.1%}   knowledge {found.knowledge:6.1%}   "
            f"perplexity {found.perplexity:.3f}"
        )
    record = {"date": datetime.date.today().isoformat(), "versions": versions(("torch", "transformers"))}
    RESULTS.write_text(json.dumps(record | {"pairs": PAIRS, "examples": EXAMPLES, "without": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
