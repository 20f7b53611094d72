"""A Llama whose retrieval circuit is set by hand, so that its retrieval heads are known.

The circuit is gather-and-aggregate: two *gather* heads of layer 1 copy the key that stands two
tokens back, one as what a value is found by, one as what is asked for ("key : value" and "key ' is"
both have it there), each into its own part of the residual stream; the *aggregate* head of layer 2
looks for the value whose key is asked for and copies it to the output. All other heads are small
noise, MLPs are zero.
"""

from dataclasses import dataclass

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hybrid_distill.assets.dictionaries import NOUNS
from hybrid_distill.plan import HeadId
from hybrid_distill.probes.kv_retrieval import HEADER, N_VALUES, QUESTION

KEYS = NOUNS[:32]
GATHER_VALUE_KEY = HeadId(1, 1)
GATHER_ASKED_KEY = HeadId(1, 3)
AGGREGATE = HeadId(2, 2)
PLANTED = {GATHER_VALUE_KEY, GATHER_ASKED_KEY, AGGREGATE}

N_LAYERS = 4
N_HEADS = 4
N_KV_HEADS = 2
HEAD_DIM = 128
WIDTH = 160
# Pair f of a head's columns turns by THETA ** (-2 f / head dim) radians a token: the first pairs
# tell positions apart, from this share of the pairs on they hardly move within a prompt and carry
# content.
THETA = 1e12
STILL_FROM = 28 / 64
# Parts of the residual stream.
CONSTANT = 0
FILLER = 1
KEY = slice(2, 34)
VALUE = slice(34, 54)
VALUE_KEY = slice(54, 86)
ASKED_KEY = slice(86, 118)
OUT = slice(118, 138)


@dataclass(frozen=True)
class Shape:
    """Sizes of a planted Llama; ``vocabulary`` None is as large as its tokenizer's."""

    n_layers: int = N_LAYERS
    n_heads: int = N_HEADS
    n_kv_heads: int = N_KV_HEADS
    head_dim: int = HEAD_DIM
    width: int = WIDTH
    intermediate: int = 8
    vocabulary: int | None = None


@dataclass(frozen=True)
class Circuit:
    """Where the three heads are; those of one layer may not share a KV head."""

    gather_value_key: HeadId = GATHER_VALUE_KEY
    gather_asked_key: HeadId = GATHER_ASKED_KEY
    aggregate: HeadId = AGGREGATE

    @property
    def heads(self) -> set[HeadId]:
        return {self.gather_value_key, self.gather_asked_key, self.aggregate}


def word_tokenizer(
    texts: list[str],
    pattern: str = r"\n|:|'|\p{N}+",
    spaces: str = "removed",
    **special: str,
) -> PreTrainedTokenizerFast:
    """Make one token a word or match of ``pattern``; spaces vanish, or are tokens ("isolated").

    There is no pad token.
    """
    at_spaces = pre_tokenizers.Split(" ", spaces)
    at_matches = pre_tokenizers.Split(Regex(pattern), "isolated")
    pieces = pre_tokenizers.Sequence([at_spaces, at_matches])
    words = ["<unk>", *special.values()]
    for text in texts:
        words += [word for word, _ in pieces.pre_tokenize_str(text)]
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys(words))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pieces
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", **special)


def probe_texts() -> list[str]:
    """List every word that a prompt with ``KEYS`` can hold."""
    values = " ".join(map(str, range(N_VALUES)))
    return [HEADER + "\n", QUESTION.format(key=" "), ":", " ".join(KEYS), values]


def planted_teacher(
    noise: float = 0.015,
    seed: int = 0,
    *,
    shape: Shape = Shape(),
    circuit: Circuit = Circuit(),
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Make the teacher and its tokenizer; ``noise`` is the spread of all other heads' weights."""
    tokenizer = word_tokenizer(probe_texts())
    config = LlamaConfig(
        vocab_size=shape.vocabulary or len(tokenizer),
        hidden_size=shape.width,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.n_layers,
        num_attention_heads=shape.n_heads,
        num_key_value_heads=shape.n_kv_heads,
        head_dim=shape.head_dim,
        rope_theta=THETA,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "self_attn" in name:
                parameter.copy_(noise * torch.randn(parameter.shape, generator=generator))
            elif "norm" not in name:
                parameter.zero_()
        _plant_words(model, tokenizer)
        _plant_gather(model, circuit.gather_value_key, into=VALUE_KEY)
        _plant_gather(model, circuit.gather_asked_key, into=ASKED_KEY)
        _plant_aggregate(model, circuit.aggregate)
    return model, tokenizer


def _plant_words(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Every embedding has the same length: norms before attention then scale all words alike."""
    embedding = model.model.embed_tokens.weight
    head = model.lm_head.weight
    # A word is a key, a value of two digits, or filler, each of length 1.
    embedding[:, CONSTANT] = 1
    embedding[:, FILLER] = 1
    for index, key in enumerate(KEYS):
        token = tokenizer.convert_tokens_to_ids(key)
        embedding[token, FILLER] = 0
        embedding[token, KEY][index] = 1
    for value in range(N_VALUES):
        token = tokenizer.convert_tokens_to_ids(str(value))
        embedding[token, FILLER] = 0
        digits = [value // 10, 10 + value % 10]
        embedding[token, VALUE][digits] = 0.5**0.5
        head[token, OUT][digits] = 2


def _slices(model: LlamaForCausalLM, head: HeadId) -> tuple[slice, slice]:
    """Return a head's rows in q_proj (columns in o_proj), and its KV head's in k_proj, v_proj."""
    config = model.config
    size = config.head_dim
    kv_head = head.head // (config.num_attention_heads // config.num_key_value_heads)
    q_rows = slice(head.head * size, (head.head + 1) * size)
    kv_rows = slice(kv_head * size, (kv_head + 1) * size)
    return q_rows, kv_rows


def _still(model: LlamaForCausalLM, number: int) -> list[int]:
    """Return the first ``number`` columns of a head that carry content, of both halves of the
    pairs."""
    half = model.config.head_dim // 2
    first = round(STILL_FROM * half)
    columns = [*range(first, half), *range(half + first, 2 * half)]
    assert number <= len(columns), f"a head of size {2 * half} has {len(columns)} columns"
    return columns[:number]


def _plant_gather(model: LlamaForCausalLM, head: HeadId, into: slice) -> None:
    """Attend two tokens back: the query of every token is the key of every token, turned by two
    positions."""
    attention = model.model.layers[head.layer].self_attn
    size = model.config.head_dim
    q_rows, kv_rows = _slices(model, head)
    (first_still,) = _still(model, 1)
    moving = torch.arange(first_still)
    turn = -2 * THETA ** (-2 * moving / size)
    key = torch.zeros(size)
    key[moving] = 1
    query = torch.zeros(size)
    query[moving] = turn.cos()
    query[size // 2 + moving] = turn.sin()
    attention.q_proj.weight[q_rows] = 0
    attention.q_proj.weight[q_rows, CONSTANT] = 2 * query
    attention.k_proj.weight[kv_rows] = 0
    attention.k_proj.weight[kv_rows, CONSTANT] = 2 * key
    n = len(KEYS)
    _copy(attention.v_proj.weight[kv_rows], range(n), KEY)
    attention.o_proj.weight[:, q_rows] = 0
    # Norms let a wider stream's few words stand out more.
    scale = 0.2 * (WIDTH / model.config.hidden_size) ** 0.5
    attention.o_proj.weight[into, q_rows][:, :n] = scale * torch.eye(n)


def _plant_aggregate(model: LlamaForCausalLM, head: HeadId) -> None:
    """Attend to the value whose key is asked for, and write that value out."""
    attention = model.model.layers[head.layer].self_attn
    q_rows, kv_rows = _slices(model, head)
    *content, gate = _still(model, len(KEYS) + 1)
    query = attention.q_proj.weight[q_rows]
    key = attention.k_proj.weight[kv_rows]
    _copy(query, content, ASKED_KEY, scale=4)
    _copy(key, content, VALUE_KEY, scale=4)
    # Only values are worth attending to; the question itself has the same key two tokens back.
    query[gate, CONSTANT] = 4
    key[gate, VALUE] = 4
    n = VALUE.stop - VALUE.start
    _copy(attention.v_proj.weight[kv_rows], range(n), VALUE)
    attention.o_proj.weight[:, q_rows] = 0
    attention.o_proj.weight[OUT, q_rows][:, :n] = torch.eye(n)


def _copy(
    weight: Tensor,
    rows: list[int] | range,
    columns: slice,
    scale: float = 1.0,
) -> None:
    weight.zero_()
    weight[list(rows), list(range(columns.start, columns.stop))] = scale
