"""Built student on disk: the main process builds it once; all others and all later starts load it.

Fits differ in their last bits between GPU models, versions of torch and kernels, and a checkpoint
is good only for the weights that its stage started from. The file holds the recurrent heads alone:
everything else is a copy of the teacher, which has the same bits everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict

from torch import Tensor

from ..io import Record, file_hash, save_tensors
from ..model.modeling_hybrid import HybridForCausalLM
from ..student.build import BuildReport
from ..student.grafting import recurrent_tensors
from ..train.sealed import CorruptCheckpoint, check_files, read_sealed, write_sealed
from ..train.weights import ShardedTensors, weights_hash
from .paths import RunPaths

FORMAT = "hybrid-distill/build/1"


def save_built(
    paths: RunPaths, student: HybridForCausalLM, report: BuildReport, requirements: Record
) -> None:
    """Write a new student: first its recurrent heads, then the record that marks them as complete.

    The record lists the source of every tensor; ``requirements`` are all that the student depends on.
    """
    tensors = {name: tensor.contiguous() for name, tensor in recurrent_tensors(student).items()}
    # A killed process must not leave the record of other tensors.
    paths.build.unlink(missing_ok=True)
    save_tensors(paths.built_weights, tensors)
    record = {
        "format": FORMAT,
        "weights": weights_hash(student),
        "files": {paths.built_weights.name: file_hash(paths.built_weights)},
        "made_for": _as_json(requirements),
        **asdict(report),
    }
    write_sealed(paths.build, record)


def build_hash(paths: RunPaths, requirements: Record) -> str | None:
    """Return the `weights_hash` of the student that was built here for these requirements, or None.

    Raises CorruptCheckpoint for damaged files.
    """
    if not paths.build.exists():
        return None
    try:
        record = read_sealed(paths.build, FORMAT)
        if record["made_for"] != _as_json(requirements):
            return None
        check_files(paths.out, record["files"])
    except CorruptCheckpoint as error:
        raise CorruptCheckpoint(
            f"{error} Delete {paths.build} to build the student again."
        ) from error
    return record["weights"]


def built_for(paths: RunPaths) -> Record | None:
    """Return the requirements of the student that was built here, as JSON holds them; None if there is none.

    Raises CorruptCheckpoint for a damaged record.
    """
    if not paths.build.exists():
        return None
    return read_sealed(paths.build, FORMAT)["made_for"]


def load_built(paths: RunPaths) -> Mapping[str, Tensor]:
    """Return the recurrent heads of the student that was built here, each read on access."""
    return ShardedTensors([paths.built_weights])


def _as_json(record: Record) -> Record:
    return json.loads(json.dumps(record, default=str))
