"""Reading answers: choices against brute force, and greedy generation."""

import copy
from typing import Any

import pytest
import torch
from conftest import FAMILIES, make_family_model
from messages import naming
from peft import LoraConfig, get_peft_model
from planted import KEYS, planted_teacher, probe_texts, word_tokenizer
from tokenizers.processors import TemplateProcessing
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from hybrid_distill.evaluation.measure import compare_on_text
from hybrid_distill.probes import Example
from hybrid_distill.probes.answering import (
    answer_choices,
    answer_generation,
    begins_with,
    choice_result,
    generate_greedily,
    left_pad,
)
from hybrid_distill.probes.encoding import EncodedExample, encode_example, tokenize
from hybrid_distill.probes.kv_retrieval import KVRetrieval
from hybrid_distill.probes.plain_text import text_batches
from hybrid_distill.teacher import eval_mode, generate_ids, without_cache

# Numbers are one token, or one token a digit.
WHOLE = r"\n|:|'|\p{N}+"
DIGITS = r"\n|:|'|\p{N}"


@pytest.fixture(scope="module")
def planted() -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    return planted_teacher()


def sharp(model: PreTrainedModel) -> PreTrainedModel:
    """Make choices differ: the logits of a random model are all alike."""
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(40)
    return model


def brute_force(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    example: Example,
) -> list[float]:
    """Run one forward per choice on the text as it is: P(choice) less P(longer choices with it)."""
    n_prompt = len(tokenizer(example.prompt)["input_ids"])
    rows = [tokenizer(example.prompt + choice)["input_ids"] for choice in example.choices]
    logprobs = []
    for ids in rows:
        logits_LV = model(torch.tensor([ids])).logits[0].double()
        logprob_LV = logits_LV.log_softmax(-1)
        of_choice = sum(logprob_LV[t - 1, ids[t]] for t in range(n_prompt, len(ids)))
        # Tokens by which other choices go on from this one.
        following = {row[len(ids)] for row in rows if row[: len(ids)] == ids and row != ids}
        goes_on = torch.zeros((), dtype=torch.double)
        for token in following:
            goes_on += logprob_LV[-1, token].exp()
        logprobs.append(float(of_choice + torch.log1p(-goes_on)))
    return logprobs


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_choices_equal_brute_force(family: str) -> None:
    tokenizer = word_tokenizer(probe_texts(), DIGITS, "isolated")
    model = sharp(make_family_model(family, vocab_size=len(tokenizer), num_hidden_layers=2))
    examples = KVRetrieval((1, 12), keys=KEYS).examples(6)
    result = answer_choices(model, tokenizer, examples, batch_size=4)
    for index, example in enumerate(examples):
        expected = brute_force(model, tokenizer, example)
        of_answer = expected[example.choices.index(example.answer)]
        assert result.logprob_EC[index] == pytest.approx(expected, abs=2e-4)
        assert float(result.answer_logprob_E[index]) == pytest.approx(of_answer, abs=2e-4)
        assert bool(result.correct_E[index]) == (of_answer == max(expected))


def test_a_choice_is_not_counted_as_the_beginning_of_another() -> None:
    """The model is about to write 84; " 8" alone has the higher summed log-probability."""
    eight = 8
    four = 4
    two = 2
    choices = ((eight,), (eight, four), (two,))
    stops = ((four,), (), ())
    example = EncodedExample((1,), choices, n_shared=0, stops=stops, answer=1)
    # Of a token after others.
    probability = {((), eight): 0.9, ((eight,), four): 0.95, ((), two): 0.05}
    target_logprob_1Q = torch.tensor([[probability[target] for target in example.targets]]).log()
    (logprob_C,) = example.choice_logprobs(target_logprob_1Q)
    assert logprob_C.exp().tolist() == pytest.approx([0.9 * 0.05, 0.9 * 0.95, 0.05])


@torch.no_grad()
def test_prompts_run_once_however_many_choices(monkeypatch) -> None:
    tokenizer = word_tokenizer(probe_texts(), DIGITS)
    model = make_family_model("llama", vocab_size=len(tokenizer))
    shapes: list[torch.Size] = []
    forward = model.forward

    def noting(*args, **kwargs):
        shapes.append(kwargs["input_ids"].shape)
        return forward(*args, **kwargs)

    monkeypatch.setattr("hybrid_distill.probes.answering.accepts", lambda model, name: True)
    monkeypatch.setattr(model, "forward", noting)
    answer_choices(model, tokenizer, KVRetrieval(30, keys=KEYS).examples(1))
    _, contexts = shapes
    assert contexts[0] <= 10, "ten first digits at most"
    assert contexts[1] == 1, "one token each"


def test_logits_that_are_not_numbers_are_no_answers(planted) -> None:
    """In float16, large activations overflow."""
    model, tokenizer = planted
    overflowing = copy.deepcopy(model)
    with torch.no_grad():
        overflowing.model.layers[0].mlp.down_proj.weight.fill_(torch.inf)
    examples = KVRetrieval(3, keys=KEYS).examples(2)
    refused = pytest.raises(ValueError, match=naming("LlamaForCausalLM", "float32"))
    with refused:
        answer_choices(overflowing, tokenizer, examples)
    with refused:
        answer_generation(overflowing, tokenizer, examples)
    batches = text_batches(overflowing, tokenizer, [examples[0].prompt], max_tokens=8, batch_size=1)
    with refused:
        compare_on_text(overflowing, None, list(batches))
    batches = text_batches(model, tokenizer, [examples[0].prompt], max_tokens=8, batch_size=1)
    with refused:
        compare_on_text(model, overflowing, list(batches))


@pytest.mark.parametrize("n_steps", [1, 2, 3])
def test_logits_that_become_nan_while_decoding_are_no_answers(planted, n_steps: int) -> None:
    """Whichever token they would have chosen, ``n_steps`` after the prompt."""
    model, tokenizer = planted
    breaking = copy.deepcopy(model)
    steps: list[int] = []

    def break_last_step(head: nn.Module, args: object, logits_BLV: Tensor) -> None:
        steps.append(len(steps))
        if len(steps) == n_steps:
            logits_BLV[-1, -1, 5] = torch.nan

    breaking.lm_head.register_forward_hook(break_last_step)
    prompt = tokenize(tokenizer, [KVRetrieval(3, keys=KEYS).examples(1)[0].prompt])
    ids_BL, mask_BL = left_pad(prompt, model.device)
    with pytest.raises(ValueError, match=naming("LlamaForCausalLM", "float32")):
        generate_ids(
            breaking, input_ids=ids_BL, attention_mask=mask_BL, max_new_tokens=3, do_sample=False
        )
    expected = 3
    if n_steps == 1:
        expected = 1
    assert len(steps) == expected


def test_a_models_own_settings_for_generate_are_left_out(planted, recwarn) -> None:
    """Instruct models bring penalties for repeating what they were told, which is what a probe asks for."""
    model, tokenizer = planted
    examples = KVRetrieval(3, keys=KEYS).examples(4)
    expected = generate_greedily(model, tokenizer, examples)
    own = copy.deepcopy(model.generation_config)
    own.update(
        repetition_penalty=9.0, no_repeat_ngram_size=1, do_sample=True, top_k=5, temperature=0.6
    )
    penalized = copy.deepcopy(model)
    penalized.generation_config = own

    assert generate_greedily(penalized, tokenizer, examples) == expected
    assert penalized.generation_config is own
    assert not recwarn.list


def test_an_adapters_model_keeps_its_settings_for_generate(planted) -> None:
    """PEFT gives its wrapper's settings to the model in it: merged and exported, that would have lost its own."""
    base, tokenizer = copy.deepcopy(planted)
    base.generation_config.repetition_penalty = 1.3
    wrapped: Any = get_peft_model(base, LoraConfig(target_modules=["q_proj"]))
    generate_greedily(wrapped, tokenizer, KVRetrieval(3, keys=KEYS).examples(1))
    assert wrapped.generation_config.repetition_penalty == 1.3
    assert wrapped.merge_and_unload().generation_config.repetition_penalty == 1.3


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_without_a_cache_the_answers_are_the_same(family: str) -> None:
    tokenizer = word_tokenizer(probe_texts(), DIGITS)
    model = sharp(make_family_model(family, vocab_size=len(tokenizer)))
    examples = KVRetrieval((1, 12), keys=KEYS).examples(6)
    cached = answer_choices(model, tokenizer, examples, batch_size=4)
    texts = generate_greedily(model, tokenizer, examples)
    with without_cache(model):
        uncached = answer_choices(model, tokenizer, examples, batch_size=4)
        assert generate_greedily(model, tokenizer, examples) == texts
    # Sums of float32 logits, which each CPU rounds in its own way.
    torch.testing.assert_close(
        uncached.answer_logprob_E, cached.answer_logprob_E, rtol=1e-6, atol=1e-7
    )
    assert model.generation_config.use_cache, "the setting was not put back"


def test_models_that_compute_all_logits_give_the_same(planted, monkeypatch) -> None:
    """Their forward knows neither positions nor logits_to_keep."""
    examples = KVRetrieval(6, keys=KEYS).examples(4)
    expected = answer_choices(*planted, examples).answer_logprob_E
    monkeypatch.setattr("hybrid_distill.probes.answering.accepts", lambda model, name: False)
    actual = answer_choices(*planted, examples).answer_logprob_E
    torch.testing.assert_close(actual, expected)


@torch.no_grad()
@pytest.mark.parametrize(("pattern", "n_steps"), [(WHOLE, 2), (DIGITS, 3)])
def test_generation_is_greedy_whatever_the_model_is_set_to(pattern: str, n_steps: int) -> None:
    """Each step takes the likeliest token, for one token more than the longest answer has."""
    tokenizer = word_tokenizer(probe_texts(), pattern)
    model = make_family_model("llama", vocab_size=len(tokenizer))
    model.generation_config.update(
        do_sample=True, temperature=5.0, top_k=3, num_beams=2, eos_token_id=None
    )
    two_digits = [e for e in KVRetrieval(6, keys=KEYS).examples(20) if len(e.answer) == len(" 84")]
    examples = two_digits[:4]

    expected = []
    for example in examples:
        ids = tokenizer(example.prompt, return_tensors="pt")["input_ids"]
        for _ in range(n_steps):
            likeliest = model(ids).logits[:, -1:].argmax(-1)
            ids = torch.cat([ids, likeliest], dim=1)
        expected.append(tokenizer.decode(ids[0, -n_steps:]))
    with eval_mode(model):
        assert generate_greedily(model, tokenizer, examples) == expected


def test_the_answer_must_be_above_every_other_choice() -> None:
    result = choice_result([[-1.0, -2.0], [-1.0, -1.0], [-2.0, -1.0]], answers=[0, 0, 0])
    assert result.correct_E.tolist() == [True, False, False]
    assert result.answer_logprob_E.tolist() == [-1.0, -1.0, -2.0]
    assert result.accuracy == pytest.approx(1 / 3)


def test_both_readings_find_a_known_circuits_answers_and_change_nothing(planted) -> None:
    model, tokenizer = planted
    model = copy.deepcopy(model).train()
    model.generation_config.do_sample = True
    model.generation_config.temperature = 5.0
    settings = model.generation_config.to_dict()
    special_tokens = dict(tokenizer.special_tokens_map)
    padding_side = tokenizer.padding_side
    assert tokenizer.pad_token is None
    assert model.generation_config.pad_token_id is None

    examples = KVRetrieval(8, keys=KEYS).examples(24)
    assert answer_choices(model, tokenizer, examples).accuracy > 0.9
    assert answer_generation(model, tokenizer, examples).double().mean() > 0.9

    assert tokenizer.padding_side == padding_side
    assert dict(tokenizer.special_tokens_map) == special_tokens
    assert model.generation_config.to_dict() == settings
    assert model.training


def test_a_beginning_of_text_is_added_and_an_end_of_text_never() -> None:
    tokenizer = word_tokenizer(["a b"], bos_token="<s>", eos_token="</s>")
    assert tokenize(tokenizer, ["a b"]) == [(3, 4)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    assert tokenizer("a b")["input_ids"] == [1, 3, 4, 2]
    assert tokenize(tokenizer, ["a b"]) == [(1, 3, 4)]
    assert tokenize(tokenizer, []) == []


def test_choices_that_a_tokenizer_cannot_tell_apart_are_refused() -> None:
    tokenizer = word_tokenizer(["only these words"])
    with pytest.raises(ValueError, match=naming("' 1'", "' 2'")):
        encode_example(tokenizer, Example("these words", " 1", (" 1", " 2")))


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        (" 84", (" 84", "84\nThe", " 84.", " 84 and"), (" 845", " 8", " 8 4", " 184", "")),
        (" blue", (" blue, they say",), (" bluebird",)),
    ],
)
def test_an_answer_may_be_followed_by_anything_but_its_own_kind(
    answer: str, right: tuple[str, ...], wrong: tuple[str, ...]
) -> None:
    assert all(begins_with(text, answer) for text in right)
    assert not any(begins_with(text, answer) for text in wrong)
