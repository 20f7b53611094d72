"""What a safetensors file says it holds, read and checked without its tensors.

The format: the length of the header in 8 bytes, the header in JSON, the tensors' bytes one after the other.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open

from .files import parse_json

LARGEST_HEADER = 10**8  # the format's own limit
BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "C64": 8, "I64": 8, "I32": 4,
    "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Of one number of each type, by the name that safetensors has for it."""
FORMATS = ("pt", "mlx")
FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Types of a model's own numbers, as torch calls them."""


class Entry(NamedTuple):
    """A tensor as the header of its file describes it."""

    dtype: str
    shape: tuple[int, ...]
    file: Path


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of a safetensors file by name.

    Raises ValueError, naming the file and the tensor, when the header is damaged or does not fit the file.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, LARGEST_HEADER):
            raise ValueError(
                f"{path} has {size} bytes and announces a header of {length}; it is cut off or no safetensors file. "
                "Copy it again."
            )
        text = file.read(length)
    header = parse_json(text.rstrip(b" "), f"the header of {path}")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"the header of {path} has metadata that is no text; copy it again.")
    if metadata and metadata.get("format") not in FORMATS:
        raise ValueError(f"the header of {path} names the format {metadata.get('format')!r}, not 'pt'; copy it again.")
    entries, spans = {}, []
    for name, fields in header.items():
        dtype, shape, span = _fields(name, fields, path)
        entries[name] = Entry(dtype, shape, path)
        spans.append((*span, name))
    _check_spans(sorted(spans), size - 8 - length, path)
    return entries


def _fields(name: str, fields: object, path: Path) -> tuple[str, tuple[int, ...], tuple[int, int]]:
    where = f"the tensor {name} in the header of {path}"
    if not isinstance(fields, dict) or set(fields) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{where} lacks its dtype, shape or data_offsets; copy the file again.")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BYTES:
        raise ValueError(f"{where} has dtype {dtype!r}; it must be one of {', '.join(BYTES)}. Copy the file again.")
    for what, numbers in (("shape", shape), ("data_offsets", offsets)):
        if not isinstance(numbers, list) or not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
            raise ValueError(f"{where} has {what} {numbers!r}; it must list whole numbers. Copy the file again.")
    if len(offsets) != 2 or offsets[1] - offsets[0] != math.prod(shape) * BYTES[dtype]:
        raise ValueError(f"{where} has shape {shape} and bytes {offsets}, which do not fit; copy the file again.")
    return dtype, tuple(shape), (offsets[0], offsets[1])


def _check_spans(spans: list[tuple[int, int, str]], n_bytes: int, path: Path) -> None:
    """The tensors must follow one another without gap or overlap, to the end of the file."""
    end = 0
    for begin, next_end, name in spans:
        if begin != end:
            raise ValueError(f"the tensor {name} of {path} begins at byte {begin}, not at {end}; copy the file again.")
        end = next_end
    if end != n_bytes:
        raise ValueError(f"{path} holds {n_bytes} bytes of tensors, its header describes {end}; copy the file again.")


def read_headers(files: list[Path]) -> dict[str, Entry]:
    """The tensors of several files. Raises ValueError as `read_header` does, and for a tensor that is there twice."""
    entries: dict[str, Entry] = {}
    for path in files:
        own = read_header(path)
        if twice := sorted(entries.keys() & own.keys()):
            raise ValueError(f"the tensor {twice[0]} is in {entries[twice[0]].file.name} and in {path}; remove one.")
        entries |= own
    return entries


def check_numbers(entries: dict[str, Entry]) -> None:
    """Raise ValueError naming the first tensor with a NaN or an infinite number. Reads every file once."""
    for path in dict.fromkeys(entry.file for entry in entries.values()):
        with safe_open(path, framework="pt") as file:
            for name, entry in entries.items():
                if entry.file != path or entry.dtype not in FLOATS or 0 in entry.shape:
                    continue
                low, high = torch.aminmax(file.get_tensor(name))
                if not (low.isfinite() and high.isfinite()):
                    kind = "NaN" if low.isnan() or high.isnan() else "infinite numbers"
                    raise ValueError(f"the tensor {name} of {path} holds {kind}; export the model again.")
