"""Windowed students in the hands of other libraries: adapters, compilers, offloading, quantization."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_family_model
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from students import ALL_BUT_ONE, THREE, close, keep, logits, logits_in_pieces, tokens
from test_offload import in_memory, on_disk
from windows import opened, windowed_student

from hybrid_distill.model import HybridForCausalLM

KINDS: dict[str, dict[str, Any]] = {
    "window": {"d_state": 0},
    "window and state": {},
    "window and gdn": {"recurrence": "gdn"},
}
TARGETS = [f"{part}_proj" for part in "xbcaqvo"]
"""Linears that adapters change, where a student has them."""
LENGTHS = (11, 1, 7)
"""Pieces of a row of 19 tokens."""


@pytest.fixture(params=KINDS)
def student(request: pytest.FixtureRequest) -> HybridForCausalLM:
    """Layers that keep three heads, none, and all but one; gates are open, so that all parts count."""
    teacher = make_family_model("qwen2")
    plan = keep(teacher, THREE, (), ALL_BUT_ONE)
    return opened(windowed_student(teacher, plan, **KINDS[request.param]))


@torch.no_grad()
def test_a_merged_adapter_computes_what_the_adapter_does_also_from_a_cache(student) -> None:
    ids = tokens(2, 19)
    before = logits(student, ids)
    names = {name.rpartition(".")[2] for name, _ in student.named_modules()}
    targets = [target for target in TARGETS if target in names]
    lora = LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    adapted: Any = get_peft_model(student, lora).eval()

    unmerged = logits(adapted, ids)
    assert (unmerged - before).abs().max() > 0.1, "the adapter changes nothing"
    close(logits_in_pieces(adapted, ids, LENGTHS, cache=student.new_cache()), unmerged)
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(logits(merged, ids), unmerged, rtol=1e-4, atol=1e-5)


def test_prompts_that_are_learned_get_gradients_and_come_first(student) -> None:
    method = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    prompted: Any = get_peft_model(student, method).eval()
    ids = tokens(2, 15)

    output = prompted(ids, attention_mask=torch.ones_like(ids), labels=ids)
    prompts = prompted.get_prompt(2)
    embeddings = torch.cat([prompts, student.get_input_embeddings()(ids)], dim=1)
    close(output.logits, student(inputs_embeds=embeddings).logits)

    output.loss.backward()
    learned = [parameter for parameter in prompted.parameters() if parameter.requires_grad]
    assert learned
    assert all(parameter.grad.abs().sum() > 0 for parameter in learned)


@torch.no_grad()
def test_compiled_it_computes_the_same(student) -> None:
    ids = tokens(2, 19)
    expected = logits(student, ids)
    compiled: Any = torch.compile(student, backend="eager")
    close(compiled(ids).logits, expected)

    n_pads = 5
    mask = torch.ones_like(ids)
    mask[0, :n_pads] = 0
    padded = logits(student, ids, attention_mask=mask)
    padded_compiled = compiled(ids, attention_mask=mask).logits
    close(padded_compiled[:, n_pads:], padded[:, n_pads:])


@torch.no_grad()
@pytest.mark.parametrize("place", ["disk", "cpu"])
def test_offloaded_weights_give_the_same_logits_and_tokens(student, place, tmp_path: Path) -> None:
    student.save_pretrained(tmp_path)
    ids = tokens(2, 19)
    model = on_disk(tmp_path) if place == "disk" else in_memory(tmp_path)
    close(logits(model, ids), logits(student, ids))
    options = {"max_new_tokens": 12, "eos_token_id": None}
    assert torch.equal(model.generate(ids, **options), student.generate(ids, **options))


@torch.no_grad()
def test_with_weights_of_8_bits_a_cache_changes_nothing(student) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    ids = tokens(2, 19)
    exact = logits(student, ids)
    quantize_(student, Int8WeightOnlyConfig())
    whole = logits(student, ids)
    error = (whole - exact).abs().max()
    assert 0 < error < 0.2 * exact.abs().max()
    close(logits_in_pieces(student, ids, LENGTHS), whole)
