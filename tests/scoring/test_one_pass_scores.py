"""Head scores from one or few passes: against derivatives, full attention maps, and the planted circuit."""

from dataclasses import dataclass, field

import pytest
import torch
import transformers
from conftest import FAMILIES, make_family_model
from head_tables import some_scores
from planted import AGGREGATE, GATHER_ASKED_KEY, GATHER_VALUE_KEY, HEAD_DIM, KEYS, PLANTED, planted_teacher, probe_texts
from planted import word_tokenizer as make_tokenizer
from torch import Tensor
from transformers import PreTrainedModel

from hybrid_distill.plan import HeadId, HeadPlan
from hybrid_distill.probes import Example
from hybrid_distill.probes.answering import answer_choices, encode_example, tokenize
from hybrid_distill.probes.kv_retrieval import KVRetrieval
from hybrid_distill.scoring import HeadScores, attention, score_heads
from hybrid_distill.scoring.attention import answer_positions, attention_to_answer, copy_score
from hybrid_distill.scoring.attribution import (
    answer_logprobs,
    attribution_scores,
    measured_recall,
    prefilter,
    recall_at_k,
)
from hybrid_distill.student.build import build_student
from hybrid_distill.teacher import ablate_heads, head_sites, load_teacher

PROBE = KVRetrieval(8, keys=KEYS)
QUIET = {"progress": False}


@dataclass(frozen=True)
class Ragged:
    """Dictionaries of different sizes in turn: batches need padding."""

    chance: float = 0.2
    sizes: tuple[int, ...] = field(default=(3, 7, 5))

    def examples(self, n: int) -> list[Example]:
        return [KVRetrieval(self.sizes[i % 3], keys=KEYS).examples(i + 1)[i] for i in range(n)]

    def describe(self) -> dict[str, object]:
        return {"name": "ragged"}


@pytest.fixture(scope="module")
def teacher():
    return planted_teacher()


def unsure_teacher():
    """The planted teacher off its plateaus: a softer output, and an aggregate head that looks about."""
    model, tokenizer = planted_teacher()
    rows = slice(AGGREGATE.head * HEAD_DIM, (AGGREGATE.head + 1) * HEAD_DIM)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.3)
        model.model.layers[AGGREGATE.layer].self_attn.q_proj.weight[rows].mul_(0.05)
    return model, tokenizer


@pytest.fixture(scope="module")
def digits():
    """Values of two digits are two tokens, and some values begin others."""
    return make_tokenizer([*probe_texts(), "0 1 2 3 4 5 6 7 8 9"], r"\n|:|'|\p{N}")


def random_model(family: str, vocab_size: int) -> PreTrainedModel:
    if family in FAMILIES:
        return make_family_model(family, vocab_size=vocab_size)
    torch.manual_seed(0)
    shape = {"vocab_size": vocab_size, "hidden_size": 32, "num_hidden_layers": 3, "initializer_range": 0.2}
    if family == "mamba2":
        config = transformers.Mamba2Config(
            **shape, state_size=8, num_heads=8, head_dim=8, n_groups=2, chunk_size=4, bos_token_id=0, eos_token_id=0
        )
        return transformers.Mamba2ForCausalLM(config).eval()
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 48}
    assert family == "gemma2"
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**shape, **heads, sliding_window=6)).eval()


def by_derivative(model: PreTrainedModel, tokenizer, probe, head: HeadId, n: int, step: float = 0.01) -> float:
    """Loss of the answer's mean log-probability per share of a head that is taken away."""
    site = head_sites(model)[head.layer]

    def logprob(scale: float) -> float:
        def scaled(module, args: tuple[Tensor, ...]):
            heads_BLHP = args[0].unflatten(-1, (site.n_heads, site.head_dim)).clone()
            heads_BLHP[:, :, head.head] *= scale
            return (heads_BLHP.flatten(-2),)

        hook = site.o_proj.register_forward_pre_hook(scaled)
        try:
            return answer_choices(model, tokenizer, probe.examples(n)).answer_logprob_E.mean().item()
        finally:
            hook.remove()

    return (logprob(1 + step) - logprob(1 - step)) / (2 * step)


@pytest.mark.parametrize("kind", ["planted", "qwen3", "gemma2", "mamba2", "digits"])
def test_drop_is_the_derivative(kind: str, digits) -> None:
    """Taking away a share of a head, padded and in batches of any size, for answers of one or of several tokens."""
    model, tokenizer = unsure_teacher()
    if kind == "digits":
        tokenizer = digits
    if kind != "planted":
        model = random_model("llama" if kind == "digits" else kind, len(tokenizer))
    scores = attribution_scores(model, tokenizer, Ragged(), by="drop", n_examples=5, batch_size=3, **QUIET)
    size = scores.logprob_drop_LH.abs().max().item()
    for head in (*PLANTED, HeadId(0, 0), HeadId(2, 3)):
        expected = by_derivative(model, tokenizer, Ragged(), head, 5)
        assert scores.logprob_drop_LH[head].item() == pytest.approx(expected, rel=0.02, abs=1e-3 * size), head


@pytest.mark.parametrize("which", ["words", "digits"])
def test_the_answers_log_probability_is_that_of_answer_choices(teacher, digits, which: str) -> None:
    tokenizer = digits if which == "digits" else teacher[1]
    model = random_model("llama", len(tokenizer))
    examples = [
        Example(e.prompt, min(e.choices, key=len) if i % 2 else e.answer, e.choices)
        for i, e in enumerate(KVRetrieval(30, keys=KEYS).examples(12))
    ]
    encoded = [encode_example(tokenizer, example) for example in examples]
    assert any(e.stops[e.answer] for e in encoded) == (which == "digits")
    expected = answer_choices(model, tokenizer, examples).answer_logprob_E
    assert torch.allclose(answer_logprobs(model, encoded), expected, atol=1e-5)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_sure_teacher_hides_its_circuit_from_the_drop_but_not_from_the_sensitivity(seed: int) -> None:
    """Gather heads feed an attention that is all but one: a little less of them changes nothing, none of them all."""
    model, tokenizer = planted_teacher(seed=seed)
    options = {"n_examples": 16, **QUIET}
    exact = score_heads(model, tokenizer, PROBE, **options)
    drop = attribution_scores(model, tokenizer, PROBE, by="drop", **options)
    assert exact.logprob_drop_LH[GATHER_ASKED_KEY] > 15 and drop.logprob_drop_LH.abs().max() < 0.1
    assert recall_at_k(drop, exact, 3, 4) < 1
    assert prefilter(attribution_scores(model, tokenizer, PROBE, **options), 4) >= PLANTED


def test_certainty_beyond_rounding_still_has_log_odds() -> None:
    """The answer's probability is 1 in float32; its log-odds are finite, and so is their gradient."""
    model, tokenizer = planted_teacher()
    with torch.no_grad():
        model.lm_head.weight.mul_(4)
    assert answer_choices(model, tokenizer, PROBE.examples(4)).answer_logprob_E.max() == 0
    drop = attribution_scores(model, tokenizer, PROBE, by="drop", n_examples=4, **QUIET)
    sensitivity = attribution_scores(model, tokenizer, PROBE, n_examples=4, **QUIET)
    assert drop.logprob_drop_LH.abs().max() < 1e-6
    assert 1 < sensitivity.logprob_drop_LH[AGGREGATE] < 100


def test_sensitivity_is_the_mean_magnitude_in_log_odds() -> None:
    model, tokenizer = unsure_teacher()
    per_example = []
    for example in PROBE.examples(4):
        p = answer_choices(model, tokenizer, [example]).answer_logprob_E.exp()
        drop = attribution_scores(model, tokenizer, One(example), by="drop", n_examples=1, **QUIET).logprob_drop_LH
        per_example.append(drop.abs() / (1 - p))
    sensitivity = attribution_scores(model, tokenizer, PROBE, n_examples=4, **QUIET)
    stacked = torch.stack(per_example)
    assert torch.allclose(sensitivity.logprob_drop_LH, stacked.mean(0), rtol=1e-3)
    assert torch.allclose(sensitivity.logprob_se_LH, stacked.std(0) / 2, rtol=1e-2)


@dataclass(frozen=True)
class One:
    example: Example
    chance: float = 0.1

    def examples(self, n: int) -> list[Example]:
        return [self.example]

    def describe(self) -> dict[str, object]:
        return {"name": "one"}


def test_attribution_leaves_the_model_as_it_was() -> None:
    model, tokenizer = planted_teacher()
    model.model.norm.weight.requires_grad_(False)
    model.train()
    asked = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    attribution_scores(model, tokenizer, PROBE, n_examples=2, **QUIET)
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == asked
    assert all(parameter.grad is None for parameter in model.parameters()) and model.training
    assert torch.is_grad_enabled() and not any(module._forward_hooks for module in model.modules())


def ranked(*heads: tuple[int, int], n_layers: int = 2, n_heads: int = 3) -> HeadScores:
    """Scores that rank these heads first, in this order."""
    logprob_LH = torch.zeros(n_layers, n_heads, dtype=torch.float64)
    for place, head in enumerate(heads):
        logprob_LH[head] = 10 - place
    return some_scores(torch.zeros_like(logprob_LH), logprob_LH)


def test_recall_is_the_share_of_the_exact_top_that_the_estimate_lets_through() -> None:
    exact, estimate = ranked((1, 0), (0, 2), (1, 2)), ranked((0, 2), (0, 1), (1, 0), (1, 1), (1, 2))
    assert prefilter(estimate, 2) == {HeadId(0, 2), HeadId(0, 1)}
    recalls = {(k, width): recall_at_k(estimate, exact, k, width) for k in (1, 3) for width in (1, 3, 5)}
    assert recalls == {(1, 1): 0, (1, 3): 1, (1, 5): 1, (3, 1): 1 / 3, (3, 3): 2 / 3, (3, 5): 1}
    with pytest.raises(ValueError, match="is 7, but 6 heads are scored"):
        prefilter(estimate, 7)


def test_recall_is_measured_against_exact_ablation(teacher) -> None:
    right = ranked(*PLANTED, n_layers=4, n_heads=4)
    half = ranked(AGGREGATE, (0, 0), (3, 3), GATHER_VALUE_KEY, n_layers=4, n_heads=4)
    options = {"k": 3, "widths": (1, 3, 4), "n_examples": 4, **QUIET}
    assert measured_recall(*teacher, PROBE, right, **options) == {1: 1 / 3, 3: 1, 4: 1}
    assert measured_recall(*teacher, PROBE, half, **options) == {1: 1 / 3, 3: 1 / 3, 4: 2 / 3}


@pytest.mark.parametrize("score", [attention_to_answer, copy_score])
@pytest.mark.parametrize("probe", [PROBE, Ragged()], ids=["even", "ragged"])
def test_attention_finds_the_aggregate_head_and_no_gather_head(teacher, score, probe) -> None:
    """Gather heads look two tokens back from the question's end: never at a value."""
    scores = score(*teacher, probe, n_examples=12, batch_size=5, **QUIET)
    assert scores.ranking()[0] == AGGREGATE and scores.accuracy_drop_LH[AGGREGATE] > 0.9
    others = scores.accuracy_drop_LH.clone()
    others[AGGREGATE] = 0
    assert others.max() < 0.3
    assert scores.accuracy_drop_LH[GATHER_ASKED_KEY] < 0.01 and scores.accuracy_drop_LH[GATHER_VALUE_KEY] < 0.01
    assert HeadPlan.top_k(scores, 1).kept == (AGGREGATE,)


def test_looking_is_not_copying(teacher) -> None:
    """With its output taken away the aggregate head still looks at the answer, but that is no longer generated."""
    model, tokenizer = teacher
    with ablate_heads(model, [AGGREGATE]):
        looked = attention_to_answer(model, tokenizer, PROBE, n_examples=16, **QUIET)
        copied = copy_score(model, tokenizer, PROBE, n_examples=16, **QUIET)
    assert looked.accuracy_drop_LH[AGGREGATE] > 0.9
    assert copied.accuracy_drop_LH[AGGREGATE] < 0.4
    assert copied.accuracy_drop_LH.max() <= copied.baseline["accuracy"] < 0.4


@pytest.mark.parametrize("family", [*FAMILIES, "gemma2"])
def test_maps_are_those_of_the_whole_prompt(family: str, teacher) -> None:
    """One step on a cache, padded, with sliding windows or not: as read from all maps of each prompt alone."""
    tokenizer = teacher[1]
    model = random_model(family, len(tokenizer))
    before = model.config._attn_implementation
    scores = attention_to_answer(model, tokenizer, Ragged(), n_examples=6, batch_size=4, **QUIET)
    assert model.config._attn_implementation == before == ("eager" if family == "gemma2" else "sdpa")
    model.set_attn_implementation("eager")
    shares = []
    for example in Ragged().examples(6):
        row = torch.tensor([tokenizer(example.prompt)["input_ids"]])
        with torch.no_grad():
            maps = torch.cat(model(row, output_attentions=True).attentions)
        place = row[0].tolist().index(tokenizer.convert_tokens_to_ids(example.answer.strip()))
        shares.append(maps[:, :, -1, place].double())
    assert torch.allclose(scores.accuracy_drop_LH, torch.stack(shares).mean(0), atol=1e-6)
    assert torch.allclose(scores.accuracy_se_LH, torch.stack(shares).std(0) / 6**0.5, atol=1e-6)
    lengths = [len(tokenizer(example.prompt)["input_ids"]) for example in Ragged().examples(6)]
    assert scores.baseline["uniform"] == pytest.approx(sum(1 / length for length in lengths) / 6)


def test_a_token_counts_as_copied_where_it_is_looked_at_while_it_is_generated(digits, monkeypatch) -> None:
    """Answers of two digits: both, one of them, the same digit elsewhere, or the right place at the wrong time."""
    example = Example("b:88 a:84 c:48 a", " 84", (" 88", " 84", " 48"))
    tokenizer = make_tokenizer([example.prompt], r":|\p{N}")  # b : 8 8 a : 8 4 c : 4 8 a
    first, second, elsewhere = 6, 7, 3
    looked = [[first, second], [first, 0], [elsewhere, second], [second, first]]
    eight_heads = torch.tensor([*looked, *looked]).T[None, :, None, :]  # [B, T, K, H]
    model = random_model("llama", len(tokenizer))

    def generated(text: str) -> list[float]:
        tokens = torch.tensor([tokenizer(text)["input_ids"]])
        monkeypatch.setattr(attention, "_generate", lambda *args: (tokens, eight_heads.expand(1, 2, 3, 8)))
        scores = copy_score(model, tokenizer, One(example), n_examples=1, **QUIET)
        assert scores.baseline["accuracy"] == (text == "84")
        return scores.accuracy_drop_LH[0, :4].tolist()

    assert answer_positions(tokenizer, example) == (first, second)
    assert generated("84") == [1, 0.5, 0.5, 0]
    assert generated("88") == [0.5, 0.5, 0, 0.5]  # different tokens are counted: the 8 once
    assert generated("bc") == [0, 0, 0, 0]


def test_generation_is_greedy_and_looks_from_where_it_predicts(teacher) -> None:
    """Positions count from each prompt's own start, generated tokens included, whatever the padding."""
    model = random_model("qwen3", len(teacher[1]))
    prompts = [tuple(teacher[1](example.prompt)["input_ids"]) for example in Ragged().examples(3)]
    with torch.no_grad():
        tokens_BT, looked_BTKH = attention._generate(model, head_sites(model), prompts, 3)
    model.set_attn_implementation("eager")
    for prompt, tokens_T, looked_TKH in zip(prompts, tokens_BT, looked_BTKH):
        row = torch.tensor([prompt])
        for token, looked_KH in zip(tokens_T, looked_TKH):
            output = model(row, output_attentions=True)
            assert output.logits[0, -1].argmax() == token
            assert torch.equal(looked_KH, torch.cat(output.attentions)[:, :, -1].argmax(-1))
            row = torch.cat([row, token[None, None]], dim=1)


def test_the_answer_is_found_as_a_whole_number_after_any_beginning() -> None:
    """The embedded tokenizer sets a beginning-of-text token, which offsets do not count."""
    tokenizer = load_teacher("tiny")[1]
    for example in [*KVRetrieval(50).examples(5), Example("8:84 184:3 a8 8", " 8", (" 8", " 3"))]:
        tokens = tokenize(tokenizer, [example.prompt])[0]
        positions = answer_positions(tokenizer, example)
        pieces = [piece.lstrip("Ġ") for piece in tokenizer.convert_ids_to_tokens(tokens)]
        assert [pieces[p] for p in positions] == [example.answer.strip()] * len(positions)
        assert len(positions) == (2 if example.prompt.startswith("8") else 1)
    with pytest.raises(ValueError, match="'Rome' does not stand in its prompt"):
        answer_positions(tokenizer, Example("The capital of Italy is", " Rome", (" Rome",)))


def test_models_without_attention_maps_are_refused(teacher) -> None:
    tokenizer = teacher[1]
    student, _ = build_student(teacher[0], HeadPlan.none(teacher[0]), d_state=4)
    for model, kind in ((random_model("mamba2", len(tokenizer)), "ssm"), (student, "hybrid")):
        for score in (attention_to_answer, copy_score):
            with pytest.raises(ValueError, match=rf"no heads of kind 'attention'.*{kind}"):
                score(model, tokenizer, PROBE, n_examples=1, **QUIET)


def test_attention_without_maps_is_refused() -> None:
    model, tokenizer = planted_teacher()
    attend = model.model.layers[1].self_attn.forward
    model.model.layers[1].self_attn.forward = lambda *args, **kwargs: (attend(*args, **kwargs)[0], None)
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn .* does not return attention maps.*attribution"):
        attention_to_answer(model, tokenizer, PROBE, n_examples=1, **QUIET)
    assert model.config._attn_implementation == "sdpa"
    assert not any(module._forward_hooks for module in model.modules())
