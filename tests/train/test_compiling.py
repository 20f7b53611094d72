"""Decoder layers compiled for a stage: the same losses, one program a layer, nothing left behind."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_family_model
from torch._dynamo.utils import counters
from torch.nn.attention import flex_attention
from training import (
    SMALL,
    StoppingRows,
    rows_of,
    small_config,
    small_rows,
    small_stage,
    word_texts,
    word_tokenizer,
)

from hybrid_distill.model import document_kernels, documents
from hybrid_distill.plan import HeadId, HeadPlan
from hybrid_distill.student.build import build_student
from hybrid_distill.train import loop
from hybrid_distill.train.compiling import compiled_layers
from hybrid_distill.train.config import Align, Distill, StageConfig
from hybrid_distill.train.loop import train_stage
from hybrid_distill.train.meter import flops_per_token
from hybrid_distill.train.stage import Stage
from hybrid_distill.train.stages import make_stage
from hybrid_distill.train.stop import Interrupted

CPU = torch.device("cpu")
PLAN = HeadPlan(3, 4, 2, tuple(HeadId(0, head) for head in range(4)) + (HeadId(2, 1),))
"""Layers that keep all heads, none, and one."""


@pytest.fixture(autouse=True)
def without_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile down to torch's own operators: what is traced is the same, and nothing is built."""
    compile_with = torch.compile

    def compile_to_operators(function: Any, **options: Any) -> Any:
        return compile_with(function, **{"backend": "aot_eager", **options})

    monkeypatch.setattr(torch, "compile", compile_to_operators)
    torch.compiler.reset()
    counters.clear()


@pytest.fixture
def on_flex_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pack rows as on a GPU, with FlexAttention's own definition."""
    plain = flex_attention.flex_attention
    monkeypatch.setattr(documents, "has_document_attention", lambda device: True)
    monkeypatch.setattr(document_kernels, "flash_function", lambda: None)
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *args: None)
    monkeypatch.setattr(document_kernels, "compiled_flex_attention", lambda: plain)


def made_stage(config: StageConfig, **shape: Any) -> Stage:
    teacher = make_family_model("llama", **{**SMALL, "num_hidden_layers": 3, **shape})
    student, _ = build_student(teacher, PLAN, d_state=4)
    return make_stage(config, student, teacher, vocab_size=99)


def trained(stage: Stage, steps: int = 3, seq_len: int = 16) -> list[float]:
    """Return the losses of SGD; only the first step may compile."""
    programs = 0
    rows = rows_of(word_texts(200), word_tokenizer(), seq_len)
    parameters = [p for p in stage.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    losses = []
    stage.train()
    with compiled_layers(stage, CPU, flops=0.0):
        for step in range(steps):
            loss = stage(rows.batch(step, 2)).total
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if step == 0:
                programs = counters["stats"]["unique_graphs"]
    assert counters["stats"]["unique_graphs"] == programs
    assert not counters["graph_break"]
    return losses


def n_compiled(stage: Stage) -> int:
    """Count the layers of student and teacher that are compiled now."""
    n_layers = 0
    for model in (stage.student, *stage.teachers):
        for layer in model.model.layers:
            # A compiled function replaces the method of the instance.
            own = vars(layer)
            n_layers += "forward" in own or "backbone_forward" in own
    return n_layers


CONFIGS = {
    "align": Align(target="layer"),
    "align nmse recomputed": Align(target="layer", loss="nmse", gradient_checkpointing=True),
    "distill": Distill(),
    "distill recomputed": Distill(gradient_checkpointing=True),
}


@pytest.mark.parametrize(
    "name, precision",
    [
        ("align", "fp32"),
        ("align nmse recomputed", "bf16"),
        ("distill", "bf16"),
        ("distill recomputed", "fp32"),
    ],
)
def test_compiled_layers_train_the_same_without_a_graph_break(name: str, precision: str) -> None:
    config = replace(CONFIGS[name], precision=precision)
    expected = trained(made_stage(replace(config, compile="off")))
    assert not counters["stats"]
    losses = trained(made_stage(replace(config, compile="on")))
    # The teacher's layers share one program. Of the student's three, each that is compared has its
    # own, and so has the loss of an alignment.
    assert counters["stats"]["unique_graphs"] == 4
    tolerance = {"fp32": 1e-5, "bf16": 1e-3}[precision]
    assert losses == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize("name", ["align", "distill recomputed"])
def test_packed_rows_on_a_gpu_break_no_graph(on_flex_attention: None, name: str) -> None:
    """The mask of documents is a tensor with attributes, and FlexAttention's blocks one of them."""
    shape = {"hidden_size": 64, "head_dim": 16}
    config = CONFIGS[name]
    expected = trained(made_stage(replace(config, compile="off"), **shape), seq_len=256)
    counters.clear()
    losses = trained(made_stage(replace(config, compile="on"), **shape), seq_len=256)
    assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "config",
    [Align(target="head"), Align(), Distill(compile="auto"), small_config("on_policy")],
    ids=["heads", "mixers", "short", "on policy"],
)
def test_layers_that_cannot_or_need_not_be_compiled_run_as_they_are(config: StageConfig) -> None:
    if type(config) is not Distill:
        config = replace(config, compile="on")
    stage = made_stage(config)
    with compiled_layers(stage, CPU, flops=0.0):
        assert n_compiled(stage) == 0


@pytest.mark.parametrize(
    ("gpu", "seconds_at_peak", "choice", "n_layers"),
    [
        # At 40 % of its peak, a GPU takes two and a half times as long: 500 and 750 seconds.
        ("NVIDIA B200", 200, "auto", 0),
        ("NVIDIA B200", 300, "auto", 6),
        ("NVIDIA B200", 300, "off", 0),
        ("NVIDIA B200", 0, "on", 6),
        ("NVIDIA H200", 200, "auto", 0),
        ("NVIDIA H200", 300, "auto", 6),
        # Its peak is unknown: H100's counts.
        ("NVIDIA L4", 200, "auto", 0),
        ("NVIDIA L4", 300, "auto", 6),
    ],
)
def test_auto_compiles_a_stage_that_is_long_for_its_gpu(
    gpu: str, seconds_at_peak: float, choice: Any, n_layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: gpu)
    peak = 2250e12 if "B200" in gpu else 989e12
    stage = made_stage(Distill(compile=choice))
    with compiled_layers(stage, torch.device("cuda"), flops=seconds_at_peak * peak):
        assert n_compiled(stage) == n_layers
    assert n_compiled(stage) == 0


def test_flops_left_are_those_of_the_steps_that_a_process_has_yet_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = []

    def noted(stage: Stage, device: torch.device, flops: float) -> AbstractContextManager[None]:
        left.append(flops)
        return compiled_layers(stage, device, flops)

    monkeypatch.setattr(loop, "compiled_layers", noted)
    # Asked to stop in its fourth step, it resumes after that.
    rows: Any = StoppingRows(small_rows(), 3)
    config = small_config("distill", steps=5)
    stage = small_stage(config)
    of_token = flops_per_token(stage.student, stage.teachers, teacher_forced=False)
    of_step = of_token * config.batch_size * rows.seq_len

    with pytest.raises(Interrupted):
        train_stage(stage, rows, tmp_path, progress=False)
    train_stage(small_stage(config), small_rows(), tmp_path, progress=False)

    assert left == [5 * of_step, of_step]


def test_a_compiled_stage_leaves_no_trace(tmp_path: Path, caplog) -> None:
    # In bfloat16, programs read copies of the weights in all micro-batches.
    stage = made_stage(small_config("distill", steps=2, compile="on", precision="bf16"))

    with caplog.at_level(logging.INFO, "hybrid_distill"):
        train_stage(stage, small_rows(), tmp_path, progress=False)

    assert any("compile: 6 decoder layers" in record.message for record in caplog.records)
    assert counters["stats"]["unique_graphs"] == 4
    assert n_compiled(stage) == 0
