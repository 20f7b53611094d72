"""Students whose weights accelerate brings to the device only while their module runs."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from accelerate import cpu_offload
from conftest import make_family_model
from students import ALL_BUT_ONE, close, keep, logits, student_of, tokens

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
