"""Small random students of every kind that other projects' tests run on."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig

from hybrid_distill.model import HybridConfig, HybridForCausalLM

ALL = os.environ.get("PEERS") == "all"
"""True in `make peers`: every student and every adapter; otherwise a few of each."""

N_LAYERS = 2
N_HEADS = 4
SHAPE: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": N_LAYERS,
    "num_attention_heads": N_HEADS,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_WINDOWED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32}
FAMILIES: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, {}),
    "qwen3": (transformers.Qwen3Config, {}),
    "gemma2": (transformers.Gemma2Config, {**_WINDOWED, "query_pre_attn_scalar": 8}),
    "gemma3": (transformers.Gemma3TextConfig, {**_WINDOWED, "query_pre_attn_scalar": 8}),
}
RECURRENCES = ("discrete", "mamba2", "gdn")
# "some": two heads of different KV groups in one layer, one head in the other.
KEPT: dict[str, list[list[int]]] = {
    "none": [[], []],
    "some": [[0, 3], [1]],
    "all": [list(range(N_HEADS))] * N_LAYERS,
}


@dataclass(frozen=True)
class Kind:
    """A family, the recurrence of its recurrent heads, and which heads stay attention (`KEPT`)."""

    family: str
    recurrence: str
    kept: str

    @property
    def name(self) -> str:
        return f"{self.family}_{self.recurrence}_{self.kept}"

    def config(self, d_state: int = 4, **overrides: Any) -> HybridConfig:
        """Make the student's config; ``overrides`` are fields of its backbone."""
        config_class, fields = FAMILIES[self.family]
        backbone = config_class(**{**SHAPE, **fields, **overrides})
        return HybridConfig(
            backbone.to_dict(), KEPT[self.kept], d_state=d_state, recurrence=self.recurrence
        )


EVERY = tuple(Kind(*parts) for parts in itertools.product(FAMILIES, RECURRENCES, KEPT))


def make_student(kind: Kind, d_state: int = 4, **overrides: Any) -> HybridForCausalLM:
    """Make a random student whose recurrent heads use all that they have, as a trained one does.

    A new one has gates of zero weights, which DoRA would divide by.
    """
    transformers.set_seed(0)
    student = HybridForCausalLM(kind.config(d_state, **overrides))
    with torch.no_grad():
        for heads in student.recurrent_heads():
            for parameter in heads.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return student.eval()


# Each family, each recurrence and each way of keeping heads.
FEW = (
    Kind("qwen3", "mamba2", "some"),
    Kind("llama", "discrete", "some"),
    Kind("gemma3", "gdn", "none"),
    Kind("gemma2", "discrete", "all"),
)
