"""Heads of every family of docs/heads.md, on tiny random models of the real transformers classes."""

import copy
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from operator import itemgetter
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from hybrid_distill.plan import HeadId, HeadPlan
from hybrid_distill.student.build import build_student
from hybrid_distill.teacher import (
    HeadSite,
    ablate_heads,
    ablate_heads_by_row,
    attention_sites,
    decoder_blocks,
    eval_mode,
    head_sites,
    record_heads,
    trace_mixers,
)

IDS = torch.arange(3, 23).view(2, 10)
TOKENS = {"vocab_size": 101, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.2}
WIDTH = {"hidden_size": 32, "num_hidden_layers": 3}
ATTENTION = {**TOKENS, **WIDTH, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
MAMBA2 = {**TOKENS, **WIDTH, "state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 4}
FALCON_H1 = {"mamba_d_ssm": 48, "mamba_n_heads": 6, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_chunk_size": 4}
ZAMBA2 = {
    **ATTENTION,
    "num_hidden_layers": 5,
    "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid", "hybrid"],
    "num_mem_blocks": 2,  # layers 1 and 4 share their attention
    "n_mamba_heads": 8,
    "mamba_ngroups": 2,
    "mamba_d_state": 8,
    "chunk_size": 4,
    "use_mem_rope": True,
}
# Layers with heads, n_heads, n_kv_heads, head_dim, kind, path of the projection.
Sites = tuple[list[int], int, int, int, str, str]
PLAIN: Sites = ([0, 1, 2], 4, 2, 8, "attention", "self_attn.o_proj")
WIDE: Sites = ([0, 1, 2], 4, 2, 16, "attention", "self_attn.o_proj")
CHANNELS: Sites = ([0, 1, 2], 64, 64, 1, "channel", "mixer.out_proj")
NEOX = {**TOKENS, **WIDTH, "intermediate_size": 48, "num_attention_heads": 4}
GEMMA = {**ATTENTION, "head_dim": 16, "sliding_window": 4}
FAMILIES: dict[str, tuple[str, dict[str, Any], Sites]] = {
    "llama": ("Llama", ATTENTION, PLAIN),
    "qwen2": ("Qwen2", ATTENTION, PLAIN),
    "qwen3": ("Qwen3", {**ATTENTION, "head_dim": 16}, WIDE),
    "gemma2": ("Gemma2", GEMMA, WIDE),
    "gemma3": ("Gemma3", {**GEMMA, "sliding_window_pattern": 2}, WIDE),
    "olmo2": ("Olmo2", ATTENTION, PLAIN),
    "phi3": ("Phi3", ATTENTION, PLAIN),
    "gpt_neox": ("GPTNeoX", NEOX, ([0, 1, 2], 4, 4, 8, "attention", "attention.dense")),
    "mamba2": ("Mamba2", MAMBA2, ([0, 1, 2], 8, 8, 8, "ssm", "mixer.out_proj")),
    "mamba": ("Mamba", {**TOKENS, **WIDTH, "state_size": 8}, CHANNELS),
    "falcon_mamba": ("FalconMamba", {**TOKENS, **WIDTH, "state_size": 8}, CHANNELS),
    "zamba2": ("Zamba2", ZAMBA2, ([1, 3, 4], 4, 2, 16, "attention", "shared_transformer.self_attn.o_proj")),
    "falcon_h1": ("FalconH1", {**ATTENTION, **FALCON_H1}, PLAIN),
    "student": ("", {}, ([0, 1, 2], 4, 2, 8, "hybrid", "self_attn.o_proj")),
}
KEPT = [HeadId(0, 1), HeadId(0, 2), HeadId(2, 3)]


def make_model(family: str, **changes: Any) -> PreTrainedModel:
    """A random model in eval mode; every vector is drawn too, so that no bias is zero and no two heads alike."""
    torch.manual_seed(0)
    if family == "student":
        teacher = make_model("llama")
        return build_student(teacher, HeadPlan.from_pairs(teacher, KEPT), d_state=4, seed=0)[0].eval()
    prefix, config, _ = FAMILIES[family]
    config_class = f"{prefix}{'Text' if family == 'gemma3' else ''}Config"
    model = getattr(transformers, f"{prefix}ForCausalLM")(getattr(transformers, config_class)(**config, **changes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model.float().eval()


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


def some_heads(site: HeadSite) -> list[int]:
    return [0, site.n_heads // 2, site.n_heads - 1]


def without_columns(model: PreTrainedModel, site: HeadSite, head: int) -> PreTrainedModel:
    """A copy that lacks the head's columns of the output projection, in this layer only."""
    edited = copy.deepcopy(model)
    block = decoder_blocks(edited)[site.layer][1]
    if site.kind == "attention" and hasattr(block, "shared_transformer"):
        block.shared_transformer = copy.deepcopy(block.shared_transformer)  # no longer shared
    o_proj = block.get_submodule(site.name.removeprefix(f"{decoder_blocks(model)[site.layer][0]}."))
    name = next(name for name, module in site.module.named_children() if module is site.o_proj)
    weight = o_proj.get_submodule(name).weight
    with torch.no_grad():
        weight[:, head * site.head_dim : (head + 1) * site.head_dim] = 0
    return edited


@contextmanager
def block_outputs(model: PreTrainedModel, pick: Callable[[Any], Any] = itemgetter(0)):
    """Collect what each decoder layer returns in a forward: the hidden states, or all of it."""
    outputs: list[Any] = []
    with ExitStack() as hooks:
        for _, block in decoder_blocks(model):
            hooks.enter_context(block.register_forward_hook(lambda *call: outputs.append(pick(call[-1]))))
        yield outputs


def n_hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_the_table(family: str) -> None:
    model = make_model(family)
    layers, n_heads, n_kv_heads, head_dim, kind, path = FAMILIES[family][2]
    sites = head_sites(model)
    assert [site.layer for site in sites] == layers
    for site in sites:
        assert (site.n_heads, site.n_kv_heads, site.head_dim, site.kind) == (n_heads, n_kv_heads, head_dim, kind)
        assert site.block is decoder_blocks(model)[site.layer][1]
        assert site.o_proj is site.block.get_submodule(path) and site.o_proj.in_features == n_heads * head_dim
        assert model.get_submodule(site.name) is site.module and not site.shared
    if family == "student":
        kept = {(site.layer, head) for site in sites for head in range(4) if site.kind_of(head) == "attention"}
        assert kept == set(KEPT) and sites[1].kind_of(0) == "ssm"
    else:
        assert {site.kind_of(0) for site in sites} == {kind}


@torch.no_grad()
def test_ablating_a_head_is_zeroing_its_columns_in_its_layer_alone(family: str) -> None:
    model = make_model(family)
    with block_outputs(model) as outputs:
        plain, below = model(IDS).logits, list(outputs)
        for site in head_sites(model):
            for head in some_heads(site):
                expected = without_columns(model, site, head)(IDS).logits
                outputs.clear()
                with ablate_heads(model, [HeadId(site.layer, head)]):
                    ablated = model(IDS).logits
                torch.testing.assert_close(ablated, expected)
                assert (ablated - plain).abs().max() > 1e-4
                unchanged = [torch.equal(a, b) for a, b in zip(outputs, below, strict=True)]
                assert unchanged[: site.layer + 1] == [True] * site.layer + [False]
                assert not any(unchanged[site.layer :])
    assert torch.equal(model(IDS).logits, plain) and n_hooks(model) == 0


@torch.no_grad()
def test_the_model_is_put_back_also_after_an_exception() -> None:
    model = make_model("llama")
    before = model(IDS).logits
    with pytest.raises(RuntimeError, match="inside"), ablate_heads(model, [HeadId(0, 0)]), trace_mixers(model):
        raise RuntimeError("inside")
    assert n_hooks(model) == 0 and torch.equal(model(IDS).logits, before)
    with ablate_heads(model, []):
        assert torch.equal(model(IDS).logits, before)
    with ablate_heads(model, [HeadId(1, 2), HeadId(1, 3)]):
        both = model(IDS).logits
    with ablate_heads(model, [HeadId(1, 2)]), ablate_heads(model, [HeadId(1, 3)]):
        assert torch.equal(model(IDS).logits, both)
    with eval_mode(model.train()):
        assert not model.training
    assert model.training


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "gpt_neox", "student"])
def test_traces_hold_what_flows_through_each_mixer(family: str) -> None:
    model = make_model(family)
    with trace_mixers(model) as calls:
        model(IDS)
        first = calls[0].output[0]
        model(IDS + 1)
    assert n_hooks(model) == 0 and len(calls) == 3
    assert not torch.equal(calls[0].output[0], first), "every forward fills the calls anew"
    for site, call in zip(attention_sites(model), calls.values(), strict=True):
        assert call.heads_BLHP.shape == (2, 10, site.n_heads, site.head_dim)
        torch.testing.assert_close(site.o_proj(call.heads_BLHP.flatten(-2)), call.output[0])
        if family != "student":  # whose call has moved its cache on
            torch.testing.assert_close(site.module(*call.args, **call.kwargs)[0], call.output[0])


def own_parameter(site: HeadSite, head: int) -> Tensor:
    """Numbers of the mixer that this head alone works with."""
    mixer: Any = site.module
    rows = slice(head * site.head_dim, (head + 1) * site.head_dim)
    match type(mixer).__name__:
        case "Phi3Attention":
            return mixer.qkv_proj.weight[rows]
        case "GPTNeoXAttention":
            return mixer.query_key_value.weight.unflatten(0, (site.n_heads, 3, site.head_dim))[head, 0]
        case "Olmo2Attention":
            return mixer.q_norm.weight[rows]
        case "HybridMixer" if site.kind_of(head) == "attention":
            return mixer.attention.q_proj.weight.unflatten(0, (len(mixer.kept), -1))[mixer.kept.index(head)]
        case "HybridMixer":
            return mixer.ssm.D[mixer.replaced.index(head)]
    return mixer.q_proj.weight[rows] if site.kind == "attention" else mixer.D[head]


def changed_heads(model: PreTrainedModel, site: HeadSite, head: int, kind: Any = None) -> list[int]:
    """The slices of the projection's input that change with a parameter of one head."""
    with record_heads(model, site.layer, kind=kind) as recorded:
        model(IDS)
        own = own_parameter(site, head)
        own.add_(torch.randn_like(own))
        model(IDS)
    difference_H = (recorded[1] - recorded[0]).abs().amax((0, 1, 3))
    return difference_H.gt(1e-6).nonzero().flatten().tolist()


@torch.no_grad()
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "mamba2"])
def test_a_slice_is_the_work_of_one_head(family: str) -> None:
    model = make_model(family)
    for site in head_sites(model)[:2]:  # Zamba2's third site shares its weights with the first
        for head in some_heads(site):
            assert changed_heads(model, site, head) == [head]


@torch.no_grad()
@pytest.mark.parametrize(("family", "groups"), [("mamba2", 2), ("zamba2", 2), ("falcon_h1", 6)])
def test_ssm_heads_of_the_mamba_2_mixer(family: str, groups: int) -> None:
    """The gated norm before the projection divides by the RMS of a group of heads: ablation leaves that as it was."""
    model = make_model(family)
    plain = model(IDS).logits
    sites = head_sites(model, "ssm")
    assert [site.layer for site in sites] == list(range(len(decoder_blocks(model))))
    for site in sites:
        assert site.kind == "ssm" and site.name.endswith(("mixer", "mamba"))
        for head in some_heads(site):
            ablated = HeadId(site.layer, head)
            with ablate_heads(model, [ablated], kind="ssm"), record_heads(model, site.layer, kind="ssm") as heads:
                logits = model(IDS).logits
            torch.testing.assert_close(logits, without_columns(model, site, head)(IDS).logits)
            zero = heads[0].abs().amax((0, 1, 3)).eq(0).nonzero().flatten().tolist()
            assert zero == [head], "in the place the projection reads, and nowhere else"
            assert (logits - plain).abs().max() > 1e-4
            size = site.n_heads // groups
            expected = list(range(head // size * size, (head // size + 1) * size))
            assert changed_heads(model, site, head, "ssm") == expected


@torch.no_grad()
def test_an_ablated_model_decodes_with_its_cache_as_without(family: str) -> None:
    model = make_model(family)
    for module in model.modules():
        if isinstance(getattr(module, "time_step_limit", None), tuple):
            module.time_step_limit = (0.0, torch.inf)  # of transformers' two forms the stepwise one knows no limit
    site = head_sites(model)[-1]
    settings: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    with ablate_heads(model, [HeadId(site.layer, head) for head in range(0, site.n_heads, 2)]):
        cached = model.generate(IDS, use_cache=True, output_logits=True, return_dict_in_generate=True, **settings)
        full = model(cached.sequences[:, :-1]).logits[:, -6:]
    torch.testing.assert_close(torch.stack(cached.logits, 1), full, atol=1e-4, rtol=1e-4)


def test_layers_without_heads_are_named() -> None:
    model = make_model("zamba2")
    message = r"head L2H0 does not exist: .* layers 0\.\.4, of which 1, 3, 4 have attention heads, with heads 0\.\.3"
    with pytest.raises(ValueError, match=message), ablate_heads(model, [HeadId(2, 0)]):
        pass
    with pytest.raises(ValueError, match=message), ablate_heads_by_row(model, 2, [0]):
        pass
    for head in (HeadId(1, 4), HeadId(5, 0), HeadId(-1, 0)):
        with pytest.raises(ValueError, match=f"{head} does not exist"), ablate_heads(model, [head]):
            pass
    with pytest.raises(ValueError, match=r"no heads of kind 'channel'; its heads are of kind attention, ssm"):
        head_sites(model, "channel")


@torch.no_grad()
def test_a_module_that_several_layers_run_is_ablated_in_one_of_them() -> None:
    """Zamba2 in earlier transformers: layers share their attention module, not only its weights."""
    model = make_model("zamba2")
    block_1, block_4 = (decoder_blocks(model)[layer][1] for layer in (1, 4))
    assert block_1.shared_transformer.self_attn.o_proj.weight is block_4.shared_transformer.self_attn.o_proj.weight
    expected = {}
    for site in (head_sites(model)[0], head_sites(model)[2]):
        expected[site.layer] = without_columns(model, site, 3)(IDS).logits
    block_4.shared_transformer = block_1.shared_transformer
    assert [site.shared for site in head_sites(model)] == [True, False, True]
    for layer, logits in expected.items():
        with ablate_heads(model, [HeadId(layer, 3)]):
            torch.testing.assert_close(model(IDS).logits, logits)
            torch.testing.assert_close(model(IDS).logits, logits)
    everywhere = head_sites(model)[0].o_proj
    everywhere.weight[:, -16:] = 0
    for logits in expected.values():
        assert (model(IDS).logits - logits).abs().max() > 1e-3, "both layers count"


@torch.no_grad()
@pytest.mark.parametrize("family", ["mamba2", "falcon_mamba", "falcon_h1"])
def test_a_kernel_that_goes_round_the_projection_is_noticed(family: str, monkeypatch) -> None:
    model = make_model(family)
    kind = "ssm" if family == "falcon_h1" else None
    site = head_sites(model, kind)[1]
    monkeypatch.setattr(site.module, "forward", lambda hidden_states, **_: hidden_states)
    model(IDS)
    with pytest.raises(ValueError, match=r"did not call its output projection.*model\.eval\(\)"):
        with ablate_heads(model, [HeadId(1, 0)], kind=kind):
            model(IDS)
    assert n_hooks(model) == 0


UNSUPPORTED = {
    "GPT2": ({"n_layer": 2, "n_embd": 16, "n_head": 2}, r"h\.0\.attn \(GPT2Attention\) has no linear q_proj, k_proj"),
    "OPT": (
        {**ATTENTION, "ffn_dim": 16, "word_embed_proj_dim": 32, "num_key_value_heads": 4},
        r"layers\.0\.self_attn \(OPTAttention\) has no linear o_proj; expected an attention module with q_proj.*"
        r"or qkv_proj, o_proj \(Phi-3\), or query_key_value, dense \(GPT-NeoX\)",
    ),
    "Rwkv": ({**WIDTH, "attention_hidden_size": 32}, r"blocks\.0\.attention \(RwkvSelfAttention\) has no linear"),
    "RecurrentGemma": (
        {**ATTENTION, "lru_width": 32, "block_types": ["recurrent", "attention"]},
        r"layers\.0 \(RecurrentGemmaDecoderLayer\) has no supported mixer: its parts are "
        r"temporal_pre_norm, temporal_block.*expected attention named self_attn or",
    ),
}  # fmt: skip


@pytest.mark.parametrize("prefix", UNSUPPORTED)
def test_an_unsupported_model_says_what_was_expected(prefix: str) -> None:
    config, message = UNSUPPORTED[prefix]
    model = getattr(transformers, f"{prefix}ForCausalLM" if prefix != "GPT2" else "GPT2LMHeadModel")(
        getattr(transformers, f"{prefix}Config")(**{"vocab_size": 20, **config})
    )
    with pytest.raises(ValueError, match=message):
        head_sites(model)
    with pytest.raises(ValueError, match=message), ablate_heads(model, []):
        pass


def test_what_is_not_understood_is_refused() -> None:
    """Sizes other than the config's, and layers that cannot become a student's."""
    model = make_model("llama")
    head_sites(model)[1].module.head_dim = 6
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.o_proj reads 32 channels; expected 4 heads x 6"):
        head_sites(model)
    for family, message in {
        "falcon_h1": r"layers\.0 \(FalconH1DecoderLayer\) mixes tokens in self_attn and in mamba",
        "zamba2": r"layers\.0 \(Zamba2MambaDecoderLayer\) holds no attention module",
        "mamba2": r"layers\.0 \(Mamba2Block\) holds no attention module",
    }.items():
        with pytest.raises(ValueError, match=message):
            attention_sites(make_model(family))
