"""A student with Mamba-2 heads is a Falcon-H1, whatever heads it keeps; other students are refused, with the reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import make_family_model
from safetensors.torch import load_file, save_file
from students import gate_in_this_process, keep, tiny_student
from transformers import AutoConfig, AutoModelForCausalLM

from hybrid_distill.cli.app import main
from hybrid_distill.cli.export import ExportJob, export_student
from hybrid_distill.export import export_checkpoint
from hybrid_distill.export.card import model_card
from hybrid_distill.export.check import greedy, left_padded
from hybrid_distill.export.engines import writer
from hybrid_distill.export.falcon_h1 import container, obstacles
from hybrid_distill.model import HybridConfig, HybridForCausalLM
from hybrid_distill.model.layout import cache_of
from hybrid_distill.plan import HeadPlan, container_bytes
from hybrid_distill.student.build import build_student

TOLERANCE = 1e-5  # relative to the largest logit; measured: 2e-7 to 8e-7
# 8 heads in 4 KV groups, 3 layers: none at all; one; uneven shares of KV heads; a layer that keeps all; all.
KEPT = {
    "none": [(), (), ()],
    "one": [(), (5,), ()],
    "uneven": [(0, 1, 2), (), (0, 1, 2, 3, 4, 6, 7)],
    "a whole layer": [(4,), tuple(range(8)), ()],
    "all": [tuple(range(8))] * 3,
}


def stirred(student: HybridForCausalLM) -> HybridForCausalLM:
    """Every parameter moved, so that none is still what it started as: biases, taps, D, gates, decays, norms."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return student.eval()


def student_keeping(family: str, kept: list[tuple[int, ...]], **options) -> HybridForCausalLM:
    teacher = make_family_model(family, vocab_size=300, tie_word_embeddings=family == "qwen2")
    return stirred(build_student(teacher, keep(teacher, *kept), d_state=5, **{"recurrence": "mamba2", **options})[0])


def stock_model(student: HybridForCausalLM) -> torch.nn.Module:
    """Let transformers build a model from the container's configuration and tensors alone."""
    stock = container(student)
    fields = dict(stock.config)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields))
    model.load_state_dict(stock.state, strict=True)
    return model.eval()


@torch.no_grad()
@pytest.mark.parametrize("kept", KEPT.values(), ids=KEPT)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_falcon_h1_computes_what_the_student_computes(family: str, kept: list[tuple[int, ...]]) -> None:
    student = student_keeping(family, kept)
    stock = stock_model(student)
    ids_BL = torch.randint(5, 300, (2, 37), generator=torch.Generator().manual_seed(1))
    expected = student(ids_BL).logits
    assert (stock(ids_BL).logits - expected).abs().max() <= TOLERANCE * expected.abs().max()
    # From its cache and left-padded, where biases in front of the convolution would leak out of the padding.
    ids_BL, mask_BL = left_padded([ids_BL[0, :3], ids_BL[1, :17]])
    assert torch.equal(greedy(stock, ids_BL, mask_BL, 8)[0], greedy(student, ids_BL, mask_BL, 8)[0])
    assert container(student).parameters() == sum(parameter.numel() for parameter in stock.parameters())
    sizes = {"head_dim": 8, "d_state": 5, "length": 100}
    plan, config = keep(student, *kept), stock.config
    kv = 2 * config.num_key_value_heads * config.head_dim * 100 * 2
    ssm = config.mamba_d_ssm * config.mamba_d_state * 4
    assert container_bytes(plan, **sizes) == config.num_hidden_layers * (kv + ssm)


def test_kept_heads_of_one_group_share_keys_and_values_where_every_layer_lets_them() -> None:
    shared = container(student_keeping("llama", [(0, 1), (2, 3, 6, 7), ()])).config
    assert (shared["num_attention_heads"], shared["num_key_value_heads"]) == (4, 2)
    apart = container(student_keeping("llama", [(0, 2), (4,), ()])).config
    assert (apart["num_attention_heads"], apart["num_key_value_heads"]) == (2, 2)


@pytest.mark.parametrize("recurrence", ["discrete", "gdn"])
def test_students_that_are_no_falcon_h1_are_refused(recurrence: str) -> None:
    with pytest.raises(ValueError, match=f"exported as falcon-h1: its recurrent heads are {recurrence}.* Export it as"):
        writer("falcon-h1", student_keeping("llama", KEPT["one"], recurrence=recurrence))


def test_a_window_is_an_obstacle_and_a_student_without_recurrent_heads_has_none() -> None:
    teacher = make_family_model("mistral", vocab_size=300, sliding_window=6)
    plan = HeadPlan.from_pairs(teacher, [(0, 1)])
    assert "sliding-window attention" in obstacles(build_student(teacher, plan, d_state=4, recurrence="mamba2")[0])[0]
    unread = build_student(teacher, HeadPlan.none(teacher), d_state=4, recurrence="mamba2")[0]
    assert obstacles(unread) == [], "no kept head looks through the window"
    teacher = make_family_model("llama", vocab_size=300)
    assert obstacles(build_student(teacher, HeadPlan.all(teacher), d_state=4)[0]) == []


def test_an_unknown_recurrence_is_refused() -> None:
    backbone = make_family_model("llama").config.to_dict()
    with pytest.raises(ValueError, match="recurrence is 'mamba3'; it must be one of discrete, mamba2"):
        HybridConfig(backbone, [[], [], []], recurrence="mamba3")
    with pytest.raises(ValueError, match="conv_bias is for discrete heads"):
        HybridConfig(backbone, [[], [], []], recurrence="mamba2", conv_bias=True)


@torch.no_grad()
@pytest.mark.parametrize("recurrence", ["mamba2", "gdn"])
def test_heads_give_one_result_however_they_are_run(recurrence: str) -> None:
    """At once; in segments; from a cache, token by token; packed; as mixing matrices."""
    student = student_keeping("llama", KEPT["uneven"], recurrence=recurrence)
    ids_BL = torch.randint(5, 300, (1, 23), generator=torch.Generator().manual_seed(1))
    expected = student(ids_BL).logits
    out = student(ids_BL[:, :9], use_cache=True)
    steps = [out.logits]
    for t in range(9, 23):
        out = student(ids_BL[:, t : t + 1], cache=cache_of(out))
        steps.append(out.logits)
    torch.testing.assert_close(torch.cat(steps, dim=1), expected, rtol=1e-5, atol=2e-6)
    packed = student(torch.cat([ids_BL, ids_BL], dim=1), seq_idx=torch.arange(2).repeat_interleave(23)[None]).logits
    torch.testing.assert_close(packed, expected.repeat(1, 2, 1), rtol=1e-5, atol=2e-6)
    heads = student.mixers()[1].ssm
    hidden_BLD = torch.randn(1, 23, student.config.hidden_size, generator=torch.Generator().manual_seed(2))
    x_BLRP, *_, gate_BLRP = heads.scan_inputs(hidden_BLD)
    mixed = torch.einsum("brls,bsrp->blrp", heads.mixing_matrices(hidden_BLD), x_BLRP) * gate_BLRP
    torch.testing.assert_close(mixed, heads(hidden_BLD), rtol=1e-5, atol=2e-6)
    student.set_segment_len(5)
    torch.testing.assert_close(student(ids_BL, use_cache=False).logits, expected, rtol=1e-5, atol=2e-6)


def test_the_card_states_the_cost() -> None:
    student = student_keeping("llama", [(0, 1), (5,), ()])
    plan = HeadPlan.from_pairs(student, [(0, 0), (0, 1), (1, 5)])
    card = model_card(student, plan, None, None, form="falcon-h1", license="mit", base_model="")
    # 3 layers with one KV head of 8 channels in 16 bit, 8 SSM heads of 8 x 5 in 32 bit
    n_bytes = 3 * (2 * 1 * 8 * 4096 * 2 + 8 * 8 * 5 * 4)
    assert (
        f"{container(student).parameters():,} parameters" in card and f"{n_bytes / 1e6:.3f} MB at 4,096 tokens" in card
    )


@pytest.mark.launched
def test_a_student_goes_from_form_to_form_behind_the_gate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And `verify`, here in this process, has an exit status that says whether every check holds."""
    student, plan = tiny_student("llama", recurrence="mamba2")
    own, stock = tmp_path / "own", tmp_path / "stock"
    export_checkpoint(student, None, own, plan=plan, form="safetensors", gate=False)
    report = export_student(ExportJob(own, stock, "falcon-h1", max_shard_size="100KB"))
    assert report.ok and {one.limit for one in report.checks if "logits" in one.name} == {1e-4}
    assert json.loads((stock / "gate/report.json").read_text())["ok"]
    assert not list(stock.glob("*.py")) + list(own.glob("*.py")) and len(list(stock.glob("model-*.safetensors"))) > 1
    assert "auto_map" not in json.loads((stock / "config.json").read_text())
    assert "FalconH1ForCausalLM" in (stock / "README.md").read_text()
    with pytest.raises(ValueError, match="holds a model of type 'falcon_h1'; pass a finished run, or an export as"):
        export_student(ExportJob(stock, tmp_path / "back"))

    gate_in_this_process(monkeypatch, tmp_path / "modules")
    main(["verify", str(own), "--to", str(tmp_path / "checks.json")])
    assert json.loads((tmp_path / "checks.json").read_text())["ok"]
    file = next(path for path in stock.glob("*.safetensors") if "model.layers.0.mamba.A_log" in load_file(path))
    weights = load_file(file)
    weights["model.layers.0.mamba.A_log"] += 1
    save_file(weights, file, metadata={"format": "pt"})
    for folder, status in (("stock", 1), ("nowhere", 2)):
        with pytest.raises(SystemExit) as end:
            main(["verify", str(tmp_path / folder)])
        assert end.value.code == status
    said = capsys.readouterr()
    assert "FAILED   reloaded = exported model, logits" in said.out
    assert "ok       cached decode = full forward, logits" in said.out
    assert "nowhere is not an export" in said.err
