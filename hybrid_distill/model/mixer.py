"""Mixer that replaces a teacher's attention: kept and recurrent heads, in the teacher's head order.

Shapes: B batch, L length, S source length, H head, P head dim, N state size, D model width, C conv channels,
K conv width (minus 1 in a stored state), R recurrent heads.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig

from .cache import HybridCache, HybridLayerCache
from .configuration_hybrid import HybridConfig
from .gated_delta import delta_mixing_matrix, gated_delta_scan, gated_delta_step, gates, unit_keys
from .layout import CACHE_NAMES, Part, cache_argument, find_layout, given_cache, head_norm, is_over_all_heads
from .ssd import causal_conv, gated_ssd_scan, gated_ssd_step, log_decay, mixing_matrix, raw_decay, step_in_place

ROW_ARGUMENTS = ("token_mask", "seq_idx")  # arguments of mixers that attention modules do not accept
ALIGNED = 16  # alignment, in elements, of rows and of x, B and C within them: kernels can then load 16 bytes at once
OPEN_GATE = 1.278464542761074  # silu(OPEN_GATE) = 1: as the bias of a gate with zero weights, it passes everything


class _KVStore:
    """Cache adapter for kept attention: stores each KV head once and repeats it for every head that reads it."""

    def __init__(self, layer: HybridLayerCache | None, kv_index: list[int] | None) -> None:
        self.layer = layer
        self.kv_index = kv_index

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.layer is not None:
            key_states, value_states = self.layer.update(key_states, value_states)
        if self.kv_index is None:
            return key_states, value_states
        return _pick_heads(key_states, self.kv_index), _pick_heads(value_states, self.kv_index)

    def get_seq_length(self, *args: Any) -> int:
        return 0 if self.layer is None else self.layer.get_seq_length()


class _CutConfig:
    """Backbone config for kept attention: overrides the numbers of heads, reads every other field through."""

    def __init__(self, backbone: PretrainedConfig, n_heads: int, n_kv_heads: int) -> None:
        self._backbone = backbone
        self.num_attention_heads, self.num_key_value_heads = n_heads, n_kv_heads

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_backbone":  # copy and pickle read it before it is set
            raise AttributeError(name)
        return getattr(self._backbone, name)


def _pick_blocks(heads: list[int], head_dim: int, norm: nn.Module, args: Any, out_BLC: Tensor) -> Tensor:
    """Pick heads from the output of a norm over all heads (forward hook)."""
    return torch.cat([out_BLC[..., head * head_dim : (head + 1) * head_dim] for head in heads], dim=-1)


def _pick_heads(t_BHLP: Tensor, heads: list[int]) -> Tensor:
    """Pick heads by slicing: an index tensor would be copied to the device at every call."""
    return torch.cat([t_BHLP[:, head : head + 1] for head in heads], dim=1)


def _unprojected(t_BLD: Tensor) -> Tensor:
    """Replace the output projection in kept attention. Not a module: LoRA would match it by name."""
    return t_BLD


def _is_plain(projection: nn.Module, device: torch.device) -> bool:
    """Return True if a projection is its plain weight on ``device``: not quantized, no adapter (LoRA), not offloaded.

    Offloading (accelerate) brings a weight to the device only while its own module runs.
    """
    return (
        type(projection) is nn.Linear
        and type(projection.weight) is nn.Parameter
        and projection.weight.device == device
    )


class _DecayProjection(nn.Linear):
    """Linear that adds its bias in fp32: near a = 1, a bf16 sum would shift half-lives by several percent."""

    def forward(self, input: Tensor) -> Tensor:
        raw = F.linear(input, self.weight)
        return raw.to(torch.promote_types(raw.dtype, torch.float32)) + self.bias


def spread_half_lives(n_heads: int, shortest: float = 2.0, longest: float = 256.0) -> Tensor:
    """Return distinct half-lives in tokens, log-spaced over a layer's heads; a single head gets the geometric mean."""
    places = (torch.arange(n_heads) + 0.5) / n_heads
    return shortest * (longest / shortest) ** places


def _ssd_matrix(raw_BLR: Tensor, b_BLRN: Tensor, c_BLRN: Tensor, seq_idx_BL: Tensor | None = None) -> Tensor:
    return mixing_matrix(log_decay(raw_BLR), b_BLRN, c_BLRN, seq_idx_BL)


def _delta_matrix(raw_BLRG: Tensor, k_BLRN: Tensor, c_BLRN: Tensor, seq_idx_BL: Tensor | None = None) -> Tensor:
    return delta_mixing_matrix(*gates(raw_BLRG), k_BLRN, c_BLRN, seq_idx_BL)


class Recurrence(NamedTuple):
    """Everything in which the `RECURRENCES` differ.

    ``scan``, ``step`` and ``matrix`` read the raw gates ([B, L, R], or [B, L, R, G] for several gates) and the keys,
    which ``keys`` computes from B and the raw gates.
    """

    scan: Callable[..., tuple[Tensor, Tensor]] = gated_ssd_scan
    step: Callable[..., tuple[Tensor, Tensor]] = gated_ssd_step
    matrix: Callable[..., Tensor] = _ssd_matrix
    keys: Callable[[Tensor, Tensor], Tensor] = lambda b, raw: b
    n_gates: int = 1
    """Rows of ``a_proj`` per head: the raw decay, and any further gates of the recurrence."""
    has_silu: bool = False
    """Hold the biases of x, B and C in the convolution, and apply a SiLU after it."""
    has_gate_bias: bool = True
    steps_in_place: bool = False
    """Decoding step may run in one kernel."""


_MAMBA2 = Recurrence(keys=lambda b, raw: b * -log_decay(raw).unsqueeze(-1).to(b.dtype), has_silu=True)
FORMS = {
    "discrete": Recurrence(steps_in_place=True),
    "mamba2": _MAMBA2,
    "mamba2-stock": _MAMBA2._replace(has_gate_bias=False),
    "gdn": Recurrence(gated_delta_scan, gated_delta_step, _delta_matrix, lambda b, raw: unit_keys(b), n_gates=2),
}
"""Forms of the recurrent heads, by name (`RECURRENCES`)."""


class SSMHeads(nn.Module):
    """Recurrent heads of one layer (discrete Mamba-2), in the order of the mixer's ``recurrent``.

        x, B, C = conv(x_proj u), conv(b_proj u), conv(c_proj u)        a = exp(-softplus(a_proj u))
        S_t = a_t S_{t-1} + x_t B_t^T        out = (S_t C_t + D x_t) silu(z_proj u)

    Every projection has a bias: x inherits the teacher's value bias; the others hold a constant feature, a decay and
    a gate. B and C are per head. ``conv_bias`` adds a bias after the convolution, as in Llamba.

    This is the ``discrete`` recurrence. ``mamba2`` uses the heads of Mamba-2 (arXiv 2405.21060, A = -1), which other
    programs support: the biases of x, B and C are those of the convolution, a SiLU follows, and the step size scales
    the input of the state, dt_t = -log a_t = softplus(a_proj u). ``mamba2-stock`` has no gate bias, like published
    models.

    ``gdn`` follows the gated delta rule (`gated_delta`): x is the value, B scaled to unit length the key, C the query.
    ``a_proj`` has a second row per head, the write gate, after its decay. Everything else is as in ``discrete``.

    ``segment_len``, if set, splits a row into segments of that many tokens and carries the states across. The backward
    pass recomputes each segment, so that memory grows with the segment, not with the row.
    """

    def __init__(
        self,
        hidden_size: int,
        n_heads: int,
        head_dim: int,
        d_state: int,
        conv_width: int,
        conv_bias: bool = False,
        recurrence: str = "discrete",
    ) -> None:
        super().__init__()
        self.recurrence = recurrence
        self.impl = "auto"
        self.segment_len: int | None = None
        self.n_heads, self.head_dim, self.d_state = n_heads, head_dim, d_state
        self.conv_width = conv_width  # ZeRO-3 empties the weights, and with them their shapes
        # A bias of x, B and C is either the projection's or, before a SiLU, the convolution's: adapters merge their own
        # bias into the projection's, which adds it before the convolution.
        has_bias = not self.form.has_silu
        self.x_proj = nn.Linear(hidden_size, n_heads * head_dim, bias=has_bias)
        self.b_proj = nn.Linear(hidden_size, n_heads * d_state, bias=has_bias)
        self.c_proj = nn.Linear(hidden_size, n_heads * d_state, bias=has_bias)
        self.z_proj = nn.Linear(hidden_size, n_heads * head_dim, bias=self.form.has_gate_bias)
        self.a_proj = _DecayProjection(hidden_size, n_heads * self.form.n_gates)
        self.sizes = [n_heads * size for size in (head_dim, d_state, d_state)]
        n_channels = sum(self.sizes)
        self.conv_weight = nn.Parameter(torch.empty(n_channels, conv_width))
        self.conv_bias = nn.Parameter(torch.empty(n_channels)) if conv_bias or self.form.has_silu else None
        self.D = nn.Parameter(torch.empty(n_heads))

    @property
    def form(self) -> Recurrence:
        """Functions of this recurrence; a property, because an attribute would have to be pickled."""
        return FORMS[self.recurrence]

    @torch.no_grad()
    def reset_parameters(self, std: float = 0.02) -> None:
        """Draw random projections; set an identity convolution, an open gate and half-lives spread over the heads."""
        for projection in (self.x_proj, self.b_proj, self.c_proj, self.a_proj):
            projection.weight.normal_(std=std)
            if projection.bias is not None:
                projection.bias.zero_()
        if self.z_proj.bias is None:
            self.z_proj.weight.normal_(std=std)
        else:
            self.z_proj.weight.zero_()
            self.z_proj.bias.fill_(OPEN_GATE)
        self.conv_weight.zero_()
        self.conv_weight[:, -1] = 1.0
        if self.conv_bias is not None:
            self.conv_bias.zero_()
        self.D.fill_(1.0)
        self.a_proj.bias.zero_()
        self.a_proj.bias.view(self.n_heads, -1)[:, 0] = raw_decay(spread_half_lives(self.n_heads))

    def forward(
        self,
        hidden_BLD: Tensor,
        token_mask_BL: Tensor | None = None,
        seq_idx_BL: Tensor | None = None,
        cache: HybridLayerCache | None = None,
    ) -> Tensor:
        """Compute the outputs of the recurrent heads, y_BLRP.

        ``token_mask_BL`` is 0 at padding, which may be anywhere in a row and affects neither outputs nor states.
        """
        if hidden_BLD.shape[1] == 1 and cache is not None and cache.ssm_state is not None:
            return self._step(hidden_BLD, token_mask_BL, cache)
        order = back = None
        if token_mask_BL is not None:
            order, back, token_mask_BL = _tokens_first(token_mask_BL)
            hidden_BLD = _Reordered.apply(hidden_BLD, order, back)
            if seq_idx_BL is not None:  # assign the padding, now at the end, to the last document
                seq_idx_BL = _Reordered.apply(seq_idx_BL, order, back).cummax(dim=1).values
        states = (None, None) if cache is None else (cache.conv_state, cache.ssm_state)
        whole = self.segment_len is None or hidden_BLD.shape[1] <= self.segment_len
        run = self._run if whole else self._run_in_segments
        y_BLRP, *states = run(hidden_BLD, token_mask_BL, seq_idx_BL, *states)
        if cache is not None:
            cache.remember(conv_state=states[0], ssm_state=states[1])
        return y_BLRP if order is None else _Reordered.apply(y_BLRP, back, order)

    def _run(
        self, hidden_BLD: Tensor, token_mask_BL: Any, seq_idx_BL: Any, conv_state_BCK: Any, state_BRPN: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (y_BLRP, conv state, SSM state) after these tokens, given the states before them."""
        xbc_BLC, raw = self._projections(hidden_BLD)
        x, b, c, raw, conv_state_BCK = self._convolved(xbc_BLC, raw, token_mask_BL, seq_idx_BL, conv_state_BCK)
        options: dict[str, Any] = {"state_BHPN": state_BRPN, "seq_idx_BL": seq_idx_BL, "impl": self.impl}
        y_BLRP, state_BRPN = self.form.scan(x, raw, b, c, self.D, self._gate(hidden_BLD), **options)
        return y_BLRP, conv_state_BCK, state_BRPN

    def _run_in_segments(
        self, hidden_BLD: Tensor, token_mask_BL: Any, seq_idx_BL: Any, conv_state_BCK: Any, state_BRPN: Any
    ) -> tuple[Tensor, Any, Any]:
        """Run `_run` on segments of ``segment_len`` tokens. A document that begins with a segment starts from zero."""
        size: Any = self.segment_len
        ys = []
        for begin in range(0, hidden_BLD.shape[1], size):
            segment = slice(begin, begin + size)
            if seq_idx_BL is not None and begin:
                conv_state_BCK, state_BRPN = _of_document(seq_idx_BL, begin, conv_state_BCK, state_BRPN)
            outputs: Any = checkpoint(
                self._run,
                hidden_BLD[:, segment],
                None if token_mask_BL is None else token_mask_BL[:, segment],
                None if seq_idx_BL is None else seq_idx_BL[:, segment],
                conv_state_BCK,
                state_BRPN,
                use_reentrant=False,
            )
            y_BLRP, conv_state_BCK, state_BRPN = outputs
            # Cloned: slices would keep the segment's larger tensors in memory.
            conv_state_BCK = conv_state_BCK.clone()
            state_BRPN = state_BRPN.clone()
            ys.append(y_BLRP)
        return torch.cat(ys, dim=1), conv_state_BCK, state_BRPN

    def mixing_matrices(self, hidden_BLD: Tensor, seq_idx_BL: Tensor | None = None) -> Tensor:
        """Return T_BRLS with y = T x, D on the diagonal included, the output gate left out."""
        x, raw, b, c, _ = self.scan_inputs(hidden_BLD, seq_idx_BL)
        mixing = self.form.matrix(raw, b, c, seq_idx_BL)
        return mixing + torch.diag_embed(self.D.to(mixing.dtype).unsqueeze(-1).expand(-1, x.shape[1]))

    def scan_inputs(self, hidden_BLD: Tensor, seq_idx_BL: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return the scan's inputs x_BLRP, raw gates, B_BLRN and C_BLRN, and the output gate silu(z)_BLRP."""
        x, b, c, raw, _ = self._convolved(*self._projections(hidden_BLD), None, seq_idx_BL, None)
        return x, raw, b, c, F.silu(self._gate(hidden_BLD))

    def _projections(self, hidden_BLD: Tensor) -> tuple[Tensor, Tensor]:
        """Return x, B and C of all heads before the convolution, [B, L, C], and the raw gates, [B, L, R G]."""
        projections = self.x_proj, self.b_proj, self.c_proj
        batch, length, width = hidden_BLD.shape
        on_kernels = hidden_BLD.is_cuda or self.impl == "triton"
        is_plain = all(_is_plain(projection, hidden_BLD.device) for projection in projections)
        if on_kernels and length > 1 and batch * length >= width and is_plain:
            # Join the weights, which are smaller than the activations. Padding makes the rows longer than `sizes`.
            bias = None if self.form.has_silu else _join([projection.bias for projection in projections])
            xbc_BLC = F.linear(hidden_BLD, _join([projection.weight for projection in projections]), bias)
        else:
            xbc_BLC = torch.cat([projection(hidden_BLD) for projection in projections], dim=-1)
        return xbc_BLC, self.a_proj(hidden_BLD)

    def _gate(self, hidden_BLD: Tensor) -> Tensor:
        return self.z_proj(hidden_BLD).unflatten(-1, (self.n_heads, self.head_dim))

    def _step(self, hidden_BLD: Tensor, token_mask_BL: Tensor | None, cache: HybridLayerCache) -> Tensor:
        """Compute the next token after the cached ones; if possible, one kernel updates the states in place."""
        xbc_BLC, raw_BLR = self._projections(hidden_BLD)
        z_BLRP = self._gate(hidden_BLD)
        conv_state, ssm_state = cast(tuple[Tensor, Tensor], (cache.conv_state, cache.ssm_state))
        y_BRP = step_in_place(
            xbc_BLC[:, 0],
            raw_BLR[:, 0],
            z_BLRP[:, 0],
            self.conv_weight.to(xbc_BLC.dtype),
            self.D,
            conv_state,
            ssm_state,
            token_mask_B=None if token_mask_BL is None else token_mask_BL[:, 0],
            impl=self.impl if self.form.steps_in_place and self.conv_bias is None else "torch",
        )
        if y_BRP is None:
            *parts, conv_state = self._convolved(xbc_BLC, raw_BLR, token_mask_BL, None, conv_state)
            x, b, c, raw = (t[:, 0] for t in parts)
            y_BRP, ssm_state = self.form.step(x, raw, b, c, self.D, z_BLRP[:, 0], ssm_state)
            cache.remember(conv_state=conv_state, ssm_state=ssm_state)
        return y_BRP.unsqueeze(1)

    def _convolved(
        self, xbc_BLC: Tensor, raw_BLR: Tensor, token_mask_BL: Any, seq_idx_BL: Any, conv_state_BCK: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return x_BLRP, B_BLRN, C_BLRN after the convolution, the raw gates, and the conv state.

        Padding, at the end of its row, adds nothing to the state and does not decay it.
        """
        token_BL1 = n_tokens_B = None
        if token_mask_BL is not None:
            token_BL1 = token_mask_BL.unsqueeze(-1).to(xbc_BLC.dtype)
            n_tokens_B = token_mask_BL.long().sum(dim=1)
            raw_BLR = raw_BLR.masked_fill(token_BL1 == 0, -math.inf)
        is_padded = xbc_BLC.shape[-1] > sum(self.sizes)

        def in_row(t: Tensor, dim: int = 0) -> Tensor:
            return _join(t.split(self.sizes, dim), dim) if is_padded else t

        xbc_BLC, conv_state_BCK = causal_conv(
            xbc_BLC,
            in_row(self.conv_weight).to(xbc_BLC.dtype),
            state_BCK=None if conv_state_BCK is None else in_row(conv_state_BCK, 1),
            seq_idx_BL=seq_idx_BL,
            n_tokens_B=n_tokens_B,
            impl=self.impl,
        )
        if is_padded:
            conv_state_BCK = torch.cat(_parts(conv_state_BCK, self.sizes, 1), dim=1)
        if self.conv_bias is not None:
            xbc_BLC = xbc_BLC + in_row(self.conv_bias).to(xbc_BLC.dtype)
        if self.form.has_silu:
            xbc_BLC = F.silu(xbc_BLC)
        x, b, c = (part.unflatten(-1, (self.n_heads, -1)) for part in _Parts.apply(xbc_BLC, self.sizes))
        raw = raw_BLR if self.form.n_gates == 1 else raw_BLR.unflatten(-1, (self.n_heads, -1))
        if token_BL1 is not None:
            x = x * token_BL1.unsqueeze(-1)
        return x, self.form.keys(b, raw), c, raw, conv_state_BCK


def _join(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Concatenate x, B and C, each padded with zeros to a multiple of ALIGNED."""
    pieces = []
    for part in parts:
        pieces.append(part)
        shape = list(part.shape)
        shape[dim] = -shape[dim] % ALIGNED
        if shape[dim]:
            pieces.append(part.new_zeros(shape))
    return torch.cat(pieces, dim)


def _parts(row: Tensor, sizes: list[int], dim: int) -> tuple[Tensor, ...]:
    """Return x, B and C of a row, padded or not, as views."""
    widths = sizes
    if row.shape[dim] != sum(sizes):
        widths = [size + -size % ALIGNED for size in sizes]
    parts = []
    for part, size in zip(row.split(widths, dim), sizes, strict=True):
        parts.append(part.narrow(dim, 0, size))
    return tuple(parts)


class _Parts(torch.autograd.Function):
    """`_parts` of the last dimension; the gradient is one row, without a copy if a kernel wrote it as one."""

    @staticmethod
    def forward(ctx: Any, row_BLC: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
        ctx.shape, ctx.sizes = row_BLC.shape, sizes
        return _parts(row_BLC, sizes, -1)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        first = grad_outputs[0]
        batch, length, width = ctx.shape
        n_bytes = batch * length * width * first.itemsize
        if not torch.compiler.is_compiling() and first.untyped_storage().nbytes() == n_bytes:
            row_BLC = first.as_strided(ctx.shape, (length * width, width, 1), 0)
            places = [(t.data_ptr(), t.stride()) for t in _parts(row_BLC, ctx.sizes, -1)]
            if places == [(t.data_ptr(), t.stride()) for t in grad_outputs]:
                return row_BLC, None
        if width > sum(ctx.sizes):
            return _join(grad_outputs, -1), None
        return torch.cat(grad_outputs, -1), None


def _tokens_first(token_mask_BL: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the order (for `_Reordered`) that puts each row's tokens before its padding, its inverse, the new mask.

    Neither sorts nor synchronizes with the device.
    """
    is_token = token_mask_BL != 0
    n_tokens_B1 = is_token.sum(dim=1, keepdim=True)
    place_BL = torch.where(is_token, is_token.cumsum(1), n_tokens_B1 + (~is_token).cumsum(1)) - 1
    index_BL = torch.arange(place_BL.numel(), device=place_BL.device).view_as(place_BL)
    back = (place_BL + index_BL[:, :1]).flatten()
    return torch.empty_like(back).scatter_(0, back, index_BL.flatten()), back, index_BL[:1] < n_tokens_B1


class _Reordered(torch.autograd.Function):
    """Reorder tokens [B, L, ..] by ``index`` into the flattened rows; ``back`` reorders the gradient."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, index: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(index, back)
        return t.flatten(0, 1).index_select(0, index).view(t.shape)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        index, back = ctx.saved_tensors
        return _Reordered.apply(*grad_outputs, back, index), None, None


def _of_document(seq_idx_BL: Tensor, begin: int, conv_state_BCK: Any, state_BRPN: Any) -> tuple[Tensor, Tensor]:
    """Zero the parts of the states before token ``begin`` that belong to an earlier document."""
    n_past = conv_state_BCK.shape[-1]
    own_BK = F.pad(seq_idx_BL[:, :begin], (n_past, 0), value=-1)[:, begin:] == seq_idx_BL[:, begin : begin + 1]
    continues_B = seq_idx_BL[:, begin - 1] == seq_idx_BL[:, begin]
    return conv_state_BCK * own_BK.unsqueeze(1), state_BRPN * continues_B[:, None, None, None]


class HybridMixer(nn.Module):
    """Replacement for the attention module of a layer, with the same inputs and kind of output.

    ``attention`` is the backbone's attention module, reduced to the kept heads and without its output projection (None
    if no head is kept); ``ssm`` holds the recurrent heads (None if all are kept). If queries and keys are normalized
    over all heads, their projections stay whole and the kept heads are picked after the norm.
    """

    def __init__(self, attention: Any, config: HybridConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.n_heads: int = config.num_attention_heads
        self.kept: tuple[int, ...] = tuple(config.kept[layer])
        self.recurrent = config.recurrent_in(layer)
        self.layout = find_layout(attention, f"the attention of layer {layer}")
        self.o_proj: nn.Linear = getattr(attention, self.layout.output)
        self.head_dim = self.o_proj.in_features // self.n_heads
        self.group_size: int = self.n_heads // config.num_key_value_heads
        self.kv_groups = tuple(sorted({head // self.group_size for head in self.kept}))
        for name in ("attention_type", "is_sliding"):  # decoders of some transformers versions read these
            if hasattr(attention, name):
                setattr(self, name, getattr(attention, name))
        self._cache_argument = cache_argument(attention.forward)
        # Stored KV head of each kept head; None if the backbone repeats KV heads itself.
        self.kv_index: list[int] | None = None
        self.row: dict[str, Any] = {}  # `ROW_ARGUMENTS` that the decoder layer received, while it runs
        self.attention = self._cut_down(attention) if self.kept else None
        sizes = config.hidden_size, len(self.recurrent), self.head_dim, config.d_state, config.conv_width
        self.ssm = SSMHeads(*sizes, config.conv_bias, config.recurrence) if self.recurrent else None

    def _cut_down(self, attention: Any) -> nn.Module:
        """Shrink the backbone's attention projections to the kept heads; the builder fills in their weights."""
        n_kept, n_stored = len(self.kept), len(self.kv_groups)
        n_all = self.n_heads, self.n_heads // self.group_size
        whole = set()
        read: dict[Part, tuple[int, ...]] = {"query": self.kept, "key": self.kv_groups}
        for part, heads in read.items():
            norm = head_norm(attention, part)
            if norm is not None and is_over_all_heads(norm, self.head_dim):
                whole.add(getattr(self.layout, part))
                if len(heads) < n_all[part == "key"]:
                    norm.register_forward_hook(partial(_pick_blocks, list(heads), self.head_dim))
        for name in self.layout.inputs:
            if name not in whole:
                full = getattr(attention, name)
                n_rows = len(self.layout.blocks(name, self.kept, self.kv_groups, *n_all)) * self.head_dim
                setattr(attention, name, nn.Linear(full.in_features, n_rows, bias=full.bias is not None))
        delattr(attention, self.layout.output)
        setattr(attention, self.layout.output, _unprojected)
        n_repeats = n_kept // n_stored
        kv_index = [self.kv_groups.index(head // self.group_size) for head in self.kept]
        repeated = [place // n_repeats for place in range(n_stored * n_repeats)]
        if kv_index != repeated:
            n_repeats = 1
            self.kv_index = kv_index
        # Head counts that forwards read, under the names that the families use.
        counts = {
            "num_heads": n_kept,
            "num_attention_heads": n_kept,
            "num_key_value_heads": n_stored,
            "num_key_value_groups": n_repeats,
        }
        for name, count in counts.items():
            if hasattr(attention, name):
                setattr(attention, name, count)
        attention.config = _CutConfig(attention.config, n_kept, n_stored)
        return attention

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        """Return (out_BLD, None): the output projection of all heads. See `heads` for the arguments."""
        y_BLHP = self.heads(hidden_states, *args, **kwargs)
        return self.o_proj(y_BLHP.flatten(-2)), None

    def heads(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        cache: HybridCache | None = None,
        *,
        token_mask: Tensor | None = None,
        seq_idx: Tensor | None = None,
        attended: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Compute the outputs y_BLHP of all heads in the teacher's head order, before the output projection.

        ``token_mask`` [B, L] is 0 at padding, ``seq_idx`` [B, L] numbers packed documents; only the recurrent heads
        read them. Kept heads read the backbone's ``attention_mask``; if ``attended`` contains their outputs, they do
        not run. Kept attention receives all other keyword arguments, including a cache under any of `CACHE_NAMES`.
        """
        if cache is None:
            cache = given_cache(kwargs)
        kwargs = {name: value for name, value in kwargs.items() if name not in CACHE_NAMES}
        if token_mask is None:
            token_mask = self.row.get("token_mask")
        if seq_idx is None:
            seq_idx = self.row.get("seq_idx")
        layer_cache = None if cache is None else cache.layer(self.layer)
        recurred = None
        if self.attention is not None and attended is None:
            store = None
            if layer_cache is not None or self.kv_index is not None:
                store = _KVStore(layer_cache, self.kv_index)
            y_BLD, _ = self.attention(
                hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=attention_mask,
                **{self._cache_argument: store},
                **kwargs,
            )
            attended = y_BLD.unflatten(-1, (len(self.kept), self.head_dim))
        if self.ssm is not None:
            recurred = self.ssm(hidden_states, token_mask, seq_idx, layer_cache)
        if layer_cache is not None:
            layer_cache.advance(hidden_states.shape[1])
        return self._in_teacher_order(attended, recurred)

    def mixing_matrices(self, hidden_states: Tensor, seq_idx_BL: Tensor | None = None) -> Tensor:
        """Return T_BRLS of the recurrent heads, D included: the counterpart of attention maps."""
        if self.ssm is None:
            raise ValueError(f"layer {self.layer} keeps all its heads; only recurrent heads have mixing matrices.")
        return self.ssm.mixing_matrices(hidden_states, seq_idx_BL)

    def _in_teacher_order(self, attended: Tensor | None, recurred: Tensor | None) -> Tensor:
        """Merge [B, L, kept, P] and [B, L, recurrent, P] by runs of consecutive heads of one kind."""
        if attended is None or recurred is None:
            return cast(Tensor, recurred if attended is None else attended)
        # Runs, because a slice per head would be many small copies, and an index tensor one more
        # transfer to the device.
        is_kept = [head in self.kept for head in range(self.n_heads)]  # torch 2.9 cannot compile groupby of a generator
        n_attended = 0
        n_recurred = 0
        runs = []
        for kept, run in itertools.groupby(is_kept):
            length = len(list(run))
            if kept:
                runs.append(attended.narrow(2, n_attended, length))
                n_attended += length
            else:
                runs.append(recurred.narrow(2, n_recurred, length))
                n_recurred += length
        return torch.cat(runs, dim=2)
