"""Rank the heads of a model by how much retrieval loses without each; write scores.json.

python examples/rank_heads.py              # the embedded teacher, in seconds
python examples/rank_heads.py PATH         # any transformers decoder: a folder or a hub id
"""

import sys

from hybrid_distill import KVRetrieval, load_teacher, score_heads


def main(path: str = "tiny") -> None:
    teacher, tokenizer = load_teacher(path)
    probe = KVRetrieval(n_pairs=8, seed=0)
    # race_k drops heads that are clearly not in the top eight.
    scores = score_heads(teacher, tokenizer, probe, n_examples=64, race_k=8, progress=False)
    scores.save("scores.json")
    values = scores.value_LH()
    print(
        f"{scores.n_layers * scores.n_heads} heads; the first eight, and the accuracy that is lost without each:"
    )
    for head in scores.ranking()[:8]:
        print(f"  {head!s:<8}{values[head]:.0%}")
    tie = scores.tie(8)
    if tie is not None:
        print(tie)


if __name__ == "__main__":
    main(*sys.argv[1:])
