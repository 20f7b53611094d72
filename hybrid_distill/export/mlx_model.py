"""Hybrid student for MLX: mlx-lm loads this file from an export's folder.

config.json names it as `model_file`. Module names match the export's tensors. Imports only mlx and
mlx_lm. Does not use ``from __future__ import annotations``: mlx-lm does not add this file to
``sys.modules``, where a dataclass would look up its annotations.

Shapes: B batch, L length, H recurrent heads, P head dim, N state size, Q tokens of a chunk.
"""

import re
from dataclasses import dataclass
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import (
    BaseModelArgs,
    create_attention_mask,
    create_ssm_mask,
    scaled_dot_product_attention,
)
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache
from mlx_lm.models.llama import MLP
from mlx_lm.models.rope_utils import initialize_rope

CHUNK = 64
"""Tokens of a chunk, mixed by matrix products."""
MIN_LOG_DECAY = -30.0
"""Erases a float32 state completely, and keeps sums of log decays finite."""
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
        self.base = SimpleNamespace(**self.backbone)
        self.width = self.base.hidden_size
        self.n_heads = self.base.num_attention_heads
        self.head_dim = self.backbone.get("head_dim") or self.width // self.n_heads
        self.has_bias = self.backbone.get("attention_bias", False)


class Attention(nn.Module):
    """Kept heads of a layer, without the output projection.

    Each KV head they read is stored once.
    """

    def __init__(self, args: ModelArgs, kept: list[int]) -> None:
        super().__init__()
        base = args.base
        n_kv_heads = args.backbone.get("num_key_value_heads") or args.n_heads
        group_size = args.n_heads // n_kv_heads
        groups = sorted({head // group_size for head in kept})
        stored_for_kept = [groups.index(head // group_size) for head in kept]
        # The attention function repeats KV heads itself, if all serve equally many query heads.
        per_group = len(kept) // len(groups)
        even = [position // per_group for position in range(per_group * len(groups))]
        self._read = None if stored_for_kept == even else mx.array(stored_for_kept)
        self.head_dim = args.head_dim
        self.n_kept = len(kept)
        self.n_stored = len(groups)
        has_bias = args.has_bias or base.model_type == "qwen2"
        self.q_proj = nn.Linear(args.width, self.n_kept * self.head_dim, bias=has_bias)
        self.k_proj = nn.Linear(args.width, self.n_stored * self.head_dim, bias=has_bias)
        self.v_proj = nn.Linear(args.width, self.n_stored * self.head_dim, bias=has_bias)
        self.rope = initialize_rope(
            self.head_dim,
            base.rope_theta,
            False,
            args.backbone.get("rope_scaling"),
            base.max_position_embeddings,
        )

    def __call__(self, x: mx.array, mask: Mask, cache: KVCache | None) -> mx.array:
        q = self._split(self.q_proj(x), self.n_kept)
        k = self._split(self.k_proj(x), self.n_stored)
        v = self._split(self.v_proj(x), self.n_stored)
        offset = 0 if cache is None else cache.offset
        q = self.rope(q, offset=offset)
        k = self.rope(k, offset=offset)
        if cache is not None:
            k, v = cache.update_and_fetch(k, v)
        if self._read is not None:
            k = mx.take(k, self._read, axis=1)
            v = mx.take(v, self._read, axis=1)
        scale = self.head_dim**-0.5
        y = scaled_dot_product_attention(q, k, v, cache=None, scale=scale, mask=mask)
        return y.swapaxes(1, 2)

    def _split(self, x: mx.array, n_heads: int) -> mx.array:
        return x.reshape(*x.shape[:2], n_heads, self.head_dim).swapaxes(1, 2)


class Recurrent(nn.Module):
    """Recurrent heads of a layer.

    Their cache holds the convolution's last inputs and the recurrent state.
    """

    def __init__(self, args: ModelArgs, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.is_mamba2 = args.recurrence != "discrete"
        width = args.width
        n_inputs = n_heads * args.head_dim
        n_keys = n_heads * args.d_state
        self.cuts = [n_inputs, n_inputs + n_keys]
        self.x_proj = nn.Linear(width, n_inputs, bias=not self.is_mamba2)
        self.b_proj = nn.Linear(width, n_keys, bias=not self.is_mamba2)
        self.c_proj = nn.Linear(width, n_keys, bias=not self.is_mamba2)
        n_channels = n_inputs + 2 * n_keys
        if self.is_mamba2:
            self.conv_bias = mx.zeros((n_channels,))
        self.z_proj = nn.Linear(width, n_inputs, bias=args.recurrence != "mamba2-stock")
        self.a_proj = nn.Linear(width, n_heads, bias=False)
        self.a_bias = mx.zeros((n_heads,))
        self.conv_weight = mx.zeros((n_channels, args.conv_width))
        self.D = mx.zeros((n_heads,))

    def __call__(self, u: mx.array, mask: mx.array | None, cache: ArraysCache | None) -> mx.array:
        xbc = mx.concatenate([self.x_proj(u), self.b_proj(u), self.c_proj(u)], axis=-1)
        xbc = self._convolved(xbc, mask, cache)
        if self.is_mamba2:
            xbc = nn.silu(xbc + self.conv_bias)
        log_a = -nn.softplus(self.a_proj(u).astype(mx.float32) + self.a_bias)
        heads = (*u.shape[:2], self.n_heads, -1)
        parts = mx.split(xbc, self.cuts, axis=-1)
        x, b, c = [part.reshape(heads).astype(mx.float32) for part in parts]
        if self.is_mamba2:
            b = b * -log_a[..., None]
        if mask is not None:
            b = mx.where(mask[..., None, None], b, 0)
            log_a = mx.where(mask[..., None], log_a, 0)
        state = None if cache is None else cache[1]
        y, state = scan(x, mx.maximum(log_a, MIN_LOG_DECAY), b, c, state)
        if cache is not None:
            cache[1] = state
            cache.advance(u.shape[1])
        y = y + self.D.astype(mx.float32)[:, None] * x
        return y.astype(u.dtype) * nn.silu(self.z_proj(u)).reshape(heads)

    def _convolved(
        self, xbc: mx.array, mask: mx.array | None, cache: ArraysCache | None
    ) -> mx.array:
        """Convolve causally, continuing from the cached inputs; cache each row's last inputs."""
        length = xbc.shape[1]
        n_past = self.conv_weight.shape[1] - 1
        if mask is not None:
            xbc = mx.where(mask[..., None], xbc, 0)
        past = None if cache is None else cache[0]
        if past is None:
            past = mx.zeros((xbc.shape[0], n_past, xbc.shape[2]), xbc.dtype)
        row = mx.concatenate([past, xbc], axis=1)
        if cache is not None and cache.lengths is not None:
            # Rows padded on the right: each keeps the inputs before its own padding.
            ends = mx.clip(cache.lengths, 0, length)[:, None] + mx.arange(n_past)
            cache[0] = mx.take_along_axis(row, ends[..., None], axis=1)
        elif cache is not None:
            cache[0] = row[:, length:]
        taps = range(n_past + 1)
        return sum(row[:, tap : tap + length] * self.conv_weight[:, tap] for tap in taps)


def scan(
    x: mx.array, log_a: mx.array, b: mx.array, c: mx.array, held: mx.array | None
) -> tuple[mx.array, mx.array]:
    """Run S_t = a_t S_{t-1} + x_t b_t^T, y_t = S_t c_t, in float32.

    Returns y [B, L, H, P] and the last S [B, H, P, N].
    """
    state: mx.array = held
    if held is None:
        state = mx.zeros((x.shape[0], *x.shape[2:], b.shape[3]), mx.float32)
    chunks = []
    for begin in range(0, x.shape[1], CHUNK):
        chunk = slice(begin, begin + CHUNK)
        # [B, H, Q, P], twice [B, H, Q, N], and [B, H, Q].
        xq = x[:, chunk].swapaxes(1, 2)
        bq = b[:, chunk].swapaxes(1, 2)
        cq = c[:, chunk].swapaxes(1, 2)
        cum = mx.cumsum(log_a[:, chunk].swapaxes(1, 2), axis=-1)
        n_tokens = cum.shape[-1]
        seen = mx.tril(mx.ones((n_tokens, n_tokens), mx.bool_))
        # Masked before exp: above the diagonal, the differences are positive and may overflow.
        decay = mx.exp(mx.where(seen, cum[..., :, None] - cum[..., None, :], -mx.inf))
        from_before = mx.exp(cum)[..., None] * (cq @ state.swapaxes(-1, -2))
        within = ((cq @ bq.swapaxes(-1, -2)) * decay) @ xq
        chunks.append(within + from_before)
        to_end = mx.exp(cum[..., -1:] - cum)[..., None]
        added = xq.swapaxes(-1, -2) @ (bq * to_end)
        state = mx.exp(cum[..., -1])[..., None, None] * state + added
    return mx.concatenate(chunks, axis=2).swapaxes(1, 2), state


class Mixer(nn.Module):
    """Both kinds of heads of a layer, in the teacher's head order, and their output projection."""

    def __init__(self, args: ModelArgs, kept: list[int]) -> None:
        super().__init__()
        recurrent = [head for head in range(args.n_heads) if head not in kept]
        if kept:
            self.attention = Attention(args, kept)
        if recurrent:
            self.ssm = Recurrent(args, len(recurrent))
        # The place of each head in the concatenated outputs, kept heads first.
        order = [*kept, *recurrent]
        self._order = mx.array([order.index(head) for head in range(args.n_heads)])
        has_bias = args.has_bias and args.base.model_type == "llama"
        self.o_proj = nn.Linear(args.n_heads * args.head_dim, args.width, bias=has_bias)

    def __call__(self, x: mx.array, masks: tuple[Mask, mx.array | None], cache: tuple) -> mx.array:
        heads = []
        if "attention" in self:
            heads.append(self.attention(x, masks[0], cache[0]))
        if "ssm" in self:
            heads.append(self.ssm(x, masks[1], cache[-1]))
        in_order = mx.take(mx.concatenate(heads, axis=2), self._order, axis=2)
        return self.o_proj(in_order.flatten(2))


class Layer(nn.Module):
    def __init__(self, args: ModelArgs, kept: list[int]) -> None:
        super().__init__()
        self.self_attn = Mixer(args, kept)
        self.mlp = MLP(args.base)
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
        if cache is None:
            caches = [(None,)] * len(self.layers)
        else:
            caches = [layer_cache.caches for layer_cache in cache]
        # All layers have read the same tokens: any KV cache and any state cache make the masks.
        keys = None
        states = None
        for layer_caches in caches:
            for part in layer_caches:
                if isinstance(part, ArraysCache):
                    states = part
                elif part is not None:
                    keys = part
        masks = (create_attention_mask(h, keys), create_ssm_mask(h, states))
        for layer, layer_caches in zip(self.layers, caches):
            h = layer(h, masks, layer_caches)
        return self.norm(h)


class Model(nn.Module):
    """Student with the interface of mlx-lm: logits, cache, layers, and weights by module name."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.args = args
        self.model_type = args.model_type
        self.model = Decoder(args)
        if not args.tie_word_embeddings:
            self.lm_head = nn.Linear(args.width, args.base.vocab_size, bias=False)

    def __call__(self, inputs: mx.array, cache: list[CacheList] | None = None) -> mx.array:
        h = self.model(inputs, cache)
        if self.args.tie_word_embeddings:
            return self.model.embed_tokens.as_linear(h)
        return self.lm_head(h)

    def make_cache(self) -> list[CacheList]:
        """Make a KV cache for layers with kept heads, a state cache for those with recurrent."""
        caches = []
        for kept in self.args.kept:
            of_layer = []
            if kept:
                of_layer.append(KVCache())
            if len(kept) < self.args.n_heads:
                of_layer.append(ArraysCache(2))
            caches.append(CacheList(*of_layer))
        return caches

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Rename the decays' bias: the model adds it outside its projection, for quantization."""
        renamed = {}
        for name, tensor in weights.items():
            renamed[re.sub(r"ssm\.a_proj\.bias$", "ssm.a_bias", name)] = tensor
        return renamed

    @property
    def layers(self) -> list[Layer]:
        return self.model.layers
