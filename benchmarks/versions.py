"""From which transformers on an export computes what it computed here: every supported family, every format.

    pip install --target OTHERS/5.0.0 transformers==5.0.0     # and so on; torch stays the one that is here
    python benchmarks/versions.py OTHERS

Exports a tiny random student that keeps some heads of every model type that benchmarks/results/families.json has as
supported, and students in the formats falcon-h1 and safetensors. Each export's own program then checks it in one
process per version (`versions_worker.py`): tensors, logits, cached decoding, padding, generated tokens, tokenizer.
Writes what was found to benchmarks/results/versions.json and docs/families.md, and the oldest version from which on all
are right to the table that exports take theirs from (hybrid_distill/export/versions.json). ``--model`` checks exports
that exist, and writes nothing.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import families
import torch
import transformers
import versions_worker
from records import RESULTS, ROOT, device_name, parser_of, read, write
from tqdm.auto import tqdm

from hybrid_distill.export import check, export_checkpoint
from hybrid_distill.export import record as gate_record
from hybrid_distill.model.field_rules import release

sys.path.append(str(ROOT / "tests"))
from students import byte_tokenizer, tiny_student

RECORD = RESULTS / "versions.json"
OLDEST = ROOT / "hybrid_distill" / "export" / "versions.json"
OWN_FORMAT = "remote-code"
OTHER_FORMATS = ("falcon-h1", "safetensors")
# Checks whose figures are kept; of a check's name, what stands before the first comma.
FIGURES = (check.RELOADED, check.CACHED, check.PADDED)
Exports = dict[str, list[Path]]
"""Folders by format."""
Result = dict[str, Any]
ByVersion = dict[str, Result]
"""Results of an export, from the newest transformers to the oldest."""


def check_exports(exports: Exports, others: Path | None) -> dict[str, Result]:
    """Check all exports with one transformers, by default this process's; results by export."""
    alone = exports[OWN_FORMAT] + exports["falcon-h1"]
    results = run_worker(others, alone, [])
    if exports["safetensors"]:
        # Plain weights are read by the package itself.
        results |= run_worker(others, exports["safetensors"], [ROOT, ROOT / "kernels"])
    return results


def run_worker(
    others: Path | None, folders: Sequence[Path], sources: list[Path]
) -> dict[str, Result]:
    path = sources if others is None else [others, *sources]
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "results.jsonl"
        file.touch()
        variables = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, path)),
            "HF_MODULES_CACHE": f"{scratch}/modules",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_VERBOSITY": "error",
        }
        command = [sys.executable, versions_worker.__file__, str(file), *map(str, folders)]
        process = subprocess.run(
            command, cwd=scratch, env=variables, capture_output=True, text=True
        )
        checks = dict(map(json.loads, file.read_text().splitlines()))
    last_words = ""
    if process.returncode:
        last_words = process.stderr.strip().rpartition("\n")[2]
    return {folder.name: summary(checks.get(folder.name), last_words) for folder in folders}


def summary(checks: list[list[Any]] | None, last_words: str) -> Result:
    """Return whether all checks hold, the figures, and the first failed check."""
    if checks is None:
        return {"right": False, "reason": f"the process ended: {last_words}"[:300]}
    figures = {}
    wrong = []
    for name, measured, limit, detail in checks:
        kind = name.split(",")[0]
        if kind in FIGURES:
            figures[kind] = measured
        if not measured <= limit:  # NaN is wrong too
            wrong.append(f"{name}: {measured:.1e}. {detail}")
    result = {"right": not wrong, **figures}
    if wrong:
        result["reason"] = " ".join(wrong[0].split())[:300]
    return result


def make_exports(scratch: Path, only: Sequence[str]) -> Exports:
    """Export tiny students, of which nothing says how old a transformers may be."""
    # More would take hours, over all families and versions.
    gate_record.PROMPT_LENGTHS = (5, 24)
    gate_record.NEW_TOKENS = 8
    exports: Exports = {export_format: [] for export_format in (OWN_FORMAT, *OTHER_FORMATS)}
    for model_type in tqdm(only or supported_types(), desc="exports"):
        teacher = families.tiny_teacher(model_type)
        plan = families.keep_some(teacher)
        student = families.make_student(teacher, plan)
        folder = scratch / model_type
        export_checkpoint(student, None, folder, plan=plan, gate=False, max_shard_size="100KB")
        exports[OWN_FORMAT].append(folder)
    other_formats = () if only else OTHER_FORMATS
    for export_format in other_formats:
        for family in ("llama", "qwen2"):
            student, plan = tiny_student(family, recurrence="mamba2")
            folder = scratch / f"{family}, {export_format}"
            export_checkpoint(
                student,
                byte_tokenizer(),
                folder,
                plan=plan,
                export_format=export_format,
                gate=False,
            )
            exports[export_format].append(folder)
    for folders in exports.values():
        for folder in folders:
            forget_version(folder / "config.json")
    return exports


def supported_types() -> list[str]:
    recorded = read(families.RESULTS)["families"]
    return [name for name, rows in recorded.items() if rows[0]["status"] == "supported"]


def existing_exports(folders: Sequence[Path]) -> Exports:
    exports: Exports = {export_format: [] for export_format in (OWN_FORMAT, *OTHER_FORMATS)}
    for folder in folders:
        reference = read(folder / "gate" / "reference.json")
        exports[reference["export_format"]].append(folder.resolve())
    return exports


def forget_version(file: Path) -> None:
    """Remove the version that an export would refuse an older one by."""
    config = json.loads(file.read_text())
    config.pop("checked_transformers", None)
    file.write_text(json.dumps(config))


def oldest_right(results: ByVersion) -> str | None:
    """Return the oldest version from which on every version tried is right; ``results`` go from new to old."""
    oldest = None
    for version, result in results.items():
        if not result["right"]:
            break
        oldest = version
    return oldest


def main() -> None:
    """Check, print, and write unless the exports were there before."""
    parser = parser_of(__doc__)
    parser.add_argument(
        "others", type=Path, help="folder that holds a folder per version of transformers"
    )
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="TYPE", help="these alone; others stay as recorded"
    )
    parser.add_argument(
        "--model", nargs="+", type=Path, default=[], help="exports to check, instead of tiny ones"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    versions: dict[str, Path | None] = {}
    for path in options.others.iterdir():
        if path.is_dir():
            versions[path.name] = path
    versions[transformers.__version__] = None
    results: dict[str, ByVersion] = {}
    with tempfile.TemporaryDirectory() as scratch:
        if options.model:
            exports = existing_exports(options.model)
        else:
            exports = make_exports(Path(scratch), options.only)
        for version in sorted(versions, key=release, reverse=True):
            by_export = check_exports(exports, versions[version])
            n_right = sum(result["right"] for result in by_export.values())
            n_wrong = len(by_export) - n_right
            print(f"transformers {version}: {n_right} right, {n_wrong} wrong", flush=True)
            for export, result in by_export.items():
                results.setdefault(export, {})[version] = result
    for export, by_version in results.items():
        print(f"{export}: right from {oldest_right(by_version)} on")
        for version, result in by_version.items():
            if not result["right"]:
                print(f"  wrong under {version}: {result['reason']}")
    if not options.model:
        record(results)


def record(new: Mapping[str, ByVersion]) -> None:
    """Add results to those on record of other exports, then make the table and the page anew."""
    recorded = read(RECORD).get("results", {})
    results = dict(sorted({**recorded, **new}.items()))
    what = "exports of tiny random students, checked by other versions of transformers"
    head = {
        "what": f"{what}; differences are relative to the largest logit",
        "device": device_name(),
        "torch": torch.__version__,
        "exported_with": transformers.__version__,
        "date": datetime.date.today().isoformat(),
    }
    write(RECORD, {**head, "results": results})
    tried = set()
    oldest = {}
    falcon = []
    for name, by_version in results.items():
        tried.update(by_version)
        if "," not in name:  # the names of other formats have one
            oldest[name] = oldest_right(by_version)
        if name.endswith(", falcon-h1"):
            falcon.append(by_version)
    versions = sorted(tried, key=release)
    right = [version for version in versions if all(is_right(each, version) for each in falcon)]
    write(OLDEST, {"tried": versions, "oldest": oldest, "falcon-h1": right})
    families.write_page()


def is_right(by_version: ByVersion, version: str) -> bool:
    return version in by_version and by_version[version]["right"]


if __name__ == "__main__":
    main()
