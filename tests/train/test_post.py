"""Conversations as training data, and the stage that learns the assistant's part of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import make_family_model
from messages import has_facts, naming
from torch.testing import assert_close
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
from hybrid_distill.train.losses import IGNORE, next_token_labels
from hybrid_distill.train.stages import make_stage

PROMPT = "{% if add_generation_prompt %}<assistant>{% endif %}"
PLAIN = "{% for m in messages %}<{{ m.role }}> {{ m.content }} <end> {% endfor %}" + PROMPT
MARKED = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.role == 'assistant' %}{% generation %} {{ m.content }} <end>{% endgeneration %}"
    "{% else %} {{ m.content }} <end>{% endif %} {% endfor %}"
)
CLOSES_THE_LAST = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} "
    "{% if loop.last %}<end> {% endif %}{% endfor %}" + PROMPT
)


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


MESSAGES = [
    message("user", "w1 w2"),
    message("assistant", "w3"),
    message("user", "w4"),
    message("assistant", "w5 w6"),
]


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
    """Write conversations with questions of 1 to 4 words and answers of 2 to 6."""
    records: list[dict] = []
    for number in range(n):
        question = message("user", f"w{number} " * (1 + number % 4))
        answer = message("assistant", f"w{number + 40} " * (2 + number % 5))
        records.append({"messages": [question, answer]})
    return write_jsonl(path, records)


def write_texts(tmp_path: Path, n: int) -> Path:
    """Write documents without roles."""
    return write_jsonl(tmp_path / "text.jsonl", [{"text": text} for text in word_texts(n)])


def chat_rows(tmp_path: Path, seq_len: int) -> PackedRows:
    """Rows of `conversations`."""
    source = conversations(tmp_path / "chat.jsonl")
    config = DataConfig((str(source),), chat=True, seq_len=seq_len)
    rows = open_rows(config, chat_tokenizer(), cache_dir=tmp_path)
    assert isinstance(rows, PackedRows)
    return rows


def chat_tokens(tmp_path: Path) -> Path:
    """Write the tokens of `conversations`; return their folder."""
    source = conversations(tmp_path / "chat.jsonl")
    write_tokens(tmp_path / "tokens", [str(source)], chat_tokenizer(), text_column=None)
    return tmp_path / "tokens"


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["by prefixes", "marked"])
def test_what_the_assistant_says_is_learned_token_by_token(template):
    tokenizer = chat_tokenizer(template)
    text = "<user> w1 w2 <end> <assistant> w3 <end> <user> w4 <end> <assistant> w5 w6 <end>"

    ids, learned = encode_conversation(json.dumps(MESSAGES), tokenizer)

    tokens = tokenizer.convert_ids_to_tokens(ids)
    assert tokens == text.split()
    predicted = [after for after, counts in zip(tokens[1:], learned) if counts]
    assert predicted == "w3 <end> w5 w6 <end>".split()
    assert not learned[-1], "nothing is known to come after the last token"

    ids_BL = torch.tensor([ids])
    one_document = torch.zeros_like(ids_BL)
    labels = next_token_labels(ids_BL, one_document, torch.tensor([learned]))
    assert labels[labels != IGNORE].tolist() == tokenizer.convert_tokens_to_ids(predicted)


def test_a_template_that_closes_an_earlier_answer_otherwise_is_refused():
    with pytest.raises(ValueError, match=naming("message 2", "{% generation %}")):
        encode_conversation(json.dumps(MESSAGES), chat_tokenizer(CLOSES_THE_LAST))


@pytest.mark.parametrize(
    "record",
    [
        pytest.param({"messages": MESSAGES[:2]}, id="messages"),
        pytest.param({"prompt": "w1 w2", "completion": "w3"}, id="prompt and completion"),
        pytest.param(
            {"problem": "w1 w2", "generated_solution": "w3", "problem_source": "w9"},
            id="problem and solution",
        ),
        pytest.param(
            {
                "conversations": [
                    {"from": "human", "value": "w1 w2"},
                    {"from": "gpt", "value": "w3"},
                ],
                "id": 3,
            },
            id="from and value",
        ),
    ],
)
def test_every_shape_of_a_record_is_the_same_conversation(tmp_path, record):
    path = write_jsonl(tmp_path / "chat.jsonl", [record])
    (document,) = read_documents(str(path), None)
    ids, learned = encode_conversation(document, chat_tokenizer())
    assert chat_tokenizer().decode(ids) == "<user> w1 w2 <end> <assistant> w3 <end>"
    assert sum(learned) == 2


@pytest.mark.parametrize(
    "record",
    [{"text": "w1"}, {"messages": [{"role": "user"}]}, {"prompt": "w1"}],
    ids=["text", "message without content", "prompt without completion"],
)
def test_a_record_that_is_not_a_conversation_is_named(tmp_path, record):
    path = write_jsonl(tmp_path / "chat.jsonl", [record])
    with pytest.raises(ValueError, match="line 1"):
        list(read_documents(str(path), None))


def test_rows_hold_whole_conversations_apart_and_their_masks(tmp_path):
    seq_len = 16
    rows = chat_rows(tmp_path, seq_len)

    batch = rows.batch(0, rows.rows_per_epoch)

    # All conversations one after the other, each token with its mask, cut into rows.
    tokenizer = chat_tokenizer()
    end_id = tokenizer.eos_token_id
    stream: list[tuple[int, bool]] = []
    for document in read_documents(str(tmp_path / "chat.jsonl"), None):
        ids, learned = encode_conversation(document, tokenizer)
        stream += zip(ids, learned)
    n_padding = -len(stream) % seq_len
    stream += [(end_id, False)] * n_padding
    begins = range(0, len(stream), seq_len)
    expected = {tuple(stream[begin : begin + seq_len]) for begin in begins}
    cut_rows: set[tuple] = set()
    for ids, mask in zip(batch["input_ids"].tolist(), batch["mask"].tolist()):
        cut_rows.add(tuple(zip(ids, mask)))
    assert cut_rows == expected

    # A document begins with each question, and with the padding.
    before = batch["input_ids"][:, :-1]
    after = batch["input_ids"][:, 1:]
    is_question = after == tokenizer.convert_tokens_to_ids("<user>")
    is_first_padding = (after == end_id) & (before != end_id)
    is_new_document = batch["seq_idx"].diff(dim=1) == 1
    assert torch.equal(is_new_document, is_question | is_first_padding)


def test_a_base_models_tokenizer_reads_what_the_instruct_models_has_written(tmp_path):
    tokens = str(chat_tokens(tmp_path))
    base = chat_tokenizer(None)
    base.eos_token = "<end>"
    chat = DataConfig((tokens,), chat=True)
    check_sources(chat, base)

    with pytest.raises(ValueError, match="tokenizer"):
        check_sources(chat, word_tokenizer())

    text = write_jsonl(tmp_path / "text.jsonl", [{"text": "w1"}])
    write_tokens(tmp_path / "text", [str(text)], base)
    mixed = DataConfig((tokens, str(tmp_path / "text")), chat=True)
    with pytest.raises(ValueError, match=r"--data\.no-chat"):
        check_sources(mixed, base)


def test_conversations_beside_text_have_their_share_of_the_rows_and_their_own_masks(tmp_path):
    tokenizer = chat_tokenizer()
    chat = str(chat_tokens(tmp_path))
    text = write_texts(tmp_path, n=91)
    config = DataConfig((str(text), chat), weights=(3, 1), seq_len=16)
    rows = open_rows(config, tokenizer, cache_dir=tmp_path)
    assert isinstance(rows, PackedRows)
    whole = rows.batch(0, rows.rows_per_epoch)
    assistant = tokenizer.convert_tokens_to_ids("<assistant>")
    is_chat = (whole["input_ids"] == assistant).any(1)
    assert abs(int(is_chat.sum()) - rows.rows_per_epoch / 4) <= 1

    alone = open_rows(DataConfig((chat,), seq_len=16), tokenizer).batch(0, 1000)
    mask_of: dict[tuple, list[bool]] = {}
    for ids, mask in zip(alone["input_ids"].tolist(), alone["mask"].tolist()):
        mask_of[tuple(ids)] = mask
    chat_ids = whole["input_ids"][is_chat].tolist()
    chat_masks = whole["mask"][is_chat].tolist()
    for ids, mask in zip(chat_ids, chat_masks):
        assert mask == mask_of[tuple(ids)]
        assert not all(mask)

    # Two processes share a batch, and a second opening cuts the same.
    halves = [rows.batch(3, 8, rank, 2)["input_ids"] for rank in range(2)]
    again = open_rows(config, tokenizer, cache_dir=tmp_path).batch(3, 8)
    assert torch.equal(torch.cat(halves), again["input_ids"])


@pytest.mark.parametrize("fused", [True, False])
def test_the_loss_does_not_see_what_the_teacher_says_of_the_users_part(tmp_path, fused):
    batch = chat_rows(tmp_path, seq_len=24).batch(0, 2)
    student, teacher = small_models(vocab_size=102)
    config = Distill(name="post", fused=fused, hard_weight=0.5)
    stage = make_stage(config, student, teacher)
    clean = stage(batch).total

    def with_noise_where(mask_BL):
        """Return the loss when the teacher's last hidden states are off in these places."""
        noise_BLE = torch.randn(1, 24, SMALL["hidden_size"]) * mask_BL.unsqueeze(-1)

        def add_noise(module, args, output):
            return type(output)(last_hidden_state=output[0] + noise_BLE)

        hook = teacher.model.register_forward_hook(add_noise)
        try:
            return stage(batch).total
        finally:
            hook.remove()

    is_assistants = batch["mask"]
    assert torch.equal(with_noise_where(~is_assistants), clean)
    assert not torch.equal(with_noise_where(is_assistants), clean)


def test_a_wider_teacher_with_another_padding_of_the_vocabulary(tmp_path):
    """The fused loss and the one of whole logits agree on the tokens that both models have."""
    batch = chat_rows(tmp_path, seq_len=24).batch(0, 2)
    student, _ = small_models(vocab_size=102)
    wide = make_family_model("llama", **{**SMALL, "hidden_size": 48, "vocab_size": 128})

    losses: dict[bool, torch.Tensor] = {}
    for fused in (True, False):
        config = Distill(name="post", fused=fused)
        stage = make_stage(config, student, wide, vocab_size=102)
        losses[fused] = stage(batch).total

    assert_close(losses[True], losses[False])


# A whole run


def save_model(folder: Path, tokenizer: PreTrainedTokenizerFast, **shape: int) -> str:
    settings = {**SMALL, "vocab_size": 102, "eos_token_id": 1, **shape}
    model = make_family_model("llama", **settings)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def post_run(tmp_path: Path) -> RunConfig:
    """Describe a run with a post stage: a base model as student, a wider chat model as teacher."""
    text = write_texts(tmp_path, n=20)
    small = save_model(tmp_path / "small", chat_tokenizer(None))
    wide = save_model(tmp_path / "wide", chat_tokenizer(), hidden_size=48)
    chat = conversations(tmp_path / "chat.jsonl")
    post = Distill(
        name="post",
        steps=2,
        batch_size=2,
        micro_batch_size=1,
        data=DataConfig((str(chat),), chat=True, seq_len=24),
        teacher=wide,
    )
    return small_run(
        tmp_path / "run",
        teacher=TeacherConfig(path=small),
        data=DataConfig((str(text),), seq_len=16),
        stages=(ALIGN, post),
        plan=PlanConfig("random", k=2),
        evaluation=EvaluationConfig(texts=str(text), n_texts=2, n_pairs=(4,)),
    )


def test_a_run_with_a_stage_of_its_own_data_and_teacher(tmp_path, monkeypatch, capsys):
    """Data that is prepared by its own command gives the same rows as data that is read."""
    monkeypatch.setenv("HYBRID_DISTILL_CACHE", str(tmp_path / "cache"))
    run = post_run(tmp_path)
    data = run.data_of(run.stage("post"))
    tokens = str(tmp_path / "tokens")
    words = ["--tokenizer", str(tmp_path / "wide"), "--sources", data.sources[0], "--chat"]
    assert main(["prepare-data", *words, "--out", tokens]) is None
    assert has_facts(capsys.readouterr().out, 12, tokens)
    # This tokenizer has no words to ask questions with.
    nothing = EvalResult({}, {}, 1, None, None, 0, None, None, None, 0, {}, 0)
    monkeypatch.setattr(
        steps,
        "evaluate_run",
        lambda inputs, student: nothing.save(inputs.paths.evaluation),
    )

    weights: list[bytes] = []
    for number, source in enumerate((data, replace(data, sources=(tokens,)))):
        config = replace(run, out=tmp_path / f"run{number}").with_stage("post", data=source)
        run_recipe(config, [])
        assert from_json(config.out / "config.json") == config
        # Finished stages are loaded.
        run_recipe(config, [])
        weights.append((config.out / "stages/2-post/model.safetensors").read_bytes())
    assert weights[0] == weights[1]
