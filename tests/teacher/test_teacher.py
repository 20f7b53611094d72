"""Observing and ablating unmodified models, and loading them."""

import json

import pytest
import torch
from planted import word_tokenizer
from safetensors.torch import load_file, save_file
from students import rope_that_depends_on_the_length
from transformers import GPT2Config, GPT2LMHeadModel

from hybrid_distill.plan import HeadId
from hybrid_distill.teacher import (
    ablate_heads,
    ablate_heads_by_row,
    attention_sites,
    eval_mode,
    fingerprint,
    hub_error,
    load_config,
    load_teacher,
    read_teacher,
    record_block,
    replay_blocks,
    trace_mixers,
)

IDS = torch.arange(3, 15).view(2, 6)


def n_hooks(model: torch.nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_sites_of_every_family(family_model, family) -> None:
    model = family_model(family)
    sites = attention_sites(model)
    assert [site.layer for site in sites] == [0, 1, 2]
    is_neox = family == "gpt_neox"
    for site, layer in zip(sites, model.base_model.layers, strict=True):
        attention = layer.attention if is_neox else layer.self_attn
        assert site.module is attention and site.o_proj is (attention.dense if is_neox else attention.o_proj)
        assert (site.n_heads, site.n_kv_heads) == (8, 8 if is_neox else 4)
        assert site.head_dim == (16 if family == "qwen3" else 8)
    assert sites[1].name == ("gpt_neox.layers.1.attention" if is_neox else "model.layers.1.self_attn")


def test_attention_that_is_not_understood_is_named() -> None:
    tiny = {"vocab_size": 20, "bos_token_id": 1, "eos_token_id": 2}
    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=16, n_head=2, **tiny))
    with pytest.raises(ValueError, match=r"transformer.h.0.attn \(GPT2Attention\) has no linear q_proj, k_"):
        attention_sites(gpt2)
    with pytest.raises(ValueError, match=r"expected .* q_proj, k_proj, v_proj, o_proj .*or qkv_proj, o_proj \(Phi-3\)"):
        attention_sites(gpt2)


@torch.no_grad()
def test_ablating_a_head_is_zeroing_its_columns_of_the_output_projection(family_model, family) -> None:
    model, edited = family_model(family), family_model(family)
    heads = [(0, 3), (2, 0), (2, 7)]
    for layer, head in heads:
        site = attention_sites(edited)[layer]
        site.o_proj.weight[:, head * site.head_dim : (head + 1) * site.head_dim] = 0
    with ablate_heads(model, heads):
        ablated = model(IDS).logits
    torch.testing.assert_close(ablated, edited(IDS).logits)
    assert (ablated - model(IDS).logits).abs().max() > 1e-3


@torch.no_grad()
def test_the_model_is_put_back_also_after_an_exception(family_model) -> None:
    model = family_model("llama")
    before = model(IDS).logits
    with pytest.raises(RuntimeError, match="inside"), ablate_heads(model, [(0, 0)]), trace_mixers(model):
        raise RuntimeError("inside")
    assert n_hooks(model) == 0
    assert torch.equal(model(IDS).logits, before)
    with ablate_heads(model, []):
        assert torch.equal(model(IDS).logits, before)


@torch.no_grad()
def test_ablations_can_be_nested(family_model) -> None:
    model = family_model("llama")
    with ablate_heads(model, [(1, 2), (1, 5)]):
        both = model(IDS).logits
    with ablate_heads(model, [(1, 2)]), ablate_heads(model, [(1, 5)]):
        assert torch.equal(model(IDS).logits, both)


def test_gradients_pass_an_ablated_model_by_the_head(family_model) -> None:
    model = family_model("llama")
    with ablate_heads(model, [(1, 2)]):
        model(IDS).logits.square().sum().backward()
    rows = model.model.layers[1].self_attn.q_proj.weight.grad.unflatten(0, (8, 8))
    assert [bool(head.any()) for head in rows] == [head != 2 for head in range(8)]


@torch.no_grad()
def test_each_group_of_rows_loses_its_own_head(family_model, family) -> None:
    model, ids = family_model(family), torch.arange(3, 27).view(4, 6)
    plain = model(ids).logits
    heads = (7, None, 0)
    with ablate_heads_by_row(model, 1, heads):
        logits = model(ids.repeat(3, 1)).logits
    for head, group in zip(heads, logits.split(4), strict=True):
        with ablate_heads(model, [] if head is None else [(1, head)]):
            torch.testing.assert_close(group, model(ids).logits)
    assert (logits[:4] - plain).abs().max() > 1e-3 and (logits[8:] - plain).abs().max() > 1e-3
    assert n_hooks(model) == 0 and torch.equal(model(ids).logits, plain)


def test_rows_that_do_not_form_equal_groups_are_refused(family_model) -> None:
    model = family_model("llama")
    with pytest.raises(ValueError, match=r"2 rows cannot hold 3 ablations"), ablate_heads_by_row(model, 1, [0, 1, 2]):
        model(IDS)
    with pytest.raises(ValueError, match="head L1H8 does not exist"), ablate_heads_by_row(model, 1, [0, 8]):
        pass
    assert n_hooks(model) == 0


@torch.no_grad()
def test_a_head_can_be_replaced_by_a_vector(family_model, family) -> None:
    model, ids = family_model(family), IDS.repeat(3, 1)
    site = attention_sites(model)[1]
    values_HP = torch.randn(site.n_heads, site.head_dim)
    with trace_mixers(model) as calls:
        model(IDS)
    heads_BLHP = calls[1].heads_BLHP.clone()
    heads_BLHP[:, :, 5] = values_HP[5]
    with trace_mixers(model) as calls, ablate_heads(model, [(1, 5)], {HeadId(1, 5): values_HP[5]}):
        replaced = model(IDS).logits
        torch.testing.assert_close(calls[1].out_BLD, site.o_proj(heads_BLHP.flatten(-2)))
    with ablate_heads_by_row(model, 1, [None, 5, 2], values_HP):
        plain, by_row, other = model(ids).logits.split(2)
    torch.testing.assert_close(by_row, replaced)
    torch.testing.assert_close(plain, model(IDS).logits)
    assert (other - replaced).abs().max() > 1e-3


@pytest.mark.parametrize("head", [(3, 0), (0, 8), (-1, 0), (0, -1)])
def test_a_head_that_does_not_exist_is_refused(family_model, head: tuple[int, int]) -> None:
    message = r"does not exist: this model has layers 0..2 with heads 0..7"
    with pytest.raises(ValueError, match=message), ablate_heads(family_model("llama"), [head]):
        pass


@torch.no_grad()
def test_traces_hold_what_flows_through_each_mixer(family_model, family) -> None:
    model = family_model(family)
    with trace_mixers(model) as calls:
        with pytest.raises(AttributeError):
            _ = calls[0].out_BLD
        model(IDS)
        first = calls[0].out_BLD
        model(IDS + 1)
    assert n_hooks(model) == 0 and len(calls) == 3
    assert not torch.equal(calls[0].out_BLD, first), "every forward fills the calls anew"
    for site, call in zip(attention_sites(model), calls, strict=True):
        assert call.heads_BLHP.shape == (2, 6, site.n_heads, site.head_dim)
        torch.testing.assert_close(site.o_proj(call.heads_BLHP.flatten(-2)), call.out_BLD)
        again = site.module(*call.args, **call.kwargs)[0]
        torch.testing.assert_close(again, call.out_BLD)
        assert call.hidden_BLD.shape == (2, 6, 64)


@torch.no_grad()
def test_replayed_blocks_do_not_run_and_change_nothing(family_model, family) -> None:
    model = family_model(family)
    with record_block(model, 1) as returned:
        logits = model(IDS).logits
    ran = []
    layers = model.base_model.layers
    for layer in layers:
        layer.mlp.register_forward_hook(lambda *_, layer=layer: ran.append(layer))
    with pytest.raises(RuntimeError), replay_blocks(model, 1, returned[0]):
        assert torch.equal(model(IDS).logits, logits)
        assert ran == [layers[2]]
        raise RuntimeError
    assert not any("forward" in layer.__dict__ for layer in layers)
    assert torch.equal(model(IDS).logits, logits)


def test_eval_mode_restores_the_mode(family_model) -> None:
    model = family_model("llama").train()
    with eval_mode(model):
        assert not model.training and not torch.is_grad_enabled()
    assert model.training and torch.is_grad_enabled()


@torch.no_grad()
def test_fingerprints_tell_teachers_apart(family_model) -> None:
    model = family_model("llama")
    known = fingerprint(model)
    assert fingerprint(family_model("llama")) == known
    assert fingerprint(family_model("llama").to(torch.bfloat16)) == known
    assert fingerprint(family_model("llama").to(torch.bfloat16).float()) == known
    assert fingerprint(family_model("llama", seed=1)) != known
    assert fingerprint(family_model("mistral")) != known
    model.model.layers[2].self_attn.k_proj.weight += 0.01
    assert fingerprint(model) != known


@pytest.fixture
def folder(tmp_path, family_model):
    """A teacher as a Hugging Face folder."""
    tokenizer = word_tokenizer(["a few words"])
    family_model("llama", vocab_size=len(tokenizer)).save_pretrained(tmp_path / "teacher")
    tokenizer.save_pretrained(tmp_path / "teacher")
    return tmp_path / "teacher"


def one_line(error: pytest.ExceptionInfo[ValueError]) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "yarn"])
def test_rope_that_depends_on_the_length_is_said_at_loading(kind, tmp_path, family_model, caplog) -> None:
    settings = rope_that_depends_on_the_length(kind, beyond=64)
    if kind == "yarn":  # it does not
        settings["rope_parameters"] = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 64}
    word_tokenizer(["a few words"]).save_pretrained(tmp_path)
    family_model("llama", **settings).save_pretrained(tmp_path)
    load_teacher(tmp_path)
    warned = [record.getMessage() for record in caplog.records if record.name == "hybrid_distill.teacher"]
    assert len(warned) == (kind != "yarn")
    assert all(f"({kind}): beyond 64 tokens" in text for text in warned)


def test_a_local_folder_is_loaded(folder, family_model) -> None:
    model, tokenizer = load_teacher(folder)
    assert tokenizer("few words")["input_ids"] == [2, 3]
    assert model.dtype == torch.float32 and not model.training
    assert model.name_or_path == str(folder)
    assert fingerprint(model) == fingerprint(load_teacher(str(folder), dtype="bfloat16")[0])
    assert load_teacher(folder, attn_implementation="eager")[0].config._attn_implementation == "eager"


def test_a_folder_without_weights_or_config_is_named(folder) -> None:
    for file in folder.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(ValueError, match="has no weights") as error:
        load_teacher(folder)
    assert "--teacher.path" in one_line(error)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"has no config\.json") as error:
        load_teacher(str(folder))
    assert str(folder) in one_line(error)


def test_a_teacher_that_cannot_be_had_names_both_ways_out(tmp_path) -> None:
    with pytest.raises(ValueError, match="somebody/no-such-teacher") as error:
        load_teacher("somebody/no-such-teacher")
    assert "--teacher.path" in one_line(error) and "make demo" in one_line(error)
    for path in (tmp_path / "nowhere", "./nowhere", str(tmp_path / "nowhere")):
        with pytest.raises(ValueError, match="is not a folder"):
            load_teacher(path)
    with pytest.raises(ValueError, match="dtype is 'float8'"):
        load_teacher("tiny", dtype="float8")


def test_a_model_that_cannot_be_had_is_called_as_its_command_calls_it(tmp_path) -> None:
    for path in (tmp_path / "nowhere", tmp_path, "somebody/no-such-model"):
        with pytest.raises(ValueError, match=f"^--model '{path}' ") as error:
            load_teacher(path, flag="--model")
        assert "teacher.path" not in one_line(error) and "make demo" not in one_line(error)


def test_without_a_network_the_hub_is_asked_once(monkeypatch) -> None:
    asked = []

    class Session:
        def head(self, url: str, timeout: float) -> None:
            asked.append(url)
            raise OSError("Name or service not known")

    def request(*args, **kwargs) -> None:
        raise AssertionError("huggingface_hub was sent to the network, where it retries for 25 seconds a file")

    monkeypatch.setattr("hybrid_distill.teacher.loading.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("hybrid_distill.teacher.loading.get_session", Session)
    monkeypatch.setattr("huggingface_hub.file_download._request_wrapper", request, raising=False)
    monkeypatch.setattr("huggingface_hub.file_download.get_hf_file_metadata", request)
    hub_error.cache_clear()
    one_line = r"^[^\n]*Name or service not known, and it is not in the cache[^\n]*$"
    try:
        for read in (load_config, read_teacher, load_teacher):
            with pytest.raises(ValueError, match=one_line):
                read("nobody/nothing")
    finally:
        hub_error.cache_clear()
    assert len(asked) == 1


def test_truncated_weights_are_answered_in_one_line(folder) -> None:
    (folder / "model.safetensors").write_bytes(b"not a safetensors file")
    with pytest.raises(ValueError, match="cannot be loaded") as error:
        load_teacher(folder)
    one_line(error)


def test_tied_embeddings_are_not_missing(folder, family_model) -> None:
    family_model("llama", tie_word_embeddings=True).save_pretrained(folder)
    model, _ = load_teacher(folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_checkpoint_that_lacks_a_tensor_is_refused(folder) -> None:
    """transformers would fill it with random numbers."""
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.self_attn.k_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"weights lack model.layers.1.self_attn.k_proj.weight") as error:
        load_teacher(folder)
    one_line(error)


def test_code_in_a_checkpoint_is_never_run(folder) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "surprise",
        "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    with pytest.raises(ValueError, match="cannot be loaded"):
        load_teacher(folder)
    assert not (folder / "ran").exists()
