"""Loading teachers: fingerprints, folders, the hub, and models that cannot be loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import has_facts
from planted import word_tokenizer
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, PreTrainedModel

from hybrid_distill.plan import HeadPlan
from hybrid_distill.student.build import build_student
from hybrid_distill.teacher import (
    fingerprint,
    hub_error,
    load_config,
    load_teacher,
    load_tokenizer,
    longest_context,
    read_teacher,
)
from hybrid_distill.teacher.location import RECIPE_FLAG, check_not_missing_path

FamilyModel = Callable[..., PreTrainedModel]


@torch.no_grad()
def test_fingerprints_tell_teachers_apart(family_model: FamilyModel) -> None:
    model = family_model("llama")
    own = fingerprint(model)
    # The dtype does not count.
    rounded = family_model("llama").to(torch.bfloat16)
    assert fingerprint(rounded) == own
    assert fingerprint(rounded.float()) == own

    assert fingerprint(family_model("llama", seed=1)) != own
    assert fingerprint(family_model("mistral")) != own
    model.model.layers[2].self_attn.k_proj.weight += 0.01
    assert fingerprint(model) != own


@torch.no_grad()
def test_a_fingerprint_sees_every_head(family_model: FamilyModel) -> None:
    """Weights of 512 x 512: an even stride through them would read one column of each."""
    shape = {"hidden_size": 512, "num_attention_heads": 64, "head_dim": 8, "num_hidden_layers": 1}
    model = family_model("llama", num_key_value_heads=64, **shape)
    attention = model.model.layers[0].self_attn
    own = fingerprint(model)
    for head in range(64):
        of_head = slice(8 * head, 8 * head + 8)
        for weight in (attention.o_proj.weight[:, of_head], attention.q_proj.weight[of_head]):
            original = weight.clone()
            weight.zero_()
            assert fingerprint(model) != own
            weight.copy_(original)
    assert fingerprint(model) == own


def test_a_fingerprint_sees_settings_that_change_what_the_weights_compute(
    family_model: FamilyModel,
) -> None:
    own = fingerprint(family_model("llama"))
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert fingerprint(family_model("llama", rope_parameters={"rope_theta": 1e4, **yarn})) != own
    assert fingerprint(family_model("llama", rope_parameters={"rope_theta": 5e5})) != own
    # The same, spelled otherwise: as a checkpoint's config.json may.
    spelled = {"rope_theta": 10_000, "rope_type": "default", "type": "default"}
    assert fingerprint(family_model("llama", rope_parameters=spelled)) == own
    windowed = family_model("mistral", sliding_window=3)
    assert fingerprint(windowed) != fingerprint(family_model("mistral", sliding_window=4))


def test_fingerprints_tell_students_of_windows_apart(family_model: FamilyModel) -> None:
    """Their attention stays whole: no parameter shows which heads are kept, or how far the others see."""
    teacher = family_model("llama")
    plans = [HeadPlan.from_pairs(teacher, [pair]) for pair in ((0, 0), (1, 1))]
    students = []
    for plan, window, sinks in (
        (plans[0], 7, 2),
        (plans[0], 3, 2),
        (plans[0], 7, 0),
        (plans[1], 7, 2),
    ):
        student, _ = build_student(teacher, plan, d_state=0, window=window, sinks=sinks)
        students.append(fingerprint(student))
    assert len({*students, fingerprint(teacher)}) == 5


@pytest.fixture
def folder(tmp_path: Path, family_model: FamilyModel) -> Path:
    """Write a teacher as a Hugging Face folder."""
    path = tmp_path / "teacher"
    tokenizer = word_tokenizer(["a few words"])
    model = family_model("llama", vocab_size=len(tokenizer), num_hidden_layers=2)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def refusal(load: Callable[..., object], *args: object, **options: object) -> str:
    """Return the message of the ValueError that loading raises, which is one line."""
    with pytest.raises(ValueError) as error:
        load(*args, **options)
    message = str(error.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("rope", "reach"),
    [
        ({"rope_type": "default"}, 256),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
        ({"rope_type": "dynamic", "factor": 2.0}, 512),
        ({"rope_type": "linear", "factor": 2.0}, 256),
    ],
    ids=["default", "yarn", "dynamic", "linear"],
)
def test_the_reach_of_a_config(rope: dict[str, Any], reach: int) -> None:
    parameters = {"rope_theta": 1e4, **rope}
    config = LlamaConfig(max_position_embeddings=256, rope_parameters=parameters)
    assert longest_context(config) == reach


def test_a_local_folder_is_loaded(folder: Path, set_cpu_bf16) -> None:
    model, tokenizer = load_teacher(folder)
    assert tokenizer("few words")["input_ids"] == [2, 3]
    assert model.dtype == torch.float32
    assert not model.training
    assert model.name_or_path == str(folder)

    rounded, _ = load_teacher(str(folder), dtype="bfloat16")
    assert fingerprint(rounded) == fingerprint(model)
    set_cpu_bf16(True)
    fast, _ = load_teacher(folder, dtype="auto")
    assert fast.dtype == torch.bfloat16
    set_cpu_bf16(False)
    slow, _ = load_teacher(folder, dtype="auto")
    assert slow.dtype == torch.float32
    eager, _ = load_teacher(folder, attn_implementation="eager")
    assert eager.config._attn_implementation == "eager"


def test_a_damaged_or_incomplete_folder_is_refused_in_one_line(folder: Path) -> None:
    tokenizer = folder / "tokenizer.json"
    weights = folder / "model.safetensors"
    content = tokenizer.read_text()
    tokenizer.write_text("{}")
    assert "--tokenizer" in refusal(load_tokenizer, folder, "--tokenizer")
    tokenizer.write_text(content)

    weights.write_bytes(b"not a safetensors file")
    assert str(folder) in refusal(load_teacher, folder)
    weights.unlink()
    message = refusal(load_teacher, folder)
    assert "*.safetensors" in message
    assert "--teacher.path" in message

    (folder / "config.json").unlink()
    message = refusal(load_teacher, str(folder))
    assert "config.json" in message
    assert str(folder) in message


def test_a_name_that_is_neither_a_folder_nor_on_the_hub_is_refused_in_one_line(
    tmp_path: Path,
) -> None:
    hub_id = "somebody/no-such-teacher"
    nowhere = tmp_path / "nowhere"
    message = refusal(load_teacher, hub_id)
    assert hub_id in message
    assert "--teacher.path" in message
    assert "make demo" in message
    for path in (nowhere, "./nowhere", str(nowhere)):
        assert has_facts(
            refusal(check_not_missing_path, path, RECIPE_FLAG), "--teacher.path", repr(str(path))
        )
        assert refusal(load_teacher, path) == refusal(check_not_missing_path, path, RECIPE_FLAG)

    # Another program's flag is named, and the demo is a recipe's.
    for path in (nowhere, tmp_path, hub_id):
        message = refusal(load_teacher, path, flag="--model")
        assert message.startswith(f"--model '{path}' ")
        assert "teacher.path" not in message
        assert "make demo" not in message


def test_an_unknown_dtype_is_refused_in_one_line() -> None:
    assert "float8" in refusal(load_teacher, "tiny", dtype="float8")


def test_without_a_network_the_hub_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = []

    class Session:
        def head(self, url: str, timeout: float) -> None:
            requests.append(url)
            raise OSError("Name or service not known")

    def download(*args: object, **kwargs: object) -> None:
        raise AssertionError("huggingface_hub would retry for 25 seconds a file")

    location = "hybrid_distill.teacher.location"
    monkeypatch.setattr(f"{location}.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(f"{location}.get_session", Session)
    monkeypatch.setattr("huggingface_hub.file_download.get_hf_file_metadata", download)
    hub_error.cache_clear()
    try:
        for load in (load_config, read_teacher, load_teacher):
            message = refusal(load, "nobody/nothing")
            assert "Name or service not known" in message
            assert "cache" in message
    finally:
        hub_error.cache_clear()
    assert len(requests) == 1


def test_a_checkpoint_that_lacks_a_tensor_is_refused(
    folder: Path, family_model: FamilyModel
) -> None:
    """transformers would fill it with random numbers. Tied embeddings are not missing."""
    name = "model.layers.1.self_attn.k_proj.weight"
    path = folder / "model.safetensors"
    weights = load_file(path)
    del weights[name]
    save_file(weights, path, metadata={"format": "pt"})
    assert name in refusal(load_teacher, folder)

    family_model("llama", tie_word_embeddings=True).save_pretrained(folder)
    model, _ = load_teacher(folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_code_in_a_checkpoint_is_never_run(folder: Path) -> None:
    path = folder / "config.json"
    trace = folder / "ran"
    config = json.loads(path.read_text())
    config["model_type"] = "surprise"
    config["auto_map"] = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    path.write_text(json.dumps(config))
    (folder / "code.py").write_text(f"open({str(trace)!r}, 'w')")
    refusal(load_teacher, folder)
    refusal(load_config, folder)
    assert not trace.exists()
