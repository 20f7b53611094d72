"""Heads kept x how they are chosen x state size x seed, as one command: `hybrid-distill sweep` (docs/sweeps.md).

A sweep is a folder of ordinary runs and of what they share::

    sweep.json  results.csv  tasks/<task>.json, <task>.log
    shared/s<seed>/                  the scores of the teacher's heads and the teacher's evaluation
    shared/n<d_state>-s<seed>/       an alignment of all heads, which serves every plan
    cells/<selection><heads>-n<d_state>-s<seed>/

`grid` lists the cells, `folder` keeps sweep.json and the tasks, `cells` carries out one task and `jobs` all of them,
`job` is the command, `results` writes the table and the status, `measured` reads the table, `report` shows it. Imports
nothing: jobs load `jobs` from here.
"""
