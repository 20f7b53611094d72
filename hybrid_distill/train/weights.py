"""Weights as files hold them: each tensor once, its rows in one file or several, one hash."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn


class ShardedTensors(Mapping[str, Tensor]):
    """Tensors whose rows are spread over several safetensors files, in order; read on access."""

    def __init__(self, paths: Sequence[Path], prefix: str = "") -> None:
        self._prefix = prefix
        self._holders: dict[str, list[safe_open]] = {}
        """Files that hold rows of each tensor."""
        for path in paths:
            file = safe_open(path, framework="pt")
            for name in file.keys():  # noqa: SIM118
                if name.startswith(prefix):
                    self._holders.setdefault(name.removeprefix(prefix), []).append(file)

    def __getitem__(self, name: str) -> Tensor:
        parts = [file.get_tensor(self._prefix + name) for file in self._holders[name]]
        # Also for scalars, which cannot be concatenated: only one process writes them.
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts)

    def rows(self, name: str, begin: int, end: int) -> Tensor:
        """Read only the rows from ``begin`` to ``end`` of a tensor."""
        parts: list[Tensor] = []
        first_row = 0
        for file in self._holders[name]:
            stored = file.get_slice(self._prefix + name)
            n_rows = stored.get_shape()[0]
            begin_here = max(begin - first_row, 0)
            end_here = min(end - first_row, n_rows)
            # May be empty, and is then what an empty share must look like: no rows, the other
            # sizes.
            parts.append(stored[begin_here : max(end_here, 0)])
            first_row += n_rows
        return torch.cat(parts)

    def __iter__(self) -> Iterator[str]:
        return iter(self._holders)

    def __len__(self) -> int:
        return len(self._holders)


def untied_state(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return (state dict with each tensor once, stored name of each tied name)."""
    untied: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    name_of_storage: dict[tuple[int, torch.Size], str] = {}
    for name, tensor in model.state_dict().items():
        # By address: the state dict makes new tensors of tied parameters. Empty tensors all have
        # address 0.
        storage = (tensor.data_ptr(), tensor.shape)
        if tensor.numel() and storage in name_of_storage:
            tied[name] = name_of_storage[storage]
            continue
        name_of_storage[storage] = name
        untied[name] = tensor
    return untied, tied


def weights_hash(model: nn.Module) -> str:
    """Hash every parameter and persistent buffer: names, shapes and values.

    Values are hashed as float32, so that a bfloat16 model and its float32 copy have the same hash.
    """
    digest = hashlib.sha256()
    untied, _ = untied_state(model)
    for name, tensor in sorted(untied.items()):
        values = tensor.detach().cpu()
        if values.is_floating_point():
            values = values.float()
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(values.contiguous().view(-1).numpy().data)
    return digest.hexdigest()
