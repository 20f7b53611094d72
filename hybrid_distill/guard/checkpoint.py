"""A checkpoint folder held against itself: config, index, headers and numbers must describe one model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ..model.configuration_hybrid import LARGEST, HybridConfig, check_sizes
from ..model.modeling_hybrid import HybridForCausalLM
from ..plan import HeadPlan
from .code import MODEL_CODE, review_code
from .files import INDEX, check_links, check_references, pickles_in, read_json, read_weight_map, weight_files
from .headers import FLOATS, Entry, check_numbers, read_headers

MARK = Path("gate") / "reference.json"
RECORDS = (
    "generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "plan.json", "head_scores.json",
    "evaluation.json", str(MARK),
)  # fmt: skip

VOCABULARIES = ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer.model")
"""Files that hold a tokenizer's words."""


def check_checkpoint(folder: str | Path, *, numbers: bool = True) -> dict[str, Entry]:
    """The tensors that a local Hugging Face folder holds, by name, once nothing is found wrong with it.

    Nothing in the folder is run and no model is built; ``numbers`` also reads every tensor, for NaN. Links and index
    entries that lead out of the folder, damaged or cut off safetensors files and NaN are refused in any checkpoint; in
    a student, whatever its files are named after, so are pickles, code of other names or with forbidden imports, config
    fields that describe no model, and tensors that are not exactly the config's. Raises ValueError with what is wrong,
    the rule and the way out.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; name the folder of a checkpoint.")
    check_no_run(folder)
    check_links(folder)
    config = read_json(folder / "config.json")
    strict = is_student(folder, config)
    if strict:
        _check_files_of_student(folder)
    else:
        _check_largest(folder, config)
    files = weight_files(folder)
    if strict and (unknown := sorted(set(folder.glob("*.safetensors")) - set(files))):
        raise ValueError(f"{unknown[0]} belongs to no weights of {folder} ({INDEX} names them); remove it.")
    tensors = read_headers(files)
    _check_index(folder, tensors)
    if config.get("quantization_config") is not None and strict:
        _check_quantised(folder, config)
    elif config.get("model_type") == HybridConfig.model_type:
        _check_tensors(folder, config, tensors)
    if numbers:
        check_numbers(tensors)
    return tensors


def check_no_run(folder: Path) -> None:
    """Raise ValueError for the folder of a run, or of several, which is easily taken for an export that is in it."""
    if any(folder.glob("*.safetensors")):
        return
    if (folder / "export" / "config.json").is_file():
        raise ValueError(f"{folder} is a run; name its export, {folder / 'export'}.")
    if below := sorted(folder.glob("*/export/config.json")):
        raise ValueError(f"{folder} holds runs; name the export of one of them, such as {below[0].parent}.")


def check_in_full(folder: Path) -> None:
    """Raise ValueError for a student in 8 bits, of which nothing else is made."""
    if read_json(folder / "config.json").get("quantization_config") is not None:
        raise ValueError(f"{folder} is a copy in 8 bits (hybrid-distill quantise); name the export it was made from.")


def _check_largest(folder: Path, config: dict[str, Any]) -> None:
    """Sizes of any model: other families have other fields, but none of these is larger."""
    text = config.get("text_config")
    for fields in (config, text if isinstance(text, dict) else {}):
        for name, largest in LARGEST.items():
            value = fields.get(name)
            if isinstance(value, int | float) and value > largest:
                raise ValueError(f"{folder / 'config.json'} has {name} {value}; it must be at most {largest}.")


def is_student(folder: Path, config: dict[str, Any] | None = None) -> bool:
    """Whether a folder says that it is an export of this project, in any of its forms."""
    config = read_json(folder / "config.json") if config is None else config
    return config.get("model_type") == HybridConfig.model_type or (folder / MARK).exists()


def load_student(
    folder: str | Path, *, dtype: torch.dtype | None = None, attn_implementation: str | None = None
) -> tuple[HybridForCausalLM, PreTrainedTokenizerBase | None]:
    """An exported student and its tokenizer, with this package's own code; the code in the folder is never run.

    In eval mode, on the CPU, in the stored ``dtype`` unless another is given. Raises ValueError as `check_checkpoint`
    does, and for a folder that is no student in its remote-code form.
    """
    folder = Path(folder)
    check_checkpoint(folder)
    config = read_json(folder / "config.json")
    if config["model_type"] != HybridConfig.model_type:
        raise ValueError(
            f"{folder} has model_type {config['model_type']!r}, a student has {HybridConfig.model_type!r}; "
            "name the folder of an export in the form remote-code or safetensors."
        )
    student = HybridForCausalLM.from_pretrained(
        folder,
        dtype=dtype or getattr(torch, config["dtype"]),
        attn_implementation=attn_implementation,
        use_safetensors=True,
        local_files_only=True,
    )
    return student.eval(), _tokenizer(folder, student.config.vocab_size)


def _tokenizer(folder: Path, vocab_size: int) -> PreTrainedTokenizerBase | None:
    if not (folder / "tokenizer_config.json").exists():
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # the tokenizers library raises plain exceptions
        raise ValueError(f"the tokenizer of {folder} cannot be read ({_reason(error)}); copy it again.") from error
    if len(tokenizer) > vocab_size:
        raise ValueError(
            f"the tokenizer of {folder} has {len(tokenizer)} tokens, the model {vocab_size}; copy it again."
        )
    return tokenizer


def _check_files_of_student(folder: Path) -> None:
    if pickles := pickles_in(folder):
        raise ValueError(
            f"{pickles[0]} may be a pickle, and reading one can run any program; a student is safetensors and JSON: "
            "remove it."
        )
    for path in folder.glob("*.py"):
        if not (MODEL_CODE / path.name).is_file():
            raise ValueError(f"{path} is no file that a student has; read it, then remove it.")
        if found := review_code(path):
            raise ValueError(f"{path} {found[0]}, which the code of a student does not; export the student again.")
    for name in RECORDS:
        if (folder / name).exists():
            read_json(folder / name)
    if (folder / "tokenizer_config.json").exists() and not any((folder / name).is_file() for name in VOCABULARIES):
        raise ValueError(f"{folder} has no tokenizer.json beside tokenizer_config.json; copy the whole folder again.")
    check_references(folder)


def _check_index(folder: Path, tensors: dict[str, Entry]) -> None:
    if not (folder / INDEX).exists():
        return
    listed = read_weight_map(folder)
    for name in sorted(listed.keys() ^ tensors.keys()):
        where = f"{INDEX} lists" if name in listed else f"{tensors[name].file.name} holds"
        raise ValueError(
            f"{folder}: only {where} the tensor {name}; the index and the files must agree. Copy both again."
        )
    for name, file in listed.items():
        if tensors[name].file.name != file:
            raise ValueError(f"{folder}: {INDEX} has the tensor {name} in {file}, it is in {tensors[name].file.name}.")


def _check_quantised(folder: Path, record: dict[str, Any]) -> None:
    """A quantised student's tensors are its library's; its config is still ours."""
    settings = record["quantization_config"]
    if not isinstance(settings, dict) or settings.get("quant_method") != "torchao":
        raise ValueError(f"{folder / 'config.json'} has another quantization_config than torchao's; quantise it again.")
    _described(folder / "config.json", record)


def _check_tensors(folder: Path, record: dict[str, Any], tensors: dict[str, Entry]) -> None:
    """Names, shapes and types of the tensors against those of the model that the config describes."""
    where = folder / "config.json"
    config, expected = _described(where, record)
    dtype = record.get("dtype")
    if dtype not in FLOATS.values():
        raise ValueError(f"{where} has dtype {dtype!r}; a student's is one of {', '.join(FLOATS.values())}.")
    for name in sorted(expected.keys() - tensors.keys()):
        raise ValueError(f"{folder} lacks the tensor {name}, which its config asks for; copy the whole folder again.")
    for name in sorted(tensors.keys() - expected.keys()):
        raise ValueError(f"{tensors[name].file} holds the tensor {name}, which its config has no place for.")
    for name, entry in tensors.items():
        if entry.shape != expected[name]:
            raise ValueError(
                f"the tensor {name} of {entry.file} has shape {entry.shape}, its config asks for {expected[name]}; "
                "copy the weights and config.json again, from one export."
            )
        if FLOATS.get(entry.dtype) != dtype:
            raise ValueError(f"the tensor {name} of {entry.file} has dtype {entry.dtype}, its config says {dtype}.")
    if (folder / "plan.json").exists():
        plan = HeadPlan.load(folder / "plan.json")
        shape = (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads)
        kept = [list(plan.kept_in(layer)) for layer in range(plan.n_layers)]
        if (plan.n_layers, plan.n_heads, plan.n_kv_heads) != shape or kept != config.kept:
            raise ValueError(f"{folder / 'plan.json'} and {where} keep other heads; copy both again, from one export.")


def _described(where: Path, record: dict[str, Any]) -> tuple[HybridConfig, dict[str, tuple[int, ...]]]:
    """The config, and the shape of each tensor of its model; a tied tensor is stored under one name only."""
    try:
        if isinstance(backbone := record.get("backbone"), dict):
            check_sizes(backbone)
        config = HybridConfig.from_dict(dict(record))
        if config.backbone is None:
            raise ValueError("it has no backbone")
        with torch.device("meta"):
            model = HybridForCausalLM(config)
    except Exception as error:  # of transformers, of torch: whatever a field leads to
        raise ValueError(f"{where} describes no student ({_reason(error)}); copy it again.") from error
    tied = model._tied_weights_keys or {} if config.tie_word_embeddings else {}
    return config, {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in tied}


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}"
