"""Write the record that an export is checked against: what the student computes for a few prompts.

check.py reads the record, wherever the export is.

Shapes: L length, T generated tokens, C recorded columns of the vocabulary, V vocabulary.
"""

from __future__ import annotations

import copy
import logging
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..export_paths import GATE, MARK
from ..io import Record, file_hash, save_tensors, write_json
from ..kernels import run_on
from ..model import HybridForCausalLM
from ..model.self_check import rounded_once_more
from ..teacher import eval_mode
from . import check
from .check import Prompts, greedy, tensor_hash
from .formats import FORMATS
from .native import checked_attention
from .weights import tied_weights

log = logging.getLogger(__name__)

PROMPT_LENGTHS = (1, 7, 24, 45)
"""Tokens of the random prompts."""
NEW_TOKENS = 16
"""Tokens generated after each prompt."""
MAX_COLUMNS = 4096
"""Columns of the vocabulary whose logits are stored, at most."""
# What tokenizers treat differently: line breaks, repeated spaces, tabs, accents, other scripts, numbers.
TEXTS = (
    "Memorize the following dictionary:\nriver:17\nlantern:62\nThe value of the key 'river' is",
    "  Two  spaces, a tab\tand é, 中, 12345; then\n\na new paragraph.",
)


def write_record(
    student: HybridForCausalLM,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: Path,
    export_format: str = "remote-code",
) -> Record:
    """Write ``gate/``: the check program, and what ``student`` and ``tokenizer`` compute.

    Requires that ``folder`` holds the model's files and nothing else. The results are computed as
    in the gate (`computing_as_exported`), in float32 (`check.COMPUTES`), on the student's device,
    where the gate runs.

    Returns the record, with the hardware and library that computed it (``arithmetic``) and the
    effect of rounding on the logits, in float32 and in the student's dtype (``rounding``; see
    `check.MARGIN`). ``kernels`` holds the student's ``implementation`` and the difference between
    its logits and those without kernels; it is None if there is no difference, or if the kernels do
    not run where the student is.
    """
    texts = []
    if tokenizer is not None:
        texts = [(text, tokenizer(text)["input_ids"]) for text in TEXTS]
    reference = student
    models = [student]
    if student.dtype != check.COMPUTES:
        # Not .to(dtype), which would also round RoPE's frequencies.
        reference = copy.deepcopy(student).float()
        models.append(reference)
    record = {
        "format": check.FORMAT,
        "export_format": export_format,
        "dtype": check.dtype_name(student.dtype),
        "tied": dict(tied_weights(student)),
        "texts": texts,
        **_stored_weights(student, folder, export_format),
    }
    ids = _random_prompts(student)
    for _, text_ids in texts:
        ids.append(torch.tensor(text_ids))
    with computing_as_exported(reference):
        # The gate cannot forbid other programs to choose end-of-text tokens.
        past_ends = FORMATS[export_format].is_for_other_program
        prompts = record_prompts(reference, ids, past_ends=past_ends)
        record["arithmetic"] = check.arithmetic(str(reference.device))
    record["rounding"] = {}
    for model in models:
        effect = _effect_of_rounding(model, prompts)
        record["rounding"][check.dtype_name(model.dtype)] = effect
    # After the roundings, from which the limit is computed.
    limit = check.order_limit(student.dtype, record)
    record["kernels"] = _difference_of_kernels(student, prompts, limit)
    _write_files(folder, record, prompts)
    return record


def _stored_weights(student: HybridForCausalLM, folder: Path, export_format: str) -> Record:
    """Hash each stored tensor, or each file if another program reads the export."""
    tensors = FORMATS[export_format].tensors
    if tensors is None:
        files = {path.name: file_hash(path) for path in sorted(folder.iterdir())}
        return {"tensors": {}, "files": files}
    hashes = {name: tensor_hash(tensor) for name, tensor in tensors(student).items()}
    return {"tensors": hashes}


def _write_files(folder: Path, record: Record, prompts: Prompts) -> None:
    """Write the check program, reference.json with the Python files' hashes, and the tensors."""
    gate = folder / GATE
    gate.mkdir()
    for file in program_files(record["export_format"]):
        shutil.copyfile(file, gate / file.name)
    code = {path.name: file_hash(path) for path in sorted(folder.glob("*.py"))}
    write_json(folder / MARK, {**record, "code": code}, indent=1)
    tensors = {"columns": prompts.columns}
    for name in ("ids", "logits", "generated", "leads"):
        for number, tensor in enumerate(getattr(prompts, name)):
            tensors[f"{name}_{number}"] = tensor
    on_cpu = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    save_tensors(gate / "reference.safetensors", on_cpu)


def program_files(export_format: str) -> list[Path]:
    """List the source files of the check program for a format."""
    main_file = Path(check.__file__)
    if FORMATS[export_format].is_for_other_program:
        return [main_file, main_file.with_name("programs.py")]
    return [main_file]


@contextmanager
def computing_as_exported(student: HybridForCausalLM) -> Iterator[None]:
    """Make a student compute what its export computes, without this package and its kernels.

    These are the defaults of a process that has only torch and transformers: recurrent heads run
    on torch, attention in the implementation that the export names, and float32 products in
    float32, not in TF32. All settings are restored on exit.
    """
    modules = student.recurrent_heads()
    implementations = [module.impl for module in modules]
    configs = (student.config, student.model.config)
    attentions = [config._attn_implementation for config in configs]
    precision = torch.get_float32_matmul_precision()
    try:
        for module in modules:
            module.impl = "torch"
        exported_attention = checked_attention(student)
        for config in configs:
            config._attn_implementation = exported_attention
        torch.set_float32_matmul_precision("highest")
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        for module, implementation in zip(modules, implementations):
            module.impl = implementation
        for config, attention in zip(configs, attentions):
            config._attn_implementation = attention


def record_prompts(
    student: HybridForCausalLM, ids: list[Tensor], *, past_ends: bool = False
) -> Prompts:
    """Compute logits [L, C] and greedy tokens [T] of prompts of token ids [L], in eval mode.

    ``past_ends`` as in `greedy`.
    """
    vocab_size = student.config.vocab_size
    # Rounded up, so that there are at most `MAX_COLUMNS`.
    step = math.ceil(vocab_size / MAX_COLUMNS)
    columns_C = torch.arange(0, vocab_size, step, device=student.device)
    prompts = Prompts(columns_C, [], [], [], [])
    with eval_mode(student):
        for prompt_L in ids:
            ids_L = prompt_L.to(student.device)
            continued = greedy(student, ids_L[None], None, NEW_TOKENS, past_ends=past_ends)
            prompts.ids.append(ids_L)
            prompts.logits.append(logits_of_prompt(student, ids_L)[:, columns_C])
            prompts.generated.append(continued.tokens_BT[0])
            prompts.leads.append(continued.leads_BT[0])
    return prompts


@torch.no_grad()
def logits_of_prompt(student: HybridForCausalLM, ids_L: Tensor) -> Tensor:
    """Compute the logits [L, V] of one prompt, in float32."""
    return student(input_ids=ids_L[None], use_cache=False).logits[0].float()


def _random_prompts(student: HybridForCausalLM) -> list[Tensor]:
    """Draw prompts [L] of ordinary tokens (no padding, BOS or EOS), the same for one vocabulary."""
    config = student.config
    special = {config.pad_token_id, config.bos_token_id}
    if isinstance(config.eos_token_id, list):
        special.update(config.eos_token_id)
    else:
        special.add(config.eos_token_id)
    ordinary = torch.tensor([token for token in range(config.vocab_size) if token not in special])
    generator = torch.Generator().manual_seed(0)
    prompts = []
    for length in PROMPT_LENGTHS:
        # On the CPU: another device would draw other tokens.
        indices = torch.randint(len(ordinary), (length,), generator=generator, device="cpu")
        prompts.append(ordinary[indices])
    return prompts


def _effect_of_rounding(student: HybridForCausalLM, prompts: Prompts) -> float:
    """Measure the largest change of a logit from one extra rounding after every layer.

    The change is relative to the largest logit.
    """
    generator = torch.Generator().manual_seed(0)
    with computing_as_exported(student):
        logits = _recorded_logits(student, prompts)
        with rounded_once_more(student, generator, torch.finfo(student.dtype).eps):
            rounded = _recorded_logits(student, prompts)
    return check.largest_difference(rounded, logits) / prompts.scale


def _difference_of_kernels(
    student: HybridForCausalLM, prompts: Prompts, limit: float
) -> Record | None:
    """Compare the student's own logits with its export's, in its dtype.

    Returns None if they are equal, or if these kernels cannot run where the student is; warns if the difference
    exceeds ``limit``.
    """
    if not run_on(student.ssm_implementation, student.device):
        return None
    with computing_as_exported(student):
        exported = _recorded_logits(student, prompts)
    # Outside of `computing_as_exported`, the student runs on its own kernels.
    own = _recorded_logits(student, prompts)
    difference = check.largest_difference(own, exported) / prompts.scale
    if difference == 0.0:
        return None
    # "not <=" and not ">": a NaN exceeds the limit too.
    if not difference <= limit:
        log.warning(
            "the student's kernels compute logits that differ from plain torch by %.2g of the largest one; rounding "
            "accounts for at most %.2g: measure the student again with --student.kernels torch",
            difference,
            limit,
        )
    return {"implementation": student.ssm_implementation, "difference": difference}


def _recorded_logits(student: HybridForCausalLM, prompts: Prompts) -> list[Tensor]:
    """Compute each prompt's logits [L, C] in the columns that a record holds."""
    with eval_mode(student):
        return [logits_of_prompt(student, ids_L)[:, prompts.columns] for ids_L in prompts.ids]
