"""Shortcuts are taken where they agree with plain forwards as well as those agree with one another, and only there."""

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
DEEP = {
    "llama": {"num_hidden_layers": 32, "initializer_range": 0.3},
    "gemma3": {"num_hidden_layers": 26, "initializer_range": 0.3},
}
HEADS = [HeadId(layer, head) for layer in (0, 12, 23) for head in (0, 3)]


def deep_model(family: str, dtype: torch.dtype) -> Any:
    """Narrow, with weights at which answers are far from uniform."""
    narrow = {"vocab_size": 160, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    return make_family_model(family, **{**narrow, **DEEP[family]}).to(dtype)


@pytest.mark.parametrize(("family", "tokenizer"), [("llama", DIGITS), ("gemma3", WORDS)], ids=DEEP)
def test_deep_models_stay_fast_in_16_bits(family: str, tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Rounding grows with depth, for plain forwards as for shortcuts: no constant tells it from a mistake."""
    model = deep_model(family, torch.bfloat16)
    options: dict[str, Any] = {"n_examples": 8, "heads": HEADS, "min_accuracy": 0.0, "progress": False}
    with caplog.at_level(logging.INFO, logger="hybrid_distill"):
        scores = score_heads(model, tokenizer, PROBE, control_texts=[" ".join(KEYS[:9])], **options)
    assert "from the ablated layer up" in caplog.text and "run in full" not in caplog.text
    exact = score_heads(model.float(), tokenizer, PROBE, **options)
    found, expected = (torch.stack([s.logprob_drop_LH[h] for h in HEADS]) for s in (scores, exact))
    assert exact.baseline["answer_logprob"] < -3 and expected.abs().max() > 0.3
    assert (found - expected).abs().max() < 0.5 * expected.abs().max()


@pytest.mark.parametrize(
    ("channel", "dtype"), [("tokens", torch.float32), ("tokens", torch.bfloat16), ("mean", torch.float32)]
)
def test_a_side_channel_between_layers_is_noticed(channel: str, dtype: torch.dtype, caplog: Any) -> None:
    """Layer 18 adds what layer 2 has seen: forwards that begin between them would read what others left behind."""
    model = deep_model("llama", dtype)
    seen: list[torch.Tensor] = []

    def look(module: Any, args: Any, output: torch.Tensor) -> None:
        seen[:] = [output if channel == "tokens" else output.mean(1, keepdim=True)]

    def add(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output + 4 * seen[0]

    hooks = [
        model.model.layers[2].mlp.register_forward_hook(look),
        model.model.layers[18].mlp.register_forward_hook(add),
    ]
    score_heads(model, WORDS, PROBE, n_examples=8, heads=HEADS[:1], min_accuracy=0.0, progress=False)
    assert "run in full" in caplog.text
    for hook in hooks:
        hook.remove()
