"""Weight files of an export, and the student's configuration as it is exported."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor

from ..io import Record, save_tensors, write_json
from ..model import HybridForCausalLM
from ..safe_loading import INDEX
from .errors import ExportError

MAX_SHARD_SIZE = "2GB"


def tied_weights(student: HybridForCausalLM) -> Mapping[str, str]:
    """Map the name of each tied tensor, which is not stored, to the name it is stored under."""
    if not student.config.tie_word_embeddings:
        return {}
    return student._tied_weights_keys


def student_config(student: HybridForCausalLM) -> Record:
    """Return the student's configuration as JSON, without the path and the code it was loaded from."""
    config = json.loads(student.config.to_json_string())
    config.pop("_name_or_path", None)
    config.pop("auto_map", None)
    return config


def write_weights(
    tensors: Mapping[str, Tensor],
    folder: Path,
    tied: Mapping[str, str],
    max_shard_size: int | str = MAX_SHARD_SIZE,
) -> None:
    """Write safetensors files and, if there are several, their index.

    Raises ExportError for an empty tensor.
    """
    state = {name: tensor for name, tensor in tensors.items() if name not in tied}
    empty = [name for name, tensor in state.items() if tensor.numel() == 0]
    if empty:
        raise ExportError(
            f"empty tensors: {', '.join(empty[:5])}; gather a sharded model (ZeRO-3, FSDP) first."
        )
    stored: set[int] = set()
    for name, tensor in state.items():
        place = tensor.untyped_storage().data_ptr()
        if place in stored:
            # safetensors refuses tensors that share memory, as both embeddings may though the config unties them.
            state[name] = tensor.clone()
        stored.add(place)
    split = split_torch_state_dict_into_shards(state, max_shard_size=max_shard_size)
    for file, names in split.filename_to_tensors.items():
        # safetensors refuses views that are not contiguous, as transposed projections are.
        shard = {name: state[name].detach().cpu().contiguous() for name in names}
        save_tensors(folder / file, shard)
    if split.is_sharded:
        weight_map = dict(sorted(split.tensor_to_filename.items()))
        write_json(folder / INDEX, {"metadata": split.metadata, "weight_map": weight_map})
