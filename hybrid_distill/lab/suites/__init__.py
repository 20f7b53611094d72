"""Tasks of lm-evaluation-harness for any model: the papers' suite, RULER, our probes, and coverage of the teacher."""

from .job import SuiteJob
from .results import SuiteResult, compare, tables
from .running import evaluate_suite, run_suite, write_questions
from .tasks import check_job

__all__ = [
    "SuiteJob",
    "SuiteResult",
    "check_job",
    "compare",
    "evaluate_suite",
    "run_suite",
    "tables",
    "write_questions",
]
