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

import argparse
import datetime
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
RESULTS = HERE / "results" / "versions.json"
FAMILIES = HERE / "results" / "families.json"
OLDEST = ROOT / "hybrid_distill" / "export" / "versions.json"
FORMS = ("falcon-h1", "safetensors")
# Checks whose figures are kept; of a check's name, what stands before the first comma.
FIGURES = ("reloaded = exported model", "cached decode = full forward", "left-padded batch = single prompts")


def check_all(folders: list[str], results: Path) -> None:
    """Check exports with the transformers that this process has; one line of JSON each, written as it is found."""
    import torch

    torch.set_num_threads(1)
    with results.open("a") as out:
        for folder in map(Path, folders):
            spec = importlib.util.spec_from_file_location("check_export", folder / "gate" / "check.py")
            assert spec is not None and spec.loader is not None
            program = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = program
            spec.loader.exec_module(program)
            if json.loads((folder / "gate" / "reference.json").read_text()).get("form") != "safetensors":
                sys.modules.update(dict.fromkeys(program.FORBIDDEN_PACKAGES))  # importing them fails
            checks = program.run_checks(folder, folder / "gate")
            out.write(json.dumps([folder.name, [[c.name, c.measured, c.limit, c.detail] for c in checks]]) + "\n")
            out.flush()


def checked(others: Path | None, folders: list[Path], needs_package: bool) -> dict[str, dict[str, Any]]:
    """Run `check_all` in a process with the transformers of the folder ``others``; results by export."""
    with tempfile.TemporaryDirectory() as scratch:
        results = Path(scratch) / "results.jsonl"
        results.touch()
        path = [str(others)] * (others is not None) + [str(ROOT), str(ROOT / "kernels")] * needs_package
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment |= {"PYTHONPATH": os.pathsep.join(path), "HF_MODULES_CACHE": f"{scratch}/modules",
                        "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}  # fmt: skip
        command = [sys.executable, __file__, "--check", str(results), *map(str, folders)]
        run = subprocess.run(command, cwd=scratch, env=environment, capture_output=True, text=True)
        found = dict(json.loads(line) for line in results.read_text().splitlines())
    died = run.stderr.strip().splitlines()[-1:] if run.returncode else []
    return {folder.name: summary(found.get(folder.name), died) for folder in folders}


def summary(checks: list[list[Any]] | None, died: list[str]) -> dict[str, Any]:
    """Return whether all checks hold, the figures, and the first failed check."""
    if checks is None:
        return {"right": False, "reason": f"the process ended: {' '.join(died)}"[:300]}
    figures = {name.split(",")[0]: measured for name, measured, *_ in checks if name.split(",")[0] in FIGURES}
    wrong = [f"{name}: {measured:.1e}. {detail}" for name, measured, limit, detail in checks if not measured <= limit]
    reason = " ".join(wrong[0].split())[:300] if wrong else ""
    return {"right": not wrong, **figures, **({"reason": reason} if wrong else {})}


def make_exports(scratch: Path, only: list[str]) -> dict[str, list[Path]]:
    """Folders of exports by form, of which nothing says how old a transformers may be."""
    sys.path.append(str(ROOT / "tests"))
    import families
    from students import byte_tokenizer, tiny_student
    from tqdm.auto import tqdm

    from hybrid_distill.export import export_checkpoint, gate

    gate.PROMPT_LENGTHS, gate.NEW_TOKENS = (5, 24), 8  # more would take hours, over all families and versions
    recorded = json.loads(FAMILIES.read_text())["families"]
    supported = [name for name, rows in recorded.items() if rows[0]["status"] == "supported"]
    made: dict[str, list[Path]] = {form: [] for form in ("remote-code", *FORMS)}
    for model_type in tqdm([name for name in supported if not only or name in only], desc="exports"):
        teacher = families.tiny_teacher(model_type)
        plan = families.keep_some(teacher)
        student = families.make_student(teacher, plan)
        made["remote-code"].append(scratch / model_type)
        export_checkpoint(student, None, scratch / model_type, plan=plan, gate=False, max_shard_size="100KB")
    for form in FORMS if not only else ():
        for family in ("llama", "qwen2"):
            student, plan = tiny_student(family, recurrence="mamba2")
            made[form].append(scratch / f"{family}, {form}")
            export_checkpoint(student, byte_tokenizer(), made[form][-1], plan=plan, export_format=form, gate=False)
    for folder in [path for paths in made.values() for path in paths]:
        file = folder / "config.json"
        config = json.loads(file.read_text())
        config.pop("checked_transformers", None)
        file.write_text(json.dumps(config))
    return made


def oldest_right(results: dict[str, dict[str, Any]]) -> str | None:
    """The oldest version from which on every version tried is right; ``results`` go from new to old."""
    oldest = None
    for version, result in results.items():
        if not result["right"]:
            break
        oldest = version
    return oldest


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("others", type=Path, help="folder that holds a folder per version of transformers")
    parser.add_argument("--only", nargs="+", default=[], metavar="TYPE", help="these alone; others stay as recorded")
    parser.add_argument("--model", nargs="+", type=Path, default=[], help="exports to check, instead of tiny ones")
    options = parser.parse_args()

    import torch
    import transformers
    from provenance import device_name

    from hybrid_distill.model.configuration_hybrid import release

    torch.set_num_threads(1)
    versions: dict[str, Path | None] = {path.name: path for path in options.others.iterdir() if path.is_dir()}
    versions[transformers.__version__] = None
    results: dict[str, dict[str, dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as name:
        if options.model:
            exports: dict[str, list[Path]] = {form: [] for form in ("remote-code", *FORMS)}
            for folder in options.model:
                form = json.loads((folder / "gate" / "reference.json").read_text()).get("form", "remote-code")
                exports[form].append(folder.resolve())
        else:
            exports = make_exports(Path(name), options.only)
        for version in sorted(versions, key=release, reverse=True):
            alone = checked(versions[version], exports["remote-code"] + exports["falcon-h1"], False)
            ours = checked(versions[version], exports["safetensors"], True) if exports["safetensors"] else {}
            for export, result in {**alone, **ours}.items():
                results.setdefault(export, {})[version] = result
            wrong = sum(not result["right"] for result in {**alone, **ours}.values())
            print(f"transformers {version}: {len(alone) + len(ours) - wrong} right, {wrong} wrong", flush=True)

    for export, by_version in results.items():
        wrong = {version: result["reason"] for version, result in by_version.items() if not result["right"]}
        print(f"{export}: right from {oldest_right(by_version)} on{'' if not wrong else f'; wrong: {wrong}'}")
    if not options.model:
        write(results, transformers.__version__, device_name(), torch.__version__)
    return 0


def write(results: dict[str, dict[str, dict[str, Any]]], exported_with: str, device: str, torch: str) -> None:
    """Put what was found beside what is recorded of other exports, then make the table and the page anew."""
    import families

    from hybrid_distill.model.configuration_hybrid import release

    recorded = json.loads(RESULTS.read_text())["results"] if RESULTS.is_file() else {}
    results = dict(sorted({**recorded, **results}.items()))
    record = {
        "what": "exports of tiny random students, checked by other versions of transformers; differences are relative "
        "to the largest logit",
        "device": device,
        "torch": torch,
        "exported_with": exported_with,
        "date": datetime.date.today().isoformat(),
        "results": results,
    }
    RESULTS.write_text(json.dumps(record, indent=1) + "\n")
    tried = sorted({version for by_version in results.values() for version in by_version}, key=release)
    stock = [by_version for name, by_version in results.items() if name.endswith(", falcon-h1")]
    table = {
        "tried": tried,
        "oldest": {name: oldest_right(by_version) for name, by_version in results.items() if "," not in name},
        "falcon-h1": [v for v in tried if all(by_version.get(v, {"right": False})["right"] for by_version in stock)],
    }
    OLDEST.write_text(json.dumps(table, indent=1) + "\n")
    families.write_page()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--check"]:
        check_all(sys.argv[3:], Path(sys.argv[2]))
    else:
        sys.exit(main())
