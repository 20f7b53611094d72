"""Tasks of lm-evaluation-harness for any model: the papers' suite, our probes, and coverage of the teacher."""

from .job import SuiteJob, SuiteReport, check_job, evaluate_suite, write_questions
from .results import Comparison, SuiteResult, compare, tables

__all__ = [
    "Comparison", "SuiteJob", "SuiteReport", "SuiteResult", "check_job", "compare", "evaluate_suite", "tables",
    "write_questions",
]  # fmt: skip
