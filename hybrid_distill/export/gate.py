"""The export gate: what the model computes is recorded, then recomputed by a process without this package.

Shapes: B batch, L length, T generated tokens, C recorded columns of the vocabulary.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..guard import check_checkpoint, check_no_run, code_differs
from ..model import HybridForCausalLM
from ..teacher import rope_by_length
from . import check as program
from .check import Check, Prompts, form_of, greedy, tensor_hash
from .falcon_h1 import container

log = logging.getLogger(__name__)

PROMPT_LENGTHS = (1, 7, 24, 45)
NEW_TOKENS = 16
MAX_COLUMNS = 4096
PACKAGE_ROOT = Path(__file__).resolve().parents[2]
TEXTS = (
    "Memorize the following dictionary:\nriver:17\nlantern:62\nThe value of the key 'river' is",
    "  Two  spaces, a tab\tand é, 中, 12345; then\n\na new paragraph.",
)


class ExportError(RuntimeError):
    """A checkpoint that does not do what the exported model did; the message holds the table of checks."""


@dataclass(frozen=True)
class GateReport:
    """The checks that were made, in order; none when the gate was switched off."""

    checks: tuple[Check, ...] = ()

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    def require(self, path: Path) -> GateReport:
        """The report itself. Raises ExportError, naming ``path``, when a check failed."""
        if not self.ok:
            raise ExportError(f"{path} failed the export gate:\n{self.table()}")
        return self

    def table(self) -> str:
        """The checks as text, one a line, with the differences measured."""
        return program.table(self.checks)

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {"ok": self.ok, "checks": [{**asdict(check), "ok": check.ok} for check in self.checks]}


def verify_export(
    path: str | Path,
    student: PreTrainedModel | None = None,
    *,
    device: str | None = None,
    trust_remote_code: bool = False,
) -> GateReport:
    """Check an exported folder, of any form, in a separate process, which cannot import this package unless the
    form needs it.

    The folder is held against what was recorded when it was exported, or against ``student`` as it is now.
    ``device`` is where the reloaded model runs (default: where the student is, else the CPU). The folder's code runs
    there, so it must be this package's own, byte for byte, unless ``trust_remote_code``. Raises ExportError when the
    process ends without a result, ValueError for a folder that is no export or that `check_checkpoint` refuses.
    """
    folder = Path(path)
    _check_is_export(folder)
    if not trust_remote_code:
        check_checkpoint(folder)
        _check_code(folder)
    if device is None:
        device = str(student.device) if student is not None else "cpu"
    if student is None:
        return run_gate(folder, folder / "gate", device)
    stored = json.loads((folder / "gate" / "reference.json").read_text())
    with tempfile.TemporaryDirectory(prefix="export-gate-") as scratch:
        gate = Path(scratch) / "gate"
        write_record(student, gate, texts=stored["texts"], tied=stored["tied"], form=form_of(stored))
        return run_gate(folder, gate, device)


def _check_is_export(folder: Path) -> None:
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; name the folder of an export.")
    lacking = [name for name in ("config.json", "gate/reference.json") if not (folder / name).is_file()]
    if lacking:
        check_no_run(folder)
        raise ValueError(f"{folder} is no exported checkpoint: it lacks {' and '.join(lacking)}; name one that has it.")


def check_unchanged(folder: Path) -> None:
    """Raise ExportError, naming tensors, where an export's files are not those that its gate passed."""
    if not (record := folder / "gate" / "reference.json").is_file():
        raise ValueError(f"{folder} has no gate/reference.json; name a finished run, or an export as it was written.")
    check = program.check_tensors_on_disk(folder, json.loads(record.read_text()))
    if not check.ok:
        raise ExportError(f"{folder} is not as it was exported: {check.name} {check.measured:g} ({check.detail}).")


def _check_code(folder: Path) -> None:
    if other := code_differs(folder):
        raise ValueError(
            f"{', '.join(other)} in {folder} is not the code that this version of hybrid-distill exports, and "
            "verifying runs it; export the student again, or read that code and pass --trust-remote-code."
        )


def tokenized(tokenizer: PreTrainedTokenizerBase | None) -> list[tuple[str, list[int]]]:
    """The gate's texts with their token ids; none without a tokenizer."""
    return [] if tokenizer is None else [(text, tokenizer(text)["input_ids"]) for text in TEXTS]


def write_record(
    student: PreTrainedModel,
    gate: Path,
    *,
    texts: Sequence[tuple[str, list[int]]],
    tied: Mapping[str, str],
    form: str = program.FORMS[0],
) -> None:
    """Write the folder ``gate``: the program that checks the export, and what ``student`` computes.

    ``texts`` are checked with the exported tokenizer and serve as prompts; ``tied`` maps a name to the name
    its tensor is stored by. Raises ValueError for a student that ``form`` cannot express.
    """
    gate.mkdir()
    # Two programs that compute one function differ by their rounding: what they have in common shows in float32.
    reference = copy.deepcopy(student).float() if form == "falcon-h1" else student
    shutil.copyfile(program.__file__, gate / "check.py")
    record = {
        "format": program.FORMAT,
        "form": form,
        "dtype": str(student.dtype).removeprefix("torch."),
        "computes": str(reference.dtype).removeprefix("torch."),
        "tied": dict(tied),
        "texts": texts,
        "tensors": {name: tensor_hash(tensor) for name, tensor in stored_tensors(student, form).items()},
    }
    (gate / "reference.json").write_text(json.dumps(record, indent=1) + "\n")
    prompts = [*_random_prompts(student), *(torch.tensor(ids) for _, ids in texts)]
    path = gate / "reference.safetensors"
    path.touch()
    mode = path.stat().st_mode  # as in `write_weights`
    record_prompts(reference, prompts).save(path)
    path.chmod(mode)


def copy_record(source: Path, folder: Path, quantised: Mapping[str, Any]) -> None:
    """Give ``folder``, a copy of an export in other numbers, the export's record of what the student computes.

    Its tensors are those that are in the copy's files; ``quantised`` has the ``limit`` on differences of logits.
    """
    gate = folder / "gate"
    gate.mkdir()
    shutil.copyfile(program.__file__, gate / "check.py")
    shutil.copyfile(source / "gate" / "reference.safetensors", gate / "reference.safetensors")
    record = json.loads((source / "gate" / "reference.json").read_text())
    record |= {"form": "remote-code", "tied": {}, "quantised": dict(quantised), "tensors": {}}
    for name, path in sorted(program.weight_files(folder).items()):
        with safe_open(path, framework="pt") as file:
            record["tensors"][name] = tensor_hash(file.get_tensor(name))
    (gate / "reference.json").write_text(json.dumps(record, indent=1) + "\n")


def stored_tensors(student: PreTrainedModel, form: str) -> dict[str, Tensor]:
    """What a form holds of a student, by name, tied tensors too. Raises ValueError for one it cannot express."""
    return container(cast(HybridForCausalLM, student)).state if form == "falcon-h1" else student.state_dict()


@torch.no_grad()
def record_prompts(student: PreTrainedModel, ids: list[Tensor]) -> Prompts:
    """The student's logits and greedy tokens for prompts of token ids [L], computed in eval mode."""
    was_training = student.training
    student.eval()
    try:
        ids = [ids_L.to(student.device) for ids_L in ids]
        logits_LV = [student(input_ids=ids_L[None], use_cache=False).logits[0].float() for ids_L in ids]
        vocab_size = logits_LV[0].shape[-1]
        columns_C = torch.arange(0, vocab_size, -(-vocab_size // MAX_COLUMNS), device=student.device)
        other_ways: list[list[Tensor]] = []
        if rope_by_length(cast(HybridForCausalLM, student).model.config) is not None:
            # In the order of the checks: frequencies may depend on what was computed before.
            found = program.cached_logits(student, ids), program.padded_logits(student, ids)
            other_ways = [[logits_LV[:, columns_C] for logits_LV in way] for way in found]
        generated, leads = zip(
            *(greedy(student, ids_L[None], None, NEW_TOKENS) for ids_L in ids), strict=True
        )
    finally:
        student.train(was_training)
    return Prompts(
        ids,
        [logits[:, columns_C] for logits in logits_LV],
        [t[0] for t in generated],
        [t[0] for t in leads],
        columns_C,
        *other_ways,
    )


def _random_prompts(student: PreTrainedModel) -> list[Tensor]:
    """Prompts of ordinary tokens (no padding, no end of text), always the same for one vocabulary."""
    config = student.config
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    special = {config.pad_token_id, config.bos_token_id, *ends}
    ordinary = torch.tensor([token for token in range(config.vocab_size) if token not in special])
    generator = torch.Generator().manual_seed(0)
    return [
        ordinary[torch.randint(len(ordinary), (length,), generator=generator)] for length in PROMPT_LENGTHS
    ]


def run_gate(folder: Path, gate: Path, device: str, *, called: Path | None = None) -> GateReport:
    """Hold a folder against the record in ``gate``, in a new interpreter with no remote code cached.

    ``called`` is the name by which the user knows a folder that has another one for now. This package is on the
    process's path, for the form that needs it; the program itself forbids it to the others. Raises ExportError when
    that process ends without a result.
    """
    log.info("%s: loading it in a separate process, to hold it against its record", called or folder)
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "ACCELERATE_", "TORCHELASTIC_", "FSDP_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(launcher)}
    with tempfile.TemporaryDirectory(prefix="export-gate-") as name:
        scratch = Path(name)
        results, program_copy = scratch / "checks.json", scratch / "check_export.py"
        shutil.copyfile(program.__file__, program_copy)
        environment |= {
            "HF_MODULES_CACHE": str(scratch / "modules"),
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(PACKAGE_ROOT), os.environ.get("PYTHONPATH")])),
            "OMP_NUM_THREADS": str(torch.get_num_threads()),
        }
        command = [sys.executable, program_copy, folder.resolve(), "--record", gate.resolve()]
        command += ["--device", device, "--json", results]
        run = subprocess.run(
            command, cwd=scratch, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        if not results.is_file():
            raise ExportError(
                f"the check of {folder} ended with status {run.returncode}:\n{run.stdout}{run.stderr}"
            )
        return GateReport(tuple(Check(**fields) for fields in json.loads(results.read_text())))
