"""Building: every tensor is accounted for, odd teachers are refused, weights can be shared."""

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from conftest import make_family_model
from messages import naming
from safetensors.torch import load_file
from students import since, tiny_student
from torch import nn
from transformers import PreTrainedModel

from hybrid_distill.data import DataConfig, open_rows
from hybrid_distill.export.versions import oldest_transformers
from hybrid_distill.io import save_tensors
from hybrid_distill.model import HybridForCausalLM, packed_inputs
from hybrid_distill.model.convolution import causal_conv
from hybrid_distill.model.decays import log_decay
from hybrid_distill.model.field_rules import release
from hybrid_distill.model.ssd import ssd_scan
from hybrid_distill.plan import HeadPlan
from hybrid_distill.student import build
from hybrid_distill.student.build import build_student
from hybrid_distill.student.dtypes import cast_weights
from hybrid_distill.student.init import LayerTrace, init_ssm
from hybrid_distill.student.score_factors import norm_gains
from hybrid_distill.student.sharing import share_frozen_weights, unshare_weights
from hybrid_distill.teacher import (
    ablate_heads,
    attention_sites,
    fingerprint,
    load_teacher,
    trace_mixers,
)

# What heads 0, 1 and 2 of 8 take of each linear, in blocks of one head's rows; in 4 KV groups,
# but for GPT-NeoX.
SEPARATE = {"q_proj": [0, 1, 2], "k_proj": [0, 1], "v_proj": [0, 1]}
NORMED_TOGETHER = {
    "q_proj": list(range(8)),
    "k_proj": list(range(4)),
    "v_proj": [0, 1],
}
BLOCKS = {
    "olmo2": NORMED_TOGETHER,
    "olmo3": NORMED_TOGETHER,
    "phi3": {"qkv_proj": [0, 1, 2, 8 + 0, 8 + 1, 12 + 0, 12 + 1]},
    "gpt_neox": {"query_key_value": list(range(9))},
}


@pytest.fixture
def teacher(family: str) -> PreTrainedModel:
    if family in ("llama", "qwen3", "olmo2"):
        return make_family_model(family, attention_bias=True)
    return make_family_model(family)


def some_heads(teacher: PreTrainedModel) -> HeadPlan:
    return HeadPlan.from_pairs(teacher, [(0, 0), (0, 1), (0, 2), (2, 5)])


def calibration() -> dict[str, torch.Tensor]:
    """Two rows of two documents each."""
    seq_idx = torch.tensor([[0] * 40 + [1] * 56, [0] * 7 + [1] * 89])
    return {"input_ids": torch.randint(3, 101, (2, 96)), "seq_idx": seq_idx}


def test_every_tensor_of_both_models_is_in_the_report(teacher) -> None:
    student, report = build_student(teacher, some_heads(teacher), d_state=8, init="random")
    shapes = {}
    used = set()
    dropped = set()
    for record in report.tensors:
        if record.action == "dropped":
            dropped.add(record.name)
        else:
            shapes[record.name] = record.shape
            used.update(record.source)
    assert dropped | used == set(teacher.state_dict())
    assert not dropped & used
    assert shapes == {name: tuple(t.shape) for name, t in student.state_dict().items()}


def test_copied_and_sliced_tensors_hold_the_teachers_values(family: str, teacher) -> None:
    student, report = build_student(teacher, some_heads(teacher), d_state=8)
    theirs = teacher.state_dict()
    ours = student.state_dict()
    for record in report.tensors:
        if record.action == "copied":
            assert torch.equal(ours[record.name], theirs[record.source[0]])
    our_site = attention_sites(student)[0]
    their_site = attention_sites(teacher)[0]
    names = their_site.module.state_dict().keys()
    for linear, blocks in BLOCKS.get(family, SEPARATE).items():
        for name in {f"{linear}.weight", f"{linear}.bias"} & names:
            whole = theirs[f"{their_site.name}.{name}"]
            by_head = whole.unflatten(0, (-1, their_site.head_dim))
            rows = by_head[blocks].flatten(0, 1)
            assert torch.equal(ours[f"{our_site.name}.attention.{name}"], rows)


def test_unused_tensors_are_dropped() -> None:
    teacher = make_family_model("qwen2")
    _, report = build_student(teacher, HeadPlan.none(teacher), d_state=8, init="random")
    dropped = {record.name for record in report.tensors if record.action == "dropped"}
    projections = set()
    for layer, part, kind in itertools.product(range(3), "qkv", ("weight", "bias")):
        projections.add(f"model.layers.{layer}.self_attn.{part}_proj.{kind}")
    assert dropped == projections


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_tied_embeddings_stay_tied(family: str) -> None:
    teacher = make_family_model(family, tie_word_embeddings=True)
    student, _ = build_student(teacher, some_heads(teacher), d_state=8)
    assert student.lm_head.weight is student.get_input_embeddings().weight

    untied_teacher = make_family_model(family)
    untied, _ = build_student(untied_teacher, some_heads(teacher), d_state=8)
    assert untied.lm_head.weight is not untied.get_input_embeddings().weight


def test_a_student_for_kernels_of_a_gpu_is_built_beside_its_teacher_on_the_cpu(
    teacher, monkeypatch
) -> None:
    """A finished run is loaded there before it moves to the GPU."""
    pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    checked_on = []

    def note(model: Any, *options: Any) -> None:
        checked_on.append(getattr(model, "ssm_implementation", None))

    monkeypatch.setattr(build, "check_same_logits", note)
    plan = HeadPlan.none(teacher)
    student, _ = build_student(teacher, plan, d_state=4, init="random", kernels="triton")
    assert checked_on == [None, "torch"]
    assert student.ssm_implementation == "triton"


def test_a_hybrid_is_not_a_teacher() -> None:
    student, _ = tiny_student("llama")
    with pytest.raises(ValueError, match="hybrid"):
        build_student(student, HeadPlan.none(student), d_state=4)


def test_the_teacher_is_left_alone(teacher) -> None:
    cast_weights(teacher.train(), torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in teacher.state_dict().items()}
    student, _ = build_student(teacher, some_heads(teacher), d_state=8)
    assert student.training
    assert {tensor.dtype for tensor in student.state_dict().values()} == {torch.bfloat16}
    assert not any(tensor.is_meta for tensor in (*student.parameters(), *student.buffers()))

    # No tensor is shared.
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.add_(1.0)
    for name, tensor in teacher.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_the_seed_covers_everything_drawn() -> None:
    teacher = make_family_model("llama")

    def weights(seed: int) -> torch.Tensor:
        # The global seed must not matter.
        torch.manual_seed(torch.randint(100, ()).item())
        student, _ = build_student(
            teacher, some_heads(teacher), d_state=32, init="random", seed=seed
        )
        return torch.cat([tensor.flatten() for tensor in student.state_dict().values()])

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


@torch.no_grad()
def test_recurrent_heads_start_as_averages_over_distinct_spans(teacher: PreTrainedModel) -> None:
    """With scores of zero a head starts as an average: rows of its mixing matrix sum to 1."""
    for site in attention_sites(teacher):
        for parameter in getattr(site.module, site.layout.query).parameters():
            parameter.zero_()
    student, _ = build_student(teacher, HeadPlan.none(teacher), d_state=8)
    ssm = student.mixers()[0].ssm
    n_heads = 8
    assert len(log_decay(ssm.a_proj.bias).unique()) == n_heads

    # Long enough for the slowest head.
    length = 2000
    _, raw, b, c, _ = ssm.scan_inputs(torch.randn(1, length, 64))
    ones = torch.ones(1, length, n_heads, 1)
    row_sums, _ = ssd_scan(ones, log_decay(raw), b, c)
    torch.testing.assert_close(row_sums[0, -1, :, 0], torch.ones(n_heads), rtol=0.02, atol=0)


def head_errors(
    student: HybridForCausalLM,
    teacher: PreTrainedModel,
    batch: dict[str, torch.Tensor],
) -> float:
    """Return the squared error of all heads, given the teacher's inputs, relative to silence."""
    seq_idx = batch["seq_idx"]
    with trace_mixers(teacher) as calls:
        packed = packed_inputs(seq_idx, config=teacher.config)
        teacher(batch["input_ids"], use_cache=False, **packed)
    error = 0.0
    total = 0.0
    for mixer, call in zip(student.mixers(), calls.values(), strict=True):
        heads_BLHP = mixer.heads(call.hidden_BLD, seq_idx=seq_idx)
        error += (heads_BLHP - call.heads_BLHP).square().sum().item()
        total += call.heads_BLHP.square().sum().item()
    return error / total


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "recurrence"),
    [
        ("qwen3", "discrete"),
        ("olmo2", "discrete"),
        ("gpt_neox", "discrete"),
        ("qwen3", "gdn"),
    ],
)
def test_fitted_heads_start_nearest_to_the_teacher(
    teacher: PreTrainedModel, recurrence: str
) -> None:
    """On text that the fit has not seen."""
    errors = {}
    shape = {"d_state": 8, "recurrence": recurrence}
    for init in ("fitted", "teacher", "random"):
        options = {"init": init, "calibration": calibration(), **shape}
        student, _ = build_student(teacher, HeadPlan.none(teacher), **options)
        errors[init] = head_errors(student, teacher, calibration())
    assert errors["fitted"] < min(0.9, errors["teacher"], errors["random"])


@torch.no_grad()
def test_heads_of_the_delta_rule_start_as_near_as_discrete_ones() -> None:
    teacher, tokenizer = load_teacher("tiny")
    rows = open_rows(DataConfig(sources=("tiny",), seq_len=128), tokenizer)
    fitted_on = rows.batch(0, 4)
    not_seen = rows.batch(1, 4)

    def error_of(recurrence: str) -> float:
        student, _ = build_student(
            teacher,
            HeadPlan.none(teacher),
            d_state=16,
            init="fitted",
            recurrence=recurrence,
            calibration=fitted_on,
        )
        return head_errors(student, teacher, not_seen)

    assert error_of("gdn") < error_of("discrete")


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "offset"),
    [("qwen3", 0), ("gemma3", 1), ("nemotron", 1), ("gpt_neox", 0)],
)
def test_gains_of_norms_that_add_one_to_their_weight(family: str, offset: int) -> None:
    site = attention_sites(make_family_model(family))[0]
    norms = [site.block.input_layernorm]
    if hasattr(site.module, "q_norm"):
        norms.append(site.module.q_norm)
    for norm in norms:
        assert torch.equal(norm_gains(norm), norm.weight + offset)


@torch.no_grad()
def test_the_fit_finds_what_heads_do() -> None:
    """Heads that look one token back, average over 8 tokens, or do both in other proportions."""
    teacher = make_family_model("llama")
    site = attention_sites(teacher)[0]
    seq_idx = calibration()["seq_idx"]
    hidden = torch.randn(2, 96, 64)
    values_BLGP = site.module.v_proj(hidden).unflatten(-1, (4, 8))
    values_BLHP = values_BLGP.repeat_interleave(2, dim=2)

    one_token_back = torch.tensor([0.0, 0.0, 1.0, 0.0]).repeat(64, 1)
    moved_BLC, _ = causal_conv(values_BLHP.flatten(-2), one_token_back, seq_idx_BL=seq_idx)
    moved_BLHP = moved_BLC.view_as(values_BLHP)

    half_life = 8.0
    a = 0.5 ** (1 / half_life)
    ones = torch.ones(2, 96, 8, 1)
    log_a = math.log(a) * ones[..., 0]
    average_BLHP, _ = ssd_scan(values_BLHP, log_a, (1 - a) * ones, ones, seq_idx_BL=seq_idx)

    heads_BLHP = torch.empty_like(values_BLHP)
    heads_BLHP[:, :, :3] = moved_BLHP[:, :, :3]
    heads_BLHP[:, :, 3:6] = 0.7 * average_BLHP[:, :, 3:6]
    heads_BLHP[:, :, 6:] = 0.5 * average_BLHP[:, :, 6:] + 0.4 * values_BLHP[:, :, 6:]

    student, _ = build_student(teacher, HeadPlan.none(teacher), d_state=8)
    trace = LayerTrace(hidden, heads_BLHP, seq_idx)
    every_head = tuple(range(8))
    fitted = init_ssm("fitted", site, every_head, student.config, torch.Generator(), trace)
    ssm = student.mixers()[0].ssm
    ssm.load_state_dict({name: tensor for name, (tensor, _) in fitted.items()})

    error_BLHP = ssm(hidden, None, seq_idx) - heads_BLHP
    error_H = error_BLHP.square().sum((0, 1, 3))
    silence_H = heads_BLHP.square().sum((0, 1, 3))
    assert (error_H / silence_H).max() < 0.01
    half_lives = -math.log(2) / log_decay(ssm.a_proj.bias)
    torch.testing.assert_close(half_lives[3:], torch.full((5,), half_life))


def identities(model: nn.Module) -> set[int]:
    return {id(parameter) for parameter in model.parameters()}


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_sharing_frees_the_copy_and_unsharing_makes_one(family: str) -> None:
    teacher = make_family_model(family, tie_word_embeddings=True)
    student, _ = build_student(teacher, some_heads(teacher), d_state=8)
    ids = torch.randint(0, 101, (2, 9))
    expected = student(ids).logits

    share_frozen_weights(student, teacher)
    outside_attention = identities(teacher)
    for site in attention_sites(teacher):
        outside_attention -= identities(site.module)
    assert identities(student) & identities(teacher) == outside_attention
    assert torch.equal(student(ids).logits, expected)

    unshare_weights(student)
    assert not identities(student) & identities(teacher)
    assert student.lm_head.weight is student.get_input_embeddings().weight
    assert torch.equal(student(ids).logits, expected)


def test_a_plan_for_another_teacher_is_refused() -> None:
    teacher = make_family_model("llama")
    other = make_family_model("llama", seed=1)
    plan = some_heads(teacher)
    made_for_teacher = replace(plan, teacher=fingerprint(teacher))
    build_student(teacher, made_for_teacher, d_state=8)
    with pytest.raises(ValueError, match=fingerprint(other)):
        build_student(other, made_for_teacher, d_state=8)
    shallow = make_family_model("llama", num_hidden_layers=2)
    with pytest.raises(ValueError, match=naming("3 layers", "2 layers")):
        build_student(shallow, plan, d_state=8)


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({"d_state": 3}, ["d_state", 3]),
        ({"init": "xavier"}, ["'xavier'", "teacher"]),
        ({"init": "statistics"}, ["'statistics'"]),
        ({"init": "fitted"}, ["calibration"]),
        (
            {"init": "fitted", "calibration": {"tokens": torch.zeros(1, 4)}},
            ["input_ids"],
        ),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], facts: list[object]) -> None:
    teacher = make_family_model("llama")
    with pytest.raises(ValueError, match=naming(*facts)):
        build_student(teacher, some_heads(teacher), **{"d_state": 8, **options})


ODD_PARTS: dict[str, Any] = {
    "k_proj": None,
    "q_norm": nn.RMSNorm(2 * 16),
    "sinks": nn.Parameter(torch.zeros(8)),
    "q_proj": nn.Linear(64, 2 * 8 * 16),
}


@pytest.mark.parametrize("part", ODD_PARTS)
def test_attention_that_is_not_understood_is_refused_by_name(part: str) -> None:
    teacher = make_family_model("qwen3")
    setattr(teacher.model.layers[1].self_attn, part, ODD_PARTS[part])
    with pytest.raises(ValueError, match=naming("model.layers.1.self_attn", part)):
        build_student(teacher, some_heads(teacher), d_state=8)


# Families between those that students are checked with and those that cannot become students.
TINY_SHAPE = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def teacher_of_class(prefix: str, **fields: object) -> PreTrainedModel:
    """Make a tiny model; skip where this transformers is older than the family, or its students."""
    config_class = getattr(transformers, f"{prefix}Config", None)
    if config_class is None:
        pytest.skip(f"{prefix} needs a newer transformers")
    oldest = oldest_transformers(config_class.model_type)
    if release(oldest) > release(transformers.__version__):
        pytest.skip(f"{prefix} needs transformers {oldest}")
    config = config_class(**TINY_SHAPE, **fields)
    model_class = getattr(transformers, f"{prefix}ForCausalLM")
    return model_class(config).eval()


@torch.no_grad()
@pytest.mark.parametrize(
    ("prefix", "fields"),
    [
        ("Helium", {"head_dim": 8, "num_key_value_heads": 4}),
        # Norms without weights, behind RoPE.
        ("NanoChat", {"num_key_value_heads": 4}),
        (
            "Olmoe",
            {"num_key_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2},
        ),
        # As a teacher with a cache.
        pytest.param("Persimmon", {"qk_layernorm": True}, marks=since("5.10")),
    ],
)
def test_relatives_become_students_too(prefix: str, fields: dict[str, object]) -> None:
    teacher = teacher_of_class(prefix, **fields)
    ids = torch.randint(3, 101, (2, 15))
    all_kept, _ = build_student(teacher, HeadPlan.all(teacher), d_state=8)
    assert torch.equal(all_kept(ids).logits, teacher(ids).logits)

    plan = HeadPlan.from_pairs(teacher, [(0, 0), (0, 1), (0, 2), (1, 5)])
    student, _ = build_student(teacher, plan, d_state=8)
    seq_idx = torch.tensor([[0] * 6 + [1] * 9]).expand(2, -1)
    alone = [student(document).logits for document in ids.split([6, 9], dim=1)]
    packed = student(ids, seq_idx=seq_idx).logits
    torch.testing.assert_close(packed, torch.cat(alone, dim=1))

    # With silent recurrent heads, silu(0) = 0, it is the teacher without the others.
    for mixer in student.mixers():
        mixer.ssm.z_proj.weight.zero_()
        mixer.ssm.z_proj.bias.zero_()
    others = set(HeadPlan.all(teacher).kept) - set(plan.kept)
    with ablate_heads(teacher, others):
        torch.testing.assert_close(student(ids).logits, teacher(ids).logits)


@pytest.mark.parametrize(
    ("prefix", "fields", "facts"),
    [
        ("BitNet", {}, ["model.layers.0.self_attn", "attn_sub_norm.weight", "[64]"]),
        ("StableLm", {"qk_layernorm": True}, ["q_layernorm.norms.0.weight", "[8]"]),
    ],
)
def test_what_cannot_become_a_student_is_refused_in_a_line(prefix, fields, facts) -> None:
    teacher = teacher_of_class(prefix, num_key_value_heads=4, **fields)
    with pytest.raises(ValueError, match=naming(*facts)) as error:
        build_student(teacher, HeadPlan.none(teacher), d_state=8)
    assert "\n" not in str(error.value)


def test_a_layer_with_one_recurrent_head_can_be_saved(tmp_path) -> None:
    teacher = make_family_model("llama")
    plan = HeadPlan.from_pairs(teacher, [(0, head) for head in range(7)])
    rows = {"input_ids": torch.randint(3, 97, (2, 32))}
    student, _ = build_student(teacher, plan, d_state=8, init="fitted", calibration=rows)
    # One element of stride 8: contiguous to torch, and not a view of bytes.
    odd = torch.empty(8)[::8]
    path = tmp_path / "weights.safetensors"
    save_tensors(path, {**student.state_dict(), "odd": odd})
    assert torch.equal(load_file(path)["odd"], odd)


def test_a_teacher_that_has_read_a_long_row_gives_the_student_its_rope() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    teacher = make_family_model("llama", rope_parameters=rope, max_position_embeddings=32)
    ids = torch.randint(3, 97, (1, 60))
    with torch.no_grad():
        teacher(ids)
        student, _ = build_student(teacher, HeadPlan.all(teacher), d_state=8)
        for length in (20, 60, 20):
            beginning = ids[:, :length]
            assert torch.equal(student(beginning).logits, teacher(beginning).logits)
