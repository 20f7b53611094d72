"""Masks on heads' matrices: everything and nothing, what lies between, and patterns of a planted circuit."""

from __future__ import annotations

import csv
import re
from contextlib import nullcontext
from pathlib import Path

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
from test_analysis_maps import PROMPT
from test_answering import TOKENIZERS, sharp
from test_head_sites import FAMILIES, IDS, make_model, n_hooks
from torch import Tensor
from transformers import PreTrainedModel

from hybrid_distill.cli.app import main
from hybrid_distill.lab.analysis.mask import MaskedTask, mask_patterns, masked_logprobs
from hybrid_distill.lab.analysis.mixing import mask_heads, mixing_sites
from hybrid_distill.lab.analysis.patterns import aggregate_mask, gather_mask
from hybrid_distill.plan import HeadId
from hybrid_distill.probes.answering import Tokens, answer_choices
from hybrid_distill.probes.kv_retrieval import KVRetrieval
from hybrid_distill.teacher import HeadKind, ablate_heads, eager_attention

ROW = IDS[:1]  # 10 tokens
ALL, NONE = torch.ones(10, 10, dtype=torch.bool), torch.zeros(10, 10, dtype=torch.bool)
EVERY_KIND = [*((family, None) for family in FAMILIES), ("zamba2", "ssm"), ("falcon_h1", "ssm")]


def two_heads(model: PreTrainedModel, kind: HeadKind | None) -> list[HeadId]:
    """One of the first layer that has heads, one of the last."""
    first, *_, last = mixing_sites(model, kind)
    return [HeadId(first.layer, 1), HeadId(last.layer, last.n_heads - 1)]


@torch.no_grad()
@pytest.mark.parametrize(("family", "kind"), EVERY_KIND)
def test_everything_kept_changes_nothing_and_nothing_kept_is_removal(family: str, kind: HeadKind | None) -> None:
    model = make_model(family)
    heads, plain = two_heads(model, kind), model(ROW).logits
    with eager_attention(model) if kind is None else nullcontext():  # recurrent heads do not ask for it
        intact = model(ROW).logits
        with ablate_heads(model, heads, kind=kind):
            removed = model(ROW).logits
    with mask_heads(model, dict.fromkeys(heads, ALL), kind=kind):
        assert torch.equal(model(ROW).logits, intact)
    with mask_heads(model, dict.fromkeys(heads, ALL.tril()), kind=kind):
        assert torch.equal(model(ROW).logits, intact), "nobody looks ahead anyway"
    with mask_heads(model, dict.fromkeys(heads, NONE), kind=kind):
        torch.testing.assert_close(model(ROW).logits, removed, rtol=0, atol=0)
    assert not torch.equal(intact, removed)
    assert torch.equal(model(ROW).logits, plain) and n_hooks(model) == 0


@torch.no_grad()
@pytest.mark.parametrize(("family", "kind"), EVERY_KIND)
def test_a_mask_and_its_complement_share_out_what_the_head_does(family: str, kind: HeadKind | None) -> None:
    """Behind the projection: with the one, with the other, add up to with all, with nothing."""
    model = make_model(family)
    site = mixing_sites(model, kind)[0]
    head = HeadId(site.layer, 1)
    mask = torch.rand(10, 10, generator=torch.Generator().manual_seed(0)) < 0.5

    def mixed(mask_TS: Tensor) -> Tensor:
        outputs: list[Tensor] = []
        with mask_heads(model, {head: mask_TS}, kind=kind):
            hook = site.module.register_forward_hook(
                lambda _, __, out: outputs.append(out[0] if isinstance(out, tuple) else out)  # type: ignore
            )
            model(ROW)
            hook.remove()
        return outputs[0]

    some, others, everything, nothing = map(mixed, (mask, ~mask, ALL, NONE))
    scale = (everything - nothing).abs().max()
    assert scale > 1e-4
    assert min((part - nothing).abs().max() for part in (some, others)) > 1e-2 * scale, "each has its share"
    assert (some + others - everything - nothing).abs().max() < 1e-5 * max(scale, everything.abs().max())


def test_masks_of_a_marked_prompt() -> None:
    """Tokens 0 1 | 2 3 | 4: two segments of a word and its summary, and the question's last token."""
    assert gather_mask(PROMPT).nonzero().tolist() == [[0, 0], [1, 0], [1, 1], [2, 2], [3, 2], [3, 3]]
    assert aggregate_mask(PROMPT).nonzero().tolist() == [[4, 1], [4, 3]]


def test_the_patterns_of_a_planted_circuit_are_all_it_needs() -> None:
    model, tokenizer = planted_teacher()
    examples = KVRetrieval(8, seed=1, keys=KEYS).examples(16)
    tasks = {"kv": MaskedTask.of(tokenizer, examples, 1 / 8)}
    table = mask_patterns(model, tasks, [GATHER_VALUE_KEY], [AGGREGATE])
    found = {row.label: row.values[0] for row in table.rows}
    assert list(found)[:4] == ["intact", "gather: removed", "gather: pattern alone", "gather: pattern taken out"]
    assert len(found) == 10 and found["intact"] == 100
    for role in ("gather", "aggregate", "both"):
        assert found[f"{role}: pattern alone"] == 100
        assert found[f"{role}: removed"] < 50 and found[f"{role}: pattern taken out"] < 50
    asked = mask_patterns(model, tasks, [GATHER_ASKED_KEY], [])
    assert asked.rows[2].values[0] < 50, "it gathers in the question, which is not a segment"


@torch.no_grad()
@pytest.mark.parametrize("pattern", TOKENIZERS)
def test_choices_of_any_tokens_are_read_as_with_a_cache(pattern: str, family_model) -> None:
    tokenizer = word_tokenizer(probe_texts(), *TOKENIZERS[pattern])
    model = sharp(family_model("llama", vocab_size=len(tokenizer)))
    examples = KVRetrieval(6, seed=1, keys=KEYS).examples(3)
    expected = answer_choices(model, tokenizer, examples).logprob_EC
    rows: list[Tokens] = []

    def everything(ids: Tokens) -> dict[HeadId, Tensor]:
        rows.append(ids)
        return {HeadId(1, 2): torch.ones(len(ids), len(ids), dtype=torch.bool)}

    task = MaskedTask.of(tokenizer, examples, 1 / 6)
    for encoded, logprobs in zip(task.encoded, expected, strict=True):
        assert masked_logprobs(model, encoded, everything) == pytest.approx(logprobs, abs=2e-4)
    assert (len(rows) > 3) == ("digits" in pattern), "a row for each first digit"


def test_a_mask_is_for_one_prompt() -> None:
    model = make_model("llama")
    with mask_heads(model, {HeadId(0, 0): ALL}):
        for ids in (IDS, IDS[:1, :9]):
            with pytest.raises(ValueError, match=r"the mask of L0H0 is \(10, 10\), the forward has"):
                model(ids)


def run(*argv: object) -> None:
    main(["analyze", "mask", *map(str, argv)])


def test_the_command_finds_heads_and_masks_them(tmp_path: Path) -> None:
    run("--pairs", 4, "--examples", 12, "--gather", "L2H6", "--aggregate", "L5H5", "--out", tmp_path / "named")
    assert {p.name for p in (tmp_path / "named").iterdir()} == {f"mask.{end}" for end in ("md", "csv", "png")}
    rows = {row["heads"]: float(row["kv"]) for row in csv.DictReader((tmp_path / "named/mask.csv").open())}
    assert rows["intact"] > 90 and rows["both: removed"] < rows["both: pattern alone"]
    run("--tasks", "kv,letters", "--pairs", 3, "--examples", 2, "--out", tmp_path / "found")
    title = (tmp_path / "found/mask.md").read_text().splitlines()[0]
    assert re.fullmatch(r"tiny: gather L\dH\d, aggregate L\dH\d", title)


def test_recurrent_heads_are_masked_too(random_models: Path, tmp_path: Path) -> None:
    run("--model", random_models / "mamba2", "--gather", "L0H0", "--pairs", 3, "--examples", 2, "--out", tmp_path)
    assert "L0H0" in (tmp_path / "mask.md").read_text()
