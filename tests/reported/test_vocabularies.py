"""Vocabularies as models have them: ids with gaps, and tokenizers larger than the embedding."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_family_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn import functional as F
from training import ALIGN, DISTILL, SMALL, refusal, small_run, word_texts, word_tokenizer
from transformers import PreTrainedTokenizerFast

from hybrid_distill.cli.app import main
from hybrid_distill.cli.cache_logits import CacheJob, cache_logits
from hybrid_distill.config import EvaluationConfig, RunConfig, TeacherConfig
from hybrid_distill.data import DataConfig, LogitHeader, TokenHeader, open_logits
from hybrid_distill.pipeline import RunInputs
from hybrid_distill.pipeline.run import choose_heads, prepare, train
from hybrid_distill.train.losses import IGNORE, next_token_labels
from hybrid_distill.train.stage import Stage, teacher_hidden
from hybrid_distill.vocabulary import vocabulary_size

EOS = 98
N_IDS = 99
N_ROWS = 101
"""End-of-text is the highest of 99 ids, of which 50 are tokens; the embedding has two rows more."""


def gapped_tokenizer() -> PreTrainedTokenizerFast:
    words = {"[UNK]": 0} | {f"w{i}": i + 2 for i in range(48)} | {"<eos>": EOS}
    backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", unk_token="[UNK]")


def save_teacher(folder: Path, tokenizer: PreTrainedTokenizerFast, **shape: Any) -> str:
    settings = {**SMALL, "vocab_size": N_ROWS, "eos_token_id": EOS, **shape}
    model = make_family_model("llama", **settings)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.setenv("HYBRID_DISTILL_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "text.jsonl"
    lines = [json.dumps({"text": document}) + "\n" for document in word_texts(20)]
    text.write_text("".join(lines))
    teacher = save_teacher(tmp_path / "teacher", gapped_tokenizer(), initializer_range=0.5)
    return small_run(
        tmp_path / "run",
        teacher=TeacherConfig(teacher),
        data=DataConfig((str(text),), seq_len=16),
        stages=(DISTILL,),
        evaluation=EvaluationConfig(texts=str(text), n_texts=2, n_pairs=(4,)),
    )


def stage_of(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> tuple[Stage, Any]:
    """Return the stage and the batch of a run's first step, as the pipeline makes them."""
    first: list[Any] = []

    def take(stage: Stage, rows: Any, *_: Any, **__: Any) -> None:
        first.extend([stage, rows.batch(0, 8)])
        raise InterruptedError

    monkeypatch.setattr("hybrid_distill.pipeline.run.train_stage", take)
    run = RunInputs(config)
    prepare(run)
    with pytest.raises(InterruptedError):
        train(run, choose_heads(run))
    stage, batch = first
    return stage, batch


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("hard_weight", [0.0, 0.5, 1.0])
def test_the_loss_covers_every_id_of_a_tokenizer_with_gaps(config, monkeypatch, fused, hard_weight):
    """tokenspeed#326, llm-foundry#841: ``len(tokenizer)`` is 50, which left out end-of-text, 98."""
    config = config.with_stage("distill", fused=fused, hard_weight=hard_weight)
    stage, batch = stage_of(config, monkeypatch)
    ids = batch["input_ids"]
    mask = batch["mask"]
    labels = next_token_labels(ids, batch["seq_idx"], mask)
    assert (labels == EOS).any()

    loss = stage(batch).total

    with torch.no_grad():
        ours_BLV = stage.student(ids, seq_idx=batch["seq_idx"], use_cache=False).logits
        theirs_BLV = stage.teacher.lm_head(teacher_hidden(stage.teacher, batch))
    student_BLV = ours_BLV[..., :N_IDS].double().log_softmax(-1)
    teacher_BLV = theirs_BLV[..., :N_IDS].double().log_softmax(-1)
    kl_BL = F.kl_div(student_BLV, teacher_BLV, log_target=True, reduction="none").sum(-1)
    soft = kl_BL[mask].mean()
    hard = F.nll_loss(student_BLV.flatten(0, 1), labels.flatten(), ignore_index=IGNORE)
    expected = (1 - hard_weight) * soft + hard_weight * hard
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)

    loss.backward()
    gradient = stage.student.lm_head.weight.grad
    assert gradient[EOS].abs().max() > 0
    assert gradient[N_IDS:].eq(0).all()


def test_an_end_of_text_that_was_never_learned_costs_what_it_costs(config, monkeypatch):
    """tokenspeed#326: the loss at end-of-text was the one without it (0.24), not 13.9."""
    config = config.with_stage("distill", hard_weight=1.0)
    stage, batch = stage_of(config, monkeypatch)
    cost = 13.9
    labels = next_token_labels(batch["input_ids"], batch["seq_idx"], batch["mask"])
    is_end = labels == EOS
    n_ends_so_far = is_end.flatten().cumsum(0).view_as(labels)
    is_first_end = is_end & (n_ends_so_far == 1)
    out = stage.student.model(batch["input_ids"], seq_idx=batch["seq_idx"], use_cache=False)
    (end_D,) = out[0][is_first_end]
    with torch.no_grad():
        weight = stage.student.lm_head.weight
        # The row that gives end-of-text the probability exp(-13.9) at the first end of a document.
        others = (weight[:EOS] @ end_D).logsumexp(-1)
        weight[EOS] = end_D * (others - cost) / end_D.square().sum()

    loss = stage({**batch, "mask": is_first_end}).total

    assert loss.item() == pytest.approx(cost, abs=0.01)


def test_stored_logits_cover_every_id(config):
    reads_logits = config.with_stage("distill", teacher_logits=config.out / "logits")
    job = CacheJob(reads_logits, top_k=N_IDS)

    cache_logits(job)

    assert LogitHeader.load(job.folder / "logits.json").vocabulary_size == N_IDS
    logits = open_logits(job.folder)
    assert EOS in logits.read(logits.row_ids)["ids"]
    RunInputs(job.run).rows(job.config)  # the run takes them


def test_generated_text_has_the_logits_of_every_id(config, tmp_path):
    out = tmp_path / "own"
    flags = f"--tokens 60 --new-tokens 8 --batch-size 4 --seq-len 16 --top-k-logits {N_IDS}"
    words = ["generate-data", "--model", config.teacher.path, "--out", str(out)]
    main([*words, *flags.split()])
    assert TokenHeader.load(out / "tokens.json").vocabulary_size == N_IDS
    assert LogitHeader.load(out / "logits/logits.json").vocabulary_size == N_IDS


# Larger than the embedding


@pytest.fixture
def padded(config: RunConfig, tmp_path: Path) -> RunConfig:
    """A run whose tokenizer has got a pad token, id 99, and whose embedding has 99 rows."""
    tokenizer = word_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    assert vocabulary_size(tokenizer) == N_IDS + 1
    path = save_teacher(tmp_path / "padded", tokenizer, vocab_size=N_IDS, eos_token_id=1)
    return replace(config, teacher=TeacherConfig(path), stages=(ALIGN, DISTILL))


@pytest.mark.parametrize("flags", [["--dry-run"], []], ids=["dry run", "run"])
def test_a_tokenizer_larger_than_the_embedding_is_refused_before_anything_is_computed(
    padded, capsys, flags
):
    """tokenizers#1609, transformers#11102: alignment trained before distillation failed."""
    line = refusal(capsys, padded, *flags)
    assert padded.teacher.path in line
    assert f"{N_IDS} rows" in line
    assert "<pad>" in line
    # A run may have left its lock, but no file of results.
    assert [path for path in padded.out.glob("*") if path.suffix] == []


@pytest.mark.parametrize("command", ["score", "generate-data", "cache-logits"])
def test_every_command_that_works_for_a_run_refuses_it_too(padded, tmp_path, capsys, command):
    path = padded.teacher.path
    out = tmp_path / "out" / "file"
    words = {
        "score": ["--model", path, "--out", f"{out}.json"],
        "generate-data": ["--model", path, "--tokens", "60", "--out", str(out)],
        "cache-logits": [
            "tiny",
            "--teacher.path",
            path,
            "--distill.teacher-logits",
            str(out),
        ],
    }
    with pytest.raises(SystemExit, match="2"):
        main([command, *words[command]])
    assert "<pad>" in capsys.readouterr().err
    assert not out.parent.exists()


def test_a_stage_of_another_teacher_is_refused_too(config, padded, capsys):
    post = replace(DISTILL, name="post", data=config.data, teacher=padded.teacher.path)
    line = refusal(capsys, replace(config, stages=(DISTILL, post)), "--dry-run")
    assert padded.teacher.path in line
    assert "<pad>" in line
