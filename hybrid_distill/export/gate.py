"""Export gate: records what a model computes, then recomputes it in a separate process without this package.

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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from ..guard import MARK, check_checkpoint, check_no_run, foreign_code
from ..io import Record, file_hash, read_json, save_tensors, write_json
from ..model import HybridForCausalLM
from ..model.configuration_hybrid import ATTENTION
from ..model.self_check import rounded_once_more
from ..progress import Phase
from ..teacher import eval_mode
from . import check as program
from .check import Check, Prompts, greedy, tensor_hash
from .engines import absent_program
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
    """Failure of an export: it cannot be written, or does not compute the same as the exported model."""


@dataclass(frozen=True)
class GateReport:
    """Checks of an export, in order; empty if the gate did not run."""

    checks: tuple[Check, ...] = ()

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    def require(self, path: Path) -> GateReport:
        """Return the report. Raises ExportError, naming ``path``, when a check failed."""
        if not self.ok:
            raise ExportError(f"{path} failed the export gate:\n{self.table()}")
        return self

    def table(self) -> str:
        """Format the checks as text, one per line, with the measured differences."""
        return program.table(self.checks)

    def to_dict(self) -> Record:
        """Return the report as JSON values."""
        return {"ok": self.ok, "checks": [{**asdict(check), "ok": check.ok} for check in self.checks]}


def verify_export(path: str | Path, *, device: str = "cpu", trust_remote_code: bool = False) -> GateReport:
    """Check an export of any form in a separate process, where only the form safetensors can import this package.

    Compares the folder with the record made at export; the reloaded model runs on ``device``. Checking runs the
    folder's code, which must be this package's own, byte for byte, unless ``trust_remote_code``. Raises ExportError
    when the process ends without a result or a file of a form for another program has changed; ValueError for a folder
    that is not an export, that `check_checkpoint` rejects, or whose program is not installed.
    """
    folder = Path(path)
    if not (folder / MARK).is_file():
        check_no_run(folder)
        raise ValueError(f"{folder} is not an export: it has no {MARK}; pass the folder of an export.")
    form = form_of(folder)
    if form in program.PACKAGES:
        check_unchanged(folder)
        if not trust_remote_code:
            own = {file_hash(file) for file in Path(__file__).parent.glob("*.py")}
            _refuse_code([file.name for file in folder.glob("*.py") if file_hash(file) not in own], folder)
        if absent := absent_program(form):
            raise ValueError(
                f"only the files of {folder} were checked: {absent}; install it, or run "
                f"{folder / 'gate' / 'check.py'} with a Python that has it."
            )
    elif not trust_remote_code:
        _refuse_code(foreign_code(folder), folder)
        check_checkpoint(folder)
    return run_gate(folder, device)


def form_of(folder: Path) -> str:
    """Return the form of an export; empty for other folders and for records of the first format."""
    return read_json(folder / MARK).get("form", "") if (folder / MARK).is_file() else ""


def _refuse_code(other: list[str], folder: Path) -> None:
    if other:
        raise ValueError(
            f"{', '.join(other)} in {folder} is not the code that this version of hybrid-distill exports, and "
            "verifying runs it; export the student again, or read that code and pass --trust-remote-code."
        )


def check_unchanged(folder: Path) -> None:
    """Raise ExportError, naming the tensors or files, if an export has changed since it passed its gate."""
    if not (folder / MARK).is_file():
        raise ValueError(f"{folder} has no {MARK}; pass an export as it was written.")
    record = program.read_record(folder / "gate")
    look = program.check_files if record["form"] in program.PACKAGES else program.check_tensors_on_disk
    check = look(folder, record)
    if not check.ok:
        raise ExportError(f"{folder} has changed since its export: {check.name} {check.measured:g} ({check.detail}).")


def check_not_quantized(folder: Path) -> None:
    """Raise ValueError for a quantized student, which cannot be exported again."""
    if read_json(folder / "config.json").get("quantization_config") is not None:
        raise ValueError(f"{folder} is quantized; pass the unquantized export.")


def write_record(
    student: HybridForCausalLM,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: Path,
    *,
    tied: Mapping[str, str],
    form: str = "remote-code",
    files: Mapping[str, str] | None = None,
) -> Record:
    """Write ``gate/`` of an export: the check program, and a record of what ``student`` and ``tokenizer`` compute.

    ``tied`` maps a tied tensor's name to the name it is stored under; ``files`` maps another program's files to hashes.

    The record is computed as the gate computes (`computing_as_exported`), on the student's device, where the gate runs.
    For other devices it also holds the arithmetic it was made with and the effect of rounding on its logits
    (`check.MARGIN`). ``kernels`` in the returned record, None for a student that computes as the export does, holds the
    student's ``implementation`` and how far its logits are from the recorded ones.
    """
    texts = [] if tokenizer is None else [(text, tokenizer(text)["input_ids"]) for text in TEXTS]
    # Two programs round the same function differently; in float32 their results can be compared.
    other_program = form == "falcon-h1" or form in program.PACKAGES
    reference = copy.deepcopy(student).float() if other_program else student
    record = {
        "format": program.FORMAT,
        "form": form,
        "dtype": str(student.dtype).removeprefix("torch."),
        "computes": str(reference.dtype).removeprefix("torch."),
        "tied": dict(tied),
        "texts": texts,
        "tensors": {},
    }
    if files is None:
        record["tensors"] = {name: tensor_hash(tensor) for name, tensor in stored_tensors(student, form).items()}
    else:
        record["files"] = dict(files)
    ids = [*_random_prompts(student), *(torch.tensor(ids) for _, ids in texts)]
    with computing_as_exported(reference):
        prompts = record_prompts(reference, ids, past_ends=form in program.PACKAGES)
        record["arithmetic"] = program.arithmetic(str(reference.device))
        record["rounding"] = _effect_of_rounding(reference, prompts)
    record["kernels"] = _difference_of_kernels(reference, prompts, record["rounding"])
    _begin_record(folder, record)
    lists = {name: tensors for name, tensors in vars(prompts).items() if name != "columns"}
    tensors = {f"{name}_{i}": tensor for name in lists for i, tensor in enumerate(lists[name])}
    tensors = {name: tensor.cpu().contiguous() for name, tensor in {"columns": prompts.columns, **tensors}.items()}
    save_tensors(folder / "gate" / "reference.safetensors", tensors)
    return record


@contextmanager
def computing_as_exported(student: HybridForCausalLM) -> Iterator[None]:
    """Make a student compute what its export computes, where neither this package nor its kernels are.

    Recurrent heads run on torch, attention in the implementation that the export names, and float32 products in
    float32, not in TF32: all defaults of a process that has only torch and transformers.
    """
    heads = student.recurrent_heads()
    implementations = [one.impl for one in heads]
    configs = (student.config, student.model.config)
    attentions = [config._attn_implementation for config in configs]
    precision = torch.get_float32_matmul_precision()
    try:
        for one in heads:
            one.impl = "torch"
        attention = checked_attention(student)
        for config in configs:
            config._attn_implementation = attention
        torch.set_float32_matmul_precision("highest")
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        for one, implementation in zip(heads, implementations):
            one.impl = implementation
        for config, attention in zip(configs, attentions):
            config._attn_implementation = attention


def checked_attention(student: HybridForCausalLM) -> str:
    """Return the student's attention implementation; if it needs a GPU, return transformers' default instead."""
    own = student.model.config._attn_implementation
    if own in ATTENTION:
        return own
    with torch.device("meta"):
        backbone = AutoModelForCausalLM.from_config(student.config.backbone_config(), trust_remote_code=False)
    return backbone.config._attn_implementation


def _effect_of_rounding(student: HybridForCausalLM, prompts: Prompts) -> float:
    """Measure how far one extra rounding after every layer moves the recorded logits, relative to the largest one."""
    generator = torch.Generator().manual_seed(0)
    with rounded_once_more(student, generator, torch.finfo(student.dtype).eps):
        return _difference(student, prompts)


def _difference_of_kernels(student: HybridForCausalLM, prompts: Prompts, rounding: float) -> Record | None:
    """Compare the logits that the student computes in its own way with the recorded ones; None if they are the same."""
    difference = _difference(student, prompts)
    if difference == 0.0:
        return None
    limit = max(program.TOLERANCE[student.dtype]["order"], program.MARGIN * rounding)
    if not difference <= limit:
        log.warning(
            "the student's kernels compute logits that differ from plain torch by %.2g of the largest one; rounding "
            "accounts for at most %.2g: measure the student again with --student.kernels torch",
            difference,
            limit,
        )
    return {"implementation": student.ssm_implementation, "difference": difference}


@torch.no_grad()
def _difference(student: HybridForCausalLM, prompts: Prompts) -> float:
    """Return the largest difference from the recorded logits, relative to the largest one."""
    with eval_mode(student):
        computed = [logits_of_prompt(student, ids_L)[:, prompts.columns] for ids_L in prompts.ids]
    return program.check_logits("", computed, prompts.logits, 0.0, scale=prompts.scale).measured


def logits_of_prompt(student: HybridForCausalLM, ids_L: Tensor) -> Tensor:
    return student(input_ids=ids_L[None], use_cache=False).logits[0].float()


def _begin_record(folder: Path, record: Record) -> None:
    """Write the check program and reference.json, with hashes of the Python files next to the weights."""
    (folder / "gate").mkdir()
    for file in _program_files(record["form"]):
        shutil.copyfile(file, folder / "gate" / file.name)
    code = {path.name: file_hash(path) for path in sorted(folder.glob("*.py"))}
    write_json(folder / MARK, {**record, "code": code}, indent=1)


def _program_files(form: str) -> list[Path]:
    """List the files of the program that checks a form."""
    check = Path(program.__file__)
    return [check, check.with_name("programs.py")] if form in program.PACKAGES else [check]


def stored_tensors(student: HybridForCausalLM, form: str) -> dict[str, Tensor]:
    """Return the tensors of a student in a form, by name, including tied ones."""
    return container(student).state if form == "falcon-h1" else student.state_dict()


def record_prompts(student: HybridForCausalLM, ids: list[Tensor], *, past_ends: bool = False) -> Prompts:
    """Compute the student's logits and greedy tokens (as `greedy`) for prompts of token ids [L], in eval mode."""
    with eval_mode(student):
        ids = [ids_L.to(student.device) for ids_L in ids]
        logits_LV = [logits_of_prompt(student, ids_L) for ids_L in ids]
        written = [greedy(student, ids_L[None], None, NEW_TOKENS, past_ends=past_ends) for ids_L in ids]
    vocab_size = student.config.vocab_size
    columns_C = torch.arange(0, vocab_size, -(-vocab_size // MAX_COLUMNS), device=student.device)
    logits_LC = [logits[:, columns_C] for logits in logits_LV]
    return Prompts(
        columns_C, ids, logits_LC, [out.tokens_BT[0] for out in written], [out.leads_BT[0] for out in written]
    )


def _random_prompts(student: HybridForCausalLM) -> list[Tensor]:
    """Draw prompts of ordinary tokens (no padding, BOS or EOS), always the same for one vocabulary."""
    config = student.config
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    special = {config.pad_token_id, config.bos_token_id, *ends}
    ordinary = torch.tensor([token for token in range(config.vocab_size) if token not in special])
    generator = torch.Generator().manual_seed(0)
    return [ordinary[torch.randint(len(ordinary), (length,), generator=generator)] for length in PROMPT_LENGTHS]


def run_gate(folder: Path, device: str, *, called: Path | None = None) -> GateReport:
    """Compare a folder with its record, in a new interpreter with no remote code cached.

    ``called`` is the path to show the user while ``folder`` is temporary. This package is on the process's path, as
    the form safetensors needs it; for all other forms the check program blocks it. Raises ExportError when the process
    ends without a result.
    """
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "ACCELERATE_", "TORCHELASTIC_", "FSDP_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(launcher)}
    with tempfile.TemporaryDirectory(prefix="export-gate-") as scratch:
        results = Path(scratch) / "checks.json"
        for file in _program_files(form_of(folder)):
            shutil.copyfile(file, Path(scratch) / file.name)
        alias = Path(scratch) / "export"  # transformers 4.56 cannot import code from a folder with a dot in its name
        alias.symlink_to(folder.resolve(), target_is_directory=True)
        environment |= {
            "HF_MODULES_CACHE": f"{scratch}/modules",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(PACKAGE_ROOT), os.environ.get("PYTHONPATH")])),
            "OMP_NUM_THREADS": str(torch.get_num_threads()),
        }
        command = [sys.executable, Path(scratch) / "check.py", alias, "--device", device, "--json", results]
        with Phase(f"checking {called or folder} in a separate process"):
            run = subprocess.run(
                command, cwd=scratch, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
            )
        if not results.is_file():
            raise ExportError(f"the check of {folder} ended with status {run.returncode}:\n{run.stdout}{run.stderr}")
        return GateReport(tuple(Check(**fields) for fields in json.loads(results.read_text())))
