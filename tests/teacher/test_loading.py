"""Loading teachers: fingerprints, folders, the hub, and models that cannot be loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from planted import word_tokenizer
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, PreTrainedModel

from hybrid_distill.teacher import (
    fingerprint,
    hub_error,
    load_config,
    load_teacher,
    load_tokenizer,
    longest_context,
    read_teacher,
)

FamilyModel = Callable[..., PreTrainedModel]


@torch.no_grad()
def test_fingerprints_tell_teachers_apart(family_model: FamilyModel) -> None:
    model = family_model("llama")
    known = fingerprint(model)
    assert fingerprint(family_model("llama").to(torch.bfloat16)) == known
    assert fingerprint(family_model("llama").to(torch.bfloat16).float()) == known
    assert fingerprint(family_model("llama", seed=1)) != known
    assert fingerprint(family_model("mistral")) != known
    model.model.layers[2].self_attn.k_proj.weight += 0.01
    assert fingerprint(model) != known


@pytest.fixture
def folder(tmp_path: Path, family_model: FamilyModel) -> Path:
    """A teacher as a Hugging Face folder."""
    tokenizer = word_tokenizer(["a few words"])
    family_model("llama", vocab_size=len(tokenizer), num_hidden_layers=2).save_pretrained(tmp_path / "teacher")
    tokenizer.save_pretrained(tmp_path / "teacher")
    return tmp_path / "teacher"


def one_line(error: pytest.ExceptionInfo[ValueError]) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("rope", "reach"),
    [
        ({"rope_type": "default"}, 256),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
        ({"rope_type": "dynamic", "factor": 2.0}, 512),
        ({"rope_type": "linear", "factor": 2.0}, 256),
    ],
    ids=lambda value: value["rope_type"] if isinstance(value, dict) else "",
)
def test_the_reach_of_a_config(rope, reach) -> None:
    config = LlamaConfig(max_position_embeddings=256, rope_parameters={"rope_theta": 1e4, **rope})
    assert longest_context(config) == reach


def test_a_local_folder_is_loaded(folder) -> None:
    model, tokenizer = load_teacher(folder)
    assert tokenizer("few words")["input_ids"] == [2, 3]
    assert model.dtype == torch.float32 and not model.training
    assert model.name_or_path == str(folder)
    assert fingerprint(model) == fingerprint(load_teacher(str(folder), dtype="bfloat16")[0])
    assert load_teacher(folder, attn_implementation="eager")[0].config._attn_implementation == "eager"


def test_a_teacher_that_cannot_be_loaded_is_refused_in_one_line(folder, tmp_path) -> None:
    tokenizer = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"^--tokenizer .* cannot be loaded") as error:
        load_tokenizer(folder, "--tokenizer")
    one_line(error)
    (folder / "tokenizer.json").write_text(tokenizer)
    (folder / "model.safetensors").write_bytes(b"not a safetensors file")
    with pytest.raises(ValueError, match="cannot be loaded") as error:
        load_teacher(folder)
    one_line(error)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="has no weights") as error:
        load_teacher(folder)
    assert "--teacher.path" in one_line(error)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"has no config\.json") as error:
        load_teacher(str(folder))
    assert str(folder) in one_line(error)
    with pytest.raises(ValueError, match="somebody/no-such-teacher") as error:
        load_teacher("somebody/no-such-teacher")
    assert "--teacher.path" in one_line(error) and "make demo" in one_line(error)
    with pytest.raises(ValueError, match="dtype is 'float8'"):
        load_teacher("tiny", dtype="float8")
    for path in (tmp_path / "nowhere", "./nowhere", str(tmp_path / "nowhere")):
        with pytest.raises(ValueError, match="is not a folder"):
            load_teacher(path)
    for path in (tmp_path / "nowhere", tmp_path, "somebody/no-such-model"):
        with pytest.raises(ValueError, match=f"^--model '{path}' ") as error:
            load_teacher(path, flag="--model")
        assert "teacher.path" not in one_line(error) and "make demo" not in one_line(error)


def test_without_a_network_the_hub_is_asked_once(monkeypatch) -> None:
    asked = []

    class Session:
        def head(self, url: str, timeout: float) -> None:
            asked.append(url)
            raise OSError("Name or service not known")

    def request(*args, **kwargs) -> None:
        raise AssertionError("huggingface_hub was sent to the network, where it retries for 25 seconds a file")

    monkeypatch.setattr("hybrid_distill.teacher.location.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("hybrid_distill.teacher.location.get_session", Session)
    monkeypatch.setattr("huggingface_hub.file_download._request_wrapper", request, raising=False)
    monkeypatch.setattr("huggingface_hub.file_download.get_hf_file_metadata", request)
    hub_error.cache_clear()
    try:
        for read in (load_config, read_teacher, load_teacher):
            with pytest.raises(ValueError, match="Name or service not known, and it is not in the cache") as error:
                read("nobody/nothing")
            one_line(error)
    finally:
        hub_error.cache_clear()
    assert len(asked) == 1


def test_a_checkpoint_that_lacks_a_tensor_is_refused(folder, family_model) -> None:
    """transformers would fill it with random numbers. Tied embeddings are not missing."""
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.self_attn.k_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"weights lack model.layers.1.self_attn.k_proj.weight") as error:
        load_teacher(folder)
    one_line(error)
    family_model("llama", tie_word_embeddings=True).save_pretrained(folder)
    model, _ = load_teacher(folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_code_in_a_checkpoint_is_never_run(folder) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "surprise",
        "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    with pytest.raises(ValueError, match="cannot be loaded"):
        load_teacher(folder)
    with pytest.raises(ValueError, match="no config"):
        load_config(folder)
    assert not (folder / "ran").exists()
