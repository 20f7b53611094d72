"""Reading answers: choices against brute force, and greedy generation."""

import copy

import pytest
import torch
from conftest import FAMILIES, make_family_model
from planted import KEYS, planted_teacher, probe_texts, word_tokenizer
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from hybrid_distill.probes import Example
from hybrid_distill.probes.answering import (
    EncodedExample,
    answer_choices,
    answer_generation,
    begins_with,
    choice_result,
    encode_example,
    generate_greedily,
    tokenize,
)
from hybrid_distill.probes.kv_retrieval import KVRetrieval
from hybrid_distill.teacher import eval_mode

WHOLE, DIGITS = r"\n|:|'|\p{N}+", r"\n|:|'|\p{N}"


@pytest.fixture(scope="module")
def planted() -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    return planted_teacher()


def sharp(model: PreTrainedModel) -> PreTrainedModel:
    """Logits of a random model are all alike; make its choices differ."""
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(40)
    return model


def brute_force(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, example: Example) -> list[float]:
    """One forward per choice on the text as it is; P(choice) less P(longer choices that begin with it)."""
    n_prompt = len(tokenizer(example.prompt)["input_ids"])
    tokens = {choice: tokenizer(example.prompt + choice)["input_ids"] for choice in example.choices}
    logprobs = []
    for ids in tokens.values():
        logits_LV = model(torch.tensor([ids])).logits[0].double()
        logprob_LV = logits_LV.log_softmax(-1)
        total = sum(logprob_LV[t - 1, ids[t]] for t in range(n_prompt, len(ids)))
        longer = {other[len(ids)] for other in tokens.values() if other[: len(ids)] == ids and other != ids}
        going_on = sum(logprob_LV[-1, token].exp() for token in longer)
        logprobs.append(float(total + torch.log1p(-torch.as_tensor(going_on))))
    return logprobs


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_choices_equal_brute_force(family: str) -> None:
    tokenizer = word_tokenizer(probe_texts(), DIGITS, "isolated")
    model = sharp(make_family_model(family, vocab_size=len(tokenizer), num_hidden_layers=2))
    examples = KVRetrieval((1, 12), keys=KEYS).examples(6)
    result = answer_choices(model, tokenizer, examples, batch_size=4)
    for row, example, correct, answer in zip(
        result.logprob_EC, examples, result.correct_E, result.answer_logprob_E, strict=True
    ):
        expected = brute_force(model, tokenizer, example)
        assert row == pytest.approx(expected, abs=2e-4)
        right = example.choices.index(example.answer)
        assert float(answer) == pytest.approx(expected[right], abs=2e-4)
        assert bool(correct) == (max(range(len(expected)), key=expected.__getitem__) == right)


def test_a_choice_is_not_counted_as_the_beginning_of_another() -> None:
    """The model is about to write 84, digit by digit; " 8" alone has the higher summed log-probability."""
    eight, four, two = 8, 4, 2
    example = EncodedExample((1,), ((eight,), (eight, four), (two,)), 0, ((four,), (), ()), answer=1)
    probability = {((), eight): 0.9, ((eight,), four): 0.95, ((), two): 0.05}
    values_1C = example.choice_logprobs(torch.tensor([[probability[read] for read in example.reads]]).log())
    assert values_1C[0].exp().tolist() == pytest.approx([0.9 * 0.05, 0.9 * 0.95, 0.05])


@torch.no_grad()
def test_prompts_run_once_however_many_choices(family_model, monkeypatch) -> None:
    tokenizer = word_tokenizer(probe_texts(), DIGITS)
    model = family_model("llama", vocab_size=len(tokenizer))
    n_tokens = []
    forward = model.forward

    def counting(*args, **kwargs):
        n_tokens.append(kwargs["input_ids"].shape)
        return forward(*args, **kwargs)

    example = KVRetrieval(30, keys=KEYS).examples(1)
    monkeypatch.setattr("hybrid_distill.probes.answering.accepts", lambda model, name: True)
    monkeypatch.setattr(model, "forward", counting)
    answer_choices(model, tokenizer, example)
    assert len(n_tokens) == 2
    assert n_tokens[1][0] <= 10 and n_tokens[1][1] == 1, "ten first digits at most, one token each"


def test_models_that_compute_all_logits_give_the_same(planted, monkeypatch) -> None:
    """Their forward knows neither positions nor logits_to_keep."""
    examples = KVRetrieval(6, keys=KEYS).examples(4)
    ours = answer_choices(*planted, examples).answer_logprob_E
    monkeypatch.setattr("hybrid_distill.probes.answering.accepts", lambda model, name: False)
    torch.testing.assert_close(answer_choices(*planted, examples).answer_logprob_E, ours)


@torch.no_grad()
@pytest.mark.parametrize("pattern", [WHOLE, DIGITS])
def test_generation_is_greedy_whatever_the_model_is_set_to(family_model, pattern: str) -> None:
    """Each step takes the likeliest token, for one token more than the longest answer has."""
    tokenizer = word_tokenizer(probe_texts(), pattern)
    model = family_model("llama", vocab_size=len(tokenizer))
    model.generation_config.update(do_sample=True, temperature=5.0, top_k=3, num_beams=2, eos_token_id=None)
    examples = [e for e in KVRetrieval(6, keys=KEYS).examples(20) if len(e.answer) == 3][:4]
    expected = []
    for example in examples:
        ids = tokenizer(example.prompt, return_tensors="pt")["input_ids"]
        n_prompt = ids.shape[1]
        for _ in range(2 if pattern == WHOLE else 3):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
        expected.append(tokenizer.decode(ids[0, n_prompt:]))
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
    model.generation_config.do_sample, model.generation_config.temperature = True, 5.0
    settings = model.generation_config.to_dict()
    assert tokenizer.pad_token is None and model.generation_config.pad_token_id is None
    before = (tokenizer.padding_side, dict(tokenizer.special_tokens_map), len(tokenizer))
    examples = KVRetrieval(8, keys=KEYS).examples(24)
    assert answer_choices(model, tokenizer, examples).accuracy > 0.9
    assert answer_generation(model, tokenizer, examples).double().mean() > 0.9
    assert (tokenizer.padding_side, dict(tokenizer.special_tokens_map), len(tokenizer)) == before
    assert model.generation_config.to_dict() == settings
    assert model.training


def test_a_beginning_of_text_is_added_and_an_end_of_text_never() -> None:
    tokenizer = word_tokenizer(["a b"], bos_token="<s>", eos_token="</s>")
    assert tokenize(tokenizer, ["a b"]) == [(3, 4)]
    from tokenizers.processors import TemplateProcessing

    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    assert tokenizer("a b")["input_ids"] == [1, 3, 4, 2]
    assert tokenize(tokenizer, ["a b"]) == [(1, 3, 4)]
    assert tokenize(tokenizer, []) == []


def test_choices_that_a_tokenizer_cannot_tell_apart_are_refused() -> None:
    tokenizer = word_tokenizer(["only these words"])
    with pytest.raises(ValueError, match="become the same tokens"):
        encode_example(tokenizer, Example("these words", " 1", (" 1", " 2")))


def test_an_answer_may_be_followed_by_anything_but_its_own_kind() -> None:
    assert all(begins_with(text, " 84") for text in (" 84", "84\nThe", " 84.", " 84 and"))
    assert not any(begins_with(text, " 84") for text in (" 845", " 8", " 8 4", " 184", ""))
    assert begins_with(" blue, they say", " blue") and not begins_with(" bluebird", " blue")
