"""Text files as people have them: marks of editors, hidden copies, links, broken characters."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
from messages import has_facts, logged_by, naming
from test_post import chat_tokenizer
from training import word_tokenizer

from hybrid_distill.cli.app import main
from hybrid_distill.data import DataConfig, open_rows, read_documents, read_held_out
from hybrid_distill.data.chat import encode_conversation
from hybrid_distill.data.files import _log_once, contents_of
from hybrid_distill.data.readers import Tally
from hybrid_distill.probes.knowledge import Knowledge, LetterChoice

MARK = b"\xef\xbb\xbf"
SEPARATOR = "<|endoftext|>\n"


def lines_of(*records: Any) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def texts(*contents: str) -> list[dict[str, str]]:
    return [{"text": text} for text in contents]


# Marks


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.txt", MARK + b"w1 w2\n" + SEPARATOR.encode() + b"w3\n", ["w1 w2\n", "w3\n"]),
        ("a.txt", MARK + SEPARATOR.encode() + b"w3\n", ["", "w3\n"]),
        (
            "a.txt",
            MARK + b"w1\r\n" + SEPARATOR.encode() + MARK + b"w2\r\n",
            ["w1\n", "w2\n"],
        ),
        ("a.jsonl", MARK + lines_of(*texts("w1", "w2")), ["w1", "w2"]),
        (
            "a.jsonl",
            MARK + lines_of(*texts("w1")) + MARK + lines_of(*texts("w2")),
            ["w1", "w2"],
        ),
        ("a.jsonl.gz", gzip.compress(MARK + lines_of(*texts("w1", "w2"))), ["w1", "w2"]),
    ],
    ids=[
        "txt",
        "txt that begins with a separator",
        "joined txt",
        "jsonl",
        "joined jsonl",
        "jsonl.gz",
    ],
)
def test_a_byte_order_mark_is_no_text(tmp_path, name, content, expected):
    """datasets#8241: three tokens, a separator that is none, and JSON that is none."""
    (tmp_path / name).write_bytes(content)
    assert list(read_documents(str(tmp_path))) == expected


def test_a_byte_order_mark_makes_no_tokens(tmp_path):
    tokenizer = word_tokenizer()
    text = b"w1 w2\n" + SEPARATOR.encode() + b"w3 w4 w5\n"

    def ids(name: str, content: bytes) -> list[list[int]]:
        (tmp_path / name).write_bytes(content)
        config = DataConfig((str(tmp_path / name),), seq_len=16)
        rows = open_rows(config, tokenizer, cache_dir=tmp_path / "cache")
        return rows.batch(0, 1)["input_ids"].tolist()

    assert ids("plain.txt", text) == ids("marked.txt", MARK + text)


def test_questions_with_a_byte_order_mark_are_read(tmp_path):
    path = tmp_path / "facts.jsonl"
    half_a_pair = " \ud83d"
    fact = {"prompt": "a", "answer": half_a_pair, "choices": [half_a_pair, " c"]}
    path.write_bytes(MARK + lines_of(fact))

    (example,) = Knowledge(path).examples()
    (lettered,) = LetterChoice.from_file(path, n_options=2).examples(1)

    assert example.choices == (" \ufffd", " c")
    assert lettered.prompt.startswith("a\n")


# Folders


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of two files, with everything else that gets into folders."""
    top = tmp_path / "corpus"
    for name in (
        "a.jsonl",
        "deep/d.jsonl",
        ".ipynb_checkpoints/a-checkpoint.jsonl",
        ".cache/b.jsonl",
        ".git/c.txt",
        "deep/._d.jsonl",
        "._a.jsonl",
    ):
        path = top / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(lines_of(*texts(path.stem)))
    return top


def test_hidden_files_and_folders_are_no_text(folder, caplog):
    """datasets#4115: copies of notebooks, caches, version control and macOS were read as data."""
    with caplog.at_level("INFO"):
        assert list(read_documents(str(folder))) == ["a", "d"]
    (line,) = [message for message in caplog.messages if str(folder) in message]
    assert has_facts(line, 5)
    assert "\n" not in line


def test_a_hidden_file_or_folder_that_is_named_is_read(folder):
    assert list(read_documents(str(folder / ".cache"))) == ["b"]
    assert list(read_documents(str(folder / "._a.jsonl"))) == ["._a"]


def test_linked_folders_are_read_once(folder, tmp_path, caplog):
    """datasets#4115: they were left out without a word."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "e.jsonl").write_bytes(lines_of(*texts("e")))
    (folder / "link").symlink_to(other)
    (folder / "link to deep").symlink_to(folder / "deep")
    (other / "round").symlink_to(folder)
    (folder / "gone.jsonl").symlink_to(tmp_path / "nothing.jsonl")
    with caplog.at_level("INFO"):
        assert sorted(read_documents(str(folder))) == ["a", "d", "e"]
    contents = contents_of(folder)
    assert len(contents.again) == 2
    assert contents.broken == ["gone.jsonl"]
    (record,) = logged_by(caplog, _log_once)
    assert has_facts(record.getMessage(), folder, 2, 1, "gone.jsonl")


def test_a_folder_of_hidden_files_alone_is_refused_with_their_number(folder):
    (folder / "a.jsonl").unlink()
    (folder / "deep" / "d.jsonl").unlink()
    with pytest.raises(ValueError, match=naming(folder, 5)):
        list(read_documents(str(folder)))


# Characters


def broken(path: Path) -> Path:
    """Half of a surrogate pair, which JSON may hold and UTF-8 may not, on line 2."""
    path.write_bytes(b'{"text": "w1"}\n{"text": "w2 \\ud83d w3"}\n{"text": "w4 \\ud83d\\ude00"}\n')
    return path


def test_half_a_surrogate_pair_is_replaced_and_its_place_is_named(tmp_path, caplog):
    """tiktoken#82: the tokenizer's UnicodeEncodeError named neither file nor line."""
    path = broken(tmp_path / "a.jsonl")
    with caplog.at_level("INFO"):
        assert list(read_documents(str(path))) == ["w1", "w2 \ufffd w3", "w4 \U0001f600"]
    (record,) = logged_by(caplog, Tally.report)
    assert has_facts(record.getMessage(), 1, f"{path}, line 2")

    config = DataConfig((str(path),), seq_len=16)
    rows = open_rows(config, word_tokenizer(), cache_dir=tmp_path / "cache")
    assert rows.batch(0, 1)["mask"].sum() > 6


def test_in_a_conversation_too(tmp_path, caplog):
    path = tmp_path / "chat.jsonl"
    path.write_bytes(b'{"prompt": "w1 \\udc00", "completion": "w2 \\ud83d\\ude00"}\n')

    with caplog.at_level("INFO"):
        (conversation,) = read_documents(str(path), None)

    contents = [message["content"] for message in json.loads(conversation)]
    assert contents == ["w1 \ufffd", "w2 \U0001f600"]
    assert f"{path}, line 1" in caplog.text
    encode_conversation(conversation, chat_tokenizer())


@pytest.mark.parametrize(
    ("name", "pack"), [("a.txt", bytes), ("a.jsonl", bytes), ("a.jsonl.gz", gzip.compress)]
)
def test_bytes_that_are_not_utf_8_are_named_by_file_and_line(
    tmp_path, name, pack: Callable[[bytes], bytes]
):
    (tmp_path / name).write_bytes(pack(b'{"text": "w1"}\n' * 3 + b'{"text": "\xff"}\n'))
    with pytest.raises(ValueError, match=naming(tmp_path / name, "line 4")):
        list(read_documents(str(tmp_path / name)))


# Columns


def table(path: Path, **columns: list[Any]) -> str:
    if path.suffix == ".parquet":
        datasets.Dataset.from_dict(columns).to_parquet(path)
    else:
        records = [dict(zip(columns, row)) for row in zip(*columns.values())]
        path.write_bytes(lines_of(*records))
    return str(path)


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
@pytest.mark.parametrize(
    ("value", "kind"), [(7, "int"), (2.5, "float"), (True, "bool"), (["w1"], "list")]
)
def test_a_column_of_something_else_is_named_by_what_it_holds(tmp_path, name, value, kind):
    """ir_datasets#160: the answer was "its columns are text"."""
    source = table(tmp_path / name, text=[value, value], other=["w1", "w2"])
    with pytest.raises(ValueError, match=naming(source, kind, value, 1, "other")):
        list(read_documents(source))


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_a_text_that_is_nan_is_a_missing_one(tmp_path, name, caplog):
    """pandas writes a missing text so."""
    nothing = float("nan")
    source = table(tmp_path / name, text=[nothing, nothing], other=["w1", "w2"])
    with caplog.at_level("INFO"):
        assert list(read_documents(source)) == ["", ""]
    (record,) = logged_by(caplog, Tally.report)
    assert has_facts(record.getMessage(), 2, source)
    with pytest.raises(ValueError, match=naming(source)):
        read_held_out(source, 2)
    if name.endswith("jsonl"):
        mixed = table(tmp_path / "mixed.jsonl", text=["w1", nothing, None])
        assert list(read_documents(mixed)) == ["w1", "", ""]


# Commands


def test_commands_read_such_files(folder, tmp_path, capsys):
    (folder / "a.jsonl").write_bytes(MARK + broken(tmp_path / "b.jsonl").read_bytes())
    out = tmp_path / "tokens"
    main(["prepare-data", "--tokenizer", "tiny", "--sources", str(folder), "--out", str(out)])
    assert has_facts(capsys.readouterr().out, 4, out)

    numbers = table(tmp_path / "n.jsonl", text=[1])
    scores = tmp_path / "s.json"
    with pytest.raises(SystemExit, match="2"):
        main(["score", "--control-texts", numbers, "--out", str(scores)])
    assert f"{numbers}, line 1" in capsys.readouterr().err
    assert not scores.exists()
