"""Each stage compares and trains what it names, and does so on the teacher's own inputs."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from conftest import make_family_model
from messages import naming
from torch import Tensor, nn
from torch.testing import assert_close
from training import random_student, small_models, small_rows, small_run

from hybrid_distill.model import packed_inputs
from hybrid_distill.plan import HeadPlan
from hybrid_distill.student.build import build_student
from hybrid_distill.student.dtypes import cast_weights
from hybrid_distill.teacher import MixerCall, attention_sites, replaced_forward, trace_mixers
from hybrid_distill.train.align import LayerAlignment
from hybrid_distill.train.config import Align, AlignMatrix, Distill, DistillOnPolicy
from hybrid_distill.train.end_to_end import EndToEnd
from hybrid_distill.train.losses import distillation_loss
from hybrid_distill.train.on_policy import OnPolicy, _rows_by_source, _SampleByRow
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
def traced(teacher: nn.Module, batch: Batch) -> list[MixerCall]:
    """Return the inputs and outputs of each of the teacher's attention modules."""
    with trace_mixers(teacher) as calls:
        forward(teacher, batch)
    return list(calls.values())


def make(name: str, k: int = 2) -> Any:
    """Make a stage of small models that keep ``k`` heads of eight."""
    configs = {
        "align": Align(),
        "matrix": AlignMatrix(),
        "distill": Distill(hard_weight=0.3),
    }
    student, teacher = small_models(k=k)
    if name == "matrix":
        # The only implementation that returns its maps.
        teacher.set_attn_implementation("eager")
    return make_stage(configs[name], student, teacher, vocab_size=99)


def trained_parameters(stage: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in stage.parameters() if parameter.requires_grad]


# Alignment.


@SOME_FAMILIES
@pytest.mark.parametrize("target", TARGETS)
def test_the_target_is_the_output_of_the_teachers_own_module(family_model, family, batch, target):
    """Recomputed by hand from a trace of the teacher, the last layer included."""
    teacher = family_model(family)
    student = random_student(teacher, k=5, seed=0)
    stage = LayerAlignment(student, teacher, Align(target=target))

    per_layer = stage(batch).per_layer

    with torch.no_grad():
        residuals = forward(teacher, batch, output_hidden_states=True).hidden_states
        for layer, call in enumerate(traced(teacher, batch)):
            mixer = student.mixers()[layer]
            inputs = call.kwargs | {"seq_idx": batch["seq_idx"]}
            heads_BLHP = mixer.heads(*call.args, **inputs)
            out_BLD = mixer.o_proj(heads_BLHP.flatten(-2))
            teacher_out_BLD = call.output[0]
            if target == "head":
                error_BLHP = heads_BLHP - call.heads_BLHP
                error = error_BLHP[:, :, list(mixer.replaced)]
            elif target == "mixer":
                error = out_BLD - teacher_out_BLD
            else:
                ours = layer_output(teacher, layer, residuals[layer], out_BLD)
                theirs = layer_output(teacher, layer, residuals[layer], teacher_out_BLD)
                error = ours - theirs
            error_norms = error.norm(dim=-1)
            expected = error_norms[batch["mask"]].mean()
            assert_close(per_layer[f"layer.{layer}"], expected, rtol=1e-4, atol=1e-6)


def layer_output(teacher: Any, layer: int, residual: Tensor, mixer_output: Tensor) -> Tensor:
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
    first_attention = teacher.model.layers[0].self_attn
    first_attention.register_forward_hook(lambda *_: calls.append("block"))
    teacher.lm_head.register_forward_hook(lambda *_: calls.append("head"))

    stage(batch).total.backward()
    assert calls == ["block"]

    # A step that fails half-way removes its hooks too.
    broken = student.mixers()[1]
    broken.forward = None
    broken.heads = None
    with pytest.raises(TypeError):
        stage(batch)
    n_hooks = 0
    for module in teacher.modules():
        n_hooks += len(module._forward_hooks) + len(module._forward_pre_hooks)
    assert n_hooks == 2, "only the two of this test"


def test_there_is_one_copy_of_the_frozen_weights():
    student, teacher = small_models()
    stage = LayerAlignment(student, teacher, Align())
    ours = student.model
    theirs = teacher.model
    assert ours.embed_tokens.weight is theirs.embed_tokens.weight
    assert ours.layers[0].mlp.up_proj.weight is theirs.layers[0].mlp.up_proj.weight
    for name, _ in stage.named_parameters():
        assert name.startswith("mixers."), "what DDP or FSDP2 wraps holds the mixers alone"


def test_with_ssm_training_a_kept_head_contributes_what_it_did(batch):
    student, teacher = small_models()
    stage = LayerAlignment(student, teacher, Align(train="ssm"))
    optimizer = torch.optim.SGD(trained_parameters(stage), lr=0.1)

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
        assert_close(heads[:, :, kept], expected, rtol=1e-5, atol=1e-6)
        o_proj = teacher.model.layers[layer].self_attn.o_proj
        assert torch.equal(mixer.o_proj.weight, o_proj.weight)


NOISY = [
    ("phi", {"resid_pdrop": 0.1, "embd_pdrop": 0.1}),
    ("phi3", {"resid_pdrop": 0.1}),
    ("gpt_neox", {"hidden_dropout": 0.1}),
    ("llama", {"attention_dropout": 0.1}),
    ("mixtral", {"router_jitter_noise": 0.1}),
]


@pytest.mark.parametrize(("family", "noise"), NOISY)
def test_a_student_trains_without_the_noise_of_its_teachers_pretraining(family, noise, batch):
    """With all heads kept it is the teacher, so the loss is zero in training too."""
    teacher = make_family_model(family, **noise)
    student, _ = build_student(teacher, HeadPlan.all(teacher.config), d_state=4)
    stage = make_stage(Distill(), student, teacher, vocab_size=teacher.config.vocab_size)
    stage.train()
    packed = {name: rows % teacher.config.vocab_size for name, rows in batch.items()}
    assert stage(packed).total.item() == 0.0
    for name, value in noise.items():
        assert getattr(student.model.config, name) == value


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
    first_layer_kept = HeadPlan.layers(teacher.config, [0])
    student, _ = build_student(teacher, first_layer_kept, d_state=4)
    stage = LayerAlignment(student, teacher, Align(train="mixer"))

    loss = stage(batch)

    assert list(loss.per_layer) == ["layer.1"]
    assert_close(loss.total.detach(), loss.per_layer["layer.1"])


def test_matrices_are_compared_with_the_teachers_attention_maps(batch):
    stage = make("matrix")

    loss = stage(batch)

    with torch.no_grad():
        maps = forward(stage.teacher, batch, output_attentions=True).attentions
    is_text_query = batch["mask"][:, None, :, None]
    for layer, call in enumerate(traced(stage.teacher, batch)):
        mixer = stage.student.mixers()[layer]
        with torch.no_grad():
            mixing = mixer.mixing_matrices(call.hidden_BLD, batch["seq_idx"])
        teacher_maps = maps[layer][:, list(mixer.replaced)]
        error = (mixing - teacher_maps) * is_text_query
        expected = torch.linalg.matrix_norm(error).mean()
        assert_close(loss.per_layer[f"layer.{layer}"], expected)

    loss.total.backward()
    for name, parameter in stage.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name
        # Values and gates do not enter a mixing matrix.
        if "x_proj" in name or "z_proj" in name:
            assert not parameter.requires_grad, name


# End to end.


@SOME_FAMILIES
def test_the_fused_loss_is_that_of_the_logits_and_has_its_gradients(family_model, family, batch):
    def loss_and_gradients(fused: bool) -> dict[str, Tensor | None]:
        teacher = family_model(family)
        student = random_student(teacher, k=5, seed=0)
        config = Distill(kind="jsd", temperature=2.0, hard_weight=0.3, fused=fused)
        stage = EndToEnd(student, teacher, config)
        loss = stage(batch).total
        loss.backward()
        gradients = {name: parameter.grad for name, parameter in student.named_parameters()}
        return {"loss": loss.detach(), **gradients}

    fused = loss_and_gradients(fused=True)
    from_logits = loss_and_gradients(fused=False)
    for name, expected in from_logits.items():
        assert_close(fused[name], expected, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("fused", [True, False])
def test_end_to_end_compares_logits_on_the_real_vocabulary(batch, fused):
    # The models have 101 columns of logits.
    vocab_size = 99
    student, teacher = small_models()
    config = Distill(temperature=2.0, fused=fused)
    stage = make_stage(config, student, teacher, vocab_size=vocab_size)
    with torch.no_grad():
        theirs = forward(teacher, batch).logits
        ours = student(input_ids=batch["input_ids"], seq_idx=batch["seq_idx"]).logits
        expected = distillation_loss(
            ours,
            theirs,
            batch["mask"],
            temperature=2.0,
            vocab_size=vocab_size,
        )
        assert_close(stage(batch).total, expected)


@pytest.mark.parametrize(
    ("field", "value"),
    [("final_logit_softcapping", 0.05), ("logits_scaling", 3.0), ("logit_scale", 0.5)],
)
def test_logits_that_are_more_than_a_product_are_not_fused(batch, field, value):
    plain_stage = EndToEnd(*small_models(), Distill())
    student, teacher = small_models()
    setattr(student.model.config, field, value)
    setattr(teacher.config, field, value)
    stage = EndToEnd(student, teacher, Distill())

    # A fused loss multiplies by the head's weights and knows nothing of the setting.
    assert not torch.allclose(stage(batch).total, plain_stage(batch).total, rtol=1e-2)


def test_a_stage_recomputes_only_if_its_own_config_says_so():
    student, teacher = small_models()
    for recompute in (True, False):
        EndToEnd(student, teacher, Distill(gradient_checkpointing=recompute))
        assert student.is_gradient_checkpointing == recompute


# Every stage.


@pytest.mark.parametrize(
    ("config", "trained"),
    [
        pytest.param(Align(train="ssm"), (".ssm.",), id="align-ssm"),
        pytest.param(Align(train="mixer"), (".ssm.", ".attention.", ".o_proj."), id="align-mixer"),
        pytest.param(Distill(train="ssm"), (".ssm.",), id="distill-ssm"),
        pytest.param(Distill(train="mixer"), (".self_attn.",), id="distill-mixer"),
        pytest.param(Distill(train="all"), ("",), id="distill-all"),
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
        is_named = any(part in name for part in trained)
        assert parameter.requires_grad == is_named, name
        assert (parameter.grad is not None) == is_named, name
    for name, parameter in teacher.named_parameters():
        assert parameter.grad is None
        assert torch.equal(parameter, before[name])
    ids_of_teacher = set(map(id, teacher.parameters()))
    ids_of_student = set(map(id, student.parameters()))
    shares_weights = not ids_of_teacher.isdisjoint(ids_of_student)
    assert shares_weights == isinstance(stage, LayerAlignment)


@pytest.mark.parametrize("name", ["align", "distill"])
def test_padding_changes_no_loss(name):
    stage = make(name)
    batch = small_rows().batch(0, 4)
    one_document_more = batch["seq_idx"].max() + 1
    padding = {
        "input_ids": torch.randint(2, 99, (4, 5)),
        "seq_idx": one_document_more.expand(4, 5),
        "mask": torch.zeros(4, 5, dtype=torch.bool),
    }
    padded = {key: torch.cat([batch[key], pad], 1) for key, pad in padding.items()}

    with torch.no_grad():
        plain_loss = stage(batch).total
        padded_loss = stage(padded).total

    assert_close(plain_loss, padded_loss, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["align", "distill"])
def test_documents_packed_in_a_row_do_not_see_each_other(name):
    """The loss of a row is the sum of its documents' shares in it."""
    stage = make(name)
    batch = small_rows().batch(1, 4)
    totals = stage.totals(batch)

    with torch.no_grad():
        whole = stage(batch).total
        sum_of_documents = 0.0
        for row in range(4):
            for number in batch["seq_idx"][row].unique():
                alone = document(batch, row, number)
                sum_of_documents += stage(alone, totals).total

    assert_close(whole, sum_of_documents, rtol=1e-4, atol=1e-6)


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
    assert {parameter.dtype for parameter in trained_parameters(stage)} == {torch.float32}
    assert {parameter.dtype for parameter in teacher.parameters()} == {torch.bfloat16}


def test_auto_precision_follows_the_teacher_not_a_student_that_was_trained(set_cpu_bf16) -> None:
    """A stage before may have left the student's weights in float32."""
    set_cpu_bf16(False)
    student, teacher = small_models()
    cast_weights(teacher, torch.bfloat16)
    assert make_stage(Align(precision="auto"), student, teacher).bf16


def shard_teacher_of_layers() -> None:
    stage = LayerAlignment(*small_models(), Align(target="layer"))
    with_sharded_teacher(stage, Mock())


REFUSED = {
    "align without recurrent heads": (
        lambda: make("align", k=8),
        "--align.train mixer",
    ),
    "matrix without recurrent heads": (
        lambda: make("matrix", k=8),
        "--matrix.train mixer",
    ),
    "matrix without maps": (
        lambda: make_stage(AlignMatrix(), *small_models()),
        "'sdpa'",
    ),
    "heads and more": (
        lambda: Align(target="head", train="mixer"),
        "--align.train ssm",
    ),
    "sharded teacher, its layers": (
        shard_teacher_of_layers,
        "'mixer'",
        "'head'",
    ),
    "run with a sharded teacher, its layers": (
        lambda: small_run(stages=(Align(target="layer"),), teacher_sharding="sharded"),
        "align.target",
        "'layer'",
    ),
}
"""Refused stages, each with the facts that its error names."""


@pytest.mark.parametrize("case", REFUSED)
def test_a_stage_that_cannot_be_is_refused(case):
    make_it, *facts = REFUSED[case]
    with pytest.raises(ValueError, match=naming(*facts)):
        make_it()


# Text that the student writes.

EOS = 1
N_PROMPT = 8
N_NEW = 12


def own_text(share: float = 1.0) -> tuple[OnPolicy, Batch]:
    """Make a stage whose student often writes the token that ends a document, and a batch."""
    student, teacher = small_models()
    with torch.no_grad():
        student.lm_head.weight[EOS] = 0.1
    student.generation_config.eos_token_id = EOS
    config = DistillOnPolicy(share=share, prompt_tokens=N_PROMPT, new_tokens=N_NEW)
    return OnPolicy(student, teacher, config), small_rows().batch(0, 8)


def test_the_student_continues_the_document_at_hand():
    """Written rows number their documents: 0 before the one at hand, 1 itself, 2 after its end."""
    stage, batch = own_text()

    written = stage.generate_text(batch, range(8))

    prompts = batch["input_ids"][:, :N_PROMPT]
    assert torch.equal(written["input_ids"][:, :N_PROMPT], prompts)
    prompt_documents = batch["seq_idx"][:, :N_PROMPT]
    is_at_hand = prompt_documents == prompt_documents[:, -1:]
    assert not is_at_hand.all(), "some prompts begin in an earlier document"
    assert torch.equal(written["seq_idx"][:, :N_PROMPT] == 1, is_at_hand)

    for row in range(8):
        ids = written["input_ids"][row].tolist()
        seq_idx = written["seq_idx"][row].tolist()
        end = len(ids)
        if EOS in ids[N_PROMPT:]:
            end = ids.index(EOS, N_PROMPT) + 1
        assert set(seq_idx[N_PROMPT:end]) == {1}
        assert set(seq_idx[end:]) <= {2}
        # A place is judged on the token after it, from the prompt's last to the one before EOS.
        judged = written["mask"][row].nonzero().flatten().tolist()
        assert judged == list(range(N_PROMPT - 1, end - 1))


def test_what_the_student_wrote_is_judged_as_if_alone():
    stage, batch = own_text()
    written = stage.generate_text(batch, range(8))
    ended_early = written["mask"].sum(1) < N_NEW
    row = int(ended_early.nonzero()[0])
    alone = document(written, row, number=1)
    in_its_row = {name: tensor[row : row + 1] for name, tensor in written.items()}

    with torch.no_grad():
        loss_alone = stage(alone).total
        loss_in_its_row = stage(in_its_row).total

    assert_close(loss_alone, loss_in_its_row, rtol=1e-4, atol=1e-7)


def test_every_token_is_a_draw_of_its_own_from_the_softmax():
    temperature = 0.7
    n_draws = 4000
    logits_V = torch.randn(8)
    sample = _SampleByRow(range(n_draws), temperature, torch.device("cpu"))
    scores_BV = logits_V.expand(n_draws, 8)

    first = sample(Mock(), scores_BV).argmax(-1)
    second = sample(Mock(), scores_BV).argmax(-1)

    probability_V = (logits_V / temperature).softmax(-1).double()
    # Standard deviation of a share of n independent draws.
    deviation_V = (probability_V * (1 - probability_V) / n_draws).sqrt()
    for drawn in (first, second):
        share_V = drawn.bincount(minlength=8) / n_draws
        assert ((share_V - probability_V).abs() < 4 * deviation_V).all()
    # Two independent draws agree with probability sum(p²).
    agreement = (first == second).double().mean()
    by_chance = float(probability_V.square().sum())
    assert agreement == pytest.approx(by_chance, abs=0.04)


def test_a_row_counts_as_much_written_as_given():
    """The loss is that of each kind of rows alone, weighted by rows; each row draws its kind."""
    n_rows = 8
    stage, batch = own_text(share=0.4)

    (mixed,) = stage.micro_batches(batch, n_rows, range(n_rows))

    given, own = _rows_by_source(mixed).values()
    n_own = len(own["mask"])
    n_given = len(given["mask"])
    assert 0 < n_own < n_rows
    assert n_own + n_given == n_rows
    with torch.no_grad():
        expected = (n_own * stage(own).total + n_given * stage(given).total) / n_rows
        assert_close(stage(mixed).total, expected)
    assert stage.n_tokens(mixed) == own["mask"].sum() + given["mask"].sum()
