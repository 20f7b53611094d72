"""Check a teacher's family with a small student of it, before anything is computed."""

from __future__ import annotations

import logging

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from ..plan import HeadPlan
from .build import build_student

log = logging.getLogger(__name__)

SMALL = 256
"""Largest vocabulary and MLP width of the student that `check_family` makes."""
SHORT_WINDOW = 3
"""Largest window of that student, shorter than the document that it is checked on."""


def check_family(teacher: PreTrainedModel, recurrence: str = "discrete", window: int = 0) -> None:
    """Check a small random student of the teacher's family with `check_same_logits`, before anything is computed.

    It has the teacher's config, but few layers (one of each type), a small vocabulary and narrow MLPs. The teacher may
    be on the meta device. Raises ValueError if this version of transformers computes such a student wrongly.
    """
    try:
        config = _small_config(teacher.config)
        # The caller's random numbers must not depend on a check. It draws on the CPU alone; torch.manual_seed would
        # seed GPUs too.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            small = AutoModelForCausalLM.from_config(
                config,
                dtype=torch.float32,
                attn_implementation=teacher.config._attn_implementation,
                trust_remote_code=False,
            )
    # A family whose sizes depend on each other: its student is checked when it is built.
    except Exception as error:
        log.debug("no small %s could be made: %s", type(teacher).__name__, error)
        return
    # Each layer keeps one head, so that both kinds of heads run in it.
    first_heads = [(layer, 0) for layer in range(config.num_hidden_layers)]
    plan = HeadPlan.from_pairs(small, first_heads)
    build_student(
        small,
        plan,
        d_state=4,
        recurrence=recurrence,
        window=min(window, SHORT_WINDOW),
        sinks=min(window, 1),
        init="random",
    )


def _small_config(config: PretrainedConfig) -> PretrainedConfig:
    """Return the config with the first layer of each type, or the first two, and small sizes."""
    fields = config.to_dict()
    n_layers = config.num_hidden_layers
    layer_types = fields.get("layer_types") or ["first", "second"][:n_layers]
    layers = sorted({layer_types.index(kind) for kind in layer_types})
    for name, value in fields.items():
        # Any list of this length holds a setting a layer: layer_types, no_rope_layers.
        if isinstance(value, list) and len(value) == n_layers:
            fields[name] = [value[layer] for layer in layers]
        # The id may lie outside the small vocabulary.
        if name.endswith("token_id"):
            fields[name] = None
    fields["num_hidden_layers"] = len(layers)
    fields["vocab_size"] = min(config.vocab_size, SMALL)
    if isinstance(fields.get("intermediate_size"), int):
        fields["intermediate_size"] = min(fields["intermediate_size"], SMALL)
    return type(config).from_dict(fields)
