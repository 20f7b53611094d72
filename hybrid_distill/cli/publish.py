"""`hybrid-distill publish`: upload of an export to the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

import tyro

from ..lab.publish import publish


def command(path: tyro.conf.Positional[Path], /, push_to_hub: str, public: bool = False, dry_run: bool = False) -> None:
    """Upload an export to the Hugging Face hub, unless it contains other files, secrets or home paths.

    Args:
        path: The folder of the export.
        push_to_hub: The repository, OWNER/NAME; it is created if it does not exist.
        public: Make a new repository public instead of private.
        dry_run: Upload nothing: print the files, their sizes and the model card. Needs no network.
    """
    print(publish(path, push_to_hub, public=public, dry_run=dry_run))
