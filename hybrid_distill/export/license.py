"""License and name of a teacher, for the model card of an export, read from the teacher's own card."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import ModelCard
from huggingface_hub.constants import REPO_ID_SEPARATOR

from ..teacher import TINY

UNKNOWN = "unknown"
"""The hub's identifier for a license that is not known."""


def license_and_name(teacher: str) -> tuple[str, str]:
    """Return a teacher's license, from its model card, and its name, for `export_checkpoint`.

    The license is `UNKNOWN` if the card cannot be read or names none.
    """
    if teacher == TINY:
        return "apache-2.0", ""
    folder = Path(teacher).expanduser()
    if folder.is_dir():
        license, _ = read_license_and_base(folder / "README.md")
        folder = folder.resolve()
        return license, _hub_id(folder) or folder.name
    license, _ = read_license_and_base(teacher)
    return license, teacher


def _hub_id(folder: Path) -> str:
    """Return the hub's name of a folder in its cache (models--ORG--NAME/snapshots/COMMIT); else ""."""
    kind, _, name = folder.parent.parent.name.partition(REPO_ID_SEPARATOR)
    if folder.parent.name != "snapshots" or kind != "models":
        return ""
    return name.replace(REPO_ID_SEPARATOR, "/", 1)


def read_license_and_base(card: str | Path) -> tuple[str, str]:
    """Read (license, base_model) from a model card: a file or a hub id."""
    try:
        fields = ModelCard.load(card, ignore_metadata_errors=True).data.to_dict()
    except Exception:  # no file, no network, or a header that YAML or ModelCard rejects
        fields = {}
    base_model = fields.get("base_model") or ""
    if isinstance(base_model, list):
        # The hub's form for merges of several models.
        base_model = base_model[0]
    return fields.get("license") or UNKNOWN, base_model
