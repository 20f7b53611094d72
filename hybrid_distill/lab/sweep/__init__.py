"""Sweeps over heads kept x selection x state size x window x seed: `hybrid-distill sweep` (docs/sweeps.md).

A sweep is a folder of ordinary runs and of the work that they share::

    sweep.json  results.csv  tasks/<task>.json, <task>.log
    shared/s<seed>/                  the scores of the teacher's heads and the teacher's evaluation
    shared/n<d_state>-s<seed>/       an alignment of all heads, which serves every plan
    cells/<selection><heads>-n<d_state>-s<seed>/

`grid` lists the cells, `paths` names the files, `folder` keeps sweep.json, `tasks` lists the
tasks and their outcomes, `cells` performs one task and `schedule` runs all of them on `workers`:
this process, or jobs of a `submission` that share the `machine`. `worker_options` chooses how many
at a time and on which GPUs, `job` is the command with the `flags`, `results` writes the table,
`status` describes how far a sweep is, `measured` reads the table, `report` and `panels` show it.
This file imports nothing, because each job loads `submission` through it.
"""
