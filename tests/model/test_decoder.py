"""The decoder of a student, called by others than `HybridForCausalLM`, copied and pickled."""

import copy
import io
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.big_modeling import _attach_context_parallel_hooks
from conftest import make_family_model
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from messages import naming
from students import (
    COMPUTATIONS,
    left_padded,
    logits,
    mixed_student,
    packed_logits,
    tokens,
)
from torch import Tensor
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hybrid_distill.model import HybridForCausalLM, layer_windows
from hybrid_distill.model.layout import cache_of

FAMILIES = ("llama", "gpt_neox", "nemotron", "gemma2")
"""GPT-NeoX orders arguments differently, Nemotron drops unknown ones, Gemma-2 has windows."""


@pytest.fixture(params=FAMILIES)
def student(request: pytest.FixtureRequest) -> HybridForCausalLM:
    return mixed_student(make_family_model(request.param))


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=2e-5)


@torch.no_grad()
def test_a_decoder_reads_padding_and_documents_itself(student: HybridForCausalLM) -> None:
    """TRL's GRPO computes the log-probabilities of a completion from these hidden states."""
    decoder = student.model
    assert student.base_model is student.get_decoder() is decoder
    prompts = [tokens(5), tokens(11)]
    alone = [decoder(prompt[None]).last_hidden_state[0] for prompt in prompts]

    ids, mask = left_padded(prompts)
    n_pads = 11 - 5
    padded = decoder(ids, mask).last_hidden_state
    close(padded[0, n_pads:], alone[0])
    close(padded[1], alone[1])

    packed = torch.cat(prompts)[None]
    positions = torch.cat([torch.arange(5), torch.arange(11)])[None]
    for documents in (
        {"position_ids": positions},
        {"cu_seq_lens_q": torch.tensor([0, 5, 16])},
        {"seq_idx": torch.tensor([[0] * 5 + [1] * 11])},
    ):
        output = decoder(input_ids=packed, **documents)
        close(output.last_hidden_state[0], torch.cat(alone))


@torch.no_grad()
def test_a_decoder_makes_and_continues_its_cache(student: HybridForCausalLM) -> None:
    ids, mask = left_padded([tokens(9), tokens(4)])
    whole = student.model(ids, mask, use_cache=False)
    assert cache_of(whole) is None
    first = student.model(ids[:, :6], mask[:, :6])
    rest = student.model(input_ids=ids[:, 6:], attention_mask=mask, past_key_values=cache_of(first))
    close(rest.last_hidden_state, whole.last_hidden_state[:, 6:])
    with pytest.raises(ValueError, match="DynamicCache"):
        student.model(ids, mask, past_key_values=DynamicCache())


def test_a_decoder_is_not_saved_as_its_backbone(student: HybridForCausalLM, tmp_path: Path) -> None:
    """transformers would load it as the backbone's class, with attention of random weights."""
    with pytest.raises(ValueError, match="HybridModel"):
        student.model.save_pretrained(tmp_path)
    assert not any(tmp_path.iterdir())


def saved_and_loaded(student: HybridForCausalLM) -> HybridForCausalLM:
    file = io.BytesIO()
    torch.save(student, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[HybridForCausalLM], HybridForCausalLM]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda student: pickle.loads(pickle.dumps(student)),
    "torch": saved_and_loaded,
}


@torch.no_grad()
@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("recurrence", COMPUTATIONS)
def test_a_copy_is_the_same_model(way: str, recurrence: str) -> None:
    student = mixed_student(make_family_model("qwen2"), recurrence)
    ids, mask = left_padded([tokens(9), tokens(4)])
    static = {"cache_implementation": "static", "max_new_tokens": 2}
    student.generate(ids, attention_mask=mask, **static)
    copied = COPIES[way](student)
    assert copied._static_cache is None
    classes = [type(module) for module in student.modules()]
    assert [type(module) for module in copied.modules()] == classes
    close(logits(copied, ids, attention_mask=mask), logits(student, ids, attention_mask=mask))
    seq_idx = torch.tensor([[0] * 4 + [1] * 5] * 2)
    close(packed_logits(copied, ids, seq_idx), packed_logits(student, ids, seq_idx))

    # A copy has its own config, which still reaches its own decoder.
    copied.config.output_hidden_states = True
    assert copied.model(ids).hidden_states is not None
    assert student.model(ids).hidden_states is None


def test_threads_read_their_own_padding(student: HybridForCausalLM) -> None:
    """One thread stands between a layer and its mixer while another runs a padded batch there."""
    ids = tokens(2, 11)
    padded, mask = left_padded([tokens(5), tokens(11)])
    expected = logits(student, ids, use_cache=False)
    is_inside = threading.Event()
    is_done = threading.Event()
    limit_s = 20
    other = threading.Thread(
        target=lambda: logits(student, padded, attention_mask=mask, use_cache=False)
    )

    # The first thread stops here until the other one has come, which stays until the first has
    # been through the mixer.
    def before_mixer(*_: object) -> None:
        if threading.current_thread() is other:
            is_inside.set()
            is_done.wait(limit_s)
        elif other.ident is None:
            other.start()
            is_inside.wait(limit_s)

    def after_mixer(*_: object) -> None:
        if threading.current_thread() is not other:
            is_done.set()

    layer = student.model.layers[0]
    mixer = student.mixers()[0]
    hooks = [
        layer.input_layernorm.register_forward_hook(before_mixer),
        mixer.register_forward_hook(after_mixer),
    ]
    actual = logits(student, ids, use_cache=False)
    other.join()
    for hook in hooks:
        hook.remove()
    assert torch.equal(actual, expected)


@torch.no_grad()
def test_a_mask_that_replaced_heads_cannot_follow_is_refused(student: HybridForCausalLM) -> None:
    ids, mask = left_padded([tokens(5), tokens(11)])
    causal = torch.ones(11, 11, dtype=torch.bool).tril().expand(2, 1, -1, -1)
    hides_padding = causal & mask[:, None, None, :].bool()
    lowest = torch.finfo(torch.float32).min
    additive = torch.zeros(hides_padding.shape).masked_fill(~hides_padding, lowest)
    for hiding in (hides_padding, additive):
        with pytest.raises(ValueError, match=naming("attention_mask", "4-D")):
            student(ids, attention_mask=hiding, use_cache=False)


@torch.no_grad()
def test_a_mask_that_hides_nothing_or_known_documents_is_read(student: HybridForCausalLM) -> None:
    ids = tokens(2, 11)
    causal = torch.ones(11, 11, dtype=torch.bool).tril().expand(2, 1, -1, -1)
    causally = logits(student, ids, attention_mask=causal, use_cache=False)
    # Layers with windows read it as it is: it does not have their windows.
    assert layer_windows(student.config) == layer_windows(student.model.config)
    if not any(layer_windows(student.model.config)):
        close(causally, logits(student, ids, use_cache=False))
    seq_idx = torch.tensor([[0] * 4 + [1] * 7] * 2)
    is_same_document = seq_idx[:, None, :, None] == seq_idx[:, None, None, :]
    student(ids, attention_mask=causal & is_same_document, seq_idx=seq_idx)


def test_attention_to_later_tokens_is_refused(student: HybridForCausalLM) -> None:
    """Kept heads would read them, and replaced heads would not."""
    ids = tokens(2, 7)
    close(logits(student, ids, is_causal=True), logits(student, ids))
    with pytest.raises(ValueError, match="is_causal"):
        student(ids, is_causal=False)
    student.config.is_causal = False
    with pytest.raises(ValueError, match="is_causal"):
        student(ids)


def test_rows_split_over_devices_are_refused() -> None:
    """Each device would begin its part of the row with empty states, and train on wrong gradients."""
    student = mixed_student(make_family_model("llama"))
    ids = tokens(1, 7)
    _attach_context_parallel_hooks(student)
    with pytest.raises(ValueError, match=naming("is_causal", "accelerate")):
        student(ids, use_cache=False)


def test_rows_that_deepspeed_splits_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ulysses puts a row together inside the attention function, where replaced heads do not look."""
    student = mixed_student(make_family_model("llama"))
    ids = tokens(1, 7)
    implementation = student.config._attn_implementation
    attend = ALL_ATTENTION_FUNCTIONS[implementation]

    # Stands for DeepSpeed's, which needs a process group of several devices.
    def wrapper(*inputs: Any, **options: Any) -> Any:
        return attend(*inputs, **options)

    wrapper.__module__ = UlyssesSPAttentionHF.__module__
    with monkeypatch.context() as patched:
        patched.setitem(ALL_ATTENTION_FUNCTIONS, implementation, wrapper)
        with pytest.raises(ValueError, match="Ulysses"):
            student(ids)
    student(ids)
