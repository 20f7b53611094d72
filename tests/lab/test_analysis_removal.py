"""Heads and layers removed, and questions in other formats: what is lost, and that nothing of a model is changed."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from harness_rows import write_task
from planted import AGGREGATE, GATHER_ASKED_KEY, GATHER_VALUE_KEY, KEYS, N_HEADS, N_LAYERS, planted_teacher
from test_head_sites import FAMILIES, IDS, block_outputs, make_model, n_hooks
from transformers import PreTrainedModel

from hybrid_distill.cli.app import main
from hybrid_distill.lab.analysis.experiment import Bench, Column, Questions, Row, Table, Task, accuracy_task
from hybrid_distill.lab.analysis.removal import KeepHeads, PruneLayers, RemoveHeads, parse_kept, without_layers
from hybrid_distill.plan import HeadId
from hybrid_distill.probes.knowledge import AnswerFormat, LetterChoice
from hybrid_distill.probes.kv_retrieval import DIALOGUE, KVRetrieval
from hybrid_distill.scoring.resume_log import ResumeLog
from hybrid_distill.teacher import TINY, ablate_heads, decoder_blocks, head_sites, load_teacher

RANKING = [AGGREGATE, GATHER_VALUE_KEY, GATHER_ASKED_KEY]
RANKING += [h for h in (HeadId(i, j) for i in range(N_LAYERS) for j in range(N_HEADS)) if h not in RANKING]


@pytest.fixture(scope="module")
def planted() -> Bench:
    """The planted teacher, asked for KV retrieval of 8 pairs in its words."""
    examples = KVRetrieval(8, seed=1, keys=KEYS).examples(24)
    return Bench(*planted_teacher(), [accuracy_task("kv", examples, 1 / 8)])


def values(table: Table) -> dict[str, float]:
    return {row.label: row.values[0] for row in table.rows}


def remove_heads(bench: Bench, ranking: list[HeadId], counts: tuple[int, ...], n_draws: int) -> Table:
    return RemoveHeads(scores=Path(), counts=counts, random_draws=n_draws).table(bench, ranking)


def test_without_its_circuit_the_planted_teacher_retrieves_nothing(planted: Bench) -> None:
    found = values(remove_heads(planted, RANKING, (1, 3), n_draws=2))
    assert list(found) == ["nothing", "first 1", "first 3", "random 1 (mean of 2)", "random 3 (mean of 2)"]
    assert found["nothing"] == 100 and found["first 1"] < 50 and found["first 3"] < 50
    unimportant = values(remove_heads(planted, RANKING[3:], (1, 3), n_draws=0))
    assert min(unimportant.values()) > 85
    with pytest.raises(ValueError, match="--counts has 17, the ranking 16 heads, the model 16; ask for 1 to 16"):
        remove_heads(planted, RANKING, (17,), n_draws=1)


def test_a_stopped_call_continues_from_what_it_has_measured(planted: Bench, tmp_path: Path) -> None:
    path, asked = tmp_path / "new" / "steps.json", list[int]()

    def measure(*_: object) -> float:
        asked.append(1)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return len(asked)

    def table() -> Table:
        return remove_heads(
            planted._replace(tasks=[Task(Column("x"), measure)], resume_log=ResumeLog(path, {})), RANKING, (1, 3), 1
        )

    with pytest.raises(KeyboardInterrupt):
        table()
    assert path.exists()
    assert [*values(table()).values()] == [1, 2, 4, 5, 6]
    assert not path.exists()


def test_random_heads_are_the_same_at_every_call_and_others_for_every_draw(planted: Bench) -> None:
    seen: list[tuple[int, ...]] = []

    def note(model: PreTrainedModel, tokenizer: object) -> float:
        seen.append(tuple(site.layer for site in head_sites(model) if "forward" in vars(site.block)))
        return 1.0

    for _ in range(2):
        remove_heads(planted._replace(tasks=[Task(Column("x"), note)]), RANKING, (3,), n_draws=4)
    assert seen[:6] == seen[6:] and len(set(seen[2:6])) > 1


def test_layers_from_the_end_and_one_by_one(planted: Bench) -> None:
    """Gather heads are in layer 1, the aggregate head in layer 2; layers 0 and 3 hold noise."""
    gradual = values(PruneLayers().from_the_end(planted))
    assert gradual["all"] == gradual["0 to 2"] == 100 and gradual["0 to 1"] < 50 and gradual["0"] < 50
    single = values(PruneLayers().one_by_one(planted))
    assert single["none"] == single["0"] == single["3"] == 100 and single["1"] < 50 and single["2"] < 50
    below = values(PruneLayers(last_layer=2).one_by_one(planted))
    assert list(below) == ["none", "0", "1", "2"] and below["none"] == 100


def test_only_the_circuits_heads_are_needed(planted: Bench) -> None:
    def keep(*texts: str, last_layer: int | None = None) -> dict[str, float]:
        experiment = KeepHeads(keep=texts, last_layer=last_layer)
        return values(experiment.table(planted, {text: parse_kept(text) for text in texts}))

    found = keep("1:1,3/2:2", "0:none/1:1,3/2:2/3:none", "1:1/2:2", "2:none")
    assert found["1:1,3/2:2"] == found["0:none/1:1,3/2:2/3:none"] == found["all"] == 100
    assert found["1:1/2:2"] < 50 and found["2:none"] < 50
    cut = keep("1:none", last_layer=2)
    assert cut["all of layers 0 to 2"] == 100 and cut["1:none"] < 50


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_left_out_hands_on_what_it_gets_and_comes_back_bit_identical(family: str) -> None:
    model = make_model(family)
    plain, weights = model(IDS).logits, {name: p.clone() for name, p in model.named_parameters()}
    with block_outputs(model) as outputs:
        model(IDS)
        below, own = outputs[0].clone(), outputs[1].clone()
        outputs.clear()
        received: list[torch.Tensor] = []
        last = decoder_blocks(model)[2][1]
        hook = last.register_forward_pre_hook(
            lambda _, args, kwargs: received.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
        )
        with without_layers(model, [1]):
            changed = model(IDS).logits
        hook.remove()
    below, own = (t if t.dim() == 3 else t.expand_as(received[0]) for t in (below, own))
    assert torch.equal(received[0][0], below[0]) and not torch.equal(own, below)
    assert not torch.equal(changed, plain)
    with without_layers(model, []), ablate_heads(model, []):
        assert torch.equal(model(IDS).logits, plain)
    assert torch.equal(model(IDS).logits, plain) and n_hooks(model) == 0
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())


def test_a_model_without_layers_generates_with_its_cache_as_without() -> None:
    for family in ("llama", "mamba2", "falcon_h1"):
        model = make_model(family)
        with torch.no_grad(), without_layers(model, [0, 2]):
            settings = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
            cached = model.generate(IDS, use_cache=True, **settings)  # type: ignore[operator]
            assert torch.equal(cached, model.generate(IDS, use_cache=False, **settings))  # type: ignore[operator]


def test_a_table_in_its_forms(tmp_path: Path) -> None:
    columns = (Column("kv", "%", 25.0), Column("perplexity", "", digits=3))
    rows = (Row("nothing", (80.0, 4.0)), Row("random 2", (62.0, 5.0), "random", 2, (2.0, 0.0)))
    text = RemoveHeads(scores=tmp_path, out=tmp_path).save(Table("a title", "removed", columns, rows))
    assert text.splitlines() == [
        "a title",
        "removed                  kv, %       perplexity",
        "nothing                   80.0            4.000",
        "random 2  62.0 ± 2.0 (−22.5 %)  5.000 (+25.0 %)",
        "guessing                  25.0",
    ]
    lines = (tmp_path / "remove-heads.md").read_text().splitlines()
    assert lines[:3] == ["a title", "", "| removed | kv, % | perplexity |"] and lines[-1] == "| guessing | 25.0 |  |"
    names, intact, random = csv.reader((tmp_path / "remove-heads.csv").open())
    assert names == [
        "removed", "kv", "kv_change_percent", "kv_sd", "perplexity", "perplexity_change_percent", "perplexity_sd"
    ]  # fmt: skip
    assert intact == ["nothing", "80.0", "", "", "4.0", "", ""]
    assert [float(cell) for cell in random[1:]] == pytest.approx([62, -22.5, 2, 5, 25, 0])

    long = Table(
        "a title", "put", columns[:1], [Row(str(i), (float(i),), "" if i < 48 else "other") for i in range(50)]
    )
    shown = RemoveHeads(scores=tmp_path, out=tmp_path).save(long, most=24).splitlines()
    assert shown[0] == "a title (24 more in the file)"
    assert [line.split()[0] for line in shown[2:-1]] == [*map(str, range(24)), "48", "49"]
    assert len((tmp_path / "remove-heads.csv").read_text().splitlines()) == 51


SMALL = ["--tasks", "kv,kv:generate,knowledge,text", "--pairs", "8", "--examples", "16"]


def test_the_command_shows_the_central_result(scores: Path, tmp_path: Path, capsys) -> None:
    main(["analyze", "remove-heads", "--scores", str(scores), "--counts", "4", "--random-draws", "1", *SMALL]
         + ["--out", str(tmp_path / "new")])  # fmt: skip
    assert {p.name for p in (tmp_path / "new").iterdir()} == {f"remove-heads.{end}" for end in ("md", "csv", "png")}
    intact, without, _ = list(csv.DictReader((tmp_path / "new/remove-heads.csv").open()))
    for task in ("kv", "kv:generate"):
        assert float(intact[task]) > 90 and float(without[task]) < 30
    assert float(without["knowledge_change_percent"]) > -15
    assert 1 < float(intact["perplexity"]) < 10
    assert "first 4" in capsys.readouterr().out


def test_the_other_commands_write_tables_and_figures(tmp_path: Path) -> None:
    few = ["--tasks", "knowledge", "--examples", "4", "--out", str(tmp_path)]
    main(["analyze", "prune-layers", "--last-layer", "1", *few])
    main(["analyze", "keep-heads", "--keep", "5:5", "5:none", *few])
    names = ("prune-layers.gradual", "prune-layers.individual", "keep-heads")
    assert {p.name for p in tmp_path.iterdir()} == {f"{name}.{end}" for name in names for end in ("md", "csv", "png")}
    assert (tmp_path / "prune-layers.individual.md").read_text().splitlines()[0].endswith("of layers 0 to 1")


def test_the_questions_and_their_options_are_the_same_in_every_form() -> None:
    forms: tuple[AnswerFormat, ...] = ("letter", "text", "completion")
    letter, text, completion = (LetterChoice.from_file(seed=3, answer_format=form).examples(5) for form in forms)
    for asked, named, alone in zip(letter, text, completion, strict=True):
        assert asked.prompt == named.prompt and asked.prompt.splitlines()[0] == alone.prompt
        assert named.choices == alone.choices and named.answer == alone.answer
        assert f"{asked.answer.strip()}.{named.answer}" in asked.prompt.splitlines()
        assert [f"{c.strip()}.{t}" for c, t in zip(asked.choices, named.choices)] == asked.prompt.splitlines()[1:-1]


def test_a_dictionary_in_other_words_has_the_same_pairs_and_the_same_answer() -> None:
    plain, spoken = KVRetrieval(3, seed=1).examples(1)[0], KVRetrieval(3, seed=1, wording=DIALOGUE).examples(1)[0]
    assert plain.choices == spoken.choices and plain.answer == spoken.answer
    key = plain.prompt.split("'")[1]
    assert f"Anna: I have{plain.answer} of the {key}." in spoken.prompt.splitlines()
    assert spoken.prompt.endswith(f"Ben: How many of the {key}?\nAnna: You said")


def test_other_words_need_the_same_heads(scores: Path, tmp_path: Path) -> None:
    argv = ["--of", "kv", "--formats", "completion,reworded", "--scores", str(scores), "--counts", "4"]
    main(["analyze", "formats", *argv, "--examples", "16", "--out", str(tmp_path)])
    assert {p.name for p in tmp_path.iterdir()} == {f"formats.{end}" for end in ("md", "csv", "png")}
    intact, without = csv.DictReader((tmp_path / "formats.csv").open())
    for name in ("completion", "reworded"):
        assert float(intact[name]) > 80 and float(without[name]) < 40


def test_tasks_of_lm_eval_are_columns(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    tiny = load_teacher(TINY)
    write_task(tmp_path, "arc_easy", n_rows=4)
    task, text = Questions(tasks="lm_eval:arc_easy,lm_eval:text", include_path=tmp_path, examples=3).make(*tiny)
    assert task.column.header == "arc_easy, %" and 3 * task.measure(*tiny) % 100 == pytest.approx(0)
    assert text.column.header == "text" and text.measure(*tiny) < 10, "a perplexity is not a share"
    with pytest.raises(ValueError, match="lm_eval:probes is 7 tasks"):
        Questions(tasks="lm_eval:probes").make(*tiny)
