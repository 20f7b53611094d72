"""Load a teacher: a local folder, a hub id, or the embedded tiny teacher."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
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

from ..assets import tiny_teacher_path
from ..distributed import own_device, warn_of_emulation
from ..io import read_json
from ..model.configuration_hybrid import rope_settings
from ..model.layout import text_config
from ..progress import Phase
from ..safe_loading import check_checkpoint, check_no_run
from ..validation import first_line
from .llamba import is_llamba, llamba_config, load_llamba

TINY = "tiny"
RECIPE_FLAG = "--teacher.path"
"""Flag that names a recipe's teacher."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SAMPLES_PER_TENSOR = 64
HUB_TIMEOUT_S = 10.0
IMPORTED = "imported_from.json"
"""File that `hybrid-distill import-gguf` writes into its folder: ``file`` and ``sha256`` of the source."""


def fingerprint(model: nn.Module) -> str:
    """Hash a teacher's config shape, and the names, shapes and some elements of its parameters.

    Elements are rounded to bfloat16, so that a checkpoint has the same fingerprint in bfloat16 and in float32. Reads
    about 64 elements per tensor: cheap for any model size.
    """
    config = text_config(model)
    shape_of = ("model_type", "num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
    digest = hashlib.sha256(json.dumps([getattr(config, name, None) for name in shape_of]).encode())
    for name, parameter in sorted(model.named_parameters()):
        stride = max(1, parameter.numel() // SAMPLES_PER_TENSOR)
        values = parameter.detach()
        if type(values).dequantize is not Tensor.dequantize:  # torchao's 8-bit weights
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
    """Load the model (eval mode, on the CPU) and tokenizer of a local folder, a hub id, or the embedded ``"tiny"``.

    A checkpoint's own code runs only with ``trust_remote_code``; ``*.bin`` weights load only with ``allow_bin``.
    ``flag`` is the option that named the model, for error messages. Raises ValueError, in one line, if loading fails.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; use one of {', '.join(DTYPES)}.")
    path = _located(name_or_path, flag)
    with Phase(f"loading {name_or_path}"), _refusal(name_or_path, flag):
        if isinstance(path, Path) and any(path.glob("*.safetensors")):
            check_checkpoint(path)
        elif isinstance(path, Path) and not allow_bin:
            raise ValueError(
                "its weights are *.bin, which are pickles: convert them to safetensors (load with transformers and "
                f"save_pretrained), or pass --{'teacher.' if flag == RECIPE_FLAG else ''}allow-bin if you trust "
                "whoever made them"
            )
        tokenizer = _tokenizer(path, revision, trust_remote_code)
        if is_llamba(path):
            model: PreTrainedModel = load_llamba(path, DTYPES[dtype])
        else:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path,
                revision=revision,
                dtype=DTYPES[dtype],
                attn_implementation=attn_implementation,
                trust_remote_code=trust_remote_code,
                use_safetensors=None if allow_bin else True,
                output_loading_info=True,
                local_files_only=bool(_offline(path)),
            )
            model, loading = loaded
            if missing := sorted(loading["missing_keys"]):
                raise ValueError(f"its weights lack {', '.join(missing[:3])}{' ...' if missing[3:] else ''}")
    model.name_or_path = str(name_or_path)
    return model.eval(), tokenizer


def load_on_own_device(
    name_or_path: str | Path, *, dtype: str | None, **options: Any
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a teacher onto this process's device; ``dtype`` defaults to bfloat16 on a GPU and float32 on a CPU."""
    device = own_device()
    dtype = dtype or ("bfloat16" if device.type == "cuda" else "float32")
    if dtype == "bfloat16":
        warn_of_emulation(device, "--dtype float32")
    model, tokenizer = load_teacher(name_or_path, dtype=dtype, **options)
    nn.Module.to(model, device)
    return model, tokenizer


def imported_from(name_or_path: str | Path) -> str | None:
    """Return the name and SHA-256 of the file that a folder was imported from, for reports; None if not imported."""
    if not (path := Path(name_or_path).expanduser() / IMPORTED).is_file():
        return None
    record = read_json(path)
    return f"{record.get('file')}, sha256 {record.get('sha256')}"


def read_teacher(
    name_or_path: str | Path, revision: str | None = None, flag: str = RECIPE_FLAG
) -> tuple[PretrainedConfig, PreTrainedTokenizerBase]:
    """Load only the config and tokenizer of a teacher, with the errors of `load_teacher`."""
    path = _located(name_or_path, flag)
    with _refusal(name_or_path, flag):
        return load_config(name_or_path, revision), _tokenizer(path, revision)


def load_tokenizer(name_or_path: str | Path, flag: str) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a teacher, or from a folder without a model. ``flag`` and errors as in `load_teacher`."""
    with _refusal(name_or_path, flag):
        return _tokenizer(_folder_or_name(name_or_path))


def load_config(name_or_path: str | Path, revision: str | None = None) -> PretrainedConfig:
    """Load the config of a local folder, a hub id, or the embedded ``"tiny"``. Raises ValueError if there is none."""
    path = _folder_or_name(name_or_path)
    try:
        if is_llamba(path):
            return llamba_config(path)
        return AutoConfig.from_pretrained(
            path, revision=revision, trust_remote_code=False, local_files_only=bool(_offline(path))
        )
    except Exception as error:  # errors for fields of a wrong type vary by version of transformers
        reason = _offline(path)
        raise ValueError(
            f"{str(name_or_path)!r} has no config that transformers can read{reason and f' ({reason})'}; "
            "pass a local folder, a name on the hub, or tiny."
        ) from error


def longest_context(config: PretrainedConfig) -> int | None:
    """Return a teacher's maximum context in tokens, RoPE scaling included; None if its config sets no limit.

    ``yarn`` and ``dynamic`` scaling multiply the trained context by ``factor``; for the other types,
    ``max_position_embeddings`` includes the scaling.
    """
    longest = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if longest is None:
        return None
    scaled = [rope for rope in rope_settings(config) if rope.get("rope_type", rope.get("type")) in ("yarn", "dynamic")]
    reach = [(rope.get("original_max_position_embeddings") or longest) * rope.get("factor", 1.0) for rope in scaled]
    return max([longest, *map(int, reach)])


@cache
def hub_error() -> str | None:
    """Return why the hub cannot be reached, or None. Asks only once, while huggingface_hub retries every file."""
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=HUB_TIMEOUT_S)
    except Exception as error:  # requests or httpx, depending on the version of huggingface_hub
        return f"{constants.ENDPOINT} cannot be reached: {error}"
    return None


def _offline(path: str | Path) -> str:
    """Return why a hub id can only be read from the cache; empty for a folder, or if the hub is reachable."""
    error = None if isinstance(path, Path) else hub_error()
    return f"{error}, and it is not in the cache" if error else ""


def _folder_or_name(name_or_path: str | Path) -> str | Path:
    """Return an existing folder as a Path, anything else as a hub id (str)."""
    path = tiny_teacher_path() if str(name_or_path) == TINY else Path(name_or_path).expanduser()
    return path if path.is_dir() else str(name_or_path)


def _located(name_or_path: str | Path, flag: str) -> str | Path:
    """Return a folder with config and weights, or a hub id. Raises ValueError for a wrong path."""
    found, called = _folder_or_name(name_or_path), f"{flag} {str(name_or_path)!r}"
    if not isinstance(found, Path):
        looks_local = isinstance(name_or_path, Path) or found.startswith((".", "/", "~")) or found.count("/") > 1
        if looks_local or Path(found).exists():  # a file
            raise ValueError(f"{called} is not a folder; pass an existing one.")
        return found
    check_no_run(found)
    if not (found / "config.json").is_file():
        raise ValueError(f"{called} has no config.json; pass a Hugging Face model folder.")
    if not [*found.glob("*.safetensors"), *found.glob("*.bin")]:
        raise ValueError(f"{called} has no weights (*.safetensors or *.bin); download them, or pass another folder.")
    return found


@contextmanager
def _refusal(name_or_path: str | Path, flag: str) -> Iterator[None]:
    """Turn any error while loading a model into one line with the flag, the reason and the fix."""
    try:
        yield
    except Exception as error:  # a damaged file can raise anything in transformers or tokenizers
        reason = first_line(error).rstrip(".;")
        if not isinstance(path := _folder_or_name(name_or_path), Path):
            reason = f"not a folder here; on the hub: {_offline(path) or reason}"
        demo = " (`make demo` runs it)" if flag == RECIPE_FLAG else ""
        raise ValueError(
            f"{flag} {str(name_or_path)!r} cannot be loaded ({reason}); pass a local folder, or the embedded teacher, "
            f"{TINY}{demo}."
        ) from error


def _tokenizer(
    path: str | Path, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Load a tokenizer. Raises ValueError for a Llamba folder without one: Llamba is published without a tokenizer."""
    if not is_llamba(path):
        return AutoTokenizer.from_pretrained(
            path, revision=revision, trust_remote_code=trust_remote_code, local_files_only=bool(_offline(path))
        )
    if not (Path(path) / "tokenizer.json").is_file():
        raise ValueError(
            "a Llamba is published without its tokenizer: copy tokenizer.json and tokenizer_config.json of the Llama "
            "it was distilled from into the folder"
        )
    return AutoTokenizer.from_pretrained(path, config=llamba_config(path), trust_remote_code=False)
