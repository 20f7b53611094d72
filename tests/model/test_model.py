"""The student is the teacher: what kept heads do; and every way to run a student gives one result."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from students import ALL_BUT_ONE, FROM_5, THREE, close, keep, logits, mixed_student, packed_logits, student_of, tokens
from torch import Tensor
from transformers import PreTrainedModel

from hybrid_distill.model import HybridCache, HybridConfig, HybridForCausalLM, configuration_hybrid, packed_inputs
from hybrid_distill.model.layout import cache_of
from hybrid_distill.model.recurrent_heads import SSMHeads
from hybrid_distill.plan import HeadPlan
from hybrid_distill.student.build import build_student
from hybrid_distill.teacher import ablate_heads, trace_mixers

FamilyModel = Callable[..., PreTrainedModel]

# What makes each family hard: biases, head norms, short windows, layers of two kinds, tied embeddings, norms over all
# heads, one projection for queries, keys and values, RoPE on a part of each head.
HARD: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "tie_word_embeddings": True},
    "qwen2": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "qwen3": {"attention_bias": True},
    "mistral": {"sliding_window": 6},
    "olmo2": {"attention_bias": True},
    "olmo3": {"sliding_window": 6},
    "phi3": {"sliding_window": 6, "partial_rotary_factor": 0.5},
    "gpt_neox": {"tie_word_embeddings": True, "rotary_pct": 0.5},
}
ALL = tuple(range(8))
# Biases and a short window, norms over all heads and layers of two kinds, one projection for all by head.
FEW = pytest.mark.parametrize("family", ["qwen2", "olmo3", "gpt_neox"])


@pytest.fixture
def teacher(family: str, family_model: FamilyModel) -> PreTrainedModel:
    return family_model(family, **HARD.get(family, {}))


@torch.no_grad()
def test_all_heads_kept_is_the_teacher(teacher: PreTrainedModel) -> None:
    """With the same bits: alone, packed, padded, generated; with the teacher's attention, and after a switch."""
    ids, mask = tokens(2, 19), torch.ones(2, 19, dtype=torch.long)
    mask[0, :6] = 0
    seq_idx = torch.tensor([[0] * 8 + [1] * 11, [0] * 3 + [1] * 16])
    greedy = dict(attention_mask=mask, max_new_tokens=9, do_sample=False)
    for implementation in ("sdpa", "eager"):
        teacher.set_attn_implementation(implementation)
        student, _ = build_student(teacher, HeadPlan.all(teacher), d_state=4)
        assert student.config._attn_implementation == implementation
        assert torch.equal(logits(student, ids), logits(teacher, ids))
        assert torch.equal(logits(student, ids, use_cache=False), logits(teacher, ids, use_cache=False))
        assert torch.equal(*(logits(model, ids, attention_mask=mask)[mask.bool()] for model in (student, teacher)))
        assert torch.equal(*(packed_logits(model, ids, seq_idx) for model in (student, teacher)))
        assert torch.equal(student.generate(ids, **greedy), teacher.generate(ids, **greedy))
    for model in (teacher, student):
        model.set_attn_implementation("sdpa")
    assert student.model.config._attn_implementation == "sdpa"
    assert torch.equal(logits(student, ids), logits(teacher, ids))


@torch.no_grad()
@pytest.mark.parametrize("kept", [(5,), THREE, ALL_BUT_ONE], ids=["one", "three", "all but one"])
def test_kept_heads_do_what_they_did(teacher: PreTrainedModel, kept: tuple[int, ...]) -> None:
    """Given the teacher's input, a mixer's kept heads put out what the teacher's heads put out."""
    student = student_of(teacher, keep(teacher, kept, kept, kept))
    with trace_mixers(teacher) as calls:
        teacher(tokens(2, 19), use_cache=False)
    assert len(calls) == 3
    for call, mixer in zip(calls.values(), student.mixers()):
        kwargs = {name: value for name, value in call.kwargs.items() if name != "hidden_states"}
        heads_BLHP = mixer.heads(call.hidden_BLD, *call.args[1:], **kwargs)
        assert heads_BLHP.shape == call.heads_BLHP.shape
        close(heads_BLHP[:, :, list(kept)], call.heads_BLHP[:, :, list(kept)])


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
    pieces = [logits(student, piece, cache=cache) for piece in ids.split([7, 5, 1, 1, 1, 8], dim=1)]
    close(torch.cat(pieces, dim=1), expected)
    assert cache.get_seq_length() == 23
    assert all(layer.get_seq_length() == 23 for layer in cache.layers)


@FEW
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
@pytest.mark.parametrize(("implementation", "family"), [*(("sdpa", f) for f in HARD), ("eager", "olmo3")])
def test_packed_documents_are_the_documents_alone(implementation: str, family: str, family_model: FamilyModel) -> None:
    teacher = family_model(family, **HARD.get(family, {}), attn_implementation=implementation)
    for model in (teacher, mixed_student(teacher)):
        lengths = [1, 9, 2, 12, 7]
        ids = tokens(2, sum(lengths))
        seq_idx = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).expand(2, -1)
        alone = [logits(model, document) for document in ids.split(lengths, dim=1)]
        close(packed_logits(model, ids, seq_idx), torch.cat(alone, dim=1))


def collated(features: list[Tensor], **options: Any) -> dict[str, Any]:
    """Pack documents with transformers' own collator: arguments of the model."""
    collator = transformers.DataCollatorWithFlattening(return_tensors="pt", **options)
    batch = collator([{"input_ids": ids.tolist()} for ids in features])
    return {name: value for name, value in batch.items() if name not in ("labels", "attention_mask")}


CONVENTIONS: dict[str, dict[str, Any]] = {
    "position_ids": {},
    "and seq_idx": {"return_seq_idx": True},
    "and borders": {"return_flash_attn_kwargs": True},
    "borders": {"return_flash_attn_kwargs": True, "return_position_ids": False},
}


@torch.no_grad()
@pytest.mark.parametrize(
    ("convention", "kept", "implementation", "family"),
    [
        *(("position_ids", THREE, "sdpa", family) for family in HARD),
        *((convention, kept, "eager", "llama") for convention in CONVENTIONS for kept in ((), THREE, ALL)),
    ],
)
def test_rows_packed_in_the_way_of_transformers_are_the_documents_alone(
    convention: str, kept: tuple[int, ...], implementation: str, family: str, family_model: FamilyModel
) -> None:
    teacher = family_model(family, **HARD.get(family, {}), attn_implementation=implementation)
    student = student_of(teacher, keep(teacher, kept, kept, kept))
    documents = [tokens(length) for length in (1, 9, 2, 12, 7)]
    batch = collated(documents, **{"return_position_ids": True, **CONVENTIONS[convention]})
    for training in (False, True):
        output = student.train(training)(**batch)
        assert cache_of(output) is None
        close(output.logits, torch.cat([logits(student, document[None]) for document in documents], dim=1))


@torch.no_grad()
@pytest.mark.parametrize("kept", [(), THREE, ALL], ids=["none", "three", "all"])
@pytest.mark.parametrize("masked", [False, True])
def test_positions_that_restart_are_those_of_documents(
    masked: bool, kept: tuple[int, ...], family_model: FamilyModel
) -> None:
    """In each row elsewhere, or one row of positions for all; from an offset; with padding, whose own mean nothing."""
    teacher = family_model("llama")
    student = student_of(teacher, keep(teacher, kept, kept, kept))
    ids = tokens(2, 20)
    seq_idx = torch.tensor([[0] * 8 + [1] * 12, [0] * 3 + [1] * 16 + [2]])
    positions = packed_inputs(seq_idx)["position_ids"] + torch.tensor([[5], [0]])
    mask = None
    if masked:
        mask = torch.ones_like(ids)
        mask[:, :2] = mask[:, 10:12] = 0
        positions = torch.where(mask.bool(), positions, torch.tensor([[1], [0]]))
    for rows in (slice(0, 2), slice(0, 1), slice(1, 2)):
        numbers = seq_idx[rows].expand(2, -1)
        expected = logits(student, ids, seq_idx=numbers, position_ids=positions[rows], attention_mask=mask)
        found = logits(student, ids, position_ids=positions[rows], attention_mask=mask)
        close(found[:, 12:], expected[:, 12:])
        close(found[:, 2:10], expected[:, 2:10])


@torch.no_grad()
def test_positions_that_only_rise_are_of_one_document(family_model: FamilyModel) -> None:
    """Those of `generate` and its padding in all its versions, of a prompt in pieces, of steps, from an offset."""
    student = mixed_student(family_model("llama"))
    ids, mask = tokens(1, 12), torch.tensor([[0, 0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1]])
    real = mask.bool()
    counted = (mask.cumsum(1) - 1).clamp(min=0)
    alone = logits(student, ids[real][None])[0]
    for padding in (0, 1, -1, None):
        positions = counted if padding is None else counted.masked_fill(~real, padding)
        output = student(ids, attention_mask=mask, position_ids=positions)
        assert cache_of(output) is not None
        close(output.logits[real], alone)
        cache, pieces = student.new_cache(), []
        for piece in torch.arange(12).split([5, 1, 4, 2]):
            inputs = {"attention_mask": mask[:, : piece[-1] + 1], "position_ids": positions[:, piece]}
            pieces.append(logits(student, ids[:, piece], cache=cache, **inputs))
        close(torch.cat(pieces, dim=1)[real], alone)
    assert cache_of(student(ids, position_ids=torch.arange(7, 19)[None])) is not None
    leaping = torch.arange(12)[None]  # the mask says why these leap
    assert cache_of(student(ids, attention_mask=mask, position_ids=leaping)) is not None


@torch.no_grad()
def test_what_no_cache_continues_and_wrong_caches_are_refused(family_model: FamilyModel) -> None:
    student = mixed_student(family_model("llama"))
    ids, rising = tokens(2, 6), torch.arange(6)[None]
    cache = cache_of(student(ids))
    for options in (
        {"position_ids": torch.tensor([[6, 7, 8, 0, 1, 2]]), "cache": cache},
        {"position_ids": rising, "cache": cache},
        {"position_ids": rising, "cache": cache, "attention_mask": torch.ones(2, 12)},
        {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]]), "use_cache": True},
        {"cu_seq_lens_q": torch.tensor([0, 5, 12]), "use_cache": True},
        {"seq_idx": torch.zeros_like(ids), "cache": student.new_cache()},
    ):
        with pytest.raises(ValueError, match=r"packed documents .* cannot be continued from a cache"):
            student(ids, **options)
    held = cache.get_seq_length()
    student(ids, position_ids=rising + 6, cache=cache)
    assert cache.get_seq_length() == held + 6
    with pytest.raises(ValueError, match=r"DynamicCache.*new_cache"):
        student(ids, cache=transformers.DynamicCache())
    with pytest.raises(ValueError, match="neither input_ids nor inputs_embeds"):
        student()


def test_packed_rows_compile_into_one_graph(family_model: FamilyModel) -> None:
    """Which cannot look at the positions: it takes every row for a packed one."""
    teacher, ids = family_model("llama", num_hidden_layers=1), tokens(2, 12)
    student = student_of(teacher, keep(teacher, THREE)).train()
    torch.compiler.reset()
    forward = torch.compile(student.forward, backend="eager", fullgraph=True)
    for positions in ([0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 0, 1], list(range(12))):
        positions = torch.tensor([positions])
        close(forward(ids, position_ids=positions).logits, student(ids, position_ids=positions).logits)
    prefill = torch.compile(student.eval().forward, backend="eager", fullgraph=True)
    with torch.no_grad():
        output = prefill(ids, position_ids=torch.arange(12)[None])
        assert cache_of(output).get_seq_length() == 12
        with pytest.raises(RuntimeError, match="packed documents"):
            prefill(ids, position_ids=torch.arange(12)[None] % 5)


@FEW
@torch.no_grad()
def test_padding_inside_a_packed_row_is_not_seen(teacher: PreTrainedModel) -> None:
    student, ids, seq_idx = mixed_student(teacher), tokens(1, 20), torch.tensor([[0] * 8 + [1] * 12])
    mask = torch.ones_like(ids)
    mask[:, 17:] = 0
    changed = torch.where(mask.bool(), ids, tokens(1, 20))
    packed = logits(student, ids, seq_idx=seq_idx, attention_mask=mask)
    close(packed[:, :17], logits(student, changed, seq_idx=seq_idx, attention_mask=mask)[:, :17])
    close(packed[:, :8], logits(student, ids[:, :8]))
    close(packed[:, 8:17], logits(student, ids[:, 8:17]))


@torch.no_grad()
@pytest.mark.parametrize("pieces", [[16], [8, 3, 1, 4]], ids=["whole", "odd"])
@pytest.mark.parametrize("sides", ["left left", "left right", "right left", "right right"])
def test_padding_anywhere_in_a_row_is_as_if_it_were_not_there(
    sides: str, pieces: list[int], family_model: FamilyModel
) -> None:
    """Two turns of a batched conversation, padded to 8 tokens each on either side, through a cache or at once."""
    student = mixed_student(family_model("llama")).double()
    real = torch.zeros(3, 16, dtype=torch.bool)
    for row, lengths in enumerate([(5, 8), (8, 2), (3, 6)]):
        for turn, (side, length) in enumerate(zip(sides.split(), lengths)):
            start = 8 * turn + (8 - length if side == "left" else 0)
            real[row, start : start + length] = True
    ids, mask = tokens(3, 16), real.long()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache, start, found = student.new_cache(), 0, []
    for length in pieces:
        end = start + length
        inputs = {"attention_mask": mask[:, :end], "position_ids": positions[:, start:end]}
        found.append(logits(student, ids[:, start:end], cache=cache, **inputs))
        start = end
    for row in range(3):
        alone = student.new_cache()
        expected = logits(student, ids[row, real[row]][None], cache=alone)
        compared = [(torch.cat(found, dim=1)[row, real[row]], expected[0])]
        for ours, theirs in zip(cache.layers, alone.layers):
            compared += [(ours.ssm_state[row], theirs.ssm_state[0]), (ours.conv_state[row], theirs.conv_state[0])]
        for actual, wanted in compared:
            torch.testing.assert_close(actual, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("recurrence", ["discrete", "mamba2", "gdn"])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_gradients_go_past_padding_inside_a_row(recurrence: str, width: int) -> None:
    heads = SSMHeads(12, 3, 4, 5, width, conv_bias=True, recurrence=recurrence).double()
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_(std=0.5)
    real = torch.rand(2, 40) < 0.6
    hidden = torch.randn(2, 40, 12, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(2, 40, 3, 4, dtype=torch.float64)
    leaves = [hidden, *heads.parameters()]
    padded = (heads(hidden, real) * weights)[real].sum()
    alone = sum((heads(hidden[row : row + 1, real[row]]) * weights[row, real[row]]).sum() for row in range(2))
    for actual, expected in zip(torch.autograd.grad(padded, leaves), torch.autograd.grad(alone, leaves)):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


@FEW
def test_gradients_reach_every_recurrent_parameter(teacher: PreTrainedModel) -> None:
    student = mixed_student(teacher).train()
    ids = tokens(2, 19)
    output = student(ids, labels=ids)
    assert cache_of(output) is None
    output.loss.backward()
    missing = [name for name, p in student.named_parameters() if ".ssm." in name and not p.grad.abs().max() > 0]
    assert missing == []


@FEW
@torch.no_grad()
def test_a_cache_can_be_copied_repeated_selected_and_reordered(teacher: PreTrainedModel) -> None:
    student = mixed_student(teacher)
    prompt, more = tokens(2, 9), tokens(4, 5)
    cache = student.new_cache()
    student(prompt, cache=cache)
    repeated, selected, reordered = (copy.deepcopy(cache) for _ in range(3))
    repeated.batch_repeat_interleave(2)
    selected.batch_select_indices(torch.tensor([1]))
    reordered.reorder_cache(torch.tensor([1, 0]))
    rows = (repeated, prompt.repeat_interleave(2, dim=0)), (selected, prompt[1:]), (reordered, prompt.flip(0))
    for changed, read in rows:
        expected = logits(student, torch.cat([read, more[: len(read)]], dim=1))[:, 9:]
        close(logits(student, more[: len(read)], cache=changed), expected)


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
    code = {path.stem for path in tmp_path.glob("*.py")}
    parts = {"cache", "decoder", "documents", "document_kernels", "document_mask", "local_attention"}
    parts |= {"gated_delta", "layout", "mixer", "recurrent_heads", "ring", "rows", "self_check", "ssd"}
    parts |= {"window_kernels", "windowed_heads", "windows"}
    assert code == {"configuration_hybrid", "modeling_hybrid", *parts}


@torch.no_grad()
def test_a_model_from_a_config_alone_runs(family_model: FamilyModel) -> None:
    backbone = family_model("llama").config.to_dict()
    config = HybridConfig(backbone=backbone, kept=[[0, 1, 2], [], [7]], d_state=4)
    model = HybridForCausalLM(config).eval()
    assert isinstance(cache_of(model(tokens(1, 5))), HybridCache)
    assert logits(model, tokens(1, 5)).isfinite().all()


def config_with(family_model: FamilyModel, **fields: Any) -> HybridConfig:
    valid = {"backbone": family_model("llama").config.to_dict(), "kept": [[], [], []], "d_state": 4}
    return HybridConfig(**{**valid, **fields})


def test_config_speaks_for_its_backbone(family_model: FamilyModel) -> None:
    teacher = family_model("qwen3")
    config = config_with(family_model, backbone=teacher.config.to_dict())
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_key_value_heads", "head_dim", "eos_token_id"):
        assert getattr(config, name) == getattr(teacher.config, name)
    assert "_name_or_path" not in config.backbone
    assert HybridConfig.from_dict(config.to_dict()).to_dict() == config.to_dict()


def test_rope_settings_are_written_in_both_spellings_and_each_familys_words(family_model: FamilyModel) -> None:
    def written(teacher: PreTrainedModel, **fields: Any) -> dict[str, Any]:
        return config_with(family_model, backbone=teacher.config.to_dict() | fields).backbone

    scaling = {
        "rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    }  # fmt: skip
    llama = written(family_model("llama"), rope_parameters=scaling)
    assert llama["rope_theta"] == 5000.0 and llama["rope_scaling"].items() <= scaling.items()
    assert llama["rope_scaling"]["factor"] == 8.0 and llama["rope_scaling"]["rope_type"] == "llama3"
    neox = written(family_model("gpt_neox", rotary_pct=0.5, rotary_emb_base=500.0))
    assert (neox["rotary_pct"], neox["rotary_emb_base"]) == (0.5, 500.0)
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    long = {"rope_type": "longrope", "rope_theta": 500.0, **factors}
    phi3 = written(family_model("phi3", rope_parameters=long))
    assert phi3["rope_scaling"] == {"type": "longrope", **factors} and phi3["rope_theta"] == 500.0


@FROM_5
def test_a_rope_for_each_type_of_layer_is_kept_or_refused(family_model: FamilyModel, monkeypatch: Any) -> None:
    """transformers 5.0 to 5.10 give all layers of OLMo-3 that of the last."""
    yarn = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 64}
    rope = {"full_attention": yarn, "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}
    olmo3 = family_model("olmo3", rope_parameters=rope).config.to_dict()
    config = config_with(family_model, backbone=olmo3)
    assert "rope_theta" not in config.backbone  # 5.0 to 5.10 would take it for all layers
    assert config.backbone_config().rope_parameters == config.backbone["rope_parameters"]
    flat = family_model("olmo2").config
    monkeypatch.setattr(transformers.AutoConfig, "for_model", lambda *args, **kwargs: flat)
    with pytest.raises(ValueError, match=r"one RoPE for all layers of olmo3.*pip install --upgrade transformers"):
        config_with(family_model, backbone=olmo3)


@torch.no_grad()
def test_padding_inside_a_row_that_is_longer_than_a_window_is_refused(family_model: FamilyModel) -> None:
    """transformers counts padding within a window, in the teacher too; shorter rows are right."""
    teacher = family_model("mistral", sliding_window=9)
    student = student_of(teacher, keep(teacher, (1, 2), (), (3,)))
    ids, mask = tokens(1, 16), torch.ones(1, 16, dtype=torch.long)
    mask[:, 5:8] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    refused = pytest.raises(ValueError, match=r"padding between the tokens of a row.*pad on the left")
    with refused:
        student(ids, attention_mask=mask, position_ids=positions)
    cache = student.new_cache()
    student(ids[:, :8], attention_mask=mask[:, :8], position_ids=positions[:, :8], cache=cache)
    with refused:
        student(ids[:, 8:], attention_mask=mask, position_ids=positions[:, 8:], cache=cache)
    student_of(teacher, HeadPlan.none(teacher))(ids, attention_mask=mask, position_ids=positions)


@torch.no_grad()
def test_windows_of_packed_rows_count_tokens_and_not_padding(family_model: FamilyModel) -> None:
    teacher = family_model("mistral", sliding_window=4)
    student = student_of(teacher, keep(teacher, (1, 2), (), (3,)))
    alone, hole = tokens(1, 12), torch.zeros(1, 3, dtype=torch.long)
    ids = torch.cat([alone[:, :6], hole, alone[:, 6:]], dim=1)
    mask = torch.ones_like(ids)
    mask[:, 6:9] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = student(ids, attention_mask=mask, position_ids=positions, seq_idx=torch.zeros_like(ids)).logits
    torch.testing.assert_close(logits[mask.bool()], student(alone, use_cache=False).logits[0])
