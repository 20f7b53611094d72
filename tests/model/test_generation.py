"""`generate` in all its ways, against the forward pass without a cache."""

from collections.abc import Callable
from typing import Any

import pytest
from conftest import make_family_model
import torch
from students import (
    ALL_BUT_ONE,
    BF16_RELATIVE_ERROR,
    THREE,
    keep,
    left_padded,
    logits,
    mixed_student,
    since,
    student_of,
    tokens,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import CompileConfig, PreTrainedModel

from hybrid_distill.export.check import TOLERANCE
from hybrid_distill.model import HybridForCausalLM
from hybrid_distill.model.layout import cache_of
from hybrid_distill.plan import HeadPlan
from hybrid_distill.teacher import TINY, load_teacher

NEW = 9
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
SAMPLE = {**GREEDY, "do_sample": True, "temperature": 0.9, "top_p": 0.9, "top_k": 0}
BEAM = {**GREEDY, "num_beams": 3, "num_return_sequences": 2}
KEPT = {"none": (), "one": (5,), "mixed": (*THREE, 5)}
WINDOWS: dict[str, dict[str, Any]] = {
    "qwen2": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "olmo3": {"sliding_window": 6},
}


@pytest.fixture(params=["qwen2", "olmo3", "gpt_neox", "tiny", "gdn"])
def student(request: pytest.FixtureRequest) -> HybridForCausalLM:
    """Biases and a short window in two layers of three; norms over all heads; the embedded teacher's student."""
    if request.param == "tiny":
        teacher, _ = load_teacher(TINY)
        return student_of(teacher, keep(teacher, THREE, (), ALL_BUT_ONE))
    if request.param == "gdn":
        return mixed_student(make_family_model("llama"), recurrence="gdn")
    return mixed_student(make_family_model(request.param, **WINDOWS.get(request.param, {})))


@pytest.fixture
def llama_student() -> HybridForCausalLM:
    return mixed_student(make_family_model("llama"))


LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [20.0, 3.0, 4.0, 5.0],
            "original_max_position_embeddings": 20}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("family", [pytest.param("phi3", marks=since("5.14")), "llama"])
def test_generation_over_the_longrope_switch(family: str) -> None:
    """Phi-3's keys in the cache were turned by the short factors: it reads all anew there, Llama goes on."""
    options = {"initializer_range": 0.2, "original_max_position_embeddings": 20}
    teacher = make_family_model(family, rope_parameters=LONGROPE, **options)
    prompt = tokens(1, 17)

    def written(model: Any) -> Any:
        asked = {"max_new_tokens": 8, "output_logits": True, "return_dict_in_generate": True, "eos_token_id": None}
        return model.generate(prompt, do_sample=False, **asked)

    everything = student_of(teacher, HeadPlan.all(teacher))
    for ours, theirs in zip(written(everything).logits, written(teacher).logits, strict=True):
        assert torch.equal(ours, theirs)
    for student in (everything, student_of(teacher, keep(teacher, THREE, (), ALL_BUT_ONE))) if family == "phi3" else ():
        output = written(student)
        for step, found in enumerate(output.logits):
            whole = logits(student, output.sequences[:, : 17 + step], use_cache=False)[:, -1]
            torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-4)


def counting_backend() -> tuple[list[Any], Callable[..., Any]]:
    """A backend of torch.compile, and the list of what it compiles."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    return graphs, backend


def greedy_without_cache(student: HybridForCausalLM, prompt_L: Tensor, n: int = NEW) -> Tensor:
    """The definition: the best token of a whole forward pass, appended, again."""
    ids = prompt_L.unsqueeze(0)
    for _ in range(n):
        ids = torch.cat([ids, logits(student, ids, use_cache=False)[:, -1:].argmax(-1)], dim=1)
    return ids[0, len(prompt_L) :]


def same_logits(actual: Tensor, expected: Tensor) -> None:
    """Up to the order of sums, as in the gate of an export."""
    assert (actual - expected).abs().max() < TOLERANCE[torch.float32]["order"] * expected.abs().max()


def generated(student: HybridForCausalLM, ids: Tensor, **options: Any) -> Tensor:
    """New tokens [B, T]."""
    return student.generate(ids, **options)[:, ids.shape[1] :]


def test_greedy_takes_the_best_token_of_the_whole_forward_pass(student: HybridForCausalLM) -> None:
    """Alone and in a left-padded batch."""
    prompts = [tokens(length) for length in (3, 17, 8)]
    expected = [greedy_without_cache(student, prompt) for prompt in prompts]
    for prompt, best in zip(prompts, expected):
        assert torch.equal(generated(student, prompt.unsqueeze(0), **GREEDY)[0], best)
    ids, mask = left_padded(prompts)
    assert torch.equal(generated(student, ids, attention_mask=mask, **GREEDY), torch.stack(expected))


@pytest.mark.parametrize("prefill_chunk_size", [None, pytest.param(4, marks=since("5.5.0"))])
def test_positions_count_tokens_and_not_padding(
    llama_student: HybridForCausalLM, prefill_chunk_size: int | None
) -> None:
    """Rotary positions are relative: from the logits one would not see a shift."""
    seen: list[Tensor] = []

    def note(module: Any, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        _, position_ids = *args, *kwargs.values()
        seen.append(position_ids)

    llama_student.model.rotary_emb.register_forward_pre_hook(note, with_kwargs=True)
    ids, mask = left_padded([tokens(5), tokens(11)])
    generated(llama_student, ids, attention_mask=mask, prefill_chunk_size=prefill_chunk_size, **GREEDY)
    positions = torch.cat(seen, dim=1)
    assert positions[0, 6:].tolist() == list(range(5 + NEW - 1))
    assert positions[1].tolist() == list(range(11 + NEW - 1))


def test_sampling_draws_from_the_distribution_of_the_whole_forward_pass(student: HybridForCausalLM) -> None:
    ids, mask = left_padded([tokens(11), tokens(5)])
    asked = {"attention_mask": mask, "return_dict_in_generate": True, "output_logits": True}

    def sampled(seed: int, **options: Any) -> Any:
        torch.manual_seed(seed)
        return student.generate(ids, **SAMPLE, **asked, **options)

    first, without = sampled(1), sampled(1, use_cache=False)
    assert torch.equal(first.sequences, sampled(1).sequences)
    assert not torch.equal(first.sequences, sampled(2).sequences)
    assert torch.equal(first.sequences, without.sequences)
    whole = [logits(student, row[-5 - NEW :].unsqueeze(0), use_cache=False)[0, 4:-1] for row in first.sequences[1:]]
    same_logits(torch.stack(first.logits, dim=1)[1:], torch.stack(whole))
    for cached, recomputed in zip(first.logits, without.logits):
        same_logits(cached, recomputed)


def test_beams_are_those_without_a_cache_and_score_what_they_say(student: HybridForCausalLM) -> None:
    ids, mask = left_padded([tokens(11), tokens(5)])
    options = {**BEAM, "attention_mask": mask, "return_dict_in_generate": True, "output_scores": True}
    cached, recomputed = student.generate(ids, **options), student.generate(ids, **options, use_cache=False)
    assert torch.equal(cached.sequences, recomputed.sequences)
    for row, length, score in zip(cached.sequences, (11, 11, 5, 5), cached.sequences_scores):
        row = row[-length - NEW :].unsqueeze(0)
        logprobs = logits(student, row, use_cache=False)[0, length - 1 : -1].log_softmax(-1)
        total = logprobs.gather(1, row[0, length:].unsqueeze(1)).sum()
        same_logits(score * NEW, total)


@pytest.mark.parametrize("kept", KEPT.values(), ids=KEPT)
def test_a_cache_is_continued_by_more_than_one_token(
    kept: tuple[int, ...], 
) -> None:
    """A conversation: the cache of the first turn, the second turn's tokens, further generation."""
    teacher = make_family_model("qwen2")
    student = student_of(teacher, keep(teacher, kept, kept, kept))
    ids, mask = left_padded([tokens(9), tokens(6)])
    first = student.generate(ids, attention_mask=mask, return_dict_in_generate=True, **GREEDY)
    ids = torch.cat([first.sequences, tokens(2, 7)], dim=1)
    mask = torch.cat([mask, torch.ones(2, NEW + 7, dtype=torch.long)], dim=1)
    continued = generated(student, ids, attention_mask=mask, cache=cache_of(first), **GREEDY)
    assert torch.equal(continued, generated(student, ids, attention_mask=mask, **GREEDY))
    assert torch.equal(continued[0], greedy_without_cache(student, ids[0]))


@since("5.5.0")
@pytest.mark.parametrize("size", [1, 5])
def test_a_prompt_in_pieces_is_the_prompt(student: HybridForCausalLM, size: int) -> None:
    ids, mask = left_padded([tokens(17), tokens(6)])
    whole = generated(student, ids, attention_mask=mask, **GREEDY)
    assert torch.equal(generated(student, ids, attention_mask=mask, prefill_chunk_size=size, **GREEDY), whole)


def test_padded_rows_in_pieces_are_refused_where_transformers_misplaces_them(
    llama_student: HybridForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybrid_distill.model.modeling_hybrid.__version__", "5.4.1")
    ids, mask = left_padded([tokens(5), tokens(3)])
    with pytest.raises(ValueError, match="wrong positions to padded rows"):
        llama_student.generate(ids, attention_mask=mask, prefill_chunk_size=2, **GREEDY)
    llama_student.generate(ids, attention_mask=torch.ones_like(mask), prefill_chunk_size=2, **GREEDY)


@pytest.mark.parametrize("kind", ["offloaded", "quantized", "paged"])
def test_another_kind_of_cache_is_refused(llama_student: HybridForCausalLM, kind: str) -> None:
    with pytest.raises(ValueError, match="cache_implementation.*'" + kind):
        llama_student.generate(tokens(1, 6), cache_implementation=kind, **GREEDY)


@pytest.mark.parametrize("way", [GREEDY, SAMPLE, BEAM], ids=["greedy", "sample", "beam"])
def test_a_static_cache_gives_the_same_text(student: HybridForCausalLM, way: dict[str, Any]) -> None:
    """Rows with padding, prompts longer and shorter than a window; on a GPU its steps are a CUDA graph."""
    ids, mask = left_padded([tokens(12), tokens(4)])
    texts = []
    for kind in (None, "static"):
        torch.manual_seed(0)
        texts.append(student.generate(ids, attention_mask=mask, cache_implementation=kind, **way))
    assert torch.equal(*texts)


def test_a_static_cache_moves_nothing_and_its_step_compiles_once(llama_student: HybridForCausalLM) -> None:
    graphs, backend = counting_backend()

    def addresses() -> list[int]:
        held = [tensor for layer in cache.layers for tensor in vars(layer).values() if isinstance(tensor, Tensor)]
        return [tensor.data_ptr() for tensor in held]

    config = CompileConfig(fullgraph=True, backend=backend, mode=None)
    config._compile_all_devices = True
    ids, cache = tokens(2, 6), llama_student.new_cache(max_length=20)
    expected = llama_student.generate(ids, **GREEDY)
    llama_student(ids[:, :-1], cache=cache)
    before = addresses()
    found = llama_student.generate(ids, cache=cache, compile_config=config, **GREEDY)
    assert torch.equal(found, expected) and len(graphs) == 1
    assert addresses() == before and len(before) == 13  # keys, values, states and counts of three layers


def test_generate_compiles_a_static_step_as_rarely_as_a_teachers() -> None:
    """Shorter texts fit the first cache; a longer one is compiled once more, for every length."""
    teacher = make_family_model("llama", num_hidden_layers=1)
    student = student_of(teacher, keep(teacher, KEPT["mixed"]))
    for model in (teacher, student):
        graphs, backend = counting_backend()
        config = CompileConfig(fullgraph=True, backend=backend, mode=None)
        config._compile_all_devices = True
        torch.compiler.reset()
        counts = []
        for length in (8, 6, 8, 12, 20):
            ids = tokens(2, length)
            options = {"cache_implementation": "static", "compile_config": config, **GREEDY}
            assert torch.equal(model.generate(ids, **options), model.generate(ids, **GREEDY))
            counts.append(len(graphs))
        assert counts[:3] == [1, 1, 1] and counts[3:] in ([1, 1], [2, 2])


def test_a_static_cache_that_generate_returned_is_not_used_again(llama_student: HybridForCausalLM) -> None:
    ids, others = tokens(2, 9), tokens(2, 9)
    options = {"cache_implementation": "static", **GREEDY}
    expected = generated(llama_student, others, **GREEDY)
    generated(llama_student, others, **{**options, "max_new_tokens": NEW + 5})  # all later caches are as long
    for _ in range(2):
        assert torch.equal(generated(llama_student, others, **options), expected)
    first = llama_student.generate(ids, return_dict_in_generate=True, **options)
    with torch.inference_mode():
        assert torch.equal(generated(llama_student, others, **options), expected)
    for _ in range(2):
        assert torch.equal(generated(llama_student, others, **options), expected)
    last = first.sequences[:, -1:]
    whole = logits(llama_student, first.sequences, use_cache=False)[:, -1]
    same_logits(logits(llama_student, last, cache=cache_of(first))[:, -1], whole)


def test_what_must_roll_a_cache_back_is_refused() -> None:
    teacher, ids = make_family_model("llama"), tokens(1, 6)
    student = mixed_student(teacher)
    for options in ({"assistant_model": teacher}, {"prompt_lookup_num_tokens": 2}):
        with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
            student.generate(ids, **options, **GREEDY)
    with pytest.raises(ValueError, match="a hybrid cannot draft for another model"):
        teacher.generate(ids, assistant_model=student, **GREEDY)


@torch.no_grad()
def test_decoding_compiles_into_one_graph_for_all_steps() -> None:
    """``fullgraph`` fails at a graph break. The first step has a graph of its own, until torch sees what grows."""
    teacher = make_family_model("llama", num_hidden_layers=1)
    student, ids = student_of(teacher, keep(teacher, KEPT["mixed"])), tokens(2, 16)
    expected = logits(student, ids, use_cache=False)
    cache = cache_of(student(ids[:, :8], use_cache=True))
    graphs, backend = counting_backend()

    torch.compiler.reset()
    step = torch.compile(student.forward, backend=backend, fullgraph=True)
    for place in range(8, 16):
        same_logits(step(ids[:, place : place + 1], cache=cache).logits[:, 0], expected[:, place])
    assert len(graphs) == 2


@torch.no_grad()
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float32, None])
def test_keys_are_stored_in_the_dtype_asked_for_and_states_in_fp32(
    student: HybridForCausalLM, kv_dtype: torch.dtype | None
) -> None:
    ids = tokens(2, 19)
    cache, stepwise = student.new_cache(kv_dtype), student.new_cache(kv_dtype)
    whole = logits(student, ids, cache=cache)
    steps = [logits(student, piece, cache=stepwise) for piece in ids.split([9, *[1] * 10], dim=1)]
    expected = logits(student, ids, use_cache=False)
    if kv_dtype is torch.bfloat16:
        assert 0 < (whole - expected).norm() < BF16_RELATIVE_ERROR * expected.norm()
        assert (torch.cat(steps, dim=1) - whole).norm() < BF16_RELATIVE_ERROR * expected.norm()
    else:
        assert torch.equal(whole, expected)
        same_logits(torch.cat(steps, dim=1), expected)
    for layer in cache.layers:
        assert layer.keys is None or layer.keys.dtype == layer.values.dtype == (kv_dtype or torch.float32)
        assert layer.ssm_state is None or layer.ssm_state.dtype == torch.float32
    full = cache_of(student(ids, use_cache=True))
    assert full.nbytes()["kv"] == cache.nbytes()["kv"] * (2 if kv_dtype is torch.bfloat16 else 1)
    assert full.nbytes()["ssm"] == cache.nbytes()["ssm"]
    cache.reset()
    assert cache.layers[0].kv_dtype == kv_dtype


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.n_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
        sizes = [tensor.untyped_storage().size() // tensor.element_size() for tensor in tensors]
        self.n_elements = max([self.n_elements, *sizes])
        return made


@torch.no_grad()
@pytest.mark.parametrize(("kept", "chunk", "padded"), [
    ((), None, False), ((), None, True), (THREE, None, False), pytest.param(THREE, 128, True, marks=since("5.5.0")),
], ids=["recurrent", "recurrent, padded", "mixed", "mixed, padded, in pieces"])  # fmt: skip
def test_memory_of_a_long_prefill_grows_with_its_length(
    kept: tuple[int, ...], chunk: int | None, padded: bool, 
) -> None:
    """Twice the tokens, at most twice the largest tensor; none with length² elements."""
    teacher = make_family_model("llama")
    student = student_of(teacher, keep(teacher, kept, kept, kept))
    largest = []
    for length in (1024, 2048):
        mask = torch.ones(1, length, dtype=torch.long)
        mask[:, : 5 if padded else 0] = 0
        with LargestTensor() as watch:
            options = {**GREEDY, "max_new_tokens": 1, "prefill_chunk_size": chunk}
            student.generate(tokens(1, length), attention_mask=mask, **options)
        assert watch.n_elements < length**2
        largest.append(watch.n_elements)
    assert largest[1] <= 2.05 * largest[0]
