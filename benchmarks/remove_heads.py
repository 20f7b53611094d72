"""Is the ranking right? Without its first heads the teacher must lose retrieval; without random ones nothing much.

    python benchmarks/remove_heads.py        # writes benchmarks/results/remove_heads.json

Removes the first heads of the embedded teacher, up to a tenth of all, by the scores' two rankings (with and without
the control drop), and as many random ones, and measures KV retrieval of 16 pairs, knowledge and perplexity
(arXiv 2504.18574 removes the top 10, 20 and 30 heads of large models).
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

from provenance import about, write

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
            asked = {"n_pairs": (PAIRS,), "n_examples": EXAMPLES, "held_out_texts": texts, "knowledge": Knowledge()}
            found = evaluate(teacher, tokenizer, teacher=teacher, seed=1, **asked)
        figures = {name: getattr(found, name) for name in ("knowledge", "perplexity")}
        rows[name] = {"heads": list(map(str, heads)), "retrieval": found.kv_generation[PAIRS], **figures}
        print(f"without {name:<34}", rows[name])
    write(RESULTS, about("ranked and random heads removed") | {"pairs": PAIRS, "examples": EXAMPLES, "without": rows})


if __name__ == "__main__":
    main()
