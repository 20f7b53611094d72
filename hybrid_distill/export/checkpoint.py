"""Writer of export folders: weights, configuration, code, tokenizer, plan, scores, results, model card.

Three forms are for transformers: ``remote-code``, the student with its Python files; ``falcon-h1``, the same function
as a stock `FalconH1ForCausalLM`; ``safetensors``, the student for this package to reload. The others are for other
programs (engines.py).
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..evaluation.evaluate import EvalResult
from ..guard import INDEX, MARK, MODEL_CODE
from ..io import Record, file_hash, read_json, save_tensors, write_json, write_text
from ..locking import locked
from ..model import HybridForCausalLM
from ..plan import HeadPlan
from ..scoring import HeadScores
from ..student.dtypes import check_one_dtype
from . import gate as export_gate
from .card import UNKNOWN, model_card
from .check import PACKAGES
from .engines import absent_program, writer
from .falcon_h1 import configuration
from .gate import ExportError, GateReport
from .versions import checked_transformers

Form = Literal["remote-code", "falcon-h1", "safetensors", "vllm", "gguf", "mlx", "onnx"]
log = logging.getLogger(__name__)
AUTO_MAP = {
    "AutoConfig": "configuration_hybrid.HybridConfig",
    "AutoModel": "modeling_hybrid.HybridModel",
    "AutoModelForCausalLM": "modeling_hybrid.HybridForCausalLM",
    "AutoModelForSequenceClassification": "modeling_hybrid.HybridForSequenceClassification",
}


def export_checkpoint(
    student: HybridForCausalLM,
    tokenizer: PreTrainedTokenizerBase | None,
    path: str | Path,
    *,
    plan: HeadPlan,
    form: Form = "remote-code",
    results: Mapping[str, EvalResult] | None = None,
    scores: HeadScores | None = None,
    max_shard_size: int | str = "2GB",
    gate: bool = True,
    license: str = UNKNOWN,
    base_model: str = "",
    training: Sequence[Record] = (),
) -> GateReport:
    """Export ``student``, by default for ``AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)``.

    ``results`` maps "teacher" and "student" to their evaluations, for the model card. ``license`` (a hub identifier)
    and ``base_model`` are the teacher's. ``training`` holds the name, steps and tokens of each stage. The folder
    appears, or replaces an earlier export, only when it is complete and has passed the gate (`verify_export`).

    Raises ExportError when the student cannot be stored or fails the gate; ValueError when ``plan`` is not
    the student's, its parameters have several dtypes, ``path`` holds anything but an export, or ``form`` cannot
    express the student.
    """
    path = Path(path)
    check_one_dtype(student)
    plan.check_fits(student)
    kept = [list(plan.kept_in(layer)) for layer in range(plan.n_layers)]
    if kept != [list(heads) for heads in student.config.kept]:
        raise ValueError(f"the plan keeps {kept}, the student {student.config.kept}; pass the plan it was built with.")
    if not path.is_dir() and (path.exists() or path.is_symlink()):
        raise ValueError(f"{path} is not a folder; pass a new folder, or an export to replace.")
    if path.is_dir() and any(path.iterdir()) and not (path / MARK).is_file():
        raise ValueError(f"{path} holds files that are not an export; pass a new folder, or an export to replace.")
    tied = tied_weights(student)
    module, files = writer(form, student), None
    with replacing_folder(path) as folder:
        if tokenizer is not None:
            write_tokenizer(tokenizer, folder)
        if student.generation_config is not None:
            student.generation_config.save_pretrained(folder)
        if module is not None and form in PACKAGES:
            module.write(student, tokenizer, folder)
            files = {found.name: file_hash(found) for found in sorted(folder.iterdir())}
        else:
            write_weights(export_gate.stored_tensors(student, form), folder, tied, max_shard_size)
            write_configuration(student, folder, form)
            for file in MODEL_CODE.glob("[!_]*.py") if form == "remote-code" else ():
                shutil.copyfile(file, folder / file.name)
        plan.save(folder / "plan.json")
        if scores is not None:
            replace(scores, provenance=_without_paths(scores.provenance)).save(folder / "head_scores.json")
        if results is not None:
            record = {name: result.to_dict() for name, result in results.items()}
            write_json(folder / "evaluation.json", _without_paths(record))
        if training:
            write_json(folder / "training.json", {"stages": list(training)})
        record = export_gate.write_record(student, tokenizer, folder, tied=tied, form=form, files=files)
        origin = {"license": license, "base_model": base_model, "kernels": record["kernels"]}
        card = model_card(student, plan, results, scores, form=form, training=training, **origin)
        write_text(folder / "README.md", card)
        if gate and (absent := absent_program(form)):
            log.warning("%s was not checked: %s", path, absent)
        elif gate:
            report = export_gate.run_gate(folder, str(student.device), called=path).require(path)
            write_json(folder / "gate" / "report.json", report.to_dict())
            return report
        return GateReport()


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder that replaces ``path`` if the block succeeds, and is deleted otherwise.

    Leftovers of a killed process are restored or deleted first. The old folder is moved aside, and deleted at the end.
    Raises InUse when another process is writing ``path``, ExportError when the disk is full or not writable.
    """
    new, old = (path.with_name(f".{path.name}.{word}.tmp") for word in ("new", "old"))
    with locked(path, beside=True):
        if old.exists() and not path.exists():
            old.rename(path)
        for left in (new, old):
            shutil.rmtree(left, ignore_errors=True)
        try:
            new.mkdir()
            yield new
            if path.exists():
                path.rename(old)
            try:
                new.rename(path)
            except OSError:
                if old.exists():
                    old.rename(path)
                raise
        except (OSError, SafetensorError) as error:
            there = "the earlier export is unchanged" if path.exists() else "no partial export is left"
            raise ExportError(f"cannot write {path} ({error}); {there}: make room and export again.") from error
        finally:
            shutil.rmtree(new, ignore_errors=True)
            if path.exists():
                shutil.rmtree(old, ignore_errors=True)


def tied_weights(student: HybridForCausalLM) -> Mapping[str, str]:
    """Map the name of each tied tensor, which is not stored, to the name it is stored under."""
    return student._tied_weights_keys if student.config.tie_word_embeddings else {}


def write_weights(
    tensors: Mapping[str, Tensor], folder: Path, tied: Mapping[str, str], max_shard_size: int | str = "2GB"
) -> None:
    """Write safetensors files and, if there are several, their index. Raises ExportError for an empty tensor."""
    state = {name: tensor for name, tensor in tensors.items() if name not in tied}
    if empty := [name for name, tensor in state.items() if tensor.numel() == 0]:
        raise ExportError(f"empty tensors: {', '.join(empty[:5])}; gather a sharded model (ZeRO-3, FSDP) first.")
    split = split_torch_state_dict_into_shards(state, max_shard_size=max_shard_size)
    for file, names in split.filename_to_tensors.items():
        save_tensors(folder / file, {name: state[name].detach().cpu().contiguous() for name in names})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": dict(sorted(split.tensor_to_filename.items()))}
        write_json(folder / INDEX, index)


def write_configuration(student: HybridForCausalLM, folder: Path, form: Form) -> None:
    """Write config.json, with an ``auto_map`` to the code for the form remote-code."""
    if form == "falcon-h1":
        config = configuration(student)
    else:
        config = json.loads(student.config.to_json_string())
        for name in ("_name_or_path", "auto_map"):
            config.pop(name, None)
        config["architectures"] = [type(student).__name__]
        config["dtype"] = str(student.dtype).removeprefix("torch.")
        config["checked_attention"] = export_gate.checked_attention(student)
        config["checked_transformers"] = checked_transformers(student.config.backbone["model_type"])
    if form == "remote-code":
        config["auto_map"] = AUTO_MAP
    write_json(folder / "config.json", config)


def write_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write tokenizer files that transformers 4 can read too."""
    tokenizer.save_pretrained(folder)
    config = read_json(path := folder / "tokenizer_config.json")
    if config.get("tokenizer_class") == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(config.get("extra_special_tokens"), list):
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    # By default, version 4 adds token_type_ids, which `generate` rejects.
    config["model_input_names"] = [name for name in tokenizer.model_input_names if name != "token_type_ids"]
    write_json(path, config)


def _without_paths(value: Any) -> Any:
    """Shorten absolute paths in a JSON record to their last component."""
    if isinstance(value, dict):
        return {name: _without_paths(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_paths(item) for item in value]
    return Path(value).name if isinstance(value, str) and Path(value).expanduser().is_absolute() else value
