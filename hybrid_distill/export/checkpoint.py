"""Write an exported folder: weights, configuration, code, tokenizer, plan, scores, results, model card.

Its form is one of three: ``remote-code``, the student with its Python files; ``falcon-h1``, the same function as a
stock `FalconH1ForCausalLM`; ``safetensors``, the student for this package to reload.
"""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, cast

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from ..evaluation.evaluate import EvalResult
from ..locking import locked
from ..model import HybridForCausalLM
from ..model.configuration_hybrid import ATTENTION
from ..plan import HeadPlan
from ..scoring import HeadScores
from . import gate as export_gate
from .card import UNKNOWN, model_card
from .falcon_h1 import configuration
from .gate import ExportError, GateReport
from .versions import oldest_transformers

# Present in every export: a folder without it is not ours to replace.
MARK = Path("gate") / "reference.json"
Form = Literal["remote-code", "falcon-h1", "safetensors"]


def export_checkpoint(
    student: PreTrainedModel,
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
    training: Sequence[Mapping[str, Any]] = (),
) -> GateReport:
    """Write ``student`` so that ``AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)`` is it.

    The form ``falcon-h1`` needs no trust, ``safetensors`` is read by ``HybridForCausalLM.from_pretrained(path)``.
    ``results`` maps "teacher" and "student" to what was measured, for the model card; ``license`` (an
    identifier of the Hugging Face hub) and ``base_model`` are the teacher's; ``training`` has the name, steps and
    tokens of each stage. No path of this machine is written. The folder appears, or
    replaces an earlier export, only when it is complete and has passed the gate (see `verify_export`); a
    failure leaves what was there.

    Raises ExportError when the student cannot be stored or fails the gate; ValueError when ``plan`` is not
    the student's, ``path`` holds something else than an export, or ``form`` cannot express the student.
    """
    path = Path(path)
    _check_plan(student, plan)
    _check_replaceable(path)
    tied = tied_names(student)
    with replacing_folder(path) as folder:
        write_weights(export_gate.stored_tensors(student, form), folder, tied, max_shard_size)
        write_configuration(student, folder, form)
        if form == "remote-code":
            write_code(student, folder)
        if tokenizer is not None:
            write_tokenizer(tokenizer, folder)
        plan.save(folder / "plan.json")
        if scores is not None:
            scores.save(folder / "head_scores.json")
            _write_json(folder / "head_scores.json", _without_paths(_read_json(folder / "head_scores.json")))
        if results is not None:
            record = {name: result.to_dict() for name, result in results.items()}
            _write_json(folder / "evaluation.json", _without_paths(record))
        if training:
            _write_json(folder / "training.json", {"stages": list(training)})
        origin = {"license": license, "base_model": base_model}
        card = model_card(student, plan, results, scores, form=form, training=training, **origin)
        (folder / "README.md").write_text(card, encoding="utf-8")
        texts = export_gate.tokenized(tokenizer)
        export_gate.write_record(student, folder / "gate", texts=texts, tied=tied, form=form)
        if not gate:
            return GateReport()
        report = export_gate.run_gate(folder, folder / "gate", str(student.device), called=path).require(path)
        _write_json(folder / "gate" / "report.json", report.to_dict())
        return report


def _check_plan(student: PreTrainedModel, plan: HeadPlan) -> None:
    plan.check_fits(student)
    kept = [list(plan.kept_in(layer)) for layer in range(plan.n_layers)]
    if kept != [list(heads) for heads in student.config.kept]:
        raise ValueError(
            f"the plan keeps {kept}, the student {student.config.kept}; pass the plan it was built with."
        )


def _check_replaceable(path: Path) -> None:
    if path.is_dir():
        if any(path.iterdir()) and not (path / MARK).is_file():
            raise ValueError(
                f"{path} holds files that are no export; pass a new folder, or an export to replace."
            )
    elif path.exists() or path.is_symlink():
        raise ValueError(f"{path} is not a folder; pass a new folder, or an export to replace.")


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """A new folder beside ``path`` that takes its place when the block ends well, and disappears otherwise.

    The folder that is replaced is moved aside first and deleted last: at no time is there a half-written
    one at ``path``. What a killed process has left is cleared away first, and a folder that it had moved aside is put
    back. Raises InUse when another process is writing ``path``, ExportError when the disk is full or cannot be written.
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
            there = "the export that was there is untouched" if path.exists() else "nothing is left of it"
            raise ExportError(f"cannot write {path} ({error}); {there}: make room and export again.") from error
        finally:
            shutil.rmtree(new, ignore_errors=True)
            if path.exists():
                shutil.rmtree(old, ignore_errors=True)


def tied_names(student: PreTrainedModel) -> dict[str, str]:
    """Names stored under another name: {"lm_head.weight": "model.embed_tokens.weight"}, or nothing.

    Raises ExportError for tensors that share memory without the configuration saying so: after loading they
    would not.
    """
    first_with: dict[tuple[Any, ...], str] = {}
    declared = student._tied_weights_keys or {} if student.config.tie_word_embeddings else {}
    tied = {}
    for name, tensor in sorted(student.state_dict().items(), key=lambda item: item[0] in declared):
        place = (tensor.device, tensor.data_ptr(), tensor.shape)
        twin = first_with.setdefault(place, name) if tensor.numel() else name
        if twin != name:
            if name not in declared:
                raise ExportError(
                    f"{name} shares its memory with {twin}, but the configuration does not say so; clone one."
                )
            tied[name] = twin
    return tied


def write_weights(
    tensors: Mapping[str, Tensor], folder: Path, tied: Mapping[str, str], max_shard_size: int | str
) -> None:
    """Write safetensors and, for more than one file, their index. Raises ExportError for an empty tensor."""
    state = {name: tensor for name, tensor in tensors.items() if name not in tied}
    empty = [name for name, tensor in state.items() if tensor.numel() == 0]
    if empty:
        raise ExportError(
            f"empty tensors: {', '.join(empty[:5])}; gather a sharded model (ZeRO-3, FSDP) before export."
        )
    split = split_torch_state_dict_into_shards(state, max_shard_size=max_shard_size)
    for file, names in split.filename_to_tensors.items():
        shard = {name: state[name].detach().cpu().contiguous() for name in names}
        path = folder / file
        path.touch()
        mode = path.stat().st_mode  # as the user's umask has it; safetensors leaves a file that its owner alone reads
        save_file(shard, path, metadata={"format": "pt"})
        path.chmod(mode)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": dict(sorted(split.tensor_to_filename.items()))}
        _write_json(folder / "model.safetensors.index.json", index)


def write_configuration(student: PreTrainedModel, folder: Path, form: Form) -> None:
    """config.json, which says where remote code is if there is any, and generation_config.json."""
    if form == "falcon-h1":
        config = configuration(cast(HybridForCausalLM, student))
    else:
        config = json.loads(student.config.to_json_string())
        for name in ("_name_or_path", "auto_map"):
            config.pop(name, None)
        config["architectures"] = [type(student).__name__]
        config["dtype"] = str(student.dtype).removeprefix("torch.")
        config["checked_attention"] = _checked_attention(cast(HybridForCausalLM, student))
        config["oldest_transformers"] = oldest_transformers(student.config.backbone["model_type"])
    if form == "remote-code":
        config["auto_map"] = {
            "AutoConfig": _dotted(type(student.config)),
            "AutoModelForCausalLM": _dotted(type(student)),
        }
    _write_json(folder / "config.json", config)
    if student.generation_config is not None:
        student.generation_config.save_pretrained(folder)


def _checked_attention(student: HybridForCausalLM) -> str:
    """The student's own attention implementation; for one that needs a GPU, what transformers takes by itself."""
    own = student.model.config._attn_implementation
    if own in ATTENTION:
        return own
    with torch.device("meta"):
        backbone = AutoModelForCausalLM.from_config(student.config.backbone_config(), trust_remote_code=False)
    return backbone.config._attn_implementation


def write_code(student: PreTrainedModel, folder: Path) -> None:
    """Copy the files of the student's own code; they import one another, torch and transformers."""
    for file in sorted(_file_of(type(student)).parent.glob("*.py")):
        if file.name != "__init__.py":
            shutil.copyfile(file, folder / file.name)


def write_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Tokenizer files, in words that transformers 4 understands too."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    if config.get("tokenizer_class") == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(config.get("extra_special_tokens"), list):
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    _write_json(path, config)


def _file_of(kind: type) -> Path:
    return Path(inspect.getfile(kind))


def _dotted(kind: type) -> str:
    """A class as config.json names it: file and class."""
    return f"{_file_of(kind).stem}.{kind.__name__}"


def _without_paths(value: Any) -> Any:
    """The values of a JSON record with absolute paths cut down to their last part."""
    if isinstance(value, dict):
        return {name: _without_paths(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_without_paths(item) for item in value]
    return Path(value).name if isinstance(value, str) and Path(value).expanduser().is_absolute() else value


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _write_json(path: Path, record: Any) -> None:
    path.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
