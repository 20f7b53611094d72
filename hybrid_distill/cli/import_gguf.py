"""`hybrid-distill import-gguf`: a plain Hugging Face folder from a GGUF file."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch
import tyro
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..io import file_hash, write_json, write_text
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

    The folder holds safetensors, the config, the tokenizer with its chat template, the generation
    config, imported_from.json (the file's name and hash), and a card with the license that the file names.

    Args:
        file: A GGUF file of an architecture that transformers can read.
        out: The folder to create.
        dtype: Dtype of the weights to write.
    """
    _check_paths(file, out)
    options = {"gguf_file": file.name}
    try:
        shape = AutoConfig.from_pretrained(file.parent, **options)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **options)
    except Exception as error:  # errors vary by architecture and version of transformers
        raise _unreadable(file, error) from error
    # Not its tokenizer: one with more ids than the embedding is put right in the folder that this command writes.
    check_teacher(shape, name=str(file), heads=True)
    try:
        loaded = AutoModelForCausalLM.from_pretrained(file.parent, dtype=DTYPES[dtype], **options)
    except Exception as error:  # errors vary by architecture and version of transformers
        raise _unreadable(file, error) from error
    model = _plain_model(loaded, DTYPES[dtype])
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    _save(model, tokenizer, file, out)
    template = "with" if tokenizer.chat_template else "without"
    print(
        f"{out}: {model.config.model_type}, {model.num_parameters():,} parameters, {dtype}, "
        f"{template} a chat template"
    )


def _check_paths(file: Path, out: Path) -> None:
    """Raise ValueError unless ``out`` can be written and ``file`` read."""
    if out.exists():
        # Hidden files may be a lock that a stopped command left.
        is_empty = out.is_dir() and all(path.name.startswith(".") for path in out.iterdir())
        if not is_empty:
            raise ValueError(f"{out} already exists; pass a new folder.")
    if find_spec("gguf") is None:
        raise ValueError(
            "GGUF files are read by the package gguf, which is not installed; pip install gguf."
        )
    if not file.is_file():
        raise ValueError(f"{file} is not a file; pass a GGUF file.")


def _plain_model(loaded: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Return the same weights in a model that does not know it was quantized.

    transformers keeps the ``quantization_config`` of a GGUF file in the config of the model that
    it has dequantized, and would save it: the folder would then not load without gguf.
    """
    options = loaded.config.to_dict()
    options.pop("quantization_config", None)
    config: PreTrainedConfig = type(loaded.config).from_dict(options)
    config.dtype = dtype
    with torch.device("meta"):
        model = type(loaded)(config)
    # Assigned, not copied: both models at once might not fit into memory.
    model.load_state_dict(loaded.state_dict(), strict=True, assign=True)
    # A state dict holds a tied weight once.
    model.tie_weights()
    model.generation_config = GenerationConfig.from_model_config(config)
    return model


def _save(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, file: Path, out: Path
) -> None:
    with locked(out):
        model.save_pretrained(out)
        # safetensors writes files that only their owner can read.
        mode = (out / "config.json").stat().st_mode
        for weights in out.glob("*.safetensors"):
            weights.chmod(mode)
        tokenizer.save_pretrained(out)
        origin = {
            "file": file.name,
            "sha256": file_hash(file),
            "versions": versions(),
            "date": now(),
        }
        write_json(out / IMPORTED, origin)
        write_text(out / "README.md", _card(file))


def _card(file: Path) -> str:
    """Return a model card with the license that the file names, for the cards of its students."""
    from gguf import GGUFReader

    field = GGUFReader(file).get_field("general.license")
    header = ""
    if field is not None:
        header = f"---\nlicense: {field.contents()}\n---\n\n"
    return f"{header}Imported from `{file.name}`.\n"


def _unreadable(file: Path, error: Exception) -> ValueError:
    """Make the error for a file that transformers cannot read."""
    reason = first_line(error).rstrip(".")
    return ValueError(
        f"transformers cannot read {file} ({reason}); pass a whole GGUF file of an architecture that it reads "
        "(Llama, Qwen2, Qwen3, Gemma, Mistral, Phi-3 and others), or the model's own Hugging Face folder."
    )
