"""Adapters of PEFT, and the losses that TRL computes from a student's config and decoder."""

from pathlib import Path
from typing import Any

import pytest
import torch
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
from students import byte_tokenizer, close, logits, mixed_student, tokens
from transformers import PreTrainedModel

from hybrid_distill.model import HybridForCausalLM

TARGETS = [f"{part}_proj" for part in "xbczaqvo"]
ADAPTERS: dict[str, PeftConfig] = {
    "lora": LoraConfig(r=4, target_modules=TARGETS, init_lora_weights=False),
    "dora": LoraConfig(r=4, target_modules=TARGETS, init_lora_weights=False, use_dora=True),
    "boft": BOFTConfig(boft_block_size=4, target_modules=TARGETS, init_weights=False),
    "ia3": IA3Config(
        target_modules=TARGETS, feedforward_modules=[], init_ia3_weights=False
    ),
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
@pytest.mark.parametrize("recurrence", ["discrete", "mamba2", "gdn"])
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
    assert (unmerged - before).abs().max() > 0.1
    torch.testing.assert_close(
        logits(adapted.merge_and_unload(), ids), unmerged, rtol=1e-4, atol=1e-5
    )


def test_an_adapters_own_bias_is_merged_or_refused() -> None:
    """mamba2's x, B and C have no bias before the convolution: PEFT refuses to merge one into them."""
    settings = {"r": 4, "init_lora_weights": False, "lora_bias": True}
    ids = tokens(2, 9)
    for recurrence, target in (("discrete", "x_proj"), ("mamba2", "z_proj")):
        student = mixed_student(make_family_model("qwen2"), recurrence)
        adapted: Any = get_peft_model(
            student, LoraConfig(target_modules=[target], **settings)
        ).eval()
        unmerged = logits(adapted, ids)
        close(logits(adapted.merge_and_unload(), ids), unmerged)
    student = mixed_student(make_family_model("qwen2"), "mamba2")
    adapted = get_peft_model(student, LoraConfig(target_modules=["x_proj"], **settings))
    with pytest.raises(RuntimeError, match="lora_bias"):
        adapted.merge_and_unload()


@pytest.mark.parametrize("method", PROMPTS)
def test_prompts_are_learned_before_the_embeddings(method: str) -> None:
    student = mixed_student(make_family_model("llama"))
    prompted: Any = get_peft_model(student, PROMPTS[method]).eval()
    ids = tokens(2, 9)
    mask = torch.ones_like(ids)
    output = prompted(ids, attention_mask=mask, labels=ids)
    embeddings = torch.cat(
        [prompted.get_prompt(2), student.get_input_embeddings()(ids)], dim=1
    )
    close(output.logits, student(inputs_embeds=embeddings).logits)
    output.loss.backward()
    learned = [parameter for parameter in prompted.parameters() if parameter.requires_grad]
    assert learned and all(parameter.grad is not None for parameter in learned)
    options = {"max_new_tokens": 3, "eos_token_id": None, "use_cache": False}
    # PEFT 0.21 looks for a cache by its name before transformers 5.24: without one, it reads all tokens anew.
    written = prompted.generate(input_ids=ids, attention_mask=mask, **options)[:, 9:]
    options["use_cache"] = True
    assert torch.equal(written, student.generate(inputs_embeds=embeddings, **options))


def test_a_prefix_of_keys_is_refused() -> None:
    """It is a cache without recurrent states."""
    prefix = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    prefixed: Any = get_peft_model(mixed_student(make_family_model("llama")), prefix)
    with pytest.raises(ValueError, match="DynamicCache"):
        prefixed(tokens(2, 9))


def scaled_teacher(name: str) -> PreTrainedModel:
    """A family that scales or caps its logits, so far that a loss without it differs."""
    import transformers

    shape = dict(
        make_family_model("llama").config.to_dict(), vocab_size=300, initializer_range=0.3
    )
    fields = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
              "num_key_value_heads", "max_position_embeddings", "pad_token_id", "initializer_range")  # fmt: skip
    own = {
        "Granite": {"logits_scaling": 4.0},
        "Cohere": {"logit_scale": 0.25},
        "Gemma2": {"final_logit_softcapping": 2.0, "head_dim": 8},
    }[name]
    config = getattr(transformers, f"{name}Config")(
        **{field: shape[field] for field in fields}, **own
    )
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


@pytest.mark.parametrize("family", ["Granite", "Cohere", "Gemma2"])
def test_trl_computes_the_students_own_loss(family: str, tmp_path: Path) -> None:
    """Its default loss multiplies the decoder's hidden states by the output embedding, in pieces."""
    trl = pytest.importorskip("trl")
    student: HybridForCausalLM = mixed_student(scaled_teacher(family))
    rows = Dataset.from_list([{"input_ids": tokens(length).tolist()} for length in (12, 7)])
    settings = {
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": 2,
    }
    arguments = trl.SFTConfig(str(tmp_path), disable_tqdm=True, **settings)
    trainer = trl.SFTTrainer(
        student, arguments, train_dataset=rows, processing_class=byte_tokenizer()
    )
    batch = next(iter(trainer.get_train_dataloader()))
    expected = type(student).forward(student, **batch).loss
    loss = trainer.compute_loss(trainer.model, dict(batch))
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
