"""Heads of every family of docs/heads.md, on tiny models of the real transformers classes."""

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from messages import naming
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
Config = dict[str, Any]
TOKENS: Config = {
    "vocab_size": 101,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
WIDTH: Config = {"hidden_size": 32, "num_hidden_layers": 3}
NEOX: Config = {**TOKENS, **WIDTH, "intermediate_size": 48, "num_attention_heads": 4}
ATTENTION: Config = {**NEOX, "num_key_value_heads": 2}
GEMMA: Config = {**ATTENTION, "head_dim": 16, "sliding_window": 4}
MAMBA: Config = {**TOKENS, **WIDTH, "state_size": 8}
MAMBA2: Config = {**MAMBA, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 4}
FALCON_H1: Config = {
    **ATTENTION,
    "mamba_d_ssm": 48,
    "mamba_n_heads": 6,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_chunk_size": 4,
}
ZAMBA2: Config = {
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


@dataclass(frozen=True)
class Family:
    """Class and config of a tiny model, and the heads that are found in it."""

    prefix: str
    config: Config
    n_heads: int = 4
    n_kv_heads: int = 2
    head_dim: int = 8
    kind: str = "attention"
    path: str = "self_attn.o_proj"
    layers: tuple[int, ...] = (0, 1, 2)


CHANNELS = {"n_heads": 64, "n_kv_heads": 64, "head_dim": 1, "kind": "channel"}
FAMILIES = {
    "llama": Family("Llama", ATTENTION),
    "qwen2": Family("Qwen2", ATTENTION),
    "qwen3": Family("Qwen3", {**ATTENTION, "head_dim": 16}, head_dim=16),
    "gemma2": Family("Gemma2", GEMMA, head_dim=16),
    "gemma3": Family("Gemma3", {**GEMMA, "sliding_window_pattern": 2}, head_dim=16),
    "olmo2": Family("Olmo2", ATTENTION),
    "phi": Family("Phi", ATTENTION, path="self_attn.dense"),
    "phi3": Family("Phi3", ATTENTION),
    "gpt_neox": Family("GPTNeoX", NEOX, n_kv_heads=4, path="attention.dense"),
    "mamba2": Family("Mamba2", MAMBA2, 8, 8, kind="ssm", path="mixer.out_proj"),
    "mamba": Family("Mamba", MAMBA, **CHANNELS, path="mixer.out_proj"),
    "falcon_mamba": Family("FalconMamba", MAMBA, **CHANNELS, path="mixer.out_proj"),
    "zamba2": Family(
        "Zamba2",
        ZAMBA2,
        head_dim=16,
        path="shared_transformer.self_attn.o_proj",
        layers=(1, 3, 4),
    ),
    "falcon_h1": Family("FalconH1", FALCON_H1),
    "student": Family("", {}, kind="hybrid"),
}
KEPT = [HeadId(0, 1), HeadId(0, 2), HeadId(2, 3)]


def make_model(family: str, **changes: Any) -> PreTrainedModel:
    """Make a random model in eval mode; ``changes`` are fields of its config.

    Every vector is drawn too, so that no bias is zero and no two heads are alike.
    """
    torch.manual_seed(0)
    if family == "student":
        teacher = make_model("llama")
        plan = HeadPlan.from_pairs(teacher, KEPT)
        student, _ = build_student(teacher, plan, d_state=4, seed=0)
        return student.eval()
    prefix = FAMILIES[family].prefix
    config_name = "Gemma3TextConfig" if family == "gemma3" else f"{prefix}Config"
    config = getattr(transformers, config_name)(**FAMILIES[family].config, **changes)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config)
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
    """Copy a model without the head's columns of the output projection, in this layer only."""
    edited = copy.deepcopy(model)
    block_name, block = decoder_blocks(edited)[site.layer]
    if site.kind == "attention" and hasattr(block, "shared_transformer"):
        # No longer shared with another layer.
        block.shared_transformer = copy.deepcopy(block.shared_transformer)
    mixer = block.get_submodule(site.name.removeprefix(f"{block_name}."))
    (projection,) = [name for name, module in site.module.named_children() if module is site.o_proj]
    with torch.no_grad():
        mixer.get_submodule(projection).weight[:, columns_of(site, head)] = 0
    return edited


def columns_of(site: HeadSite, head: int) -> slice:
    """Return a head's columns of the output projection."""
    return slice(head * site.head_dim, (head + 1) * site.head_dim)


@contextmanager
def block_outputs(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """Collect the hidden states that each decoder layer returns in a forward."""
    outputs: list[Tensor] = []

    def collect(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        outputs.append(output[0])

    with ExitStack() as hooks:
        for _, block in decoder_blocks(model):
            hooks.enter_context(block.register_forward_hook(collect))
        yield outputs


def n_hooks(model: nn.Module) -> int:
    count = 0
    for module in model.modules():
        count += len(module._forward_hooks) + len(module._forward_pre_hooks)
    return count


def test_the_table(family: str) -> None:
    model = make_model(family)
    expected = FAMILIES[family]
    sites = head_sites(model)
    assert tuple(site.layer for site in sites) == expected.layers
    for site in sites:
        assert site.n_heads == expected.n_heads
        assert site.n_kv_heads == expected.n_kv_heads
        assert site.head_dim == expected.head_dim
        assert site.kind == expected.kind
        assert site.block is decoder_blocks(model)[site.layer][1]
        assert site.o_proj is site.block.get_submodule(expected.path)
        assert site.o_proj.in_features == expected.n_heads * expected.head_dim
        assert model.get_submodule(site.name) is site.module
        assert not site.shared
        for head in range(site.n_heads):
            kind = expected.kind
            if family == "student":
                is_kept = HeadId(site.layer, head) in KEPT
                kind = "attention" if is_kept else "ssm"
            assert site.kind_of(head) == kind


@torch.no_grad()
def test_ablating_a_head_is_zeroing_its_columns_in_its_layer_alone(family: str) -> None:
    model = make_model(family)
    with block_outputs(model) as outputs:
        plain = model(IDS).logits
        plain_outputs = list(outputs)
        for site in head_sites(model):
            for head in some_heads(site):
                expected = without_columns(model, site, head)(IDS).logits
                outputs.clear()
                with ablate_heads(model, [HeadId(site.layer, head)]):
                    ablated = model(IDS).logits
                torch.testing.assert_close(ablated, expected)
                assert (ablated - plain).abs().max() > 1e-4, "the head does not matter"
                for layer, output in enumerate(outputs):
                    is_below = layer < site.layer
                    assert torch.equal(output, plain_outputs[layer]) == is_below
    assert torch.equal(model(IDS).logits, plain)
    assert n_hooks(model) == 0


@torch.no_grad()
def test_the_model_is_put_back_also_after_an_exception() -> None:
    model = make_model("llama")
    before = model(IDS).logits
    with pytest.raises(RuntimeError), ablate_heads(model, [HeadId(0, 0)]), trace_mixers(model):
        raise RuntimeError
    assert n_hooks(model) == 0
    assert torch.equal(model(IDS).logits, before)


@torch.no_grad()
def test_no_heads_and_nested_ablations() -> None:
    model = make_model("llama")
    before = model(IDS).logits
    with ablate_heads(model, []):
        assert torch.equal(model(IDS).logits, before)
    with ablate_heads(model, [HeadId(1, 2), HeadId(1, 3)]):
        together = model(IDS).logits
    with ablate_heads(model, [HeadId(1, 2)]), ablate_heads(model, [HeadId(1, 3)]):
        assert torch.equal(model(IDS).logits, together)


def test_eval_mode_ends() -> None:
    model = make_model("llama").train()
    with eval_mode(model):
        assert not model.training
    assert model.training


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "gpt_neox", "student"])
def test_traces_hold_the_input_and_output_of_each_mixer(family: str) -> None:
    model = make_model(family)
    with trace_mixers(model) as calls:
        model(IDS)
        first = calls[0].output[0]
        model(IDS + 1)
    assert n_hooks(model) == 0
    assert len(calls) == 3
    assert not torch.equal(calls[0].output[0], first), "every forward fills the calls anew"
    for site, call in zip(attention_sites(model), calls.values(), strict=True):
        assert call.heads_BLHP.shape == (2, 10, site.n_heads, site.head_dim)
        projected = site.o_proj(call.heads_BLHP.flatten(-2))
        torch.testing.assert_close(projected, call.output[0])
        # A student's call has moved its cache on.
        if family != "student":
            again = site.module(*call.args, **call.kwargs)
            torch.testing.assert_close(again[0], call.output[0])


def own_parameter(site: HeadSite, head: int) -> Tensor:
    """Return numbers of the mixer that this head alone works with."""
    mixer: Any = site.module
    rows = slice(head * site.head_dim, (head + 1) * site.head_dim)
    if site.kind == "hybrid":
        if site.kind_of(head) == "ssm":
            return mixer.ssm.D[mixer.replaced.index(head)]
        by_head = mixer.attention.q_proj.weight.unflatten(0, (len(mixer.kept), -1))
        return by_head[mixer.kept.index(head)]
    if site.kind != "attention":
        return mixer.D[head]
    match type(mixer).__name__:
        case "Phi3Attention":
            return mixer.qkv_proj.weight[rows]
        case "GPTNeoXAttention":
            # Queries, keys and values of one head after those of another.
            by_head = mixer.query_key_value.weight.unflatten(0, (site.n_heads, 3, site.head_dim))
            return by_head[head, 0]
        case "Olmo2Attention":
            # Its norm of all queries together would spread a change of q_proj over all heads.
            return mixer.q_norm.weight[rows]
    return mixer.q_proj.weight[rows]


def changed_heads(model: PreTrainedModel, site: HeadSite, head: int, kind: Any = None) -> list[int]:
    """List the slices of the projection's input that change with a parameter of one head."""
    with record_heads(model, site.layer, kind=kind) as recorded:
        model(IDS)
        own = own_parameter(site, head)
        own.add_(torch.randn_like(own))
        model(IDS)
    difference_H = (recorded[1] - recorded[0]).abs().amax((0, 1, 3))
    return difference_H.gt(1e-6).nonzero().flatten().tolist()


# Mamba-2's gated norm mixes the heads of a group: the next test.
@torch.no_grad()
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "mamba2"])
def test_a_slice_is_the_work_of_one_head(family: str) -> None:
    model = make_model(family)
    for site in head_sites(model)[:2]:  # Zamba2's third site shares its weights with the first
        for head in some_heads(site):
            assert changed_heads(model, site, head) == [head]


@torch.no_grad()
@pytest.mark.parametrize(("family", "groups"), [("mamba2", 2), ("zamba2", 2), ("falcon_h1", 6)])
def test_ablation_of_an_ssm_head_leaves_the_norm_of_its_group(family: str, groups: int) -> None:
    """The gated norm before the projection divides by the RMS of a group of heads."""
    model = make_model(family)
    plain = model(IDS).logits
    sites = head_sites(model, "ssm")
    assert [site.layer for site in sites] == list(range(len(decoder_blocks(model))))
    for site in sites:
        assert site.kind == "ssm"
        assert site.name.endswith(("mixer", "mamba"))
        size = site.n_heads // groups
        for head in some_heads(site):
            ablation = ablate_heads(model, [HeadId(site.layer, head)], kind="ssm")
            with ablation, record_heads(model, site.layer, kind="ssm") as recorded:
                logits = model(IDS).logits
            expected = without_columns(model, site, head)(IDS).logits
            torch.testing.assert_close(logits, expected)
            assert (logits - plain).abs().max() > 1e-4, "the head does not matter"
            largest_H = recorded[0].abs().amax((0, 1, 3))
            silent = largest_H.eq(0).nonzero().flatten().tolist()
            assert silent == [head]

            first = head // size * size
            group = list(range(first, first + size))
            assert changed_heads(model, site, head, "ssm") == group


@torch.no_grad()
def test_an_ablated_model_decodes_with_its_cache_as_without(family: str) -> None:
    model = make_model(family)
    for module in model.modules():
        # Of transformers' two forms of Mamba-2, the stepwise one does not clamp the step.
        if isinstance(getattr(module, "time_step_limit", None), tuple):
            module.time_step_limit = (0.0, torch.inf)
    site = head_sites(model)[-1]
    heads = [HeadId(site.layer, head) for head in range(0, site.n_heads, 2)]
    n_new = 6
    with ablate_heads(model, heads):
        cached = model.generate(
            IDS,
            max_new_tokens=n_new,
            min_new_tokens=n_new,
            do_sample=False,
            use_cache=True,
            output_logits=True,
            return_dict_in_generate=True,
        )
        full = model(cached.sequences[:, :-1]).logits[:, -n_new:]
    torch.testing.assert_close(torch.stack(cached.logits, 1), full, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("head", [HeadId(2, 0), HeadId(1, 4), HeadId(5, 0), HeadId(-1, 0)])
def test_a_head_that_does_not_exist_is_named(head: HeadId) -> None:
    """Layers 0 and 2 of this Zamba2 have no attention, and layer 1 has four heads."""
    model = make_model("zamba2")
    with pytest.raises(ValueError, match=naming(head, "1, 3, 4")):
        with ablate_heads(model, [head]):
            pass
    with pytest.raises(ValueError, match=str(head)):
        with ablate_heads_by_row(model, head.layer, [head.head]):
            pass


def test_a_kind_that_a_model_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match=naming("attention", "ssm", "channel")):
        head_sites(make_model("zamba2"), "channel")


@torch.no_grad()
def test_a_module_that_several_layers_run_is_ablated_in_one_of_them() -> None:
    """Zamba2's layers share their attention's weights; some models share the module itself."""
    model = make_model("zamba2")
    expected = {}
    for site in (head_sites(model)[0], head_sites(model)[2]):
        expected[site.layer] = without_columns(model, site, 3)(IDS).logits
    _, block_1 = decoder_blocks(model)[1]
    _, block_4 = decoder_blocks(model)[4]
    block_4.shared_transformer = block_1.shared_transformer
    assert [site.shared for site in head_sites(model)] == [True, False, True]
    for layer, logits in expected.items():
        with ablate_heads(model, [HeadId(layer, 3)]):
            # Each forward counts its own calls of the module.
            for _ in range(2):
                torch.testing.assert_close(model(IDS).logits, logits)

    site = head_sites(model)[0]
    site.o_proj.weight[:, columns_of(site, 3)] = 0
    without_both = model(IDS).logits
    for logits in expected.values():
        assert (without_both - logits).abs().max() > 1e-3, "both layers count"


@torch.no_grad()
@pytest.mark.parametrize("family", ["mamba2", "falcon_mamba", "falcon_h1"])
def test_a_kernel_that_goes_round_the_projection_is_noticed(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(family)
    kind = "ssm" if family == "falcon_h1" else None
    site = head_sites(model, kind)[1]

    def without_projection(hidden_states: Tensor, **_: object) -> Tensor:
        return hidden_states

    monkeypatch.setattr(site.module, "forward", without_projection)
    model(IDS)
    with pytest.raises(ValueError, match=r"model\.eval\(\)"):
        with ablate_heads(model, [HeadId(1, 0)], kind=kind):
            model(IDS)
    assert n_hooks(model) == 0


OPT: Config = {**ATTENTION, "ffn_dim": 16, "word_embed_proj_dim": 32, "num_key_value_heads": 4}
RECURRENT_GEMMA: Config = {
    **ATTENTION,
    "lru_width": 32,
    "block_types": ["recurrent", "attention"],
}
GPT2: Config = {"n_layer": 2, "n_embd": 16, "n_head": 2}
# Class, config, and what is named: the module and what it lacks.
UNSUPPORTED: dict[str, tuple[str, Config, list[str]]] = {
    "GPT2": ("GPT2LMHeadModel", GPT2, ["h.0.attn", "q_proj"]),
    "OPT": ("OPTForCausalLM", OPT, ["layers.0.self_attn", "OPTAttention", "o_proj"]),
    "Rwkv": ("RwkvForCausalLM", {**WIDTH, "attention_hidden_size": 32}, ["blocks.0.attention"]),
    "RecurrentGemma": ("RecurrentGemmaForCausalLM", RECURRENT_GEMMA, ["temporal_block"]),
}


@pytest.mark.parametrize("prefix", UNSUPPORTED)
def test_an_unsupported_model_names_the_module(prefix: str) -> None:
    class_name, fields, facts = UNSUPPORTED[prefix]
    config = getattr(transformers, f"{prefix}Config")(**{"vocab_size": 20, **fields})
    model = getattr(transformers, class_name)(config)
    with pytest.raises(ValueError, match=naming(*facts)):
        head_sites(model)
    with pytest.raises(ValueError, match=naming(*facts)), ablate_heads(model, []):
        pass


def test_a_size_other_than_the_configs_is_refused() -> None:
    model = make_model("llama")
    head_sites(model)[1].module.head_dim = 6
    with pytest.raises(ValueError, match=naming("layers.1.self_attn.o_proj", 32)):
        head_sites(model)


@pytest.mark.parametrize(
    ("family", "facts"),
    [
        ("falcon_h1", ["layers.0", "self_attn", "mamba"]),
        ("zamba2", ["layers.0", "Zamba2MambaDecoderLayer"]),
        ("mamba2", ["layers.0", "Mamba2Block"]),
    ],
)
def test_layers_that_cannot_become_a_students_are_refused(family: str, facts: list[str]) -> None:
    with pytest.raises(ValueError, match=naming(*facts)):
        attention_sites(make_model(family))
