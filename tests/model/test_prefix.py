"""A prompt's state, used again: continuations of copies, and of what a file holds, against the run
without a cache."""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from conftest import FAMILIES, make_family_model
from kinds import KINDS, short_windows, student_of_kind
from messages import naming
from safetensors.torch import load_file, save_file
from students import (
    HARD,
    left_padded,
    logits,
    logits_in_pieces,
    mixed_student,
    positions_of,
    same_logits,
    tokens,
)
from torch import Tensor

from hybrid_distill.model import HybridCache, HybridForCausalLM

GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}


@pytest.fixture(params=KINDS)
def student(request: pytest.FixtureRequest) -> HybridForCausalLM:
    return student_of_kind(request.param)


@pytest.fixture
def llama_student() -> HybridForCausalLM:
    return mixed_student(make_family_model("llama"))


def followed_by(ids: Tensor, n_tokens: int) -> Tensor:
    """Append random tokens to each row."""
    return torch.cat([ids, tokens(len(ids), n_tokens)], dim=1)


def mask_for(ids: Tensor, mask: Tensor) -> Tensor:
    """Extend a mask over the tokens that were appended."""
    n_new = ids.shape[1] - mask.shape[1]
    return torch.cat([mask, mask.new_ones(len(ids), n_new)], dim=1)


def continued(student: Any, cache: HybridCache, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    return student.generate(ids, attention_mask=mask, cache=cache, **GREEDY)


def train_one_weight(student: HybridForCausalLM) -> None:
    """Make it another student by one element."""
    with torch.no_grad():
        student.recurrent_heads()[0].x_proj.weight[0, 0] += 1


def check_continuations(student: Any, cache: HybridCache, ids: Tensor, mask: Tensor) -> None:
    """Continue copies of a cache by texts of several lengths, logits and tokens."""
    for length in (1, 4):
        whole = followed_by(ids, length)
        whole_mask = mask_for(whole, mask)
        positions = positions_of(whole_mask)

        expected = logits(
            student, whole, attention_mask=whole_mask, position_ids=positions, use_cache=False
        )
        step = logits(
            student,
            whole[:, -length:],
            attention_mask=whole_mask,
            position_ids=positions[:, -length:],
            cache=cache.copy(),
        )
        same_logits(step, expected[:, -length:])

        text = student.generate(whole, attention_mask=whole_mask, **GREEDY)
        assert torch.equal(continued(student, cache.copy(), whole, whole_mask), text)


def test_a_prefix_that_ends_in_a_piece_of_one_token_is_saved(student, tmp_path: Path) -> None:
    ids = tokens(2, 9)
    in_pieces = student.prefill(ids, chunk_size=4)
    extended = student.prefill(ids[:, 8:], cache=student.prefill(ids[:, :8]))
    for number, cache in enumerate((in_pieces, extended)):
        cache.save(tmp_path / str(number))
        check_continuations(
            student, student.load_cache(tmp_path / str(number), ids), ids, torch.ones_like(ids)
        )


# Copies


@pytest.mark.parametrize("chunk_size", [None, 5, 1])
def test_copies_of_a_prefix_are_continued_as_the_whole_text(student, chunk_size) -> None:
    for ids, mask in (left_padded([tokens(13)]), left_padded([tokens(13), tokens(6)])):
        cache = student.prefill(ids, mask, chunk_size=chunk_size)
        check_continuations(student, cache, ids, mask)


def test_prefill_goes_on_from_a_prefill(student) -> None:
    ids, mask = left_padded([tokens(13), tokens(6)])
    cache = student.prefill(ids[:, :8], mask[:, :8])
    cache = student.prefill(ids[:, 8:], cache=cache)
    check_continuations(student, cache, ids, mask)


def test_a_prefix_is_repeated_for_a_batch_of_continuations(student) -> None:
    prefix = tokens(1, 9)
    cache = student.prefill(prefix)
    ids = followed_by(prefix.expand(3, -1), 4)

    batch = continued(student, cache.repeat(3), ids)
    for row, text in zip(ids, batch):
        assert torch.equal(student.generate(row[None], **GREEDY)[0], text)
    # The one that was repeated is as it was.
    assert torch.equal(continued(student, cache, ids[:1]), batch[:1])


def test_a_static_cache_is_filled_and_copied(student) -> None:
    ids = tokens(2, 9)
    cache = student.prefill(ids, cache=student.new_cache(max_length=24))
    whole = followed_by(ids, 3)
    text = student.generate(whole, **GREEDY)
    for _ in range(2):
        assert torch.equal(continued(student, cache.copy(), whole), text)
    with pytest.raises(ValueError, match=naming("max_length")):
        cache.save("never")


def test_sampling_from_a_prefix_draws_what_it_draws_without(llama_student) -> None:
    ids = tokens(1, 9)
    prefix = llama_student.prefill(ids[:, :6])
    texts = []
    for cache in (None, prefix.copy()):
        torch.manual_seed(0)
        options = {**GREEDY, "do_sample": True}
        texts.append(llama_student.generate(ids, cache=cache, **options))
    assert torch.equal(*texts)


def test_a_cache_that_goes_back_holds_the_prompt_of_then(llama_student, tmp_path: Path) -> None:
    ids = tokens(1, 9)
    cache = llama_student.new_cache()
    empty = cache.snapshot()
    llama_student.prefill(ids[:, :6], cache=cache)
    of_six_tokens = cache.snapshot()
    llama_student.prefill(ids[:, 6:], cache=cache)

    cache.restore(of_six_tokens)
    text = followed_by(ids[:, :6], 5)
    expected = llama_student.generate(text, **GREEDY)
    assert torch.equal(continued(llama_student, cache.copy(), text), expected)
    # A forward pass notes no tokens.
    logits(llama_student, tokens(1, 3), cache=cache)
    with pytest.raises(ValueError, match="prefill"):
        cache.save(tmp_path / "saved")

    cache.restore(empty)
    other = tokens(1, 4)
    llama_student.prefill(other, cache=cache)
    text = followed_by(other, 1)
    expected = llama_student.generate(text, **GREEDY)
    assert torch.equal(continued(llama_student, cache, text), expected)


def test_a_cache_of_inference_mode_is_continued_outside(student) -> None:
    ids = tokens(1, 9)
    with torch.inference_mode():
        cache = student.prefill(ids)
    following = ids[:, :1]
    first = logits(student, following, cache=cache)
    second = logits(student, following, cache=cache)
    whole = torch.cat([ids, following, following], dim=1)
    expected = logits(student, whole, use_cache=False)
    same_logits(torch.cat([first, second], dim=1), expected[:, -2:])


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float16])
def test_a_cache_of_another_dtype_is_read_in_pieces(kv_dtype: torch.dtype) -> None:
    student = short_windows(d_state=0).to(torch.bfloat16)
    ids = tokens(1, 9)
    in_pieces = logits_in_pieces(student, ids, (3, 3, 3), cache=student.new_cache(kv_dtype))
    # Sums of bfloat16 in another order.
    difference = in_pieces - logits(student, ids, use_cache=False)
    assert difference.abs().max() < 0.1


def test_prefill_refuses_what_does_not_fit(llama_student) -> None:
    ids = tokens(2, 9)
    filled = llama_student.new_cache()
    logits(llama_student, ids, cache=filled)
    for wrong in (
        {"attention_mask": torch.ones(2, 5)},
        {"chunk_size": 0},
        {"cache": filled},
        {"cache": llama_student.prefill(ids[:1])},
    ):
        with pytest.raises(ValueError):
            llama_student.prefill(ids, **wrong)
    with pytest.raises(ValueError):
        filled.repeat(0)


def test_a_cache_with_gradients_is_not_copied(llama_student) -> None:
    cache = llama_student.new_cache()
    llama_student(tokens(1, 5), cache=cache)
    for copied in (cache.copy, lambda: cache.repeat(2)):
        with pytest.raises(ValueError, match="no_grad"):
            copied()


# Files


@pytest.mark.parametrize("family", FAMILIES)
def test_a_loaded_prefix_is_continued_in_every_family(family: str, tmp_path: Path) -> None:
    student = mixed_student(make_family_model(family, **HARD.get(family, {})))
    ids, mask = left_padded([tokens(13), tokens(6)])
    path = tmp_path / "saved"
    student.prefill(ids, mask).save(path)
    check_continuations(student, student.load_cache(path, ids, mask), ids, mask)


def test_a_file_holds_every_tensor_bit_for_bit(student, tmp_path: Path) -> None:
    ids, mask = left_padded([tokens(13), tokens(6)])
    cache = student.prefill(ids, mask)
    cache.save(tmp_path / "saved")
    loaded = student.load_cache(tmp_path / "saved", ids, mask)
    for ours, theirs in zip(cache.layers, loaded.layers, strict=True):
        assert ours.get_seq_length() == theirs.get_seq_length() == 13
        assert ours.tensors().keys() == theirs.tensors().keys()
        for name, tensor in ours.tensors().items():
            assert torch.equal(tensor, theirs.tensors()[name])
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    check_continuations(student, loaded, ids, mask)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float16])
def test_a_loaded_cache_goes_on_in_the_dtype_of_its_keys(llama_student, kv_dtype, tmp_path) -> None:
    ids = tokens(1, 9)
    more = tokens(1, 3)
    cache = llama_student.prefill(ids, cache=llama_student.new_cache(kv_dtype))
    cache.save(tmp_path / "saved")
    loaded = llama_student.load_cache(tmp_path / "saved", ids)
    expected = logits(llama_student, more, cache=cache)
    assert torch.equal(logits(llama_student, more, cache=loaded), expected)
    assert loaded.layer(0).keys.dtype == kv_dtype


@pytest.mark.parametrize("part", ["", "model.layers.1"], ids=["whole", "one layer"])
def test_an_offloaded_student_reads_the_same_prefix(part: str, tmp_path: Path) -> None:
    student = short_windows()
    ids = tokens(1, 9)
    more = tokens(1, 3)
    student.prefill(ids).save(tmp_path / "saved")
    expected = logits(student, more, cache=student.prefill(ids))

    cpu_offload(student.get_submodule(part), execution_device=torch.device("cpu"))
    for cache in (student.prefill(ids), student.load_cache(tmp_path / "saved", ids)):
        same_logits(logits(student, more, cache=cache), expected)


def test_a_quantized_student_reads_and_loads_a_prefix(llama_student, tmp_path: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(llama_student, quantization.Int8WeightOnlyConfig())
    ids = tokens(1, 9)
    more = tokens(1, 3)
    cache = llama_student.prefill(ids)
    cache.save(tmp_path / "saved")
    loaded = llama_student.load_cache(tmp_path / "saved", ids)
    expected = logits(llama_student, more, cache=cache)
    assert torch.equal(logits(llama_student, more, cache=loaded), expected)


def test_the_state_of_another_prompt_is_refused(llama_student, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    ids, mask = left_padded([tokens(9), tokens(6)])
    llama_student.prefill(ids, mask).save(path)
    other = ids.clone()
    other[0, 3] += 1
    with pytest.raises(ValueError, match=naming("prompt")):
        llama_student.load_cache(path, other, mask)
    with pytest.raises(ValueError, match=naming("prompt")):
        llama_student.load_cache(path, ids)


def test_the_state_of_another_student_is_refused(llama_student, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    ids, mask = left_padded([tokens(9), tokens(6)])
    llama_student.prefill(ids, mask).save(path)
    with pytest.raises(ValueError, match=naming("student")):
        mixed_student(make_family_model("llama"), "gdn").load_cache(path, ids, mask)
    with pytest.raises(ValueError, match="bfloat16"):
        llama_student.to(torch.bfloat16).load_cache(path, ids, mask)
    llama_student.to(torch.float32)
    train_one_weight(llama_student)
    with pytest.raises(ValueError, match=naming("student")):
        llama_student.load_cache(path, ids, mask)


def test_an_embedding_that_alone_was_trained_makes_another_student(llama_student, tmp_path) -> None:
    ids = tokens(1, 9)
    path = tmp_path / "saved"
    llama_student.prefill(ids).save(path)
    embedding = llama_student.get_input_embeddings().weight
    with torch.no_grad():
        embedding[ids[0, 4]] += 1
    with pytest.raises(ValueError, match=naming("student")):
        llama_student.load_cache(path, ids)


def test_a_damaged_file_is_refused(llama_student, tmp_path: Path) -> None:
    ids = tokens(1, 9)
    path = tmp_path / "saved"
    llama_student.prefill(ids).save(path)
    content = path.read_bytes()
    flipped = bytearray(content)
    flipped[-5] ^= 1
    half = content[: len(content) // 2]
    torch_file = tmp_path / "torch"
    torch.save({"0.keys": torch.zeros(3)}, torch_file)
    # Without the header that says what they are.
    tensors_alone = tmp_path / "tensors"
    save_file(load_file(path), tensors_alone)

    for damaged in (flipped, half, b"", torch_file.read_bytes(), tensors_alone.read_bytes()):
        path.write_bytes(damaged)
        with pytest.raises(ValueError):
            llama_student.load_cache(path, ids)
    with pytest.raises(ValueError):
        llama_student.load_cache(tmp_path / "nothing", ids)


def test_only_what_prefill_has_read_is_saved(llama_student, tmp_path: Path) -> None:
    ids = tokens(2, 9)
    generated = llama_student.prefill(ids)
    continued(llama_student, generated, followed_by(ids, 1))
    forwarded = llama_student.new_cache()
    logits(llama_student, ids, cache=forwarded)
    selected = llama_student.prefill(ids)
    selected.batch_select_indices(torch.tensor([1]))
    for cache in (generated, forwarded, selected):
        with pytest.raises(ValueError, match="prefill"):
            cache.save(tmp_path / "saved")
    assert not list(tmp_path.iterdir())


def test_a_repeated_prefix_is_saved_and_checked_as_any(llama_student, tmp_path: Path) -> None:
    ids, mask = left_padded([tokens(9), tokens(6)])
    cache = llama_student.prefill(ids, mask).repeat(2)
    cache.save(tmp_path / "repeated")
    ids = ids.repeat_interleave(2, dim=0)
    mask = mask.repeat_interleave(2, dim=0)
    longer = followed_by(ids, 2)
    longer_mask = mask_for(longer, mask)

    loaded = llama_student.load_cache(tmp_path / "repeated", ids, mask)
    expected = llama_student.generate(longer, attention_mask=longer_mask, **GREEDY)
    assert torch.equal(continued(llama_student, loaded, longer, longer_mask), expected)

    other = longer.clone()
    other[3, 5] += 1
    with pytest.raises(ValueError, match=naming("cache.repeat")):
        continued(llama_student, cache, other, longer_mask)


# What `generate` accepts after a prefix


def test_generate_refuses_another_text_than_the_prefix(llama_student) -> None:
    ids = tokens(2, 9)
    cache = llama_student.prefill(ids)
    other = torch.cat([ids, ids[:, :2]], dim=1)
    other[1, 4] += 1
    nothing_new = ids
    fewer_rows = torch.cat([ids, ids], dim=1)[:1]
    for wrong in (other, nothing_new, fewer_rows):
        with pytest.raises(ValueError):
            continued(llama_student, cache, wrong)
    assert cache.get_seq_length() == 9


def embedded(student: Any, ids: Tensor, cache: HybridCache, **options: Any) -> Tensor:
    """Return what `generate` appends to the embeddings of tokens."""
    prompt = student.get_input_embeddings()(ids)
    return student.generate(inputs_embeds=prompt, cache=cache, **GREEDY, **options)


def test_embeddings_go_on_from_a_prefix_as_tokens_do(student) -> None:
    """Padded rows; and a row without a mask."""
    length = 13
    ids, mask = left_padded([tokens(length), tokens(9)])
    new_tokens = student.generate(ids, attention_mask=mask, **GREEDY)[:, length:]
    cache = student.prefill(ids[:, :8], attention_mask=mask[:, :8])
    assert torch.equal(embedded(student, ids, cache, attention_mask=mask), new_tokens)
    cache = student.prefill(ids[:1, :8])
    assert torch.equal(embedded(student, ids[:1], cache), new_tokens[:1])


def test_generate_refuses_other_embeddings_than_the_prefix(llama_student) -> None:
    ids, mask = left_padded([tokens(9), tokens(7)])
    cache = llama_student.prefill(ids[:, :8], attention_mask=mask[:, :8])
    with pytest.raises(ValueError, match=naming("cache.repeat")):
        embedded(llama_student, ids.flip(1), cache, attention_mask=mask)
    with pytest.raises(ValueError, match=naming("cache.repeat")):
        embedded(llama_student, ids, cache, attention_mask=torch.ones_like(mask))
    with pytest.raises(ValueError, match=naming("cache.repeat")):
        embedded(llama_student, ids[:1], cache, attention_mask=mask[:1])
    # What stands at padding does not matter.
    ids[1, 0] = 1
    embedded(llama_student, ids, cache, attention_mask=mask)


@pytest.mark.parametrize("n_past", [3, 8])
def test_embeddings_of_the_new_tokens_alone_are_refused(llama_student, n_past: int) -> None:
    """transformers would cut off as many of them as the cache holds, or all."""
    ids = tokens(1, 12)
    cache = llama_student.new_cache()
    logits(llama_student, ids[:, :n_past], cache=cache)
    with pytest.raises(ValueError, match=naming(n_past, 12 - n_past)):
        embedded(llama_student, ids[:, n_past:], cache, attention_mask=torch.ones_like(ids))


def test_generate_refuses_another_padding_than_the_prefix(llama_student) -> None:
    ids, mask = left_padded([tokens(9), tokens(6)])
    longer = followed_by(ids, 1)
    for wrong in (torch.ones_like(longer), None):
        cache = llama_student.prefill(ids, mask)
        with pytest.raises(ValueError, match="attention_mask"):
            llama_student.generate(longer, attention_mask=wrong, cache=cache, **GREEDY)


def test_generate_refuses_the_prefix_of_another_student(llama_student) -> None:
    ids = tokens(1, 9)
    longer = followed_by(ids, 2)
    cache = llama_student.prefill(ids)
    train_one_weight(llama_student)
    with pytest.raises(ValueError, match=naming("student")):
        continued(llama_student, cache, longer)


def test_settings_of_generation_do_not_make_another_student(llama_student) -> None:
    ids = tokens(1, 9)
    longer = followed_by(ids, 2)
    cache = llama_student.prefill(ids)
    expected = continued(llama_student, cache.copy(), longer)
    llama_student.config.pad_token_id = 5
    llama_student.config.use_cache = False
    assert torch.equal(continued(llama_student, cache, longer), expected)


def test_a_prefix_belongs_to_the_adapters_that_were_on(llama_student, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["down_proj"], r=2, init_lora_weights=False)
    adapted = peft.get_peft_model(llama_student, config)
    ids = tokens(1, 9)
    longer = followed_by(ids, 2)
    cache = llama_student.prefill(ids)
    cache.save(tmp_path / "saved")

    expected = llama_student.generate(longer, **GREEDY)
    assert torch.equal(continued(llama_student, cache.copy(), longer), expected)
    with adapted.disable_adapter():
        with pytest.raises(ValueError, match=naming("student")):
            llama_student.load_cache(tmp_path / "saved", ids)
        with pytest.raises(ValueError, match=naming("student")):
            continued(llama_student, cache, longer)


def test_a_static_cache_that_is_too_short_is_refused(llama_student) -> None:
    ids = tokens(1, 9)
    cache = llama_student.new_cache(max_length=10)
    with pytest.raises(ValueError, match=naming(10, "max_length")):
        continued(llama_student, cache, ids)
    with pytest.raises(ValueError, match=naming(10, 11, "max_length")):
        llama_student.prefill(tokens(1, 11), cache=cache, chunk_size=4)
    assert cache.get_seq_length() == 0
