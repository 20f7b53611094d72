"""Heads and layers removed: what is lost, that nothing of the model is changed, and what is refused."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from planted import AGGREGATE, GATHER_ASKED_KEY, GATHER_VALUE_KEY, KEYS, N_HEADS, N_LAYERS, planted_teacher
from test_head_sites import FAMILIES, IDS, block_outputs, make_model, n_hooks
from transformers import PreTrainedModel

from hybrid_distill.cli.app import main
from hybrid_distill.lab.analysis.experiment import Bench
from hybrid_distill.lab.analysis.keep_heads import keep_heads, parse_kept
from hybrid_distill.lab.analysis.prune_layers import prune_each_layer, prune_from_the_end, without_layers
from hybrid_distill.lab.analysis.remove_heads import remove_heads
from hybrid_distill.lab.analysis.tables import Column, Row, Table
from hybrid_distill.lab.analysis.tasks import Task
from hybrid_distill.plan import HeadId
from hybrid_distill.probes.answering import answer_choices
from hybrid_distill.probes.kv_retrieval import KVRetrieval
from hybrid_distill.teacher import ablate_heads, decoder_blocks, head_sites

RANKING = [AGGREGATE, GATHER_VALUE_KEY, GATHER_ASKED_KEY]
RANKING += [h for h in (HeadId(i, j) for i in range(N_LAYERS) for j in range(N_HEADS)) if h not in RANKING]


@pytest.fixture(scope="module")
def planted() -> Bench:
    """The planted teacher, asked for KV retrieval of 8 pairs in its words."""
    examples = KVRetrieval(8, seed=1, keys=KEYS).examples(24)
    retrieval = Task(Column("kv", "%", 12.5), lambda m, t: 100 * answer_choices(m, t, examples).accuracy)
    return Bench(*planted_teacher(), [retrieval])


def values(table: Table) -> dict[str, float]:
    return {row.label: row.values[0] for row in table.rows}


def test_without_its_circuit_the_planted_teacher_retrieves_nothing(planted: Bench) -> None:
    found = values(remove_heads(planted, RANKING, (1, 3), n_draws=2))
    assert list(found) == ["nothing", "first 1", "first 3", "random 1 (mean of 2)", "random 3 (mean of 2)"]
    assert found["nothing"] == 100 and found["first 1"] < 50 and found["first 3"] < 50
    unimportant = values(remove_heads(planted, RANKING[3:], (1, 3), n_draws=0))
    assert min(unimportant.values()) > 85


def test_random_heads_are_the_same_at_every_call_and_others_for_every_draw(planted: Bench) -> None:
    seen: list[set[HeadId]] = []

    def note(model: PreTrainedModel, tokenizer: object) -> float:
        hooked = [site.layer for site in head_sites(model) if site.o_proj._forward_pre_hooks]
        seen.append({HeadId(layer, 0) for layer in hooked})
        return 1.0

    for _ in range(2):
        remove_heads(planted._replace(tasks=[Task(Column("x"), note)]), RANKING, (3,), n_draws=4)
    assert seen[:6] == seen[6:]
    assert len({frozenset(heads) for heads in seen[2:6]}) > 1


def test_layers_from_the_end_and_one_by_one(planted: Bench) -> None:
    """Gather heads are in layer 1, the aggregate head in layer 2; layers 0 and 3 hold noise."""
    gradual = values(prune_from_the_end(planted))
    assert gradual["all"] == gradual["0 to 2"] == 100 and gradual["0 to 1"] < 50 and gradual["0"] < 50
    single = values(prune_each_layer(planted))
    assert single["none"] == single["0"] == single["3"] == 100 and single["1"] < 50 and single["2"] < 50
    below = values(prune_each_layer(planted, last_layer=2))
    assert list(below) == ["none", "0", "1", "2"] and below["none"] == 100


def test_only_the_circuits_heads_are_needed(planted: Bench) -> None:
    variants = {text: parse_kept(text) for text in ("1:1,3/2:2", "0:none/1:1,3/2:2/3:none", "1:1/2:2", "2:none")}
    found = values(keep_heads(planted, variants))
    assert found["1:1,3/2:2"] == found["0:none/1:1,3/2:2/3:none"] == found["all"] == 100
    assert found["1:1/2:2"] < 50 and found["2:none"] < 50
    cut = values(keep_heads(planted, {"1:none": {1: ()}}, last_layer=2))
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


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_left_out_runs_once_and_no_more_but_for_a_cache(family: str) -> None:
    """Its output is not used then: both forwards give the same."""
    model, ran = make_model(family), []
    site = next(site for site in head_sites(model) if site.layer == 1)
    hook = site.module.register_forward_pre_hook(lambda *_: ran.append(1))
    uses = sum(other.module is site.module for other in head_sites(model)) - 1  # by the other layers
    with without_layers(model, [1]):
        first = model(IDS, use_cache=False).logits
        assert len(ran) == 1 + uses
        assert torch.equal(model(IDS, use_cache=False).logits, first) and len(ran) == 1 + 2 * uses
        assert torch.equal(model(IDS, use_cache=True).logits, first) and len(ran) == 2 + 3 * uses
    hook.remove()


def test_a_model_without_layers_generates_with_its_cache_as_without() -> None:
    for family in ("llama", "mamba2", "falcon_h1"):
        model = make_model(family)
        with torch.no_grad(), without_layers(model, [0, 2]):
            settings = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
            cached = model.generate(IDS, use_cache=True, **settings)  # type: ignore[operator]
            assert torch.equal(cached, model.generate(IDS, use_cache=False, **settings))  # type: ignore[operator]


TABLE = Table(
    "a title",
    "removed",
    (Column("kv", "%", 25.0), Column("perplexity", "", digits=3)),
    (Row("nothing", (80.0, 4.0)), Row.mean("random 2", [(60.0, 5.0), (64.0, 5.0)], "random", 2)),
)


def test_a_table_in_three_forms(tmp_path: Path) -> None:
    assert TABLE.text().splitlines() == [
        "a title",
        "removed                  kv, %       perplexity",
        "nothing                   80.0            4.000",
        "random 2  62.0 ± 2.0 (−22.5 %)  5.000 (+25.0 %)",
        "guessing                  25.0",
    ]
    TABLE.save(tmp_path, "table")
    assert (tmp_path / "table.md").read_text().splitlines() == [
        "a title",
        "",
        "| removed | kv, % | perplexity |",
        "| --- | ---: | ---: |",
        "| nothing | 80.0 | 4.000 |",
        "| random 2 | 62.0 ± 2.0 (\N{MINUS SIGN}22.5 %) | 5.000 (+25.0 %) |",
        "| guessing | 25.0 |  |",
    ]
    rows = list(csv.reader(TABLE.csv().splitlines()))
    assert rows[0] == ["removed", "kv", "kv_change_percent", "kv_sd", "perplexity", "perplexity_change_percent",
                       "perplexity_sd"]  # fmt: skip
    assert rows[1] == ["nothing", "80.0", "", "", "4.0", "", ""]
    assert [float(cell) for cell in rows[2][1:]] == pytest.approx([62, -22.5, 2, 5, 25, 0])


TINY = ["--tasks", "kv,kv:generate,knowledge,text", "--pairs", "8", "--examples", "16"]


def test_the_command_shows_the_central_result(scores: Path, tmp_path: Path, capsys) -> None:
    main(["analyze", "remove-heads", "--scores", str(scores), "--counts", "4", "--random-draws", "1", *TINY]
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


def test_more_heads_than_there_are(planted: Bench) -> None:
    with pytest.raises(ValueError, match="--counts has 17, the ranking 16 heads, the model 16; ask for 1 to 16"):
        remove_heads(planted, RANKING, (17,))
