"""An exported student computes what the student computes, also without this package."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import make_family_model
from damaged import file_of
from head_tables import some_scores
from huggingface_hub import ModelCard
from messages import has_facts, naming
from safetensors.torch import load_file, save_file
from students import byte_tokenizer, lose_caches, tiny_student
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.dynamic_module_utils import get_relative_imports

from hybrid_distill.cli.export import ExportJob, export_student
from hybrid_distill.evaluation.evaluate import EvalResult
from hybrid_distill.evaluation.result import binomial_error
from hybrid_distill.export import (
    ExportError,
    GateReport,
    export_checkpoint,
    license_and_name,
    verify_export,
)
from hybrid_distill.export.card import model_card
from hybrid_distill.export.check import (
    CACHED,
    PACKAGES,
    PADDED,
    RELOADED,
    Check,
    left_padded,
    run_checks,
    table,
    weight_files,
)
from hybrid_distill.export.formats import FORMATS
from hybrid_distill.export.license import read_license_and_base
from hybrid_distill.export.native import checked_attention
from hybrid_distill.export.replacement import check_replaceable
from hybrid_distill.export.versions import checked_transformers
from hybrid_distill.export_paths import CARD, EVALUATION, HEAD_SCORES, MARK, TRAINING
from hybrid_distill.model import HybridForCausalLM, field_rules, mixer, self_check, ssd
from hybrid_distill.model.field_rules import check_version
from hybrid_distill.plan import HeadPlan
from hybrid_distill.safe_loading import MODEL_CODE, foreign_code
from hybrid_distill.student.build import build_student

FAMILIES = {
    "llama": "discrete",
    "qwen2": "discrete",
    "olmo3": "mamba2",
    "phi3": "gdn",
    "gpt_neox": "discrete",
}
"""Recurrence of each family's student."""
ONE_PROCESS_TO_ANOTHER = 1e-5  # relative to the largest logit
RESULT = EvalResult(
    kv_choice={16: 0.9},
    kv_generation={4: 1.0, 16: 0.875},
    n_examples=128,
    knowledge=0.5,
    knowledge_chance=0.25,
    n_knowledge=100,
    perplexity=12.5,
    top1_agreement=None,
    kl_to_teacher=0.1,
    n_text_tokens=1000,
    cache_bytes={128: 1000, 2048: 16000, 4096: 32000},
    conv_state_bytes=300,
)
ZEROED = {
    "n_examples": 24,
    "figures": {"perplexity": {"whole": 4.9, "zeroed": 9.0}},
    "unused": False,
}

LOAD_ALONE = """
import sys, torch
from transformers import AutoModelForCausalLM
sys.modules.update(hybrid_distill=None, hybrid_kernels=None)
torch.set_num_threads(1)
for folder in sys.argv[1:]:
    options = {"trust_remote_code": True, "dtype": torch.float32}
    model = AutoModelForCausalLM.from_pretrained(folder, **options)
    ids, mask = torch.load(f"{folder}.prompts", weights_only=True)
    logits = model(input_ids=ids[:1]).logits
    options = {"do_sample": False, "min_new_tokens": 12, "max_new_tokens": 12}
    tokens = model.generate(ids, attention_mask=mask, **options)
    torch.save((logits, tokens, model.model.config._attn_implementation), f"{folder}.answers")
"""


@pytest.fixture(scope="module")
def exports(tmp_path_factory) -> dict[str, tuple[HybridForCausalLM, Path]]:
    """Each family's student and its export in several files; the first has its card in full."""
    torch.set_num_threads(1)
    options = {
        "results": {"teacher": RESULT, "student": replace(RESULT, recurrent_heads_zeroed=ZEROED)},
        "license": "apache-2.0",
    }
    exports = {}
    for family, recurrence in FAMILIES.items():
        student, plan = tiny_student(family, recurrence=recurrence)
        path = tmp_path_factory.mktemp(family) / "export"
        export_checkpoint(
            student,
            byte_tokenizer(),
            path,
            plan=plan,
            max_shard_size="100KB",
            gate=False,
            **options,
        )
        exports[family] = (student, path)
        options = {}
    return exports


@pytest.fixture
def copied(exports, tmp_path, monkeypatch):
    """An export to damage, and the failed checks of a folder by name."""
    modules = str(tmp_path / "modules")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", modules)
    path = tmp_path / "damaged"
    shutil.copytree(exports["llama"][1], path)

    def failed() -> dict[str, Check]:
        return {check.name: check for check in run_checks(path, path / "gate") if not check.ok}

    return path, failed


def damaged_tensor(path: Path, damage: Callable[[torch.Tensor], object]) -> str:
    """Change the first tensor of an export's first file; return its name."""
    file = sorted(path.glob("*.safetensors"))[0]
    tensors = load_file(file)
    name = sorted(tensors)[0]
    damage(tensors[name])
    save_file(tensors, file, metadata={"format": "pt"})
    return name


SDPA_FOR_SOFT_CAPS = """
from transformers.models.gemma2.modeling_gemma2 import Gemma2PreTrainedModel
Gemma2PreTrainedModel._supports_sdpa = True
"""  # as transformers had it until 5.22: sdpa, which drops the cap, is the default


@pytest.fixture(scope="module")
def soft_capped(tmp_path_factory):
    """A Gemma 2 student whose capped scores matter, and its export."""
    teacher = make_family_model(
        "gemma2",
        vocab_size=300,
        attn_logit_softcapping=0.5,
        query_pre_attn_scalar=1,
    )
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    plan = HeadPlan.from_pairs(teacher, [(0, 1), (1, 0), (1, 2)])
    student, _ = build_student(teacher, plan, d_state=4)
    path = tmp_path_factory.mktemp("gemma2") / "export"
    export_checkpoint(student, None, path, plan=plan, gate=False)
    return student, path


@pytest.mark.launched
def test_loads_and_generates_the_same_in_a_process_without_this_package(exports, soft_capped):
    exports = {**exports, "gemma2": soft_capped}
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(5, 261, (length,), generator=generator) for length in (31, 3, 18)]
    ids_BL, mask_BL = left_padded(prompts)
    folders = [str(path) for _, path in exports.values()]
    for folder in folders:
        torch.save((ids_BL, mask_BL), f"{folder}.prompts")
    cwd = Path(folders[0]).parent
    environment = {**os.environ, "HF_MODULES_CACHE": str(cwd / "modules")}
    environment.pop("PYTHONPATH", None)
    command = [sys.executable, "-c", SDPA_FOR_SOFT_CAPS + LOAD_ALONE, *folders]

    subprocess.run(command, check=True, cwd=cwd, env=environment)

    options = {"do_sample": False, "min_new_tokens": 12, "max_new_tokens": 12}
    for student, path in exports.values():
        logits, tokens, attention = torch.load(f"{path}.answers", weights_only=True)
        assert attention == student.model.config._attn_implementation
        expected = student(input_ids=ids_BL[:1]).logits
        error = (logits - expected).abs().max()
        assert error <= ONE_PROCESS_TO_ANOTHER * expected.abs().max()
        expected_tokens = student.generate(ids_BL, attention_mask=mask_BL, **options)
        assert torch.equal(tokens, expected_tokens)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_check_of_the_gate_holds_and_logits_are_the_same_to_the_bit(
    exports, family, tmp_path, monkeypatch
):
    modules = str(tmp_path / "modules")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", modules)
    student, path = exports[family]

    checks = run_checks(path, path / "gate")

    assert all(check.ok for check in checks), table(checks)
    assert len(checks) == 10

    # Each tensor once, in several files.
    tied = {"lm_head.weight"} if family == "qwen2" else set()
    assert weight_files(path).keys() == student.state_dict().keys() - tied
    assert len(list(path.glob("model-*.safetensors"))) > 1

    reloaded = AutoModelForCausalLM.from_pretrained(
        path,
        trust_remote_code=True,
        dtype=torch.float32,
    )
    ids_BL = torch.randint(5, 261, (2, 33))
    logits = reloaded(input_ids=ids_BL).logits
    assert torch.equal(logits, student(input_ids=ids_BL).logits)


def test_nothing_is_pickled_and_the_code_is_this_packages(exports):
    _, path = exports["llama"]
    kinds = {file.suffix for file in path.rglob("*") if file.is_file()}
    assert kinds == {".safetensors", ".json", ".py", ".md"}
    assert foreign_code(path) == []
    files = {file.name for file in path.glob("*.py")}
    assert files == {file.name for file in MODEL_CODE.glob("*.py")} - {"__init__.py"}
    # Before 5.5, transformers copies a local model's entry file and what that file itself imports.
    imported = {*get_relative_imports(path / "modeling_hybrid.py"), "modeling_hybrid"}
    assert imported == {file.stem for file in path.glob("*.py")}


def test_license_and_name_come_from_the_teachers_own_card(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    teacher = tmp_path / "Some-1B"
    teacher.mkdir()
    card = teacher / "README.md"
    assert license_and_name(str(teacher)) == ("unknown", "Some-1B")

    card.write_text("---\nlicense: llama3.2\n---\n# Some\n")
    assert license_and_name(str(teacher)) == ("llama3.2", "Some-1B")
    assert license_and_name("~/Some-1B") == ("llama3.2", "Some-1B")

    broken_yaml = "---\nlicense: [llama3.2\n---\n"
    card.write_text(broken_yaml)
    assert license_and_name(str(teacher)) == ("unknown", "Some-1B")

    assert license_and_name("tiny") == ("apache-2.0", "")


def test_a_card_may_list_its_base_models(tmp_path: Path) -> None:
    """The first base of a merge is the one that the export's own card names."""
    card = tmp_path / "README.md"
    card.write_text("---\nlicense: mit\nbase_model:\n- a/b\n- c/d\n---\n")
    assert read_license_and_base(card) == ("mit", "a/b")
    card.write_text("---\nlicense: mit\nbase_model: []\n---\n")
    assert read_license_and_base(card) == ("mit", "")


def test_the_name_of_a_snapshot_in_the_hubs_cache_is_its_identifier(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--Some-Org--Some--1B" / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    assert license_and_name(str(snapshot)) == ("unknown", "Some-Org/Some--1B")


def test_the_card_says_distilled_only_of_a_student_that_was() -> None:
    """Not of one whose training is not recorded: it may have had none."""
    student, plan = tiny_student("llama")
    distill = {"name": "distill", "steps": 1, "tokens": 8}
    for training, is_distilled in (([], False), ([distill], True), (None, False)):
        card = model_card(
            student,
            plan,
            None,
            None,
            license="mit",
            base_model="a/b",
            training=training,
        )
        tags = next(line for line in card.splitlines() if line.startswith("tags: "))
        assert ("distillation, " in tags) == is_distilled
        assert ("distilled from a/b" in card) == is_distilled


def test_a_conversion_records_nothing_that_its_export_did_not(
    exports, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybrid_distill.export.gate.run_gate", lambda *_, **__: GateReport())
    _, path = exports["qwen2"]
    out = tmp_path / "export"
    export_student(ExportJob(path, out, format="safetensors"))
    for folder in (path, out):
        names = {file.name for file in folder.iterdir()}
        assert not names & {TRAINING, EVALUATION, HEAD_SCORES}
        assert "distillation" not in ModelCard.load(folder / CARD).data.tags


LIBRARIES = {
    "remote-code": "transformers",
    "falcon-h1": "transformers",
    "vllm": "transformers",
    "mlx": "mlx",
    "gguf": None,
    "onnx": None,
    "safetensors": None,
}
"""Library on the hub that loads each format, None for formats that none loads."""


@pytest.mark.parametrize("export_format", FORMATS)
def test_the_card_claims_the_library_and_the_checks_of_its_format(export_format: str) -> None:
    # The recurrence that every format can hold.
    student, plan = tiny_student("llama", recurrence="mamba2")
    text = model_card(
        student,
        plan,
        None,
        None,
        export_format=export_format,
        license="mit",
        base_model="a/b",
        kernels={"implementation": "triton", "difference": 1e-6},
    )
    assert ModelCard(text).data.library_name == LIBRARIES[export_format]
    # As in `check.py`: a program's logits are compared with the record alone, and vLLM has none to show.
    check = text.partition("`python gate/check.py`")[2].partition("Where it was exported")[0]
    is_for_other_program = export_format in PACKAGES
    assert ("left-padded" in check) is not is_for_other_program
    assert ("tensor" in check) is not is_for_other_program
    assert ("logits" in check) is (export_format != "vllm")
    # Stock Falcon-H1 refuses to, and other programs have other ways.
    speculates = export_format in ("remote-code", "safetensors")
    assert ("assistant_model" in text) is speculates


def test_the_card_gives_shares_of_heads_that_were_ranked_by_attribution() -> None:
    student, plan = tiny_student("llama")
    share_LH = torch.zeros(plan.n_layers, plan.n_heads)
    share_LH[0, 1] = 3.0
    share_LH[1, 2] = 1.0
    scores = some_scores(share_LH, logprob=share_LH, accuracy_drop_LH=None, accuracy_se_LH=None)
    card = model_card(student, plan, None, scores, license="mit", base_model="a/b")
    assert "L0H1 75.0" in card
    assert "L1H2 25.0" in card
    assert "points of accuracy" not in card


def test_the_card_shows_what_windows_lose() -> None:
    student, plan = tiny_student("llama")
    result = replace(RESULT, far_choice={4: 0.75}, n_far=24, distance=440)
    error = binomial_error(0.75, 24)
    card = model_card(
        student, plan, {"student": result}, None, license="mit", base_model="a/b", training=[]
    )
    (line,) = [line for line in card.splitlines() if "440" in line]
    assert has_facts(line, 4, "75.0", f"{100 * error:.1f}")


def test_card_says_what_was_kept_measured_and_allowed(exports):
    _, path = exports["llama"]
    card = (path / "README.md").read_text()
    assert card.startswith("---\nlicense: apache-2.0\n")
    assert "| 1 | 2, 3, 7 | 1, 3 | 5 |" in card
    assert "87.5 ± 3.0" in card
    assert "trust_remote_code=True" in card
    assert "| perplexity | 4.900 | 9.000 |" in card
    assert "does not use its recurrent heads" not in card
    assert HeadPlan.load(path / "plan.json").k == 4


@pytest.mark.parametrize("value", [1e-3, float("nan")])
def test_gate_sees_a_changed_tensor(copied, value):
    path, failed = copied
    name = damaged_tensor(path, lambda tensor: tensor.add_(value))
    checks = failed()
    assert name in checks["63 tensors on disk: wrong"].detail
    assert name in checks["63 tensors after loading: wrong"].detail
    assert f"{RELOADED}, logits" in checks


def test_gate_sees_a_pickle(copied):
    path, failed = copied
    (path / "pytorch_model.bin").write_bytes(b"")
    assert failed()["pickled files"].detail == "pytorch_model.bin"


WRONG_DECODING = """
right = ssd_step
def ssd_step(*a):
    y, state = right(*a)
    return 0.9 * y, state
"""
WRONG_PADDING = """
right = SSMHeads.forward
SSMHeads.forward = lambda *a: right(*a[:2], None, *a[3:])
"""


@pytest.mark.launched
def test_verify_fails_loudly_when_decoding_or_padding_is_wrong(copied):
    path, _ = copied
    for module, mistake in ((ssd, WRONG_DECODING), (mixer, WRONG_PADDING)):
        with (path / file_of(module)).open("a") as code:
            code.write(mistake)
    with pytest.raises(ValueError, match=naming(file_of(mixer), file_of(ssd))):
        verify_export(path)

    report = verify_export(path, trust_remote_code=True)
    ok = {check.name: check.ok for check in report.checks}
    assert not ok[f"{CACHED}, logits"]
    assert not ok[f"{PADDED}, logits"]
    assert ok[f"{RELOADED}, logits"]


def test_a_teacher_with_settings_for_sampling_alone_is_exported(tmp_path: Path) -> None:
    """transformers reads such a file, and refuses to write it."""
    student, plan = tiny_student("llama")
    student.generation_config = GenerationConfig(top_p=0.6, max_new_tokens=512)
    export_checkpoint(student, byte_tokenizer(), tmp_path / "export", plan=plan, gate=False)
    read = GenerationConfig.from_pretrained(tmp_path / "export")
    assert read.top_p == 0.6


def test_embeddings_that_the_config_unties_are_exported_though_they_are_shared(tmp_path) -> None:
    student, plan = tiny_student("qwen2")
    student.config.tie_word_embeddings = False
    export_checkpoint(student, byte_tokenizer(), tmp_path / "export", plan=plan, gate=False)
    again = HybridForCausalLM.from_pretrained(tmp_path / "export")
    assert torch.equal(again.lm_head.weight, student.lm_head.weight)


def test_an_export_is_replaced_whole_or_not_at_all(exports, copied, monkeypatch):
    student, _ = exports["llama"]
    path, _ = copied
    plan = HeadPlan.load(path / "plan.json")
    reference = path / "gate" / "reference.json"
    before = reference.read_bytes()
    bad = GateReport((Check("cached decode", 1.0, 0.1),))
    monkeypatch.setattr("hybrid_distill.export.gate.run_gate", lambda *_, **__: bad)
    with pytest.raises(ExportError, match="cached decode"):
        export_checkpoint(student, None, path, plan=plan)
    assert reference.read_bytes() == before

    student.train()
    report = export_checkpoint(student, None, path, plan=plan, gate=False)
    assert report.checks == ()
    assert student.training
    # The student is the module's.
    student.eval()
    assert not (path / "tokenizer.json").exists()
    assert (path / "model.safetensors").is_file()
    assert {other.name for other in path.parent.iterdir()} <= {path.name, "modules"}


def test_an_export_behind_a_link_is_replaced_where_it_is(exports, copied, tmp_path: Path) -> None:
    student, _ = exports["llama"]
    path, _ = copied
    plan = HeadPlan.load(path / "plan.json")
    other_disk = tmp_path / "disk"
    other_disk.mkdir()
    place = path.rename(other_disk / "big")
    link = tmp_path / "link"
    link.symlink_to(place)
    for _ in range(3):
        (place / "tokenizer.json").touch()
        export_checkpoint(student, None, link, plan=plan, gate=False)
        assert link.is_symlink()
        assert not (place / "tokenizer.json").exists()
        assert list(other_disk.iterdir()) == [place]


@pytest.mark.parametrize("out", [".", "..", "../link"])
def test_the_current_folder_is_not_replaced(
    copied, monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    """A shell in it would stay in the deleted one."""
    path, _ = copied
    check_replaceable(path)
    path.with_name("link").symlink_to(path)
    monkeypatch.chdir(path / "gate" if out == ".." else path)
    with pytest.raises(ValueError, match=re.escape(out)):
        check_replaceable(Path(out))


def test_refuses_a_folder_that_is_not_an_export(exports, tmp_path):
    student, path = exports["llama"]
    plan = HeadPlan.load(path / "plan.json")
    thesis = tmp_path / "thesis.tex"
    thesis.write_text("years of work")
    for place in (tmp_path, thesis):
        with pytest.raises(ValueError, match=naming(place)):
            export_checkpoint(student, None, place, plan=plan, gate=False)
    assert thesis.read_text() == "years of work"
    with pytest.raises(ValueError, match=naming(tmp_path, MARK)):
        verify_export(tmp_path)


@pytest.mark.parametrize("export_format", [None, "pickle", ["onnx"]])
def test_a_record_of_an_unknown_format_is_refused(copied, export_format: object) -> None:
    path, _ = copied
    record = json.loads((path / MARK).read_text())
    (path / MARK).write_text(json.dumps({**record, "export_format": export_format}))
    with pytest.raises(ValueError, match=naming(path / MARK)):
        verify_export(path)


def test_the_folder_of_a_run_names_the_export_in_it(tmp_path):
    for export in (tmp_path / "top" / "export", tmp_path / "export"):
        export.mkdir(parents=True)
        (export / "config.json").write_text("{}")
        with pytest.raises(ValueError, match=str(export)):
            verify_export(tmp_path)


def test_the_tokenizers_file_is_the_same_before_and_after_it_has_read_a_text(
    tmp_path: Path,
) -> None:
    """A resumed run may export with a tokenizer that has read none; that of the file pads or truncates."""
    student, plan = tiny_student("llama")
    saved = []
    for reads in (False, True):
        tokenizer = byte_tokenizer()
        tokenizer.backend_tokenizer.enable_padding(length=48, pad_id=0)
        tokenizer.backend_tokenizer.enable_truncation(max_length=32)
        if reads:
            tokenizer("a text")
        path = tmp_path / f"reads-{reads}"
        export_checkpoint(student, tokenizer, path, plan=plan, gate=False)
        saved.append((path / "tokenizer.json").read_bytes())
    assert saved[0] == saved[1]
    record = json.loads(saved[0])
    assert record["padding"] is None
    assert record["truncation"] is None


def test_refuses_another_plan_and_empty_tensors(tmp_path):
    student, plan = tiny_student("llama")
    path = tmp_path / "export"
    with pytest.raises(ValueError, match=naming(student.config.kept, [[]] * plan.n_layers)):
        export_checkpoint(student, None, path, plan=HeadPlan.none(plan), gate=False)
    student.model.norm.weight = torch.nn.Parameter(torch.empty(0))
    with pytest.raises(ExportError, match=naming("model.norm.weight")):
        export_checkpoint(student, None, path, plan=plan, gate=False)
    assert list(tmp_path.iterdir()) == []


def test_an_older_transformers_is_refused_in_one_line(copied, monkeypatch):
    path, _ = copied
    checked = json.loads((path / "config.json").read_text())["checked_transformers"]
    assert checked[0] == "5.2.0"
    assert checked[-1] == transformers.__version__
    assert "`transformers` 5.2.0 or newer" in (path / "README.md").read_text()
    monkeypatch.setattr(field_rules.transformers, "__version__", "5.1.3")
    for load in (AutoModelForCausalLM.from_pretrained, HybridForCausalLM.from_pretrained):
        with pytest.raises(ValueError, match=naming("5.2.0", "5.1.3")):
            load(path, trust_remote_code=True)
    monkeypatch.setattr(field_rules.transformers, "__version__", "5.3.0.dev0")
    assert isinstance(HybridForCausalLM.from_pretrained(path), HybridForCausalLM)


def test_versions_are_compared_as_numbers_and_an_odd_one_is_refused(monkeypatch):
    monkeypatch.setattr(field_rules.transformers, "__version__", "5.9.1")
    for oldest in ("5.2.0", "5.9", "5.9.1"):
        check_version([oldest, "5.23.0"])
    check_version(None)
    for newer in ("5.10.4", "5.9.2", "6.0"):
        with pytest.raises(ValueError, match=naming(newer, "5.9.1")):
            check_version([newer])
    for odd in (["newest"], ["5"], [5.2], ["5.2.0", "5.0.0; import os"], "5.2.0", []):
        with pytest.raises(ValueError, match="checked_transformers"):
            check_version(odd)
    monkeypatch.undo()
    assert checked_transformers("a-model-of-tomorrow") == [transformers.__version__]
    assert checked_transformers("aria_text")[0] == "5.18.0"


def test_an_export_checks_itself_once_under_a_transformers_that_is_not_in_its_record(
    copied, monkeypatch
):
    path, _ = copied
    set_config(path, checked_transformers=["5.2.0", "5.3.0"])
    n_checks = []
    check_same_logits = self_check.check_same_logits

    def counted(*args):
        n_checks.append(args)
        check_same_logits(*args)

    # As transformers 5.24 did to exports of 5.23: the cache has another name, and no head gets one.
    with monkeypatch.context() as broken:
        lose_caches(broken)
        with pytest.raises(ValueError, match=transformers.__version__) as error:
            HybridForCausalLM.from_pretrained(path)
        assert "\n" not in str(error.value)
        assert not (path / self_check.PASSED).exists()
    monkeypatch.setattr(self_check, "check_same_logits", counted)
    for _ in range(2):
        HybridForCausalLM.from_pretrained(path)
    assert len(n_checks) == 1
    assert json.loads((path / self_check.PASSED).read_text()) == [transformers.__version__]


def set_config(path: Path, **fields: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def test_an_offloaded_export_checks_itself_too(copied, tmp_path):
    path, _ = copied
    set_config(path, checked_transformers=["5.2.0"])
    HybridForCausalLM.from_pretrained(
        path,
        device_map={"model": "disk", "lm_head": "cpu"},
        offload_folder=tmp_path / "offload",
    )
    assert (path / self_check.PASSED).is_file()


def test_a_missing_and_an_unknown_tensor_are_refused_in_one_line(copied):
    path, _ = copied
    file = sorted(path.glob("*.safetensors"))[0]
    tensors = load_file(file)
    missing = sorted(tensors)[0]
    unknown = "model.unknown.weight"
    tensors[unknown] = tensors.pop(missing)
    save_file(tensors, file, metadata={"format": "pt"})
    index_file = path / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    index["weight_map"][unknown] = index["weight_map"].pop(missing)
    index_file.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=rf"{naming(missing, unknown)}.*\Z"):
        HybridForCausalLM.from_pretrained(path)
    _, info = HybridForCausalLM.from_pretrained(path, output_loading_info=True)
    assert set(info["missing_keys"]) == {missing}
    assert set(info["unexpected_keys"]) == {unknown}


def test_an_export_loads_in_another_dtype(copied):
    path, _ = copied
    options = {"dtype": torch.bfloat16, "device_map": "cpu"}
    assert HybridForCausalLM.from_pretrained(path, **options).dtype == torch.bfloat16


def test_attention_that_needs_a_gpu_is_not_recorded(soft_capped):
    _, path = soft_capped
    # Until 5.22, transformers chose SDPA, which drops the cap.
    expected = "sdpa" if transformers.Gemma2ForCausalLM._supports_sdpa else "eager"
    assert json.loads((path / "config.json").read_text())["checked_attention"] == expected
    student, _ = tiny_student("llama")
    student.model.config._attn_implementation = "flash_attention_2"
    assert checked_attention(student) == "sdpa"


def test_the_recorded_attention_is_used_unless_another_is_passed(copied):
    path, _ = copied
    set_config(path, checked_attention="eager")
    loaded = HybridForCausalLM.from_pretrained(path)
    assert loaded.model.config._attn_implementation == "eager"
    assert loaded.config._attn_implementation == "eager"
    loaded = HybridForCausalLM.from_pretrained(path, attn_implementation="sdpa")
    assert loaded.model.config._attn_implementation == "sdpa"
    set_config(path, checked_attention="somebody/kernels")
    with pytest.raises(ValueError, match="somebody/kernels"):
        HybridForCausalLM.from_pretrained(path)


def test_an_export_that_was_changed_is_not_exported_again(copied, tmp_path) -> None:
    path, _ = copied
    name = damaged_tensor(path, lambda tensor: tensor.add_(0.5))
    with pytest.raises(ExportError, match=naming(path, name)):
        export_student(ExportJob(path, tmp_path / "again"))
    assert not (tmp_path / "again").exists()


def test_files_have_the_mode_of_the_users_umask(exports) -> None:
    _, path = exports["llama"]
    tensors = path / "gate" / "reference.safetensors"
    assert tensors.stat().st_mode == (path / "config.json").stat().st_mode
