"""Students whose weights are elsewhere: accelerate brings them to the device while their module runs, or DeepSpeed's
ZeRO-3 divides them among processes."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from accelerate import cpu_offload
from conftest import make_family_model
from students import ALL_BUT_ONE, close, keep, logits, mixed_student, student_of, tokens
from training import free_port

from hybrid_distill.model import HybridForCausalLM
from hybrid_distill.model.field_rules import RECURRENCES

IN_MEMORY = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")


def on_disk(folder: Path) -> HybridForCausalLM:
    """Load a student whose layers stay on disk."""
    places = {**dict.fromkeys(IN_MEMORY, "cpu"), "model.layers": "disk"}
    return HybridForCausalLM.from_pretrained(
        folder, device_map=places, offload_folder=folder / "offload"
    )


def in_memory(folder: Path) -> HybridForCausalLM:
    """Load a student whose weights stay in memory; the device is the CPU too."""
    student = HybridForCausalLM.from_pretrained(folder)
    return cpu_offload(student, execution_device=torch.device("cpu"))


@torch.no_grad()
@pytest.mark.parametrize(
    ("offloaded", "impl"), [(on_disk, "torch"), (in_memory, "torch"), (in_memory, "triton")]
)
@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_offloaded_weights_give_the_same_logits_and_tokens(
    recurrence: str,
    impl: str,
    offloaded: Callable[[Path], HybridForCausalLM],
    tmp_path: Path,
) -> None:
    teacher = make_family_model("llama", num_hidden_layers=1)
    student = student_of(teacher, keep(teacher, ALL_BUT_ONE), recurrence=recurrence)
    student.save_pretrained(tmp_path)
    # With more tokens than the model is wide, kernels join the projections' weights.
    ids = tokens(2, 33)
    model = offloaded(tmp_path)
    model.set_ssm_implementation(impl)
    assert model.recurrent_heads()[0].x_proj.weight.is_meta
    close(logits(model, ids), logits(student, ids))
    prompt = ids[:, :9]
    text = student.generate(prompt, max_new_tokens=2)
    assert torch.equal(model.generate(prompt, max_new_tokens=2), text)


ON_ZERO_3 = """
import sys

import deepspeed
import torch
from transformers.integrations import HfDeepSpeedConfig

from hybrid_distill.model import HybridForCausalLM

# Another way to add up on a CPU, which would be compiled first.
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
deepspeed.init_distributed("gloo")
settings = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
keep_alive = HfDeepSpeedConfig(settings)
folder, loaded = sys.argv[1:]
student = HybridForCausalLM.from_pretrained(folder)
parameters = list(student.parameters())
assert all(parameter.numel() == 0 for parameter in parameters)
with deepspeed.zero.GatheredParameters(parameters):
    torch.save(student.state_dict(), loaded)
"""
"""Load a student under ZeRO-3, as a trainer does, and save what was loaded."""


def test_a_student_is_loaded_under_zero_3(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    student = mixed_student(make_family_model("llama"))
    student.save_pretrained(tmp_path)
    environment = {
        **os.environ,
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "DS_ACCELERATOR": "cpu",
    }
    command = [sys.executable, "-c", ON_ZERO_3, str(tmp_path), str(tmp_path / "loaded")]
    subprocess.run(command, env=environment, check=True)
    loaded = torch.load(tmp_path / "loaded")
    for name, tensor in student.state_dict().items():
        assert torch.equal(loaded[name], tensor), name
