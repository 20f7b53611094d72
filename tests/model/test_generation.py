"""`generate` in all its ways, against the forward pass without a cache."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor
from conftest import make_family_model
from memory_use import LargestTensor
from messages import naming
from students import (
    ALL_BUT_ONE,
    BF16_RELATIVE_ERROR,
    LONGROPE,
    THREE,
    keep,
    left_padded,
    logits,
    logits_in_pieces,
    mixed_student,
    positions_of,
    same_logits,
    since,
    student_of,
    tokens,
)
from torch import Tensor
from transformers import CompileConfig

from hybrid_distill.model import HybridCache, HybridForCausalLM
from hybrid_distill.model.layout import cache_of
from hybrid_distill.plan import HeadPlan
from hybrid_distill.teacher import TINY, load_teacher

NEW = 9
GREEDY: dict[str, Any] = {
    "max_new_tokens": NEW,
    "do_sample": False,
    "eos_token_id": None,
}
SAMPLE = {**GREEDY, "do_sample": True, "temperature": 0.9, "top_p": 0.9, "top_k": 0}
BEAM = {**GREEDY, "num_beams": 3, "num_return_sequences": 2}
KEPT = {"none": (), "one": (5,), "mixed": (*THREE, 5)}
WINDOWS: dict[str, dict[str, Any]] = {
    "qwen2": {
        "use_sliding_window": True,
        "sliding_window": 6,
        "max_window_layers": 1,
    },
    "olmo3": {"sliding_window": 6},
}


@pytest.fixture(params=["qwen2", "olmo3", "gpt_neox", "tiny", "gdn"])
def student(request: pytest.FixtureRequest) -> HybridForCausalLM:
    """Biases and a short window; norms over all heads; the embedded teacher's student."""
    if request.param == "tiny":
        teacher, _ = load_teacher(TINY)
        return student_of(teacher, keep(teacher, THREE, (), ALL_BUT_ONE))
    if request.param == "gdn":
        return mixed_student(make_family_model("llama"), recurrence="gdn")
    return mixed_student(make_family_model(request.param, **WINDOWS.get(request.param, {})))


@pytest.fixture
def llama_student() -> HybridForCausalLM:
    return mixed_student(make_family_model("llama"))


@torch.no_grad()
@pytest.mark.parametrize("family", [pytest.param("phi3", marks=since("5.14")), "llama"])
def test_generation_over_the_longrope_switch(family: str) -> None:
    """Llama goes on from its cache; Phi-3 reads all anew, for the short factors turned its keys."""
    settings = {"initializer_range": 0.2, "original_max_position_embeddings": 20}
    teacher = make_family_model(family, rope_parameters=LONGROPE, **settings)
    length = 17
    prompt = tokens(1, length)

    def generate(model: Any) -> Any:
        options = {"output_logits": True, "return_dict_in_generate": True}
        # The switch comes at 20 tokens.
        return model.generate(prompt, **{**GREEDY, "max_new_tokens": 8}, **options)

    all_kept = student_of(teacher, HeadPlan.all(teacher))
    for ours, theirs in zip(generate(all_kept).logits, generate(teacher).logits, strict=True):
        assert torch.equal(ours, theirs)
    if family != "phi3":
        return
    for student in (all_kept, mixed_student(teacher)):
        output = generate(student)
        for step, step_logits in enumerate(output.logits):
            ids = output.sequences[:, : length + step]
            whole = logits(student, ids, use_cache=False)[:, -1]
            torch.testing.assert_close(step_logits, whole, rtol=1e-4, atol=1e-4)


def counting_backend() -> tuple[list[Any], Callable[..., Any]]:
    """Return the graphs that torch.compile makes from now on, and a backend that adds to them."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    return graphs, backend


def counting_compile_config() -> tuple[list[Any], CompileConfig]:
    """Return the graphs that `generate` makes from now on, and its setting that counts them."""
    graphs, backend = counting_backend()
    config = CompileConfig(fullgraph=True, backend=backend, mode=None)
    # transformers compiles on GPUs alone.
    config._compile_all_devices = True
    return graphs, config


def greedy_without_cache(student: HybridForCausalLM, prompt_L: Tensor) -> Tensor:
    """Append the best token of a whole forward pass, again and again: the definition."""
    ids = prompt_L.unsqueeze(0)
    for _ in range(NEW):
        best = logits(student, ids, use_cache=False)[:, -1:].argmax(-1)
        ids = torch.cat([ids, best], dim=1)
    return ids[0, len(prompt_L) :]


def generated(student: HybridForCausalLM, ids: Tensor, **options: Any) -> Tensor:
    """Return the new tokens [B, T], greedily."""
    return student.generate(ids, **{**GREEDY, **options})[:, ids.shape[1] :]


def test_greedy_takes_the_best_token_of_the_whole_forward_pass(student) -> None:
    """Alone and in a left-padded batch."""
    prompts = [tokens(length) for length in (3, 17, 8)]
    expected = [greedy_without_cache(student, prompt) for prompt in prompts]
    for prompt, best in zip(prompts, expected):
        assert torch.equal(generated(student, prompt.unsqueeze(0))[0], best)
    ids, mask = left_padded(prompts)
    assert torch.equal(generated(student, ids, attention_mask=mask), torch.stack(expected))


@pytest.mark.parametrize("prefill_chunk_size", [None, pytest.param(4, marks=since("5.5.0"))])
def test_positions_count_tokens_and_not_padding(llama_student, prefill_chunk_size) -> None:
    """Rotary positions are relative: from the logits one would not see a shift."""
    pieces: list[Tensor] = []

    def note(module: Any, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        _, position_ids = *args, *kwargs.values()
        pieces.append(position_ids)

    llama_student.model.rotary_emb.register_forward_pre_hook(note, with_kwargs=True)
    ids, mask = left_padded([tokens(5), tokens(11)])
    generated(llama_student, ids, attention_mask=mask, prefill_chunk_size=prefill_chunk_size)
    positions = torch.cat(pieces, dim=1)
    # No step reads the last new token. The short row has 6 pads.
    assert positions[0, 6:].tolist() == list(range(5 + NEW - 1))
    assert positions[1].tolist() == list(range(11 + NEW - 1))


def test_sampling_draws_from_the_distribution_of_the_whole_forward_pass(student) -> None:
    ids, mask = left_padded([tokens(11), tokens(5)])
    outputs = {"return_dict_in_generate": True, "output_logits": True}

    def sampled(seed: int, **options: Any) -> Any:
        torch.manual_seed(seed)
        return student.generate(ids, attention_mask=mask, **SAMPLE, **outputs, **options)

    cached = sampled(1)
    recomputed = sampled(1, use_cache=False)
    assert torch.equal(cached.sequences, sampled(1).sequences)
    assert not torch.equal(cached.sequences, sampled(2).sequences)
    assert torch.equal(cached.sequences, recomputed.sequences)
    for ours, theirs in zip(cached.logits, recomputed.logits):
        same_logits(ours, theirs)

    # The second row without its padding: the 5 tokens of its prompt, and the new ones.
    alone = cached.sequences[1, -5 - NEW :].unsqueeze(0)
    expected = logits(student, alone, use_cache=False)[0, 4:-1]
    same_logits(torch.stack(cached.logits, dim=1)[1], expected)


def test_beams_are_those_without_a_cache_and_have_their_own_scores(student) -> None:
    ids, mask = left_padded([tokens(11), tokens(5)])
    options = {
        "attention_mask": mask,
        "return_dict_in_generate": True,
        "output_scores": True,
    }
    cached = student.generate(ids, **BEAM, **options)
    recomputed = student.generate(ids, **BEAM, **options, use_cache=False)
    assert torch.equal(cached.sequences, recomputed.sequences)

    # Two beams of each prompt.
    lengths = (11, 11, 5, 5)
    for beam, length, score in zip(cached.sequences, lengths, cached.sequences_scores):
        row = beam[-length - NEW :].unsqueeze(0)
        logits_LV = logits(student, row, use_cache=False)[0, length - 1 : -1]
        new_tokens = row[0, length:].unsqueeze(1)
        log_prob = logits_LV.log_softmax(-1).gather(1, new_tokens).sum()
        # A beam's score is a mean over its new tokens.
        same_logits(score * NEW, log_prob)


@pytest.mark.parametrize("kept", KEPT.values(), ids=KEPT)
def test_a_cache_is_continued_by_more_than_one_token(kept: tuple[int, ...]) -> None:
    """A conversation: the cache of the first turn, the second turn's tokens, an answer."""
    teacher = make_family_model("qwen2")
    student = student_of(teacher, keep(teacher, kept, kept, kept))
    ids, mask = left_padded([tokens(9), tokens(6)])
    first_turn = student.generate(ids, attention_mask=mask, return_dict_in_generate=True, **GREEDY)
    question = tokens(2, 7)
    ids = torch.cat([first_turn.sequences, question], dim=1)
    mask = torch.cat([mask, torch.ones(2, NEW + 7, dtype=torch.long)], dim=1)

    answer = generated(student, ids, attention_mask=mask, cache=cache_of(first_turn))
    assert torch.equal(answer, generated(student, ids, attention_mask=mask))
    assert torch.equal(answer[0], greedy_without_cache(student, ids[0]))


@since("5.5.0")
@pytest.mark.parametrize("size", [1, 5])
def test_a_prompt_in_pieces_is_the_prompt(student, size: int) -> None:
    ids, mask = left_padded([tokens(17), tokens(6)])
    whole = generated(student, ids, attention_mask=mask)
    in_pieces = generated(student, ids, attention_mask=mask, prefill_chunk_size=size)
    assert torch.equal(in_pieces, whole)


def test_padded_rows_in_pieces_are_refused_where_transformers_misplaces_them(
    llama_student, monkeypatch
) -> None:
    monkeypatch.setattr("hybrid_distill.model.prompt.__version__", "5.4.1")
    ids, mask = left_padded([tokens(5), tokens(3)])
    with pytest.raises(ValueError, match=naming("5.4.1", "prefill_chunk_size")):
        generated(llama_student, ids, attention_mask=mask, prefill_chunk_size=2)
    without_padding = torch.ones_like(mask)
    generated(llama_student, ids, attention_mask=without_padding, prefill_chunk_size=2)


def test_a_filled_cache_and_pieces_are_refused_where_transformers_reads_the_past_again(
    llama_student, monkeypatch
) -> None:
    monkeypatch.setattr("hybrid_distill.model.prompt.__version__", "5.20.0")
    ids = tokens(1, 9)
    cache = llama_student.prefill(ids[:, :5])
    with pytest.raises(ValueError, match=naming("5.20.0", 5, "prefill_chunk_size")):
        generated(llama_student, ids, cache=cache, prefill_chunk_size=2)


# A prompt after a cache


def new_alone(ids: Tensor, n_past: int) -> dict[str, Any]:
    """Return the arguments of `generate` for the tokens after ``n_past``, and a mask for all."""
    return {"inputs": ids[:, n_past:], "attention_mask": torch.ones_like(ids)}


@since("5.21")
def test_a_prompt_in_pieces_goes_on_from_its_own_prefix_alone(llama_student) -> None:
    """Another prompt, nothing new, and the state of other weights."""
    prefix = tokens(1, 8)
    ids = torch.cat([prefix, tokens(1, 5)], dim=1)
    cache = llama_student.prefill(prefix)
    whole = generated(llama_student, ids)
    options = {"prefill_chunk_size": 3}
    assert torch.equal(generated(llama_student, ids, cache=cache.copy(), **options), whole)

    other = ids.clone()
    other[0, 4] += 1
    for wrong in (other, prefix):
        with pytest.raises(ValueError):
            generated(llama_student, wrong, cache=cache, **options)
    with torch.no_grad():
        llama_student.recurrent_heads()[0].x_proj.weight[0, 0] += 1
    with pytest.raises(ValueError, match=naming("student")):
        generated(llama_student, ids, cache=cache, **options)
    assert cache.get_seq_length() == 8


@since("5.5.0")
def test_new_tokens_alone_go_on_from_the_rows_padding_and_student_of_a_prefix(
    llama_student,
) -> None:
    ids = tokens(2, 13)
    cache = llama_student.prefill(ids[:, :8])
    new_tokens = new_alone(ids, 8)
    text = llama_student.generate(**new_tokens, cache=cache.copy(), **GREEDY)
    assert torch.equal(text[:, 5:], generated(llama_student, ids))

    with pytest.raises(ValueError, match=naming("cache.repeat")):
        llama_student.generate(**new_alone(ids[:1], 8), cache=cache, **GREEDY)
    padded = torch.ones_like(ids)
    padded[0, 0] = 0
    with pytest.raises(ValueError, match="attention_mask"):
        llama_student.generate(**{**new_tokens, "attention_mask": padded}, cache=cache, **GREEDY)
    with pytest.raises(ValueError, match=naming(8, 5, 12)):
        too_short = torch.ones(2, 12, dtype=torch.long)
        llama_student.generate(**{**new_tokens, "attention_mask": too_short}, cache=cache, **GREEDY)
    with torch.no_grad():
        llama_student.recurrent_heads()[0].x_proj.weight[0, 0] += 1
    with pytest.raises(ValueError, match=naming("student")):
        llama_student.generate(**new_tokens, cache=cache, **GREEDY)


@since("5.5.0")
def test_new_tokens_alone_fit_a_static_cache_after_its_tokens(llama_student) -> None:
    ids = tokens(1, 13)
    for room, is_enough in ((12 + NEW, True), (11 + NEW, False)):
        cache = llama_student.prefill(ids[:, :8], cache=llama_student.new_cache(max_length=room))
        if is_enough:
            text = llama_student.generate(**new_alone(ids, 8), cache=cache, **GREEDY)
            assert torch.equal(text[:, 5:], generated(llama_student, ids))
            continue
        with pytest.raises(ValueError, match=naming(room, 12 + NEW, "max_length")):
            llama_student.generate(**new_alone(ids, 8), cache=cache, **GREEDY)


@pytest.mark.parametrize("max_length", [None, 40], ids=["dynamic", "static"])
@pytest.mark.parametrize("way", ["num_return_sequences", "num_beams"])
def test_a_cache_of_other_rows_than_the_input_is_refused(
    llama_student, way: str, max_length: int | None
) -> None:
    """Both options repeat the input's rows. No prefill has noted those of the cache."""
    options = {**GREEDY, way: 3, "do_sample": way == "num_return_sequences"}
    cache = llama_student.new_cache(max_length=max_length)
    text = llama_student.generate(tokens(1, 8), cache=cache, **GREEDY)
    ids = torch.cat([text, tokens(1, 5)], dim=1)
    with pytest.raises(ValueError, match=naming(3, 1, way, "cache.repeat")):
        llama_student.generate(ids, cache=cache, **options)
    with pytest.raises(ValueError, match=naming(2, 1, "cache.repeat")):
        generated(llama_student, ids.expand(2, -1), cache=cache)
    assert cache.get_seq_length() == 8 + NEW - 1

    texts = []
    for of_three_rows in (cache.repeat(3), None):
        torch.manual_seed(0)
        texts.append(llama_student.generate(ids, cache=of_three_rows, **options))
    assert torch.equal(*texts)


def test_a_reset_static_cache_keeps_its_rows(llama_student) -> None:
    ids = tokens(3, 8)
    cache = llama_student.new_cache(max_length=20)
    generated(llama_student, ids[:1], cache=cache)
    cache.reset()
    with pytest.raises(ValueError, match=naming(3, 1, "cache.repeat")):
        generated(llama_student, ids, cache=cache)
    text = generated(llama_student, ids, cache=cache.repeat(3))
    assert torch.equal(text, generated(llama_student, ids))


@since("5.21")
@pytest.mark.parametrize("n_new", [1, 4])
def test_columns_read_as_tokens_are_no_padding_for_a_prompt_in_pieces(
    llama_student, n_new: int
) -> None:
    """The first answer may be one token, after a prompt in pieces."""
    options = {"return_dict_in_generate": True, "prefill_chunk_size": 3}
    first_turn = llama_student.generate(
        tokens(2, 8), **{**GREEDY, "max_new_tokens": n_new}, **options
    )
    ids = torch.cat([first_turn.sequences, tokens(2, 5)], dim=1)
    mask = torch.ones_like(ids)
    mask[0, 5:7] = 0
    with pytest.raises(ValueError, match=naming("1 of 2", "attention_mask")):
        generated(
            llama_student,
            ids,
            attention_mask=mask,
            cache=cache_of(first_turn),
            prefill_chunk_size=2,
        )


@since("5.14")
def test_a_prompt_is_not_cut_at_the_longrope_switch() -> None:
    """In pieces, or as new tokens alone, whose steps may cross it too."""
    settings = {"initializer_range": 0.2, "original_max_position_embeddings": 20}
    student = mixed_student(make_family_model("phi3", rope_parameters=LONGROPE, **settings))
    ids = tokens(1, 28)
    with pytest.raises(ValueError, match=naming(20, 28, "prefill_chunk_size")):
        generated(student, ids, prefill_chunk_size=6)
    # A single piece cuts nothing.
    assert torch.equal(generated(student, ids, prefill_chunk_size=28), generated(student, ids))
    # Up to the switch, pieces are the prompt: the steps beyond it read all tokens anew.
    in_pieces = generated(student, ids[:, :16], prefill_chunk_size=6)
    assert torch.equal(in_pieces, generated(student, ids[:, :16]))

    cache = student.prefill(ids[:, :8])
    for length in (28, 13):
        with pytest.raises(ValueError, match=naming(20, length + NEW - 1)):
            student.generate(**new_alone(ids[:, :length], 8), cache=cache, **GREEDY)
    options = {**GREEDY, "max_new_tokens": 8}
    text = student.generate(**new_alone(ids[:, :13], 8), cache=cache, **options)
    assert torch.equal(text[:, 5:], generated(student, ids[:, :13], max_new_tokens=8))


@pytest.mark.parametrize("kind", ["offloaded", "quantized", "paged"])
def test_another_kind_of_cache_is_refused(llama_student, kind: str) -> None:
    with pytest.raises(ValueError, match=f"'{kind}"):
        generated(llama_student, tokens(1, 6), cache_implementation=kind)


@pytest.mark.parametrize("way", [GREEDY, SAMPLE, BEAM], ids=["greedy", "sample", "beam"])
def test_a_static_cache_gives_the_same_text(student, way: dict[str, Any]) -> None:
    """Rows with padding, prompts longer and shorter than a window; on a GPU, a CUDA graph."""
    ids, mask = left_padded([tokens(12), tokens(4)])
    texts = []
    for kind in (None, "static"):
        torch.manual_seed(0)
        options = {"attention_mask": mask, "cache_implementation": kind, **way}
        texts.append(student.generate(ids, **options))
    assert torch.equal(*texts)


@since("5.5.0")
def test_a_piece_of_one_token_may_be_padding_in_a_static_cache(llama_student) -> None:
    ids, mask = left_padded([tokens(9), tokens(5)])
    whole = generated(llama_student, ids, attention_mask=mask)
    options = {"cache_implementation": "static", "prefill_chunk_size": 1}
    assert torch.equal(generated(llama_student, ids, attention_mask=mask, **options), whole)


def test_a_logits_processor_generates_with_a_static_cache_of_its_own(llama_student) -> None:
    ids = tokens(1, 9)
    other = tokens(1, 3)
    static = {"cache_implementation": "static"}

    def generate_another(input_ids: Tensor, scores: Tensor) -> Tensor:
        generated(llama_student, other, max_new_tokens=2, **static)
        return scores

    expected = generated(llama_student, ids)
    text = generated(llama_student, ids, logits_processor=[generate_another], **static)
    assert torch.equal(text, expected)
    # The outer call's is kept.
    kept = llama_student._static_cache.cache
    assert torch.equal(generated(llama_student, ids, **static), expected)
    assert llama_student._static_cache.cache is kept


def test_a_static_cache_of_autocast_is_not_used_outside_it(llama_student) -> None:
    """It stores the inputs of convolutions in 16 bits."""
    ids = tokens(2, 9)
    static = {"cache_implementation": "static"}
    caches = []
    for is_on in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_on):
            generated(llama_student, ids, **static)
        caches.append(llama_student._static_cache.cache)
    of_autocast, plain = caches
    assert of_autocast.layer(0).conv_state.dtype == torch.bfloat16
    assert plain.layer(0).conv_state.dtype == torch.float32


def addresses_of(cache: HybridCache) -> list[int]:
    addresses = []
    for layer in cache.layers:
        for value in vars(layer).values():
            if isinstance(value, Tensor):
                addresses.append(value.data_ptr())
    return addresses


def test_a_static_cache_moves_nothing_and_its_step_compiles_once(llama_student) -> None:
    graphs, config = counting_compile_config()
    ids = tokens(2, 6)
    cache = llama_student.new_cache(max_length=20)
    expected = generated(llama_student, ids)
    llama_student(ids[:, :-1], cache=cache)
    before = addresses_of(cache)
    assert len(before) == 13, "keys, values, states and counts of three layers"

    output = generated(llama_student, ids, cache=cache, compile_config=config)
    assert torch.equal(output, expected)
    assert len(graphs) == 1
    assert addresses_of(cache) == before


def test_generate_compiles_a_static_step_as_rarely_as_a_teachers() -> None:
    """Shorter texts fit the first cache; a longer one is compiled once more, for every length."""
    teacher = make_family_model("llama", num_hidden_layers=1)
    student = student_of(teacher, keep(teacher, KEPT["mixed"]))
    for model in (teacher, student):
        graphs, config = counting_compile_config()
        torch.compiler.reset()
        counts = []
        for length in (8, 6, 8, 12, 20):
            ids = tokens(2, length)
            options = {"cache_implementation": "static", "compile_config": config}
            assert torch.equal(generated(model, ids, **options), generated(model, ids))
            counts.append(len(graphs))
        assert counts in ([1, 1, 1, 1, 1], [1, 1, 1, 2, 2])


def test_a_row_that_ended_early_is_not_continued_with_its_padding_masked(llama_student) -> None:
    """The states have read the padding: only without the cache, or with padding read as tokens, is the text right."""
    ids = tokens(2, 8)
    plain = generated(llama_student, ids)
    # Of the first row alone, and early in it.
    end = next(int(token) for token in plain[0, :-2] if token not in plain[1])
    output = llama_student.generate(
        ids, **{**GREEDY, "eos_token_id": end, "pad_token_id": 0}, return_dict_in_generate=True
    )
    text = output.sequences
    n_of_first = 8 + plain[0].tolist().index(end) + 1
    assert n_of_first < text.shape[1]
    longer = torch.cat([text, tokens(2, 3)], dim=1)
    mask = torch.ones_like(longer)
    whole = generated(llama_student, longer, attention_mask=mask)
    cache = cache_of(output)
    assert torch.equal(
        generated(llama_student, longer, attention_mask=mask, cache=cache.copy()), whole
    )
    mask[0, n_of_first : text.shape[1]] = 0
    for same_rows in (cache.copy(), cache.repeat(1)):
        with pytest.raises(ValueError, match=naming("1 of 2", "attention_mask")):
            generated(llama_student, longer, attention_mask=mask, cache=same_rows)
    cache.batch_select_indices(torch.tensor([1]))
    expected = generated(llama_student, longer[1:])
    assert torch.equal(generated(llama_student, longer[1:], cache=cache), expected)


def test_a_static_cache_is_not_asked_for_beside_another(llama_student) -> None:
    ids = tokens(1, 8)
    cache = llama_student.prefill(ids[:, :5])
    with pytest.raises(ValueError, match=naming("static", "max_length")):
        generated(llama_student, ids, cache=cache, cache_implementation="static")


def test_frozen_weights_decode_the_same_tokens() -> None:
    """Inductor's freezing takes tensors that no step passes for weights: the cache must not be among them."""
    teacher = make_family_model("llama", num_hidden_layers=1)
    student = student_of(teacher, keep(teacher, KEPT["mixed"]), window=5)
    config = CompileConfig(fullgraph=True, mode="default")
    config._compile_all_devices = True
    torch.compiler.reset()
    for length in (8, 6):
        ids = tokens(2, length)
        with inductor.patch(freezing=True):
            frozen = generated(student, ids, cache_implementation="static", compile_config=config)
        assert torch.equal(frozen, generated(student, ids))


def test_a_static_cache_that_generate_returned_is_not_used_again(llama_student) -> None:
    ids = tokens(2, 9)
    others = tokens(2, 9)
    expected = generated(llama_student, others)

    def static(**options: Any) -> Tensor:
        return generated(llama_student, others, cache_implementation="static", **options)

    # All later caches are as long.
    static(max_new_tokens=NEW + 5)
    for _ in range(2):
        assert torch.equal(static(), expected)
    options = {"cache_implementation": "static", "return_dict_in_generate": True}
    returned = llama_student.generate(ids, **options, **GREEDY)
    with torch.inference_mode():
        assert torch.equal(static(), expected)
    for _ in range(2):
        assert torch.equal(static(), expected)

    text = returned.sequences
    step = logits(llama_student, text[:, -1:], cache=cache_of(returned))
    whole = logits(llama_student, text, use_cache=False)
    same_logits(step[:, -1], whole[:, -1])


@torch.no_grad()
@pytest.mark.parametrize("window", [0, 5])
def test_decoding_compiles_into_one_graph_for_all_steps(window: int) -> None:
    """``fullgraph`` fails at a graph break. The first step's own graph is before sizes vary."""
    teacher = make_family_model("llama", num_hidden_layers=1)
    student = student_of(teacher, keep(teacher, KEPT["mixed"]), window=window)
    ids = tokens(2, 16)
    expected = logits(student, ids, use_cache=False)
    cache = cache_of(student(ids[:, :8], use_cache=True))
    graphs, backend = counting_backend()
    torch.compiler.reset()
    step = torch.compile(student.forward, backend=backend, fullgraph=True)
    for place in range(8, 16):
        output = step(ids[:, place : place + 1], cache=cache)
        same_logits(output.logits[:, 0], expected[:, place])
    assert len(graphs) == 2


@torch.no_grad()
@pytest.mark.parametrize("max_length", [None, 16], ids=["dynamic", "static"])
def test_padded_rows_after_a_cache_compile_without_a_break(max_length: int | None) -> None:
    """Several tokens at once, with a 2-D mask: how many are before them is on the device if the
    cache is static."""
    teacher = make_family_model("llama", num_hidden_layers=1)
    student = student_of(teacher, keep(teacher, KEPT["mixed"]), window=5)
    ids, mask = left_padded([tokens(12), tokens(7)])
    positions = positions_of(mask)
    expected = logits(student, ids, attention_mask=mask, position_ids=positions)
    cache = student.new_cache(max_length=max_length)
    student(ids[:, :6], attention_mask=mask[:, :6], position_ids=positions[:, :6], cache=cache)
    torch.compiler.reset()
    read = torch.compile(student.forward, backend="eager", fullgraph=True)
    options = {"attention_mask": mask, "position_ids": positions[:, 6:]}
    same_logits(read(ids[:, 6:], cache=cache, **options).logits, expected[:, 6:])


def test_embeddings_in_pieces_are_refused(llama_student) -> None:
    prompt = llama_student.get_input_embeddings()(tokens(1, 9))
    with pytest.raises(ValueError, match=naming("inputs_embeds", "prefill_chunk_size")):
        llama_student.generate(inputs_embeds=prompt, prefill_chunk_size=4, **GREEDY)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float32, None])
def test_keys_are_stored_in_the_dtype_asked_for_and_states_in_fp32(student, kv_dtype) -> None:
    cache = student.new_cache(kv_dtype)
    logits(student, tokens(2, 19), cache=cache)
    for layer in cache.layers:
        if layer.keys is not None:
            assert layer.keys.dtype == layer.values.dtype == (kv_dtype or torch.float32)
        if layer.ssm_state is not None:
            assert layer.ssm_state.dtype == torch.float32
    cache.reset()
    assert cache.layers[0].kv_dtype == kv_dtype


@torch.no_grad()
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float32, None])
def test_keys_of_16_bits_round_the_logits_and_take_half_the_memory(student, kv_dtype) -> None:
    ids = tokens(2, 19)
    cache = student.new_cache(kv_dtype)
    whole = logits(student, ids, cache=cache)
    prefill_and_tokens = (9, *[1] * 10)
    steps = logits_in_pieces(student, ids, prefill_and_tokens, cache=student.new_cache(kv_dtype))
    expected = logits(student, ids, use_cache=False)

    n_bytes = cache.nbytes()
    n_bytes_by_default = cache_of(student(ids, use_cache=True)).nbytes()
    assert n_bytes["ssm"] == n_bytes_by_default["ssm"]
    if kv_dtype is torch.bfloat16:
        bound = BF16_RELATIVE_ERROR * expected.norm()
        assert 0 < (whole - expected).norm() < bound
        assert (steps - whole).norm() < bound
        assert 2 * n_bytes["kv"] == n_bytes_by_default["kv"]
    else:
        assert torch.equal(whole, expected)
        same_logits(steps, expected)
        assert n_bytes["kv"] == n_bytes_by_default["kv"]


@torch.no_grad()
@pytest.mark.parametrize(
    ("kept", "chunk", "n_pads"),
    [
        ((), None, 0),
        ((), None, 5),
        (THREE, None, 0),
        pytest.param(THREE, 128, 5, marks=since("5.5.0")),
    ],
    ids=["recurrent", "recurrent, padded", "mixed", "mixed, padded, in pieces"],
)
def test_memory_of_a_long_prefill_grows_with_its_length(kept, chunk, n_pads: int) -> None:
    """Twice the tokens, at most twice the largest tensor; none with length² elements."""
    teacher = make_family_model("llama")
    student = student_of(teacher, keep(teacher, kept, kept, kept))
    options = {"max_new_tokens": 1, "prefill_chunk_size": chunk}
    n_elements = []
    for length in (1024, 2048):
        mask = torch.ones(1, length, dtype=torch.long)
        mask[:, :n_pads] = 0
        with LargestTensor() as largest:
            generated(student, tokens(1, length), attention_mask=mask, **options)
        assert largest.n_elements < length**2
        n_elements.append(largest.n_elements)
    assert n_elements[1] <= 2.05 * n_elements[0]
