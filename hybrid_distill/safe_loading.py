"""Security checks on checkpoint folders from any source, made before anything in them is loaded.

Weights must be safetensors with finite numbers. A student's tensors must match config.json in name,
shape and dtype, and its code must be unchanged since the export. Code in the folder is never run
here (docs/security.md).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase
from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

from .export_paths import EXPORT_RECORDS, MARK, PLAN
from .io import Record, file_hash, parse_json, read_json
from .model.configuration_hybrid import HybridConfig
from .model.field_rules import LARGEST, check_sizes
from .model.modeling_hybrid import HybridForCausalLM
from .plan import HeadPlan
from .vocabulary import check_embedding

INDEX = "model.safetensors.index.json"
MODEL_CODE = Path(__file__).parent / "model"
RECORDS = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    *EXPORT_RECORDS,
)
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".npy", ".npz")
FILE_NAME = r"[^/\\:.][^/\\:]*"  # cannot lead to another folder
FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""torch's names of safetensors' dtypes."""
# transformers downloads code for any other name.
ATTENTIONS = (
    None,
    "eager",
    "sdpa",
    "flash_attention_2",
    "flash_attention_3",
    "flex_attention",
)
ATTENTION_FIELDS = ("attn_implementation", "_attn_implementation", "_attn_implementation_internal")


Described = tuple[str, tuple[int, ...]]
"""Dtype and shape of a tensor."""


class Entry(NamedTuple):
    """Tensor as described in its file's header."""

    dtype: str
    shape: tuple[int, ...]
    file: Path


def check_checkpoint(folder: str | Path) -> None:
    """Raise ValueError if a local Hugging Face checkpoint folder is damaged or unsafe.

    Runs no code from the folder and builds no model in memory; reads every tensor, for NaN. Any
    checkpoint is refused for links or names that lead out of the folder, damaged JSON or
    safetensors, or absurd sizes; a student also for pickles, changed or foreign code, an invalid
    config, or tensors that differ from the config's.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; pass the folder of a checkpoint.")
    check_no_run(folder)
    _check_links(folder)
    config = read_json(folder / "config.json")
    is_hybrid = config.get("model_type") == HybridConfig.model_type
    is_export = is_hybrid or (folder / MARK).exists()
    if is_export:
        _check_student_files(folder)
    else:
        # A student's sizes are checked field by field below; of other models only absurd ones are
        # refused.
        _check_largest(folder, config)
    tensors = _read_weights(folder, is_export)
    if is_hybrid:
        _check_model(folder, config, tensors)


def _check_links(folder: Path) -> None:
    """Raise ValueError for a link that leads out of the folder."""
    root = folder.resolve()
    places = [root]
    if root.parent.name == "snapshots":  # the hub's cache links to its own blobs
        places.append(root.parents[1] / "blobs")
    for path in folder.rglob("*"):
        if path.is_symlink():
            target = path.resolve()
            if not any(target.is_relative_to(place) for place in places):
                raise ValueError(f"{path} is a link out of the folder; put the file itself there.")


def load_student(
    folder: str | Path,
) -> tuple[HybridForCausalLM, PreTrainedTokenizerBase | None]:
    """Load an exported student and its tokenizer with this package's own code.

    Code in the folder is never run. The student is in eval mode, on the CPU, in the stored dtype.
    Raises ValueError as `check_checkpoint` does.
    """
    folder = Path(folder)
    check_checkpoint(folder)
    config = read_json(folder / "config.json")
    model_type = config.get("model_type")
    if model_type != HybridConfig.model_type:
        raise ValueError(
            f"{folder} holds a model of type {model_type!r}; pass a finished run, or an export as "
            "remote-code or safetensors."
        )
    student = HybridForCausalLM.from_pretrained(
        folder,
        dtype=getattr(torch, config["dtype"]),
        use_safetensors=True,
        local_files_only=True,
    )
    student = student.eval()
    if not (folder / "tokenizer_config.json").exists():
        return student, None
    options = {"trust_remote_code": False, "local_files_only": True}
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    except Exception as error:  # the tokenizers library raises plain exceptions
        raise ValueError(
            f"the tokenizer of {folder} cannot be read ({_reason(error)}); copy it again."
        ) from error
    check_embedding(tokenizer, student.config, str(folder))
    return student, tokenizer


def check_no_run(folder: Path) -> None:
    """Raise ValueError for a folder of one or several runs, which is easily mistaken for the export in it."""
    if any(folder.glob("*.safetensors")):
        return
    if (folder / "export" / "config.json").is_file():
        raise ValueError(f"{folder} is a run; pass its export, {folder / 'export'}.")
    configs = sorted(folder.glob("*/export/config.json"))
    if configs:
        raise ValueError(
            f"{folder} contains several runs; pass the export of one, such as {configs[0].parent}."
        )


def foreign_code(folder: Path) -> list[str]:
    """List the Python files next to a checkpoint's weights that differ from this package's own."""
    own = {path.name: file_hash(path) for path in MODEL_CODE.glob("*.py")}
    files = sorted(folder.glob("*.py"))
    return [path.name for path in files if own.get(path.name) != file_hash(path)]


def _check_largest(folder: Path, config: Record) -> None:
    """Raise ValueError for a size larger than in any model.

    Fields that a family does not have are skipped.
    """
    for fields in (config, config.get("text_config")):
        if not isinstance(fields, dict):
            continue
        for name, largest in LARGEST.items():
            value = fields.get(name)
            if isinstance(value, int | float) and value > largest:
                raise ValueError(
                    f"{folder / 'config.json'} has {name} {value}; it must be at most {largest}."
                )


def _check_student_files(folder: Path) -> None:
    """Check the files next to a student's weights.

    There are no pickles, no adapters, no unknown code and no references to other places.
    """
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() in PICKLES:
            raise ValueError(
                f"{path} may be a pickle, and reading one can run any program; remove it."
            )
    adapters = folder / "adapter_config.json"
    if adapters.exists():
        raise ValueError(
            f"{adapters} makes transformers load another model; a student has no adapters: remove it."
        )
    records = {}
    for name in RECORDS:
        path = folder / name
        if path.exists():
            records[name] = read_json(path)
    _check_code(folder)
    if "tokenizer_config.json" in records:
        names = _vocabulary_files(records["tokenizer_config.json"])
        if names and not any((folder / name).is_file() for name in names):
            raise ValueError(
                f"{folder} has a tokenizer_config.json but no {' or '.join(names)}; copy the whole folder again."
            )
    for name in ("config.json", "tokenizer_config.json"):
        _check_references(folder / name, records.get(name, {}))


def _vocabulary_files(record: Record) -> list[str]:
    """Return the files of which a tokenizer's class needs at least one; none for a class of bytes without files."""
    # From transformers' own classes, by name.
    kind = tokenizer_class_from_name(str(record.get("tokenizer_class")))
    if kind is None:
        return ["tokenizer.json"]
    try:
        names = set(kind.vocab_files_names.values())
    except ImportError:
        # The class's package (sentencepiece) is not installed: loading says so.
        return []
    # Written by every fast tokenizer, whatever its class reads besides.
    return sorted(names | {"tokenizer.json"}) if names else []


def _check_code(folder: Path) -> None:
    """Raise ValueError for Python files that were not exported, or not as they are."""
    recorded = None
    if (folder / MARK).exists():
        recorded = read_json(folder / MARK).get("code")
    for name in foreign_code(folder):
        path = folder / name
        if not (MODEL_CODE / name).is_file():
            raise ValueError(f"{path} is not part of an export; inspect it, then remove it.")
        # Another version's export records other hashes.
        if isinstance(recorded, dict) and recorded.get(name) != file_hash(path):
            raise ValueError(f"{path} is not the file that was exported; export the student again.")


def _check_references(path: Path, record: Record) -> None:
    """Raise ValueError if a record points to code or files outside the folder."""
    for reference in _auto_map_entries(record.get("auto_map") or {}):
        file = re.fullmatch(r"(\w+)\.\w+", str(reference))
        if file is None or not path.with_name(f"{file[1]}.py").is_file():
            raise ValueError(
                f"{path} has the auto_map entry {reference!r}; it must be FILE.CLASS of a file in its folder."
            )
    for name, value in record.items():
        is_file_name = name.endswith("_file") and value is not None
        if is_file_name and not re.fullmatch(FILE_NAME, str(value)):
            raise ValueError(
                f"{path} has {name} {value!r}; it must be a plain file name in the same folder."
            )
    for fields in (record, record.get("backbone")):
        if not isinstance(fields, dict):
            continue
        for name in ATTENTION_FIELDS:
            value = fields.get(name)
            if not isinstance(value, str | None) or value not in ATTENTIONS:
                raise ValueError(
                    f"{path} has {name} {value!r}, which may be a program from the hub; remove that line."
                )


def _auto_map_entries(auto_map: object) -> list[object]:
    """List the classes that an auto_map names; a tokenizer's names a slow and a fast one."""
    values = list(auto_map.values()) if isinstance(auto_map, dict) else [auto_map]
    entries: list[object] = []
    for value in values:
        entries += value if isinstance(value, list) else [value]
    return entries


def _read_weights(folder: Path, is_export: bool) -> dict[str, Entry]:
    """Read the files that the index names, or model.safetensors; an export must have no other weight files."""
    weight_map = _read_weight_map(folder / INDEX)
    names = set(map(str, weight_map.values())) or {"model.safetensors"}
    _check_file_names(folder, names, is_export)
    tensors: dict[str, Entry] = {}
    for file in sorted(names):
        for name, entry in _read_file(folder / file).items():
            if name in tensors:
                raise ValueError(
                    f"the tensor {name} is in {tensors[name].file.name} and in {entry.file}; remove one."
                )
            tensors[name] = entry
    if weight_map:
        _check_weight_map(folder / INDEX, weight_map, tensors)
    return tensors


def _read_weight_map(index: Path) -> Record:
    """Read which file holds each tensor; empty without an index."""
    if not index.exists():
        return {}
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} has no weight_map of tensors to files; copy it again.")
    return weight_map


def _check_file_names(folder: Path, names: set[str], is_export: bool) -> None:
    """Raise ValueError if one of these files is missing or, in an export, if there are other weight files."""
    present = {path.name for path in folder.glob("*.safetensors")}
    # Compared by name: a name that contains a path is never present.
    for name in sorted(names - present):
        raise ValueError(f"{folder} has no {name}, which its weights need; copy it again.")
    if not is_export:
        return
    for name in sorted(present - names):
        raise ValueError(
            f"{folder / name} does not belong to the weights ({INDEX} names them); remove it."
        )


def _check_weight_map(index: Path, weight_map: Record, tensors: dict[str, Entry]) -> None:
    """Raise ValueError for a tensor that the index places in another file than the one that holds it."""
    files = {name: entry.file.name for name, entry in tensors.items()}
    for name in sorted(weight_map.keys() | files.keys()):
        if weight_map.get(name) != files.get(name):
            raise ValueError(
                f"{index} and the files do not agree on the tensor {name}; copy both again."
            )


def _read_file(path: Path) -> dict[str, Entry]:
    """Read a safetensors file's header, and check the numbers of its tensors.

    safetensors itself makes all other checks.
    """
    try:
        # Opened by safetensors first: its checks come before ours.
        with safe_open(path, framework="pt") as weights:
            entries = _read_header(path)
            _check_numbers(weights, entries)
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path} is not a whole safetensors file ({_reason(error)}); copy it again."
        ) from error
    return entries


def _read_header(path: Path) -> dict[str, Entry]:
    """Read the header of a safetensors file. Raises ValueError for fields or metadata that it should not have."""
    with path.open("rb") as file:
        header_size = int.from_bytes(file.read(8), "little")
        header = parse_json(file.read(header_size), f"the header of {path}")
    metadata = header.pop("__metadata__", {})
    if metadata and metadata.get("format") not in ("pt", "mlx"):
        raise ValueError(
            f"the header of {path} has the metadata {metadata}, not format 'pt'; copy it again."
        )
    entries = {}
    for name, fields in header.items():
        if set(fields) != {"dtype", "shape", "data_offsets"}:
            raise ValueError(
                f"the tensor {name} of {path} has the fields {sorted(fields)}; copy it again."
            )
        entries[name] = Entry(fields["dtype"], tuple(fields["shape"]), path)
    return entries


def _check_numbers(weights: Any, entries: dict[str, Entry]) -> None:
    """Raise ValueError for a tensor of an open safetensors file that holds NaN or infinity."""
    for name, entry in entries.items():
        if entry.dtype not in FLOATS or 0 in entry.shape:
            continue
        # Not isfinite, whose mask would take memory beside the tensor; aminmax propagates NaN.
        ends = torch.stack(torch.aminmax(weights.get_tensor(name)))
        if not ends.isfinite().all():
            raise ValueError(
                f"the tensor {name} of {entry.file} holds NaN or infinity; export the model again."
            )


def _check_model(folder: Path, record: Record, tensors: dict[str, Entry]) -> None:
    """Compare the tensors and plan.json with the model that the config describes."""
    path = folder / "config.json"
    model = _empty_model(path, record)
    settings = record.get("quantization_config")
    if settings is not None:
        # torchao's tensors are not compared.
        if not isinstance(settings, dict) or settings.get("quant_method") != "torchao":
            raise ValueError(
                f"{path} has a quantization_config that is not torchao's; quantize the student again."
            )
        return
    dtype = str(record.get("dtype"))
    if dtype not in FLOATS.values():
        names = ", ".join(FLOATS.values())
        raise ValueError(f"{path} has dtype {record.get('dtype')!r}; it must be one of {names}.")
    _compare_tensors(folder, tensors, _expected_tensors(model, dtype))
    if (folder / PLAN).exists():
        _check_plan(folder / PLAN, model.config)


def _empty_model(path: Path, record: Record) -> HybridForCausalLM:
    """Build the model that a config.json describes, without weights. Raises ValueError if it describes none."""
    try:
        backbone = record.get("backbone")
        if isinstance(backbone, dict):
            # As stored: HybridConfig repairs some fields.
            check_sizes(backbone)
        config = HybridConfig.from_dict(dict(record))
        with torch.device("meta"):
            return HybridForCausalLM(config)
    except Exception as error:  # a bad field can raise anything in transformers and torch
        raise ValueError(
            f"{path} does not describe a student ({_reason(error)}); copy it again."
        ) from error


def _expected_tensors(model: HybridForCausalLM, dtype: str) -> dict[str, Described]:
    """Return the dtype and shape of each tensor that the files of a model hold: tied ones once."""
    expected = {name: (dtype, tuple(tensor.shape)) for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        for name in model._tied_weights_keys or {}:
            expected.pop(name, None)
    return expected


def _compare_tensors(
    folder: Path, tensors: dict[str, Entry], expected: dict[str, Described]
) -> None:
    """Raise ValueError for a tensor that is missing, superfluous, or of another dtype or shape."""
    for name in sorted(tensors.keys() | expected.keys()):
        stored: object = "missing"
        file = folder
        if name in tensors:
            entry = tensors[name]
            stored = (FLOATS.get(entry.dtype, entry.dtype), entry.shape)
            file = entry.file
        if stored != expected.get(name):
            raise ValueError(
                f"the tensor {name} of {file} is {stored}, its config.json asks for "
                f"{expected.get(name, 'no such tensor')}; copy the whole folder again."
            )


def _check_plan(path: Path, config: PretrainedConfig) -> None:
    """Raise ValueError if a plan is not the config's."""
    plan = HeadPlan.load(path)
    sizes = (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads)
    kept = [list(plan.kept_in(layer)) for layer in range(plan.n_layers)]
    if (plan.n_layers, plan.n_heads, plan.n_kv_heads) != sizes or kept != config.kept:
        raise ValueError(
            f"{path} and config.json disagree on the kept heads; copy both again from the same export."
        )


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, ValueError) and text:
        return text
    return f"{type(error).__name__}: {text}"
