"""Llama-3.2-1B by heads kept and state size: the published grid (arXiv 2602.11374).

hybrid-distill sweep recipes/sweep_llama_1b.py --out runs/sweep_llama_1b --cluster slurm --jobs 8

Time: 30 students on a tenth of the published tokens, each on one GPU. A student takes 18 hours of an H100 and
shares one of five alignments of 3 hours: 550 GPU-hours in all, counted from shapes, not measured.
Expected result: as published, 10 heads restore retrieval at any state size, and more state does not replace them. Not
reproduced here.
"""

import sys
from dataclasses import replace
from typing import Any

from hybrid_llama_1b import config as llama_1b

from hybrid_distill.cli import main as command
from hybrid_distill.config import RunConfig


def config() -> RunConfig:
    """Use a tenth of the published tokens. Align heads one by one, so that all plans can share them."""
    base = replace(llama_1b(), name="sweep-llama-1b")
    for stage in base.stages:
        base = base.with_stage(stage.name, steps=stage.steps // 10)
    return base.with_stage("align", target="head")


def grid() -> dict[str, Any]:
    """Return the grid. To compare with whole layers of 32, add ``--heads ...,32,64,128 --selection top,layers``."""
    return {
        "heads": "0,5,10,20,30,40,all",
        "d_state": "4,8,16,32,64",
        "seeds": 1,
        "selection": "top",
    }


def jobs() -> dict[str, Any]:
    """Give a job one GPU and a day: a student trains in hours, and a job out of time resumes."""
    return {"gpus": 1, "minutes": 24 * 60}


def main() -> None:
    command(["sweep", __file__, *sys.argv[1:]])


if __name__ == "__main__":
    main()
