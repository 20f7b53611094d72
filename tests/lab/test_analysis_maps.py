"""Gather and aggregate heads by their patterns: on matrices made by hand, on a planted circuit, on the tiny teacher."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest
import torch
from planted import AGGREGATE, GATHER_ASKED_KEY, GATHER_VALUE_KEY, KEYS, planted_teacher
from test_head_sites import make_model

from hybrid_distill.cli.app import main
from hybrid_distill.lab.analysis.experiment import parse_head
from hybrid_distill.lab.analysis.maps import AGGREGATE as BY_AGGREGATE
from hybrid_distill.lab.analysis.maps import GATHER, find_patterns
from hybrid_distill.lab.analysis.mixing import heads_in, mix_heads, mixing_bytes, mixing_sites
from hybrid_distill.lab.analysis.patterns import MarkedPrompt, Segment, mark_example, mark_prompt, row_shares, sharpness
from hybrid_distill.plan import HeadId, HeadPlan
from hybrid_distill.probes import Example
from hybrid_distill.probes.knowledge import LetterChoice
from hybrid_distill.probes.kv_retrieval import KVRetrieval
from hybrid_distill.student.build import build_student
from hybrid_distill.teacher import load_teacher

KV = Example("Memorize:\nheart:8\nbench:72\nThe value of the key 'bench' is", " 72", (" 8", " 72"))


@pytest.fixture(scope="module")
def tiny() -> tuple:
    return load_teacher("tiny")


def words(marked: MarkedPrompt, positions: tuple[int, ...]) -> str:
    return " ".join(marked.labels[position] for position in positions)


def test_a_dictionary_is_marked(tiny: tuple) -> None:
    marked = mark_example(tiny[1], KV)
    found = [(words(marked, s.content), words(marked, s.summary)) for s in marked.segments]
    assert found == [("heart :", "8 ↵"), ("bench :", "72 ↵")]
    assert marked.answer == 1 and marked.labels[-1] == "␣", "the space before a number is the same for all choices"
    assert words(marked, marked.separators) == ": ↵ : ↵ : ↵ ' '"


def test_options_are_summed_up_by_their_last_word(tiny: tuple) -> None:
    example = LetterChoice.from_file(n_options=3, seed=0).examples(1)[0]
    marked = mark_example(tiny[1], example)
    assert len(marked.segments) == 3 and marked.answer is not None
    for letter, segment in zip("ABC", marked.segments, strict=True):
        assert marked.labels[segment.content[0]] == letter and marked.labels[segment.summary[-1]] == "↵"
    right = marked.segments[marked.answer]
    assert words(marked, right.content).startswith(example.answer.strip())


def test_a_text_of_ones_own_has_its_lines_as_segments(tiny: tuple) -> None:
    marked = mark_prompt(tiny[1], "heart bench ivory\nheart\nThe value of")
    assert [(words(marked, s.content), words(marked, s.summary)) for s in marked.segments] == [
        ("heart bench", "ivory ↵"),
        ("", "heart ↵"),
    ]
    assert marked.answer is None


def test_an_answer_that_is_not_in_one_line_is_refused(tiny: tuple) -> None:
    with pytest.raises(ValueError, match="' 72' stands in 0 lines of its prompt"):
        mark_example(tiny[1], Example("heart:8\nThe value is", " 72", (" 8", " 72")))


# Tokens 0 1 | 2 3 | 4: two segments of one word and its summary, and the question's last token.
PROMPT = MarkedPrompt(
    (5, 6, 7, 8, 9), ("a", "1", "b", "2", "?"), (Segment((0,), (1,)), Segment((2,), (3,))), (0, 4), answer=1
)


def test_measures_of_matrices_made_by_hand() -> None:
    uniform = sharpness(torch.ones(5, 5).tril(), PROMPT)
    assert uniform.entropy == pytest.approx(math.log2(5))
    assert uniform.answer == pytest.approx(0.2) and uniform.aggregate == pytest.approx(0.4)
    assert uniform.separators == pytest.approx(0.4) and uniform.gather == pytest.approx((1 / 2 + 1 / 4) / 2)

    gather = torch.eye(5)
    gather[[1, 3]] = 0
    gather[1, 0] = gather[3, 2] = -7  # an SSM's entries have signs, and any size
    found = sharpness(gather, PROMPT)
    assert found == (0, 0, 1, 1, 0)

    aggregate = torch.eye(5)
    aggregate[4] = torch.tensor([0, 0.5, 0, -1.5, 0])
    found = sharpness(aggregate, PROMPT)
    assert found.gather == 0 and found.aggregate == 1 and found.answer == pytest.approx(0.75)
    assert found.entropy == pytest.approx(0.811, abs=1e-3)
    assert torch.equal(row_shares(torch.zeros(2, 2)), torch.zeros(2, 2, dtype=torch.float64))


def test_a_planted_circuit_is_found_by_its_patterns() -> None:
    model, tokenizer = planted_teacher()
    found = find_patterns(model, tokenizer, KVRetrieval(8, seed=1, keys=KEYS).examples(4))
    assert set(found.ranking(GATHER)[:2]) == {GATHER_VALUE_KEY, GATHER_ASKED_KEY}
    assert found.ranking(BY_AGGREGATE)[0] == AGGREGATE
    assert set(found.first(2)) > {GATHER_VALUE_KEY, GATHER_ASKED_KEY, AGGREGATE}
    table = found.table(2, ablation=[AGGREGATE, GATHER_VALUE_KEY])
    places = {row.label: row.values[-1] for row in table.rows}
    assert places[str(AGGREGATE)] == 1 and places[str(GATHER_VALUE_KEY)] == 2
    assert math.isnan(places[str(GATHER_ASKED_KEY)])
    answers = {row.label: row.values[1] for row in table.rows}
    assert answers[str(AGGREGATE)] > 50


def test_one_forward_a_prompt_and_more_only_where_memory_asks_for_it() -> None:
    model, tokenizer = planted_teacher()
    examples = KVRetrieval(4, seed=1, keys=KEYS).examples(2)
    n_tokens, sites, forwards = len(mark_example(tokenizer, examples[0]).ids), mixing_sites(model), []
    two_layers = mixing_bytes(model, n_tokens, [head for site in sites[:2] for head in heads_in(site, None)], sites)
    hook = model.register_forward_pre_hook(lambda *_: forwards.append(1))
    whole = find_patterns(model, tokenizer, examples)
    assert len(forwards) == 2
    parts = find_patterns(model, tokenizer, examples, max_bytes=two_layers)
    assert len(forwards) == 2 + 2 * 2, "four layers, two at a time"
    hook.remove()
    assert torch.equal(whole.means_HM, parts.means_HM) and whole.heads == parts.heads


def run(*argv: object) -> None:
    main(["analyze", "maps", *map(str, argv)])


def test_the_command_finds_the_embedded_teachers_circuit(scores: Path, tmp_path: Path, capsys) -> None:
    run("--scores", scores, "--pairs", 8, "--examples", 2, "--k", 4, "--out", tmp_path)
    printed = capsys.readouterr().out
    assert "L2H6" in printed and "L5H5" in printed, "they gather and aggregate: docs/results_tiny.md"
    assert "overlap@10" in printed
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
    run("--heads", "L2H6", "L5H5", "--beside", tmp_path / "student", "--pairs", 3, "--out", tmp_path / "out")
    rows = list(csv.DictReader((tmp_path / "out/maps.csv").open()))
    assert [row["head"] for row in rows] == [
        "tiny L2H6 attention",
        "tiny L5H5 attention",
        "student L2H6 attention",
        "student L5H5 ssm",
    ]
    assert float(rows[2]["gather"]) > 90, "a kept head looks where it looked"


def test_kinds_of_a_student() -> None:
    student = make_model("student")
    assert [site.layer for site in mixing_sites(student, "attention")] == [0, 2]
    assert mix_heads(student, [5, 6, 7], [HeadId(1, 0)], kind="ssm")[0].kind == "ssm"
    with pytest.raises(ValueError, match="L0H0 of this student is of kind 'ssm'; ask for one of kind 'attention'"):
        mix_heads(student, [5, 6, 7], [HeadId(0, 0)], kind="attention")
    recurrent = build_student(make_model("llama"), HeadPlan.none(make_model("llama")), d_state=4)[0]
    with pytest.raises(ValueError, match="this student has no heads of kind 'attention'"):
        mixing_sites(recurrent, "attention")


def test_recurrent_models_are_searched_or_shown(random_models: Path, tmp_path: Path) -> None:
    run("--model", random_models / "mamba2", "--pairs", 3, "--examples", 2, "--k", 1, "--out", tmp_path / "a")
    own = ["--heads", "L0H63", "--prompt", "heart:8\nbench"]
    run("--model", random_models / "falcon_mamba", *own, "--out", tmp_path / "b")
    assert (tmp_path / "a/maps.png").stat().st_size > 10_000
    assert "L0H63 channel" in (tmp_path / "b/maps.csv").read_text()


def test_heads_by_name() -> None:
    assert parse_head(" L12H3") == HeadId(12, 3)
