"""A student with Mamba-2 heads is a Falcon-H1, whatever heads it keeps; others are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_family_model
from messages import naming
from safetensors.torch import load_file, save_file
from students import gate_in_this_process, keep, tiny_student
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForCausalLM

from hybrid_distill.cache_size import falcon_h1_cache_bytes
from hybrid_distill.cli.app import main
from hybrid_distill.cli.export import ExportJob, export_student
from hybrid_distill.export import export_checkpoint
from hybrid_distill.export.card import model_card
from hybrid_distill.export.check import CACHED, RELOADED, greedy, left_padded
from hybrid_distill.export.falcon_h1 import obstacles, to_falcon_h1
from hybrid_distill.export.formats import check_expressible
from hybrid_distill.model import HybridConfig, HybridForCausalLM
from hybrid_distill.model.layout import cache_of
from hybrid_distill.plan import HeadPlan
from hybrid_distill.student.build import build_student

TOLERANCE = 1e-5  # relative to the largest logit; measured: 2e-7 to 8e-7
# 3 layers of 8 heads in 4 KV groups.
KEPT = {
    "none": [(), (), ()],
    "one": [(), (5,), ()],
    "uneven": [(0, 1, 2), (), (0, 1, 2, 3, 4, 6, 7)],
    "a whole layer": [(4,), tuple(range(8)), ()],
    "all": [tuple(range(8))] * 3,
}


def stirred(student: HybridForCausalLM) -> HybridForCausalLM:
    """Move every parameter, so that none is still what it started as."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return student.eval()


def student_keeping(
    family: str,
    kept: list[tuple[int, ...]],
    recurrence: str = "mamba2",
    d_state: int = 5,
    **options: Any,
) -> HybridForCausalLM:
    tied = family == "qwen2"
    teacher = make_family_model(family, vocab_size=300, tie_word_embeddings=tied)
    plan = keep(teacher, *kept)
    student, _ = build_student(teacher, plan, d_state=d_state, recurrence=recurrence, **options)
    return stirred(student)


def random_ids(*shape: int) -> torch.Tensor:
    return torch.randint(5, 300, shape, generator=torch.Generator().manual_seed(1))


def falcon_model(student: HybridForCausalLM) -> torch.nn.Module:
    """Let transformers build a model from the converted configuration and tensors alone."""
    falcon = to_falcon_h1(student)
    config = AutoConfig.for_model(**falcon.config)
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(falcon.state, strict=True)
    return model.eval()


@torch.no_grad()
@pytest.mark.parametrize("kept", KEPT.values(), ids=KEPT)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_falcon_h1_computes_what_the_student_computes(
    family: str, kept: list[tuple[int, ...]]
) -> None:
    student = student_keeping(family, kept)
    falcon = falcon_model(student)
    ids_BL = random_ids(2, 37)

    expected = student(ids_BL).logits
    error = (falcon(ids_BL).logits - expected).abs().max()
    assert error <= TOLERANCE * expected.abs().max()

    # Left-padded and from its cache, where biases before the convolution would leak out of padding.
    prompts_BL, mask_BL = left_padded([ids_BL[0, :3], ids_BL[1, :17]])
    ours = greedy(student, prompts_BL, mask_BL, 8).tokens_BT
    theirs = greedy(falcon, prompts_BL, mask_BL, 8).tokens_BT
    assert torch.equal(theirs, ours)


@pytest.mark.parametrize("kept", KEPT.values(), ids=KEPT)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_the_announced_sizes_are_those_of_the_falcon_h1(
    family: str, kept: list[tuple[int, ...]]
) -> None:
    student = student_keeping(family, kept)
    falcon = falcon_model(student)

    n_parameters = sum(parameter.numel() for parameter in falcon.parameters())
    assert to_falcon_h1(student).parameters() == n_parameters

    length = 100
    config = falcon.config
    # Keys and values in 16 bit, states in 32.
    kv_bytes = 2 * config.num_key_value_heads * config.head_dim * length * 2
    ssm_bytes = config.mamba_d_ssm * config.mamba_d_state * 4
    announced = falcon_h1_cache_bytes(keep(student, *kept), head_dim=8, d_state=5, length=length)
    assert announced == config.num_hidden_layers * (kv_bytes + ssm_bytes)


@pytest.mark.parametrize(
    ("kept", "n_heads", "n_kv_heads"),
    [
        ([(0, 1), (2, 3, 6, 7), ()], 4, 2),
        ([(0, 2), (4,), ()], 2, 2),
    ],
    ids=["shared in every layer", "apart"],
)
def test_heads_of_one_group_share_keys_and_values_where_every_layer_lets_them(
    kept: list[tuple[int, ...]], n_heads: int, n_kv_heads: int
) -> None:
    config = to_falcon_h1(student_keeping("llama", kept)).config
    assert config["num_attention_heads"] == n_heads
    assert config["num_key_value_heads"] == n_kv_heads


@pytest.mark.parametrize("recurrence", ["discrete", "gdn"])
def test_students_with_other_recurrences_are_refused(recurrence: str) -> None:
    student = student_keeping("llama", KEPT["one"], recurrence=recurrence)
    with pytest.raises(ValueError, match=naming("falcon-h1", recurrence)):
        check_expressible(student, "falcon-h1")


def test_only_a_window_that_a_kept_head_looks_through_is_an_obstacle() -> None:
    teacher = make_family_model("mistral", vocab_size=300, sliding_window=6)
    options = {"d_state": 4, "recurrence": "mamba2"}

    one_head = HeadPlan.from_pairs(teacher, [(0, 1)])
    student, _ = build_student(teacher, one_head, **options)
    (reason,) = obstacles(student)
    assert "sliding-window" in reason

    student, _ = build_student(teacher, HeadPlan.none(teacher), **options)
    assert obstacles(student) == []


def test_a_student_without_recurrent_heads_has_no_obstacle() -> None:
    teacher = make_family_model("llama", vocab_size=300)
    student, _ = build_student(teacher, HeadPlan.all(teacher), d_state=4)
    assert obstacles(student) == []


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"recurrence": "mamba3"}, "mamba3"),
        ({"recurrence": "mamba2", "conv_bias": True}, "conv_bias"),
    ],
    ids=["unknown", "bias before a mamba2 convolution"],
)
def test_an_impossible_recurrence_is_refused(options: dict[str, Any], name: str) -> None:
    backbone = make_family_model("llama").config.to_dict()
    with pytest.raises(ValueError, match=name):
        HybridConfig(backbone, [[], [], []], **options)


@torch.no_grad()
@pytest.mark.parametrize("recurrence", ["mamba2", "gdn"])
def test_heads_give_one_result_however_they_are_run(recurrence: str) -> None:
    """Run at once; in segments; from a cache, token by token; packed; as mixing matrices."""
    student = student_keeping("llama", KEPT["uneven"], recurrence=recurrence)
    n_tokens = 23
    n_prompt = 9
    close = {"rtol": 1e-5, "atol": 2e-6}
    ids_BL = random_ids(1, n_tokens)
    expected = student(ids_BL).logits

    out = student(ids_BL[:, :n_prompt], use_cache=True)
    steps = [out.logits]
    for place in range(n_prompt, n_tokens):
        out = student(ids_BL[:, place : place + 1], cache=cache_of(out))
        steps.append(out.logits)
    assert_close(torch.cat(steps, dim=1), expected, **close)

    twice_BL = torch.cat([ids_BL, ids_BL], dim=1)
    seq_idx_BL = torch.arange(2).repeat_interleave(n_tokens)[None]
    packed = student(twice_BL, seq_idx=seq_idx_BL).logits
    assert_close(packed, expected.repeat(1, 2, 1), **close)

    heads = student.mixers()[1].ssm
    generator = torch.Generator().manual_seed(2)
    hidden_BLD = torch.randn(1, n_tokens, student.config.hidden_size, generator=generator)
    x_BLRP, *_, gate_BLRP = heads.scan_inputs(hidden_BLD)
    matrices_BRLS = heads.mixing_matrices(hidden_BLD)
    mixed_BLRP = torch.einsum("brls,bsrp->blrp", matrices_BRLS, x_BLRP)
    assert_close(mixed_BLRP * gate_BLRP, heads(hidden_BLD), **close)

    student.set_segment_len(5)
    in_segments = student(ids_BL, use_cache=False).logits
    assert_close(in_segments, expected, **close)


def test_the_card_states_the_cost() -> None:
    student = student_keeping("llama", [(0, 1), (5,), ()])
    plan = HeadPlan.from_pairs(student, [(0, 0), (0, 1), (1, 5)])

    card = model_card(
        student,
        plan,
        None,
        None,
        export_format="falcon-h1",
        license="mit",
        base_model="",
    )

    # 3 layers with one KV head of 8 channels in 16 bit, 8 SSM heads of 8 x 5 in 32 bit.
    kv_bytes = 2 * 1 * 8 * 4096 * 2
    ssm_bytes = 8 * 8 * 5 * 4
    megabytes = 3 * (kv_bytes + ssm_bytes) / 1e6
    assert f"{to_falcon_h1(student).parameters():,} parameters" in card
    assert f"{megabytes:.3f} MB at 4,096 tokens" in card


@pytest.mark.launched
def test_a_student_goes_from_format_to_format_behind_the_gate(tmp_path: Path) -> None:
    student, plan = tiny_student("llama", recurrence="mamba2")
    own = tmp_path / "own"
    falcon = tmp_path / "falcon"
    export_checkpoint(student, None, own, plan=plan, export_format="safetensors", gate=False)

    report = export_student(ExportJob(own, falcon, "falcon-h1", max_shard_size="100KB"))

    assert report.ok
    limits = {check.limit for check in report.checks if "logits" in check.name}
    assert limits == {1e-4}
    assert json.loads((falcon / "gate/report.json").read_text())["ok"]

    # Neither format brings code.
    for folder in (own, falcon):
        assert not list(folder.glob("*.py"))
    assert "auto_map" not in json.loads((falcon / "config.json").read_text())
    assert len(list(falcon.glob("model-*.safetensors"))) > 1
    assert "FalconH1ForCausalLM" in (falcon / "README.md").read_text()

    # The format falcon-h1 is not read back.
    with pytest.raises(ValueError, match="falcon_h1"):
        export_student(ExportJob(falcon, tmp_path / "back"))


def test_verify_has_an_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The check runs in this process: its logits are compared, its decoding is consistent."""
    gate_in_this_process(monkeypatch, tmp_path / "modules")
    student, plan = tiny_student("llama", recurrence="mamba2")
    falcon = tmp_path / "falcon"
    export_checkpoint(student, None, falcon, plan=plan, export_format="falcon-h1", gate=False)

    main(["verify", str(falcon), "--to", str(tmp_path / "checks.json")])
    assert json.loads((tmp_path / "checks.json").read_text())["ok"]

    # Weights that changed after the export: status 1. No export at all: 2.
    file = falcon / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.0.mamba.A_log"] += 1
    save_file(weights, file, metadata={"format": "pt"})
    for folder, status in (("falcon", 1), ("nowhere", 2)):
        with pytest.raises(SystemExit) as end:
            main(["verify", str(tmp_path / folder), "--to", str(tmp_path / "checks.json")])
        assert end.value.code == status
    assert "nowhere" in capsys.readouterr().err
    checks = json.loads((tmp_path / "checks.json").read_text())["checks"]
    passed = {check["name"]: check["ok"] for check in checks}
    assert not passed[f"{RELOADED}, logits"]
    assert passed[f"{CACHED}, logits"]
