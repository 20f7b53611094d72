"""A Llama with a planted circuit for two hops: the value of the key asked for is a key, whose value is the answer.

Layer 1 gathers, as in `planted`: each value the key two tokens back, the end of the question the key five tokens
back. The *hop* head of layer 2 looks for the word whose key is asked for and copies it into a part of the stream of
its own; the *aggregate* head of layer 3 looks for the number whose key that word is.
"""

from __future__ import annotations

import torch
from planted import ASKED_KEY, KEY, KEYS, VALUE_KEY, Shape, noisy_teacher, plant_aggregate, plant_gather
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from hybrid_distill.plan import HeadId
from hybrid_distill.probes.kv_retrieval import N_VALUES
from hybrid_distill.probes.words import HEADER, QUESTION

GATHER_VALUE_KEY, GATHER_ASKED_KEY, HOP, AGGREGATE = HeadId(1, 0), HeadId(1, 2), HeadId(2, 3), HeadId(3, 1)
PLANTED = {GATHER_VALUE_KEY, GATHER_ASKED_KEY, HOP, AGGREGATE}
SHAPE = Shape(n_layers=5, width=176)
HOP_KEY = slice(138, 170)
# "key ' stands for the number": the answer follows the last of these.
FROM_KEY_TO_END = 5


def two_hop_teacher(noise: float = 0.01, seed: int = 0) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """The teacher and its tokenizer; ``noise`` is the spread of all other heads' weights."""
    texts = [HEADER + "\n", QUESTION.format(key=" "), ":", " ".join(KEYS), " ".join(map(str, range(N_VALUES)))]
    model, tokenizer = noisy_teacher(texts, noise, seed, SHAPE)
    with torch.no_grad():
        plant_gather(model, GATHER_VALUE_KEY, into=VALUE_KEY)
        plant_gather(model, GATHER_ASKED_KEY, into=ASKED_KEY, back=FROM_KEY_TO_END)
        plant_aggregate(model, HOP, among=KEY, into=HOP_KEY, gain=0.2)
        plant_aggregate(model, AGGREGATE, asked=HOP_KEY)
    return model, tokenizer
