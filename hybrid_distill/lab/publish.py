"""The command ``hybrid-distill publish``: an export goes to the Hugging Face hub, and nothing else does."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.utils import validate_repo_id

from ..export.card import UNKNOWN
from ..export.gate import verify_export
from ..guard import VOCABULARIES, check_checkpoint

PUBLISHED = (
    "*.safetensors", "model.safetensors.index.json", "config.json", "generation_config.json", "tokenizer*.json",
    "tokenizer.model", "vocab.json", "merges.txt", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "*.py", "README.md", "LICENSE*", "NOTICE*", "plan.json", "head_scores.json",
    "evaluation.json", "training.json",
    "gate/check.py", "gate/reference.json", "gate/reference.safetensors", "gate/report.json",
)  # fmt: skip
"""All that an export is made of; whatever else lies in its folder is a reason to stop."""
SECRETS = {
    "an access token": re.compile(
        rb"\b(hf_[A-Za-z0-9]{30,}|gh[pousr]_[A-Za-z0-9]{36,}|github_pat_\w{22,}|sk-[\w-]{32,}|AKIA[0-9A-Z]{16}|glpat-[\w-]{20,})"
    ),
    "a private key": re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----"),
}
HOMES = re.compile(rb"(/home/|/Users/|/root/|[A-Za-z]:\\+Users\\+)[^\s\"']*")
UNNAMED = (UNKNOWN, "other")


def publish(folder: Path, repo: str, *, public: bool = False, dry_run: bool = False) -> str:
    """Upload an export to ``repo``, which is made if it does not exist, private unless ``public``.

    What was uploaded, as text; with ``dry_run`` what would be, and the model card, without a network. Raises
    ValueError for a folder that `check_checkpoint` refuses or that did not pass its gate, a file that is no part of an
    export, and a token or a home path in one; ExportError when the folder is not what was exported.
    """
    if "/" not in repo:
        raise ValueError(f"the repository is {repo!r}; name it with its owner, OWNER/NAME.")
    validate_repo_id(repo)
    check_checkpoint(folder, numbers=False)  # verify_export looks at them
    files = publishable(folder)
    listing = _listing(folder, files)
    verify_export(folder).require(folder)
    if dry_run:
        card = (folder / "README.md").read_text()
        return f"would go to {repo}:\n{listing}\n\n{card}\nEvery check holds. This was a dry run: nothing was uploaded."
    hub = HfApi()
    hub.create_repo(repo, private=not public, exist_ok=True)
    names = [path.relative_to(folder).as_posix() for path in files]
    hub.upload_folder(repo_id=repo, folder_path=folder, allow_patterns=names, commit_message="Export")
    return f"went to {repo}:\n{listing}"


def publishable(folder: Path) -> list[Path]:
    """The files of an export, each looked into. Raises ValueError as `publish` does."""
    report = folder / "gate" / "report.json"
    if not report.is_file() or json.loads(report.read_text()).get("ok") is not True:
        raise ValueError(f"{folder} has not passed the export gate (gate/report.json); export it again.")
    files = sorted(path for path in folder.rglob("*") if not path.is_dir())
    for path in files:
        name = path.relative_to(folder).as_posix()
        if not any(fnmatch(name, pattern) and name.count("/") == pattern.count("/") for pattern in PUBLISHED):
            raise ValueError(f"{path} is no part of an export, and nothing else is published; remove it.")
        for found in _findings(path, folder):
            raise ValueError(f"{path} holds {found}, which would be public; remove it, or export again.")
    return files


def _findings(path: Path, folder: Path) -> Iterator[str]:
    content = _header(path) if path.suffix == ".safetensors" else path.read_bytes()
    yield from (f"what looks like {what}" for what, pattern in SECRETS.items() if pattern.search(content))
    for place in (Path.home(), folder.resolve()):
        if len(place.parts) > 1 and f"{place}/".encode() in content:
            yield f"the path {place} of this machine"
    if path.name not in VOCABULARIES and (home := HOMES.search(content)):
        yield f"the path {home[0].decode(errors='replace')}"


def _header(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(int.from_bytes(file.read(8), "little"))


def _licence(folder: Path) -> str:
    front_matter = re.search(r"^license: *(\S+)$", (folder / "README.md").read_text(), re.MULTILINE)
    return front_matter[1] if front_matter else UNKNOWN


def _listing(folder: Path, files: list[Path]) -> str:
    sizes = [path.stat().st_size for path in files]
    lines = [f"{size:>14,}  {path.relative_to(folder).as_posix()}" for path, size in zip(files, sizes, strict=True)]
    lines.append(f"{sum(sizes):>14,}  bytes in {len(files)} files")
    if _licence(folder) in UNNAMED:
        lines.append("The teacher's licence is not known: find out whether you may publish this; say it in the card.")
    return "\n".join(lines)
