"""Each stage compares and trains what it names, and does so on the teacher's own inputs."""

from __future__ import annotations

from typing import Any
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

Batch = dict[str, Tensor]


@pytest.fixture(scope="module")
def batch() -> Batch:
    return small_rows().batch(0, 8)


def forward(model: nn.Module, batch: Batch, **options: Any) -> Any:
    """Run a teacher on packed documents."""
    packed = packed_inputs(batch["seq_idx"], config=getattr(model, "config", None))
    return model(input_ids=batch["input_ids"], use_cache=False, **packed, **options)


@torch.no_grad()
def traced(teacher: nn.Module, batch: Batch) -> list:
    with trace_mixers(teacher) as calls:
        forward(teacher, batch)
    return list(calls.values())


def make(name: str, k: int = 2):
    student, teacher = small_models(k=k)
    if name == "matrix":
        teacher.set_attn_implementation("eager")
    configs = {"align": Align(), "matrix": AlignMatrix(), "distill": Distill(hard_weight=0.3)}
    return make_stage(configs[name], student, teacher, vocab_size=99)


# Alignment.


@SOME_FAMILIES
@pytest.mark.parametrize("target", TARGETS)
def test_the_target_is_the_output_of_the_teachers_own_module(family_model, family, batch, target):
    """Recomputed by hand from a trace of the teacher, the last layer included."""
    teacher = family_model(family)
    student, _ = build_student(teacher, HeadPlan.random(teacher.config, 5, seed=0), d_state=4)
    per_layer = LayerAlignment(student, teacher, Align(target=target))(batch).per_layer
    with torch.no_grad():
        residuals = forward(teacher, batch, output_hidden_states=True).hidden_states
    for layer, call in enumerate(traced(teacher, batch)):
        mixer = student.mixers()[layer]
        with torch.no_grad():
            heads_BLHP = mixer.heads(*call.args, **call.kwargs | {"seq_idx": batch["seq_idx"]})
            out_BLD = mixer.o_proj(heads_BLHP.flatten(-2))
            if target == "head":
                error = (heads_BLHP - call.heads_BLHP)[:, :, list(mixer.replaced)]
            elif target == "mixer":
                error = out_BLD - call.output[0]
            else:
                ours = layer_output(teacher, layer, residuals[layer], mixer_output=out_BLD)
                theirs = layer_output(teacher, layer, residuals[layer], mixer_output=call.output[0])
                error = ours - theirs
        expected = error.norm(dim=-1)[batch["mask"]].mean()
        torch.testing.assert_close(per_layer[f"layer.{layer}"], expected, rtol=1e-4, atol=1e-6)


def layer_output(teacher: Any, layer: int, residual: Tensor, *, mixer_output: Tensor) -> Tensor:
    """Run a decoder layer whose attention returns ``mixer_output``."""
    site = attention_sites(teacher)[layer]
    with replaced_forward(site.module, lambda *_, **__: (mixer_output, None)):
        return teacher.base_model.layers[layer](residual)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("loss", ["l2", "nmse"])
def test_a_batch_costs_one_pass_of_the_teacher_and_leaves_no_hooks(batch, target, loss):
    student, teacher = small_models()
    stage = LayerAlignment(student, teacher, Align(target=target, loss=loss))
    calls: list[str] = []
    teacher.model.layers[0].self_attn.register_forward_hook(lambda *_: calls.append("block"))
    teacher.lm_head.register_forward_hook(lambda *_: calls.append("head"))
    stage(batch).total.backward()
    assert calls == ["block"]
    student.mixers()[1].forward = student.mixers()[1].heads = None
    with pytest.raises(TypeError):
        stage(batch)
    n_hooks = 0
    for module in teacher.modules():
        n_hooks += len(module._forward_hooks) + len(module._forward_pre_hooks)
    assert n_hooks == 2, "only the two of this test, after a step that failed too"


def test_there_is_one_copy_of_the_frozen_weights():
    student, teacher = small_models()
    stage = LayerAlignment(student, teacher, Align())
    ours = student.model
    theirs = teacher.model
    assert ours.embed_tokens.weight is theirs.embed_tokens.weight
    assert ours.layers[0].mlp.up_proj.weight is theirs.layers[0].mlp.up_proj.weight
    for name, _ in stage.named_parameters():
        assert name.startswith("mixers."), "the wrapped module holds the mixers alone"


def test_with_ssm_training_a_kept_head_contributes_what_it_did(batch):
    student, teacher = small_models()
    stage = LayerAlignment(student, teacher, Align())
    trained = [parameter for parameter in stage.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    for _ in range(3):
        stage(batch).total.backward()
        optimizer.step()
        optimizer.zero_grad()
    for layer, call in enumerate(traced(teacher, batch)):
        mixer = student.mixers()[layer]
        kept = list(mixer.kept)
        with torch.no_grad():
            heads = mixer.heads(*call.args, **call.kwargs, seq_idx=batch["seq_idx"])
        expected = call.heads_BLHP[:, :, kept]
        torch.testing.assert_close(heads[:, :, kept], expected, rtol=1e-5, atol=1e-6)
        o_proj = teacher.model.layers[layer].self_attn.o_proj
        assert torch.equal(mixer.o_proj.weight, o_proj.weight)


@pytest.mark.parametrize("target", TARGETS)
def test_recomputing_changes_nothing_but_memory(batch, target):
    def gradients(recompute: bool) -> list[Tensor]:
        config = Align(target=target, gradient_checkpointing=recompute)
        stage = LayerAlignment(*small_models(), config)
        stage(batch).total.backward()
        return [p.grad for p in stage.parameters() if p.grad is not None]

    kept = gradients(recompute=False)
    recomputed = gradients(recompute=True)
    assert kept
    assert all(map(torch.equal, kept, recomputed))


def test_layers_that_keep_every_head_are_left_out(batch):
    _, teacher = small_models()
    student, _ = build_student(teacher, HeadPlan.layers(teacher.config, [0]), d_state=4)
    loss = LayerAlignment(student, teacher, Align(train="mixer"))(batch)
    assert list(loss.per_layer) == ["layer.1"]
    torch.testing.assert_close(loss.total.detach(), loss.per_layer["layer.1"])


def test_matrices_are_compared_with_the_teachers_attention_maps(batch):
    stage = make("matrix")
    loss = stage(batch)
    with torch.no_grad():
        maps = forward(stage.teacher, batch, output_attentions=True).attentions
    for layer, call in enumerate(traced(stage.teacher, batch)):
        mixer = stage.student.mixers()[layer]
        with torch.no_grad():
            mixing = mixer.mixing_matrices(call.hidden_BLD, batch["seq_idx"])
        error = mixing - maps[layer][:, list(mixer.replaced)]
        error = error * batch["mask"][:, None, :, None]
        expected = torch.linalg.matrix_norm(error).mean()
        torch.testing.assert_close(loss.per_layer[f"layer.{layer}"], expected)
    loss.total.backward()
    for name, parameter in stage.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name
        if "x_proj" in name or "z_proj" in name:
            assert not parameter.requires_grad, name


# End to end.


@SOME_FAMILIES
def test_the_fused_loss_is_that_of_the_logits_and_has_its_gradients(family_model, family, batch):
    def train(fused: bool) -> dict[str, Tensor]:
        teacher = family_model(family)
        student, _ = build_student(teacher, HeadPlan.random(teacher.config, 5, seed=0), d_state=4)
        config = Distill(kind="jsd", temperature=2.0, hard_weight=0.3, fused=fused)
        loss = EndToEnd(student, teacher, config)(batch).total
        loss.backward()
        gradients = {name: parameter.grad for name, parameter in student.named_parameters()}
        return {"loss": loss.detach(), **gradients}

    fused = train(fused=True)
    for name, tensor in train(fused=False).items():
        torch.testing.assert_close(fused[name], tensor, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("fused", [True, False])
def test_end_to_end_compares_logits_on_the_real_vocabulary(batch, fused):
    student, teacher = small_models()
    stage = make_stage(Distill(temperature=2.0, fused=fused), student, teacher, vocab_size=99)
    with torch.no_grad():
        theirs = forward(teacher, batch).logits
        ours = student(input_ids=batch["input_ids"], seq_idx=batch["seq_idx"]).logits
        options = {"temperature": 2.0, "vocab_size": 99}
        expected = distillation_loss(ours, theirs, batch["mask"], **options)
        torch.testing.assert_close(stage(batch).total, expected)


@pytest.mark.parametrize(
    ("field", "value"),
    [("final_logit_softcapping", 0.05), ("logits_scaling", 3.0), ("logit_scale", 0.5)],
)
def test_logits_that_are_more_than_a_product_are_not_fused(batch, field, value):
    student, teacher = small_models()
    setattr(student.model.config, field, value)
    setattr(teacher.config, field, value)
    plain = EndToEnd(*small_models(), Distill())(batch).total
    finished = EndToEnd(student, teacher, Distill())(batch).total
    assert not torch.allclose(finished, plain, rtol=1e-2)


def test_a_stage_recomputes_only_if_its_own_config_says_so():
    student, teacher = small_models()
    for recompute in (True, False):
        EndToEnd(student, teacher, Distill(gradient_checkpointing=recompute))
        assert student.is_gradient_checkpointing == recompute


# Every stage.


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
def test_a_stage_trains_what_it_names_uses_all_of_it_and_never_touches_the_teacher(
    batch, config, trained
):
    student, teacher = small_models()
    before = {name: parameter.detach().clone() for name, parameter in teacher.named_parameters()}
    # Shares weights, which distillation must not train.
    LayerAlignment(student, teacher, Align())
    stage = make_stage(config, student, teacher)
    stage(batch).total.backward()
    for name, parameter in stage.named_parameters():
        expected = any(part in name for part in trained)
        assert parameter.requires_grad == expected, name
        assert (parameter.grad is not None) == expected, name
    for name, parameter in teacher.named_parameters():
        assert parameter.grad is None
        assert torch.equal(parameter, before[name])
    shared = set(map(id, teacher.parameters())) & set(map(id, student.parameters()))
    assert bool(shared) == isinstance(stage, LayerAlignment)


@pytest.mark.parametrize("name", ["align", "distill"])
def test_padding_changes_no_loss(name):
    stage = make(name)
    batch = small_rows().batch(0, 4)
    padding = {
        "input_ids": torch.randint(2, 99, (4, 5)),
        "seq_idx": (batch["seq_idx"].max() + 1).expand(4, 5),
        "mask": torch.zeros(4, 5, dtype=torch.bool),
    }
    padded = {key: torch.cat([batch[key], pad], 1) for key, pad in padding.items()}
    with torch.no_grad():
        torch.testing.assert_close(stage(batch).total, stage(padded).total, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["align", "distill"])
def test_documents_packed_in_a_row_do_not_see_each_other(name):
    """The loss of a row is the sum of its documents' shares in it."""
    stage = make(name)
    batch = small_rows().batch(1, 4)
    totals = stage.totals(batch)
    total = 0.0
    with torch.no_grad():
        for row in range(4):
            for number in batch["seq_idx"][row].unique():
                alone = document(batch, row, number)
                total += stage(alone, totals).total
        torch.testing.assert_close(stage(batch).total, total, rtol=1e-4, atol=1e-6)


def document(batch: Batch, row: int, number: Tensor | int) -> Batch:
    """Return one document of a row as a batch."""
    is_inside = batch["seq_idx"][row] == number
    ids = batch["input_ids"][row][is_inside][None]
    mask = batch["mask"][row][is_inside][None]
    return {"input_ids": ids, "seq_idx": torch.zeros_like(ids), "mask": mask}


def test_trained_parameters_are_float32_over_a_bfloat16_teacher(batch):
    student, teacher = small_models()
    config = Align(precision="bf16")
    stage = LayerAlignment(student.bfloat16(), teacher.bfloat16(), config)
    loss = stage(batch).total
    loss.backward()
    assert loss.dtype == torch.float32
    trained = {parameter.dtype for parameter in stage.parameters() if parameter.requires_grad}
    assert trained == {torch.float32}
    assert {parameter.dtype for parameter in teacher.parameters()} == {torch.bfloat16}


REFUSED = {
    "align without recurrent heads": (lambda: make("align", k=8), "nothing to train"),
    "matrix without recurrent heads": (lambda: make("matrix", k=8), "nothing to train"),
    "matrix without maps": (lambda: make_stage(AlignMatrix(), *small_models()), "'sdpa'"),
    "heads and more": (lambda: Align(target="head", train="mixer"), r"--align\.train ssm"),
    "sharded teacher, its layers": (
        lambda: with_sharded_teacher(
            LayerAlignment(*small_models(), Align(target="layer")), Mock()
        ),
        "'mixer' or 'head'",
    ),
    "run with a sharded teacher, its layers": (
        lambda: small_run(stages=(Align(target="layer"),), teacher_sharding="sharded"),
        r"align\.target is 'layer'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_stage_that_cannot_be_is_refused(case):
    make_it, named = REFUSED[case]
    with pytest.raises(ValueError, match=named):
        make_it()


# Text that the student writes.

EOS = 1


def own_text(share: float = 1.0) -> tuple[OnPolicy, Batch]:
    """Make a stage whose student often writes the token that ends a document, and a batch."""
    student, teacher = small_models()
    with torch.no_grad():
        student.lm_head.weight[EOS] = 0.1
    student.generation_config.eos_token_id = EOS
    config = DistillOnPolicy(share=share, prompt_tokens=8, new_tokens=12)
    return OnPolicy(student, teacher, config), small_rows().batch(0, 8)


def test_the_student_continues_the_document_at_hand():
    stage, batch = own_text()
    written = stage.own_text(batch, range(8))
    assert torch.equal(written["input_ids"][:, :8], batch["input_ids"][:, :8])
    at_hand = batch["seq_idx"][:, :8] == batch["seq_idx"][:, 7:8]
    assert torch.equal(written["seq_idx"][:, :8] == 1, at_hand)
    assert not at_hand.all()
    for row in range(8):
        ids = written["input_ids"][row].tolist()
        seq_idx = written["seq_idx"][row].tolist()
        end = len(ids)
        if EOS in ids[8:]:
            end = ids.index(EOS, 8) + 1
        judged = written["mask"][row].nonzero().flatten().tolist()
        assert judged == list(range(7, end - 1))
        assert set(seq_idx[8:end]) == {1}
        assert set(seq_idx[end:]) <= {2}


def test_what_the_student_wrote_is_judged_as_if_alone():
    stage, batch = own_text()
    written = stage.own_text(batch, range(8))
    ended_early = written["mask"].sum(1) < 12
    row = int(ended_early.nonzero()[0])
    alone = document(written, row, number=1)
    only = {name: tensor[row : row + 1] for name, tensor in written.items()}
    with torch.no_grad():
        torch.testing.assert_close(stage(alone).total, stage(only).total, rtol=1e-4, atol=1e-7)


def test_every_token_is_a_draw_of_its_own_from_the_softmax():
    logits_V = torch.randn(8)
    n_draws = 4000
    sample = _SampleByRow(range(n_draws), 0.7, torch.device("cpu"))
    scores_BV = logits_V.expand(n_draws, 8)
    expected_V = (logits_V / 0.7).softmax(-1).double()
    deviation_V = (expected_V * (1 - expected_V) / n_draws).sqrt()
    first = sample(Mock(), scores_BV).argmax(-1)
    second = sample(Mock(), scores_BV).argmax(-1)
    for drawn in (first, second):
        share_V = drawn.bincount(minlength=8) / n_draws
        assert ((share_V - expected_V).abs() < 4 * deviation_V).all()
    agreement = (first == second).double().mean()
    assert agreement == pytest.approx(float(expected_V.square().sum()), abs=0.04)


def test_a_row_counts_as_much_written_as_given():
    """The loss is that of each kind of rows alone, weighted by rows; each row draws its kind."""
    stage, batch = own_text(share=0.4)
    (mixed,) = stage.micro_batches(batch, 8, range(8))
    given = _kind_of(mixed, "given")
    own = _kind_of(mixed, "own")
    n_own = len(own["mask"])
    assert 0 < n_own < 8
    assert n_own + len(given["mask"]) == 8
    with torch.no_grad():
        expected = (n_own * stage(own).total + (8 - n_own) * stage(given).total) / 8
        torch.testing.assert_close(stage(mixed).total, expected)
    assert stage.n_tokens(mixed) == own["mask"].sum() + given["mask"].sum()
