"""Reasons why a format cannot express a student, for rules that several formats share.

A format's own file lists its other reasons.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..model import HybridForCausalLM
from ..model.backbone_config import rope_settings

MAMBA2 = ("mamba2", "mamba2-stock")
"""Recurrences of Mamba-2, the heads of a Falcon-H1."""
SSD_RECURRENCES = ("discrete", *MAMBA2)
"""Recurrences that are linear attention: their states decay and add up, and erase nothing (unlike those of gdn)."""
BACKBONES = ("llama", "mistral", "qwen2")
"""Backbones with Llama's decoder layers, apart from biases."""


def backbone_obstacles(
    student: HybridForCausalLM, backbones: Sequence[str] = BACKBONES
) -> list[str]:
    """List the reasons why Llama-like formats cannot express a student's backbone and kept heads."""
    backbone = student.model.config
    if backbone.model_type not in backbones:
        # At once: other backbones may lack the fields below.
        return [f"its backbone is {backbone.model_type}, not one of {', '.join(backbones)}"]
    reasons = []
    if backbone.hidden_act != "silu":
        reasons.append(f"its MLPs use {backbone.hidden_act}, not silu")
    cache = student.new_cache()
    for mixer in student.mixers():
        if mixer.kept and cache.layer(mixer.layer).sliding_window is not None:
            reasons.append(
                "some of its kept heads use sliding-window attention, which this format lacks"
            )
            break
    return reasons


def recurrence_obstacles(student: HybridForCausalLM) -> list[str]:
    """List the reason, if any, why a format with linear attention cannot express the recurrent heads."""
    unsupported = unsupported_recurrence(student, SSD_RECURRENCES)
    if unsupported is None:
        return []
    return [f"its recurrent heads are {unsupported}, not one of {', '.join(SSD_RECURRENCES)}"]


def unsupported_recurrence(student: HybridForCausalLM, supported: Sequence[str]) -> str | None:
    """Return the recurrence of a student's recurrent heads if it is not among those ``supported``."""
    recurrence = student.config.recurrence
    has_recurrent_heads = any(mixer.ssm is not None for mixer in student.mixers())
    if has_recurrent_heads and recurrence not in supported:
        return recurrence
    return None


def rope_kinds(student: HybridForCausalLM) -> set[str]:
    """Return the RoPE types of a student's layers."""
    settings = rope_settings(student.model.config)
    return {rope.get("rope_type") or rope.get("type") or "default" for rope in settings}
