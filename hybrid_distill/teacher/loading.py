"""Load a teacher: a local folder, a name on the hub, or the embedded tiny one."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

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

from ..guard import check_checkpoint, check_no_run, is_bin_only
from .llamba import is_llamba, llamba_config, load_llamba
from .sites import text_config

log = logging.getLogger(__name__)

TINY = "tiny"
RECIPE_FLAG = "--teacher.path"
"""Where a recipe names its teacher."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SAMPLES_PER_TENSOR = 64
HUB_TIMEOUT_S = 10.0


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
    from ..assets import tiny_teacher_path

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
