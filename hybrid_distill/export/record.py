"""Record of what an exported student computes, made for the program that checks the export.

Shapes: B batch, L length, T generated tokens, C recorded columns of the vocabulary, V vocabulary.
"""

from __future__ import annotations

import copy
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..export_paths import GATE, MARK
from ..io import Record, file_hash, save_tensors, write_json
from ..model import HybridForCausalLM
from ..model.self_check import rounded_once_more
from ..teacher import eval_mode
from . import check as program
from .check import Prompts, greedy, tensor_hash
from .formats import FORMATS
from .native import checked_attention
from .weights import tied_weights

log = logging.getLogger(__name__)
PROMPT_LENGTHS = (1, 7, 24, 45)
NEW_TOKENS = 16
MAX_COLUMNS = 4096
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

    The folder holds the model's files and nothing else yet. The record is computed as the gate
    computes (`computing_as_exported`), in float32 (`check.COMPUTES`) and on the student's device,
    where the gate runs. It also holds the arithmetic it was made with, and the effect of rounding
    on its logits in float32 and in the student's dtype (`check.MARGIN`). ``kernels`` in the
    returned record holds the student's ``implementation`` and how far its logits are from those
    without kernels; it is None if the student computes as its export.
    """
    texts = []
    if tokenizer is not None:
        texts = [(text, tokenizer(text)["input_ids"]) for text in TEXTS]
    tensors = FORMATS[export_format].tensors
    is_for_program = tensors is None
    reference = student
    measured = [student]
    if student.dtype != program.COMPUTES:
        # Not .to(dtype), which would also round RoPE's frequencies.
        reference = copy.deepcopy(student).float()
        measured.append(reference)
    record = {
        "format": program.FORMAT,
        "form": export_format,
        "dtype": program.dtype_name(student.dtype),
        "tied": dict(tied_weights(student)),
        "texts": texts,
        "tensors": {},
    }
    if tensors is None:
        record["files"] = {path.name: file_hash(path) for path in sorted(folder.iterdir())}
    else:
        stored = tensors(student)
        record["tensors"] = {name: tensor_hash(tensor) for name, tensor in stored.items()}
    ids = _random_prompts(student)
    for _, text_ids in texts:
        ids.append(torch.tensor(text_ids))
    with computing_as_exported(reference):
        prompts = record_prompts(reference, ids, past_ends=is_for_program)
        record["arithmetic"] = program.arithmetic(str(reference.device))
    record["rounding"] = {}
    for model in measured:
        effect = _effect_of_rounding(model, prompts)
        record["rounding"][program.dtype_name(model.dtype)] = effect
    limit = program.order_limit(student.dtype, record)
    record["kernels"] = _difference_of_kernels(student, prompts, limit)
    _write_files(folder, record, prompts)
    return record


def _write_files(folder: Path, record: Record, prompts: Prompts) -> None:
    """Write the check program, reference.json with hashes of the Python files, and tensors."""
    gate = folder / GATE
    gate.mkdir()
    for file in program_files(record["form"]):
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
    """List the files of the program that checks a format."""
    check = Path(program.__file__)
    if export_format in program.PACKAGES:
        return [check, check.with_name("programs.py")]
    return [check]


@contextmanager
def computing_as_exported(student: HybridForCausalLM) -> Iterator[None]:
    """Make a student compute what its export computes, without this package and its kernels.

    Recurrent heads run on torch, attention in the implementation that the export names, and float32
    products in float32, not in TF32: all defaults of a process that has only torch and
    transformers.
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


def record_prompts(
    student: HybridForCausalLM, ids: list[Tensor], *, past_ends: bool = False
) -> Prompts:
    """Compute logits and greedy tokens (as `greedy`) for prompts of token ids [L], in eval mode."""
    vocab_size = student.config.vocab_size
    # Rounded up, so that there are at most `MAX_COLUMNS`.
    every = -(-vocab_size // MAX_COLUMNS)
    columns_C = torch.arange(0, vocab_size, every, device=student.device)
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
    """Draw prompts of ordinary tokens (no padding, BOS or EOS), the same for one vocabulary."""
    config = student.config
    special = {config.pad_token_id, config.bos_token_id}
    ends = config.eos_token_id
    special |= set(ends) if isinstance(ends, list) else {ends}
    ordinary = torch.tensor([token for token in range(config.vocab_size) if token not in special])
    generator = torch.Generator().manual_seed(0)
    prompts = []
    for length in PROMPT_LENGTHS:
        places = torch.randint(len(ordinary), (length,), generator=generator, device="cpu")
        prompts.append(ordinary[places])
    return prompts


def _effect_of_rounding(student: HybridForCausalLM, prompts: Prompts) -> float:
    """Measure how far one extra rounding after every layer moves the logits, relatively."""
    generator = torch.Generator().manual_seed(0)
    with computing_as_exported(student):
        logits = _recorded_logits(student, prompts)
        with rounded_once_more(student, generator, torch.finfo(student.dtype).eps):
            rounded = _recorded_logits(student, prompts)
    return program.largest_difference(rounded, logits) / prompts.scale


def _difference_of_kernels(
    student: HybridForCausalLM, prompts: Prompts, limit: float
) -> Record | None:
    """Compare the student's own logits with its export's, in its dtype; None if they are the same."""
    with computing_as_exported(student):
        exported = _recorded_logits(student, prompts)
    # Outside of `computing_as_exported`, the student runs on its own kernels.
    own = _recorded_logits(student, prompts)
    difference = program.largest_difference(own, exported) / prompts.scale
    if difference == 0.0:
        return None
    if not difference <= limit:  # a NaN is not within it
        log.warning(
            "the student's kernels compute logits that differ from plain torch by %.2g of the largest one; rounding "
            "accounts for at most %.2g: measure the student again with --student.kernels torch",
            difference,
            limit,
        )
    return {"implementation": student.ssm_implementation, "difference": difference}


def _recorded_logits(student: HybridForCausalLM, prompts: Prompts) -> list[Tensor]:
    """Compute the columns [L, C] of each prompt's logits that a record holds."""
    with eval_mode(student):
        return [logits_of_prompt(student, ids_L)[:, prompts.columns] for ids_L in prompts.ids]
