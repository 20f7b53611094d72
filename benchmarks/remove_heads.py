"""Is the ranking right? Without its first heads the teacher must lose retrieval; without random ones nothing much.

    python benchmarks/remove_heads.py        # writes benchmarks/results/remove_heads.json

Removes the first heads of the embedded teacher, up to a tenth of all, by the scores' two rankings (with and without
the control drop), and as many random ones, and measures KV retrieval of 16 pairs, knowledge and perplexity
(arXiv 2504.18574 removes the top 10, 20 and 30 heads of large models).
"""

from __future__ import annotations

from itertools import islice
from typing import Any

from records import RESULTS, about, parser_of, write

from hybrid_distill.data import read_documents
from hybrid_distill.evaluation.evaluate import evaluate
from hybrid_distill.plan import HeadId, HeadPlan
from hybrid_distill.probes.knowledge import Knowledge
from hybrid_distill.probes.kv_retrieval import KVRetrieval
from hybrid_distill.scoring import HeadScores, score_heads
from hybrid_distill.teacher import ablate_heads, load_teacher

PAIRS = 16
CONTROL_TEXTS = 16
N_RANDOM = 5


def sets_of_heads(scores: HeadScores, teacher: Any) -> dict[str, tuple[HeadId, ...]]:
    """Return the heads to remove: the first by each ranking, and as many random ones."""
    tenth = round(0.1 * scores.n_layers * scores.n_heads)
    sets: dict[str, tuple[HeadId, ...]] = {"nothing": ()}
    for count in (tenth - 1, tenth):
        for by in ("retrieval", "retrieval_minus_control"):
            sets[f"first {count} by {by}"] = tuple(scores.ranking(by)[:count])
    for seed in range(N_RANDOM):
        sets[f"random {tenth}, seed {seed}"] = HeadPlan.random(teacher, tenth, seed).kept
    return sets


def main() -> None:
    """Print the table, write the JSON."""
    parser = parser_of(__doc__, RESULTS / "remove_heads.json")
    parser.add_argument("--examples", type=int, default=128)
    parser.add_argument("--texts", type=int, default=64)
    options = parser.parse_args()
    teacher, tokenizer = load_teacher("tiny")
    texts = list(islice(read_documents("tiny:held_out"), options.texts))
    probe = KVRetrieval(PAIRS, seed=0)
    scores = score_heads(
        teacher,
        tokenizer,
        probe,
        n_examples=options.examples,
        control_texts=texts[:CONTROL_TEXTS],
    )
    rows: dict[str, Any] = {}
    for name, heads in sets_of_heads(scores, teacher).items():
        with ablate_heads(teacher, heads):
            result = evaluate(
                teacher,
                tokenizer,
                teacher=teacher,
                seed=1,
                n_pairs=(PAIRS,),
                n_examples=options.examples,
                held_out_texts=texts,
                knowledge=Knowledge(),
            )
        rows[name] = {
            "heads": list(map(str, heads)),
            "retrieval": result.kv_generation[PAIRS],
            "knowledge": result.knowledge,
            "perplexity": result.perplexity,
        }
        print(f"without {name:<34}", rows[name])
    head = about("ranked and random heads removed")
    write(options.out, head | {"pairs": PAIRS, "examples": options.examples, "without": rows})


if __name__ == "__main__":
    main()
