"""Drafted tokens and how a cache takes them back: the text is that of plain decoding."""

import pickle
from typing import Any

import pytest
import torch
from conftest import make_family_model
from kinds import KINDS, student_of_kind
from messages import naming
from students import (
    LONGROPE,
    left_padded,
    logits,
    mixed_student,
    positions_of,
    same_logits,
    tokens,
)
from torch import Tensor
from transformers import PreTrainedModel

from hybrid_distill.model import HybridCache, HybridForCausalLM
from hybrid_distill.model.layout import cache_of
from hybrid_distill.plan import HeadPlan
from hybrid_distill.student.build import build_student

NEW = 24
# An end that no vocabulary has: transformers 5.2 cannot look prompts up without any.
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": 200}
LOOKUP: dict[str, Any] = {**GREEDY, "prompt_lookup_num_tokens": 4}


@pytest.fixture(params=KINDS)
def student(request: pytest.FixtureRequest) -> HybridForCausalLM:
    return student_of_kind(request.param)


@pytest.fixture
def llama_student() -> HybridForCausalLM:
    return mixed_student(make_family_model("llama"))


def repetitive(length: int = 21) -> Tensor:
    """A prompt with repetitions, from which drafts are made: some are right, most are wrong."""
    return tokens(1, 5).repeat(1, 5)[:, :length]


def check_text(drafted: Tensor, plain: Tensor) -> None:
    """Compare two texts; transformers 5.2 may go on by some tokens beyond the length asked for."""
    assert torch.equal(drafted[:, : plain.shape[1]], plain)


class Drafts:
    """Counts the forward passes of a model, and the tokens that a cache has taken back."""

    def __init__(self, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
        self.n_forwards = 0
        self.taken_back: list[int] = []
        model.register_forward_pre_hook(self._count)
        crop = HybridCache.crop

        def counted(cache: HybridCache, n: int) -> None:
            before = cache.get_seq_length()
            crop(cache, n)
            self.taken_back.append(before - cache.get_seq_length())

        monkeypatch.setattr(HybridCache, "crop", counted)

    def _count(self, *args: Any) -> None:
        self.n_forwards += 1


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_early_exit_gives_the_text_of_greedy_decoding(family: str) -> None:
    """Also of a family whose config lists the kind of every layer, of which then only the first draft."""
    student = mixed_student(make_family_model(family))
    prompt = repetitive()
    plain = student.generate(prompt, **GREEDY)
    for n_layers in range(1, student.config.num_hidden_layers):
        drafted = student.generate(prompt, **GREEDY, assistant_early_exit=n_layers)
        check_text(drafted, plain)


def test_prompt_lookup_gives_the_text_of_greedy_decoding(student, monkeypatch) -> None:
    prompts = [repetitive(), repetitive(3), tokens(1, 9)]
    expected = [student.generate(prompt, **GREEDY) for prompt in prompts]
    drafts = Drafts(student, monkeypatch)
    for prompt, text in zip(prompts, expected):
        check_text(student.generate(prompt, **LOOKUP), text)
    assert sum(drafts.taken_back) > 0, "no draft was wrong"
    assert drafts.n_forwards < len(prompts) * NEW, "no draft was right"


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 2])
def test_a_cropped_cache_goes_on_as_if_the_tokens_had_never_been(student, rows: int) -> None:
    """Every border within and between forward passes of one and several tokens, rows padded too."""
    length = 13
    lengths = (length, 6)[:rows]
    ids, mask = left_padded([tokens(length) for length in lengths])
    drafted = tokens(rows, 9)
    more = tokens(rows, 3)

    def read(new_ids: Tensor, n_new: int, **options: Any) -> Tensor:
        """Read the last tokens of the prompt and ``n_new`` ones."""
        whole_mask = torch.cat([mask, mask.new_ones(rows, n_new)], dim=1)
        positions = positions_of(whole_mask)[:, -new_ids.shape[1] :]
        return logits(
            student, new_ids, attention_mask=whole_mask, position_ids=positions, **options
        )

    prefilled = student.prefill(ids, mask)
    for n_left in range(10):
        cache = prefilled.copy()
        cache.activate_past_recording()
        n_read = 0
        for piece in drafted.split([4, 1, 1, 3], dim=1):
            n_read += piece.shape[1]
            read(piece, n_read, cache=cache)
        # A copy of a cache takes back on its own.
        copied = cache.copy()
        copied.crop(n_left - n_read)
        cache.crop(n_left - n_read)
        assert cache.get_seq_length() == length + n_left

        whole = torch.cat([ids, drafted[:, :n_left], more], dim=1)
        expected = read(whole, n_left + 3, use_cache=False)[:, -3:]
        for taken_back in (cache, copied):
            first_two = read(more[:, :2], n_left + 2, cache=taken_back)
            third = read(more[:, 2:], n_left + 3, cache=taken_back)
            same_logits(torch.cat([first_two, third], dim=1), expected)


@torch.no_grad()
def test_a_number_of_tokens_to_leave_crops_as_well(llama_student) -> None:
    """As transformers before 5.24 asks."""
    ids = tokens(1, 9)
    cache = llama_student.new_cache()
    cache.activate_past_recording()
    logits(llama_student, ids, cache=cache)
    cache.crop(6)
    assert cache.get_seq_length() == 6
    step = logits(llama_student, ids[:, 6:7], cache=cache)
    same_logits(step, logits(llama_student, ids[:, :7], use_cache=False)[:, -1:])


@torch.no_grad()
@pytest.mark.parametrize("max_length", [None, 24])
def test_a_snapshot_is_gone_back_to_as_often_as_needed(student, max_length) -> None:
    ids = tokens(2, 9)
    cache = student.new_cache(max_length=max_length)
    empty = cache.snapshot()
    logits(student, tokens(2, 7), cache=cache)
    cache.restore(empty)
    same_logits(logits(student, ids, cache=cache), logits(student, ids, use_cache=False))

    snapshot = cache.snapshot()
    for length in (1, 5, 1):
        more = tokens(2, length)
        step = logits(student, more, cache=cache)
        whole = torch.cat([ids, more], dim=1)
        expected = logits(student, whole, use_cache=False)[:, -length:]
        same_logits(step, expected)
        cache.restore(snapshot)
        assert int(cache.get_seq_length()) == 9


@torch.no_grad()
def test_tokens_after_a_snapshot_that_was_gone_back_to_are_cropped_as_they_were_read(
    student,
) -> None:
    prompt = tokens(1, 5)
    undone = tokens(1, 4)
    kept = tokens(1, 4)
    more = tokens(1, 3)
    cache = student.new_cache()
    cache.activate_past_recording()
    logits(student, prompt, cache=cache)
    snapshot = cache.snapshot()
    logits(student, undone, cache=cache)
    cache.restore(snapshot)
    logits(student, kept, cache=cache)
    cache.crop(-2)

    step = logits(student, more, cache=cache)
    whole = torch.cat([prompt, kept[:, :2], more], dim=1)
    same_logits(step, logits(student, whole, use_cache=False)[:, -3:])


@torch.no_grad()
def test_a_snapshot_fills_a_cache_that_was_reset(student) -> None:
    whole = tokens(2, 12)
    ids, more = whole.split([9, 3], dim=1)
    cache = student.new_cache()
    logits(student, ids, cache=cache)
    snapshot = cache.snapshot()
    cache.reset()
    cache.restore(snapshot)

    step = logits(student, more, cache=cache)
    same_logits(step, logits(student, whole, use_cache=False)[:, -3:])


@torch.no_grad()
@pytest.mark.parametrize("change", ["reorder_cache", "batch_select_indices", "repeat"])
def test_records_of_other_rows_are_not_cropped_to(llama_student, change) -> None:
    cache = llama_student.new_cache()
    cache.activate_past_recording()
    logits(llama_student, tokens(2, 9), cache=cache)
    if change == "repeat":
        cache = cache.repeat(2)
    else:
        getattr(cache, change)(torch.tensor([1, 0]))
    with pytest.raises(ValueError, match=naming("cache.activate_past_recording")):
        cache.crop(-2)
    logits(llama_student, tokens(len(cache.layer(0).keys), 2), cache=cache)
    cache.crop(-1)
    assert cache.get_seq_length() == 10


@pytest.mark.parametrize("as_assistant", [False, True], ids=["of a student", "by a student"])
def test_an_assistant_gives_the_text_of_greedy_decoding(student, as_assistant) -> None:
    teacher: Any = make_family_model("llama", seed=1)
    target, assistant = (teacher, student) if as_assistant else (student, teacher)
    prompts = [repetitive(), tokens(1, 9)]
    expected = [target.generate(prompt, **GREEDY) for prompt in prompts]
    for prompt, text in zip(prompts, expected):
        assert torch.equal(target.generate(prompt, **GREEDY, assistant_model=assistant), text)


def test_a_student_drafts_for_another(llama_student, monkeypatch) -> None:
    """The assistant's texts are partly right: it is the student, slightly changed."""
    drafter = mixed_student(make_family_model("llama"), "gdn")
    drafter.generation_config.num_assistant_tokens = 5
    drafter.generation_config.assistant_confidence_threshold = 0.0
    prompts = [repetitive(), tokens(1, 9), tokens(1, 2)]
    expected = [llama_student.generate(prompt, **GREEDY) for prompt in prompts]
    drafts = Drafts(llama_student, monkeypatch)
    for prompt, text in zip(prompts, expected):
        assert torch.equal(llama_student.generate(prompt, **GREEDY, assistant_model=drafter), text)
    assert sum(drafts.taken_back) > 0, "no draft was wrong"


def test_a_model_drafts_for_itself_without_an_error(llama_student, monkeypatch) -> None:
    prompt = tokens(1, 9)
    expected = llama_student.generate(prompt, **GREEDY)
    twin = mixed_student(make_family_model("llama"))
    twin.load_state_dict(llama_student.state_dict())
    twin.generation_config.assistant_confidence_threshold = 0.0

    drafts = Drafts(llama_student, monkeypatch)
    text = llama_student.generate(prompt, **GREEDY, assistant_model=twin)
    assert torch.equal(text, expected)
    assert drafts.n_forwards < NEW / 2


def test_speculation_draws_from_the_distribution_of_plain_sampling(llama_student) -> None:
    """Each of two tokens, by 400 texts each way."""
    prompt = repetitive()
    options = {**GREEDY, "do_sample": True, "top_k": 3, "max_new_tokens": 2}
    n_texts = 400
    torch.manual_seed(0)

    def frequencies(n_drafted: int | None) -> Tensor:
        counts = torch.zeros(2, 101)
        for _ in range(n_texts):
            text = llama_student.generate(prompt, **options, prompt_lookup_num_tokens=n_drafted)
            counts[[0, 1], text[0, -2:]] += 1
        return counts / n_texts

    # The difference of two frequencies has a standard error of sqrt(2 / 4 / 400) at most: 0.035.
    torch.testing.assert_close(frequencies(None), frequencies(2), atol=0.12, rtol=0)


def test_the_cache_of_a_speculation_is_that_of_its_text_and_records_no_more(student) -> None:
    options = {**LOOKUP, "return_dict_in_generate": True}
    output = student.generate(repetitive(), **options)
    text = output.sequences
    cache = cache_of(output)
    assert not any(layer.record_past or layer.recorded for layer in cache.layers)

    n_held = cache.get_seq_length()
    step = logits(student, text[:, n_held:], cache=cache)
    expected = logits(student, text, use_cache=False)[:, n_held:]
    same_logits(step, expected)


def test_speculation_goes_on_from_a_prefix(student) -> None:
    prompt = repetitive()
    expected = student.generate(prompt, **GREEDY)
    for length in (20, 12):
        cache = student.prefill(prompt[:, :length])
        check_text(student.generate(prompt, **LOOKUP, cache=cache), expected)


def test_a_refused_speculation_leaves_its_cache_as_it_was(llama_student) -> None:
    """Another prompt than the prefix, nothing new, and new tokens alone."""
    prompt = repetitive()
    expected = llama_student.generate(prompt, **GREEDY)
    cache = llama_student.prefill(prompt[:, :8])
    other = prompt.clone()
    other[0, 4] += 1
    alone = prompt[:, 8:]
    refused = (
        (other, torch.ones_like(other)),
        (prompt[:, :8], torch.ones_like(prompt[:, :8])),
        (alone, torch.ones_like(prompt)),
    )
    for ids, mask in refused:
        with pytest.raises(ValueError):
            llama_student.generate(ids, attention_mask=mask, cache=cache, **LOOKUP)
        assert cache.get_seq_length() == 8
    check_text(llama_student.generate(prompt, cache=cache, **LOOKUP), expected)


def test_speculation_refuses_new_tokens_alone_after_a_conversation(llama_student) -> None:
    prompt = repetitive()
    cache = llama_student.new_cache()
    with torch.no_grad():
        logits(llama_student, prompt[:, :6], cache=cache)
    with pytest.raises(ValueError, match=naming(6)):
        mask = torch.ones_like(prompt)
        llama_student.generate(prompt[:, 6:], attention_mask=mask, cache=cache, **LOOKUP)
    expected = llama_student.generate(prompt, **GREEDY)
    check_text(llama_student.generate(prompt, cache=cache, **LOOKUP), expected)


def test_speculation_shows_what_decoding_shows(llama_student) -> None:
    options = {
        "return_dict_in_generate": True,
        "output_logits": True,
        "output_hidden_states": True,
    }
    prompt = repetitive()
    plain = llama_student.generate(prompt, **GREEDY, **options)
    drafted = llama_student.generate(prompt, **LOOKUP, **options)
    assert torch.equal(plain.sequences, drafted.sequences)
    for ours, theirs in zip(drafted.logits, plain.logits, strict=True):
        same_logits(ours, theirs)
    assert len(drafted.hidden_states) == len(plain.hidden_states)
    for ours, theirs in zip(drafted.hidden_states[0], plain.hidden_states[0], strict=True):
        same_logits(ours, theirs)


def test_what_cannot_be_taken_back_is_refused(llama_student) -> None:
    ids = tokens(1, 9)
    cache = llama_student.prefill(ids)
    before = cache.snapshot()
    for n_tokens in (-1, 5):
        with pytest.raises(ValueError, match=naming("cache.activate_past_recording")):
            cache.crop(n_tokens)

    # Two tokens are recorded, the prompt is not.
    cache.activate_past_recording()
    logits(llama_student, tokens(1, 2), cache=cache)
    with pytest.raises(ValueError, match=naming("cache.activate_past_recording")):
        cache.crop(-3)
    cache.crop(-2)
    for layer, held in zip(cache.layers, before.layers, strict=True):
        for name, tensor in layer.tensors().items():
            assert torch.equal(tensor, held.tensors[name])


def test_a_static_cache_takes_nothing_back(llama_student) -> None:
    cache = llama_student.new_cache(max_length=9)
    with pytest.raises(ValueError, match=naming("cache.restore")):
        cache.crop(-1)
    with pytest.raises(ValueError, match=naming("cache_implementation")):
        cache.activate_past_recording()


@torch.no_grad()
def test_a_cache_that_records_is_copied_but_not_pickled(llama_student) -> None:
    ids = tokens(1, 9)
    cache = llama_student.new_cache()
    cache.activate_past_recording()
    logits(llama_student, ids, cache=cache)
    copied = cache.copy()
    copied.crop(-3)
    expected = logits(llama_student, ids, use_cache=False)[:, 6:]
    same_logits(logits(llama_student, ids[:, 6:], cache=copied), expected)

    for recording in (cache, cache.snapshot()):
        with pytest.raises(ValueError, match="stop_recording"):
            pickle.dumps(recording)
    cache.stop_recording()
    assert pickle.loads(pickle.dumps(cache)).get_seq_length() == 9


def test_keys_alone_are_cropped_without_a_record() -> None:
    teacher = make_family_model("llama")
    student, _ = build_student(teacher, HeadPlan.all(teacher), d_state=4)
    ids = tokens(1, 9)
    cache = student.prefill(ids)
    cache.crop(-4)
    step = logits(student, ids[:, 5:], cache=cache)
    same_logits(step, logits(student, ids, use_cache=False)[:, 5:])


def test_speculation_is_refused_without_a_cache_that_takes_back_and_of_two_rows(
    llama_student,
) -> None:
    ids = tokens(1, 9)
    for options in ({"cache_implementation": "static"}, {"use_cache": False}):
        with pytest.raises(ValueError):
            llama_student.generate(ids, **LOOKUP, **options)
    with pytest.raises(ValueError):
        llama_student.generate(tokens(2, 9), **LOOKUP)


def test_speculation_is_refused_of_and_by_a_student_whose_keys_turn() -> None:
    """LongRoPE reads all tokens anew at its switch."""
    ids = tokens(1, 9)
    settings = {"rope_parameters": LONGROPE, "original_max_position_embeddings": 20}
    teacher: Any = make_family_model("phi3", **settings)
    student: Any = mixed_student(teacher)
    with pytest.raises(ValueError, match="LongRoPE"):
        student.generate(ids, **LOOKUP)
    with pytest.raises(ValueError, match="LongRoPE"):
        teacher.generate(ids, **GREEDY, assistant_model=student)
