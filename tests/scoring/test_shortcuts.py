"""Shortcuts are taken where they agree with full forwards as well as those with one another."""

import itertools
import logging
from typing import Any

import pytest
import torch
from conftest import make_family_model
from messages import logged_by
from planted import KEYS
from test_scoring import DIGITS, WORDS

from hybrid_distill.plan import HeadId
from hybrid_distill.probes.kv_retrieval import KVRetrieval
from hybrid_distill.scoring import HeadScores, score_heads
from hybrid_distill.scoring.forwards import FromLayer
from hybrid_distill.scoring.rounds import AblationRun
from hybrid_distill.scoring.shortcuts import fastest_exact

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


def score(model: Any, tokenizer: Any, heads: list[HeadId], **options: Any) -> HeadScores:
    """Score heads on eight examples, however few of them the random model answers."""
    return score_heads(
        model,
        tokenizer,
        PROBE,
        n_examples=8,
        heads=heads,
        min_accuracy=0.0,
        progress=False,
        **options,
    )


@pytest.mark.parametrize(("family", "tokenizer"), [("llama", DIGITS), ("gemma3", WORDS)])
def test_deep_models_stay_fast_in_16_bits(family: str, tokenizer: Any, caplog) -> None:
    """Rounding grows with depth, in full forwards as in shortcuts: no constant tells it from a
    mistake."""
    model = deep_model(family, torch.bfloat16)
    texts = [" ".join(KEYS[:9])]
    with caplog.at_level(logging.INFO, logger="hybrid_distill"):
        in_bfloat16 = score(model, tokenizer, HEADS, control_texts=texts)
    (record,) = logged_by(caplog, AblationRun.log_estimate)
    assert any(isinstance(fact, FromLayer) for fact in record.args)

    in_float32 = score(model.float(), tokenizer, HEADS)
    drops = torch.stack([in_bfloat16.logprob_drop_LH[head] for head in HEADS])
    expected = torch.stack([in_float32.logprob_drop_LH[head] for head in HEADS])
    largest = expected.abs().max()
    assert in_float32.baseline["answer_logprob"] < -3, "answers are nearly uniform"
    assert largest > 0.3, "no head matters"
    assert (drops - expected).abs().max() < 0.5 * largest


@pytest.mark.parametrize(
    ("channel", "dtype"),
    [("tokens", torch.float32), ("tokens", torch.bfloat16), ("mean", torch.float32)],
)
def test_a_side_channel_between_layers_is_noticed(channel: str, dtype: torch.dtype, caplog) -> None:
    """Layer 18 adds what layer 2 has seen: forwards that begin between them read old values."""
    model = deep_model("llama", dtype)
    seen: list[torch.Tensor] = []

    def look(module: Any, args: Any, output: torch.Tensor) -> None:
        seen.clear()
        seen.append(output if channel == "tokens" else output.mean(1, keepdim=True))

    def add(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output + 4 * seen[0]

    model.model.layers[2].mlp.register_forward_hook(look)
    model.model.layers[18].mlp.register_forward_hook(add)
    score(model, WORDS, HEADS[:1])
    assert logged_by(caplog, fastest_exact)
