"""Gather and aggregate heads by their patterns, and masks: by hand, planted, tiny teacher."""

from __future__ import annotations

import copy
import math
import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from analyses import FILES, rows_of, run
from messages import naming
from planted import (
    AGGREGATE,
    GATHER_ASKED_KEY,
    GATHER_VALUE_KEY,
    KEYS,
    planted_teacher,
    probe_texts,
    word_tokenizer,
)
from test_answering import DIGITS, WHOLE, sharp
from test_head_sites import FAMILIES, IDS, make_model, n_hooks
from torch import Tensor, nn

from hybrid_distill.lab.analysis.head_matrices import HeadMix
from hybrid_distill.lab.analysis.masking import Mask, masked_logprobs
from hybrid_distill.lab.analysis.mixing import find_heads, mask_heads, mix_heads
from hybrid_distill.lab.analysis.patterns import (
    MarkedPrompt,
    Segment,
    Sharpness,
    aggregate_mask,
    find_patterns,
    gather_mask,
    mark_example,
    mark_prompt,
    rank_by,
    row_shares,
    sharpness,
)
from hybrid_distill.lab.analysis.tables import Column
from hybrid_distill.plan import HeadId, HeadPlan
from hybrid_distill.probes import Example
from hybrid_distill.probes.answering import answer_choices
from hybrid_distill.probes.encoding import Tokens, encode_example
from hybrid_distill.probes.kv_retrieval import KVRetrieval
from hybrid_distill.student.build import build_student
from hybrid_distill.teacher import HeadKind, ablate_heads, eager_attention, load_teacher


@pytest.fixture(scope="module")
def tiny() -> tuple:
    return load_teacher("tiny")


@pytest.fixture(scope="module")
def planted() -> tuple:
    return planted_teacher()


def words(marked: MarkedPrompt, positions: tuple[int, ...]) -> str:
    return " ".join(marked.labels[position] for position in positions)


def segments(marked: MarkedPrompt) -> list[tuple[str, str]]:
    """Return the words of each segment, and those of its summary."""
    texts: list[tuple[str, str]] = []
    for segment in marked.segments:
        content = words(marked, segment.content)
        summary = words(marked, segment.summary)
        texts.append((content, summary))
    return texts


def test_lines_of_a_question_are_marked(tiny: tuple) -> None:
    _, tokenizer = tiny
    prompt = "Memorize:\nheart:8\nbench:72\nThe value of the key 'bench' is"
    example = Example(prompt, " 72", (" 8", " 72"))

    marked = mark_example(tokenizer, example)

    assert segments(marked) == [("heart :", "8 ↵"), ("bench :", "72 ↵")]
    assert marked.answer == 1
    assert marked.labels[-1] == "␣", "the space before a number is the same for all choices"
    assert words(marked, marked.separators) == ": ↵ : ↵ : ↵ ' '"


def test_lines_of_any_text_are_marked(tiny: tuple) -> None:
    marked = mark_prompt(tiny[1], "heart bench ivory\nheart\nThe value of")
    assert segments(marked) == [("heart bench", "ivory ↵"), ("", "heart ↵")]
    assert marked.answer is None


# Tokens 0 1 | 2 3 | 4: two segments of one word and its summary, and the question's last token.
PROMPT = MarkedPrompt(
    ids=(5, 6, 7, 8, 9),
    labels=("a", "1", "b", "2", "?"),
    segments=(Segment((0,), (1,)), Segment((2,), (3,))),
    separators=(0, 4),
    answer=1,
)


def measured(matrix_TS: Tensor) -> Sharpness:
    values_SP = torch.zeros(5, 1)
    mix = HeadMix(HeadId(0, 0), "attention", matrix_TS, values_SP)
    return sharpness(PROMPT, mix)


def test_measures_of_matrices_made_by_hand() -> None:
    uniform = measured(torch.ones(5, 5).tril())
    # Tokens 1 and 3 see 2 and 4 tokens, of which one is the content of their segment.
    gather_of_uniform = (1 / 2 + 1 / 4) / 2
    assert uniform == pytest.approx((math.log2(5), 0.2, 0.4, gather_of_uniform, 0.4))

    gather_TS = torch.eye(5)
    gather_TS[[1, 3]] = 0
    # An SSM's entries have signs, and any size.
    gather_TS[1, 0] = -7
    gather_TS[3, 2] = -7
    assert measured(gather_TS) == (0, 0, 1, 1, 0)

    aggregate_TS = torch.eye(5)
    aggregate_TS[4] = torch.tensor([0, 0.5, 0, -1.5, 0])
    entropy = -(0.25 * math.log2(0.25) + 0.75 * math.log2(0.75))
    assert measured(aggregate_TS) == pytest.approx((entropy, 0.75, 0, 0, 1))


def test_shares_of_a_row_of_zeros_are_zeros() -> None:
    zeros_TS = torch.zeros(2, 2)
    assert torch.equal(row_shares(zeros_TS), zeros_TS.double())


def test_masks_of_a_marked_prompt() -> None:
    gather = [[0, 0], [1, 0], [1, 1], [2, 2], [3, 2], [3, 3]]
    assert gather_mask(PROMPT).nonzero().tolist() == gather
    assert aggregate_mask(PROMPT).nonzero().tolist() == [[4, 1], [4, 3]]


def test_a_planted_circuit_is_found_by_its_patterns_in_one_forward_a_prompt(planted: tuple) -> None:
    model, tokenizer = planted
    examples = KVRetrieval(8, seed=1, keys=KEYS).examples(4)
    forwards: list[int] = []

    with model.register_forward_pre_hook(lambda *_: forwards.append(1)):
        sharpness_of = find_patterns(model, tokenizer, examples)

    assert len(forwards) == len(examples)
    first_gather = rank_by(sharpness_of, "gather")[:2]
    first_aggregate = rank_by(sharpness_of, "aggregate")[0]
    assert set(first_gather) == {GATHER_VALUE_KEY, GATHER_ASKED_KEY}
    assert first_aggregate == AGGREGATE
    assert sharpness_of[AGGREGATE].answer > 0.5


def test_the_command_finds_the_embedded_teachers_circuit(
    scores: Path, tmp_path: Path, capsys
) -> None:
    """L2H6 gathers and L5H5 aggregates: docs/results_tiny.md."""
    few = ["--pairs", 8, "--examples", 2, "--k", 4]

    run("maps", "--scores", scores, *few, "--out", tmp_path)

    printed = capsys.readouterr().out
    assert "L2H6" in printed
    assert "L5H5" in printed
    files = {f"maps.{end}" for end in (*FILES, "patterns.md", "patterns.csv")}
    assert {path.name for path in tmp_path.iterdir()} == files
    row_of = {row["head"]: row for row in rows_of(tmp_path / "maps.patterns.csv")}
    assert float(row_of["L2H6"]["gather"]) > 90
    assert float(row_of["L5H5"]["answer"]) > 90
    assert float(row_of["L2H6"]["place by ablation"]) == 1


def test_a_student_beside_its_teacher(tiny: tuple, tmp_path: Path) -> None:
    teacher, tokenizer = tiny
    plan = HeadPlan.from_pairs(teacher, [HeadId(2, 6)])
    student, _ = build_student(teacher, plan, d_state=4)
    student.save_pretrained(tmp_path / "student")
    tokenizer.save_pretrained(tmp_path / "student")
    few = ["--heads", "L2H6", "L5H5", "--pairs", 3]

    run("maps", *few, "--beside", tmp_path / "student", "--out", tmp_path / "out")

    rows = rows_of(tmp_path / "out/maps.csv")
    assert [row["head"] for row in rows] == [
        "tiny L2H6 attention",
        "tiny L5H5 attention",
        "student L2H6 attention",
        "student L5H5 ssm",
    ]
    assert float(rows[2]["gather"]) > 90, "a kept head looks where it looked"


def test_a_model_with_other_tokens_is_not_shown_beside(tiny: tuple, tmp_path: Path, capsys) -> None:
    teacher, tokenizer = tiny
    other = copy.deepcopy(tokenizer)
    other.add_tokens(["zebra crossing"])
    teacher.save_pretrained(tmp_path)
    other.save_pretrained(tmp_path)
    few = ["--heads", "L2H6", "--pairs", 3]
    with pytest.raises(SystemExit) as stopped:
        run("maps", *few, "--beside", tmp_path, "--out", tmp_path / "out")
    assert stopped.value.code == 2
    assert "'zebra crossing'" in capsys.readouterr().err


def test_kinds_of_a_student() -> None:
    """It keeps heads of layers 0 and 2, L0H0 not among them."""
    student = make_model("student")
    assert {head.layer for head in find_heads(student, "attention")} == {0, 2}
    (mix,) = mix_heads(student, [5, 6, 7], [HeadId(1, 0)], kind="ssm")
    assert mix.kind == "ssm"
    with pytest.raises(ValueError, match=naming("L0H0", "'attention'")):
        mix_heads(student, [5, 6, 7], [HeadId(0, 0)], kind="attention")

    teacher = make_model("llama")
    recurrent, _ = build_student(teacher, HeadPlan.none(teacher), d_state=4)
    with pytest.raises(ValueError, match="'attention'"):
        find_heads(recurrent, "attention")


def test_recurrent_models_are_searched_and_shown(random_models: Path, tmp_path: Path) -> None:
    few = ["--pairs", 3, "--examples", 2, "--k", 1]
    run("maps", "--model", random_models / "mamba2", *few, "--out", tmp_path / "a")
    assert (tmp_path / "a/maps.png").stat().st_size > 10_000
    named = ["--heads", "L0H63", "--prompt", "heart:8\nbench"]
    run("maps", "--model", random_models / "falcon_mamba", *named, "--out", tmp_path / "b")
    assert "L0H63 channel" in (tmp_path / "b/maps.csv").read_text()


ROW = IDS[:1]  # 10 tokens
ALL = torch.ones(10, 10, dtype=torch.bool)
NONE = torch.zeros(10, 10, dtype=torch.bool)
of_every_kind = pytest.mark.parametrize(
    ("family", "kind"),
    [
        *((family, None) for family in FAMILIES),
        ("zamba2", "ssm"),
        ("falcon_h1", "ssm"),
    ],
)


@torch.no_grad()
@of_every_kind
def test_everything_kept_changes_nothing_and_nothing_kept_is_removal(
    family: str, kind: HeadKind | None
) -> None:
    model = make_model(family)
    every_head = list(find_heads(model, kind))
    heads = [every_head[1], every_head[-1]]  # of the first layer that has heads, and of the last
    plain = model(ROW).logits
    # Recurrent heads do not ask for eager attention.
    as_masked = eager_attention(model) if kind is None else nullcontext()
    with as_masked:
        intact = model(ROW).logits
        with ablate_heads(model, heads, kind=kind):
            removed = model(ROW).logits
    assert not torch.equal(intact, removed)

    for mask, expected in ((ALL, intact), (ALL.tril(), intact), (NONE, removed)):
        with mask_heads(model, dict.fromkeys(heads, mask), kind=kind):
            masked = model(ROW).logits
        assert torch.equal(masked, expected)

    assert torch.equal(model(ROW).logits, plain)
    assert n_hooks(model) == 0


@torch.no_grad()
def mixer_output(
    model: nn.Module,
    head: HeadId,
    mask: Tensor,
    kind: HeadKind | None,
) -> Tensor:
    """Return what the head's mixer puts out, behind its projection, with the head masked."""
    outputs: list[Tensor] = []

    def note(mixer: object, args: object, output: Tensor | tuple[Tensor, ...]) -> None:
        outputs.append(output[0] if isinstance(output, tuple) else output)

    site = find_heads(model, kind)[head]  # type: ignore[arg-type]
    with mask_heads(model, {head: mask}, kind=kind):  # type: ignore[arg-type]
        # Registered behind the hook that masks.
        with site.module.register_forward_hook(note):
            model(ROW)
    return outputs[0]


@of_every_kind
def test_a_mask_and_its_complement_share_out_what_the_head_does(
    family: str, kind: HeadKind | None
) -> None:
    """With the one plus with the other equals with all plus with nothing."""
    model = make_model(family)
    head = list(find_heads(model, kind))[1]
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(10, 10, generator=generator) < 0.5

    some = mixer_output(model, head, mask, kind)
    others = mixer_output(model, head, ~mask, kind)
    everything = mixer_output(model, head, ALL, kind)
    nothing = mixer_output(model, head, NONE, kind)

    scale = (everything - nothing).abs().max()
    assert scale > 1e-4
    for part in (some, others):
        share = (part - nothing).abs().max()
        assert share > 1e-2 * scale, "each has its share"
    error = (some + others - everything - nothing).abs().max()
    assert error < 1e-5 * max(scale, everything.abs().max())


def test_the_patterns_of_a_planted_circuit_are_all_it_needs(planted: tuple) -> None:
    model, tokenizer = planted
    marked = []
    for example in KVRetrieval(8, seed=1, keys=KEYS).examples(16):
        marked.append((encode_example(tokenizer, example), mark_example(tokenizer, example)))
    questions = {Column("kv"): marked}
    heads = {"gather": [GATHER_VALUE_KEY], "aggregate": [AGGREGATE]}

    table = Mask().table(model, questions, heads)

    kv = {row.label: row.values[0] for row in table.rows}
    variants = ("removed", "pattern alone", "pattern taken out")
    assert list(kv)[:4] == ["intact", *(f"gather: {variant}" for variant in variants)]
    assert len(kv) == 10
    assert kv["intact"] == 100
    for role in ("gather", "aggregate", "both"):
        assert kv[f"{role}: pattern alone"] == 100
        assert kv[f"{role}: removed"] < 50
        assert kv[f"{role}: pattern taken out"] < 50

    # This one gathers in the question, which is not a segment.
    table = Mask().table(model, questions, {"gather": [GATHER_ASKED_KEY]})
    pattern_alone = table.rows[2]
    assert pattern_alone.values[0] < 50


@torch.no_grad()
@pytest.mark.parametrize("pattern", [WHOLE, DIGITS])
def test_choices_of_any_tokens_are_read_as_with_a_cache(pattern: str, family_model) -> None:
    tokenizer = word_tokenizer(probe_texts(), pattern)
    model = sharp(family_model("llama", vocab_size=len(tokenizer)))
    examples = KVRetrieval(6, seed=1, keys=KEYS).examples(3)
    expected = answer_choices(model, tokenizer, examples).logprob_EC
    rows: list[Tokens] = []

    def everything(ids: Tokens) -> dict[HeadId, Tensor]:
        rows.append(ids)
        return {HeadId(1, 2): torch.ones(len(ids), len(ids), dtype=torch.bool)}

    for example, logprobs in zip(examples, expected, strict=True):
        encoded = encode_example(tokenizer, example)
        masked = masked_logprobs(model, encoded, everything)
        assert masked == pytest.approx(logprobs, abs=2e-4)
    # A choice of several tokens needs a row for each first digit.
    has_more_rows = len(rows) > len(examples)
    assert has_more_rows == (pattern == DIGITS)


@pytest.mark.parametrize("ids", [IDS, IDS[:1, :9]], ids=["two prompts", "nine tokens"])
def test_a_mask_is_for_one_prompt(ids: Tensor) -> None:
    model = make_model("llama")
    with mask_heads(model, {HeadId(0, 0): ALL}), pytest.raises(ValueError, match="L0H0"):
        model(ids)


def test_heads_to_mask_are_searched(tmp_path: Path) -> None:
    few = ["--pairs", 3, "--examples", 2]
    run("mask", "--tasks", "kv,letters", *few, "--out", tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {f"mask.{end}" for end in FILES}
    title = (tmp_path / "mask.md").read_text().splitlines()[0]
    assert re.fullmatch(r"tiny: gather L\dH\d, aggregate L\dH\d", title)
