"""Conversations as training data, and the stage that learns the assistant's part of them, from another teacher too."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import make_family_model
from training import ALIGN, SMALL, small_models, small_run, word_texts, word_tokenizer
from transformers import PreTrainedTokenizerFast

from hybrid_distill.cli.app import main, run_recipe
from hybrid_distill.config import EvaluationConfig, PlanConfig, RunConfig, TeacherConfig, from_json
from hybrid_distill.data import DataConfig, PackedRows, check_sources, open_rows, write_tokens
from hybrid_distill.data.chat import encode_conversation
from hybrid_distill.data.documents import read_documents
from hybrid_distill.evaluation.evaluate import EvalResult
from hybrid_distill.pipeline import run as steps
from hybrid_distill.train.config import Distill
from hybrid_distill.train.end_to_end import EndToEnd
from hybrid_distill.train.losses import IGNORE, next_token_labels
from hybrid_distill.train.stages import make_stage

PLAIN = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %} {{ m.content }} <end>"
    "{% endgeneration %}{% else %} {{ m.content }} <end>{% endif %} {% endfor %}"
)
FORGETFUL = (
    "{% for m in messages %}<{{ m.role }}> {% if loop.last %}w96 {% endif %}{{ m.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SAID = [("user", "w1 w2"), ("assistant", "w3"), ("user", "w4"), ("assistant", "w5 w6")]
MESSAGES = [{"role": role, "content": content} for role, content in SAID]


def chat_tokenizer(template: str | None = PLAIN) -> PreTrainedTokenizerFast:
    """`word_tokenizer` with tokens 99 to 101 for turns."""
    tokenizer = word_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<user>", "<assistant>", "<end>"]})
    tokenizer.chat_template = template
    return tokenizer


def write_jsonl(path: Path, records: list[dict]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def conversations(path: Path, n: int = 12) -> Path:
    """Questions of 1 to 4 words, answers of 2 to 6."""
    answered = [{"role": "user", "content": f"w{i} " * (1 + i % 4)} for i in range(n)]
    said = [[ask, {"role": "assistant", "content": f"w{i + 40} " * (2 + i % 5)}] for i, ask in enumerate(answered)]
    return write_jsonl(path, [{"messages": messages} for messages in said])


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["by prefixes", "marked"])
def test_what_is_learned_is_what_the_assistant_says_token_by_token(template):
    tokenizer = chat_tokenizer(template)
    ids, learned = encode_conversation(json.dumps(MESSAGES), tokenizer)
    tokens = tokenizer.convert_ids_to_tokens(ids)
    assert tokens == "<user> w1 w2 <end> <assistant> w3 <end> <user> w4 <end> <assistant> w5 w6 <end>".split()
    predicted = [after for after, counts in zip(tokens[1:], learned) if counts]
    assert predicted == "w3 <end> w5 w6 <end>".split()
    assert not learned[-1], "nothing is known to come after the last token"
    row = torch.tensor([ids])
    labels = next_token_labels(row, torch.zeros_like(row), torch.tensor([learned]))[0].tolist()
    assert [label for label in labels if label != IGNORE] == tokenizer.convert_tokens_to_ids(predicted)


def test_a_template_that_renders_the_beginning_otherwise_is_refused():
    with pytest.raises(ValueError, match=r"message 2 .*\{% generation %\}"):
        encode_conversation(json.dumps(MESSAGES), chat_tokenizer(FORGETFUL))


@pytest.mark.parametrize(
    "record",
    [
        {"messages": MESSAGES[:2]},
        {"prompt": "w1 w2", "completion": "w3"},
        {"problem": "w1 w2", "generated_solution": "w3", "problem_source": "w9"},
        {"conversations": [{"from": "human", "value": "w1 w2"}, {"from": "gpt", "value": "w3"}], "id": 3},
    ],
)
def test_every_shape_of_a_record_is_the_same_conversation(tmp_path, record):
    (document,) = read_documents(str(write_jsonl(tmp_path / "chat.jsonl", [record])), None)
    ids, learned = encode_conversation(document, chat_tokenizer())
    assert chat_tokenizer().decode(ids) == "<user> w1 w2 <end> <assistant> w3 <end>"
    assert sum(learned) == 2


@pytest.mark.parametrize("record", [{"text": "w1"}, {"messages": [{"role": "user"}]}, {"prompt": "w1"}])
def test_a_record_that_is_no_conversation_is_named(tmp_path, record):
    with pytest.raises(ValueError, match="line 1 holds"):
        list(read_documents(str(write_jsonl(tmp_path / "chat.jsonl", [record])), None))


def test_rows_hold_whole_conversations_apart_and_their_masks(tmp_path):
    tokenizer, source = chat_tokenizer(), conversations(tmp_path / "chat.jsonl")
    rows = open_rows(DataConfig((str(source),), chat=True, seq_len=16), tokenizer, cache_dir=tmp_path)
    assert isinstance(rows, PackedRows)
    expected = [encode_conversation(document, tokenizer) for document in read_documents(str(source), None)]
    batch = rows.batch(0, rows.rows_per_epoch)
    found = {tuple(zip(ids.tolist(), mask.tolist())) for ids, mask in zip(batch["input_ids"], batch["mask"])}
    stream = [pair for ids, learned in expected for pair in zip(ids, learned)]
    stream += [(tokenizer.eos_token_id, False)] * (-len(stream) % 16)
    assert found == {tuple(stream[begin : begin + 16]) for begin in range(0, len(stream), 16)}
    before, after = batch["input_ids"][:, :-1], batch["input_ids"][:, 1:]
    begins = after == tokenizer.convert_tokens_to_ids("<user>")
    padding = (after == tokenizer.eos_token_id) & (before != tokenizer.eos_token_id)
    assert torch.equal(batch["seq_idx"].diff(dim=1) == 1, torch.logical_or(begins, padding))


def test_a_base_models_tokenizer_reads_what_the_instruct_models_has_written(tmp_path):
    write_tokens(tmp_path / "tokens", [str(conversations(tmp_path / "chat.jsonl"))], chat_tokenizer(), text_column=None)
    base = chat_tokenizer(None)
    base.eos_token = "<end>"
    check_sources(DataConfig((str(tmp_path / "tokens"),), chat=True), base)
    write_tokens(tmp_path / "text", [str(write_jsonl(tmp_path / "text.jsonl", [{"text": "w1"}]))], base)
    with pytest.raises(ValueError, match=r"/text holds plain text .*pass --data\.no-chat\."):
        check_sources(DataConfig((str(tmp_path / "tokens"), str(tmp_path / "text")), chat=True), base)
    with pytest.raises(ValueError, match="made with a tokenizer other than"):
        check_sources(DataConfig((str(tmp_path / "tokens"),), chat=True), word_tokenizer())


def test_conversations_beside_text_have_their_share_of_the_rows_and_the_loss_on_their_answers_alone(tmp_path):
    tokenizer, chat = chat_tokenizer(), tmp_path / "chat"
    write_tokens(chat, [str(conversations(tmp_path / "chat.jsonl"))], tokenizer, text_column=None)
    text = write_jsonl(tmp_path / "text.jsonl", [{"text": text} for text in word_texts(91)])
    config = DataConfig((str(text), str(chat)), weights=(3, 1), seq_len=16)
    rows = open_rows(config, tokenizer, cache_dir=tmp_path)
    assert isinstance(rows, PackedRows)
    whole = rows.batch(0, rows.rows_per_epoch)
    is_chat = (whole["input_ids"] == tokenizer.convert_tokens_to_ids("<assistant>")).any(1)
    assert abs(int(is_chat.sum()) - rows.rows_per_epoch / 4) <= 1
    alone = open_rows(DataConfig((str(chat),), seq_len=16), tokenizer).batch(0, 1000)
    known = {tuple(ids): mask for ids, mask in zip(alone["input_ids"].tolist(), alone["mask"].tolist())}
    for ids, mask in zip(whole["input_ids"][is_chat].tolist(), whole["mask"][is_chat].tolist()):
        assert mask == known[tuple(ids)] and not all(mask)
    halves = [rows.batch(3, 8, rank, 2)["input_ids"] for rank in range(2)]
    assert torch.equal(torch.cat(halves), open_rows(config, tokenizer, cache_dir=tmp_path).batch(3, 8)["input_ids"])


@pytest.mark.parametrize("fused", [True, False])
def test_the_loss_does_not_see_what_the_teacher_says_of_the_users_part(tmp_path, fused):
    source = conversations(tmp_path / "chat.jsonl")
    rows = open_rows(DataConfig((str(source),), chat=True, seq_len=24), chat_tokenizer(), cache_dir=tmp_path)
    batch = rows.batch(0, 2)
    student, teacher = small_models(vocab_size=102)
    stage = make_stage(Distill(name="post", fused=fused, hard_weight=0.5), student, teacher)
    clean = stage(batch).total

    def with_noise_where(mask):
        noise = torch.randn(1, 24, SMALL["hidden_size"]) * mask.unsqueeze(-1)
        hook = teacher.model.register_forward_hook(
            lambda module, args, out: type(out)(last_hidden_state=out[0] + noise)
        )
        try:
            return stage(batch).total
        finally:
            hook.remove()

    assert torch.equal(with_noise_where(~batch["mask"]), clean)
    assert not torch.equal(with_noise_where(batch["mask"]), clean)


def test_a_wider_teacher_with_another_padding_of_the_vocabulary(tmp_path):
    student, _ = small_models(vocab_size=102)
    wide = make_family_model("llama", **{**SMALL, "hidden_size": 48, "vocab_size": 128})
    source = conversations(tmp_path / "chat.jsonl")
    rows = open_rows(DataConfig((str(source),), chat=True, seq_len=24), chat_tokenizer(), cache_dir=tmp_path)
    losses = []
    for fused in (True, False):
        stage = make_stage(Distill(name="post", fused=fused), student, wide, vocab_size=102)
        assert isinstance(stage, EndToEnd)
        losses.append(stage(rows.batch(0, 2)).total)
    torch.testing.assert_close(*losses)


# A whole run


def save_model(folder: Path, tokenizer: PreTrainedTokenizerFast, **shape: int) -> str:
    model = make_family_model("llama", **{**SMALL, "vocab_size": 102, "eos_token_id": 1, **shape})
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def post_run(tmp_path: Path) -> RunConfig:
    """A run of the post stage alone: a base model as student, a wider one with a chat template as teacher."""
    text = tmp_path / "text.jsonl"
    write_jsonl(text, [{"text": document} for document in word_texts(20)])
    small = save_model(tmp_path / "small", chat_tokenizer(None))
    wide = save_model(tmp_path / "wide", chat_tokenizer(), hidden_size=48)
    data = DataConfig((str(conversations(tmp_path / "chat.jsonl")),), chat=True, seq_len=24)
    return small_run(
        tmp_path / "run",
        teacher=TeacherConfig(path=small),
        data=DataConfig((str(text),), seq_len=16),
        stages=(ALIGN, Distill(name="post", steps=2, batch_size=2, micro_batch_size=1, data=data, teacher=wide)),
        plan=PlanConfig("random", k=2),
        evaluation=EvaluationConfig(texts=str(text), n_texts=2, n_pairs=(4,)),
    )


def test_a_run_with_a_stage_of_its_own_data_and_teacher(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HYBRID_DISTILL_CACHE", str(tmp_path / "cache"))
    run = post_run(tmp_path)
    data = run.data_of(run.stage("post"))
    assert main(["prepare-data", "--tokenizer", str(tmp_path / "wide"), "--sources", data.sources[0],
                 "--chat", "--out", str(tmp_path / "tokens")]) is None  # fmt: skip
    assert "12 documents" in capsys.readouterr().out
    # This tokenizer has no words to ask questions with.
    nothing = EvalResult({}, {}, 1, None, None, 0, None, None, None, 0, {}, 0)
    monkeypatch.setattr(steps, "evaluate_run", lambda inputs, student: nothing.save(inputs.paths.evaluation))
    prepared = replace(data, sources=(str(tmp_path / "tokens"),))
    for number, source in enumerate((data, prepared)):
        config = replace(run, out=tmp_path / f"run{number}").with_stage("post", data=source)
        run_recipe(config, [])
        assert from_json(config.out / "config.json") == config
        run_recipe(config, [])  # finished stages are loaded
    ends = [(tmp_path / f"run{n}/stages/2-post/model.safetensors").read_bytes() for n in (0, 1)]
    assert ends[0] == ends[1], "prepared tokens are other rows"
