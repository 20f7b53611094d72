"""Check exports with the transformers that this process has, for `versions.py`.

    python benchmarks/versions_worker.py RESULTS.jsonl FOLDER ...

One line of JSON for each export, written as it is found. Nothing of the package is imported: exports must not need it.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import torch


def check_all(results: Path, folders: list[Path]) -> None:
    """Run each export's own program."""
    torch.set_num_threads(1)
    with results.open("a") as out:
        for folder in folders:
            program = load_program(folder / "gate" / "check.py")
            reference = json.loads((folder / "gate" / "reference.json").read_text())
            if reference["export_format"] != "safetensors":
                # None in its place makes an import of a package fail.
                sys.modules.update(dict.fromkeys(program.FORBIDDEN_PACKAGES))
            rows = []
            for check in program.run_checks(folder, folder / "gate"):
                rows.append([check.name, check.measured, check.limit, check.detail])
            out.write(json.dumps([folder.name, rows]) + "\n")
            # What was found must be there if a later export ends the process.
            out.flush()


def load_program(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_export", path)
    assert spec is not None and spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    # Before it is run: its dataclasses look their module up.
    sys.modules[spec.name] = program
    spec.loader.exec_module(program)
    return program


if __name__ == "__main__":
    check_all(Path(sys.argv[1]), [Path(folder) for folder in sys.argv[2:]])
