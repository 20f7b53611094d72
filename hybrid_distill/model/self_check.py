"""Check on a few random tokens that a model computes the same logits for a document packed, padded, cached and alone.

A decoder that leaks across packed documents, or treats padding as text, still trains and evaluates without an error.
Each model family has its own code for this, and each version of transformers changes it.

Shapes: L length, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, __version__
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from .configuration_hybrid import HybridConfig
from .documents import PACKING, packed_inputs
from .field_rules import release
from .kernel_choice import try_together
from .layout import cache_argument, cache_of, decoder_of, text_config
from .windows import LIMITED

BESIDE = 5
"""Number of tokens before the tested document: another document, or padding."""
PIECES = (5, 1, 1, 4)
"""Lengths of the pieces that fill the cache, in tokens."""
WINDOW = 4
"""Largest window and chunk during the check, shorter than the document."""
SINKS = 2
"""Largest number of sinks during the check: with the window, fewer tokens than the document."""
MARGIN = 16
"""Tolerance of the logits, as a multiple of the effect of one extra rounding after every layer."""
TF32_EPS = 2**-10
"""Relative rounding error of products on a GPU, which may compute float32 in TF32."""
QUANTIZED_EPS = 2**-8
"""Relative rounding error of a quantized model, whose activations may be rounded to 8 bits."""

PADDED = "padded on the left"
PACKED = "packed behind another document"
CACHED = "from a cache"

PASSED = Path("gate", "transformers.json")
"""File in an export's folder that lists the versions of transformers under which it passed its check when loaded."""

_checked: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


def check_same_logits(model: PreTrainedModel, fix: str) -> None:
    """Check that a document gives the same logits packed behind another, left-padded, cached and alone.

    Checks again only if the attention implementation changes. The tolerance is relative to the effect of rounding on
    this model's logits in its dtype (`MARGIN`). Raises ValueError, with the model class, the failed case, the
    difference and the ``fix``, if the logits differ.
    """
    implementation = str(model.config._attn_implementation)
    if _checked.get(model) == implementation:
        return
    generator = torch.Generator().manual_seed(0)
    # By name: the caller's default device may be another.
    ids_1L = torch.randint(
        text_config(model).vocab_size,
        (1, BESIDE + sum(PIECES)),
        generator=generator,
        device="cpu",
    )
    device = model.device
    # Offloaded: accelerate's hooks move the tokens to where the weights will be.
    if device.type == "meta":
        device = torch.device("cpu")
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), _short_windows(model):
            _try_kernels(model, device)
            _compare(model, ids_1L.to(device), generator, fix)
    finally:
        model.train(was_training)
    _checked[model] = implementation


def _try_kernels(model: PreTrainedModel, device: torch.device) -> None:
    """Test the kernels that the check will use, in one child process: one for each would take 10 to 25 s to start."""
    if not _is_student(model):
        return
    student: Any = model
    heads = student.first_recurrent_heads()
    if heads is None or heads.impl != "auto":
        return
    calls = heads.step_calls(model.dtype, masked=False)
    calls += heads.row_calls(model.dtype, training=False, packed=False)
    if model.config._attn_implementation in PACKING:
        calls += heads.row_calls(model.dtype, training=False, packed=True)
    try_together(device, calls)


def check_new_version(model: PreTrainedModel, path: Any) -> None:
    """Check a loaded export with `check_same_logits` if no one has run it under this version of transformers.

    ``path`` is what it was loaded from. A version that passes is added to `PASSED`, if that folder can be written.
    Raises ValueError, naming versions that compute it correctly, if this one does not.
    """
    config: Any = model.config
    # ZeRO-3 has scattered the weights.
    if config.checked_transformers is None or is_deepspeed_zero3_enabled():
        return
    record = Path(str(path)) / PASSED
    passed = []
    with suppress(OSError, ValueError):
        passed = list(json.loads(record.read_text()))
    if __version__ in config.checked_transformers or __version__ in passed:
        return
    versions = sorted(config.checked_transformers, key=release)
    fix = (
        f"This export was checked with transformers {versions[0]} to {versions[-1]}: "
        f"pip install 'transformers=={versions[-1]}', or export the student again under this version."
    )
    check_same_logits(model, fix)
    if record.parent.is_dir():
        with suppress(OSError):
            record.write_text(json.dumps([*passed, __version__]))


def _compare(model: PreTrainedModel, ids_1L: Tensor, generator: torch.Generator, fix: str) -> None:
    document_1L = ids_1L[:, BESIDE:]
    forwards: dict[str, Callable[[], Tensor]] = {PADDED: lambda: _padded(model, ids_1L)}
    # `packed_inputs` refuses the others, in training too.
    if model.config._attn_implementation in PACKING:
        forwards[PACKED] = lambda: _packed(model, ids_1L)
    forwards[CACHED] = lambda: _cached(model, document_1L)
    with _refusal(model, "alone", fix):
        alone_LV = _logits(model, document_1L)
        with rounded_once_more(model, generator, _eps(model)):
            limit = MARGIN * _largest_rms(_logits(model, document_1L) - alone_LV)
    check_not_nan(alone_LV, model)
    for case, forward in forwards.items():
        with _refusal(model, case, fix):
            difference = _largest_rms(forward() - alone_LV)
            # Not `>`: NaN must fail.
            if not difference <= limit:
                raise ValueError(
                    f"logits differ by {difference:.2g} from those alone (at most {limit:.2g}: rounding)"
                )


def check_not_nan(values: Tensor, model: PreTrainedModel) -> None:
    """Raise ValueError if results of a model are NaN: in float16, large activations overflow."""
    if values.isnan().any():
        dtype = str(model.dtype).removeprefix("torch.")
        fix = "load it in float32 or bfloat16" if dtype == "float16" else "check its weights"
        raise ValueError(f"{type(model).__name__} computes NaN in {dtype}; {fix}.")


@contextmanager
def _refusal(model: PreTrainedModel, case: str, fix: str) -> Iterator[None]:
    """Turn any error into one line with the model and the failed case; model code may raise any exception."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())
        if type(error) is not ValueError:
            reason = f"{type(error).__name__}: {reason}"
        name = type(model).__name__
        if _is_student(model):
            name = f"a student made from {type(decoder_of(model)).__name__}"
        raise ValueError(
            f"{name} does not compute a document {case} with transformers {__version__}: {reason}. "
            f"Expected the same logits in every way. {fix}"
        ) from error


def _is_student(model: PreTrainedModel) -> bool:
    return isinstance(model.config, HybridConfig)


def _module_with_scores(model: PreTrainedModel) -> Any:
    """Return the model; for a student without an output embedding (`HybridModel`, a classifier), its decoder."""
    if _is_student(model) and model.get_output_embeddings() is None:
        return decoder_of(model)
    return model


def _logits(model: PreTrainedModel, ids_1L: Tensor, **inputs: object) -> Tensor:
    """Compute the logits, or the hidden states of a decoder alone."""
    options = {"use_cache": False, "return_dict": True, **inputs}
    if getattr(text_config(model), "output_router_logits", False):
        # Computed of the mask, which packing has another shape of.
        options["output_router_logits"] = False
    return _scores_of(_module_with_scores(model)(input_ids=ids_1L, **options))


def _scores_of(output: Any) -> Tensor:
    """Return the logits of the first row, or the hidden states of a decoder alone."""
    # By name: the first field of an output with a router's loss is that loss.
    if "logits" in output:
        return output.logits[0].float()
    return output.last_hidden_state[0].float()


def _padded(model: PreTrainedModel, ids_1L: Tensor) -> Tensor:
    mask_1L = _in_document(ids_1L)
    positions_1L = (mask_1L.cumsum(-1) - 1).clamp(min=0)
    logits_LV = _logits(model, ids_1L, attention_mask=mask_1L, position_ids=positions_1L)
    return logits_LV[BESIDE:]


def _packed(model: PreTrainedModel, ids_1L: Tensor) -> Tensor:
    seq_idx_1L = _in_document(ids_1L)
    inputs: dict[str, Any] = {"seq_idx": seq_idx_1L}
    if not _is_student(model):
        inputs = packed_inputs(seq_idx_1L, model.dtype, model.config)
    logits_LV = _logits(model, ids_1L, **inputs)
    return logits_LV[BESIDE:]


def _in_document(ids_1L: Tensor) -> Tensor:
    """Return 1 at tokens of the tested document and 0 before it: a mask, and the number of each document."""
    place_L = torch.arange(ids_1L.shape[1], device=ids_1L.device)
    return (place_L >= BESIDE).long().unsqueeze(0)


def _cached(model: PreTrainedModel, document_1L: Tensor) -> Tensor:
    module = _module_with_scores(model)
    name = cache_argument(module.forward)
    cache = None
    logits = []
    for piece_1L in document_1L.split(PIECES, dim=1):
        output = module(input_ids=piece_1L, use_cache=True, return_dict=True, **{name: cache})
        cache = cache_of(output)
        logits.append(_scores_of(output))
    return torch.cat(logits)


def _largest_rms(difference_LV: Tensor) -> float:
    """Return the root mean square over the vocabulary, for the token where it is largest."""
    return difference_LV.square().mean(-1).sqrt().max().item()


@contextmanager
def _short_windows(model: PreTrainedModel) -> Iterator[None]:
    """Make windows and chunks shorter than the document; masks and caches read the config at every forward."""
    config = text_config(model)
    windowed = []
    if _is_student(model):
        student: Any = model
        config = decoder_of(model).config
        windowed = [mixer.windowed for mixer in student.mixers() if mixer.windowed is not None]
    sizes = {field: getattr(config, field, None) for field in LIMITED.values()}
    longer = {field: size for field, size in sizes.items() if size is not None and size > WINDOW}
    reaches = [heads.reach for heads in windowed]
    try:
        for field in longer:
            setattr(config, field, WINDOW)
        for heads, reach in zip(windowed, reaches, strict=True):
            heads.reach = reach.shrunk(WINDOW, SINKS)
        yield
    finally:
        for heads, reach in zip(windowed, reaches, strict=True):
            heads.reach = reach
        for field, size in longer.items():
            setattr(config, field, size)


def _eps(model: PreTrainedModel) -> float:
    """Return the relative rounding error of the model's products."""
    eps = torch.finfo(model.dtype).eps
    if model.device.type == "cuda":
        eps = max(eps, TF32_EPS)
    if getattr(model.config, "quantization_config", None) is not None:
        eps = max(eps, QUANTIZED_EPS)
    return eps


@contextmanager
def rounded_once_more(
    model: PreTrainedModel, generator: torch.Generator, eps: float
) -> Iterator[None]:
    """Perturb every decoder layer's output by about one rounding error of relative size ``eps``."""

    def perturb(module: nn.Module, args: object, output: object) -> object:
        return rounded_output(output, generator, eps)

    with ExitStack() as hooks:
        for layer in decoder_of(model).layers:
            hooks.enter_context(layer.register_forward_hook(perturb))
        yield


def rounded_output(output: Any, generator: torch.Generator, eps: float) -> Any:
    """Perturb a decoder layer's output by about one rounding error of relative size ``eps``."""
    # Decoder layers return the hidden states alone, or first among others: it depends on the family.
    if isinstance(output, tuple):
        return (rounded_output(output[0], generator, eps), *output[1:])
    # Drawn on the CPU, for the same numbers on every device.
    uniform = torch.rand(output.shape, generator=generator, device="cpu", dtype=torch.float32)
    change = eps * (2 * uniform.to(output.device) - 1)
    return (output * (1 + change)).to(output.dtype)
