"""The student is the teacher: what kept heads do; and every way to run a student gives one result."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from students import (
    ALL_BUT_ONE,
    BF16_RELATIVE_ERROR,
    THREE,
    close,
    keep,
    left_padded,
    logits,
    mixed_student,
    student_of,
    tokens,
)
from torch import Tensor
from transformers import PreTrainedModel

from hybrid_distill.build import build_student
from hybrid_distill.model import HybridCache, HybridConfig, HybridForCausalLM, packed_inputs
from hybrid_distill.plan import HeadPlan
from hybrid_distill.teacher import ablate_heads, trace_mixers

FamilyModel = Callable[..., PreTrainedModel]

# What makes each family hard: biases, head norms, short windows, layers of two kinds, tied embeddings.
HARD: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "tie_word_embeddings": True},
    "qwen2": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "qwen3": {"attention_bias": True},
    "mistral": {"sliding_window": 6},
}
# 8 heads in 4 KV groups: none; one; three of groups 0, 0, 1; all but one; all.
KEPT_IN_A_LAYER = {
    "none": (),
    "one": (5,),
    "three": THREE,
    "all but one": ALL_BUT_ONE,
    "all": tuple(range(8)),
}


@pytest.fixture
def teacher(family: str, family_model: FamilyModel) -> PreTrainedModel:
    return family_model(family, **HARD[family])


@torch.no_grad()
def test_all_heads_kept_is_the_teacher(teacher: PreTrainedModel) -> None:
    student, _ = build_student(teacher, HeadPlan.all(teacher), d_state=4)
    ids = tokens(2, 19)
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    assert torch.equal(logits(student, ids), logits(teacher, ids))
    assert torch.equal(logits(student, ids, use_cache=False), logits(teacher, ids, use_cache=False))
    assert torch.equal(
        logits(student, ids, attention_mask=mask)[mask.bool()],
        logits(teacher, ids, attention_mask=mask)[mask.bool()],
    )
    greedy = dict(attention_mask=mask, max_new_tokens=9, do_sample=False)
    assert torch.equal(student.generate(ids, **greedy), teacher.generate(ids, **greedy))


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_all_heads_kept_is_the_teacher_with_its_attention(implementation: str, family_model: FamilyModel) -> None:
    teacher = family_model("mistral", **HARD["mistral"], attn_implementation=implementation)
    student, _ = build_student(teacher, HeadPlan.all(teacher), d_state=4)
    ids = tokens(2, 19)
    assert student.config._attn_implementation == implementation
    assert torch.equal(logits(student, ids), logits(teacher, ids))
    for model in (teacher, student):
        model.set_attn_implementation("eager")
    assert student.model.config._attn_implementation == "eager"
    assert torch.equal(logits(student, ids), logits(teacher, ids))


@torch.no_grad()
@pytest.mark.parametrize("kept", KEPT_IN_A_LAYER.values(), ids=KEPT_IN_A_LAYER)
def test_kept_heads_do_what_they_did(teacher: PreTrainedModel, kept: tuple[int, ...]) -> None:
    """Given the teacher's input, a mixer's kept heads put out what the teacher's heads put out."""
    student = student_of(teacher, keep(teacher, kept, kept, kept))
    with trace_mixers(teacher) as calls:
        teacher(tokens(2, 19), use_cache=False)
    assert len(calls) == 3
    for call, mixer in zip(calls, student.mixers()):
        heads_BLHP = mixer.heads(call.hidden_BLD, *call.args[1:], **_without(call.kwargs, "hidden_states"))
        assert heads_BLHP.shape == call.heads_BLHP.shape
        close(heads_BLHP[:, :, list(kept)], call.heads_BLHP[:, :, list(kept)])


def _without(kwargs: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in kwargs.items() if key != name}


@torch.no_grad()
def test_one_kept_head_contributes_what_it_did(teacher: PreTrainedModel) -> None:
    """With silent recurrent heads, a student with one head is the teacher with the others ablated."""
    kept = (1, 5)
    student = student_of(teacher, HeadPlan.from_pairs(teacher, [kept]))
    for mixer in student.mixers():
        mixer.ssm.z_proj.weight.zero_()
        mixer.ssm.z_proj.bias.zero_()  # silu(0) = 0
    ids = tokens(2, 19)
    everything_else = [head for head in HeadPlan.all(teacher).kept if head != kept]
    with ablate_heads(teacher, everything_else):
        expected = logits(teacher, ids)
    close(logits(student, ids), expected)


@torch.no_grad()
def test_prefill_and_steps_are_the_training_forward(teacher: PreTrainedModel) -> None:
    student = mixed_student(teacher)
    ids = tokens(2, 23)
    expected = logits(student, ids, use_cache=False)
    cache = student.new_cache()
    # A prompt, a second chunk, one token at a time, a chunk again.
    pieces = [logits(student, piece, past_key_values=cache) for piece in ids.split([7, 5, 1, 1, 1, 8], dim=1)]
    close(torch.cat(pieces, dim=1), expected)
    assert cache.get_seq_length() == 23
    assert all(layer.get_seq_length() == 23 for layer in cache.layers)


@torch.no_grad()
def test_the_training_forward_is_the_mixing_matrix(teacher: PreTrainedModel) -> None:
    """Heads' outputs = gate * (mixing matrix times values)."""
    student = mixed_student(teacher)
    seq_idx = torch.tensor([[0] * 5 + [1] * 8 + [2] * 6]).expand(2, -1)
    hidden = torch.randn(2, 19, student.config.hidden_size)
    mixer = student.mixers()[1]
    mixing_BHLS = mixer.mixing_matrices(hidden, seq_idx)
    values_BSHP, *_ = mixer.ssm._convolved(*mixer.ssm._projections(hidden), None, seq_idx, None)
    gate_BLHP = torch.nn.functional.silu(mixer.ssm.z_proj(hidden)).unflatten(-1, (8, -1))
    expected = torch.einsum("bhls,bshp->blhp", mixing_BHLS, values_BSHP) * gate_BLHP
    close(mixer.heads(hidden, seq_idx=seq_idx), expected)
    assert mixing_BHLS[0, :, 6, 4].abs().max() == 0


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_packed_documents_are_the_documents_alone(implementation: str, family: str, family_model: FamilyModel) -> None:
    teacher = family_model(family, **HARD[family], attn_implementation=implementation)
    for model in (teacher, mixed_student(teacher)):
        lengths = [1, 9, 2, 12, 7]
        ids = tokens(2, sum(lengths))
        seq_idx = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).expand(2, -1)
        if isinstance(model, HybridForCausalLM):
            packed = logits(model, ids, seq_idx=seq_idx)
        else:
            packed = logits(model, ids, use_cache=False, **packed_inputs(seq_idx, config=model.config))
        alone = [logits(model, document) for document in ids.split(lengths, dim=1)]
        close(packed, torch.cat(alone, dim=1))


@torch.no_grad()
def test_all_heads_kept_is_the_teacher_when_packed(teacher: PreTrainedModel) -> None:
    student, _ = build_student(teacher, HeadPlan.all(teacher), d_state=4)
    ids, seq_idx = tokens(2, 20), torch.tensor([[0] * 8 + [1] * 12, [0] * 3 + [1] * 17])
    expected = logits(teacher, ids, use_cache=False, **packed_inputs(seq_idx, config=teacher.config))
    assert torch.equal(logits(student, ids, seq_idx=seq_idx), expected)


@torch.no_grad()
def test_padding_inside_a_packed_row_is_not_seen(teacher: PreTrainedModel) -> None:
    student = mixed_student(teacher)
    ids = tokens(1, 20)
    seq_idx = torch.tensor([[0] * 8 + [1] * 12])
    mask = torch.ones_like(ids)
    mask[:, 17:] = 0
    changed = torch.where(mask.bool(), ids, tokens(1, 20))
    packed = logits(student, ids, seq_idx=seq_idx, attention_mask=mask)
    close(packed[:, :17], logits(student, changed, seq_idx=seq_idx, attention_mask=mask)[:, :17])
    close(packed[:, :8], logits(student, ids[:, :8]))
    close(packed[:, 8:17], logits(student, ids[:, 8:17]))


@torch.no_grad()
def test_a_left_padded_batch_is_its_prompts_alone(teacher: PreTrainedModel) -> None:
    student = mixed_student(teacher)
    prompts = [tokens(length) for length in (3, 17, 8)]
    ids, mask = left_padded(prompts)
    together = student.generate(ids, attention_mask=mask, max_new_tokens=9, do_sample=False, eos_token_id=None)
    padded = logits(student, ids, attention_mask=mask)
    for row, prompt in enumerate(prompts):
        alone = student.generate(prompt.unsqueeze(0), max_new_tokens=9, do_sample=False, eos_token_id=None)
        assert torch.equal(together[row, -9:], alone[0, -9:])
        close(padded[row, -len(prompt) :], logits(student, prompt.unsqueeze(0))[0])


@torch.no_grad()
def test_left_padding_leaves_the_states_at_zero(teacher: PreTrainedModel) -> None:
    student = mixed_student(teacher)
    cache = student.new_cache()
    student(tokens(2, 6), attention_mask=torch.tensor([[0] * 6, [0] * 3 + [1] * 3]), past_key_values=cache)
    for layer in cache.layers:
        assert (layer.ssm_state[0] == 0).all()
        assert (layer.conv_state[0] == 0).all()
        assert (layer.ssm_state[1] != 0).any()


@torch.no_grad()
def test_a_student_without_attention_counts_its_tokens(teacher: PreTrainedModel) -> None:
    student = student_of(teacher, HeadPlan.none(teacher))
    ids = tokens(2, 20)
    cache = student.new_cache()
    student(ids[:, :12], past_key_values=cache, attention_mask=torch.ones(2, 12))
    assert cache.get_seq_length() == 12
    assert cache.nbytes()["kv"] == 0
    close(logits(student, ids[:, 12:], past_key_values=cache), logits(student, ids)[:, 12:])


def test_gradients_reach_every_recurrent_parameter(teacher: PreTrainedModel) -> None:
    student = mixed_student(teacher).train()
    ids = tokens(2, 19)
    output = student(ids, labels=ids)
    assert output.past_key_values is None
    output.loss.backward()
    missing = [name for name, p in student.named_parameters() if ".ssm." in name and not p.grad.abs().max() > 0]
    assert missing == []


def test_gradient_checkpointing_changes_nothing(family_model: FamilyModel) -> None:
    student = mixed_student(family_model("llama")).train()
    ids, seq_idx = tokens(2, 19), torch.tensor([[0] * 8 + [1] * 11]).expand(2, -1)

    def gradients() -> list[Tensor]:
        student.zero_grad()
        student(ids, labels=ids, seq_idx=seq_idx).loss.backward()
        return [p.grad.clone() for p in student.parameters()]

    plain = gradients()
    student.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for actual, expected in zip(gradients(), plain):
        close(actual, expected)


@torch.no_grad()
def test_half_precision_keeps_states_in_fp32(teacher: PreTrainedModel) -> None:
    student = mixed_student(teacher)
    ids = tokens(2, 19)
    expected = logits(student, ids)
    student.bfloat16()
    cache = student.new_cache()
    actual = logits(student, ids, past_key_values=cache)
    assert all(layer.ssm_state.dtype == torch.float32 for layer in cache.layers)
    assert cache.layers[0].keys.dtype == torch.bfloat16
    assert (actual.float() - expected).norm() < BF16_RELATIVE_ERROR * expected.norm()


@torch.no_grad()
def test_the_reference_recurrence_gives_the_same_logits(teacher: PreTrainedModel) -> None:
    student = mixed_student(teacher)
    ids = tokens(2, 45)
    expected = logits(student, ids)
    student.set_ssm_implementation("reference")
    close(logits(student, ids), expected)


def test_an_implementation_that_is_not_installed_is_refused(teacher: PreTrainedModel, monkeypatch) -> None:
    monkeypatch.setattr("hybrid_distill.model.ssd._absent", lambda impl: (impl,))
    with pytest.raises(RuntimeError, match="mamba_ssm is not installed"):
        mixed_student(teacher).set_ssm_implementation("mamba_ssm")


@torch.no_grad()
def test_a_cache_can_be_copied_repeated_selected_and_reordered(teacher: PreTrainedModel) -> None:
    student = mixed_student(teacher)
    prompt, more = tokens(2, 9), tokens(4, 5)
    cache = student.new_cache()
    student(prompt, past_key_values=cache)
    repeated, selected, reordered = (copy.deepcopy(cache) for _ in range(3))

    repeated.batch_repeat_interleave(2)
    expected = logits(student, torch.cat([prompt.repeat_interleave(2, dim=0), more], dim=1))[:, 9:]
    close(logits(student, more, past_key_values=repeated), expected)

    selected.batch_select_indices(torch.tensor([1]))
    expected = logits(student, torch.cat([prompt[1:], more[:1]], dim=1))[:, 9:]
    close(logits(student, more[:1], past_key_values=selected), expected)

    reordered.reorder_cache(torch.tensor([1, 0]))
    expected = logits(student, torch.cat([prompt.flip(0), more[:2]], dim=1))[:, 9:]
    close(logits(student, more[:2], past_key_values=reordered), expected)


@torch.no_grad()
def test_cache_bytes_are_the_bytes_of_what_is_stored(family_model: FamilyModel) -> None:
    """Three heads of two KV groups hold two keys and two values a token."""
    student = student_of(family_model("llama"), keep(family_model("llama"), (0, 1, 2), (), (7,)), d_state=5)
    cache = student(tokens(2, 9)).past_key_values
    head_dim, n_recurrent = 8, 5 + 8 + 7
    assert cache.nbytes() == {
        "kv": 2 * (2 + 0 + 1) * head_dim * 9 * 4 * 2,
        "ssm": n_recurrent * head_dim * 5 * 4 * 2,
        "conv": n_recurrent * (head_dim + 2 * 5) * 3 * 4 * 2,
    }
    tensors = [t for layer in cache.layers for t in vars(layer).values() if isinstance(t, torch.Tensor)]
    assert sum(t.untyped_storage().nbytes() for t in tensors) == sum(cache.nbytes().values())
    cache.reset()
    assert cache.get_seq_length() == 0
    assert sum(cache.nbytes().values()) == 0


@torch.no_grad()
def test_a_sliding_window_bounds_the_cache(family_model: FamilyModel) -> None:
    student = mixed_student(family_model("mistral", **HARD["mistral"]))
    cache = student(tokens(1, 30)).past_key_values
    assert cache.layers[0].keys.shape[-2] == HARD["mistral"]["sliding_window"] - 1
    assert cache.get_seq_length() == 30


def test_a_recurrent_state_cannot_be_rolled_back(family_model: FamilyModel) -> None:
    cache = mixed_student(family_model("llama")).new_cache()
    with pytest.raises(ValueError, match="cannot be rolled back"):
        cache.crop(-1)


def test_wrong_caches_are_refused(family_model: FamilyModel) -> None:
    student = mixed_student(family_model("llama"))
    ids = tokens(1, 4)
    with pytest.raises(ValueError, match=r"DynamicCache.*new_cache"):
        student(ids, past_key_values=transformers.DynamicCache())
    with pytest.raises(ValueError, match="packed documents"):
        student(ids, seq_idx=torch.zeros_like(ids), past_key_values=student.new_cache())
    with pytest.raises(ValueError, match="neither input_ids nor inputs_embeds"):
        student()


def test_packed_inputs_need_an_attention_that_takes_masks(family_model: FamilyModel) -> None:
    config = family_model("llama").config
    config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match=r"flash_attention_2.*sdpa"):
        packed_inputs(torch.zeros(1, 4, dtype=torch.long), config=config)


@torch.no_grad()
def test_saved_with_its_code_it_loads_as_the_same_model(teacher: PreTrainedModel, tmp_path: Any) -> None:
    student = mixed_student(teacher)
    student.save_pretrained(tmp_path)
    ids = tokens(2, 19)
    for trust in (False, True):  # with this package installed, its own class is used either way
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=trust).eval()
        stored = loaded.state_dict()
        assert all(torch.equal(stored[name], tensor) for name, tensor in student.state_dict().items())
        # Same tensors at other addresses: a matrix product may round its last bit differently.
        close(logits(loaded, ids), logits(student, ids))
    code = {path.name for path in tmp_path.glob("*.py")}
    assert code == {"configuration_hybrid.py", "modeling_hybrid.py", "mixer.py", "ssd.py"}


@torch.no_grad()
def test_a_model_from_a_config_alone_runs(family_model: FamilyModel) -> None:
    backbone = family_model("llama").config.to_dict()
    config = HybridConfig(backbone=backbone, kept=[[0, 1, 2], [], [7]], d_state=4)
    model = HybridForCausalLM(config).eval()
    assert isinstance(model(tokens(1, 5)).past_key_values, HybridCache)
    assert logits(model, tokens(1, 5)).isfinite().all()


def config_with(family_model: FamilyModel, **fields: Any) -> HybridConfig:
    valid = {"backbone": family_model("llama").config.to_dict(), "kept": [[], [], []], "d_state": 4}
    return HybridConfig(**{**valid, **fields})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"d_state": 0}, "d_state is 0; it must be a whole number from 4 to 128"),
        ({"d_state": 3.5}, r"d_state is 3\.5"),
        ({"d_state": True}, "d_state is True"),
        ({"conv_width": 0}, "conv_width is 0"),
        ({"kept": [[], []]}, "needs 3 lists"),
        ({"kept": None}, "needs 3 lists"),
        ({"kept": [[], [8], []]}, r"kept\[1\] is \[8\]; it must list heads from 0 to 7"),
        ({"kept": [[2, 1], [], []]}, r"kept\[0\].*ascending"),
        ({"kept": [[1, 1], [], []]}, r"kept\[0\].*each once"),
        ({"kept": [["1"], [], []]}, r"kept\[0\]"),
        ({"backbone": {"hidden_size": 8}}, "without a model_type"),
        ({"backbone": "llama"}, "backbone is str"),
        ({"backbone": {"model_type": "no_such"}}, "'no_such', which this transformers does not know"),
    ],
)
def test_a_bad_config_says_what_is_wrong(fields: dict[str, Any], message: str, family_model: FamilyModel) -> None:
    with pytest.raises(ValueError, match=message):
        config_with(family_model, **fields)


def test_config_speaks_for_its_backbone(family_model: FamilyModel) -> None:
    teacher = family_model("qwen3")
    config = config_with(family_model, backbone=teacher.config.to_dict())
    for name in (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_key_value_heads",
        "head_dim",
        "eos_token_id",
    ):
        assert getattr(config, name) == getattr(teacher.config, name)
    assert "_name_or_path" not in config.backbone
    assert HybridConfig.from_dict(config.to_dict()).to_dict() == config.to_dict()


def test_rope_settings_are_written_in_both_spellings(family_model: FamilyModel) -> None:
    scaling = {
        "rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    }  # fmt: skip
    new = {**family_model("llama").config.to_dict(), "rope_parameters": scaling}
    backbone = config_with(family_model, backbone=new).backbone
    assert backbone["rope_theta"] == 5000.0
    assert backbone["rope_scaling"]["factor"] == 8.0
    assert backbone["rope_scaling"]["rope_type"] == "llama3"
