"""File of a prompt's state: a cache that ``model.prefill`` has filled, with its prompt and its student.

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
from torch import Tensor, nn

from .weight_samples import sample_weights

FORMAT = "hybrid-distill prefix 1"
SAMPLES_PER_TENSOR = 64
"""Elements of each weight that a fingerprint reads."""
STUDENT_FIELDS = ("kept", "d_state", "conv_width", "conv_bias", "recurrence", "window", "sinks")
"""Settings of a student that its weights may not show: beside windows, attention stays whole."""
OUTPUT_SETTINGS = (
    "bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "return_dict", "output_attentions",
    "output_hidden_states", "output_router_logits",
)  # fmt: skip
"""Settings of a decoder that the state after a prompt does not depend on."""


class Prefix(NamedTuple):
    """A prompt [B, L], which of its columns are tokens, and the student that has read it."""

    ids_BL: Tensor
    mask_BL: Tensor
    student: str
    """`prompt_state_fingerprint` of the student."""
    dtype: str

    @property
    def n_columns(self) -> int:
        """Length L of the rows."""
        return self.ids_BL.shape[1]

    def begins(self, ids_BS: Tensor, mask_BS: Tensor | None) -> bool:
        """Return True if these rows begin with the prompt and its padding; without a mask, all are tokens.

        The ids at padding do not matter.
        """
        if not self._fits(ids_BS):
            return False
        is_other_BL = ids_BS[:, : self.n_columns] != self.ids_BL.to(ids_BS.device)
        return self._is_same(is_other_BL, mask_BS)

    def begins_embedded(
        self, embedded_BSD: Tensor, mask_BS: Tensor | None, embedding: nn.Module
    ) -> bool:
        """Return `begins` for the embeddings of rows, given the student's embedding of tokens."""
        if not self._fits(embedded_BSD):
            return False
        own_BLD = embedding(self.ids_BL).to(embedded_BSD)
        is_other_BL = (embedded_BSD[:, : self.n_columns] != own_BLD).any(dim=-1)
        return self._is_same(is_other_BL, mask_BS)

    def has_same_padding(self, n_rows: int, mask_BS: Tensor | None) -> bool:
        """Return True if rows whose tokens are not known are as many as the prompt's, and padded alike."""
        if n_rows != len(self.ids_BL):
            return False
        is_other_BL = torch.zeros_like(self.mask_BL, dtype=torch.bool)
        if mask_BS is not None:
            is_other_BL = is_other_BL.to(mask_BS.device)
        return self._is_same(is_other_BL, mask_BS)

    def _fits(self, rows: Tensor) -> bool:
        """Return True if the rows are as many as the prompt's, and as long or longer."""
        return rows.shape[0] == self.ids_BL.shape[0] and rows.shape[1] >= self.n_columns

    def _is_same(self, is_other_BL: Tensor, mask_BS: Tensor | None) -> bool:
        """Return True if no token of the prompt is another, and the padding is the prompt's."""
        is_token_BL = (self.mask_BL != 0).to(is_other_BL.device)
        counts_as_token_BL = torch.ones_like(is_token_BL)
        if mask_BS is not None:
            counts_as_token_BL = mask_BS[:, : self.n_columns] != 0
        differs_BL = (is_other_BL & is_token_BL) | (counts_as_token_BL != is_token_BL)
        return not bool(differs_BL.any())

    def repeated(self, n: int) -> Prefix:
        """Return the prompt with each row n times."""
        return self._replace(
            ids_BL=self.ids_BL.repeat_interleave(n, dim=0),
            mask_BL=self.mask_BL.repeat_interleave(n, dim=0),
        )

    def facts(self) -> dict[str, str]:
        """Return the metadata by which a file is recognized."""
        mask_BL = (self.mask_BL != 0).long().cpu()
        tokens_BL = self.ids_BL.long().cpu() * mask_BL
        shape = str(tuple(tokens_BL.shape)).encode()
        prompt = shape + _bytes(tokens_BL) + _bytes(mask_BL)
        return {
            "format": FORMAT,
            "prompt": hashlib.sha256(prompt).hexdigest(),
            "student": self.student,
            "dtype": self.dtype,
        }


@torch.no_grad()
def prompt_state_fingerprint(model: Any, ids_BL: Tensor, mask_BL: Tensor) -> str:
    """Hash everything on which the state after a prompt depends.

    That is a student's settings, its weights and which of its adapters are on, and the embeddings of the tokens. Of
    each weight, only some elements are read. Wherever a weight is, on a device or offloaded, the hash is the same.
    """
    config = model.config
    settings = {name: getattr(config, name) for name in STUDENT_FIELDS}
    backbone = {
        name: value for name, value in config.backbone.items() if name not in OUTPUT_SETTINGS
    }
    description_of_config = json.dumps([settings, backbone], sort_keys=True, default=str)
    digest = hashlib.sha256(description_of_config.encode())
    # Training may change the embeddings of a few tokens alone, which a sample would not notice.
    token_T = ids_BL[mask_BL != 0].unique()
    token_T = token_T[token_T < config.vocab_size]
    embedding_TD = model.get_input_embeddings()(token_T)
    samples = [embedding_TD.float().flatten()]
    for description, sample in sample_weights(model.model, SAMPLES_PER_TENSOR):
        digest.update(description.encode())
        samples.append(sample.to(ids_BL.device, torch.float32))
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
        # Before the student, whose hash holds the embeddings of the prompt's tokens.
        "prompt": "another prompt, or of this one with another attention_mask",
        "student": "another student, or of this one with other weights or settings",
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
