"""The student is the teacher: what kept heads do; every way to run a student gives one result."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import make_family_model
from students import (
    ALL_BUT_ONE,
    HARD,
    THREE,
    close,
    keep,
    logits,
    logits_in_pieces,
    mixed_student,
    packed_logits,
    student_of,
    tokens,
)

from hybrid_distill.model import HybridForCausalLM
from hybrid_distill.model.layout import cache_of
from hybrid_distill.plan import HeadPlan
from hybrid_distill.student.build import build_student
from hybrid_distill.teacher import ablate_heads, trace_mixers

# Biases and a short window; norms over all heads and layers of two kinds; one projection for all.
FEW = pytest.mark.parametrize("family", ["qwen2", "olmo3", "gpt_neox"])


@pytest.fixture
def teacher(family: str) -> transformers.PreTrainedModel:
    return make_family_model(family, **HARD[family])


@torch.no_grad()
def test_all_heads_kept_is_the_teacher(teacher) -> None:
    """Same bits alone, packed, padded and generated; in either attention, and after a switch."""
    ids = tokens(2, 19)
    seq_idx = torch.tensor([[0] * 8 + [1] * 11, [0] * 3 + [1] * 16])
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    greedy = {"attention_mask": mask, "max_new_tokens": 9, "do_sample": False}

    def outputs(model: Any) -> list[torch.Tensor]:
        return [
            logits(model, ids),
            logits(model, ids, use_cache=False),
            logits(model, ids, attention_mask=mask)[mask.bool()],
            packed_logits(model, ids, seq_idx),
            model.generate(ids, **greedy),
        ]

    for implementation in ("sdpa", "eager"):
        teacher.set_attn_implementation(implementation)
        student, _ = build_student(teacher, HeadPlan.all(teacher), d_state=4)
        assert student.config._attn_implementation == implementation
        for output, expected in zip(outputs(student), outputs(teacher), strict=True):
            assert torch.equal(output, expected)
    for model in (teacher, student):
        model.set_attn_implementation("sdpa")
    assert student.model.config._attn_implementation == "sdpa"
    assert torch.equal(logits(student, ids), logits(teacher, ids))


@torch.no_grad()
def test_a_student_computes_experts_as_it_was_asked_to(tmp_path: Path) -> None:
    """The config reports what the decoder runs."""
    teacher = make_family_model("mixtral")
    student, _ = build_student(teacher, keep(teacher, THREE), d_state=4)
    assert student.config._experts_implementation == student.model.config._experts_implementation
    student.save_pretrained(tmp_path)
    again = HybridForCausalLM(student.config)
    assert again.config._experts_implementation == student.config._experts_implementation

    loaded = HybridForCausalLM.from_pretrained(tmp_path, experts_implementation="eager")

    assert loaded.config._experts_implementation == "eager"
    assert loaded.model.layers[0].mlp.experts.config._experts_implementation == "eager"
    ids = tokens(2, 9)
    close(logits(loaded, ids), logits(student, ids))
    for model in (student, student.model):
        student.set_experts_implementation("eager")
        assert model.config._experts_implementation == "eager"
        assert model._can_set_experts_implementation()


def test_a_student_without_experts_refuses_an_implementation_for_them() -> None:
    """transformers asks the class whether it has experts; one class has students of all families."""
    teacher = make_family_model("llama")
    student, _ = build_student(teacher, keep(teacher, THREE), d_state=4)
    assert not HybridForCausalLM._can_set_experts_implementation()
    with pytest.raises(ValueError, match="does not support setting experts implementation"):
        student.set_experts_implementation("grouped_mm")


def test_a_teacher_that_returns_its_routers_loss_has_students() -> None:
    teacher = make_family_model("mixtral", output_router_logits=True)
    student, _ = build_student(teacher, HeadPlan.all(teacher), d_state=4)
    ids = tokens(2, 9)
    assert torch.equal(logits(student, ids), logits(teacher, ids))


@torch.no_grad()
@pytest.mark.parametrize("kept", [(5,), THREE, ALL_BUT_ONE], ids=["one", "three", "all but one"])
def test_kept_heads_do_what_they_did(teacher, kept: tuple[int, ...]) -> None:
    """Given the teacher's input, a mixer's kept heads return what the teacher's heads return."""
    student = student_of(teacher, keep(teacher, kept, kept, kept))
    with trace_mixers(teacher) as calls:
        teacher(tokens(2, 19), use_cache=False)
    for call, mixer in zip(calls.values(), student.mixers(), strict=True):
        # Hidden states come by position in some families, by name in others.
        options = dict(call.kwargs)
        options.pop("hidden_states", None)
        heads_BLHP = mixer.heads(call.hidden_BLD, *call.args[1:], **options)
        assert heads_BLHP.shape == call.heads_BLHP.shape
        close(heads_BLHP[:, :, list(kept)], call.heads_BLHP[:, :, list(kept)])


@torch.no_grad()
def test_one_kept_head_contributes_what_it_did(teacher) -> None:
    """With silent recurrent heads, a student of one head is the teacher without the others."""
    kept = (1, 5)
    student = student_of(teacher, HeadPlan.from_pairs(teacher, [kept]))
    for mixer in student.mixers():
        # silu(0) = 0
        mixer.ssm.z_proj.weight.zero_()
        mixer.ssm.z_proj.bias.zero_()
    ids = tokens(2, 19)
    others = [head for head in HeadPlan.all(teacher).kept if head != kept]
    with ablate_heads(teacher, others):
        expected = logits(teacher, ids)
    close(logits(student, ids), expected)


@torch.no_grad()
def test_prefill_and_steps_are_the_training_forward(teacher) -> None:
    """A prompt, a second chunk, one token at a time, a chunk again."""
    student = mixed_student(teacher)
    length = 23
    ids = tokens(2, length)
    cache = student.new_cache()
    in_pieces = logits_in_pieces(student, ids, (7, 5, 1, 1, 1, 8), cache=cache)
    close(in_pieces, logits(student, ids, use_cache=False))
    assert cache.get_seq_length() == length
    assert all(layer.get_seq_length() == length for layer in cache.layers)


@FEW
@torch.no_grad()
def test_the_training_forward_is_the_mixing_matrix(teacher) -> None:
    """Heads' outputs = gate * (mixing matrix times values)."""
    student = mixed_student(teacher)
    mixer = student.mixers()[1]
    seq_idx = torch.tensor([[0] * 5 + [1] * 8 + [2] * 6]).expand(2, -1)
    hidden = torch.randn(2, 19, student.config.hidden_size)
    mixing_BHLS = mixer.mixing_matrices(hidden, seq_idx)
    values_BSHP, *_, gate_BLHP = mixer.ssm.scan_inputs(hidden, seq_idx)
    mixed_BLHP = torch.einsum("bhls,bshp->blhp", mixing_BHLS, values_BSHP)
    close(mixer.heads(hidden, seq_idx=seq_idx), mixed_BLHP * gate_BLHP)
    # Token 6 is of the second document, token 4 of the first.
    assert mixing_BHLS[0, :, 6, 4].abs().max() == 0


@FEW
def test_gradients_reach_every_recurrent_parameter(teacher) -> None:
    student = mixed_student(teacher).train()
    ids = tokens(2, 19)
    output = student(ids, labels=ids)
    assert cache_of(output) is None
    output.loss.backward()
    for heads in student.recurrent_heads():
        for name, parameter in heads.named_parameters():
            assert parameter.grad.abs().max() > 0, name


@FEW
@torch.no_grad()
def test_a_cache_can_be_copied_repeated_selected_and_reordered(teacher) -> None:
    student = mixed_student(teacher)
    length = 9
    prompts = tokens(2, length)
    more = tokens(4, 5)
    cache = student.new_cache()
    student(prompts, cache=cache)
    repeated = copy.deepcopy(cache)
    repeated.batch_repeat_interleave(2)
    selected = copy.deepcopy(cache)
    selected.batch_select_indices(torch.tensor([1]))
    reordered = copy.deepcopy(cache)
    reordered.reorder_cache(torch.tensor([1, 0]))

    for changed, prompts_of_cache in (
        (repeated, prompts.repeat_interleave(2, dim=0)),
        (selected, prompts[1:]),
        (reordered, prompts.flip(0)),
    ):
        continuation = more[: len(prompts_of_cache)]
        whole = torch.cat([prompts_of_cache, continuation], dim=1)
        expected = logits(student, whole)[:, length:]
        close(logits(student, continuation, cache=changed), expected)


CODE = {
    "aligned_rows",
    "cache",
    "convolution",
    "chunked_scan",
    "backbone",
    "backbone_config",
    "configuration_hybrid",
    "field_rules",
    "decays",
    "decoder",
    "document_kernels",
    "document_mask",
    "documents",
    "gated_delta",
    "generation",
    "kernel_choice",
    "layer_cache",
    "layout",
    "local_attention",
    "logits",
    "mixer",
    "modeling_hybrid",
    "once",
    "prefill",
    "prefix",
    "pretrained",
    "prompt",
    "recurrences",
    "recurrent_heads",
    "ring",
    "rows",
    "self_check",
    "ssd",
    "static_layer_cache",
    "weight_samples",
    "window_kernels",
    "windowed_heads",
    "windows",
}
"""Files of `hybrid_distill/model` that travel with every student."""


@torch.no_grad()
def test_saved_with_its_code_it_loads_as_the_same_model(teacher, tmp_path: Any) -> None:
    student = mixed_student(teacher)
    student.save_pretrained(tmp_path)
    weights = student.state_dict()
    ids = tokens(2, 19)
    # With this package installed, its own class is used either way.
    for trust in (False, True):
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, trust_remote_code=trust
        )
        loaded.eval()
        stored = loaded.state_dict()
        for name, tensor in weights.items():
            assert torch.equal(stored[name], tensor), name
        # Same tensors at other addresses: a matrix product may round its last bit differently.
        close(logits(loaded, ids), logits(student, ids))
    assert {path.stem for path in tmp_path.glob("*.py")} == CODE
