"""A student's config is its backbone's: to read, to write, to save; its flags reach the decoder."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_family_model
from students import close, logits, mixed_student, since, tokens
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hybrid_distill.model import HybridConfig, HybridForCausalLM
from hybrid_distill.model.layout import cache_of

SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
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
    for field in SIZES:
        assert isinstance(fields[field], int)
    assert HybridConfig.from_dict(fields).to_dict() == fields
    assert "_name_or_path" not in config.backbone
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


def test_a_keyword_of_the_backbone_is_taken(student: HybridForCausalLM, tmp_path: Path) -> None:
    def with_keyword(**keyword: Any) -> HybridConfig:
        return HybridConfig(student.config.backbone, student.config.kept, d_state=5, **keyword)

    config = with_keyword(max_position_embeddings=1024)
    assert config.max_position_embeddings == 1024
    assert config.backbone["max_position_embeddings"] == 1024

    rope = {"rope_type": "linear", "rope_theta": 77.0, "factor": 2.0}
    assert with_keyword(rope_parameters=rope).backbone_config().rope_parameters == rope
    # It would contradict the backbone's `rope_parameters`.
    with pytest.raises(ValueError, match=r"3\.0"):
        with_keyword(rope_theta=3.0)

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
        ("sinks", 1),
        ("backbone", {}),
    ],
)
def test_a_value_that_means_nothing_is_refused(
    name: str, value: Any, student: HybridForCausalLM
) -> None:
    before = student.config.to_dict()
    named = "kept" if name.startswith("num_") else name
    with pytest.raises(ValueError, match=named):
        setattr(student.config, name, value)
    assert student.config.to_dict() == before


def test_the_attention_implementation_is_that_of_the_decoder(student: HybridForCausalLM) -> None:
    fields = student.config.to_dict()
    config = HybridConfig(**fields, attn_implementation="eager")
    assert config.shared_backbone()._attn_implementation == "eager"
    config._attn_implementation = "sdpa"
    assert config.shared_backbone()._attn_implementation == "sdpa"
    assert HybridForCausalLM(config).model.config._attn_implementation == "sdpa"


def test_resized_embeddings_are_saved_and_loaded(
    student: HybridForCausalLM, tmp_path: Path
) -> None:
    student.config.pad_token_id = 104
    student.resize_token_embeddings(105)
    assert student.config.vocab_size == student.model.config.vocab_size == 105
    student.save_pretrained(tmp_path)
    loaded = HybridForCausalLM.from_pretrained(tmp_path)
    ids = tokens(1, 9)
    close(logits(loaded, ids), logits(student, ids))


@torch.no_grad()
@pytest.mark.parametrize("way", ["written", "keyword"])
def test_flags_of_the_config_are_followed(
    way: str, student: HybridForCausalLM, tmp_path: Path
) -> None:
    student.save_pretrained(tmp_path)
    ids = tokens(2, 9)

    def with_flag(name: str, value: Any) -> HybridForCausalLM:
        if way == "keyword":
            return HybridForCausalLM.from_pretrained(tmp_path, **{name: value})
        model = HybridForCausalLM.from_pretrained(tmp_path)
        setattr(model.config, name, value)
        return model

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
    expected = logits(student, ids)
    logits_BLV, *_ = model(ids)
    close(logits_BLV, expected)
    close(model(ids, return_dict=True).logits, expected)
    text = model.generate(ids, max_new_tokens=3)
    assert torch.equal(text, student.generate(ids, max_new_tokens=3))


@torch.no_grad()
def test_attentions_are_those_of_the_kept_heads(student: HybridForCausalLM) -> None:
    student.set_attn_implementation("eager")
    student.config.output_attentions = True
    ids = tokens(2, 9)
    # Its layers keep three heads, none and seven.
    expected = [(2, 3, 9, 9), (2, 0, 9, 9), (2, 7, 9, 9)]
    for output in (student(ids), student.model(ids)):
        assert [tuple(maps.shape) for maps in output.attentions] == expected


@torch.no_grad()
def test_embeddings_are_tied_as_the_config_says_and_load_so(tmp_path: Path) -> None:
    student = mixed_student(make_family_model("qwen2", tie_word_embeddings=True))
    ids = tokens(2, 9)

    def saved_untied(model: HybridForCausalLM, name: str) -> HybridForCausalLM:
        model.save_pretrained(tmp_path / name)
        loaded = HybridForCausalLM.from_pretrained(tmp_path / name)
        assert loaded.lm_head.weight is not loaded.model.embed_tokens.weight
        assert loaded.config.tie_word_embeddings is False
        assert loaded.config.backbone["tie_word_embeddings"] is False
        close(logits(loaded, ids), logits(model, ids))
        return loaded

    student.save_pretrained(tmp_path / "tied")
    config = HybridConfig.from_pretrained(tmp_path / "tied", tie_word_embeddings=False)
    saved_untied(HybridForCausalLM(config).eval(), "made untied")
    student.config.tie_word_embeddings = False
    later = saved_untied(student, "untied later")
    saved_untied(later, "again")
    # The file has one tensor for both. Auto classes put the option into the config.
    for loader in (HybridForCausalLM, AutoModelForCausalLM):
        with pytest.raises(ValueError, match="tie_word_embeddings=False"):
            loader.from_pretrained(tmp_path / "tied", tie_word_embeddings=False)


# RoPE


def backbone_of(teacher: PreTrainedModel, **fields: Any) -> dict[str, Any]:
    backbone = teacher.config.to_dict() | fields
    return HybridConfig(backbone, [[], [], []], d_state=4).backbone


def test_rope_settings_are_written_in_both_spellings_and_each_familys_words() -> None:
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 5000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    llama = backbone_of(make_family_model("llama"), rope_parameters=scaling)
    assert llama["rope_theta"] == 5000.0
    assert llama["rope_scaling"].items() <= scaling.items()
    assert llama["rope_scaling"]["factor"] == 8.0
    assert llama["rope_scaling"]["rope_type"] == "llama3"

    neox = backbone_of(make_family_model("gpt_neox", rotary_pct=0.5, rotary_emb_base=500.0))
    assert neox["rotary_pct"] == 0.5
    assert neox["rotary_emb_base"] == 500.0

    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    longrope = {"rope_type": "longrope", "rope_theta": 500.0, **factors}
    phi3 = backbone_of(make_family_model("phi3", rope_parameters=longrope))
    assert phi3["rope_scaling"] == {"type": "longrope", **factors}
    assert phi3["rope_theta"] == 500.0


def test_a_rope_for_each_type_of_layer_is_kept_or_refused(monkeypatch) -> None:
    """transformers 5.0 to 5.10 give all layers of OLMo-3 that of the last."""
    rope = {
        "full_attention": {
            "rope_type": "yarn",
            "rope_theta": 500.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    }
    teacher = make_family_model("olmo3", rope_parameters=rope)
    config = HybridConfig(teacher.config.to_dict(), [[], [], []], d_state=4)
    # Those versions would take it for all layers.
    assert "rope_theta" not in config.backbone
    assert config.backbone_config().rope_parameters == config.backbone["rope_parameters"]

    # A version that reads one RoPE for all layers.
    one_rope = make_family_model("olmo2").config
    monkeypatch.setattr(AutoConfig, "for_model", lambda *args, **kwargs: one_rope)
    with pytest.raises(ValueError, match="olmo3"):
        backbone_of(teacher)
