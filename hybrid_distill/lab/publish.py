"""Upload of an export, and nothing else, to the Hugging Face hub."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.utils import validate_repo_id
from safetensors import safe_open

from ..export.card import UNKNOWN, on_card
from ..export.check import PACKAGES
from ..export.gate import form_of, verify_export
from ..guard import VOCABULARIES, check_checkpoint
from ..io import read_json

PUBLISHED = (
    "*.safetensors", "model.gguf", "model.onnx", "model.onnx.data",
    "model.safetensors.index.json", "config.json", "generation_config.json", "tokenizer*.json",
    "tokenizer.model", "vocab.json", "merges.txt", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "*.py", "README.md", "LICENSE*", "NOTICE*", "plan.json", "head_scores.json",
    "evaluation.json", "training.json",
    "gate/*.py", "gate/reference.json", "gate/reference.safetensors", "gate/report.json",
)  # fmt: skip
"""Files of an export; any other file in its folder stops the upload."""
BINARY = (".gguf", ".onnx", ".data")
"""Suffixes of weight files that are not searched; their tokenizer data is also in text files, which are."""
SECRETS = {
    "an access token": re.compile(
        rb"\b(hf_[A-Za-z0-9]{30,}|gh[pousr]_[A-Za-z0-9]{36,}|github_pat_\w{22,}|sk-[\w-]{32,}|AKIA[0-9A-Z]{16}|glpat-[\w-]{20,})"
    ),
    "a private key": re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----"),
}
HOMES = re.compile(rb"(/home/|/Users/|/root/|[A-Za-z]:\\+Users\\+)[^\s\"']*")


def publish(folder: Path, repo: str, *, public: bool = False, dry_run: bool = False) -> str:
    """Upload an export to ``repo``, which is created if it does not exist, private unless ``public``.

    Returns a list of the files; with ``dry_run``, uploads nothing, needs no network and adds the model card. Raises
    ValueError for a folder that `check_checkpoint` rejects or that did not pass its gate, a file that is not part of an
    export, and an access token, private key or home path in a file; ExportError if the export has changed.
    """
    if "/" not in repo:
        raise ValueError(f"the repository is {repo!r}; pass it with its owner, OWNER/NAME.")
    validate_repo_id(repo)
    if form_of(folder) not in PACKAGES:  # otherwise verify_export compares every file
        check_checkpoint(folder, numbers=False)  # verify_export checks them
    files = publishable(folder)
    listing = _listing(folder, files)
    verify_export(folder).require(folder)
    if dry_run:
        card = (folder / "README.md").read_text()
        return f"would upload to {repo}:\n{listing}\n\n{card}\nAll checks passed. Dry run: nothing was uploaded."
    hub = HfApi()
    hub.create_repo(repo, private=not public, exist_ok=True)
    names = [path.relative_to(folder).as_posix() for path in files]
    hub.upload_folder(repo_id=repo, folder_path=folder, allow_patterns=names, commit_message="Export")
    return f"uploaded to {repo}:\n{listing}"


def publishable(folder: Path) -> list[Path]:
    """List the files of an export after searching each for secrets. Raises ValueError as `publish` does."""
    report = folder / "gate" / "report.json"
    if not report.is_file() or read_json(report).get("ok") is not True:
        raise ValueError(
            f"{folder} has not passed the export gate (gate/report.json); export it again, where the "
            "program that runs it is installed."
        )
    files = sorted(path for path in folder.rglob("*") if not path.is_dir())
    for path in files:
        name = path.relative_to(folder).as_posix()
        if not any(fnmatch(name, pattern) and name.count("/") == pattern.count("/") for pattern in PUBLISHED):
            raise ValueError(f"{path} is not part of an export, and nothing else is published; remove it.")
        for found in _findings(path, folder):
            raise ValueError(f"{path} holds {found}, which would be public; remove it, or export again.")
    return files


def _findings(path: Path, folder: Path) -> Iterator[str]:
    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt") as file:
            content = json.dumps([file.metadata(), [*file.keys()]]).encode()
    else:
        content = b"" if path.suffix in BINARY else path.read_bytes()
    yield from (f"what looks like {what}" for what, pattern in SECRETS.items() if pattern.search(content))
    for place in (Path.home(), folder.resolve()):
        if len(place.parts) > 1 and f"{place}/".encode() in content:
            yield f"the path {place} of this machine"
    if path.name not in VOCABULARIES and (home := HOMES.search(content)):
        yield f"the path {home[0].decode(errors='replace')}"


def _listing(folder: Path, files: list[Path]) -> str:
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}
    lines = [f"{size:>14,}  {name}" for name, size in sizes.items()]
    lines.append(f"{sum(sizes.values()):>14,}  bytes in {len(files)} files")
    if on_card(folder / "README.md")[0] in (UNKNOWN, "other"):
        lines.append("The teacher's license is unknown: check that you may publish this, and name it in the card.")
    return "\n".join(lines)
