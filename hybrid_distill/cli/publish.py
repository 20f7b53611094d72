"""`hybrid-distill publish`: an export, and nothing else, goes to the Hugging Face hub."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import tyro
from huggingface_hub import HfApi
from huggingface_hub.utils import validate_repo_id
from safetensors import safe_open

from ..export.card import UNKNOWN, on_card
from ..export.gate import verify_export
from ..guard import VOCABULARIES, check_checkpoint
from ..io import read_json

PUBLISHED = (
    "*.safetensors", "model.safetensors.index.json", "config.json", "generation_config.json", "tokenizer*.json",
    "tokenizer.model", "vocab.json", "merges.txt", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "*.py", "README.md", "LICENSE*", "NOTICE*", "plan.json", "head_scores.json",
    "evaluation.json", "training.json",
    "gate/check.py", "gate/reference.json", "gate/reference.safetensors", "gate/report.json",
)  # fmt: skip
"""Files of an export; another file in its folder is a reason to stop."""
SECRETS = {
    "an access token": re.compile(
        rb"\b(hf_[A-Za-z0-9]{30,}|gh[pousr]_[A-Za-z0-9]{36,}|github_pat_\w{22,}|sk-[\w-]{32,}|AKIA[0-9A-Z]{16}|glpat-[\w-]{20,})"
    ),
    "a private key": re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----"),
}
HOMES = re.compile(rb"(/home/|/Users/|/root/|[A-Za-z]:\\+Users\\+)[^\s\"']*")


def publishable(folder: Path) -> list[Path]:
    """List the files of an export after a look into each.

    Raises ValueError for a folder that did not pass its gate, a file that is not part of an export, and a token or a
    home path in one.
    """
    report = folder / "gate" / "report.json"
    if not report.is_file() or read_json(report).get("ok") is not True:
        raise ValueError(f"{folder} has not passed the export gate (gate/report.json); export it again.")
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
        content = path.read_bytes()
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
        lines.append("The teacher's license is not known: find out whether you may publish this; say it in the card.")
    return "\n".join(lines)


def command(path: tyro.conf.Positional[Path], /, push_to_hub: str, public: bool = False, dry_run: bool = False) -> None:
    """Upload an export to the Hugging Face hub, once nothing is found in it that does not belong there.

    Args:
        path: The folder of the export.
        push_to_hub: The repository, OWNER/NAME; it is created if it does not exist.
        public: Make a new repository public, not private.
        dry_run: Upload nothing: print the files, their sizes and the model card. Needs no network.
    """
    if "/" not in push_to_hub:
        raise ValueError(f"the repository is {push_to_hub!r}; pass it with its owner, OWNER/NAME.")
    validate_repo_id(push_to_hub)
    check_checkpoint(path, numbers=False)  # verify_export looks at them
    files = publishable(path)
    listing = _listing(path, files)
    verify_export(path).require(path)
    if dry_run:
        card = (path / "README.md").read_text()
        print(f"would go to {push_to_hub}:\n{listing}\n\n{card}")
        print("Every check holds. This was a dry run: nothing was uploaded.")
        return
    hub = HfApi()
    hub.create_repo(push_to_hub, private=not public, exist_ok=True)
    names = [file.relative_to(path).as_posix() for file in files]
    hub.upload_folder(repo_id=push_to_hub, folder_path=path, allow_patterns=names, commit_message="Export")
    print(f"went to {push_to_hub}:\n{listing}")
