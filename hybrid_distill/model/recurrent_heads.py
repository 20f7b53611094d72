"""Recurrent heads of a layer: SSMs and the gated delta rule, with their projections and convolution.

Shapes: B batch, L length, S source length, P head dim, N state size, D model width, C conv channels,
K conv width (minus 1 in a stored state), R recurrent heads, G rates per head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .aligned_rows import AlignedParts, aligned_parts, join_aligned
from .convolution import causal_conv
from .decays import raw_decay
from .kernel_choice import KERNEL_WIDTHS, KernelCall
from .layer_cache import HybridLayerCache
from .recurrences import FORMS, Recurrence
from .rows import TokensFirst
from .ssd import step_in_place

OPEN_GATE = 1.278464542761074
"""Bias at which a gate with zero weights passes everything: silu(OPEN_GATE) = 1."""
CLOSED_GATE = 0.0
"""Bias at which a gate with zero weights passes nothing, but still gets a gradient: silu(0) = 0."""


def is_plain(projection: nn.Module, device: torch.device) -> bool:
    """Return True if a projection is its plain weight on ``device``: not quantized, no adapter (LoRA), not offloaded.

    Offloading (accelerate) brings a weight to the device only while its own module runs.
    """
    return (
        type(projection) is nn.Linear
        # A plain tensor too: a stage in bf16 puts a copy in the parameter's place.
        and type(projection.weight) in (nn.Parameter, Tensor)
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


class ScanInputs(NamedTuple):
    """Inputs of a recurrence, after the convolution."""

    x: Tensor
    """[B, L, R, P]"""
    raw: Tensor
    """Raw rates, [B, L, R] or [B, L, R, G]."""
    b: Tensor
    """[B, L, R, N], as ``Recurrence.scale_b`` returns it."""
    c: Tensor
    """[B, L, R, N]"""


class SSMHeads(nn.Module):
    """Recurrent heads of one layer (discrete Mamba-2), in the order of the mixer's ``replaced``.

        x, B, C = conv(x_proj u), conv(b_proj u), conv(c_proj u)        a = exp(-softplus(a_proj u))
        S_t = a_t S_{t-1} + x_t B_t^T        out = (S_t C_t + D x_t) silu(z_proj u)

    Every projection has a bias: x inherits the teacher's value bias; the others hold a constant feature, a decay and
    a gate. B and C are per head. ``conv_bias`` adds a bias after the convolution, as in Llamba.

    This is the ``discrete`` recurrence. ``mamba2`` uses the heads of Mamba-2 (arXiv 2405.21060, A = -1), which other
    programs support: the biases of x, B and C are those of the convolution, a SiLU follows, and the step size scales
    the input of the state, dt_t = -log a_t = softplus(a_proj u). ``mamba2-stock`` has no bias of the
    output gate, like published models.

    ``gdn`` follows the gated delta rule (`gated_delta`): x is the value, B scaled to unit length the key, C the query.
    ``a_proj`` has a second row per head, the write gate, after its decay. Everything else is as in ``discrete``.

    With ``starts_closed``, `reset_parameters` closes the output gate: the heads then start as zeros beside a window.

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
        starts_closed: bool = False,
    ) -> None:
        super().__init__()
        self.recurrence = recurrence
        self.impl = "auto"
        self.segment_len: int | None = None
        self.starts_closed = starts_closed
        self.n_heads = n_heads
        self.head_dim = head_dim
        self.d_state = d_state
        # Not read from the weights: ZeRO-3 empties them, and with them their shapes.
        self.conv_width = conv_width
        # A bias of x, B and C is either the projection's or, before a SiLU, the convolution's: adapters merge their own
        # bias into the projection's, which adds it before the convolution.
        has_bias = not self.form.has_silu
        self.x_proj = nn.Linear(hidden_size, n_heads * head_dim, bias=has_bias)
        self.b_proj = nn.Linear(hidden_size, n_heads * d_state, bias=has_bias)
        self.c_proj = nn.Linear(hidden_size, n_heads * d_state, bias=has_bias)
        self.z_proj = nn.Linear(
            hidden_size, n_heads * head_dim, bias=self.form.has_output_gate_bias
        )
        self.a_proj = _DecayProjection(hidden_size, n_heads * self.form.n_rates)
        self.sizes = [n_heads * size for size in (head_dim, d_state, d_state)]
        n_channels = sum(self.sizes)
        self.conv_weight = nn.Parameter(torch.empty(n_channels, conv_width))
        self.conv_bias = None
        if conv_bias or self.form.has_silu:
            self.conv_bias = nn.Parameter(torch.empty(n_channels))
        self.D = nn.Parameter(torch.empty(n_heads))

    @property
    def form(self) -> Recurrence:
        """Functions of this recurrence; a property, because an attribute would have to be pickled."""
        return FORMS[self.recurrence]

    def row_calls(self, dtype: torch.dtype, *, training: bool, packed: bool) -> list[KernelCall]:
        """List the kernels that `forward` asks for on rows, if they run."""
        options = {"training": training, "packed": packed}
        sizes = self.head_dim, self.d_state
        calls = []
        scan_kernel = self.form.kernel
        if scan_kernel is not None:
            calls.append(
                KernelCall(scan_kernel.name, dtype, sizes, {**scan_kernel.options, **options})
            )
        if self.conv_width in KERNEL_WIDTHS:
            calls.append(KernelCall("convolution", dtype, (self.conv_width,), options))
        return calls

    def step_calls(self, dtype: torch.dtype, *, masked: bool) -> list[KernelCall]:
        """List the kernel that `forward` asks for on one token after a cache, if there is one."""
        if not self.has_step or self.conv_width not in KERNEL_WIDTHS:
            return []
        sizes = self.head_dim, self.d_state, self.conv_width
        options = {"training": False, "masked": masked}
        return [KernelCall("decoding step", dtype, sizes, options)]

    @property
    def has_step(self) -> bool:
        """True if one token may run in one kernel."""
        return self.form.steps_in_place and self.conv_bias is None

    @torch.no_grad()
    def reset_parameters(self, std: float = 0.02) -> None:
        """Draw random projections; set an identity convolution, an open gate and half-lives spread over the heads.

        Does nothing where DeepSpeed's ZeRO-3 has emptied the parameters: loading a checkpoint fills them.
        """
        if not self.D.numel():
            return
        for projection in (self.x_proj, self.b_proj, self.c_proj, self.a_proj):
            projection.weight.normal_(std=std)
            if projection.bias is not None:
                projection.bias.zero_()
        if self.z_proj.bias is None:
            self.z_proj.weight.normal_(std=std)
        else:
            self.z_proj.weight.zero_()
            self.z_proj.bias.fill_(CLOSED_GATE if self.starts_closed else OPEN_GATE)
        self.conv_weight.zero_()
        self.conv_weight[:, -1] = 1.0
        if self.conv_bias is not None:
            self.conv_bias.zero_()
        self.D.fill_(1.0)
        self.a_proj.bias.zero_()
        # The decay is the first rate of a head.
        rates_RG = self.a_proj.bias.view(self.n_heads, -1)
        rates_RG[:, 0] = raw_decay(spread_half_lives(self.n_heads))

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
        if cache is not None:
            cache.on_replay(self._replay(hidden_BLD, token_mask_BL))
        rows = None
        if token_mask_BL is not None:
            # Padding goes last: the convolution and the states would have to skip it within a row.
            rows = TokensFirst.of(token_mask_BL)
            token_mask_BL = rows.mask_BL
            hidden_BLD = rows.apply(hidden_BLD)
            if seq_idx_BL is not None:
                seq_idx_BL = rows.documents(seq_idx_BL)
        conv_state = None
        ssm_state = None
        if cache is not None:
            conv_state = cache.conv_state
            ssm_state = cache.ssm_state
        run = self._run
        if self.segment_len is not None and hidden_BLD.shape[1] > self.segment_len:
            run = self._run_in_segments
        y_BLRP, conv_state, ssm_state = run(
            hidden_BLD, token_mask_BL, seq_idx_BL, conv_state, ssm_state
        )
        if cache is not None:
            cache.remember(conv_state=conv_state, ssm_state=ssm_state)
        if rows is None:
            return y_BLRP
        return rows.undo(y_BLRP)

    def _replay(
        self, hidden_BLD: Tensor, token_mask_BL: Tensor | None
    ) -> Callable[[HybridLayerCache, int], None]:
        """Return a function that reads the first n of these tokens again, from the states before them."""

        def replay(cache: HybridLayerCache, n_tokens: int) -> None:
            mask_BL = None
            if token_mask_BL is not None:
                mask_BL = token_mask_BL[:, :n_tokens]
            # Without documents: packed rows are refused with a cache.
            self.forward(hidden_BLD[:, :n_tokens], mask_BL, None, cache)

        return replay

    def _run(
        self,
        hidden_BLD: Tensor,
        token_mask_BL: Tensor | None,
        seq_idx_BL: Tensor | None,
        conv_state_BCK: Tensor | None,
        state_BRPN: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (y_BLRP, conv state, SSM state) after these tokens, given the states before them."""
        xbc_BLC, raw_BLR = self._projections(hidden_BLD)
        inputs, conv_state_BCK = self._convolved_inputs(
            xbc_BLC, raw_BLR, token_mask_BL, seq_idx_BL, conv_state_BCK
        )
        y_BLRP, state_BRPN = self.form.scan(
            *inputs,
            self.D,
            self._output_gate(hidden_BLD),
            state_BHPN=state_BRPN,
            seq_idx_BL=seq_idx_BL,
            impl=self.impl,
        )
        return y_BLRP, conv_state_BCK, state_BRPN

    def _run_in_segments(
        self,
        hidden_BLD: Tensor,
        token_mask_BL: Tensor | None,
        seq_idx_BL: Tensor | None,
        conv_state_BCK: Tensor | None,
        state_BRPN: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Run `_run` on segments of ``segment_len`` tokens. A document that begins with a segment starts from zero."""
        size: Any = self.segment_len
        ys = []
        for begin in range(0, hidden_BLD.shape[1], size):
            segment = slice(begin, begin + size)
            if seq_idx_BL is not None and begin:
                conv_state_BCK, state_BRPN = _states_of_document(
                    seq_idx_BL, begin, conv_state_BCK, state_BRPN
                )
            outputs: tuple[Tensor, Tensor, Tensor] = checkpoint(
                self._run,
                hidden_BLD[:, segment],
                _columns(token_mask_BL, segment),
                _columns(seq_idx_BL, segment),
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
        mixing_BRLS = self.form.matrix(raw, b, c, seq_idx_BL)
        skip_R1 = self.D.to(mixing_BRLS.dtype).unsqueeze(-1)
        skip_RL = skip_R1.expand(-1, x.shape[1])
        return mixing_BRLS + torch.diag_embed(skip_RL)

    def scan_inputs(
        self, hidden_BLD: Tensor, seq_idx_BL: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Return the scan's inputs x_BLRP, raw rates, B_BLRN and C_BLRN, and the output gate silu(z)_BLRP."""
        xbc_BLC, raw_BLR = self._projections(hidden_BLD)
        inputs, _ = self._convolved_inputs(xbc_BLC, raw_BLR, None, seq_idx_BL, None)
        return (*inputs, F.silu(self._output_gate(hidden_BLD)))

    def _projections(self, hidden_BLD: Tensor) -> tuple[Tensor, Tensor]:
        """Return x, B and C of all heads before the convolution, [B, L, C], and the raw rates, [B, L, R G]."""
        projections = (self.x_proj, self.b_proj, self.c_proj)
        batch, length, width = hidden_BLD.shape
        on_kernels = hidden_BLD.is_cuda or self.impl == "triton"
        are_plain = all(is_plain(projection, hidden_BLD.device) for projection in projections)
        if on_kernels and length > 1 and batch * length >= width and are_plain:
            # The weights are joined, because they are smaller than the activations. Padding makes
            # the rows longer than `sizes`.
            weight = join_aligned([projection.weight for projection in projections])
            bias = None
            if not self.form.has_silu:
                bias = join_aligned([projection.bias for projection in projections])
            xbc_BLC = F.linear(hidden_BLD, weight, bias)
        else:
            xbc_BLC = torch.cat([projection(hidden_BLD) for projection in projections], dim=-1)
        return xbc_BLC, self.a_proj(hidden_BLD)

    def _output_gate(self, hidden_BLD: Tensor) -> Tensor:
        return self.z_proj(hidden_BLD).unflatten(-1, (self.n_heads, self.head_dim))

    def _step(
        self, hidden_BLD: Tensor, token_mask_BL: Tensor | None, cache: HybridLayerCache
    ) -> Tensor:
        """Compute the next token after the cached ones; if possible, one kernel updates the states in place."""
        xbc_BLC, raw_BLR = self._projections(hidden_BLD)
        z_BLRP = self._output_gate(hidden_BLD)
        conv_state = cast(Tensor, cache.conv_state)
        ssm_state = cast(Tensor, cache.ssm_state)
        y_BRP = step_in_place(
            xbc_BLC[:, 0],
            raw_BLR[:, 0],
            z_BLRP[:, 0],
            self.conv_weight.to(xbc_BLC.dtype),
            self.D,
            conv_state,
            ssm_state,
            token_mask_B=_columns(token_mask_BL, 0),
            impl=self.impl if self.has_step else "torch",
        )
        if y_BRP is None:
            inputs, conv_state = self._convolved_inputs(
                xbc_BLC, raw_BLR, token_mask_BL, None, conv_state
            )
            x, raw, b, c = inputs
            y_BRP, ssm_state = self.form.step(
                x[:, 0], raw[:, 0], b[:, 0], c[:, 0], self.D, z_BLRP[:, 0], ssm_state
            )
            cache.remember(conv_state=conv_state, ssm_state=ssm_state)
        return y_BRP.unsqueeze(1)

    def _convolved_inputs(
        self,
        xbc_BLC: Tensor,
        raw_BLR: Tensor,
        token_mask_BL: Tensor | None,
        seq_idx_BL: Tensor | None,
        conv_state_BCK: Tensor | None,
    ) -> tuple[ScanInputs, Tensor]:
        """Return the inputs of the scan after the convolution, and the conv state.

        Padding, at the end of its row, adds nothing to the state and does not decay it.
        """
        token_BL1 = None
        n_tokens_B = None
        if token_mask_BL is not None:
            token_BL1 = token_mask_BL.unsqueeze(-1).to(xbc_BLC.dtype)
            n_tokens_B = token_mask_BL.long().sum(dim=1)
            # softplus and sigmoid of -inf are 0: padding neither decays the state nor writes to it
            # by the delta rule.
            raw_BLR = raw_BLR.masked_fill(token_BL1 == 0, -math.inf)
        xbc_BLC, conv_state_BCK = self._convolve(xbc_BLC, seq_idx_BL, conv_state_BCK, n_tokens_B)
        x, b, c = self._by_head(xbc_BLC)
        raw = raw_BLR
        if self.form.n_rates > 1:
            raw = raw_BLR.unflatten(-1, (self.n_heads, -1))
        if token_BL1 is not None:
            # Only now: the taps of the convolution reach from padding back to the tokens before it.
            x = x * token_BL1.unsqueeze(-1)
        return ScanInputs(x, raw, self.form.scale_b(b, raw), c), conv_state_BCK

    def _by_head(self, xbc_BLC: Tensor) -> tuple[Tensor, ...]:
        """Split a row into x_BLRP, B_BLRN and C_BLRN."""
        parts = AlignedParts.apply(xbc_BLC, self.sizes)
        return tuple(part.unflatten(-1, (self.n_heads, -1)) for part in parts)

    def _convolve(
        self,
        xbc_BLC: Tensor,
        seq_idx_BL: Tensor | None,
        conv_state_BCK: Tensor | None,
        n_tokens_B: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Convolve the channels of x, B and C, with the bias and SiLU of the form; return also the conv state."""
        is_padded = xbc_BLC.shape[-1] > sum(self.sizes)

        def like_row(t: Tensor, dim: int = 0) -> Tensor:
            """Pad the parts along ``dim`` as those of the row are."""
            if is_padded:
                return join_aligned(t.split(self.sizes, dim), dim)
            return t

        if conv_state_BCK is not None:
            conv_state_BCK = like_row(conv_state_BCK, 1)
        xbc_BLC, conv_state_BCK = causal_conv(
            xbc_BLC,
            # By hand: a product of bfloat16 and float32 is float32, under autocast too.
            like_row(self.conv_weight).to(xbc_BLC.dtype),
            state_BCK=conv_state_BCK,
            seq_idx_BL=seq_idx_BL,
            n_tokens_B=n_tokens_B,
            impl=self.impl,
        )
        if is_padded:
            # A cache holds no padding: whether rows have it depends on their length.
            conv_state_BCK = torch.cat(aligned_parts(conv_state_BCK, self.sizes, 1), dim=1)
        if self.conv_bias is not None:
            xbc_BLC = xbc_BLC + like_row(self.conv_bias).to(xbc_BLC.dtype)
        if self.form.has_silu:
            xbc_BLC = F.silu(xbc_BLC)
        return xbc_BLC, conv_state_BCK


def _columns(t_BL: Tensor | None, columns: slice | int) -> Tensor | None:
    """Return these columns of a mask or of document numbers, if there are any."""
    if t_BL is None:
        return None
    return t_BL[:, columns]


def _states_of_document(
    seq_idx_BL: Tensor, begin: int, conv_state_BCK: Any, state_BRPN: Any
) -> tuple[Tensor, Tensor]:
    """Zero the parts of the states before token ``begin`` that belong to an earlier document."""
    n_past = conv_state_BCK.shape[-1]
    # -1 is the number of no document. It fills the places of a past that is longer than the tokens so far.
    past_BX = F.pad(seq_idx_BL[:, :begin], (n_past, 0), value=-1)
    document_B1 = seq_idx_BL[:, begin : begin + 1]
    is_own_BK = past_BX[:, begin:] == document_B1
    continues_B = seq_idx_BL[:, begin - 1] == seq_idx_BL[:, begin]
    own_conv_state = conv_state_BCK * is_own_BK.unsqueeze(1)
    own_state = state_BRPN * continues_B[:, None, None, None]
    return own_conv_state, own_state
