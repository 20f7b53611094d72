"""Shortcuts are taken where they agree with full forwards as well as those with one another."""

import itertools
import logging
from typing import Any

import pytest
import torch
from conftest import make_family_model
from planted import KEYS
from test_scoring import DIGITS, WORDS

from hybrid_distill.plan import HeadId
from hybrid_distill.probes.kv_retrieval import KVRetrieval
from hybrid_distill.scoring import score_heads

PROBE = KVRetrieval(6, keys=KEYS[:16])
N_LAYERS = {"llama": 32, "gemma3": 26}
HEADS = [HeadId(*pair) for pair in itertools.product((0, 12, 23), (0, 3))]


def deep_model(family: str, dtype: torch.dtype) -> Any:
    """Make a narrow model with weights at which answers are far from uniform."""
    model = make_family_model(
        family,
        num_hidden_layers=N_LAYERS[family],
        vocab_size=160,
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.3,
    )
    return model.to(dtype)


@pytest.mark.parametrize(("family", "tokenizer"), [("llama", DIGITS), ("gemma3", WORDS)])
def test_deep_models_stay_fast_in_16_bits(family: str, tokenizer: Any, caplog) -> None:
    """Rounding grows with depth, in full forwards as in shortcuts: no constant tells it from a
    mistake."""
    model = deep_model(family, torch.bfloat16)
    texts = [" ".join(KEYS[:9])]
    options: dict[str, Any] = {
        "n_examples": 8,
        "heads": HEADS,
        "min_accuracy": 0.0,
        "progress": False,
    }
    with caplog.at_level(logging.INFO, logger="hybrid_distill"):
        scores = score_heads(model, tokenizer, PROBE, control_texts=texts, **options)
    assert "from the ablated layer up" in caplog.text
    in_float32 = score_heads(model.float(), tokenizer, PROBE, **options)
    drops = torch.stack([scores.logprob_drop_LH[head] for head in HEADS])
    expected = torch.stack([in_float32.logprob_drop_LH[head] for head in HEADS])
    assert in_float32.baseline["answer_logprob"] < -3
    assert expected.abs().max() > 0.3
    assert (drops - expected).abs().max() < 0.5 * expected.abs().max()


@pytest.mark.parametrize(
    ("channel", "dtype"),
    [
        ("tokens", torch.float32),
        ("tokens", torch.bfloat16),
        ("mean", torch.float32),
    ],
)
def test_a_side_channel_between_layers_is_noticed(channel: str, dtype: torch.dtype, caplog) -> None:
    """Layer 18 adds what layer 2 has seen: forwards that begin between them read old values."""
    model = deep_model("llama", dtype)
    seen: list[torch.Tensor] = []

    def look(module: Any, args: Any, output: torch.Tensor) -> None:
        seen[:] = [output if channel == "tokens" else output.mean(1, keepdim=True)]

    def add(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output + 4 * seen[0]

    model.model.layers[2].mlp.register_forward_hook(look)
    model.model.layers[18].mlp.register_forward_hook(add)
    heads = HEADS[:1]
    score_heads(
        model,
        WORDS,
        PROBE,
        n_examples=8,
        heads=heads,
        min_accuracy=0.0,
        progress=False,
    )
    assert "run in full" in caplog.text
