"""Hybrid student for MLX: mlx-lm loads this file from an export's folder.

config.json names it as `model_file`. Module names match the export's tensors. Imports only mlx and
mlx_lm. Does not use ``from __future__ import annotations``: mlx-lm does not add this file to
``sys.modules``, where a dataclass would look up its annotations.

Shapes: B batch, L length, D model width, A attention heads kept, G stored KV heads, H recurrent
heads, P head dim, N state size, C convolution channels, K convolution width, Q tokens of a chunk,
S source token of a chunk.
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
"""Tokens of a chunk of the scan, whose interactions are matrix products."""
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

    Each KV head that they read is stored once.
    """

    def __init__(self, args: ModelArgs, kept: list[int]) -> None:
        super().__init__()
        base = args.base
        n_kv_heads = args.backbone.get("num_key_value_heads") or args.n_heads
        group_size = args.n_heads // n_kv_heads
        groups = sorted({head // group_size for head in kept})
        kv_of_query = [groups.index(head // group_size) for head in kept]
        # The attention function repeats KV heads itself, if all serve equally many query heads.
        n_shared = len(kept) // len(groups)
        repeated = [query // n_shared for query in range(n_shared * len(groups))]
        self._kv_of_query = None if kv_of_query == repeated else mx.array(kv_of_query)
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

    def __call__(self, hidden_BLD: mx.array, mask: Mask, cache: KVCache | None) -> mx.array:
        """Return the heads' outputs, [B, L, A, P]."""
        q_BALP = self._by_head(self.q_proj(hidden_BLD), self.n_kept)
        k_BGLP = self._by_head(self.k_proj(hidden_BLD), self.n_stored)
        v_BGLP = self._by_head(self.v_proj(hidden_BLD), self.n_stored)
        offset = 0 if cache is None else cache.offset
        q_BALP = self.rope(q_BALP, offset=offset)
        k_BGLP = self.rope(k_BGLP, offset=offset)
        if cache is not None:
            k_BGLP, v_BGLP = cache.update_and_fetch(k_BGLP, v_BGLP)
        if self._kv_of_query is not None:
            k_BGLP = mx.take(k_BGLP, self._kv_of_query, axis=1)
            v_BGLP = mx.take(v_BGLP, self._kv_of_query, axis=1)
        scale = self.head_dim**-0.5
        y_BALP = scaled_dot_product_attention(
            q_BALP, k_BGLP, v_BGLP, cache=None, scale=scale, mask=mask
        )
        return y_BALP.swapaxes(1, 2)

    def _by_head(self, projected: mx.array, n_heads: int) -> mx.array:
        """Split projections [B, L, heads * P] into [B, heads, L, P]."""
        batch, length, _ = projected.shape
        return projected.reshape(batch, length, n_heads, self.head_dim).swapaxes(1, 2)


class Recurrent(nn.Module):
    """Recurrent heads of a layer.

    Their cache holds the convolution's last inputs [B, K - 1, C] and the recurrent state
    [B, H, P, N].
    """

    def __init__(self, args: ModelArgs, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.is_mamba2 = args.recurrence != "discrete"
        width = args.width
        x_width = n_heads * args.head_dim
        b_width = n_heads * args.d_state
        self.split_places = [x_width, x_width + b_width]
        self.x_proj = nn.Linear(width, x_width, bias=not self.is_mamba2)
        self.b_proj = nn.Linear(width, b_width, bias=not self.is_mamba2)
        self.c_proj = nn.Linear(width, b_width, bias=not self.is_mamba2)
        n_channels = x_width + 2 * b_width
        if self.is_mamba2:
            self.conv_bias = mx.zeros((n_channels,))
        self.z_proj = nn.Linear(width, x_width, bias=args.recurrence != "mamba2-stock")
        self.a_proj = nn.Linear(width, n_heads, bias=False)
        self.a_bias = mx.zeros((n_heads,))
        self.conv_weight = mx.zeros((n_channels, args.conv_width))
        self.D = mx.zeros((n_heads,))

    def __call__(
        self, hidden_BLD: mx.array, mask_BL: mx.array | None, cache: ArraysCache | None
    ) -> mx.array:
        """Return the heads' outputs, [B, L, H, P]."""
        batch, length, _ = hidden_BLD.shape
        x_BLC = self.x_proj(hidden_BLD)
        b_BLC = self.b_proj(hidden_BLD)
        c_BLC = self.c_proj(hidden_BLD)
        xbc_BLC = mx.concatenate([x_BLC, b_BLC, c_BLC], axis=-1)
        xbc_BLC = self._convolve(xbc_BLC, mask_BL, cache)
        if self.is_mamba2:
            xbc_BLC = nn.silu(xbc_BLC + self.conv_bias)
        by_head = (batch, length, self.n_heads, -1)
        x_BLC, b_BLC, c_BLC = mx.split(xbc_BLC, self.split_places, axis=-1)
        x_BLHP = x_BLC.reshape(by_head).astype(mx.float32)
        b_BLHN = b_BLC.reshape(by_head).astype(mx.float32)
        c_BLHN = c_BLC.reshape(by_head).astype(mx.float32)

        decay_BLH = self.a_proj(hidden_BLD).astype(mx.float32)
        log_a_BLH = -nn.softplus(decay_BLH + self.a_bias)
        if self.is_mamba2:
            # Mamba-2 scales B by the step size, from which the decay is computed; A = -1.
            step_BLH1 = -log_a_BLH[..., None]
            b_BLHN = b_BLHN * step_BLH1
        if mask_BL is not None:
            # Padding neither writes to the state nor lets it decay.
            b_BLHN = mx.where(mask_BL[..., None, None], b_BLHN, 0)
            log_a_BLH = mx.where(mask_BL[..., None], log_a_BLH, 0)
        log_a_BLH = mx.maximum(log_a_BLH, MIN_LOG_DECAY)

        past_state = None if cache is None else cache[1]
        y_BLHP, state_BHPN = scan(x_BLHP, log_a_BLH, b_BLHN, c_BLHN, past_state)
        if cache is not None:
            cache[1] = state_BHPN
            cache.advance(length)
        skip_H1 = self.D.astype(mx.float32)[:, None]
        y_BLHP = y_BLHP + skip_H1 * x_BLHP
        gate_BLC = nn.silu(self.z_proj(hidden_BLD))
        return y_BLHP.astype(hidden_BLD.dtype) * gate_BLC.reshape(by_head)

    def _convolve(
        self, xbc_BLC: mx.array, mask_BL: mx.array | None, cache: ArraysCache | None
    ) -> mx.array:
        """Convolve causally, continuing from the cached inputs; cache each row's last inputs."""
        batch, length, n_channels = xbc_BLC.shape
        n_past = self.conv_weight.shape[1] - 1
        if mask_BL is not None:
            xbc_BLC = mx.where(mask_BL[..., None], xbc_BLC, 0)
        past_BKC = None if cache is None else cache[0]
        if past_BKC is None:
            past_BKC = mx.zeros((batch, n_past, n_channels), xbc_BLC.dtype)
        inputs_BLC = mx.concatenate([past_BKC, xbc_BLC], axis=1)
        if cache is not None and cache.lengths is not None:
            # Rows padded on the right: each keeps the inputs before its own padding.
            lengths_B1 = mx.clip(cache.lengths, 0, length)[:, None]
            last_BK = lengths_B1 + mx.arange(n_past)
            cache[0] = mx.take_along_axis(inputs_BLC, last_BK[..., None], axis=1)
        elif cache is not None:
            cache[0] = inputs_BLC[:, length:]
        # A sum over taps: MLX's own convolution wants the weights in another layout.
        total_BLC = 0
        for tap in range(n_past + 1):
            shifted_BLC = inputs_BLC[:, tap : tap + length]
            total_BLC = total_BLC + shifted_BLC * self.conv_weight[:, tap]
        return total_BLC


def scan(
    x_BLHP: mx.array,
    log_a_BLH: mx.array,
    b_BLHN: mx.array,
    c_BLHN: mx.array,
    past_state: mx.array | None,
) -> tuple[mx.array, mx.array]:
    """Run S_t = a_t S_{t-1} + x_t b_t^T, y_t = S_t c_t, in float32 and chunk by chunk.

    Starts from ``past_state`` or zeros. Returns y [B, L, H, P] and the last S [B, H, P, N].
    """
    batch, length, n_heads, head_dim = x_BLHP.shape
    state_BHPN = past_state
    if state_BHPN is None:
        state_BHPN = mx.zeros((batch, n_heads, head_dim, b_BLHN.shape[3]), mx.float32)
    chunks = []
    for begin in range(0, length, CHUNK):
        chunk = slice(begin, begin + CHUNK)
        x_BHQP = x_BLHP[:, chunk].swapaxes(1, 2)
        b_BHQN = b_BLHN[:, chunk].swapaxes(1, 2)
        c_BHQN = c_BLHN[:, chunk].swapaxes(1, 2)
        log_a_BHQ = log_a_BLH[:, chunk].swapaxes(1, 2)
        log_decay_BHQ = mx.cumsum(log_a_BHQ, axis=-1)

        # What the chunk's tokens read of each other.
        n_tokens = log_decay_BHQ.shape[-1]
        is_past_QS = mx.tril(mx.ones((n_tokens, n_tokens), mx.bool_))
        log_decay_BHQS = log_decay_BHQ[..., :, None] - log_decay_BHQ[..., None, :]
        # Masked before exp: above the diagonal, the differences are positive and may overflow.
        decay_BHQS = mx.exp(mx.where(is_past_QS, log_decay_BHQS, -mx.inf))
        scores_BHQS = c_BHQN @ b_BHQN.swapaxes(-1, -2)
        within_BHQP = (scores_BHQS * decay_BHQS) @ x_BHQP

        # What they read of the state before the chunk.
        decay_BHQ1 = mx.exp(log_decay_BHQ)[..., None]
        from_state_BHQP = decay_BHQ1 * (c_BHQN @ state_BHPN.swapaxes(-1, -2))
        chunks.append(within_BHQP + from_state_BHQP)

        # What they write to the state after it.
        log_decay_BH1 = log_decay_BHQ[..., -1:]
        decay_to_end_BHQ1 = mx.exp(log_decay_BH1 - log_decay_BHQ)[..., None]
        written_BHPN = x_BHQP.swapaxes(-1, -2) @ (b_BHQN * decay_to_end_BHQ1)
        decay_BH11 = mx.exp(log_decay_BHQ[..., -1])[..., None, None]
        state_BHPN = decay_BH11 * state_BHPN + written_BHPN
    y_BHLP = mx.concatenate(chunks, axis=2)
    return y_BHLP.swapaxes(1, 2), state_BHPN


class Mixer(nn.Module):
    """Both kinds of heads of a layer, in the teacher's head order, and their output projection."""

    def __init__(self, args: ModelArgs, kept: list[int]) -> None:
        super().__init__()
        recurrent = [head for head in range(args.n_heads) if head not in kept]
        if kept:
            self.attention = Attention(args, kept)
        if recurrent:
            self.ssm = Recurrent(args, len(recurrent))
        # Index of each teacher's head in the concatenated outputs, kept heads first.
        order = kept + recurrent
        self._order = mx.array([order.index(head) for head in range(args.n_heads)])
        has_bias = args.has_bias and args.base.model_type == "llama"
        self.o_proj = nn.Linear(args.n_heads * args.head_dim, args.width, bias=has_bias)

    def __call__(
        self, hidden_BLD: mx.array, masks: tuple[Mask, mx.array | None], cache: tuple
    ) -> mx.array:
        attention_mask, ssm_mask = masks
        outputs = []
        if "attention" in self:
            outputs.append(self.attention(hidden_BLD, attention_mask, cache[0]))
        if "ssm" in self:
            # Behind the KV cache, if the layer has kept heads too.
            outputs.append(self.ssm(hidden_BLD, ssm_mask, cache[-1]))
        joined_BLHP = mx.concatenate(outputs, axis=2)
        in_order_BLHP = mx.take(joined_BLHP, self._order, axis=2)
        return self.o_proj(in_order_BLHP.flatten(2))


class Layer(nn.Module):
    """Decoder layer: heads and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, args: ModelArgs, kept: list[int]) -> None:
        super().__init__()
        self.self_attn = Mixer(args, kept)
        self.mlp = MLP(args.base)
        self.input_layernorm = nn.RMSNorm(args.width, eps=args.base.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(args.width, eps=args.base.rms_norm_eps)

    def __call__(
        self, hidden_BLD: mx.array, masks: tuple[Mask, mx.array | None], cache: tuple
    ) -> mx.array:
        normed_BLD = self.input_layernorm(hidden_BLD)
        hidden_BLD = hidden_BLD + self.self_attn(normed_BLD, masks, cache)
        normed_BLD = self.post_attention_layernorm(hidden_BLD)
        return hidden_BLD + self.mlp(normed_BLD)


class Decoder(nn.Module):
    """Embedding, layers and last norm."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(args.base.vocab_size, args.width)
        self.layers = [Layer(args, kept) for kept in args.kept]
        self.norm = nn.RMSNorm(args.width, eps=args.base.rms_norm_eps)

    def __call__(self, ids_BL: mx.array, cache: list[CacheList] | None) -> mx.array:
        hidden_BLD = self.embed_tokens(ids_BL)
        if cache is None:
            caches = [(None,)] * len(self.layers)
        else:
            caches = [layer_cache.caches for layer_cache in cache]
        # All layers have read the same tokens: the masks come from any KV and any state cache.
        kv_cache = None
        state_cache = None
        for layer_caches in caches:
            for part in layer_caches:
                if isinstance(part, ArraysCache):
                    state_cache = part
                elif part is not None:
                    kv_cache = part
        attention_mask = create_attention_mask(hidden_BLD, kv_cache)
        ssm_mask = create_ssm_mask(hidden_BLD, state_cache)
        for layer, layer_caches in zip(self.layers, caches):
            hidden_BLD = layer(hidden_BLD, (attention_mask, ssm_mask), layer_caches)
        return self.norm(hidden_BLD)


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
        """Return the logits of token ids ``inputs`` [B, L], [B, L, vocabulary]."""
        hidden_BLD = self.model(inputs, cache)
        if self.args.tie_word_embeddings:
            return self.model.embed_tokens.as_linear(hidden_BLD)
        return self.lm_head(hidden_BLD)

    def make_cache(self) -> list[CacheList]:
        """Make the layers' caches: for kept heads a KV cache, for recurrent ones a state cache."""
        layer_caches = []
        for kept in self.args.kept:
            parts = []
            if kept:
                parts.append(KVCache())
            if len(kept) < self.args.n_heads:
                parts.append(ArraysCache(2))
            layer_caches.append(CacheList(*parts))
        return layer_caches

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Rename the decays' bias: the model adds it outside its projection, for quantization."""
        renamed = {}
        for name, tensor in weights.items():
            renamed[re.sub(r"ssm\.a_proj\.bias$", "ssm.a_bias", name)] = tensor
        return renamed

    @property
    def layers(self) -> list[Layer]:
        """Decoder layers, which mlx-lm counts."""
        return self.model.layers
