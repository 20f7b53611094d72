"""A prompt's state, used again: continuations of copies, and of what a file holds, against the run without a cache."""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from conftest import FAMILIES, make_family_model
from safetensors.torch import load_file, save_file
from students import HARD, keep, left_padded, logits, mixed_student, tokens
from torch import Tensor

from hybrid_distill.export.check import TOLERANCE
from hybrid_distill.model import HybridCache, HybridForCausalLM
from hybrid_distill.student.build import build_student

GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
RECURRENCES = ("discrete", "mamba2", "mamba2-stock", "gdn")
KINDS = (*RECURRENCES, "windows", "gdn and windows", "windows alone", "sliding")


def windowed(recurrence: str = "discrete", d_state: int = 5) -> HybridForCausalLM:
    """Windows shorter than the prompts; heads kept in some groups, none, and whole groups."""
    teacher = make_family_model("llama")
    plan = keep(teacher, (0, 5), (), (2, 3))
    options = {"window": 4, "sinks": 2, "d_state": d_state, "recurrence": recurrence}
    student, _ = build_student(teacher, plan, init="random", **options)
    return opened(student)


def opened(student: HybridForCausalLM) -> HybridForCausalLM:
    """Give the recurrent heads gates and taps that matter."""
    with torch.no_grad():
        for name, parameter in student.named_parameters():
            if ".ssm." in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return student.eval()


def student_of_kind(kind: str) -> HybridForCausalLM:
    """Make one of `KINDS`."""
    if kind in RECURRENCES:
        return mixed_student(make_family_model("llama"), kind)
    if kind == "sliding":
        return mixed_student(make_family_model("qwen2", **HARD["qwen2"]))
    if kind == "windows alone":
        return windowed(d_state=0)
    return windowed("gdn" if kind.startswith("gdn") else "discrete")


@pytest.fixture(params=KINDS)
def student(request: pytest.FixtureRequest) -> HybridForCausalLM:
    return student_of_kind(request.param)


@pytest.fixture
def llama_student() -> HybridForCausalLM:
    return mixed_student(make_family_model("llama"))


def same_logits(actual: Tensor, expected: Tensor) -> None:
    """Allow for another order of sums, as the gate of an export does."""
    error = (actual - expected).abs().max()
    assert error < TOLERANCE[torch.float32] * expected.abs().max()


def continued(student: Any, cache: HybridCache, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    return student.generate(ids, attention_mask=mask, cache=cache, **GREEDY)


def check_continuations(student: Any, cache: HybridCache, ids: Tensor, mask: Tensor) -> None:
    """Continue copies of a cache by texts of several lengths, logits and tokens."""
    for length in (1, 4):
        more = tokens(len(ids), length)
        whole = torch.cat([ids, more], dim=1)
        whole_mask = torch.cat([mask, torch.ones_like(more)], dim=1)
        positions = (whole_mask.cumsum(1) - 1).clamp_min(0)
        step = logits(
            student,
            more,
            attention_mask=whole_mask,
            position_ids=positions[:, -length:],
            cache=cache.copy(),
        )
        expected = logits(
            student, whole, attention_mask=whole_mask, position_ids=positions, use_cache=False
        )
        same_logits(step, expected[:, -length:])
        text = continued(student, cache.copy(), whole, whole_mask)
        assert torch.equal(text, student.generate(whole, attention_mask=whole_mask, **GREEDY))


@pytest.mark.parametrize("chunk_size", [None, 5, 1])
def test_copies_of_a_prefix_are_continued_as_the_whole_text(student, chunk_size) -> None:
    for ids, mask in (left_padded([tokens(13)]), left_padded([tokens(13), tokens(6)])):
        cache = student.prefill(ids, mask, chunk_size=chunk_size)
        check_continuations(student, cache, ids, mask)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_loaded_prefix_is_continued_in_every_family(family: str, tmp_path: Path) -> None:
    student = mixed_student(make_family_model(family, **HARD.get(family, {})))
    ids, mask = left_padded([tokens(13), tokens(6)])
    path = tmp_path / "prompt"
    student.prefill(ids, mask).save(path)
    check_continuations(student, student.load_cache(path, ids, mask), ids, mask)


def test_a_file_holds_every_tensor_bit_for_bit(student, tmp_path: Path) -> None:
    ids, mask = left_padded([tokens(13), tokens(6)])
    cache = student.prefill(ids, mask)
    cache.save(tmp_path / "prompt")
    loaded = student.load_cache(tmp_path / "prompt", ids, mask)
    for ours, theirs in zip(cache.layers, loaded.layers, strict=True):
        assert ours.get_seq_length() == theirs.get_seq_length() == 13
        assert ours.tensors().keys() == theirs.tensors().keys()
        for name, tensor in ours.tensors().items():
            assert torch.equal(tensor, theirs.tensors()[name])
    assert [path.name for path in tmp_path.iterdir()] == ["prompt"]
    check_continuations(student, loaded, ids, mask)


@torch.no_grad()
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float16])
def test_a_loaded_cache_goes_on_in_the_dtype_of_its_keys(llama_student, kv_dtype, tmp_path) -> None:
    ids, more = tokens(1, 9), tokens(1, 3)
    cache = llama_student.prefill(ids, cache=llama_student.new_cache(kv_dtype))
    cache.save(tmp_path / "prompt")
    loaded = llama_student.load_cache(tmp_path / "prompt", ids)
    assert torch.equal(
        logits(llama_student, more, cache=loaded), logits(llama_student, more, cache=cache)
    )
    assert loaded.layer(0).keys.dtype == kv_dtype


def test_prefill_goes_on_from_a_prefill(student) -> None:
    ids, mask = left_padded([tokens(13), tokens(6)])
    cache = student.prefill(ids[:, :8], mask[:, :8])
    cache = student.prefill(ids[:, 8:], cache=cache)
    check_continuations(student, cache, ids, mask)


def test_a_prefix_is_repeated_for_a_batch_of_continuations(student) -> None:
    prefix = tokens(1, 9)
    cache = student.prefill(prefix)
    ids = torch.cat([prefix.expand(3, -1), tokens(3, 4)], dim=1)
    batch = continued(student, cache.repeat(3), ids)
    for row, text in zip(ids, batch):
        assert torch.equal(student.generate(row[None], **GREEDY)[0], text)
    # The one that was repeated is as it was.
    assert torch.equal(continued(student, cache, ids[:1]), batch[:1])


def test_a_static_cache_is_filled_and_copied(student) -> None:
    ids = tokens(2, 9)
    cache = student.prefill(ids, cache=student.new_cache(max_length=24))
    whole = torch.cat([ids, tokens(2, 3)], dim=1)
    for _ in range(2):
        text = continued(student, cache.copy(), whole)
        assert torch.equal(text, student.generate(whole, **GREEDY))
    with pytest.raises(ValueError, match="static"):
        cache.save("never")


def test_sampling_from_a_prefix_draws_what_it_draws_without(llama_student) -> None:
    ids = tokens(1, 9)
    cache = llama_student.prefill(ids[:, :6])
    texts = []
    for given in (None, cache.copy()):
        torch.manual_seed(0)
        options = {**GREEDY, "do_sample": True, "cache": given}
        texts.append(llama_student.generate(ids, **options))
    assert torch.equal(*texts)


def test_the_state_of_something_else_is_refused(llama_student, tmp_path: Path) -> None:
    path = tmp_path / "prompt"
    ids, mask = left_padded([tokens(9), tokens(6)])
    llama_student.prefill(ids, mask).save(path)
    other = ids.clone()
    other[0, 3] += 1
    with pytest.raises(ValueError, match="another prompt"):
        llama_student.load_cache(path, other, mask)
    with pytest.raises(ValueError, match="another prompt"):
        llama_student.load_cache(path, ids)
    with pytest.raises(ValueError, match="another student"):
        mixed_student(make_family_model("llama"), "gdn").load_cache(path, ids, mask)
    with pytest.raises(ValueError, match="bfloat16"):
        llama_student.to(torch.bfloat16).load_cache(path, ids, mask)
    llama_student.to(torch.float32)
    with torch.no_grad():
        llama_student.recurrent_heads()[0].x_proj.weight[0, 0] += 1
    with pytest.raises(ValueError, match="another student"):
        llama_student.load_cache(path, ids, mask)


def test_an_embedding_that_alone_was_trained_makes_another_student(llama_student, tmp_path) -> None:
    ids = tokens(1, 9)
    path = tmp_path / "prompt"
    llama_student.prefill(ids).save(path)
    embedding = llama_student.get_input_embeddings().weight
    with torch.no_grad():
        embedding[ids[0, 4]] += 1
    with pytest.raises(ValueError, match="another student"):
        llama_student.load_cache(path, ids)


@pytest.mark.parametrize("part", ["", "model.layers.1"], ids=["whole", "one layer"])
def test_an_offloaded_student_reads_the_same_prefix(part: str, tmp_path: Path) -> None:
    student = windowed()
    ids = tokens(1, 9)
    student.prefill(ids).save(tmp_path / "prompt")
    more = tokens(1, 3)
    expected = logits(student, more, cache=student.prefill(ids))
    cpu_offload(student.get_submodule(part), execution_device=torch.device("cpu"))
    for cache in (student.prefill(ids), student.load_cache(tmp_path / "prompt", ids)):
        same_logits(logits(student, more, cache=cache), expected)


def test_a_quantized_student_reads_and_loads_a_prefix(llama_student, tmp_path: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(llama_student, quantization.Int8WeightOnlyConfig())
    ids = tokens(1, 9)
    cache = llama_student.prefill(ids)
    cache.save(tmp_path / "prompt")
    more = tokens(1, 3)
    loaded = llama_student.load_cache(tmp_path / "prompt", ids)
    step = logits(llama_student, more, cache=loaded)
    assert torch.equal(step, logits(llama_student, more, cache=cache))


def test_a_cache_that_goes_back_holds_the_prompt_of_then(llama_student, tmp_path: Path) -> None:
    ids = tokens(1, 9)
    cache = llama_student.new_cache()
    empty = cache.snapshot()
    llama_student.prefill(ids[:, :6], cache=cache)
    snapshot = cache.snapshot()
    llama_student.prefill(ids[:, 6:], cache=cache)
    cache.restore(snapshot)
    # Another continuation of the first six tokens.
    text = torch.cat([ids[:, :6], tokens(1, 5)], dim=1)
    assert torch.equal(
        continued(llama_student, cache.copy(), text), llama_student.generate(text, **GREEDY)
    )
    logits(llama_student, tokens(1, 3), cache=cache)
    with pytest.raises(ValueError, match="prefill"):
        cache.save(tmp_path / "prompt")
    cache.restore(empty)
    other = tokens(1, 4)
    llama_student.prefill(other, cache=cache)
    text = torch.cat([other, tokens(1, 1)], dim=1)
    assert torch.equal(
        continued(llama_student, cache, text), llama_student.generate(text, **GREEDY)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_of_inference_mode_is_continued_outside(kind: str) -> None:
    student = student_of_kind(kind)
    ids = tokens(1, 9)
    with torch.inference_mode():
        cache = student.prefill(ids)
    step = torch.cat([logits(student, ids[:, :1], cache=cache) for _ in range(2)], dim=1)
    whole = torch.cat([ids, ids[:, :1], ids[:, :1]], dim=1)
    same_logits(step, logits(student, whole, use_cache=False)[:, -2:])


@torch.no_grad()
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float16])
def test_a_cache_of_another_dtype_is_read_in_pieces(kv_dtype: torch.dtype) -> None:
    student = windowed(d_state=0).to(torch.bfloat16)
    ids = tokens(1, 9)
    cache = student.new_cache(kv_dtype)
    pieces = [logits(student, ids[:, start : start + 3], cache=cache) for start in (0, 3, 6)]
    # Sums of bfloat16 in another order.
    difference = torch.cat(pieces, dim=1) - logits(student, ids, use_cache=False)
    assert difference.abs().max() < 0.1


def test_a_damaged_file_is_refused(llama_student, tmp_path: Path) -> None:
    ids = tokens(1, 9)
    path = tmp_path / "prompt"
    llama_student.prefill(ids).save(path)
    content = path.read_bytes()
    flipped = bytearray(content)
    flipped[-5] ^= 1
    torch_file = tmp_path / "torch"
    torch.save({"0.keys": torch.zeros(3)}, torch_file)
    save_file(load_file(path), tmp_path / "tensors")
    for damaged in (
        flipped,
        content[: len(content) // 2],
        b"",
        torch_file.read_bytes(),
        (tmp_path / "tensors").read_bytes(),
    ):
        path.write_bytes(damaged)
        with pytest.raises(ValueError):
            llama_student.load_cache(path, ids)
    with pytest.raises(ValueError):
        llama_student.load_cache(tmp_path / "nothing", ids)


def test_only_what_prefill_has_read_is_saved(llama_student, tmp_path: Path) -> None:
    ids = tokens(2, 9)
    generated = llama_student.prefill(ids)
    continued(llama_student, generated, torch.cat([ids, tokens(2, 1)], dim=1))
    forwarded = llama_student.new_cache()
    logits(llama_student, ids, cache=forwarded)
    selected = llama_student.prefill(ids)
    selected.batch_select_indices(torch.tensor([1]))
    for cache in (generated, forwarded, selected):
        with pytest.raises(ValueError, match="prefill"):
            cache.save(tmp_path / "prompt")
    assert not list(tmp_path.iterdir())


def test_a_repeated_prefix_is_saved_and_checked_as_any(llama_student, tmp_path: Path) -> None:
    ids, mask = left_padded([tokens(9), tokens(6)])
    cache = llama_student.prefill(ids, mask).repeat(2)
    cache.save(tmp_path / "repeated")
    ids, mask = ids.repeat_interleave(2, dim=0), mask.repeat_interleave(2, dim=0)
    loaded = llama_student.load_cache(tmp_path / "repeated", ids, mask)
    longer = torch.cat([ids, tokens(4, 2)], dim=1)
    longer_mask = torch.cat([mask, torch.ones(4, 2, dtype=torch.long)], dim=1)
    expected = llama_student.generate(longer, attention_mask=longer_mask, **GREEDY)
    assert torch.equal(continued(llama_student, loaded, longer, longer_mask), expected)
    other = longer.clone()
    other[3, 5] += 1
    with pytest.raises(ValueError, match="does not begin"):
        continued(llama_student, cache, other, longer_mask)


def test_generate_refuses_another_text_than_the_prefix(llama_student) -> None:
    ids = tokens(2, 9)
    cache = llama_student.prefill(ids)
    other = torch.cat([ids, ids[:, :2]], dim=1)
    other[1, 4] += 1
    for wrong in (other, ids, torch.cat([ids, ids], dim=1)[:1]):
        with pytest.raises(ValueError):
            continued(llama_student, cache, wrong)
    assert cache.get_seq_length() == 9


def embedded(student: Any, ids: Tensor, cache: HybridCache, **options: Any) -> Tensor:
    """Return what `generate` appends to the embeddings of tokens."""
    prompt = student.get_input_embeddings()(ids)
    return student.generate(inputs_embeds=prompt, cache=cache, **GREEDY, **options)


def test_embeddings_go_on_from_a_prefix_as_tokens_do(student) -> None:
    """Padded rows; and a row without a mask."""
    ids, mask = left_padded([tokens(13), tokens(9)])
    cache = student.prefill(ids[:, :8], attention_mask=mask[:, :8])
    text = student.generate(ids, attention_mask=mask, **GREEDY)[:, 13:]
    assert torch.equal(embedded(student, ids, cache, attention_mask=mask), text)
    cache = student.prefill(ids[:1, :8])
    assert torch.equal(embedded(student, ids[:1], cache), text[:1])


def test_generate_refuses_other_embeddings_than_the_prefix(llama_student) -> None:
    ids, mask = left_padded([tokens(9), tokens(7)])
    cache = llama_student.prefill(ids[:, :8], attention_mask=mask[:, :8])
    with pytest.raises(ValueError, match="does not begin"):
        embedded(llama_student, ids.flip(1), cache, attention_mask=mask)
    with pytest.raises(ValueError, match="does not begin"):
        embedded(llama_student, ids, cache, attention_mask=torch.ones_like(mask))
    with pytest.raises(ValueError, match="does not begin"):
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
    with pytest.raises(ValueError, match="pass the tokens of the cache"):
        embedded(llama_student, ids[:, n_past:], cache, attention_mask=torch.ones_like(ids))


def test_generate_refuses_another_padding_than_the_prefix(llama_student) -> None:
    ids, mask = left_padded([tokens(9), tokens(6)])
    longer = torch.cat([ids, tokens(2, 1)], dim=1)
    for wrong in (torch.ones_like(longer), None):
        cache = llama_student.prefill(ids, mask)
        with pytest.raises(ValueError, match="attention_mask"):
            llama_student.generate(longer, attention_mask=wrong, cache=cache, **GREEDY)


def test_generate_refuses_the_prefix_of_another_student(llama_student) -> None:
    ids = tokens(1, 9)
    longer = torch.cat([ids, tokens(1, 2)], dim=1)
    cache = llama_student.prefill(ids)
    with torch.no_grad():
        llama_student.recurrent_heads()[0].x_proj.weight[0, 0] += 1
    with pytest.raises(ValueError, match="another student"):
        continued(llama_student, cache, longer)


def test_a_prefix_belongs_to_the_adapters_that_were_on(llama_student, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["down_proj"], r=2, init_lora_weights=False)
    adapted = peft.get_peft_model(llama_student, config)
    ids = tokens(1, 9)
    longer = torch.cat([ids, tokens(1, 2)], dim=1)
    cache = llama_student.prefill(ids)
    cache.save(tmp_path / "prompt")
    expected = llama_student.generate(longer, **GREEDY)
    assert torch.equal(continued(llama_student, cache.copy(), longer), expected)
    with adapted.disable_adapter():
        with pytest.raises(ValueError, match="another student"):
            llama_student.load_cache(tmp_path / "prompt", ids)
        with pytest.raises(ValueError, match="another student"):
            continued(llama_student, cache, longer)


def test_prefill_refuses_what_does_not_fit(llama_student) -> None:
    ids = tokens(2, 9)
    cache = llama_student.new_cache()
    logits(llama_student, ids, cache=cache)
    for wrong in (
        {"attention_mask": torch.ones(2, 5)},
        {"chunk_size": 0},
        {"cache": cache},
        {"cache": llama_student.prefill(ids[:1])},
    ):
        with pytest.raises(ValueError):
            llama_student.prefill(ids, **wrong)
    with pytest.raises(ValueError):
        cache.repeat(0)


def test_a_cache_with_gradients_is_not_copied(llama_student) -> None:
    cache = llama_student.new_cache()
    llama_student(tokens(1, 5), cache=cache)
    for copied in (cache.copy, lambda: cache.repeat(2)):
        with pytest.raises(ValueError, match="no_grad"):
            copied()


def test_a_static_cache_that_is_too_short_is_refused(llama_student) -> None:
    ids = tokens(1, 9)
    cache = llama_student.new_cache(max_length=10)
    with pytest.raises(ValueError, match="holds 10 tokens"):
        continued(llama_student, cache, ids)
    assert cache.get_seq_length() == 0
