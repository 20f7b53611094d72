"""A hybrid student for MLX: mlx-lm loads this file from the folder of an export (`model_file` in config.json).

Each layer has its kept heads as attention and the others as recurrent heads, in the teacher's head order. Names of
modules are those of the export's tensors. Imports mlx and mlx_lm alone; without ``from __future__ import annotations``,
which a dataclass cannot bear in a module that no ``sys.modules`` knows.

Shapes: B batch, L length, H recurrent heads, P head dim, N state size, C conv channels, Q tokens of a chunk.
"""

import re
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import BaseModelArgs, create_attention_mask, create_ssm_mask, scaled_dot_product_attention
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache
from mlx_lm.models.llama import MLP
from mlx_lm.models.rope_utils import initialize_rope

CHUNK = 64  # tokens that are mixed by matrix products at a time
MIN_LOG_DECAY = -30.0


@dataclass
class ModelArgs(BaseModelArgs):
    model_type: str
    backbone: dict[str, Any]
    kept: list[list[int]]
    d_state: int
    conv_width: int
    recurrence: str
    tie_word_embeddings: bool = False


class Attention(nn.Module):
    """Kept heads of a layer, without output projection; each KV head that they read is stored once."""

    def __init__(self, args: ModelArgs, kept: list[int]) -> None:
        super().__init__()
        base = args.backbone
        width, n_heads = base["hidden_size"], base["num_attention_heads"]
        self.head_dim = base.get("head_dim") or width // n_heads
        group_size = n_heads // (base.get("num_key_value_heads") or n_heads)
        groups = sorted({head // group_size for head in kept})
        self.n_kept, self.n_stored = len(kept), len(groups)
        read = [groups.index(head // group_size) for head in kept]
        even = [row for row in range(len(groups)) for _ in range(len(kept) // len(groups))]
        self._read = None if read == even else mx.array(read)
        has_bias = base["model_type"] == "qwen2" or base.get("attention_bias", False)
        self.q_proj = nn.Linear(width, len(kept) * self.head_dim, bias=has_bias)
        self.k_proj = nn.Linear(width, len(groups) * self.head_dim, bias=has_bias)
        self.v_proj = nn.Linear(width, len(groups) * self.head_dim, bias=has_bias)
        scaling, length = base.get("rope_scaling"), base["max_position_embeddings"]
        self.rope = initialize_rope(self.head_dim, base["rope_theta"], False, scaling, length)

    def __call__(self, x: mx.array, mask: Any, cache: Any) -> mx.array:
        batch, length, _ = x.shape
        counts = self.n_kept, self.n_stored, self.n_stored
        q, k, v = (
            projection(x).reshape(batch, length, n, self.head_dim).transpose(0, 2, 1, 3)
            for projection, n in zip((self.q_proj, self.k_proj, self.v_proj), counts)
        )
        offset = 0 if cache is None else cache.offset
        q, k = self.rope(q, offset=offset), self.rope(k, offset=offset)
        if cache is not None:
            k, v = cache.update_and_fetch(k, v)
        if self._read is not None:
            k, v = mx.take(k, self._read, axis=1), mx.take(v, self._read, axis=1)
        y = scaled_dot_product_attention(q, k, v, cache=None, scale=self.head_dim**-0.5, mask=mask)
        return y.transpose(0, 2, 1, 3)


class Recurrent(nn.Module):
    """Recurrent heads of a layer; their cache is what the convolution and the recurrence carry on."""

    def __init__(self, args: ModelArgs, n_heads: int) -> None:
        super().__init__()
        base, n_state = args.backbone, args.d_state
        width = base["hidden_size"]
        self.head_dim = base.get("head_dim") or width // base["num_attention_heads"]
        self.n_heads, self.is_mamba2 = n_heads, args.recurrence != "discrete"
        self.sizes = [n_heads * size for size in (self.head_dim, n_state, n_state)]
        early = not self.is_mamba2
        self.x_proj, self.b_proj, self.c_proj = (nn.Linear(width, size, bias=early) for size in self.sizes)
        if self.is_mamba2:
            self.x_bias, self.b_bias, self.c_bias = (mx.zeros((size,)) for size in self.sizes)
        self.z_proj = nn.Linear(width, self.sizes[0], bias=args.recurrence != "mamba2-stock")
        self.a_proj = nn.Linear(width, n_heads, bias=False)
        self.a_bias = mx.zeros((n_heads,))
        self.conv_weight = mx.zeros((sum(self.sizes), args.conv_width))
        self.D = mx.zeros((n_heads,))

    def __call__(self, u: mx.array, mask: mx.array | None, cache: Any) -> mx.array:
        xbc = mx.concatenate([self.x_proj(u), self.b_proj(u), self.c_proj(u)], axis=-1)
        xbc = self._convolved(xbc, mask, cache)
        if self.is_mamba2:
            xbc = nn.silu(xbc + mx.concatenate([self.x_bias, self.b_bias, self.c_bias]))
        log_a = -nn.softplus(self.a_proj(u).astype(mx.float32) + self.a_bias)
        first, second = self.sizes[0], self.sizes[0] + self.sizes[1]
        heads = *u.shape[:2], self.n_heads, -1
        x, b, c = (part.reshape(heads).astype(mx.float32) for part in mx.split(xbc, [first, second], axis=-1))
        if self.is_mamba2:
            b = b * -log_a[..., None]
        held = None if cache is None else cache[1]
        if mask is not None:
            b, log_a = mx.where(mask[..., None, None], b, 0), mx.where(mask[..., None], log_a, 0)
        y, state = scan(x, mx.maximum(log_a, MIN_LOG_DECAY), b, c, held)
        if cache is not None:
            cache[1] = state
            cache.advance(u.shape[1])
        y = y + self.D.astype(mx.float32)[:, None] * x
        return y.astype(u.dtype) * nn.silu(self.z_proj(u)).reshape(heads)

    def _convolved(self, xbc: mx.array, mask: mx.array | None, cache: Any) -> mx.array:
        """Convolve causally after what the cache holds; keep the last inputs of each row there."""
        length, n_past = xbc.shape[1], self.conv_weight.shape[1] - 1
        if mask is not None:
            xbc = mx.where(mask[..., None], xbc, 0)
        past = None if cache is None else cache[0]
        past = mx.zeros((xbc.shape[0], n_past, xbc.shape[2]), xbc.dtype) if past is None else past
        row = mx.concatenate([past, xbc], axis=1)
        if cache is not None and cache.lengths is not None:  # padding behind the tokens of a row
            ends = mx.clip(cache.lengths, 0, length)[:, None] + mx.arange(n_past)
            cache[0] = mx.take_along_axis(row, ends[..., None], axis=1)
        elif cache is not None:
            cache[0] = row[:, length:]
        return sum(row[:, tap : tap + length] * self.conv_weight[:, tap] for tap in range(n_past + 1))


def scan(x: mx.array, log_a: mx.array, b: mx.array, c: mx.array, state: mx.array | None) -> tuple[mx.array, mx.array]:
    """Run S_t = a_t S_{t-1} + x_t b_t^T, y_t = S_t c_t, in fp32; return y [B, L, H, P] and the last S [B, H, P, N]."""
    ys = []
    if state is None:
        state = mx.zeros((x.shape[0], x.shape[2], x.shape[3], b.shape[3]), mx.float32)
    for begin in range(0, x.shape[1], CHUNK):
        xq, bq, cq = (t[:, begin : begin + CHUNK].transpose(0, 2, 1, 3) for t in (x, b, c))  # [B, H, Q, .]
        cum = mx.cumsum(log_a[:, begin : begin + CHUNK].transpose(0, 2, 1), axis=-1)
        seen = mx.tril(mx.ones((cum.shape[-1], cum.shape[-1]), mx.bool_))
        decay = mx.exp(mx.where(seen, cum[..., :, None] - cum[..., None, :], -mx.inf))
        before = mx.exp(cum)[..., None] * (cq @ state.swapaxes(-1, -2))
        ys.append(((cq @ bq.swapaxes(-1, -2)) * decay) @ xq + before)
        added = xq.swapaxes(-1, -2) @ (bq * mx.exp(cum[..., -1:] - cum)[..., None])
        state = mx.exp(cum[..., -1])[..., None, None] * state + added
    return mx.concatenate(ys, axis=2).transpose(0, 2, 1, 3), state


class Mixer(nn.Module):
    """A layer's heads of both kinds, and the teacher's output projection over all of them."""

    def __init__(self, args: ModelArgs, kept: list[int]) -> None:
        super().__init__()
        base = args.backbone
        n_heads, width = base["num_attention_heads"], base["hidden_size"]
        recurrent = [head for head in range(n_heads) if head not in kept]
        if kept:
            self.attention = Attention(args, kept)
        if recurrent:
            self.ssm = Recurrent(args, len(recurrent))
        places = [*kept, *recurrent]
        self._order = mx.array([places.index(head) for head in range(n_heads)])
        head_dim = base.get("head_dim") or width // n_heads
        has_bias = base["model_type"] == "llama" and base.get("attention_bias", False)
        self.o_proj = nn.Linear(n_heads * head_dim, width, bias=has_bias)

    def __call__(self, x: mx.array, masks: tuple[Any, Any], cache: list[Any]) -> mx.array:
        heads = []
        if "attention" in self:
            heads.append(self.attention(x, masks[0], cache[0]))
        if "ssm" in self:
            heads.append(self.ssm(x, masks[1], cache[-1]))
        return self.o_proj(mx.take(mx.concatenate(heads, axis=2), self._order, axis=2).flatten(2))


class Layer(nn.Module):
    def __init__(self, args: ModelArgs, kept: list[int]) -> None:
        super().__init__()
        base = args.backbone
        self.self_attn, self.mlp = Mixer(args, kept), MLP(SimpleNamespace(**base))
        self.input_layernorm = nn.RMSNorm(base["hidden_size"], eps=base["rms_norm_eps"])
        self.post_attention_layernorm = nn.RMSNorm(base["hidden_size"], eps=base["rms_norm_eps"])

    def __call__(self, h: mx.array, masks: tuple[Any, Any], cache: list[Any]) -> mx.array:
        h = h + self.self_attn(self.input_layernorm(h), masks, cache)
        return h + self.mlp(self.post_attention_layernorm(h))


class Decoder(nn.Module):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        base = args.backbone
        self.embed_tokens = nn.Embedding(base["vocab_size"], base["hidden_size"])
        self.layers = [Layer(args, kept) for kept in args.kept]
        self.norm = nn.RMSNorm(base["hidden_size"], eps=base["rms_norm_eps"])

    def __call__(self, ids: mx.array, cache: Any) -> mx.array:
        h = self.embed_tokens(ids)
        cache = [(None, None)] * len(self.layers) if cache is None else cache
        held = [one for layer in cache for one in (layer if isinstance(layer, tuple) else layer.caches)]
        states = next((one for one in held if isinstance(one, ArraysCache)), None)
        keys = next((one for one in held if one is not None and not isinstance(one, ArraysCache)), None)
        masks = create_attention_mask(h, keys), create_ssm_mask(h, states)
        for layer, one in zip(self.layers, cache):
            h = layer(h, masks, one if isinstance(one, tuple) else one.caches)
        return self.norm(h)


class Model(nn.Module):
    """What mlx-lm asks for: logits of ids, a cache, and the layers."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.args, self.model_type = args, args.model_type
        self.model = Decoder(args)
        if not args.tie_word_embeddings:
            self.lm_head = nn.Linear(args.backbone["hidden_size"], args.backbone["vocab_size"], bias=False)

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        h = self.model(inputs, cache)
        return self.model.embed_tokens.as_linear(h) if self.args.tie_word_embeddings else self.lm_head(h)

    def make_cache(self) -> list[CacheList]:
        """Make a cache of keys and values where heads were kept, and of states where some are recurrent."""
        n_heads = self.args.backbone["num_attention_heads"]
        return [
            CacheList(*([KVCache()] if kept else []), *([ArraysCache(size=2)] if len(kept) < n_heads else []))
            for kept in self.args.kept
        ]

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Take biases that are added later out of their projections, which may be quantized."""
        late = "a" if self.args.recurrence == "discrete" else "axbc"
        ending = re.compile(rf"ssm\.([{late}])_proj\.bias$")
        return {ending.sub(r"ssm.\1_bias", name): tensor for name, tensor in weights.items()}

    @property
    def layers(self) -> list[Layer]:
        return self.model.layers
