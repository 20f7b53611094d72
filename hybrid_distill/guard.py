"""Security checks on checkpoint folders from any source, made before anything in them is loaded.

Weights must be safetensors with finite numbers. A student's tensors must match config.json in name, shape and dtype,
and its code must be unchanged since the export. Code in the folder is never run here (docs/security.md).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from .io import Record, file_hash, parse_json, read_json
from .model.configuration_hybrid import LARGEST, HybridConfig, check_sizes
from .model.modeling_hybrid import HybridForCausalLM
from .plan import HeadPlan
from .vocabulary import check_embedding

INDEX = "model.safetensors.index.json"
MARK = Path("gate") / "reference.json"  # only exports have it
MODEL_CODE = Path(__file__).parent / "model"
VOCABULARIES = ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer.model")
RECORDS = "config generation_config tokenizer_config special_tokens_map plan head_scores evaluation".split()
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".npy", ".npz")
FILE_NAME = r"[^/\\:.][^/\\:]*"  # cannot lead to another folder
FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # safetensors name: torch name
ATTENTIONS = (None, "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")  # others download code


class Entry(NamedTuple):
    """Tensor as described in its file's header."""

    dtype: str
    shape: tuple[int, ...]
    file: Path


def check_checkpoint(folder: str | Path, *, numbers: bool = True) -> None:
    """Raise ValueError if a local Hugging Face checkpoint folder is damaged or unsafe.

    Runs no code from the folder and builds no model in memory; with ``numbers``, also reads every tensor, for NaN. Any
    checkpoint is refused for links or names that lead out of the folder, damaged JSON or safetensors, or absurd sizes;
    a student also for pickles, changed or foreign code, an invalid config, or tensors that differ from the config's.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; pass the folder of a checkpoint.")
    check_no_run(folder)
    inside = [folder.resolve()]
    if folder.resolve().parent.name == "snapshots":  # the hub's cache links to its own blobs
        inside.append(folder.resolve().parents[1] / "blobs")
    for path in folder.rglob("*"):
        if path.is_symlink() and not any(path.resolve().is_relative_to(place) for place in inside):
            raise ValueError(f"{path} is a link out of the folder; put the file itself there.")
    config = read_json(folder / "config.json")
    is_hybrid = config.get("model_type") == HybridConfig.model_type
    if strict := is_hybrid or (folder / MARK).exists():
        _check_student_files(folder)
    else:
        _check_largest(folder, config)
    tensors = _read_weights(folder, strict, numbers)
    if is_hybrid:
        _check_model(folder, config, tensors)


def load_student(folder: str | Path) -> tuple[HybridForCausalLM, PreTrainedTokenizerBase | None]:
    """Load an exported student and its tokenizer with this package's own code; code in the folder is never run.

    The student is in eval mode, on the CPU, in the stored dtype. Raises ValueError as `check_checkpoint` does.
    """
    folder = Path(folder)
    check_checkpoint(folder)
    config = read_json(folder / "config.json")
    if (kind := config.get("model_type")) != HybridConfig.model_type:
        raise ValueError(
            f"{folder} holds a model of type {kind!r}; pass a finished run, or an export as remote-code or safetensors."
        )
    options = {"dtype": getattr(torch, config["dtype"]), "use_safetensors": True, "local_files_only": True}
    student = HybridForCausalLM.from_pretrained(folder, **options).eval()
    if not (folder / "tokenizer_config.json").exists():
        return student, None
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # the tokenizers library raises plain exceptions
        raise ValueError(f"the tokenizer of {folder} cannot be read ({_reason(error)}); copy it again.") from error
    check_embedding(tokenizer, student.config, str(folder))
    return student, tokenizer


def check_no_run(folder: Path) -> None:
    """Raise ValueError for a folder of one or several runs, which is easily mistaken for the export in it."""
    if any(folder.glob("*.safetensors")):
        return
    if (folder / "export" / "config.json").is_file():
        raise ValueError(f"{folder} is a run; pass its export, {folder / 'export'}.")
    if below := sorted(folder.glob("*/export/config.json")):
        raise ValueError(f"{folder} contains several runs; pass the export of one, such as {below[0].parent}.")


def foreign_code(folder: Path) -> list[str]:
    """List the Python files next to a checkpoint's weights that differ from this package's own."""
    own = {path.name: file_hash(path) for path in MODEL_CODE.glob("*.py")}
    return [path.name for path in sorted(folder.glob("*.py")) if own.get(path.name) != file_hash(path)]


def _check_largest(folder: Path, config: Record) -> None:
    """Raise ValueError for a size larger than in any model; fields that a family does not have are skipped."""
    for fields in filter(lambda part: isinstance(part, dict), (config, config.get("text_config") or {})):
        for name, largest in LARGEST.items():
            if isinstance(value := fields.get(name), int | float) and value > largest:
                raise ValueError(f"{folder / 'config.json'} has {name} {value}; it must be at most {largest}.")


def _check_student_files(folder: Path) -> None:
    """Check the files next to a student's weights: no pickles, no adapters, known code, no outside references."""
    if pickles := sorted(path for path in folder.rglob("*") if path.suffix.lower() in PICKLES):
        raise ValueError(f"{pickles[0]} may be a pickle, and reading one can run any program; remove it.")
    if (path := folder / "adapter_config.json").exists():
        raise ValueError(f"{path} makes transformers load another model; a student has no adapters: remove it.")
    paths = {name: folder / f"{name}.json" for name in RECORDS}
    records = {name: read_json(path) for name, path in paths.items() if path.exists()}
    recorded = read_json(folder / MARK).get("code") if (folder / MARK).exists() else None
    for name in foreign_code(folder):
        if not (MODEL_CODE / name).is_file():
            raise ValueError(f"{folder / name} is not part of an export; inspect it, then remove it.")
        if isinstance(recorded, dict) and recorded.get(name) != file_hash(folder / name):
            raise ValueError(f"{folder / name} is not the file that was exported; export the student again.")
    if "tokenizer_config" in records and not any((folder / name).is_file() for name in VOCABULARIES):
        raise ValueError(f"{folder} has a tokenizer_config.json but no tokenizer.json; copy the whole folder again.")
    for name in ("config", "tokenizer_config"):
        _check_references(paths[name], records.get(name, {}))


def _check_references(path: Path, record: Record) -> None:
    """Raise ValueError if a record points to code or files outside the folder."""
    auto_map = record.get("auto_map") or {}
    values = auto_map.values() if isinstance(auto_map, dict) else [auto_map]
    for entry in [entry for value in values for entry in (value if isinstance(value, list) else [value])]:
        file = re.fullmatch(r"(\w+)\.\w+", str(entry))
        if file is None or not path.with_name(f"{file[1]}.py").is_file():
            raise ValueError(f"{path} has the auto_map entry {entry!r}; it must be FILE.CLASS of a file in its folder.")
    for name, value in record.items():
        if name.endswith("_file") and value is not None and not re.fullmatch(FILE_NAME, str(value)):
            raise ValueError(f"{path} has {name} {value!r}; it must be a plain file name in the same folder.")
    for fields in (record, record.get("backbone")):
        for name in ("attn_implementation", "_attn_implementation", "_attn_implementation_internal"):
            value = fields.get(name) if isinstance(fields, dict) else None
            if not isinstance(value, str | None) or value not in ATTENTIONS:
                raise ValueError(f"{path} has {name} {value!r}, which may be a program from the hub; remove that line.")


def _read_weights(folder: Path, strict: bool, numbers: bool) -> dict[str, Entry]:
    """Read the files that the index names, or model.safetensors; if ``strict``, refuse any others."""
    listed: Record = {}
    if (index := folder / INDEX).exists():
        listed = read_json(index).get("weight_map") or {}
        if not isinstance(listed, dict) or not listed:
            raise ValueError(f"{index} has no weight_map of tensors to files; copy it again.")
    there = {path.name for path in folder.glob("*.safetensors")}
    files = set(map(str, listed.values())) or {"model.safetensors"}
    if absent := sorted(files - there):
        raise ValueError(f"{folder} has no {absent[0]}, which its weights need; copy it again.")
    if strict and (unknown := sorted(there - files)):
        raise ValueError(f"{folder / unknown[0]} does not belong to the weights ({INDEX} names them); remove it.")
    tensors: dict[str, Entry] = {}
    for path in [folder / name for name in sorted(files)]:
        own = _read_file(path, numbers)
        if twice := sorted(tensors.keys() & own.keys()):
            raise ValueError(f"the tensor {twice[0]} is in {tensors[twice[0]].file.name} and in {path}; remove one.")
        tensors |= own
    if listed and (differ := sorted(listed.items() ^ {name: tensors[name].file.name for name in tensors}.items())):
        raise ValueError(f"{index} and the files do not agree on the tensor {differ[0][0]}; copy both again.")
    return tensors


def _read_file(path: Path, numbers: bool) -> dict[str, Entry]:
    """Read a safetensors file's header, and its tensors if ``numbers``; safetensors itself makes all other checks."""
    try:
        with safe_open(path, framework="pt") as weights, path.open("rb") as file:
            header = parse_json(file.read(int.from_bytes(file.read(8), "little")), f"the header of {path}")
            metadata = header.pop("__metadata__", {})
            if metadata and metadata.get("format") not in ("pt", "mlx"):
                raise ValueError(f"the header of {path} has the metadata {metadata}, not format 'pt'; copy it again.")
            for name, fields in header.items():
                if set(fields) != {"dtype", "shape", "data_offsets"}:
                    raise ValueError(f"the tensor {name} of {path} has the fields {sorted(fields)}; copy it again.")
                if not numbers or fields["dtype"] not in FLOATS or 0 in fields["shape"]:
                    continue
                if not torch.stack(torch.aminmax(weights.get_tensor(name))).isfinite().all():
                    raise ValueError(f"the tensor {name} of {path} holds NaN or infinity; export the model again.")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a whole safetensors file ({_reason(error)}); copy it again.") from error
    return {name: Entry(fields["dtype"], tuple(fields["shape"]), path) for name, fields in header.items()}


def _check_model(folder: Path, record: Record, tensors: dict[str, Entry]) -> None:
    """Compare the tensors and plan.json with the model that the config describes."""
    where = folder / "config.json"
    try:
        if isinstance(backbone := record.get("backbone"), dict):
            check_sizes(backbone)  # unmodified: HybridConfig repairs some fields
        config = HybridConfig.from_dict(dict(record))
        with torch.device("meta"):
            model = HybridForCausalLM(config)
    except Exception as error:  # a bad field can raise anything in transformers and torch
        raise ValueError(f"{where} does not describe a student ({_reason(error)}); copy it again.") from error
    if (settings := record.get("quantization_config")) is not None:  # torchao's tensors are not compared
        if not isinstance(settings, dict) or settings.get("quant_method") != "torchao":
            raise ValueError(f"{where} has a quantization_config that is not torchao's; quantize the student again.")
        return
    if (dtype := record.get("dtype")) not in FLOATS.values():
        raise ValueError(f"{where} has dtype {dtype!r}; it must be one of {', '.join(FLOATS.values())}.")
    tied = model._tied_weights_keys or {} if config.tie_word_embeddings else {}
    expected = {name: (dtype, tuple(tensor.shape)) for name, tensor in model.state_dict().items() if name not in tied}
    found = {name: (FLOATS.get(entry.dtype, entry.dtype), entry.shape) for name, entry in tensors.items()}
    for name in sorted(found.keys() | expected.keys()):
        if found.get(name) != expected.get(name):
            raise ValueError(
                f"the tensor {name} of {tensors[name].file if name in tensors else folder} is "
                f"{found.get(name, 'missing')}, its config.json asks for {expected.get(name, 'no such tensor')}; "
                "copy the whole folder again."
            )
    if (path := folder / "plan.json").exists():
        plan = HeadPlan.load(path)
        shape = (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads)
        kept = [list(plan.kept_in(layer)) for layer in range(plan.n_layers)]
        if (plan.n_layers, plan.n_heads, plan.n_kv_heads) != shape or kept != config.kept:
            raise ValueError(f"{path} and {where} disagree on the kept heads; copy both again from the same export.")


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}"
