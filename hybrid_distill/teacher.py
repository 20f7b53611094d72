"""Observe and ablate an unmodified Hugging Face decoder: where its mixers are, what flows through them.

Shapes: B batch, L length, H query head, P head dim, D model width.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from .plan import HeadId

TINY = "tiny"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ATTENTION_NAMES = ("self_attn", "attn", "attention", "self_attention")
SUPPORTED = "Llama, Qwen2, Qwen3 or Mistral"
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
SAMPLES_PER_TENSOR = 64


@dataclass(frozen=True)
class AttentionSite:
    """The token mixer of one decoder layer; its ``o_proj`` reads the heads side by side, in order."""

    layer: int
    name: str
    module: nn.Module
    block: nn.Module
    o_proj: nn.Linear
    n_heads: int
    n_kv_heads: int
    head_dim: int


def decoder_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """(name, module) of every decoder layer, bottom to top. Raises ValueError when there is no such list."""
    n_layers = text_config(model).num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == n_layers:
            return [(f"{name}.{index}", block) for index, block in enumerate(module)]
    raise ValueError(
        f"{type(model).__name__} holds no list of {n_layers} decoder layers (num_hidden_layers of its "
        f"config); expected a decoder such as {SUPPORTED}."
    )


def text_config(model: Any) -> Any:
    """The config of the language model inside ``model``."""
    return model.config.get_text_config(decoder=True)


def attention_sites(model: nn.Module) -> list[AttentionSite]:
    """The mixer of every layer of a Hugging Face decoder, or of a hybrid student.

    Raises ValueError, naming the module and what was expected, for a layer whose attention is not understood.
    """
    return [_site(model, index, name, block) for index, (name, block) in enumerate(decoder_blocks(model))]


def _site(model: nn.Module, layer: int, block_name: str, block: nn.Module) -> AttentionSite:
    children = dict(block.named_children())
    child = next((c for c in ATTENTION_NAMES if c in children), None)
    if child is None:
        raise ValueError(
            f"{block_name} ({type(block).__name__}) holds no attention module: its parts are "
            f"{', '.join(children) or 'none'}; expected one named self_attn, as in {SUPPORTED}."
        )
    name, module = f"{block_name}.{child}", children[child]
    # By name: a class that comes with an exported checkpoint is not the class in this package.
    is_hybrid = type(module).__name__ == "HybridMixer"
    parts: dict[str, Any] = dict(module.named_children())
    needed = ("o_proj",) if is_hybrid else PROJECTIONS
    missing = [part for part in needed if not isinstance(parts.get(part), nn.Linear)]
    if missing:
        raise ValueError(
            f"{name} ({type(module).__name__}) has no linear {', '.join(missing)}; "
            f"expected an attention module with {', '.join(PROJECTIONS)}, as in {SUPPORTED}."
        )
    config, o_proj = text_config(model), parts["o_proj"]
    head_dim = getattr(module, "head_dim", None) or o_proj.in_features // config.num_attention_heads
    n_kv_heads = config.num_key_value_heads if is_hybrid else parts["k_proj"].out_features // head_dim
    return AttentionSite(
        layer, name, module, block, o_proj, o_proj.in_features // head_dim, n_kv_heads, head_dim
    )


@contextmanager
def ablate_heads(
    model: nn.Module, heads: Iterable[HeadId], values: Mapping[HeadId, Tensor] | None = None
) -> Iterator[None]:
    """Zero the named heads' slices of the output projection's input while the context is open.

    A head named in ``values`` gets that vector [P] there, at every token, instead of zeros (mean ablation).
    The model is as before afterwards, also after an exception; contexts may be nested. Raises ValueError
    for a head that does not exist.
    """
    sites = attention_sites(model)
    vectors = {HeadId(*head): value_P for head, value_P in (values or {}).items()}
    heads_of: dict[int, list[int]] = {}
    for head_id in (HeadId(*head) for head in heads):
        _check_exists(sites, head_id)
        heads_of.setdefault(head_id.layer, []).append(head_id.head)
    with ExitStack() as hooks:
        for layer, which in heads_of.items():
            replaced = {head: vectors.get(HeadId(layer, head)) for head in which}
            hooks.enter_context(_edited(sites[layer], _replacing(replaced)))
        yield


@contextmanager
def ablate_heads_by_row(
    model: nn.Module, layer: int, heads: Sequence[int | None], values: Tensor | None = None
) -> Iterator[None]:
    """Ablate another head of one layer in each group of rows: ``len(heads)`` ablations in one batch.

    Rows g*B/G to (g+1)*B/G - 1 of a batch of B rows lose head ``heads[g]``, G being ``len(heads)``; None
    ablates nothing there. With ``values`` [H, P] head h's slice becomes ``values[h]`` instead of zeros.
    Raises ValueError for a head that does not exist, and in a forward whose rows do not form G equal groups.
    """
    sites = attention_sites(model)
    for head in heads:
        _check_exists(sites, HeadId(layer, 0 if head is None else head))
    with ExitStack() as hooks:
        if heads:
            hooks.enter_context(_edited(sites[layer], _replacing_by_row(heads, values)))
        yield


def _check_exists(sites: list[AttentionSite], head_id: HeadId) -> None:
    layer, head = head_id
    if not (0 <= layer < len(sites) and 0 <= head < sites[layer].n_heads):
        raise ValueError(
            f"head {head_id} does not exist: this model has layers 0..{len(sites) - 1} "
            f"with heads 0..{sites[0].n_heads - 1}."
        )


@contextmanager
def _edited(site: AttentionSite, edit: Callable[[Tensor], None]) -> Iterator[None]:
    """Let ``edit`` change a copy of the heads x_BLHP that the output projection reads."""

    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        heads_BLHP = args[0].unflatten(-1, (-1, site.head_dim)).clone()
        edit(heads_BLHP)
        return (heads_BLHP.flatten(-2), *args[1:])

    handle = site.o_proj.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _replacing(values: dict[int, Tensor | None]) -> Callable[[Tensor], None]:
    zeroed = [head for head, value_P in values.items() if value_P is None]

    def edit(heads_BLHP: Tensor) -> None:
        heads_BLHP[..., zeroed, :] = 0
        for head, value_P in values.items():
            if value_P is not None:
                heads_BLHP[..., head, :] = value_P.to(heads_BLHP)

    return edit


def _replacing_by_row(heads: Sequence[int | None], values: Tensor | None) -> Callable[[Tensor], None]:
    def edit(heads_BLHP: Tensor) -> None:
        n_rows = len(heads_BLHP)
        if n_rows % len(heads):
            raise ValueError(
                f"a batch of {n_rows} rows cannot hold {len(heads)} ablations evenly; repeat the batch once per head."
            )
        head_of = [head for head in heads for _ in range(n_rows // len(heads))]
        rows = [row for row, head in enumerate(head_of) if head is not None]
        which = [head for head in head_of if head is not None]
        heads_BLHP[rows, :, which] = 0 if values is None else values[which].unsqueeze(1).to(heads_BLHP)

    return edit


@dataclass
class MixerCall:
    """One layer's mixer in the latest forward: how it was called, its heads before ``o_proj``, its output.

    Reading a field before a forward has run raises AttributeError.
    """

    hidden_BLD: Tensor = field(init=False)
    args: tuple[Any, ...] = field(init=False)
    kwargs: dict[str, Any] = field(init=False)
    heads_BLHP: Tensor = field(init=False)
    out_BLD: Tensor = field(init=False)


@contextmanager
def trace_mixers(model: nn.Module) -> Iterator[list[MixerCall]]:
    """Yield one `MixerCall` per layer; every forward inside the context fills them anew.

    Tensors are the model's own, neither copied nor detached: for targets, forward under ``torch.no_grad``.
    """
    sites = attention_sites(model)
    calls = [MixerCall() for _ in sites]
    with ExitStack() as hooks:
        for site, call in zip(sites, calls, strict=True):
            before, heads, after = _recorders(call, site.head_dim)
            for handle in (
                site.module.register_forward_pre_hook(before, with_kwargs=True),
                site.o_proj.register_forward_pre_hook(heads),
                site.module.register_forward_hook(after),
            ):
                hooks.callback(handle.remove)
        yield calls


def _recorders(call: MixerCall, head_dim: int) -> tuple[Any, Any, Any]:
    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call.args, call.kwargs = args, kwargs
        call.hidden_BLD = args[0] if args else kwargs["hidden_states"]

    def heads(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        call.heads_BLHP = args[0].unflatten(-1, (-1, head_dim))

    def after(module: nn.Module, args: Any, output: Any) -> None:
        call.out_BLD = output[0] if isinstance(output, tuple) else output

    return before, heads, after


@contextmanager
def record_block(model: nn.Module, layer: int) -> Iterator[list[Any]]:
    """Yield a list that receives what decoder layer ``layer`` returns, one entry per forward."""
    outputs: list[Any] = []
    block = decoder_blocks(model)[layer][1]
    handle = block.register_forward_hook(lambda module, args, output: outputs.append(output))
    try:
        yield outputs
    finally:
        handle.remove()


@contextmanager
def replay_blocks(model: nn.Module, layer: int, output: Any) -> Iterator[None]:
    """Let layers 0..``layer`` hand out ``output`` (from `record_block`) instead of running.

    A forward on the same input then computes the layers above only, with the same result. Not for use with a
    cache: the skipped layers would leave theirs empty.
    """
    with ExitStack() as restore:
        for _, block in decoder_blocks(model)[: layer + 1]:
            restore.callback(_restore_forward, block, block.__dict__.get("forward"))
            block.forward = lambda *args, **kwargs: output
        yield


def _restore_forward(block: nn.Module, own: Any) -> None:
    if own is None:
        del block.forward
    else:
        block.forward = own


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Evaluate without dropout and without gradients; the model's mode is restored afterwards."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def fingerprint(model: nn.Module) -> str:
    """Short hash that tells two teachers apart: config shape, parameters' names, shapes and some elements.

    The elements are rounded to bfloat16, so that a checkpoint has one fingerprint, loaded in bfloat16 or
    in float32. Reads about 64 elements of a tensor: cheap for any size.
    """
    config = text_config(model)
    shape_of = ("model_type", "num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
    digest = hashlib.sha256(json.dumps([getattr(config, name, None) for name in shape_of]).encode())
    for name, parameter in sorted(model.named_parameters()):
        stride = max(1, parameter.numel() // SAMPLES_PER_TENSOR)
        sample = parameter.detach().flatten()[::stride].to(torch.bfloat16).view(torch.int16)
        digest.update(f"{name} {tuple(parameter.shape)} {sample.tolist()}".encode())
    return digest.hexdigest()[:16]


def load_teacher(
    name_or_path: str | Path,
    *,
    dtype: str = "float32",
    revision: str | None = None,
    attn_implementation: str | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model (eval mode, on the CPU) and tokenizer of a local folder, a hub id, or the embedded ``"tiny"``.

    Code that comes with a checkpoint is never run. Raises ValueError, in one line, for an unknown dtype, a
    folder without config or weights, and a name that cannot be had.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; use one of {', '.join(DTYPES)}.")
    path = _checked(_tiny_path() if str(name_or_path) == TINY else name_or_path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=False)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            revision=revision,
            dtype=DTYPES[dtype],
            attn_implementation=attn_implementation,
            trust_remote_code=False,
            output_loading_info=True,
        )
        model, loading = loaded
        if missing := sorted(loading["missing_keys"]):
            raise ValueError(f"its weights lack {', '.join(missing[:3])}{' ...' if missing[3:] else ''}")
    except (OSError, RuntimeError, SafetensorError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"the teacher {str(name_or_path)!r} cannot be loaded ({reason}); give a local folder with "
            "--teacher.path PATH, or run the embedded default with `make demo`."
        ) from error
    model.name_or_path = str(name_or_path)
    return model.eval(), tokenizer


def _tiny_path() -> Path:
    from .assets import tiny_teacher_path

    return tiny_teacher_path()


def _checked(path: str | Path) -> str | Path:
    """A folder or a hub id; says what a folder lacks before transformers says it in twenty lines."""
    folder = Path(path).expanduser()
    looks_local = isinstance(path, Path) or str(path).startswith((".", "/", "~")) or str(path).count("/") > 1
    if not folder.is_dir():
        if looks_local or folder.exists():
            raise ValueError(
                f"the teacher {str(path)!r} is not a folder; give an existing one with --teacher.path PATH."
            )
        return path
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"the teacher folder {str(path)!r} has no config.json; give a Hugging Face model folder."
        )
    if not [*folder.glob("*.safetensors"), *folder.glob("*.bin")]:
        raise ValueError(
            f"the teacher folder {str(path)!r} has no weights (*.safetensors or *.bin); "
            "download them into it, or name another folder with --teacher.path PATH."
        )
    return folder
