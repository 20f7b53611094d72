"""Hybrid student for MLX: mlx-lm loads this file from an export's folder (`model_file` in config.json).

Module names match the export's tensors. Imports only mlx and mlx_lm. Does not use ``from __future__ import
annotations``: mlx-lm does not add this file to ``sys.modules``, where a dataclass would look up its annotations.

Shapes: B batch, L length, H recurrent heads, P head dim, N state size, Q tokens of a chunk.
"""

import re
from dataclasses import dataclass
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import BaseModelArgs, create_attention_mask, create_ssm_mask, scaled_dot_product_attention
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache
from mlx_lm.models.llama import MLP
from mlx_lm.models.rope_utils import initialize_rope

CHUNK = 64  # tokens per chunk, mixed by matrix products
MIN_LOG_DECAY = -30.0
Mask = mx.array | str | None


@dataclass
class ModelArgs(BaseModelArgs):
    """Fields of config.json that the model reads; ``backbone`` is the teacher's configuration."""

    model_type: str
    backbone: dict
    kept: list[list[int]]
    d_state: int
    conv_width: int
    recurrence: str
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        base = self.base = SimpleNamespace(**self.backbone)
        self.width, self.n_heads = base.hidden_size, base.num_attention_heads
        self.head_dim = self.backbone.get("head_dim") or self.width // self.n_heads
        self.has_bias = self.backbone.get("attention_bias", False)


class Attention(nn.Module):
    """Kept heads of a layer, without the output projection; each KV head they read is stored once."""

    def __init__(self, args: ModelArgs, kept: list[int]) -> None:
        super().__init__()
        base = args.base
        group_size = args.n_heads // (args.backbone.get("num_key_value_heads") or args.n_heads)
        groups = sorted({head // group_size for head in kept})
        read = [groups.index(head // group_size) for head in kept]
        even = [row for row in range(len(groups)) for _ in range(len(kept) // len(groups))]
        self._read = None if read == even else mx.array(read)
        self.head_dim, self.counts = args.head_dim, (len(kept), len(groups), len(groups))
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(args.width, n * self.head_dim, bias=args.has_bias or base.model_type == "qwen2")
            for n in self.counts
        )
        scaling = args.backbone.get("rope_scaling")
        self.rope = initialize_rope(self.head_dim, base.rope_theta, False, scaling, base.max_position_embeddings)

    def __call__(self, x: mx.array, mask: Mask, cache: KVCache | None) -> mx.array:
        q, k, v = (
            projection(x).reshape(*x.shape[:2], n, self.head_dim).swapaxes(1, 2)
            for projection, n in zip((self.q_proj, self.k_proj, self.v_proj), self.counts)
        )
        offset = 0 if cache is None else cache.offset
        q, k = self.rope(q, offset=offset), self.rope(k, offset=offset)
        if cache is not None:
            k, v = cache.update_and_fetch(k, v)
        if self._read is not None:
            k, v = mx.take(k, self._read, axis=1), mx.take(v, self._read, axis=1)
        y = scaled_dot_product_attention(q, k, v, cache=None, scale=self.head_dim**-0.5, mask=mask)
        return y.swapaxes(1, 2)


class Recurrent(nn.Module):
    """Recurrent heads of a layer; their cache holds the convolution's last inputs and the recurrent state."""

    def __init__(self, args: ModelArgs, n_heads: int) -> None:
        super().__init__()
        self.n_heads, self.is_mamba2 = n_heads, args.recurrence != "discrete"
        self.sizes = [n_heads * size for size in (args.head_dim, args.d_state, args.d_state)]
        self.x_proj, self.b_proj, self.c_proj = (
            nn.Linear(args.width, size, bias=not self.is_mamba2) for size in self.sizes
        )
        if self.is_mamba2:
            self.conv_bias = mx.zeros((sum(self.sizes),))
        self.z_proj = nn.Linear(args.width, self.sizes[0], bias=args.recurrence != "mamba2-stock")
        self.a_proj, self.a_bias = nn.Linear(args.width, n_heads, bias=False), mx.zeros((n_heads,))
        self.conv_weight = mx.zeros((sum(self.sizes), args.conv_width))
        self.D = mx.zeros((n_heads,))

    def __call__(self, u: mx.array, mask: mx.array | None, cache: ArraysCache | None) -> mx.array:
        xbc = mx.concatenate([self.x_proj(u), self.b_proj(u), self.c_proj(u)], axis=-1)
        xbc = self._convolved(xbc, mask, cache)
        if self.is_mamba2:
            xbc = nn.silu(xbc + self.conv_bias)
        log_a = -nn.softplus(self.a_proj(u).astype(mx.float32) + self.a_bias)
        cuts, heads = [self.sizes[0], self.sizes[0] + self.sizes[1]], (*u.shape[:2], self.n_heads, -1)
        x, b, c = (part.reshape(heads).astype(mx.float32) for part in mx.split(xbc, cuts, axis=-1))
        if self.is_mamba2:
            b = b * -log_a[..., None]
        if mask is not None:
            b, log_a = mx.where(mask[..., None, None], b, 0), mx.where(mask[..., None], log_a, 0)
        y, state = scan(x, mx.maximum(log_a, MIN_LOG_DECAY), b, c, None if cache is None else cache[1])
        if cache is not None:
            cache[1] = state
            cache.advance(u.shape[1])
        y = y + self.D.astype(mx.float32)[:, None] * x
        return y.astype(u.dtype) * nn.silu(self.z_proj(u)).reshape(heads)

    def _convolved(self, xbc: mx.array, mask: mx.array | None, cache: ArraysCache | None) -> mx.array:
        """Convolve causally, continuing from the cached inputs; cache the last inputs of each row."""
        length, n_past = xbc.shape[1], self.conv_weight.shape[1] - 1
        if mask is not None:
            xbc = mx.where(mask[..., None], xbc, 0)
        past = None if cache is None else cache[0]
        past = mx.zeros((xbc.shape[0], n_past, xbc.shape[2]), xbc.dtype) if past is None else past
        row = mx.concatenate([past, xbc], axis=1)
        if cache is not None and cache.lengths is not None:  # rows padded on the right
            ends = mx.clip(cache.lengths, 0, length)[:, None] + mx.arange(n_past)
            cache[0] = mx.take_along_axis(row, ends[..., None], axis=1)
        elif cache is not None:
            cache[0] = row[:, length:]
        return sum(row[:, tap : tap + length] * self.conv_weight[:, tap] for tap in range(n_past + 1))


def scan(x: mx.array, log_a: mx.array, b: mx.array, c: mx.array, held: mx.array | None) -> tuple[mx.array, mx.array]:
    """Run S_t = a_t S_{t-1} + x_t b_t^T, y_t = S_t c_t, in fp32; return y [B, L, H, P] and the last S [B, H, P, N]."""
    sizes = x.shape[0], *x.shape[2:], b.shape[3]
    ys, state = [], mx.zeros(sizes, mx.float32) if held is None else held
    for begin in range(0, x.shape[1], CHUNK):
        xq, bq, cq = (t[:, begin : begin + CHUNK].swapaxes(1, 2) for t in (x, b, c))  # [B, H, Q, .]
        cum = mx.cumsum(log_a[:, begin : begin + CHUNK].swapaxes(1, 2), axis=-1)
        seen = mx.tril(mx.ones((cum.shape[-1], cum.shape[-1]), mx.bool_))
        decay = mx.exp(mx.where(seen, cum[..., :, None] - cum[..., None, :], -mx.inf))
        before = mx.exp(cum)[..., None] * (cq @ state.swapaxes(-1, -2))
        ys.append(((cq @ bq.swapaxes(-1, -2)) * decay) @ xq + before)
        added = xq.swapaxes(-1, -2) @ (bq * mx.exp(cum[..., -1:] - cum)[..., None])
        state = mx.exp(cum[..., -1])[..., None, None] * state + added
    return mx.concatenate(ys, axis=2).swapaxes(1, 2), state


class Mixer(nn.Module):
    """Both kinds of heads of a layer, in the teacher's head order, and the output projection over all of them."""

    def __init__(self, args: ModelArgs, kept: list[int]) -> None:
        super().__init__()
        recurrent = [head for head in range(args.n_heads) if head not in kept]
        if kept:
            self.attention = Attention(args, kept)
        if recurrent:
            self.ssm = Recurrent(args, len(recurrent))
        self._order = mx.array([[*kept, *recurrent].index(head) for head in range(args.n_heads)])
        has_bias = args.has_bias and args.base.model_type == "llama"
        self.o_proj = nn.Linear(args.n_heads * args.head_dim, args.width, bias=has_bias)

    def __call__(self, x: mx.array, masks: tuple[Mask, mx.array | None], cache: tuple) -> mx.array:
        heads = []
        if "attention" in self:
            heads.append(self.attention(x, masks[0], cache[0]))
        if "ssm" in self:
            heads.append(self.ssm(x, masks[1], cache[-1]))
        return self.o_proj(mx.take(mx.concatenate(heads, axis=2), self._order, axis=2).flatten(2))


class Layer(nn.Module):
    def __init__(self, args: ModelArgs, kept: list[int]) -> None:
        super().__init__()
        self.self_attn, self.mlp = Mixer(args, kept), MLP(args.base)
        self.input_layernorm = nn.RMSNorm(args.width, eps=args.base.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(args.width, eps=args.base.rms_norm_eps)

    def __call__(self, h: mx.array, masks: tuple[Mask, mx.array | None], cache: tuple) -> mx.array:
        h = h + self.self_attn(self.input_layernorm(h), masks, cache)
        return h + self.mlp(self.post_attention_layernorm(h))


class Decoder(nn.Module):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(args.base.vocab_size, args.width)
        self.layers = [Layer(args, kept) for kept in args.kept]
        self.norm = nn.RMSNorm(args.width, eps=args.base.rms_norm_eps)

    def __call__(self, ids: mx.array, cache: list[CacheList] | None) -> mx.array:
        h = self.embed_tokens(ids)
        layers = [(None,)] * len(self.layers) if cache is None else [one.caches for one in cache]
        held = [one for layer in layers for one in layer if one is not None]
        keys = next((one for one in held if not isinstance(one, ArraysCache)), None)
        states = next((one for one in held if isinstance(one, ArraysCache)), None)
        masks = create_attention_mask(h, keys), create_ssm_mask(h, states)
        for layer, one in zip(self.layers, layers):
            h = layer(h, masks, one)
        return self.norm(h)


class Model(nn.Module):
    """Student with the interface that mlx-lm expects: logits, cache, layers, and weights by module name."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.args, self.model_type, self.model = args, args.model_type, Decoder(args)
        if not args.tie_word_embeddings:
            self.lm_head = nn.Linear(args.width, args.base.vocab_size, bias=False)

    def __call__(self, inputs: mx.array, cache: list[CacheList] | None = None) -> mx.array:
        h = self.model(inputs, cache)
        return self.model.embed_tokens.as_linear(h) if self.args.tie_word_embeddings else self.lm_head(h)

    def make_cache(self) -> list[CacheList]:
        """Make a KV cache for layers with kept heads, and a state cache for layers with recurrent heads."""
        return [
            CacheList(*([KVCache()] if kept else []), *([ArraysCache(2)] if len(kept) < self.args.n_heads else []))
            for kept in self.args.kept
        ]

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Rename the decays' bias: the model adds it outside its projection, which may be quantized."""
        return {re.sub(r"ssm\.a_proj\.bias$", "ssm.a_bias", name): tensor for name, tensor in weights.items()}

    @property
    def layers(self) -> list[Layer]:
        return self.model.layers
