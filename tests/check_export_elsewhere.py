"""Export students in every form, then check them with other environments' Pythons: torch and transformers only.

    python tests/check_export_elsewhere.py /path/to/other-venv/bin/python [more interpreters ...] [--model EXPORT ...]

Needs no GPU and no network. Prints a table, and fails when an exported folder computes anything else there than
it did here. docs/export.md holds what it printed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from conftest import FAMILIES, make_family_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from hybrid_distill.build import build_student
from hybrid_distill.plan import HeadPlan

SPECIAL = ["<pad>", "<s>", "</s>", "<tool>", "<image>"]


def tiny_student(
    family: str, *, d_state: int = 8, recurrence: str = "discrete"
) -> tuple[PreTrainedModel, HeadPlan]:
    """A student that keeps 4 heads in two layers and none in the third; Qwen2 with tied embeddings."""
    teacher = make_family_model(family, vocab_size=300, tie_word_embeddings=family == "qwen2")
    plan = HeadPlan.from_pairs(teacher, [(0, 1), (1, 2), (1, 3), (1, 7)])
    return build_student(teacher, plan, d_state=d_state, recurrence=recurrence)[0], plan


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and special tokens with and without a role."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(SPECIAL + alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    roles = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, additional_special_tokens=["<tool>", "<image>"], **roles
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("interpreters", nargs="+", help="Python of another environment")
    parser.add_argument("--model", nargs="*", type=Path, default=[], help="exports, instead of tiny random students")
    options = parser.parse_args()
    torch.set_num_threads(1)
    failures = 0
    print("| student | form | transformers | logits differ by | cached decoding | tokens the same |")
    print("| --- | --- | --- | ---: | ---: | --- |")
    with tempfile.TemporaryDirectory() as scratch:
        for folder, student, form in exports(options.model, Path(scratch)):
            for interpreter in options.interpreters:
                version, checks = checked(interpreter, folder, form)
                failures += not all_hold(checks)
                print(f"| {student} | {form} | {version} | {' | '.join(figures(checks))} |", flush=True)
    print(f"\n{failures} failed. Differences are relative to the largest logit.")
    return int(failures > 0)


def exports(models: list[Path], scratch: Path) -> Iterator[tuple[Path, str, str]]:
    """(folder, student's name, form) of everything to check; a form that cannot express a student is left out."""
    from hybrid_distill.export import export_checkpoint
    from hybrid_distill.export.check import FORMS
    from hybrid_distill.export.command import ExportJob, export_student

    if not models:
        for family, recurrence in [*((f, "discrete") for f in FAMILIES), ("llama", "mamba2"), ("qwen2", "mamba2")]:
            student, plan = tiny_student(family, recurrence=recurrence)
            models.append(scratch / f"{family}, {recurrence}")
            export_checkpoint(student, byte_tokenizer(), models[-1], plan=plan, gate=False)
    for model in models:
        recurrence = json.loads((model / "config.json").read_text()).get("recurrence", "discrete")
        for form in FORMS:
            if form == "falcon-h1" and recurrence == "discrete":
                continue
            folder = scratch / f"{model.name}, {form}"
            export_student(ExportJob(model, folder, form, max_shard_size="100KB"))
            yield folder, model.name, form


def checked(interpreter: str, folder: Path, form: str) -> tuple[str, list[dict[str, Any]]]:
    """The other environment's version of transformers, and what the export's own program finds there."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_MODULES_CACHE": str(folder.parent / "modules"), "HF_HUB_OFFLINE": "1"}
    if form == "safetensors":  # which this package reloads
        environment["PYTHONPATH"] = str(Path(__file__).parents[1])
    ask = "import importlib.metadata as m; print(m.version('transformers'))"
    version = subprocess.run([interpreter, "-c", ask], capture_output=True, text=True, check=True).stdout.strip()
    results = folder.parent / "checks.json"
    results.unlink(missing_ok=True)
    command = [interpreter, str(folder / "gate/check.py"), "--json", str(results)]
    run = subprocess.run(command, cwd=folder.parent, env=environment, capture_output=True, text=True)
    if not results.is_file() or run.returncode:
        print(run.stdout + run.stderr, file=sys.stderr)
    return version, json.loads(results.read_text()) if results.is_file() else []


def figures(checks: list[dict[str, Any]]) -> list[str]:
    """Largest difference of logits at once and from the cache, and whether every token was the same."""
    found = {check["name"].split(",")[0]: check for check in checks}
    names = ("reloaded = exported model", "cached decode = full forward")
    numbers = [f"{found[name]['measured']:.1e}" if name in found else "-" for name in names]
    tokens = [check for check in checks if check["name"].startswith("generated tokens")]
    return [*numbers, "yes" if tokens and all_hold(tokens) else "NO"]


def all_hold(checks: list[dict[str, Any]]) -> bool:
    return bool(checks) and all(check["measured"] <= check["limit"] for check in checks)


if __name__ == "__main__":
    sys.exit(main())
