"""Each stage compares and trains what it names, and does so on the teacher's own inputs."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from training import small_models, small_rows, small_run

from hybrid_distill.model import packed_inputs
from hybrid_distill.plan import HeadPlan
from hybrid_distill.student.build import build_student
from hybrid_distill.teacher import attention_sites, replaced_forward, trace_mixers
from hybrid_distill.train.align import LayerAlignment
from hybrid_distill.train.config import Align, AlignMatrix, Distill, DistillOnPolicy
from hybrid_distill.train.end_to_end import EndToEnd
from hybrid_distill.train.losses import distillation_loss
from hybrid_distill.train.on_policy import OnPolicy, _kind_of, _SampleByRow
from hybrid_distill.train.parallel.fsdp2 import with_sharded_teacher
from hybrid_distill.train.stages import make_stage

TARGETS = ("mixer", "layer", "head")
SOME_FAMILIES = pytest.mark.parametrize("family", ["llama", "olmo2", "gpt_neox"])
"""Separate projections, norms over all heads, and one linear for all parts."""


@pytest.fixture(scope="module")
def batch():
    return small_rows().batch(0, 8)


def one_document(batch, row: int, number: int) -> Tensor:
    return batch["input_ids"][row][batch["seq_idx"][row] == number][None]


@torch.no_grad()
def traced(teacher: nn.Module, batch) -> list:
    with trace_mixers(teacher) as calls:
        teacher(input_ids=batch["input_ids"], use_cache=False, **packed_inputs(batch["seq_idx"]))
    return list(calls.values())


@SOME_FAMILIES
@pytest.mark.parametrize("target", TARGETS)
def test_the_target_is_the_output_of_the_teachers_own_module(family_model, family, batch, target):
    """Recomputed by hand from a trace of the teacher, the last layer included."""
    teacher = family_model(family)
    student, _ = build_student(teacher, HeadPlan.random(teacher.config, 5, seed=0), d_state=4)
    found = LayerAlignment(student, teacher, Align(target=target))(batch).per_layer
    mask, packed = batch["mask"], packed_inputs(batch["seq_idx"])
    with torch.no_grad():
        states = teacher(input_ids=batch["input_ids"], output_hidden_states=True, use_cache=False, **packed)
    teacher_states = states.hidden_states
    for layer, call in enumerate(traced(teacher, batch)):
        mixer, block = student.mixers()[layer], teacher.base_model.layers[layer]
        recurrent = list(mixer.replaced)
        with torch.no_grad():
            kwargs = {**call.kwargs, "seq_idx": batch["seq_idx"]}
            heads = mixer.heads(*call.args, **kwargs)
            if target == "head":
                error = (heads - call.heads_BLHP)[:, :, recurrent]
            elif target == "mixer":
                error = mixer.o_proj(heads.flatten(-2)) - call.output[0]
            else:
                residual, site = teacher_states[layer], attention_sites(teacher)[layer]
                outputs = []
                for out_BLD in (mixer.o_proj(heads.flatten(-2)), call.output[0]):
                    with replaced_forward(site.module, lambda *_, out_BLD=out_BLD, **__: (out_BLD, None)):
                        outputs.append(block(residual))
                error = outputs[0] - outputs[1]
        expected = error.norm(dim=-1)[mask].mean()
        torch.testing.assert_close(found[f"layer.{layer}"], expected, rtol=1e-4, atol=1e-6)


STAGES = {
    "mixer": Align(target="mixer", train="mixer"),
    "layer": Align(target="layer"),
    "head": Align(target="head"),
    "matrix": AlignMatrix(),
    "distill": Distill(),
}


@SOME_FAMILIES
def test_the_fused_loss_is_that_of_the_logits_and_has_its_gradients(family_model, family, batch):
    found = {}
    for fused in (True, False):
        teacher = family_model(family)
        student, _ = build_student(teacher, HeadPlan.random(teacher.config, 5, seed=0), d_state=4)
        config = Distill(kind="jsd", temperature=2.0, hard_weight=0.3, fused=fused)
        loss = EndToEnd(student, teacher, config)(batch).total
        loss.backward()
        found[fused] = {"loss": loss.detach()} | {name: p.grad for name, p in student.named_parameters()}
    for name, tensor in found[True].items():
        torch.testing.assert_close(tensor, found[False][name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("loss", ["l2", "nmse"])
def test_a_batch_costs_one_pass_of_the_teacher_and_leaves_no_hooks(batch, target, loss):
    student, teacher = small_models()
    stage = LayerAlignment(student, teacher, Align(target=target, loss=loss))
    calls = {"blocks": 0, "head": 0}
    teacher.model.layers[0].self_attn.register_forward_hook(lambda *_: calls.update(blocks=calls["blocks"] + 1))
    teacher.lm_head.register_forward_hook(lambda *_: calls.update(head=calls["head"] + 1))
    stage(batch).total.backward()
    assert calls == {"blocks": 1, "head": 0}
    student.mixers()[1].forward = student.mixers()[1].heads = None
    with pytest.raises(TypeError):
        stage(batch)
    hooks = [h for m in teacher.modules() for h in (m._forward_hooks, m._forward_pre_hooks) if h]
    assert len(hooks) == 2, "only the two of this test, after a step that failed too"


def test_there_is_one_copy_of_the_frozen_weights():
    student, teacher = small_models()
    stage = LayerAlignment(student, teacher, Align())
    assert student.model.embed_tokens.weight is teacher.model.embed_tokens.weight
    assert student.model.layers[0].mlp.up_proj.weight is teacher.model.layers[0].mlp.up_proj.weight
    names = {name for name, _ in stage.named_parameters()}
    assert all(name.startswith("mixers.") for name in names), "the wrapped module holds the mixers alone"


@pytest.mark.parametrize(
    ("config", "trained"),
    [
        (Align(train="ssm"), (".ssm.",)),
        (Align(train="mixer"), (".ssm.", ".attention.", ".o_proj.")),
        (Distill(train="ssm"), (".ssm.",)),
        (Distill(train="mixer"), (".self_attn.",)),
        (Distill(train="all"), ("",)),
    ],
)
def test_a_stage_trains_what_it_says_uses_all_of_it_and_never_touches_the_teacher(batch, config, trained):
    student, teacher = small_models()
    before = {name: p.detach().clone() for name, p in teacher.named_parameters()}
    LayerAlignment(student, teacher, Align())  # shares weights, which distillation must not train
    stage = make_stage(config, student, teacher)
    stage(batch).total.backward()
    for name, parameter in stage.named_parameters():
        should = any(part in name for part in trained)
        assert parameter.requires_grad == should and (parameter.grad is not None) == should, name
    for name, parameter in teacher.named_parameters():
        assert parameter.grad is None and torch.equal(parameter, before[name])
    shared = {id(p) for p in teacher.parameters()} & {id(p) for p in student.parameters()}
    assert bool(shared) == isinstance(stage, LayerAlignment)


def test_with_ssm_training_a_kept_head_goes_on_contributing_what_it_did(batch):
    student, teacher = small_models()
    stage = LayerAlignment(student, teacher, Align())
    optimizer = torch.optim.SGD([p for p in stage.parameters() if p.requires_grad], lr=0.1)
    for _ in range(3):
        stage(batch).total.backward()
        optimizer.step()
        optimizer.zero_grad()
    for layer, call in enumerate(traced(teacher, batch)):
        mixer = student.mixers()[layer]
        with torch.no_grad():
            heads = mixer.heads(*call.args, **call.kwargs, seq_idx=batch["seq_idx"])
        kept = list(mixer.kept)
        torch.testing.assert_close(heads[:, :, kept], call.heads_BLHP[:, :, kept], rtol=1e-5, atol=1e-6)
        assert torch.equal(mixer.o_proj.weight, teacher.model.layers[layer].self_attn.o_proj.weight)


@pytest.mark.parametrize("target", TARGETS)
def test_recomputing_changes_nothing_but_memory(batch, target):
    gradients = []
    for recompute in (False, True):
        stage = LayerAlignment(*small_models(), Align(target=target, gradient_checkpointing=recompute))
        stage(batch).total.backward()
        gradients.append([p.grad for p in stage.parameters() if p.grad is not None])
    assert gradients[0] and all(torch.equal(a, b) for a, b in zip(*gradients))


def test_layers_that_keep_every_head_are_left_out(batch):
    student, teacher = small_models()
    student, _ = build_student(teacher, HeadPlan.layers(teacher.config, [0]), d_state=4)
    loss = LayerAlignment(student, teacher, Align(train="mixer"))(batch)
    assert list(loss.per_layer) == ["layer.1"]
    torch.testing.assert_close(loss.total.detach(), loss.per_layer["layer.1"])


def make(name: str, k: int = 2):
    student, teacher = small_models(k=k)
    if name == "matrix":
        teacher.set_attn_implementation("eager")
    config = {"align": Align(), "matrix": AlignMatrix(), "distill": Distill(hard_weight=0.3)}[name]
    return make_stage(config, student, teacher, vocab_size=99)


@pytest.mark.parametrize("name", ["align", "distill"])
def test_padding_changes_no_loss(name):
    stage = make(name)
    batch = small_rows().batch(0, 4)
    rows = torch.randint(2, 99, (4, 5))
    padded = {
        "input_ids": torch.cat([batch["input_ids"], rows], 1),
        "seq_idx": torch.cat([batch["seq_idx"], (batch["seq_idx"].max() + 1).expand(4, 5)], 1),
        "mask": torch.cat([batch["mask"], torch.zeros(4, 5, dtype=torch.bool)], 1),
    }
    with torch.no_grad():
        torch.testing.assert_close(stage(batch).total, stage(padded).total, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["align", "distill"])
def test_documents_packed_in_a_row_do_not_see_each_other(name):
    """The loss of a row is the sum of its documents' shares in it."""
    stage = make(name)
    batch = small_rows().batch(1, 4)
    total, totals = 0.0, stage.totals(batch)
    with torch.no_grad():
        for row in range(4):
            for number in batch["seq_idx"][row].unique():
                ids = one_document(batch, row, int(number))
                alone = {
                    "input_ids": ids,
                    "seq_idx": torch.zeros_like(ids),
                    "mask": batch["mask"][row][batch["seq_idx"][row] == number][None],
                }
                total += stage(alone, totals).total
        torch.testing.assert_close(stage(batch).total, total, rtol=1e-4, atol=1e-6)


def test_matrices_are_compared_with_the_teachers_attention_maps(batch):
    stage = make("matrix")
    found = stage(batch)
    student, teacher = stage.student, stage.teacher
    with torch.no_grad():
        packed = packed_inputs(batch["seq_idx"], config=teacher.config)
        maps = teacher(input_ids=batch["input_ids"], output_attentions=True, use_cache=False, **packed).attentions
    for layer, call in enumerate(traced(teacher, batch)):
        mixer = student.mixers()[layer]
        with torch.no_grad():
            mixing = mixer.mixing_matrices(call.hidden_BLD, batch["seq_idx"])
        error = (mixing - maps[layer][:, list(mixer.replaced)]) * batch["mask"][:, None, :, None]
        torch.testing.assert_close(found.per_layer[f"layer.{layer}"], torch.linalg.matrix_norm(error).mean())
    found.total.backward()
    for name, parameter in stage.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name
    assert not any(p.requires_grad for n, p in stage.named_parameters() if "x_proj" in n or "z_proj" in n)


@pytest.mark.parametrize("fused", [True, False])
def test_end_to_end_compares_logits_on_the_real_vocabulary(batch, fused):
    student, teacher = small_models()
    stage = make_stage(Distill(temperature=2.0, fused=fused), student, teacher, vocab_size=99)
    with torch.no_grad():
        packed = packed_inputs(batch["seq_idx"])
        theirs = teacher(input_ids=batch["input_ids"], use_cache=False, **packed).logits
        ours = student(input_ids=batch["input_ids"], seq_idx=batch["seq_idx"]).logits
        expected = distillation_loss(ours, theirs, batch["mask"], temperature=2.0, vocab_size=99)
        torch.testing.assert_close(stage(batch).total, expected)


@pytest.mark.parametrize("finish", [{"final_logit_softcapping": 0.05}, {"logits_scaling": 3.0}, {"logit_scale": 0.5}])
def test_logits_that_are_more_than_a_product_are_not_fused(batch, finish):
    student, teacher = small_models()
    for config in (student.model.config, teacher.config):
        for name, value in finish.items():
            setattr(config, name, value)
    plain = EndToEnd(*small_models(), Distill())(batch).total
    assert not torch.allclose(EndToEnd(student, teacher, Distill())(batch).total, plain, rtol=1e-2)


def test_a_stage_recomputes_only_if_it_says_so_itself():
    student, teacher = small_models()
    for recompute in (True, False):
        EndToEnd(student, teacher, Distill(gradient_checkpointing=recompute))
        assert student.is_gradient_checkpointing == recompute


def test_trained_parameters_are_float32_over_a_bfloat16_teacher(batch):
    student, teacher = small_models()
    stage = LayerAlignment(student.bfloat16(), teacher.bfloat16(), Align(precision="bf16"))
    loss = stage(batch).total
    loss.backward()
    assert loss.dtype == torch.float32
    assert {p.dtype for p in stage.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in teacher.parameters()} == {torch.bfloat16}


REFUSED = {
    "align without recurrent heads": (lambda: make("align", k=8), "nothing to train"),
    "matrix without recurrent heads": (lambda: make("matrix", k=8), "nothing to train"),
    "matrix without maps": (lambda: make_stage(AlignMatrix(), *small_models()), "'sdpa' attention does not return"),
    "heads and more": (lambda: Align(target="head", train="mixer"), r"heads alone: use --align\.train ssm"),
    "sharded teacher, its layers": (
        lambda: with_sharded_teacher(LayerAlignment(*small_models(), Align(target="layer")), Mock()),
        "the teacher cannot be sharded; use target 'mixer' or 'head'",
    ),
    "run with a sharded teacher, its layers": (
        lambda: small_run(stages=(Align(target="layer"),), teacher_sharding="sharded"),
        r"align\.target is 'layer'.* use --align.target mixer or head, or --teach",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_stage_that_cannot_be_is_refused(case):
    make_it, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        make_it()


def own_text(share: float = 1.0, eos: int = 1):
    """A stage whose student often writes the token that ends a document, and a batch."""
    student, teacher = small_models()
    with torch.no_grad():
        student.lm_head.weight[eos] *= 0
        student.lm_head.weight[eos] += 0.1
    student.generation_config.eos_token_id = eos
    config = DistillOnPolicy(share=share, prompt_tokens=8, new_tokens=12)
    return OnPolicy(student, teacher, config), small_rows().batch(0, 8)


def test_the_student_goes_on_from_the_document_at_hand():
    stage, batch = own_text()
    written = stage.own_text(batch, range(8))
    assert torch.equal(written["input_ids"][:, :8], batch["input_ids"][:, :8])
    at_hand = batch["seq_idx"][:, :8] == batch["seq_idx"][:, 7:8]
    assert torch.equal(written["seq_idx"][:, :8] == 1, at_hand) and not at_hand.all()
    for row in range(8):
        ids, mask, seq_idx = (written[name][row].tolist() for name in ("input_ids", "mask", "seq_idx"))
        end = ids.index(1, 8) + 1 if 1 in ids[8:] else len(ids)
        assert [place for place, judged in enumerate(mask) if judged] == list(range(7, end - 1))
        assert set(seq_idx[8:end]) == {1} and set(seq_idx[end:]) <= {2}


def test_what_the_student_wrote_is_judged_as_if_alone():
    stage, batch = own_text()
    written = stage.own_text(batch, range(8))
    row = int((written["mask"].sum(1) < 12).nonzero()[0])  # it ended early
    kept = written["seq_idx"][row] == 1
    alone = {
        "input_ids": written["input_ids"][row][kept][None],
        "seq_idx": torch.zeros(1, int(kept.sum()), dtype=torch.long),
        "mask": written["mask"][row][kept][None],
    }
    only = {name: tensor[row : row + 1] for name, tensor in written.items()}
    with torch.no_grad():
        torch.testing.assert_close(stage(alone).total, stage(only).total, rtol=1e-4, atol=1e-7)


def test_every_token_is_a_draw_of_its_own_from_the_softmax():
    logits_V, temperature, n_draws = torch.randn(8), 0.7, 4000
    sample = _SampleByRow(range(n_draws), temperature, torch.device("cpu"))
    scores_BV = logits_V.expand(n_draws, 8)
    first, second = (sample(Mock(), scores_BV).argmax(-1) for _ in range(2))
    expected_V = (logits_V / temperature).softmax(-1).double()
    for drawn in (first, second):
        found_V = drawn.bincount(minlength=8) / n_draws
        assert ((found_V - expected_V).abs() < 4 * (expected_V * (1 - expected_V) / n_draws).sqrt()).all()
    assert (first == second).double().mean() == pytest.approx(float(expected_V.square().sum()), abs=0.04)


def test_a_row_counts_as_much_written_as_given():
    """The stage's loss is that of each kind of rows alone, weighted by rows; which rows are written is drawn by row."""
    stage, batch = own_text(share=0.4)
    (mixed,) = stage.micro_batches(batch, 8, range(8))
    given, own = (_kind_of(mixed, kind) for kind in ("given", "own"))
    n_own = len(own["mask"])
    assert 0 < n_own < 8 and n_own + len(given["mask"]) == 8
    with torch.no_grad():
        expected = (n_own * stage(own).total + (8 - n_own) * stage(given).total) / 8
        torch.testing.assert_close(stage(mixed).total, expected)
    assert stage.n_tokens(mixed) == own["mask"].sum() + given["mask"].sum()
