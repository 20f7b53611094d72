"""Packed documents and padding: each document is what it is alone."""

import re
from typing import Any

import pytest
import torch
import transformers
from conftest import make_family_model
from messages import naming
from students import (
    COMPUTATIONS,
    HARD,
    THREE,
    close,
    keep,
    logits,
    logits_in_pieces,
    mixed_student,
    packed_logits,
    positions_of,
    student_of,
    tokens,
)

from hybrid_distill.model import packed_inputs
from hybrid_distill.model.documents import CACHE_WITH_PACKING
from hybrid_distill.model.layout import cache_of
from hybrid_distill.model.recurrent_heads import SSMHeads
from hybrid_distill.plan import HeadPlan

ALL = tuple(range(8))
LENGTHS = (1, 9, 2, 12, 7)


@torch.no_grad()
@pytest.mark.parametrize(
    ("implementation", "family"), [*(("sdpa", f) for f in HARD), ("eager", "olmo3")]
)
def test_packed_documents_are_the_documents_alone(implementation: str, family: str) -> None:
    teacher = make_family_model(family, **HARD[family], attn_implementation=implementation)
    ids = tokens(2, sum(LENGTHS))
    numbers = torch.arange(len(LENGTHS))
    seq_idx = torch.repeat_interleave(numbers, torch.tensor(LENGTHS)).expand(2, -1)
    for model in (teacher, mixed_student(teacher)):
        alone = [logits(model, document) for document in ids.split(LENGTHS, dim=1)]
        close(packed_logits(model, ids, seq_idx), torch.cat(alone, dim=1))


CONVENTIONS: dict[str, dict[str, Any]] = {
    "position_ids": {},
    "and seq_idx": {"return_seq_idx": True},
    "and borders": {"return_flash_attn_kwargs": True},
    "borders": {"return_flash_attn_kwargs": True, "return_position_ids": False},
}


@torch.no_grad()
@pytest.mark.parametrize(
    ("convention", "kept", "implementation", "family"),
    [
        *(("position_ids", THREE, "sdpa", family) for family in HARD),
        *((convention, THREE, "eager", "llama") for convention in CONVENTIONS),
        *(("borders", kept, "eager", "llama") for kept in ((), ALL)),
    ],
)
def test_rows_of_transformers_own_collator_are_the_documents_alone(
    convention: str, kept: tuple[int, ...], implementation: str, family: str
) -> None:
    teacher = make_family_model(family, **HARD[family], attn_implementation=implementation)
    student = student_of(teacher, keep(teacher, kept, kept, kept))
    documents = [tokens(length) for length in LENGTHS]
    options = {"return_position_ids": True, **CONVENTIONS[convention]}
    collator = transformers.DataCollatorWithFlattening(return_tensors="pt", **options)
    batch = collator([{"input_ids": ids.tolist()} for ids in documents])
    del batch["labels"]
    # Positions or borders alone tell where documents begin.
    batch.pop("attention_mask", None)

    for training in (False, True):
        student.train(training)
        output = student(**batch)
        assert cache_of(output) is None
        alone = [logits(student, document[None]) for document in documents]
        close(output.logits, torch.cat(alone, dim=1))


@torch.no_grad()
@pytest.mark.parametrize("kept", [(), THREE, ALL], ids=["none", "three", "all"])
@pytest.mark.parametrize("masked", [False, True])
def test_positions_that_restart_are_those_of_documents(masked: bool, kept: tuple[int, ...]) -> None:
    """They restart elsewhere in each row, begin at an offset, and mean nothing at padding."""
    teacher = make_family_model("llama")
    student = student_of(teacher, keep(teacher, kept, kept, kept))
    ids = tokens(2, 20)
    seq_idx = torch.tensor([[0] * 8 + [1] * 12, [0] * 3 + [1] * 16 + [2]])
    offsets = torch.tensor([[5], [0]])
    positions = packed_inputs(seq_idx)["position_ids"] + offsets
    mask = None
    if masked:
        mask = torch.ones_like(ids)
        mask[:, :2] = 0
        mask[:, 10:12] = 0
        at_padding = torch.tensor([[1], [0]])
        positions = torch.where(mask.bool(), positions, at_padding)

    both = slice(0, 2)
    one_row_for_all = (slice(0, 1), slice(1, 2))
    for rows in (both, *one_row_for_all):
        inputs = {"position_ids": positions[rows], "attention_mask": mask}
        numbers = seq_idx[rows].expand(2, -1)
        by_number = logits(student, ids, seq_idx=numbers, **inputs)
        by_position = logits(student, ids, **inputs)
        close(by_position[:, 12:], by_number[:, 12:])
        close(by_position[:, 2:10], by_number[:, 2:10])


PADDED_TWICE = torch.tensor([[0, 0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1]])


@torch.no_grad()
@pytest.mark.parametrize("padding", [0, 1, -1, None])
def test_positions_that_only_rise_are_of_one_document(padding: int | None) -> None:
    """Whatever `generate` gives to padding, in all its versions; at once and in pieces."""
    student = mixed_student(make_family_model("llama"))
    ids = tokens(1, 12)
    mask = PADDED_TWICE
    is_token = mask.bool()
    positions = positions_of(mask)
    if padding is not None:
        positions = positions.masked_fill(~is_token, padding)
    alone = logits(student, ids[is_token][None])[0]

    output = student(ids, attention_mask=mask, position_ids=positions)
    assert cache_of(output) is not None
    close(output.logits[is_token], alone)
    in_pieces = logits_in_pieces(student, ids, (5, 1, 4, 2), mask=mask, positions=positions)
    close(in_pieces[is_token], alone)


@torch.no_grad()
def test_positions_from_an_offset_or_that_leap_over_padding_make_a_cache() -> None:
    student = mixed_student(make_family_model("llama"))
    ids = tokens(1, 12)
    from_an_offset = student(ids, position_ids=torch.arange(7, 19)[None])
    leaping = student(ids, attention_mask=PADDED_TWICE, position_ids=torch.arange(12)[None])
    assert cache_of(from_an_offset) is not None
    assert cache_of(leaping) is not None


RISING = torch.arange(6)[None]
"""Positions of one document of 6 tokens."""


@torch.no_grad()
@pytest.mark.parametrize(
    "options",
    [
        {"position_ids": torch.tensor([[6, 7, 8, 0, 1, 2]]), "cache": "filled"},
        {"position_ids": RISING, "cache": "filled"},
        {"position_ids": RISING, "cache": "filled", "attention_mask": torch.ones(2, 12)},
        {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]]), "use_cache": True},
        {"cu_seq_lens_q": torch.tensor([0, 5, 12]), "use_cache": True},
        {"seq_idx": torch.zeros(2, 6, dtype=torch.long), "cache": "empty"},
    ],
    ids=[
        "restart after a cache",
        "start anew after a cache",
        "start anew after a cache, masked",
        "restart into a cache",
        "borders into a cache",
        "numbers into a cache",
    ],
)
def test_documents_beside_a_cache_are_refused(options: dict[str, Any]) -> None:
    student = mixed_student(make_family_model("llama"))
    ids = tokens(2, 6)
    caches = {"empty": student.new_cache(), "filled": cache_of(student(ids))}
    if "cache" in options:
        options = {**options, "cache": caches[options["cache"]]}
    with pytest.raises(ValueError, match=re.escape(CACHE_WITH_PACKING)):
        student(ids, **options)


@torch.no_grad()
def test_positions_that_go_on_from_a_cache_continue_it() -> None:
    student = mixed_student(make_family_model("llama"))
    ids = tokens(2, 6)
    cache = cache_of(student(ids))
    # A call that is refused leaves the cache as it is.
    with pytest.raises(ValueError, match=re.escape(CACHE_WITH_PACKING)):
        student(ids, position_ids=RISING, cache=cache)
    assert cache.get_seq_length() == 6
    student(ids, position_ids=RISING + 6, cache=cache)
    assert cache.get_seq_length() == 12


def test_a_cache_without_states_and_no_input_are_refused() -> None:
    student = mixed_student(make_family_model("llama"))
    with pytest.raises(ValueError, match="DynamicCache"):
        student(tokens(2, 6), cache=transformers.DynamicCache())
    with pytest.raises(ValueError, match=naming("input_ids", "inputs_embeds")):
        student()


def test_a_replica_without_parameters_reads_packed_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainer copies a model to several GPUs of one process: tensors of a copy are not its parameters."""
    student = mixed_student(make_family_model("llama"))
    ids = tokens(1, 12)
    seq_idx = torch.tensor([[0] * 5 + [1] * 7])
    expected = packed_logits(student, ids, seq_idx)

    def of_replica(_model: Any) -> torch.dtype:
        raise StopIteration

    monkeypatch.setattr(transformers.PreTrainedModel, "dtype", property(of_replica))
    with torch.no_grad():
        close(student(ids, seq_idx=seq_idx, use_cache=False).logits, expected)


def test_packed_rows_compile_into_one_graph() -> None:
    """A graph cannot look at the positions: it takes every row for a packed one."""
    teacher = make_family_model("llama", num_hidden_layers=1)
    student = student_of(teacher, keep(teacher, THREE)).train()
    ids = tokens(2, 12)
    rising = torch.arange(12)[None]
    torch.compiler.reset()
    restarting = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 0, 1]])
    forward = torch.compile(student.forward, backend="eager", fullgraph=True)
    for positions in (restarting, rising):
        output = forward(ids, position_ids=positions)
        close(output.logits, student(ids, position_ids=positions).logits)

    student.eval()
    prefill = torch.compile(student.forward, backend="eager", fullgraph=True)
    with torch.no_grad():
        output = prefill(ids, position_ids=rising)
        assert cache_of(output).get_seq_length() == 12
        with pytest.raises(RuntimeError, match=re.escape(CACHE_WITH_PACKING)):
            prefill(ids, position_ids=rising % 5)


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen2", "olmo3", "gpt_neox"])
def test_padding_inside_a_packed_row_is_not_seen(family: str) -> None:
    student = mixed_student(make_family_model(family, **HARD[family]))
    ids = tokens(1, 20)
    seq_idx = torch.tensor([[0] * 8 + [1] * 12])
    mask = torch.ones_like(ids)
    mask[:, 17:] = 0
    changed = torch.where(mask.bool(), ids, tokens(1, 20))
    packed = logits(student, ids, seq_idx=seq_idx, attention_mask=mask)
    of_changed = logits(student, changed, seq_idx=seq_idx, attention_mask=mask)
    close(packed[:, :17], of_changed[:, :17])
    close(packed[:, :8], logits(student, ids[:, :8]))
    close(packed[:, 8:17], logits(student, ids[:, 8:17]))


TURN = 8
"""Tokens of a turn, with its padding."""
N_TOKENS = [(5, 8), (8, 2), (3, 6)]
"""Tokens of the two turns of each row."""


def two_turns(sides: str) -> torch.Tensor:
    """Mark the tokens [3, 16] of turns that are padded on these sides."""
    is_token = torch.zeros(len(N_TOKENS), 2 * TURN, dtype=torch.bool)
    for row, lengths in enumerate(N_TOKENS):
        for turn, (side, length) in enumerate(zip(sides.split(), lengths)):
            start = turn * TURN
            if side == "left":
                start += TURN - length
            is_token[row, start : start + length] = True
    return is_token


@torch.no_grad()
@pytest.mark.parametrize("pieces", [[16], [8, 3, 1, 4]], ids=["whole", "odd"])
@pytest.mark.parametrize("sides", ["left left", "left right", "right left", "right right"])
def test_padding_anywhere_in_a_row_is_as_if_it_were_not_there(
    sides: str, pieces: list[int]
) -> None:
    """Two turns of a batched conversation, through a cache or at once."""
    student = mixed_student(make_family_model("llama")).double()
    is_token = two_turns(sides)
    ids = tokens(*is_token.shape)
    mask = is_token.long()
    cache = student.new_cache()
    logits_BLV = logits_in_pieces(
        student, ids, pieces, cache=cache, mask=mask, positions=positions_of(mask)
    )

    exact = {"rtol": 1e-9, "atol": 1e-9}
    for row in range(len(ids)):
        of_row = student.new_cache()
        expected = logits(student, ids[row, is_token[row]][None], cache=of_row)
        torch.testing.assert_close(logits_BLV[row, is_token[row]], expected[0], **exact)
        for ours, theirs in zip(cache.layers, of_row.layers):
            torch.testing.assert_close(ours.ssm_state[row], theirs.ssm_state[0], **exact)
            torch.testing.assert_close(ours.conv_state[row], theirs.conv_state[0], **exact)


@pytest.mark.parametrize("recurrence", COMPUTATIONS)
@pytest.mark.parametrize("width", [1, 2, 4])
def test_gradients_go_past_padding_inside_a_row(recurrence: str, width: int) -> None:
    heads = SSMHeads(12, 3, 4, 5, width, conv_bias=True, recurrence=recurrence).double()
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_(std=0.5)
    is_token = torch.rand(2, 40) < 0.6
    hidden = torch.randn(2, 40, 12, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(2, 40, 3, 4, dtype=torch.float64)
    leaves = [hidden, *heads.parameters()]

    padded = (heads(hidden, is_token) * upstream)[is_token].sum()
    alone = torch.zeros((), dtype=torch.float64)
    for row in range(2):
        output = heads(hidden[row : row + 1, is_token[row]])
        alone = alone + (output * upstream[row, is_token[row]]).sum()
    of_padded = torch.autograd.grad(padded, leaves)
    of_alone = torch.autograd.grad(alone, leaves)
    for gradient, expected in zip(of_padded, of_alone):
        torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_padding_inside_a_row_that_is_longer_than_a_window_is_refused() -> None:
    """transformers counts padding within a window, in the teacher too; shorter rows are right."""
    teacher = make_family_model("mistral", sliding_window=9)
    student = student_of(teacher, keep(teacher, (1, 2), (), (3,)))
    ids = tokens(1, 16)
    mask = torch.ones_like(ids)
    mask[:, 5:8] = 0
    positions = positions_of(mask)
    whole = {"attention_mask": mask, "position_ids": positions}
    first = {"attention_mask": mask[:, :8], "position_ids": positions[:, :8]}
    second = {"attention_mask": mask, "position_ids": positions[:, 8:]}

    with pytest.raises(ValueError, match=naming("attention_mask", 9)):
        student(ids, **whole)
    cache = student.new_cache()
    student(ids[:, :8], cache=cache, **first)
    with pytest.raises(ValueError, match=naming("attention_mask", 9)):
        student(ids[:, 8:], cache=cache, **second)
    # Without a kept head, nothing has the teacher's windows.
    student_of(teacher, HeadPlan.none(teacher))(ids, **whole)


@torch.no_grad()
def test_windows_of_packed_rows_count_tokens_and_not_padding() -> None:
    teacher = make_family_model("mistral", sliding_window=4)
    student = student_of(teacher, keep(teacher, (1, 2), (), (3,)))
    alone = tokens(1, 12)
    pads = torch.zeros(1, 3, dtype=torch.long)
    ids = torch.cat([alone[:, :6], pads, alone[:, 6:]], dim=1)
    mask = torch.ones_like(ids)
    mask[:, 6:9] = 0
    inputs = {
        "attention_mask": mask,
        "position_ids": positions_of(mask),
        "seq_idx": torch.zeros_like(ids),
    }
    padded = logits(student, ids, **inputs)[mask.bool()]
    expected = logits(student, alone, use_cache=False)[0]
    torch.testing.assert_close(padded, expected)
