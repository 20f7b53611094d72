"""Heads kept x how they are chosen x state size x seed, as one command: `hybrid-distill sweep` (docs/sweeps.md).

A sweep is a folder of ordinary runs and of what they share::

    sweep.json  results.csv  tasks/<task>.json, <task>.log
    shared/s<seed>/                  the scores of the teacher's heads and the teacher's evaluation
    shared/n<d_state>-s<seed>/       an alignment of all heads, which serves every plan (`sharing`)
    cells/<selection><heads>-n<d_state>-s<seed>/

`grid` says which cells there are, `record` keeps sweep.json, `cells` makes and carries out one task, `running` all of
them (here, in processes, on a cluster), `results` writes the table, `status` says how far it is, `job` is the command.
"""

from .grid import Cell, Grid
from .job import SweepFailed, SweepJob, sweep
from .record import Sweep
from .status import status

__all__ = ["Cell", "Grid", "Sweep", "SweepFailed", "SweepJob", "status", "sweep"]
