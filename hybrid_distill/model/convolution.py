"""Causal convolution of the channels of recurrent heads, over the tokens of a document.

Shapes: B batch, L length, C channels, K conv width (minus 1 in a state).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .kernel_choice import KERNEL_WIDTHS, KERNELS, choose_implementation


def causal_conv(
    x_BLC: Tensor,
    weight_CK: Tensor,
    *,
    state_BCK: Tensor | None = None,
    seq_idx_BL: Tensor | None = None,
    n_tokens_B: Tensor | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Convolve channels causally, with identity activation: y_t = sum_k weight[:, k] x_{t - (K - 1) + k}.

    The last tap reads the current token. The state is the last K - 1 inputs, [B, C, K - 1] (default: zeros). With
    ``seq_idx_BL``, no tap reads another document. Returns y_BLC and the state after each row's last token: the last
    input, or input ``n_tokens_B`` - 1 if padding follows the tokens.
    """
    n_past = weight_CK.shape[1] - 1
    length = x_BLC.shape[1]
    if state_BCK is not None:
        state_BCK = state_BCK.to(x_BLC.dtype)
    chosen = "torch"
    if length > 0 and n_past + 1 in KERNEL_WIDTHS:
        chosen = choose_implementation(
            impl, "convolution", x_BLC, n_past + 1, packed=seq_idx_BL is not None
        )
    if chosen == "triton":
        conv = KERNELS["causal_conv"]
        y_BLC, last_BCK = conv(x_BLC, weight_CK, state_BCK=state_BCK, seq_idx_BL=seq_idx_BL)
    else:
        y_BLC, last_BCK = _conv_by_taps(x_BLC, weight_CK, state_BCK, seq_idx_BL)
    if n_tokens_B is not None:
        # Either way has returned the last inputs of a row, which here are padding.
        last_BCK = _last_tokens(x_BLC, state_BCK, n_tokens_B, n_past)
    return y_BLC, last_BCK


def _conv_by_taps(
    x_BLC: Tensor, weight_CK: Tensor, state_BCK: Tensor | None, seq_idx_BL: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute `causal_conv` as a sum over taps."""
    n_past = weight_CK.shape[1] - 1
    length = x_BLC.shape[1]
    if state_BCK is None:
        past_BKC = x_BLC.new_zeros(x_BLC.shape[0], n_past, x_BLC.shape[2])
    else:
        past_BKC = state_BCK.mT
    with_past_BLC = torch.cat([past_BKC, x_BLC], dim=1)
    y_BLC = x_BLC * weight_CK[:, -1]
    for back in range(1, n_past + 1):
        tap_BLC = with_past_BLC[:, n_past - back : n_past - back + length]
        if seq_idx_BL is not None:
            tap_BLC = tap_BLC * _same_document(seq_idx_BL, back).unsqueeze(-1)
        y_BLC = torch.addcmul(y_BLC, tap_BLC, weight_CK[:, -1 - back])
    return y_BLC, with_past_BLC[:, length:].mT


def _last_tokens(
    x_BLC: Tensor, state_BCK: Tensor | None, n_tokens_B: Tensor, n_past: int
) -> Tensor:
    """Return the last K - 1 inputs up to each row's last token, [B, C, K - 1]; some may come from the state."""
    back_K = torch.arange(-n_past, 0, device=x_BLC.device)
    place_BK1 = (n_tokens_B.unsqueeze(1) + back_K).unsqueeze(-1)
    # Negative places are in the state. Each source is read at all places, so they are clamped.
    new_BKC = x_BLC.gather(1, place_BK1.clamp_min(0).expand(-1, -1, x_BLC.shape[2]))
    if state_BCK is None:
        return new_BKC.masked_fill(place_BK1 < 0, 0.0).mT
    place_in_state_BK1 = (place_BK1 + n_past).clamp_max(n_past - 1)
    held_BKC = state_BCK.mT.gather(1, place_in_state_BK1.expand_as(new_BKC))
    return torch.where(place_BK1 < 0, held_BKC, new_BKC).mT


def _same_document(seq_idx_BL: Tensor, back: int) -> Tensor:
    """Mark tokens whose predecessor ``back`` tokens earlier is in the same document; the past is the first document."""
    length = seq_idx_BL.shape[1]
    past_BK = seq_idx_BL[:, :1].expand(-1, back)
    earlier_BL = torch.cat([past_BK, seq_idx_BL], dim=1)[:, :length]
    return earlier_BL == seq_idx_BL
