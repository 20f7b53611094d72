"""Adapters of PEFT, and the losses that TRL computes from a student's config and decoder."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import make_family_model
from datasets import Dataset
from peft import (
    BOFTConfig,
    HRAConfig,
    IA3Config,
    LoraConfig,
    PeftConfig,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    get_peft_model,
)
from students import COMPUTATIONS, byte_tokenizer, close, logits, mixed_student, tokens
from transformers import PreTrainedModel

from hybrid_distill.model import HybridForCausalLM, SSMHeads

TARGETS = [f"{part}_proj" for part in "xbczaqvo"]
ADAPTERS: dict[str, PeftConfig] = {
    "lora": LoraConfig(r=4, target_modules=TARGETS, init_lora_weights=False),
    "dora": LoraConfig(r=4, target_modules=TARGETS, init_lora_weights=False, use_dora=True),
    "boft": BOFTConfig(boft_block_size=4, target_modules=TARGETS, init_weights=False),
    "ia3": IA3Config(target_modules=TARGETS, feedforward_modules=[], init_ia3_weights=False),
    "hra": HRAConfig(r=4, target_modules=TARGETS, init_weights=False),
}
PROMPTS: dict[str, PeftConfig] = {
    "prompt tuning": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "p-tuning": PromptEncoderConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=4, encoder_hidden_size=16
    ),
}


@torch.no_grad()
@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("recurrence", COMPUTATIONS)
def test_a_merged_adapter_computes_what_the_adapter_does(
    recurrence: str,
    adapter: str,
) -> None:
    student = mixed_student(make_family_model("qwen2"), recurrence)
    ids = tokens(2, 9)
    before = logits(student, ids)
    adapted: Any = get_peft_model(student, ADAPTERS[adapter]).eval()
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.add_(0.05 * torch.randn_like(parameter))
    unmerged = logits(adapted, ids)
    assert (unmerged - before).abs().max() > 0.1, "the adapter changes nothing"
    merged = logits(adapted.merge_and_unload(), ids)
    torch.testing.assert_close(merged, unmerged, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize(
    "wrapper", [{"modules_to_save": ["ssm"]}, {"target_parameters": ["ssm.conv_weight"]}]
)
def test_a_wrapped_layer_of_heads_takes_the_settings(wrapper: Any, monkeypatch: Any) -> None:
    """The convolution is trained so: it is not a matrix that LoRA finds by its module."""
    student = mixed_student(make_family_model("llama"))
    lora = LoraConfig(target_modules=["o_proj"], init_lora_weights=False, **wrapper)
    adapted: Any = get_peft_model(student, lora).eval()
    ids = tokens(2, 9)
    whole = logits(adapted, ids)
    lengths = set()
    run = SSMHeads._run

    def counting(self: SSMHeads, hidden_BLD: torch.Tensor, *args: Any) -> Any:
        lengths.add(hidden_BLD.shape[1])
        return run(self, hidden_BLD, *args)

    monkeypatch.setattr(SSMHeads, "_run", counting)
    student.set_segment_len(4)
    close(logits(adapted, ids), whole)
    assert lengths == {4, 1}
    student.set_ssm_implementation("torch")
    assert {heads.impl for heads in adapted.modules() if isinstance(heads, SSMHeads)} == {"torch"}


def with_own_bias(recurrence: str, target: str) -> Any:
    student = mixed_student(make_family_model("qwen2"), recurrence)
    settings = {"r": 4, "init_lora_weights": False, "lora_bias": True}
    return get_peft_model(student, LoraConfig(target_modules=[target], **settings)).eval()


@pytest.mark.parametrize(("recurrence", "target"), [("discrete", "x_proj"), ("mamba2", "z_proj")])
def test_an_adapters_own_bias_is_merged(recurrence: str, target: str) -> None:
    adapted = with_own_bias(recurrence, target)
    ids = tokens(2, 9)
    unmerged = logits(adapted, ids)
    close(logits(adapted.merge_and_unload(), ids), unmerged)


def test_an_adapters_own_bias_that_has_no_place_is_refused() -> None:
    """mamba2's x, B and C have no bias before the convolution."""
    with pytest.raises(RuntimeError, match="lora_bias"):
        with_own_bias("mamba2", "x_proj").merge_and_unload()


@pytest.mark.parametrize("method", PROMPTS)
def test_prompts_are_learned_before_the_embeddings(method: str) -> None:
    student = mixed_student(make_family_model("llama"))
    prompted: Any = get_peft_model(student, PROMPTS[method]).eval()
    ids = tokens(2, 9)
    mask = torch.ones_like(ids)
    output = prompted(ids, attention_mask=mask, labels=ids)
    prompts = prompted.get_prompt(2)
    embeddings = torch.cat([prompts, student.get_input_embeddings()(ids)], dim=1)
    close(output.logits, student(inputs_embeds=embeddings).logits)

    output.loss.backward()
    learned = [parameter for parameter in prompted.parameters() if parameter.requires_grad]
    assert learned
    assert all(parameter.grad is not None for parameter in learned)

    options = {"max_new_tokens": 3, "eos_token_id": None}
    # PEFT 0.21 looks for a cache by its name before transformers 5.24; without one, it reads all
    # tokens anew.
    text = prompted.generate(input_ids=ids, attention_mask=mask, use_cache=False, **options)
    expected = student.generate(inputs_embeds=embeddings, use_cache=True, **options)
    assert torch.equal(text[:, 9:], expected)


def test_a_prefix_of_keys_is_refused() -> None:
    """It is a cache without recurrent states."""
    prefix = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    prefixed: Any = get_peft_model(mixed_student(make_family_model("llama")), prefix)
    with pytest.raises(ValueError, match="DynamicCache"):
        prefixed(tokens(2, 9))


SHARED_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "pad_token_id",
)
SCALES: dict[str, dict[str, Any]] = {
    "Granite": {"logits_scaling": 4.0},
    "Cohere": {"logit_scale": 0.25},
    "Gemma2": {"final_logit_softcapping": 2.0, "head_dim": 8},
}
"""Families that scale or cap their logits, so far that a loss without it differs."""


def scaled_teacher(name: str) -> PreTrainedModel:
    shape = make_family_model("llama", vocab_size=300).config.to_dict()
    fields = {field: shape[field] for field in SHARED_SIZES}
    config_class = getattr(transformers, f"{name}Config")
    config = config_class(**fields, initializer_range=0.3, **SCALES[name])
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


@pytest.mark.parametrize("family", SCALES)
def test_trl_computes_the_students_own_loss(family: str, tmp_path: Path) -> None:
    """Its default loss multiplies hidden states by the output embedding, in pieces."""
    trl = pytest.importorskip("trl")
    student: HybridForCausalLM = mixed_student(scaled_teacher(family))
    texts = [tokens(12), tokens(7)]
    rows = Dataset.from_list([{"input_ids": ids.tolist()} for ids in texts])
    arguments = trl.SFTConfig(
        str(tmp_path),
        disable_tqdm=True,
        report_to=[],
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=2,
    )
    trainer = trl.SFTTrainer(
        student, arguments, train_dataset=rows, processing_class=byte_tokenizer()
    )
    batch = next(iter(trainer.get_train_dataloader()))
    expected = type(student).forward(student, **batch).loss
    loss = trainer.compute_loss(trainer.model, dict(batch))
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
