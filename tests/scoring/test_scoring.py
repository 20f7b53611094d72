"""Ranking heads: the planted circuit is the ground truth."""

import math
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from conftest import make_family_model
from head_tables import some_scores
from messages import logged_by, naming
from planted import (
    AGGREGATE,
    KEYS,
    N_HEADS,
    N_KV_HEADS,
    N_LAYERS,
    PLANTED,
    planted_teacher,
    word_tokenizer,
)

from hybrid_distill.plan import HeadId, HeadPlan
from hybrid_distill.probes.answering import answer_choices
from hybrid_distill.probes.checks import CannotAnswer
from hybrid_distill.probes.encoding import encode_example
from hybrid_distill.probes.knowledge import Knowledge
from hybrid_distill.probes.kv_retrieval import KVRetrieval
from hybrid_distill.scoring import HeadScores, ablation, score_heads
from hybrid_distill.scoring.batch_sizer import BatchSizer
from hybrid_distill.scoring.forwards import Forwards, FromLayer
from hybrid_distill.scoring.head_scores import TABLES, heads_of
from hybrid_distill.scoring.probe_batch import batches_of
from hybrid_distill.scoring.probe_rows import PromptRow
from hybrid_distill.scoring.shortcuts import fastest_exact
from hybrid_distill.student.build import build_student
from hybrid_distill.teacher import ablate_heads, fingerprint, head_sites

score = partial(score_heads, progress=False)
PROBE = KVRetrieval(8, keys=KEYS)
TEXTS = [f"{KEYS[i]} : {i} \n {KEYS[i + 1]} {KEYS[i]} : {i + 2}" for i in range(4)]
QUIET = 0.008  # noise at which every planted teacher answers nearly all questions


@pytest.fixture(scope="module")
def teacher():
    return planted_teacher()


@pytest.fixture(scope="module")
def scores(teacher) -> HeadScores:
    return score(*teacher, PROBE, n_examples=32, batch_size=20, control_texts=TEXTS)


@pytest.mark.parametrize("seed", range(3))
def test_exactly_the_planted_heads_come_first(seed: int) -> None:
    """However the noise of the other heads is drawn: the circuit's three heads, and no other."""
    model, tokenizer = planted_teacher(QUIET, seed)
    scores = score(model, tokenizer, KVRetrieval(8, seed, keys=KEYS), n_examples=16)
    assert scores.baseline["accuracy"] > 0.9
    assert scores.baseline["control_loss"] is None
    assert scores.control_drop_LH is None
    assert set(scores.ranking()[:3]) == PLANTED
    for head in scores.ranking():
        drop = scores.accuracy_drop_LH[head]
        assert drop > 0.5 if head in PLANTED else drop < 0.15
    plan = HeadPlan.top_k(scores, 3)
    assert set(plan.kept) == PLANTED
    assert plan.teacher == fingerprint(model)


def test_scores_are_those_of_ablating_each_head_by_hand(teacher, scores) -> None:
    model, tokenizer = teacher
    examples = PROBE.examples(32)
    whole = answer_choices(model, tokenizer, examples)
    for head in [AGGREGATE, HeadId(0, 0), HeadId(1, 0), HeadId(3, 3)]:
        with ablate_heads(model, [head]):
            without = answer_choices(model, tokenizer, examples)
        drop, error = mean_and_error(whole.correct_E.double() - without.correct_E.double())
        assert scores.accuracy_drop_LH[head] == pytest.approx(drop)
        assert scores.accuracy_se_LH[head] == pytest.approx(error)
        drop, error = mean_and_error(whole.answer_logprob_E - without.answer_logprob_E)
        assert scores.logprob_drop_LH[head] == pytest.approx(drop, abs=1e-3)
        assert scores.logprob_se_LH[head] == pytest.approx(error, abs=1e-3)


def mean_and_error(values: torch.Tensor) -> tuple[float, float]:
    """Return the mean and its standard error."""
    error = values.std() / math.sqrt(len(values))
    return values.mean().item(), error.item()


@torch.no_grad()
def test_control_is_the_loss_of_each_text(teacher, scores) -> None:
    model, tokenizer = teacher

    def losses() -> torch.Tensor:
        rows = [torch.tensor([tokenizer(text)["input_ids"]]) for text in TEXTS]
        return torch.stack([model(row, labels=row).loss.double() for row in rows])

    whole = losses()
    with ablate_heads(model, [AGGREGATE]):
        without = losses()
    rise, error = mean_and_error(without - whole)
    assert scores.baseline["control_loss"] == pytest.approx(whole.mean().item(), rel=1e-5)
    assert scores.control_drop_LH[AGGREGATE] == pytest.approx(rise, rel=1e-4)
    assert scores.control_se_LH[AGGREGATE] == pytest.approx(error, rel=1e-4)


def assert_one_by_one(
    scores: HeadScores, model: Any, tokenizer: Any, probe: Any, n_examples: int
) -> None:
    """Compare with the slow way: each head switched off, every forward in full."""
    examples = probe.examples(n_examples)
    whole = answer_choices(model, tokenizer, examples)
    n_lost_LH = torch.zeros(scores.accuracy_drop_LH.shape, dtype=torch.long)
    logprob_drop_LH = torch.zeros(scores.accuracy_drop_LH.shape, dtype=torch.double)
    for head in heads_of(head_sites(model)):
        with ablate_heads(model, [head]):
            without = answer_choices(model, tokenizer, examples)
        n_lost_LH[head] = whole.correct_E.sum() - without.correct_E.sum()
        logprob_drop_LH[head] = (whole.answer_logprob_E - without.answer_logprob_E).mean()
    assert logprob_drop_LH.abs().median() > 1e-3, "heads have to matter, or nothing is compared"
    n_scored_LH = (n_examples * scores.accuracy_drop_LH).round().long()
    assert torch.equal(n_scored_LH, n_lost_LH)
    torch.testing.assert_close(scores.logprob_drop_LH, logprob_drop_LH, rtol=1e-4, atol=2e-5)


PROMPT = KVRetrieval(3, keys=KEYS[:16]).examples(1)[0].prompt
# Some keys have several tokens, so that lengths differ; numbers have one, or a tree of digits.
NUMBERS = " ".join(map(str, range(100)))
WORDS = word_tokenizer([" ".join(KEYS[:16]), NUMBERS, PROMPT], r"\n|:|'|\p{N}+|e")
DIGITS = word_tokenizer([" ".join(KEYS[:16]), " ".join("0123456789"), PROMPT], r"\n|:|'|\p{N}|e")
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, eager": {"attn_implementation": "eager"},
    "llama, one layer": {"num_hidden_layers": 1},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 16},
    "olmo2": {"num_key_value_heads": 4},
    "phi3": {},
    "gpt_neox": {"num_key_value_heads": None},
    "gemma2": {"sliding_window": 16, "attn_implementation": "eager"},
}
by_tokenizer = pytest.mark.parametrize("tokenizer", [WORDS, DIGITS], ids=["words", "digits"])


def random_model(family: str, vocab_size: int = 160) -> Any:
    """Make a model with larger weights than at initialization, so that every head matters."""
    settings = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.2,
        **FAMILIES[family],
    }
    return make_family_model(family.split(",")[0], **settings)


@pytest.mark.parametrize(
    ("family", "tokenizer"),
    [
        *((family, DIGITS) for family in FAMILIES),
        # Choices of one token are read alike in all families.
        *((family, WORDS) for family in ("llama", "mistral", "gpt_neox")),
    ],
)
def test_scores_are_those_of_full_forwards_head_by_head(
    family: str, tokenizer: Any, caplog
) -> None:
    """Whatever the batch holds: lengths differ, choices have one token or form a tree."""
    model = random_model(family)
    probe = KVRetrieval(6, keys=KEYS[:16])
    scores = score(model, tokenizer, probe, n_examples=7, min_accuracy=0.0)
    assert_one_by_one(scores, model, tokenizer, probe, 7)
    # The mask of a tree knows no window.
    is_windowed_tree = "sliding_window" in FAMILIES[family] and tokenizer is DIGITS
    assert bool(logged_by(caplog, fastest_exact)) == is_windowed_tree


@by_tokenizer
@pytest.mark.parametrize(("n_pairs", "n_queries"), [(6, 3), (3, 2)])
def test_questions_about_one_prompt_share_its_tokens(
    n_pairs: int, n_queries: int, tokenizer: Any, caplog
) -> None:
    """The scores are those of asking each question by itself; a prompt is one sample of them."""
    model = random_model("llama")
    probe = KVRetrieval(n_pairs, keys=KEYS[:16], n_queries=n_queries)
    lengths: list[int] = []

    def note_length(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        lengths.append(kwargs["input_ids"].shape[1])

    model.register_forward_pre_hook(note_length, with_kwargs=True)
    n_prompts = 3
    scores = score(model, tokenizer, probe, n_examples=n_prompts, min_accuracy=0.0, batch_size=1)
    longest_shared = max(lengths)
    lengths.clear()
    assert_one_by_one(scores, model, tokenizer, probe, n_prompts * n_queries)
    longest_alone = max(lengths)
    assert scores.provenance["n_examples"] == n_prompts
    assert not logged_by(caplog, fastest_exact)
    assert longest_shared < 1.7 * longest_alone, "less than two prompts"


def test_equal_drops_are_ordered_by_logprob_then_by_position() -> None:
    scores = some_scores([[0.5, 0.0, 0.5], [0.9, 0.0, 0.0]], [[1.0, -1.0, 2.0], [0.0, 3.0, -1.0]])
    expected = [(1, 0), (0, 2), (0, 0), (1, 1), (0, 1), (1, 2)]
    assert scores.ranking() == [HeadId(*pair) for pair in expected]


def test_a_teacher_that_fails_the_probe_is_refused(teacher) -> None:
    model, tokenizer = teacher
    with ablate_heads(model, [AGGREGATE]):
        # What it scores, and the least that is asked for.
        with pytest.raises(CannotAnswer, match=naming("12.5%", "41.7%")):
            score(model, tokenizer, PROBE, n_examples=16)


def test_scores_record_what_they_were_made_of(scores, teacher) -> None:
    provenance = scores.provenance
    model, _ = teacher
    assert scores.n_layers == N_LAYERS
    assert scores.n_heads == N_HEADS
    assert scores.n_kv_heads == N_KV_HEADS
    assert provenance["fingerprint"] == fingerprint(model) == scores.fingerprint
    assert provenance["probe"] == PROBE.describe()
    assert provenance["n_examples"] == 32
    assert provenance["dtype"] == "float32"
    assert provenance["device"] == "cpu"
    assert provenance["control"]["texts"] == 4
    assert provenance["versions"]["torch"] == torch.__version__
    assert provenance["date"]


def test_choices_of_many_tokens_and_of_different_numbers() -> None:
    """A tree holds choices that begin one another, and examples with few and with many of them."""
    probe = Knowledge()
    texts: list[str] = []
    for example in probe.examples(12):
        texts += [example.prompt + choice for choice in example.choices]
    tokenizer = word_tokenizer(texts, r"\n|:|'|\p{L}")
    model = random_model("llama", len(tokenizer))
    scores = score(model, tokenizer, probe, n_examples=12, min_accuracy=0.0)
    assert_one_by_one(scores, model, tokenizer, probe, 12)


def random_student() -> Any:
    teacher = random_model("llama")
    plan = HeadPlan.random(teacher.config, 5, seed=1)
    student, _ = build_student(teacher, plan, d_state=4)
    return student.eval()


def random_mamba() -> Any:
    config = transformers.Mamba2Config(
        vocab_size=160,
        hidden_size=32,
        num_hidden_layers=2,
        num_heads=8,
        head_dim=8,
        state_size=8,
        n_groups=1,
        chunk_size=16,
    )
    return transformers.Mamba2ForCausalLM(config).eval()


@pytest.mark.parametrize(("make", "tokenizer"), [(random_student, DIGITS), (random_mamba, WORDS)])
def test_recurrent_heads_are_scored_in_full_forwards(make: Any, tokenizer: Any, caplog) -> None:
    """Their states go from token to token: no tree, no start in the middle of a row."""
    model = make()
    probe = KVRetrieval(3, keys=KEYS[:16])
    scores = score(model, tokenizer, probe, n_examples=3, min_accuracy=0.0)
    assert make is random_mamba or logged_by(caplog, fastest_exact)
    assert_one_by_one(scores, model, tokenizer, probe, 3)


def test_nothing_is_computed_that_is_not_needed(teacher) -> None:
    """Tokens that pass each layer's MLP: none below the ablated layer, never pads."""
    model, tokenizer = teacher
    n_rows = 6
    rows = []
    for number, example in enumerate(PROBE.examples(n_rows)):
        encoded = encode_example(tokenizer, example)
        rows.append(PromptRow(number, [example], [encoded], torch.device("cpu")))
    (batch,) = batches_of(rows)
    n_tokens_of_batch = n_rows * batch.length
    n_tokens: Counter[torch.nn.Module] = Counter()

    def count(mlp: torch.nn.Module, args: tuple[torch.Tensor]) -> None:
        n_tokens[mlp] += args[0].shape[:-1].numel()

    mlps = [block.mlp for block in model.model.layers]
    hooks = [mlp.register_forward_pre_hook(count) for mlp in mlps]
    forwards = FromLayer(model, head_sites(model), BatchSizer(model, 8))
    forwards.begin([batch])
    for layer in range(N_LAYERS):
        n_tokens.clear()
        forwards.without(batch, layer, range(N_HEADS))
        below = [0] * layer
        from_here = [N_HEADS * n_tokens_of_batch] * (N_LAYERS - layer)
        # Once for all heads: what the layers above begin with.
        from_here[0] += n_tokens_of_batch
        assert [n_tokens[mlp] for mlp in mlps] == below + from_here
    for hook in hooks:
        hook.remove()


def test_out_of_memory_halves_the_batch_and_goes_on(teacher, monkeypatch, caplog) -> None:
    model, tokenizer = teacher
    options = {"n_examples": 5, "batch_size": 20, "control_texts": TEXTS}
    scores = score(model, tokenizer, PROBE, **options)
    original = model.forward
    most_rows = 5
    sizes: list[int] = []

    def small_memory(*args, **kwargs):
        n_rows = len(kwargs["input_ids"])
        sizes.append(n_rows)
        if n_rows > most_rows:
            raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        return original(*args, **kwargs)

    monkeypatch.setattr(model, "forward", small_memory)
    again = score(model, tokenizer, PROBE, **options)
    first, *_ = logged_by(caplog, BatchSizer.fit)
    assert first.args[0] == 20
    last_failure = max(index for index, size in enumerate(sizes) if size > most_rows)
    assert max(sizes[last_failure + 1 :]) == most_rows, "nothing larger is tried again"
    assert torch.equal(again.accuracy_drop_LH, scores.accuracy_drop_LH)
    torch.testing.assert_close(again.logprob_drop_LH, scores.logprob_drop_LH, rtol=1e-4, atol=1e-4)


def test_memory_for_not_even_one_row_is_an_error(teacher, monkeypatch) -> None:
    model, tokenizer = teacher

    def no_memory(*args, **kwargs):
        raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    monkeypatch.setattr(model, "forward", no_memory)
    with pytest.raises(MemoryError):
        score(model, tokenizer, PROBE, n_examples=2)


def test_removed_heads_are_off_in_the_baseline_too(teacher) -> None:
    model, tokenizer = teacher
    removed = HeadId(1, 1)
    head = HeadId(1, 2)
    examples = PROBE.examples(9)
    scores = score(model, tokenizer, PROBE, n_examples=9, removed=[removed], min_accuracy=0.0)
    with ablate_heads(model, [removed]):
        whole = answer_choices(model, tokenizer, examples)
    with ablate_heads(model, [removed, head]):
        without = answer_choices(model, tokenizer, examples)
    drop = (whole.answer_logprob_E - without.answer_logprob_E).mean()
    assert removed not in scores.ranking()
    assert scores.n_examples_LH[removed] == 0
    assert scores.baseline["accuracy"] == whole.accuracy
    assert scores.logprob_drop_LH[head] == pytest.approx(drop.item(), abs=2e-4)


def test_scoring_can_be_limited_to_some_heads(teacher, scores) -> None:
    heads = {AGGREGATE, HeadId(0, 2)}
    of_some = score(*teacher, PROBE, n_examples=32, batch_size=20, heads=heads)
    assert of_some.ranking()[0] == AGGREGATE
    assert set(of_some.ranking()) == heads
    for head in heads:
        expected = scores.logprob_drop_LH[head].item()
        assert of_some.logprob_drop_LH[head] == pytest.approx(expected, abs=1e-4)

    with pytest.raises(ValueError, match="L9H0"):
        score(*teacher, PROBE, heads=[HeadId(9, 0)])
    with pytest.raises(ValueError, match="removed"):
        score(*teacher, PROBE, heads=heads, removed=heads)


def watch(monkeypatch, interrupt_at: int | None = None) -> list[HeadId]:
    """Note the heads that are ablated from now on; interrupt when a layer is reached."""
    ablated: list[HeadId] = []
    original = Forwards.without
    choose_forwards = ablation.fastest_exact

    def watching(self, batch, layer, heads):
        if layer == interrupt_at:
            raise KeyboardInterrupt
        ablated.extend(HeadId(layer, head) for head in heads)
        return original(self, batch, layer, heads)

    def then_watching(*args):
        forwards = choose_forwards(*args)
        monkeypatch.setattr(Forwards, "without", watching)
        return forwards

    monkeypatch.setattr(ablation, "fastest_exact", then_watching)
    return ablated


@pytest.mark.parametrize("race", [{}, {"race_k": 3}], ids=["exhaustive", "race"])
def test_an_interrupted_scoring_resumes(teacher, tmp_path, monkeypatch, caplog, race) -> None:
    options = {"n_examples": 16, "batch_size": 20, "control_texts": TEXTS, **race}
    path = tmp_path / "partial.json"
    uninterrupted = score(*teacher, PROBE, **options)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        watch(patch, interrupt_at=2)
        score(*teacher, PROBE, resume_path=path, **options)
    assert str(path) in caplog.text

    with monkeypatch.context() as patch:
        ablated = watch(patch)
        resumed = score(*teacher, PROBE, resume_path=path, **options)
    # A race goes through all layers in each of its rounds.
    if not race:
        assert {head.layer for head in ablated} == {2, 3}
    for name in TABLES:
        expected = getattr(uninterrupted, name).nan_to_num()
        assert torch.equal(getattr(resumed, name).nan_to_num(), expected), name
    assert resumed.agreement == uninterrupted.agreement
    assert [file.name for file in tmp_path.iterdir()] == ["partial.json"]


@pytest.mark.parametrize("damage", ["other probe", "torn file"])
def test_partial_scores_of_other_things_are_not_used(
    teacher, tmp_path, monkeypatch, caplog, damage
) -> None:
    path = tmp_path / "partial.json"
    probe = KVRetrieval(2, keys=KEYS)
    score(*teacher, probe, n_examples=2, resume_path=path)
    if damage == "other probe":
        probe = KVRetrieval(2, seed=1, keys=KEYS)
    else:
        path.write_text(path.read_text()[:-20])
    ablated = watch(monkeypatch)
    score(*teacher, probe, n_examples=2, resume_path=path)
    assert len(ablated) == N_LAYERS * N_HEADS
    assert str(path) in caplog.text


def test_logits_that_are_not_finite_are_named_and_the_rest_is_kept(
    teacher, tmp_path, monkeypatch
) -> None:
    path = tmp_path / "partial.json"
    original = Forwards.without

    def broken(self, batch, layer, heads):
        value_HQ = original(self, batch, layer, heads)
        if layer == 2 and len(heads) == N_HEADS:
            row = [row.number for row in batch.rows].index(5)
            first_value = row * 8  # 8 choices of one token
            value_HQ[3, first_value] = math.nan
        return value_HQ

    with monkeypatch.context() as patch:
        patch.setattr(Forwards, "without", broken)
        with pytest.raises(ValueError, match=naming("L2H3", "prompt 5")):
            score(*teacher, PROBE, n_examples=8, resume_path=path)
    ablated = watch(monkeypatch)
    score(*teacher, PROBE, n_examples=8, resume_path=path)
    assert {head.layer for head in ablated} == {2, 3}


def test_a_baseline_that_is_not_finite_is_refused() -> None:
    model, tokenizer = planted_teacher()
    model.model.layers[1].mlp.down_proj.weight.data.fill_(math.nan)
    with pytest.raises(ValueError, match=naming("prompt 0", "resume_path")):
        score(model, tokenizer, PROBE, n_examples=2)
