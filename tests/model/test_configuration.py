"""A student's config speaks for the backbone: to read, to write, to save; and its flags reach the decoder."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_family_model
from students import close, logits, mixed_student, since, tokens
from transformers import AutoModelForCausalLM

from hybrid_distill.model import HybridConfig, HybridForCausalLM
from hybrid_distill.model.layout import cache_of

NOT_SHARED = {
    "_name_or_path",
    "architectures",
    "dtype",
    "model_type",
    "transformers_version",
}


@pytest.fixture
def student() -> HybridForCausalLM:
    return mixed_student(make_family_model("llama"))


@since("5.5.0")
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gpt_neox", "phi3"])
def test_every_field_of_the_backbone_is_a_field_of_the_student(name: str) -> None:
    teacher = make_family_model(name)
    config = mixed_student(teacher).config
    fields = config.to_dict()
    for field, value in teacher.config.to_dict().items():
        if field not in NOT_SHARED and value is not None:
            assert getattr(config, field) == value
            assert fields[field] == value
    for field in (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    ):
        assert isinstance(fields[field], int)
    again = HybridConfig.from_dict(fields)
    assert again.to_dict() == fields
    assert not hasattr(config, "no_such_field")


def test_a_field_that_is_written_reaches_the_decoder_and_the_file(
    student: HybridForCausalLM, tmp_path: Path
) -> None:
    student.config.max_position_embeddings = 77
    student.config.rope_parameters = {"rope_type": "default", "rope_theta": 500.0}
    assert student.model.config.max_position_embeddings == 77
    student.save_pretrained(tmp_path)
    loaded = HybridForCausalLM.from_pretrained(tmp_path)
    for config in (loaded.config, loaded.model.config):
        assert config.max_position_embeddings == 77
        assert config.rope_parameters["rope_theta"] == 500.0
    assert loaded.config.backbone["max_position_embeddings"] == 77


def test_a_keyword_of_the_backbone_is_taken(
    student: HybridForCausalLM, tmp_path: Path
) -> None:
    config = HybridConfig(
        student.config.backbone,
        student.config.kept,
        d_state=5,
        max_position_embeddings=1024,
    )
    assert (
        config.max_position_embeddings == config.backbone["max_position_embeddings"] == 1024
    )
    rope = {"rope_type": "linear", "rope_theta": 77.0, "factor": 2.0}
    config = HybridConfig(
        student.config.backbone, student.config.kept, d_state=5, rope_parameters=rope
    )
    assert config.backbone_config().rope_parameters == rope
    student.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, max_position_embeddings=1024)
    assert loaded.model.config.max_position_embeddings == 1024


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("vocab_size", "many"),
        ("num_hidden_layers", 2),  # `kept` has three lists
        ("num_attention_heads", 4),  # `kept` names head 7
        ("kept", [[0], [1]]),
        ("d_state", 0),
        ("backbone", {}),
    ],
)
def test_a_value_that_means_nothing_is_refused(
    name: str, value: Any, student: HybridForCausalLM
) -> None:
    before = student.config.to_dict()
    with pytest.raises(ValueError, match="kept" if name.startswith("num_") else name):
        setattr(student.config, name, value)
    assert student.config.to_dict() == before


def test_the_attention_implementation_is_that_of_the_decoder(
    student: HybridForCausalLM,
) -> None:
    fields = student.config.to_dict()
    config = HybridConfig(**fields, attn_implementation="eager")
    assert config.shared_backbone()._attn_implementation == "eager"
    config._attn_implementation = "sdpa"
    assert config.shared_backbone()._attn_implementation == "sdpa"
    assert HybridForCausalLM(config).model.config._attn_implementation == "sdpa"


def test_a_rope_keyword_of_transformers_4_beside_rope_parameters_is_refused(
    student: HybridForCausalLM,
) -> None:
    with pytest.raises(ValueError, match=r"rope_theta is 3\.0"):
        HybridConfig(
            student.config.backbone, student.config.kept, d_state=5, rope_theta=3.0
        )


def test_resized_embeddings_are_saved_and_loaded(
    student: HybridForCausalLM, tmp_path: Path
) -> None:
    student.config.pad_token_id = 104
    student.resize_token_embeddings(105)
    assert student.config.vocab_size == student.model.config.vocab_size == 105
    student.save_pretrained(tmp_path)
    ids = tokens(1, 9)
    close(logits(HybridForCausalLM.from_pretrained(tmp_path), ids), logits(student, ids))


@torch.no_grad()
@pytest.mark.parametrize("way", ["written", "keyword"])
def test_flags_of_the_config_are_followed(
    way: str, student: HybridForCausalLM, tmp_path: Path
) -> None:
    def with_flag(name: str, value: Any) -> HybridForCausalLM:
        if way == "keyword":
            return HybridForCausalLM.from_pretrained(tmp_path, **{name: value})
        model = HybridForCausalLM.from_pretrained(tmp_path)
        setattr(model.config, name, value)
        return model

    student.save_pretrained(tmp_path)
    ids = tokens(2, 9)
    expected = logits(student, ids)

    model = with_flag("output_hidden_states", True)
    for output in (model(ids), model.model(ids)):
        assert len(output.hidden_states) == 4
    assert model(ids, output_hidden_states=False).hidden_states is None

    model = with_flag("use_cache", False)
    for output in (model(ids), model.model(ids)):
        assert cache_of(output) is None
    assert cache_of(model(ids, use_cache=True)) is not None

    model = with_flag("return_dict", False)
    for output in (model(ids), model.model(ids)):
        assert type(output) is tuple
    close(model(ids)[0], expected)
    close(model(ids, return_dict=True).logits, expected)
    assert torch.equal(
        model.generate(ids, max_new_tokens=3), student.generate(ids, max_new_tokens=3)
    )


@torch.no_grad()
def test_attentions_are_those_of_the_kept_heads(student: HybridForCausalLM) -> None:
    student.set_attn_implementation("eager")
    student.config.output_attentions = True
    ids = tokens(2, 9)
    for output in (student(ids), student.model(ids)):
        assert [tuple(maps.shape) for maps in output.attentions] == [
            (2, 3, 9, 9),
            (2, 7, 9, 9),
        ]


@torch.no_grad()
def test_embeddings_are_tied_as_the_config_says_and_load_so(tmp_path: Path) -> None:
    student = mixed_student(make_family_model("qwen2", tie_word_embeddings=True))
    ids = tokens(2, 9)

    def apart(model: HybridForCausalLM, name: str) -> HybridForCausalLM:
        model.save_pretrained(tmp_path / name)
        loaded = HybridForCausalLM.from_pretrained(tmp_path / name)
        assert loaded.lm_head.weight is not loaded.model.embed_tokens.weight
        assert (
            loaded.config.tie_word_embeddings
            is loaded.config.backbone["tie_word_embeddings"]
            is False
        )
        close(logits(loaded, ids), logits(model, ids))
        return loaded

    student.save_pretrained(tmp_path / "tied")
    config = HybridConfig.from_pretrained(tmp_path / "tied", tie_word_embeddings=False)
    apart(HybridForCausalLM(config).eval(), "made untied")
    student.config.tie_word_embeddings = False
    apart(apart(student, "untied later"), "again")
    with pytest.raises(
        ValueError, match="tie_word_embeddings=False"
    ):  # the file has one tensor for both
        HybridForCausalLM.from_pretrained(tmp_path / "tied", tie_word_embeddings=False)
