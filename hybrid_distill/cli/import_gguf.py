"""`hybrid-distill import-gguf`: a plain Hugging Face folder from a GGUF file."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch
import tyro
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from ..io import file_hash, write_json
from ..locking import locked
from ..provenance import now, versions
from ..student.teachers import check_teacher
from ..teacher import DTYPES, IMPORTED
from ..validation import first_line


def command(
    file: tyro.conf.Positional[Path],
    out: tyro.conf.Positional[Path],
    /,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
) -> None:
    """Convert a GGUF file to a Hugging Face folder; the folder works as a teacher like any other.

    The folder holds safetensors, the config, the tokenizer with its chat template, the generation config, and
    imported_from.json: the file's name and hash.

    Args:
        file: A GGUF file of an architecture that transformers can read.
        out: The folder to create.
        dtype: Dtype of the weights to write.
    """
    if out.exists() and (not out.is_dir() or any(path.name[0] != "." for path in out.iterdir())):
        raise ValueError(f"{out} already exists; pass a new folder.")
    if find_spec("gguf") is None:
        raise ValueError("GGUF files are read by the package gguf, which is not installed; pip install gguf.")
    if not file.is_file():
        raise ValueError(f"{file} is not a file; pass a GGUF file.")
    name = {"gguf_file": file.name}
    try:
        shape = AutoConfig.from_pretrained(file.parent, **name)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **name)
    except Exception as error:  # errors vary by architecture and version of transformers
        raise _unreadable(file, error) from error
    # Not its tokenizer: one with more ids than the embedding is put right in the folder that this command writes.
    check_teacher(shape, name=str(file), heads=True)
    try:
        read = AutoModelForCausalLM.from_pretrained(file.parent, dtype=DTYPES[dtype], **name)
    except Exception as error:  # errors vary by architecture and version of transformers
        raise _unreadable(file, error) from error
    config = type(read.config).from_dict(
        {key: value for key, value in read.config.to_dict().items() if key != "quantization_config"}
    )
    config.dtype = DTYPES[dtype]
    with torch.device("meta"):
        model = type(read)(config)
    model.load_state_dict(read.state_dict(), strict=True, assign=True)
    model.tie_weights()
    model.generation_config = GenerationConfig.from_model_config(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    with locked(out):
        model.save_pretrained(out)
        for weights in out.glob("*.safetensors"):  # safetensors writes files that only their owner can read
            weights.chmod((out / "config.json").stat().st_mode)
        tokenizer.save_pretrained(out)
        origin = {"file": file.name, "sha256": file_hash(file), "versions": versions(), "date": now()}
        write_json(out / IMPORTED, origin)
    template = "with" if tokenizer.chat_template else "without"
    print(f"{out}: {config.model_type}, {model.num_parameters():,} parameters, {dtype}, {template} a chat template")


def _unreadable(file: Path, error: Exception) -> ValueError:
    """Make the error for a file that transformers cannot read."""
    reason = first_line(error).rstrip(".")
    return ValueError(
        f"transformers cannot read {file} ({reason}); pass a whole GGUF file of an architecture that it reads "
        "(Llama, Qwen2, Qwen3, Gemma, Mistral, Phi-3 and others), or the model's own Hugging Face folder."
    )
