"""Result of a finished stage on disk: the student's weights and their manifest."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor, nn

from ..distributed import compute_everywhere, is_first_on_machine
from ..io import Record, file_hash, save_tensors
from .sealed import SaveFailed, check_files, read_sealed, write_sealed
from .weights import ShardedTensors, untied_state, weights_hash

FORMAT = "hybrid-distill/stage/2"
MANIFEST = "manifest.json"
WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class StageManifest:
    """Record of a finished stage."""

    name: str
    steps: int
    weights: str
    """`weights_hash` of the student at the end; the next stage's ``parent``."""
    parent: str
    """`weights_hash` of the student at the start."""
    data: str
    """Fingerprint of the rows."""
    seed: int
    config: Record
    files: dict[str, str]
    """Hash of each file."""
    tied: dict[str, str] = field(default_factory=dict)
    """Names of tied parameters that are not stored, each with the stored name."""
    finished: bool = True
    format: str = FORMAT

    @classmethod
    def read(cls, folder: str | Path) -> StageManifest | None:
        """Read the manifest of a finished stage; None if missing.

        Raises CorruptCheckpoint if broken.
        """
        path = Path(folder) / MANIFEST
        if not path.exists():
            return None
        return cls(**read_sealed(path, FORMAT))


def save_stage(folder: str | Path, student: nn.Module, **record: Any) -> StageManifest:
    """Write a student as the result of a stage.

    The manifest comes last: it marks the weights as complete. ``record`` is the rest of the
    manifest. Raises SaveFailed if the disk is full or not writable.
    """
    folder = Path(folder)
    path = folder / WEIGHTS
    untied, tied = untied_state(student)
    tensors = {name: tensor.contiguous() for name, tensor in untied.items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_tensors(path, tensors)
        files = {WEIGHTS: file_hash(path)}
        # Last: a folder without it is not a finished stage, whatever else it holds.
        manifest = StageManifest(**record, weights=weights_hash(student), files=files, tied=tied)
        write_sealed(folder / MANIFEST, asdict(manifest))
    except OSError as error:
        raise SaveFailed(f"cannot save {path} ({error}); make room and run again.") from error
    return manifest


def load_stage(folder: str | Path, student: nn.Module) -> StageManifest:
    """Load all weights of a finished stage into a student that was built the same way.

    Every process must call this; the first on each machine checks the hash. Parameters take the
    stored dtype. A student that shares weights with its teacher must be unshared first, unless the
    stage did not change those weights. Raises ValueError if the student does not match,
    CorruptCheckpoint for damaged files.
    """
    folder = Path(folder)
    manifest = _finished(folder)
    hashes: dict[str, str] = {}
    if is_first_on_machine():
        hashes = manifest.files
    # Hashing takes as long as reading: once a machine is enough.
    compute_everywhere(lambda: check_files(folder, hashes))
    stored = load_file(folder / WEIGHTS)
    # keep_vars: the parameters themselves, whose dtype a detached tensor could not change.
    own = student.state_dict(keep_vars=True)
    _check_same_student(folder, stored, own, manifest.tied)
    for name, tensor in stored.items():
        target = own[name]
        if target.dtype == tensor.dtype:
            # In place: parameters that are tied, or shared with the teacher, stay so.
            target.data.copy_(tensor)
        else:
            target.data = tensor.to(target.device)
    return manifest


def _check_same_student(
    folder: Path,
    stored: dict[str, Tensor],
    own: dict[str, Tensor],
    tied: dict[str, str],
) -> None:
    """Raise ValueError unless names and shapes are the same."""
    shapes = {name: tuple(tensor.shape) for name, tensor in stored.items()}
    expected = {name: tuple(tensor.shape) for name, tensor in own.items()}
    differing = {name for name, _ in shapes.items() ^ expected.items()} - set(tied)
    if not differing:
        return
    example = min(differing)
    raise ValueError(
        f"{folder} holds another student: {len(differing)} tensors differ, for example {example}, "
        f"of shape {shapes.get(example)} there and {expected.get(example)} here; build the student "
        "with the plan and options of that run."
    )


def stage_tensors(folder: Path) -> ShardedTensors:
    """Open the weights of a finished stage, in this process alone; each tensor is read on access.

    Raises ValueError if the stage is not finished, CorruptCheckpoint for damaged files.
    """
    manifest = _finished(folder)
    check_files(folder, manifest.files)
    return ShardedTensors([folder / WEIGHTS])


def load_trained(folder: Path, student: nn.Module) -> None:
    """Load the trained parameters from the result of the stage that has just trained them.

    On a CPU they are memory-mapped: a machine holds one copy until a process writes to it.
    """
    stored = ShardedTensors([folder / WEIGHTS])
    for name, parameter in student.named_parameters():
        if parameter.requires_grad:
            parameter.data = stored[name].to(parameter.device)


def _finished(folder: Path) -> StageManifest:
    manifest = StageManifest.read(folder)
    if manifest is None:
        raise ValueError(
            f"{folder} does not hold a finished stage (no {MANIFEST}); run the stage first."
        )
    return manifest
