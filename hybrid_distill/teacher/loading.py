"""Load a teacher: a local folder, a hub id, or the embedded tiny teacher."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..distributed import chosen_dtype, own_device, warn_of_emulation
from ..model.backbone_config import rope_settings
from ..progress import Phase
from ..safe_loading import check_checkpoint
from .llamba import is_llamba, llamba_config, load_llamba
from .location import (
    RECIPE_FLAG,
    folder_or_name,
    loading_errors,
    locate,
    must_use_cache,
    offline_reason,
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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
    """Load model and tokenizer of a local folder, a hub id, or the embedded ``"tiny"``.

    The model is in eval mode and on the CPU. ``dtype`` "auto" is as in `chosen_dtype`. A
    checkpoint's own code runs only with ``trust_remote_code``; ``*.bin`` weights load only with
    ``allow_bin``. ``flag`` is the option that named the model, for error messages. Raises
    ValueError, in one line, if loading fails.
    """
    dtype = chosen_dtype(dtype)
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; use auto or one of {', '.join(DTYPES)}.")
    path = locate(name_or_path, flag)
    with Phase(f"loading {name_or_path}"), loading_errors(name_or_path, flag):
        _check_folder(path, allow_bin, flag)
        tokenizer = _tokenizer(path, revision, trust_remote_code)
        if is_llamba(path):
            model: PreTrainedModel = load_llamba(path, DTYPES[dtype])
        else:
            model = _load_model(
                path,
                revision=revision,
                dtype=DTYPES[dtype],
                attn_implementation=attn_implementation,
                trust_remote_code=trust_remote_code,
                # None also takes *.bin; False would take nothing else.
                use_safetensors=None if allow_bin else True,
            )
    model.name_or_path = str(name_or_path)
    return model.eval(), tokenizer


def _check_folder(path: str | Path, allow_bin: bool, flag: str) -> None:
    """Raise ValueError for damaged safetensors, and for pickles that were not allowed."""
    if not isinstance(path, Path):
        return
    if any(path.glob("*.safetensors")):
        check_checkpoint(path)
    elif not allow_bin:
        option = "--teacher.allow-bin" if flag == RECIPE_FLAG else "--allow-bin"
        raise ValueError(
            "its weights are *.bin, which are pickles: convert them to safetensors (load with "
            f"transformers and save_pretrained), or pass {option} if you trust whoever made them"
        )


def _load_model(path: str | Path, **options: Any) -> PreTrainedModel:
    """Load with transformers. Raises ValueError for missing tensors, which would be random."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        path,
        output_loading_info=True,
        local_files_only=must_use_cache(path),
        **options,
    )
    model, loading = loaded
    missing = sorted(loading["missing_keys"])
    if missing:
        more = " ..." if len(missing) > 3 else ""
        raise ValueError(f"its weights lack {', '.join(missing[:3])}{more}")
    if getattr(model.config, "output_router_logits", False):
        # The loss that balances experts: a teacher is not trained, and it cannot be computed of packed rows.
        model.config.output_router_logits = False
    return model


def load_on_own_device(
    name_or_path: str | Path, *, dtype: str | None, **options: Any
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a teacher onto this process's device.

    ``dtype`` defaults to bfloat16 on a GPU and float32 on a CPU.
    """
    device = own_device()
    if dtype is None:
        dtype = "bfloat16" if device.type == "cuda" else "float32"
    if dtype == "bfloat16":
        warn_of_emulation(device, "--dtype float32")
    model, tokenizer = load_teacher(name_or_path, dtype=dtype, **options)
    # transformers decorates PreTrainedModel.to, which hides its type from type checkers.
    nn.Module.to(model, device)
    return model, tokenizer


def read_teacher(
    name_or_path: str | Path, revision: str | None = None, flag: str = RECIPE_FLAG
) -> tuple[PretrainedConfig, PreTrainedTokenizerBase]:
    """Load only the config and tokenizer of a teacher, with the errors of `load_teacher`."""
    path = locate(name_or_path, flag)
    with loading_errors(name_or_path, flag):
        return load_config(name_or_path, revision), _tokenizer(path, revision)


def load_tokenizer(name_or_path: str | Path, flag: str) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a teacher, or from a folder without a model.

    ``flag`` and errors are as in `load_teacher`.
    """
    with loading_errors(name_or_path, flag):
        return _tokenizer(folder_or_name(name_or_path))


def load_config(name_or_path: str | Path, revision: str | None = None) -> PretrainedConfig:
    """Load the config of a local folder, a hub id, or the embedded ``"tiny"``.

    Raises ValueError if there is none.
    """
    path = folder_or_name(name_or_path)
    try:
        if is_llamba(path):
            return llamba_config(path)
        return AutoConfig.from_pretrained(
            path,
            revision=revision,
            trust_remote_code=False,
            local_files_only=must_use_cache(path),
        )
    except Exception as error:  # errors for fields of a wrong type vary by version of transformers
        reason = offline_reason(path)
        why = f" ({reason})" if reason else ""
        raise ValueError(
            f"{str(name_or_path)!r} has no config that transformers can read{why}; "
            "pass a local folder, a name on the hub, or tiny."
        ) from error


def longest_context(config: PretrainedConfig) -> int | None:
    """Return a teacher's maximum context in tokens, RoPE scaling included; None without a limit.

    ``yarn`` and ``dynamic`` scaling multiply the trained context by ``factor``; for the other
    types, ``max_position_embeddings`` includes the scaling.
    """
    longest = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if longest is None:
        return None
    contexts = [longest]
    for rope in rope_settings(config):
        if rope.get("rope_type", rope.get("type")) in ("yarn", "dynamic"):
            trained = rope.get("original_max_position_embeddings") or longest
            contexts.append(int(trained * rope.get("factor", 1.0)))
    return max(contexts)


def check_row_length(option: str, seq_len: int, config: PretrainedConfig, teacher: str) -> None:
    """Raise ValueError, naming the option that sets it, if a row is longer than a teacher's context."""
    longest = longest_context(config)
    if longest is not None and seq_len > longest:
        raise ValueError(
            f"{option} is {seq_len}, but the context of the teacher {teacher!r} is {longest} tokens; use at most "
            f"{longest}, or a teacher whose config scales its RoPE further (rope_parameters of type yarn)."
        )


def _tokenizer(
    path: str | Path, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Load a tokenizer. Raises ValueError for a Llamba folder without one, as it is published."""
    if not is_llamba(path):
        return AutoTokenizer.from_pretrained(
            path,
            revision=revision,
            trust_remote_code=trust_remote_code,
            local_files_only=must_use_cache(path),
        )
    if not (Path(path) / "tokenizer.json").is_file():
        raise ValueError(
            "a Llamba is published without its tokenizer: copy tokenizer.json and "
            "tokenizer_config.json of the Llama it was distilled from into the folder"
        )
    # With its config: AutoTokenizer does not know the model type in config.json.
    return AutoTokenizer.from_pretrained(path, config=llamba_config(path), trust_remote_code=False)
