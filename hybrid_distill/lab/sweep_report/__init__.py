"""What a sweep says: a report, and the best student under a budget of memory. Both read its results.csv alone
(and sweep.json, where there is one, for what was asked for); docs/sweeps.md has the columns.

`settings` groups cells by how the student is made, `figures`, `findings` and `page` report, `document` writes Markdown
and HTML, `surrogate` predicts what was not run, `recommend` chooses.
"""

from .page import CONTEXT, write_sweep_report
from .recommend import RecommendJob, recommend
from .settings import is_sweep

__all__ = ["CONTEXT", "RecommendJob", "is_sweep", "recommend", "write_sweep_report"]
