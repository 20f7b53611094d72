"""File of a prompt's state: a cache that ``model.prefill`` has filled, and of which prompt and student it is.

Shapes: B batch, L columns of the prompt, padding included.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

FORMAT = "hybrid-distill prefix 1"
SAMPLES_PER_TENSOR = 16
"""Elements of each weight that a fingerprint reads."""


class Prefix(NamedTuple):
    """A prompt [B, L], which of its columns are tokens, and the student that has read it."""

    ids_BL: Tensor
    mask_BL: Tensor
    student: str
    """`fingerprint` of the student."""
    dtype: str

    @property
    def n_columns(self) -> int:
        """Length L of the rows."""
        return self.ids_BL.shape[1]

    def begins(self, ids_BS: Tensor) -> bool:
        """Return True if these rows begin with the prompt; what stands at padding does not matter."""
        if ids_BS.shape[0] != self.ids_BL.shape[0] or ids_BS.shape[1] < self.n_columns:
            return False
        is_other = ids_BS[:, : self.n_columns] != self.ids_BL.to(ids_BS.device)
        return not bool((is_other & (self.mask_BL != 0).to(ids_BS.device)).any())

    def facts(self) -> dict[str, str]:
        """Return what a file says of itself."""
        mask_BL = (self.mask_BL != 0).long().cpu()
        tokens_BL = self.ids_BL.long().cpu() * mask_BL
        shape = str(tuple(tokens_BL.shape)).encode()
        return {
            "format": FORMAT,
            "prompt": hashlib.sha256(shape + _bytes(tokens_BL) + _bytes(mask_BL)).hexdigest(),
            "student": self.student,
            "dtype": self.dtype,
        }


def fingerprint(model: Any) -> str:
    """Hash a student's config, and the names, shapes, dtypes and some elements of its weights."""
    config = model.config
    fields = ("kept", "d_state", "conv_width", "conv_bias", "recurrence", "window", "sinks")
    own = {name: getattr(config, name) for name in fields}
    described = json.dumps([own, config.backbone], sort_keys=True, default=str)
    digest = hashlib.sha256(described.encode())
    samples = []
    for name, weight in sorted(model.named_parameters()):
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        # An offloaded weight is elsewhere until its module runs.
        if weight.device.type != "meta":
            stride = max(1, weight.numel() // SAMPLES_PER_TENSOR)
            sample = weight.detach().flatten()[::stride][:SAMPLES_PER_TENSOR]
            samples.append(sample.to(model.device, torch.float32))
    # One transfer: every read from the device costs a sync.
    digest.update(_bytes(torch.cat(samples).cpu()))
    return digest.hexdigest()


def write_prefix(path: Path, prefix: Prefix, tensors: dict[str, Tensor]) -> None:
    """Write a prompt's state as one safetensors file, at once."""
    facts = {**prefix.facts(), "content": _digest(tensors)}
    unfinished = path.with_name(path.name + ".unfinished")
    save_file(tensors, unfinished, metadata=facts)
    os.replace(unfinished, path)


def read_prefix(path: Path, prefix: Prefix) -> dict[str, Tensor]:
    """Return the tensors of `write_prefix`, on the CPU; nothing is unpickled.

    Raises ValueError for a damaged file, and for the state of another prompt or student, or of another dtype.
    """
    tensors = {}
    try:
        with safe_open(path, framework="pt") as file:
            facts = file.metadata() or {}
            _check_facts(path, facts, prefix.facts())
            names = file.keys()
            for name in names:
                tensors[name] = file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path} cannot be read as a prompt's state ({error}); pass a file of cache.save."
        ) from error
    if facts.get("content") != _digest(tensors):
        raise ValueError(
            f"{path} is damaged: its checksum differs; call prefill and save it again."
        )
    return tensors


def _check_facts(path: Path, facts: dict[str, str], expected: dict[str, str]) -> None:
    if facts.get("format") != FORMAT:
        raise ValueError(
            f"{path} is not a prompt's state in the format of this version; pass a file of cache.save."
        )
    owners = {
        "dtype": f"a student in {facts.get('dtype')}, not {expected['dtype']}",
        "student": "another student, or of this one with other weights or settings",
        "prompt": "another prompt, or of this one with another attention_mask",
    }
    for name, owner in owners.items():
        if facts.get(name) != expected[name]:
            raise ValueError(f"{path} is the state of {owner}; call prefill and save it again.")


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _digest(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(_bytes(tensor.cpu()))
    return digest.hexdigest()
