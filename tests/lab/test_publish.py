"""A publication is an export, all of it and nothing else: no token, no path of this machine, no training state."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from students import byte_tokenizer, only_error, tiny_student

from hybrid_distill.cli.app import main
from hybrid_distill.export import GateReport, export_checkpoint
from hybrid_distill.lab.publish import publish
from hybrid_distill.plan import HeadPlan
from hybrid_distill.scoring import HeadScores

TOKEN = "hf_" + "a1B2" * 9


def scores_of(plan: HeadPlan) -> HeadScores:
    drop_LH = torch.linspace(0.0, 0.5, plan.n_layers * plan.n_heads).view(plan.n_layers, plan.n_heads)
    numbers = [drop_LH, drop_LH, None, torch.zeros_like(drop_LH), torch.zeros_like(drop_LH), None]
    return HeadScores(plan.n_kv_heads, *numbers, provenance={"model": "/home/somebody/models/Teacher-1B"})


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    """An export that says it has passed its gate."""
    torch.set_num_threads(1)
    student, plan = tiny_student("llama")
    path = tmp_path_factory.mktemp("publish") / "export"
    training = [{"name": "align", "steps": 10, "tokens": 5120}, {"name": "distill", "steps": 5, "tokens": 2560}]
    options: dict[str, Any] = {"scores": scores_of(plan), "training": training, "max_shard_size": "200KB"}
    export_checkpoint(student, byte_tokenizer(), path, plan=plan, base_model="some/Teacher-1B", gate=False, **options)
    (path / "gate" / "report.json").write_text('{"ok": true, "checks": []}')
    return path


@pytest.fixture
def copied(exported, tmp_path) -> Path:
    shutil.copytree(exported, tmp_path / "export")
    return tmp_path / "export"


def test_a_dry_run_lists_every_file_and_the_card(exported, capsys, monkeypatch) -> None:
    monkeypatch.setattr("hybrid_distill.lab.publish.HfApi", None)
    main(["publish", str(exported), "--push-to-hub", "me/student", "--dry-run"])
    said = capsys.readouterr().out
    files = [path for path in exported.rglob("*") if path.is_file()]
    assert f"bytes in {len(files)} files" in said and f"{sum(path.stat().st_size for path in files):,}" in said
    for path in files:
        assert path.relative_to(exported).as_posix() in said
    assert "head_scores.json" in said and "| all | | 7,680 |" in said
    assert "license is unknown" in said and "**Not known.**" in said and "license: unknown" in said


def test_a_form_for_another_program_is_published_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxscript", reason="onnxscript, which writes ONNX, is not installed")
    monkeypatch.setattr("hybrid_distill.lab.publish.verify_export", lambda folder: GateReport())  # test_engines.py
    student, plan = tiny_student("llama")
    path = tmp_path / "export"
    export_checkpoint(student, byte_tokenizer(), path, plan=plan, form="onnx", gate=False)
    with pytest.raises(ValueError, match=r"has not passed the export gate .* where the program that runs it is inst"):
        publish(path, "me/student", dry_run=True)
    (path / "gate" / "report.json").write_text('{"ok": true, "checks": []}')
    said = publish(path, "me/student", dry_run=True)
    for name in ("model.onnx", "generate.py", "gate/check.py", "gate/programs.py"):
        assert f"  {name}\n" in said


def test_the_card_names_the_heads_that_are_missed_most_and_no_path_is_exported(exported) -> None:
    card = (exported / "README.md").read_text()
    assert "L2H7 50.0 (not kept)" in card and "L1H7 32.6, " in card, "a kept head is not marked"
    assert HeadScores.load(exported / "head_scores.json").provenance["model"] == "Teacher-1B"


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("optimizer.safetensors", None, "optimizer.safetensors"),
        ("state.json", "{}", "is not part of an export"),
        ("gate/notes.txt", "", "is not part of an export"),
        (".env", "", "is not part of an export"),
        ("README.md", f"license: mit\n{TOKEN}", "an access token"),
        ("training.json", '{"key": "-----BEGIN PRIVATE KEY-----"}', "a private key"),
        ("evaluation.json", '{"texts": "/home/somebody/data/books.txt"}', "/home/somebody/data/books.txt"),
        ("gate/report.json", '{"ok": false}', "has not passed the export gate"),
    ],
)
def test_what_does_not_belong_there_stops_it(copied, capsys, file: str, content: str | None, said: str) -> None:
    if content is None:
        shutil.copy(next(copied.glob("*.safetensors")), copied / file)
    else:
        (copied / file).write_text(content)
    with pytest.raises(SystemExit) as exit_:
        main(["publish", str(copied), "--push-to-hub", "me/student", "--dry-run"])
    assert exit_.value.code == 2 and said in only_error(capsys.readouterr().err)


def test_what_is_uploaded_is_what_was_listed(copied, monkeypatch) -> None:
    calls: dict[str, Any] = {}

    class Hub:
        def create_repo(self, repo: str, **options: Any) -> None:
            calls["made"] = (repo, options)

        def upload_folder(self, **options: Any) -> None:
            calls["uploaded"] = options

    monkeypatch.setattr("hybrid_distill.lab.publish.HfApi", Hub)
    monkeypatch.setattr("hybrid_distill.lab.publish.verify_export", lambda path: GateReport())
    publish(copied, "me/student")
    assert calls["made"] == ("me/student", {"private": True, "exist_ok": True})
    names = {path.relative_to(copied).as_posix() for path in copied.rglob("*") if path.is_file()}
    assert set(calls["uploaded"]["allow_patterns"]) == names
    with pytest.raises(ValueError, match="Repo id"):
        publish(copied, "me/not a name")
