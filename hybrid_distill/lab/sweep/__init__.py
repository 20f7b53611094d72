"""Heads kept x how they are chosen x state size x seed, as one command: `hybrid-distill sweep` (docs/sweeps.md).

A sweep is a folder of ordinary runs and of what they share::

    sweep.json  results.csv  tasks/<task>.json, <task>.log
    shared/s<seed>/                  the scores of the teacher's heads and the teacher's evaluation
    shared/n<d_state>-s<seed>/       an alignment of all heads, which serves every plan
    cells/<selection><heads>-n<d_state>-s<seed>/

`grid` lists the cells, `record` keeps sweep.json, `cells` carries out one task and `running` all of them, `results`
writes the table and the status, `job` is the command.
"""

from .grid import Cell, Grid
from .job import SweepFailed, SweepJob, sweep
from .record import Sweep
from .results import status

__all__ = ["Cell", "Grid", "Sweep", "SweepFailed", "SweepJob", "status", "sweep"]
