"""Matrix x values = what the output projection reads, for every family of docs/heads.md; what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from students import mixed_student, recurrent_parameters
from test_head_sites import FAMILIES, IDS, KEPT, make_model, n_hooks
from torch import Tensor
from transformers import PreTrainedModel

from hybrid_distill.lab.analysis.head_matrices import HeadMix
from hybrid_distill.lab.analysis.mixing import mix_heads
from hybrid_distill.plan import HeadId
from hybrid_distill.scoring.head_scores import heads_of
from hybrid_distill.teacher import HeadKind, head_sites, record_heads

TOKENS = IDS[0].tolist()  # 10 tokens: not a multiple of the chunk size 4
ROUNDING = 1e-5  # of the largest number that a head puts out, in float32
TWO_KINDS: list[tuple[str, str | None]] = [("zamba2", "ssm"), ("falcon_h1", "ssm")]
"""Families with recurrent heads beside attention."""


def all_heads(model: PreTrainedModel, kind: HeadKind | None = None) -> list[HeadId]:
    return heads_of(head_sites(model, kind))


@torch.no_grad()
def read_by_projection(model: PreTrainedModel, layer: int, kind: HeadKind | None = None) -> Tensor:
    """Return the heads of a layer, x_LHP, in a forward of the model as it is."""
    with record_heads(model, layer, kind=kind) as recorded:
        model(torch.tensor([TOKENS]))
    return recorded[0][0]


def check_exact(
    model: PreTrainedModel,
    heads: list[HeadId],
    kind: HeadKind | None = None,
) -> list[HeadMix]:
    """Check that each head's matrix times its values is what the output projection reads."""
    mixes = mix_heads(model, TOKENS, heads, kind=kind)
    assert [mix.head for mix in mixes] == heads, "the order is the caller's"
    layers = {head.layer for head in heads}
    heads_in = {layer: read_by_projection(model, layer, kind) for layer in layers}
    for mix in mixes:
        expected_LP = heads_in[mix.head.layer][:, mix.head.head]
        largest = expected_LP.abs().max()
        assert largest > 1e-3
        error = (mix.output() - expected_LP).abs().max()
        assert error < ROUNDING * largest, mix.head
        assert torch.equal(mix.matrix_TS, mix.matrix_TS.tril()), "no head looks ahead"
    return mixes


EVERY_KIND = [(family, None) for family in FAMILIES] + TWO_KINDS


@pytest.mark.parametrize(("family", "kind"), EVERY_KIND)
def test_matrix_times_values_is_the_heads_output(family: str, kind: HeadKind | None) -> None:
    model = make_model(family)
    own = model.config._attn_implementation
    check_exact(model, all_heads(model, kind)[::-1], kind)
    assert model.config._attn_implementation == own
    assert n_hooks(model) == 0


@pytest.mark.parametrize(
    ("family", "kind", "changes"),
    [
        ("falcon_h1", "ssm", {"mamba_rms_norm": True, "mamba_norm_before_gate": True}),
        ("falcon_h1", "ssm", {"mamba_rms_norm": True, "mamba_norm_before_gate": False}),
        (
            "falcon_h1",
            "ssm",
            {"ssm_in_multiplier": 0.5, "ssm_multipliers": [0.5, 1.5, 0.7, 1.2, 2.0]},
        ),
        ("falcon_h1", "attention", {"key_multiplier": 3.0, "attention_out_multiplier": 0.5}),
        (
            "mamba2",
            None,
            {"time_step_limit": (0.02, 0.3), "use_bias": True, "use_conv_bias": False},
        ),
        (
            "falcon_mamba",
            None,
            {"use_bias": True, "use_conv_bias": False, "time_step_rank": 3},
        ),
    ],
    ids=[
        "norm before the gate",
        "norm behind the gate",
        "multipliers of the SSM",
        "multipliers of attention",
        "mamba2",
        "falcon_mamba",
    ],
)
def test_the_settings_that_families_differ_in(
    family: str, kind: HeadKind | None, changes: dict[str, Any]
) -> None:
    model = make_model(family, **changes)
    check_exact(model, all_heads(model, kind)[::3], kind)


@pytest.mark.parametrize(
    ("family", "recurrence"),
    [
        ("olmo3", "discrete"),
        ("phi3", "gdn"),
        ("gpt_neox", "mamba2"),
    ],
)
def test_a_students_kept_and_recurrent_heads_in_every_layout(
    family: str, recurrence: str, family_model: Any
) -> None:
    student = mixed_student(family_model(family, initializer_range=0.2), recurrence)
    check_exact(student, [HeadId(0, 0), HeadId(0, 2), HeadId(2, 5), HeadId(2, 6)])


def test_a_student_has_both_kinds_in_the_teachers_order() -> None:
    model = make_model("student")
    with torch.no_grad():
        for parameter in recurrent_parameters(model):
            parameter.add_(0.1 * torch.randn_like(parameter))
    mixes = check_exact(model, all_heads(model))
    assert [mix.head for mix in mixes if mix.kind == "attention"] == KEPT


def test_layers_that_share_a_module_keep_their_own_maps() -> None:
    """Zamba2 in earlier transformers: see test_head_sites."""
    model = make_model("zamba2")
    blocks = {site.layer: site.block for site in head_sites(model)}
    blocks[4].shared_transformer = blocks[1].shared_transformer
    check_exact(model, [HeadId(1, 0)])
    check_exact(model, [HeadId(1, 0), HeadId(4, 0)])
