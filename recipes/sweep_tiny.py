"""The embedded teacher by heads kept, state size and selection: 84 students, about 75 minutes on two cores.

hybrid-distill sweep recipes/sweep_tiny.py --out runs/sweep_tiny --jobs 2

Time: about 75 minutes on two idle cores; 81 students are trained.
Expected result: retrieval comes back with heads chosen by score (none 1 %, four 69 to 81 %, eight of 48 95 to 97 %),
not with random ones; knowledge stays; the state size makes no measurable difference (docs/sweep_tiny/report.md).
"""

import sys
from dataclasses import replace
from typing import Any

from hybrid_tiny import config as tiny

from hybrid_distill.cli import main as command
from hybrid_distill.config import RunConfig, ScoringConfig, StudentConfig


def config() -> RunConfig:
    """Shorten the stages of hybrid_tiny.py: distillation more than alignment, which students share.

    The heads are the method's own, ranked by one question a dictionary: docs/sweep_tiny has their figures.
    """
    base = replace(
        tiny(),
        name="sweep-tiny",
        scoring=ScoringConfig(n_pairs=16, n_examples=128, n_queries=1),
        student=StudentConfig(d_state=16),
    )
    return base.with_stage("align", steps=400).with_stage("distill", steps=100)


def grid() -> dict[str, Any]:
    return {"heads": "0,1,2,4,8,all", "d_state": "4,16,64", "seeds": 3, "selection": "top,random"}


def main() -> None:
    command(["sweep", __file__, *sys.argv[1:]])


if __name__ == "__main__":
    main()
