"""Heads and layers removed, questions in other formats: what is lost."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from analyses import FILES, rows_of, run
from harness_rows import write_task
from messages import naming
from planted import AGGREGATE, GATHER_ASKED_KEY, GATHER_VALUE_KEY, KEYS, planted_teacher
from test_head_sites import FAMILIES, IDS, block_outputs, make_model, n_hooks
from transformers import PreTrainedModel

from hybrid_distill.lab.analysis.experiment import Bench
from hybrid_distill.lab.analysis.removal import (
    KeepHeads,
    PruneLayers,
    RemoveHeads,
    parse_kept,
    without_layers,
)
from hybrid_distill.lab.analysis.tables import Column, Row, Table
from hybrid_distill.lab.analysis.tasks import Questions, Task, accuracy_task
from hybrid_distill.plan import HeadId
from hybrid_distill.probes.knowledge import LetterChoice
from hybrid_distill.probes.kv_retrieval import DIALOGUE, KVRetrieval
from hybrid_distill.scoring.head_scores import heads_of
from hybrid_distill.scoring.resume_log import ResumeLog
from hybrid_distill.teacher import TINY, ablate_heads, decoder_blocks, head_sites, load_teacher

CIRCUIT = [AGGREGATE, GATHER_VALUE_KEY, GATHER_ASKED_KEY]


@pytest.fixture(scope="module")
def planted() -> Bench:
    """Make the planted teacher, asked for KV retrieval of 8 pairs in its words."""
    teacher, tokenizer = planted_teacher()
    examples = KVRetrieval(8, seed=1, keys=KEYS).examples(24)
    return Bench(teacher, tokenizer, [accuracy_task("kv", examples, 1 / 8)])


@pytest.fixture(scope="module")
def others(planted: Bench) -> list[HeadId]:
    """List the heads outside the circuit."""
    return [head for head in heads_of(head_sites(planted.model)) if head not in CIRCUIT]


def values(table: Table) -> dict[str, float]:
    return {row.label: row.values[0] for row in table.rows}


def remove_heads(
    bench: Bench,
    ranking: list[HeadId],
    counts: tuple[int, ...],
    n_draws: int,
) -> dict[str, float]:
    experiment = RemoveHeads(scores=Path(), counts=counts, random_draws=n_draws)
    return values(experiment.table(bench, ranking))


def test_without_its_circuit_the_planted_teacher_retrieves_nothing(
    planted: Bench, others: list[HeadId]
) -> None:
    ranking = CIRCUIT + others

    kv = remove_heads(planted, ranking, (1, 3), n_draws=2)

    assert list(kv) == [
        "nothing",
        "first 1",
        "first 3",
        "random 1 (mean of 2)",
        "random 3 (mean of 2)",
    ]
    assert kv["nothing"] == 100
    assert kv["first 1"] < 50
    assert kv["first 3"] < 50

    unimportant = remove_heads(planted, others, (1, 3), n_draws=0)
    assert min(unimportant.values()) > 85

    experiment = RemoveHeads(scores=Path(), counts=(17,))
    with pytest.raises(ValueError, match=naming("--counts", 17)):
        experiment.check_counts(planted.model, ranking)


def test_a_stopped_call_resumes(planted: Bench, others: list[HeadId], tmp_path: Path) -> None:
    """Values are numbers of calls, and the third call is interrupted."""
    log = tmp_path / "new" / "steps.json"
    n_calls = 0

    def measure(*_: object) -> float:
        nonlocal n_calls
        n_calls += 1
        if n_calls == 3:
            raise KeyboardInterrupt
        return n_calls

    def measure_all() -> list[float]:
        task = Task(Column("x"), measure)
        bench = planted._replace(tasks=[task], resume_log=ResumeLog(log, {}))
        kv = remove_heads(bench, CIRCUIT + others, (1, 3), n_draws=1)
        return list(kv.values())

    with pytest.raises(KeyboardInterrupt):
        measure_all()
    assert log.exists()

    assert measure_all() == [1, 2, 4, 5, 6]
    assert not log.exists()


def test_random_heads_are_the_same_at_every_call_and_others_for_every_draw(
    planted: Bench, others: list[HeadId]
) -> None:
    changed: list[tuple[int, ...]] = []

    def note(model: PreTrainedModel, tokenizer: object) -> float:
        """Note the layers in which heads are removed, which have a `forward` of their own."""
        layers = [site.layer for site in head_sites(model) if "forward" in vars(site.block)]
        changed.append(tuple(layers))
        return 1.0

    bench = planted._replace(tasks=[Task(Column("x"), note)])
    for _ in range(2):
        remove_heads(bench, CIRCUIT + others, (3,), n_draws=4)

    # Nothing removed, the first 3 of the ranking, four draws.
    first_call = changed[:6]
    second_call = changed[6:]
    assert first_call == second_call
    draws = first_call[2:]
    assert len(set(draws)) > 1


def test_layers_from_the_end_and_one_by_one(planted: Bench) -> None:
    """Gather heads are in layer 1, the aggregate head in layer 2; layers 0 and 3 hold noise."""
    gradual = values(PruneLayers().from_the_end(planted))
    assert gradual["all"] == gradual["0 to 2"] == 100
    assert max(gradual["0 to 1"], gradual["0"]) < 50

    single = values(PruneLayers().one_by_one(planted))
    assert single["none"] == single["0"] == single["3"] == 100
    assert max(single["1"], single["2"]) < 50

    below = values(PruneLayers(last_layer=2).one_by_one(planted))
    assert list(below) == ["none", "0", "1", "2"]
    assert below["none"] == 100


def test_only_the_circuits_heads_are_needed(planted: Bench) -> None:
    def keep(*texts: str, last_layer: int | None = None) -> dict[str, float]:
        experiment = KeepHeads(keep=texts, last_layer=last_layer)
        kept = {text: parse_kept(text) for text in texts}
        return values(experiment.table(planted, kept))

    # Layers that are not named keep all their heads.
    circuit = "1:1,3/2:2"
    circuit_alone = "0:none/1:1,3/2:2/3:none"
    without_a_gather_head = "1:1/2:2"
    without_the_aggregate_head = "2:none"
    kv = keep(circuit, circuit_alone, without_a_gather_head, without_the_aggregate_head)
    assert kv[circuit] == kv[circuit_alone] == kv["all"] == 100
    assert kv[without_a_gather_head] < 50
    assert kv[without_the_aggregate_head] < 50

    kv = keep("1:none", last_layer=2)
    assert kv["all of layers 0 to 2"] == 100
    assert kv["1:none"] < 50


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_left_out_returns_its_input_and_comes_back_bit_identical(family: str) -> None:
    model = make_model(family)
    plain = model(IDS).logits
    weights = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with block_outputs(model) as outputs:
        model(IDS)
        below = outputs[0].clone()
        own = outputs[1].clone()
    assert not torch.equal(own, below)

    # Layer 2 gets what layer 0 puts out.
    inputs: list[torch.Tensor] = []

    def note(block: object, args: tuple, kwargs: dict) -> None:
        inputs.append(args[0] if args else kwargs["hidden_states"])

    _, next_block = decoder_blocks(model)[2]
    with (
        next_block.register_forward_pre_hook(note, with_kwargs=True),
        without_layers(model, [1]),
    ):
        changed = model(IDS).logits
    assert torch.equal(inputs[0][0], below.expand_as(inputs[0])[0])
    assert not torch.equal(changed, plain)

    with without_layers(model, []), ablate_heads(model, []):
        assert torch.equal(model(IDS).logits, plain)
    assert torch.equal(model(IDS).logits, plain)
    assert n_hooks(model) == 0
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights[name])


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "mamba2", "falcon_h1"])
def test_a_model_without_layers_generates_with_its_cache_as_without(family: str) -> None:
    model = make_model(family)
    settings = {
        "max_new_tokens": 5,
        "min_new_tokens": 5,
        "do_sample": False,
    }
    with without_layers(model, [0, 2]):
        cached = model.generate(IDS, use_cache=True, **settings)  # type: ignore[operator]
        plain = model.generate(IDS, use_cache=False, **settings)  # type: ignore[operator]
    assert torch.equal(cached, plain)


def test_a_table_as_text_and_as_numbers(tmp_path: Path) -> None:
    columns = (Column("kv", "%", 25.0), Column("perplexity", "", digits=3))
    rows = (
        Row("nothing", (80.0, 4.0)),
        Row("random 2", (62.0, 5.0), "random", 2, (2.0, 0.0)),
    )
    experiment = RemoveHeads(scores=tmp_path, out=tmp_path)

    text = experiment.save(Table("a title", "removed", columns, rows))

    assert text.splitlines() == [
        "a title",
        "removed                  kv, %       perplexity",
        "nothing                   80.0            4.000",
        "random 2  62.0 ± 2.0 (−22.5 %)  5.000 (+25.0 %)",
        "guessing                  25.0",
    ]
    lines = (tmp_path / "remove-heads.md").read_text().splitlines()
    assert lines[:3] == ["a title", "", "| removed | kv, % | perplexity |"]
    assert lines[-1] == "| guessing | 25.0 |  |"

    names, intact, random = csv.reader((tmp_path / "remove-heads.csv").open())
    of_kv = ["kv", "kv_change_percent", "kv_sd"]
    of_perplexity = ["perplexity", "perplexity_change_percent", "perplexity_sd"]
    assert names == ["removed", *of_kv, *of_perplexity]
    assert intact == ["nothing", "80.0", "", "", "4.0", "", ""]
    label, *cells = random
    assert label == "random 2"
    assert [float(cell) for cell in cells] == pytest.approx([62, -22.5, 2, 5, 25, 0])


def test_a_long_table_is_shortened_in_its_text_alone(tmp_path: Path) -> None:
    """Rows of the first group are cut; the two of another one stay."""
    rows = [Row(str(i), (float(i),)) for i in range(48)]
    rows += [Row(str(i), (float(i),), "other") for i in range(48, 50)]
    experiment = RemoveHeads(scores=tmp_path, out=tmp_path)

    text = experiment.save(Table("a title", "put", [Column("kv")], rows), most=24)

    title, _, *shown = text.splitlines()
    assert "24 more" in title
    labels = [line.split()[0] for line in shown]
    assert labels == [*map(str, range(24)), "48", "49"]
    assert len(rows_of(tmp_path / "remove-heads.csv")) == 50


def test_the_command_shows_the_central_result(scores: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "new"
    tasks = ["--tasks", "kv,kv:generate,knowledge,text"]
    few = ["--pairs", 8, "--examples", 16]
    ranking = ["--scores", scores, "--counts", 4, "--random-draws", 1]

    run("remove-heads", *ranking, *tasks, *few, "--out", out)

    assert {path.name for path in out.iterdir()} == {f"remove-heads.{end}" for end in FILES}
    intact, without, _ = rows_of(out / "remove-heads.csv")
    for task in ("kv", "kv:generate"):
        assert float(intact[task]) > 90
        assert float(without[task]) < 30
    assert float(without["knowledge_change_percent"]) > -15
    assert 1 < float(intact["perplexity"]) < 10
    assert "first 4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        (["prune-layers", "--last-layer", 1], ["prune-layers.gradual", "prune-layers.individual"]),
        (["keep-heads", "--keep", "5:5", "5:none"], ["keep-heads"]),
    ],
    ids=["prune-layers", "keep-heads"],
)
def test_the_other_commands_write_tables_and_figures(
    tmp_path: Path, argv: list[object], names: list[str]
) -> None:
    run(*argv, "--tasks", "knowledge", "--examples", 4, "--out", tmp_path)
    expected: set[str] = set()
    for name in names:
        expected.update(f"{name}.{end}" for end in FILES)
    assert {path.name for path in tmp_path.iterdir()} == expected


def test_the_questions_and_their_options_are_the_same_in_every_answer_format() -> None:
    letters = LetterChoice.from_file(seed=3, answer_format="letter").examples(5)
    texts = LetterChoice.from_file(seed=3, answer_format="text").examples(5)
    completions = LetterChoice.from_file(seed=3, answer_format="completion").examples(5)
    for letter, text, completion in zip(letters, texts, completions, strict=True):
        question, *options, _ = letter.prompt.splitlines()
        assert text.prompt == letter.prompt
        assert completion.prompt == question
        assert text.choices == completion.choices
        assert text.answer == completion.answer
        assert f"{letter.answer.strip()}.{text.answer}" in options
        expected_options: list[str] = []
        for choice, option in zip(letter.choices, text.choices):
            expected_options.append(f"{choice.strip()}.{option}")
        assert options == expected_options


def test_a_dictionary_in_other_words_has_the_same_pairs_and_the_same_answer() -> None:
    (plain,) = KVRetrieval(3, seed=1).examples(1)
    (spoken,) = KVRetrieval(3, seed=1, wording=DIALOGUE).examples(1)
    key = plain.prompt.split("'")[1]
    assert plain.choices == spoken.choices
    assert plain.answer == spoken.answer
    assert f"Anna: I have{plain.answer} of the {key}." in spoken.prompt.splitlines()
    assert spoken.prompt.endswith(f"Ben: How many of the {key}?\nAnna: You said")


def test_other_words_need_the_same_heads(scores: Path, tmp_path: Path) -> None:
    ranking = ["--scores", scores, "--counts", 4]
    formats = ["--of", "kv", "--formats", "completion,reworded"]

    run("formats", *formats, *ranking, "--examples", 16, "--out", tmp_path)

    assert {path.name for path in tmp_path.iterdir()} == {f"formats.{end}" for end in FILES}
    intact, without = rows_of(tmp_path / "formats.csv")
    for name in ("completion", "reworded"):
        assert float(intact[name]) > 80
        assert float(without[name]) < 40


def test_tasks_of_lm_eval_are_columns(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    tiny = load_teacher(TINY)
    write_task(tmp_path, "arc_easy", n_rows=4)
    names = "lm_eval:arc_easy,lm_eval:text"
    task, text = Questions(tasks=names, include_path=tmp_path, examples=3).make(*tiny)
    assert task.column.header == "arc_easy, %"
    # A share of three examples.
    assert 3 * task.measure(*tiny) % 100 == pytest.approx(0)
    # A perplexity is not a share.
    assert text.column.header == "text"
    assert text.measure(*tiny) < 10
    with pytest.raises(ValueError, match=naming("lm_eval:probes", 7)):
        Questions(tasks="lm_eval:probes").make(*tiny)
