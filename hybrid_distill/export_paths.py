"""Names of the files that an export has besides those of transformers.

The program that checks an export (export/check.py) travels with it, and so spells the names in ``gate`` itself.
"""

from pathlib import Path

PLAN = "plan.json"
HEAD_SCORES = "head_scores.json"
EVALUATION = "evaluation.json"
"""Evaluations of teacher and student."""
TRAINING = "training.json"
"""Name, steps and tokens of each stage."""
EXPORT_RECORDS = (PLAN, HEAD_SCORES, EVALUATION, TRAINING)
"""Records of plan, scores, measurements and training, in JSON."""
CARD = "README.md"
GATE = "gate"
"""Folder of the check program and what it compares with."""
MARK = Path(GATE, "reference.json")
"""Record of what the student computes, which every export has and nothing else."""
REPORT = Path(GATE, "report.json")
"""Result of the gate."""
