"""Observe and ablate an unmodified Hugging Face decoder: where its mixers are, what flows through them.

What a head is in each family: docs/heads.md. Shapes: B batch, L length, H head, P head dim, D model width.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast

import torch
from huggingface_hub import constants, get_session
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from .guard import check_checkpoint, check_no_run, is_bin_only
from .llamba import is_llamba, llamba_config, load_llamba
from .model.layout import ATTENTION_NAMES, AttentionLayout, attention_name, find_layout
from .plan import HeadId

log = logging.getLogger(__name__)

TINY = "tiny"
RECIPE_FLAG = "--teacher.path"
"""Where a recipe names its teacher."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SUPPORTED = "Llama, Qwen2, Qwen3, Mistral, OLMo-2, OLMo-3, Phi-3 or GPT-NeoX"
# In a decoder layer: its attention, its recurrent mixer (Zamba2 wraps both).
ATTENTION_PATHS = (*ATTENTION_NAMES, "shared_transformer.self_attn")
RECURRENT_PATHS = ("mixer", "mamba", "mamba_decoder.mamba")
SAMPLES_PER_TENSOR = 64
HUB_TIMEOUT_S = 10.0

HeadKind = Literal["attention", "ssm", "channel"]


@dataclass(frozen=True)
class HeadSite:
    """The heads of one decoder layer: the linear ``o_proj`` reads them side by side, in order.

    ``module`` is the mixer, ``layout`` names its linears if it is attention; ``shared`` says that other layers run
    it too. ``kind`` is "attention"; "ssm" (Mamba-2); "channel" (Mamba-1: heads of size 1); or "hybrid", a student's
    mixer (`kind_of`).
    """

    layer: int
    name: str
    module: nn.Module
    block: nn.Module
    o_proj: nn.Linear
    n_heads: int
    n_kv_heads: int
    head_dim: int
    kind: HeadKind | Literal["hybrid"] = "attention"
    layout: AttentionLayout | None = None
    shared: bool = False

    def kind_of(self, head: int) -> HeadKind:
        """The kind of one head; in a student's mixer kept heads are attention, the others SSM heads."""
        if self.kind != "hybrid":
            return self.kind
        kept: Any = self.module.kept
        return "attention" if head in kept else "ssm"


AttentionSite = HeadSite  # one found by `attention_sites`


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
    """The one mixer of every layer of a decoder that can become a student, or of a student.

    Raises ValueError, naming the module and what was expected, for a layer whose attention is in none of the
    layouts of `model.layout`, or which holds another mixer beside it.
    """
    sites = []
    for layer, (name, block) in enumerate(decoder_blocks(model)):
        children = dict(block.named_children())
        child = attention_name(block)
        if not child:
            raise ValueError(
                f"{name} ({type(block).__name__}) holds no attention module: its parts are "
                f"{', '.join(children) or 'none'}; expected one named self_attn, as in {SUPPORTED}."
            )
        if beside := [c for c in RECURRENT_PATHS if c in children]:
            raise ValueError(
                f"{name} ({type(block).__name__}) mixes tokens in {child} and in {beside[0]}; "
                f"expected attention alone, as in {SUPPORTED}."
            )
        sites.append(_attention_site(model, layer, block, f"{name}.{child}", children[child]))
    return sites


def head_sites(model: nn.Module, kind: HeadKind | None = None) -> list[HeadSite]:
    """The heads of every layer that has any, in any decoder of docs/heads.md, bottom to top.

    Without ``kind`` these are a student's heads of both kinds, the attention heads of a model with attention,
    the recurrent heads of a model without; a hybrid has a second set of heads under ``kind="ssm"``. Raises
    ValueError, naming the module found and what was expected, for a layer that is not understood, and for a
    model without heads of that kind.
    """
    found = _every_site(model)
    kinds = [site.kind for site in found]
    wanted = kind or next(k for k in ("hybrid", "attention", *kinds) if k in kinds)
    uses = Counter(id(site.o_proj) for site in found)
    sites = [replace(site, shared=uses[id(site.o_proj)] > 1) for site in found if site.kind == wanted]
    if not sites:
        raise ValueError(
            f"{type(model).__name__} has no heads of kind {kind!r}; "
            f"its heads are of kind {', '.join(sorted(set(kinds)))}."
        )
    return sites


def asked_for(kind: str) -> HeadKind | None:
    """How `head_sites` is asked for sites of a kind: a student's mixers are what it gives by itself."""
    return None if kind == "hybrid" else cast(HeadKind, kind)


def head_kinds(model: nn.Module) -> list[str]:
    """What `HeadSite.kind` is in a decoder, sorted, each once: two in Zamba2 and Falcon-H1."""
    return sorted({site.kind for site in _every_site(model)})


def _every_site(model: nn.Module) -> list[HeadSite]:
    """Of all kinds, bottom to top."""
    return [
        site
        for layer, (name, block) in enumerate(decoder_blocks(model))
        for site in _block_sites(model, layer, name, block)
    ]


def _block_sites(model: nn.Module, layer: int, name: str, block: nn.Module) -> Iterator[HeadSite]:
    parts = dict(block.named_modules())
    attention = next((path for path in ATTENTION_PATHS if path in parts), None)
    recurrent = next((path for path in RECURRENT_PATHS if path in parts), None)
    if attention is None and recurrent is None:
        raise ValueError(
            f"{name} ({type(block).__name__}) holds no mixer that is understood: its parts are "
            f"{', '.join(dict(block.named_children())) or 'none'}; expected attention named self_attn or "
            "attention, or a Mamba mixer named mixer or mamba (docs/heads.md)."
        )
    if attention is not None:
        path = f"{name}.{attention}"
        yield _attention_site(model, layer, block, path, parts[attention])
    if recurrent is not None:
        yield _recurrent_site(layer, block, f"{name}.{recurrent}", parts[recurrent])


def _attention_site(model: nn.Module, layer: int, block: nn.Module, name: str, module: nn.Module) -> HeadSite:
    # By name: a class that comes with an exported checkpoint is not the class in this package.
    is_hybrid = type(module).__name__ == "HybridMixer"
    layout = None if is_hybrid else find_layout(module, name)
    output = "o_proj" if layout is None else layout.output
    config, o_proj = text_config(model), cast(nn.Linear, module.get_submodule(output))
    n_heads = config.num_attention_heads
    head_dim = getattr(module, "head_dim", None) or o_proj.in_features // n_heads
    if o_proj.in_features != n_heads * head_dim:
        raise ValueError(
            f"{name}.{output} reads {o_proj.in_features} channels; "
            f"expected {n_heads} heads x {head_dim} = {n_heads * head_dim}."
        )
    if layout is None:
        return HeadSite(layer, name, module, block, o_proj, n_heads, config.num_key_value_heads, head_dim, "hybrid")
    n_kv_heads = layout.count_kv_heads(module, n_heads, head_dim)
    return HeadSite(layer, name, module, block, o_proj, n_heads, n_kv_heads, head_dim, "attention", layout)


def _recurrent_site(layer: int, block: nn.Module, name: str, mixer: Any) -> HeadSite:
    """Mamba-2's heads have one decay each; in Mamba-1 every channel has its own."""
    decay, out_proj = getattr(mixer, "A_log", None), getattr(mixer, "out_proj", None)
    if decay is None or not isinstance(out_proj, nn.Linear):
        raise ValueError(
            f"{name} ({type(mixer).__name__}) has no A_log or no linear out_proj; expected a Mamba-1 or Mamba-2 "
            "mixer, as in Falcon-Mamba, Mamba-2, Zamba2 or Falcon-H1."
        )
    n_heads, kind = len(decay), "ssm" if decay.dim() == 1 else "channel"
    return HeadSite(layer, name, mixer, block, out_proj, n_heads, n_heads, out_proj.in_features // n_heads, kind)


@contextmanager
def ablate_heads(
    model: nn.Module,
    heads: Iterable[HeadId],
    values: Mapping[HeadId, Tensor] | None = None,
    *,
    kind: HeadKind | None = None,
) -> Iterator[None]:
    """Zero the named heads' slices of the output projection's input while the context is open.

    A head named in ``values`` gets that vector [P] there, at every token, instead of zeros (mean ablation).
    ``kind`` is that of `head_sites`. The model is as before afterwards, also after an exception; contexts may
    be nested. Raises ValueError for a head that does not exist, and in a forward that goes round the
    projection.
    """
    sites = head_sites(model, kind)
    vectors = {HeadId(*head): value_P for head, value_P in (values or {}).items()}
    heads_of: dict[int, list[int]] = {}
    for head_id in (HeadId(*head) for head in heads):
        check_exists(model, sites, head_id)
        heads_of.setdefault(head_id.layer, []).append(head_id.head)
    with ExitStack() as hooks:
        for site in sites:
            if which := heads_of.get(site.layer):
                replaced = {head: vectors.get(HeadId(site.layer, head)) for head in which}
                hooks.enter_context(_at_heads(site, _replacing(replaced)))
        yield


@contextmanager
def ablate_heads_by_row(
    model: nn.Module,
    layer: int,
    heads: Sequence[int | None],
    values: Tensor | None = None,
    *,
    kind: HeadKind | None = None,
) -> Iterator[None]:
    """Ablate another head of one layer in each group of rows: ``len(heads)`` ablations in one batch.

    Rows g*B/G to (g+1)*B/G - 1 of a batch of B rows lose head ``heads[g]``, G being ``len(heads)``; None
    ablates nothing there. With ``values`` [H, P] head h's slice becomes ``values[h]`` instead of zeros.
    Raises ValueError as `ablate_heads` does, and in a forward whose rows do not form G equal groups.
    """
    sites = head_sites(model, kind)
    for head in heads:
        check_exists(model, sites, HeadId(layer, 0 if head is None else head))
    with ExitStack() as hooks:
        if heads:
            site = next(site for site in sites if site.layer == layer)
            hooks.enter_context(_at_heads(site, _replacing_by_row(heads, values)))
        yield


@contextmanager
def record_heads(model: nn.Module, layer: int, *, kind: HeadKind | None = None) -> Iterator[list[Tensor]]:
    """Yield a list that receives the heads x_BLHP of a layer as its output projection reads them, per forward."""
    sites = head_sites(model, kind)
    check_exists(model, sites, HeadId(layer, 0))
    recorded: list[Tensor] = []
    with _at_heads(next(site for site in sites if site.layer == layer), recorded.append):
        yield recorded


def check_exists(model: nn.Module, sites: list[HeadSite], head_id: HeadId) -> None:
    """Raise ValueError unless one of ``sites`` has this head."""
    n_heads = {site.layer: site.n_heads for site in sites}
    if not 0 <= head_id.head < n_heads.get(head_id.layer, 0):
        n_layers = len(decoder_blocks(model))
        some = f", of which {', '.join(map(str, n_heads))} have {sites[0].kind} heads," if len(sites) < n_layers else ""
        raise ValueError(
            f"head {head_id} does not exist: this model has layers 0..{n_layers - 1}{some} "
            f"with heads 0..{sites[0].n_heads - 1}."
        )


@contextmanager
def _at_heads(site: HeadSite, edit: Callable[[Tensor], None]) -> Iterator[None]:
    """Hand ``edit`` a copy x_BLHP of the heads of this layer; what it changes there, the projection reads."""
    in_layer, reached = not site.shared, False

    def enter_layer(module: nn.Module, args: Any) -> None:
        nonlocal in_layer
        in_layer = True

    def leave_layer(module: nn.Module, args: Any, output: Any) -> None:
        nonlocal in_layer
        in_layer = not site.shared  # what is shared runs for other layers as well

    def start(module: nn.Module, args: Any) -> None:
        nonlocal reached
        reached = False

    def edited(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        nonlocal reached
        reached = True
        if not in_layer:
            return None
        heads_BLHP = args[0].unflatten(-1, (-1, site.head_dim)).clone()
        edit(heads_BLHP)
        return (heads_BLHP.flatten(-2), *args[1:])

    def check(module: nn.Module, args: Any, output: Any) -> None:
        if not reached:
            raise ValueError(
                f"{site.name} did not call its output projection, so its heads were left as they are: "
                "a fused kernel for training did its work; call model.eval() first."
            )

    with ExitStack() as hooks:
        for handle in (
            site.block.register_forward_pre_hook(enter_layer),
            site.module.register_forward_pre_hook(start),
            site.o_proj.register_forward_pre_hook(edited),
            site.module.register_forward_hook(check),
            site.block.register_forward_hook(leave_layer, always_call=True),
        ):
            hooks.callback(handle.remove)
        yield


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
        n_rows, _, _, _ = heads_BLHP.shape
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
            restore.enter_context(replaced_forward(block, lambda *args, **kwargs: output))
        yield


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Run ``forward`` in the place of a module's own, which comes back afterwards; its hooks stay."""
    own = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


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
        values = parameter.detach()
        if type(values).dequantize is not Tensor.dequantize:  # 8-bit weights, of torchao
            values = values.dequantize()
        sample = values.flatten()[::stride].to(torch.bfloat16).view(torch.int16)
        digest.update(f"{name} {tuple(parameter.shape)} {sample.tolist()}".encode())
    return digest.hexdigest()[:16]


def load_teacher(
    name_or_path: str | Path,
    *,
    dtype: str = "float32",
    revision: str | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    allow_bin: bool = False,
    flag: str = RECIPE_FLAG,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model (eval mode, on the CPU) and tokenizer of a local folder, a hub id, or the embedded ``"tiny"``.

    Code that comes with a checkpoint is run only where ``trust_remote_code`` is set, and weights are safetensors unless
    ``allow_bin``. ``flag`` is where the user has named the model, for messages. Raises ValueError, in one line, for an
    unknown dtype, a name that cannot be had, a folder without config or weights, and one that `check_checkpoint`
    refuses.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; use one of {', '.join(DTYPES)}.")
    path = _checked(_tiny_path() if str(name_or_path) == TINY else name_or_path, flag)
    with _refusal(name_or_path, flag):
        if isinstance(path, Path):
            _check_folder(path, allow_bin, flag)
        tokenizer = _tokenizer(path, revision, trust_remote_code)
        if is_llamba(path):
            llamba = load_llamba(path, DTYPES[dtype])
            llamba.name_or_path = str(name_or_path)
            return llamba, tokenizer
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            revision=revision,
            dtype=DTYPES[dtype],
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
            use_safetensors=None if allow_bin else True,
            output_loading_info=True,
            local_files_only=_offline(path),
        )
        model, loading = loaded
        if missing := sorted(loading["missing_keys"]):
            raise ValueError(f"its weights lack {', '.join(missing[:3])}{' ...' if missing[3:] else ''}")
    model.name_or_path = str(name_or_path)
    if (rope := rope_by_length(model.config)) is not None:
        log.warning(
            "%s has RoPE that depends on the length of a row (%s): beyond %s tokens, decoding from a cache and batches "
            "with longer rows give other logits than a row at once and alone, in the teacher and in its students",
            name_or_path, rope[0], f"{rope[1]:,}",
        )  # fmt: skip
    return model.eval(), tokenizer


def read_teacher(
    name_or_path: str | Path, revision: str | None = None, flag: str = RECIPE_FLAG
) -> tuple[PretrainedConfig, PreTrainedTokenizerBase]:
    """Config and tokenizer: what `load_teacher` reads, and refuses, without the weights."""
    path = _checked(_tiny_path() if str(name_or_path) == TINY else name_or_path, flag)
    with _refusal(name_or_path, flag):
        return load_config(name_or_path, revision), _tokenizer(path, revision)


def _tokenizer(path: str | Path, revision: str | None, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Raises ValueError for a Llamba, as it is published, without the tokenizer of the Llama that taught it."""
    if not is_llamba(path):
        return AutoTokenizer.from_pretrained(
            path, revision=revision, trust_remote_code=trust_remote_code, local_files_only=_offline(path)
        )
    if not (Path(path) / "tokenizer.json").is_file():
        raise ValueError(
            "a Llamba is published without its tokenizer: copy tokenizer.json and tokenizer_config.json of the Llama "
            "it was distilled from into the folder"
        )
    return AutoTokenizer.from_pretrained(path, config=llamba_config(path), trust_remote_code=False)


def longest_context(config: Any) -> int | None:
    """Tokens that a teacher's positions reach over, RoPE scaling included; None where its config does not say.

    ``yarn`` and ``dynamic`` scaling reach ``factor`` times as far as the model was trained; of the other types,
    ``max_position_embeddings`` already says what they reach.
    """
    shape = config.get_text_config(decoder=True)
    longest = getattr(shape, "max_position_embeddings", None)
    rope = getattr(shape, "rope_parameters", None) or getattr(shape, "rope_scaling", None) or {}
    rope = rope.get("full_attention", rope)  # some families have one for each type of layer
    if longest is None or rope.get("rope_type", rope.get("type")) not in ("yarn", "dynamic"):
        return longest
    trained = rope.get("original_max_position_embeddings") or longest
    return max(longest, int(trained * rope.get("factor", 1.0)))


def _offline(name_or_path: str | Path) -> bool:
    """Whether a name on the hub can only be read from the cache."""
    return not Path(name_or_path).is_dir() and hub_error() is not None


@cache
def hub_error() -> str | None:
    """Return why the hub cannot be reached, None if it can. Asks once, where huggingface_hub retries every file."""
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=HUB_TIMEOUT_S)
    except Exception as error:  # requests or httpx, by the version of huggingface_hub
        return f"{constants.ENDPOINT} cannot be reached: {error}"
    return None


def _not_cached() -> str:
    return f"{error}, and it is not in the cache" if (error := hub_error()) else ""


def rope_by_length(config: Any) -> tuple[str, int] | None:
    """Type of a RoPE whose frequencies depend on the longest row of a batch, and tokens up to which they do not.

    Beyond that a token read into a cache keeps the position it got while the row was shorter: decoding from a cache is
    not the forward of the whole row, in transformers' own models too. None where positions do not depend on length.
    """
    shape = config.get_text_config(decoder=True)
    rope = getattr(shape, "rope_parameters", None) or getattr(shape, "rope_scaling", None) or {}
    for part in [part for part in rope.values() if isinstance(part, Mapping)] or [rope]:  # one for each type of layer
        kind = part.get("rope_type", part.get("type"))
        if kind == "dynamic":
            return kind, shape.max_position_embeddings
        if kind == "longrope":
            trained = part.get("original_max_position_embeddings")
            trained = trained or getattr(shape, "original_max_position_embeddings", None)
            return kind, trained or shape.max_position_embeddings
    return None


@contextmanager
def _refusal(name_or_path: str | Path, flag: str) -> Iterator[None]:
    """Says in one line why a model cannot be had."""
    try:
        yield
    except Exception as error:  # of transformers, of the tokenizers library: whatever a damaged file leads to
        reason = str(error).strip().splitlines()[0].rstrip(".;") if str(error).strip() else type(error).__name__
        if not Path(name_or_path).expanduser().is_dir() and str(name_or_path) != TINY:
            reason = f"it is not a folder here, and of the hub: {_not_cached() or reason}"
        raise ValueError(
            f"{flag} {str(name_or_path)!r} cannot be loaded ({reason}); give a local folder, or take the embedded "
            f"teacher, {TINY}{' (`make demo` runs it)' if flag == RECIPE_FLAG else ''}."
        ) from error


def head_dim_of(config: Any) -> int:
    """Width of an attention head; configs that do not name it divide the hidden size among the heads."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def load_config(name_or_path: str | Path, revision: str | None = None) -> PretrainedConfig:
    """The config of a local folder, a hub id, or the embedded ``"tiny"``. Raises ValueError where there is none."""
    path = _tiny_path() if str(name_or_path) == TINY else Path(name_or_path).expanduser()
    name = path if path.is_dir() else str(name_or_path)
    try:
        if is_llamba(path):
            return llamba_config(path)
        return AutoConfig.from_pretrained(
            name, revision=revision, trust_remote_code=False, local_files_only=_offline(name)
        )
    except Exception as error:  # each version of transformers has errors of its own for fields of a wrong type
        reason = "" if path.is_dir() else _not_cached()
        raise ValueError(
            f"{str(name_or_path)!r} has no config that transformers can read{reason and f' ({reason})'}; "
            "give a local folder, a name on the hub, or tiny."
        ) from error


def _check_folder(folder: Path, allow_bin: bool, flag: str) -> None:
    if not is_bin_only(folder):
        check_checkpoint(folder)
    elif not allow_bin:
        raise ValueError(
            "its weights are *.bin, which are pickles: convert them to safetensors (load with transformers and "
            f"save_pretrained), or pass --{'teacher.' if flag == RECIPE_FLAG else ''}allow-bin if you trust whoever "
            "made them"
        )


def _tiny_path() -> Path:
    from .assets import tiny_teacher_path

    return tiny_teacher_path()


def _checked(path: str | Path, flag: str) -> str | Path:
    """A folder or a hub id; says what a folder lacks before transformers says it in twenty lines."""
    folder = Path(path).expanduser()
    called = f"{flag} {str(path)!r}"
    looks_local = isinstance(path, Path) or str(path).startswith((".", "/", "~")) or str(path).count("/") > 1
    if not folder.is_dir():
        if looks_local or folder.exists():
            raise ValueError(f"{called} is not a folder; give an existing one.")
        return path
    if not (folder / "config.json").is_file():
        check_no_run(folder)
        raise ValueError(f"{called} has no config.json; give a Hugging Face model folder.")
    check_no_run(folder)
    if not [*folder.glob("*.safetensors"), *folder.glob("*.bin")]:
        raise ValueError(
            f"{called} has no weights (*.safetensors or *.bin); download them into it, or name another folder."
        )
    return folder
