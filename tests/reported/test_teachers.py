"""Which models can be teachers: every command checks it before it computes anything."""

from pathlib import Path

import pytest
import torch
from conftest import make_family_model
from students import only_error
from torch.testing import assert_close
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma3Config,
    PreTrainedModel,
)

from hybrid_distill.cli import import_gguf
from hybrid_distill.cli.app import main
from hybrid_distill.plan import HeadPlan
from hybrid_distill.student.build import build_student
from hybrid_distill.student.teachers import check_teacher
from hybrid_distill.teacher import load_teacher
from hybrid_distill.vocabulary import vocabulary_size


@pytest.fixture(scope="module")
def multimodal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gemma 3 with images, at a tiny size, and the embedded teacher's tokenizer."""
    folder = tmp_path_factory.mktemp("gemma")
    _, tokenizer = load_teacher("tiny")
    text = {
        "vocab_size": vocabulary_size(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 1024,
    }
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


RECIPE = """
from hybrid_distill.config import RunConfig
from hybrid_distill.train.config import Distill


def config():
    return RunConfig(stages=(Distill(), Distill(name="post")))
"""
COMMANDS = {
    "score": "score --model {model} --out {out}/scores.json",
    "dry run": "run tiny --teacher.path {model} --dry-run --out {out}",
    "run": "run tiny --teacher.path {model} --out {out}",
    "post teacher": "run {recipe} --post.teacher {model} --dry-run --out {out}",
    "prune": "analyze prune-layers --model {model} --out {out}",
    "keep": "analyze keep-heads --keep 1:0 --model {model} --out {out}",
    "maps": "analyze maps --model {model} --out {out}",
    "generate": "generate-data --model {model} --tokens 200 --out {out}",
    "cache": "cache-logits tiny --teacher.path {model} --distill.teacher-logits {out}",
    "memory": "memory --model {model}",
    "sweep": "sweep --set teacher.path={model} --out {out}",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_model_that_wraps_its_language_model_is_refused_before_weights_are_read(
    multimodal, tmp_path, capsys, monkeypatch, name
):
    """lm-polygraph#435: a multimodal Gemma 3 was scored for an hour, then "has no head counts"."""
    monkeypatch.setattr(
        AutoModelForCausalLM,
        "from_pretrained",
        lambda *_, **__: pytest.fail("weights were read"),
    )
    out = tmp_path / "out"
    recipe = tmp_path / "recipe.py"
    recipe.write_text(RECIPE)
    with pytest.raises(SystemExit, match="2"):
        main(COMMANDS[name].format(model=multimodal, recipe=recipe, out=out).split())
    line = only_error(capsys.readouterr().err)
    assert str(multimodal) in line
    assert "Gemma3ForConditionalGeneration" in line
    assert not out.exists() or not list(out.iterdir())


def test_its_language_model_is_a_teacher(multimodal):
    """As docs/heads.md takes it out."""
    whole: PreTrainedModel = AutoModelForImageTextToText.from_pretrained(multimodal)
    config = whole.config.get_text_config(decoder=True)
    text: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    text.base_model.load_state_dict(whole.model.language_model.state_dict())
    text.lm_head.load_state_dict(whole.lm_head.state_dict())
    ids = torch.arange(12)[None] + 5
    with torch.no_grad():
        assert_close(text.eval()(ids).logits, whole.eval()(ids).logits)

    check_teacher(text.config, name="text", heads=True)
    student, _ = build_student(text, HeadPlan.all(text.config), d_state=4)
    with torch.no_grad():
        assert torch.equal(student(ids).logits, text(ids).logits)


def test_heads_that_cannot_be_replaced_are_known_without_weights():
    config = make_family_model("llama").config
    check_teacher(config, name="llama", heads=True)
    mamba = AutoModelForCausalLM.from_config(_mamba()).config
    check_teacher(mamba, name="mamba")  # its logits and text are as good as any
    with pytest.raises(ValueError, match="self_attn"):
        check_teacher(mamba, name="mamba", heads=True)


def _mamba():
    from transformers import Mamba2Config

    return Mamba2Config(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=1,
        num_heads=8,
        head_dim=8,
        state_size=8,
        n_groups=1,
    )


def test_a_gguf_file_is_asked_before_its_weights_are_converted(tmp_path, capsys, monkeypatch):
    (tmp_path / "model.gguf").touch()
    _, tokenizer = load_teacher("tiny")
    monkeypatch.setattr(import_gguf, "find_spec", lambda name: name)
    monkeypatch.setattr(import_gguf.AutoConfig, "from_pretrained", lambda *_, **__: _mamba())
    monkeypatch.setattr(import_gguf.AutoTokenizer, "from_pretrained", lambda *_, **__: tokenizer)
    monkeypatch.setattr(
        AutoModelForCausalLM,
        "from_pretrained",
        lambda *_, **__: pytest.fail("weights were read"),
    )
    with pytest.raises(SystemExit, match="2"):
        main(["import-gguf", str(tmp_path / "model.gguf"), str(tmp_path / "out")])
    assert "self_attn" in only_error(capsys.readouterr().err)
    assert not (tmp_path / "out").exists()
