"""Gather and aggregate heads by their patterns, and masks of their matrices: by hand, planted, on the tiny teacher."""

from __future__ import annotations

import copy
import csv
import math
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
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
from torch import Tensor

from hybrid_distill.cli.app import main
from hybrid_distill.lab.analysis.experiment import Column
from hybrid_distill.lab.analysis.maps import Mask, masked_logprobs
from hybrid_distill.lab.analysis.mixing import HeadMix, find_heads, mask_heads, mix_heads
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
from hybrid_distill.plan import HeadId, HeadPlan
from hybrid_distill.probes import Example
from hybrid_distill.probes.answering import answer_choices
from hybrid_distill.probes.encoding import Tokens, encode_example
from hybrid_distill.probes.kv_retrieval import KVRetrieval
from hybrid_distill.student.build import build_student
from hybrid_distill.teacher import HeadKind, ablate_heads, eager_attention, load_teacher

KV = Example("Memorize:\nheart:8\nbench:72\nThe value of the key 'bench' is", " 72", (" 8", " 72"))


@pytest.fixture(scope="module")
def tiny() -> tuple:
    return load_teacher("tiny")


def words(marked: MarkedPrompt, positions: tuple[int, ...]) -> str:
    return " ".join(marked.labels[position] for position in positions)


def test_lines_are_marked(tiny: tuple) -> None:
    marked = mark_example(tiny[1], KV)
    found = [(words(marked, s.content), words(marked, s.summary)) for s in marked.segments]
    assert found == [("heart :", "8 ↵"), ("bench :", "72 ↵")]
    assert marked.answer == 1 and marked.labels[-1] == "␣", "the space before a number is the same for all choices"
    assert words(marked, marked.separators) == ": ↵ : ↵ : ↵ ' '"
    own = mark_prompt(tiny[1], "heart bench ivory\nheart\nThe value of")
    found = [(words(own, s.content), words(own, s.summary)) for s in own.segments]
    assert found == [("heart bench", "ivory ↵"), ("", "heart ↵")] and own.answer is None


# Tokens 0 1 | 2 3 | 4: two segments of one word and its summary, and the question's last token.
PROMPT = MarkedPrompt(
    (5, 6, 7, 8, 9), ("a", "1", "b", "2", "?"), (Segment((0,), (1,)), Segment((2,), (3,))), (0, 4), answer=1
)


def measured(matrix_TS: Tensor) -> Sharpness:
    return sharpness(PROMPT, HeadMix(HeadId(0, 0), "attention", matrix_TS, torch.zeros(5, 1)))


def test_measures_of_matrices_made_by_hand() -> None:
    uniform = measured(torch.ones(5, 5).tril())
    assert uniform == pytest.approx((math.log2(5), 0.2, 0.4, (1 / 2 + 1 / 4) / 2, 0.4))
    gather = torch.eye(5)
    gather[[1, 3]] = 0
    gather[1, 0] = gather[3, 2] = -7  # an SSM's entries have signs, and any size
    assert measured(gather) == (0, 0, 1, 1, 0)
    aggregate = torch.eye(5)
    aggregate[4] = torch.tensor([0, 0.5, 0, -1.5, 0])
    found = measured(aggregate)
    assert found.gather == 0 and found.aggregate == 1 and found.answer == pytest.approx(0.75)
    assert found.entropy == pytest.approx(0.811, abs=1e-3)
    assert torch.equal(row_shares(torch.zeros(2, 2)), torch.zeros(2, 2, dtype=torch.float64))


def test_masks_of_a_marked_prompt() -> None:
    assert gather_mask(PROMPT).nonzero().tolist() == [[0, 0], [1, 0], [1, 1], [2, 2], [3, 2], [3, 3]]
    assert aggregate_mask(PROMPT).nonzero().tolist() == [[4, 1], [4, 3]]


@pytest.fixture(scope="module")
def planted() -> tuple:
    return planted_teacher()


def test_a_planted_circuit_is_found_by_its_patterns_in_one_forward_a_prompt(planted: tuple) -> None:
    model, tokenizer = planted
    forwards: list[int] = []
    with model.register_forward_pre_hook(lambda *_: forwards.append(1)):
        found = find_patterns(model, tokenizer, KVRetrieval(8, seed=1, keys=KEYS).examples(4))
    assert len(forwards) == 4
    assert set(rank_by(found, "gather")[:2]) == {GATHER_VALUE_KEY, GATHER_ASKED_KEY}
    assert rank_by(found, "aggregate")[0] == AGGREGATE and found[AGGREGATE].answer > 0.5


def run(*argv: object) -> None:
    main(["analyze", *map(str, argv)])


def test_the_command_finds_the_embedded_teachers_circuit(scores: Path, tmp_path: Path, capsys) -> None:
    run("maps", "--scores", scores, "--pairs", 8, "--examples", 2, "--k", 4, "--out", tmp_path)
    printed = capsys.readouterr().out
    assert "L2H6" in printed and "L5H5" in printed, "they gather and aggregate: docs/results_tiny.md"
    assert {p.name for p in tmp_path.iterdir()} == {
        f"maps.{end}" for end in ("md", "csv", "png", "patterns.md", "patterns.csv")
    }
    rows = {row["head"]: row for row in csv.DictReader((tmp_path / "maps.patterns.csv").open())}
    assert float(rows["L2H6"]["gather"]) > 90 and float(rows["L5H5"]["answer"]) > 90
    assert float(rows["L2H6"]["place by ablation"]) == 1


def test_a_student_beside_its_teacher(tiny: tuple, tmp_path: Path) -> None:
    teacher, tokenizer = tiny
    student, _ = build_student(teacher, HeadPlan.from_pairs(teacher, [HeadId(2, 6)]), d_state=4)
    student.save_pretrained(tmp_path / "student")
    tokenizer.save_pretrained(tmp_path / "student")
    run("maps", "--heads", "L2H6", "L5H5", "--beside", tmp_path / "student", "--pairs", 3, "--out", tmp_path / "out")
    rows = list(csv.DictReader((tmp_path / "out/maps.csv").open()))
    shown = ["tiny L2H6 attention", "tiny L5H5 attention", "student L2H6 attention", "student L5H5 ssm"]
    assert [row["head"] for row in rows] == shown
    assert float(rows[2]["gather"]) > 90, "a kept head looks where it looked"


def test_a_model_with_other_tokens_is_not_shown_beside(tiny: tuple, tmp_path: Path, capsys) -> None:
    teacher, tokenizer = tiny
    other = copy.deepcopy(tokenizer)
    other.add_tokens(["zebra crossing"])
    for part in (teacher, other):
        part.save_pretrained(tmp_path)
    with pytest.raises(SystemExit):
        run("maps", "--heads", "L2H6", "--beside", tmp_path, "--pairs", 3, "--out", tmp_path / "out")
    assert "mixed tokenizers" in capsys.readouterr().err


def test_kinds_of_a_student() -> None:
    student = make_model("student")
    assert {head.layer for head in find_heads(student, "attention")} == {0, 2}
    assert mix_heads(student, [5, 6, 7], [HeadId(1, 0)], kind="ssm")[0].kind == "ssm"
    with pytest.raises(ValueError, match="L0H0 of this student is of another kind than 'attention'"):
        mix_heads(student, [5, 6, 7], [HeadId(0, 0)], kind="attention")
    recurrent = build_student(make_model("llama"), HeadPlan.none(make_model("llama")), d_state=4)[0]
    with pytest.raises(ValueError, match="this student has no heads of kind 'attention'"):
        find_heads(recurrent, "attention")


def test_recurrent_models_are_searched_shown_and_masked(random_models: Path, tmp_path: Path) -> None:
    run("maps", "--model", random_models / "mamba2", "--pairs", 3, "--examples", 2, "--k", 1, "--out", tmp_path / "a")
    own = ["--heads", "L0H63", "--prompt", "heart:8\nbench"]
    run("maps", "--model", random_models / "falcon_mamba", *own, "--out", tmp_path / "b")
    few = ["--gather", "L0H0", "--pairs", 3, "--examples", 2]
    run("mask", "--model", random_models / "mamba2", *few, "--out", tmp_path)
    assert "L0H0" in (tmp_path / "mask.md").read_text() and (tmp_path / "a/maps.png").stat().st_size > 10_000
    assert "L0H63 channel" in (tmp_path / "b/maps.csv").read_text()


ROW = IDS[:1]  # 10 tokens
ALL, NONE = torch.ones(10, 10, dtype=torch.bool), torch.zeros(10, 10, dtype=torch.bool)
EVERY_KIND = [*((family, None) for family in FAMILIES), ("zamba2", "ssm"), ("falcon_h1", "ssm")]


@torch.no_grad()
@pytest.mark.parametrize(("family", "kind"), EVERY_KIND)
def test_everything_kept_changes_nothing_and_nothing_kept_is_removal(family: str, kind: HeadKind | None) -> None:
    model = make_model(family)
    every, plain = list(find_heads(model, kind)), model(ROW).logits
    heads = [every[1], every[-1]]  # of the first layer that has heads, and of the last
    with eager_attention(model) if kind is None else nullcontext():  # recurrent heads do not ask for it
        intact = model(ROW).logits
        with ablate_heads(model, heads, kind=kind):
            removed = model(ROW).logits
    for mask, expected in ((ALL, intact), (ALL.tril(), intact), (NONE, removed)):
        with mask_heads(model, dict.fromkeys(heads, mask), kind=kind):
            assert torch.equal(model(ROW).logits, expected)
    assert not torch.equal(intact, removed)
    assert torch.equal(model(ROW).logits, plain) and n_hooks(model) == 0


@torch.no_grad()
@pytest.mark.parametrize(("family", "kind"), EVERY_KIND)
def test_a_mask_and_its_complement_share_out_what_the_head_does(family: str, kind: HeadKind | None) -> None:
    """Behind the projection: with the one, with the other, add up to with all, with nothing."""
    model = make_model(family)
    head, site = list(find_heads(model, kind).items())[1]
    mask = torch.rand(10, 10, generator=torch.Generator().manual_seed(0)) < 0.5
    outputs: list[Any] = []
    for mask_TS in (mask, ~mask, ALL, NONE):
        with mask_heads(model, {head: mask_TS}, kind=kind):
            hook = site.module.register_forward_hook(lambda _, __, out: outputs.append(out))
            model(ROW)
            hook.remove()
    some, others, everything, nothing = (out[0] if isinstance(out, tuple) else out for out in outputs)
    scale = (everything - nothing).abs().max()
    assert scale > 1e-4
    assert min((part - nothing).abs().max() for part in (some, others)) > 1e-2 * scale, "each has its share"
    assert (some + others - everything - nothing).abs().max() < 1e-5 * max(scale, everything.abs().max())


def test_the_patterns_of_a_planted_circuit_are_all_it_needs(planted: tuple) -> None:
    model, tokenizer = planted
    examples = KVRetrieval(8, seed=1, keys=KEYS).examples(16)
    tasks = {Column("kv"): [(encode_example(tokenizer, e), mark_example(tokenizer, e)) for e in examples]}
    table = Mask().table(model, tasks, {"gather": [GATHER_VALUE_KEY], "aggregate": [AGGREGATE]})
    found = {row.label: row.values[0] for row in table.rows}
    assert list(found)[:4] == ["intact", "gather: removed", "gather: pattern alone", "gather: pattern taken out"]
    assert len(found) == 10 and found["intact"] == 100
    for role in ("gather", "aggregate", "both"):
        assert found[f"{role}: pattern alone"] == 100
        assert found[f"{role}: removed"] < 50 and found[f"{role}: pattern taken out"] < 50
    asked = Mask().table(model, tasks, {"gather": [GATHER_ASKED_KEY]})
    assert asked.rows[2].values[0] < 50, "it gathers in the question, which is not a segment"


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
        assert masked_logprobs(model, encode_example(tokenizer, example), everything) == pytest.approx(
            logprobs, abs=2e-4
        )
    assert (len(rows) > 3) == (pattern == DIGITS), "a row for each first digit"


def test_a_mask_is_for_one_prompt() -> None:
    model = make_model("llama")
    with mask_heads(model, {HeadId(0, 0): ALL}):
        for ids in (IDS, IDS[:1, :9]):
            with pytest.raises(ValueError, match=r"the mask of L0H0 is \(10, 10\), the forward has"):
                model(ids)


def test_mask_finds_heads_and_masks_them(tmp_path: Path) -> None:
    run("mask", "--pairs", 4, "--examples", 12, "--gather", "L2H6", "--aggregate", "L5H5", "--out", tmp_path / "named")
    assert {p.name for p in (tmp_path / "named").iterdir()} == {f"mask.{end}" for end in ("md", "csv", "png")}
    rows = {row["heads"]: float(row["kv"]) for row in csv.DictReader((tmp_path / "named/mask.csv").open())}
    assert rows["intact"] > 90 and rows["both: removed"] < rows["both: pattern alone"]
    run("mask", "--tasks", "kv,letters", "--pairs", 3, "--examples", 2, "--out", tmp_path / "found")
    title = (tmp_path / "found/mask.md").read_text().splitlines()[0]
    assert re.fullmatch(r"tiny: gather L\dH\d, aggregate L\dH\d", title)
