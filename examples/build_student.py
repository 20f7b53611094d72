"""Keep the best heads of scores.json, make the others recurrent, compare with the teacher, and export to student/.

python examples/build_student.py           # after examples/rank_heads.py
python examples/build_student.py PATH 20   # the same model, 20 heads
"""

import sys

from hybrid_distill import (
    HeadPlan,
    HeadScores,
    build_student,
    evaluate,
    export_checkpoint,
    load_teacher,
)


def main(path: str = "tiny", k: str = "6") -> None:
    teacher, tokenizer = load_teacher(path)
    scores = HeadScores.load("scores.json")
    plan = HeadPlan.top_k(scores, int(k))
    student, report = build_student(teacher, plan, d_state=16, init="teacher")
    print(f"{report.kept_heads} heads kept, {report.recurrent_heads} recurrent")

    # The student is not trained yet: `hybrid_distill.run` aligns and distills. Its cache is already smaller.
    for name, model in {"teacher": teacher, "student": student}.items():
        # A different seed from the one used for scoring.
        result = evaluate(model, tokenizer, n_pairs=(4,), n_examples=32, seed=1)
        megabytes = result.cache_bytes[4096] / 1e6
        print(
            f"{name}: retrieval {result.kv_choice[4]:.0%}, cache {megabytes:.1f} MB at 4096 tokens"
        )

    export_checkpoint(student, tokenizer, "student", plan=plan, scores=scores)
    print("export: student")


if __name__ == "__main__":
    main(*sys.argv[1:])
