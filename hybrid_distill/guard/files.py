"""The files of a checkpoint folder, by name and as JSON: nothing that leads out of it, nothing that is a pickle."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".npy", ".npz")
INDEX = "model.safetensors.index.json"
LARGEST_JSON = 2**28  # bytes; the tokenizers of the largest vocabularies have a tenth of it
# What transformers may be told in config.json; other names are programs that it would fetch from the hub.
ATTENTIONS = (None, "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")


def read_json(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds. Raises ValueError for anything else, for NaN, and for a key given twice."""
    if not path.is_file():
        raise ValueError(f"{path} is missing; copy the whole folder again.")
    if (size := path.stat().st_size) > LARGEST_JSON:
        raise ValueError(f"{path} has {size} bytes; such a file has at most {LARGEST_JSON}. Copy it again.")
    return parse_json(path.read_bytes(), str(path))


def parse_json(text: bytes, where: str) -> dict[str, Any]:
    """`read_json` of a text; ``where`` is what it is called in messages."""
    try:
        record = json.loads(text.decode("utf-8"), object_pairs_hook=_once, parse_constant=_constant)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise ValueError(f"{where} is no sound JSON ({reason}); copy it again.") from error
    if not isinstance(record, dict):
        raise ValueError(f"{where} holds a {type(record).__name__}; it must be a JSON object. Copy it again.")
    return record


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} is there twice")
    return record


def _constant(name: str) -> float:
    if name == "NaN":
        raise ValueError("NaN is not a number")
    return float(name)  # Infinity: some families have it in their config.json


def check_links(folder: Path) -> None:
    """Raise ValueError for a link that leads out of the folder, the hub cache's links to its own blobs excepted."""
    inside = [folder.resolve()]
    if folder.resolve().parent.name == "snapshots":
        inside.append(folder.resolve().parents[1] / "blobs")
    for path in folder.rglob("*"):
        if path.is_symlink() and not any(path.resolve().is_relative_to(place) for place in inside):
            raise ValueError(f"{path} is a link out of the folder; put the file itself there.")


def pickles_in(folder: Path) -> list[Path]:
    """Files that a loader might unpickle, which can run any program."""
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in PICKLES)


def is_bin_only(folder: Path) -> bool:
    """Whether a folder's weights are there as a pickle and not as safetensors."""
    return not any(folder.glob("*.safetensors")) and any(folder.glob("*.bin"))


def check_inside(name: Any, what: str) -> str:
    """A file name that an index or a config gives. Raises ValueError unless it is a plain name in the same folder."""
    plain = isinstance(name, str) and name not in ("", ".", "..")
    if not plain or PurePosixPath(name).name != name or PureWindowsPath(name).name != name:
        raise ValueError(f"{what} names the file {name!r}; it must be a plain file name in the same folder.")
    return name


def check_references(folder: Path) -> None:
    """Raise ValueError for JSON files of a student that point at code or files elsewhere."""
    for path in (folder / "config.json", folder / "tokenizer_config.json"):
        record = read_json(path) if path.exists() else {}
        for entry in _code_references(record):
            module = entry.split(".")[0] if isinstance(entry, str) and entry.count(".") == 1 else ""
            if not module.isidentifier() or not (folder / f"{module}.py").is_file():
                raise ValueError(f"{path} has the auto_map entry {entry!r}; it must be FILE.CLASS of a file beside it.")
        for name, value in record.items():
            if name.endswith("_file") and value is not None:
                check_inside(value, f"{name} of {path}")
        _check_attention(record, path)
    if (folder / "adapter_config.json").exists():
        raise ValueError(
            f"{folder / 'adapter_config.json'} would make transformers load another model; a student has no adapters: "
            "remove that file."
        )


def _code_references(record: dict[str, Any]) -> Iterator[Any]:
    auto_map = record.get("auto_map") or {}
    for value in auto_map.values() if isinstance(auto_map, dict) else [auto_map]:
        yield from value if isinstance(value, list) else [value]


def _check_attention(record: dict[str, Any], path: Path) -> None:
    backbone = record.get("backbone")
    for fields in (record, backbone if isinstance(backbone, dict) else {}):
        for name in ("attn_implementation", "_attn_implementation", "_attn_implementation_internal"):
            value = fields.get(name)
            if not isinstance(value, str | None) or value not in ATTENTIONS:
                raise ValueError(
                    f"{path} has {name} {value!r}, which may be a program from the hub; remove that line, and choose "
                    "the attention when you load the model."
                )


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder's weights, as its index names them, if it has one.

    Raises ValueError for a damaged index, and for a file that is missing.
    """
    listed = set(read_weight_map(folder).values()) if (folder / INDEX).exists() else {"model.safetensors"}
    if missing := [name for name in sorted(listed) if not (folder / name).is_file()]:
        raise ValueError(f"{folder / missing[0]} is missing, of its weights; copy the whole folder again.")
    return [folder / name for name in sorted(listed)]


def read_weight_map(folder: Path) -> dict[str, str]:
    """Tensor name -> file name of the index. Raises ValueError for a damaged one and for files elsewhere."""
    path = folder / INDEX
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{path} has no weight_map of tensors to files; copy it again.")
    for file in set(map(str, weight_map.values())):
        if not check_inside(file, str(path)).endswith(".safetensors"):
            raise ValueError(f"{path} names the file {file!r}; weights are read from safetensors files only.")
    return weight_map
