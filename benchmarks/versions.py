"""From which transformers on an export computes what it computed here: every supported family, every form.

    pip install --target OTHERS/5.0.0 transformers==5.0.0     # and so on; torch stays the one that is here
    python benchmarks/versions.py OTHERS

Exports a tiny random student that keeps some heads of every model type that benchmarks/results/families.json has as
supported, and students in the forms falcon-h1 and safetensors. Each export's own program then checks it in one process
per version: tensors, logits, cached decoding, padding, generated tokens, tokenizer. Writes what was found to
benchmarks/results/versions.json and docs/families.md, and the oldest version from which on all are right to the table
that exports take theirs from (hybrid_distill/export/versions.json). ``--model`` checks exports that exist, and writes
nothing.
"""

from __future__ import annotations

import datetime
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# `check_all` runs where the package must not be imported: so nothing of it, nor of what imports it, at the top.
HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RECORD = HERE / "results" / "versions.json"
FAMILIES = HERE / "results" / "families.json"
OLDEST = ROOT / "hybrid_distill" / "export" / "versions.json"
FORMS = ("falcon-h1", "safetensors")
# Checks whose figures are kept; of a check's name, what stands before the first comma.
FIGURES = (
    "reloaded = exported model",
    "cached decode = full forward",
    "left-padded batch = single prompts",
)


def check_all(folders: list[str], results: Path) -> None:
    """Check exports with the transformers that this process has; one line of JSON each, written as it is found."""
    import torch

    torch.set_num_threads(1)
    with results.open("a") as out:
        for folder in map(Path, folders):
            spec = importlib.util.spec_from_file_location(
                "check_export", folder / "gate" / "check.py"
            )
            assert spec is not None and spec.loader is not None
            program = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = program
            spec.loader.exec_module(program)
            if (
                json.loads((folder / "gate" / "reference.json").read_text()).get("form")
                != "safetensors"
            ):
                sys.modules.update(
                    dict.fromkeys(program.FORBIDDEN_PACKAGES)
                )  # importing them fails
            checks = program.run_checks(folder, folder / "gate")
            out.write(
                json.dumps([folder.name, [[c.name, c.measured, c.limit, c.detail] for c in checks]])
                + "\n"
            )
            out.flush()


def checked(
    others: Path | None, folders: list[Path], needs_package: bool
) -> dict[str, dict[str, Any]]:
    """Run `check_all` in a process with the transformers of the folder ``others``; results by export."""
    with tempfile.TemporaryDirectory() as scratch:
        results = Path(scratch) / "results.jsonl"
        results.touch()
        path = []
        if others is not None:
            path.append(str(others))
        if needs_package:
            path += [str(ROOT), str(ROOT / "kernels")]
        variables = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path),
            "HF_MODULES_CACHE": f"{scratch}/modules",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_VERBOSITY": "error",
        }
        command = [sys.executable, __file__, "--check", str(results), *map(str, folders)]
        run = subprocess.run(command, cwd=scratch, env=variables, capture_output=True, text=True)
        by_export = dict(json.loads(line) for line in results.read_text().splitlines())
    last_words = run.stderr.strip().splitlines()[-1:] if run.returncode else []
    return {folder.name: summary(by_export.get(folder.name), last_words) for folder in folders}


def summary(checks: list[list[Any]] | None, died: list[str]) -> dict[str, Any]:
    """Return whether all checks hold, the figures, and the first failed check."""
    if checks is None:
        return {"right": False, "reason": f"the process ended: {' '.join(died)}"[:300]}
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


def make_exports(scratch: Path, only: list[str]) -> dict[str, list[Path]]:
    """Return folders of exports by form, of which nothing says how old a transformers may be."""
    sys.path.append(str(ROOT / "tests"))
    import families
    from students import byte_tokenizer, tiny_student
    from tqdm.auto import tqdm

    from hybrid_distill.export import export_checkpoint, gate

    # More would take hours, over all families and versions.
    gate.PROMPT_LENGTHS = (5, 24)
    gate.NEW_TOKENS = 8
    recorded = json.loads(FAMILIES.read_text())["families"]
    supported = [name for name, rows in recorded.items() if rows[0]["status"] == "supported"]
    made: dict[str, list[Path]] = {form: [] for form in ("remote-code", *FORMS)}
    for model_type in tqdm(
        [name for name in supported if not only or name in only], desc="exports"
    ):
        teacher = families.tiny_teacher(model_type)
        plan = families.keep_some(teacher)
        student = families.make_student(teacher, plan)
        made["remote-code"].append(scratch / model_type)
        export_checkpoint(
            student, None, scratch / model_type, plan=plan, gate=False, max_shard_size="100KB"
        )
    for form in FORMS if not only else ():
        for family in ("llama", "qwen2"):
            student, plan = tiny_student(family, recurrence="mamba2")
            made[form].append(scratch / f"{family}, {form}")
            export_checkpoint(
                student, byte_tokenizer(), made[form][-1], plan=plan, export_format=form, gate=False
            )
    for folders in made.values():
        for folder in folders:
            forget_version(folder / "config.json")
    return made


def forget_version(file: Path) -> None:
    """Remove the version that an export would refuse an older one by."""
    config = json.loads(file.read_text())
    config.pop("checked_transformers", None)
    file.write_text(json.dumps(config))


def oldest_right(results: dict[str, dict[str, Any]]) -> str | None:
    """Return the oldest version from which on every version tried is right; ``results`` go from new to old."""
    oldest = None
    for version, result in results.items():
        if not result["right"]:
            break
        oldest = version
    return oldest


def main() -> int:
    from records import device_name, parser_of

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

    import torch
    import transformers

    from hybrid_distill.model.configuration_hybrid import release

    torch.set_num_threads(1)
    versions: dict[str, Path | None] = {
        path.name: path for path in options.others.iterdir() if path.is_dir()
    }
    versions[transformers.__version__] = None
    results: dict[str, dict[str, dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as name:
        if options.model:
            exports: dict[str, list[Path]] = {form: [] for form in ("remote-code", *FORMS)}
            for folder in options.model:
                form = json.loads((folder / "gate" / "reference.json").read_text()).get(
                    "form", "remote-code"
                )
                exports[form].append(folder.resolve())
        else:
            exports = make_exports(Path(name), options.only)
        for version in sorted(versions, key=release, reverse=True):
            alone = checked(versions[version], exports["remote-code"] + exports["falcon-h1"], False)
            ours = (
                checked(versions[version], exports["safetensors"], True)
                if exports["safetensors"]
                else {}
            )
            for export, result in {**alone, **ours}.items():
                results.setdefault(export, {})[version] = result
            wrong = sum(not result["right"] for result in {**alone, **ours}.values())
            print(
                f"transformers {version}: {len(alone) + len(ours) - wrong} right, {wrong} wrong",
                flush=True,
            )

    for export, by_version in results.items():
        wrong = {
            version: result["reason"]
            for version, result in by_version.items()
            if not result["right"]
        }
        print(
            f"{export}: right from {oldest_right(by_version)} on{'' if not wrong else f'; wrong: {wrong}'}"
        )
    if not options.model:
        write(results, transformers.__version__, device_name(), torch.__version__)
    return 0


def write(
    results: Mapping[str, dict[str, dict[str, Any]]], exported_with: str, device: str, torch: str
) -> None:
    """Add results to those on record of other exports, then make the table and the page anew."""
    import families
    from records import read
    from records import write as write_record

    from hybrid_distill.model.configuration_hybrid import release

    results = dict(sorted({**read(RECORD).get("results", {}), **results}.items()))
    record = {
        "what": "exports of tiny random students, checked by other versions of transformers; differences are relative "
        "to the largest logit",
        "device": device,
        "torch": torch,
        "exported_with": exported_with,
        "date": datetime.date.today().isoformat(),
        "results": results,
    }
    write_record(RECORD, record)
    tried = set()
    oldest = {}
    stock = []
    for name, by_version in results.items():
        tried.update(by_version)
        if "," not in name:  # the names of other forms have one
            oldest[name] = oldest_right(by_version)
        if name.endswith(", falcon-h1"):
            stock.append(by_version)
    versions = sorted(tried, key=release)
    right = [
        v
        for v in versions
        if all(by_version.get(v, {"right": False})["right"] for by_version in stock)
    ]
    write_record(OLDEST, {"tried": versions, "oldest": oldest, "falcon-h1": right})
    families.write_page()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--check"]:
        check_all(sys.argv[3:], Path(sys.argv[2]))
    else:
        sys.exit(main())
