"""A damaged or hostile checkpoint is refused in one clear line, before anything in it is loaded, and never run."""

from __future__ import annotations

import ast
import json
import shutil
from pathlib import Path
from random import Random

import pytest
import torch
from conftest import make_family_model
from damaged import CANARY, all_damages, evil_code, one_number, plant_code, plant_pickle, set_field
from students import byte_tokenizer, tiny_student
from transformers import AutoConfig

from hybrid_distill.cli.app import main
from hybrid_distill.export import export_checkpoint, verify_export
from hybrid_distill.guard import check_checkpoint, code_differs, load_student, review_code
from hybrid_distill.guard.code import ALLOWED, MODEL_CODE, imported_names
from hybrid_distill.model import HybridConfig
from hybrid_distill.plan import HeadPlan
from hybrid_distill.teacher import load_config, load_teacher

DAMAGES = all_damages()


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A student and its export in several files, not put through the gate."""
    torch.set_num_threads(1)
    student, plan = tiny_student("llama")
    path = tmp_path_factory.mktemp("guard") / "export"
    export_checkpoint(student, byte_tokenizer(), path, plan=plan, max_shard_size="200KB", gate=False)
    return student, path


@pytest.fixture
def copied(exported, tmp_path) -> Path:
    path = tmp_path / "damaged"
    shutil.copytree(exported[1], path)
    return path


def test_there_are_two_hundred_damages() -> None:
    assert len(DAMAGES) >= 200


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_refused(name: str, copied: Path) -> None:
    DAMAGES[name](copied, Random(name))
    with pytest.raises(ValueError) as refusal:
        load_student(copied)
    said = str(refusal.value)
    assert "\n" not in said and 30 < len(said) < 1000
    assert str(copied) in said or ".safetensors" in said, "it does not say where"
    assert not (copied.parent / CANARY).exists(), "code of the checkpoint was run"


def test_what_is_planted_would_run(tmp_path) -> None:
    """Otherwise an absent canary would prove nothing."""
    import pickle

    (tmp_path / "folder").mkdir()
    plant_pickle("x.bin")(tmp_path / "folder", Random(0))
    pickle.loads((tmp_path / "folder" / "x.bin").read_bytes())
    assert (tmp_path / CANARY).exists()
    (tmp_path / CANARY).unlink()
    exec(evil_code(tmp_path / "folder"))
    assert (tmp_path / CANARY).exists()


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_an_undamaged_student_is_the_student(family: str, tmp_path) -> None:
    student, plan = tiny_student(family)
    export_checkpoint(student, byte_tokenizer(), tmp_path / "export", plan=plan, gate=False)
    loaded, tokenizer = load_student(tmp_path / "export")
    ids_BL = torch.randint(5, 261, (2, 17))
    assert torch.equal(loaded(input_ids=ids_BL).logits, student.eval()(input_ids=ids_BL).logits)
    assert tokenizer is not None and not loaded.training
    assert code_differs(tmp_path / "export") == []


def test_a_nan_is_refused_by_name_wherever_a_model_is_loaded(copied, capsys) -> None:
    one_number(float("nan"))(copied, Random(0))
    name = next(n for n in tensor_names(copied) if f"the tensor {n} " in str(refused(load_student, copied)))
    for load in (load_teacher, verify_export):
        assert f"the tensor {name} of" in str(refused(load, copied))
    with pytest.raises(SystemExit) as exit_:
        main(["score", "--model", str(copied)])
    said = capsys.readouterr().err
    assert exit_.value.code == 2 and name in said and len(said.strip().splitlines()) == 1


def test_a_tokenizer_without_its_words_is_refused_by_name(copied) -> None:
    (copied / "tokenizer.json").unlink()
    for load in (load_student, load_teacher, verify_export):
        assert "has no tokenizer.json beside tokenizer_config.json" in str(refused(load, copied))


def refused(load, folder: Path) -> ValueError:
    with pytest.raises(ValueError) as refusal:
        load(folder)
    return refusal.value


def tensor_names(folder: Path) -> list[str]:
    return list(check_checkpoint(folder, numbers=False))


def test_verify_runs_no_code_that_it_does_not_know(copied, capsys) -> None:
    for damage in (plant_code("ssd.py"), plant_pickle("model.bin"), set_field("config.json", "d_state", 10**9)):
        path = copied.parent / "again"
        shutil.copytree(copied, path)
        damage(path, Random(0))
        with pytest.raises(SystemExit) as exit_:
            main(["verify", str(path)])
        said = capsys.readouterr().err
        assert exit_.value.code == 2 and said.startswith("error: ") and len(said.strip().splitlines()) == 1
        assert not (path.parent / CANARY).exists()
        shutil.rmtree(path)
    with (copied / "ssd.py").open("a") as code:
        code.write("\nHARMLESS = 1\n")
    assert load_student(copied), "its code is not run here"
    with pytest.raises(ValueError, match=r"ssd.py .* --trust-remote-code"):
        verify_export(copied)


def test_a_teacher_with_a_pickle_needs_a_flag(tmp_path, capsys) -> None:
    model = make_family_model("llama", vocab_size=300)
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    load_teacher(tmp_path)  # its safetensors
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"\*\.bin, which are pickles.*--teacher.allow-bin"):
        load_teacher(tmp_path)
    with pytest.raises(SystemExit):
        main(["score", "--model", str(tmp_path)])
    assert " --allow-bin" in capsys.readouterr().err
    assert torch.equal(load_teacher(tmp_path, allow_bin=True)[0].lm_head.weight, model.lm_head.weight)


def test_a_teachers_index_does_not_lead_out_of_its_folder(tmp_path) -> None:
    folder = tmp_path / "teacher"
    make_family_model("llama", vocab_size=300).save_pretrained(folder, max_shard_size="100KB")
    byte_tokenizer().save_pretrained(folder)
    load_teacher(folder)
    first = sorted(folder.glob("*.safetensors"))[0]
    shutil.copy(first, tmp_path / "w.safetensors")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    for name, file in index["weight_map"].items():
        if file == first.name:
            index["weight_map"][name] = "../w.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="plain file name"):
        load_teacher(folder)


def test_the_hub_caches_links_are_followed(exported, tmp_path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for file in exported[1].glob("*.*"):
        shutil.copy(file, blobs / file.name)
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    assert load_student(snapshot)


def test_reading_a_config_runs_no_code(tmp_path) -> None:
    plant_code("evil.py")(tmp_path, Random(0))
    record = {"model_type": "surprise", "auto_map": {"AutoConfig": "evil.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match="no config"):
        load_config(tmp_path)
    assert not (tmp_path.parent / CANARY).exists()


@pytest.mark.parametrize("path", sorted(MODEL_CODE.glob("*.py")), ids=lambda path: path.name)
def test_the_code_that_is_exported_imports_little_and_opens_nothing(path: Path) -> None:
    assert review_code(path) == []
    nodes = ast.walk(ast.parse(path.read_text()))
    names = {name for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for name in imported_names(node)}
    names = {name for name in names if not name.startswith(".")}
    assert names <= {
        "__future__", "collections", "functools", "importlib", "itertools", "logging", "math", "reprlib", "types",
        "typing", "torch", "transformers",
    }  # fmt: skip
    assert names <= ALLOWED


def test_a_config_validates_itself_inside_an_export(exported) -> None:
    """What plain transformers can be kept from: the class that travels refuses, without this package's guard."""
    record = AutoConfig.from_pretrained(exported[1]).to_dict()
    for name, value in {"hidden_size": 10**12, "rms_norm_eps": float("nan"), "num_hidden_layers": -1}.items():
        with pytest.raises(ValueError, match=name):
            HybridConfig(**{**record, "backbone": {**record["backbone"], name: value}})
    with pytest.raises(ValueError, match="parameters"):
        HybridConfig(**{**record, "backbone": {**record["backbone"], "hidden_size": 2**17, "vocab_size": 2**24}})


def test_a_plan_from_elsewhere_is_noticed(copied) -> None:
    plan = HeadPlan.load(copied / "plan.json")
    HeadPlan.none(plan).save(copied / "plan.json")
    with pytest.raises(ValueError, match="keep other heads"):
        check_checkpoint(copied)


def test_a_run_is_told_from_its_export(tmp_path: Path) -> None:
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"is a run; name its export, .*export\.$"):
        check_checkpoint(tmp_path)
