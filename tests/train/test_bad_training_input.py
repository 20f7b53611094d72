"""Input that no GPU minute must be spent on is refused before a teacher is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from messages import has_facts
from test_post import chat_tokenizer, conversations, save_model, write_jsonl
from training import ALIGN, DISTILL, QUICK, refusal, small_run, word_texts, word_tokenizer

from hybrid_distill.cli.app import main
from hybrid_distill.config import RunConfig
from hybrid_distill.data import DataConfig, write_tokens
from hybrid_distill.train.config import Distill


@pytest.fixture(autouse=True)
def _nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_teacher(*args: object, **options: object) -> None:
        raise AssertionError("the teacher was loaded before the input was looked at")

    monkeypatch.setattr("hybrid_distill.pipeline.inputs.load_teacher", load_teacher)


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """Write text.jsonl, chat.jsonl, tokens of each, and a model.

    words/ and chat/ were made with a tokenizer of words, whose vocabulary the model has.
    """
    text = write_jsonl(tmp_path / "text.jsonl", [{"text": text} for text in word_texts(20)])
    write_tokens(tmp_path / "words", [str(text)], word_tokenizer(), name="words")
    chat = conversations(tmp_path / "chat.jsonl")
    write_tokens(tmp_path / "chat", [str(chat)], chat_tokenizer(), name="chat", text_column=None)
    save_model(tmp_path / "model", chat_tokenizer())
    return tmp_path


def run_of_all_stages(out: Path) -> RunConfig:
    """A run that also lists longer rows and conversations."""
    long = Distill(name="long", **QUICK)
    post = Distill(name="post", data=DataConfig(chat=True), **QUICK)
    return small_run(out, stages=(ALIGN, DISTILL, long, post))


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--data.sources {0}/words", "{0}/words"),
        ("--stages align post --post.data.sources {0}/chat", "{0}/chat"),
        (
            "--stages align post --post.teacher {0}/model --post.data.sources {0}/chat",
            "{0}/model",
        ),
        ("--stages post --post.data.sources {0}/chat.jsonl", "tiny_teacher chat_template.jinja"),
        ("--stages post", "tiny --post.data.sources"),
        ("--teacher {0}/model --data.sources {0}/words {0}/chat", "{0}/words"),
        (
            "--teacher {0}/model --data.sources {0}/text.jsonl "
            "--stages post --post.data.sources hf:somebody/chat",
            "prepare-data --sources hf:somebody/chat",
        ),
        ("--stages long --long.seq-len 4096", "long.seq_len 4096"),
        ("--data.seq-len 2048", "data.seq_len 2048"),
        ("--stages distill align", "--stages align distill"),
        ("--stages post --post.teacher /no/such/model", "/no/such/model"),
    ],
)
def test_data_and_teachers_that_do_not_go_together(
    inputs: Path, capsys: pytest.CaptureFixture[str], flags: str, named: str
) -> None:
    run = small_run(inputs / "run")
    if "post" in flags or "long" in flags:
        run = run_of_all_stages(inputs / "run")
    error = refusal(capsys, run, *flags.format(inputs).split())
    assert has_facts(error, *named.format(inputs).split()), error
    assert not (inputs / "run").exists()


@pytest.mark.parametrize("flag", ["--teacher", "--teacher.path", "--post.teacher"])
def test_no_teacher(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    assert "''" in refusal(capsys, run_of_all_stages(Path("runs/small")), flag, "")


def test_a_config_file_without_a_teacher(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"name": "run", "seed": 0}))
    with pytest.raises(SystemExit) as exit_:
        main(["evaluate", str(tmp_path)])
    assert exit_.value.code == 2
    assert "teacher" in capsys.readouterr().err
