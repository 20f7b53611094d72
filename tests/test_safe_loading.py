"""A damaged or hostile checkpoint is refused in one line, before it is loaded, and never run."""

import json
import shutil
from pathlib import Path
from random import Random

import pytest
import torch
from conftest import make_family_model
from damaged import (
    CANARY,
    all_damages,
    evil_code,
    file_of,
    one_number,
    plant_code,
    plant_pickle,
    set_field,
    shards,
)
from messages import has_facts, naming
from safetensors.torch import load_file
from students import byte_tokenizer, only_error, tiny_student
from transformers import AutoConfig, ByT5Tokenizer

from hybrid_distill.cli.app import main
from hybrid_distill.export import export_checkpoint, verify_export
from hybrid_distill.export_paths import MARK
from hybrid_distill.io import file_hash
from hybrid_distill.model import HybridConfig, ssd
from hybrid_distill.model.field_rules import LARGEST_MODEL
from hybrid_distill.safe_loading import foreign_code, load_student
from hybrid_distill.teacher import load_teacher

DAMAGES = all_damages()
assert len(DAMAGES) >= 300


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A student and its export in several files, not put through the gate."""
    torch.set_num_threads(1)
    student, plan = tiny_student("llama")
    path = tmp_path_factory.mktemp("guard") / "export"
    export_checkpoint(
        student, byte_tokenizer(), path, plan=plan, max_shard_size="200KB", gate=False
    )
    return student, path


@pytest.fixture
def copied(exported, tmp_path) -> Path:
    path = tmp_path / "damaged"
    shutil.copytree(exported[1], path)
    return path


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_refused(name: str, copied: Path) -> None:
    DAMAGES[name](copied, Random(name))
    error = refused(load_student, copied)
    assert "\n" not in error
    assert 30 < len(error) < 1000
    assert str(copied) in error or ".safetensors" in error, "it does not name the place"
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
    assert tokenizer is not None
    assert not loaded.training
    assert foreign_code(tmp_path / "export") == []


def test_a_student_whose_tokenizer_has_no_file_loads(tmp_path) -> None:
    """ByT5's tokens are bytes: it writes a config alone."""
    student, plan = tiny_student("llama")
    tokenizer = ByT5Tokenizer(extra_ids=0)
    export_checkpoint(student, tokenizer, tmp_path / "export", plan=plan, gate=False)
    assert not (tmp_path / "export" / "tokenizer.json").exists()

    _, loaded = load_student(tmp_path / "export")

    assert loaded is not None
    text = "The cabin in Malm\u00f6"
    assert loaded(text).input_ids == tokenizer(text).input_ids


def test_a_nan_is_refused_by_name_wherever_a_model_is_loaded(copied, capsys) -> None:
    one_number(float("nan"))(copied, Random(0))
    names = []
    for shard in shards(copied):
        names += [name for name, tensor in load_file(shard).items() if tensor.isnan().any()]
    (name,) = names
    for load in (load_student, load_teacher, verify_export):
        assert has_facts(refused(load, copied), name)
    with pytest.raises(SystemExit, match="2"):
        main(["score", "--model", str(copied)])
    assert name in only_error(capsys.readouterr().err)


SSD = file_of(ssd)


def refused(load, folder: Path) -> str:
    with pytest.raises(ValueError) as refusal:
        load(folder)
    return str(refusal.value)


def test_verify_runs_no_code_that_it_does_not_know(copied, capsys) -> None:
    for damage in (
        plant_code(SSD),
        plant_pickle("model.bin"),
        set_field("config.json", "d_state", 10**9),
    ):
        path = copied.parent / "again"
        shutil.copytree(copied, path)
        damage(path, Random(0))
        with pytest.raises(SystemExit, match="2"):
            main(["verify", str(path)])
        assert only_error(capsys.readouterr().err)
        assert not (path.parent / CANARY).exists()
        shutil.rmtree(path)


@pytest.mark.parametrize("recorded", [True, False])
def test_another_versions_export_loads_and_its_code_is_run_by_nobody_who_did_not_ask(
    copied, recorded: bool
) -> None:
    """Exports record their Python files; the first versions' did not."""
    (copied / SSD).write_text(evil_code(copied))
    record = json.loads((copied / MARK).read_text())
    record["code"][SSD] = file_hash(copied / SSD)
    (copied / MARK).write_text(json.dumps(record if recorded else {**record, "code": None}))
    assert load_student(copied)
    assert load_teacher(copied)
    assert "--trust-remote-code" in refused(verify_export, copied)
    assert not (copied.parent / CANARY).exists()
    plant_code("evil.py")(copied, Random(0))
    assert "evil.py" in refused(load_student, copied)


def test_a_teacher_with_a_pickle_needs_a_flag(tmp_path, capsys) -> None:
    model = make_family_model("llama", vocab_size=300)
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    load_teacher(tmp_path)  # its safetensors
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"--teacher\.allow-bin"):
        load_teacher(tmp_path)
    with pytest.raises(SystemExit):
        main(["score", "--model", str(tmp_path)])
    assert " --allow-bin" in capsys.readouterr().err
    assert torch.equal(
        load_teacher(tmp_path, allow_bin=True)[0].lm_head.weight, model.lm_head.weight
    )


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
    with pytest.raises(ValueError, match=naming("../w.safetensors")):
        load_teacher(folder)


def test_the_hub_caches_links_are_followed(exported, tmp_path) -> None:
    blobs = tmp_path / "blobs"
    snapshot = tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for file in exported[1].glob("*.*"):
        shutil.copy(file, blobs / file.name)
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    assert load_student(snapshot)


def test_a_config_validates_itself_inside_an_export(exported) -> None:
    """The class that travels refuses for plain transformers, without this package's guard."""
    record = AutoConfig.from_pretrained(exported[1]).to_dict()
    for name, value in {
        "hidden_size": 10**12,
        "rms_norm_eps": float("nan"),
        "num_hidden_layers": -1,
    }.items():
        with pytest.raises(ValueError, match=name):
            HybridConfig(**{**record, "backbone": {**record["backbone"], name: value}})
    with pytest.raises(ValueError, match=naming(f"{LARGEST_MODEL:.1e}")):
        HybridConfig(
            **{
                **record,
                "backbone": {
                    **record["backbone"],
                    "hidden_size": 2**17,
                    "vocab_size": 2**24,
                },
            }
        )
