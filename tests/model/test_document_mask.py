"""Packed rows without a mask of all pairs: FlashAttention for documents, FlexAttention, the mask.

FlashAttention needs a GPU: `flash` computes what its documentation says, document by document.
"""

import inspect
import re
import threading
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import make_family_model
from memory_use import allocations
from students import mixed_student
from torch import Tensor
from torch.nn.attention import flex_attention
from training import small_config, small_models
from transformers import PretrainedConfig, PreTrainedModel

from hybrid_distill.data import Batch, cu_seqlens, pick_rows
from hybrid_distill.model import (
    HybridForCausalLM,
    document_kernels,
    documents,
    packed_inputs,
)
from hybrid_distill.model.document_mask import DocumentMask
from hybrid_distill.student.dtypes import cast_weights
from hybrid_distill.train.grouped import grouped_attention
from hybrid_distill.train.stages import make_stage

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 4},
    "olmo3": {"sliding_window": 4},
    "llama4": {"attention_chunk_size": 5},
}
LENGTH = 150
MANY = 8192


def flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    **options: Any,
) -> Tensor:
    """Attend as flash_attn_varlen_func: [tokens, heads, head dim], 16 bits, int32 borders."""
    borders = cu_seqlens_q.tolist()
    assert q.dtype == k.dtype == v.dtype
    assert q.dtype in (torch.float16, torch.bfloat16)
    assert cu_seqlens_q is cu_seqlens_k
    assert cu_seqlens_q.dtype == torch.int32
    assert cu_seqlens_q.ndim == 1
    assert borders[0] == 0
    assert borders[-1] == len(q) == len(k)
    assert max_seqlen_q == max_seqlen_k
    assert causal
    assert not dropout_p
    assert window_size[1] in (-1, 0)
    attended = []
    for begin, end in pairwise(borders):
        length = end - begin
        assert 0 <= length <= max_seqlen_q
        heads = [t[begin:end].transpose(0, 1) for t in (q, k, v)]
        seen: dict[str, Any] = {"is_causal": True}
        if window_size[0] >= 0:
            place = torch.arange(length)
            distance = place[:, None] - place
            seen = {"attn_mask": (distance >= 0) & (distance <= window_size[0])}
        document = F.scaled_dot_product_attention(
            *heads, scale=softmax_scale, enable_gqa=True, **seen
        )
        attended.append(document.transpose(0, 1))
    return torch.cat(attended)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """``as_on_a_gpu(function)``: packed rows run it from now on; None is FlexAttention."""

    def choose(function: Any) -> None:
        monkeypatch.setattr(documents, "has_document_attention", lambda device: True)
        monkeypatch.setattr(document_kernels, "flash_function", lambda: function)

    return choose


@pytest.fixture
def flex_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run FlexAttention's own definition; it refuses only at its border to train on a CPU."""
    plain = flex_attention.flex_attention
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *args: None)
    monkeypatch.setattr(document_kernels, "compiled_flex_attention", lambda: plain)


def packed_rows(length: int = LENGTH, mean: int = 20) -> Batch:
    """Two rows of random documents, with other borders in each."""
    generator = torch.Generator().manual_seed(0)
    is_border = torch.rand(2, length, generator=generator) < 1 / mean
    seq_idx = is_border.long().cumsum(1)
    seq_idx = seq_idx - seq_idx[:, :1]
    n_documents = int(seq_idx.max()) + 1
    ids = torch.randint(2, 99, seq_idx.shape, generator=generator)
    return {
        "input_ids": ids,
        "seq_idx": seq_idx,
        "mask": torch.ones_like(ids, dtype=torch.bool),
        "lengths": torch.stack([row.bincount(minlength=n_documents) for row in seq_idx]),
    }


def teacher_config() -> PretrainedConfig:
    _, teacher = small_models()
    return teacher.config


def logits(model: PreTrainedModel, batch: Batch, borders: Tensor | None = None) -> Tensor:
    ids = batch["input_ids"]
    seq_idx = batch["seq_idx"]
    if isinstance(model, HybridForCausalLM):
        return model(ids, seq_idx=seq_idx, cu_seq_lens_q=borders).logits
    packed = packed_inputs(seq_idx, model.dtype, model.config, cu_seqlens=borders)
    return model(ids, use_cache=False, **packed).logits


def masks_of_rows(seq_idx: Tensor, **options: Any) -> dict[str, Any]:
    """Return masks by the kind of layer that reads them, of which most families have one."""
    masks = packed_inputs(seq_idx, **options)["attention_mask"]
    return masks if isinstance(masks, dict) else {"all": masks}


def close(output: Tensor, expected: Tensor, tolerance: float = 1e-3) -> None:
    """Hold the mean error to a share, ``tolerance``, of the mean size."""
    error = (output.float() - expected.float()).abs().mean()
    assert error < tolerance * expected.float().abs().mean()


@torch.no_grad()
@pytest.mark.usefixtures("flex_is_not_compiled")
@pytest.mark.parametrize("kernel", [flash, None], ids=["flash", "flex"])
@pytest.mark.parametrize("family", FAMILIES)
def test_documents_and_windows_without_their_mask(family, kernel, as_on_a_gpu):
    """In each kind of layer the same attention; in teacher and student the same logits."""
    batch = packed_rows()
    # FlexAttention that is not compiled rounds every step to 16 bits.
    dtype = torch.float32 if kernel is None else torch.bfloat16
    teacher = make_family_model(family, **FAMILIES[family], head_dim=16)
    cast_weights(teacher, dtype)
    models = [teacher, mixed_student(teacher).to(dtype)]
    q, k, v = torch.randn(3, 2, 4, LENGTH, 16).to(dtype)

    def attend(mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3)

    expected = [logits(model, batch) for model in models]
    plain = masks_of_rows(batch["seq_idx"], config=teacher.config)
    as_on_a_gpu(kernel)
    for borders in (None, cu_seqlens(batch)):
        masks = masks_of_rows(batch["seq_idx"], config=teacher.config, cu_seqlens=borders)
        for kind, mask in masks.items():
            assert isinstance(mask, DocumentMask)
            assert torch.equal(mask + 0, plain[kind] + 0)
            close(attend(mask), attend(plain[kind]))
        for model, logits_BLV in zip(models, expected):
            # Three layers have rounded.
            close(logits(model, batch, borders), logits_BLV, 2e-2)


@pytest.mark.parametrize("settings", [{"target": "layer", "train": "mixer"}, {"name": "distill"}])
def test_a_stage_trains_the_same_without_the_mask(settings, as_on_a_gpu):
    """Kept heads too; the borders come with the batch, so that the host does not wait for them.

    In groups, no key is repeated for the teacher's heads: four read two.
    """
    batch = packed_rows()
    n_heads: list[tuple[int, int]] = []

    def counting(q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> Tensor:
        n_heads.append((q.shape[1], k.shape[1]))
        return flash(q, k, v, *args, **options)

    def step() -> tuple[float, Tensor]:
        config = small_config(**settings, precision="bf16")
        stage = make_stage(config, *small_models()).train()
        loss = stage(batch).total
        loss.backward()
        gradients = [p.grad.flatten() for p in stage.parameters() if p.grad is not None]
        return loss.item(), torch.cat(gradients)

    loss, gradient = step()
    as_on_a_gpu(counting)
    repeated = step()
    assert n_heads.count((4, 4)) == 2, "both layers of the teacher repeat keys"
    n_heads.clear()
    with grouped_attention():
        grouped = step()
    assert n_heads.count((4, 2)) == 2, "both layers of the teacher do not"
    for loss_without_mask, gradient_without_mask in (repeated, grouped):
        assert loss_without_mask == pytest.approx(loss, rel=1e-3)
        close(gradient_without_mask, gradient, 3e-2)


def test_a_row_of_8192_tokens_costs_no_mask(as_on_a_gpu):
    """Bytes at the fullest of a step that trains kept heads: a mask has a byte for each pair."""
    batch = pick_rows(packed_rows(MANY, mean=250), slice(1))
    config = small_config(target="layer", train="mixer", precision="bf16")
    stage = make_stage(config, *small_models(num_hidden_layers=1)).train()

    def peak() -> int:
        _, most_bytes = allocations(lambda: stage(batch).total.backward())
        return most_bytes

    with_mask = peak()
    as_on_a_gpu(flash)
    without = peak()
    bytes_of_mask = MANY**2
    assert without < bytes_of_mask < with_mask - without


# FlexAttention: its masks of blocks, its values and its compilation


BLOCK = document_kernels.FLEX_BLOCK
REACHES: dict[str, tuple[str, dict[str, Any]]] = {
    "documents": ("llama", {}),
    "short windows": ("mistral", {"sliding_window": 40}),
    "long windows": ("mistral", {"sliding_window": 300}),
    "chunks": ("llama4", {"attention_chunk_size": 200}),
}


def masks_of(
    reach: str, length: int, mean: int, as_on_a_gpu: Callable[[Any], None]
) -> list[tuple[DocumentMask, Tensor]]:
    """Return each kind of mask of two rows, with its numbers [2, 1, L, L]."""
    family, settings = REACHES[reach]
    config = make_family_model(family, **settings).config
    seq_idx = packed_rows(length, mean)["seq_idx"]
    numbers = masks_of_rows(seq_idx, config=config)
    as_on_a_gpu(None)
    masks = masks_of_rows(seq_idx, config=config)
    return [(mask, numbers[kind]) for kind, mask in masks.items()]


WITH_WHOLE_BLOCKS = [("documents", 1000), ("long windows", 1024), ("documents", 257)]


def blocks_of(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Mark the blocks of a mask in which some pair is seen, and those that are seen whole."""
    length = numbers.shape[-1]
    beyond = -length % BLOCK
    padded = F.pad(numbers[:, 0], (0, beyond, 0, beyond))
    by_block = padded.unflatten(2, (-1, BLOCK)).unflatten(1, (-1, BLOCK))
    # Queries beyond the end see nothing that counts; keys beyond it are never read whole.
    is_query = (torch.arange(length + beyond) < length).view(-1, BLOCK, 1, 1)
    some = by_block.any(4).any(2)
    whole = (by_block | ~is_query).all(4).all(2)
    return some, whole


def listed(counts: Tensor, indices: Tensor) -> Tensor:
    """Mark the blocks that a BlockMask's lists name, [B, K, K]; each is named at most once."""
    times_named = torch.zeros_like(indices[:, 0])
    is_listed = torch.arange(indices.shape[-1]) < counts[:, 0].unsqueeze(-1)
    for row, block, place in is_listed.nonzero().tolist():
        times_named[row, block, indices[row, 0, block, place]] += 1
    return times_named


@pytest.mark.parametrize("reach", REACHES)
@pytest.mark.parametrize(("length", "mean"), [(1024, 250), (1000, 600), (129, 90), (257, 10**6)])
def test_blocks_of_documents_are_those_of_their_mask(reach, length, mean, as_on_a_gpu):
    """A block is read if some pair in it is seen, and whole if every query sees all its keys.

    A CPU runs no backward kernel that would read the lists by key.
    """
    for mask, numbers in masks_of(reach, length, mean, as_on_a_gpu):
        some, whole = blocks_of(numbers)
        blocks = mask.blocks
        partial_kv = listed(blocks.kv_num_blocks, blocks.kv_indices)
        whole_kv = listed(blocks.full_kv_num_blocks, blocks.full_kv_indices)
        assert torch.equal(partial_kv, (some & ~whole).int())
        assert torch.equal(whole_kv, whole.int())
        # The backward reads the same blocks by key.
        partial_q = listed(blocks.q_num_blocks, blocks.q_indices)
        whole_q = listed(blocks.full_q_num_blocks, blocks.full_q_indices)
        assert torch.equal(partial_q, partial_kv.mT)
        assert torch.equal(whole_q, whole_kv.mT)
        if (reach, length) in WITH_WHOLE_BLOCKS:
            assert whole.any(), "whole blocks were not tested"


def test_blocks_of_a_long_row_are_small(as_on_a_gpu):
    as_on_a_gpu(None)
    seq_idx = packed_rows(MANY, mean=250)["seq_idx"]
    mask = packed_inputs(seq_idx, config=teacher_config())["attention_mask"]
    bytes_of_mask = MANY**2
    assert mask.blocks.kv_indices.nbytes < bytes_of_mask / 500


@pytest.mark.usefixtures("flex_is_not_compiled")
@pytest.mark.parametrize(
    ("length", "n_heads", "n_kv_heads"),
    [(300, 4, 4), (300, 4, 2), (300, 6, 1), (300, 3, 3), (256, 4, 2)],
)
@pytest.mark.parametrize("reach", REACHES)
def test_flex_attention_and_its_backward(reach, length, n_heads, n_kv_heads, as_on_a_gpu):
    """Values and gradients are those of the additive mask."""
    options: dict[str, Any] = {"scale": 0.3, "enable_gqa": True}
    lowest = torch.finfo(torch.float32).min
    for mask, numbers in masks_of(reach, length, 150, as_on_a_gpu):
        additive = torch.zeros(numbers.shape).masked_fill_(~numbers, lowest)
        heads = []
        for n in (n_heads, n_kv_heads, n_kv_heads):
            heads.append(torch.randn(2, n, length, 16, requires_grad=True))
        upstream = torch.randn(2, n_heads, length, 16)

        results = []
        for attn_mask in (mask, additive):
            out = F.scaled_dot_product_attention(*heads, attn_mask=attn_mask, **options)
            results.append([out, *torch.autograd.grad(out, heads, upstream)])
        for actual, expected in zip(*results):
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_flex_attention_compiles_each_shape_once_and_static(
    as_on_a_gpu, monkeypatch: pytest.MonkeyPatch
):
    """A row of 16 tokens compiles nothing; other documents of a shape compile nothing new."""
    graphs: list[list[Any]] = []

    def record(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(inputs)
        return graph.forward

    compile_with = torch.compile
    compile_and_record = partial(compile_with, backend=record)
    document_kernels.compiled_flex_attention.cache_clear()
    monkeypatch.setattr(torch, "compile", compile_and_record)
    config = teacher_config()
    as_on_a_gpu(None)

    # Length, mean length of a document, graphs that were compiled until then.
    rows = [
        (16, 5, 0),
        (256, 60, 1),
        (256, 30, 1),
        (384, 60, 2),
        (384, 200, 2),
        (256, 100, 2),
        (16, 4, 2),
    ]
    for length, mean, n_graphs in rows:
        seq_idx = packed_rows(length, mean)["seq_idx"]
        mask = packed_inputs(seq_idx, config=config)["attention_mask"]
        assert isinstance(mask, DocumentMask)
        q = torch.randn(2, 4, length, 16)
        numbers = torch.zeros(2, 1, length, length, dtype=torch.bool) | mask
        attended = F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
        exact = F.scaled_dot_product_attention(q, q, q, attn_mask=numbers)
        torch.testing.assert_close(attended, exact)
        assert len(graphs) == n_graphs
    document_kernels.compiled_flex_attention.cache_clear()
    for inputs in graphs:
        for value in inputs:
            assert not isinstance(value, torch.SymInt)
            if isinstance(value, Tensor):
                assert all(type(size) is int for size in value.shape)


@torch.no_grad()
@pytest.mark.slow
def test_flex_attention_compiled_for_this_cpu(as_on_a_gpu):
    """The forward that inductor compiles, with whole blocks and a ragged end."""
    for mask, numbers in masks_of("long windows", 600, 500, as_on_a_gpu):
        assert mask.blocks.full_kv_num_blocks.any()
        q = torch.randn(2, 4, 600, 16)
        k, v = torch.randn(2, 2, 2, 600, 16)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        exact = F.scaled_dot_product_attention(q, k, v, attn_mask=numbers, enable_gqa=True)
        torch.testing.assert_close(attended, exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "implementation",
    ["flash_attention_2", "flash_attention_3", "flex_attention", "paged|sdpa"],
)
def test_other_attention_is_refused_by_name(implementation: str) -> None:
    for packs in (None, "sdpa", "eager"):
        documents.check_packs(packs)
    with pytest.raises(ValueError, match=re.escape(implementation)):
        documents.check_packs(implementation)


def test_a_mask_of_documents_has_its_numbers_for_any_other_function(as_on_a_gpu):
    seq_idx = packed_rows()["seq_idx"]
    config = teacher_config()
    plain = packed_inputs(seq_idx, config=config)["attention_mask"]
    as_on_a_gpu(None)
    mask = packed_inputs(seq_idx, config=config)["attention_mask"]

    # Attention cuts a mask to its keys: here nothing is cut off.
    assert isinstance(mask[:, :, :, :LENGTH], DocumentMask)
    assert (mask.dtype, mask.dim()) == (torch.bool, 4)
    functions = (
        lambda m: m[..., :5],
        lambda m: torch.where(m, 0.0, -1.0),
        lambda m: torch.cat([m, m]),
        torch.sum,
    )
    for function in functions:
        numbers = function(mask)
        assert torch.equal(numbers, function(plain))
        assert not isinstance(numbers, DocumentMask)
    too_narrow_for_flex = torch.randn(3, 2, 2, LENGTH, 8)
    attended = F.scaled_dot_product_attention(*too_narrow_for_flex, attn_mask=mask)
    exact = F.scaled_dot_product_attention(*too_narrow_for_flex, attn_mask=plain)
    assert torch.equal(attended, exact)


@pytest.mark.parametrize("torch_has_the_option", [True, False])
def test_every_thread_compiles_more_shapes_than_dynamos_default(
    torch_has_the_option: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit of settings is each thread's own since torch 2.12: recomputation runs in the backward's."""
    graphs: list[Any] = []

    def record(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(inputs)
        return graph.forward

    compile_with = torch.compile

    def compile_and_record(function: Any, **options: Any) -> Any:
        return compile_with(function, backend=record, **options)

    def without_the_option(function: Any, *, dynamic: bool) -> Any:
        return compile_with(function, backend=record, dynamic=dynamic)

    replacement = compile_and_record
    if torch_has_the_option:
        parameters = inspect.signature(compile_with).parameters
        if "recompile_limit" not in parameters:
            pytest.skip("this torch has no such option")
        compile_and_record.__signature__ = inspect.Signature(list(parameters.values()))
    else:
        replacement = without_the_option
    monkeypatch.setattr(torch, "compile", replacement)
    twice = document_kernels.compile_static(lambda row: 2 * row)
    lengths = range(2, 14)

    def run() -> None:
        for length in lengths:
            twice(torch.ones(length))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert len(graphs) == len(lengths)


def test_rows_of_ever_new_lengths_run_with_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches without padding, as some loops make them: each length would compile anew."""
    monkeypatch.setattr(document_kernels, "_lengths", set())
    lengths = range(200, 212)
    runs = []
    for _ in range(2):
        for length in lengths:
            query = torch.zeros(1, 2, length, 16)
            runs.append(document_kernels.flex_runs(query, by_default=True))
    assert runs == 2 * (8 * [True] + 4 * [False])


@pytest.mark.parametrize(
    ("dtype", "width", "shared", "fits"),
    [
        (torch.float32, 128, 101_376, False),
        (torch.float32, 128, 166_912, True),
        (torch.float32, 64, 101_376, True),
        (torch.bfloat16, 128, 101_376, True),
    ],
)
def test_float32_blocks_that_a_gpu_has_no_memory_for_are_left_to_the_mask(
    dtype: torch.dtype, width: int, shared: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As reported of an RTX 4090 (pytorch issue 133254)."""
    gpu = SimpleNamespace(shared_memory_per_block_optin=shared)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    asked_anew = document_kernels.flex_fits.__wrapped__
    assert asked_anew(dtype, width, torch.device("cuda")) is fits
