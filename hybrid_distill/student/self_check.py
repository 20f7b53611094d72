"""Check on a few random tokens that a model computes the same logits for a document packed, padded, cached and alone.

A decoder that leaks across packed documents, or treats padding as text, still trains and evaluates without an error.
Each model family has its own code for this, and each version of transformers changes it.

Shapes: L length, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, __version__

from ..model import HybridForCausalLM, packed_inputs
from ..model.documents import LIMITED
from ..teacher import SUPPORTED, decoder_blocks, eval_mode, text_config

BESIDE = 5
"""Number of tokens before the tested document: another document, or padding."""
PIECES = (5, 1, 1, 4)
"""Lengths of the pieces that fill the cache, in tokens."""
WINDOW = 4
"""Largest window and chunk during the check, shorter than the document."""
MARGIN = 16
"""Tolerance of the logits, as a multiple of the effect of one extra rounding after every layer."""
TF32_EPS = 2**-10
"""Relative rounding error of products on a GPU, which may compute float32 in TF32."""

_checked: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


def check_rows(model: PreTrainedModel) -> None:
    """Check that a document gives the same logits packed behind another, left-padded, cached and alone.

    Checks again only if the attention implementation changes. The tolerance is relative to the effect of rounding on
    this model's logits in its dtype (`MARGIN`). Raises ValueError, with the model class, the failed case and the
    difference, if the logits differ.
    """
    implementation = str(model.config._attn_implementation)
    if _checked.get(model) == implementation:
        return
    generator = torch.Generator().manual_seed(0)
    ids_1L = torch.randint(text_config(model).vocab_size, (1, BESIDE + sum(PIECES)), generator=generator)
    with eval_mode(model), _short_windows(model):
        _compare(model, ids_1L.to(model.device), generator)
    _checked[model] = implementation


def _compare(model: PreTrainedModel, ids_1L: Tensor, generator: torch.Generator) -> None:
    document_1L = ids_1L[:, BESIDE:]
    ways: dict[str, Callable[[], Tensor]] = {"padded on the left": lambda: _padded(model, ids_1L)}
    if model.config._attn_implementation in ("eager", "sdpa"):  # `packed_inputs` refuses the others, in training too
        ways["packed behind another document"] = lambda: _packed(model, ids_1L)
    ways["from a cache"] = lambda: _cached(model, document_1L)
    with _refusal(model, "alone"):
        alone_LV = _logits(model, document_1L)
        with rounded_once_more(model, generator, _eps(model)):
            limit = MARGIN * _size(_logits(model, document_1L) - alone_LV)
    for way, logits in ways.items():
        with _refusal(model, way):
            difference = _size(logits() - alone_LV)
            if not difference <= limit:
                raise ValueError(f"logits differ by {difference:.2g} from those alone (at most {limit:.2g}: rounding)")


@contextmanager
def _refusal(model: PreTrainedModel, way: str) -> Iterator[None]:
    """Turn any error into one line with the model and the failed case; model code may raise any exception."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split()) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        is_student = isinstance(model, HybridForCausalLM)
        name = f"a student made from {type(_backbone(model)).__name__}" if is_student else type(model).__name__
        raise ValueError(
            f"{name} does not compute a document {way} with transformers {__version__}: {reason}. "
            f"Expected the same logits in every way. Take a teacher of another family ({SUPPORTED}) or another version "
            "of transformers, or remove from its config.json windows that its attention does not have (sliding_window)."
        ) from error


def _backbone(model: PreTrainedModel) -> object:
    return model.model if isinstance(model, HybridForCausalLM) else model


def _logits(model: PreTrainedModel, ids_1L: Tensor, **inputs: object) -> Tensor:
    return model(input_ids=ids_1L, **{"use_cache": False, **inputs}).logits[0].float()


def _padded(model: PreTrainedModel, ids_1L: Tensor) -> Tensor:
    mask_1L = (torch.arange(ids_1L.shape[1], device=ids_1L.device) >= BESIDE).long().unsqueeze(0)
    positions_1L = (mask_1L.cumsum(-1) - 1).clamp(min=0)
    return _logits(model, ids_1L, attention_mask=mask_1L, position_ids=positions_1L)[BESIDE:]


def _packed(model: PreTrainedModel, ids_1L: Tensor) -> Tensor:
    seq_idx_1L = (torch.arange(ids_1L.shape[1], device=ids_1L.device) >= BESIDE).long().unsqueeze(0)
    is_student = isinstance(model, HybridForCausalLM)
    inputs = {"seq_idx": seq_idx_1L} if is_student else packed_inputs(seq_idx_1L, model.dtype, model.config)
    return _logits(model, ids_1L, **inputs)[BESIDE:]


def _cached(model: PreTrainedModel, document_1L: Tensor) -> Tensor:
    cache, logits = None, []
    for piece_1L in document_1L.split(PIECES, dim=1):
        output = model(input_ids=piece_1L, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        logits.append(output.logits[0].float())
    return torch.cat(logits)


def _size(difference_LV: Tensor) -> float:
    """Return the root mean square over the vocabulary, for the token where it is largest."""
    return difference_LV.square().mean(-1).sqrt().max().item()


@contextmanager
def _short_windows(model: PreTrainedModel) -> Iterator[None]:
    """Make windows and chunks shorter than the document; masks and caches read the config at every forward."""
    config = text_config(_backbone(model))
    sizes = {field: getattr(config, field, None) for field in LIMITED.values()}
    longer = {field: size for field, size in sizes.items() if size is not None and size > WINDOW}
    try:
        for field in longer:
            setattr(config, field, WINDOW)
        yield
    finally:
        for field, size in longer.items():
            setattr(config, field, size)


def _eps(model: PreTrainedModel) -> float:
    return max(torch.finfo(model.dtype).eps, TF32_EPS if model.device.type == "cuda" else 0)


@contextmanager
def rounded_once_more(model: PreTrainedModel, generator: torch.Generator, eps: float) -> Iterator[None]:
    """Perturb every decoder layer's output by about one rounding error of relative size ``eps``."""

    def change(module: nn.Module, args: object, output: Tensor | tuple[Tensor, ...]) -> object:
        hidden_BLD = output[0] if isinstance(output, tuple) else output
        change_BLD = torch.rand(hidden_BLD.shape, generator=generator).to(hidden_BLD.device)
        changed_BLD = (hidden_BLD * (1 + eps * (2 * change_BLD - 1))).to(hidden_BLD.dtype)
        return (changed_BLD, *output[1:]) if isinstance(output, tuple) else changed_BLD

    with ExitStack() as hooks:
        for _, block in decoder_blocks(model):
            hooks.enter_context(block.register_forward_hook(change))
        yield
