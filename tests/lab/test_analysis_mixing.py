"""Matrix x values = what the output projection reads, for every family of docs/heads.md; what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from students import mixed_student
from test_head_sites import FAMILIES, IDS, KEPT, make_model
from torch import Tensor
from transformers import PreTrainedModel

from hybrid_distill.lab.analysis.mixing import HeadMix, mix_heads, mixing_bytes
from hybrid_distill.plan import HeadId
from hybrid_distill.teacher import HeadKind, head_sites, record_heads

TOKENS = IDS[0].tolist()  # 10 tokens: not a multiple of the chunk size 4
ROUNDING = 1e-5  # of the largest number that a head puts out, in float32
TWO_KINDS = [("zamba2", "ssm"), ("falcon_h1", "ssm")]


def all_heads(model: PreTrainedModel, kind: HeadKind | None = None) -> list[HeadId]:
    return [HeadId(site.layer, head) for site in head_sites(model, kind) for head in range(site.n_heads)]


@torch.no_grad()
def read_by_projection(model: PreTrainedModel, layer: int, kind: HeadKind | None) -> Tensor:
    """The heads of a layer, x_LHP, in a forward of the model as it is."""
    with record_heads(model, layer, kind=kind) as recorded:
        model(torch.tensor([TOKENS]))
    return recorded[0][0]


def check_exact(model: PreTrainedModel, mixes: list[HeadMix], kind: HeadKind | None) -> None:
    for layer in {mix.head.layer for mix in mixes}:
        x_LHP = read_by_projection(model, layer, kind)
        for mix in (mix for mix in mixes if mix.head.layer == layer):
            expected_LP = x_LHP[:, mix.head.head]
            largest = expected_LP.abs().max()
            assert largest > 1e-3
            assert (mix.output() - expected_LP).abs().max() < ROUNDING * largest, mix.head
            assert torch.equal(mix.matrix_TS, mix.matrix_TS.tril()), "no head looks ahead"


@pytest.mark.parametrize(("family", "kind"), [*((family, None) for family in FAMILIES), *TWO_KINDS])
def test_matrix_times_values_is_the_heads_output(family: str, kind: HeadKind | None) -> None:
    model = make_model(family)
    own = model.config._attn_implementation
    check_exact(model, mix_heads(model, TOKENS, all_heads(model, kind), kind=kind), kind)
    assert model.config._attn_implementation == own
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("family", "kind", "changes"),
    [
        ("falcon_h1", "ssm", {"mamba_rms_norm": True, "mamba_norm_before_gate": True}),
        ("falcon_h1", "ssm", {"mamba_rms_norm": True, "mamba_norm_before_gate": False}),
        ("falcon_h1", "ssm", {"ssm_in_multiplier": 0.5, "ssm_multipliers": [0.5, 1.5, 0.7, 1.2, 2.0]}),
        ("falcon_h1", "attention", {"key_multiplier": 3.0, "attention_out_multiplier": 0.5}),
        ("mamba2", None, {"time_step_limit": (0.02, 0.3), "use_bias": True, "use_conv_bias": False}),
        ("falcon_mamba", None, {"use_bias": True, "use_conv_bias": False, "time_step_rank": 3}),
    ],
)
def test_the_settings_that_families_differ_in(family: str, kind: HeadKind | None, changes: dict[str, Any]) -> None:
    model = make_model(family, **changes)
    check_exact(model, mix_heads(model, TOKENS, all_heads(model, kind)[::3], kind=kind), kind)


@pytest.mark.parametrize("family", ["olmo3", "phi3", "gpt_neox"])
def test_a_students_kept_and_recurrent_heads_in_every_layout(family: str, family_model: Any) -> None:
    student = mixed_student(family_model(family, initializer_range=0.2))
    heads = [HeadId(0, 0), HeadId(0, 2), HeadId(2, 5), HeadId(2, 6)]
    check_exact(student, mix_heads(student, TOKENS, heads), None)


def test_a_student_has_both_kinds_in_the_teachers_order() -> None:
    model = make_model("student")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".ssm." in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    mixes = mix_heads(model, TOKENS, all_heads(model))
    check_exact(model, mixes, None)
    assert [mix.head for mix in mixes if mix.kind == "attention"] == KEPT


def test_the_order_is_the_callers_and_no_other_head_is_made() -> None:
    model = make_model("falcon_mamba")
    heads = [HeadId(2, 40), HeadId(0, 63), HeadId(2, 1)]
    mixes = mix_heads(model, TOKENS, heads)
    assert [mix.head for mix in mixes] == heads
    assert all(mix.values_SP.shape == (10, 1) and mix.matrix_TS.shape == (10, 10) for mix in mixes)
    check_exact(model, mixes, None)


def test_layers_that_share_a_module_keep_their_own_maps() -> None:
    """Zamba2 in earlier transformers: see test_head_sites."""
    model = make_model("zamba2")
    blocks = {site.layer: site.block for site in head_sites(model)}
    blocks[4].shared_transformer = blocks[1].shared_transformer
    for heads in ([HeadId(1, 0)], [HeadId(1, 0), HeadId(4, 0)]):
        check_exact(model, mix_heads(model, TOKENS, heads), None)


def test_bfloat16_is_exact_to_its_own_rounding() -> None:
    for family in ("llama", "mamba2", "falcon_mamba"):
        model = make_model(family).to(torch.bfloat16)
        for mix in mix_heads(model, TOKENS, [HeadId(0, 3)]):
            expected_LP = read_by_projection(model, 0, None)[:, 3].float()
            assert (mix.output() - expected_LP).norm() / expected_LP.norm() < 0.02


@pytest.mark.parametrize(
    ("family", "kind", "head", "message"),
    [
        ("llama", None, HeadId(3, 0), r"L3H0 does not exist: this model has layers 0\.\.2"),
        ("mamba2", "attention", HeadId(0, 0), "Mamba2ForCausalLM has no heads of kind 'attention'"),
        ("zamba2", None, HeadId(2, 0), "of which 1, 3, 4 have attention heads"),
    ],
)
def test_heads_that_are_not_there(family: str, kind: HeadKind | None, head: HeadId, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mix_heads(make_model(family), TOKENS, [head], kind=kind)


def test_prompts_that_do_not_fit() -> None:
    model = make_model("llama", max_position_embeddings=8)
    with pytest.raises(ValueError, match="the prompt has 10 tokens; it must have 1 to 8 tokens, the model's context"):
        mix_heads(model, TOKENS, [HeadId(0, 0)])
    with pytest.raises(ValueError, match="the prompt has 0 tokens"):
        mix_heads(make_model("mamba2"), [], [HeadId(0, 0)])


def test_matrices_that_are_too_large_are_refused_with_the_number(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("mamba2")
    monkeypatch.setattr(model, "forward", lambda **_: pytest.fail("it must be refused before it runs"))
    with pytest.raises(ValueError, match=r"of 2 heads on 40000 tokens take about 53\.6 GiB, more than the 4\.0 GiB"):
        mix_heads(model, [5] * 40000, [HeadId(0, 0), HeadId(1, 0)])


@pytest.mark.parametrize("family", ["llama", "mamba2", "falcon_mamba"])
def test_the_estimate_holds(family: str) -> None:
    """Against the largest tensors that are alive together, as the profiler counts them."""
    model, n = make_model(family, max_position_embeddings=1024) if family == "llama" else make_model(family), 384
    heads = [HeadId(0, 0), HeadId(1, 1)]
    with torch.profiler.profile(profile_memory=True) as profiler:
        mix_heads(model, [5] * n, heads)
    held, peak = 0, 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    estimate = mixing_bytes(model, n, heads)
    assert 0.4 * peak < estimate < 2.5 * peak, (estimate, peak)
