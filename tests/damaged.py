"""Three hundred ways to damage an exported student, as functions of its folder and a generator.

Planted code writes the file CANARY beside the folder if it is ever run.
"""

import json
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from hybrid_distill.model import configuration_hybrid, documents, modeling_hybrid, ssd

CANARY = "canary"
INDEX = "model.safetensors.index.json"
HUGE = 10**9
Damage = Callable[[Path, Random], object]


class Bomb:
    """An object that leaves the canary when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.canary,)


def evil_code(folder: Path) -> str:
    return f"import pathlib\npathlib.Path({str(folder.parent / CANARY)!r}).touch()\n"


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("model*.safetensors"))


def edit_json(file: str, edit: Callable[[dict[str, Any]], Any]) -> Damage:
    """Replace the object of a file with what ``edit`` makes of its object, or does to it."""

    def damage(folder: Path, rng: Random) -> None:
        record = json.loads((folder / file).read_text())
        changed = edit(record)
        (folder / file).write_text(json.dumps(record if changed is None else changed))

    return damage


def set_field(file: str, *path_and_value: Any) -> Damage:
    *path, last, value = path_and_value

    def edit(record: Any) -> None:
        for name in path:
            record = record[name]
        record[last] = value

    return edit_json(file, edit)


def write(file: str, content: str | bytes) -> Damage:
    data = content.encode() if isinstance(content, str) else content
    return lambda folder, rng: (folder / file).write_bytes(data)


def edit_bytes(edit: Callable[[bytes, Random], bytes]) -> Damage:
    """Replace the bytes of a weight file."""

    def damage(folder: Path, rng: Random) -> None:
        file = rng.choice(shards(folder))
        file.write_bytes(edit(file.read_bytes(), rng))

    return damage


def cut(share: float) -> Damage:
    """Keep a weight file's first bytes alone; all but the last one with a share of 1."""

    def first_bytes(content: bytes, rng: Random) -> bytes:
        n_bytes = min(int(len(content) * share), len(content) - 1)
        return content[:n_bytes]

    return edit_bytes(first_bytes)


def edit_tensors(edit: Callable[[dict[str, torch.Tensor], str], Any]) -> Damage:
    """Rewrite a weight file with one of its tensors, of two dimensions, changed."""

    def damage(folder: Path, rng: Random) -> None:
        file = rng.choice(shards(folder))
        tensors = load_file(file)
        matrices = [name for name, tensor in sorted(tensors.items()) if tensor.ndim == 2]
        name = rng.choice(matrices)
        edit(tensors, name)
        save_file(tensors, file, metadata={"format": "pt"})

    return damage


def edit_tensor(edit: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    """Rewrite a weight file with another tensor in place of one."""

    def replace(tensors: dict[str, torch.Tensor], name: str) -> None:
        tensors[name] = edit(tensors[name])

    return edit_tensors(replace)


def one_number(value: float) -> Damage:
    """Change the number in the middle of a tensor."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[tensor.numel() // 2] = value
        return tensor

    return edit_tensor(change)


def as_dtype(dtype: torch.dtype) -> Damage:
    return edit_tensor(lambda tensor: tensor.to(dtype))


def rename(tensors: dict[str, torch.Tensor], name: str) -> None:
    tensors[f"{name}.x"] = tensors.pop(name)


# A file of safetensors begins with the length of its header in 8 bytes, then the header in JSON.


def length_of_header(content: bytes) -> int:
    return int.from_bytes(content[:8], "little")


def edit_header(edit: Callable[[dict[str, Any], str], Any]) -> Damage:
    """Rewrite a weight file's header; ``edit`` gets it and a tensor's name, may return text."""

    def change(content: bytes, rng: Random) -> bytes:
        end = 8 + length_of_header(content)
        header = json.loads(content[8:end])
        name = rng.choice([name for name in header if name != "__metadata__"])
        text = edit(header, name) or json.dumps(header)
        return len(text).to_bytes(8, "little") + text.encode() + content[end:]

    return edit_bytes(change)


def entry(field: str, value: Any) -> Damage:
    return edit_header(lambda header, name: header[name].update({field: value}))


def header_length(change: Callable[[int], int]) -> Damage:
    """Write another length of the header, which stays as it is."""

    def edit(content: bytes, rng: Random) -> bytes:
        length = change(length_of_header(content))
        return length.to_bytes(8, "little") + content[8:]

    return edit_bytes(edit)


@edit_bytes
def flip_header_bit(content: bytes, rng: Random) -> bytes:
    flipped = bytearray(content)
    place = rng.randrange(8 + length_of_header(content))
    bit = rng.randrange(8)
    flipped[place] ^= 1 << bit
    return bytes(flipped)


def repeat_tensor(header: dict[str, Any], name: str) -> str:
    """Return a header in which a tensor has two entries, which a dictionary cannot hold."""
    entry = f"{json.dumps(name)}: {json.dumps(header[name])}"
    return f"{{{entry}, {json.dumps(header)[1:]}"


def repeat_key(file: str) -> Damage:
    """Write the file's first key twice, with another value."""

    def damage(folder: Path, rng: Random) -> None:
        record = json.loads((folder / file).read_text())
        first = next(iter(record))
        (folder / file).write_text(f"{{{json.dumps(first)}: 1, {json.dumps(record)[1:]}")

    return damage


def file_of(module: ModuleType) -> str:
    """Return the name of a module's file, which exports carry."""
    return Path(str(module.__file__)).name


def link_out(file: str) -> Damage:
    """Move a file out of the folder, with a link to it in its place."""

    def damage(folder: Path, rng: Random) -> None:
        outside = folder.parent / f"outside-{file}"
        shutil.move(folder / file, outside)
        (folder / file).symlink_to(outside)

    return damage


def plant_pickle(file: str) -> Damage:
    def damage(folder: Path, rng: Random) -> None:
        bomb = Bomb(folder.parent / CANARY)
        (folder / file).write_bytes(pickle.dumps(bomb))

    return damage


def only_a_pickle(folder: Path, rng: Random) -> None:
    for file in [*shards(folder), folder / INDEX]:
        file.unlink()
    plant_pickle("pytorch_model.bin")(folder, rng)


def plant_code(file: str, auto_map: str | None = None) -> Damage:
    def damage(folder: Path, rng: Random) -> None:
        old = (folder / file).read_text() if (folder / file).exists() else ""
        (folder / file).write_text(old + "\n" + evil_code(folder))
        if auto_map is not None:
            set_field("config.json", "auto_map", "AutoModelForCausalLM", auto_map)(folder, rng)

    return damage


def remove(pattern: str) -> Damage:
    def damage(folder: Path, rng: Random) -> None:
        files = list(folder.glob(pattern))
        assert files, f"no {pattern} in {folder}: nothing is damaged"
        for file in files:
            file.unlink()

    return damage


def move_weight(folder: Path, rng: Random) -> None:
    """List a tensor in another file."""
    files = [file.name for file in shards(folder)]
    index = json.loads((folder / INDEX).read_text())
    name = rng.choice(sorted(index["weight_map"]))
    files.remove(index["weight_map"][name])
    index["weight_map"][name] = files[0]
    (folder / INDEX).write_text(json.dumps(index))


def in_two_files(folder: Path, rng: Random) -> None:
    first, second, *_ = shards(folder)
    tensors = load_file(first)
    name = next(iter(tensors))
    with_one_more = {**load_file(second), name: tensors[name]}
    save_file(with_one_more, second, metadata={"format": "pt"})


def config_edits() -> Iterator[tuple[str, Damage]]:
    bad_sizes: list[Any] = [0, -1, HUGE**2, "64", 64.5, True, [64], float("nan"), None]
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"):
        for value in bad_sizes:
            yield f"{name}={value}", set_field("config.json", "backbone", name, value)
    other: list[tuple[str, list[Any]]] = [
        ("intermediate_size", [HUGE, -96, 97]),
        ("num_key_value_heads", [0, 3, HUGE, 2]),
        ("head_dim", [-8, HUGE, 4]),
        ("max_position_embeddings", [-1, "many"]),
        ("rms_norm_eps", [float("nan"), -1, "small", float("inf")]),
        ("rope_theta", [0, -1.0, "far"]),
        ("hidden_act", ["no_such_function", 7]),
        ("num_labels", [HUGE]),
        ("attention_dropout", [-0.5, 2]),
        ("tie_word_embeddings", ["yes"]),
        ("attention_bias", [True]),
        ("pad_token_id", [10**6, "x"]),
        ("model_type", ["no_such_model", "bert", ["llama"], "hybrid_distill"]),
        ("attn_implementation", ["somebody/kernel"]),
        ("rope_parameters", ["far", {"rope_type": "no_such_type"}]),
        ("id2label", [{str(i): "x" for i in range(20000)}]),
        ("initializer_range", [float("inf")]),
    ]
    for name, values in other:
        for value in values:
            yield (
                f"{name}={str(value)[:20]}",
                set_field("config.json", "backbone", name, value),
            )
    top: list[tuple[str, list[Any]]] = [
        ("d_state", [0, -8, HUGE, "8", 8.5, True, 16]),
        ("conv_width", [0, HUGE, "4", 5]),
        ("model_type", ["llama", 3]),
        (
            "kept",
            [
                None,
                "all",
                [],
                [[0]],
                [[1], [2, 3, 7], [], []],
                [[1], [3, 2, 7], []],
                [[1], [2, 3, 8], []],
                [[1], [2, 3, -1], []],
                [[1.0], [2, 3, 7], []],
                [[2], [2, 3, 7], []],
                [[0]] * 10**5,
            ],
        ),
        ("backbone", [None, [], "llama", {}]),
        ("dtype", [None, "float99", "int8", "bfloat16"]),
        ("eos_token_id", ["x", 1.5]),
        ("tie_word_embeddings", [True, "yes"]),
        ("attn_implementation", ["a/kernel"]),
        ("hidden_size", [32]),
        ("vocab_size", [HUGE, 299]),
        ("num_labels", [-1, HUGE]),
    ]
    for name, values in top:
        for value in values:
            yield f"top {name}={str(value)[:20]}", set_field("config.json", name, value)
    for value in (
        "../evil.Model",
        "/tmp/evil.Model",
        "somebody/repo--evil.Model",
        "evil.Model",
        "evil",
        7,
        ["x.Y"],
    ):
        yield (
            f"auto_map={value}",
            set_field("config.json", "auto_map", "AutoModelForCausalLM", value),
        )


def broken_json(file: str) -> Iterator[tuple[str, Damage]]:
    texts = {
        "empty": "",
        "null": "null",
        "list": "[]",
        "cut": '{"a": [1, 2',
        "nan": '{"a": NaN}',
        "binary": b"\xff\xfe\x00{",
        "deep": '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}",
        "junk": "{} x",
    }
    for kind, text in texts.items():
        yield f"{file} {kind}", write(file, text)
    yield f"{file} key twice", repeat_key(file)


def index_edits() -> Iterator[tuple[str, Damage]]:
    yield "index without map", edit_json(INDEX, lambda record: {"metadata": {}})
    yield "index with an empty map", set_field(INDEX, "weight_map", {})
    yield (
        "index lists one more",
        set_field(INDEX, "weight_map", "model.layers.9.weight", "model-9.safetensors"),
    )
    yield (
        "index lists one less",
        edit_json(INDEX, lambda record: record["weight_map"].popitem() and None),
    )
    yield "index has a tensor elsewhere", move_weight
    for value in (
        "../w.safetensors",
        "/w.safetensors",
        "a/w.safetensors",
        "..\\w.safetensors",
        "w.bin",
        7,
        "..",
        "",
    ):
        yield f"index -> {value}", set_field(INDEX, "weight_map", "lm_head.weight", value)


def weight_edits() -> Iterator[tuple[str, Damage]]:
    for share in (0, 0.0001, 0.001, 0.01, 0.1, 0.5, 0.9, 1.0):
        yield f"cut to {share:.2%}", cut(share)
    for i in range(40):
        yield f"bit {i} flipped in a header", flip_header_bit
    lengths: dict[str, Callable[[int], int]] = {
        "huge": lambda n: 2**63,
        "all ones": lambda n: 2**64 - 1,
        "0": lambda n: 0,
        "+1": lambda n: n + 1,
        "-1": lambda n: n - 1,
        "+8": lambda n: n + 8,
    }
    for what, change in lengths.items():
        yield f"header length {what}", header_length(change)
    entries: list[tuple[str, Any]] = [
        ("shape", [-1, 64]),
        ("shape", "64"),
        ("shape", [64.0, 64]),
        ("shape", [0, 2**62]),
        ("shape", [True]),
        ("dtype", "F31"),
        ("dtype", "f32"),
        ("dtype", None),
        ("dtype", "I32"),
        ("data_offsets", [4, 0]),
        ("data_offsets", [0]),
        ("data_offsets", [2**62, 2**62 + 4]),
        ("data_offsets", [0.5, 4]),
        ("extra", 1),
        ("dtype", ["F32"]),
    ]
    for field, value in entries:
        yield f"header {field}={value}", entry(field, value)
    yield "header names a tensor twice", edit_header(repeat_tensor)
    yield "header is a list", edit_header(lambda header, name: "[]")
    yield "header is deep", edit_header(lambda header, name: '{"a":' * 10**5)
    yield (
        "header lacks a tensor",
        edit_header(lambda header, name: header.pop(name) and None),
    )
    yield (
        "metadata of another format",
        edit_header(lambda header, name: header.update(__metadata__={"format": "np"})),
    )
    yield (
        "bytes after the tensors",
        lambda folder, rng: shards(folder)[0].open("ab").write(b"\0" * 8) and None,
    )
    for i in range(3):
        yield f"tensor missing {i}", edit_tensors(lambda held, name: held.pop(name))
        yield f"tensor renamed {i}", edit_tensors(rename)
        yield (
            f"tensor too many {i}",
            edit_tensors(lambda held, name: held.update(extra=torch.zeros(2, 2))),
        )
        yield f"wrong shape {i}", edit_tensor(lambda tensor: tensor[:, 1:].clone())
        yield f"flat {i}", edit_tensor(lambda tensor: tensor.flatten())
    for value in (float("nan"), float("inf"), float("-inf")):
        for i in range(3):
            yield f"{value} {i}", one_number(value)
    for dtype in (
        torch.float16,
        torch.bfloat16,
        torch.float64,
        torch.int32,
        torch.uint8,
        torch.float8_e4m3fn,
    ):
        yield str(dtype), as_dtype(dtype)
    yield "tensor in two files", in_two_files


def file_edits() -> Iterator[tuple[str, Damage]]:
    for file in (
        "model.bin",
        "pytorch_model.bin",
        "a.pt",
        "x.PKL",
        "gate/x.pickle",
        "optimizer.pt",
        "x.npy",
    ):
        yield f"planted {file}", plant_pickle(file)
    yield "only a pickle", only_a_pickle
    yield "planted evil.py", plant_code("evil.py")
    yield "planted evil.py, in auto_map", plant_code("evil.py", "evil.Model")
    yield "planted tokenization.py", plant_code("tokenization.py")
    for module in (modeling_hybrid, configuration_hybrid, documents, ssd):
        file = file_of(module)
        yield f"code in {file}", plant_code(file)
    yield "no config", remove("config.json")
    yield "no weights", remove("model-*.safetensors")
    yield "one shard gone", remove("model-00002*")
    yield "index gone", remove(INDEX)
    yield "code gone", remove(file_of(modeling_hybrid))
    yield "tokenizer.json gone", remove("tokenizer.json")
    for file in ("config.json", INDEX, "tokenizer.json", file_of(ssd)):
        yield f"link out: {file}", link_out(file)
    yield (
        "folder linked out",
        lambda folder, rng: (folder / "more").symlink_to(folder.parent),
    )
    yield (
        "adapter",
        write("adapter_config.json", '{"base_model_name_or_path": "somebody/model"}'),
    )
    yield (
        "weights besides",
        lambda folder, rng: shutil.copy(shards(folder)[0], folder / "other.safetensors") and None,
    )
    yield "tokenizer.json cut", write("tokenizer.json", '{"version": "1.0", "trunc')
    yield "tokenizer.json empty", write("tokenizer.json", "{}")
    yield (
        "tokenizer code",
        set_field("tokenizer_config.json", "auto_map", {"AutoTokenizer": ["../evil.T", None]}),
    )
    yield (
        "tokenizer file",
        set_field("tokenizer_config.json", "vocab_file", "/etc/hostname"),
    )
    yield "training.json cut", write("training.json", '{"stages": [{"na')
    yield "another plan", set_field("plan.json", "kept", [[0, 0]])


def all_damages() -> dict[str, Damage]:
    """Return every damage by name."""
    edits = [*config_edits(), *weight_edits(), *index_edits(), *file_edits()]
    for file in (
        "config.json",
        INDEX,
        "tokenizer_config.json",
        "plan.json",
        "generation_config.json",
    ):
        edits += broken_json(file)
    damages = dict(edits)
    assert len(damages) == len(edits), "two damages have one name"
    return damages
