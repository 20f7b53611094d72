"""Write report.md and its figures for a run or a comparison of runs, from the files on disk alone.

A run directory holds evaluation.json, plan.json, scores.json, stages/*/metrics.jsonl and
teacher/evaluation.json. A compare directory holds scores.json and compare.json, which names the teacher's
evaluation and one run directory a student, and perhaps a run ``aligned`` whose stages the students share:

    {"students": [{"name", "label", "dir", "selection", "k"}, ...], "teacher": "teacher/evaluation.json"}

``selection`` is "none", "random", or what ranked the heads: "top" (single ablation), "restoration" ... A
student may also have "data", the name of a control data set (its row stands in the table and is left out of
the finding), and "scores", the file of the ranking (default scores.json). Optional at the top: "title", and
"n_pairs", the dictionary size of the finding.
"""

from .page import write_report
from .record import Row, measured
from .tables import results_table

__all__ = ["Row", "measured", "results_table", "write_report"]
